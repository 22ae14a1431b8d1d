"""`ReadRates`: whether reading pages of a store pays, by what it has cost of late."""

import math

_TRY_S = 30.0  # then pages are read that are cheaper to compute: the store may have become faster
_WEIGHT = 0.25  # of the newest figure in a running mean


class ReadRates:
    """The recent cost of reading, and whether reading pays. The read thread supplies the figures."""

    def __init__(self, compute_page_s: float | None) -> None:
        self._compute_page_s = compute_page_s
        self.answer_s = 0.0  # running means of seconds: to be told what there is,
        self.page_s: float | None = None  # and for each page that is read, beside
        self._tried = -math.inf  # when reading was tried though it did not pay

    def asked(self, seconds: float) -> None:
        self.answer_s = _mean(self.answer_s or None, seconds)

    def fetched(self, pages: int, seconds: float) -> None:
        self.page_s = _mean(self.page_s, max(0.0, seconds - self.answer_s) / pages)

    def pays(self, pages: int, before: int, now: float, gain: int | None = None) -> bool:
        """Whether `pages` are here sooner than computed, after `before` others that are on their way.

        `gain`: pages of tokens that are not computed then; None: as many as are read. Now and then also where they are
        not: the store may have become faster.
        """
        if self._compute_page_s is None or self.page_s is None:
            return True
        if self.answer_s + (before + pages) * self.page_s < (pages if gain is None else gain) * self._compute_page_s:
            return True
        if now - self._tried < _TRY_S:
            return False
        self._tried = now
        return True


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
