"""Small random models, and a pool of pages made by hand for tests of runners without a manager."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache.replica.context import TextContext
from kvcache.types import RaggedKVCacheInputs
from scheduler_adapters.hf.runner import load_model, own_attention
from tests.scheduler_adapters.serving import own_tokens

SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Latents have 16 elements, and 8 more elements are shared by all heads. A key has 16 own elements and the 8 shared
# elements. A value has 12 elements. The first MLP is dense.
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": None,
}
HYBRIDS = {
    "bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1, 3]}),
    "granite": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
        },
    ),
    "falcon": ("FalconH1Config", MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 128}),
    "nemotron": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA | {"pad_token_id": None, "eos_token_id": 257}),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        LATENTS
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    # With tied embeddings a random model repeats its last token.
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False}),
    "minimax": (
        "MiniMaxConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "bos_token_id": 256,
            "eos_token_id": None,
        },
    ),
    # The model uses one attention layer at two depths, with a separate adapter for each depth. The lower limit of dt
    # applies only to steps of several tokens.
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
            "num_mem_blocks": 1,
            "time_step_min": 1e-6,
            "head_dim": 32,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "chunk_size": 8,
            "tie_word_embeddings": False,
            "pad_token_id": 258,
            "bos_token_id": 256,
            "eos_token_id": None,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 6,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention", "conv"],
            "sliding_window": 20,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": 257,
        },
    ),
}
# More models, whose caches have the same forms as the caches of the models above.
MORE_HYBRIDS = {
    "lfm2_moe": (
        "Lfm2MoeConfig",
        EXPERTS
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        LATENTS
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
    ),
}


def _make_model(kind: str, **changes: Any) -> Any:
    """Returns a random model of this architecture, in the state in which `from_pretrained` returns a model."""
    import transformers

    name, sizes = {
        "llama": ("LlamaConfig", {}),
        "qwen3": ("Qwen3Config", {}),
        "mistral": ("MistralConfig", {"sliding_window": 24}),
        "phi3": ("Phi3Config", {"sliding_window": 24, "pad_token_id": 258, "bos_token_id": 256, "eos_token_id": None}),
        "gemma2": ("Gemma2Config", {}),
        # With tied embeddings a random model repeats its last token.
        "gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": False}),
        # Latents have 16 elements, and 8 more elements are rotated. A key has 16 elements and the 8 rotated elements. A
        # value has 12 elements. The first layer is dense.
        "deepseek_v3": (
            "DeepseekV3Config",
            {
                "num_key_value_heads": 4,
                "head_dim": 8,
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 12,
                "moe_intermediate_size": 32,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
        ),
        "minimax": ("MiniMaxConfig", {"num_local_experts": 4}),
        "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "llama4": (
            "Llama4TextConfig",
            {"intermediate_size_mlp": 128, "num_local_experts": 4, "attn_temperature_tuning": False},
        ),
        **HYBRIDS,
        **MORE_HYBRIDS,
    }[kind]
    config_class = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = config_class(**{**SIZES, **sizes, **changes})
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def make_model() -> Any:
    """Makes models that only the calling test uses."""
    return _make_model


class SharedModels:
    """Models that several test files run and no test may change. Each model is made once."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}

    def __call__(self, kind: str, **changes: Any) -> Any:
        key = f"{kind} {sorted(changes.items())}"
        if key not in self._made:
            model = load_model(None) if kind == "tiny" else _make_model(kind, **changes)
            self._made[key] = model, _fingerprint(model)
        return self._made[key][0]

    def check(self) -> None:
        changed = {
            key: [(was, now) for was, now in zip(before, _fingerprint(model), strict=True) if was != now]
            for key, (model, before) in self._made.items()
            if _fingerprint(model) != before
        }
        for key in changed:
            del self._made[key]  # The changed model is dropped, so that the mistake of one test fails only this test.
        assert not changed, f"a test changed models that others run: {changed}"


def _fingerprint(model: Any) -> Any:
    """Returns the state that one test could change for another test: weights, attention, modes and generation
    settings.
    """
    digest = hashlib.blake2b()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    modes = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    # `save_pretrained` changes the recorded architecture. The architecture changes no token.
    config = str({key: value for key, value in model.config.to_dict().items() if key != "architectures"})
    return digest.hexdigest(), config, attention, modes, model.generation_config.to_json_string()


@pytest.fixture(scope="session")
def shared_model() -> SharedModels:
    return SharedModels()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, shared_model: SharedModels) -> Any:
    """Returns the model that the test file names as `MODEL`, or a Llama."""
    return shared_model(getattr(request.module, "MODEL", "llama"))


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, model: Any) -> list[list[int]]:
    """Returns the model's own answers to the test file's `PROMPTS`. Each answer has `NEW` tokens."""
    return [own_tokens(model, prompt, request.module.NEW) for prompt in request.module.PROMPTS]


@pytest.fixture(autouse=True, scope="module")
def _models_stay(shared_model: SharedModels) -> Iterator[None]:
    yield
    shared_model.check()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns directories saved by `save_pretrained`, by architecture."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "mistral"):
        _make_model(kind).save_pretrained(root / kind)
    return root


@pytest.fixture
def tiny_model(shared_model: SharedModels) -> Any:
    """The demo's own model."""
    return shared_model("tiny")


class _HandPool:
    """A pool and block tables made by hand. Requests get pages in a shuffled order, and the heads are divided over `tp`
    shards.
    """

    def __init__(self, model: Any, lengths: list[int], page_size: int = 16, tp: int = 1, seed: int = 0) -> None:
        config = model.config
        heads, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, pages in enumerate(order.split(counts)):
            self.table[row, : len(pages)] = pages
        held = max(1, heads // tp)
        # The bytes of a page are head-major, as in the real pool. They start as garbage, except in the null page.
        shape = (len(order) + 1, held, layers, 2, page_size, dim)
        self.blocks = [torch.full(shape, 1e4).permute(0, 3, 2, 4, 1, 5) for _ in range(tp)]
        for pool in self.blocks:
            pool[0] = 0

    def inputs(self, contexts: list[TextContext]) -> Any:
        starts = torch.tensor([c.start_idx for c in contexts], dtype=torch.int32)
        longest = max(c.active_length for c in contexts), max(c.active_idx for c in contexts)
        table = self.table[: len(contexts)]
        return [RaggedKVCacheInputs(b, starts, table, torch.tensor([longest], dtype=torch.int32)) for b in self.blocks]


@pytest.fixture
def hand_pool() -> Any:
    return _HandPool


@pytest.fixture
def own_logits() -> Any:
    return _own_logits


def _own_logits(model: Any, tokens: Any) -> Any:
    """Returns the model's logits after the last of `tokens`, computed with the model's own attention."""
    ids = torch.tensor([list(tokens)])
    with own_attention(model), torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
