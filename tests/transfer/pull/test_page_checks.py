"""Checksums of pages: of those that there are."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.layout import PageLayout
from transfer.errors import InvalidTransferError
from transfer.plan.shapes import dense
from transfer.pull.page_checks import PageChecks

PAGES = 5


@pytest.fixture
def pool() -> np.ndarray:
    layout = dense(PageLayout("bfloat16", 2, 2, 2, 0, 4, 16, 8, "head,layer,side,token,dim"), PAGES)
    return np.random.default_rng(0).integers(0, 256, (PAGES, layout.region_bytes[0] // PAGES)).astype(np.uint8)


def checks_of(pool: np.ndarray) -> PageChecks:
    layout = dense(PageLayout("bfloat16", 2, 2, 2, 0, 4, 16, 8, "head,layer,side,token,dim"), PAGES)
    return PageChecks(layout, [pool.ctypes.data])


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
