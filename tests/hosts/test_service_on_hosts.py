"""`pagewire serve` on three hosts: links are cut, addresses move, and hosts reboot."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hosts.fleet import HEAD, Fleet, fleet_on_hosts, prompts
from tests.hosts.network import Family

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def one_fleet(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Fleet]:
    with fleet_on_hosts(tmp_path_factory.mktemp("served"), family=family) as found:
        yield found


@pytest.fixture
def fleet(one_fleet: Fleet) -> Fleet:
    """The fleet that all tests of this file share. If an earlier test has broken the fleet, it is repaired first.

    UCX sometimes ends a source if the connection of its reader fails (docs/guides/operations.md). Such an end must fail
    only one test, and not all later tests.
    """
    served = one_fleet.served
    for name, role, host in (("p", "prefill", one_fleet.prefill), ("d", "decode", one_fleet.decode)):
        if served.processes[name].poll() is not None:
            served.join_on(host, role, name)
    served.until_there(1, 1)
    return one_fleet


@pytest.mark.both_families
def test_prompts_are_answered_by_three_hosts(fleet: Fleet, tiny_model: Any) -> None:
    before = fleet.served.get("/fleet")["d"]["pages_pulled"]
    for one in fleet.asked(prompts(6)):
        found = one.result()
        assert found.status == 200
        found.assert_right(tiny_model)
    assert fleet.served.until_nothing_is_held()["d"]["pages_pulled"] >= before + 6 * 18


CUTS: dict[str, tuple[Callable[[Fleet], object], Callable[[Fleet], object]]] = {
    "both": (lambda fleet: fleet.decode.cut(), lambda fleet: fleet.decode.restore()),
    "to decode": (
        lambda fleet: [fleet.decode.deafen(other) for other in (fleet.front, fleet.prefill)],
        lambda fleet: [fleet.decode.hear(other) for other in (fleet.front, fleet.prefill)],
    ),
    "from decode": (
        lambda fleet: [other.deafen(fleet.decode) for other in (fleet.front, fleet.prefill)],
        lambda fleet: [other.hear(fleet.decode) for other in (fleet.front, fleet.prefill)],
    ),
    "prefill": (lambda fleet: fleet.prefill.cut(), lambda fleet: fleet.prefill.restore()),
}


@pytest.mark.parametrize(
    "seconds", [1, pytest.param(10, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("direction", CUTS)
@pytest.mark.parametrize("phase", ["before", "computing", "pulling", "decoding"])
def test_a_link_that_is_cut_costs_no_right_token_and_no_page(
    fleet: Fleet,
    tiny_model: Any,
    phase: str,
    direction: str,
    seconds: int,
    record_property: Callable[[str, object], None],
) -> None:
    """The link is cut when a prompt is in `phase`. With `before`, the prompts are sent while the link is cut."""
    cut, restore = CUTS[direction]
    fleet.shape("4mbit" if phase == "pulling" else "1gbit")  # At this rate 590 KB take more than a second.
    try:
        asked = [] if phase == "before" else fleet.asked_until(phase, HEAD * (3 if phase == "computing" else 1))
        cut(fleet)
        asked += fleet.asked(prompts(2))
        time.sleep(seconds)
    finally:
        restore(fleet)
        fleet.shape("1gbit")
    back = time.monotonic()
    fleet.served.until_there(1, 1)
    record_property("there_s", time.monotonic() - back)
    assert time.monotonic() - back < 15, "TCP alone would retry after longer and longer pauses"
    found = [one.result() for one in asked]
    for one in found:
        one.assert_right(tiny_model)
    fleet.assert_serves(tiny_model)
    record_property("right", sum(one.status == 200 for one in found))
    record_property("held_s", time.monotonic() - back)


@pytest.mark.both_families
def test_hosts_may_reboot_one_after_another(fleet: Fleet, tiny_model: Any) -> None:
    served = fleet.served
    for name, role, host in (("p", "prefill", fleet.prefill), ("d", "decode", fleet.decode)):
        asked = fleet.asked(prompts(4))
        host.kill()
        served.until(lambda: served.get("/health")[role] == 0, f"the end of {name}")  # noqa: B023
        host.restore()
        served.join_on(host, role, name)
        served.until_there(1, 1)
        for one in asked:
            one.result().assert_right(tiny_model)
        fleet.assert_serves(tiny_model)


@pytest.mark.both_families
def test_a_host_of_decode_may_move(fleet: Fleet, tiny_model: Any) -> None:
    """Decode opens all of its connections itself, so it finds the other processes again.

    A connection from the old address is closed when its data has not been acknowledged for 15 s. Until then, a pull
    over this connection fails. The front may reach decode earlier, because it has a connection of its own.
    """
    asked = fleet.asked(prompts(4))
    fleet.decode.move(78)
    moved = time.monotonic()
    for one in asked:
        one.result().assert_right(tiny_model)
    fleet.served.until_there(1, 1)
    while (found := fleet.answered(*prompts(1))).status != 200:
        found.assert_right(tiny_model)
        assert time.monotonic() - moved < 90, found.answer
    fleet.assert_serves(tiny_model)
