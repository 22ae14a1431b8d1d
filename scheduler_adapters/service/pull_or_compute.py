"""Whether tokens of a prompt are pulled from who has them or computed here: by what either took so far. Pure.

Either takes a time that grows with the tokens: a latency, and a rate. Both are fitted to what was measured, the latest
of which counts most, as links and loads change. What a pull takes has the question in it, and whatever source and
link are busy with; what computing takes has the batch in it that a prompt shares.
"""

from __future__ import annotations

_KEEP = 0.9  # of the weight of a measurement, with each one after it: the last ten or so count
_TRY_AGAIN = 32  # of so many prompts that would be computed one is pulled: a link that was slow need not stay so


class TimeByTokens:
    """A line through measured times, by tokens.

    Attributes:
        taken_s: all times that were measured, in seconds.
        misjudged_s: by how much they differed from the estimate of the moment before, longer or shorter, added up.
    """

    def __init__(self) -> None:
        self.taken_s = 0.0
        self.misjudged_s = 0.0
        # Of the measurements (x: tokens, y: seconds), by their weights: their number, sum of x, of y, of x*x, of x*y.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        estimate = self.seconds(tokens)
        if estimate is not None:
            self.misjudged_s += abs(estimate - seconds)
        self.taken_s += seconds
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(_KEEP * old + one for old, one in zip(self._sums, new, strict=True))  # pyright: ignore[reportAttributeAccessIssue] - five

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens would take; None where nothing was measured that tells."""
        count, x, y, xx, xy = self._sums
        if not count:
            return None
        spread = xx - x * x / count
        if spread <= 1e-6 * xx:  # one length: what is latency and what is rate is not known
            return y / x * tokens if 0.5 < tokens * count / x < 2.0 else None
        rate = (xy - x * y / count) / spread
        latency = (y - rate * x) / count
        if rate < 0.0:  # more tokens took less time: chance
            rate, latency = 0.0, y / count
        elif latency < 0.0:
            rate, latency = xy / xx, 0.0
        return latency + rate * tokens


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
