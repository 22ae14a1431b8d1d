"""A relay between the hosts simulates distant hosts, and links that lose frames or pause."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hosts.fleet import Fleet, fleet_on_hosts, prompts
from tests.hosts.network import Cable, Host
from tests.hosts.pair import Pair, two_hosts

pytestmark = pytest.mark.hosts
_numbers = itertools.count()
DELAYS_S = (0.02, 0.1)
PAUSES_S = (0.2, 0.5, 1.0, 2.0)


def cable(host: Host) -> Cable:
    """Returns the relay of a host, with delay and loss set to zero."""
    assert host.relay is not None
    host.relay("delay", 0.0)
    host.relay("lose", 0.0, 0)
    return host.relay


@pytest.fixture(scope="module")
def far_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("far"), relayed=True) as found:
        yield found


@pytest.fixture(scope="module")
def far_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_on_hosts(tmp_path_factory.mktemp("served"), relayed=True) as found:
        yield found


def pulled(pair: Pair, pages: int, timeout_s: float = 30.0) -> list[Any]:
    name = f"pulled {next(_numbers)}"
    return pair.reader("pull", name, pair.offer(name, pages), timeout_s)


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_pages_arrive_over_a_link_with_a_long_delay(
    far_pair: Pair, delay_s: float, record_property: Callable[[str, object], None]
) -> None:
    relay = cable(far_pair.source_host)
    relay("delay", delay_s)
    for pages in (1, 16, 64):
        seconds, error, right = pulled(far_pair, pages)
        assert (error, right) == ("", True)
        assert seconds > 2 * delay_s, "the fence follows the data"
        record_property(f"{pages}_pages_s", seconds)
    (address,) = far_pair.source("compute", f"lent {delay_s}", 16)
    seconds, error, pages = far_pair.reader("ask", f"lent {delay_s}", 16, address, 20.0)
    assert (error, pages) == ("", 16)
    record_property("asked_s", seconds)
    assert far_pair.reader("take", f"lent {delay_s}", 20.0)[1:] == ["", True]
    far_pair.assert_nothing_is_held()


@pytest.mark.parametrize("share", [0.01, pytest.param(0.05, marks=pytest.mark.long)])
def test_a_link_that_loses_frames_costs_only_time(
    far_pair: Pair, share: float, record_property: Callable[[str, object], None]
) -> None:
    relay = cable(far_pair.source_host)
    before = relay("counted").get("lost", 0)
    relay("lose", share, 1)
    for pages in (1, 16, 64):
        seconds, error, right = pulled(far_pair, pages)
        record_property(f"{pages}_pages_s", seconds)
        assert (error, right) == ("", True)
    assert relay("counted")["lost"] > before, "the relay must have lost frames"
    relay("lose", 0.0, 0)
    far_pair.assert_nothing_is_held()


@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_a_link_that_pauses_costs_only_time(
    far_pair: Pair, pause_s: float, record_property: Callable[[str, object], None]
) -> None:
    relay = cable(far_pair.source_host)
    relay("delay", 0.005)  # With this delay, 4 MiB take several steps.
    name = f"paused {next(_numbers)}"
    offer = far_pair.offer(name, 64)
    far_pair.until_received(1 << 18, lambda: far_pair.reader.say("pull", name, offer, 30.0))
    relay("pause", pause_s)
    seconds, error, right = far_pair.reader.answer()
    record_property("seconds", seconds)
    assert (error, right) == ("", True)
    assert seconds > pause_s, "the pull must have been under way during the pause"
    far_pair.assert_nothing_is_held()


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_a_fleet_whose_hosts_are_far_apart_gives_the_same_tokens(
    far_fleet: Fleet, tiny_model: Any, delay_s: float, record_property: Callable[[str, object], None]
) -> None:
    relay, before = cable(far_fleet.front), far_fleet.served.get("/fleet")["d"]["pages_pulled"]
    relay("delay", delay_s)
    begin = time.monotonic()
    for one in far_fleet.asked(prompts(4)):
        assert one.result().status == 200, one.result().answer
        one.result().assert_right(tiny_model)
    record_property("answered_s", time.monotonic() - begin)
    far_fleet.assert_serves(tiny_model)
    assert far_fleet.served.get("/fleet")["d"]["pages_pulled"] >= before + 5 * 18


@pytest.mark.parametrize("pause_s", [0.2, *(pytest.param(one, marks=pytest.mark.long) for one in (0.5, 1.0)), 2.0])
def test_a_fleet_whose_network_stands_still_gives_the_same_tokens_or_says_why(
    far_fleet: Fleet, tiny_model: Any, pause_s: float, record_property: Callable[[str, object], None]
) -> None:
    relay = cable(far_fleet.front)
    relay("delay", 0.002)
    asked = far_fleet.asked(prompts(4))
    for at in range(5):  # A pause may come in any phase of a request.
        assert at or not all(one.done() for one in asked)
        time.sleep(0.1)
        relay("pause", pause_s)
        time.sleep(pause_s)
    found = [one.result() for one in asked]
    for one in found:
        one.assert_right(tiny_model)
    record_property("right", sum(one.status == 200 for one in found))
    far_fleet.served.until_there(1, 1)
    far_fleet.assert_serves(tiny_model)
