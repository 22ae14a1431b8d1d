"""Latents and recurrent states in one manager: every shard has all latents, but only its own heads of a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.params import SSM_KIND, StateShape
from kvcache.sizing import page_bytes

DELTA = StateShape(3, 4, 8, 4, 8, 4, torch.float32, form="gated_delta")
WIDTH, PAGE, LAYERS = 24, 4, 2
TOKENS = range(9)
SHAPES = pytest.mark.parametrize(("tp", "shared"), [(1, True), (2, True), (2, False), (4, True), (4, False)])


def manager_of(tp: int, shared: bool) -> Any:
    params = KVCacheParams(
        torch.float32,
        1,
        WIDTH,
        enable_prefix_caching=True,
        page_size=PAGE,
        n_devices=tp,
        is_mla=True,
        states=DELTA,
        share_state_memory=shared,
    )
    assert page_bytes(params, LAYERS, PAGE) == tp * LAYERS * PAGE * WIDTH * 4
    options: dict[str, Any] = {"available_cache_memory": 150_000 * tp, "enable_runtime_checks": True}
    return PagedKVCacheManager(params, 3, 64, LAYERS, ["cpu"] * tp, **options)


@SHAPES
def test_latents_are_on_every_shard_and_states_are_split(tp: int, shared: bool) -> None:
    manager = manager_of(tp, shared)
    blocks = manager.device_tensors[0]
    assert {tuple(shard.shape[1:]) for shard in blocks} == {(1, LAYERS, PAGE, 1, WIDTH)}
    assert len({shard.data_ptr() for shard in blocks}) == tp
    for shard, kinds in enumerate(manager.states[0].layouts):
        channels, heads = (shard * 32 // tp, 32 // tp), (shard * 4 // tp, 4 // tp)
        assert {kind: (layout.first_head, layout.num_heads) for kind, layout in kinds.items()} == {
            **dict.fromkeys(DELTA.conv_kinds, channels),
            SSM_KIND: heads,
        }
        of_shard = sum(layout.page_bytes for layout in kinds.values())
        assert of_shard * tp == 3 * 4 * (3 * 8 * 3 + 8 * 8) * 4
        # A shard has only its part of a state, but all latents. With more shards, a slab therefore has fewer pages.
        if shared:
            page = LAYERS * PAGE * WIDTH * 4
            assert (manager.slab_pages - 1) * page < of_shard <= manager.slab_pages * page
    manager.check()


def run(manager: Any, context: TextContext, value: float) -> int:
    """Runs a chunk that leaves states and latents with the value `value`. Returns its number of tokens."""
    assert manager.maybe_reserve(context)
    (states,), name, tokens = manager.states, context.request_id, context.active_length
    inputs = manager.fetch([context])
    pages = states.pages_at([name], [context.start_idx])
    for layer in range(DELTA.layers):
        states.write(layer, pages, DELTA.conv_kinds, torch.arange(96.0 * 3).view(1, 96, 3) + value)
        states.write(layer, pages, (SSM_KIND,), torch.arange(256.0).view(1, 4, 8, 8) - value)
    for shard in inputs:
        shard.blocks[shard.lookup_table[0, context.start_idx // PAGE]] = value
    states.advance(pages, [context.active_idx])
    context.update(0)
    manager.step([context])
    return tokens


@SHAPES
def test_a_prefix_is_found_with_its_latents_and_the_state_after_it(tp: int, shared: bool) -> None:
    manager = manager_of(tp, shared)
    first, again = TextContext(TOKENS, 64, "first"), TextContext([*TOKENS, 9, 9], 64, "again")
    manager.external_claim("first")
    assert [run(manager, first, 5.0), run(manager, first, 7.0)] == [8, 1]
    manager.release("first")
    manager.external_claim("again")
    assert manager.maybe_reserve(again)
    assert again.start_idx == 8
    (states,) = manager.states
    pages = states.pages_at(["again"], [8])
    for layer in range(DELTA.layers):
        assert torch.equal(states.read(layer, pages, DELTA.conv_kinds)[0], torch.arange(96.0 * 3).view(96, 3) + 5)
        assert torch.equal(states.read(layer, pages, (SSM_KIND,))[0], torch.arange(256.0).view(4, 8, 8) - 5)
    found = [shard.blocks[shard.lookup_table[0, 0]] for shard in manager.fetch([again])]
    assert all(torch.equal(latents, torch.full((1, LAYERS, PAGE, 1, WIDTH), 5.0)) for latents in found)
    manager.release("again")
    manager.check()
    assert manager.num_free_blocks == manager.total_num_pages
