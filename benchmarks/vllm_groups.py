"""vLLM's KV cache manager, asked what `benchmarks.layer_groups` asks ours: a row a model, as JSON lines.

`benchmarks.layer_groups` starts it by the Python of vLLM's environment; no model is loaded, and no memory of a cache
taken. The layers' specs are those that vLLM has for these models, the groups are made by vLLM, and a pool has as many
blocks as the budget holds. A step is what vLLM's scheduler does for each request that decodes: slots for a token, and
the token appended, with the hash of a block where one is full. The block tables that a worker makes of it are left out,
where ours are part of the step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_planning
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import Request

from benchmarks.frame import WARM_UP, Row, now, pin, settle
from benchmarks.layer_groups import (
    BATCH,
    BUDGET,
    BUDGET_OF_STEPS,
    CHUNK,
    LENGTH,
    LENGTHS,
    LONGEST,
    MODELS,
    PAGE,
    TRACE,
    lost_percent,
    prompt,
    trace_prompts,
)
from benchmarks.pools import expect

_PARAMS = SamplingParams(max_tokens=1 << 20)
_HASH = get_hash_fn_by_name("sha256")


def manager_of(name: str, budget: int) -> KVCacheManager:
    """A manager with as many blocks as the budget holds."""
    layers, full, window, of_token = MODELS[name]
    # Of one head, whose bytes are those of all: only these count.
    shape = {"block_size": PAGE, "num_kv_heads": 1, "head_size": of_token // 4, "dtype": torch.bfloat16}
    specs = {
        str(layer): FullAttentionSpec(**shape) if layer in full else SlidingWindowSpec(**shape, sliding_window=window)
        for layer in range(layers)
    }
    groups = kv_cache_planning._get_kv_cache_groups_uniform_page_size(specs)  # noqa: SLF001 - the rest reads a model
    of_block = PAGE * of_token * max(len(group.layer_names) for group in groups)
    config = KVCacheConfig(num_blocks=budget // of_block, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        LONGEST,
        scheduler_block_size=PAGE,
        hash_block_size=PAGE,
        max_in_flight_tokens=CHUNK,
        enable_caching=True,
    )


def prefilled(manager: KVCacheManager, name: str, tokens: Sequence[int]) -> tuple[Request, int] | None:
    """A request whose prompt ran in chunks, and how many of its tokens were found; None: it does not fit."""
    request = Request(name, list(tokens), _PARAMS, None, block_hasher=get_request_block_hasher(PAGE, _HASH))
    blocks, found, *_ = manager.get_computed_blocks(request)
    end = found
    while end < len(tokens):
        count = min(CHUNK, len(tokens) - end)
        made = (
            manager.allocate_slots(request, count, found, blocks)
            if end == found
            else manager.allocate_slots(request, count)
        )
        if made is None:
            manager.free(request)
            return None
        end += count
        request.num_computed_tokens = end
    request.append_output_token_ids(1)
    return request, found


def fitting(manager: KVCacheManager, length: int) -> tuple[int, int]:
    """Requests of so many tokens that decode at a time, and the blocks that the first of them holds."""
    count = held = 0
    while (made := prefilled(manager, str(count), prompt(count, length).tolist())) is not None:
        if manager.allocate_slots(made[0], 1) is None:
            break
        count += 1
        held = held or manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    return count, held


def step_us(manager: KVCacheManager, repeats: int) -> list[float]:
    """Of each page's worth of steps the mean, in microseconds."""
    made = [prefilled(manager, str(at), prompt(at, LENGTH + at % PAGE).tolist()) for at in range(BATCH)]
    batch, means = [one[0] for one in made if one is not None], list[float]()
    settle()
    for _ in range(WARM_UP + repeats):
        start = now()
        for _ in range(PAGE):
            manager.new_step_starts()
            for request in batch:
                expect(manager.allocate_slots(request, 1) is not None, "every request has its blocks")
            for request in batch:
                request.num_computed_tokens += 1
                request.append_output_token_ids(1)
        means.append((now() - start) / 1e3 / PAGE)
    return means[WARM_UP:]


def cached_tokens(manager: KVCacheManager) -> int | None:
    """Tokens of the trace's prompts that were found, one request after another; None where there is no trace."""
    total = 0
    for number, tokens in enumerate(trace_prompts()):
        made = prefilled(manager, f"t{number}", tokens.tolist())
        expect(made is not None, "a prompt alone fits")
        if made is not None:
            total += made[1]
            manager.free(made[0])
    return total if TRACE.exists() else None


def measure(repeats: int) -> Iterator[Row]:
    """A row for each model."""
    for name in MODELS:
        times = step_us(manager_of(name, BUDGET_OF_STEPS), repeats)
        groups = manager_of(name, BUDGET).kv_cache_config.kv_cache_groups
        row: Row = {"model": name, "manager": f"vLLM {vllm.__version__}", "tables": len(groups)}
        in_page = max(len(group.layer_names) for group in groups)
        for length in LENGTHS:
            row[f"fit {length}"], held = fitting(manager_of(name, BUDGET), length)
            row[f"lost % {length}"] = lost_percent(name, length, held * in_page)
        row |= {"step_min": round(min(times), 1), "step_median": round(statistics.median(times), 1)}
        yield row | {"cached tokens": cached_tokens(manager_of(name, BUDGET))}


if __name__ == "__main__":
    pin()
    init_none_hash(_HASH)
    for each in measure(int(sys.argv[1])):
        print(json.dumps(each), flush=True)
