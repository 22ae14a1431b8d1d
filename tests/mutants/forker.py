"""Runs pytest in forks of a process that has already loaded the libraries, because loading them takes longer than most
tests.

Run `python -m tests.mutants.forker` in a copy of the repository. Each line of standard input is a run as JSON, and each
line of standard output is the result of one run. The packages under test are loaded only in the forks. A fork that has
collected its tests may serve many runs (`tests.mutants.warm`). It then reads the lines itself until one of them says
"end".
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.orphans import adopt, end_children

# Modules that the packages and their tests import. None of the modules starts a thread, because a fork would lack the
# thread.
_LIBRARIES = (
    "hypothesis",
    "msgspec",
    "nixl",
    "numpy",
    "pytest",
    "rich",
    "torch",
    "transformers.models.llama.modeling_llama",
    "xxhash",
    "zmq",
)
_LOOK_S = 0.01


def run(tests: Sequence[str], options: Sequence[str], limit_s: float, *, compiled: bool) -> dict[str, Any]:
    """Runs tests in a fork. No descendant of this process outlives the run.

    Args:
        tests: paths and node ids.
        options: options of pytest, which come before the tests.
        limit_s: seconds until the fork is killed.
        compiled: keep Python's compiled files for the next runs.

    Returns:
        `status`: exit status of the fork, negative for a signal, None if it ran out of time; `output`: the end of its
            output.
    """
    adopt()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _become_pytest([*options, *tests], output.fileno(), compiled=compiled)
        status = _wait(child, limit_s)
        # This call ends the fork if its time is over. It also ends every process that the tests have left.
        end_children()
        _bury()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 20_000))
        return {"status": status, "output": output.read().decode(errors="replace")}


def serve_warm(tests: Sequence[str], options: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Makes a fork that collects tests and serves runs of them until it is told to end.

    Returns:
        `ended`: its exit status; `output`: the end of its output.
    """
    adopt()
    with tempfile.TemporaryFile() as output:
        asked, answered = os.dup(0), os.dup(1)
        child = os.fork()
        if child == 0:
            lines, answers = os.fdopen(asked), os.fdopen(answered, "w")

            def ask() -> dict[str, Any] | None:
                request = json.loads(lines.readline() or "{}")
                return request if request.get("tests") is not None else None

            def answer(found: dict[str, Any]) -> None:
                answers.write(json.dumps(found) + "\n")
                answers.flush()

            warm = importlib.import_module("tests.mutants.warm")
            plugin = warm.Warm([Path(package) for package in packages], ask, answer)
            _become_pytest([*options, *tests], output.fileno(), compiled=True, plugins=[plugin])
        os.close(asked)
        os.close(answered)
        _, status = os.waitpid(child, 0)
        end_children()
        _bury()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 20_000))
        return {"ended": os.waitstatus_to_exitcode(status), "output": output.read().decode(errors="replace")}


def _wait(child: int, limit_s: float) -> int | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_LOOK_S)
    return None


def _bury() -> None:
    """Reaps every child that has ended, so that none stays a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_pytest(arguments: Sequence[str], output: int, *, compiled: bool, plugins: Sequence[object] = ()) -> None:
    status = 70
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = not compiled
        if not compiled:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        status = int(importlib.import_module("pytest").main(list(arguments), plugins=list(plugins)))
    except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as its parent does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serves runs until the input ends."""
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # The module belongs to an optional extra. Tests that need the module are skipped.
    for line in sys.stdin:
        asked = json.loads(line)
        found = serve_warm(**asked) if "packages" in asked else run(**asked)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
