"""A model's name depends on every value of its weights, and on nothing else."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvcache import BlockTableMismatchError, TextContext
from scheduler_adapters.errors import ModelLoadError
from scheduler_adapters.hf import weights
from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import tiny_llama
from scheduler_adapters.hf.weights import ModelWeights, architecture_name, free_memory, model_name
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


def offered(source: PageExchange, reader: PageExchange) -> tuple[TextContext, Any]:
    """Returns the reader's context of a prompt that the source has computed and leased, and the block table."""
    manager: Any = source._manager
    context = TextContext([1, 2, 3], 8, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    context.update(4)
    manager.step([context])
    offer = source.offer("r", 5.0)
    assert offer is not None
    reader.open_pull(0, "r", offer, 5.0)
    return TextContext([1, 2, 3, 4], 8, "r"), manager.block_table("r")


def test_a_peer_whose_weights_differ_in_one_value_is_refused_by_name(
    make_model: Callable[..., Any], tmp_path: Path, exchange_of: Callable[[Path, str], PageExchange]
) -> None:
    """While a fleet gets new weights, one process after another, the weights of two processes differ."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "before")
    change(model, "lm_head.weight", model.lm_head.weight.numel() - 1)
    model.save_pretrained(tmp_path / "after")
    source, reader = exchange_of(tmp_path / "before", "p"), exchange_of(tmp_path / "after", "d")
    context, table = offered(source, reader)
    manager: Any = reader._manager
    manager.external_claim("r")
    names = [model_name(load_model(tmp_path / name)) for name in ("before", "after")]
    wanted = (
        f"request 'r': the block table has tokens of the weights {names[0]}, but this request runs under {names[1]}"
    )
    with pytest.raises(BlockTableMismatchError, match=wanted):
        manager.import_block_table(context, table)
    manager.release("r")
    reader.cancel_pull(0, "r", "it is of other weights")
    source._manager.release("r")


def test_a_peer_of_another_architecture_is_refused_when_they_first_meet(
    make_model: Callable[..., Any], tmp_path: Path, exchange_of: Callable[[Path, str], PageExchange]
) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "one")
    model.config.rms_norm_eps = 1e-3
    model.save_pretrained(tmp_path / "other")
    source, reader = exchange_of(tmp_path / "one", "p"), exchange_of(tmp_path / "other", "d")
    offered(source, reader)
    events: list[Any] = []
    end = time.monotonic() + 20
    while not events:
        assert time.monotonic() < end, "the source was not refused"
        source.poll()
        events += [one.event for one in reader.poll()]
        time.sleep(1e-3)
    names = [architecture_name(load_model(tmp_path / name)) for name in ("one", "other")]
    wanted = f"is not compatible: model: {names[0]!r} at the source, {names[1]!r} at the reader"
    assert wanted in events[0].error
    source._manager.release("r")


# ---- other weights for a model that serves


@pytest.fixture
def tiny() -> ModelWeights:
    return ModelWeights(load_model(None))


def saved(path: Path, seed: int, **config: Any) -> Path:
    model: Any = tiny_llama(seed)
    model.config.update(config)
    model.save_pretrained(path)
    return path


def test_a_model_gets_other_weights_and_its_own_again(tiny: ModelWeights, tmp_path: Path) -> None:
    before, tokens = tiny.name, torch.tensor([[256, 1, 2, 3]])
    where = [parameter.data_ptr() for parameter in tiny.model.parameters()]
    names = {}
    for seed in (1, 0):
        spare = tiny.load(saved(tmp_path / str(seed), seed))
        tiny.put(spare)
        names[seed] = tiny.name
        assert tiny.name == spare.name == model_name(tiny.model)
        with torch.inference_mode():
            assert tiny.model(tokens).logits.equal(tiny_llama(seed)(tokens).logits)
    assert names[0] == before, "the same weights from a directory have the same name"
    assert names[1] != before
    assert where == [parameter.data_ptr() for parameter in tiny.model.parameters()], "what has their addresses keeps it"


def smaller(path: Path) -> None:
    model: Any = tiny_llama()
    type(model)(type(model.config)(vocab_size=259, hidden_size=64, num_hidden_layers=1)).save_pretrained(path)


def ends_elsewhere(path: Path) -> None:
    model: Any = tiny_llama(1)
    model.generation_config.eos_token_id = 3
    model.save_pretrained(path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda _: None, "does not exist"),
    "a file": (lambda path: path.write_text("x"), "has no config.json"),
    "an unreadable file": (
        lambda path: (saved(path, 1) / "model.safetensors").write_bytes(b"\0" * 1000),
        "cannot be loaded",
    ),
    "a file that is cut short": (
        lambda path: os.truncate(saved(path, 1) / "model.safetensors", 100_000),
        "cannot be loaded",
    ),
    "no weights": (lambda path: (saved(path, 1) / "model.safetensors").unlink(), "cannot be loaded"),
    "another setting": (
        lambda path: saved(path, 1, rms_norm_eps=0.5),
        "has another model: rms_norm_eps is 0.5 there, and 1e-06 here",
    ),
    "another size": (smaller, "has another model: .*hidden_size is 64 there, and 128 here.*more"),
    "other ends": (ends_elsewhere, r"ends with the tokens \[3\], but the model with \[257\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_directory_that_does_not_fit_is_refused_and_changes_nothing(
    tiny: ModelWeights, tmp_path: Path, what: str
) -> None:
    make, told = REFUSED[what]
    make(tmp_path / "it")
    with pytest.raises(ModelLoadError, match=rf"model directory '{tmp_path}/it' {told}"):
        tiny.load(tmp_path / "it")
    assert model_name(tiny.model) == tiny.name


def test_too_little_memory_is_noticed_before_anything_is_loaded(
    tiny: ModelWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:  1000 kB\n")
    monkeypatch.setattr(weights, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(weights, "_CONTAINER", tmp_path)
    assert free_memory() == 1000 << 10
    with pytest.raises(ModelLoadError, match=r"takes [\d,]+ bytes of host memory, and 1,024,000 are free"):
        tiny.load(saved(tmp_path / "it", 1))
    for name, text in {"memory.max": "90000", "memory.current": "80000", "memory.stat": "anon 1\nfile 5000\n"}.items():
        (tmp_path / name).write_text(text)
    assert free_memory() == 15_000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory() == 1000 << 10
    (tmp_path / "meminfo").unlink()
    assert free_memory() is None
    tiny.load(tmp_path / "it")
