"""Runs are joined exactly if they are adjacent on both sides."""

from __future__ import annotations

import numpy as np
import pytest

from transfer.plan.runs import Runs, joined


def runs(*rows: tuple[int, int, int]) -> Runs:
    local, remote, length = np.array(rows, np.int64).T
    return Runs(local, remote, length)


def listed(found: Runs) -> list[tuple[int, int, int]]:
    return list(zip(found.local.tolist(), found.remote.tolist(), found.length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(10, 110, 5), (0, 100, 10)], [(0, 100, 15)]),
        ([(0, 100, 10), (10, 200, 5)], [(0, 100, 10), (10, 200, 5)]),
        ([(0, 100, 10), (20, 110, 5)], [(0, 100, 10), (20, 110, 5)]),
        ([(0, 100, 10), (10, 110, 5), (15, 300, 5), (20, 305, 5)], [(0, 100, 15), (15, 300, 10)]),
    ],
)
def test_runs_are_joined_where_they_meet_on_both_sides(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    assert listed(joined(runs(*before))) == after
