"""The disk space of each extra, and the time of imports.

Run `python -m benchmarks.installed [--json FILE]`. A size counts the files that a distribution and everything that it
requires have in this environment, so `pagewire[all]` must be installed. An extra counts only what it adds to the
manager. Bytecode is not counted, but exists when imports are measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.frame import Row, options, pin, report

_NAMED = re.compile(r"[-_.]+")
_IMPORTS = ("pagewire", "kvcache", "transfer")
_TIMED = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {name}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def closure(name: str, extras: frozenset[str]) -> set[str]:
    """The distributions that are installed with a distribution and its extras."""
    found: set[str] = set()
    pending = [(name, frozenset[str]()), *((name, frozenset({extra})) for extra in extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        found.add(one[0])
        pending += required(*one)
    return found


def required(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """The requirements of a distribution on this machine, each with its extras."""
    for text in importlib.metadata.requires(name) or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield _NAMED.sub("-", needed.name).lower(), frozenset(needed.extras)


def num_bytes(name: str) -> int:
    """The bytes of a distribution's installed files. If ours is installed editable, the files of its packages count."""
    if name == "pagewire":
        root = Path(__file__).resolve().parents[1]
        packages = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
        files = [path for one in packages for path in (root / one).rglob("*")]
    else:
        files = [Path(str(file.locate())) for file in importlib.metadata.files(name) or ()]
    return sum(path.stat().st_size for path in files if path.suffix != ".pyc" and path.is_file())


def sizes() -> Iterator[Row]:
    """Returns the distributions and megabytes that the manager and each extra add."""
    manager = closure("pagewire", frozenset())
    yield {"what": "pagewire", "distributions": len(manager), "MB": _mega(manager), "MB_torch": _mega({"torch"})}
    for extra in importlib.metadata.metadata("pagewire").get_all("Provides-Extra") or ():
        try:
            added = closure("pagewire", frozenset({extra})) - manager
            yield {"what": extra, "distributions": len(added), "MB": _mega(added)}
        except importlib.metadata.PackageNotFoundError:
            continue  # a required distribution is not installed


def _mega(names: set[str]) -> float:
    return round(sum(map(num_bytes, names)) / 1e6, 1)


def imports(repeats: int) -> Iterator[Row]:
    """Milliseconds of `import` in a new process, without the start of Python: the minimum of several runs."""
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for name in _IMPORTS:
            command, times = [sys.executable, "-c", _TIMED.format(name=name)], list[list[float]]()
            for _ in range(1 + repeats):  # the first run also compiles bytecode, and is not counted
                told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout  # noqa: S603 - ourselves
                times.append([1e3 * float(seconds) for seconds in told.split()])
            wall, cpu = (round(min(each), 1) for each in zip(*times, strict=True))
            yield {"what": f"import {name}", "ms_min": wall, "cpu_ms_min": cpu, "n": repeats}


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    rows = [*sizes(), *imports(2 if chosen.quick else 8)]
    report("installed", rows, chosen, "MB: what was found; columns *_min: minimum of the n samples of a row")


if __name__ == "__main__":
    main()
