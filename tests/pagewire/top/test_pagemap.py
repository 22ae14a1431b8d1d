"""Each cell of the map has the mean colour of its pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.watch.messages import PageState
from pagewire.top.pagemap import DARK, LIGHT, Span, colours


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("pages", [8, 9, 10, 11])
def test_pages_that_are_alike_have_one_colour_in_the_last_place_too(pages: int, light: bool) -> None:
    cells = np.full(pages + 1, PageState.HELD, np.uint32)
    found = colours(cells, Span(1, pages, 4), light=light)
    (colour,) = {tuple(place) for place in found.tolist()}
    assert colour == (LIGHT if light else DARK).states[PageState.HELD]


def test_a_place_is_the_mean_of_its_pages_and_one_in_quarantine_hides_the_others() -> None:
    cells = np.array([0, *[PageState.HELD] * 3, PageState.LEASED, PageState.LEASED, PageState.QUARANTINED], np.uint32)
    first, last = colours(cells, Span(1, 6, 4)).tolist()
    held, leased = (np.array(DARK.states[state]) for state in (PageState.HELD, PageState.LEASED))
    assert first == ((3 * held + leased) // 4).tolist()
    assert tuple(last) == DARK.states[PageState.QUARANTINED]
