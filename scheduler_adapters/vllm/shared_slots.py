"""Host slots of one rank, in memory that the rank's worker and the process of vLLM's scheduler share.

The worker copies blocks between the device and the slots. The scheduler's process decides which slot holds which block,
and moves slots to files and objects. The memory is a file in `/dev/shm`, which only its owner may access. Its name goes
as soon as both processes have mapped it, so the memory is freed when both have ended, however they end.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from transfer.errors import InvalidEngineError

_FOLDER = Path("/dev/shm")  # noqa: S108  (the file is private: mode 0600, and refused if it exists)
_HEADER = mmap.PAGESIZE
_DIGEST_BYTES = 16
_OF_FORMAT, _OF_WEIGHTS = slice(24, 24 + _DIGEST_BYTES), slice(40, 40 + _DIGEST_BYTES)


def slots_path(engine_id: str, rank: int) -> Path:
    """Returns the path of the slots of a rank. Data-parallel engines have different ids."""
    return _FOLDER / f"pagewire-{hashlib.sha256(engine_id.encode()).hexdigest()[:24]}-{rank}"


class SharedSlots:
    """The mapped slots. Slot 0 is the null slot. The memory begins with a header, in which the worker describes them.

    Attributes:
        num_slots: number of slots, without the null slot.
        memory: uint8 `[num_slots + 1, slot_bytes]`.
        digest: identifies the format and the model of what this rank writes: 16 bytes.
    """

    def __init__(self, file: int) -> None:
        self._mapping = mmap.mmap(file, 0)
        self._words = np.frombuffer(self._mapping, np.uint64, 3)
        self.num_slots, size = (int(word) for word in self._words[:2])
        self.digest = bytes(self._mapping[_OF_FORMAT])
        content = np.frombuffer(self._mapping, np.uint8, (self.num_slots + 1) * size, _HEADER)
        self.memory: torch.Tensor = torch.as_tensor(content.reshape(-1, size))

    @classmethod
    def create(cls, path: Path, num_slots: int, slot_bytes: int, described: str, weights: bytes = b"") -> SharedSlots:
        """Creates the slots of a rank. `described` is text that identifies what the rank writes, `weights` its weights.

        Raises:
            InvalidEngineError: the host has too little shared memory.
        """
        size = _HEADER + (num_slots + 1) * slot_bytes
        path.unlink(missing_ok=True)  # left behind by a process that died while it started
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # without it, memory that is not there kills the process at first use
            digest = hashlib.sha256(described.encode()).digest()[:_DIGEST_BYTES]
            words = np.array([num_slots, slot_bytes, 0], np.uint64).tobytes()
            os.pwrite(file, words + digest + weights.ljust(_DIGEST_BYTES, b"\0"), 0)
            return cls(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InvalidEngineError(
                f"host_kvcache_swap_space_gb: {size} bytes of shared memory do not fit into {_FOLDER}: {error}"
            ) from error
        finally:
            os.close(file)

    @classmethod
    def join(cls, path: Path) -> SharedSlots:
        """Maps the slots that a worker has created, and removes their name.

        Raises:
            InvalidEngineError: there are none.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidEngineError(
                f"{path}: {error}. The worker creates this file, so all workers must run on the scheduler's host"
            ) from error
        try:
            return cls(file)
        finally:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def changes(self) -> int:
        """How often the worker's weights were replaced since its start."""
        return int(self._words[2])

    @property
    def weights(self) -> bytes:
        """The digest of the checkpoint that the worker's weights were read from last. Empty if that is not known."""
        found = bytes(self._mapping[_OF_WEIGHTS])
        return found if any(found) else b""

    def count_change(self, weights: bytes = b"") -> None:
        """Records that the worker's weights were replaced. `weights` is as in the attribute of this name."""
        self._mapping[_OF_WEIGHTS] = weights.ljust(_DIGEST_BYTES, b"\0")
        self._words[2] += np.uint64(1)
