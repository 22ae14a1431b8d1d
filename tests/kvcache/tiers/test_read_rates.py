"""Pages are read if reading was recently faster than computing. If reading has not paid for a while, the tier tries it
again now and then.
"""

from __future__ import annotations

import math

import pytest

from kvcache.tiers.object_tier import ReadRates


def rates(answer_s: float = 0.5, page_s: float = 0.125, compute_page_s: float = 0.25) -> ReadRates:
    made = ReadRates(compute_page_s)
    made.asked(answer_s)
    made.fetched(4, answer_s + 4 * page_s)
    return made


def test_reading_pays_as_long_as_there_are_no_measurements() -> None:
    assert ReadRates(math.inf).pays(1, 0, 1, 0.0)
    assert ReadRates(1e-9).pays(1, 1 << 20, 1, 0.0), "nothing was read so far"
    always = rates(compute_page_s=math.inf)
    assert all(always.pays(1, 1 << 20, 1, now) for now in (0.0, 1.0))


@pytest.mark.parametrize(
    ("pages", "before", "gain", "pays"),
    [
        (4, 0, 4, False),  # The read takes 0.5 + 0.5 s and saves 1 s, so it gains nothing.
        (5, 0, 5, True),
        (5, 1, 5, False),  # One page is read before these pages.
        (6, 1, 6, True),
        (5, 0, 4, False),  # One of the five pages saves no computation.
        (4, 0, 5, True),
        (1, 0, 0, False),
    ],
)
def test_reading_pays_if_all_pages_arrive_sooner_than_they_can_be_computed(
    pages: int, before: int, gain: int, pays: bool
) -> None:
    made = rates()
    made._tried = 0.0
    assert made.pays(pages, before, gain, 1.0) == pays


def test_a_read_that_does_not_pay_is_tried_once_in_thirty_seconds() -> None:
    made = rates()
    assert [made.pays(1, 0, 1, now) for now in (100.0, 101.0, 129.5, 130.0, 130.5, 159.5, 160.0)] == [
        *(True, False, False),
        *(True, False, False),
        True,
    ]
    assert made.pays(5, 0, 5, 160.5), "a read that pays does not count as a trial"
    assert made.pays(1, 0, 1, 190.0)


def test_a_read_that_took_no_longer_than_an_answer_is_measured() -> None:
    made = ReadRates(0.25)
    made.asked(2.0)
    made.fetched(4, 0.5)
    assert [made.pays(4, 0, 4, now) for now in (100.0, 101.0)] == [True, False], "an answer takes 2 s, computing 1 s"
    assert made.pays(9, 0, 9, 102.0)


def test_each_measurement_counts_for_a_quarter_of_the_estimate() -> None:
    made = ReadRates(1.0)
    assert (made.answer_s, made.page_s) == (0.0, 0.0)
    for seconds, mean in ((0.5, 0.5), (0.1, 0.4), (0.4, 0.4)):
        made.asked(seconds)
        assert made.answer_s == pytest.approx(mean)
    for pages, seconds, mean in ((2, 2.4, 1.0), (1, 0.4, 0.75), (3, 0.1, 0.5625)):
        # The store needs 0.4 s of these seconds to answer. The rest is the time of the read. It is at least zero.
        made.fetched(pages, seconds)
        assert made.page_s == pytest.approx(mean)
