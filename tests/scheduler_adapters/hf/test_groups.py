"""Models with windows and chunks run over several block tables. They give the tokens of `generate` with fewer pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import InvalidParamsError, LayerGroup, TextContext
from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.generate import PagedGenerator
from scheduler_adapters.hf.recurrent import groups_of
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, manager_for, num_layers_of
from scheduler_adapters.hf.tiny import ByteTokenizer

pytestmark = pytest.mark.slow

PAGE, WINDOW, NEW = 8, 20, 20
SYSTEM = ByteTokenizer().encode("What all prompts begin with, and what is longer than any window of these models. " * 2)
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)] for text in ("one", "another one", "the third, which is longest")]

MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CHUNKED = ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"layer_types": MIXED, "sliding_window": WINDOW}),
    "gpt-oss": ("gpt_oss", {"layer_types": MIXED, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"layer_types": MIXED, "sliding_window": WINDOW, "use_sliding_window": True}),
    "llama4": ("llama4", {"layer_types": CHUNKED, "attention_chunk_size": 24}),
}
# In these models no layer attends to all tokens.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral alone": ("mistral", {"sliding_window": WINDOW}),
    "phi3 alone": ("phi3", {"sliding_window": WINDOW}),
    "qwen3 alone": ("qwen3", {"layer_types": MIXED[:1] * 4, "sliding_window": WINDOW, "use_sliding_window": True}),
    "llama4 alone": ("llama4", {"layer_types": CHUNKED[:1] * 4, "attention_chunk_size": 24}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    kind, changes = MODELS[request.param]
    return shared_model(kind, num_hidden_layers=4, **changes)


def manager_of_pages(model: Any, pages: int, rows: int = 8, tiers: dict[str, Any] | None = None, **params: Any) -> Any:
    """Returns a manager with `pages` pages. A page has all layers if the layers share one table, and one layer if they
    do not.
    """
    cache = kv_params_of(model.config, page_size=PAGE, **{"group_layers": True, **params})
    cache = dataclasses.replace(cache, **(tiers or {}))
    layers = num_layers_of(model.config)
    memory = pages * PAGE * cache.bytes_per_token(1 if cache.groups else layers) * cache.data_parallel_degree
    devices = ["cpu"] * cache.n_devices
    return manager_for(model, cache, rows, 512, devices, available_cache_memory=memory, enable_runtime_checks=True)


def test_the_groups_follow_the_config(make_model: Callable[..., Any]) -> None:
    config = make_model("gemma3", num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW).config
    assert groups_of(config) == (LayerGroup("full", (1,)), LayerGroup("window", (0, 2, 3), WINDOW))
    config = make_model("llama4", num_hidden_layers=4, layer_types=CHUNKED, attention_chunk_size=24).config
    assert groups_of(config) == (LayerGroup("full", (2,)), LayerGroup("chunked", (0, 1, 3), 24))
    assert groups_of(make_model("llama").config) == ()
    for kind in ("mistral", "phi3"):  # all layers alike
        assert groups_of(make_model(kind).config) == (LayerGroup("window", (0, 1, 2), 24),)
        assert groups_of(make_model(kind, sliding_window=None).config) == ()
    assert not kv_params_of(config).groups


def test_positions_that_a_packed_batch_cannot_have_are_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("llama4", num_hidden_layers=4, layer_types=CHUNKED, attn_temperature_tuning=True)
    with pytest.raises(UnsupportedModelError, match="attn_temperature_tuning"):
        HFRunner(model)


def test_tables_of_another_model_are_refused(model: Any, make_model: Callable[..., Any]) -> None:
    manager = manager_of_pages(model, 400)
    context = TextContext([1, 2, 3], 99, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    with pytest.raises(UnsupportedModelError, match="4 block tables"):
        HFRunner(make_model("llama", num_hidden_layers=4)).run([context], manager.fetch([context]))
    other = make_model("qwen3", num_hidden_layers=4, num_key_value_heads=2)
    with pytest.raises(InvalidParamsError, match="groups of the manager are not those of"):
        PagedGenerator(other, manager)
