"""What two managers tell each other of a request's pages: `BlockTable`, and what is copied by it into ours.

The maker of a table says where the KV of a request lies. The manager that takes it up makes a `PendingImport` of it,
and whoever copies is handed a `PageCopy` for each group of layers.
"""

from __future__ import annotations

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

    Attributes:
        request_id: the request, as the maker of the table calls it.
        replica_idx: the maker's replica that holds the pages.
        num_tokens: tokens whose KV the pages hold; the last page may be partly filled.
        page_size: tokens of a page.
        groups: per group of layers the page ids in logical order.
        fingerprint: names the geometry of the pages on all shards (`kvcache.layout.replica_fingerprint`): where two
            agree, pages may be copied as they are. A transfer that plans from the layouts does not need it.
        hash_algorithm: of `digests`; empty where prefix caching is off.
        digests: one after another, the digests of all full pages; none where prefix caching is off.
    """

    request_id: str
    replica_idx: int
    num_tokens: int
    page_size: int
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str
    hash_algorithm: str = ""
    digests: bytes = b""


class PageCopy(NamedTuple):
    """Pages to copy from another manager: what a transfer takes for one group of layers.

    Attributes:
        dst_pages: int32, ours, of the logical pages of our page size that the tokens touch; the last may be left over.
        src_pages: int32, the other manager's, of the logical pages of its own page size that the tokens touch.
        tokens: the first token to copy, and the one after the last. Nothing before the first may be written.
    """

    dst_pages: ArrayLike
    src_pages: ArrayLike
    tokens: tuple[int, int]


@dataclass(eq=False, slots=True)
class PendingImport:
    """Pages that another manager's block table is being copied into. Made by `import_block_table`.

    Attributes:
        request_id: whose pages.
        owner: whose import it is: a replica of the manager that made it.
        page_size: tokens of our pages.
        src_page_size: tokens of the other manager's.
        replica_idx: ours.
        src_replica_idx: the other manager's.
        num_tokens: tokens that the table covers; more once it is extended.
        tokens: first token that is not here yet, and the one after the last that the table covers (the first again
            where nothing is to be copied).
        src_pages: int32, page ids of the other manager, in its page size, from the page of the first token on.
        dst_pages: int32, ours to write, from the page of the first token on. They belong to the transfer until the
            import is closed.
        hasher: of the request's own tokens, in the page size and algorithm of the table; None where that has no
            digests.
        closed: committed or cancelled.
        wholes: of each further group of layers the other manager's page and ours: pages of the request as a whole.
        on_free: called when a cancelled import has given its pages back, for who keeps further ones for it.
    """

    request_id: RequestID
    owner: object
    page_size: int
    src_page_size: int
    replica_idx: int
    src_replica_idx: int
    num_tokens: int
    tokens: tuple[int, int]
    src_pages: Pages
    dst_pages: Pages
    hasher: PrefixHasher | None = None
    closed: bool = False
    wholes: tuple[tuple[int, int], ...] = ()
    on_free: Callable[[], None] | None = None

    @property
    def copy(self) -> PageCopy:
        """All that is to be copied by now, of the pages of tokens."""
        return PageCopy(self.dst_pages, self.src_pages, self.tokens)

    @property
    def needs_copy(self) -> bool:
        """Whether anything is to be copied by now: False where all was cached here."""
        return self.tokens[0] < self.tokens[1] or bool(self.wholes)

    def take_up(self, table: BlockTable) -> None:
        """The other manager's table covers so many tokens now."""
        first = self.tokens[0]
        self.num_tokens = table.num_tokens
        self.tokens = (first, max(first, table.num_tokens))
        self.src_pages = np.array(table.groups[0], np.int32)[first // table.page_size :]

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
