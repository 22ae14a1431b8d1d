"""Recurrent layers over several replicas. Each replica has the states of its own requests, and the tokens are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.endpoints.prometheus import ManagerCollector
from kvcache.errors import NoFreeStatePageError
from kvcache.replica.context import TextContext
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, manager_for, num_layers_of
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.serving import assert_nothing_held, loop_of, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

PAGE, NEW = 8, 20
SYSTEM = ByteTokenizer().encode("What all of these prompts begin with. ")
ENDS = ("Who wrote it?", "And who read it, some time later?", "x", "Was it long?")
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)[1:]] for text in ENDS]
WAYS = {"apart": {"share_state_memory": False, "state_copies": 8}, "shared": {}}


@pytest.fixture(scope="module", params=["bamba", "qwen3_next", "kimi_linear"])
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    return shared_model(request.param)


def two_replicas(model: Any, way: str, tokens: int = 600, states: int = 13, tp: int = 1, **over: Any) -> Any:
    """Returns a manager with two replicas of four requests each, and memory for this many tokens and states."""
    params = kv_params_of(
        model.config, page_size=PAGE, n_devices=2 * tp, data_parallel_degree=2, enable_prefix_caching=True
    )
    params = dataclasses.replace(params, **WAYS[way], **over)
    sizes = 8, 4096, ["cpu"] * 2 * tp
    of_token = params.bytes_per_token(num_layers_of(model.config))
    probe = manager_for(model, params, *sizes, available_cache_memory=64 << 20)
    of_state = probe.slab_pages * PAGE * of_token
    of_state = of_state or sum(blocks[0].nbytes for shard in probe.states[0].blocks for blocks in shard)
    memory = tokens * of_token + states * of_state
    return manager_for(model, params, *sizes, available_cache_memory=2 * memory, enable_runtime_checks=True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_on_both_replicas_with_separate_hits(
    model: Any, expected: list[list[int]], way: str, tp: int
) -> None:
    manager = two_replicas(model, way, tp=tp)
    loop, on = loop_of(manager, model, 24), list[int]()
    loop.on_admit = lambda request_id, replica, cached: on.append(replica)
    assert tokens_of(serve(loop, requests_of(PROMPTS * 2, NEW))) == expected * 2
    assert set(on) == {0, 1}
    hits = [states.hits for states in manager.states]
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert sum(states.hits for states in manager.states) == sum(hits) + len(PROMPTS)
    assert manager.metrics.cache_tokens >= len(PROMPTS) * (len(SYSTEM) // PAGE * PAGE)
    told = figures(manager)
    assert told["pagewire_state_hits_total"] == [states.hits for states in manager.states]
    assert told["pagewire_states", "held"] == [0, 0]
    assert told["pagewire_states", "idle"] == [states.pool.idle.count for states in manager.states] != [0, 0]
    assert manager.metrics.state_hits == sum(told["pagewire_state_hits_total"])
    assert_nothing_held(manager)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_when_requests_of_both_replicas_are_preempted(model: Any, way: str) -> None:
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS * 2)]
    # The memory is enough for two prompts on each replica.
    manager = two_replicas(model, way, 17 * PAGE, states=2 if way == "shared" else 13)
    loop = loop_of(manager, model, 32)
    expected = [own_tokens(model, prompt, NEW) for prompt in prompts]
    assert tokens_of(serve(loop, requests_of(prompts, NEW))) == expected
    assert loop.preemptions
    assert_nothing_held(manager)


def figures(manager: Any) -> dict[Any, list[float]]:
    """Returns the metrics of the states. A key is the metric's name with all labels except the replica. A value has one
    figure for each replica.
    """
    found: dict[Any, list[float]] = {}
    for family in ManagerCollector(manager, engine="0").collect():
        for sample in family.samples:
            if "state" in sample.name and "replica" in sample.labels:
                name = (sample.name, sample.labels["state"]) if "state" in sample.labels else sample.name
                found.setdefault(name, []).append(sample.value)
    return found


def run(manager: Any, runner: HFRunner, contexts: list[TextContext]) -> list[int]:
    """Runs a step of requests of one replica."""
    assert all(manager.maybe_reserve(context) for context in contexts)
    replica = manager.get_replica(contexts[0])
    tokens = runner.run(contexts, [manager.fetch(contexts)[replica]])
    for context, token in zip(contexts, tokens, strict=True):
        context.update(token)
    manager.step(contexts)
    return tokens


@pytest.mark.parametrize("way", WAYS)
def test_pages_of_one_replica_reach_the_other_through_the_shared_host_tier(
    model: Any, expected: list[list[int]], way: str
) -> None:
    manager = two_replicas(model, way, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=0.05)
    runner = HFRunner(model, manager.states)
    for replica in (0, 1):
        context = TextContext(PROMPTS[1], 4096, f"on {replica}")
        manager.external_claim(context.request_id, replica)
        while context.current_length < len(PROMPTS[1]) + NEW:
            run(manager, runner, [context])
        assert context.tokens.tolist() == PROMPTS[1] + expected[1]
        manager.release(context.request_id)
        manager.flush_tiers()
    metrics = manager.metrics
    assert (metrics.h2d_states_copied, metrics.state_hits) == (1, 1)
    assert metrics.h2d_blocks_copied
    assert [states.hits for states in manager.states] == [0, 1]
    assert_nothing_held(manager)


@pytest.mark.parametrize("way", WAYS)
def test_evicted_states_are_counted_on_their_replica(model: Any, way: str) -> None:
    manager = two_replicas(model, way, 17 * PAGE, states=2 if way == "shared" else 13)
    runner = HFRunner(model, manager.states)
    for number in range(14):
        context = TextContext([number, *PROMPTS[1]], 4096, str(number))
        manager.external_claim(context.request_id, 1)
        while context.start_idx < len(PROMPTS[1]):
            run(manager, runner, [context])
        manager.release(context.request_id)
    told = figures(manager)["pagewire_evicted_states_total"]
    assert told == [0, manager.metrics.state_evictions] != [0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_and_guesses_stay_on_their_replica(model: Any, expected: list[list[int]], way: str) -> None:
    manager = two_replicas(model, way)
    runner = HFRunner(model, manager.states)
    for replica in (1, 0):
        parent = TextContext(PROMPTS[0], 4096, "parent")
        manager.external_claim("parent", replica)
        assert [pages.holds("parent") for pages in manager.states] == [at == replica for at in range(2)]
        while parent.current_length < len(PROMPTS[0]) + 5:
            run(manager, runner, [parent])
        child = parent.fork("child")
        assert manager.fork(parent, child)
        assert manager.get_replica(child) == replica
        assert runner.draft("child")
        start = child.start_idx
        assert manager.maybe_reserve(child, 3)
        for guess in (300, 300):
            child.update(guess % 259)
        child.set_token_indices(start_idx=start)
        ((first, *_),) = runner.verify([child], [manager.fetch([child])[replica]], [2])
        child.set_token_indices(active_idx=start + 1, end_idx=start + 1)
        child.update(first)
        manager.step([child])
        while parent.current_length < len(PROMPTS[0]) + NEW:
            run(manager, runner, [parent])
        while child.current_length < len(PROMPTS[0]) + NEW:
            run(manager, runner, [child])
        assert parent.tokens.tolist() == child.tokens.tolist() == PROMPTS[0] + expected[0]
        manager.release("parent")
        manager.release("child")
        assert_nothing_held(manager)


def test_a_fork_without_room_for_its_state_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = two_replicas(model, "shared")
    parent = TextContext(PROMPTS[0], 4096, "parent")
    manager.external_claim("parent", 1)
    run(manager, HFRunner(model, manager.states), [parent])
    child = parent.fork("child")
    manager.reset_prefix_cache()  # The pool has no copy left that it could evict.
    child.set_token_indices(start_idx=3)  # The child may start at another token than its parent.
    before = child.start_idx, child.active_idx, manager.num_free_blocks
    monkeypatch.setattr(manager._replicas.each[1].pool, "can_take_slab", lambda: False)
    with pytest.raises(NoFreeStatePageError, match="'child': all .* state pages are held"):
        manager.fork(parent, child)
    monkeypatch.undo()
    assert (child.start_idx, child.active_idx, manager.num_free_blocks) == before
    assert not manager.contains("child")
    assert manager.fork(parent, child)
    manager.release("parent")
    manager.release("child")
    assert_nothing_held(manager)


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_without_room_for_a_state_is_not_recommended(model: Any, way: str) -> None:
    manager = two_replicas(model, way, tokens=120)
    states, rows, leases = manager.states[0], manager._replicas.each[0].rows, []
    # The loop takes all state pages. A lease holds a state even after its request is released.
    while states.pool.has_room:
        manager.external_claim("gone", 0)
        leases.append(manager.lease("gone"))
        manager.release("gone")
    context = TextContext(PROMPTS[0], 4096, "r")
    assert (manager.admission(context).replica_idx, manager.admission(context).fits) == (1, True)
    assert not rows.row_of
    with pytest.raises(NoFreeStatePageError, match="'r': all .* state pages are held"):
        manager.external_claim("r", 0)
    assert not manager.contains("r")
    manager.external_claim("r", 1)
    manager.release("r")
    for lease in leases:
        manager.end_lease(lease)
    assert_nothing_held(manager)


def test_pages_of_requests_on_both_replicas_stay_from_fetch_to_step(model: Any) -> None:
    manager = two_replicas(model, "shared")
    contexts = [TextContext(prompt, 4096, f"r{at}") for at, prompt in enumerate(PROMPTS[:2])]
    for replica, context in enumerate(contexts):
        manager.external_claim(context.request_id, replica)
        assert manager.maybe_reserve(context)

    def stay() -> list[bool]:
        staying = [replica.pool.moves.staying() for replica in manager._replicas.each]
        own = [manager.get_req_blocks(context.request_id) for context in contexts]
        return [bool(mask[pages].all()) for mask, pages in zip(staying, own, strict=True)]

    assert stay() == [False, False]
    manager.fetch(contexts)
    assert stay() == [True, True]
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    assert stay() == [False, False]
    for context in contexts:
        manager.release(context.request_id)
    assert_nothing_held(manager)
