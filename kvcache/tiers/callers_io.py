"""A caller's own `ObjectIO` or `PageIO` as the tiers use it: each of its failures is an `OSError`.

A store's client may raise errors of its own, which are not `OSError`s. They must not reach the serving loop in the
middle of a call. The tiers count them as failures of the store or the disk, like any `OSError`.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import numpy as np
import torch

from kvcache.arguments import shown
from kvcache.errors import InvalidParamsError
from kvcache.types import MakeObjectIO, ObjectIO, ObjectRange, PageIO, Part

_log = logging.getLogger("pagewire")


class CallersObjects:
    """The `ObjectIO` that a caller's `make_io` returns. Raises `InvalidParamsError` if it returns anything else."""

    def __init__(self, make_io: MakeObjectIO, size: int, timeout_s: float) -> None:
        self._io: ObjectIO = make_io(size, timeout_s)
        names, memory = ("exist", "write", "read", "close"), cast("Any", getattr(self._io, "memory", None))
        fits = getattr(memory, "dtype", None) == np.uint8 and memory.size >= size
        if not fits or not all(callable(getattr(self._io, name, None)) for name in names):
            raise InvalidParamsError(
                f"object_tier_io({size}, {timeout_s}) returned {shown(self._io)}: an ObjectIO with a memory of that "
                "many bytes is needed"
            )

    @property
    def memory(self) -> Part:
        return self._io.memory

    def exist(self, keys: Sequence[str]) -> list[bool]:
        with _failing("exist"):
            return _for_each(keys, self._io.exist(keys))

    def write(self, objects: Sequence[ObjectRange]) -> None:
        with _failing("write"):
            self._io.write(objects)

    def read(self, ranges: Sequence[ObjectRange]) -> list[bool]:
        with _failing("read"):
            return _for_each(ranges, self._io.read(ranges))

    def close(self) -> None:
        """Close the caller's object. A failure is logged, because the other parts of a tier must still be closed."""
        try:
            self._io.close()
        except Exception as error:  # noqa: BLE001 - the caller's code
            _log.warning("object tier: closing %s failed: %s", shown(self._io), error)


class CallersPages:
    """The `PageIO` that a caller's `make_io` returns. Raises `InvalidParamsError` if it returns anything else."""

    def __init__(self, make_io: Callable[[Sequence[torch.Tensor]], PageIO], memory: Sequence[torch.Tensor]) -> None:
        self._io: PageIO = make_io(memory)
        if not all(callable(getattr(self._io, name, None)) for name in ("write", "read")):
            raise InvalidParamsError(f"file_tier_io returned {shown(self._io)}: a PageIO is needed")

    def write(self, file: int, parts: Sequence[Part], offset: int) -> None:
        with _failing("write"):
            self._io.write(file, parts, offset)

    def read(self, file: int, parts: Sequence[Part], offset: int) -> None:
        with _failing("read"):
            self._io.read(file, parts, offset)


@contextlib.contextmanager
def _failing(call: str) -> Generator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{call} raised {type(error).__name__}: {error}") from error


def _for_each(asked: Sequence[object], answers: Sequence[object]) -> list[bool]:
    if len(answers) != len(asked):
        raise ValueError(f"{len(answers)} answers came for {len(asked)} queries")
    return [bool(answer) for answer in answers]
