"""`Retention`: a client's hints about the future use of pages, and the one-byte codes that pages get from them.

`kvcache.policies.hinted_order` uses the codes.
"""

import functools
import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import flag, integer, number, optional, shown, tuple_of, whole
from kvcache.errors import InvalidRequestError

Codes = NDArray[np.uint8]
"""The code of each page's hint.

It combines a level, from 0 (evicted first) to 4 (evicted last), with a class of time to live.
"""
Times = NDArray[np.float64]

LEVELS = 5
NEUTRAL = 2  # the level of a page without a hint, which is also its code
# The time-to-live classes. Class 0 has no limit. Classes 1 to 5 hold up to 4, 16, 64, 256 and 1024 seconds. Class 6
# holds longer.
_TTL_CLASSES = 7
# The code of a page that several sessions share. Its level is neutral. A later hint cannot lower the level below
# neutral (see `merge_codes`).
SHARED = LEVELS * _TTL_CLASSES
LEVEL_OF = np.array([*[code % LEVELS for code in range(SHARED)], NEUTRAL], np.uint8)


class RangeRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Retention` for a part of a request's tokens, such as a system prompt or tools. Raises the same errors."""

    start: int  # the first token of the range
    end: int | None = None  # the token after the last token of the range; None: all tokens from `start` on
    session_continues: bool | None = None
    priority: int = 50
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        start, end = integer(self.start), math.inf if self.end is None else integer(self.end)
        if start is None or start < 0 or end is None or end <= start:
            raise InvalidRequestError(
                f"retention: a range from token {shown(self.start)} to {shown(self.end)} has no tokens"
            )
        _check_hint(self)

    def columns(self, pages: int, page_size: int) -> slice:
        """Returns the columns of the pages that lie entirely in the range, among a request's first `pages` pages."""
        return slice(-(-self.start // page_size), pages if self.end is None else self.end // page_size)


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's knowledge about the future use of a request's pages. It biases the eviction order, but pins no page.

    The hints are read when the request is admitted, and again when it is released. Its pages get the hints that were
    read at the release. A wrong hint costs little (see `kvcache.policies.hinted_order`). A correct `session_continues`
    can be worth as much as a pool of twice the size. Raises `InvalidRequestError` (a ValueError) if a value is out of
    range.

    Examples:
        >>> tools = RangeRetention(0, 32, priority=100)  # the tools at the start of the prompt, two pages of 16 tokens
        >>> page_hints(Retention(session_continues=False, ranges=(tools,)), pages=4, page_size=16).codes.tolist()
        [4, 4, 0, 0]
    """

    session_continues: bool | None = None  # whether a later request is expected to extend this request; None: unknown
    priority: int = 50  # from 0 (evicted first) to 100 (evicted last), rounded to a multiple of 25
    # how many seconds after the release the hint holds; None: no limit, but its effect decays
    ttl_s: float | None = None
    ranges: tuple[RangeRetention, ...] = ()  # hints for some tokens; a page follows the last range that contains it

    def __post_init__(self) -> None:
        _check_hint(self)
        ranges = tuple_of(
            "retention: ranges", self.ranges, RangeRetention, "a tuple of RangeRetention", InvalidRequestError
        )
        msgspec.structs.force_setattr(self, "ranges", ranges)


_optional_flag = optional(functools.partial(flag, error=InvalidRequestError))


def _check_hint(hint: Retention | RangeRetention) -> None:
    _optional_flag("retention: session_continues", hint.session_continues)
    whole("retention: priority", hint.priority, 0, 100, InvalidRequestError)
    if hint.ttl_s is not None and number("retention: ttl_s", hint.ttl_s, error=InvalidRequestError) <= 0:
        raise InvalidRequestError(f"retention: ttl_s is {hint.ttl_s}: a number of seconds above 0 is needed, or None")


class PageHints(NamedTuple):
    """A request's hints for its pages: the code of each hint, and how many seconds the hint holds (or infinity)."""

    codes: Codes
    lives: Times

    def of(self, at: NDArray[np.intp]) -> "PageHints":
        """Returns the hints for the pages at these indices."""
        return PageHints(self.codes[at], self.lives[at])


def page_hints(retention: Retention, pages: int, page_size: int) -> PageHints:
    """Returns the hints for a request's first `pages` pages. A range applies to pages that lie entirely in it."""
    codes, lives = np.full(pages, _code_of(retention), np.uint8), np.full(pages, _life_of(retention))
    for hint in retention.ranges:  # a range overrides the hint of the whole request
        columns = hint.columns(pages, page_size)
        codes[columns], lives[columns] = _code_of(hint), _life_of(hint)
    return PageHints(codes, lives)


def _code_of(hint: Retention | RangeRetention) -> int:
    lean = {True: 2, False: -2, None: 0}[hint.session_continues]
    level = min(LEVELS - 1, max(0, NEUTRAL + lean + round((hint.priority - 50) / 25)))
    life = _life_of(hint)
    if math.isinf(life):
        return level
    return level + LEVELS * min(_TTL_CLASSES - 1, max(1, math.ceil(math.log(life, 4))))


def _life_of(hint: Retention | RangeRetention) -> float:
    """Returns how many seconds the hint holds."""
    return math.inf if hint.ttl_s is None else hint.ttl_s


def merge_codes(old: Codes, new: Codes | None) -> Codes:
    """Returns the new codes of pages with the codes `old`, after a request that used these pages has released them.

    `new` has the codes of the request's hints, or is None if it has none. The latest hint counts, with one exception.
    If a hint said to evict a page first, and the page was used again all the same, then several sessions share it (for
    example, it is part of a system prompt). In that case the end of one session does not make the page the first to be
    evicted again.
    """
    refuted = LEVEL_OF[old] < NEUTRAL
    if new is None:
        return np.where(refuted, np.uint8(SHARED), old)
    return np.where((refuted | (old == SHARED)) & (LEVEL_OF[new] < NEUTRAL), np.uint8(SHARED), new)
