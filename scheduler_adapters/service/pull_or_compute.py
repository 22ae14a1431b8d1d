"""Decides from measured times whether tokens of a prompt are pulled from a peer or computed here. Pure.

Both times grow with the number of tokens, but not linearly: steps dominate short computations, attention dominates
long ones. So times are kept by length, a few for each power of two, and times between two measured lengths are
interpolated. This gives the usual time of a length. The current speed of each way is one factor for all lengths, taken
from the latest measurements: a link that has become slow at one length counts as slow at all.

The time of a pull includes the question, and any delay at a busy source or link. The time of a computation includes the
batch that the prompt shares.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from statistics import fmean, median, median_low

_KEPT = 9  # measurements of a length
_LATEST = 5  # measurements of any length that say how quick a way is now
_TRY_AGAIN = 32  # of so many prompts that would be computed one is pulled: a link that was slow need not stay so


class TimeByTokens:
    """What a way took, by tokens.

    Attributes:
        taken_s: all times that were measured, in seconds.
        misjudged_s: by how much they differed from the estimate of the moment before, longer or shorter, added up.
    """

    def __init__(self) -> None:
        self.taken_s = 0.0
        self.misjudged_s = 0.0
        # By bits of the length: tokens, and the seconds that they would usually have taken.
        self._measured: dict[int, deque[tuple[int, float]]] = {}
        self._usual: list[tuple[float, float]] = []  # of each of these one tokens and seconds, shorter ones first
        self._latest = deque([1.0] * _LATEST, _LATEST)  # what the latest took, of what is usual

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        self.taken_s += seconds
        seconds = max(seconds, 1e-6)
        usual = self._usually(tokens)
        kept = self._measured.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        if usual is not None:
            self.misjudged_s += abs(usual * self._pace() - seconds)
            if kept:  # else the usual time is a guess, and says nothing of the moment
                self._latest.append(seconds / usual)
        kept.append((tokens, seconds / self._pace()))
        self._usual = []
        for some in (zip(*kept, strict=True) for _, kept in sorted(self._measured.items(), reverse=True)):
            lengths, times = some
            longer_s = self._usual[0][1] if self._usual else math.inf  # what is longer and takes less shows chance
            self._usual.insert(0, (fmean(lengths), min(median_low(times), longer_s)))

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens would take now; None if nothing was measured that tells."""
        usual = self._usually(tokens)
        return None if usual is None else usual * self._pace()

    def _pace(self) -> float:
        """What is taken now of what is usual. Chance makes a time long: one that is short is believed at once."""
        mostly, last = median(self._latest), self._latest[-1]
        return last if last < mostly / 2 else mostly

    def _usually(self, tokens: int) -> float | None:
        """By the line through the two measured lengths that are nearest."""
        known = self._usual
        if len(known) < 2:  # what is latency and what is rate is not known
            near = [seconds / at * tokens for at, seconds in known if 0.5 < tokens / at < 2.0]
            return near[0] if near else None
        first = min(max(bisect(known, (tokens, math.inf)) - 1, 0), len(known) - 2)
        (low, low_s), (high, high_s) = known[first : first + 2]
        line = low_s + (high_s - low_s) * (tokens - low) / (high - low)
        return max(line, low_s * min(1.0, tokens / low))  # a latency is not below 0


class PullOrCompute:
    """Says which way is quicker.

    Attributes:
        pull, compute: what each took.
    """

    def __init__(self) -> None:
        self.pull = TimeByTokens()
        self.compute = TimeByTokens()
        self._refused = 0

    def pays(self, tokens: int, rest: int) -> bool:
        """Whether so many tokens are better pulled, of a prompt that has `rest` behind them, which are computed anyway.

        Where one of both is not known they are: to learn of it.
        """
        pull, whole, behind = self.pull.seconds(tokens), self.compute.seconds(tokens + rest), self.compute.seconds(rest)
        if pull is None or whole is None or behind is None or pull < whole - behind:
            return True
        self._refused += 1
        return self._refused % _TRY_AGAIN == 0

    @property
    def taken_s(self) -> dict[str, float]:
        """Seconds that were measured, of each way."""
        return {"pull": self.pull.taken_s, "compute": self.compute.taken_s}

    @property
    def misjudged_s(self) -> dict[str, float]:
        """Seconds by which the estimates of each way were wrong."""
        return {"pull": self.pull.misjudged_s, "compute": self.compute.misjudged_s}
