"""Models none of whose layers attends to everything: the tokens of `generate`, and pages of the window alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache import TextContext
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, manager_for, num_layers_of
from scheduler_adapters.loop import ServingLoop
from tests.scheduler_adapters.hf.test_groups import CHUNKED, MIXED, NEW, PAGE, PROMPTS, SYSTEM, WINDOW
from tests.scheduler_adapters.serving import assert_nothing_held, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

CHUNK = 24
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"layer_types": MIXED[:1] * 4, "sliding_window": WINDOW, "use_sliding_window": True}),
    "llama4": ("llama4", {"layer_types": CHUNKED[:1] * 4, "attention_chunk_size": CHUNK}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    kind, changes = MODELS[request.param]
    return shared_model(kind, num_hidden_layers=4, **changes)


@pytest.fixture(scope="module")
def expected(model: Any) -> Any:
    return [own_tokens(model, prompt, NEW) for prompt in PROMPTS]


def manager_of(model: Any, pages: int, tiers: dict[str, Any] | None = None, **params: Any) -> Any:
    """A manager of so many pages, each of all layers."""
    cache = kv_params_of(model.config, page_size=PAGE, group_layers=True, **params)
    cache = dataclasses.replace(cache, **(tiers or {}))
    memory = pages * PAGE * cache.bytes_per_token(num_layers_of(model.config))
    devices = ["cpu"] * cache.n_devices
    return manager_for(model, cache, 8, 512, devices, available_cache_memory=memory, enable_runtime_checks=True)


@pytest.mark.parametrize(("budget", "tp"), [(512, 1), (16, 2)])
def test_tokens_equal_with_hits_chunks_and_shards(model: Any, expected: Any, budget: int, tp: int) -> None:
    manager = manager_of(model, 100, n_devices=tp)
    assert manager.layer_tables.kinds == (
        f"chunked {CHUNK}" if "llama4" in type(model).__name__.lower() else "window 20",
    )
    loop = ServingLoop(manager, HFRunner(model), token_budget=budget)
    first = tokens_of(serve(loop, requests_of(PROMPTS[:1], NEW)))
    others = tokens_of(serve(loop, requests_of(PROMPTS[1:], NEW)))
    assert first + others == expected
    assert manager.metrics.cache_tokens >= 2 * (len(SYSTEM) // PAGE - 1) * PAGE
    again = tokens_of(serve(loop, requests_of([[*PROMPTS[0], *expected[0][:-1]]], 1)))
    assert again == [expected[0][-1:]]
    assert_nothing_held(manager)


def test_a_long_request_holds_the_window_alone(model: Any) -> None:
    manager = manager_of(model, 60)
    loop = ServingLoop(manager, HFRunner(model), token_budget=16)
    for request in requests_of([(SYSTEM * 3)[:380]], NEW):
        loop.add(request)
    held = 0
    while loop.has_work:
        loop.step()
        held = max(held, manager.num_held_blocks)
    assert 3 <= held <= 7, "a request of 400 tokens took 50 pages where all were kept"


def test_tokens_equal_with_hits_from_the_host_and_from_files(shared_model: Callable[..., Any], tmp_path: Path) -> None:
    model = shared_model("mistral", num_hidden_layers=4, sliding_window=WINDOW)
    expected = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    tiers: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-2}
    tiers |= {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-2, "file_tier_key": "model"}
    manager = manager_of(model, 30, tiers=tiers)
    loop = ServingLoop(manager, HFRunner(model), token_budget=64)
    assert tokens_of(serve(loop, requests_of(PROMPTS[:1], NEW))) == expected[:1]
    for at in range(4):  # each takes the place of what was before
        serve(loop, requests_of([[at, *PROMPTS[0]]], NEW))
    found = manager.metrics.cache_tokens
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert 3 <= manager.metrics.h2d_blocks_copied <= 9, "of a prefix come the window's pages alone"
    assert manager.metrics.cache_tokens - found >= 3 * (len(SYSTEM) // PAGE - 1) * PAGE
    manager.close()
    again = manager_of(model, 30, tiers=tiers)
    loop = ServingLoop(again, HFRunner(model), token_budget=64)
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert again.metrics.file_blocks_read >= 3
    assert again.metrics.cache_tokens >= 3 * (len(SYSTEM) // PAGE - 1) * PAGE
    assert_nothing_held(again)
    again.close()


def test_tokens_equal_when_requests_give_way(model: Any) -> None:
    manager = manager_of(model, 6 if "llama4" in type(model).__name__.lower() else 8)
    loop = ServingLoop(manager, HFRunner(model), token_budget=16)
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]  # none shares a page with another
    wanted = [own_tokens(model, prompt, NEW) for prompt in prompts]
    assert tokens_of(serve(loop, requests_of(prompts, NEW))) == wanted
    assert loop.preemptions
    assert manager.metrics.evictions
    assert_nothing_held(manager)


@pytest.mark.parametrize("here", ["nothing", "the prompt"])
def test_tokens_equal_after_a_hand_over_of_the_window(model: Any, expected: Any, here: str) -> None:
    source, target = manager_of(model, 100), manager_of(model, 100)
    runner, whole = HFRunner(model), [*PROMPTS[0], *expected[0]]
    loop = ServingLoop(source, runner, token_budget=512)
    if here == "the prompt":
        serve(ServingLoop(target, runner, token_budget=512), requests_of([PROMPTS[0]], 1))
    loop.add(dataclasses.replace(requests_of([PROMPTS[0]], 1)[0], hold_pages=True))
    while loop.has_work:
        loop.step()
    table = source.block_table(requests_of([PROMPTS[0]], 1)[0].request_id)
    assert len(table.groups) == 1
    assert len(table.groups[0]) <= 4, "a window of 20 tokens, or a chunk of 24"
    context = TextContext(whole[: len(PROMPTS[0]) + 1], 512, "d")
    target.external_claim("d")
    pending = target.import_block_table(context, table)
    copier = target.copier(pending)
    for copy in copier.take():
        for shard, blocks in enumerate(target.device_tensors[0]):
            count = len(copy.src_pages)
            blocks[copy.dst_pages[:count]] = source.device_tensors[0][shard][copy.src_pages]
        assert len(copy.src_pages) == (1 if here == "the prompt" else len(table.groups[0]))
    target.commit_import(context, pending, copier.prove())
    while len(context.tokens) < len(whole):
        assert target.maybe_reserve(context)
        (token,) = runner.run([context], target.fetch([context]))
        context.update(token)
        target.step([context])
    assert context.tokens.tolist() == whole
    target.release("d")
    assert_nothing_held(target)
