"""Baselines of small pools. If no hint is trusted, a baseline has exactly the hits of plain LRU."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvcache.policies.baseline import Baseline
from kvcache.replica.policy import Words
from kvcache.retention import PageHints

FIRST, LAST = 0, 4


def words(*ids: int) -> Words:
    return np.array(ids, np.uint64)


def said(level: int, count: int) -> PageHints:
    return PageHints(np.full(count, level, np.uint8), np.full(count, np.inf))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_baseline_keeps_one_page_even_if_requests_hold_all_pages(share: float) -> None:
    baseline = Baseline(10, share)
    assert baseline.visit(words(1, 2), 0) == 0
    assert baseline.visit(words(1, 2), 10) == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_pool_of_one_page_keeps_one(share: float) -> None:
    baseline = Baseline(1, share)
    baseline.touch(words(1, 2))
    assert baseline.visit(words(1, 2), 2) == 1


def test_a_share_of_zero_gives_the_hits_of_plain_lru_whatever_the_hints_say() -> None:
    rng, pages = random.Random(0), 12
    baseline, lru, room = Baseline(pages), OrderedDict[int, None](), pages
    hits = 0
    for _ in range(2000):
        head = rng.randrange(8) * 100
        prompt = [*range(head, head + rng.randint(1, 5))]
        move = rng.choice(["visit", "visit", "visit", "touch", "forget", "leave"])
        if move == "visit":
            room = rng.randint(5, pages)
            run = next((at for at, page in enumerate(prompt) if page not in lru), len(prompt))
            assert baseline.visit(words(*prompt), room) == run
            hits += run
        elif move == "leave":
            baseline.leave(words(*prompt), said(rng.choice([FIRST, LAST]), len(prompt)))
        else:
            getattr(baseline, move)(words(*prompt))
        for page in reversed(prompt):
            lru.pop(page, None)
            if move != "forget":
                lru[page] = None
        while len(lru) > room:
            lru.popitem(last=False)
    assert hits > 500


def test_a_lead_shorter_than_a_page_of_the_sample_is_one_page() -> None:
    baseline = Baseline(4, 1.0)
    baseline.widen(100.0)
    baseline.leave(words(1), said(LAST, 1))
    for other in (2, 3, 4, 5):
        baseline.visit(words(other), 4)
    assert baseline.visit(words(1), 4) == 1


def test_a_page_that_was_taken_by_others_leaves_no_hint_to_the_page_in_its_place() -> None:
    baseline = Baseline(2, 1.0)
    baseline.leave(words(1), said(LAST, 1))
    baseline.forget(words(1))
    for other in (2, 3, 4):
        baseline.visit(words(other), 2)
    assert baseline.visit(words(3), 2) == 1
