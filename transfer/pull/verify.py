"""The reader's side of page checks: which pages of a pull are compared, and what is read again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer.errors import HandshakeError, PullFailedError
from transfer.memory import MemoryType
from transfer.plan.runs import concatenated
from transfer.pull.lease import WORD_BYTES, make_words
from transfer.pull.page_checks import ATTEMPTS, PageChecks, same_pages
from transfer.pull.pull_state import PagesOfGroup, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from transfer.nixl.agent import Agent
    from transfer.plan.plan import Plan
    from transfer.wire.messages import RankMetadata


class _Pair(NamedTuple):
    """Pages of one group that are to be equal: int64 `[pages]` each."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]


class Verifier:
    """Compares the pages that came from one rank with its page checks.

    Its copy of the source's words is shared by all pulls: while a lease stands, the words of its pages do not change,
    and when it has ended the fence refuses the pull.

    Args:
        checks: of our own pages.
        mine: our metadata.
        there: the source's.
        share: of the pages that are compared, drawn at random; 1 for all of them.
        agent: registers the copy of the words.

    Attributes:
        repeated: pages that were read again.

    Raises:
        HandshakeError: the source makes no checks, or a page there is not a page here.
    """

    def __init__(self, checks: PageChecks, mine: RankMetadata, there: RankMetadata, share: float, agent: Agent) -> None:
        where = f"engine {there.engine_id!r} rank {there.rank} cannot be verified"
        if not there.checks_addrs:
            raise HandshakeError(f"{where}: it makes no page checks")
        if not same_pages(mine.layout, there.layout):
            raise HandshakeError(f"{where}: its pages are laid out otherwise than ours")
        if (mine.memory_type, there.memory_type) != (MemoryType.DRAM, MemoryType.DRAM):
            raise HandshakeError(f"{where}: pages in device memory are not checked")
        self.repeated = 0
        self._checks = checks
        self._mine = mine
        self._there = there
        self._share = share
        self._random = np.random.default_rng()
        self._words = [make_words(group.num_pages) for group in there.layout.groups]
        agent.register([(words.ctypes.data, words.nbytes, 0) for words in self._words], MemoryType.DRAM)

    def part(self, key: str, plan: Plan, groups: Sequence[PagesOfGroup], rank: int) -> Part | None:
        """Returns what to read, with the checks of its pages; None where nothing is to be read.

        Raises:
            InvalidTransferError: pages or tokens that do not fit either layout.
        """
        pairs: list[_Pair] = []
        for group, pages in zip(self._mine.layout.groups, groups, strict=True):
            start, stop = pages.tokens
            count = max(0, math.ceil(stop / group.page_size) - start // group.page_size)
            count = min(count, 1) if group.state else count
            pairs.append(_Pair(np.asarray(pages.local, np.int64)[:count], np.asarray(pages.remote, np.int64)[:count]))
        return self._part(key, plan, groups, pairs, rank, ATTEMPTS)

    def _part(
        self, key: str, plan: Plan, groups: Sequence[PagesOfGroup], pairs: list[_Pair], rank: int, attempts: int
    ) -> Part | None:
        bases = self._mine.bases, self._there.bases
        runs = concatenated([plan.runs(group, *pages, *bases) for group, pages in enumerate(groups)])
        if not len(runs):
            return None
        spans = np.array([self._span(group, pair) for group, pair in enumerate(pairs) if len(pair.remote)], np.uint64)
        local, remote = runs.descriptors(self._mine.device, self._there.device)
        return Part(
            rank,
            np.concatenate([local, spans[:, [0, 2, 3]]]),
            np.concatenate([remote, spans[:, [1, 2, 3]]]),
            runs.num_bytes,
            lambda: self._compare(key, plan, pairs, rank, attempts - 1),
        )

    def _span(self, group: int, pair: _Pair) -> tuple[int, int, int, int]:
        # All words from the first page to the last, whoever's: one run, where picking them would be one for each page.
        first, last = int(pair.remote.min()), int(pair.remote.max())
        here, there = self._words[group].ctypes.data, self._there.checks_addrs[group]
        return here + WORD_BYTES * first, there + WORD_BYTES * first, WORD_BYTES * (last - first + 1), 0

    def _compare(self, key: str, plan: Plan, pairs: list[_Pair], rank: int, attempts: int) -> Part | None:
        """Compares what has arrived. Returns what has to be read again, if anything."""
        bad: list[_Pair] = []
        for group, pair in enumerate(pairs):
            drawn = self._draw(pair)
            expected = self._words[group][drawn.remote]
            wrong = self._checks.bad(group, drawn.local, expected)
            bad.append(_Pair(drawn.local[wrong], drawn.remote[wrong]))
        count = sum(len(pair.local) for pair in bad)
        if not count:
            return None
        if not attempts:
            group, pair = next((at, pair) for at, pair in enumerate(bad) if len(pair.local))
            raise PullFailedError(
                f"request {key!r}: {count} pages still differ from their source after {ATTEMPTS} reads, group {group} "
                f"page {pair.remote[0]} of engine {self._there.engine_id!r} rank {rank} among them"
            )
        self.repeated += count
        return self._part(key, plan, [self._pages(at, pair) for at, pair in enumerate(bad)], bad, rank, attempts)

    def _draw(self, pair: _Pair) -> _Pair:
        if self._share >= 1:
            return pair
        drawn = self._random.random(len(pair.local)) < self._share
        return _Pair(pair.local[drawn], pair.remote[drawn])

    def _pages(self, group: int, pair: _Pair) -> PagesOfGroup:
        return PagesOfGroup(pair.local, pair.remote, (0, len(pair.local) * self._mine.layout.groups[group].page_size))
