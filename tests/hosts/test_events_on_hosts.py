"""KV events go from one host to a router on another host. Links are cut, and hosts lose power."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.events import PAGES
from tests.hosts.network import IPV4, Family, network
from tests.hosts.pair import DIRECTIONS, Pair, Side
from transfer.wire.keys import make_keyrings, save_keyring

pytestmark = pytest.mark.hosts
Record = Callable[[str, object], None]
WITHIN_S = 30.0


@contextmanager
def publisher_and_follower(folder: Path, family: Family = IPV4) -> Iterator[tuple[Pair, Callable[[], Side]]]:
    """Two hosts, and a function that restarts the publisher after its host has lost power."""
    files = folder / "publisher.keys", folder / "follower.keys"
    for keyring, file in zip(make_keyrings(2), files, strict=True):
        save_keyring(keyring, file)
    with network("source", "reader", families=(family,)) as (source, reader):

        def publisher() -> Side:
            return Side(source, "publisher", folder, "tests.hosts.events", source.address, str(files[0]))

        first = publisher()
        follower = Side(reader, "follower", folder, "tests.hosts.events", source.address, str(files[1]))
        yield Pair(first, follower, source, reader), publisher


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Pair]:
    with publisher_and_follower(tmp_path_factory.mktemp("followed"), family) as (pair, _):
        yield pair


def until_equal(publisher: Side, follower: Side) -> float:
    """Returns the seconds until the follower knows exactly the pages that the publisher has."""
    begin = time.monotonic()
    want = publisher("there")
    while (have := follower("there")) != want:
        missing, extra = len({*want} - {*have}), len({*have} - {*want})
        assert time.monotonic() - begin < WITHIN_S, f"{missing} pages are missing, {extra} are too many"
        time.sleep(0.02)
    return time.monotonic() - begin


@pytest.mark.both_families
@pytest.mark.parametrize("rate", ["1gbit", "10mbit"])
def test_a_router_on_another_host_knows_every_page(followed: Pair, rate: str, record_property: Record) -> None:
    followed.shape(rate)
    assert followed.source("compute", 60) > PAGES, "more pages than the pool has must have been evicted"
    record_property("known_s", until_equal(followed.source, followed.reader))


@pytest.mark.parametrize("seconds", [1, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_router_whose_link_was_cut_learns_the_missed_events(
    followed: Pair, direction: str, seconds: int, record_property: Record
) -> None:
    followed.shape("1gbit")
    until_equal(followed.source, followed.reader)
    before = followed.reader("counted")
    cut, restore = DIRECTIONS[direction]
    cut(followed)
    end = time.monotonic() + seconds
    gone = 0
    while time.monotonic() < end:
        gone += followed.source("compute", 2)
    restore(followed)
    assert gone > PAGES, "more pages than the pool has must have been evicted"
    record_property("known_s", until_equal(followed.source, followed.reader))
    after = followed.reader("counted")
    record_property("seen", {name: after[name] - before[name] for name in after})


@pytest.mark.both_families
def test_the_events_of_a_host_that_lost_power_and_came_back_are_followed_again(
    tmp_path: Path, family: Family, record_property: Record
) -> None:
    """A half-open connection brings no message. A router therefore reconnects after three seconds without a message."""
    with publisher_and_follower(tmp_path, family) as (pair, restarted):
        pair.source("compute", 20)
        until_equal(pair.source, pair.reader)
        known = pair.reader("there")
        pair.source_host.kill()
        pair.source_host.restore()
        publisher = restarted()
        publisher("compute", 1)
        record_property("known_s", until_equal(publisher, pair.reader))
        assert {*pair.reader("there")} != {*known}, "the pages that were lost with the host must be forgotten"


def test_a_router_with_a_strangers_keys_hears_nothing(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.keys"
    save_keyring(make_keyrings(1)[0], stranger)
    with publisher_and_follower(tmp_path) as (pair, _):
        spy = Side(pair.reader_host, "spy", tmp_path, "tests.hosts.events", pair.source_host.address, str(stranger))
        pair.source("compute", 5)
        until_equal(pair.source, pair.reader)
        assert spy("counted")["messages"] == 0
        assert spy("there") == []
