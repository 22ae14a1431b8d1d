"""Plans the pull of one layer group. The pull is cut into pieces: a piece ends where a local or a remote page ends.

Pieces are of one kind if they cover the same positions of their local pages, and the same positions of their remote
pages. The runs are computed once for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from transfer.errors import InvalidTransferError
from transfer.plan.boxes import Group
from transfer.plan.intersection import Ints, Stack
from transfer.plan.runs import PagePairs, PageRuns, Runs, concatenated, joined, no_runs, page_runs, token_runs

MAX_RUNS = 1 << 25
"""The largest number of runs in one pull. The descriptors of so many runs take a gigabyte, and their transfer a minute.

Only a layout that scatters single elements needs more, and only a malicious peer has such a layout.
"""

MAX_TOKEN = 1 << 62

_MAX_KEPT = 1 << 20
"""The largest number of page runs that a group caches, at 56 bytes each.

A pull usually has one to three kinds of pieces. If neither page size divides the other, there can be as many kinds as
the two pages have tokens together.
"""


class PieceKind(NamedTuple):
    """The pieces of a pull that have the same position in their local page and the same position in their remote page.

    A piece ends where a local or a remote page ends, so it lies within one page on each side.
    """

    local_token: int  # where the piece begins in its local page, in tokens
    remote_token: int
    num_tokens: int
    local: Ints  # int64 `[pieces]`, evenly spaced indices into the list of local pages
    remote: Ints


def cut(tokens: tuple[int, int], local_size: int, remote_size: int) -> list[PieceKind]:
    """Cuts a range of `tokens` (at least one) into pieces, for two page sizes.

    The result has one entry for each kind of pieces. The number of kinds does not grow with the number of tokens.
    """
    start, stop = tokens
    # the common case, for which the search below is not needed
    if local_size == remote_size and start % local_size == stop % local_size == 0:
        pages = np.arange((stop - start) // local_size, dtype=np.int64)
        return [PieceKind(0, 0, local_size, pages, pages)]
    ends = [np.arange(_up(start + 1, size), stop, size) for size in (local_size, remote_size)]
    cuts = np.unique(np.concatenate([[start], *ends, [stop]]))
    begin, num_tokens = cuts[:-1], np.diff(cuts)
    local, remote = begin // local_size, begin // remote_size
    kinds = np.stack([begin - local * local_size, begin - remote * remote_size, num_tokens])
    order = np.lexsort(kinds)  # a stable sort, so that pieces of one kind stay in order
    kinds, local, remote = kinds[:, order], (local - local[0])[order], (remote - remote[0])[order]
    firsts = np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1
    found: list[PieceKind] = []
    for first, last in pairwise([0, *firsts.tolist(), len(begin)]):
        local_token, remote_token, count = kinds[:, first].tolist()
        found.append(PieceKind(local_token, remote_token, count, local[first:last], remote[first:last]))
    return found


class GroupPlan:
    """The plan of one layer group. `stacks` has the pairs of a local and a remote box that have elements in common."""

    def __init__(self, where: str, local: Group, remote: Group, stacks: tuple[Stack, ...]) -> None:
        self.where = where
        self.local = local
        self.remote = remote
        self.stacks = stacks
        flows = [stack.flows(local.page_size, remote.page_size) for stack in stacks]
        self._flowing = tuple(token_runs(stack) for stack, flow in zip(stacks, flows, strict=True) if flow)
        self._others = tuple(stack for stack, flow in zip(stacks, flows, strict=True) if not flow)
        self._kept: dict[tuple[int, int, int, bool], tuple[PageRuns, ...]] = {}
        self._num_kept = 0

    def page_runs(self, kind: PieceKind, *, flowing: bool = True) -> tuple[PageRuns, ...]:
        """Returns the runs that make up one piece of the given kind. The result is cached.

        With `flowing`, the runs of stacks that flow (`Stack.flows`) are included. Without it, they are left out.
        """
        key = (kind.local_token, kind.remote_token, kind.num_tokens, flowing)
        found = self._kept.get(key)
        if found is None:
            found = page_runs(self.stacks if flowing else self._others, *key[:3])
            self._num_kept += sum(len(runs.length) for runs in found)
            if self._num_kept > _MAX_KEPT:
                self._kept.clear()
                self._num_kept = 0
            self._kept[key] = found
        return found

    def tokens(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """Returns the tokens to copy: `tokens`, extended to the next end of a local or remote page, whichever is first.

        The range is empty if there is nothing to copy.

        Raises:
            InvalidTransferError: a token is out of range, or there are more tokens than the local pool holds.
        """
        start, stop = tokens
        if not (start >= 0 and stop <= MAX_TOKEN):
            raise InvalidTransferError(f"{self.where}: tokens {start} to {stop} are not within 0 to {MAX_TOKEN}")
        if start >= stop or not self.stacks:
            return (start, start)
        if self.local.state:
            return (0, 1)
        size, pages = self.local.page_size, self.local.num_pages
        if stop > (start // size + pages) * size:
            raise InvalidTransferError(
                f"{self.where}: tokens {start} to {stop} do not fit the {pages} local pages, which hold "
                f"{pages * size} tokens"
            )
        return start, min(_up(stop, self.local.page_size), _up(stop, self.remote.page_size))

    def local_pages(self, pages: ArrayLike, tokens: tuple[int, int]) -> Ints:
        """Returns the local pages that hold `tokens`, int64 `[pages]`.

        Raises `InvalidTransferError` if one is missing.
        """
        return _pages_of(f"{self.where}: local", pages, tokens, self.local)

    def remote_pages(self, pages: ArrayLike, tokens: tuple[int, int]) -> Ints:
        """Returns the remote pages that hold `tokens`, int64 `[pages]`.

        Raises `InvalidTransferError` if a page is missing.
        """
        return _pages_of(f"{self.where}: remote", pages, tokens, self.remote)

    def refuse_repeated(self, pairs: PagePairs) -> None:
        """Raises `InvalidTransferError` if two pages of the request would be copied to the same local page."""
        if pairs.repeated is not None:
            raise InvalidTransferError(f"{self.where}: local page {pairs.repeated} is named twice")

    def size(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of runs and bytes in a pull of `tokens` if no two of its pages are neighbours."""
        found = self._lengths(cut(tokens, self.local.page_size, self.remote.page_size))
        num_bytes = sum(count * int(length.sum()) for count, length in found)
        return sum(count * len(length) for count, length in found), num_bytes

    def _lengths(self, kinds: list[PieceKind]) -> list[tuple[int, Ints]]:
        """Returns pairs: a number of pieces with the same runs, and the lengths of these runs in bytes."""
        found: list[tuple[int, Ints]] = []
        for kind in kinds:
            found += [(len(kind.local), runs.length) for runs in self.page_runs(kind, flowing=len(kinds) == 1)]
            if len(kinds) > 1:
                found += [(len(kind.local), runs.length * kind.num_tokens) for runs in self._flowing]
        return found

    def runs(
        self, local: ArrayLike, remote: ArrayLike, tokens: tuple[int, int], local_bases: Ints, remote_bases: Ints
    ) -> Runs:
        """Returns the runs of this group, as `Plan.runs` describes."""
        tokens = self.tokens(tokens)
        if tokens[0] == tokens[1]:
            return no_runs()
        local_pages, remote_pages = self.local_pages(local, tokens), self.remote_pages(remote, tokens)
        kinds = cut(tokens, self.local.page_size, self.remote.page_size)
        alike = len(kinds) == 1
        if not alike:  # a check within each kind would miss a page that occurs in two kinds
            self.refuse_repeated(PagePairs(local_pages, local_pages))
        total = sum(count * len(length) for count, length in self._lengths(kinds))
        if total > MAX_RUNS:
            raise InvalidTransferError(
                f"{self.where}: tokens {tokens[0]} to {tokens[1]} take {total} runs; at most {MAX_RUNS} are allowed"
            )
        found: list[Runs] = []
        for kind in kinds:
            # With a single kind, each piece has its own pair of pages, so the lists are used as they are. Otherwise the
            # pages of this kind's pieces are selected from the lists.
            pages = (local_pages, remote_pages) if alike else (local_pages[kind.local], remote_pages[kind.remote])
            pairs = PagePairs(*pages)
            self.refuse_repeated(pairs)
            found += [runs.over(pairs, local_bases, remote_bases) for runs in self.page_runs(kind, flowing=alike)]
        if not alike and self._flowing:
            found += self._flow(kinds, local_pages, remote_pages, local_bases, remote_bases)
        return concatenated(found)

    def _flow(
        self, kinds: list[PieceKind], local_pages: Ints, remote_pages: Ints, local_bases: Ints, remote_bases: Ints
    ) -> Iterator[Runs]:
        """Yields the runs of the stacks in which a run can continue from one piece into the next (`Stack.flows`).

        The method first joins adjacent pieces, and then repeats the joined runs for each pair of boxes.
        """
        local_page = np.concatenate([local_pages[kind.local] for kind in kinds])
        remote_page = np.concatenate([remote_pages[kind.remote] for kind in kinds])
        repeats = [len(kind.local) for kind in kinds]
        inside = np.array([kind[:3] for kind in kinds], np.int64)
        local_token, remote_token, num_tokens = np.repeat(inside, repeats, axis=0).T
        for runs in self._flowing:
            token_bytes = int(runs.length[0])
            spread = joined(
                Runs(
                    local_page * runs.local_page + local_token * token_bytes,
                    remote_page * runs.remote_page + remote_token * token_bytes,
                    num_tokens * token_bytes,
                )
            )
            yield runs.spread(spread.local, spread.remote, spread.length, local_bases, remote_bases)


def _pages_of(where: str, pages: ArrayLike, tokens: tuple[int, int], group: Group) -> Ints:
    needed = -(-tokens[1] // group.page_size) - tokens[0] // group.page_size
    try:
        found = np.asarray(pages, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidTransferError(f"{where} pages are not 64-bit integers: {error}") from error
    if found.ndim != 1 or len(found) < needed:
        raise InvalidTransferError(
            f"{where} pages: got {found.size}, but tokens {tokens[0]} to {tokens[1]} take {needed} pages of "
            f"{group.page_size} tokens"
        )
    found = found[:needed]
    if int(found.view(np.uint64).max()) >= group.num_pages:  # as a uint64, a negative id is a huge number
        wrong = found[(found < 0) | (found >= group.num_pages)][0]
        raise InvalidTransferError(f"{where} page {wrong} does not exist: the pages are 0 to {group.num_pages - 1}")
    return found


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size) * size
