"""Pages as colours: each place of a map stands for a page, or sums up as many as it must. Pure arithmetic.

A place that sums up has the mean of its pages' colours: so many of a state, so much of its colour. One with a page in
quarantine is that page's alone: it is what one looks for.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.watched import Cells, PageState

Colours = NDArray[np.uint8]
"""Red, green and blue of each place: `[places, 3]`."""

COLOURS: dict[PageState, tuple[int, int, int]] = {
    PageState.FREE: (38, 44, 54),
    PageState.IDLE: (64, 150, 220),  # released last; those that go first are darker
    PageState.HELD: (70, 190, 90),
    PageState.LEASED: (225, 165, 40),
    PageState.WRITTEN: (180, 120, 255),
    PageState.QUARANTINED: (255, 70, 70),
}
GLYPHS = {
    PageState.FREE: "··",
    PageState.IDLE: "░░",
    PageState.HELD: "██",
    PageState.LEASED: "◆◆",
    PageState.WRITTEN: "▲▲",
    PageState.QUARANTINED: "✖✖",
}
_COLDEST = 0.35  # of an idle page's colour, where it goes first
_DIM = 0.22  # of what a filter leaves out
_LOW = 64  # values of the bits that the colour depends on: state and age
_CHUNK = 4096  # colours that are summed up in 20 bits each


class Span(NamedTuple):
    """The pages of a pool that a map shows: from `first` on, `per_place` in each place; the last has what is left."""

    first: int
    pages: int
    per_place: int

    @property
    def places(self) -> int:
        """How many there are."""
        return -(-self.pages // self.per_place)


def span_of(num_pages: int, places: int, zoom: int = 0, centre: float = 0.5) -> Span:
    """What a map of so many places shows: all pages, or the `2**zoom`th part of them around a share of the pool."""
    shown = max(min(num_pages, places), num_pages >> zoom)
    first = round(centre * num_pages - shown / 2)
    return Span(1 + min(max(0, first), num_pages - shown), shown, -(-shown // max(1, places)))


def _packed() -> NDArray[np.uint64]:
    """The colour for each value of a cell's low bits, 20 bits each; then the colours for cells that a filter hides."""
    table = np.zeros((2, _LOW, 3))
    for state, colour in COLOURS.items():
        for age in range(8):
            warmth = _COLDEST + (1 - _COLDEST) * age / 7 if state == PageState.IDLE else 1.0
            table[0, state | age << 3] = np.array(colour) * warmth
    table[1] = table[0] * _DIM
    flat = table.round().astype(np.uint64).reshape(-1, 3)
    return flat[:, 0] << np.uint64(40) | flat[:, 1] << np.uint64(20) | flat[:, 2]


_PACKED = _packed()


def colours(cells: Cells, span: Span, lit: NDArray[np.bool_] | None = None) -> Colours:
    """The colour of each place; `lit`: by owner number, whose pages a filter leaves. None: all."""
    shown = cells[span.first : span.first + span.pages]
    low = (shown & np.uint32(_LOW - 1)).astype(np.uint8)
    if lit is not None:
        low[~lit[shown >> np.uint32(8)]] |= _LOW
    packed = _PACKED[low]
    sums = _summed(packed, span)
    full = np.full(span.places, span.per_place)
    full[-1] = span.pages - (span.places - 1) * span.per_place
    found = (sums // full[:, None]).astype(np.uint8)
    odd = np.flatnonzero(low & 7 == PageState.QUARANTINED)
    found[odd // span.per_place] = COLOURS[PageState.QUARANTINED]
    return found


def _summed(packed: NDArray[np.uint64], span: Span) -> NDArray[np.uint64]:
    """The sums of the colours of each place, `[places, 3]`: first of so few pages that 20 bits hold them."""
    starts = np.arange(span.places) * span.per_place
    inner = (starts[:, None] + np.arange(0, span.per_place, _CHUNK)).ravel()
    inner = inner[inner < span.pages]
    sums = np.add.reduceat(packed, inner)
    parts = [sums >> np.uint64(shift) & np.uint64(0xFFFFF) for shift in (40, 20, 0)]
    return np.add.reduceat(np.stack(parts, 1), np.searchsorted(inner, starts), axis=0)
