"""Weights and adapters that differ at the two sides are noticed in each hand-over, not only when a pair first meets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_serve.client import PROMPTS, Answer, ask
from tests.vllm_serve.proxy import FOR_A_READER
from tests.vllm_serve.server import Pair, Server, Settings

TRIED = [prompt for prompt in PROMPTS if len(prompt) > 60][:6]
WEIGHTS = "model.safetensors"
UPDATES = (
    *("--weight-transfer-config", json.dumps({"backend": "file"})),
    *("--worker-extension-cls", "tests.vllm_serve.file_weights.Worker"),
)


def make_adapter(folder: Path, seed: int) -> Path:
    """Returns the folder of a LoRA adapter of the Llama of these tests. All of its weights depend on the seed."""
    from safetensors.torch import save_file

    folder.mkdir()
    numbers, rank, hidden, heads = torch.Generator().manual_seed(seed), 8, 128, {"q_proj": 256, "v_proj": 128}
    weights: dict[str, torch.Tensor] = {}
    for layer in range(4):
        for name, size in heads.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=numbers) * 0.1
            weights[f"{module}.lora_B.weight"] = torch.randn(size, rank, generator=numbers) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": [*heads], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def target(model: Callable[..., Path], folder: Path) -> Path:
    """Returns a model of these tests alone, because they replace its weights."""
    return Path(shutil.copytree(model("llama"), folder / "reloaded"))


@pytest.fixture(scope="module")
def adapters(folder: Path) -> tuple[Path, Path, Path]:
    """Returns the folders of an adapter, of its copy, and of an adapter with other weights."""
    first, second = make_adapter(folder / "first", 1), make_adapter(folder / "second", 2)
    return first, Path(shutil.copytree(first, folder / "copied")), second


@pytest.fixture
def pair(servers: Any, target: Path, adapters: tuple[Path, Path, Path]) -> Pair:
    """Both sides have the adapters `same` and `other`. The weights of `other` differ."""
    first, copied, second = adapters
    settings = Settings(target, number=11, more=_adapters(same=first, other=first))
    return servers.pair(settings, replace(settings, number=12, more=_adapters(same=copied, other=second)))


def _adapters(**adapters: Path) -> tuple[str, ...]:
    named = [f"{name}={path}" for name, path in adapters.items()]
    return (*UPDATES, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *named)


def handed_over(pair: Pair, prompt: list[int], **more: Any) -> Answer:
    first = ask(pair.prefill.url, prompt, **{**more, "max_tokens": 1, "kv_transfer_params": FOR_A_READER})
    assert first.status == 200, first
    return ask(pair.decode.url, prompt, kv_transfer_params=first.params, **more)


def alone(pair: Pair, **more: Any) -> list[list[int]]:
    """Returns the tokens of decode without a transfer."""
    found = [ask(pair.decode.url, prompt, **more).tokens for prompt in TRIED]
    pair.forget()
    return found


def assert_refused(pair: Pair, told: str, **more: Any) -> None:
    read = len(pair.decode.text)
    assert [handed_over(pair, prompt, **more).status for prompt in TRIED] == [500] * len(TRIED)
    assert pair.decode.text[read:].count(told) >= len(TRIED), pair.decode.text[read:]
    pair.forget()


def test_an_adapter_with_other_weights_at_the_other_side_is_refused_by_name(pair: Pair) -> None:
    right = alone(pair, model="same")
    assert right != alone(pair)
    assert [handed_over(pair, prompt, model="same").tokens for prompt in TRIED] == right
    pair.forget()
    assert_refused(pair, "holds pages of another model: adapter 'other': 'files ", model="other")
    assert handed_over(pair, TRIED[0], model="same").tokens == right[0]
    pair.forget()


def test_weights_that_were_reloaded_at_one_side_are_refused_until_the_other_side_has_them(
    pair: Pair, target: Path, model: Callable[..., Path]
) -> None:
    before = alone(pair)
    assert [handed_over(pair, prompt).tokens for prompt in TRIED] == before
    pair.forget()
    shutil.copy(model("llama", 1) / WEIGHTS, target / "new")
    (target / "new").replace(target / WEIGHTS)
    pair.prefill.post("/collective_rpc", method="reload_weights")
    pair.forget()
    assert_refused(pair, "holds pages of another model: weights: 'checkpoint ")
    pair.decode.post("/collective_rpc", method="reload_weights")
    pair.forget()
    after = alone(pair)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert [handed_over(pair, prompt).tokens for prompt in TRIED] == after
    pair.forget()


def update(server: Server, file: Path) -> None:
    """Updates a server's weights as a trainer does."""
    server.post("/start_weight_update")
    server.post("/update_weights", update_info={"path": str(file)})
    server.post("/finish_weight_update")


def test_weights_that_a_trainer_updates_at_one_side_are_refused_until_the_other_side_has_them(
    pair: Pair, model: Callable[..., Path]
) -> None:
    before, file = alone(pair), model("llama", 2) / WEIGHTS
    update(pair.prefill, file)
    pair.forget()
    assert_refused(pair, "then update 1 from memory")
    update(pair.decode, file)
    pair.forget()
    after = alone(pair)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert [handed_over(pair, prompt).tokens for prompt in TRIED] == after
    pair.forget()
