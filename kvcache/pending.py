"""`PendingImport`: pages of ours that another manager's are being copied into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.hashing import PrefixHasher
from kvcache.types import RequestID

Pages = NDArray[np.int32]


class PageCopy(NamedTuple):
    """Pages to copy from another manager: what a transfer takes for one group of layers.

    Attributes:
        dst_pages: int32, ours, of the logical pages of `page_size` tokens that the tokens touch; the last ones may be
            left over.
        src_pages: int32, the other manager's, of the logical pages of its own page size that the tokens touch.
        tokens: the first token to copy, and the one after the last. Nothing before the first may be written.
    """

    dst_pages: Pages
    src_pages: Pages
    tokens: tuple[int, int]


@dataclass(eq=False, slots=True)
class PendingImport:
    """Pages that another manager's block table is being copied into. Made by `import_block_table`.

    Attributes:
        request_id: whose pages.
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
    """

    request_id: RequestID
    replica_idx: int
    src_replica_idx: int
    num_tokens: int
    tokens: tuple[int, int]
    src_pages: Pages
    dst_pages: Pages
    hasher: PrefixHasher | None = None
    closed: bool = False

    @property
    def copy(self) -> PageCopy:
        """All that is to be copied by now."""
        return PageCopy(self.dst_pages, self.src_pages, self.tokens)
