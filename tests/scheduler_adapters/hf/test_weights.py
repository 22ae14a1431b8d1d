"""A model's name depends on every value of its weights, and on nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvcache import TextContext
from scheduler_adapters.errors import ModelLoadError
from scheduler_adapters.hf import weights
from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.weights import model_name
from scheduler_adapters.service.server import build_loop
from tests.scheduler_adapters.hf.lending_source import CONFIG
from transfer import PageExchange


def change(model: Any, name: str, at: int) -> None:
    """Changes the lowest bit of one value of a weight."""
    flat = dict(model.named_parameters(remove_duplicate=False))[name].data.view(-1)
    flat[at : at + 1].view(torch.uint8)[0] ^= 1


def test_each_value_of_each_weight_is_part_of_the_name(make_model: Callable[..., Any]) -> None:
    model, draw = make_model("llama"), random.Random(3)
    names = {name: weight.numel() for name, weight in model.named_parameters()}
    found = {model_name(model)}
    places = [
        (name, at) for name, size in names.items() for at in {0, size // 2, size - 1, *draw.choices(range(size), k=2)}
    ]
    for name, at in places:
        change(model, name, at)
        found.add(model_name(model))
        change(model, name, at)
    assert len(found) == 1 + len(places)
    assert model_name(model) in found, "the model has the first weights again, so it must have the first name"


def test_the_name_depends_on_the_values_and_not_on_their_layout_in_memory(
    make_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path / "one")
    model: Any = load_model(tmp_path / "one")
    name = model_name(model)
    (tmp_path / "one").rename(tmp_path / "another")
    assert model_name(load_model(tmp_path / "another")) == name
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert model_name(model) == name
    monkeypatch.setattr("kvcache.weights_digest.CHUNK_BYTES", 1000)
    assert model_name(model) == name


def test_values_at_other_places_or_of_another_type_give_another_name(make_model: Callable[..., Any]) -> None:
    model = make_model("llama")
    found = {model_name(model)}
    mlp, other = model.model.layers[0].mlp, model.model.layers[1].mlp
    mlp.up_proj, other.up_proj = other.up_proj, mlp.up_proj
    found.add(model_name(model))
    found.add(model_name(model.bfloat16()))
    assert len(found) == 3


def test_tied_weights_are_read_once_and_named_as_if_they_were_two(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    read: list[str] = []
    digest_of = weights._digest_of
    monkeypatch.setattr(weights, "_digest_of", lambda name, weight: (read.append(name), digest_of(name, weight))[1])
    tied = model_name(model)
    assert len(read) == len(model.state_dict()) - 1
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert model_name(model) == tied
    change(model, "lm_head.weight", model.lm_head.weight.numel() - 1)
    assert model_name(model) != tied


def test_a_model_without_values_has_no_name(make_model: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = make_model("llama")
    with pytest.raises(ModelLoadError, match=r"weight 'model\.embed_tokens\.weight' has no values"):
        model_name(model)


@pytest.fixture
def exchange_of() -> Iterator[Callable[[Path, str], PageExchange]]:
    with ExitStack() as stack:

        def load(path: Path, name: str) -> PageExchange:
            loop, compatibility = build_loop(msgspec.structs.replace(CONFIG, model=str(path)))
            stack.callback(loop.manager.close)
            exchange = PageExchange(loop.manager, name, compatibility=compatibility)
            stack.callback(exchange.close)
            return exchange

        yield load


def test_a_peer_whose_weights_differ_in_one_value_is_refused_by_name(
    make_model: Callable[..., Any], tmp_path: Path, exchange_of: Callable[[Path, str], PageExchange]
) -> None:
    """While a fleet gets new weights, one process after another, the weights of two processes differ."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "before")
    change(model, "lm_head.weight", model.lm_head.weight.numel() - 1)
    model.save_pretrained(tmp_path / "after")
    source, reader = exchange_of(tmp_path / "before", "p"), exchange_of(tmp_path / "after", "d")
    context = TextContext([1, 2, 3], 8, "r")
    source._manager.external_claim("r")
    assert source._manager.maybe_reserve(context)
    offered = source.offer("r", 5.0)
    assert offered is not None
    reader.open_pull(0, "r", offered, 5.0)
    events: list[Any] = []
    end = time.monotonic() + 20
    while not events:
        assert time.monotonic() < end, "the source was not refused"
        source.poll()
        events += [one.event for one in reader.poll()]
        time.sleep(1e-3)
    names = [model_name(load_model(tmp_path / name)) for name in ("before", "after")]
    wanted = f"is not compatible: model: {names[0]!r} at the source, {names[1]!r} at the reader"
    assert wanted in events[0].error
    source._manager.release("r")
