"""The pulls of one rank where a real agent cannot be made to do what one day it may. Real ones are in test_replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transfer.errors import AgentError, InvalidTransferError, PullFailedError
from transfer.memory import MemoryType
from transfer.pull.lease import LeaseRef
from transfer.pull.parts import Part
from transfer.pull.pull import Puller
from transfer.pull.pull_state import PullEvent
from transfer.wire.messages import decode_note

LEASE = LeaseRef(0xABCDEF, 2, 9.0)
WORDS_AT = 1 << 20


class Agent:
    """Counts what is done with handles. A test says when each READ ends, and how; a fence then delivers `word`."""

    def __init__(self, puller: Puller) -> None:
        self.puller = puller
        self.word = LEASE.lease_id
        self.posted: list[dict[str, Any]] = []
        self.notes: list[tuple[str, Any]] = []
        self.auto = True
        self.raise_at: dict[int, AgentError] = {}

    def read(self, peer: str, local: Any, remote: Any, note: bytes = b"", kinds: Any = None) -> tuple[int, bool]:
        number = len(self.posted)
        self.posted.append(
            {
                "peer": peer,
                "local": local,
                "remote": remote,
                "note": note,
                "kinds": kinds,
                "state": "PROC",
                "released": 0,
            }
        )
        if number in self.raise_at:
            self.posted[number]["state"] = "refused"
            raise self.raise_at[number]
        return number, False

    def read_word(self, peer: str, local: int, remote: int, note: bytes) -> int:
        return self.read(peer, [(local, 8, 0)], [(remote, 8, 0)], note)[0]

    def end(self, number: int, state: str = "DONE") -> None:
        self.posted[number]["state"] = state

    def done(self, handle: int) -> bool:
        posted = self.posted[handle]
        assert not posted["released"]
        if self.auto and posted["state"] == "PROC":
            posted["state"] = "DONE"
        if posted["state"] == "ERR":
            raise AgentError("it broke", peer_lost=True)
        slot = (int(posted["local"][0][0]) - self.puller.words.ctypes.data) // 8
        if posted["state"] == "DONE" and self.word is not None and 0 <= slot < len(self.puller.words):
            self.puller.words[slot] = self.word
        if posted["state"] == "DONE" and posted["note"]:
            self.notes.append((posted["peer"], decode_note(posted["note"])))
        return posted["state"] == "DONE"

    def release(self, handle: int) -> None:
        self.posted[handle]["released"] += 1

    def notify(self, peer: str, message: bytes) -> None:
        self.notes.append((peer, decode_note(message)))


class StandIn(SimpleNamespace):
    """Stands for a `RemoteEngine`: each is itself alone."""

    __hash__ = object.__hash__


class Rig:
    def __init__(self, ranks: int = 2, slots: int = 8) -> None:
        self.now = 50.0
        self.puller = Puller(("d", 1, 4), slots=slots, clock=lambda: self.now)
        self.agent = Agent(self.puller)
        there = [
            SimpleNamespace(agent_name=f"p/{rank}", memory_type=MemoryType.DRAM, words_addr=WORDS_AT + rank * 4096)
            for rank in range(ranks)
        ]
        self.engine: Any = StandIn(engine_id="p", ranks=there, words=64, failure="", agent=self.agent)

    def open(self, key: str = "r", **options: Any) -> None:
        self.puller.open(key, self.engine, options.get("lease", LEASE), options.get("timeout_s", 100.0))

    def add(self, *parts: Part, key: str = "r", last: bool = True) -> None:
        self.puller.add(key, list(parts), last=last)

    def polled(self, times: int = 4) -> list[PullEvent]:
        for _ in range(times):
            self.puller.poll()
        return list(self.puller.events)

    def said(self, verdict: str) -> list[str]:
        return [peer for peer, note in self.agent.notes if note.verdict == verdict]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def part(rank: int = 0, runs: int = 2, arrived: Any = None) -> Part:
    rows = np.arange(runs * 3, dtype=np.uint64).reshape(runs, 3) + 64
    return Part(rank, rows, rows, 100, arrived)


OK = PullEvent("r", "", safe=True)


def test_data_comes_first_then_the_word_of_each_rank_that_was_read(rig: Rig) -> None:
    rig.open()
    rig.add(part(0), part(1))
    assert rig.polled() == [OK]
    data, fences = rig.agent.posted[:2], rig.agent.posted[2:]
    assert [bool(one["note"]) for one in (*data, *fences)] == [False, False, True, True]
    assert [fence["remote"] for fence in fences] == [[(WORDS_AT + 16, 8, 0)], [(WORDS_AT + 4096 + 16, 8, 0)]]
    assert all(one["released"] == 1 for one in rig.agent.posted)
    assert rig.said("done") == ["p/0", "p/1"]
    assert {(n.lease_id, n.engine_id, n.rank, n.ranks) for _, n in rig.agent.notes} == {(LEASE.lease_id, "d", 1, 4)}


def test_no_fence_while_a_read_is_in_flight_and_no_done_while_more_is_to_come(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1), last=False)
    rig.agent.end(0)
    assert rig.polled() == []
    assert len(rig.agent.posted) == 2
    rig.agent.end(1)
    assert rig.polled() == []
    assert [one["note"] for one in rig.agent.posted[2:]] == [b"", b""]  # these mark what is here as good
    rig.add(part(0))
    rig.agent.end(4)
    assert rig.polled() == []
    assert len(rig.agent.posted) == 5
    rig.agent.end(2)
    rig.agent.end(3)
    rig.polled()
    assert [bool(one["note"]) for one in rig.agent.posted[5:]] == [True, True]


def test_what_a_fence_has_passed_can_be_kept_when_the_rest_fails(rig: Rig) -> None:
    rig.open()
    rig.add(part(0), last=False)
    rig.polled()
    assert rig.puller.passed("r") == 1
    rig.agent.auto = False
    rig.add(part(0), last=False)
    rig.add(part(1), last=False)
    rig.polled()
    rig.puller.fail("r", "no more")
    assert rig.polled() == [PullEvent("r", "no more", safe=False)]
    rig.agent.auto = True
    assert rig.polled()[-1] == PullEvent("r", "no more", safe=True, passed=1)


def test_what_a_fence_refuses_cannot_be_kept(rig: Rig) -> None:
    rig.open()
    rig.add(part(0), last=False)
    rig.polled()
    rig.agent.word = 7
    rig.add(part(0), last=False)
    assert rig.polled()[-1].passed == 1


def test_a_rank_that_is_not_read_from_is_told_on_its_own_after_the_fence(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(1))
    rig.agent.end(0)
    rig.polled()
    assert rig.agent.notes == []
    rig.agent.end(1)
    assert rig.polled() == [OK]
    assert rig.said("done") == ["p/1", "p/0"]


def test_parts_without_runs_are_not_posted(rig: Rig) -> None:
    rig.open()
    rig.add(part(0, runs=0), part(1, runs=0))
    assert rig.polled() == [OK]
    assert rig.agent.posted == []
    assert rig.said("done") == ["p/0", "p/1"]


@pytest.mark.parametrize("word", [0, 1, LEASE.lease_id + 1, None])
def test_a_fence_that_does_not_bring_the_lease_s_id_fails_the_pull(rig: Rig, word: int | None) -> None:
    rig.puller.words[:] = LEASE.lease_id  # left over from other fences; None: a READ that is "done" and brought nothing
    rig.agent.word = word
    rig.open()
    rig.add(part(0), part(1))
    (event,) = [event for event in rig.polled() if event.safe]
    assert event.error.startswith("engine 'p' rank 0 had given the pages away: the lease expired (")
    assert f"it lasts {LEASE.duration_s:g} s without a word of its reader" in event.error
    assert "its lease word 2 holds" in event.error
    assert rig.puller.events[-1] is event


def test_fences_wait_for_each_other_where_words_are_few() -> None:
    rig = Rig(slots=2)
    rig.agent.auto = False
    for key in "ab":
        rig.open(key)
        rig.add(part(0), part(1), key=key)
    for number in range(4):
        rig.agent.end(number)
    rig.polled()
    assert len(rig.agent.posted) == 6
    rig.agent.end(4)
    rig.agent.end(5)
    rig.polled()
    assert [event.key for event in rig.puller.events] == ["a"]
    assert len(rig.agent.posted) == 8
    rig.agent.auto = True
    assert rig.polled()[-1] == PullEvent("b", "", safe=True)


def test_no_handle_is_released_in_flight_and_none_twice(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1), part(0))
    rig.agent.end(1, "ERR")
    events = rig.polled()
    assert [(event.safe, "it broke" in event.error) for event in events] == [(False, True)]
    assert [one["released"] for one in rig.agent.posted] == [0, 1, 0]
    rig.agent.end(0)
    rig.polled()
    assert len(rig.puller.events) == 1
    rig.agent.end(2, "ERR")
    assert [event.safe for event in rig.polled()] == [False, True]
    assert [one["released"] for one in rig.agent.posted] == [1, 1, 1]
    assert rig.said("refused") == ["p/0", "p/1"]
    assert len(rig.agent.posted) == 3  # no fence after a failure


def test_a_post_that_is_refused_stops_the_others_and_waits_for_what_is_in_flight(rig: Rig) -> None:
    rig.agent.auto = False
    rig.agent.raise_at = {1: AgentError("no")}
    rig.open()
    rig.add(part(0), part(1), part(1))
    assert [event.safe for event in rig.polled()] == [False]
    assert len(rig.agent.posted) == 2
    rig.agent.end(0)
    assert [event.safe for event in rig.polled()] == [False, True]
    assert rig.engine.failure == ""  # refused, not lost: the next pull may be taken


class Settled(Part):
    """Takes note of each time it is told that nothing of it is in flight any more."""

    __slots__ = ("times",)

    def settle(self) -> None:
        self.times = getattr(self, "times", 0) + 1


def settled(runs: int = 2, num_bytes: int = 100) -> Settled:
    rows = np.arange(runs * 3, dtype=np.uint64).reshape(runs, 3) + 64
    made = Settled(0, rows, rows, num_bytes)
    made.times = 0
    return made


def test_a_part_is_settled_once_whether_it_could_be_posted_or_not(rig: Rig) -> None:
    """What it reads into may be used again from then on: neither while something is in flight, nor never."""
    rig.agent.auto = False
    rig.agent.raise_at = {1: AgentError("no")}
    rig.open()
    posted, refused, unposted = settled(), settled(), settled()
    rig.add(posted, refused, unposted)
    rig.polled()
    assert (posted.times, refused.times, unposted.times) == (0, 1, 0)
    rig.agent.end(0)
    assert rig.polled()[-1].safe
    assert (posted.times, refused.times, unposted.times) == (1, 1, 0)


def test_of_a_source_that_is_gone_the_reason_says_so_and_what_is_left_to_do(rig: Rig) -> None:
    rig.agent.raise_at = {0: AgentError("posting: NIXL_ERR_REMOTE_DISCONNECT", peer_lost=True)}
    rig.open()
    rig.add(part(0))
    (event,) = rig.polled()
    assert event.error == (
        "reading from engine 'p': its process is gone, so its pages are to be computed, or had elsewhere: posting: "
        "NIXL_ERR_REMOTE_DISCONNECT"
    )
    assert event.safe


def test_a_fence_of_two_ranks_has_passed_when_both_words_match(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1), last=False)
    rig.agent.end(0)
    rig.agent.end(1)
    rig.polled()
    rig.agent.end(2)
    rig.polled()
    assert rig.puller.passed("r") == 0
    rig.agent.word = 7
    rig.agent.end(3)
    (event,) = rig.polled()
    assert "engine 'p' rank 1 had given the pages away" in event.error
    assert event.passed == 0


def test_a_rank_that_was_told_done_is_not_told_refused(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1))
    for number in range(3):
        rig.agent.end(number)
        rig.polled()
    rig.puller.fail("r", "cancelled")
    assert rig.said("done") == ["p/0"]
    assert rig.said("refused") == ["p/1"]


def test_a_fence_that_cannot_be_posted_fails_the_pull_and_keeps_no_word(rig: Rig) -> None:
    rig.agent.raise_at = {3: AgentError("no")}
    rig.open()
    rig.add(part(0), part(1))
    assert rig.polled()[-1].error == "reading from engine 'p': no"
    assert len(rig.puller._free) == 8


def test_a_peer_that_is_lost_takes_no_further_pull(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    rig.agent.end(0, "ERR")
    rig.polled()
    assert rig.engine.failure == "it broke"
    with pytest.raises(PullFailedError, match="request 's': engine 'p' was lost: it broke"):
        rig.open("s")


def test_a_waiting_pull_renews_its_lease_on_every_rank_three_times_a_duration(rig: Rig) -> None:
    rig.open()
    for rig.now in (52.9, 53.0, 55.9, 56.1, 59.2):
        rig.polled()
    assert rig.said("renew") == ["p/0", "p/1"] * 3
    rig.puller.fail("r", "left")
    rig.now = 90.0
    rig.polled()
    assert len(rig.said("renew")) == 6


def test_what_is_waited_for_is_named_when_time_is_up(rig: Rig) -> None:
    rig.agent.auto = False
    for key, parts in (("open", []), ("reading", [part(0), part(0)]), ("fence", [part(1)])):
        rig.open(key, timeout_s=10.0)
        rig.add(*parts, key=key, last=key != "open")
    rig.agent.end(2)
    rig.polled()
    rig.now += 12
    said = {event.key: event.error for event in rig.polled()}
    assert said == {
        "open": "timed out after 12 s, waiting for more pages",
        "reading": "timed out after 12 s, waiting for 2 READs",
        "fence": "timed out after 12 s, waiting for the fence",
    }


def test_a_long_reason_is_cut_for_the_wire_and_whole_in_the_event(rig: Rig) -> None:
    rig.open()
    rig.puller.fail("r", "x" * 3000)
    assert len(rig.puller.events[-1].error) == 3000
    assert {len(note.reason) for _, note in rig.agent.notes} == {200}


def test_only_the_first_reason_counts(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    rig.puller.fail("r", "first")
    rig.puller.fail("r", "second")
    rig.agent.end(0)
    assert {event.error for event in rig.polled()} == {"first"}


def test_nothing_can_be_added_to_what_is_over(rig: Rig) -> None:
    with pytest.raises(PullFailedError, match="request 'r': no such pull"):
        rig.add(part())
    rig.agent.auto = False
    rig.open()
    rig.add(part())
    with pytest.raises(PullFailedError, match="its last part was added before"):
        rig.add(part())
    rig.puller.fail("r", "why")
    with pytest.raises(PullFailedError, match="request 'r': why"):
        rig.add(part())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0.0}, "timeout of 0.0 s"),
        ({"timeout_s": float("nan")}, "timeout of nan s"),
        ({"lease": LEASE._replace(duration_s=float("inf"))}, "lease of inf s"),
        ({"lease": LEASE._replace(duration_s=-1.0)}, "lease of -1.0 s"),
        ({"lease": LEASE._replace(slot=64)}, "slot 64, engine 'p' has 64 slots"),
        ({"lease": LEASE._replace(lease_id=0)}, "lease 0x0 in slot 2"),
    ],
)
def test_a_pull_that_cannot_be_is_refused(rig: Rig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTransferError, match=f"request 'r': .*{message}"):
        rig.open(**options)
    assert len(rig.puller) == 0


def test_what_arrived_may_ask_for_more_before_the_fence_or_fail_the_pull(rig: Rig) -> None:
    seen: list[str] = []

    def again() -> Part:
        seen.append("first")
        return part(1, arrived=lambda: seen.append("second"))

    rig.open()
    rig.add(part(0, arrived=again))
    assert rig.polled() == [OK]
    assert seen == ["first", "second"]
    assert [bool(one["note"]) for one in rig.agent.posted] == [False, False, True, True]

    def bad() -> None:
        raise PullFailedError("page 7 is not what was sent")

    rig.puller.events.clear()
    rig.open("s")
    rig.add(part(0, arrived=bad), key="s")
    assert rig.polled()[-1] == PullEvent("s", "page 7 is not what was sent", safe=True)


def test_what_arrives_after_a_failure_is_not_used(rig: Rig) -> None:
    seen: list[int] = []
    rig.agent.auto = False
    rig.open()
    rig.add(part(0, arrived=lambda: seen.append(0)))
    rig.puller.fail("r", "too late")
    rig.agent.end(0)
    assert rig.polled()[-1].safe
    assert seen == []


def test_an_engine_s_pulls_are_given_up_together_and_no_others(rig: Rig) -> None:
    other = Rig()
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    rig.puller.open("s", other.engine, LEASE, 5.0)
    assert rig.puller.uses(rig.engine)
    rig.puller.fail_engine(rig.engine, "gone")
    assert rig.puller.uses(rig.engine)  # its READ is in flight
    rig.agent.end(0)
    assert [event.key for event in rig.polled()] == ["r", "r"]
    assert not rig.puller.uses(rig.engine)
    assert "s" in rig.puller
    with pytest.raises(PullFailedError, match="engine 'p' was lost: gone"):
        rig.open("t")


def test_what_was_in_flight_of_an_abandoned_engine_is_given_back_once_its_agent_is_gone(rig: Rig) -> None:
    settled: list[int] = []

    class Slab(Part):
        def settle(self) -> None:
            settled.append(self.rank)

    rows = np.ones((2, 3), np.uint64)
    rig.agent.auto = False
    rig.open()
    rig.add(Slab(0, rows, rows, 100))
    rig.open("s")
    rig.add(part(0), part(1), key="s")
    rig.agent.end(1)
    rig.agent.end(2)
    rig.polled()
    assert len(rig.puller._free) == 6
    pulls = rig.puller.abandon(rig.engine)
    assert [one["released"] for one in rig.agent.posted] == [1] * 5
    assert not any(event.safe for event in rig.puller.events)
    assert settled == []
    rig.puller.conclude(pulls)
    assert {event.key for event in rig.puller.events if event.safe} == {"r", "s"}
    assert settled == [0]
    assert len(rig.puller._free) == 8
    assert len(rig.puller) == 0


def test_who_withdraws_a_pull_learns_what_became_of_it_and_no_event_of_it_is_left(rig: Rig) -> None:
    for key, times in (("q", 2), ("r", 1)):
        rig.open(key)
        for _ in range(times):
            rig.add(part(0), key=key, last=False)
            rig.polled()
        rig.puller.fail(key, "lost")
    assert rig.puller.withdraw("r", "late") == (1, True)
    assert [(event.key, event.passed) for event in rig.puller.events] == [("q", 2)]
    rig.open()
    rig.add(part(0), last=False)
    rig.polled()
    assert rig.puller.withdraw("r", "left") == (1, True)
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    assert rig.puller.withdraw("r", "left") == (0, False)
    assert rig.puller.events[-1] == PullEvent("r", "left", safe=False)


def test_telemetry_of_a_pull_adds_up(rig: Rig) -> None:
    rig.open()
    rig.add(part(0, runs=3), last=False)
    rig.now += 2
    rig.add(part(1, runs=4))
    rig.polled()
    (pull,) = rig.puller.ended
    assert (pull.num_bytes, pull.num_runs, pull.total_s) == (200, 7, 2.0)
    assert 0 < pull.post_s < 1


def test_pulls_that_wait_for_further_pages_cost_a_poll_nothing_and_are_renewed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"r{number}" for number in range(50)]
    rig.agent.auto = False
    for key in keys:
        rig.open(key)
        rig.add(part(), key=key, last=False)
    assert rig.puller.is_reading
    rig.agent.auto = True
    for _ in range(20):
        rig.polled()
    assert all(rig.puller.passed(key) == 1 for key in keys)
    moved: list[str] = []
    advance = rig.puller._advance
    monkeypatch.setattr(rig.puller, "_advance", lambda pull: (moved.append(pull.key), advance(pull)))
    rig.polled()
    assert not moved
    assert not rig.puller.is_reading
    for times in (1, 2, 3):
        rig.now += LEASE.duration_s / 3
        rig.polled()
        assert len(rig.said("renew")) == times * 2 * len(keys)
    rig.now += 100.0
    rig.polled()
    assert sorted(event.key for event in rig.puller.events if event.safe) == sorted(keys)
    assert all("timed out" in event.error for event in rig.puller.events)
