"""`BlockTable`, by which a manager describes a request's pages to another manager, and the types of an import.

A table states where the KV of a request lies. The manager that accepts a table makes a `PendingImport` of it, and the
copier receives a `PageCopy` for each group of layers. If the model has several groups of layers (`params.groups`), the
table has a list of pages for each. For layers with a window, only the pages that the next token sees are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.errors import InvalidRequestError
from kvcache.replica.hashing import PrefixHasher
from kvcache.types import RequestID

Pages = NDArray[np.int32]


class BlockTable(msgspec.Struct, frozen=True, tag="block_table/1", omit_defaults=True):
    """The location of one request's KV: the contract between a manager, a transfer, and another manager.

    The page ids are meaningful only to the manager that made the table, and only while that manager holds the pages for
    the request. If the fingerprints of two managers agree (`kvcache.layout.replica_fingerprint`), pages may be copied
    as they are. A transfer that plans from the layouts does not need the fingerprint.
    """

    request_id: str  # the request's id at the manager that made the table
    replica_idx: int  # the replica that holds the pages, at the manager that made the table
    num_tokens: int  # tokens whose KV the pages hold; the last page may be partly filled
    page_size: int  # tokens of a page
    # The page ids of each group of layers in logical order, up to the page of the last token. A group with a window may
    # lack its first pages, because pages that no later query sees are freed. Such a group has no pages in the table
    # while the prompt still runs.
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str  # identifies the geometry of the pages on all shards
    hash_algorithm: str = ""  # the algorithm of `digests`; empty if prefix caching is off
    digests: bytes = b""  # the digests of all full pages, one after another; empty if prefix caching is off
    # The kind of each group (`LayerTables.kinds_named`), except a first group of full attention.
    kinds: tuple[str, ...] = ()
    # the logical page of the first id and digest; the importing manager already has all pages before it
    first_page: int = 0
    # One seal for each lease of the request. The manager that grants a lease makes its seal (`manager.lease`). A reader
    # compares the seal (`transfer.pull.seals`) to see that the lease holds these pages. Empty without a lease.
    seals: tuple[bytes, ...] = ()

    def follows(self, before: "BlockTable | None") -> bool:
        """Whether this table leaves out only pages that `before`, an earlier table of the same request, has named."""
        if self.first_page <= 0:
            return True
        if before is None or before.page_size != self.page_size or self.page_size <= 0:
            return False
        return self.first_page * self.page_size <= before.num_tokens


class PageDigests(NamedTuple):
    """Full pages named by content. Equal digests mean equal tokens from the first one on, equal salt and extra keys."""

    page_size: int  # tokens
    hash_algorithm: str
    digests: bytes  # the digests one after another, from `first_page` on
    first_page: int = 0  # the logical page of the first digest; each digest also covers all earlier pages


class PageCopy(NamedTuple):
    """Pages of one group of layers to copy from another manager. They are the logical pages that hold `tokens`."""

    dst_pages: ArrayLike  # int32, pages of this manager, in its page size; the last ones may be unused
    src_pages: ArrayLike  # int32, pages of the other manager, in its page size
    # the first token to copy, and the end; earlier tokens in the first page must not be overwritten
    tokens: tuple[int, int]


@dataclass(eq=False, slots=True)
class ImportPart:
    """The part of a `PendingImport` for one block table of a request, or for its recurrent state."""

    first: int  # the first token to copy; this manager has cached all earlier tokens that are needed
    # This manager's pages, from the page of token `first` on. The transfer owns them until the import is closed.
    dst_pages: Pages
    at_end: bool = False  # True for a window: while the prompt runs, the source may still free these pages
    is_state: bool = False  # True for a recurrent state: one page for the whole request, from the pool of states
    # The other manager's pages, also from token `first` on.
    src_pages: Pages = field(default_factory=lambda: np.zeros(0, np.int32))
    stop: int = 0  # the end of the tokens that can be copied so far
    taken: int = 0  # the end of the tokens that the copier has taken so far

    def named(self, pages: tuple[int, ...], num_tokens: int, page_size: int) -> Pages | None:
        """Returns the other manager's pages to copy: pages that earlier tables named, then `pages` of its new table.

        Returns None if the new table leaves out a page that was never named, if a page differs from an earlier table,
        or if a page occurs twice.
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
        """Record that `pages` of the other manager hold the tokens to copy before `num_tokens`."""
        self.src_pages, self.stop = pages, max(self.first, num_tokens)

    def copy_from(self, token: int, page_size: int, src_page_size: int) -> PageCopy:
        """Returns the pages that can be copied by now, from `token` on. `token` is not before `first`."""
        dst = self.dst_pages[token // page_size - self.first // page_size :]
        src = self.src_pages[token // src_page_size - self.first // src_page_size :]
        return PageCopy(dst, src, (token, self.stop))

    def take(self, page_size: int, src_page_size: int) -> PageCopy:
        """Returns the pages that can be copied by now and were not taken before."""
        token, self.taken = max(self.first, self.taken), self.stop
        return self.copy_from(token, page_size, src_page_size)


def _nothing() -> None:
    """Do nothing. The default of `PendingImport.on_free`."""


@dataclass(eq=False, slots=True)
class PendingImport:
    """An import of another manager's block table that is being copied.

    Made by `import_block_table` and by `PageContents.import_pages`.
    """

    request_id: RequestID  # the request that receives the pages
    owner: object  # the `Replica` of the manager that made this import
    page_size: int  # tokens of this manager's pages
    src_page_size: int  # tokens of the other manager's pages
    replica_idx: int  # the replica of this manager
    src_replica_idx: int  # the replica that holds the pages at the other manager
    parts: list[ImportPart]  # one for each block table, then one for the recurrent state
    num_tokens: int = 0  # how many tokens the table covers; extending the import raises this
    # The hasher of the request's tokens, in the table's page size and algorithm; None if the table has no digests.
    hasher: PrefixHasher | None = None
    closed: bool = False  # committed or cancelled
    on_free: Callable[[], None] = _nothing  # called after the import was cancelled and its pages were freed
    told: list[BlockTable] = field(default_factory=list[BlockTable])  # tables whose pages no copier has taken yet
    others: tuple[BlockTable, ...] = ()  # tables of further managers that hold some of the same tokens
    # A copy of the tokens up to the end of the pages, if no request waits for them (`PageContents.import_pages`). The
    # context may drop tokens and get others meanwhile.
    prompt: NDArray[np.integer[Any]] | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """The range of tokens to import, from the first one that this manager lacks in its first block table."""
        first = self.parts[0].first
        return first, max(first, self.num_tokens)

    @property
    def needs_copy(self) -> bool:
        """Whether anything has to be copied by now. False if all pages were cached here."""
        return any(part.is_state or part.first < part.stop for part in self.parts)

    @property
    def written(self) -> Pages:
        """This manager's pages that the copy overwrites, in all block tables: int32 `[pages]`."""
        pages = [part.dst_pages for part in self.parts if not part.is_state]
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    @property
    def can_shorten(self) -> bool:
        """Whether the import may end earlier than its table.

        False with a window or a state, because their pages belong to the end of the table.
        """
        return len(self.parts) == 1 and not self.parts[0].at_end

    def shorten(self, num_tokens: int) -> None:
        """End the import at `num_tokens` instead of at the end of its table. A copied page must end there."""
        first, stop = self.tokens
        if not self.can_shorten or num_tokens % self.page_size or not first < num_tokens <= stop:
            raise InvalidRequestError(
                f"request {self.request_id!r}: an import of tokens {first} to {stop} in pages of {self.page_size} "
                f"cannot end at token {num_tokens}"
            )
        self.num_tokens = self.parts[0].stop = num_tokens

    def copies_from(self, table: BlockTable) -> list[PageCopy]:
        """Returns the pages to copy, with the page ids of another table, as far as that table has them.

        `table` must have the page size of the first table.
        """
        copies: list[PageCopy] = []
        for part, pages in zip(self.parts, table.groups, strict=True):
            begin = (-(-table.num_tokens // table.page_size) - len(pages)) * table.page_size
            if part.is_state:
                token, stop = part.first, part.stop if table.num_tokens == self.num_tokens else part.first
            else:
                token, stop = max(part.first, begin), min(part.stop, table.num_tokens)
            if token >= stop:
                copies.append(PageCopy((), (), (0, 0)))
                continue
            src = pages if part.is_state else pages[(token - begin) // table.page_size :]
            skipped = 0 if part.is_state else token // self.page_size - part.first // self.page_size
            copies.append(PageCopy(part.dst_pages[skipped:], np.array(src, np.int32), (token, stop)))
        return copies

    def named(self, table: BlockTable, *, last: bool) -> list[Pages] | None:
        """Returns the other manager's pages to copy by now, for each block table.

        With `last`, the table is the last one.

        Returns None if the pages contradict earlier tables.
        """
        found: list[Pages] = []
        for part, pages in zip(self.parts, table.groups, strict=True):
            now = part.named(pages, table.num_tokens, table.page_size) if last or not part.at_end else part.src_pages
            if now is None:
                return None
            found.append(now)
        return found

    def take_up(self, table: BlockTable, named: list[Pages], *, last: bool) -> None:
        """Record which tokens the other manager's table now covers, and in which pages.

        With `last`, the table will not grow any more.
        """
        self.num_tokens = table.num_tokens
        self.told.append(table)
        for part, pages in zip(self.parts, named, strict=True):
            if last or not part.at_end:
                part.take_up(pages, 0 if part.is_state else table.num_tokens)

    def take(self, *, last: bool) -> list[PageCopy]:
        """Returns the pages that can be copied by now and were not taken before.

        A state is copied only when all tokens have run (`last`).
        """
        for part in self.parts:
            if part.is_state and last:
                part.take_up(part.src_pages, self.num_tokens)
        return [part.take(self.page_size, self.src_page_size) for part in self.parts]
