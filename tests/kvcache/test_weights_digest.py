"""The version of live tensors depends on every byte, name, dtype and shape of them, and on nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import InvalidParamsError, weights_of
from tests.kvcache.build import manager_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.int64]
ON_CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


def tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns a tensor of each dtype, with random bytes, of 0 to 3 dimensions."""
    draw, shapes = np.random.default_rng(1), [(3, 4, 5), (7,), (), (0, 3), (6, 2), (1, 1), (2, 300)]
    made = dict[str, torch.Tensor]()
    for dtype, shape in zip(DTYPES, shapes, strict=True):
        count = int(np.prod(shape)) * dtype.itemsize
        raw = draw.integers(0, 2 if dtype == torch.bool else 256, count, np.uint8)
        made[str(dtype)] = torch.from_numpy(raw).view(dtype).reshape(shape).to(device)
    return made


class Model(torch.nn.Module):
    """A model with parameters, a tied one, and buffers, of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Buffer(torch.ones(3))
        self.rotary = torch.nn.Buffer(torch.arange(4.0), persistent=False)


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize("chunk", [64 << 20, 16])
def test_each_byte_counts_and_the_device_does_not(device: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    version = weights_of(tensors())
    monkeypatch.setattr("kvcache.weights_digest.CHUNK_BYTES", chunk)
    made, draw = tensors(device), random.Random(2)
    assert weights_of(made) == version
    assert len(version) == 16
    found, flipped = {version}, 0
    for name, tensor in made.items():
        flat = tensor.reshape(-1).view(torch.uint8)
        for at in {0, len(flat) - 1, *draw.choices(range(len(flat)), k=3)} if len(flat) else ():
            flat[at] ^= 1
            found.add(weights_of(made))
            flat[at] ^= 1
            flipped += 1
        assert weights_of(made) == version, name
    assert len(found) == 1 + flipped > 15
    assert manager_of(params={"weights": version}).weights == version


def test_names_dtypes_and_shapes_count_and_the_order_and_layout_do_not() -> None:
    made = tensors()
    version = weights_of(made)
    assert weights_of(dict(reversed(made.items()))) == version
    turned = {name: one.mT.contiguous().mT if one.dim() > 1 else one for name, one in made.items()}
    assert not turned["torch.float32"].is_contiguous()
    assert weights_of(turned) == version
    some = torch.zeros(4, 2)
    cases: list[dict[str, torch.Tensor]] = [
        {"a": some},
        {"b": some},
        {"a": some.reshape(2, 4)},
        {"a": some.to(torch.int32)},
        {"a": some[:2], "b": some[2:]},
        {"a": some[:0]},
        {},
    ]
    assert len({weights_of(case) for case in cases}) == len(cases)


def test_a_model_is_its_parameters_and_all_of_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = Model(), list[int]()
    version = weights_of(model)
    for tensor in (model.embed.weight.data, model.scale, model.rotary):
        tensor.view(torch.uint8).view(-1)[0] ^= 1
        assert weights_of(model) != version
        tensor.view(torch.uint8).view(-1)[0] ^= 1
    assert weights_of(model) == version
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    assert weights_of(model) == version, "tied weights are named as if they were two"
    model.head.weight = model.embed.weight
    digest = "kvcache.weights_digest.digest_of_tensor"
    monkeypatch.setattr(digest, lambda tensor: read.append(tensor.numel()) or b"")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]
    weights_of(model)
    assert sorted(read) == [3, 4, 15], "they are read once"


@pytest.mark.parametrize("model", [3, None, [torch.zeros(1)], {"a": 1}, {"a": torch.zeros(2, 2).to_sparse()}])
def test_what_has_no_bytes_is_refused(model: Any) -> None:
    with pytest.raises(InvalidParamsError, match="weights_of: "):
        weights_of(model)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(InvalidParamsError, match=r"'embed.weight' is on torch's meta device"):
        weights_of(model)
