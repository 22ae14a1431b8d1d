"""The leases that a worker was asked for: each is told of once, and no event of another one counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transfer.connector.metadata import ConnectorMetadata
from transfer.connector.sends import Sends
from transfer.errors import InvalidTransferError
from transfer.pull.replica import LeaseOver, Offered


class Thread:
    """Stands for the transfer thread; the real one is in test_worker."""

    def __init__(self) -> None:
        self.did: list[tuple[object, ...]] = []

    def call_soon(self, method: Callable[..., object], *args: object) -> None:
        self.did.append((method.__name__, *args))


@pytest.fixture
def sends() -> Sends:
    made = Sends()
    made.begin("r", 5)
    return made


def test_a_lease_is_offered_and_then_sent(sends: Sends) -> None:
    sends.on_event(Offered("r", 5, ""))
    assert (sends.offered, sends.sent) == ({"r": ""}, {})
    sends.on_event(LeaseOver("r", 5, "read"))
    assert sends.sent == {"r": "read"}
    sends.check_new(["r"])


def test_a_lease_that_was_not_granted_is_offered_with_the_reason_and_never_sent(sends: Sends) -> None:
    sends.on_event(Offered("r", 5, "slot 1 is taken"))
    sends.on_event(LeaseOver("r", 5, "late"))
    assert (sends.offered, sends.sent) == ({"r": "slot 1 is taken"}, {})


def test_events_of_an_earlier_lease_of_a_request_do_not_count(sends: Sends) -> None:
    for event in (Offered("r", 4, ""), LeaseOver("r", 4, "read"), LeaseOver("unknown", 5, "read")):
        sends.on_event(event)
    assert (sends.offered, sends.sent) == ({}, {})
    with pytest.raises(InvalidTransferError, match="request 'r': its lease 0x5 stands"):
        sends.check_new(["q", "r"])


def test_only_what_stands_is_started_or_ended(sends: Sends) -> None:
    thread = Thread()
    step = ConnectorMetadata(reqs_computed=["r", "x"], reqs_not_processed={"r": "left", "x": "left"})
    sends.go_on(step, thread)
    assert thread.did == [("start_clock", 5), ("revoke", 5, "left")]
