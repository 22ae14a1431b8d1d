"""A page that differs from its source is read again, so often and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache.layout import PageLayout
from tests.transfer.wire.test_messages import rank
from transfer.errors import PullFailedError
from transfer.plan.plan import plan
from transfer.plan.rank_plan import RankPlan
from transfer.plan.shapes import dense
from transfer.pull.page_checks import ATTEMPTS, PageChecks
from transfer.pull.verify import Verifier

LAYOUT = dense(PageLayout("bfloat16", 2, 2, 2, 0, 4, 16, 8, "head,layer,side,token,dim"), 5)


def test_a_page_that_never_comes_right_is_read_three_times() -> None:
    pool = np.ones(LAYOUT.region_bytes[0], np.uint8)
    checks = PageChecks(LAYOUT, [pool.ctypes.data])
    mine = rank(layout=LAYOUT, bases=(pool.ctypes.data,))
    there = msgspec.structs.replace(mine, checks_addrs=(checks.words[0].ctypes.data,))
    agent: Any = SimpleNamespace(register=lambda *_: None)
    verifier = Verifier(checks, mine, there, 1.0, agent)
    planned = RankPlan(0, plan(LAYOUT, LAYOUT), (mine.bases, there.bases), (0, 0))
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
