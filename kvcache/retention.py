"""Retention hints as codes of one byte for each page: `kvcache.pool.hinted_order` goes by them."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.types import RangeRetention, Retention

Codes = NDArray[np.uint8]
"""Kinds of hint: a level, 0 (goes first) to 4 (goes last), and a class of time to live."""
Times = NDArray[np.float64]

LEVELS = 5
NEUTRAL = 2  # the level, and the code, of a page that nobody said anything about
_TTL_CLASSES = 7  # without a time, then up to 4, 16, 64, 256, 1024 seconds, then above
SHARED = LEVELS * _TTL_CLASSES  # neutral, and not to be put first again: see `merge_codes`
LEVEL_OF = np.array([*[code % LEVELS for code in range(SHARED)], NEUTRAL], np.uint8)


class PageHints(NamedTuple):
    """The hints of a request for its pages, and for how many seconds they hold; None: no hint has an end."""

    codes: Codes
    lives: Times | None

    def of(self, at: NDArray[np.intp]) -> "PageHints":
        """The hints for the pages at these places."""
        return PageHints(self.codes[at], None if self.lives is None else self.lives[at])


def page_hints(retention: Retention, pages: int, page_size: int) -> PageHints:
    """The hints of a request's first `pages` pages. A range speaks for the pages that lie in it with all tokens."""
    codes, lives = np.zeros(pages, np.uint8), np.zeros(pages)
    for hint in (retention, *retention.ranges):  # what a range says stands over what the whole says
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
    """The codes of pages that had `old` ones, now that a request that used them says `new`, or nothing.

    The latest word counts, except that a page of which somebody said that it should go first, and which was used all
    the same, is shared by more than one session (a system prompt, say): no session's end puts it first again.
    """
    refuted = LEVEL_OF[old] < NEUTRAL
    if new is None:
        return np.where(refuted, np.uint8(SHARED), old)
    return np.where((refuted | (old == SHARED)) & (LEVEL_OF[new] < NEUTRAL), np.uint8(SHARED), new)
