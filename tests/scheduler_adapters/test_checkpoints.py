"""The version of a checkpoint depends on the names and contents of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_adapters.checkpoints import weights_of_checkpoint
from scheduler_adapters.errors import ModelLoadError


def test_a_checkpoint_is_its_weight_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text(folder.name)
    version = weights_of_checkpoint(one)
    assert len(version) == 16
    assert weights_of_checkpoint(str(two)) == version
    assert weights_of_checkpoint(one / "a.safetensors") == version
    (two / "a.safetensors").write_bytes(b"weighty")
    assert weights_of_checkpoint(two) != version
    (one / "a.safetensors").rename(one / "b.safetensors")
    assert weights_of_checkpoint(one) != version
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ModelLoadError, match="has no readable file of a checkpoint"):
            weights_of_checkpoint(nothing)
