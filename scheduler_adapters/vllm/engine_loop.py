"""Wakes vLLM's engine. Without requests its loop sleeps until a client sends something."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

from vllm.v1.engine import EngineCoreRequestType

_engines: WeakSet[Any] = WeakSet()  # the engines of this process whose loop runs
_is_wrapped: list[bool] = []


def watch_loop() -> None:
    """Lets `wake` find the engines of this process. Call it before the engine's loop begins.

    vLLM does not show its engine to a connector. The method that sleeps is therefore wrapped, once in a process.
    """
    if _is_wrapped:
        return
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415  (imported by every process with an engine anyway)

    method: Any = EngineCoreProc._process_input_queue  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    @functools.wraps(method)
    def seen(engine: Any) -> Any:
        if engine not in _engines:
            _engines.add(engine)
        return method(engine)

    setattr(EngineCoreProc, method.__name__, seen)
    _is_wrapped.append(True)


def wake() -> None:
    """Ends the sleep of the engines of this process. Their loops then ask whether there is work. Safe from any thread.

    This is what vLLM itself does on a signal. It has no effect on an engine that does not sleep.
    """
    for engine in list(_engines):
        engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
