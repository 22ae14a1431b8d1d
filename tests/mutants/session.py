"""Collects test files once and tries many mutants with them, each with the tests that reach its function."""

import ast
from collections.abc import Sequence
from functools import cached_property
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from tests.mutants.sites import functions
from tests.mutants.tree import Run, Tree

PACKAGES = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
NOT_CALLED = "no test calls it"
_REACH_LIMIT_S = 1200.0
_COLD_S = 60.0  # A separate process has to load all modules again.
_GRACE_S = 10.0
# In seconds of processor time. If a run uses 2 s more than twice its usual time, one of its loops does not end.
_SPIN_S = 2.0
_PATIENCE = 4.0  # A run that takes this many times its usual time hangs. The mutant then counts as noticed.


class Session:
    """A set of test files in a copy of the repository.

    Args:
        tree: the copy, which serves one session at a time.
        files: the test files.
        but: test files that were run before, and are left out now.

    Raises:
        RuntimeError: the tests cannot be collected.
    """

    def __init__(self, tree: Tree, files: Sequence[str], but: Sequence[str] = ()) -> None:
        self.tree = tree
        self._but = frozenset(but)
        self.files = tuple(files)
        packages = [str(tree.folder / name) for name in PACKAGES]
        begun = tree.ask({"tests": list(files), "options": tree.options, "packages": packages})
        self.is_over = "ended" in begun
        if self.is_over:
            raise RuntimeError(f"{' '.join(files)}: no test is collected: {begun['output'][-2000:]}")
        self._imported = frozenset(begun["imported"])
        self._is_single = begun["threads"] == 1  # The fork of a process with several threads may hang.

    @cached_property
    def _reach(self) -> dict[str, Any]:
        """Returns the functions that each test calls, and the seconds that the test takes. They are measured once for
        all sessions of a tree with these files.
        """
        if self.files in self.tree.reach:
            return self.tree.reach[self.files]
        found = self._ask(_request([], _REACH_LIMIT_S) | {"reach": True})
        if "seconds" not in found:
            raise RuntimeError(f"{' '.join(self.files)}: the tests do not end on the unchanged source: {found}")
        self.tree.reach[self.files] = found
        return found

    @property
    def failed(self) -> list[str]:
        """The tests that fail even without a change. They therefore cannot notice a mutant."""
        return self._reach["failed"]

    @property
    def seconds(self) -> float:
        """The seconds that all tests take together."""
        return sum(self._reach["seconds"].values())

    def tests_of(self, path: Path, function: str) -> list[str]:
        """Returns the tests that may notice a change of a function, the fastest first. If the change is outside of
        functions, returns all tests.
        """
        name = f"{self.tree.folder / path}:{function}"
        reach, seconds, spawning = self._reach["reach"], self._reach["seconds"], set(self._reach["spawning"])
        is_code = function in functions(ast.parse((self.tree.folder / path).read_text())) and name not in self._imported
        chosen = {test for test in seconds if not is_code or name in reach[test] or test in spawning}
        # The tests of a file run together, because its fixtures are then set up only once. Tests that start processes
        # run last.
        order = sorted(chosen, key=lambda test: (test.partition("::")[0], test in spawning, seconds[test]))
        return [test for test in order if test not in self.failed and test.partition("::")[0] not in self._but]

    def run(self, path: Path, function: str, before: str, after: str) -> Run:
        """Tries a changed source file with the tests that may notice the change, until one of them does.

        Returns:
            Returns the outcome, or "cold" if only `run_cold` can try it.
        """
        start = monotonic()
        tests = self.tests_of(path, function)
        if not tests:
            return Run("passed", NOT_CALLED, 0.0)
        expected_s, used_s = (sum(self._reach[what][test] for test in tests) for what in ("seconds", "processor"))
        limit_s = _GRACE_S + _PATIENCE * expected_s
        file = self.tree.folder / path
        with self.tree.changed(path, after):
            if self._is_single and f"{file}:{function}" not in self._imported:
                asked = {"path": str(file), "before": before, "after": after, "function": function}
                found = self._ask(_request(tests, limit_s) | asked | {"processor_s": ceil(_SPIN_S + 2 * used_s)})
                if "no_swap" not in found:
                    return Run(_outcome(found["status"]), found.get("by", ""), monotonic() - start)
        return Run("cold", "", monotonic() - start)

    def run_cold(self, path: Path, function: str, after: str) -> Run:
        """Tries a changed source in a process that loads all modules again. Closes the session."""
        tests = self.tests_of(path, function)
        limit_s = _COLD_S + _PATIENCE * sum(self._reach["seconds"][test] for test in tests)
        return self.tree.run_mutated(path, after, tests, limit_s)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        found = self.tree.ask(request)
        if "ended" in found:
            self.is_over = True
            raise RuntimeError(f"{' '.join(self.files)}: the session has ended: {found}")
        return found

    def close(self) -> None:
        """Ends the session. The tree can then serve another session."""
        if not self.is_over:
            self.is_over = "ended" in self.tree.ask({"tests": None})


def _request(tests: Sequence[str], limit_s: float) -> dict[str, Any]:
    return {"tests": list(tests), "limit_s": limit_s, "processor_s": 0, "reach": False, "path": ""}


def _outcome(status: int | None) -> str:
    if status is None:
        return "timed out"
    return "crashed" if status < 0 else "passed" if status == 0 else "failed"
