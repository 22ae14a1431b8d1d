"""A third host reads the pages of two hosts. The links have unequal speeds, and one of them may be cut."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts.network import Host, network
from tests.hosts.pair import Side

pytestmark = pytest.mark.hosts
PAGES = 192  # Each page has 64 KiB.
_numbers = itertools.count()


class Sources(NamedTuple):
    """Two sources, each on its own host, and a reader."""

    sides: dict[str, Side]
    hosts: dict[str, Host]
    reader: Side
    addresses: dict[str, str]

    def pull(self, *names: str, timeout_s: float = 60.0) -> Any:
        """Pulls pages. Returns the seconds that this took, the error (or ""), whether every byte is right, and the
        number of bytes from each source.
        """
        keys: list[str] = []
        for name in names:
            keys.append(f"{name} {next(_numbers)}")
            _, error, pages = self.reader("ask", keys[-1], PAGES, self.addresses[name], 10.0, f"{name}/0")
            assert (error, pages) == ("", PAGES)
        if len(keys) == 1:
            return self.reader("take", *keys, timeout_s)
        return self.reader("take_from", keys, timeout_s)

    def assert_nothing_is_held(self, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while (held := [one("held")[:3] for one in (*self.sides.values(), self.reader)]) != [[0, 0, 0]] * 3:
            assert time.monotonic() < deadline, held
            time.sleep(0.05)


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    with network("p", "q", "reader") as (p, q, reader):
        hosts = {"p": p, "q": q}
        sides = {name: Side(host, name, tmp_path) for name, host in hosts.items()}
        addresses = {name: side("compute", "theirs", PAGES)[0] for name, side in sides.items()}
        found = Sources(sides, hosts, Side(reader, "d", tmp_path), addresses)
        for name in sides:
            assert found.pull(name)[1:3] == ["", True], "the sources and the reader must be connected"
        yield found


@pytest.mark.parametrize(("fast", "slow"), [("200mbit", "200mbit"), ("1gbit", "100mbit")])
def test_two_sources_are_read_at_the_speed_of_both_links(
    sources: Sources, fast: str, slow: str, record_property: Callable[[str, object], None]
) -> None:
    sources.hosts["p"].shape(fast)
    sources.hosts["q"].shape(slow)
    alone = min(sources.pull("p")[0] for _ in range(3))
    both = [sources.pull("p", "q") for _ in range(4)]
    assert all((error, right) == ("", True) for _, error, right, _ in both)
    record_property("seconds", {"one": alone, "both": [seconds for seconds, *_ in both]})
    record_property("shares", [shares for *_, shares in both])
    fastest = min(both, key=lambda one: one[0])
    assert fastest[0] < (0.65 if fast == slow else 1.1) * alone
    assert fastest[3]["p/0"] > (0.3 if fast == slow else 0.8) * (PAGES << 16)
    sources.assert_nothing_is_held()


def test_a_source_that_loses_power_leaves_its_pages_to_the_other(sources: Sources) -> None:
    for host in sources.hosts.values():
        host.shape("50mbit")
    keys = [f"{name} {next(_numbers)}" for name in sources.sides]
    for key, name in zip(keys, sources.sides, strict=True):
        sources.reader("ask", key, PAGES, sources.addresses[name], 10.0, f"{name}/0")
    sources.reader.say("take_from", keys, 30.0)
    time.sleep(0.5)  # The whole pull takes two seconds.
    sources.hosts["q"].kill()
    _, error, right, _ = sources.reader.answer()
    assert right != bool(error)
    deadline = time.monotonic() + 30
    while sources.sides["p"]("held")[:2] != [0, 0] or sources.reader("held")[:3] != [0, 0, 0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
