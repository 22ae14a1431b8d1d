"""`PageExchange` between two hosts: whole links, cut links, slow links, and peers that go and come back."""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts.network import Host, network

pytestmark = pytest.mark.hosts
_numbers = itertools.count()
SECRET = {"PAGEWIRE_TEST_SECRET": "a secret of the tests, of enough bytes"}


class Side:
    """The program of one side."""

    def __init__(self, host: Host, name: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.hosts.exchanged", name, host.address]
        with (folder / f"{name}.log").open("ab") as log:
            self._process = host.start(command, SECRET, log, answers=True)
        assert self.answer() == ["ready"]

    def say(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def __call__(self, *command: object) -> Any:
        self.say(*command)
        return self.answer()


class Pair(NamedTuple):
    source: Side
    reader: Side
    source_host: Host
    reader_host: Host

    def offer(self, name: str, pages: int, duration_s: float = 30.0) -> str:
        return self.source("offer", name, pages, duration_s)[0]

    def shape(self, rate: str) -> None:
        for host in (self.source_host, self.reader_host):
            host.shape(rate)

    def assert_nothing_is_held(self, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while (held := [side("held")[:3] for side in (self.source, self.reader)]) != [[0, 0, 0]] * 2:
            assert time.monotonic() < deadline, held
            time.sleep(0.05)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Pair]:
    with network("source", "reader") as (source, reader):
        yield Pair(Side(source, "p", folder), Side(reader, "d", folder), source, reader)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Pair]:
    """One for a test that ends a side of it."""
    with two_hosts(tmp_path) as found:
        yield found


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


DIRECTIONS: dict[str, tuple[Callable[[Pair], None], Callable[[Pair], None]]] = {
    "both": (lambda pair: pair.reader_host.cut(), lambda pair: pair.reader_host.restore()),
    "to the reader": (
        lambda pair: pair.reader_host.deafen(pair.source_host),
        lambda pair: pair.reader_host.hear(pair.source_host),
    ),
    "from the reader": (
        lambda pair: pair.source_host.deafen(pair.reader_host),
        lambda pair: pair.source_host.hear(pair.reader_host),
    ),
}


def in_the_middle(pair: Pair, timeout_s: float, lease_s: float) -> None:
    """The reader has begun to pull 64 pages, 4 MiB, over a link that takes 1.7 seconds for them."""
    name = f"cut {next(_numbers)}"
    _, error, _ = pair.reader("pull", f"before {name}", pair.offer(f"before {name}", 1), 30.0)
    assert error == "", "the two know each other"
    pair.shape("20mbit")
    offer, before = pair.offer(name, 64, lease_s), pair.reader_host.received()
    pair.reader.say("pull", name, offer, timeout_s)
    while pair.reader_host.received() - before < 1 << 20:
        time.sleep(0.005)


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
    time.sleep(seconds)  # the length of the outage, which is what is tried
    restore(pair)
    back = time.monotonic()
    _, error, right = pair.reader.answer()
    record_property("error", error)
    record_property("ended_s", time.monotonic() - back)
    assert right != bool(error)
    pair.assert_nothing_is_held()
    record_property("held_s", time.monotonic() - back)
    _, error, right = pair.reader("pull", "after", pair.offer(f"after {next(_numbers)}", 4), 20.0)
    assert (error, right) == ("", True), "the two go on"


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
    # The process still names the address that it was started with: one that knows the new one takes its place.
    pair = own_pair._replace(source=Side(own_pair.source_host, "p2", tmp_path))
    _, error, right = pair.reader("pull", "again", pair.offer("again", 16), 20.0)
    assert (error, right) == ("", True)
