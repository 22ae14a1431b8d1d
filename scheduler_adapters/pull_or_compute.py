"""Decides, from measured times, whether the pages of a prompt should be pulled from a peer or computed here.

Pure computation.

Pulling and computing are the two ways to get a prompt's pages. The time of each way is estimated as a sum of terms. A
pull has a latency, and a time for each token. A computation has a latency, and times for each new token, for each pair
of tokens that attention compares, and for each cached token, because it reads the cached tokens. The time of a
computation therefore grows faster than the number of tokens, and is longer after a long cached prefix. The coefficients
of the terms are fitted to measurements. For each power of two of the number of tokens, the latest measurements are
kept, so that frequent lengths do not displace rare ones.

This sum is the usual time. To follow the current speed, it is multiplied by a factor from the latest measurements. The
factor stays at 1 as long as the latest measurements deviate from the usual time no more than measurements normally do.

The time of a pull includes the time for asking the source, and any delay at a busy source or link. The time of a
computation includes the other requests in the same batch.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Terms = Callable[[int, int], tuple[float, ...]]
    """Returns the terms for a number of cached tokens and a number of further ones. The first term is always 1."""

_KEPT = 12  # measurements kept for each power of two of tokens
_LATEST = 5  # the current speed is estimated from this many measurements
# how many of the latest measurements are used to find how far a measurement normally deviates from its estimate
_NOISE_OF = 24
_ROUNDS = 3  # rounds of a fit; each takes its weights from the previous one
_TINY = 1e-30  # makes a fit solvable if a term was always 0
# A slow link may recover, so some prompts are pulled although computing is estimated to be quicker. One in `_TRY_AGAIN`
# prompts is pulled if the pull loses at most the fraction `_MOST_LOSS` of the time in which the other prompts are
# computed. One in `_TRY_ANYWAY` prompts is pulled however much time the pull loses.
_TRY_AGAIN, _MOST_LOSS, _TRY_ANYWAY = 32, 1 / 32, 128
# A prompt is pulled from its end while it is computed from its front, if this takes at most the fraction
# `_MOST_OF_ONE_WAY` of the time for pulling alone or computing alone, whichever is shorter.
_MOST_OF_ONE_WAY = 0.9


class TimeByTokens:
    """Estimates the time of pulls, or of computations, from measured times.

    Args:
        terms: returns the terms of the estimate for a number of cached tokens and a number of further tokens; at most
            four. The estimated time is the sum of the terms, each multiplied by its coefficient, which is not negative.

    Attributes:
        taken_s: sum of all measured times, in seconds.
        misjudged_s: sum of the absolute errors of the estimates, in seconds.
    """

    def __init__(self, terms: Terms) -> None:
        self.taken_s = 0.0
        self.misjudged_s = 0.0
        self._terms = terms
        # For each bit length of a token count, the latest measurements: number of tokens, terms, and seconds at the
        # usual speed.
        self._measured: dict[int, deque[tuple[int, tuple[float, ...], float]]] = {}
        self._fit: list[float] = []  # the coefficients; empty if they have to be fitted again
        # For the latest measurements: log(time / usual time), and |log(time / estimated time)|.
        self._latest = deque([0.0] * _LATEST, _LATEST)
        self._errors = deque([0.1] * 3, _NOISE_OF)

    def add(self, tokens: int, seconds: float, cached: int = 0) -> None:
        """Records that `tokens` tokens after `cached` cached ones took `seconds` seconds."""
        self.taken_s += seconds
        seconds = max(seconds, 1e-6)
        usual = self._usually(tokens, cached)
        if usual is not None:
            estimated = usual * self._pace()
            self.misjudged_s += abs(estimated - seconds)
            self._errors.append(abs(math.log(seconds / estimated)))
            self._latest.append(math.log(seconds / usual))
        kept = self._measured.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append((tokens, self._terms(cached, tokens), seconds / self._pace()))
        self._fit = []

    def seconds(self, tokens: int, cached: int = 0) -> float | None:
        """Returns the estimated seconds for `tokens` tokens at the current speed; None without enough measurements."""
        usual = self._usually(tokens, cached)
        return None if usual is None else usual * self._pace()

    def _pace(self) -> float:
        """Returns the ratio of the current times to the usual times. The fitted terms give the usual times.

        A slowdown counts only when most of the latest measurements show it. A single measurement that is much shorter
        than usual counts at once, because disturbances make times longer, never shorter.
        """
        noise, mostly, last = 1.5 * median(self._errors), median(self._latest), self._latest[-1]
        if last < mostly - max(math.log(2.0), 3.0 * noise):
            mostly = last
        return math.exp(math.copysign(max(0.0, abs(mostly) - noise), mostly))

    def _usually(self, tokens: int, cached: int) -> float | None:
        """The usual time in seconds; None if there are too few measurements."""
        every = [one for kept in self._measured.values() for one in kept]
        if len(self._measured) < 2:  # with measurements of one length only, latency and rate cannot be told apart
            near = [seconds / at * tokens for at, _, seconds in every if 0.5 < tokens / at < 2.0]
            return median(near) if near else None
        terms = self._terms(cached, tokens)
        if not self._fit:
            most = min(len(terms), len(self._measured))
            self._fit = _fitted(np.array([one[1][:most] for one in every]), np.array([one[2] for one in every]))
        return max(1e-6, sum(each * term for each, term in zip(self._fit, terms, strict=False)))


def _fitted(terms: Floats, seconds: Floats) -> list[float]:
    """Fits non-negative coefficients by least squares of the relative errors. Outliers get less weight.

    `terms` is float64 `[measurements, terms]`, `seconds` is float64 `[measurements]`.
    """
    expected, weight = seconds, np.ones_like(seconds)
    found = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        scaled = terms * (weight / expected**2)[:, None]
        found = _non_negative(scaled.T @ terms, scaled.T @ seconds)
        expected = np.maximum(terms @ found, 1e-6)
        # a measurement that is three times its estimate gets half the weight
        weight = 1.0 / np.maximum(np.abs(seconds / expected - 1.0), 1.0)
    return found.tolist()


def _non_negative(products: Floats, aims: Floats) -> Floats:
    """Solves the normal equations of least squares for coefficients that are not negative.

    The set of all terms is tried first. If it gives a negative coefficient, every subset is tried. There are at most
    four terms.
    """
    best, least = np.zeros_like(aims), math.inf
    for count in range(len(aims), 0, -1):
        for some in map(list, combinations(range(len(aims)), count)):
            square = products[np.ix_(some, some)]
            found = np.linalg.solve(square + np.diag(1e-9 * square.diagonal() + _TINY), aims[some])
            value = found @ square @ found - 2.0 * (found @ aims[some])
            if found.min() >= 0.0 and value < least:
                best, least = np.zeros_like(aims), value
                best[some] = found
        if count == len(aims) and least < math.inf:
            break
    return best


def _pull_terms(_: int, tokens: int) -> tuple[float, ...]:
    """Returns the terms of a pull's time: a latency, and a time for each token."""
    return 1.0, tokens / 1e3


def _compute_terms(cached: int, tokens: int) -> tuple[float, ...]:
    """Returns the terms of a computation's time: a latency, and times for tokens, pairs in attention, cached tokens."""
    return 1.0, tokens / 1e3, tokens * (cached + tokens / 2) / 1e6, cached / 1e3


class PullOrCompute:
    """Decides from measured times whether to pull the pages of a prompt, to compute them, or to do both at once.

    Attributes:
        pull: measured times of pulls.
        compute: measured times of computations.
    """

    def __init__(self) -> None:
        self.pull = TimeByTokens(_pull_terms)
        self.compute = TimeByTokens(_compute_terms)
        # how many prompts were computed since a prompt was last pulled although computing was estimated to be quicker
        self._refused = 0
        self._spare_s = 0.0  # how many seconds may be lost by pulling such a prompt

    def pays(self, cached: int, tokens: int, rest: int) -> bool:
        """Returns whether to pull `tokens` tokens that follow `cached` cached ones, rather than compute them.

        The `rest` tokens of the prompt after these tokens are computed in any case.

        Also returns True while the time of a pull or of a computation cannot be estimated, so that a pull is measured.
        Now and then returns True although computing is quicker, in order to notice that a link has recovered.
        """
        pull, whole = self.pull.seconds(tokens), self.compute.seconds(tokens + rest, cached)
        behind = self.compute.seconds(rest, cached + tokens)
        if pull is None or whole is None or behind is None or pull + behind < whole:
            return True
        self._refused += 1
        self._spare_s += _MOST_LOSS * whole
        is_cheap = self._refused >= _TRY_AGAIN and self._spare_s >= pull + behind - whole
        if not is_cheap and self._refused < _TRY_ANYWAY:
            return False
        self._refused, self._spare_s = 0, 0.0
        return True

    def splits(self, cached: int, tokens: int, rest: int, page_size: int) -> bool:
        """Returns whether to pull the final part of the `tokens` tokens while the first part is computed.

        `cached`, `tokens` and `rest` are as in `pays`.
        """
        share = self.meets(cached, cached + tokens, page_size)
        pull, whole = self.pull.seconds(tokens), self.compute.seconds(tokens + rest, cached)
        behind, front = self.compute.seconds(rest, cached + tokens), self.compute.seconds(tokens - share, cached)
        if not share or pull is None or whole is None or behind is None or front is None:
            return False
        return front + behind < _MOST_OF_ONE_WAY * min(pull + behind, whole)

    def meets(self, at: int, stop: int, page_size: int) -> int:
        """Returns how many tokens before token `stop` can be pulled before a computation at token `at` reaches them.

        The result is a whole number of pages, in tokens. It is 0 if no page can be pulled in time, or if a time cannot
        be estimated.
        """
        low, high = 0, max(0, stop - at) // page_size
        while low < high:
            pages = (low + high + 1) // 2
            pull = self.pull.seconds(pages * page_size)
            compute = self.compute.seconds(stop - at - pages * page_size, at)
            if pull is None or compute is None:
                return 0
            low, high = (pages, high) if pull <= compute else (low, pages - 1)
        return low * page_size

    def pulled_within(self, seconds: float, tokens: int, page_size: int) -> int:
        """Returns how many of the `tokens` tokens can be pulled in `seconds` seconds: whole pages, at least one."""
        takes = self.pull.seconds(tokens)
        if takes is None or takes <= seconds:
            return tokens
        return max(page_size, int(tokens * seconds / takes) // page_size * page_size)

    @property
    def taken_s(self) -> dict[str, float]:
        """The sums of all measured times in seconds, under "pull" and "compute"."""
        return {"pull": self.pull.taken_s, "compute": self.compute.taken_s}

    @property
    def misjudged_s(self) -> dict[str, float]:
        """The sums of the absolute errors of all estimates in seconds, under "pull" and "compute"."""
        return {"pull": self.pull.misjudged_s, "compute": self.compute.misjudged_s}
