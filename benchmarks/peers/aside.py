"""Runs a peer's script in the peer's environment, and then takes further measurements of its manager.

Run `python aside.py wall|cpu SCRIPT [ARGUMENT ...]`. With `cpu`, `perf_counter_ns` returns processor time. This file
imports none of our code. The further measurements:

    next turn new    a conversation of 32,768 tokens continues by 256: the request is hashed, looked up and reserved
    next turn list   the same, starting from the list of tokens: the time includes making the request
    memory, build    memory and build time of MAX 26.7's pools, by a function of its script that the script never calls
    decode           decode steps of SGLang's allocator, by a function of its script; the rest of the script is not run
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

LENGTH, TURN, PAGE = 32_768, 256, 16
WARM_UP, REPEATS = 3, 40
TURNS = 9
_SET_BELOW_PYTHON = ("PYTHONEXECUTABLE", "PYTHONPATH", "PYTHONHOME")
"""MAX's libraries set these variables without `os.environ`. A child process that inherits them would not find its
environment.
"""
Turn = Callable[[list[int]], tuple[int, int, int]]
"""Takes tokens. Returns three times in ns: at the start, once the request exists, and once its pages are reserved."""


def measure(kind: str, next_turn: Turn, history: list[int], fresh: Callable[[int], list[int]]) -> None:
    """Prints both next-turn rows of a manager that has computed and published `history`."""
    times: list[tuple[int, int, int]] = []
    for number in range(WARM_UP + REPEATS):
        tokens = history + fresh(TURN)
        if number == WARM_UP:
            gc.collect()
            gc.freeze()
        times.append(next_turn(tokens))
    for name, first in (("next turn new", 1), ("next turn list", 0)):
        took = [(one[2] - one[first]) / 1e3 for one in times[WARM_UP:]]
        row = {"kind": kind, "name": name, "min": min(took), "med": statistics.median(took)}
        print(json.dumps(row), flush=True)
    gc.unfreeze()


def ask_vllm(found: dict[str, Any]) -> None:
    """Measures vLLM's manager."""
    clock, hashing = found["pc"], found["get_hash_fn_by_name"]("sha256")
    found["init_none_hash"](hashing)
    hasher, request = found["get_request_block_hasher"](PAGE, hashing), found["req"]
    manager = found["mgr"](14 * LENGTH // PAGE)
    history: list[int] = found["toks"](LENGTH)
    first = request("history", history, hasher)
    manager.allocate_slots(first, LENGTH, 0, manager.get_computed_blocks(first)[0])
    manager.free(first)

    def next_turn(tokens: list[int]) -> tuple[int, int, int]:
        start = clock()
        made = request("next", tokens, None)
        there = clock()
        made.block_hashes = hasher(made)
        blocks, cached, _ = manager.get_computed_blocks(made)
        got = manager.allocate_slots(made, len(tokens) - cached, cached, blocks)
        end = clock()
        if got is None or cached != LENGTH:
            raise RuntimeError(f"{cached} tokens of the conversation are cached, expected {LENGTH}")
        manager.free(made)
        return start, there, end

    measure("vllm", next_turn, history, found["toks"])


def ask_max(kind: str, manager: Any, found: dict[str, Any]) -> None:
    """Measures one of MAX's managers. Newer releases have other names for claim and reserve."""
    clock, make_context = found["NS"], found["ctx"]
    named = hasattr(manager, "alloc")
    claim = manager.claim if named else (lambda c: manager.external_claim(c.request_id))
    reserve = manager.alloc if named else manager.maybe_reserve
    release = manager.release if named else (lambda c: manager.release(c.request_id))
    history: list[int] = found["toks"](LENGTH).tolist()
    first = make_context(history)
    claim(first)
    reserve(first)
    if named:
        manager.runtime_inputs([[first]])
    else:
        manager.fetch([first], 1)
    first.update(7)
    manager.step(first) if named else manager.step([first])
    release(first)

    def next_turn(tokens: list[int]) -> tuple[int, int, int]:
        start = clock()
        context = make_context(tokens)
        there = clock()
        claim(context)
        reserve(context)
        end = clock()
        cached = context.tokens.processed_length if named else context.start_idx
        if cached != LENGTH:
            raise RuntimeError(f"{cached} tokens of the conversation are cached, expected {LENGTH}")
        release(context)
        return start, there, end

    measure(kind, next_turn, history, lambda count: found["toks"](count).tolist())


def ask_max257(found: dict[str, Any]) -> None:
    """Measures the manager of MAX 25.7."""
    ask_max("v257", found["make"](PAGE, 14 * LENGTH // PAGE, 4, LENGTH + 1024), found)


def ask_max267(found: dict[str, Any]) -> None:
    """Measures both of the managers of MAX 26.7."""
    for kind in ("legacy", "jenga"):
        ask_max(kind, found["make"](kind, PAGE, 14 * LENGTH // PAGE, 4, LENGTH + 1024), found)
        for variable in _SET_BELOW_PYTHON:
            os.unsetenv(variable)
        found["mem"](kind)  # runs in its own process


def ask_sglang(found: dict[str, Any]) -> None:
    """Measures SGLang's page allocator.

    Each call of its function returns a median, and several calls give the figure.
    """
    for batch in (1, 1024):
        took = [found["bench_decode_sgl"](PAGE, batch)["full"] for _ in range(TURNS)]
        row = {"kind": "sglang", "name": f"decode {PAGE} {batch}", "min": min(took), "med": statistics.median(took)}
        print(json.dumps(row), flush=True)


ASKED = {
    "bench_vllm.py": ask_vllm,
    "bench_max257.py": ask_max257,
    "bench_max.py": ask_max267,
    "bench_sglang.py": ask_sglang,
}


def run_script(script: str, name: str) -> dict[str, Any]:
    """Runs the script.

    Returns the names that the script defines. An empty package takes the place of SGLang's, so that none of the
    package's code runs on import.
    """
    if name != "bench_sglang.py":
        return runpy.run_path(script, run_name="__main__")
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("sglang is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        site = os.path.join(folder, "sgl-site")  # noqa: PTH118 - as the rest: of the peer's environment
        os.mkdir(site)  # noqa: PTH102
        os.symlink(spec.submodule_search_locations[0], os.path.join(site, "sglang"))  # noqa: PTH118, PTH211
        os.environ["SGLANG_SITE"] = site
        found = runpy.run_path(script, run_name="asked")
        found["bench_decode_sgl"](PAGE, 1)  # imports the rest
    return found


def main() -> None:
    """Runs the script, and then measures."""
    if sys.argv[1] == "cpu":
        time.perf_counter_ns = time.thread_time_ns
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    folder, _, name = script.rpartition("/")
    sys.path.insert(0, folder)
    found = run_script(script, name)
    if name in ASKED:
        ASKED[name](found)


if __name__ == "__main__":
    main()
