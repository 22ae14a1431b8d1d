"""`BlockTable`, with which a manager describes a request's pages to another manager, and the types of an import.

A table states where the KV of a request lies. The manager that accepts a table creates a `PendingImport` from it, and
the copier receives a `PageCopy` for each group of layers. If the model has several groups of layers (`params.groups`),
the table has a list of pages for each. For layers with a window, only the pages that the next token sees are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.errors import InvalidRequestError
from kvcache.pool.index import Pages
from kvcache.replica.hashing import PrefixHasher
from kvcache.types import RequestID
from kvcache.uncopied import Uncopied


class BlockTable(msgspec.Struct, frozen=True, tag="block_table/1", omit_defaults=True):
    """The location of one request's KV: the contract between a manager, a transfer, and another manager.

    The page ids are meaningful only to the manager that made the table, and only while that manager holds the pages for
    the request. If two managers have the same fingerprint (`kvcache.layout.replica_fingerprint`), their pages have the
    same geometry and may be copied byte for byte. A transfer that plans its copies from the page layouts does not need
    the fingerprint.
    """

    request_id: str  # the request's id at the manager that made the table
    replica_idx: int  # the index of the replica that holds the pages, at the manager that made the table
    num_tokens: int  # the number of tokens whose KV the pages hold; the last page may be partly filled
    page_size: int  # tokens of a page
    # The page ids of each group of layers in logical order, up to the page of the last token. A group with a window may
    # lack its first pages, because pages that no later query sees are freed. With sinks, it lacks those between the
    # sinks and the window instead. Such a group, and a recurrent state, have no pages in a table of full pages
    # (`block_table(full_pages=True)`): the request's next chunk frees or overwrites them. A reader refuses such a table
    # as the last one.
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str  # identifies the geometry of the pages on all shards
    hash_algorithm: str = ""  # the algorithm of `digests`; empty if prefix caching is off
    digests: bytes = b""  # the digests of all full pages, one after another; empty if prefix caching is off
    # The kind of each group (`LayerTables.kinds_named`), except a first group of full attention.
    kinds: tuple[str, ...] = ()
    # The index in the prompt of the first page in this table, to which the first digest belongs. The importing manager
    # already has all earlier pages.
    first_page: int = 0
    # One seal for each lease of the request; empty without a lease. The manager that grants a lease makes its seal
    # (`manager.lease`). A reader compares the seal with the one that it expects (`transfer.pull.seals`), and so sees
    # that the lease holds the pages of this table.
    seals: tuple[bytes, ...] = ()
    # Names the weights under which the last tokens were computed, so that a reader of another version can say so. It is
    # empty if their version was not given, or if the pages were asked for by digest. Digests tell the version of every
    # full page.
    weights: bytes = b""

    def follows(self, before: "BlockTable | None") -> bool:
        """Whether the earlier table `before` of the same request named all pages that this table leaves out."""
        if self.first_page <= 0:
            return True
        if before is None or before.page_size != self.page_size or self.page_size <= 0:
            return False
        return self.first_page * self.page_size <= before.num_tokens


class PageDigests(NamedTuple):
    """Full pages, identified by their content.

    Two pages have equal digests if all their tokens from the first token of the prompt on, their salts and their extra
    keys are equal.
    """

    page_size: int  # tokens
    hash_algorithm: str
    digests: bytes  # the digests one after another, from `first_page` on
    # the index in the prompt of the page of the first digest; each digest also covers all earlier pages
    first_page: int = 0
    # Pairs of a name and a value: what else the KV depends on and no digest covers, such as the files of an adapter.
    named: tuple[tuple[str, str], ...] = ()


class PageCopy(NamedTuple):
    """The pages of one group of layers that hold the tokens in the range `tokens`, to copy from another manager."""

    # int32, page ids of this manager, in its own page size; the copy may need only the first of these pages
    dst_pages: ArrayLike
    src_pages: ArrayLike  # int32, page ids of the other manager, in the other manager's page size
    # the first token to copy, and the end of the range; the first page may also hold earlier tokens, which must not be
    # overwritten
    tokens: tuple[int, int]


NOTHING = PageCopy((), (), (0, 0))
_NO_PAGES: Pages = np.zeros(0, np.int32)
_OTHER_PAGES = "names other pages than the earlier table of this import"


@dataclass(eq=False, slots=True)
class ImportPart:
    """The part of a `PendingImport` for one block table of a request."""

    first: int  # the first token to copy; this manager already has the earlier tokens that this block table needs
    # The ids of this manager's pages, beginning with the page of token `first`. The transfer owns these pages until the
    # import is closed.
    dst_pages: Pages
    # Whether the pages are copied only at the end. True for layers with a window, because the source may free pages
    # while the prompt runs, and for draft layers, because the source may compute the KV of its last token again.
    at_end: bool = False
    # The ids of the other manager's pages. Like `dst_pages`, they begin with the page of token `first`.
    src_pages: Pages = field(default_factory=lambda: np.zeros(0, np.int32))
    stop: int = 0  # all tokens before this token can be copied now
    taken: int = 0  # the copier has taken all tokens before this token

    @property
    def needs_copy(self) -> bool:
        """Whether any page has to be copied from the other manager."""
        return self.first < self.stop

    @property
    def needs_last(self) -> bool:
        """Whether only the last table names all pages."""
        return self.at_end

    @property
    def written(self) -> Pages:
        """The token pages that the copy overwrites: int32 `[pages]`."""
        return self.dst_pages

    @property
    def besides(self) -> Pages:
        """The pages besides token pages that the copy overwrites: int32 `[pages]`."""
        return _NO_PAGES

    def named(self, pages: tuple[int, ...], num_tokens: int, page_size: int) -> Pages | None:
        """Returns the other manager's pages to copy.

        Earlier tables have named some of these pages. The new table names `pages`. Returns None in three cases: the new
        table leaves out a page that no earlier table named; it contradicts an earlier table; or a page occurs twice.
        """
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
        """Record that `pages` of the other manager hold all tokens to copy before token `num_tokens`."""
        self.src_pages, self.stop = pages, max(self.first, num_tokens)

    def copy_from(self, token: int, page_size: int, src_page_size: int) -> PageCopy:
        """Returns the pages that can be copied now, beginning with the page of token `token`.

        `token` must not be before token `first`.
        """
        dst = self.dst_pages[token // page_size - self.first // page_size :]
        src = self.src_pages[token // src_page_size - self.first // src_page_size :]
        return PageCopy(dst, src, (token, self.stop))

    def take(self, page_size: int, src_page_size: int) -> PageCopy:
        """Returns the pages that can be copied now and that no earlier call has returned."""
        token, self.taken = max(self.first, self.taken), self.stop
        return self.copy_from(token, page_size, src_page_size)

    def copy_of(self, table: BlockTable, pages: tuple[int, ...], pending: "PendingImport") -> PageCopy:
        """Returns what can be copied from the manager that made `table`, which names `pages` for this part."""
        begin = (-(-table.num_tokens // table.page_size) - len(pages)) * table.page_size
        token, stop = max(self.first, begin), min(self.stop, table.num_tokens)
        if token >= stop:
            return NOTHING
        dst = self.dst_pages[token // pending.page_size - self.first // pending.page_size :]
        return PageCopy(dst, np.array(pages[(token - begin) // table.page_size :], np.int32), (token, stop))

    def complete(self, num_tokens: int) -> None:
        """Let the next `take` return what is copied once, at the end. The import covers `num_tokens` tokens."""

    def contradiction(self, pages: tuple[int, ...]) -> str:  # noqa: ARG002 - the same for all pages
        """Returns what an error says if `named` returns None for `pages`."""
        return _OTHER_PAGES


@dataclass(eq=False, slots=True)
class PendingImport(Uncopied):
    """An import of another manager's block table that is being copied.

    Made by `import_block_table` and by `PageContents.import_pages`.
    """

    request_id: RequestID  # the id of the request that receives the pages
    owner: object  # the `Replica` of the manager that made this import
    page_size: int  # the number of tokens in a page of this manager
    src_page_size: int  # the number of tokens in a page of the other manager
    replica_idx: int  # the index of the replica, at this manager, that gets the pages
    src_replica_idx: int  # the index of the replica, at the other manager, that holds the pages
    parts: list[ImportPart]  # the parts of the import: one for each block table, then those of `Kept`
    num_tokens: int = 0  # how many tokens the other manager's table covers; extending the import raises this number
    # The hasher of the request's tokens, in the table's page size and algorithm; None if the table has no digests.
    hasher: PrefixHasher | None = None
    has_last: bool = False  # whether the last block table of the prompt has come
    closed: bool = False  # whether the import was committed or cancelled
    # Whether the cache was reset since the import began. Its pages are then not published, and no request waits for
    # them, so they become free.
    private: bool = False
    on_free: Callable[[], None] = lambda: None  # called after the import was cancelled and its pages were freed
    # the tables of the other manager whose pages no copier has taken yet
    told: list[BlockTable] = field(default_factory=list[BlockTable])
    others: tuple[BlockTable, ...] = ()  # the block tables of other managers that hold some of the same tokens
    # A copy of the prompt's tokens up to the end of the imported pages, for an import that no request waits for
    # (`PageContents.import_pages`). The copy is needed because the context may drop tokens and get other tokens while
    # pages are copied.
    prompt: NDArray[np.integer[Any]] | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """The range of tokens to import.

        It begins with the first token that this manager lacks in its first block table.
        """
        first = self.parts[0].first
        return first, max(first, self.num_tokens)

    @property
    def needs_copy(self) -> bool:
        """Whether anything has to be copied from the other manager, which also names what this manager has cached."""
        return any(part.needs_copy for part in self.parts)

    @property
    def lacks_end(self) -> bool:
        """Whether only a table that has not come yet names the pages of windows, or the recurrent state."""
        return not self.has_last and any(part.needs_last for part in self.parts)

    @property
    def written(self) -> Pages:
        """The pages of this manager that the copy overwrites, collected over all block tables: int32 `[pages]`.

        Pages besides token pages are not among them.
        """
        pages = [part.written for part in self.parts]
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    @property
    def can_shorten(self) -> bool:
        """Whether the import may end earlier than its table.

        False if a layer group has a window, or if there is a recurrent state. The table names only the window pages and
        the state that are needed at its own end. An earlier end needs other window pages and another state.
        """
        return len(self.parts) == 1 and not self.parts[0].at_end

    def shorten(self, num_tokens: int) -> None:
        """End the import before token `num_tokens` instead of at the end of its table.

        `num_tokens` must be the end of a page that is to be copied.
        """
        first, stop = self.tokens
        if not self.can_shorten or num_tokens % self.page_size or not first < num_tokens <= stop:
            raise InvalidRequestError(
                f"request {self.request_id!r}: an import of tokens {first} to {stop} in pages of {self.page_size} "
                f"cannot end at token {num_tokens}"
            )
        self.num_tokens = self.parts[0].stop = num_tokens

    def copies_from(self, table: BlockTable) -> list[PageCopy]:
        """Returns the pages of this import that can be copied from the manager that made `table`.

        `table` may name only some of the pages. It must have the same page size as the first table of the import.
        """
        return [part.copy_of(table, pages, self) for part, pages in zip(self.parts, table.groups, strict=True)]

    def named(self, table: BlockTable, *, last: bool) -> list[Pages] | str:
        """Returns the other manager's pages that can be copied by now, for each block table.

        `last` says that `table` is the last one of this import. If `table` contradicts an earlier table of the import,
        returns what an error says.
        """
        if self.src_replica_idx != table.replica_idx:
            return _OTHER_PAGES
        found: list[Pages] = []
        for part, pages in zip(self.parts, table.groups, strict=True):
            now = part.named(pages, table.num_tokens, table.page_size) if last or not part.at_end else part.src_pages
            if now is None:
                return part.contradiction(pages)
            found.append(now)
        return found

    def take_up(self, table: BlockTable, named: list[Pages], *, last: bool) -> None:
        """Record that the other manager's block table now covers more tokens.

        `table` is the new table of the other manager. `named` has the other manager's pages that can be copied now, for
        each block table. `last` says that `table` is the last table of this import.
        """
        self.num_tokens = table.num_tokens
        self.has_last |= last
        self.told.append(table)
        for part, pages in zip(self.parts, named, strict=True):
            if last or not part.at_end:
                part.take_up(pages, table.num_tokens)

    def take(self, *, last: bool) -> list[PageCopy]:
        """Returns the pages that can be copied now and that no earlier call has returned.

        What is copied once, such as a recurrent state, is copied only with `last`.
        """
        for part in self.parts if last else ():
            part.complete(self.num_tokens)
        return [part.take(self.page_size, self.src_page_size) for part in self.parts]
