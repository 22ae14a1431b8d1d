"""Sets environment variables for a moment, without a risk to other threads that read the environment."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

_making = [threading.Lock()]  # the lock is held while the process has the variables of a block
_in_use = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ")  # the C library's table of all variables
# Tables by what they were made from. They and their variables are never freed, because other threads may read them.
_kept: dict[tuple[tuple[int | None, ...], tuple[str, ...]], tuple[Any, ...]] = {}


def _forked() -> None:
    _making[0] = threading.Lock()  # a thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_forked)


@contextmanager
def environment(settings: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables within the block, for one thread at a time, and restores them afterwards.

    Before glibc 2.41, each new variable moves the table of all variables, and frees the old table. A thread that reads
    the environment at this moment crashes, and torch, UCX and many other libraries read it whenever they like. So the
    block has a table of its own, in which the variables have their places from the start.

        environ ─► [ PATH HOME ]                               before and after the block
        environ ─► [ PATH HOME UCX_TLS UCX_LOG_LEVEL ... ]     within the block; never freed

    Examples:
        >>> with environment({"PAGEWIRE_EXAMPLE": "1"}):
        ...     os.environ["PAGEWIRE_EXAMPLE"]
        '1'
        >>> "PAGEWIRE_EXAMPLE" in os.environ
        False
    """
    with _making[0]:
        before = {name: os.environ.get(name) for name in settings}
        address, entries = _in_use.value, _entries()
        table = _table(entries, [name for name, value in before.items() if value is None])
        _in_use.value = ctypes.addressof(table)
        os.environ.update(settings)  # every name has its place, so nothing moves
        try:
            yield
        finally:
            # If somebody else has changed the environment meanwhile, the table in use has that change, and stays.
            if _in_use.value == ctypes.addressof(table) and table[: len(entries)] == entries:
                _in_use.value = address
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _entries() -> list[int | None]:
    """Returns the addresses of the variables in the table in use."""
    count, pointers = 0, ctypes.cast(_in_use, ctypes.POINTER(ctypes.c_void_p))
    while pointers[count]:
        count += 1
    return pointers[:count]


def _table(entries: list[int | None], names: list[str]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns a table of these entries, and of a variable for each of `names`. The table ends with a null pointer.

    The same arguments get the same table again, so that a process that makes agents all its life does not grow.
    """
    key = tuple(entries), tuple(names)
    if key not in _kept:
        texts = [ctypes.create_string_buffer(os.fsencode(f"{name}=")) for name in names]
        _kept[key] = (ctypes.c_void_p * (len(entries) + len(names) + 1))(), texts
    table, texts = _kept[key]
    table[:-1] = [*entries, *map(ctypes.addressof, texts)]
    return table
