"""Turns pages into colours: each position on a map shows one page, or several. Pure arithmetic.

A position that shows several pages has the mean of their colours, so each state shows in proportion to its pages. A
position with a quarantined page has that page's colour, because users look for such pages.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.watch.messages import Cells, PageState

Colours = NDArray[np.uint8]
"""The red, green and blue of each position: `[positions, 3]`."""


class Palette(NamedTuple):
    """The colours of a theme.

    Attributes:
        states: colour of each page state. An idle page has this colour if it is among the last to be evicted.
        ground: a colour that is mixed into the colour of an idle page that is evicted soon, and of a page that a filter
            hides.
        fading: a word that describes how faded pages look.
    """

    states: dict[PageState, tuple[int, int, int]]
    ground: tuple[int, int, int]
    fading: str


DARK = Palette(
    {
        PageState.FREE: (38, 44, 54),
        PageState.IDLE: (64, 150, 220),
        PageState.HELD: (70, 190, 90),
        PageState.LEASED: (225, 165, 40),
        PageState.WRITTEN: (180, 120, 255),
        PageState.QUARANTINED: (255, 70, 70),
    },
    (0, 0, 0),
    "darker",
)
LIGHT = Palette(
    {
        PageState.FREE: (214, 219, 226),
        PageState.IDLE: (20, 104, 176),
        PageState.HELD: (22, 128, 50),
        PageState.LEASED: (176, 112, 0),
        PageState.WRITTEN: (122, 50, 214),
        PageState.QUARANTINED: (208, 16, 16),
    },
    (255, 255, 255),
    "paler",
)
GLYPHS = {
    PageState.FREE: "··",
    PageState.IDLE: "░░",
    PageState.HELD: "██",
    PageState.LEASED: "◆◆",
    PageState.WRITTEN: "▲▲",
    PageState.QUARANTINED: "✖✖",
}
_COLDEST = 0.35  # how much of its colour an idle page keeps if it is evicted first
_DIM = 0.22  # how much of its colour a page keeps if a filter hides it
_LOW = 64  # the low bits of a cell hold the state and the age of a page, and have this many values
_CHUNK = 4096  # the most colours whose sum fits into 20 bits per channel


class Span(NamedTuple):
    """The pages of a pool that a map shows: `pages` pages from `first` on."""

    first: int
    pages: int
    per_square: int

    @property
    def squares(self) -> int:
        """The number of positions on the map."""
        return -(-self.pages // self.per_square)


def span_of(num_pages: int, squares: int, zoom: int = 0, centre: float = 0.5) -> Span:
    """Returns which pages a map with `squares` squares shows.

    At zoom 0, the map shows the whole pool. Each further step of `zoom` halves the visible part around `centre`. A map
    never shows fewer pages than it has positions.
    """
    shown = max(min(num_pages, squares), num_pages >> zoom)
    first = round(centre * num_pages - shown / 2)
    return Span(1 + min(max(0, first), num_pages - shown), shown, -(-shown // max(1, squares)))


@lru_cache
def _packed(light: bool) -> NDArray[np.uint64]:
    """Returns a table of packed colours (20 bits per channel), one for each pair of a page's state and age.

    The second half of the table has the colours for pages that a filter hides.
    """
    palette = LIGHT if light else DARK
    table, ground = np.zeros((2, _LOW, 3)), np.array(palette.ground)
    for state, colour in palette.states.items():
        for age in range(8):
            warmth = _COLDEST + (1 - _COLDEST) * age / 7 if state == PageState.IDLE else 1.0
            table[0, state | age << 3] = ground + (np.array(colour) - ground) * warmth
    table[1] = ground + (table[0] - ground) * _DIM
    flat = table.round().astype(np.uint64).reshape(-1, 3)
    return flat[:, 0] << np.uint64(40) | flat[:, 1] << np.uint64(20) | flat[:, 2]


def colours(cells: Cells, span: Span, lit: NDArray[np.bool_] | None = None, *, light: bool = False) -> Colours:
    """Returns the colour of each position.

    `lit` is a bool array: whether the filter shows the pages of each owner, by owner number. None shows all pages.
    """
    shown = cells[span.first : span.first + span.pages]
    low = (shown & np.uint32(_LOW - 1)).astype(np.uint8)
    if lit is not None:
        low[~lit[shown >> np.uint32(8)]] |= _LOW
    sums = _summed(_packed(light)[low], span)
    full = np.full(span.squares, span.per_square)
    full[-1] = span.pages - (span.squares - 1) * span.per_square
    found = (sums // full[:, None]).astype(np.uint8)
    odd = np.flatnonzero(low & 7 == PageState.QUARANTINED)
    found[odd // span.per_square] = (LIGHT if light else DARK).states[PageState.QUARANTINED]
    return found


def _summed(packed: NDArray[np.uint64], span: Span) -> NDArray[np.uint64]:
    """Returns, for each position, the sum of its pages' colours: `[positions, 3]`.

    The function sums at most `_CHUNK` pages at a time, so that no sum needs more than 20 bits.
    """
    starts = np.arange(span.squares) * span.per_square
    inner = (starts[:, None] + np.arange(0, span.per_square, _CHUNK)).ravel()
    inner = inner[inner < span.pages]
    sums = np.add.reduceat(packed, inner)
    parts = [sums >> np.uint64(shift) & np.uint64(0xFFFFF) for shift in (40, 20, 0)]
    return np.add.reduceat(np.stack(parts, 1), np.searchsorted(inner, starts), axis=0)
