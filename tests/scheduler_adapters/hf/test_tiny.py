from collections import Counter
from typing import Any

import torch

from scheduler_adapters.hf.runner import reference_tokens
from scheduler_adapters.hf.tiny import BOS, ByteTokenizer, tiny_llama


def test_a_text_is_its_bytes_behind_a_start_token() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né") == [BOS, *"né".encode()]
    assert tokenizer.encode("") == [BOS]


def test_a_small_vocabulary_still_gives_valid_tokens() -> None:
    tokens = ByteTokenizer(100).encode("zebra é")
    assert max(tokens) < 100
    assert len(tokens) == len("zebra é".encode())
    assert ByteTokenizer(100).encode("") == [0]


def test_the_seed_decides_the_weights_and_the_global_generator_is_unchanged() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b, other = tiny_llama(1), tiny_llama(1), tiny_llama(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, other.lm_head.weight)


def test_greedy_output_varies_and_depends_on_the_far_end_of_the_prompt(tiny_model: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    out = reference_tokens(tiny_model, ByteTokenizer().encode(text), 24)
    assert Counter(out).most_common(1)[0][1] <= len(out) // 3
    assert out != reference_tokens(tiny_model, ByteTokenizer().encode("A" + text[1:]), 24)
