"""Measures for vLLM's KV cache manager what `benchmarks.layer_groups` measures for ours. Prints JSON lines.

`benchmarks.layer_groups` starts it with the Python of vLLM's environment. No model is loaded, and no cache memory is
allocated. The layers' specs are vLLM's own for these models, vLLM forms the groups, and a pool has as many blocks as
fit into the budget. A step does the work of vLLM's scheduler for each decoding request: it allocates slots for a token
and appends the token, which also hashes each block that becomes full. A step does not build block tables, because
vLLM's worker builds them; for our manager they are part of the step. With recurrent layers vLLM sets the block length:
the multiple of 16 tokens whose block has as many bytes as a state in one layer. States are cached in vLLM's mode
`align`, with its scheduler's own rule for where chunks end. `matched by 16` uses `prefix_match_unit` instead of whole
blocks. The copies of states that vLLM requests are marked as done before the measured part ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_planning
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
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
from benchmarks.recurrent_models import RECURRENT
from benchmarks.recurrent_models import lost_percent as lost_of_states

_PARAMS = SamplingParams(max_tokens=1 << 20)
_HASH = get_hash_fn_by_name("sha256")


# Mamba-2 can keep a state from the middle of a chunk.
_EXPORTS = {"Nemotron-H 47B": {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}}


class Peer(NamedTuple):
    """vLLM's manager, and the parts of its scheduler that the measurements need."""

    manager: KVCacheManager
    block: int  # tokens
    matched_by: int  # tokens
    ends: SimpleNamespace | None  # input of the scheduler's rule for where chunks end; None if they may end anywhere


def peer_of(name: str, budget: int, matched_by: int | None = None) -> Peer:
    """A manager with as many blocks as fit into the budget."""
    specs, block, of_layer = _recurrent_specs(name) if name in RECURRENT else _window_specs(name)
    groups = kv_cache_planning._get_kv_cache_groups_uniform_page_size(specs)  # noqa: SLF001 - the rest reads a model
    of_block = of_layer * max(len(group.layer_names) for group in groups)
    config = KVCacheConfig(num_blocks=budget // of_block, kv_cache_tensors=[], kv_cache_groups=groups)
    if name in RECURRENT:
        config.prefix_cache_retention_interval = 0  # vLLM's default for such models
    matched_by = matched_by or block
    manager = KVCacheManager(
        config,
        LONGEST,
        scheduler_block_size=block,
        hash_block_size=matched_by,
        max_in_flight_tokens=CHUNK,
        enable_caching=True,
    )
    return Peer(manager, block, matched_by, _ends(name, manager, block, matched_by) if name in RECURRENT else None)


def _window_specs(name: str) -> tuple[dict[str, KVCacheSpec], int, int]:
    """The specs of the layers, the tokens of a block, and the bytes of a block in one layer."""
    layers, full, window, of_token = MODELS[name]
    # A single head has the bytes of all heads, because only the number of bytes matters.
    shape = {"block_size": PAGE, "num_kv_heads": 1, "head_size": of_token // 4, "dtype": torch.bfloat16}
    specs = {
        str(layer): FullAttentionSpec(**shape) if layer in full else SlidingWindowSpec(**shape, sliding_window=window)
        for layer in range(layers)
    }
    return specs, PAGE, PAGE * of_token


def _recurrent_specs(name: str) -> tuple[dict[str, KVCacheSpec], int, int]:
    model = RECURRENT[name]
    state = {"shapes": (model.conv, model.matrix), "dtypes": (torch.bfloat16, torch.float32)}
    block = PAGE * -(-MambaSpec(block_size=-1, **state).page_size_bytes // (PAGE * model.of_token))
    attention = FullAttentionSpec(
        block_size=block, num_kv_heads=model.heads, head_size=model.head_dim, dtype=torch.bfloat16
    )
    recurrent = MambaSpec(
        block_size=block,
        page_size_padded=block * model.of_token,
        mamba_cache_mode="align",
        **state,
        **_EXPORTS.get(name, {}),
    )
    specs = {f"full {at}": attention for at in range(model.full)}
    specs |= {f"recurrent {at}": recurrent for at in range(model.recurrent)}
    return specs, block, block * model.of_token


def _ends(name: str, manager: KVCacheManager, block: int, matched_by: int) -> SimpleNamespace:
    return SimpleNamespace(
        block_size=block,
        cache_config=SimpleNamespace(block_size=block),
        hash_block_size=matched_by,
        max_num_scheduled_tokens=CHUNK,
        mamba_has_prefill_checkpoint_blocks=name in _EXPORTS,
        mamba_partial_cache_hit=matched_by < block and manager.coordinator.enable_partial_hash_hits,
        mamba_prefill_checkpoint_alignment=_EXPORTS.get(name, {}).get("prefill_checkpoint_alignment"),
        mamba_shared_prefix_checkpoint=False,
        num_hash_lookahead_tokens=0,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        use_eagle_block_drop=False,
    )


def prefilled(peer: Peer, name: str, tokens: Sequence[int]) -> tuple[Request, int] | None:
    """Returns a request whose prompt ran in chunks, and how many tokens were cached.

    Returns None if it does not fit.
    """
    manager = peer.manager
    request = Request(name, list(tokens), _PARAMS, None, block_hasher=get_request_block_hasher(peer.matched_by, _HASH))
    blocks, found, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    end = found
    while end < len(tokens):
        count, hits = min(CHUNK, len(tokens) - end), found - request.num_computed_tokens if end == found else 0
        if peer.ends is not None:
            count = Scheduler._mamba_block_aligned_split(peer.ends, request, count, hits)  # noqa: SLF001
        manager.new_step_starts()
        made = (
            manager.allocate_slots(request, count, found, blocks)
            if end == found
            else manager.allocate_slots(request, count)
        )
        if made is None:
            manager.free(request)
            return None
        copied(manager)
        end += count
        request.num_computed_tokens = end
    request.append_output_token_ids(1)
    return request, found


def copied(manager: KVCacheManager) -> None:
    """Marks the requested copies as done. vLLM's scheduler then frees their blocks."""
    manager.block_pool.free_blocks(manager.take_kv_cache_block_copies()[1])


def fitting(peer: Peer, length: int) -> tuple[int, int]:
    """How many requests of this length can decode at the same time, and how many blocks the first one holds."""
    manager, count, held = peer.manager, 0, 0
    while (made := prefilled(peer, str(count), prompt(count, length).tolist())) is not None:
        manager.new_step_starts()
        if manager.allocate_slots(made[0], 1) is None:
            break
        copied(manager)
        count += 1
        held = held or manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    return count, held


def step_us(peer: Peer, repeats: int) -> list[float]:
    """The times of a step in microseconds, each a mean over as many steps as a page has tokens."""
    manager = peer.manager
    made = [prefilled(peer, str(at), prompt(at, LENGTH + at % PAGE).tolist()) for at in range(BATCH)]
    batch, means = [one[0] for one in made if one is not None], list[float]()
    settle()
    for _ in range(WARM_UP + repeats):
        start = now()
        for _ in range(PAGE):
            manager.new_step_starts()
            for request in batch:
                expect(manager.allocate_slots(request, 1) is not None, "every request has its blocks")
            copied(manager)
            for request in batch:
                request.num_computed_tokens += 1
                request.append_output_token_ids(1)
        means.append((now() - start) / 1e3 / PAGE)
    return means[WARM_UP:]


def cached_tokens(peer: Peer) -> int | None:
    """The number of the trace's prompt tokens that were found cached; None if there is no trace."""
    total = 0
    for number, tokens in enumerate(trace_prompts()):
        made = prefilled(peer, f"t{number}", tokens.tolist())
        expect(made is not None, "a prompt alone fits")
        if made is not None:
            total += made[1]
            peer.manager.free(made[0])
    return total if TRACE.exists() else None


def measure(repeats: int) -> Iterator[Row]:
    """A row for each model, and two rows for models with recurrent layers."""
    for name in (*MODELS, *RECURRENT):
        for matched_by in (None, PAGE) if name in RECURRENT else (None,):
            made = partial(peer_of, name, matched_by=matched_by)
            manager, block, *_ = made(BUDGET)
            groups = manager.kv_cache_config.kv_cache_groups
            matched = f", matched by {matched_by}" if matched_by else ""
            row: Row = {"model": name, "manager": f"vLLM {vllm.__version__}{matched}", "tables": len(groups)}
            in_page = max(len(group.layer_names) for group in groups)
            for length in LENGTHS:
                row[f"fit {length}"], held = fitting(made(BUDGET), length)
                row[f"lost % {length}"] = (
                    lost_of_states(name, length, held * in_page, block / RECURRENT[name].full)
                    if name in RECURRENT
                    else lost_percent(name, length, held * in_page)
                )
            times = step_us(made(BUDGET_OF_STEPS), repeats)
            row |= {"step_min": round(min(times), 1), "step_median": round(statistics.median(times), 1)}
            yield row | {"cached tokens": cached_tokens(made(BUDGET))}


if __name__ == "__main__":
    pin()
    init_none_hash(_HASH)
    for each in measure(int(sys.argv[1])):
        print(json.dumps(each), flush=True)
