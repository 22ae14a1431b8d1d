"""Rare events of SGLang's rooms: reused room numbers, questions at unusual times, and ranks that are late."""

from __future__ import annotations

import time

import pytest

from scheduler_adapters.sglang.leases import Computed
from scheduler_adapters.sglang.rooms import RoomClient, RoomReady, RoomWanted
from tests.scheduler_adapters.sglang.test_rooms import PROMPT, ROOM, TOKENS, Sides, arrived, sides  # noqa: F401
from transfer.wire.allowed_peers import AllowedPeers

TWO_RANKS = pytest.mark.parametrize("sides", [{"ranks": 2}], indirect=True)
ANY_RANKS = pytest.mark.parametrize("sides", [{"ranks": 1}, {"ranks": 2}], indirect=True)


def check_serves(sides: Sides) -> None:  # noqa: F811
    """Serves a request that decode has already asked for, from the request's arrival at prefill to its end."""
    for told in (sides.prefill, sides.decode, *sides.followers_told):
        told.heard.clear()
    sides.here.zero_()
    sides.open()
    sides.check_hears(sides.prefill, "room_wanted")
    sides.place([1, 4, 3])
    sides.compute()
    sides.check_hears(sides.decode, "room_loaded")
    arrived(sides, [1, 4, 3])
    sides.check_hears(sides.prefill, "room_read")
    for told in sides.followers_told:
        sides.check_hears(told, "room_read")
    assert not sides.leases[0]._waiting, "otherwise the room would be leased again"
    close(sides, "done")


def close(sides: Sides, reason: str) -> None:  # noqa: F811
    for lease in reversed(sides.leases):
        lease.close(ROOM, reason)
        assert lease.open_count == 0


def asked(sides: Sides) -> None:  # noqa: F811
    """Makes decode ask again, and waits until prefill has received the question."""
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.until(lambda: ROOM in sides.leases[0]._rooms and not sides.leases[0]._rooms[ROOM].dropped)


def test_a_request_that_decode_has_not_asked_for_is_not_computed(sides: Sides) -> None:  # noqa: F811
    sides.open()
    end = time.monotonic() + 0.1
    sides.until(lambda: time.monotonic() > end)
    assert not sides.prefill.heard


@ANY_RANKS
def test_the_number_of_a_room_that_was_read_is_used_again(sides: Sides) -> None:  # noqa: F811
    for _ in range(2):
        asked(sides)
        check_serves(sides)


@ANY_RANKS
def test_the_number_of_a_room_that_was_dropped_is_used_again(sides: Sides) -> None:  # noqa: F811
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.pulls.give_up(ROOM, "its client went away")
    sides.until(lambda: ROOM in sides.leases[0]._rooms and bool(sides.leases[0]._rooms[ROOM].dropped))
    asked(sides)
    check_serves(sides)


@ANY_RANKS
def test_a_lease_has_ended_when_its_room_is_closed_and_the_number_is_used_again(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    sides.compute()
    sides.until(lambda: sides.pulls._rooms[ROOM].ready is not None)
    close(sides, "aborted")
    for told in (sides.prefill, *sides.followers_told):
        assert told.heard[-1] == "room_failed: the pages were leased and not read: aborted"
    sides.pulls.give_up(ROOM, "gone at prefill")
    sides.until(lambda: not sides.pulls.open_count)
    asked(sides)
    check_serves(sides)


@pytest.mark.parametrize("sides", [{"expect_s": 4.0}], indirect=True)
def test_a_request_that_has_arrived_is_no_longer_expected(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    end = time.monotonic() + 5.0
    sides.until(lambda: time.monotonic() > end)
    check_serves(sides)


@TWO_RANKS
def test_no_rank_leases_pages_that_it_has_not_computed(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    made = Computed([[5, 2, 7]], [0], TOKENS, (b"row",), PROMPT)
    sides.leases[0].offer(ROOM, made)
    end = time.monotonic() + 0.3
    sides.until(lambda: time.monotonic() > end)
    assert sides.pulls._rooms[ROOM].ready is None
    sides.leases[1].offer(ROOM, made)
    sides.until(lambda: sides.pulls._rooms[ROOM].ready is not None)


@TWO_RANKS
def test_a_room_that_only_one_rank_has_computed_can_be_closed_and_its_number_reused(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    sides.leases[0].offer(ROOM, Computed([[5, 2, 7]], [0], TOKENS, (b"row",), PROMPT))
    sides.until(lambda: bool(sides.leases[1]._unsent))
    sides.leases[0].close(ROOM, "aborted")
    sides.until(lambda: not sides.leases[1].open_count)
    sides.check_hears(sides.decode, "room_failed: prefill: aborted")
    sides.leases[0]._failed.clear()
    asked(sides)
    check_serves(sides)


def test_a_decode_rank_that_asks_late_gets_the_answer_at_once(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    sides.compute()
    sides.until(lambda: sides.pulls._rooms[ROOM].ready is not None)
    late, told = RoomClient(None, AllowedPeers()), []
    assert not late.send(sides.address, RoomWanted(room=ROOM))
    sides.until(lambda: bool(told.extend(late.received()) or told))
    late.close()
    assert [type(message) for message in told] == [RoomReady]


def test_a_room_that_decode_gives_up_before_it_has_pages_is_released(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    sides.compute()
    sides.until(lambda: sides.pulls._rooms[ROOM].is_held)
    sides.pulls.give_up(ROOM, "its client went away")
    assert sides.pulls.is_over(ROOM), "nothing was read"
    sides.until(lambda: not sides.pulls.open_count)
    sides.check_hears(sides.prefill, "not read")


def test_a_reason_of_any_length_can_be_told(sides: Sides) -> None:  # noqa: F811
    asked(sides)
    sides.open()
    sides.leases[0].close(ROOM, "x" * 5000)
    sides.check_hears(sides.decode, "room_failed: prefill: xxx")
