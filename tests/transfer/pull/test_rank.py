"""A single rank gives up copies that never end, at its time limit and not earlier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.replica.block_table import PageCopy
from tests.transfer.clock import Clock
from tests.transfer.replicas import TOKENS, WHOLE, run
from transfer.errors import AgentError, InvalidEngineError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.plan.boxes import ShardLayout
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory

STUCK_S = 7.0


def test_copies_that_never_end_are_given_up_at_the_limit_with_the_agent_that_makes_them(engine: Any) -> None:
    clock = Clock()
    p, q, d = engine("p"), engine("q", seed=9), engine("d", clock=clock, stuck_s=STUCK_S, heartbeat_s=1e9)
    other = q.source(q.offer("other"))
    d.replica.pull("other", other, 1e6)  # waits for pages
    d.hindrances[0].held = True
    d.replica.pull("r", p.source(p.offer()), 2.0)
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, q, d, until=lambda: d.hindrances[0].reads and d.ranks[0].puller._pulls.get("other"))
    agent = d.ranks[0].remote("p").agent
    clock.now += 2.1
    run(p, q, d, until=lambda: d.pulls)
    assert [(event.key, event.safe) for event in d.pulls] == [("r", False)]
    for seconds in (STUCK_S - 0.2, 0.1):  # Both times are within the time limit.
        clock.now += seconds
        for _ in range(20):
            d.poll()
        assert agent.is_open
        assert len(d.pulls) == 1
    clock.now += 0.2
    run(p, q, d, until=lambda: len(d.pulls) == 2)
    assert (d.pulls[1].key, d.pulls[1].safe) == ("r", True)
    assert not agent.is_open
    assert d.ranks[0].remote("p") is None
    d.hindrances[0].held = False
    d.replica.add_pages("other", WHOLE, last=True)
    d.replica.pull("again", p.source(p.offer("again", 1)), 20.0)
    d.replica.add_pages("again", [PageCopy([7], [9], (0, TOKENS))], last=True)
    run(p, q, d, until=lambda: len(d.pulls) == 4)
    assert {*d.pulls[2:]} == {PullEvent("other", "", safe=True), PullEvent("again", "", safe=True)}


def test_the_agent_of_an_engine_that_cannot_be_loaded_is_used_for_the_next_engine(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engine("p"), engine("d")
    (mine,) = d.ranks
    remote = mine.inspect([p.ranks[0].metadata])
    agent = mine._spare

    def refused(_: Any) -> None:
        raise AgentError("refused by the test")

    with monkeypatch.context() as patched:
        patched.setattr(remote, "load", refused)
        with pytest.raises(AgentError, match="refused by the test"):
            mine.load(remote)
    assert mine.remote("p") is None
    assert mine._spare is agent
    assert mine.load(remote).agent is agent


@pytest.mark.parametrize("verifies", [False, True])
def test_an_agent_with_memory_of_a_verifier_is_not_used_for_another_source(engine: Any, verifies: bool) -> None:
    p, d = engine("p"), engine("d")
    (mine,) = d.ranks
    remote = mine.load(mine.inspect([p.ranks[0].metadata]))
    # The words of a verifier are in memory that is freed together with the verifier.
    remote.verifier = object() if verifies else None
    agent = remote.agent
    mine.disconnect("p", Failure(FailureKind.SOURCE_GONE, "it is over"))
    mine._reap()
    assert agent.is_open == (not verifies)
    assert (mine._spare is agent) == (not verifies)


def test_leases_are_counted_by_how_they_ended(engine: Any) -> None:
    clock = Clock()
    p, d = engine("p", clock=clock), engine("d")
    d.replica.pull("r", p.source(p.offer("r", 0)), 20.0)
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=lambda: d.pulls and p.overs)
    for word_idx in (1, 2):
        p.offer(f"expires {word_idx}", word_idx, 5.0)
    clock.now += 5.1
    run(p, d, until=lambda: len(p.overs) == 3)
    p.replica.revoke(p.offer("revoked", 3).lease_id, "an abort, before it expired")
    p.take()
    assert p.replica.stats.snapshot().leases == {"read": 1, "expired": 2, "other": 1}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (MemoryType.DRAM, 0)), ("cuda", (MemoryType.VRAM, 0)), ("cuda:3", (MemoryType.VRAM, 3))],
)
def test_a_rank_uses_the_memory_of_its_device(device: str, expected: tuple[MemoryType, int]) -> None:
    kinds: list[MemoryType] = []

    def agent(_: str, memory_type: MemoryType) -> Any:
        kinds.append(memory_type)
        raise AgentError("there may be no such device here")

    memory = ShardMemory(ShardLayout((), (64,)), (4096,), torch.device(device))
    assert (memory.memory_type, memory.device_index) == expected
    with pytest.raises(AgentError):
        RankTransfer(RankIdentity(engine_id="e", incarnation="i"), memory, agent=agent)
    assert kinds == [expected[0]]


@pytest.mark.parametrize("options", [{"checks": True}, {"verify": 0.01}])
def test_page_checks_are_refused_for_pages_on_a_gpu(options: dict[str, Any]) -> None:
    identity, layout = RankIdentity(engine_id="e", incarnation="i"), ShardLayout((), (64,))
    with pytest.raises(InvalidEngineError, match="engine 'e' rank 0: page checks .* these pages are in VRAM"):
        RankTransfer(identity, ShardMemory(layout, (4096,), torch.device("cuda")), **options)
