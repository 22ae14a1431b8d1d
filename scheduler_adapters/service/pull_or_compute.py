"""Decides from measured times whether tokens of a prompt are pulled from a peer or computed here. Pure.

Both times grow with the number of tokens, but not linearly: steps dominate short computations, attention dominates long
ones. A few measurements are therefore kept for each power of two, and times between measured lengths are interpolated.
This gives the usual time of a length. The current speed of each way is one factor for all lengths, taken from the
latest measurements: a link that has become slow at one length counts as slow at all lengths.

The time of a pull includes the question, and any delay at a busy source or link. The time of a computation includes the
batch that the prompt shares.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from statistics import fmean, median, median_low

_KEPT = 9  # measurements kept for each power of two
_LATEST = 5  # the current speed is estimated from this many measurements
_TRY_AGAIN = 32  # one of this many prompts that would be computed is pulled, because a slow link may recover


class TimeByTokens:
    """Measured times of one way (pull or compute), by number of tokens.

    Attributes:
        taken_s: sum of all measured times, in seconds.
        misjudged_s: sum of the absolute errors of the estimates, in seconds.
    """

    def __init__(self) -> None:
        self.taken_s = 0.0
        self.misjudged_s = 0.0
        # By bit length of the token count: pairs of tokens and the seconds that they usually take.
        self._measured: dict[int, deque[tuple[int, float]]] = {}
        self._usual: list[tuple[float, float]] = []  # one pair of tokens and seconds for each, ascending
        self._latest = deque([1.0] * _LATEST, _LATEST)  # latest measured times, each divided by its usual time

    def add(self, tokens: int, seconds: float) -> None:
        """Records that `tokens` tokens took `seconds` seconds."""
        self.taken_s += seconds
        seconds = max(seconds, 1e-6)
        usual = self._usually(tokens)
        kept = self._measured.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        if usual is not None:
            self.misjudged_s += abs(usual * self._pace() - seconds)
            if kept:  # otherwise the usual time is extrapolated and says nothing of the current speed
                self._latest.append(seconds / usual)
        kept.append((tokens, seconds / self._pace()))
        self._usual = []
        for some in (zip(*kept, strict=True) for _, kept in sorted(self._measured.items(), reverse=True)):
            lengths, times = some
            longer_s = self._usual[0][1] if self._usual else math.inf  # a longer length with a shorter time shows noise
            self._usual.insert(0, (fmean(lengths), min(median_low(times), longer_s)))

    def seconds(self, tokens: int) -> float | None:
        """Returns the estimated seconds for `tokens` tokens now; None without suitable measurements."""
        usual = self._usually(tokens)
        return None if usual is None else usual * self._pace()

    def _pace(self) -> float:
        """The current time as a factor of the usual one.

        Noise only lengthens times, so a much shorter time counts at once.
        """
        mostly, last = median(self._latest), self._latest[-1]
        return last if last < mostly / 2 else mostly

    def _usually(self, tokens: int) -> float | None:
        """The usual time, on the line through the two nearest measured lengths; None if too little is known."""
        known = self._usual
        if len(known) < 2:  # latency and rate cannot be told apart
            near = [seconds / at * tokens for at, seconds in known if 0.5 < tokens / at < 2.0]
            return near[0] if near else None
        first = min(max(bisect(known, (tokens, math.inf)) - 1, 0), len(known) - 2)
        (low, low_s), (high, high_s) = known[first : first + 2]
        line = low_s + (high_s - low_s) * (tokens - low) / (high - low)
        return max(line, low_s * min(1.0, tokens / low))  # a latency is not negative


class PullOrCompute:
    """Chooses the quicker way.

    Attributes:
        pull: measured times of pulls.
        compute: measured times of computations.
    """

    def __init__(self) -> None:
        self.pull = TimeByTokens()
        self.compute = TimeByTokens()
        self._refused = 0

    def pays(self, tokens: int, rest: int) -> bool:
        """Whether to pull `tokens` tokens of a prompt. The `rest` behind them is computed in any case.

        Also True while a time is not known yet, in order to measure it.
        """
        pull, whole, behind = self.pull.seconds(tokens), self.compute.seconds(tokens + rest), self.compute.seconds(rest)
        if pull is None or whole is None or behind is None or pull < whole - behind:
            return True
        self._refused += 1
        return self._refused % _TRY_AGAIN == 0

    @property
    def taken_s(self) -> dict[str, float]:
        """The sum of the measured seconds of each way."""
        return {"pull": self.pull.taken_s, "compute": self.compute.taken_s}

    @property
    def misjudged_s(self) -> dict[str, float]:
        """The sum of the errors of the estimates of each way, in seconds."""
        return {"pull": self.pull.misjudged_s, "compute": self.compute.misjudged_s}
