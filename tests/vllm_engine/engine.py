"""vLLM engines of one process, on the CPU: its real scheduler, block manager and connector classes, and a small model.

vLLM's model runner needs a GPU. A small model replaces it: it writes keys and values into the blocks that vLLM's
scheduler assigns, and computes each token from all keys and values that its layers see. One wrong byte in one block
therefore changes the tokens. Each rank holds its heads, and vLLM's own aggregator combines their outputs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.parallel import ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm_engine.states import States, read, recur
from transfer.connector.config import share

LAYERS, HEAD_DIM = 2, 16
OURS = ("PagewireConnector", "scheduler_adapters.vllm")
TIERS = ("OffloadingConnector", None)
BOTH = ("MultiConnector", None)
_FIRST, _TOKENS = 1000, 1000
_CONFIG: dict[str, Any] = {}  # what a test adds to the model's config


@dataclass(frozen=True)
class Shape:
    """The shape of an engine.

    `windows` has an entry for each group: 0 for full attention. As in vLLM, all groups share their tensors: layer i of
    each group lies in tensor i. With `states` there is a further group of recurrent layers.
    """

    blocks: int = 60
    block_size: int = 16
    tp_size: int = 1
    heads: int = 4
    windows: tuple[int, ...] = (0,)
    states: States | None = None
    drafts: int = 0  # The number of tokens that a draft model proposes in each step. Its layers are the last group.
    policy: str = "fail"
    max_batched: int = 64
    rows: int = 16
    events: str = ""  # The name of the in-process sockets for the engine's KV events. An empty name means no events.
    connector: tuple[str, str | None] = OURS
    # The attention backend of the engine's layers. The small model writes the cache in this backend's format.
    backend: Any = TritonAttentionBackend
    extra: dict[str, Any] = field(default_factory=lambda: {"host": "127.0.0.1", "port": 0})


def secret_of(text: str) -> str:
    """Returns a reference to a secret. The secret is put into an environment variable, as a deployment must do it. An
    empty text stands for no secret.
    """
    if not text:
        return ""
    name = f"PAGEWIRE_SECRET_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    os.environ[name] = text
    return f"env:{name}"


def model_dir(folder: Path, heads: int) -> str:
    """Returns a folder with the config of a small Llama, which vLLM wants to read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": LAYERS,
        "vocab_size": 200_000,
        "max_position_embeddings": 131_072,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": HEAD_DIM,
    }
    config |= _CONFIG
    folder = folder / f"heads-{heads}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_config(model: str, role: str, engine_id: str, shape: Shape, rank: int, start: str = "1") -> VllmConfig:
    name, module = shape.connector
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, tokenizer=model, skip_tokenizer_init=True, dtype="float16", enforce_eager=True,
            max_model_len=65_536,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.rows, max_num_batched_tokens=shape.max_batched, max_model_len=65_536,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=CacheConfig(
            block_size=shape.block_size, cache_dtype="auto",
            enable_prefix_caching=not shape.states or bool(shape.states.block_size),
            mamba_cache_mode=shape.states.mode if shape.states else "none",
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=name, kv_connector_module_path=module, kv_role=role, engine_id=engine_id,
            kv_connector_extra_config=shape.extra, kv_load_failure_policy=shape.policy, kv_buffer_device="cpu",
        ),
        parallel_config=ParallelConfig(),
        kv_events_config=None if not shape.events else KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"inproc://{shape.events}",
            replay_endpoint=f"inproc://{shape.events}.replay",
        ),
    )  # fmt: skip
    if shape.drafts:
        config.speculative_config = SpeculativeConfig(
            method="draft_model", model=model, num_speculative_tokens=shape.drafts,
            target_model_config=config.model_config, target_parallel_config=config.parallel_config,
        )  # fmt: skip
    # The size is set after the config is made, because vLLM would otherwise look for this many devices. This process
    # plays all ranks.
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = shape.tp_size
    config.parallel_config.rank = rank
    config.instance_id = start
    config.cache_config.num_gpu_blocks = shape.blocks
    return config


def make_cache_config(shape: Shape) -> KVCacheConfig:
    common = {
        "block_size": shape.block_size,
        "num_kv_heads": len(share(shape.heads, shape.tp_size, 0)),
        "head_size": HEAD_DIM,
        "dtype": torch.float16,
    }
    groups = [
        KVCacheGroupSpec(
            [f"model.layers.{group + layer * len(shape.windows)}.self_attn.attn" for layer in range(LAYERS)],
            SlidingWindowSpec(sliding_window=window, **common) if window else FullAttentionSpec(**common),
        )
        for group, window in enumerate(shape.windows)
    ]
    if shape.states:
        names = [_mixer(layer) for layer in range(LAYERS)]
        groups.append(KVCacheGroupSpec(names, shape.states.spec(shape.tp_size)))
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Kernel:
    """Writes and reads the cache of a layer as the layer's backend would. vLLM's own code would need a device or
    another wheel.
    """

    def __init__(self, *, in_columns: bool) -> None:
        self.in_columns = in_columns

    def do_kv_cache_update(
        self, layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        del layer
        pages, heads, size, content = cache.shape
        if not self.in_columns:
            cache[slots // size, :, slots % size] = torch.cat([keys, values], -1)
            return
        halves = cache.view(pages, heads, 2, -1)
        halves[:, :, 0].view(pages, heads, content // 2, size)[slots // size, :, :, slots % size] = keys
        halves[:, :, 1].view(pages, heads, size, content // 2)[slots // size, :, slots % size] = values

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns the keys and values of some slots: `[slots, heads, content]`."""
        pages, heads, size, content = cache.shape
        if not self.in_columns:
            return cache[slots // size, :, slots % size]
        halves = cache.view(pages, heads, 2, -1)
        keys = halves[:, :, 0].view(pages, heads, content // 2, size)[slots // size, :, :, slots % size]
        values = halves[:, :, 1].view(pages, heads, size, content // 2)[slots // size, :, slots % size]
        return torch.cat([keys, values], -1)


class Layer(AttentionLayerBase):
    """A layer of the small model, as vLLM's workers see it."""

    head_size = HEAD_DIM
    _k_scale = _v_scale = None

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self.backend = backend
        self.impl = Kernel(in_columns=backend.get_name() == "CPU_ATTN")
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        del vllm_config


def add_layers(
    config: VllmConfig, caches: KVCacheConfig, backend: Any = TritonAttentionBackend, states: States | None = None
) -> VllmConfig:
    """Adds loaded layers to a config, as in a worker."""
    for group in caches.kv_cache_groups:
        is_state = states is not None and isinstance(group.kv_cache_spec, MambaSpec)
        layers = {name: Layer(states.backend if is_state else backend) for name in group.layer_names}
        if is_state:
            for layer in layers.values():
                layer.norm = states.norm
        config.compilation_config.static_forward_context |= layers
    return config


def _mixer(layer: int) -> str:
    return f"model.layers.{100 + layer}.mixer"


def contents(
    tokens: torch.Tensor, positions: torch.Tensor, layer: int, heads: Sequence[int], weights: int = 0
) -> torch.Tensor:
    """Returns the keys and values of some tokens: `[tokens, heads, 2 * HEAD_DIM]`, all of them small integers."""
    first = (tokens * 31 + positions * 7 + layer * 3 + weights * 17)[:, None] + torch.tensor(list(heads)) * 5
    return ((first % 251)[:, :, None] + torch.arange(2 * HEAD_DIM) % 3).to(torch.float16)


def look(cache: torch.Tensor, positions: torch.Tensor) -> int:
    """Returns the output of a layer for the keys and values that it sees: `[tokens, heads, 2 * HEAD_DIM]`."""
    weights = torch.arange(1, cache.shape[-1] + 1) * 3
    return int((cache.long() * weights).sum((1, 2)) @ (positions % 13 + 1))


def expected_tokens(prompt: Sequence[int], count: int, shape: Shape, weights: int = 0) -> list[int]:
    """Returns the model's output without a cache. `weights` is the version of its weights."""
    tokens = list(prompt)
    states = [] if shape.states is None else [shape.states.zeros() for _ in range(LAYERS)]
    places, owned = ([], []) if shape.states is None else (shape.states.places(1, 0), shape.states.owned(1, 0))
    ran = 0
    for _ in range(count):
        total = 0
        for layer, state in enumerate(states):
            for token in tokens[ran:]:
                recur(state, token, layer, places)
            total += read(state, places, owned)
        ran = len(tokens)
        for group, window in enumerate(shape.windows):
            positions = torch.arange(max(0, len(tokens) - window) if window else 0, len(tokens))
            for index in range(LAYERS):
                layer = group + index * len(shape.windows)
                seen = contents(torch.tensor(tokens)[positions], positions, layer, range(shape.heads), weights)
                total += look(seen, positions)
        tokens.append(_FIRST + total % _TOKENS)
    return tokens[len(prompt) :]


class Engine:
    """A vLLM scheduler, our connector in both of its roles (for the scheduler and for each worker), and the small model
    on each rank.
    """

    def __init__(self, folder: Path, role: str, shape: Shape, engine_id: str) -> None:
        self.shape = shape
        self.weights = 0  # the version of the model's weights, which a test may change between steps
        self._kernel = Kernel(in_columns=shape.backend.get_name() == "CPU_ATTN")
        model, start = model_dir(folder, shape.heads), secrets.token_hex(3)
        config, caches = make_config(model, role, engine_id, shape, 0, start), make_cache_config(shape)
        self.workers: list[Any] = []
        self.caches: list[dict[str, Any]] = []
        # For each rank, the recurrent layers. As in vLLM, their states are views of the bytes of a page.
        self.mixers: list[dict[int, Any]] = []
        for rank in range(shape.tp_size):
            ranked = make_config(model, role, engine_id, shape, rank, start)
            self.add_rank(
                add_layers(ranked, caches, shape.backend, shape.states)
                if shape.connector in (OURS, TIERS, BOTH)
                else ranked,
                caches,
                rank,
            )
        # As in vLLM, the workers come first.
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in caches.kv_cache_groups)),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self._aggregator = KVOutputAggregator.from_connector(self.workers[0], shape.tp_size)
        self.outputs: list[Any] = []
        self.scheduled: list[dict[str, int]] = []
        # The number of requests that the last step has preempted, and the largest number of used blocks.
        self.preempted = self.peak_blocks = 0
        self.stats: list[Any] = []  # The stats of the workers.
        # The stats of the scheduler and the workers, in the form in which they leave the engine.
        self.reported: list[dict[str, Any]] = []
        self.free_at_start = self.free_blocks

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def add_rank(self, config: VllmConfig, caches: KVCacheConfig, rank: int) -> None:
        shape, heads = self.shape, share(self.shape.heads, self.shape.tp_size, rank)
        tensors = [
            torch.zeros(shape.blocks, len(heads), shape.block_size, 2 * HEAD_DIM, dtype=torch.float16)
            for _ in range(LAYERS)
        ]
        views: dict[str, Any] = {
            name: tensors[index]
            for group in caches.kv_cache_groups[: len(shape.windows)]
            for index, name in enumerate(group.layer_names)
        }
        mixers: dict[int, Any] = {}
        of_states: Any = caches.kv_cache_groups[-1].kv_cache_spec
        # The bytes of a page, padded to the size of an attention layer's page.
        for layer in range(LAYERS if shape.states else 0):
            views[_mixer(layer)] = torch.zeros(shape.blocks, 1, 1, tensors[0][0].nbytes, dtype=torch.int8)
            mixer = SimpleNamespace(get_state_shape=lambda: of_states.shapes, get_state_dtype=lambda: of_states.dtypes)
            MambaBase.bind_kv_cache(cast("Any", mixer), views[_mixer(layer)])
            mixers[layer] = mixer
        for name, layer in config.compilation_config.static_forward_context.items():
            layer.kv_cache = views[name]
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        with set_current_vllm_config(config):
            worker.register_kv_caches(views)
        self.workers.append(worker)
        self.caches.append(views)
        self.mixers.append(mixers)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, request_id: str, prompt: Sequence[int], count: int, params: Any = None) -> None:
        self.scheduler.add_request(make_request(request_id, prompt, count, self.shape.block_size, params))

    def step(self) -> None:
        plan = self.scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        self.scheduled.append(dict(plan.num_scheduled_tokens))
        self.preempted = len(plan.preempted_req_ids or ())
        self.peak_blocks = max(self.peak_blocks, self.free_at_start - self.free_blocks)
        sampled = [
            self._run(
                request_id, plan.num_scheduled_tokens[request_id], plan.scheduled_spec_decode_tokens.get(request_id, [])
            )
            for request_id in ids
        ]
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            output = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            )
            output.kv_connector_output = run_worker(worker, plan)
            outputs.append(output)
        combined = self._aggregator.aggregate(outputs)
        if (stats := combined.kv_connector_output.kv_connector_stats) is not None:
            self.stats.append(stats)
        for found in self.scheduler.update_from_output(plan, combined).values():
            self.outputs += found.outputs
            if found.scheduler_stats is not None and found.scheduler_stats.kv_connector_stats is not None:
                self.reported.append(found.scheduler_stats.kv_connector_stats)
        if self.shape.drafts:
            drafts = [self._draft(self.scheduler.requests.get(request_id)) for request_id in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _draft(self, request: Request | None) -> list[int]:
        """Returns proposed tokens, the second of which is wrong every other time."""
        if request is None:
            return []
        drafts = expected_tokens(list(request.all_token_ids), self.shape.drafts, self.shape)
        drafts[-1] += request.num_tokens % 2
        return drafts

    def _run(self, request_id: str, count: int, drafts: Sequence[int] = ()) -> list[int]:
        """Runs the last `count` tokens up to the computed ones. Returns the next token, if these are the last ones.

        After them come `drafts`. Each of these that is right is returned, and the token after it.
        """
        request, found = self.scheduler.requests[request_id], list[int]()
        end = request.num_computed_tokens - len(drafts)
        tokens = [*request.all_token_ids, *drafts]
        for at, draft in enumerate([*drafts, -1]):
            found += self._run_to(request_id, tokens, end + at, 1 if at else count - len(drafts))
            if not found or found[-1] != draft:
                break
        return found

    def _run_to(self, request_id: str, known: Sequence[int], end: int, count: int) -> list[int]:
        """Writes the keys and values of the `count` tokens before `end`.

        If these tokens are the last known ones, returns the next token.
        """
        request, size = self.scheduler.requests[request_id], self.shape.block_size
        tokens = torch.tensor(known)
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        is_last, total = end >= request.num_tokens, 0
        for rank, caches in enumerate(self.caches):
            heads = share(self.shape.heads, self.shape.tp_size, rank)
            owned = [at for at, head in enumerate(heads) if rank == 0 or head not in share(
                self.shape.heads, self.shape.tp_size, rank - 1)]  # fmt: skip
            for group, window in enumerate(self.shape.windows):
                table = torch.tensor(tables[group])
                for index in range(LAYERS):
                    layer = group + index * len(self.shape.windows)
                    cache = caches[f"model.layers.{layer}.self_attn.attn"]
                    written = torch.arange(end - count, end)
                    kept = contents(tokens[written], written, layer, heads, self.weights)
                    slots = table[written // size] * size + written % size
                    self._kernel.do_kv_cache_update(None, kept[..., :HEAD_DIM], kept[..., HEAD_DIM:], cache, slots)
                    if is_last:
                        seen = torch.arange(max(0, end - window) if window else 0, end)
                        slots = table[seen // size] * size + seen % size
                        total += look(self._kernel.read(cache, slots)[:, owned], seen)
            if self.shape.states:
                total += self._recur(self.mixers[rank], tables[-1], tokens[:end].tolist(), rank, count)
        return [_FIRST + total % _TOKENS] if is_last else []

    def _recur(self, mixers: dict[int, Any], table: Sequence[int], tokens: list[int], rank: int, count: int) -> int:
        """Runs the last `count` tokens. As in vLLM, a state that has filled its block goes on in a copy."""
        states, ranks, total = self.shape.states, self.shape.tp_size, 0
        assert states is not None
        ran, size = len(tokens) - count, states.block_size
        block = table[(len(tokens) - 1) // size] if size else table[-1]
        before = table[(ran - 1) // size] if size and ran else block
        places, owned = states.places(ranks, rank), states.owned(ranks, rank)
        for layer in range(LAYERS):
            state = [part[block] for part in mixers[layer].kv_cache]
            for part, old in zip(state, [part[before] for part in mixers[layer].kv_cache], strict=True):
                if not ran:  # A new block still has the content of its previous owner.
                    part.zero_()
                elif before != block:
                    part.copy_(old)
            for token in tokens[ran:]:
                recur(state, token, layer, places)
            total += read(state, places, owned)
        return total

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> str:
        found = [output.finish_reason for output in self.outputs if output.request_id == request_id]
        return "" if not found or found[-1] is None else str(found[-1])

    def status(self, request_id: str) -> Any:
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    def params(self, request_id: str) -> dict[str, Any]:
        """Returns the `kv_transfer_params` of a request, as if they had been parsed from an HTTP body."""
        (found,) = [
            output.kv_transfer_params
            for output in self.outputs
            if output.request_id == request_id and output.kv_transfer_params is not None
        ]
        return json.loads(json.dumps(found))

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def run_worker(worker: Any, plan: Any) -> KVConnectorOutput:
    """Calls a worker's connector as vLLM's model runner does in a step, in the same order."""
    worker.handle_preemptions(plan.kv_connector_metadata)
    worker.bind_connector_metadata(plan.kv_connector_metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(plan.finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=results.finished_sending or None,
        finished_recving=results.finished_recving or None,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    return output


_hashers: dict[int, Any] = {}


def make_request(
    request_id: str, prompt: Sequence[int], count: int, block_size: int, params: Any, **given: Any
) -> Request:
    if block_size not in _hashers:
        init_none_hash(sha256)
        _hashers[block_size] = get_request_block_hasher(block_size, sha256)
    sampling = SamplingParams(
        max_tokens=count, ignore_eos=True, extra_args=None if params is None else {"kv_transfer_params": params}
    )
    return Request(request_id, list(prompt), sampling, None, block_hasher=_hashers[block_size], **given)


def run_until(engines: Sequence[Engine], done: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Steps engines in turn until a condition holds. Only a test that fails waits as long as `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, [
            (list(engine.scheduler.requests.values()), engine.scheduled[-3:]) for engine in engines
        ]
        for engine in engines:
            engine.step()
        time.sleep(0.001)
