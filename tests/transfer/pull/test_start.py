"""Keys of a fleet, and a rank over the memory of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transfer.errors import InvalidEngineError
from transfer.memory import MemoryType
from transfer.plan.boxes import ShardLayout
from transfer.pull import start
from transfer.pull.rank import RankIdentity
from transfer.pull.start import ShardMemory, fleet_keys, make_rank
from transfer.wire.keys import make_keyrings

SECRET = "the secret of one fleet"  # noqa: S105 -- of this test


def test_keys_are_those_given_or_those_of_the_secret() -> None:
    (keyring,) = make_keyrings(1)
    assert fleet_keys("e", "") == (b"", None)
    assert fleet_keys("e", "", b"k", keyring) == (b"k", keyring)
    key, shared = fleet_keys("e", SECRET)
    assert len(key) == 32
    assert shared is not None
    assert fleet_keys("other", SECRET) == (key, shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((SECRET, b"k"), "engine 'e': a key beside a shared secret; one is needed"),
        ((SECRET, b"", make_keyrings(1)[0]), "engine 'e': a keyring beside a shared secret; one is needed"),
        (("short",), "has 5 bytes, at least 16"),
    ],
)
def test_a_secret_stands_alone(options: Any, message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        fleet_keys("engine 'e'", *options)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (MemoryType.DRAM, 0)), ("cuda", (MemoryType.VRAM, 0)), ("cuda:3", (MemoryType.VRAM, 3))],
)
def test_a_rank_has_the_memory_of_its_device(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: tuple[MemoryType, int]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(start, "RankTransfer", lambda *args, **options: made.append((args, options)))
    memory = ShardMemory(ShardLayout((), (64,)), (4096,), torch.device(device))
    make_rank(RankIdentity(engine_id="e", incarnation="i"), memory, verify=0.5)
    ((args, options),) = made
    assert args[1:] == (memory.layout, memory.bases, *expected)
    assert options["verify"] == 0.5
