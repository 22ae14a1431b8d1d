"""Lists everything that a manager knows, as one flat list. If the lists from before and after a call are equal, the
call has changed nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

from kvcache import PagedKVCacheManager, TextContext

Books = list[object]

# The comparison leaves these attributes out, because calls may change them without changing the state: the clock,
# cached answers with their generation, the last list of contexts, bounds of slabs' ages, and the tables of steps in
# flight.
_SKIPPED = {"_seen", "matches", "_credit", "_ages", "_ages_back", "_of_steps", "_listed", "_alone"}
_PLAIN = {type(None), bool, int, float, str, bytes}
_LEFT_OUT = (type, types.FunctionType, types.MethodType, TextContext, torch.Tensor)
_SHORT = 256  # In bytes. A shorter array is listed with its bytes, a longer array with a hash of its bytes.


def books_of(manager: PagedKVCacheManager, contexts: Sequence[TextContext] = ()) -> Books:
    """Returns every array, counter and metric of the manager with its name. Also returns the indices of the
    contexts.
    """
    found: Books = []
    _walk(manager, found, set())
    found.append(manager.metrics)
    for context in contexts:
        found += (context.request_id, context.tokens.tobytes(), context.start_idx, context.active_idx, context.end_idx)
        found += (context.cache_salt, context.extra_keys, context.retention)
    return found


def first_difference(before: Books, after: Books) -> str:
    """Returns the path of the first entry that differs, with its value before and after. The result is empty if both
    lists are equal.
    """
    if before == after:
        return ""
    at = next((at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), -1)
    names = [entry for entry in before[max(0, at - 40) : at] if isinstance(entry, str)][-8:]
    return f"{'.'.join(names)}: {before[at]!r:.200} became {after[at]!r:.200}"


def _walk(value: Any, found: Books, seen: set[int]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        found.append(value)
    elif kind is np.ndarray:
        short = value.nbytes < _SHORT
        found.append(value.tobytes() if short else xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).data))
    elif kind is bytearray:
        found.append(bytes(value))
    elif kind is dict:
        found.append(len(value))
        for key, item in value.items():
            found.append(key if type(key) in _PLAIN else "key")
            _walk(item, found, seen)
    elif isinstance(value, list | tuple | set):
        _walk_all(value, found, seen)
    elif (names := _names_of(kind)) is not None and id(value) not in seen:
        seen.add(id(value))
        for name in (*names, *getattr(value, "__dict__", ())):
            if name not in _SKIPPED:
                found.append(name)
                _walk(getattr(value, name, None), found, seen)


def _walk_all(values: Iterable[Any], found: Books, seen: set[int]) -> None:
    listed = tuple(values)
    if {*map(type, listed)} <= _PLAIN:
        found.append(listed)
        return
    found.append(len(listed))
    for item in listed:
        _walk(item, found, seen)


@cache
def _names_of(kind: type) -> tuple[str, ...] | None:
    """Returns the names of the slots of a class of pagewire. Returns None if objects of the class are left out of the
    list.
    """
    if issubclass(kind, _LEFT_OUT) or not kind.__module__.startswith("kvcache"):
        return None
    slots = [name for base in kind.__mro__ for name in _listed(base.__dict__.get("__slots__", ()))]
    return tuple(name for name in slots if not name.startswith("__"))


def _listed(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else [*slots]
