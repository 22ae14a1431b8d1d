"""vLLM's own KV cache pool for a model that has only a config.json. The model's layers are made without memory, and are
asked for their cache specs.

    python -m tests.vllm_engine.pool < questions.json > answers.json

Runs under vLLM 0.32 and 0.33. It reads `Question`s and writes `Answer`s. One process plays one of several ranks: vLLM's
model takes its share of the heads from the size of the process group, and that size is set here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec


class Question(msgspec.Struct, frozen=True):
    """A model on `tp` ranks, each with `memory` bytes for its cache, and requests of some lengths."""

    folder: str
    tp: int
    memory: int
    block_size: int
    step_tokens: int
    lengths: tuple[int, ...]
    cache_dtype: str = "auto"


class Answer(msgspec.Struct, frozen=True):
    """vLLM's answer to a `Question`."""

    version: str
    layer_page_bytes: list[int]  # For each layer, the bytes of a page before vLLM groups the layers.
    group_layers: list[int]  # The number of layers in each group.
    block_bytes: int  # The bytes of a block in the largest group.
    num_blocks: int
    request_blocks: dict[int, int]  # For each length of a request, the largest number of blocks that the request takes.


def answer(question: Question, scratch: Path) -> Answer:
    """Asks vLLM. The platform is a CPU, and the process group exists already."""
    import torch
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import gpt_oss
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    # The experts of a model keep nothing in the cache. Some experts have no CPU kernel.
    gpt_oss.FusedMoEFactory = lambda **_: torch.nn.Identity()
    # Nothing is computed here. On a CPU without AVX-512, vLLM refuses to compute with fp8 pages.
    CPUAttentionBackend.supports_kv_cache_dtype = classmethod(lambda *_: True)
    config: VllmConfig = _config(question, scratch)
    with set_current_vllm_config(config):
        _start_group(scratch)
        parallel_state.get_tp_group().world_size = question.tp
        config.parallel_config.tensor_parallel_size = question.tp
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        made = config.compilation_config.static_forward_context
        specs: dict[str, Any] = {
            name: layer.get_kv_cache_spec(config)
            for name, layer in made.items()
            if isinstance(layer, AttentionLayerBase)
        }
        # The layers are separate, as FlashAttention needs them.
        resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
        groups, found = _grouped(config, dict(specs), question.memory)
        wanted: dict[int, int] = {}
        for length in question.lengths:
            config.model_config.max_model_len = length
            each = (group.kv_cache_spec for group in groups)
            wanted[length] = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in each)
    return Answer(
        version=vllm.__version__,
        layer_page_bytes=[spec.page_size_bytes for spec in specs.values()],
        group_layers=[len(group.layer_names) for group in groups],
        block_bytes=max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups),
        num_blocks=found.num_blocks,
        request_blocks=wanted,
    )


def _grouped(config: Any, specs: dict[str, Any], memory: int) -> tuple[list[Any], Any]:
    """Returns vLLM's groups of layers, and its pool."""
    try:
        from vllm.v1.core import kv_cache_planning as of
    except ImportError:  # 0.32
        from vllm.v1.core import kv_cache_utils as of
    groups = of.get_kv_cache_groups(config, specs)
    return groups, of.get_kv_cache_config_from_groups(config, groups, memory)


def _config(question: Question, scratch: Path) -> Any:
    """Returns the config of the text part.

    Weight quantisation is left out, because it needs kernels and does not change the cache.
    """
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    told: dict[str, Any] = json.loads((Path(question.folder) / "config.json").read_text())
    if "text_config" in told:
        told = {"architectures": ["Gemma3ForCausalLM"], "torch_dtype": told["torch_dtype"], **told["text_config"]}
    told.pop("quantization_config", None)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    (folder / "config.json").write_text(json.dumps(told))
    length, step = min(8192, told["max_position_embeddings"]), question.step_tokens
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=length,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=step, max_model_len=length, enable_chunked_prefill=True,
            is_encoder_decoder=False, async_scheduling=False, disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=CacheConfig(block_size=question.block_size, cache_dtype=question.cache_dtype),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
    )  # fmt: skip


def _start_group(scratch: Path) -> None:
    """Makes the process groups for one model. A mixture of experts needs additional groups."""
    import torch
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel

    if torch.distributed.is_initialized():
        destroy_model_parallel()
    else:
        init_distributed_environment(1, 0, f"file://{scratch}/group", 0, "gloo")
    initialize_model_parallel(1, 1)


def main() -> None:
    """Answers the questions on standard input, one after another."""
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()  # The CUDA wheel finds no platform on this machine.
        answers = [answer(question, Path(scratch)) for question in questions]
    sys.stdout.buffer.write(msgspec.json.encode(answers))
    sys.stdout.flush()
    os._exit(0)  # The process does not wait for the threads of its process group.


if __name__ == "__main__":
    main()
