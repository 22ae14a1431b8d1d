"""A copy of the packages and their tests, in which mutations are tried one at a time. The working tree is unchanged."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.mutation import ROOT

_FOLDERS = ("kvcache", "transfer", "scheduler_adapters", "pagewire", "tests", "docs", "examples", "benchmarks")
PARTS = (*_FOLDERS, "hatch_build.py", "pyproject.toml")
NO_CACHES = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".hypothesis")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Run(NamedTuple):
    """The outcome of a run of tests.

    Attributes:
        outcome: "passed", "failed", "timed out", "crashed" (ended by a signal), or "broken": no test ran.
        by: the test that failed first, or the end of the output if the run is broken.
        seconds: how long the run took.
    """

    outcome: str
    by: str
    seconds: float


class Tree:
    """A copy in a folder of its own.

    Args:
        folder: an empty folder, which the caller removes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part, ignore=NO_CACHES)
            else:
                shutil.copy2(ROOT / part, folder / part)
        # For each set of test files, the functions that its tests call.
        self.reach: dict[tuple[str, ...], dict[str, Any]] = {}
        self._stamp = time.time_ns()
        self._forker: subprocess.Popen[str] | None = None

    def check_imports(self) -> None:
        """Raises `RuntimeError` if a program that runs here does not import the packages from the copy."""
        code = (
            "import kvcache as k, transfer as t, scheduler_adapters as s, pagewire as p\n"
            "print(k.__file__, t.__file__, s.__file__, p.__file__)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        if not all(Path(path).is_relative_to(self.folder) for path in done.stdout.split()):
            raise RuntimeError(f"the packages are not imported from the copy, but from {done.stdout.strip()}")

    def run_mutated(self, path: Path, source: str, tests: Sequence[str], limit_s: float) -> Run:
        """Runs tests with a changed source file, and restores the file afterwards."""
        with self.changed(path, source):
            return self.run(tests, limit_s)

    @contextmanager
    def changed(self, path: Path, source: str) -> Generator[None]:
        """Returns a `with` block in which the source file is changed. The file is restored at the end of the block."""
        file = self.folder / path
        before, status = file.read_bytes(), file.stat()
        # Python compares a compiled file with its source by size and by whole seconds, so each change gets a new time.
        self._stamp += 2_000_000_000
        try:
            file.write_text(source)
            os.utime(file, ns=(self._stamp, self._stamp))
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, tests: Sequence[str], limit_s: float, *, compiled: bool = False) -> Run:
        """Runs tests up to the first failure. With `compiled`, the files that Python has compiled are kept for the next
        runs.
        """
        start = time.monotonic()
        asked = {"tests": list(tests), "options": ["-x", *self.options], "limit_s": limit_s, "compiled": compiled}
        answer = self.ask(asked)
        outcome, output = _outcome(answer["status"]), answer["output"]
        found = _FAILED.search(output)
        by = output[-2000:] if outcome == "broken" else found[1] if found else ""
        return Run(outcome, by, time.monotonic() - start)

    @property
    def options(self) -> list[str]:
        """Arguments of pytest for a fixed order, fixed random numbers, and no files outside of the copy."""
        given = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'basetemp'}"]
        # With xdist the rerun plugin starts a thread, and a process with threads cannot be forked safely.
        given += ["-p", "no:xdist", "-p", "no:rerunfailures"]
        # hypothesis is loaded before pytest starts. This would cause the warning.
        given += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return [*given, "--hypothesis-seed=0"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to the forking process, and returns its answer."""
        if self._forker is None:
            self._forker = self._start_forker()
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(request) + "\n")
        self._forker.stdin.flush()
        return json.loads(self._forker.stdout.readline())

    def close(self) -> None:
        """Ends the process that runs the tests."""
        if self._forker is not None:
            self._forker.communicate()

    def _start_forker(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forker"],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        # The options of CI would run failed tests again. Here a test is meant to fail.
        return dict(os.environ) | {"PYTHONPATH": str(self.folder), "PYTEST_ADDOPTS": ""}


def _outcome(status: int | None) -> str:
    if status is None:
        return "timed out"
    if status < 0:
        return "crashed"
    return {0: "passed", 1: "failed"}.get(status, "broken")
