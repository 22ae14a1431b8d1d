"""An object store in memory. A test chooses the calls that fail and the calls that are delayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvcache.tiers.object_tier import ObjectTier
from kvcache.types import ObjectIO, ObjectRange, Part
from tests.kvcache.served import LONGEST_WAIT_S, Served, until

COUNT = 4  # The number of pages in an object.
# Ways to damage an object. "longer" adds extra bytes at the end of the object. All of its pages are then still right,
# so they are read and the object stays.
DAMAGE = ("gone", "swapped", "empty", "cut", "noise", "shifted", "pushed", "flipped", "longer")
S = TypeVar("S", bound=Served)


class StoredObjects:
    """A store that several `ObjectIO`s share. Managers get it as `object_tier_io`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.read_bytes = 0
        self.fails = False
        self.may = threading.Event()  # While the event is not set, each call of the store waits until its time limit.
        self.may.set()
        self.open = 0
        self._machines: list[Served] = []

    def machine(self, kind: type[S], *sizes: int, params: dict[str, Any] | None = None, **options: Any) -> S:
        """Makes a manager over this store, which is closed together with the store. A busy machine may delay a test for
        seconds, and the manager must not take this for a slow store. The manager therefore waits for the store as
        long as it can, unless `params` say otherwise.
        """
        given = {"file_tier_key": "model", "object_tier_io": self, "object_tier_pages": COUNT}
        given |= {"object_tier_timeout_s": 60.0, **(params or {})}
        made = kind(*sizes, params=given, **options)
        self._machines.append(made)
        return made

    def close(self) -> None:
        """Checks and closes all managers over the store. After that, no connection to the store may be open."""
        for one in self._machines:
            one.manager.check()
            one.manager.close()
        assert self.open == 0

    def __call__(self, size: int, timeout_s: float) -> ObjectIO:
        self.open += 1
        return _IO(self, size, timeout_s)

    @property
    def pages(self) -> dict[str, bytes]:
        """Returns the objects that contain pages."""
        return {key: content for key, content in self.objects.copy().items() if not key.endswith("/current")}

    def is_not_waited_for(self, reserve: Callable[[], bool]) -> None:
        """Asserts that `reserve` returns True while a call to the store hangs, although a call may take a minute."""
        self.may.clear()
        began = time.monotonic()
        assert reserve()
        assert time.monotonic() - began < LONGEST_WAIT_S
        self.may.set()

    def damage(self, key: str, how: str, rng: np.random.Generator) -> bool:
        """Damages an object in one of the ways in `DAMAGE`. Returns whether the object has changed or is gone."""
        content, right = damaged(self, key, how, rng), self.objects.pop(key)
        if content is not None:
            self.objects[key] = content
        return content != right


def damaged(store: StoredObjects, key: str, how: str, rng: np.random.Generator) -> bytes | None:
    """Returns the content of an object after the damage, or None if the object is gone."""
    content = bytearray(store.objects[key])
    others = [one for one in store.pages if one != key]
    made: dict[str, Callable[[], bytes | None]] = {
        "gone": lambda: None,
        "swapped": lambda: store.objects[others[int(rng.integers(len(others)))]],
        "empty": lambda: b"",
        "cut": lambda: bytes(content[: int(rng.integers(len(content)))]),
        "noise": lambda: rng.integers(0, 256, len(content), np.uint8).tobytes(),
        "shifted": lambda: bytes(content[1:]) + b"?",
        "pushed": lambda: b"?" + bytes(content),
        "longer": lambda: bytes(content) + rng.integers(0, 256, int(rng.integers(1, 200)), np.uint8).tobytes(),
    }
    if how in made:
        return made[how]()
    content[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    return bytes(content)


def tiers_of(it: Served) -> list[ObjectTier]:
    """Returns the object tiers of a manager: the tier of its pages, and the tier of its states if it has states."""
    return [tiers._counted[-1] for tiers in it.manager._replicas._all_tiers]


def objects_of(it: Served) -> ObjectTier:
    """Returns the object tier for pages."""
    return tiers_of(it)[0]


def settled(it: Served) -> None:
    """Waits until the threads of the object tiers have nothing to do."""

    def is_done() -> bool:
        for tier in tiers_of(it):
            tier.tick()
        return not any(tier._reader.jobs or tier._writer.jobs or tier._queue for tier in tiers_of(it))

    until(is_done)


def forget_host(it: Served) -> None:
    """Evicts all pages from the host, but keeps the manager's knowledge of the store."""
    for tiers in it.manager._replicas._all_tiers:
        tiers.host.pool.forget()


def key_of(it: Served, prompt: Iterable[int], pages: int, table: int = 0, *, state: bool = False) -> str:
    """Returns the key of a table's object that ends after `pages` pages of a prompt. With `state`, returns the key of
    the state after these pages.
    """
    tier, tables, digests = tiers_of(it)[state], it.manager._replicas.each[0].tables, it.digests(prompt)
    if not tier._epoch:
        settled(it)
    own = tables.every(digests)[table] if tables.count > 1 else digests
    return tier._layout.key(tier._epoch, own[pages - 1].tobytes())


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
        """Reads as S3 does. If the object ends within a range, the result is shorter. If the object ends before the
        range, the read fails.
        """
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
