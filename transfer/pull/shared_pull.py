"""A pull from several sources at the same time. It reads more pages from the faster sources.

Each source has leased its own copy of pages with the same tokens. The pull has one *part* for each source: a separate
pull, under that source's lease. A part reads one run of pages at a time. The fence after the run shows that the pages
were still leased. When the fence has passed, the part gets its next run. A faster source therefore delivers more pages,
and its speed need not be known beforehand.

If a source fails, the part of another source that has the same pages reads the failed run. It begins only once no READ
of the failed run is in flight. If a page is no longer available from any source, the pull ends before that page, or
fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.replica.block_table import BlockTable, PageCopy
from transfer.plan.boxes import Group
from transfer.plan.intersection import Ints
from transfer.plan.page_lists import NOTHING, PageLists
from transfer.pull.pull_state import OwnKey, PullEvent, PullShare, ReplicaPull
from transfer.pull.source import Contact, Source

ONE_SOURCE_BYTES = 1 << 20
"""In bytes: up to this size, a pull reads one source, because a second one would save less time than its first run
takes.
"""
_PROBE_BYTES = 256 << 10
"""In bytes: the first run of a source whose speed is unknown, if there are other sources."""
_LEAST_S, _LEAST_BYTES = 0.01, 1 << 20
"""A run should take at least this time, or have at least these bytes, because the fence after it costs a round trip in
which no page arrives.
"""
_MOST_S = 0.25
"""In seconds: a run should take at most this long, because this time is lost if the source fails."""
_GROWTH = 4
"""The next run of a new source may be at most this many times as large as its last run."""
_KNOWN_RATES = 256
_TO_READ, _READING, _PASSED, _LOST = range(4)


def shares(num_bytes: int) -> bool:
    """Whether a pull of `num_bytes` bytes reads several sources."""
    return num_bytes > ONE_SOURCE_BYTES


class SourcePages(NamedTuple):
    """The pages of a pull that a source has leased.

    Attributes:
        source: the source and its lease.
        groups: for each group of the layout, the local pages, the source's pages, and their tokens.
        tables: the block tables that name these pages. Their seals are checked before the first page is read.
    """

    source: Source
    groups: Sequence[PageCopy]
    tables: Sequence[BlockTable]


class PullsOfReplica(Protocol):
    """The pulls of a replica from a single source each. `ReplicaTransfer` implements this interface."""

    def pull(self, key: str, source: Source, timeout_s: float) -> None:
        """Opens a pull whose pages are named later."""
        ...

    def look_up(self, key: str) -> ReplicaPull | None:
        """Returns an open pull, or None."""
        ...

    def add_pages(self, key: str, groups: PageLists, *, last: bool, tables: Sequence[BlockTable] = ()) -> None:
        """Adds pages that a pull must read. May be called several times for one pull."""
        ...

    def cancel(self, key: str, reason: str) -> None:
        """Gives up an open pull."""
        ...


@dataclass(slots=True, eq=False)
class _SourcePart:
    """The part that one source has in a shared pull. Its pages are counted in columns (see `SharedPull`).

    Attributes:
        key: key of the pull that reads from this source.
        holding: the pages that this source has leased.
        has: bool `[columns]`: the columns that the source has.
        seen: sums of the bytes and of the seconds of the runs that have passed. Both sums are halved before a run is
            added, so that later runs count more. A short run adds little to the sums, because it says little about the
            speed: buffers on the way may hold all of it.
        most: the maximum size of the next run, in bytes.
        run: the columns that are being read; None if no read is under way.
        since: when `run` began.
        runs: number of runs that were begun.
        num_bytes: bytes of the runs that have passed.
        declined: the `version` of the pull when this part last declined to read. The part is asked again only after the
            version has changed.
        error: why the part failed; empty if it has not.
    """

    key: str
    holding: SourcePages
    has: NDArray[np.bool_]
    seen: tuple[float, float] = (0.0, 0.0)
    most: float = math.inf
    run: tuple[int, int] | None = None
    since: float = 0.0
    runs: int = 0
    num_bytes: int = 0
    declined: int = -1
    error: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if the rate is not known."""
        num_bytes, seconds = self.seen
        return num_bytes / seconds if seconds else 0.0


class SharedPull:
    """Decides which source each page of a pull is read from.

    The tokens of the pull are divided into *columns*. Each column has as many tokens as the least common multiple of
    our page size and the sources' page size. This class only computes; `SharedPulls` makes the calls.

    Args:
        key: names the pull.
        holdings: for each source, the pages that it has leased. The first source has every page.
        groups: the groups of our layout.
        page_bytes: bytes of a page of each group, over all local ranks.
        page_sizes: tokens of our pages, and of the sources' pages.
        can_shorten: whether the pull may end before pages that no source has.
    """

    def __init__(
        self,
        key: str,
        holdings: Sequence[SourcePages],
        groups: Sequence[Group],
        page_bytes: Sequence[int],
        page_sizes: tuple[int, int],
        *,
        can_shorten: bool,
    ) -> None:
        self.key = key
        self.parts: list[_SourcePart] = []
        self.cancelled = ""
        self.is_told = False  # whether the failure of the pull was reported to its owner
        self.version = 0  # increases when a column changes its state, and when a part becomes able or unable to read
        self._groups, self._sizes, self._can_shorten = groups, page_sizes, can_shorten
        self._column = math.lcm(*page_sizes)
        ranges = [tokens for _, _, tokens in holdings[0].groups if tokens[0] < tokens[1]]
        self._origin = min((first for first, _ in ranges), default=0) // self._column * self._column
        count = -(-(max((stop for _, stop in ranges), default=0) - self._origin) // self._column)
        self._starts = self._origin + self._column * np.arange(count)
        self.state = np.zeros(count, np.uint8)
        sizes = np.zeros(count, np.int64)
        for group, size, (_, _, tokens) in zip(groups, page_bytes, holdings[0].groups, strict=True):
            sizes[self._touched(group, tokens)] += size if group.state else size * self._column // page_sizes[0]
        self._ends = np.concatenate(([0], np.cumsum(sizes)))

    def add(self, key: str, holding: SourcePages, whole: SourcePages, seen: tuple[float, float]) -> None:
        """Adds the part of a source that has leased the pages in `holding`.

        `whole` has every page of the pull. `seen` is the value of `_SourcePart.seen` from earlier pulls.
        """
        has = np.ones(len(self.state), np.bool_)
        for group, (_, _, wanted), (_, _, held) in zip(self._groups, whole.groups, holding.groups, strict=True):
            lacks = np.zeros(len(self.state), np.bool_)
            lacks[self._touched(group, wanted)] = True
            if held[0] < held[1]:
                begins = held[0] <= np.maximum(self._starts, wanted[0])
                ends = held[1] >= np.minimum(self._starts + self._column, wanted[1])
                lacks &= ~(begins & ends)
            has &= ~lacks
        self.parts.append(_SourcePart(key, holding, has, seen))

    def _touched(self, group: Group, tokens: tuple[int, int]) -> slice:
        """Returns the columns (ranges of tokens, see `SharedPull`) in which pages of a group are read.

        For a state, this is only the last column.
        """
        first, stop = tokens
        if first >= stop:
            return slice(0, 0)
        last = -(-(stop - self._origin) // self._column)
        return slice(last - 1 if group.state else (first - self._origin) // self._column, last)

    def num_bytes(self, run: tuple[int, int]) -> int:
        """Returns the number of bytes in a run of columns (ranges of tokens)."""
        first, stop = run
        return int(self._ends[stop] - self._ends[first])

    def pages(self, holding: SourcePages, run: tuple[int, int]) -> list[PageCopy]:
        """Returns the pages of each group in a run of columns. The remote page ids are those in `holding`."""
        first, stop = self._origin + run[0] * self._column, self._origin + run[1] * self._column
        found: list[PageCopy] = []
        for group, pages in zip(self._groups, holding.groups, strict=True):
            local, remote, (begin, end) = pages
            token, after = max(first, begin), min(stop, end)
            if group.state:
                found.append(pages if begin < end <= stop else NOTHING)
            elif token >= after:
                found.append(NOTHING)
            else:
                sides = zip((local, remote), self._sizes, strict=True)
                here, there = (_of_tokens(side, begin, token, after, size) for side, size in sides)
                found.append(PageCopy(here, there, (token, after)))
        return found

    def next_run(self, part: _SourcePart, now: float) -> tuple[int, int] | None:
        """Returns the columns (ranges of tokens) that a part should read next. No read of the part may be under way.

        Returns None if the part's source has none of the remaining columns. Also returns None if the other parts will
        finish sooner without this part.
        """
        left = self.state == _TO_READ
        mine = np.flatnonzero(left & part.has)
        if not len(mine):
            return None
        first = int(mine[0])
        gaps = np.flatnonzero(np.diff(mine) != 1)
        stop = int(mine[gaps[0] if len(gaps) else -1]) + 1
        if not shares(int(self._ends[-1])):
            return first, stop
        others = [other for other in self.parts if other is not part and not other.error and other.has[first]]
        rest = int(np.dot(np.diff(self._ends), left))
        known = [one.rate for one in (part, *others) if one.rate]
        usual = sum(known) / len(known) if known else 0.0
        others_rate = sum(other.rate or usual for other in others)
        if not part.rate:
            num_bytes = _PROBE_BYTES if others else self.num_bytes((first, stop))
        elif not others:
            num_bytes = int(part.rate * _MOST_S)
        else:
            share = rest * part.rate / (part.rate + others_rate) / 2
            num_bytes = int(
                min(max(share, min(_LEAST_BYTES, part.rate * _LEAST_S)), part.rate * _MOST_S, part.most, rest)
            )
            under_way = sum(self._left(other, now) for other in others)
            # The fastest source never declines, because otherwise nobody might read the last pages.
            is_slower = max(other.rate for other in others) > part.rate
            if is_slower and num_bytes / part.rate > (rest + under_way) / others_rate:
                return None
        within: int = self._ends.item(first) + num_bytes
        last = int(np.searchsorted(self._ends, within, "right")) - 1
        return first, min(max(last, first + 1), stop)

    def _left(self, part: _SourcePart, now: float) -> float:
        """Estimates how many bytes of a part's run have not arrived yet."""
        return 0.0 if part.run is None else max(0.0, self.num_bytes(part.run) - part.rate * (now - part.since))

    def begin(self, part: _SourcePart, run: tuple[int, int], now: float) -> None:
        """Records that a part reads a run."""
        self.state[slice(*run)] = _READING
        part.run, part.since, part.runs = run, now, part.runs + 1
        self.version += 1

    def passed(self, part: _SourcePart, now: float) -> None:
        """Records that a fence has confirmed the run of pages that a part was reading."""
        if part.run is None:
            return
        num_bytes = self.num_bytes(part.run)
        # a new source's runs grow only step by step, because one run says little about its speed
        if not part.rate or part.most < math.inf:
            part.most = _GROWTH * num_bytes
        part.seen = part.seen[0] / 2 + num_bytes, part.seen[1] / 2 + max(now - part.since, 1e-6)
        part.num_bytes += num_bytes
        self.state[slice(*part.run)] = _PASSED
        part.run = None
        self.version += 1

    def failed(self, part: _SourcePart, event: PullEvent) -> None:
        """Records that a part has failed.

        Other parts may read the failed part's run once none of the failed part's READs is in flight.
        """
        part.error = event.error
        self.version += 1
        if event.safe and part.run is not None:
            self.state[slice(*part.run)] = _TO_READ
            part.run = None

    def outcome(self) -> PullEvent | None:
        """Returns the event to report now, if any: the pull's last event, or an earlier event about its failure."""
        alive = [part for part in self.parts if not part.error]
        in_flight = any(part.run is not None for part in self.parts)
        error = self.cancelled or ("" if alive else self.parts[-1].error)
        if in_flight:
            if not error or alive or self.is_told:
                return None
            self.is_told = True
            return PullEvent(self.key, error, safe=False)
        had = np.zeros(len(self.state), np.bool_)
        for part in alive:
            had |= part.has
        lost = np.flatnonzero((self.state == _LOST) | ((self.state == _TO_READ) & ~had))
        end = int(lost[0]) if len(lost) else len(self.state)
        self.state[end:][self.state[end:] == _TO_READ] = _LOST
        if not self.cancelled and (self.state[:end] == _TO_READ).any():
            return None
        shares = tuple(PullShare(part.holding.source.contact, part.num_bytes, part.error) for part in self.parts)
        if not self.cancelled and not self.is_told:
            if end == len(self.state):
                return PullEvent(self.key, "", safe=True, shares=shares)
            if end and self._can_shorten:
                return PullEvent(self.key, "", safe=True, stop=int(self._starts[end]), shares=shares)
        errors = dict.fromkeys(part.error for part in self.parts if part.error)
        reason = self.cancelled or "; ".join(errors) or "no source has every page"
        return PullEvent(self.key, reason, safe=True, shares=shares)


def _of_tokens(pages: ArrayLike, begin: int, first: int, stop: int, page_size: int) -> Ints:
    """Returns the pages that hold the tokens `first` to `stop`. The first of `pages` holds the token `begin`."""
    skipped = begin // page_size
    return np.asarray(pages, np.int64)[first // page_size - skipped : -(-stop // page_size) - skipped]


class SharedPulls:
    """Runs the shared pulls of a replica over its single-source pulls, `pulls`. Single-threaded, like the replica."""

    def __init__(self, pulls: PullsOfReplica) -> None:
        self._pulls = pulls
        self._open: dict[str, SharedPull] = {}
        self._parts: dict[str, tuple[SharedPull, _SourcePart]] = {}  # by key, until the last event of the part
        # the attribute `seen` of each of the sources that were read most recently
        self._seen: dict[Contact, tuple[float, float]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, shared: SharedPull, holdings: Sequence[SourcePages], timeout_s: float) -> None:
        """Begins a shared pull: opens a pull from each of its sources."""
        self._open[shared.key] = shared
        for holding in holdings:
            key = OwnKey(shared.key)
            shared.add(key, holding, holdings[0], self._seen.get(holding.source.contact, (0.0, 0.0)))
            self._parts[key] = shared, shared.parts[-1]
        shared.parts.sort(key=lambda part: -part.rate)
        for part in list(shared.parts):
            self._pulls.pull(part.key, part.holding.source, timeout_s)

    def cancel(self, key: str, reason: str) -> None:
        """Gives up an open pull. A no-op if there is none."""
        if (shared := self._open.get(key)) is None or shared.cancelled:
            return
        shared.cancelled = reason
        for part in shared.parts:
            self._pulls.cancel(part.key, reason)

    def hear(self, event: PullEvent) -> bool:
        """Handles an event if it belongs to a part of a shared pull. Returns whether it belongs to one."""
        found = self._parts.get(event.key)
        if found is None:
            return False
        shared, part = found
        if event.error:
            shared.failed(part, event)
        if event.safe:
            del self._parts[event.key]
        return True

    def step(self, now: float) -> list[PullEvent]:
        """Assigns runs to parts. Returns the events of pulls that have ended or failed."""
        happened: list[PullEvent] = []
        for shared in list(self._open.values()):
            if not shared.cancelled:
                self._hand_out(shared, now)
            event = shared.outcome()
            if event is None:
                continue
            happened.append(event)
            if event.safe:
                self._end(shared, event)
        return happened

    def _hand_out(self, shared: SharedPull, now: float) -> None:
        idle: list[_SourcePart] = []
        for part in shared.parts:
            pull = self._pulls.look_up(part.key)
            if pull is None or part.error or not pull.started:
                continue
            if part.run is not None and pull.passed >= part.runs:
                shared.passed(part, now)
                self._remember(part)
            if part.run is None:
                idle.append(part)
        for part in idle:
            if part.error or part.declined == shared.version:
                continue
            run = shared.next_run(part, now)
            if run is None:
                part.declined = shared.version
                continue
            first = not part.runs
            shared.begin(part, run, now)
            tables = part.holding.tables if first else ()
            self._pulls.add_pages(part.key, shared.pages(part.holding, run), last=False, tables=tables)

    def _remember(self, part: _SourcePart) -> None:
        contact = part.holding.source.contact
        # The removal moves the entry to the end. The first entry must be the one that has been unused for the longest
        # time.
        self._seen.pop(contact, None)
        self._seen[contact] = part.seen
        if len(self._seen) > _KNOWN_RATES:
            del self._seen[next(iter(self._seen))]

    def _end(self, shared: SharedPull, event: PullEvent) -> None:
        """Ends the parts that are still open, and tells their sources that no more will be read."""
        del self._open[shared.key]
        for part in shared.parts:
            pull = self._pulls.look_up(part.key)
            if pull is None or part.error:
                continue
            if pull.started and not event.error:
                self._pulls.add_pages(part.key, [NOTHING] * len(part.holding.groups), last=True)
            else:
                self._pulls.cancel(part.key, event.error or "its pages were read elsewhere")
