"""Every model of `transformers` with recurrent states is served with its own tokens, or is refused with a reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.recurrent import STATE_FORMS, text_config_of
from scheduler_adapters.hf.runner import HFRunner, cache_argument_of, kv_params_of, own_attention
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.conftest import HYBRIDS, MORE_HYBRIDS
from tests.scheduler_adapters.serving import assert_nothing_held, new_loop, own_tokens, requests_of, serve, tokens_of

NEW, PAGE = 12, 8
TEXTS = ("A state is of all tokens before it. " * 2, "x", "A state is of all tokens before it. Who wrote it?")
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "no layer attends"),
    "recurrent_gemma": "keep their state in themselves",
    "zamba": "divide their channels into heads",
    "zaya": "also keep the last token's values",
    **dict.fromkeys(("inkling_text", "inkling2_text"), "inputs of several convolutions"),
    **dict.fromkeys(("glm5_next_text", "qwen4_exp_text"), "keys of an indexer"),
    "deepseek_v4": "layer 0 is 'heavily_compressed_attention'",
    "lara_mini": "layer 0 is 'linear_attention'",
    "inkling2_loop_text": "layer 0 is 'hybrid_sliding'",
}
# Words in a model's code that occur only if the model keeps states.
_KEEPS = re.compile(r"conv_state|recurrent_state|linear_cache|_is_stateful = True")


def causal_types() -> Iterator[tuple[str, Any]]:
    """Returns every causal model type whose code keeps states, with its configuration. The name is the name of the type
    or of its text part.
    """
    import transformers

    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    for config_class in causal:
        file = Path(inspect.getfile(config_class))
        code = file.with_name(file.name.replace("configuration_", "modeling_"))
        if code.exists() and _KEEPS.search(code.read_text()):
            config = config_class()
            yield config.get_text_config().model_type, config


def test_every_model_type_is_served_or_refused() -> None:
    found = dict(causal_types())
    assert len(found) > 20
    for name, config in found.items():
        if name not in STATE_FORMS:
            with pytest.raises(UnsupportedModelError, match=config.model_type):
                kv_params_of(config)
    assert found.keys() - STATE_FORMS.keys() <= REFUSED.keys()


def test_every_type_that_is_served_is_tested(make_model: Callable[..., Any]) -> None:
    tested = {text_config_of(make_model(kind).config).model_type for kind in (*HYBRIDS, *MORE_HYBRIDS)}
    assert STATE_FORMS.keys() == tested


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_type_says_why(name: str) -> None:
    import transformers

    mapping: Any = transformers.CONFIG_MAPPING
    if name not in mapping:
        pytest.skip(f"transformers {transformers.__version__} does not know {name}")
    with pytest.raises(UnsupportedModelError, match=f"{name}: .*{REFUSED[name]}"):
        kv_params_of(mapping[name]())


def test_a_state_that_the_configuration_does_not_mention_is_refused(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    HFRunner(model)
    monkeypatch.setattr(model, "_is_stateful", True, raising=False)
    with pytest.raises(UnsupportedModelError, match="llama: the model keeps a state for each request, whose form"):
        HFRunner(model)


def test_a_hybrid_without_attention_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("bamba", attn_layer_indices=[])
    with pytest.raises(UnsupportedModelError, match="bamba: .*no layer attends"):
        kv_params_of(model.config)


@torch.inference_mode()
def test_a_zamba2_itself_gives_other_logits_one_token_at_a_time(make_model: Callable[..., Any]) -> None:
    """The logits differ if the lower limit of dt matters, because only passes of several tokens apply this limit."""
    tokens = torch.tensor([PROMPTS[0][:20]])
    for least, differs in ((0.05, True), (1e-6, False)):
        model = make_model("zamba2", time_step_min=least)
        with own_attention(model):
            whole = model(tokens, use_cache=False).logits[0, -1]
            name = cache_argument_of(model)
            past = model(tokens[:, :-1], use_cache=True)[name]
            last = model(tokens[:, -1:], **{name: past}, use_cache=True, position_ids=torch.tensor([[19]]))
        gap = (last.logits[0, -1] - whole).abs().max() / (whole.max() - whole.min())
        assert (float(gap) > 1e-3) == differs


@pytest.fixture(scope="module", params=MORE_HYBRIDS)
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    return shared_model(request.param)


@pytest.mark.parametrize(("budget", "shards"), [(64, 1), (7, 2)])
def test_tokens_are_the_models_own(model: Any, budget: int, shards: int) -> None:
    """Prompts run as a whole and in chunks. They run again after their prefixes were cached."""
    expected = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    loop = new_loop(model, budget=budget, page_size=PAGE, n_devices=shards, enable_prefix_caching=True)
    assert loop.manager.states
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert tokens_of(serve(loop, requests_of(PROMPTS[::-1], NEW))) == expected[::-1]
    assert loop.manager.metrics.cache_tokens >= 2 * 6 * PAGE
    assert_nothing_held(loop.manager)
