from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache.errors import InvalidParamsError, InvalidRequestError, PromptTooLongError
from kvcache.replica.context import TextContext
from scheduler_adapters.errors import GenerationError, UnsupportedModelError
from scheduler_adapters.hf.generate import PagedGenerator
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.serving import assert_nothing_held, new_manager, own_tokens

HEAD = "A call takes prompts of any lengths, and gives back as many lists of tokens. " * 2
TEXTS = (HEAD + "Which?", "x", HEAD + "How many, and in which order?", "Something else altogether.", HEAD + "Which?")
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 12


def manager_of(model: Any, pages: int = 200, rows: int = 4, **manager: Any) -> Any:
    return new_manager(model, pages, rows=rows, **manager)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "bamba", "falcon"])
@pytest.mark.parametrize(("shards", "budget"), [(1, 512), (2, 20)])
def test_each_prompt_gets_what_the_models_own_generate_gives(
    make_model: Callable[..., Any], kind: str, shards: int, budget: int
) -> None:
    model = make_model(kind)
    generator = PagedGenerator(model, manager_of(model, n_devices=shards), budget)
    expected = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    assert generator.generate(PROMPTS, NEW) == expected
    assert generator.generate(PROMPTS[:1], 1) == [expected[0][:1]]
    assert_nothing_held(generator._manager)


def test_a_batch_of_the_models_own_generate_gives_the_same(model: Any, expected: list[list[int]]) -> None:
    """Between two served batches the model's own `generate` still works, here for a batch of equal prompts."""
    generator = PagedGenerator(model, manager_of(model))
    before = model.config._attn_implementation
    assert generator.generate(PROMPTS, NEW) == expected
    assert model.config._attn_implementation == before
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[0], PROMPTS[4]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    assert output[:, len(PROMPTS[0]) :].tolist() == [expected[0], expected[4]]


def test_the_next_call_reuses_the_pages_of_the_one_before(model: Any, expected: list[list[int]]) -> None:
    manager = manager_of(model)
    generator = PagedGenerator(model, manager)
    generator.generate(PROMPTS[:1], NEW)
    assert manager.metrics.cache_tokens == 0
    assert generator.generate(PROMPTS[2:3], NEW) == expected[2:3]
    shared = len(ByteTokenizer().encode(HEAD)) // 16 * 16
    assert manager.metrics.cache_tokens == shared
    assert generator.generate(PROMPTS[2:3], NEW, cache_salt="another tenant") == expected[2:3]
    assert manager.metrics.cache_tokens == shared
    turn = [*PROMPTS[0], *expected[0], *ByteTokenizer().encode("And then?")]
    assert generator.generate([turn], NEW) == [own_tokens(model, turn, NEW)]
    assert manager.metrics.cache_tokens > 2 * shared, "the answer of the first call was not reused"


def test_prompts_may_be_tensors_and_there_may_be_none(model: Any, expected: list[list[int]]) -> None:
    generator = PagedGenerator(model, manager_of(model))
    assert generator.generate([torch.tensor(PROMPTS[3])], NEW) == expected[3:4]  # pyright: ignore[reportArgumentType]
    assert generator.generate([]) == []


def test_more_prompts_than_rows_and_pages_wait_for_each_other(model: Any, expected: list[list[int]]) -> None:
    longest = -(-(max(map(len, PROMPTS)) + NEW) // 16)
    generator = PagedGenerator(model, manager_of(model, pages=longest, rows=2))
    assert generator.generate([*PROMPTS, *PROMPTS], NEW) == [*expected, *expected]
    assert_nothing_held(generator._manager)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["llama", "bamba"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_interrupted_call_holds_nothing_and_the_next_one_works(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, error: type[BaseException], after: int
) -> None:
    model = make_model(kind)
    before = model.config._attn_implementation
    generator = PagedGenerator(model, manager_of(model), token_budget=64)
    calls = 0

    def interrupted(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error("in the model")

    with monkeypatch.context() as patched:
        patched.setattr(model.get_input_embeddings(), "forward", interrupted_after(model, interrupted))
        with pytest.raises(error, match="in the model"):
            generator.generate(PROMPTS, NEW)
    assert model.config._attn_implementation == before
    assert_nothing_held(generator._manager)
    assert generator.generate(PROMPTS[:2], NEW) == [own_tokens(model, prompt, NEW) for prompt in PROMPTS[:2]]


def interrupted_after(model: Any, hook: Callable[..., None]) -> Callable[..., Any]:
    forward = model.get_input_embeddings().forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        hook()
        return forward(*args, **kwargs)

    return replaced


def test_one_bad_prompt_is_named_and_none_is_run(model: Any) -> None:
    manager = manager_of(model, pages=20, max_seq_len=200)
    generator = PagedGenerator(model, manager)
    for bad, new, error, message in (
        ([], 1, InvalidRequestError, "prompt-1'.*tokens of shape"),
        ([1, -1], 1, InvalidRequestError, "prompt-1'.*token -1"),
        ([1, 259], 1, InvalidRequestError, "prompt-1'.*token 259 is not in the vocabulary of 259 tokens"),
        ("text", 1, InvalidRequestError, "prompt-1'.*a non-empty list of integers"),
        ([1], 0, InvalidRequestError, "prompt-0'.*max_new_tokens is 0"),
        ([1] * 190, 12, PromptTooLongError, "prompt-1'.*190 prompt tokens and 12 new ones do not fit: .* room for 200"),
        ([1] * 300, 25, PromptTooLongError, "prompt-1'.* room for 200"),
    ):
        with pytest.raises(error, match=message):
            generator.generate([PROMPTS[1], bad], new)  # pyright: ignore[reportArgumentType]
    assert manager.metrics.prompt_tokens == 0
    assert_nothing_held(manager)
    assert 0 < len(generator.generate([[1] * 190], 11)[0]) <= 11


def test_pages_that_others_hold_are_an_error_and_not_an_endless_wait(model: Any, expected: list[list[int]]) -> None:
    manager = manager_of(model, pages=15, rows=2)
    generator = PagedGenerator(model, manager)
    other = TextContext([5] * 14 * 16, 1024, "other")
    with manager.claim(other):
        assert manager.maybe_reserve(other)
        with pytest.raises(GenerationError, match="1 prompts wait.*14 of 15 pages"):
            generator.generate([PROMPTS[0]], NEW)
        manager.external_claim("another")
        with pytest.raises(GenerationError, match="or all rows"):
            generator.generate([[1]], 1)
        manager.release("another")
        assert manager.num_free_blocks == 1
        assert generator.generate([PROMPTS[1]], NEW) == expected[1:2]
    assert_nothing_held(manager)


def test_a_manager_made_for_another_model_is_refused(model: Any, make_model: Callable[..., Any]) -> None:
    for other, message in (
        (
            make_model("llama", num_hidden_layers=2),
            "num_layers of the manager's pages is 2, but LlamaForCausalLM needs 3",
        ),
        (make_model("llama", num_key_value_heads=4), "n_kv_heads of the manager's pages is 4, but .* needs 2"),
        (make_model("llama", head_dim=8), "head_dim of the manager's pages is 8, but .* needs 16"),
    ):
        with pytest.raises(InvalidParamsError, match=message):
            PagedGenerator(model, manager_of(other))
    with pytest.raises(InvalidParamsError, match="is torch.bfloat16, but .* needs torch.float32"):
        PagedGenerator(model, manager_of(model, dtype=torch.bfloat16))


def test_a_hybrid_needs_a_manager_with_state_pages(make_model: Callable[..., Any]) -> None:
    model = make_model("bamba")
    plain = make_model("llama", num_hidden_layers=2)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="pass the manager's state pages"):
        PagedGenerator(model, manager_of(plain))
    assert model.config._attn_implementation == before


def test_settings_that_change_greedy_tokens_are_refused_by_name(make_model: Callable[..., Any]) -> None:
    model = make_model("llama")
    manager = manager_of(model)
    for name, value in (("repetition_penalty", 1.2), ("min_new_tokens", 4), ("num_beams", 3)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(model.generation_config, name, value)
            with pytest.raises(UnsupportedModelError, match=f"generation_config.{name} is {value}"):
                PagedGenerator(model, manager)
    model.generation_config.repetition_penalty = 1.0
    PagedGenerator(model, manager)
