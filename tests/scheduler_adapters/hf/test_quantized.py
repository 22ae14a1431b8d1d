"""8-bit pages have a scale for each token and head. They give the tokens of a model that quantises its own cache in the
same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcache import KVCacheQuantizationConfig
from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.runner import cache_argument_of, eos_token_ids_of, own_attention
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.serving import assert_nothing_held, new_loop, requests_of, serve, tokens_of

NEW, GRANULARITY = 12, 8
TEXTS = ("a page of text, " * 6, "x", "Where do the keys and values of a token lie? " * 2)
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


class QuantisingCache(DynamicCache):
    """Transformers' own cache, with new keys and values rounded to 8 bits."""

    dtype = torch.float8_e4m3fn

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(self.through(key_states), self.through(value_states), layer_idx, *args, **kwargs)

    def through(self, states: torch.Tensor) -> torch.Tensor:
        parts = states.reshape(-1, GRANULARITY)
        most = float(127 if self.dtype == torch.int8 else torch.finfo(self.dtype).max)
        scale = parts.abs().max(dim=1, keepdim=True).values / most
        stored = (parts / scale).round() if self.dtype == torch.int8 else parts / scale
        return (stored.clamp(-most, most).to(self.dtype).to(states.dtype) * scale).reshape(states.shape)


@torch.inference_mode()
def generated(model: Any, prompt: list[int], dtype: torch.dtype | None) -> list[int]:
    cache = DynamicCache() if dtype is None else QuantisingCache()
    if dtype is not None:
        cache.dtype = dtype  # type: ignore[attr-defined]
    tokens, given = list(prompt), prompt
    with own_attention(model):
        for _ in range(NEW):
            past = {cache_argument_of(model): cache}
            logits = model(input_ids=torch.tensor([given]), **past, use_cache=True).logits
            given = [int(logits[0, -1].argmax())]
            tokens += given
            if given[0] in eos_token_ids_of(model):
                break
    return tokens[len(prompt) :]


def scaled(dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    return {"dtype": dtype, "kvcache_quant_config": KVCacheQuantizationConfig(torch.float32, GRANULARITY, **changes)}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    # With such large weights, rounding to eight bits changes the results.
    return shared_model(request.param, initializer_range=0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tp", "budget"), [(1, 64), (2, 24)])
def test_tokens_are_those_of_a_cache_that_is_quantised_alike(
    model: Any, dtype: torch.dtype, tp: int, budget: int
) -> None:
    expected = [generated(model, prompt, dtype) for prompt in PROMPTS]
    if dtype.is_floating_point:  # int8 loses less
        assert expected != [generated(model, prompt, None) for prompt in PROMPTS], "eight bits show"
    loop = new_loop(model, budget=budget, page_size=8, n_devices=tp, **scaled(dtype))
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert loop.manager.metrics.cache_tokens > 0
    assert_nothing_held(loop.manager)


def test_preempted_requests_keep_their_scales(model: Any) -> None:
    dtype = torch.float8_e4m3fn
    expected = [generated(model, prompt, dtype) for prompt in PROMPTS]
    loop = new_loop(model, pages=27, page_size=8, **scaled(dtype))
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert loop.preemptions
    assert_nothing_held(loop.manager)


@pytest.mark.parametrize(
    ("prefill", "decode"), [({"tp": 2}, {}), ({}, {"tp": 2}), ({"page_size": 16}, {"page_size": 8})]
)
def test_prefill_hands_scales_over(model: Any, tmp_path: Path, prefill: Any, decode: Any) -> None:
    dtype = torch.float8_e4m3fn
    sides = [Side(**{"page_size": 8, "params": scaled(dtype), **side}) for side in (prefill, decode)]
    service = Service(model, tmp_path, *sides)
    try:
        assert service.serve(PROMPTS, NEW) == [generated(model, prompt, dtype) for prompt in PROMPTS]
        service.assert_nothing_held()
        assert service.decode.stats().pages_pulled
    finally:
        service.close()


def test_scales_of_whole_pages_are_not_run(model: Any) -> None:
    loop = new_loop(model, page_size=8, **scaled(torch.int8, scale_of="page and head"))
    with pytest.raises(UnsupportedModelError, match="use scale_of 'token and head'"):
        serve(loop, requests_of(PROMPTS, 1))
