"""`BlockTable`, by which one manager tells another of a request's pages, and the types of an import made from it.

A table states where the KV of a request lies. The manager that accepts a table makes a `PendingImport` of it, and the
copier receives a `PageCopy` for each group of layers. If layers keep different tokens (`params.groups`), each block
table is a group. For layers with a window, only the pages that the next token sees are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.replica.hashing import PrefixHasher
from kvcache.types import RequestID

Pages = NDArray[np.int32]


class BlockTable(msgspec.Struct, frozen=True, tag="block_table/1", omit_defaults=True):
    """Where the KV of one request lies: the contract between a manager, a transfer, and another manager.

    The page ids mean something only to the manager that made the table, and only while it holds them for the request.
    Where the fingerprints of two managers agree (`kvcache.layout.replica_fingerprint`), pages may be copied as they
    are; a transfer that plans from the layouts does not need them.
    """

    request_id: str  # as the maker of the table calls it
    replica_idx: int  # the maker's replica that holds the pages
    num_tokens: int  # tokens whose KV the pages hold; the last page may be partly filled
    page_size: int  # tokens of a page
    # The page ids of each group of layers in logical order, up to the page of the last token. A window's first pages
    # may be missing, and all of them while the prompt still runs: pages that no query sees any more are given back.
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str  # names the geometry of the pages on all shards
    hash_algorithm: str = ""  # of `digests`; empty if prefix caching is off
    digests: bytes = b""  # one after another, of all full pages; none where prefix caching is off
    # The kind of each group (`LayerTables.kinds_named`), without a first group of full attention.
    kinds: tuple[str, ...] = ()
    first_page: int = 0  # the logical page of the first id and digest: the importer already has the pages before it
    # A seal from each lease of the request, by which its readers know that the lease names these pages. The grantor of
    # the lease makes it (`manager.lease`), and a reader compares it (`transfer.pull.seals`). Empty without a lease.
    seals: tuple[bytes, ...] = ()

    def follows(self, before: "BlockTable | None") -> bool:
        """Whether it leaves out no page but such as an earlier table of the same request has told of, if any has."""
        if self.first_page <= 0:
            return True
        if before is None or before.page_size != self.page_size or self.page_size <= 0:
            return False
        return self.first_page * self.page_size <= before.num_tokens


class PageDigests(NamedTuple):
    """Names full pages by what they hold: equal digests, equal tokens from the first on, salt and extra keys."""

    page_size: int  # tokens
    hash_algorithm: str
    digests: bytes  # one after another, from `first_page` on
    first_page: int = 0  # a logical page: each digest names all that comes before its page as well


class PageCopy(NamedTuple):
    """Pages to copy from another manager, of one group of layers: of the logical pages that `tokens` touch."""

    dst_pages: ArrayLike  # int32, ours, of our page size; the last may be left over
    src_pages: ArrayLike  # int32, the other manager's, of its own page size
    tokens: tuple[int, int]  # the first to copy, and the one after the last; nothing before the first may be written


@dataclass(eq=False, slots=True)
class ImportPart:
    """What is copied into one block table of a request, or into its recurrent state: a part of a `PendingImport`."""

    first: int  # the first token to copy; what is seen before it is here
    dst_pages: Pages  # ours, from the page of that token on; the transfer's until the import is closed
    at_end: bool = False  # of a window: its source may still give pages back while the prompt runs
    is_state: bool = False  # one page of the whole request, not of the pool of tokens' pages
    src_pages: Pages = field(default_factory=lambda: np.zeros(0, np.int32))  # the other manager's, likewise
    stop: int = 0  # the token after the last to copy by now
    taken: int = 0  # the token up to which the copier has been told of them

    def named(self, pages: tuple[int, ...], num_tokens: int, page_size: int) -> Pages | None:
        """The pages to copy as a table of the other manager has them, those that it leaves out as tables before had.

        None if no table named these, or it names another page than before, or one twice.
        """
        if self.is_state:
            new = np.array(pages, np.int32)
            return new if not len(self.src_pages) or np.array_equal(new, self.src_pages) else None
        if self.first >= num_tokens:
            return self.src_pages
        begin, first, known = -(-num_tokens // page_size) - len(pages), self.first // page_size, self.src_pages
        left_out = max(0, begin - first)
        again = len(known) - left_out
        if again < 0:
            return None
        new = np.array(pages[max(0, first - begin) :], np.int32)
        if again and not np.array_equal(new[:again], known[left_out:]):
            return None
        if not left_out:
            return new
        every = np.concatenate([known, new[again:]])
        ordered = np.sort(every)
        return None if np.count_nonzero(ordered[1:] == ordered[:-1]) else every

    def take_up(self, pages: Pages, num_tokens: int) -> None:
        """These pages of the other manager hold what is to be copied before token `num_tokens`."""
        self.src_pages, self.stop = pages, max(self.first, num_tokens)

    def copy_from(self, token: int, page_size: int, src_page_size: int) -> PageCopy:
        """What is to be copied by now from `token` on, which is none before the first."""
        dst = self.dst_pages[token // page_size - self.first // page_size :]
        src = self.src_pages[token // src_page_size - self.first // src_page_size :]
        return PageCopy(dst, src, (token, self.stop))

    def take(self, page_size: int, src_page_size: int) -> PageCopy:
        """What is to be copied by now and was not taken before."""
        token, self.taken = max(self.first, self.taken), self.stop
        return self.copy_from(token, page_size, src_page_size)


@dataclass(eq=False, slots=True)
class PendingImport:
    """Pages that another manager's block table is being copied into. Made by `import_block_table`."""

    request_id: RequestID  # whose pages
    owner: object  # the replica, of the manager that made it
    page_size: int  # tokens of our pages
    src_page_size: int  # tokens of the other manager's
    replica_idx: int  # ours
    src_replica_idx: int  # the other manager's
    parts: list[ImportPart]  # of each block table, then of the recurrent state
    num_tokens: int = 0  # the tokens that the table covers; it grows when the import is extended
    # The hasher of the request's tokens, in the table's page size and algorithm; None if the table has no digests.
    hasher: PrefixHasher | None = None
    closed: bool = False  # committed or cancelled
    on_free: Callable[[], None] | None = None  # called when a cancelled import has given its pages back
    told: list[BlockTable] = field(default_factory=list[BlockTable])  # tables whose pages nobody has taken to copy yet

    @property
    def tokens(self) -> tuple[int, int]:
        """From the first that the first block table has not here yet to the end of the table."""
        first = self.parts[0].first
        return first, max(first, self.num_tokens)

    @property
    def needs_copy(self) -> bool:
        """Whether anything is to be copied by now: False if all was cached here."""
        return any(part.is_state or part.first < part.stop for part in self.parts)

    @property
    def written(self) -> Pages:
        """Our pages that are copied into, of all tables: int32 `[pages]`."""
        pages = [part.dst_pages for part in self.parts if not part.is_state]
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    def named(self, table: BlockTable, *, last: bool) -> list[Pages] | None:
        """The other manager's pages to copy by now, for each block table; `last`: the table will not cover more.

        None if these are others than tables before have named.
        """
        found: list[Pages] = []
        for part, pages in zip(self.parts, table.groups, strict=True):
            now = part.named(pages, table.num_tokens, table.page_size) if last or not part.at_end else part.src_pages
            if now is None:
                return None
            found.append(now)
        return found

    def take_up(self, table: BlockTable, named: list[Pages], *, last: bool) -> None:
        """The other manager's table covers so many tokens now, and these pages; `last`: it will not cover more."""
        self.num_tokens = table.num_tokens
        self.told.append(table)
        for part, pages in zip(self.parts, named, strict=True):
            if last or not part.at_end:
                part.take_up(pages, 0 if part.is_state else table.num_tokens)

    def take(self, *, last: bool) -> list[PageCopy]:
        """What is to be copied by now and was not taken before: of a state nothing before all has run."""
        for part in self.parts:
            if part.is_state and last:
                part.take_up(part.src_pages, self.num_tokens)
        return [part.take(self.page_size, self.src_page_size) for part in self.parts]
