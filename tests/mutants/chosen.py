"""Chooses the mutants to try: all, those of functions that have changed since a commit, or a random sample."""

import ast
import random
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutants.handwritten import HANDWRITTEN
from tests.mutants.mutation import ROOT, StaleMutationError, mutated
from tests.mutants.places import PACKAGES, beside, sources
from tests.mutants.sites import Mutant, functions, mutants

BY_HAND = "by hand"
# The number of mutants of one file that are tried in a row. The tests are collected only once for these mutants.
_IN_A_ROW = 25
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


class Batch(NamedTuple):
    """Mutants of one file that are tried one after the other.

    Attributes:
        path: the file, relative to the root of the repository.
        mutants: the mutants, in the order of their trials.
        is_changed: whether the mutants belong to changed functions.
    """

    path: Path
    mutants: Sequence[Mutant]
    is_changed: bool = False


@cache
def mutants_of(path: Path) -> tuple[Mutant, ...]:
    """Yields every mutant of a file, from the operators and from the handwritten list."""
    return (*mutants(path, (ROOT / path).read_text()), *by_hand()[0].get(path, ()))


def stale() -> list[str]:
    """Returns the handwritten mutations that no longer match the sources, each with the reason."""
    return by_hand()[1]


@cache
def by_hand() -> tuple[dict[Path, list[Mutant]], list[str]]:
    found: dict[Path, list[Mutant]] = {}
    unfit: list[str] = []
    for module in HANDWRITTEN:
        for one in module.mutations:
            try:
                source = (ROOT / module.path).read_text()
                changed = mutated(source, one)
            except (OSError, StaleMutationError) as error:
                unfit.append(f"{module.path}:{one.function}: {error}")
                continue
            shown = " ".join(one.old.split()), " ".join(one.new.split())
            both = zip(source.split("\n"), changed.split("\n"), strict=False)
            line = next(number for number, (old, new) in enumerate(both, 1) if old != new)
            whole = 0, len(source.encode()), changed
            mutant = Mutant(module.path, one.function, BY_HAND, line, *shown, *whole)
            found.setdefault(module.path, []).append(mutant)
    return found, unfit


def matching(only: Sequence[str], operators: Sequence[str] = ()) -> list[Batch]:
    """Returns the mutants of the named packages, files or functions that the named operators make. If none is named,
    all count.
    """
    found: list[Batch] = []
    for path in sources():
        if not beside(path):
            continue
        module = ".".join(path.with_suffix("").parts)
        if only and not any(f"{module}.".startswith(f"{one}.") or one.startswith(f"{module}.") for one in only):
            continue
        wanted = [
            mutant
            for mutant in mutants_of(path)
            if not only or any(f"{module}.{mutant.function}.".startswith(f"{one}.") for one in only)
            if not operators or mutant.operator in operators
        ]
        if wanted:
            found.append(Batch(path, wanted))
    return found


def sampled(batches: Iterable[Batch], seed: str) -> list[Batch]:
    """Yields the mutants in a random order: first several mutants of one file, and then several of another file."""
    generator = random.Random(seed)
    parts: list[list[Batch]] = []
    for path, some, is_changed in batches:
        drawn = generator.sample(list(some), len(some))
        cuts = range(0, len(drawn), _IN_A_ROW)
        parts.append([Batch(path, drawn[cut : cut + _IN_A_ROW], is_changed) for cut in cuts])
    generator.shuffle(parts)
    rounds = max(map(len, parts), default=0)
    return [files[at] for at in range(rounds) for files in parts if at < len(files)]


def thinned(batches: Iterable[Batch], each: int, seed: str) -> list[Batch]:
    """Returns at most `each` mutants of every function and constant, drawn by a seed, in the order of the files."""
    found: list[Batch] = []
    for path, some, is_changed in batches:
        of_each: dict[str, list[Mutant]] = {}
        for mutant in some:
            of_each.setdefault(mutant.function, []).append(mutant)
        kept: set[Mutant] = set()
        for function, its in of_each.items():
            # Each function has its own random generator, so that an edit of one function leaves the samples of the
            # others unchanged.
            kept.update(random.Random(f"{seed} {path}:{function}").sample(its, min(each, len(its))))
        found.append(Batch(path, [mutant for mutant in some if mutant in kept], is_changed))
    return found


def changed_since(revision: str) -> list[Batch]:
    """Returns the mutants of all functions and constants whose text in the working tree differs from that of a commit.

    Raises:
        RuntimeError: there is no such commit.
    """
    found: list[Batch] = []
    for path, lines in _changed_lines(revision).items():
        if not beside(path):
            continue
        touched = touched_by(ast.parse((ROOT / path).read_text()), lines)
        some = [mutant for mutant in mutants_of(path) if mutant.function in touched or mutant.line in lines]
        if some:
            found.append(Batch(path, some, is_changed=True))
    return found


def touched_by(program: ast.Module, lines: set[int]) -> set[str]:
    """Returns the functions of a file that contain one of these lines."""
    return {
        name
        for name, node in functions(program).items()
        if lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    }


def _changed_lines(revision: str) -> Mapping[Path, set[int]]:
    command = ["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", revision, "--", *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"--changed-since {revision}: {done.stderr.strip()}")
    found: dict[Path, set[int]] = {}
    for part in re.split(r"^diff --git .*\n", done.stdout, flags=re.MULTILINE):
        name = re.search(r"^\+\+\+ b/(.+\.py)$", part, re.MULTILINE)
        if name is None or not (ROOT / name[1]).exists():
            continue
        lines = found.setdefault(Path(name[1]), set())
        for first, count in _HUNK.findall(part):
            # If a change only removes lines, the lines around the removed lines count as changed.
            lines |= set(range(int(first), int(first) + max(2 if count == "0" else int(count or 1), 1)))
    return found
