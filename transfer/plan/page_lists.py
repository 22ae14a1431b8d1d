"""From the blocks that a source's scheduler names to the pages that a plan takes."""

from __future__ import annotations

import numpy as np

from transfer.errors import InvalidTransferError
from transfer.plan.boxes import Group
from transfer.plan.plan import kernel_pages
from transfer.pull.pull_state import BlocksOfGroup, PagesOfGroup

NOTHING = PagesOfGroup((), (), (0, 0))


def resolved(pages: PagesOfGroup | BlocksOfGroup, local: Group, remote: Group) -> PagesOfGroup:
    """Returns the pages of both sides from the first token on.

    A source may leave out the blocks that a sliding window does not reach, so its list is counted from its end.

    Args:
        pages: of one group.
        local: the group here.
        remote: the group there: its page size, and how many pages a block has.

    Raises:
        InvalidTransferError: the blocks do not hold the tokens, or are more than its tokens can fill.
    """
    if isinstance(pages, PagesOfGroup):
        return pages
    start, stop = pages.tokens
    if start >= stop:
        return NOTHING
    if stop > pages.end:
        raise InvalidTransferError(f"tokens up to {stop} are asked for, the source has computed {pages.end}")
    blocks = np.asarray(pages.blocks, np.int64)
    if local.state:
        if not len(blocks):
            raise InvalidTransferError("the source names 0 blocks for a state, 1 is needed")
        return PagesOfGroup(pages.local, blocks[-1:], pages.tokens)
    size = remote.page_size * remote.block_pages
    first = -(-pages.end // size) - len(blocks)
    if first < 0:
        raise InvalidTransferError(
            f"the source names {len(blocks)} blocks of {size} tokens, its {pages.end} tokens fill {first + len(blocks)}"
        )
    if first * size > pages.needed:
        raise InvalidTransferError(
            f"the source's {len(blocks)} blocks of {size} tokens begin with token {first * size}, "
            f"token {pages.needed} is the first that is needed"
        )
    kept = max(start, first * size)
    at = kept // size
    there = kernel_pages(blocks[at - first :], remote.block_pages)[(kept - at * size) // remote.page_size :]
    here = np.asarray(pages.local)[kept // local.page_size - start // local.page_size :]
    return PagesOfGroup(here, there, (kept, stop))
