"""A replica without lower tiers finds no page in them, waits for no copy, and gets no page back."""

from __future__ import annotations

from types import FunctionType

import numpy as np

from kvcache.pool.pages_below import PagesBelow

DIGESTS = np.arange(8, dtype=np.uint64).reshape(1, 4, 2)
ASKED = np.array([[True, False, True, True]])
PAGES = np.array([3, 4], np.int32)
GIVEN: dict[str, tuple[object, ...]] = {
    "hold": (PAGES,),
    "drop": (PAGES,),
    "bring": (PAGES, PAGES, DIGESTS[0, :2]),
    "restore": (0, PAGES, PAGES),
    "arrive": (np.array([0]),),
    "load_all": (),
    "restart": (),
    "touch": (DIGESTS[0],),
    "used": (DIGESTS[0],),
    "leave": (0, PAGES, DIGESTS[0, :2], np.zeros_like),
}


def test_a_replica_without_lower_tiers_finds_nothing_and_loads_nothing() -> None:
    below = PagesBelow()
    for asks in (below.has, below.may_have, below.host_has):
        assert np.array_equal(asks(DIGESTS, ASKED), np.zeros_like(ASKED))
    assert ASKED.tolist() == [[True, False, True, True]]
    assert below.slots(DIGESTS[0]).tolist() == [0] * 4
    assert below.slots(DIGESTS[0]).dtype == np.int32
    assert below.ask(DIGESTS, ASKED) is False
    for wait in (False, True):
        assert below.to_host(DIGESTS, ASKED, 3, wait=wait) is False
    assert below.coming() == []
    assert {below.keeps, below.fetches, below.asks, below.is_bringing} == {False}
    assert below.generation == below.answers == below.brought_at_once == below.longest_tail == 0


def test_a_replica_without_lower_tiers_ignores_every_call_about_its_pages() -> None:
    below = PagesBelow()
    for name, given in GIVEN.items():
        assert getattr(below, name)(*given) is None
    assert PAGES.tolist() == [3, 4]
    calls = {name for name, one in vars(PagesBelow).items() if isinstance(one, FunctionType)}
    assert calls == GIVEN.keys() | {"has", "may_have", "host_has", "ask", "to_host", "slots", "coming"}
