"""Identifies the files of a checkpoint, or of an adapter, by what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from scheduler_adapters.errors import ModelLoadError

_OF_CHECKPOINT = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_WHOLE_BYTES = 256 << 20
"""A file of up to this size is read as a whole. `_PARTS` parts of `_PART_BYTES` are read of a larger one."""
_PARTS, _PART_BYTES = 1024, 64 << 10


def digest_of_files(files: Iterable[Path]) -> str:
    """Returns a digest of the names and contents of files; empty if there are none."""
    found, ordered = hashlib.blake2b(digest_size=16), sorted(files, key=lambda file: file.name)
    for file in ordered:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            found.update(f"{file.name}\0{size}\0".encode(errors="surrogateescape"))
            whole = size <= _WHOLE_BYTES
            for part in range(1 if whole else _PARTS):
                opened.seek(part * (size - _PART_BYTES) // (_PARTS - 1) if part else 0)
                found.update(opened.read(size if whole else _PART_BYTES))
    return found.hexdigest() if ordered else ""


def files_in(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Returns the files of a folder whose names match one of the patterns."""
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]


def digest_of_checkpoint(path: str) -> str:
    """Returns a digest of the files of a checkpoint; empty if `path` names none, or they cannot be read."""
    try:
        return digest_of_files([Path(path)] if Path(path).is_file() else files_in(Path(path), _OF_CHECKPOINT))
    except OSError:
        return ""


def weights_of_checkpoint(path: str | Path) -> bytes:
    """Returns the version of a checkpoint's weights: 16 bytes, for `KVCacheParams(weights=)` and `set_weights`.

    `path` is a file, or a folder with `.safetensors`, `.bin`, `.pt`, `.pth` or `.gguf` files. The version is a digest
    of their names and contents. 1,024 parts of a file above 256 MiB are read, 64 MiB in all. This tells apart the
    checkpoints of a training run, but not large files that differ in a few bytes: `weights_of` reads all of them.
    Tensors that were loaded from a checkpoint have another version than the checkpoint itself, so use one of the two
    functions throughout. Raises `ModelLoadError` if there is no such file, or one cannot be read.
    """
    found = digest_of_checkpoint(str(path))
    if not found:
        kinds = ", ".join(_OF_CHECKPOINT)
        raise ModelLoadError(f"weights_of_checkpoint: {str(path)!r} has no readable file of a checkpoint ({kinds})")
    return bytes.fromhex(found)
