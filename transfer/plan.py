"""From the layouts of two shards and two lists of pages to the runs of bytes that a pull copies.

One rule for every pair of layouts: a box of the local shard and a box of the remote one are intersected, axis by axis.
Tensor and pipeline parallelism, replicated heads, page sizes, the order of axes, tensors apart or together: none is a
case of its own. `transfer.sources` says which remote shards to plan with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from transfer.boxes import Group, ShardLayout
from transfer.errors import InvalidTransferError, MetadataError
from transfer.runs import PagePairs, Part, Runs, concatenated, joined, no_runs
from transfer.stacks import Ints, Stack, common
from transfer.templates import template, token_template

_MAX_TEMPLATES = 64
"""Templates that a group keeps. A pull needs one to three, and a few more while page sizes differ by an odd ratio."""


class Pieces(NamedTuple):
    """Those pieces of a pull that lie alike in their two pages. A piece ends where a page of either side does.

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


def cut(tokens: tuple[int, int], local_size: int, remote_size: int) -> list[Pieces]:
    """`tokens`, at least one, as pieces for two page sizes: of few kinds, whatever the length."""
    start, stop = tokens
    if local_size == remote_size and start % local_size == stop % local_size == 0:  # the common case, with no search
        pages = np.arange((stop - start) // local_size, dtype=np.int64)
        return [Pieces(0, 0, local_size, pages, pages)]
    ends = [np.arange(_up(start + 1, size), stop, size) for size in (local_size, remote_size)]
    cuts = np.unique(np.concatenate([[start], *ends, [stop]]))
    begin, num_tokens = cuts[:-1], np.diff(cuts)
    local, remote = begin // local_size, begin // remote_size
    kinds = np.stack([begin - local * local_size, begin - remote * remote_size, num_tokens])
    order = np.lexsort(kinds)  # stable, so that pieces of a kind stay in order
    kinds, local, remote = kinds[:, order], (local - local[0])[order], (remote - remote[0])[order]
    firsts = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1
    found: list[Pieces] = []
    for first, last in pairwise([0, *firsts.tolist(), len(begin)]):
        local_token, remote_token, count = kinds[:, first].tolist()
        found.append(Pieces(local_token, remote_token, count, local[first:last], remote[first:last]))
    return found


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
        flows = [stack.flows(local.page_size, remote.page_size) for stack in stacks]
        self._flowing = tuple(token_template(stack) for stack, flow in zip(stacks, flows, strict=True) if flow)
        self._others = tuple(stack for stack, flow in zip(stacks, flows, strict=True) if not flow)
        self._templates: dict[tuple[int, int, int, bool], tuple[Part, ...]] = {}

    def parts(self, pieces: Pieces, *, flowing: bool = True) -> tuple[Part, ...]:
        """The runs of one of `pieces`, those of stacks that flow included or not; made once for all alike."""
        key = (pieces.local_token, pieces.remote_token, pieces.num_tokens, flowing)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[key] = template(self.stacks if flowing else self._others, *key[:3])
        return found

    def tokens(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """The tokens that are copied for `tokens`: to the nearer page end of the two sides; none where none is needed.

        Raises:
            InvalidTransferError: the tokens start before 0.
        """
        start, stop = tokens
        if start < 0:
            raise InvalidTransferError(f"tokens {start} to {stop}: the first token is 0")
        if start >= stop or not self.stacks:
            return (start, start)
        if self.local.state:
            return (0, 1)
        return start, min(_up(stop, self.local.page_size), _up(stop, self.remote.page_size))

    def runs(
        self, local_pages: Ints, remote_pages: Ints, tokens: tuple[int, int], local_bases: Ints, remote_bases: Ints
    ) -> Runs:
        """As `Plan.runs`, for pages that `pages_of` has checked and tokens, at least one, that `tokens` has rounded."""
        pieces = cut(tokens, self.local.page_size, self.remote.page_size)
        alike = len(pieces) == 1
        if not alike:  # else the pairs below find out, at no cost
            _refuse_repeated(PagePairs(local_pages, np.zeros_like(local_pages)))
        found: list[Runs] = []
        for kind in pieces:
            pairs = PagePairs(local_pages[kind.local], remote_pages[kind.remote])
            _refuse_repeated(pairs)
            found += [part.over(pairs, local_bases, remote_bases) for part in self.parts(kind, flowing=alike)]
        if not alike and self._flowing:
            found += self._flow(pieces, local_pages, remote_pages, local_bases, remote_bases)
        return concatenated(found)

    def _flow(
        self, pieces: list[Pieces], local_pages: Ints, remote_pages: Ints, local_bases: Ints, remote_bases: Ints
    ) -> Iterator[Runs]:
        """The runs of stacks whose tokens go on from piece to piece, which are joined before they are spread."""
        local_page = np.concatenate([local_pages[kind.local] for kind in pieces])
        remote_page = np.concatenate([remote_pages[kind.remote] for kind in pieces])
        repeats = [len(kind.local) for kind in pieces]
        inside = np.array([kind[:3] for kind in pieces], np.int64)
        local_token, remote_token, num_tokens = np.repeat(inside, repeats, axis=0).T
        for part in self._flowing:
            token_bytes = int(part.length[0])
            places = joined(
                Runs(
                    local_page * part.local_page + local_token * token_bytes,
                    remote_page * part.remote_page + remote_token * token_bytes,
                    num_tokens * token_bytes,
                )
            )
            yield part.spread(places.local, places.remote, places.length, local_bases, remote_bases)


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


def _refuse_repeated(pairs: PagePairs) -> None:
    if pairs.repeated is not None:
        raise InvalidTransferError(f"local page {pairs.repeated} is named twice")


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
