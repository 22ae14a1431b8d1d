"""Which idle page goes first: least recently used, biased by retention hints and tenant quotas. Frees nothing.

A bounded share of the idle pages follows the hints, the rest plain LRU:

    release ──► recent: the newest (1 - share), LRU ──oldest──► older: one LRU order a kind of hint ──► evicted

`older` gives the page of the lowest rank. The rank of a page is its place in the LRU order plus a lead by its hint, of
so many pool sizes: a page that is worth more lives so much longer, then it goes as if nobody had said anything. So a
hint decays and never pins, and whatever the hints say, the cache holds what plain LRU would hold in a pool smaller by
the share. Rejected: strict classes, which pin; and leads without a share, whose cost by wrong hints has no bound.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.pool.idle_order import IdleOrder, Indices, Pages
from kvcache.pool.quotas import SlabQuotas, TenantQuotas
from kvcache.types import RangeRetention, Retention

Codes = NDArray[np.uint8]
"""Kinds of hint: a level, 0 (goes first) to 4 (goes last), and a class of time to live."""
Times = NDArray[np.float64]

_LEVELS = 5
NEUTRAL = 2  # the level, and the code, of a page that nobody said anything about
_TTL_CLASSES = 7  # without a time, then up to 4, 16, 64, 256, 1024 seconds, then above
SHARED = _LEVELS * _TTL_CLASSES  # neutral, and not to be put first again: see `merge_codes`
LEVEL_OF = np.array([*[code % _LEVELS for code in range(SHARED)], NEUTRAL], np.uint8)
# Pool sizes that one level is worth. On public traces twice as much gives the same hits within 1 %, also where every
# fifth hint is wrong, and half as much up to 4 % fewer.
_LEAD = 2
_LAST = 1 << 62
BY_LRU, BY_HINT, BY_QUOTA = 0, 1, 2
"""Why a page went: its turn had come, somebody had said that it goes first, or its tenant had more than its quota."""


class PageHints(NamedTuple):
    """What a request says about its pages, and for how many seconds; None where none has an end."""

    codes: Codes
    lives: Times | None

    def of(self, at: Indices) -> "PageHints":
        """What is said of the pages at these places."""
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
    level = min(_LEVELS - 1, max(0, NEUTRAL + lean + round((hint.priority - 50) / 25)))
    if hint.ttl_s is None:
        return level
    return level + _LEVELS * min(_TTL_CLASSES - 1, max(1, math.ceil(math.log(hint.ttl_s, 4))))


def merge_codes(old: Codes, new: Codes | None) -> Codes:
    """The codes of pages that had `old` ones, now that a request that used them says `new`, or nothing.

    The latest word counts, except that a page of which somebody said that it should go first, and which was used all
    the same, is shared by more than one session (a system prompt, say): no session's end puts it first again.
    """
    refuted = LEVEL_OF[old] < NEUTRAL
    if new is None:
        return np.where(refuted, np.uint8(SHARED), old)
    return np.where((refuted | (old == SHARED)) & (LEVEL_OF[new] < NEUTRAL), np.uint8(SHARED), new)


class HintedOrder:
    """The idle pages of one pool in the order in which they go. See the module.

    `recent` has the pages that are idle now, in a log with room for `MOST_ORDERS`. `quotas` say whose pages go first of
    all, and `on_surplus` is told of these. `clock` gives seconds, for hints with a time to live.
    """

    def __init__(
        self,
        num_pages: int,
        recent: IdleOrder,
        quotas: TenantQuotas | SlabQuotas | None = None,
        on_surplus: Callable[[Pages], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share = 0.0  # of the idle pages, how many follow the hints
        # What was said of each page; set while it is not idle.
        self.codes = np.full(num_pages + 1, NEUTRAL, np.uint8)
        self._quotas = quotas
        self._on_surplus = on_surplus
        self._clock = clock
        self._num_pages = num_pages
        self.lead_pages = num_pages  # a lead is so many times as long
        self._recent = recent
        self._older: dict[int, IdleOrder] = {}  # by code
        self._settled = np.zeros(num_pages + 1, np.bool_)  # pages of `_older`
        self._since = np.zeros(num_pages + 1, np.int64)  # of each page of `_older`, its place in the LRU order
        self._expires: Times | None = None
        self._places = 0
        self._renewed = 0  # of the pages to be settled, in place of how many others left the order
        self.count = recent.count
        self.explains = False  # whether `pop` says why, and what it said: of each page that it gave
        self.reasons: Codes | None = None

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        """A request that used `pages`, not idle, leaves them and says `hints` of them, or nothing."""
        self.codes[pages] = merge_codes(self.codes[pages], None if hints is None else hints.codes)
        if hints is None or hints.lives is None:
            return
        if self._expires is None:
            self._expires = np.zeros(self._num_pages + 1)
        self._expires[pages] = self._clock() + hints.lives

    def forget(self, pages: Pages) -> None:
        """`pages` left the order as they were evicted: what was said of them is over."""
        self.codes[pages] = NEUTRAL
        if self._quotas is not None:
            self._quotas.disown(pages)

    def renew(self, pages: Pages) -> None:
        """`pages`, idle, are about to leave the order for others in their place: a hint does not wear off by that."""
        self._renewed += int(np.count_nonzero(self._settled[pages]))

    def moved(self, sources: Pages, targets: Pages) -> None:
        """The content of `sources`, not idle, is in `targets` by now, and what was said of it goes along."""
        self.codes[targets] = self.codes[sources]
        if self._quotas is not None:
            self._quotas.moved(sources, targets)
        self.forget(sources)
        if self._expires is not None:
            self._expires[targets] = self._expires[sources]

    def append(self, pages: Pages | Indices) -> None:
        """Put `pages`, none of them in the order, where their hints want them, the youngest of all."""
        if not len(pages):  # what has just left the order is made up for by who comes, not by who does not
            return
        self._recent.append(pages)
        self.count += len(pages)
        if self._quotas is not None:
            self._quotas.append(pages)
        excess = self._recent.count - int((1.0 - self.share) * self.count)
        if excess > 0:
            self._settle(self._recent.pop(excess))

    def remove(self, pages: Pages | Indices) -> None:
        if self._quotas is not None:
            self._quotas.remove(pages)
        self._take(pages)

    def pop(self, count: int) -> Pages:
        """Take the `count` pages out that go first, in the order in which they go. At most `self.count`."""
        if count > self.count:
            raise InvariantError(f"idle order: {count} pages asked for, {self.count} are there")
        taken: list[Pages] = []
        if self._quotas is not None:
            taken.append(self._quotas.pop_surplus(count))
            self._take(taken[0])
            self._on_surplus(taken[0])
        missing = count - sum(map(len, taken))
        by_order = len(taken)
        while missing and self.count > self._recent.count:
            taken.append(self._pop_older(missing))
            missing -= len(taken[-1])
        if missing:
            taken.append(self._recent.pop(missing))
            self.count -= missing
        if self._quotas is not None:
            for pages in taken[by_order:]:
                self._quotas.remove(pages)
        gone = np.concatenate(taken) if taken else np.zeros(0, np.int32)
        if self._quotas is not None:
            self._quotas.disown(gone)
        if self.explains:
            self.reasons = (LEVEL_OF[self.codes[gone]] < NEUTRAL).astype(np.uint8) * BY_HINT
            self.reasons[: len(taken[0]) if self._quotas is not None else 0] = BY_QUOTA
        self.codes[gone] = NEUTRAL
        return gone

    def pop_one(self) -> int:
        return int(self.pop(1)[0])

    def due(self) -> int:
        """The page that goes next as its tenant has more than its quota; 0: none."""
        return 0 if self._quotas is None else self._quotas.first()

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        """By how many pools' pages the hints of `pages` have them live longer, as far as hints are trusted."""
        return (LEVEL_OF[self.codes[pages]].astype(np.float64) - NEUTRAL) * (_LEAD * self.share)

    def first_lead(self) -> float:
        """`leads` of the page that goes next, 0.0 once its time is over."""
        page = np.array([self.first()], np.int32)
        over = self._expires is not None and self._expired(int(self.codes[page[0]]), page, self._clock())
        return 0.0 if over else float(self.leads(page)[0])

    def first(self) -> int:
        if page := self.due():
            return page
        if self.count == self._recent.count:
            return self._recent.first()
        return self._older[self._lowest()[0]].first()

    def positions(self) -> Indices:
        """As `IdleOrder.positions`: settled pages by their place in the LRU order, below 0, then the recent ones."""
        return np.where(self._settled, self._since - self._places, self._recent.positions())

    def pages(self) -> Pages:
        return np.concatenate([*(order.pages() for order in self._older.values()), self._recent.pages()])

    def mend(self, pages: Indices) -> None:
        """As `IdleOrder.mend`; those that follow hints come before the others, as ever. `quotas` have none of them."""
        known = self._settled[pages] | (self._recent.log.stamp[pages] >= 0)
        pages = pages[np.argsort(np.where(known, self.positions()[pages], _LAST), kind="stable")]
        self._recent.log.clear()
        self._settled[:] = False
        self._renewed = self.count = 0
        self.append(pages)

    def check(self) -> None:
        self._recent.check()
        if self.count != len(self.pages()) or int(self._settled.sum()) != self.count - self._recent.count:
            raise InvariantError(f"idle order: {len(self.pages())} pages, {self.count} counted")
        for code, order in self._older.items():
            pages = order.pages()
            if not (self._settled[pages].all() and (self.codes[pages] == code).all()):
                raise InvariantError(f"idle order: a page of another kind is in the order of kind {code}")
            if (np.diff(self._since[pages]) < 0).any():
                raise InvariantError(f"idle order: the pages of kind {code} are not in their order")
        if self._quotas is not None:
            self._quotas.check(self.pages())

    def _settle(self, pages: Pages) -> None:
        """The oldest of the recent pages go to the orders of their hints."""
        renewed = min(self._renewed, len(pages))
        self._renewed -= renewed
        self._since[pages] = self._places + np.maximum(0, np.arange(len(pages)) - renewed)
        self._places += len(pages) - renewed
        self._settled[pages] = True
        codes = self.codes[pages]
        for code in set(codes.tolist()):
            if code not in self._older:
                self._older[code] = IdleOrder(self._num_pages, self._recent.log)
            self._older[code].append(pages[codes == code])

    def _take(self, pages: Pages | Indices) -> None:
        self.count -= len(pages)
        settled = self._settled[pages]
        if not settled.any():
            self._recent.remove(pages)
            return
        older, recent = pages[settled], pages[~settled]
        self._recent.remove(recent)
        self._settled[older] = False
        codes = self.codes[older]
        for code in set(codes.tolist()):
            self._older[code].remove(older[codes == code])

    def _pop_older(self, most: int) -> Pages:
        """The pages of the lowest rank, of one kind, as many as are below all others, `most` at most."""
        chosen, bound, now = self._lowest()
        order = self._older[chosen]
        pages = order.oldest(most)
        lead = self._lead(chosen)
        if expired := self._expired(chosen, pages, now):
            pages, lead = pages[:expired], 0
        below = int(np.searchsorted(self._since[pages], bound - lead))
        pages = order.pop(max(1, below))
        self._settled[pages] = False
        self.count -= len(pages)
        return pages

    def _lowest(self) -> tuple[int, int, float]:
        """The kind whose oldest page has the lowest rank, the lowest rank of another, and what time it is."""
        now = self._clock() if self._expires is not None else 0.0
        ranks: list[tuple[int, int]] = []
        for code, order in self._older.items():
            if order.count:
                head = order.oldest(1)
                lead = 0 if self._expired(code, head, now) else self._lead(code)
                ranks.append((int(self._since[head[0]]) + lead, code))
        (_, chosen), (bound, _) = sorted([*ranks, (_LAST, 0)])[:2]
        return chosen, bound, now

    def _lead(self, code: int) -> int:
        return (int(LEVEL_OF[code]) - NEUTRAL) * _LEAD * self.lead_pages

    def _expired(self, code: int, pages: Pages, now: float) -> int:
        """How many of `pages`, oldest first, have a hint that is worth nothing any more, up to the first that has not.

        The classes of time to live see to it that a page does not wait long behind one whose hint lives longer.
        """
        if self._expires is None or code == SHARED or code < _LEVELS:
            return 0
        alive = self._expires[pages] > now
        return int(np.argmax(alive)) if alive.any() else len(pages)
