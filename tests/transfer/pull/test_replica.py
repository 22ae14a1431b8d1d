"""Leases and pulls of whole engines over real NIXL in one process, with faults."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache.replica.block_table import PageCopy
from tests.transfer.clock import Clock
from tests.transfer.replicas import KEY, LOCAL, PAGES, REMOTE, TOKENS, WHOLE, Engine, passing, pull, run, settled
from transfer.errors import HandshakeError, MetadataError, PullFailedError, SettingsMismatchError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.plan.page_lists import BlocksOfGroup
from transfer.plan.plan import Plan
from transfer.pull.lease import Lease, LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.remote import RemoteEngine
from transfer.pull.replica import LeaseOffer, LeaseOver, Offered
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard, HandshakeServer
from transfer.wire.messages import LeasedPages, LeaseQuery, LeaseRefusal, LeaseReply, Wanted, open_rank, sealed_pages


def test_a_pull_is_small_by_the_bytes_of_all_ranks_once_its_source_is_known(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engine("p"), engine("d", 2)
    source = p.source(p.offer(word_idx=0))
    assert not d.replica.is_small(source, WHOLE)
    pull(d, source)
    run(p, d, until=settled(d))
    assert d.replica.is_small(source, WHOLE)
    num_bytes = sum(pool[LOCAL].nbytes for pool in d.pools)
    monkeypatch.setattr("transfer.pull.replica._SMALL_BYTES", num_bytes)
    assert d.replica.is_small(source, WHOLE)
    monkeypatch.setattr("transfer.pull.replica._SMALL_BYTES", num_bytes - 1)
    assert not d.replica.is_small(source, WHOLE)
    assert not d.replica.is_small(None, [])
    assert not d.replica.is_small(source, [])


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (1, 4)])
def test_pages_arrive_and_the_lease_ends_when_every_rank_has_read(engine: Any, tp: tuple[int, int]) -> None:
    p, d = engine("p", tp[0]), engine("d", tp[1])
    d.blank()
    lease = p.offer(word_idx=3)
    assert [rank.words[3] for rank in p.ranks] == [lease.lease_id] * tp[0]
    pull(d, p.source(lease))
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert d.pulls == [PullEvent("r", "", safe=True)]
    assert p.overs == [LeaseOver("r", lease.lease_id, "read")]
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))
    rest = sorted(set(range(PAGES)) - set(LOCAL))
    assert (d.heads(rest) == 0x5A).all()
    p.replica.leases.check()
    assert not any(rank.words.any() for rank in p.ranks)
    assert not len(p.replica.leases)


def test_tokens_that_are_already_present_are_not_written(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    d.blank()
    pull(d, p.source(p.offer()), groups=[PageCopy([7], [9], (2 * TOKENS, 3 * TOKENS))])
    run(p, d, until=settled(d))
    assert np.array_equal(d.heads([7]), p.heads([9]))
    assert (d.heads([1, 2, 3]) == 0x5A).all()


def test_a_pull_with_nothing_to_read_only_notifies_the_source(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    lease = p.offer()
    pull(d, p.source(lease), groups=[PageCopy([], [], (48, 48))])
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert p.overs == [LeaseOver("r", lease.lease_id, "read")]
    assert [hindrance.reads for hindrance in d.hindrances] == [[], []]


def test_the_word_of_done_rides_on_the_fence_and_on_no_data(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 1)
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    notes = [note for _, note in d.hindrances[0].reads]
    assert [bool(note) for note in notes] == [False, False, True, True]


@pytest.mark.parametrize("when", ["before", "while waiting for more"])
def test_a_lease_that_has_ended_fails_the_pull(engine: Any, when: str) -> None:
    p, d = engine("p", 2), engine("d", 2)
    lease = p.offer(word_idx=2)
    if when == "before":
        p.replica.revoke(lease.lease_id, "aborted")
        pull(d, p.source(lease))
    else:
        pull(d, p.source(lease), groups=None)
        d.replica.add_pages("r", WHOLE, last=False)
        run(p, d, until=lambda: all(len(rank.puller) and not rank.puller._pulls.get("r").reading for rank in d.ranks))
        p.replica.revoke(lease.lease_id, "aborted")
        assert not d.pulls
        d.replica.add_pages("r", [PageCopy([], [], (48, 48))], last=True)
    run(p, d, until=settled(d))
    assert d.pulls[-1].error.endswith(f"its lease word 2 holds 0x0 instead of {lease.lease_id:#x}")
    assert "engine 'p' rank" in d.pulls[-1].error
    assert p.overs == [LeaseOver("r", lease.lease_id, "aborted")]


def test_a_word_that_has_passed_to_another_lease_fails_the_pull(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    first = p.offer("r")
    p.replica.revoke(first.lease_id, "aborted")
    second = p.offer("s")
    pull(d, p.source(first))
    run(p, d, until=settled(d))
    assert f"holds {second.lease_id:#x}" in d.pulls[-1].error
    assert p.replica.leases.ids() == [second.lease_id]


def test_a_note_that_cannot_be_read_is_counted_and_the_next_note_is_heard(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease = p.offer()
    pull(d, p.source(lease), groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    source = d.ranks[0].remote("p")
    source.agent.notify(source.ranks[0].agent_name, b"not a note")
    run(p, d, until=lambda: p.replica.leases.counts["malformed"])
    assert p.replica.leases.ids() == [lease.lease_id]
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert p.overs == [LeaseOver("r", lease.lease_id, "read")]
    assert p.replica.leases.counts == {"malformed": 1, "accepted": 1}


def test_pages_arrive_chunk_by_chunk_and_the_lease_is_renewed_meanwhile(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p", clock=clock), engine("d", 2, clock=clock, heartbeat_s=1000.0)
    d.blank()
    lease = p.offer(duration_s=3.0)
    pull(d, p.source(lease), groups=None, timeout_s=60.0)
    run(p, d, until=lambda: all(len(rank.puller) for rank in d.ranks))
    run(p, d, until=lambda: all(len(rank.puller) for rank in d.ranks))  # From here on the reader renews the lease.
    for at, (local, remote) in enumerate(zip(LOCAL, REMOTE, strict=True)):
        tokens = (at * TOKENS, (at + 1) * TOKENS)
        d.replica.add_pages("r", [PageCopy([local], [remote], tokens)], last=at == 2)
        for _ in range(5):
            clock.now += 1.1
            before = sum(p.replica.leases.counts.values())
            if at < 2:
                run(p, d, until=lambda seen=before: sum(p.replica.leases.counts.values()) >= seen + 2)
                assert not d.pulls
                assert not p.overs
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert p.overs[0].reason == "read"
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


def test_chunks_are_read_while_prefill_computes_and_the_lease_does_not_run_out(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p", clock=clock), engine("d", clock=clock, heartbeat_s=1e9)
    lease = p.offer(running=True, duration_s=2.0)
    clock.now += 1000
    p.poll()
    assert not p.overs
    pull(d, p.source(lease), groups=None, timeout_s=1e6)
    d.replica.add_pages("r", [PageCopy([1], [5], (0, TOKENS))], last=False)
    run(p, d, until=lambda: np.array_equal(d.heads([1]), p.heads([5])))
    p.pools[0][6] = 7  # The source computes the next chunk.
    d.replica.add_pages("r", [PageCopy([2], [6], (TOKENS, 2 * TOKENS))], last=True)
    p.replica.start_clock(lease.lease_id)
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert p.overs[0].reason == "read"
    assert (d.heads([2]) == 7).all()


def test_the_lease_of_an_unread_prefill_ends_after_the_prompt_is_computed(engine: Any) -> None:
    clock = Clock()
    p = engine("p", 2, clock=clock)
    lease = p.offer(running=True, duration_s=2.0)
    clock.now += 1000
    p.replica.start_clock(lease.lease_id)
    p.poll()
    assert not p.overs
    clock.now += 2
    p.poll()
    assert p.overs[0].reason.startswith("expired")


def test_metadata_may_come_by_another_way_than_the_handshake(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2, heartbeat_s=0.01)
    assert d.replica.directory.add(p.serve(), p.card.ranks) == "p"
    assert p.server.counts["answered"] == 0
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=lambda: p.server.counts["answered"] > 3)  # only pings follow
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=settled(d))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)


def test_a_lease_expires_on_the_source_s_own_clock(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p", 2, clock=clock), engine("d")
    lease = p.offer(duration_s=5.0)
    clock.now += 4.9
    p.poll()
    assert not p.overs
    clock.now += 0.2
    p.poll()
    assert p.overs == [LeaseOver("r", lease.lease_id, "expired after 5.0 s without hearing from its readers")]
    pull(d, p.source(lease))
    run(p, d, until=settled(d))
    assert "holds 0x0" in d.pulls[-1].error


def test_a_lease_is_granted_by_every_rank_or_by_none(engine: Any) -> None:
    p = engine("p", 2)
    p.replica.leases.grant(99, "other", 4, 10.0)
    p.replica.offer(LeaseOffer("r", LeaseRef(new_lease_id(), 4, 10.0)))
    p.take()
    (offered,) = p.of(Offered)
    assert "word 4 is taken" in offered.error
    assert p.replica.leases.ids() == [99]
    assert [rank.words[4] for rank in p.ranks] == [99, 99]


def test_what_one_rank_lacks_no_rank_needs(engine: Any) -> None:
    p, d = engine("p"), engine("d", 2)
    d.hindrances[1].refuse = {0}
    lease = p.offer()
    pull(d, p.source(lease))
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert [event for event in d.pulls if event.safe] == [d.pulls[-1]]
    assert "refused by the test" in d.pulls[-1].error
    assert "refused by the test" in p.overs[0].reason
    pull(d, p.source(p.offer("again")), key="again")
    run(p, d, until=settled(d, "again"))
    assert d.pulls[-1].error == ""


def test_a_failure_is_told_at_once_and_pages_come_back_when_nothing_is_in_flight(engine: Any) -> None:
    p, d = engine("p"), engine("d", 2)
    d.hindrances[0].held = True
    d.hindrances[1].refuse = {0}
    pull(d, p.source(p.offer()))
    run(p, d, until=lambda: d.pulls)
    assert [event.safe for event in d.pulls] == [False]
    for _ in range(50):
        p.poll()
        d.poll()
    assert [event.safe for event in d.pulls] == [False]
    d.replica.pull("r", p.source(p.offer("q", 1)), 20.0)
    assert "has not ended yet" in d.replica.events.pop().error
    d.hindrances[0].held = False
    run(p, d, until=settled(d))
    assert [event.safe for event in d.pulls] == [False, True]
    assert len({event.error for event in d.pulls}) == 1


def test_if_a_second_read_fails_the_pages_of_the_first_stay_in_flight(engine: Any) -> None:
    p, d = engine("p", 2), engine("d")
    d.hindrances[0].held, d.hindrances[0].refuse = True, {1}
    pull(d, p.source(p.offer()))
    run(p, d, until=lambda: d.pulls)
    assert [event.safe for event in d.pulls] == [False]
    d.hindrances[0].held = False
    run(p, d, until=settled(d))


def test_a_pull_that_takes_too_long_fails_and_its_pages_stay_away(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, heartbeat_s=1000.0)
    d.hindrances[0].held = True
    pull(d, p.source(p.offer()), timeout_s=5.0)
    run(p, d, until=lambda: d.hindrances[0].reads)
    clock.now += 5.1
    run(p, d, until=lambda: d.pulls)
    assert d.pulls[0].error.startswith("timed out after 5.1 s, waiting for 1 READs")
    run(p, d, until=lambda: p.overs)
    assert p.overs[0].reason.startswith("timed out")
    assert len(d.pulls) == 1
    d.hindrances[0].held = False
    run(p, d, until=settled(d))


def test_a_cancelled_pull_ends_the_lease_with_its_reason(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=lambda: all(len(rank.puller) for rank in d.ranks))
    d.replica.cancel("r", "the client left")
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert d.pulls == [PullEvent("r", "the client left", safe=True)]
    assert p.overs[0].reason == "the client left"
    d.replica.cancel("r", "again")
    d.replica.add_pages("r", WHOLE, last=True)
    d.poll()
    assert len(d.pulls) == 1


def test_a_pull_that_is_cancelled_before_its_source_has_answered_is_refused_there(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    pull(d, p.source(p.offer()))
    d.replica.cancel("r", "the client left")
    d.take()
    assert d.pulls == [PullEvent("r", "the client left", safe=True)], (
        "the owner gets the event at once, without waiting for the source"
    )
    pull(d, p.source(p.offer("other", 1)))  # The key of the ended pull can be used again.
    run(p, d, until=lambda: len(d.pulls) == 2 and len(p.overs) == 2)
    assert {over.request_id: over.reason for over in p.overs} == {"r": "the client left", "other": "read"}
    assert d.pulls[1].error == ""
    assert not d.replica._pulls


DIGEST = b"of the reader's own tokens"


def answering(p: Engine, *answers: dict[str, Any]) -> list[int]:
    """Makes a source give these answers about its leases one after another, and then repeat the last answer. Returns a
    list that records how many tokens each question asked for.
    """
    asked: list[int] = []

    def leased(query: LeaseQuery) -> LeaseReply:
        asked.append(query.num_tokens)
        answer: dict[str, Any] = dict(answers[min(len(asked), len(answers)) - 1])
        lease = answer.pop("lease", None)
        if lease is not None:
            fields = {"incarnation": p.incarnation, "num_tokens": 48, "block_ids": (REMOTE,), "prompt_digest": DIGEST}
            found = {
                "engine_id": "p",
                "word_idx": lease.word_idx,
                "duration_s": lease.duration_s,
                "lease_id": lease.lease_id,
            }
            answer = {"pages": sealed_pages(LeasedPages(**(fields | found | answer)), KEY)}
        return LeaseReply(query_id=query.query_id, **answer)

    p.card = replace(p.card, leased=leased)
    return asked


def wanted(p: Engine, lease: LeaseRef) -> Wanted:
    return Wanted(p.serve(), "p", lease.lease_id, 48, DIGEST)


ASKED = [BlocksOfGroup(LOCAL, (0, 48), 0)]


def test_a_source_says_itself_which_pages_it_holds(engine: Any) -> None:
    p, d = engine("p", 2), engine("d")
    d.blank()
    lease = p.offer(word_idx=3)
    asked = answering(p, {"lease": lease})
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert (d.pulls, p.overs[0].reason) == ([PullEvent("r", "", safe=True, begins=(0,))], "read")
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))
    assert asked == [48]


def test_a_reader_waits_until_the_lease_stands_on_every_rank(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease = LeaseRef(new_lease_id(), 2, 30.0)
    asked = answering(p, *[{}] * 6, {"lease": lease})
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=lambda: len(asked) == 6)
    assert d.pulls == []
    p.replica.offer(LeaseOffer("r", lease))
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert d.pulls[-1].error == ""
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


def test_a_reader_does_not_wait_longer_than_its_own_time(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock)
    asked = answering(p, {}, {"waits_for": "ranks [1] have not granted it yet"})
    pull(d, wanted(p, p.offer()), groups=ASKED, timeout_s=0.6)
    run(p, d, until=passing(clock, settled(d), answered=d))
    waited = r" \(asked for 0\.[3-6] s, last answer: ranks \[1\] have not granted it yet\)"
    assert re.fullmatch(f"timed out: engine 'p' did not confirm its lease{waited}", d.pulls[-1].error)
    assert 4 < len(asked) < 30, "the pauses double, so about 10 questions fit into 0.6 s"


def test_a_lease_that_ends_while_a_reader_waits_says_what_it_waited_for_and_how_long(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock)
    asked = answering(p, *[{"waits_for": "its request is still computed"}] * 3, {"error": "it has ended"})
    pull(d, wanted(p, p.offer()), groups=ASKED)
    run(p, d, until=passing(clock, settled(d), answered=d))
    assert asked[:4] == [48] * 4
    assert re.search(
        r": it has ended \(asked for 0\.\d s, last answer: its request is still computed\)$", d.pulls[-1].error
    )


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"prompt_digest": b"another's"}], "request 'r': lease .* holds the pages of another prompt"),
        ([{"error": "it holds the pages of 40 tokens"}, {}], "request 'r': engine 'p' at tcp://.*: it holds the pages"),
    ],
    ids=str,
)
def test_a_lease_that_brings_nothing_is_given_back_with_the_reason(
    engine: Any, answers: list[dict[str, Any]], message: str
) -> None:
    """The reader asks the source once more, for zero tokens. The source can then free the pages of the lease."""
    p, d = engine("p", 2), engine("d", 2)
    d.blank()
    lease = p.offer()
    asked = answering(p, *(one if "error" in one else {"lease": lease, **one} for one in answers))
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=lambda: settled(d)() and p.overs and not d.replica._pulls)
    assert re.search(message, d.pulls[-1].error)
    assert [over.reason for over in p.overs] == [d.pulls[-1].error[:200]]
    assert (len(d.pulls), asked) == (1, [48, 0])
    assert (d.heads(LOCAL) == 0x5A).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lease_id": 5}, "about lease .* names engine 'p' and lease 0x0000000000000005"),
        ({"error": "it has ended"}, "request 'r': engine 'p' at tcp://.*: it has ended"),
    ],
    ids=str,
)
def test_a_lease_that_is_not_for_this_reader_is_not_touched_by_it(
    engine: Any, change: dict[str, Any], message: str
) -> None:
    p, d = engine("p"), engine("d")
    d.blank()
    lease = p.offer()
    answering(p, change if "error" in change else {"lease": lease, **change})
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=settled(d))
    assert re.search(message, d.pulls[-1].error)
    end = time.monotonic() + 0.1
    run(p, d, until=lambda: time.monotonic() > end)
    assert (p.overs, sum(p.replica.leases.counts.values())) == ([], 0)
    assert (d.heads(LOCAL) == 0x5A).all()
    assert not d.replica._pulls, "the reader must not repeat a refusal that the source has refused"


def test_pages_of_another_number_of_groups_fail_the_pull_and_end_the_lease(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease = p.offer()
    answering(p, {"lease": lease, "block_ids": (REMOTE, REMOTE)})
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=lambda: settled(d)() and p.overs)
    assert d.pulls[-1].error == "request 'r': the source has 2 groups, this engine has 1"


def test_a_lease_of_another_incarnation_of_the_source_is_not_used(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease = p.offer()
    answering(p, {"lease": lease, "incarnation": "before"})
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=settled(d))
    assert "has restarted since it granted the lease" in d.pulls[-1].error


def test_a_source_that_is_lost_before_it_has_named_its_pages_is_contacted_again(engine: Any) -> None:
    """The reader knew an earlier incarnation of the source. The params come from the current incarnation."""
    p, d = engine("p"), engine("d")
    pull(d, p.source(p.offer("before")), key="before")
    run(p, d, until=settled(d, "before"))
    lease = p.offer(word_idx=1)
    asked = answering(p, {}, {}, {}, {"lease": lease})
    p.server.serve(p.card)
    pull(d, wanted(p, lease), groups=ASKED)
    run(p, d, until=lambda: asked)
    (peer,) = d.replica.directory._peers.values()
    d.replica.directory._forget(peer, Failure(FailureKind.SOURCE_GONE, "engine 'p' was restarted"))
    run(p, d, until=settled(d))
    assert d.pulls[-1].error == ""


def test_a_source_learns_of_a_cancelled_pull_when_it_names_its_pages(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    lease = p.offer()
    asked = answering(p, {}, {}, {}, {"lease": lease})
    pull(d, wanted(p, lease))
    run(p, d, until=lambda: asked)
    d.replica.cancel("r", "the client left")
    d.take()
    assert d.pulls == [PullEvent("r", "the client left", safe=True)]
    run(p, d, until=lambda: p.overs and not d.replica._pulls)
    assert p.overs[0].reason == "the client left"
    assert d.replica.stats.snapshot().failed_pulls == 0, "a pull that its owner gave up does not count as failed"


def test_an_engine_that_names_its_pages_in_another_way_says_so(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    pull(d, wanted(p, p.offer()), groups=ASKED)
    run(p, d, until=settled(d))
    assert "engine 'p' answers no lease queries: its readers learn of leases in other messages" in d.pulls[-1].error


def test_a_refusal_for_a_source_that_never_answers_is_forgotten(engine: Any) -> None:
    p, d = engine("p"), engine("d", handshake_timeout_s=0.2)
    source = p.source(p.offer())
    p.server.close()
    pull(d, source, timeout_s=0.3)
    d.replica.cancel("r", "the client left")
    run(d, until=lambda: not d.replica._pulls)
    d.take()
    assert d.pulls == [PullEvent("r", "the client left", safe=True)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([PageCopy(LOCAL, [5, 6], (0, 48))], "remote pages: got 2, but tokens 0 to 48 take 3 pages"),
        ([PageCopy([1], REMOTE, (0, 48))], "local pages: got 1, but tokens 0 to 48"),
        (
            [PageCopy(LOCAL, [5, 6, PAGES], (0, 48))],
            f"remote page {PAGES} does not exist: the pages are 0 to {PAGES - 1}",
        ),
        ([PageCopy(LOCAL, [5, -6, 7], (0, 48))], "remote page -6 does not exist: the pages are 0 to"),
        ([PageCopy([1, 2, 1], REMOTE, (0, 48))], "local page 1 is named twice"),
        ([], "got pages for 0 groups, but the layout has 1"),
        (WHOLE * 2, "got pages for 2 groups, but the layout has 1"),
    ],
)
def test_pages_that_do_not_fit_fail_their_request_and_no_other(engine: Any, groups: Any, message: str) -> None:
    p, d = engine("p", 2), engine("d", 2)
    pull(d, p.source(p.offer("bad")), key="bad", groups=groups)
    pull(d, p.source(p.offer("good", 1)), key="good")
    run(p, d, until=lambda: settled(d, "bad")() and settled(d, "good")() and len(p.overs) == 2)
    assert {event.key: bool(event.error) for event in d.pulls} == {"bad": True, "good": False}
    bad = next(event.error for event in d.pulls if event.key == "bad")
    assert message in bad
    assert "request 'bad'" in bad


@pytest.mark.parametrize(("lease_id", "word_idx"), [(0, 0), (1, 6000), (1, -1), (1 << 64, 0)])
def test_an_impossible_lease_is_refused_before_anything_is_read(engine: Any, lease_id: int, word_idx: int) -> None:
    p, d = engine("p"), engine("d")
    pull(d, p.source(LeaseRef(lease_id, word_idx, 5.0)))
    run(p, d, until=settled(d))
    assert "engine 'p' has 5120 words" in d.pulls[-1].error
    assert d.hindrances[0].reads == []


def test_a_second_pull_of_the_same_name_is_refused_and_the_first_continues(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    source = p.source(p.offer())
    pull(d, source, groups=None)
    d.replica.pull("r", source, 5.0)
    refusal = PullEvent("r", "request 'r': an earlier pull of the same name has not ended yet", safe=True)
    d.take()
    assert d.pulls == [refusal]
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=lambda: len(d.pulls) == 2)
    assert d.pulls == [refusal, PullEvent("r", "", safe=True)]
    pull(d, p.source(p.offer("r", 1)))
    run(p, d, until=lambda: len(d.pulls) == 3)


def test_a_dead_source_fails_its_own_pulls_in_its_own_time(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, handshake_timeout_s=4.0)
    dead = Source("tcp://127.0.0.1:9", "dead", LeaseRef(1, 0, 5.0))
    for number in range(5):
        pull(d, dead._replace(engine_id=f"dead{number}", address=f"tcp://127.0.0.1:{9 + number}"), key=f"dead{number}")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    assert [event.key for event in d.pulls] == ["r"]  # This pull has not waited for the five pulls of dead sources.
    clock.now += 4.0
    run(p, d, until=lambda: len(d.pulls) == 6)
    assert all("in 4.0 s" in event.error for event in d.pulls[1:])
    assert d.replica.stats.failed_handshakes == 5
    assert d.replica.stats.snapshot().failed_pulls == 5


def test_an_engine_that_one_rank_cannot_load_is_loaded_by_none(engine: Any, monkeypatch: Any) -> None:
    p, d = engine("p"), engine("d", 2)

    def refuse(*_: Any) -> None:
        raise HandshakeError("refused by the test")

    monkeypatch.setattr(d.ranks[1], "load", refuse)
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    assert "refused by the test" in d.pulls[-1].error
    assert [rank.remote("p") for rank in d.ranks] == [None, None]


def test_pages_are_given_back_when_the_lease_words_of_all_ranks_are_cleared(engine: Any) -> None:
    p = engine("p", 2)
    lease = p.offer(word_idx=3)
    told, seen = p.replica._on_over, list[list[int]]()

    def watched(lease: Lease) -> None:
        seen.append([int(rank.words[3]) for rank in p.ranks])
        told(lease)

    p.replica._on_over = watched  # type: ignore[method-assign]
    p.replica.revoke(lease.lease_id, "given up")
    p.take()
    assert p.overs == [LeaseOver("r", lease.lease_id, "given up")]
    assert seen == [[0, 0]]


def test_a_pull_has_ended_when_every_reading_rank_has_its_part(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    d.hindrances[1].held = True
    pull(d, p.source(p.offer()))
    run(p, d, until=lambda: d.hindrances[1].reads and d.ranks[0].puller._pulls.get("r") is None)
    for _ in range(20):
        p.poll()
        d.poll()
    assert d.pulls == []
    d.hindrances[1].held = False
    run(p, d, until=settled(d))
    assert d.pulls == [PullEvent("r", "", safe=True)]


def test_only_tokens_that_every_rank_has_passed_may_be_kept(engine: Any) -> None:
    p, d = engine("p", 2), engine("d", 2)
    d.hindrances[1].held = True
    d.replica.pull("r", p.source(p.offer()), 20.0)
    d.replica.add_pages("r", WHOLE, last=False)
    run(p, d, until=lambda: (one := d.ranks[0].puller._pulls.get("r")) and one.passed == 1 and d.hindrances[1].reads)
    d.replica.cancel("r", "enough")
    d.hindrances[1].held = False
    run(p, d, until=settled(d))
    assert (d.pulls[-1].error, d.pulls[-1].passed) == ("enough", 0)


def test_an_engine_that_one_rank_has_lost_is_asked_again(engine: Any) -> None:
    p, d = engine("p"), engine("d", 2)
    source = p.source(p.offer())
    pull(d, source)
    run(p, d, until=settled(d))
    assert d.replica.directory.use(source.contact) is not None
    d.ranks[1].disconnect("p", Failure(FailureKind.SOURCE_GONE, "lost"))
    assert d.replica.directory.use(source.contact) is None
    pull(d, p.source(p.offer("s", 1)), key="s")
    run(p, d, until=settled(d, "s"))
    assert d.pulls[-1].error == ""


def test_a_pull_does_not_wait_for_its_source_longer_than_its_own_time(engine: Any) -> None:
    d = engine("d", handshake_timeout_s=60.0)
    pull(d, Source("tcp://127.0.0.1:9", "dead", LeaseRef(1, 0, 5.0)), timeout_s=0.1)
    run(d, until=settled(d), seconds=10.0)
    assert [event.error for event in d.pulls] == ["timed out: engine 'dead' did not answer the handshake"]


@pytest.mark.parametrize(
    "address", ["nonsense", "tcp://", "tcp://no.such.host.invalid:1", "ipc://\0", "udp://1.1.1.1:1", "tcp://\ud800:1"]
)
def test_an_invalid_address_is_an_error_of_its_request(engine: Any, address: str) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock)
    pull(d, Source(address, "q", LeaseRef(1, 0, 5.0)), key="bad")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    clock.now += 5.0  # the name of a host is looked up for as long as an answer may take
    run(p, d, until=settled(d, "bad"))
    assert {event.key: bool(event.error) for event in d.pulls} == {"bad": True, "r": False}


def test_an_engine_with_another_name_is_not_read_from(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    pull(d, p.source(p.offer())._replace(engine_id="q"))
    run(p, d, until=settled(d))
    assert "engine 'q' is not here: ['p']" in d.pulls[-1].error


def test_a_server_that_answers_for_another_engine_does_not_replace_it(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    with HandshakeServer([EngineCard("q", "i", p.card.ranks, p.card.compatibility)]) as liar:
        pull(d, Source(liar.endpoint, "q", LeaseRef(1, 0, 5.0)), key="bad")
        run(p, d, until=settled(d, "bad"))
    assert "got the metadata of engine 'p'" in d.pulls[-1].error
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=settled(d))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)


def test_incompatible_settings_are_refused_with_both_values(engine: Any) -> None:
    p, d = engine("p", compatibility={"model": "llama", "dtype": "bf16"}), engine("d", compatibility={"model": "qwen"})
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    differ = "dtype: 'bf16' at the source, None at the reader, model: 'llama' at the source, 'qwen' at the reader"
    assert differ in d.pulls[-1].error
    assert d.ranks[0].remote("p") is None


@pytest.mark.parametrize("tp", [1, 2])
def test_a_lease_of_a_source_that_cannot_be_loaded_is_refused_over_the_side_channel(engine: Any, tp: int) -> None:
    p, d = engine("p", 2), engine("d", tp, compatibility={"model": "qwen"})
    refusals: deque[LeaseRefusal] = deque()
    p.card = replace(p.card, refused=refusals.append)
    lease, other = p.offer(), p.offer("s", 1)
    pull(d, p.source(lease))
    run(p, d, until=lambda: settled(d)() and len(refusals) == tp)
    assert sorted((one.lease_id, one.reader, one.rank, one.ranks) for one in refusals) == [
        (lease.lease_id, "d", rank, tp) for rank in range(tp)
    ]
    for refusal in refusals:
        assert not p.overs
        p.replica.hear_refusal(refusal)
        p.replica.hear_refusal(refusal)  # twice is as good as once
        p.take()
    ((request_id, lease_id, reason),) = p.overs
    assert (request_id, lease_id) == ("r", lease.lease_id)
    assert "model: 'm' at the source, 'qwen' at the reader" in reason
    assert p.replica.leases.ids() == [other.lease_id]


def test_an_engine_does_not_read_from_itself(engine: Any) -> None:
    p = engine("p")
    pull(p, p.source(p.offer()))
    run(p, until=settled(p))
    assert "an engine cannot read from itself" in p.pulls[-1].error


def test_a_wrong_address_for_a_known_engine_touches_no_other_request(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock)
    source = p.source(p.offer())
    pull(d, source, groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    pull(d, p.source(p.offer("bad", 1))._replace(address="tcp://127.0.0.1:9"), key="bad")
    clock.now += 5.0
    run(p, d, until=settled(d, "bad"))
    assert not settled(d)()
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=settled(d))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)


def test_one_engine_at_two_addresses_is_one_engine(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    with HandshakeServer([p.card]) as second:
        pull(d, p.source(p.offer()), groups=None)
        run(p, d, until=lambda: len(d.ranks[0].puller))
        pull(d, p.source(p.offer("s", 1))._replace(address=second.endpoint), key="s")
        run(p, d, until=settled(d, "s"))
        d.replica.add_pages("r", WHOLE, last=True)
        run(p, d, until=settled(d))
    assert {event.key: event.error for event in d.pulls} == {"r": "", "s": ""}


def test_an_engine_restarted_at_its_address_is_found_out_and_read_from_anew(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, heartbeat_s=0.02, dead_after_s=0.5)
    address = p.serve()
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    p.close()
    successor = engine("p", seed=50)
    successor.serve(address)
    run(successor, d, until=passing(clock, settled(d)))
    assert "was restarted" in d.pulls[-1].error or "silent" in d.pulls[-1].error
    pull(d, successor.source(successor.offer()), key="again")
    run(successor, d, until=settled(d, "again"))
    assert d.pulls[-1].error == ""
    assert np.array_equal(d.heads(LOCAL), successor.heads(REMOTE))


def test_the_first_request_of_a_restarted_engine_is_served(engine: Any) -> None:
    """The request names the incarnation that has promised its pages. It must not fail because the reader knows an
    earlier incarnation.
    """
    p, d = engine("p"), engine("d")
    address = p.serve()
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    p.close()
    successor = engine("p", seed=50)
    successor.serve(address)
    promised = successor.source(successor.offer())._replace(incarnation=successor.incarnation)
    older = promised._replace(incarnation="before")
    pull(d, promised, key="new")
    pull(d, older, key="old")
    run(successor, d, until=lambda: settled(d, "new")() and settled(d, "old")())
    errors = {event.key: event.error for event in d.pulls}
    assert errors["new"] == ""
    assert "has restarted since it granted the lease" in errors["old"]
    assert np.array_equal(d.heads(LOCAL), successor.heads(REMOTE))


def test_a_silent_source_is_given_up(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, heartbeat_s=0.02, dead_after_s=0.2)
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    p.server.close()
    run(p, d, until=passing(clock, settled(d)))
    assert "engine 'p' is silent" in d.pulls[-1].error


def test_a_living_source_is_not_given_up_however_long_it_computes(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, heartbeat_s=0.01, dead_after_s=0.2)
    pull(d, p.source(p.offer()), groups=None)
    run(p, d, until=passing(clock, lambda: p.server and p.server.counts["answered"] > 20, answered=d))
    assert clock.now > 100.2
    assert not d.pulls


def test_engines_that_were_idle_for_long_are_forgotten(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, idle_s=100.0)
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d))
    clock.now += 99
    d.poll()
    assert d.ranks[0].remote("p") is not None
    clock.now += 2
    d.poll()
    d.poll()
    assert d.ranks[0].remote("p") is None
    assert (len(d.replica.directory), d.ranks[0]._remotes, d.ranks[0]._retiring) == (0, {}, [])
    pull(d, p.source(p.offer("r", 1)), key="later")
    run(p, d, until=settled(d, "later"))
    assert d.pulls[-1].error == ""


def test_shutting_down_ends_what_is_open_and_can_be_done_twice(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease = p.offer()
    pull(d, p.source(lease), groups=None)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    for _ in range(2):
        d.replica.close()
        p.replica.close()
    d.take()
    p.take()
    assert d.pulls == [PullEvent("r", "this engine was shut down", safe=True)]
    assert p.overs == [LeaseOver("r", lease.lease_id, "this engine was shut down")]


def test_a_pull_in_flight_at_the_shutdown_is_safe_once_the_agent_is_gone(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    d.hindrances[0].held = True
    pull(d, p.source(p.offer()))
    run(p, d, until=lambda: d.hindrances[0].reads)
    d.replica.close()
    d.take()
    assert [event.safe for event in d.pulls] == [False, True]


def test_pulls_from_an_engine_fail_if_it_is_connected_again(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    lease, rank = p.offer(), d.ranks[0]
    rank.puller.open("r", rank.load(rank.inspect(p.card.ranks)), lease, 20.0)
    rank.load(rank.inspect(p.card.ranks))
    assert [(event.key, event.error) for event in rank.puller.events] == [("r", "engine 'p' was connected again")]


def test_an_engine_that_was_lost_stays_loaded_while_a_read_from_it_is_in_flight(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    d.hindrances[0].held = True
    pull(d, p.source(p.offer()))
    run(p, d, until=lambda: d.hindrances[0].reads)
    rank = d.ranks[0]
    remote = rank.remote("p")
    rank.disconnect("p", Failure(FailureKind.SOURCE_GONE, "lost"))
    d.poll()
    assert remote.agent.is_open
    d.hindrances[0].held = False
    run(p, d, until=settled(d))
    d.poll()
    with pytest.raises(PullFailedError, match="engine 'p' is not loaded"):
        _ = remote.agent


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"incarnation": "x"}, MetadataError, "names several engines or incarnations"),
        ({"memory_type": MemoryType.VRAM}, MetadataError, "names several engines or incarnations"),
        ({"rank": 0}, MetadataError, r"got ranks \[0, 0\]; all 2 ranks are needed"),
        ({"agent_name": "p/0"}, MetadataError, "two ranks have the same agent name"),
        ({"hostname": "elsewhere"}, MetadataError, "rank 1 is on host 'elsewhere', but UCX_TLS here reaches only"),
        ({"settings": {"nixl": "0"}}, SettingsMismatchError, "rank 1 has other UCX or NIXL settings: .*nixl"),
        (
            {"compatibility": {"model": "n"}},
            HandshakeError,
            "rank 1 is not compatible: model: 'n' at the source, 'm' at the reader",
        ),
        ({"layout": None}, MetadataError, "rank 1 has 2 page groups, this engine has 1"),
    ],
)
def test_every_rank_of_an_engine_must_fit_not_only_its_first(
    engine: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    one, other = (open_rank(data, KEY) for data in engine("p", 2).card.ranks)
    mine = open_rank(engine("d").card.ranks[0], KEY)
    one = msgspec.structs.replace(one, agent_name="p/0")
    if "layout" in changes:
        changes = {"layout": msgspec.structs.replace(other.layout, groups=other.layout.groups * 2)}
    assert RemoteEngine([one, other], mine, {"model": "m"}).read_ranks == (0, 1)
    with pytest.raises(error, match=message):
        RemoteEngine([one, msgspec.structs.replace(other, **changes)], mine, {"model": "m"})


def test_an_engine_has_as_many_lease_words_as_the_rank_with_the_fewest(engine: Any) -> None:
    one, other = (open_rank(data, KEY) for data in engine("p", 2).card.ranks)
    mine = open_rank(engine("d").card.ranks[0], KEY)
    assert RemoteEngine([one, msgspec.structs.replace(other, words=3)], mine, {"model": "m"}).words == 3


def test_pages_of_all_ranks_are_read_even_if_one_rank_uses_the_general_plan(engine: Any, monkeypatch: Any) -> None:
    ranks = [open_rank(data, KEY) for data in engine("p", 2).card.ranks]
    remote = RemoteEngine(ranks, open_rank(engine("d").card.ranks[0], KEY), {"model": "m"})
    whole, few = sum(part.num_bytes for part in remote.parts("r", WHOLE)), Plan.few
    monkeypatch.setattr(Plan, "few", lambda plan, named: None if plan.rank else few(plan, named))
    assert sum(part.num_bytes for part in remote.parts("r", WHOLE)) == whole
    checked = object()
    stand_in: Any = SimpleNamespace(part=lambda *_: checked)
    remote.verifier = stand_in
    monkeypatch.undo()
    assert remote.parts("r", WHOLE) == [checked, checked]


def test_pulls_whose_source_has_not_answered_are_not_polled(engine: Any) -> None:
    class Unwalked(dict[str, Any]):
        def refuse(self) -> Any:
            raise AssertionError("a poll iterates over all pulls")

        items = values = __iter__ = refuse

    clock = Clock()
    d = engine("d", clock=clock, heartbeat_s=1000.0)
    keys = [f"r{number}" for number in range(20)]
    for key in keys:
        pull(d, Source("ipc:///tmp/nobody", "p", LeaseRef(1, 0, 30.0)), key)
    d.poll()
    pulls = d.replica._pulls
    d.replica._pulls = Unwalked(pulls)
    assert d.replica.poll()
    d.replica._pulls = pulls
    clock.now += 21.0
    run(d, until=lambda: len(d.pulls) == len(keys))
    assert all("did not answer the handshake" in event.error or "handshake" in event.error for event in d.pulls)
    assert not d.replica.poll()
