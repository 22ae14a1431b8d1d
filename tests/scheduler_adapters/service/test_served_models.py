"""Models with shared heads and with windows. The whole service serves them over one shard and over several shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache.errors import InvalidParamsError
from scheduler_adapters.hf.runner import kv_params_of
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.serving import assert_nothing_held, new_loop, own_tokens, requests_of, serve, tokens_of

HEAD = "A window that slides sees only the last few tokens of a text. " * 2
PROMPTS = [ByteTokenizer().encode(text) for text in (HEAD + "Which?", "ab", HEAD + "How many, and whose?", HEAD)]
NEW = 12
WINDOW = 24  # The window of mistral and gemma3. It is shorter than every long prompt, and no multiple of the page size.


def model_of(make_model: Callable[..., Any], kind: str) -> Any:
    if kind == "gemma3":  # Some layers have a window, and other layers have none.
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return make_model(kind, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=16)
    return make_model(kind)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3", "deepseek_v3"])
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    """Returns a model with four query heads. They share two key/value heads or one latent."""
    return model_of(shared_model, request.param)


@pytest.mark.each_value
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("page_size", "budget"), [(16, 40), (7, 200), (64, 19)])
def test_tokens_are_the_models_own_on_any_number_of_shards(
    model: Any, expected: list[list[int]], shards: int, page_size: int, budget: int
) -> None:
    loop = new_loop(model, page_size=page_size, budget=budget, n_devices=shards)
    assert loop.manager.params.n_kv_heads_per_device == (1 if loop.manager.params.is_mla else max(1, 2 // shards))
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert tokens_of(serve(loop, requests_of(PROMPTS[::-1], NEW))) == expected[::-1]
    assert loop.manager.metrics.cache_tokens > 0
    assert_nothing_held(loop.manager)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_the_window_matters_to_these_prompts(make_model: Callable[..., Any], kind: str) -> None:
    narrow = model_of(make_model, kind)
    wide = make_model(kind, **{**narrow.config.to_diff_dict(), "sliding_window": 4096})
    assert own_tokens(wide, PROMPTS[0], NEW) != own_tokens(narrow, PROMPTS[0], NEW)


@pytest.mark.parametrize("shards", [2, 4])
def test_each_shard_holds_its_own_heads_and_no_other(make_model: Callable[..., Any], shards: int) -> None:
    model = make_model("llama")
    whole, split = new_loop(model), new_loop(model, n_devices=shards)
    for loop in (whole, split):
        serve(loop, requests_of(PROMPTS[:1], 1, hold_pages=True))
    pages = whole.manager.get_req_blocks("r0")
    assert split.manager.get_req_blocks("r0") == pages
    (everything,) = whole.manager.device_tensors[0]
    for shard, blocks in enumerate(split.manager.device_tensors[0]):
        heads = split.manager.params.heads_of_shard(shard)
        assert blocks.shape[4] == len(heads)
        assert split.manager.layouts[shard].first_head == heads.start
        assert torch.equal(blocks[pages], everything[pages][..., heads.start : heads.stop, :])
        assert blocks[pages].any()


def test_heads_that_no_number_of_shards_can_share_evenly_are_refused(make_model: Callable[..., Any]) -> None:
    config = make_model("llama").config
    with pytest.raises(InvalidParamsError, match="n_kv_heads is 2: 3 shards"):
        kv_params_of(config, n_devices=3)


def test_an_evicted_and_preempted_batch_of_a_windowed_model_keeps_its_tokens(make_model: Callable[..., Any]) -> None:
    model = make_model("mistral")
    expected = [own_tokens(model, prompt, 40) for prompt in PROMPTS]
    longest = max(len(prompt) for prompt in PROMPTS) + 40 - 1
    loop = new_loop(model, pages=-(-longest // 8) + 4, page_size=8, n_devices=2)
    assert tokens_of(serve(loop, requests_of(PROMPTS, 40))) == expected
    assert loop.preemptions > 0
    assert loop.manager.metrics.evictions > 0
    assert_nothing_held(loop.manager)
