"""Tries every handwritten mutation: `python -m tests.mutants [--only kvcache.pool.pages] [--jobs 2] [--json FILE]`.

Each is written into a copy of the packages and run against the tests that must notice it. A mutation that none of them
notices survives: a rule of the code that nothing tests. The exit status is 1 where one survives that is not stated to
be equivalent.
"""

import argparse
import json
import queue
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.mutants.handwritten import HANDWRITTEN
from tests.mutants.mutation import ROOT, Module, Mutation, StaleMutationError, mutated
from tests.mutants.tree import Run, Tree

LIMIT_S = 150.0  # a mutation that makes a test wait for ever is noticed by that
UNCHANGED_LIMIT_S = 1200.0


class Tried(NamedTuple):
    """A mutation, and what came of it."""

    module: Module
    mutation: Mutation
    run: Run

    @property
    def verdict(self) -> str:
        """ "noticed", "equivalent", or what is wrong: "survived", "broken", "not equivalent"."""
        if self.run.outcome == "broken":
            return "broken"
        if self.mutation.equivalent:
            return "equivalent" if self.run.outcome == "passed" else "not equivalent"
        return "survived" if self.run.outcome == "passed" else "noticed"


def chosen(only: Sequence[str]) -> list[tuple[Module, Mutation]]:
    """The mutations of the modules, packages or functions named; all where none is."""
    found: list[tuple[Module, Mutation]] = []
    for module in HANDWRITTEN:
        for mutation in module.mutations:
            name = f"{module.name}.{mutation.function}."
            if not only or any(name.startswith(f"{one}.") for one in only):
                found.append((module, mutation))
    return found


def fitting(pairs: Sequence[tuple[Module, Mutation]]) -> tuple[list[tuple[Module, Mutation]], list[str]]:
    """The mutations that fit the source as it is, and why each of the others does not."""
    fit: list[tuple[Module, Mutation]] = []
    stale: list[str] = []
    for module, mutation in pairs:
        try:
            mutated((ROOT / module.path).read_text(), mutation)
        except (OSError, StaleMutationError) as error:
            stale.append(f"{module.name}: {error}")
        else:
            fit.append((module, mutation))
    return fit, stale


def try_all(
    pairs: Sequence[tuple[Module, Mutation]], jobs: int, tell: Callable[[Tried], None], *, unchecked: bool = False
) -> list[Tried]:
    """Try every mutation, `jobs` at a time, after the tests have passed without one (unless `unchecked`).

    Raises:
        RuntimeError: the tests do not pass on the unchanged packages.
    """
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()

    def one(pair: tuple[Module, Mutation]) -> Tried:
        module, mutation = pair
        source, tests = mutated((ROOT / module.path).read_text(), mutation), module.tests_of(mutation)
        tree = trees.get()
        try:
            tried = Tried(module, mutation, tree.run_mutated(module.path, source, tests, LIMIT_S))
        finally:
            trees.put(tree)
        tell(tried)
        return tried

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        for number in range(jobs):
            tree = Tree(Path(folder, str(number)).absolute())
            stack.callback(tree.close)
            trees.put(tree)
        tree = trees.get()
        tree.check_imports()
        if not unchecked:
            _check_unchanged(tree, pairs)
        trees.put(tree)
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, pairs))


def _check_unchanged(tree: Tree, pairs: Sequence[tuple[Module, Mutation]]) -> None:
    tests = sorted({test for module, mutation in pairs for test in module.tests_of(mutation)})
    run = tree.run(tests, UNCHANGED_LIMIT_S, compiled=True)
    if run.outcome != "passed":
        raise RuntimeError(f"the tests do not pass without a mutation: {run.outcome}, {run.by}")


def table(tried: Sequence[Tried]) -> list[str]:
    """Of each module its mutations, and how many were noticed, are equivalent, or neither."""
    rows = [("module", "mutations", "noticed", "equivalent", "wrong", "seconds")]
    names = list(dict.fromkeys(one.module.name for one in tried))
    for name in [*names, "all"]:
        mine = [one for one in tried if name in (one.module.name, "all")]
        counts = Counter(one.verdict for one in mine)
        wrong = len(mine) - counts["noticed"] - counts["equivalent"]
        seconds = sum(one.run.seconds for one in mine)
        figures = (len(mine), counts["noticed"], counts["equivalent"], wrong, round(seconds))
        rows.append((name, *map(str, figures)))
    width = max(len(row[0]) for row in rows)
    return [f"{row[0]:{width}}" + "".join(f"{figure:>12}" for figure in row[1:]) for row in rows]


def line_of(one: Tried) -> str:
    """One mutation, and what came of it."""
    what = f"{one.module.name}: {one.mutation.function}: {one.mutation.old!r} -> {one.mutation.new!r}"
    how = f" ({one.run.outcome})" if one.run.outcome in ("timed out", "crashed") else ""
    why = f", {one.run.by}" if one.run.by else f", {one.mutation.equivalent}" if one.mutation.equivalent else ""
    return f"{one.verdict:10} {one.run.seconds:5.1f} s  {what}{how}{why}"


def as_json(tried: Sequence[Tried]) -> list[dict[str, object]]:
    """What came of each mutation, for a file."""
    return [
        {
            "module": one.module.name,
            **one.mutation._asdict(),
            "tests": one.module.tests_of(one.mutation),
            "verdict": one.verdict,
            "outcome": one.run.outcome,
            "by": one.run.by,
            "seconds": round(one.run.seconds, 1),
        }
        for one in tried
    ]


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    """Try what was asked for, and print what came of it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], help="a module, a package or a function; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--list", action="store_true", help="name the mutations, and try none")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutation first")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pairs, stale = fitting(chosen(asked.only))
    for line in stale:
        _print(f"stale      {line}")
    if not pairs:
        parser.error(f"no mutation of {asked.only}")
    if asked.list:
        for module, mutation in pairs:
            _print(f"{module.name}: {mutation.function}: {mutation.old!r} -> {mutation.new!r}")
        return 0
    tried = try_all(pairs, max(1, asked.jobs), lambda one: _print(line_of(one)), unchecked=asked.unchecked)
    for line in table(tried):
        _print(line)
    wrong = [one for one in tried if one.verdict not in ("noticed", "equivalent")]
    for one in wrong:
        _print(line_of(one))
    if asked.json:
        asked.json.write_text(json.dumps(as_json(tried), indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
