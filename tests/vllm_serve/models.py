"""Small models with random weights, each in its own folder. No file is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 260
SPECIAL = {"bos_token": 256, "eos_token": 257, "pad_token": 258, "unk_token": 259}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,  # With such large weights each token affects the next tokens.
    "tie_word_embeddings": False,
    **{f"{name}_id": number for name, number in SPECIAL.items() if name != "unk_token"},
}
_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, **_HEADS))


def _deep_llama() -> Any:
    """Returns a model that computes a token much more slowly than a peer's KV of it is read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    larger = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, **larger}, num_key_value_heads=4, head_dim=64))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, **_HEADS))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_COMMON, **_HEADS, sliding_window=64))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_COMMON, **_HEADS, sliding_window=64, query_pre_attn_scalar=64, layer_types=layers)
    )


def _deepseek() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_COMMON, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=4, n_routed_experts=2, n_shared_experts=1,
            num_experts_per_tok=1, moe_intermediate_size=64,
        )
    )  # fmt: skip


def _granite() -> Any:
    """Returns a model whose layers alternate between Mamba 2 and attention. vLLM has had no Bamba since 0.23."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **_COMMON, num_key_value_heads=2, layer_types=["mamba", "attention"] * 2, position_embedding_type="rope",
            mamba_n_heads=4, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2, num_local_experts=0,
            num_experts_per_tok=0, shared_intermediate_size=384,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "deep-llama": _deep_llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "deepseek": _deepseek,
    "granite": _granite,
}


def make_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Returns the folder of a model, which is made if it does not exist."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = folder / f"{name}-{seed}"
    if not (target / "tokenizer.json").exists():
        torch.manual_seed(seed)
        MODELS[name]().eval().save_pretrained(target)
        words = {f"t{number}": number for number in range(VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"t{SPECIAL['unk_token']}"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {name: f"t{number}" for name, number in SPECIAL.items()}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(target)
    return target
