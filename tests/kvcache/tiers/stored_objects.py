"""An object store in memory, which fails and takes its time as a test wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvcache.types import ObjectIO, ObjectRange, Part


class StoredObjects:
    """What all its `ObjectIO` share. A manager's `object_tier_io`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.read_bytes = 0
        self.fails = False
        self.may = threading.Event()  # calls wait for it, as long as their time lasts
        self.may.set()
        self.open = 0

    def __call__(self, size: int, timeout_s: float) -> ObjectIO:
        self.open += 1
        return _IO(self, size, timeout_s)

    @property
    def pages(self) -> dict[str, bytes]:
        """The objects that hold pages."""
        return {key: content for key, content in self.objects.copy().items() if not key.endswith("/current")}

    def is_not_waited_for(self, reserve: Callable[[], bool]) -> None:
        """`reserve`, of a manager that gives a call a minute, says True although no call comes to its end."""
        self.may.clear()
        began = time.monotonic()
        assert reserve()
        assert time.monotonic() - began < 30
        self.may.set()


class _IO:
    def __init__(self, store: StoredObjects, size: int, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._memory = np.zeros(size, np.uint8)

    @property
    def memory(self) -> Part:
        return self._memory

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._call("exist")
        return [key in self._store.objects for key in keys]

    def write(self, objects: Sequence[ObjectRange]) -> None:
        self._call("write")
        for key, offset, start, size in objects:
            assert offset == 0
            self._store.objects[key] = self._memory[start : start + size].tobytes()

    def read(self, ranges: Sequence[ObjectRange]) -> list[bool]:
        """As S3: less where the object ends, an error where it has ended before."""
        self._call("read")
        done: list[bool] = []
        for key, offset, start, size in ranges:
            content = self._store.objects.get(key, b"")[offset : offset + size]
            self._store.read_bytes += len(content)
            self._memory[start : start + len(content)] = np.frombuffer(content, np.uint8)
            done.append(bool(content))
        return done

    def close(self) -> None:
        self._store.open -= 1

    def _call(self, name: str) -> None:
        self._store.calls.append(name)
        if not self._store.may.wait(self._timeout_s):
            raise TimeoutError("the store is slow")
        if self._store.fails:
            raise ConnectionError("the store fails")
