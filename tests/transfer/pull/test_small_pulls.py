"""Pulls of few pages over real NIXL end as soon as they are posted. If a condition is not met, they run like any other
pull.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.replica.block_table import PageCopy
from tests.transfer.replicas import PAGES, TOKENS, Engine, run
from transfer.plan.page_lists import BlocksOfGroup
from transfer.pull.lease import LeaseRef
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver

LOCAL, REMOTE = [1, 2, 3], [5, 6, 9]
GROUPS = [PageCopy(LOCAL, REMOTE, (0, 3 * TOKENS))]


def pair(engine: Any, tp: tuple[int, int] = (1, 1), **options: Any) -> tuple[Engine, Engine]:
    """Returns a source and a reader that a previous pull has connected."""
    p, d = engine("p", tp[0]), engine("d", tp[1], **options)
    pull(p, d, p.offer(word_idx=PAGES), "first")
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe and p.overs)
    for one in (p, d):
        one.events.clear()
    for hindrance in d.hindrances:
        hindrance.reads.clear()
    d.blank()
    return p, d


def pull(p: Engine, d: Engine, lease: LeaseRef, key: str = "r", groups: Any = GROUPS) -> None:
    d.replica.pull(key, p.source(lease), 20.0, groups)
    d.take()


def free_words(d: Engine) -> list[int]:
    return [len(rank.puller._free) for rank in d.ranks]


def test_a_small_pull_is_over_when_the_call_returns(engine: Any) -> None:
    p, d = pair(engine)
    free, before = free_words(d), d.replica.stats.snapshot()
    lease = p.offer(word_idx=3)
    pull(p, d, lease)
    assert d.pulls == [PullEvent("r", "", safe=True)]
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))
    assert (d.heads(sorted(set(range(PAGES)) - set(LOCAL))) == 0x5A).all()
    assert [bool(note) for _, note in d.hindrances[0].reads] == [False, True]
    assert d.replica.num_pulls == (0, 0)
    assert free_words(d) == free
    assert not len(d.ranks[0].puller)
    found = d.replica.stats.snapshot()
    assert (found.pulls - before.pulls, found.interval_pulls) == (1, 1)
    assert found.num_bytes - before.num_bytes == d.pools[0][LOCAL].nbytes == found.records[0].num_bytes
    assert found.num_runs - before.num_runs == 2  # Pages 1 and 2 are adjacent at both sides, so they are one run.
    run(p, d, until=lambda: p.overs)
    assert p.overs == [LeaseOver("r", lease.lease_id, "read")]
    assert d.pulls == [PullEvent("r", "", safe=True)]


def test_a_timed_small_pull_says_when_its_fence_was_posted(engine: Any) -> None:
    p, d = pair(engine, timed=True)
    pull(p, d, p.offer())
    (event,) = d.pulls
    assert event.times is not None
    assert 0 < event.times.fence_at <= event.times.over_at


@pytest.mark.parametrize("passed_on", [False, True])
def test_a_small_pull_notices_that_its_lease_has_ended(engine: Any, passed_on: bool) -> None:
    p, d = pair(engine)
    lease, free = p.offer(word_idx=2), free_words(d)
    p.replica.revoke(lease.lease_id, "aborted")
    word = p.offer("s", word_idx=2).lease_id if passed_on else 0
    pull(p, d, lease)
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe)
    assert d.pulls[-1].error.endswith(f"its lease word 2 holds {word:#x} instead of {lease.lease_id:#x}")
    assert free_words(d) == free
    assert d.replica.num_pulls == (0, 0)


@pytest.mark.parametrize("held", ["data", "fence"])
def test_a_small_pull_that_does_not_end_as_it_is_posted_continues_like_any_other(engine: Any, held: str) -> None:
    p, d = pair(engine)
    lease, hindrance = p.offer(), d.hindrances[0]
    if held == "data":
        hindrance.held = True
    else:
        hindrance.hold_from = 1
    pull(p, d, lease)
    assert not d.pulls
    assert d.replica.num_pulls == (1, 0)
    pull(p, d, lease)
    (refused,) = d.pulls
    assert (refused.safe, "has not ended yet" in refused.error) == (True, True)
    d.events.clear()
    for _ in range(3):
        d.poll()
    assert not d.pulls
    hindrance.held, hindrance.hold_from = False, None
    run(p, d, until=lambda: d.pulls and p.overs)
    assert d.pulls == [PullEvent("r", "", safe=True)]
    assert p.overs == [LeaseOver("r", lease.lease_id, "read")]
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


def test_a_small_pull_in_flight_can_be_cancelled_and_gives_its_pages_back_when_it_has_ended(engine: Any) -> None:
    p, d = pair(engine)
    lease, hindrance = p.offer(), d.hindrances[0]
    hindrance.held = True
    pull(p, d, lease)
    d.replica.cancel("r", "given up")
    d.poll()
    assert [(event.error, event.safe) for event in d.pulls] == [("given up", False)]
    hindrance.held = False
    run(p, d, until=lambda: d.pulls[-1].safe and p.overs)
    assert p.overs == [LeaseOver("r", lease.lease_id, "given up")]


@pytest.mark.parametrize("read", [0, 1])
def test_a_refused_read_fails_a_small_pull(engine: Any, read: int) -> None:
    p, d = pair(engine)
    lease, free = p.offer(), free_words(d)
    d.hindrances[0].refuse = {read}
    pull(p, d, lease)
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe and p.overs)
    assert "refused by the test" in d.pulls[-1].error
    assert "refused by the test" in p.overs[0].reason
    assert free_words(d) == free


def test_a_small_pull_waits_if_all_fence_words_are_in_use(engine: Any) -> None:
    p, d = pair(engine)
    puller = d.ranks[0].puller
    kept, puller._free = puller._free, []
    pull(p, d, p.offer())
    assert not d.pulls
    puller._free = kept
    run(p, d, until=lambda: d.pulls)
    assert d.pulls == [PullEvent("r", "", safe=True)]


@pytest.mark.parametrize("wrong", ["word_idx", "id", "pages"])
def test_a_small_pull_fails_with_the_same_messages_as_any_other(engine: Any, wrong: str) -> None:
    p, d = pair(engine)
    lease, groups = p.offer(), GROUPS
    if wrong == "word_idx":
        lease = lease._replace(word_idx=1 << 20)
    elif wrong == "id":
        lease = lease._replace(lease_id=0, word_idx=1)  # A lease word without a lease holds 0.
    else:
        groups = [PageCopy(LOCAL, [5, 6, PAGES], (0, 3 * TOKENS))]
    pull(p, d, lease, groups=groups)
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe)
    assert "request 'r'" in d.pulls[-1].error
    assert (d.heads(range(PAGES)) == 0x5A).all()


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
def test_a_pull_of_several_ranks_is_no_small_pull(engine: Any, tp: tuple[int, int]) -> None:
    p, d = pair(engine, tp)
    pull(p, d, p.offer())
    run(p, d, until=lambda: d.pulls and p.overs)
    assert d.pulls == [PullEvent("r", "", safe=True)]
    assert p.overs[0].reason == "read"
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


def test_pages_of_another_incarnation_of_the_source_are_not_read(engine: Any) -> None:
    p, d = pair(engine)
    d.replica.pull("r", p.source(p.offer())._replace(incarnation="another"), 20.0, GROUPS)
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe)
    assert "has restarted since it granted the lease" in d.pulls[-1].error
    assert not d.hindrances[0].reads


def test_pages_that_the_source_would_name_are_no_small_pull(engine: Any) -> None:
    _p, d = pair(engine)
    part = d.ranks[0].remote("p")
    assert part is not None
    assert part.small_part(GROUPS) is not None
    assert part.small_part([BlocksOfGroup(LOCAL, (0, 3 * TOKENS), 0, REMOTE, 3 * TOKENS)]) is None
    assert part.small_part([]) is None
    part.verifier = object()  # pyright: ignore[reportAttributeAccessIssue]
    assert part.small_part(GROUPS) is None


def test_a_small_pull_in_flight_ends_at_its_deadline(engine: Any) -> None:
    now = 100.0
    p, d = pair(engine, clock=lambda: now)
    d.hindrances[0].held = True
    pull(p, d, p.offer())
    now += 21.0
    d.poll()
    assert [(event.error, event.safe) for event in d.pulls] == [("timed out after 21 s, waiting for 1 READs", False)]
    d.hindrances[0].held = False
    run(p, d, until=lambda: d.pulls[-1].safe)


def test_a_source_of_which_pulls_end_at_once_is_not_forgotten_as_idle(engine: Any) -> None:
    now = 100.0
    p, d = pair(engine, clock=lambda: now, idle_s=10.0)
    known = d.ranks[0].remote("p")
    for _ in range(3):
        now += 6.0
        pull(p, d, p.offer())
        for _ in range(3):
            d.poll()
            p.poll()
    assert known is not None
    assert d.ranks[0].remote("p") is known


def test_a_fence_without_data_does_not_pass_because_of_an_older_word(engine: Any) -> None:
    p, d = pair(engine)
    lease, rank = p.offer(), d.ranks[0]
    remote = rank.remote("p")
    assert remote is not None
    rank.puller.words[:] = lease.lease_id
    remote.agent.read_word = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    pull(p, d, lease)
    run(p, d, until=lambda: d.pulls and d.pulls[-1].safe)
    assert "holds 0x0" in d.pulls[-1].error


def test_the_word_of_another_lease_is_not_taken_for_it(engine: Any) -> None:
    p, d = pair(engine)
    for word_idx in (7, 0, 7):
        lease = p.offer(f"word {word_idx}", word_idx=word_idx)
        pull(p, d, lease)
        assert d.pulls.pop() == PullEvent("r", "", safe=True)
        run(p, d, until=lambda: p.overs)
        p.overs.clear()
