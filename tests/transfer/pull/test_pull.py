"""Pulls of one rank in situations that cannot be forced with a real agent. `test_replica` has the tests with real
agents.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transfer.errors import AgentError, InvalidTransferError, PullFailedError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.pull import pull as pulls
from transfer.pull.lease import LeaseRef
from transfer.pull.parts import Part
from transfer.pull.pull import Puller
from transfer.pull.pull_state import PullEvent, PullTimes, RankPull, how_ended
from transfer.wire.messages import decode_note

LEASE = LeaseRef(0xABCDEF, 2, 9.0)
WORDS_AT = 1 << 20


class Agent:
    """A simulated agent that counts the uses of handles.

    The test decides when and how each READ ends. A fence delivers `word`.
    """

    def __init__(self, puller: Puller) -> None:
        self.puller = puller
        self.word: int | None = LEASE.lease_id
        self.posted: list[dict[str, Any]] = []
        self.notes: list[tuple[str, Any]] = []
        self.auto = True
        self.raise_at: dict[int, AgentError] = {}
        self.at_once: set[int] = set()  # The numbers of the posted transfers that end as soon as they are posted.
        self.release_fails: AgentError | None = None

    def read(self, peer: str, local: Any, remote: Any, kinds: Any = None, note: bytes = b"") -> int | None:
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
        if number in self.at_once:
            self.end(number)
            self.done(number)
        return None if number in self.at_once else number

    def read_word(self, peer: str, local: int, remote: int, note: bytes) -> int | None:
        return self.read(peer, [(local, 8, 0)], [(remote, 8, 0)], None, note)

    def end(self, number: int, state: str = "DONE") -> None:
        self.posted[number]["state"] = state

    def done(self, handle: int) -> bool:
        posted = self.posted[handle]
        assert not posted["released"]
        if self.auto and posted["state"] == "PROC":
            posted["state"] = "DONE"
        if posted["state"] == "ERR":
            raise AgentError("it broke", peer_lost=True)
        word_idx = (int(posted["local"][0][0]) - self.puller.words.ctypes.data) // 8
        if posted["state"] == "DONE" and self.word is not None and 0 <= word_idx < len(self.puller.words):
            self.puller.words[word_idx] = self.word
        if posted["state"] == "DONE" and posted["note"]:
            self.notes.append((posted["peer"], decode_note(posted["note"])))
        return posted["state"] == "DONE"

    def release(self, handle: int) -> None:
        self.posted[handle]["released"] += 1
        if self.release_fails:
            raise self.release_fails

    def notify(self, peer: str, message: bytes) -> None:
        self.notes.append((peer, decode_note(message)))


class StandIn(SimpleNamespace):
    """A substitute for a `RemoteEngine`. It is equal to no other object."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


class Rig:
    def __init__(self, ranks: int = 2, words: int = 8) -> None:
        self.now = 50.0
        self.puller = Puller(("d", 1, 4), words=words, clock=lambda: self.now)
        self.agent = Agent(self.puller)
        there = [
            SimpleNamespace(agent_name=f"p/{rank}", memory_type=MemoryType.DRAM, words_addr=WORDS_AT + rank * 4096)
            for rank in range(ranks)
        ]
        self.engine: Any = StandIn(engine_id="p", ranks=there, words=64, failure=None, agent=self.agent)

    def open(self, key: str = "r", **options: Any) -> RankPull:
        return self.puller.open(key, self.engine, options.get("lease", LEASE), options.get("timeout_s", 100.0))

    def add(self, *parts: Part, key: str = "r", last: bool = True) -> None:
        pull = self.puller._pulls.get(key)
        assert pull is not None
        self.puller.add(pull, list(parts), last=last)

    def fail(self, key: str, failure: Failure) -> None:
        """Fails the pull with this key, if it is open."""
        if (pull := self.puller._pulls.get(key)) is not None:
            self.puller.fail(pull, failure)

    def passed(self, key: str) -> int:
        pull = self.puller._pulls.get(key)
        return 0 if pull is None else pull.passed

    def polled(self, times: int = 4) -> list[PullEvent]:
        for _ in range(times):
            self.puller.poll()
        return list(self.puller.events)

    def said(self, verdict: str) -> list[str]:
        return [peer for peer, note in self.agent.notes if note.verdict == verdict]


@pytest.fixture(autouse=True)
def posting_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes 0.1 us.

    A poll that has posted for too long goes on in the next poll. On a busy machine, any poll may take that long.
    """
    ticks = itertools.count(1)
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-7, monotonic=time.monotonic)
    monkeypatch.setattr(pulls, "time", clock)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def part(rank: int = 0, runs: int = 2, arrived: Any = None) -> Part:
    rows = np.arange(runs * 3, dtype=np.uint64).reshape(runs, 3) + 64
    return Part(rank, rows, rows, 100, arrived)


OK = PullEvent("r", "", safe=True)


def why(text: str, kind: FailureKind = FailureKind.OTHER) -> Failure:
    return Failure(kind, text)


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
    # A notification would promise the source that the data is good.
    assert [one["note"] for one in rig.agent.posted[2:]] == [b"", b""]
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
    assert rig.passed("r") == 1
    rig.agent.auto = False
    rig.add(part(0), last=False)
    rig.add(part(1), last=False)
    rig.polled()
    rig.fail("r", why("no more"))
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


def test_a_rank_that_is_not_read_from_is_notified_separately_after_the_fence(rig: Rig) -> None:
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
    # Earlier fences have left the expected id in every word_idx. With `None`, a READ ends as "done" but writes no data.
    rig.puller.words[:] = LEASE.lease_id
    rig.agent.word = word
    rig.open()
    rig.add(part(0), part(1))
    (event,) = [event for event in rig.polled() if event.safe]
    assert event.error.startswith("engine 'p' rank 0 no longer held the pages: the lease expired (")
    assert f"it lasts {LEASE.duration_s:g} s unless its reader renews it" in event.error
    assert "its lease word 2 holds" in event.error
    assert rig.puller.events[-1] is event


def test_fences_wait_for_each_other_if_there_are_too_few_words() -> None:
    rig = Rig(words=2)
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


def test_reads_that_do_not_end_at_once_are_counted(rig: Rig) -> None:
    # Transfer 0 is a READ of pages. Transfer 3 is the fence on one rank.
    rig.agent.auto, rig.agent.at_once = False, {0, 3}
    rig.open()
    rig.add(part(0), part(1))
    assert rig.puller.num_posted == 1
    rig.agent.end(1)
    rig.puller.poll()
    assert rig.puller.num_posted == 2
    rig.agent.end(2)
    assert rig.polled() == [OK]


def test_a_fence_of_two_ranks_waits_if_only_one_word_is_free() -> None:
    rig = Rig(words=3)
    rig.agent.auto = False
    for key in "ab":
        rig.open(key)
        rig.add(part(0), part(1), key=key)
    for number in range(4):
        rig.agent.end(number)
    rig.polled()
    assert len(rig.agent.posted) == 6, "four READs, and the fence of two words: one is left, the other pull needs two"
    assert len(rig.puller._free) == 1
    rig.agent.auto = True
    assert [(event.key, event.error, event.safe) for event in rig.polled()] == [("a", "", True), ("b", "", True)]
    assert len(rig.puller._free) == 3


@pytest.mark.parametrize("at_once", [{0, 1}, {0}, set[int]()])
def test_a_fence_without_data_does_not_pass_because_of_a_word_left_over_from_an_earlier_pull(at_once: set[int]) -> None:
    """Before the pull, the word already holds the lease's id from another fence. The fence must fail, however many
    transfers end as soon as they are posted.
    """
    rig = Rig(ranks=1)
    rig.puller.words[:] = LEASE.lease_id
    rig.agent.at_once, rig.agent.word = at_once, None
    assert isinstance(rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, part()), RankPull)
    (event,) = rig.polled()
    assert event.safe
    assert (
        f"rank 0 no longer held the pages: the lease {how_ended(LEASE)}: its lease word 2 holds 0x0 instead"
        in event.error
    )
    assert len(rig.puller._free) == 8


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
    assert len(rig.agent.posted) == 3  # After a failure the pull posts no fence.


def test_a_post_that_is_refused_stops_the_others_and_waits_for_what_is_in_flight(rig: Rig) -> None:
    rig.agent.auto = False
    rig.agent.raise_at = {1: AgentError("no")}
    rig.open()
    rig.add(part(0), part(1), part(1))
    assert [event.safe for event in rig.polled()] == [False]
    assert len(rig.agent.posted) == 2
    rig.agent.end(0)
    assert [event.safe for event in rig.polled()] == [False, True]
    # The pull was refused, but the engine is still usable, so the next pull may succeed.
    assert rig.engine.failure is None


class Settled(Part):
    """A part that counts the calls of `settle`. Such a call says that none of the part's READs is in flight any
    more.
    """

    __slots__ = ("times",)

    def settle(self) -> None:
        self.times = getattr(self, "times", 0) + 1


def settled(runs: int = 2, num_bytes: int = 100) -> Settled:
    rows = np.arange(runs * 3, dtype=np.uint64).reshape(runs, 3) + 64
    made = Settled(0, rows, rows, num_bytes)
    made.times = 0
    return made


def test_a_part_is_settled_exactly_once_whether_it_was_posted_or_refused(rig: Rig) -> None:
    """The destination pages of a settled part may be reused. A part must therefore not be settled while its READ is in
    flight, and must be settled in the end.
    """
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


def test_if_a_source_is_gone_the_reason_says_so_and_what_can_be_done(rig: Rig) -> None:
    rig.agent.raise_at = {0: AgentError("posting: NIXL_ERR_REMOTE_DISCONNECT", peer_lost=True)}
    rig.open()
    rig.add(part(0))
    (event,) = rig.polled()
    assert event.error == (
        "reading from engine 'p': its process is gone, or has moved or freed its pages; compute the prompt or pull it "
        "from another engine: posting: NIXL_ERR_REMOTE_DISCONNECT"
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
    assert rig.passed("r") == 0
    rig.agent.word = 7
    rig.agent.end(3)
    (event,) = rig.polled()
    assert "engine 'p' rank 1 no longer held the pages" in event.error
    assert event.passed == 0


def test_a_rank_that_was_sent_done_is_not_sent_refused(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1))
    for number in range(3):
        rig.agent.end(number)
        rig.polled()
    rig.fail("r", why("cancelled"))
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
    assert rig.engine.failure == why("it broke", FailureKind.SOURCE_GONE)
    with pytest.raises(PullFailedError, match="request 's': engine 'p' was lost: it broke"):
        rig.open("s")


def test_a_waiting_pull_renews_its_lease_on_every_rank_three_times_a_duration(rig: Rig) -> None:
    rig.open()
    for rig.now in (52.9, 53.0, 55.9, 56.1, 59.2):
        rig.polled()
    assert rig.said("renew") == ["p/0", "p/1"] * 3
    rig.fail("r", why("left"))
    rig.now = 90.0
    rig.polled()
    assert len(rig.said("renew")) == 6


def test_a_pull_that_times_out_names_what_it_was_waiting_for(rig: Rig) -> None:
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
    rig.fail("r", why("x" * 3000))
    assert len(rig.puller.events[-1].error) == 3000
    assert {len(note.reason) for _, note in rig.agent.notes} == {200}


def test_only_the_first_reason_counts(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    rig.fail("r", why("first"))
    rig.fail("r", why("second"))
    rig.agent.end(0)
    assert {event.error for event in rig.polled()} == {"first"}


def test_nothing_can_be_added_to_a_pull_that_is_over(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part())
    with pytest.raises(PullFailedError, match="its last part was already added"):
        rig.add(part())
    rig.fail("r", why("why"))
    with pytest.raises(PullFailedError, match="request 'r': why"):
        rig.add(part())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0.0}, "its timeout is 0.0 s"),
        ({"timeout_s": float("nan")}, "its timeout is nan s"),
        ({"lease": LEASE._replace(duration_s=float("inf"))}, "its lease lasts inf s"),
        ({"lease": LEASE._replace(duration_s=-1.0)}, "its lease lasts -1.0 s"),
        ({"lease": LEASE._replace(word_idx=64)}, "word 64 is invalid: .* engine 'p' has 64 words"),
        ({"lease": LEASE._replace(lease_id=0)}, "lease 0x0 in word 2"),
    ],
)
def test_a_pull_that_cannot_be_is_refused(rig: Rig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTransferError, match=f"request 'r': .*{message}"):
        rig.open(**options)
    assert len(rig.puller) == 0


def test_a_part_that_has_arrived_may_request_further_parts_or_fail_the_pull(rig: Rig) -> None:
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


def test_a_part_that_arrives_after_a_failure_is_not_used(rig: Rig) -> None:
    seen: list[int] = []
    rig.agent.auto = False
    rig.open()
    rig.add(part(0, arrived=lambda: seen.append(0)))
    rig.fail("r", why("too late"))
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
    rig.puller.fail_engine(rig.engine, why("gone"))
    assert rig.puller.uses(rig.engine)  # The READ of this part is still in flight.
    rig.agent.end(0)
    assert [event.key for event in rig.polled()] == ["r", "r"]
    assert not rig.puller.uses(rig.engine)
    assert rig.puller._pulls.get("s") is not None
    with pytest.raises(PullFailedError, match="engine 'p' was lost: gone"):
        rig.open("t")


def test_pages_in_flight_from_an_abandoned_engine_are_given_back_once_its_agent_is_gone(rig: Rig) -> None:
    settled: list[int] = []

    class Buffered(Part):
        def settle(self) -> None:
            settled.append(self.rank)

    rows = np.ones((2, 3), np.uint64)
    rig.agent.auto = False
    rig.open()
    rig.add(Buffered(0, rows, rows, 100))
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


def test_withdrawing_a_pull_returns_its_result_and_leaves_no_event(rig: Rig) -> None:
    for key, times in (("q", 2), ("r", 1)):
        pull = rig.open(key)
        for _ in range(times):
            rig.add(part(0), key=key, last=False)
            rig.polled()
        rig.fail(key, why("lost"))
    rig.puller.withdraw(pull, why("late"))
    assert (pull.passed, pull.is_over, pull.error) == (1, True, why("lost"))
    assert [(event.key, event.passed) for event in rig.puller.events] == [("q", 2)]
    pull = rig.open()
    rig.add(part(0), last=False)
    rig.polled()
    rig.puller.withdraw(pull, why("left"))
    assert (pull.passed, pull.is_over, pull.error) == (1, True, why("left"))
    assert [event.key for event in rig.puller.events] == ["q"]
    rig.agent.auto = False
    pull = rig.open()
    rig.add(part(0))
    rig.puller.withdraw(pull, why("left"))
    assert (pull.passed, pull.is_over) == (0, False)
    assert rig.puller.events[-1] == PullEvent("r", "left", safe=False)


def test_the_telemetry_of_a_pull_is_consistent(rig: Rig) -> None:
    rig.open()
    rig.add(part(0, runs=3), last=False)
    rig.now += 2
    rig.add(part(1, runs=4))
    rig.polled()
    (pull,) = rig.puller.ended
    assert (pull.num_bytes, pull.num_runs, pull.total_s) == (200, 7, 2.0)
    assert 0 < pull.post_s < 1


def test_pulls_that_wait_for_further_pages_are_not_polled_and_their_leases_are_renewed(
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
    assert all(rig.passed(key) == 1 for key in keys)
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


@pytest.mark.parametrize("timed", [True, False])
def test_a_pull_that_ends_as_it_is_posted_has_one_event_and_its_figures(timed: bool) -> None:
    rig = Rig(ranks=1)
    rig.agent.at_once = {0, 1}
    rig.puller.timed = timed
    rig.engine.agent = rig.agent
    asked = part(runs=3)
    event = rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, asked)
    assert isinstance(event, PullEvent)
    assert (event.key, event.error, event.safe, event.passed) == ("r", "", True, 0)
    assert (event.times is not None) == timed
    if event.times is not None:
        assert 50.0 <= event.times.fence_at <= 51.0
        assert event.times[1] == 50.0
    assert not rig.puller.events
    assert (len(rig.puller), len(rig.puller._free)) == (0, 8)
    (figures,) = rig.puller.ended
    assert (figures.num_bytes, figures.num_runs, figures.total_s) == (100, 3, 0.0)
    assert 0 < figures.post_s < 1
    read, fence = rig.agent.posted
    assert read["local"] is asked.local
    assert (fence["remote"], read["kinds"]) == ([(WORDS_AT + 8 * LEASE.word_idx, 8, 0)], (MemoryType.DRAM,) * 2)
    assert rig.said("done") == ["p/0"]
    with pytest.raises(InvalidTransferError, match="0 s"):
        rig.puller.pull_at_once("s", rig.engine, LEASE, 0.0, asked)


@pytest.mark.parametrize("ended", [{0}, {1}, set()])
def test_a_pull_that_does_not_end_as_it_is_posted_continues_like_any_other(ended: set[int]) -> None:
    """When the call returns, the READ of the pages or the later fence is still in flight."""
    rig = Rig(ranks=1)
    rig.agent.auto, rig.agent.at_once = False, ended
    assert isinstance(rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, part()), RankPull)
    assert rig.polled() == []
    assert rig.puller.is_reading
    for number in range(2):
        if number < len(rig.agent.posted):
            rig.agent.end(number)
            rig.polled()
    assert [(event.key, event.error, event.safe) for event in rig.polled()] == [("r", "", True)]
    assert (len(rig.puller), len(rig.puller._free)) == (0, 8)
    assert [one["released"] for one in rig.agent.posted] == [0 if number in ended else 1 for number in range(2)]
    (figures,) = rig.puller.ended
    assert (figures.num_bytes, figures.num_runs) == (100, 2)
    assert rig.said("done") == ["p/0"]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_pull_that_cannot_be_posted_at_all_fails_and_keeps_no_word(refused: int) -> None:
    rig = Rig(ranks=1)
    rig.agent.at_once, rig.agent.raise_at = {0}, {refused: AgentError("no such address")}
    assert isinstance(rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, part()), RankPull)
    (event,) = rig.polled()
    assert (event.key, event.safe) == ("r", True)
    assert "reading from engine 'p': no such address" in event.error
    assert (len(rig.puller), len(rig.puller._free)) == (0, 8)
    assert not rig.puller.ended


def test_a_fence_whose_word_comes_later_does_not_hold_up_the_one_behind_it(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1))
    rig.agent.end(0)
    rig.agent.end(1)
    rig.polled()
    first, second = 2, 3
    rig.agent.end(second)
    assert rig.polled() == []
    assert [one["released"] for one in rig.agent.posted] == [1, 1, 0, 1]
    rig.agent.end(first, "ERR")
    (event,) = rig.polled()
    assert event.safe
    assert "it broke" in event.error
    assert rig.said("refused") == ["p/0"]  # The second source rank got "done".
    assert len(rig.puller._free) == 8


def test_if_two_fences_fail_both_words_are_given_back_and_the_first_reason_stays(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), part(1))
    for number in (0, 1):
        rig.agent.end(number)
    rig.polled()
    rig.agent.end(2, "ERR")
    rig.agent.end(3, "ERR")
    events = rig.polled(1)
    assert [event.safe for event in events] == [False, True]
    assert len({event.error for event in events}) == 1
    assert len(rig.puller._free) == 8


def test_pulls_that_stay_stuck_name_their_engine_once_and_others_do_not(rig: Rig) -> None:
    rig.agent.auto = False
    for key in "ab":
        rig.open(key)
        rig.add(part(0), key=key)
    rig.now += 3.0
    assert rig.puller.stuck(1.0) == []  # The data of these READs may still arrive.
    rig.fail("a", why("late"))
    rig.fail("b", why("late"))
    assert rig.puller.stuck(0.0) == []  # A pull counts as stuck only some time after it has failed.
    rig.now += 2.0
    assert rig.puller.stuck(2.0) == []
    assert rig.puller.stuck(1.5) == [rig.engine]
    rig.agent.end(0)
    rig.agent.end(1)
    rig.polled()
    assert rig.puller.stuck(0.0) == []


def test_an_abandoned_engine_leaves_the_pulls_of_others_and_handles_that_cannot_be_released(rig: Rig) -> None:
    other = Rig()
    other.agent.puller = rig.puller
    other.agent.auto = rig.agent.auto = False
    rig.agent.release_fails = AgentError("the agent is gone")
    rig.open()
    rig.add(part(0))
    rig.puller.open("s", other.engine, LEASE, 90.0)
    rig.add(part(0), key="s")
    pulls = rig.puller.abandon(rig.engine)
    assert [pull.key for pull in pulls] == ["r"]
    rig.puller.conclude(pulls)
    assert [(event.key, event.safe) for event in rig.puller.events] == [("r", False), ("r", True)]
    assert other.agent.posted[0]["released"] == 0
    other.agent.auto = True
    assert rig.polled()[-1] == PullEvent("s", "", safe=True)


def long_part(runs: int, arrived: Any = None, length: int = 1 << 20) -> Settled:
    """Returns a part that takes several transfers. It has `runs` runs of a MiB, each at its own address."""
    rows = np.zeros((runs, 3), np.uint64)
    rows[:, 0], rows[:, 1] = np.arange(runs) * length, length
    made = Settled(0, rows, rows.copy() + np.array([1 << 40, 0, 0], np.uint64), runs * length, arrived)
    made.times = 0
    return made


def test_a_part_of_many_transfers_is_used_when_all_of_them_have_arrived(rig: Rig) -> None:
    seen: list[int] = []
    rig.agent.auto = False
    rig.open()
    asked = long_part(40, lambda: seen.append(len(rig.agent.posted)))
    rig.add(asked)
    rig.polled()
    cuts = [len(one["local"]) for one in rig.agent.posted]
    assert cuts == [16, 16, 8]
    assert np.array_equal(np.concatenate([one["local"] for one in rig.agent.posted]), asked.local)
    assert np.array_equal(np.concatenate([one["remote"] for one in rig.agent.posted]), asked.remote)
    for number in (2, 0):
        rig.agent.end(number)
        rig.polled()
        assert (seen, asked.times) == ([], 0)
    rig.agent.end(1)
    rig.polled()
    assert (seen, asked.times) == ([3], 1)
    assert len(rig.agent.posted) == 4  # the fence


def test_a_part_with_a_failed_transfer_is_settled_when_its_other_transfers_have_ended(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    asked = long_part(40)
    rig.add(asked)
    rig.polled()
    rig.agent.end(1, "ERR")
    rig.polled()
    rig.agent.end(0)
    assert not rig.polled()[-1].safe
    assert asked.times == 0
    rig.agent.end(2)
    assert rig.polled()[-1].safe
    assert asked.times == 1


def test_a_pull_has_at_most_eight_transfers_in_flight_one_of_them_in_nixls_thread(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(long_part(1000))
    rig.polled()
    assert [len(one["local"]) for one in rig.agent.posted] == [128, *[16] * 7]
    rig.open("s")
    rig.add(long_part(1000), key="s")
    # Only 16 runs are posted, because NIXL's thread is still busy with earlier runs.
    assert len(rig.agent.posted[8]["local"]) == 16
    rig.agent.end(1)
    rig.polled(2)
    assert [len(one["local"]) for one in rig.agent.posted[16:]] == [16]
    rig.agent.end(0)
    rig.polled(2)
    assert [len(one["local"]) for one in rig.agent.posted[17:]] == [128]


def test_transfers_that_end_as_they_are_posted_are_released_once_and_posting_stops_after_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.agent.auto, rig.agent.at_once = False, set(range(100))
    seconds = iter(np.arange(0.0, 1.0, 2e-4))
    monkeypatch.setattr("transfer.pull.pull.time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    rig.open()
    rig.add(long_part(160))
    assert len(rig.agent.posted) == 2  # Each post takes 0.2 ms. After 0.3 ms no post begins.
    assert not any(one["released"] for one in rig.agent.posted), "nothing is left to release"
    assert rig.puller.is_copying
    rig.polled(1)
    assert len(rig.agent.posted) == 4
    assert rig.polled(3) == [PullEvent("r", "", safe=True)]
    assert not rig.puller.is_copying
    assert len(rig.agent.posted) == 11
    assert rig.puller.ended[0].num_runs == 160


def test_a_half_posted_part_of_a_failed_pull_is_settled_when_its_posted_transfers_have_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.agent.auto = False
    rig.open()
    moving = long_part(1000)  # The part has more runs than may be in flight at a time.
    rig.add(moving)
    rig.fail("r", why("late"))
    assert (moving.times, rig.puller.events[-1].safe) == (0, False)
    for number in range(8):
        assert moving.times == 0
        rig.agent.end(number)
        rig.polled(1)
    assert (moving.times, rig.puller.events[-1].safe) == (1, True)
    # Each transfer of this part ends as soon as it is posted. Nevertheless, the pull stops posting the part when the
    # time for posts is over.
    rig.agent.at_once = {8, 9}
    seconds = iter(np.arange(0.0, 1.0, 2e-4))
    monkeypatch.setattr("transfer.pull.pull.time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    rig.open("s")
    resting = long_part(100)
    rig.add(resting, key="s")
    assert (resting.posted, resting.in_flight, resting.times) == (32, 0, 0)
    rig.fail("s", why("late"))
    assert resting.times == 1
    assert rig.puller.events[-1] == PullEvent("s", "late", safe=True)


class Waits(Part):
    """A part that can be posted only after the test has permitted it."""

    __slots__ = ("asked", "ready")

    def is_ready(self) -> bool:
        self.asked += 1
        return self.ready


def test_a_part_is_posted_when_it_is_ready_and_not_asked_again_while_it_is_read(rig: Rig) -> None:
    rows = np.zeros((40, 3), np.uint64)
    rows[:, 1] = 1 << 20
    waits = Waits(0, rows, rows, 40 << 20)
    waits.asked, waits.ready = 0, False
    rig.agent.auto = False
    rig.open()
    rig.add(waits)
    assert rig.polled() == []
    assert (waits.asked, rig.agent.posted) == (5, [])
    assert rig.puller.is_reading
    waits.ready = True
    rig.polled()
    assert (waits.asked, len(rig.agent.posted)) == (6, 3)


def test_an_engine_that_failed_keeps_its_first_reason_and_a_renewal_comes_at_a_third(rig: Rig) -> None:
    rig.engine.failure = why("its process is gone")
    rig.puller.fail_engine(rig.engine, why("silent"))
    assert rig.engine.failure == why("its process is gone")
    other = Rig()
    other.open()
    other.now += LEASE.duration_s / 3 - 0.01
    other.polled()
    assert other.said("renew") == []
    other.now += 0.02
    other.polled()
    assert other.said("renew") == ["p/0", "p/1"]


# ---- times of a pull


def test_a_deadline_before_the_first_renewal_is_kept(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open("opened", timeout_s=1.0)
    one = Rig(ranks=1)
    one.agent.auto = False
    assert isinstance(one.puller.pull_at_once("at once", one.engine, LEASE, 1.0, part()), RankPull)
    for each in (rig, one):
        each.now += 0.99
        assert each.polled() == []
        each.now += 0.02
        assert "timed out after 1.01 s" in each.polled()[0].error
    assert "waiting for 1 READs" in one.puller.events[0].error


def test_a_lease_is_renewed_each_third_of_its_time_and_never_for_a_pull_that_has_failed(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0))
    told: list[float] = []
    for _ in range(40):
        rig.now += 0.25
        before = len(rig.said("renew"))
        rig.polled()
        if len(rig.said("renew")) > before:
            told.append(rig.now - 50.0)
    assert told == [3.0, 6.0, 9.0]
    rig.fail("r", why("enough"))
    rig.now += 9.0
    rig.polled()
    assert len(rig.said("renew")) == 2 * len(told)


def test_the_times_of_an_earlier_pull_are_not_those_of_the_next_pull_of_that_name(rig: Rig) -> None:
    rig.open()
    rig.fail("r", why("over"))
    rig.polled()
    rig.now += 2.5
    rig.open()
    rig.now += 1.0  # Since the first pull began, a third of the lease's duration has passed.
    rig.polled()
    assert rig.said("renew") == []
    rig.now += 2.0
    rig.polled()
    assert rig.said("renew") == ["p/0", "p/1"]


def test_a_pull_that_is_timed_says_when_its_fence_was_posted_and_when_it_was_over(rig: Rig) -> None:
    for timed in (True, False):
        rig.puller.timed, rig.agent.auto = timed, False
        rig.puller.events.clear()
        rig.open()
        rig.add(part(0))
        rig.now += 1.0
        rig.agent.end(len(rig.agent.posted) - 1)
        rig.polled()
        posted = rig.now
        rig.now += 2.0
        rig.agent.end(len(rig.agent.posted) - 1)
        (event,) = rig.polled()
        assert event.times == (PullTimes(posted, rig.now) if timed else None)


# ---- the parts that a fence covers, and the ranks that are notified


def test_a_fence_covers_the_parts_before_it_and_is_not_posted_again_without_new_parts(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), last=False)
    rig.agent.end(0)
    rig.polled()
    assert len(rig.agent.posted) == 2
    rig.add(part(0), last=False)  # The fence of the first part is in flight.
    rig.agent.end(1)
    rig.polled()
    assert rig.passed("r") == 1
    rig.agent.end(2)
    rig.polled()
    rig.agent.end(3)
    rig.polled(10)
    assert rig.passed("r") == 2
    assert len(rig.agent.posted) == 4, "both parts have passed, so no further fence may be posted"
    assert not rig.puller.is_moving
    rig.fail("r", why("enough"))
    assert rig.said("refused") == ["p/0", "p/1"], (
        "every rank whose lease word was read must be told that the pull is over"
    )
    assert rig.puller.events[-1] == PullEvent("r", "enough", safe=True, passed=2)
    assert rig.passed("r") == rig.passed("nobody") == 0


def test_a_fence_that_waits_for_a_word_is_posted_once_another_pull_gives_one_back() -> None:
    rig = Rig(ranks=1, words=1)
    rig.agent.auto = False
    rig.open("a")
    rig.add(part(), key="a")
    rig.open("b")
    rig.add(part(), key="b", last=False)
    rig.agent.end(0)
    rig.agent.end(1)
    rig.polled()
    assert len(rig.agent.posted) == 3
    rig.agent.end(2)
    rig.polled()
    assert len(rig.agent.posted) == 4
    rig.agent.end(3)
    rig.polled()
    assert rig.passed("b") == 1


def test_a_pull_does_not_end_before_the_read_of_its_lease_word_is_known_to_have_ended() -> None:
    """NIXL still has the handle of the word's READ. The word must not be reused before the handle is released."""
    rig = Rig(ranks=1)
    rig.agent.auto, rig.agent.at_once = False, {0}
    read_word = rig.agent.read_word

    def at_once(peer: str, local: int, remote: int, note: bytes) -> int | None:
        handle = read_word(peer, local, remote, note)
        rig.puller.words[(local - rig.puller.words.ctypes.data) // 8] = LEASE.lease_id
        return handle

    rig.agent.read_word = at_once  # type: ignore[method-assign]
    assert isinstance(rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, part()), RankPull)
    assert rig.polled() == []
    assert len(rig.puller._free) == 7
    rig.agent.end(1)
    assert rig.polled() == [OK]
    assert rig.agent.posted[1]["released"] == 1
    assert len(rig.puller._free) == 8


def test_the_part_of_a_pull_at_once_is_settled_when_its_read_has_ended_even_if_the_pull_fails_earlier() -> None:
    settled: list[int] = []

    class Buffered(Part):
        def settle(self) -> None:
            settled.append(self.rank)

    rig = Rig(ranks=1)
    rig.agent.auto = False
    rows = np.ones((2, 3), np.uint64)
    assert isinstance(rig.puller.pull_at_once("r", rig.engine, LEASE, 9.0, Buffered(0, rows, rows, 100)), RankPull)
    rig.fail("r", why("enough"))
    rig.fail("r", why("once more"))
    assert settled == []
    assert [(event.error, event.safe) for event in rig.polled()] == [("enough", False)]
    for number in range(len(rig.agent.posted)):
        rig.agent.end(number)
    assert [(event.error, event.safe) for event in rig.polled()] == [("enough", False), ("enough", True)]
    assert settled == [0]


def test_a_pull_that_is_opened_is_the_one_that_is_added_to(rig: Rig) -> None:
    opened = rig.puller.open("r", rig.engine, LEASE, 9.0)
    assert rig.puller._pulls.get("r") is opened
    assert rig.puller._pulls.get("s") is None


def test_nothing_can_be_added_to_a_failed_pull_that_is_still_in_flight(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0), last=False)
    rig.fail("r", why("the source is stuck"))
    with pytest.raises(PullFailedError, match="the source is stuck"):
        rig.add(part(0))
    assert len(rig.agent.posted) == 1


def test_a_notification_that_cannot_be_sent_does_no_harm(rig: Rig) -> None:
    def lost(*_: object) -> None:
        raise AgentError("no such peer")

    rig.agent.notify = lost  # type: ignore[method-assign]
    rig.open()
    rig.add(part(0))  # The pull has to notify the other rank separately.
    assert rig.polled() == [OK]
    rig.open("s")
    rig.now += LEASE.duration_s / 3 + 0.01
    rig.polled()
    rig.fail("s", why("enough"))
    assert rig.puller.events[-1] == PullEvent("s", "enough", safe=True)


@pytest.mark.parametrize("runs", [40, 48])  # A transfer has at most 16 runs.
def test_a_part_in_several_transfers_is_read_once_and_counted_once(rig: Rig, runs: int) -> None:
    rig.open()
    asked = long_part(runs, lambda: None)
    rig.add(asked, part(1, runs=3))
    assert rig.polled(10) == [OK]
    (figures,) = rig.puller.ended
    assert rig.puller.ended.maxlen == 4096, "the list of ended pulls is bounded if nobody takes them"
    assert (figures.num_runs, figures.num_bytes) == (runs + 3, asked.num_bytes + 100)
    read = [one["local"] for one in rig.agent.posted if len(one["local"]) > 3]
    assert np.array_equal(np.concatenate(read), asked.local)


def test_a_part_with_a_refused_transfer_is_settled_when_its_earlier_transfers_have_ended(rig: Rig) -> None:
    rig.agent.auto, rig.agent.raise_at = False, {2: AgentError("no such address")}
    rig.open()
    asked = long_part(48, lambda: None)
    rig.add(asked)
    for number in (0, 1):
        assert [(event.error[-15:], event.safe) for event in rig.polled()] == [("no such address", False)]
        assert asked.times == 0
        rig.agent.end(number)
    assert rig.polled()[-1].safe
    assert asked.times == 1


def test_a_part_that_has_arrived_requests_another_part_which_is_posted_in_the_same_poll(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.add(part(0, arrived=lambda: part(1)))
    rig.agent.end(0)
    rig.puller.poll()
    assert [one["peer"] for one in rig.agent.posted] == ["p/0", "p/1"]


# ---- sources that are gone


def test_if_several_pulls_lose_their_source_the_first_one_says_why(rig: Rig) -> None:
    rig.agent.auto = False
    rig.open()
    rig.open("s")
    rig.add(part(0))
    rig.add(part(0), key="s")
    rig.agent.end(0, "ERR")
    rig.polled()
    rig.engine.failure = why("as was said first")
    rig.agent.end(1, "ERR")
    rig.polled()
    assert rig.engine.failure == why("as was said first")


@pytest.mark.parametrize("failure", ["", "its process is gone"])
def test_an_abandoned_engine_s_pulls_say_why_and_its_words_and_its_thread_are_free(failure: str) -> None:
    rig = Rig()
    rig.agent.auto = False
    rig.engine.failure = None
    rig.open()
    rig.add(long_part(1000))
    rig.open("s")
    rig.add(part(0), part(1), key="s")
    for number in range(len(rig.agent.posted) - 2, len(rig.agent.posted)):
        rig.agent.end(number)
    rig.polled()
    assert rig.puller._behind, "NIXL's thread must copy a part of it"
    assert sorted(rig.puller._free) != [*range(8)]
    rig.engine.failure = why(failure) if failure else None
    rig.puller.conclude(rig.puller.abandon(rig.engine))
    assert {event.error for event in rig.puller.events} == {failure or "given up"}
    assert sorted(rig.puller._free) == [*range(8)]
    assert not rig.puller._behind
    assert not rig.puller.is_moving


def test_an_engine_is_in_use_during_its_transfers_and_for_a_second_after_a_notification_to_it(rig: Rig) -> None:
    rig.agent.auto = False
    assert rig.puller.engines_in_use() == set()
    rig.open()
    rig.add(part(0))
    rig.now += 2.0
    assert rig.puller.engines_in_use() == {rig.engine}
    assert rig.puller.is_moving
    rig.agent.auto = True
    rig.polled()
    assert not rig.puller.is_moving
    assert rig.puller.engines_in_use() == {rig.engine}, (
        "the rank that was not read from was notified just now, so the engine is in use"
    )
    rig.now += 0.99
    assert rig.puller.engines_in_use() == {rig.engine}
    rig.now += 0.02
    assert rig.puller.engines_in_use() == set()
