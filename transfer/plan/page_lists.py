"""The pages that a pull reads and writes for each group. A source may name its scheduler's blocks in place of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from kvcache.replica.block_table import PageCopy
from transfer.errors import InvalidTransferError
from transfer.plan.boxes import Group
from transfer.plan.intersection import Ints


class BlocksOfGroup(NamedTuple):
    """The tokens to read for one layer group, from a source that names its scheduler's blocks in place of pages.

    Attributes:
        local: the local pages that hold the tokens, in our page size.
        tokens: the first token to read, and the end of the tokens to read.
        needed: the first token that must be read. The tokens from the start of `tokens` up to this token are optional:
            they lie in the same local page, but under a sliding window the source may have freed them. They are read
            only if the source still has them.
        blocks: the source's blocks. The last one holds token `end` - 1, or the state after it. `with_blocks` fills in
            `blocks` and `end` from the source's answer.
        end: how many tokens the source has computed.
    """

    local: ArrayLike
    tokens: tuple[int, int]
    needed: int
    blocks: ArrayLike = ()
    end: int = 0


PageLists: TypeAlias = Sequence[PageCopy | BlocksOfGroup]
"""One entry for each group of a layout, in order."""

NOTHING = PageCopy((), (), (0, 0))


def with_blocks(where: str, groups: PageLists, block_ids: Sequence[Sequence[int]], num_tokens: int) -> PageLists:
    """Returns `groups` with the source's blocks filled into each `BlocksOfGroup`.

    `num_tokens` is the number of tokens that the source has computed.

    Raises:
        InvalidTransferError: the source names blocks for another number of groups.
    """
    if len(groups) != len(block_ids):
        raise InvalidTransferError(f"{where}: the source has {len(block_ids)} groups, this engine has {len(groups)}")
    return [
        group._replace(blocks=blocks, end=num_tokens) if isinstance(group, BlocksOfGroup) else group
        for group, blocks in zip(groups, block_ids, strict=True)
    ]


def pages_of(where: str, named: PageCopy | BlocksOfGroup, local: Group, remote: Group) -> PageCopy:
    """Returns the pages of both sides, starting at the first token that the source has.

    A source may leave out its first blocks, which a sliding window no longer reaches. The position of a block is
    therefore counted from the end of the source's list.

    Raises:
        InvalidTransferError: the blocks do not hold the tokens that are needed, or there are more blocks than the
            source's tokens can fill.
    """
    if not isinstance(named, BlocksOfGroup):
        return named
    start, stop = named.tokens
    if start >= stop:
        return NOTHING
    if stop > named.end:
        raise InvalidTransferError(f"{where}: tokens up to {stop} are needed, but the source has computed {named.end}")
    blocks = np.asarray(named.blocks, np.int64)
    if local.state:
        if not len(blocks):
            raise InvalidTransferError(f"{where}: the source names 0 blocks for a state; 1 is needed")
        if stop != named.end:
            raise InvalidTransferError(f"{where}: the source's state covers {named.end} tokens, but {stop} are needed")
        return PageCopy(named.local, blocks[-1:], named.tokens)
    size = remote.page_size * remote.block_pages
    first = -(-named.end // size) - len(blocks)
    if first < 0:
        raise InvalidTransferError(
            f"{where}: the source names {len(blocks)} blocks of {size} tokens, but its {named.end} tokens "
            f"fill {first + len(blocks)}"
        )
    if first * size > named.needed:
        raise InvalidTransferError(
            f"{where}: the source's {len(blocks)} blocks of {size} tokens begin with token {first * size}, "
            f"but token {named.needed} is the first that is needed"
        )
    kept = first_read(named, remote)
    at = kept // size
    there = kernel_pages(blocks[at - first :], remote.block_pages)[(kept - at * size) // remote.page_size :]
    here = np.asarray(named.local)[kept // local.page_size - start // local.page_size :]
    return PageCopy(here, there, (kept, stop))


def first_read(named: BlocksOfGroup, remote: Group) -> int:
    """Returns the first token that `pages_of` reads.

    This is the start of `tokens`, or the first token of the source's blocks if they start later.
    """
    start, stop = named.tokens
    if start >= stop or remote.state:
        return start
    size = remote.page_size * remote.block_pages
    return max(start, (-(-named.end // size) - len(np.asarray(named.blocks))) * size)


def kernel_pages(pages: ArrayLike, ratio: int) -> Ints:
    """Returns the kernel pages of each logical page, int64 `[pages * ratio]`.

    `ratio` is how many kernel pages form a logical page. It is above 1 if a kernel's page holds fewer tokens.
    """
    return np.add.outer(np.asarray(pages, np.int64) * ratio, np.arange(ratio)).reshape(-1)
