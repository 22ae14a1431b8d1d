"""`PageExchange` between two hosts: whole links, cut links, slow links, and peers that leave and return."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.pair import DIRECTIONS, Pair, Side

pytestmark = pytest.mark.hosts
_numbers = itertools.count()


@pytest.mark.both_families
def test_pages_arrive_as_they_were_over_any_link(pair: Pair) -> None:
    for rate in ("5gbit", "1gbit", "100mbit"):
        pair.shape(rate)
        for pages in (1, 16, 64):
            name = f"{rate} {pages}"
            _, error, right = pair.reader("pull", name, pair.offer(name, pages), 30.0)
            assert error == ""
            assert right
    pair.assert_nothing_is_held()
    ended = pair.source("held")[3]
    assert {ended[name] for name in ended if "bit" in name} == {"read"}


def in_the_middle(pair: Pair, timeout_s: float, lease_s: float) -> None:
    """Begins a pull of 64 pages (4 MiB) over a link that needs 1.7 seconds for them. Returns while the pull is in
    flight.
    """
    name = f"cut {next(_numbers)}"
    _, error, _ = pair.reader("pull", f"before {name}", pair.offer(f"before {name}", 1), 30.0)
    assert error == "", "the two sides must be connected"
    pair.shape("20mbit")
    offer = pair.offer(name, 64, lease_s)
    pair.until_received(1 << 20, lambda: pair.reader.say("pull", name, offer, timeout_s))


@pytest.mark.both_families
@pytest.mark.parametrize(
    "seconds", [1, pytest.param(10, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_pull_whose_link_is_cut_ends_right_or_says_why_and_holds_nothing(
    pair: Pair, direction: str, seconds: int, record_property: Callable[[str, object], None]
) -> None:
    cut, restore = DIRECTIONS[direction]
    in_the_middle(pair, timeout_s=20.0, lease_s=5.0)
    cut(pair)
    time.sleep(seconds)
    restore(pair)
    back = time.monotonic()
    _, error, right = pair.reader.answer()
    record_property("error", error)
    record_property("ended_s", time.monotonic() - back)
    assert right != bool(error)
    pair.assert_nothing_is_held()
    record_property("held_s", time.monotonic() - back)
    pair.assert_goes_on()


@pytest.mark.both_families
def test_a_source_that_reboots_at_its_address_is_another_one(own_pair: Pair, tmp_path: Path) -> None:
    in_the_middle(own_pair, timeout_s=10.0, lease_s=5.0)
    own_pair.source_host.kill()
    _, error, right = own_pair.reader.answer()
    assert error
    assert not right
    own_pair.source_host.restore()
    pair = own_pair._replace(source=Side(own_pair.source_host, "p", tmp_path))
    _, error, right = pair.reader("pull", "again", pair.offer("again", 64), 20.0)
    assert (error, right) == ("", True)
    pair.assert_nothing_is_held()


def test_a_reader_that_loses_power_keeps_no_page_longer_than_its_lease(own_pair: Pair, tmp_path: Path) -> None:
    in_the_middle(own_pair, timeout_s=10.0, lease_s=2.0)
    own_pair.reader_host.kill()
    deadline = time.monotonic() + 30
    while own_pair.source("held")[:2] != [0, 0]:
        assert time.monotonic() < deadline, own_pair.source("held")
        time.sleep(0.05)
    own_pair.reader_host.restore()
    pair = own_pair._replace(reader=Side(own_pair.reader_host, "d", tmp_path))
    _, error, right = pair.reader("pull", "again", pair.offer("again", 64), 20.0)
    assert (error, right) == ("", True)


def test_a_source_whose_address_moves_fails_a_pull_by_its_deadline_and_nothing_else(
    own_pair: Pair, tmp_path: Path
) -> None:
    in_the_middle(own_pair, timeout_s=5.0, lease_s=5.0)
    own_pair.source_host.move(77)
    _, error, right = own_pair.reader.answer()
    assert error
    assert not right
    own_pair.assert_nothing_is_held()
    # The process still gives readers its old address. A process that knows the new address replaces it.
    pair = own_pair._replace(source=Side(own_pair.source_host, "p2", tmp_path))
    _, error, right = pair.reader("pull", "again", pair.offer("again", 16), 20.0)
    assert (error, right) == ("", True)
