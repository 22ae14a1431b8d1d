"""LFM3: windows, full attention and short convolutions in one model, over tables of their own and kept states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache import LayerGroup, TextContext
from kvcache.sizing import page_bytes
from scheduler_adapters.hf.recurrent import groups_of
from scheduler_adapters.hf.runner import (
    HFRunner,
    kv_params_of,
    manager_for,
    num_layers_of,
    state_bytes_of,
)
from scheduler_adapters.loop import Request, ServingLoop
from tests.kvcache.build import proven
from tests.kvcache.tiers.stored_objects import StoredObjects
from tests.scheduler_adapters.hf.speculating import Engine, assert_equal
from tests.scheduler_adapters.hf.test_groups import PROMPTS, SYSTEM
from tests.scheduler_adapters.hf.test_kept_states import conversations
from tests.scheduler_adapters.serving import assert_nothing_held, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

PAGE, NEW, COPIES = 8, 20, 16
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["among-pages", "apart"])


@pytest.fixture(scope="module")
def model(shared_model: Callable[..., Any]) -> Any:
    return shared_model("lfm3")


@pytest.fixture(scope="module")
def expected(model: Any) -> Any:
    return [own_tokens(model, prompt, NEW) for prompt in PROMPTS]


def manager_of_pages(
    model: Any, pages: int, shared: bool, rows: int = 8, tiers: dict[str, Any] | None = None, **params: Any
) -> Any:
    """A manager of so many pages of one layer each, and of states among them or beside them."""
    cache = kv_params_of(
        model.config, page_size=PAGE, **{"group_layers": True, "enable_prefix_caching": True, **params}
    )
    caching = cache.enable_prefix_caching
    copies = None if shared or not caching else COPIES
    cache = dataclasses.replace(cache, share_state_memory=shared, state_copies=copies, **(tiers or {}))
    memory = pages * page_bytes(cache, 1 if cache.groups else num_layers_of(model.config), PAGE)
    memory += 0 if shared else state_bytes_of(model, cache.n_devices, rows + (copies or 0))
    devices = ["cpu"] * cache.n_devices
    return manager_for(model, cache, rows, 512, devices, available_cache_memory=memory, enable_runtime_checks=True)


def loop_of(manager: Any, model: Any, budget: int = 64) -> ServingLoop:
    return ServingLoop(manager, HFRunner(model, manager.states), token_budget=budget)


def test_the_groups_are_of_the_layers_that_attend(model: Any, make_model: Callable[..., Any]) -> None:
    assert groups_of(model.config) == (LayerGroup("full", (1,)), LayerGroup("window", (0, 2), 20))
    named = {"layers_block_type": ["linear_attention", "full_attention"], "sliding_window": 8}
    assert groups_of(make_model("nemotron", **named).config) == ()


@SHARED
@pytest.mark.parametrize(("budget", "tp"), [(512, 1), (16, 2)])
def test_tokens_equal_with_hits_chunks_and_shards(
    model: Any, expected: Any, budget: int, tp: int, shared: bool
) -> None:
    manager = manager_of_pages(model, 400, shared, n_devices=tp)
    assert len(manager.layer_tables.tables) == 3
    loop = loop_of(manager, model, budget)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert tokens_of(serve(loop, [Request("r", prompt, NEW)])) == [tokens]
    assert manager.metrics.cache_tokens >= 2 * (len(SYSTEM) // PAGE - 1) * PAGE
    again = tokens_of(serve(loop, requests_of([[*PROMPTS[0], *expected[0][:-1]]], 1)))
    assert again == [expected[0][-1:]]
    assert manager.states[0].hits >= 3
    assert_nothing_held(manager)


@SHARED
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_equal_when_requests_give_way(model: Any, shared: bool, caching: bool) -> None:
    manager = manager_of_pages(model, 66, shared, enable_prefix_caching=caching)
    loop = loop_of(manager, model, 16)
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]  # none shares a page with another
    wanted = [own_tokens(model, prompt, NEW) for prompt in prompts]
    assert tokens_of(serve(loop, requests_of(prompts, NEW))) == wanted
    assert loop.preemptions
    assert bool(manager.metrics.evictions) == caching
    assert_nothing_held(manager)


@SHARED
def test_tokens_equal_after_a_hit_and_a_fork(model: Any, expected: Any, shared: bool) -> None:
    manager = manager_of_pages(model, 400, shared)
    loop = loop_of(manager, model)
    serve(loop, [Request("r", PROMPTS[0], 1)])
    runner, parent = loop.runner, TextContext(PROMPTS[0], 512, "parent")
    manager.external_claim("parent")
    contexts = [parent]
    for step in range(NEW):
        assert all(manager.maybe_reserve(context) for context in contexts)
        tokens = runner.run(contexts, manager.fetch(contexts))
        for context, token in zip(contexts, tokens, strict=True):
            context.update(token)
        manager.step(contexts)
        if step == 5:
            contexts.append(parent.fork("child"))
            assert manager.fork(parent, contexts[1])
    assert manager.states[0].hits == 1
    for context in contexts:
        assert context.tokens[len(PROMPTS[0]) :].tolist() == expected[0]
        manager.release(context.request_id)
    assert_nothing_held(manager)


@SHARED
def test_tokens_equal_with_guesses(model: Any, shared: bool) -> None:
    engine = Engine(model, 0.7, manager=manager_of_pages(model, 400, shared))
    answers = engine.knows(PROMPTS)
    for _ in range(2):
        assert_equal(model, answers, engine.serve(PROMPTS))
    assert engine.accepted
    assert engine.set_back
    assert_nothing_held(engine.manager)


@SHARED
@pytest.mark.parametrize("had", [False, True])
def test_tokens_equal_behind_an_import_of_pages_and_state(model: Any, expected: Any, shared: bool, had: bool) -> None:
    source, target = (manager_of_pages(model, 400, shared) for _ in range(2))
    serve(loop_of(source, model, 16), [Request("r", PROMPTS[0], 1, hold_pages=True)])
    taker = loop_of(target, model)
    if had:
        serve(taker, [Request("r", PROMPTS[1], 1)])
    context = taker.context_for(Request("r", [*PROMPTS[0], expected[0][0]], NEW - 1))
    target.external_claim("r")
    pending = target.import_block_table(context, source.block_table("r"))
    assert bool(pending.tokens[0]) == had
    ((there, here),) = pending.wholes
    for dst, src, (first, stop) in pending.copies(pending.tokens[0], last=True)[:-1]:
        count = -(-stop // PAGE) - first // PAGE if first < stop else 0
        target.device_tensors[0][0][dst[:count]] = source.device_tensors[0][0][src[:count]]
    for mine, theirs in zip(target.states[0].blocks[0], source.states[0].blocks[0], strict=True):
        mine[here] = theirs[there]
    target.commit_import(context, pending, proven(target, pending))
    taker.adopt(Request("r", PROMPTS[0], NEW), context)
    tokens = expected[0][:1]
    while taker.has_work:
        tokens += [int(output.token or 0) for output in taker.step()]
    assert tokens == expected[0]
    assert_nothing_held(target)


@SHARED
def test_conversations_find_all_that_went_before(model: Any, shared: bool) -> None:
    manager = manager_of_pages(model, 600, shared)
    answered = conversations(loop_of(manager, model), 4, 3)
    assert [answer for _, answer in answered] == [own_tokens(model, prompt, NEW) for prompt, _ in answered]
    found = sum((len(prompt) + len(answer) - 1) // PAGE * PAGE for prompt, answer in answered[:8])
    assert manager.metrics.cache_tokens >= found
    assert manager.states[0].num_kept <= 4 * (3 + 3)  # after each prompt, and each answer
    assert_nothing_held(manager)


def longest_held(model: Any, **params: Any) -> int:
    """Bytes that a request of 400 tokens holds at the most beside its state, its prompt in chunks of 16."""
    manager = manager_of_pages(model, 400, shared=False, **params)
    loop = loop_of(manager, model, 16)
    for request in requests_of([(SYSTEM * 3)[:380]], NEW):
        loop.add(request)
    held = 0
    while loop.has_work:
        loop.step()
        held = max(held, manager.total_num_pages - manager.num_free_blocks)
    return held * manager.layouts[0].page_bytes


def test_fewer_pages_are_held(model: Any) -> None:
    grouped, whole = longest_held(model), longest_held(model, group_layers=False)
    page = whole // 50 // 3
    assert whole == 3 * 50 * page
    assert grouped <= (50 + 2 * 7) * page


def test_a_window_in_a_nemotron_changes_nothing_as_its_layers_do_not_look_at_it(make_model: Callable[..., Any]) -> None:
    model = make_model("nemotron", sliding_window=8)
    manager = manager_of_pages(model, 200, shared=True)
    assert not manager.params.groups
    wanted = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    assert tokens_of(serve(loop_of(manager, model), requests_of(PROMPTS, NEW))) == wanted


@SHARED
@pytest.mark.parametrize(("budget", "tp"), [(512, 1), (16, 2)])
def test_a_minimax_with_a_window_has_one_table(
    make_model: Callable[..., Any], budget: int, tp: int, shared: bool
) -> None:
    """Its window is that of all its attention layers, so every page is kept, and each layer sees the last tokens."""
    kinds = ["full_attention", "linear_attention", "full_attention"]
    model, unbounded = (make_model("minimax", layer_types=kinds, sliding_window=tokens) for tokens in (8, None))
    wanted = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    assert wanted[0] != own_tokens(unbounded, PROMPTS[0], NEW)
    manager = manager_of_pages(model, 400, shared, n_devices=tp)
    assert not manager.params.groups
    loop = loop_of(manager, model, budget)
    assert [tokens_of(serve(loop, [Request("r", prompt, NEW)]))[0] for prompt in PROMPTS] == wanted
    assert tokens_of(serve(loop, [Request("r", PROMPTS[0], NEW)])) == wanted[:1]
    assert manager.states[0].hits == 3
    assert_nothing_held(manager)


@pytest.mark.parametrize("budget", [512, 16])
def test_a_minimax_with_a_window_and_a_recurrent_layer_first_gives_its_own_logits(
    make_model: Callable[..., Any], own_logits: Callable[..., Any], budget: int
) -> None:
    """`generate` takes the length of its mask from the first layer, which has no keys; its steps are others."""
    model = make_model("minimax", sliding_window=8)
    manager = manager_of_pages(model, 400, shared=True)
    (tokens,) = tokens_of(serve(loop_of(manager, model, budget), [Request("r", PROMPTS[0], NEW)]))
    wanted = [int(own_logits(model, [*PROMPTS[0], *tokens[:at]]).argmax()) for at in range(NEW)]
    assert tokens == wanted
    assert tokens != own_tokens(model, PROMPTS[0], NEW)


@SHARED
def test_tokens_equal_with_hits_from_the_host_and_from_files(
    model: Any, expected: Any, shared: bool, tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-2}
    tiers |= {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-2, "file_tier_key": "model"}
    manager = manager_of_pages(model, 100, shared, tiers=tiers)
    loop = loop_of(manager, model)
    others = [[at, *prompt] for at, prompt in enumerate([*PROMPTS, *PROMPTS])]
    for prompt in (PROMPTS[0], *others):  # each takes the place of what was before
        serve(loop, [Request("r", prompt, NEW)])
    found = manager.metrics.cache_tokens
    assert [tokens_of(serve(loop, [one]))[0] for one in requests_of(PROMPTS, NEW)] == expected
    assert manager.metrics.h2d_blocks_copied > len(SYSTEM) // PAGE
    assert manager.metrics.cache_tokens - found >= 3 * (len(SYSTEM) // PAGE - 1) * PAGE
    manager.close()
    again = manager_of_pages(model, 100, shared, tiers=tiers)
    loop = loop_of(again, model)
    assert [tokens_of(serve(loop, [one]))[0] for one in requests_of(PROMPTS, NEW)] == expected
    assert again.metrics.file_states_read
    assert again.metrics.file_blocks_read > len(SYSTEM) // PAGE
    assert again.metrics.cache_tokens >= 3 * (len(SYSTEM) // PAGE - 1) * PAGE
    again.close()
    assert_nothing_held(again)


@SHARED
@pytest.mark.parametrize(("count", "budget"), [(1, 64), (4, 7)])
def test_tokens_equal_with_hits_from_an_object_store(model: Any, shared: bool, count: int, budget: int) -> None:
    """Another machine goes on from what the first has written, also where that ends within an object of pages."""
    store = StoredObjects()
    tiers: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-2}
    tiers |= {"object_tier_io": store, "object_tier_pages": count, "file_tier_key": "model"}
    first = manager_of_pages(model, 300, shared, tiers=tiers)
    answered = conversations(loop_of(first, model), 2, 1)
    first.close()
    again = manager_of_pages(model, 300, not shared, tiers=tiers)
    loop = loop_of(again, model, budget)
    for prompt, answer in answered:
        follow = [*prompt, *answer, 3, 4, 5]
        assert tokens_of(serve(loop, [Request("r", follow, NEW)])) == [own_tokens(model, follow, NEW)]
    found = sum((len(prompt) + len(answer) - 1) // PAGE * PAGE for prompt, answer in answered)
    metrics = again.metrics
    assert metrics.cache_tokens == found
    assert metrics.object_states_read == again.states[0].hits == len(answered)
    assert metrics.object_blocks_read
    again.close()
    assert_nothing_held(again)
    assert store.open == 0
