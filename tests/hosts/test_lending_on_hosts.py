"""One host asks another host for pages by content while the link between them is cut."""

import itertools
import time
from collections.abc import Callable

import pytest

from tests.hosts.pair import DIRECTIONS, Pair

pytestmark = pytest.mark.hosts
PAGES = 64
_numbers = itertools.count()


def known(pair: Pair) -> tuple[str, str]:
    """Returns the name of a new request and the address of a source. The source has the request's pages, and the reader
    has asked the source before.
    """
    pair.shape("1gbit")
    name = f"lent {next(_numbers)}"
    (address,) = pair.source("compute", name, PAGES)
    _, error, pages = pair.reader("ask", f"before {name}", 1, address, 20.0)
    assert (error, pages) == ("", 1)
    assert pair.reader("take", f"before {name}", 20.0)[1:] == ["", True]
    pair.assert_nothing_is_held()
    return address, name


@pytest.mark.both_families
def test_pages_of_another_host_are_lent_and_read(pair: Pair) -> None:
    address, name = known(pair)
    for rate in ("5gbit", "1gbit", "100mbit"):
        pair.shape(rate)
        _, error, pages = pair.reader("ask", name, PAGES, address, 20.0)
        assert (error, pages) == ("", PAGES)
        assert pair.source("held")[1] == PAGES
        assert pair.reader("take", name, 20.0)[1:] == ["", True]
        pair.assert_nothing_is_held(9.0)  # The source gives the pages back before their lease expires.


OUTAGES = [1, pytest.param(12, marks=pytest.mark.long)]
"""Outages in seconds: a short one, and one that is longer than a lent lease lasts without a read or a renewal."""


@pytest.mark.parametrize("seconds", OUTAGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_question_over_a_link_that_is_cut_is_answered_or_fails_with_a_reason(
    pair: Pair, direction: str, seconds: int, record_property: Callable[[str, object], None]
) -> None:
    address, name = known(pair)
    cut, restore = DIRECTIONS[direction]
    cut(pair)
    pair.reader.say("ask", name, PAGES, address, 20.0)
    time.sleep(seconds)
    restore(pair)
    back = time.monotonic()
    _, error, pages = pair.reader.answer()
    record_property("answered_s", time.monotonic() - back)
    record_property("error", error)
    assert error or pages == PAGES
    if not error:
        assert pair.reader("take", name, 20.0)[1:] == ["", True]
    pair.assert_nothing_is_held()
    record_property("held_s", time.monotonic() - back)
    pair.assert_goes_on()


@pytest.mark.parametrize(
    "direction", ["both", "to the reader", pytest.param("from the reader", marks=pytest.mark.long)]
)
def test_a_question_that_no_answer_reaches_fails_by_its_deadline(pair: Pair, direction: str) -> None:
    """The question may still arrive late. The source then lends pages that no reader reads. After the lease has
    expired, the source can lend the pages again.
    """
    address, name = known(pair)
    cut, restore = DIRECTIONS[direction]
    cut(pair)
    try:
        seconds, error, pages = pair.reader("ask", name, PAGES, address, 1.0)
    finally:
        restore(pair)
    assert seconds < 5
    assert "p/0" in error
    assert address in error
    assert pages == 0
    again, deadline = f"again {name}", time.monotonic() + 30
    while pages < PAGES:
        assert time.monotonic() < deadline
        _, error, pages = pair.reader("ask", again, PAGES, address, 20.0)
        assert error == ""
    assert pair.reader("take", again, 20.0)[1:] == ["", True]
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("seconds", OUTAGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("phase", ["lent", "reading"])
def test_a_link_that_is_cut_while_pages_are_lent_costs_no_wrong_byte_and_no_page(
    pair: Pair, phase: str, direction: str, seconds: int, record_property: Callable[[str, object], None]
) -> None:
    """The link is cut before the first READ (phase `lent`), or after one of the four MiB has arrived (phase
    `reading`).
    """
    address, name = known(pair)
    cut, restore = DIRECTIONS[direction]
    assert pair.reader("ask", name, PAGES, address, 20.0)[1:] == ["", PAGES]
    if phase == "lent":
        cut(pair)
        pair.reader.say("take", name, 20.0)
    else:
        pair.shape("20mbit")
        pair.until_received(1 << 20, lambda: pair.reader.say("take", name, 20.0))
        cut(pair)
    time.sleep(seconds)
    restore(pair)
    pair.shape("1gbit")
    back = time.monotonic()
    _, error, right = pair.reader.answer()
    record_property("error", error)
    record_property("ended_s", time.monotonic() - back)
    assert right != bool(error)
    pair.assert_nothing_is_held()
    record_property("held_s", time.monotonic() - back)
    pair.assert_goes_on()
