"""What two managers tell each other of a request's pages: `BlockTable`, and what is copied by it into ours.

The maker of a table says where the KV of a request lies. The manager that takes it up makes a `PendingImport` of it,
and whoever copies is handed a `PageCopy` for each group of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    groups: tuple[tuple[int, ...], ...]  # per group of layers the page ids in logical order
    fingerprint: str  # names the geometry of the pages on all shards
    hash_algorithm: str = ""  # of `digests`; empty where prefix caching is off
    digests: bytes = b""  # one after another, of all full pages; none where prefix caching is off
    first_page: int = 0  # the logical page of the first id and digest: whoever takes the table up has those before it

    def pages_from(self, page: int) -> tuple[int, ...]:
        """The ids from a logical page on, which is not before the first."""
        return self.groups[0][page - self.first_page :]


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
class PendingImport:
    """Pages that another manager's block table is being copied into. Made by `import_block_table`."""

    request_id: RequestID  # whose pages
    owner: object  # the replica, of the manager that made it
    page_size: int  # tokens of our pages
    src_page_size: int  # tokens of the other manager's
    replica_idx: int  # ours
    src_replica_idx: int  # the other manager's
    num_tokens: int  # that the table covers; more once it is extended
    tokens: tuple[int, int]  # those to copy by now: from the first that is not here yet to the end of the table
    src_pages: Pages  # the other manager's ids, from the page of the first token on
    dst_pages: Pages  # ours, from the page of the first token on; the transfer's until the import is closed
    # Of the request's tokens, in the page size and algorithm of the table; None where that has no digests.
    hasher: PrefixHasher | None = None
    closed: bool = False  # committed or cancelled
    wholes: tuple[tuple[int, int], ...] = ()  # of each further group the other's page of the whole request, and ours
    on_free: Callable[[], None] | None = None  # called when a cancelled import has given its pages back

    @property
    def needs_copy(self) -> bool:
        """Whether anything is to be copied by now: False where all was cached here."""
        return self.tokens[0] < self.tokens[1] or bool(self.wholes)

    def take_up(self, table: BlockTable) -> None:
        """The other manager's table covers so many tokens now."""
        first = self.tokens[0]
        self.num_tokens = table.num_tokens
        self.tokens = (first, max(first, table.num_tokens))
        self.src_pages = np.array(table.pages_from(first // table.page_size), np.int32)

    def copy_from(self, token: int) -> PageCopy:
        """What is to be copied by now from `token` on, which is none before the first."""
        first, stop = self.tokens
        dst = self.dst_pages[token // self.page_size - first // self.page_size :]
        src = self.src_pages[token // self.src_page_size - first // self.src_page_size :]
        return PageCopy(dst, src, (token, stop))

    def copies(self, token: int, *, last: bool) -> list[PageCopy]:
        """`copy_from`, then what is to be copied of each further group: of a state nothing before all has run."""
        whole = (0, self.num_tokens if last else 0)
        pairs = ((np.array([ours], np.int32), np.array([theirs], np.int32)) for theirs, ours in self.wholes)
        return [self.copy_from(token), *(PageCopy(dst, src, whole) for dst, src in pairs)]
