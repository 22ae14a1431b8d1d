"""Retention hints as one-byte codes for each page, which `kvcache.pool.hinted_order` uses."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.types import RangeRetention, Retention

Codes = NDArray[np.uint8]
"""Kinds of hint: a level, from 0 (goes first) to 4 (goes last), and a class of time to live."""
Times = NDArray[np.float64]

LEVELS = 5
NEUTRAL = 2  # the level, and the code, of a page without a hint
_TTL_CLASSES = 7  # no limit; up to 4, 16, 64, 256, 1024 seconds; longer
SHARED = LEVELS * _TTL_CLASSES  # neutral, and never evicted first by a later hint: see `merge_codes`
LEVEL_OF = np.array([*[code % LEVELS for code in range(SHARED)], NEUTRAL], np.uint8)


class PageHints(NamedTuple):
    """The hints of a request for its pages, and the seconds for which each holds; None: no hint expires."""

    codes: Codes
    lives: Times | None

    def of(self, at: NDArray[np.intp]) -> "PageHints":
        """The hints for the pages at these indices."""
        return PageHints(self.codes[at], None if self.lives is None else self.lives[at])


def page_hints(retention: Retention, pages: int, page_size: int) -> PageHints:
    """The hints for a request's first `pages` pages. A range applies to pages that lie entirely in it."""
    codes, lives = np.zeros(pages, np.uint8), np.zeros(pages)
    for hint in (retention, *retention.ranges):  # a range overrides the hint for the whole request
        first, last = 0, pages
        if isinstance(hint, RangeRetention):
            first, last = -(-hint.start // page_size), pages if hint.end is None else hint.end // page_size
        codes[first:last] = _code_of(hint)
        lives[first:last] = math.inf if hint.ttl_s is None else hint.ttl_s
    return PageHints(codes, lives if np.isfinite(lives).any() else None)


def _code_of(hint: Retention | RangeRetention) -> int:
    lean = {True: 2, False: -2, None: 0}[hint.session_continues]
    level = min(LEVELS - 1, max(0, NEUTRAL + lean + round((hint.priority - 50) / 25)))
    if hint.ttl_s is None:
        return level
    return level + LEVELS * min(_TTL_CLASSES - 1, max(1, math.ceil(math.log(hint.ttl_s, 4))))


def merge_codes(old: Codes, new: Codes | None) -> Codes:
    """The codes of pages with `old` codes after a request that used them brings the hints `new`, or None.

    The latest hint counts, with one exception. If a page was hinted to go first and was used again, several sessions
    share it (for example, a system prompt). Then the end of one session does not put it first again.
    """
    refuted = LEVEL_OF[old] < NEUTRAL
    if new is None:
        return np.where(refuted, np.uint8(SHARED), old)
    return np.where((refuted | (old == SHARED)) & (LEVEL_OF[new] < NEUTRAL), np.uint8(SHARED), new)
