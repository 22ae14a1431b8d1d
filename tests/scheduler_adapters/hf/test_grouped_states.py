"""LFM3: windows, full attention and short convolutions in one model, over tables of their own and kept states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import LayerGroup
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
from tests.kvcache.tiers.stored_objects import StoredObjects
from tests.scheduler_adapters.hf.test_groups import PROMPTS, SYSTEM
from tests.scheduler_adapters.hf.test_own_tokens import conversations
from tests.scheduler_adapters.serving import assert_nothing_held, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

PAGE, NEW, COPIES = 8, 20, 16
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["among-pages", "apart"])


@pytest.fixture(scope="module")
def model(shared_model: Callable[..., Any]) -> Any:
    return shared_model("lfm3")


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
