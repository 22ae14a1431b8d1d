import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.replica.context import TextContext
from scheduler_adapters.errors import ModelInUseError, ModelLoadError, UnsupportedModelError
from scheduler_adapters.hf.runner import (
    ATTENTION,
    HFRunner,
    attend_over_pages,
    is_rounding_tie,
    kv_params_of,
    load_model,
    load_tokenizer,
    num_layers_of,
    own_attention,
    paged_attention,
    reference_tokens,
)
from scheduler_adapters.hf.tiny import PAD, ByteTokenizer, tiny_llama

TEXTS = ("a page of text, " * 6, "x", "Where do the keys and values of a token lie? " * 2)
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 12


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-mixed", "mistral"])
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    if request.param == "qwen3-mixed":  # The model has layers with a window and layers without a window.
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        return shared_model("qwen3", use_sliding_window=True, sliding_window=20, layer_types=kinds)
    return shared_model(request.param)


@pytest.fixture(scope="module")
def expected(model: Any) -> Any:
    return [reference_tokens(model, prompt, NEW) for prompt in PROMPTS]


def run_to_the_end(runner: Any, pool: Any, contexts: list[TextContext], chunk: int | None = None) -> None:
    """Runs each request until it has `NEW` tokens. Prompts run in chunks of `chunk` tokens."""
    while any(len(c.tokens) < c.max_length for c in contexts):
        for context in contexts:
            if chunk and context.end_idx - context.start_idx > chunk:
                context.set_token_indices(active_idx=context.start_idx + chunk)
        # A finished request runs its last token again. This writes the same values again.
        done = [len(c.tokens) == c.max_length for c in contexts]
        tokens = runner.run(contexts, pool.inputs(contexts))
        for context, token, finished in zip(contexts, tokens, done, strict=True):
            if not finished:
                context.update(token)


@pytest.mark.parametrize(("page_size", "tp", "chunk"), [(16, 1, None), (4, 2, 7), (128, 1, 30), (16, 4, 16)])
def test_a_ragged_batch_gives_the_models_own_tokens(
    model: Any, expected: list[list[int]], hand_pool: Callable[..., Any], page_size: int, tp: int, chunk: int | None
) -> None:
    contexts = [TextContext(prompt, len(prompt) + NEW) for prompt in PROMPTS]
    pool = hand_pool(model, [c.max_length for c in contexts], page_size, tp)
    run_to_the_end(HFRunner(model), pool, contexts, chunk)
    assert [c.tokens[len(p) :].tolist() for c, p in zip(contexts, PROMPTS, strict=True)] == expected


def test_the_window_of_the_mistral_model_matters(make_model: Callable[..., Any]) -> None:
    wide, narrow = make_model("mistral", sliding_window=None), make_model("mistral")
    assert reference_tokens(wide, PROMPTS[0], NEW) != reference_tokens(narrow, PROMPTS[0], NEW)


def test_logits_equal_the_models_own_to_rounding(
    model: Any, hand_pool: Callable[..., Any], own_logits: Callable[..., torch.Tensor]
) -> None:
    contexts = [TextContext(prompt, len(prompt) + 1) for prompt in PROMPTS]
    logits = HFRunner(model).logits(contexts, hand_pool(model, [c.max_length for c in contexts]).inputs(contexts))
    for row, prompt in zip(logits, PROMPTS, strict=True):
        torch.testing.assert_close(row, own_logits(model, prompt), atol=1e-4, rtol=1e-4)


def test_the_reference_sees_padding_tokens_of_the_prompt(tiny_model: Any, own_logits: Callable[..., Any]) -> None:
    pad = tiny_model.generation_config.pad_token_id
    tokens = [pad, *PROMPTS[2][:20], pad, pad, 70]
    expected = []
    for _ in range(4):
        expected.append(int(own_logits(tiny_model, tokens + expected).argmax()))
    assert pad == PAD
    assert reference_tokens(tiny_model, tokens, 4) == expected


def test_another_request_of_the_batch_changes_no_token(
    model: Any, expected: list[list[int]], hand_pool: Callable[..., Any]
) -> None:
    alone = [TextContext(PROMPTS[2], len(PROMPTS[2]) + NEW)]
    run_to_the_end(HFRunner(model), hand_pool(model, [alone[0].max_length]), alone)
    assert alone[0].tokens[len(PROMPTS[2]) :].tolist() == expected[2]


def test_soft_capped_scores_are_refused(make_model: Callable[..., Any], hand_pool: Callable[..., Any]) -> None:
    model = make_model("gemma2")
    context = TextContext([1, 2, 3], 8)
    with pytest.raises(UnsupportedModelError, match="softcap"):
        HFRunner(model).run([context], hand_pool(model, [8]).inputs([context]))


def test_params_follow_the_config(make_model: Callable[..., Any]) -> None:
    config = make_model("qwen3").config
    params = kv_params_of(config, page_size=16, n_devices=2)
    assert (params.n_kv_heads, params.head_dim, params.page_size) == (2, 16, 16)
    assert params.n_kv_heads_per_device == 1
    assert params.enable_prefix_caching
    assert num_layers_of(config) == 3


def test_own_attention_is_given_back_after_an_error() -> None:
    model = load_model(None)
    attend_over_pages(model)
    with contextlib.suppress(KeyError), own_attention(model):
        assert model.config._attn_implementation == "sdpa"
        raise KeyError
    assert model.config._attn_implementation == "pagewire"


def test_a_call_of_another_thread_is_refused_while_the_attention_is_switched() -> None:
    model = tiny_llama()
    before = model.config._attn_implementation

    def elsewhere(switch: Callable[..., Any]) -> str:
        def call() -> str:
            with switch(model) as own:
                return own.config._attn_implementation

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    for switched in (paged_attention, own_attention):
        with switched(model):
            for switch in (paged_attention, own_attention):
                with pytest.raises(ModelInUseError, match="LlamaForCausalLM: a call of another thread has"):
                    elsewhere(switch)
                # The model's attention was switched by this thread, so this thread may switch it again.
                with switch(model):
                    pass
        assert model.config._attn_implementation == before
        assert elsewhere(paged_attention) == ATTENTION
    attend_over_pages(model)
    with paged_attention(model):
        assert elsewhere(paged_attention) == ATTENTION, "nobody switches it"
    assert model.config._attn_implementation == ATTENTION


def test_a_model_is_as_it_was_after_each_call_of_a_runner(hand_pool: Callable[..., Any]) -> None:
    model = load_model(None)
    model.train()
    model.model.layers[1].eval()  # Some layers are in training mode, and other layers are not.
    before = model.config._attn_implementation, [module.training for module in model.modules()]
    runner = HFRunner(model)
    assert (model.config._attn_implementation, [module.training for module in model.modules()]) == before
    context = TextContext(PROMPTS[0], len(PROMPTS[0]) + 1)
    pool = hand_pool(model, [context.max_length])
    runner.run([context], pool.inputs([context]))
    with pytest.raises(UnsupportedModelError, match="block tables"):
        runner.run([context], [one._replace(lookup_table=torch.zeros(3, 1, 1)) for one in pool.inputs([context])])
    assert (model.config._attn_implementation, [module.training for module in model.modules()]) == before


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_saved_directory_loads_in_float32_with_the_byte_tokenizer(
    model_dirs: Path, make_model: Callable[..., Any], kind: str
) -> None:
    loaded = load_model(model_dirs / kind)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, make_model(kind).lm_head.weight)
    tokenizer = load_tokenizer(model_dirs / kind, loaded.config.vocab_size)
    assert isinstance(tokenizer, ByteTokenizer)


def test_a_tokenizer_beside_the_model_is_used(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<unk>": 0, "pages": 1, "flow": 2}, unk_token="<unk>")  # noqa: S106
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)  # noqa: S106
    loaded = load_tokenizer(tmp_path, 3)
    assert loaded.encode("flow pages what") == [2, 1, 0]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer cannot be read"):
        load_tokenizer(tmp_path, 3)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelLoadError, match="'nonsense'"):
        load_model(None, device="nonsense")


def test_a_penalty_in_the_saved_settings_changes_no_greedy_token(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model("llama")
    expected = reference_tokens(model, PROMPTS[0], NEW)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = [300, 301]
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert reference_tokens(loaded, PROMPTS[0], NEW) == expected
    assert HFRunner(loaded).eos_token_ids == {300, 301}


def test_a_wrong_directory_is_one_clear_error(model_dirs: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text((model_dirs / "qwen3" / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(tmp_path)


def test_missing_weights_are_an_error_not_random_numbers(model_dirs: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model_dirs / "qwen3" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dirs / "qwen3" / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*up_proj"):
        load_model(tmp_path)


def test_truncated_weights_are_an_error(model_dirs: Path, tmp_path: Path) -> None:
    data = (model_dirs / "qwen3" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "config.json").write_text((model_dirs / "qwen3" / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(tmp_path)


def test_only_a_small_gap_of_logits_is_a_tie(tiny_model: Any, own_logits: Callable[..., torch.Tensor]) -> None:
    prompt = PROMPTS[0]
    best, second = own_logits(tiny_model, prompt).topk(2).indices.tolist()
    worst = int(own_logits(tiny_model, prompt).argmin())
    assert not is_rounding_tie(tiny_model, prompt, [worst], [best])
    assert not is_rounding_tie(tiny_model, prompt, [best], [best, second])
    tied = load_model(None, seed=5)
    with torch.no_grad():  # Two tokens now have almost the same output weights.
        tied.lm_head.weight[second] = tied.lm_head.weight[best] * (1 + 1e-6)
    assert is_rounding_tie(tied, prompt, [second], [best])
