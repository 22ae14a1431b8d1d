"""From the layouts of two shards and two lists of pages to the runs of bytes that a pull copies.

One rule for every pair of layouts: a box of the local shard and a box of the remote one are intersected, axis by axis.
Tensor and pipeline parallelism, replicated heads, page sizes, the order of axes, tensors apart or together: none is a
case of its own. `transfer.sources` says which remote shards to plan with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from transfer.boxes import Group, ShardLayout
from transfer.errors import InvalidTransferError, MetadataError
from transfer.runs import PagePairs, Part, Runs, concatenated, joined, no_runs, template
from transfer.stacks import Ints, Stack, common

_MAX_TEMPLATES = 64
"""Templates that a group keeps. A pull needs one to three, and a few more while page sizes differ by an odd ratio."""


class Pieces(NamedTuple):
    """Tokens cut where a page of either side ends: those pieces that lie alike in their two pages.

    Attributes:
        local_token: tokens of the local page before the piece.
        remote_token: tokens of the remote page before the piece.
        num_tokens: tokens of the piece.
        local: int64 `[pieces]`, index into the list of local pages. Evenly spaced, as `remote` is.
        remote: int64 `[pieces]`, index into the list of remote pages.
    """

    local_token: int
    remote_token: int
    num_tokens: int
    local: Ints
    remote: Ints


class GroupPlan:
    """One group of the plan.

    Attributes:
        local: the reader's group.
        remote: the other side's.
        stacks: pairs of boxes that hold something in common.
    """

    def __init__(self, local: Group, remote: Group, stacks: tuple[Stack, ...]) -> None:
        self.local = local
        self.remote = remote
        self.stacks = stacks
        self._flows = any(stack.flows(local.page_size, remote.page_size) for stack in stacks)
        self._templates: dict[tuple[int, int, int], tuple[Part, ...]] = {}

    def parts(self, local_token: int, remote_token: int, count: int) -> tuple[Part, ...]:
        """The runs of one pair of pages, made once."""
        key = (local_token, remote_token, count)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[key] = template(self.stacks, *key)
        return found

    def tokens(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """The tokens that are copied for `tokens`: to the nearer page end of the two sides; none where none is needed.

        Raises:
            InvalidTransferError: the tokens start before 0.
        """
        start, stop = tokens
        if start < 0:
            raise InvalidTransferError(f"tokens {start} to {stop}: the first token there is is 0")
        if start >= stop or not self.stacks:
            return (start, start)
        if self.local.state:
            return (0, 1)
        return start, min(_up(stop, self.local.page_size), _up(stop, self.remote.page_size))

    def pieces(self, start: int, stop: int) -> list[Pieces]:
        """The tokens from `start` to `stop` (as `tokens` returns them) as pieces; few kinds, whatever the length."""
        local_size, remote_size = self.local.page_size, self.remote.page_size
        first_local, first_remote = start // local_size, start // remote_size
        if local_size == remote_size and start % local_size == 0:  # the common case, without a search
            pages = np.arange((stop - start) // local_size, dtype=np.int64)
            return [Pieces(0, 0, local_size, pages, pages)]
        ends = [np.arange(_up(start + 1, size), stop, size) for size in {local_size, remote_size}]
        cuts = np.unique(np.concatenate([[start], *ends, [stop]]))
        begin, count = cuts[:-1], np.diff(cuts)
        kinds = np.stack([begin % local_size, begin % remote_size, count])
        order = np.lexsort(kinds)
        begin, kinds = begin[order], kinds[:, order]
        firsts = np.flatnonzero(np.concatenate(([True], (kinds[:, 1:] != kinds[:, :-1]).any(axis=0))))
        found: list[Pieces] = []
        for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), len(begin)], strict=True):
            local_token, remote_token, tokens = kinds[:, first].tolist()
            local, remote = (
                begin[first:last] // local_size - first_local,
                begin[first:last] // remote_size - first_remote,
            )
            found.append(Pieces(local_token, remote_token, tokens, local, remote))
        return found

    def runs(
        self, local_pages: Ints, remote_pages: Ints, tokens: tuple[int, int], local_bases: Ints, remote_bases: Ints
    ) -> Runs:
        """As `Plan.runs`, for pages that `pages_of` has checked and tokens that `tokens` has rounded."""
        if tokens[0] == tokens[1]:
            return no_runs()
        pieces = self.pieces(*tokens)
        found: list[Runs] = []
        for piece in pieces:
            pairs = PagePairs(local_pages[piece.local], remote_pages[piece.remote])
            parts = self.parts(piece.local_token, piece.remote_token, piece.num_tokens)
            found += [part.runs(pairs, local_bases, remote_bases) for part in parts]
        runs = concatenated(found)
        # Within a kind of pieces all is joined that can be; between kinds only tokens that flow can be.
        return joined(runs) if len(pieces) > 1 and self._flows else runs


class Plan:
    """What a shard copies from another one, for any pages. Made by `plan`; not safe for several threads at once.

    Attributes:
        groups: one for each group of the layouts.
        num_regions: regions of the local and of the remote shard.
    """

    def __init__(self, groups: tuple[GroupPlan, ...], num_regions: tuple[int, int]) -> None:
        self.groups = groups
        self.num_regions = num_regions

    def runs(
        self,
        group: int,
        local_pages: ArrayLike,
        remote_pages: ArrayLike,
        tokens: tuple[int, int],
        local_bases: ArrayLike,
        remote_bases: ArrayLike,
    ) -> Runs:
        """The runs that bring `tokens` of one request from the remote pages to the local ones.

        Nothing before the first token is written: the pages before it may be shared. After the last one, the rest of
        its page is copied along, up to the nearer page end of the two sides. A state group has one page on each side,
        and takes any tokens that are not empty.

        Args:
            group: index of the group.
            local_pages: ids of the local pages from the one that holds the first token on; what is left over is
                ignored. Integers, best as an array.
            remote_pages: the same on the remote side.
            tokens: first token to copy, and the one after the last.
            local_bases: address of each local region.
            remote_bases: address of each remote region.

        Raises:
            InvalidTransferError: too few pages for the tokens, a page that the pool does not have, a local page named
                twice, a negative first token, or not one address for each region.
        """
        plan = self.groups[group]
        tokens = plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return no_runs()
        local = pages_of(f"group {group}: local", local_pages, tokens, plan.local)
        remote = pages_of(f"group {group}: remote", remote_pages, tokens, plan.remote)
        _check_distinct(group, local)
        return plan.runs(local, remote, tokens, *self._bases(local_bases, remote_bases))

    def _bases(self, local: ArrayLike, remote: ArrayLike) -> tuple[Ints, Ints]:
        bases = np.asarray(local, np.int64), np.asarray(remote, np.int64)
        for side, found, needed in zip(("local", "remote"), bases, self.num_regions, strict=True):
            if found.shape != (needed,):
                raise InvalidTransferError(f"{found.size} addresses of {side} regions: the shard has {needed}")
        return bases


def pages_of(where: str, pages: ArrayLike, tokens: tuple[int, int], group: Group) -> Ints:
    """int64 `[pages]`: those of a list that hold `tokens`.

    Raises:
        InvalidTransferError: the list is too short, or names a page that the pool does not have.
    """
    needed = -(-tokens[1] // group.page_size) - tokens[0] // group.page_size
    found = np.asarray(pages, np.int64)
    if found.ndim != 1 or len(found) < needed:
        raise InvalidTransferError(
            f"{where} pages: {found.size} for tokens {tokens[0]} to {tokens[1]}, which take {needed} of "
            f"{group.page_size} tokens"
        )
    found = found[:needed]
    if int(found.view(np.uint64).max()) >= group.num_pages:  # a negative id is a huge one
        wrong = found[(found < 0) | (found >= group.num_pages)][0]
        raise InvalidTransferError(f"{where} page {wrong}: the pool has {group.num_pages}")
    return found


def _check_distinct(group: int, pages: Ints) -> None:
    if len(pages) < 2 or (pages[1:] > pages[:-1]).all():
        return
    ascending = np.sort(pages)
    twice = ascending[1:] == ascending[:-1]
    if twice.any():
        raise InvalidTransferError(f"group {group}: local page {ascending[1:][twice][0]} is named twice")


def plan(local: ShardLayout, remote: ShardLayout) -> Plan:
    """What `local` copies from `remote`: all that both hold. Both must have passed `transfer.boxes.check`.

    Raises:
        MetadataError: the sides differ in the number or the kind of their groups, or in the type of common elements.
    """
    if len(local.groups) != len(remote.groups):
        raise MetadataError(
            f"{len(local.groups)} groups on one side, {len(remote.groups)} on the other: there must be as many"
        )
    return Plan(
        tuple(
            _plan_group(f"group {number}", ours, theirs)
            for number, (ours, theirs) in enumerate(zip(local.groups, remote.groups, strict=True))
        ),
        (len(local.region_bytes), len(remote.region_bytes)),
    )


def _plan_group(where: str, local: Group, remote: Group) -> GroupPlan:
    if local.state != remote.state:
        raise MetadataError(f"{where}: recurrent state on one side, tokens on the other")
    return GroupPlan(local, remote, common(where, local.boxes, remote.boxes))


def window_start(num_tokens: int, window: int, page_size: int) -> int:
    """The first token that is needed to compute token `num_tokens` next, cut down to the start of its page.

    A window of W tokens counts the token that looks: it sees itself and the W - 1 before it. 0 means all.
    """
    return max(0, num_tokens - window + 1) // page_size * page_size if window else 0


def kernel_pages(pages: ArrayLike, ratio: int) -> Ints:
    """int64 `[pages * ratio]`: the kernel's pages of each logical page, where a kernel's page holds fewer tokens."""
    return np.add.outer(np.asarray(pages, np.int64) * ratio, np.arange(ratio)).reshape(-1)


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size) * size
