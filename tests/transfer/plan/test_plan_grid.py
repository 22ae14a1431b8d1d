"""Checks a seeded sample of the grid. `python -m tests.transfer.plan_grid` checks the whole grid."""

from __future__ import annotations

import random

import pytest

from tests.transfer.plan_grid import Triple, sample, topologies, triples


@pytest.fixture(scope="module")
def found() -> set[Triple]:
    some = random.Random(4).sample(sorted(topologies()), 120)
    return {triple for topology in some for triple in triples(*topology)}


@pytest.mark.parametrize(("staged", "number"), [(False, 250), (True, 120)])
def test_a_sample_of_the_grid_copies_each_element(found: set[Triple], staged: bool, number: int) -> None:
    assert sample(found, number, 11, staged=staged) == []


def test_the_grid_has_the_documented_combinations() -> None:
    every = set(topologies())
    assert len(every) == 9 * 8 * 3 * 8 * 3
    # 4 source ranks and 2 readers share 2 heads, so heads are replicated. Other systems refuse this case.
    assert (2, 2, 2, 1, 4, 1) in every
    assert (1, 1, 8, 3, 3, 2) in every  # latents
