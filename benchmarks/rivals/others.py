"""Faults that the scripts of kvcr and Mooncake do not test: a source that reuses its memory, or one that is killed.

Run `python others.py kvcr|mooncake SCRIPT` in the environment of that program. This file imports none of our code; the
script creates the engines and allocates their memory. It prints one JSON line for each fault:

    kvcr        its source deposits other blocks, which evict those that are read
    mooncake    its source writes other bytes to the memory that is read; its source is killed
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

BLOCKS, OTHER = 2048, 255
_WARM, _TRIES = 3, 5


def imported(path: str) -> Any:
    """Imports the script as a module, so that spawned processes find it by its name."""
    folder, _, file = path.rpartition("/")
    sys.path.insert(0, folder)
    return importlib.import_module(file.removesuffix(".py"))


def started(target: Any, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Starts a source process. Returns the process, the pipe to it, and its description."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()
    if not pipe.poll(180):
        raise SystemExit("the source did not start")
    return process, pipe, pipe.recv()


def show(fault: str, told: str, seconds: float, wrong: int, usual_s: float) -> None:
    """Prints a row."""
    row = {"the source": fault, "told_after_s": round(seconds, 4), "told": told}
    print(json.dumps({**row, "wrong_blocks": wrong, "usual_s": round(usual_s, 4)}), flush=True)


def wrong_of(script: Any, local: int, blocks: Iterable[int] = range(BLOCKS)) -> int:
    """The number of blocks in which any value is wrong."""
    size: int = script.BLOCK
    held = ((at, ctypes.string_at(local + at * size, size)) for at in blocks)
    return sum(data != bytes([at % 251 + 1]) * size for at, data in held)


# ---- Mooncake


def mooncake_source(pipe: Any, options: argparse.Namespace) -> None:
    """Runs a source that serves its memory. On command it overwrites all of that memory with other bytes."""
    script = imported(options.script)
    engine, (_pool, start) = script.engine_of("tcp"), script.memory("huge")
    for number in range(BLOCKS):
        ctypes.memset(start + number * script.BLOCK, number % 251 + 1, script.BLOCK)
    if engine.register_memory(start, script.POOL):
        raise SystemExit("Mooncake failed to register the memory")
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", start))
    try:
        pipe.recv()
        ctypes.memset(start, OTHER, BLOCKS * script.BLOCK)
        pipe.recv()
    except EOFError:
        pass
    os._exit(0)


def ask_mooncake(options: argparse.Namespace) -> None:
    """Reads 2,048 blocks while the source writes to them, and while it is killed."""
    script = imported(options.script)
    engine, (_pool, local) = script.engine_of("tcp"), script.memory("huge")
    if engine.register_memory(local, script.POOL):
        raise SystemExit("Mooncake failed to register the memory")
    for fault in ("writes other bytes to the memory in the middle of the read", "is killed in the middle of the read"):
        for _ in range(_TRIES):  # repeats until the fault happens before the read has ended
            status, seconds, usual_s = read_in_fault(fault, (script, engine, local), options)
            if seconds > 0:
                show(fault, f"status {status}", seconds, 0 if status else wrong_of(script, local), usual_s)
                break


def read_in_fault(fault: str, reader: tuple[Any, Any, int], options: argparse.Namespace) -> tuple[int, float, float]:
    """Returns the status of a read, and two durations in seconds.

    The first is from the fault to the end of the read. The second is that of a read without a fault.
    """
    script, engine, local = reader
    process, pipe, (target, start) = started(mooncake_source, options)
    offsets = [number * script.BLOCK for number in range(BLOCKS)]
    here, there = [local + one for one in offsets], [start + one for one in offsets]
    read = functools.partial(engine.batch_transfer_sync_read, target, here, there, [script.BLOCK] * BLOCKS)
    usual_s = min(timed(read)[1] for _ in range(_WARM))
    ctypes.memset(local, 0, BLOCKS * script.BLOCK)
    acted: list[float] = []
    waiter = threading.Thread(target=act_once_begun, args=(fault, process, pipe, (local, script.BLOCK), acted))
    waiter.start()
    status, _ = timed(read)
    end = time.monotonic()
    waiter.join()
    process.kill()
    return status, end - acted[0], usual_s


def timed(read: Callable[[], int]) -> tuple[int, float]:
    """Returns the status of a read, and its duration in seconds."""
    begin = time.monotonic()
    return read(), time.monotonic() - begin


def act_once_begun(fault: str, process: Any, pipe: Any, memory: tuple[int, int], acted: list[float]) -> None:
    """Waits for the first bytes, and then kills the source or makes it overwrite its memory."""
    local, size = memory
    deadline = time.monotonic() + 60
    while not any(ctypes.string_at(local + at * size, 1) != b"\0" for at in range(0, BLOCKS, 64)):
        if time.monotonic() > deadline:
            break
        time.sleep(1e-4)
    acted.append(time.monotonic())
    if "killed" in fault:
        os.kill(process.pid, signal.SIGKILL)
    else:
        pipe.send("write")


# ---- kvcr


def pinned_nothing(self: Any, _keys: Any) -> int:
    """Replaces the script's callback: tells kvcr that the framework has no further blocks."""
    self.number += 1
    self.results.append((self.number, (f"pin {self.number}", {})))
    return self.number


def kvcr_source(pipe: Any, options: argparse.Namespace) -> None:
    """Runs a source that deposits all its blocks.

    A command makes it deposit as many other blocks into the same slots.
    """
    script = imported(options.script)
    types = importlib.import_module("kvcr.types")
    _pool, start = script.memory("huge")
    for number in range(script.COUNT):
        ctypes.memset(start + number * script.BLOCK, number % 251 + 1, script.BLOCK)
    _held, held = script.memory("huge")
    script.Pins.request = pinned_nothing
    kvcr, endpoint = script.make("source", start, held, options)

    def deposit(first_key: int) -> int:
        done = 0
        for first in range(0, script.COUNT, 256):
            keys = range(first_key + first, first_key + first + 256)
            blocks = {
                script.key_of(key): [types.MemoryRef(end_point_name="source", element_index=key % script.COUNT)]
                for key in keys
            }
            done += sum(one.success for one in script.finish(kvcr, kvcr.deposit(blocks), 1e-3).values())
        return done

    if deposit(0) < script.COUNT:
        raise SystemExit("kvcr did not accept all blocks of the source")
    pipe.send(endpoint)
    try:
        while True:
            while not pipe.poll(1e-3):
                kvcr.poll_completed()
            pipe.recv()
            pipe.send(deposit(script.COUNT))
    except EOFError:
        pass
    os._exit(0)


def ask_kvcr(options: argparse.Namespace) -> None:
    """Delivers 2,048 blocks while the source evicts them, and once more after the eviction."""
    script = imported(options.script)
    types = importlib.import_module("kvcr.types")
    _process, pipe, endpoint = started(kvcr_source, options)
    _pool, local = script.memory("huge")
    kvcr, _ = script.make("reader", local, 0, options, [])
    numbers = range(BLOCKS)

    def deliver(name: str, count: int, begun: Any = None) -> tuple[dict[bytes, str], float]:
        asked = numbers[:count]
        refs = {script.key_of(at): [types.MemoryRef(end_point_name="reader", element_index=at)] for at in asked}
        kvcr.submit_hint(script.hint(endpoint, list(asked)), name)
        handle = kvcr.deliver(refs, name)
        if begun is not None:
            begun()
        begin = time.monotonic()
        results = script.finish(kvcr, handle, 1e-4)
        return {key: one.status.name for key, one in results.items()}, time.monotonic() - begin

    for at in range(200):  # the first deliveries fail or wait because metadata is being exchanged
        if [*deliver(f"first {at}", 1)[0].values()] == ["SUCCESS"]:
            break
    usual_s = min(deliver(f"warm {at}", BLOCKS)[1] for at in range(_WARM))
    faults = (
        ("evicts the blocks in the middle of the fetch", True),
        ("has evicted the blocks before it is asked", False),
    )
    for fault, told in faults:
        ctypes.memset(local, 0, BLOCKS * script.BLOCK)
        results, seconds = deliver(fault, BLOCKS, (lambda: pipe.send("evict")) if told else None)
        if told and not pipe.poll(120):
            raise SystemExit("the source did not evict")
        evicted = pipe.recv() if told else 0
        text = ", ".join(f"{count} {name}" for name, count in collections.Counter(results.values()).items())
        wrong = wrong_of(script, local, [at for at in numbers if results[script.key_of(at)] == "SUCCESS"])
        show(fault, text + (f"; {evicted} others deposited" if told else ""), seconds, wrong, usual_s)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Runs one of the programs."""
    name, script = sys.argv[1:3]
    options = argparse.Namespace(script=script, pool="huge", held="kvcr", timeout_ms=1000)
    {"kvcr": ask_kvcr, "mooncake": ask_mooncake}[name](options)


if __name__ == "__main__":
    main()
