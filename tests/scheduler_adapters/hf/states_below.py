"""Helpers for tests of states in lower tiers: managers with a host tier, and conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcache.sizing import page_bytes
from kvcache.states.state_memory import kind_offsets, pages_of_slab, state_layouts
from scheduler_adapters.hf.recurrent import state_shape_of
from scheduler_adapters.hf.runner import kv_params_of, manager_for, num_layers_of
from scheduler_adapters.loop import Request, ServingLoop
from tests.scheduler_adapters.serving import own_tokens, serve

PAGE = 8


def state_bytes(model: Any, shards: int = 1) -> int:
    """Returns the number of bytes that a state takes in a lower tier."""
    return sum(kind_offsets(kinds)[-1] for kinds in state_layouts(state_shape_of(model), shards))


def below(
    model: Any,
    *,
    slabs: bool = True,
    shards: int = 1,
    rows: int = 2,
    states: int = 2,
    pages: int = 16,
    host_states: int = 40,
    host_pages: int = 200,
    folder: Path | None = None,
    checks: bool = True,
    page_size: int = PAGE,
    over: dict[str, Any] | None = None,
) -> Any:
    """Returns a manager with memory for this many states and pages, on the device and in the host tier. Without slabs
    there is one state page for each request, and `states - 1` pages for copies.
    """
    bare = kv_params_of(model.config, page_size=page_size, n_devices=shards, enable_prefix_caching=True)
    page = page_bytes(bare, num_layers_of(model.config), page_size)
    of_states, of_pages = host_states * state_bytes(model, shards), host_pages * page
    space = of_states + of_pages
    params: dict[str, Any] = {
        "enable_kvcache_swapping_to_host": True,
        "host_kvcache_swap_space_gb": (space + 0.5) / 2**30,
    }
    params["tier_state_share"] = (of_states + 0.5) / space
    if folder is not None:
        params |= {"file_tier_dir": str(folder), "file_tier_max_gb": 1e-2, "file_tier_key": "a model"}
    cache = dataclasses.replace(bare, **(params | (over or {})))
    options: dict[str, Any] = {"enable_runtime_checks": checks}
    if slabs:
        options["available_cache_memory"] = (states * slab_pages(model, bare, page_size) + pages) * page
        return manager_for(model, cache, rows, 4096, ["cpu"] * shards, **options)
    cache = dataclasses.replace(cache, share_state_memory=False, state_copies=states - 1)
    each = sum(layout.page_bytes for kinds in state_layouts(state_shape_of(model), shards) for layout in kinds.values())
    options["available_cache_memory"] = (rows + states) * each + pages * page
    return manager_for(model, cache, rows, 4096, ["cpu"] * shards, **options)


def slab_pages(model: Any, cache: Any, page_size: int) -> int:
    from kvcache.layout import shard_layouts

    layouts = state_layouts(state_shape_of(model), cache.n_devices)
    return pages_of_slab(layouts, shard_layouts(cache, num_layers_of(model.config), page_size))


def turns_of(
    model: Any, prompts: Sequence[list[int]], asked: int, new: int
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields the turns of all users, round by round.

    Each turn has the user's name, the prompt with the conversation so far, and the answer.
    """
    said = [list(prompt) for prompt in prompts]
    for turn in range(asked):
        for at, prompt in enumerate(said):
            answer = own_tokens(model, prompt, new)
            yield f"{at}.{turn}", list(prompt), answer
            said[at] = [*prompt, *answer, 65 + turn, 66, 67]


def found_share(loop: ServingLoop, model: Any, prompts: Sequence[list[int]], asked: int, new: int) -> float:
    """Returns the fraction of all prompt tokens that were found cached."""
    for name, prompt, _ in turns_of(model, prompts, asked, new):
        serve(loop, [Request(name, prompt, new)])
    return loop.manager.metrics.cache_hit_rate
