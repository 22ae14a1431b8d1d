"""Checksums of pages: of those that there are; and a page that differs is read again, so often and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache.layout import PageLayout
from tests.transfer.wire.test_messages import rank
from transfer.errors import InvalidTransferError, PullFailedError
from transfer.plan.plan import plan
from transfer.plan.shapes import dense
from transfer.pull.page_checks import ATTEMPTS, PageChecks, Verifier

PAGES = 5
LAYOUT = dense(PageLayout("bfloat16", 2, 2, 2, 0, 4, 16, 8, "head,layer,side,token,dim"), PAGES)


@pytest.fixture
def pool() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (PAGES, LAYOUT.region_bytes[0] // PAGES)).astype(np.uint8)


def checks_of(pool: np.ndarray) -> PageChecks:
    return PageChecks(LAYOUT, [pool.ctypes.data])


def test_pages_that_changed_are_named_by_their_places(pool: np.ndarray) -> None:
    checks = checks_of(pool)
    checks.seal(0, [4, 1, 2])
    expected = checks.words[0][[1, 2, 4]].copy()
    assert checks.bad(0, [1, 2, 4], expected).tolist() == []
    pool[2, 0] ^= 1
    pool[4, -1] ^= 1
    assert checks.bad(0, [1, 2, 4], expected).tolist() == [1, 2]


@pytest.mark.parametrize("pages", [[PAGES], [0, -1], [1, 1 << 40]])
def test_pages_that_the_pool_does_not_have_are_refused(pool: np.ndarray, pages: list[int]) -> None:
    with pytest.raises(InvalidTransferError, match=f"group 0: pages {min(pages)} to {max(pages)}, has {PAGES}"):
        checks_of(pool).seal(0, pages)


def test_a_page_that_never_comes_right_is_read_three_times() -> None:
    pool = np.ones(LAYOUT.region_bytes[0], np.uint8)
    checks = PageChecks(LAYOUT, [pool.ctypes.data])
    mine = rank(layout=LAYOUT, bases=(pool.ctypes.data,))
    there = msgspec.structs.replace(mine, checks_addrs=(checks.words[0].ctypes.data,))
    agent: Any = SimpleNamespace(register=lambda *_: None)
    verifier = Verifier(checks, mine, there, 1.0, agent)
    planned = plan(LAYOUT, LAYOUT, (mine.bases, there.bases))
    part = verifier.part("r", planned, [([1], [2], (0, 16))])
    for _ in range(ATTEMPTS - 1):
        assert part is not None
        assert part.arrived is not None
        part = part.arrived()
    assert verifier.repeated == ATTEMPTS - 1
    assert part is not None
    assert part.arrived is not None
    with pytest.raises(PullFailedError, match="1 pages still differ from their source after 3 reads, group 0 page 2"):
        part.arrived()


@pytest.mark.parametrize(
    ("span", "verified"), [((0, 16), 1), ((0, 17), 2), ((0, 31), 2), ((15, 17), 2), ((16, 32), 1), ((31, 33), 2)]
)
def test_every_page_of_a_pull_is_verified_those_at_its_ends_too(
    pool: np.ndarray, span: tuple[int, int], verified: int
) -> None:
    """16 tokens a page: a page counts of which one token is read, and the page after the last one does not."""
    checks = checks_of(pool)
    checks.seal(0, [3, 4])
    mine = rank(layout=LAYOUT, bases=(pool.ctypes.data,))
    there = msgspec.structs.replace(mine, checks_addrs=(checks.words[0].ctypes.data,))
    agent: Any = SimpleNamespace(register=lambda *_: None)
    planned = plan(LAYOUT, LAYOUT, (mine.bases, there.bases))
    for wrong in (1, 2):  # of the pages that are read into
        verifier = Verifier(checks, mine, there, 1.0, agent)
        verifier._words[0][[1, 2]] = checks.words[0][[3, 4]]  # what arrives of the source's words
        pool[[1, 2]] = pool[[3, 4]]
        pool[wrong, -1] ^= 1
        part = verifier.part("r", planned, [([1, 2], [1, 2], span)])
        assert part is not None
        assert part.arrived is not None
        again = part.arrived()
        assert verifier.repeated == (wrong <= verified)
        assert (again is not None) == (wrong <= verified)
