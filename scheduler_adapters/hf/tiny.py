"""The default model: a small random Llama over bytes, the same in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
# The default range of 0.02 leaves the residual stream so small that the output hardly depends on the context, and
# greedy decoding repeats one token. A wider range makes attention matter: a wrong page shows up as wrong tokens.
_INITIALIZER_RANGE = 0.15


class ByteTokenizer:
    """Encodes text as a start token and UTF-8 bytes.

    If the model's vocabulary is too small for all tokens, each byte is taken modulo the size of the vocabulary, and
    there is no start token. Every prompt then still gives valid tokens.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`; never empty."""
        tokens = list(text.encode())
        if self.vocab_size > BOS:
            return [BOS, *tokens]
        return [token % self.vocab_size for token in tokens] or [0]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens. Special tokens appear by name, or not at all."""
        names = {BOS: "<s>", EOS: "</s>", PAD: "<pad>"}
        others = {token: b"" if skip_special_tokens else names.get(token, "").encode() for token in token_ids}
        return b"".join(bytes([t]) if t < BOS else others[t] for t in token_ids).decode(errors="replace")


def tiny_llama(seed: int = 0) -> PreTrainedModel:
    """Returns a random Llama of about a million weights in float32: 4 layers, 4 query and 2 key/value heads of 32.

    The same seed gives the same weights in every process of one machine. The global random generator is left unchanged.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (heavy, and of an optional extra)

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1 << 16,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    generator: Any = torch.random  # torch has no types for this module
    with generator.fork_rng(devices=[]):
        generator.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
