"""Programs for `test_exits`. They end while objects of pagewire are still open. They do not import pytest, because its
import takes 0.5 s.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from tests.transfer.replicas import Engine
from transfer import KVTransferEngine, PageExchange
from transfer.pull.thread import TransferThread

OWN = "the program's own error"
STATUS = {"end": 0, "error": 1, "exit": 3, "interrupt": 130}
_kept: list[Any] = []
"""The objects that the processes leave open."""


def at_work(thread: TransferThread) -> None:
    """Makes the thread poll without pauses, so that the interpreter usually ends during a NIXL call of the thread."""
    thread._pause = lambda: 0.0  # type: ignore[method-assign]


def open_exchange() -> None:
    """Opens an exchange with a lease, so that its thread keeps polling."""
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=64, page_size=16)
    manager = PagedKVCacheManager(params, 8, 2048, 2, ["cpu"], available_cache_memory=16 << 20)
    exchange = PageExchange(manager, "p")
    context = TextContext(range(96), max_length=2048, request_id="r")
    manager.external_claim("r")
    manager.maybe_reserve(context)
    context.update(1)
    manager.step([context])
    exchange.offer("r", 10.0)
    exchange.wait(0, 10.0)
    at_work(exchange.threads[0])
    _kept.extend((manager, exchange))


def open_thread() -> None:
    """Opens a transfer thread over a rank with a lease, as in a connector's worker."""
    engine = Engine("p")
    engine.offer()
    thread = TransferThread(engine.replica)
    at_work(thread)
    _kept.extend((engine, thread))


def open_engine() -> None:
    """Opens two connected engines with MAX's interface."""
    tensors = [[[torch.zeros(64, 64)]] for _ in range(2)]
    engines = [KVTransferEngine(f"e{at}", tensors[at], total_num_pages=64) for at in range(2)]
    for ours, theirs in (engines, engines[::-1]):
        ours.connect(theirs.metadata)
    _kept.extend((tensors, engines))


OPENED = {"exchange": open_exchange, "thread": open_thread, "engine": open_engine}


def ends(conn: Connection, what: str, how: str, path: str, wait_s: float) -> None:
    """Opens an object, and ends the process in one of the ways in which a program ends."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # At the end of the process, the garbage collector would search all imported modules. The search would take most of
    # the time.
    gc.freeze()
    OPENED[what]()
    time.sleep(wait_s)
    try:
        if how == "error":
            raise ValueError(OWN)  # noqa: TRY301  (it is the end of the program)
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001  (as the interpreter does with what nobody has caught)
        traceback.print_exc()
    conn.close()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(STATUS[how])  # `Py_Exit` finalizes the interpreter. `multiprocessing` would skip this.
