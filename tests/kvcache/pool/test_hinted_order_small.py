"""Baselines of small pools. If no hint is trusted, a baseline with hints has exactly the hits of plain LRU."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.pool.hinted_order import HintedBaseline, LruBaseline, Words
from kvcache.retention import PageHints

FIRST, LAST = 0, 4


def words(*ids: int) -> Words:
    return np.array(ids, np.uint64)


def said(level: int, count: int) -> PageHints:
    return PageHints(np.full(count, level, np.uint8), np.full(count, np.inf))


def hinted(pages: int, share: float) -> HintedBaseline:
    return HintedBaseline(pages, 1, np.uint64(0), share)


@pytest.mark.parametrize("baseline", [LruBaseline(10), hinted(10, 0.0)], ids=["plain", "hinted"])
def test_a_baseline_keeps_one_page_even_if_requests_hold_all_pages(baseline: LruBaseline | HintedBaseline) -> None:
    assert baseline.visit(words(1, 2), 0) == 0
    assert baseline.visit(words(1, 2), 10) == 1


@pytest.mark.parametrize("baseline", [LruBaseline(1), hinted(1, 0.0)], ids=["plain", "hinted"])
def test_a_pool_of_one_page_keeps_one(baseline: LruBaseline | HintedBaseline) -> None:
    baseline.touch(words(1, 2))
    assert baseline.visit(words(1, 2), 2) == 1


def test_with_a_share_of_zero_the_hinted_baseline_has_the_hits_of_plain_lru() -> None:
    rng, room = random.Random(0), 12
    plain, other = LruBaseline(room), hinted(room, 0.0)
    hits = 0
    for _ in range(2000):
        head = rng.randrange(8) * 100
        prompt = words(*range(head, head + rng.randint(1, 5)))
        move = rng.choice(["visit", "visit", "visit", "touch", "forget", "leave"])
        if move == "visit":
            free = rng.randint(5, room)
            found = plain.visit(prompt, free)
            assert other.visit(prompt, free) == found
            hits += found
        elif move == "leave":
            plain.touch(prompt)
            other.leave(prompt, said(rng.choice([FIRST, LAST]), len(prompt)))
        else:
            getattr(plain, move)(prompt)
            getattr(other, move)(prompt)
    assert hits > 500


def test_a_lead_shorter_than_a_page_of_the_sample_is_one_page() -> None:
    baseline = hinted(4, 1.0)
    baseline.widen(100.0)
    baseline.leave(words(1), said(LAST, 1))
    for other in (2, 3, 4, 5):
        baseline.visit(words(other), 4)
    assert baseline.visit(words(1), 4) == 1


def test_a_page_that_was_taken_by_others_leaves_no_hint_to_the_page_in_its_place() -> None:
    baseline = hinted(2, 1.0)
    baseline.leave(words(1), said(LAST, 1))
    baseline.forget(words(1))
    for other in (2, 3, 4):
        baseline.visit(words(other), 2)
    assert baseline.visit(words(3), 2) == 1
