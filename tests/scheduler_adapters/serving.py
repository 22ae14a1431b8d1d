"""What tests of served models share: a manager of so many pages, a loop over it, and running the loop to its end."""

from collections.abc import Sequence
from typing import Any

from kvcache.manager import PagedKVCacheManager
from scheduler_adapters.hf import HFRunner, kv_params_of, num_layers_of
from scheduler_adapters.loop import Output, Request, ServingLoop


def new_manager(model: Any, pages: int, page_size: int = 16, rows: int = 8, **params: Any) -> PagedKVCacheManager:
    cache = kv_params_of(model.config, page_size=page_size, **params)
    layers = num_layers_of(model.config)
    memory = pages * page_size * cache.bytes_per_token(layers) * cache.data_parallel_degree
    return PagedKVCacheManager(
        cache, rows, 4096, layers, ["cpu"] * cache.n_devices, available_cache_memory=memory, enable_runtime_checks=True
    )


def new_loop(model: Any, pages: int = 200, budget: int = 64, **manager: Any) -> ServingLoop:
    return ServingLoop(new_manager(model, pages, **manager), HFRunner(model), token_budget=budget)


def serve(loop: ServingLoop, requests: Sequence[Request], limit: int = 2000) -> dict[str, list[Output]]:
    for request in requests:
        loop.add(request)
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    for _ in range(limit):
        if not loop.has_work:
            return outputs
        for output in loop.step():
            outputs[output.request_id].append(output)
    raise AssertionError(f"not done after {limit} steps: {loop.num_running} running, {loop.num_waiting} waiting")


def requests_of(prompts: Sequence[list[int]], new: int, **fields: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **fields) for i, prompt in enumerate(prompts)]


def tokens_of(outputs: dict[str, list[Output]]) -> list[list[int | None]]:
    return [[output.token for output in whole] for whole in outputs.values()]


def assert_nothing_held(loop: ServingLoop) -> None:
    loop.manager.check()
    assert loop.manager.num_free_blocks == loop.manager.total_num_pages
