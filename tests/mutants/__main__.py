"""Breaks the code on purpose, one small change at a time, and reports the changes that no test notices.

Each change is tried with the tests beside its file. A change that passes them is a gap in the tests, unless
`harmless.txt` says why no test can notice it. With `--elsewhere` such a change is also tried with the other tests of
the folder, and with the tests of the package's interface.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import chosen, harmless, trial
from tests.mutants.operators import ON_CONDITIONS, OPERATORS
from tests.mutants.trial import Tried

_FOREVER_S = 1e9
_COLUMNS = (trial.BESIDE, trial.ELSEWHERE, trial.HARMLESS, trial.SURVIVED, trial.SURVIVED_BESIDE, trial.BROKEN)


def line_of(one: Tried) -> str:
    """Returns a line about one mutant and the outcome of its trial."""
    run = one.elsewhere or one.beside
    how = f" ({run.outcome})" if run.outcome in {"timed out", "crashed"} else ""
    why = one.reason or run.by
    where = f"{one.mutant.path}:{one.mutant.line}: {one.mutant.key.partition(':')[2]}"
    return f"{one.verdict:17} {run.seconds:5.1f} s  {where}{how}{f', {why}' if why else ''}"


def table(tried: Sequence[Tried]) -> list[str]:
    """Returns a table with the number of mutants of each file, and of all files, by outcome."""
    rows: list[tuple[str, ...]] = [("file", "mutants", *_COLUMNS)]
    paths = sorted({one.mutant.path for one in tried})
    for path in [*paths, None]:
        mine = [one for one in tried if path in {one.mutant.path, None}]
        counts = Counter(one.verdict for one in mine)
        rows.append((str(path or "all"), str(len(mine)), *(str(counts[column]) for column in _COLUMNS)))
    width = max(len(row[0]) for row in rows)
    return [
        f"{row[0]:{width}}"
        + "".join(f"{cell:>{max(len(name), 7) + 2}}" for cell, name in zip(row[1:], rows[0][1:], strict=True))
        for row in rows
    ]


def listed(gaps: Sequence[Tried]) -> list[str]:
    """Returns the list of gaps by file. If no test calls a function, the function is named only once."""
    uncalled = Counter((one.mutant.path, one.mutant.function) for one in gaps if one.is_uncalled)
    lines = [f"{path}: no test calls {function}: {count} mutants" for (path, function), count in uncalled.items()]
    others = [one for one in gaps if not one.is_uncalled]
    return [
        *sorted(lines),
        *(line_of(one) for one in sorted(others, key=lambda one: (one.mutant.path, one.mutant.line))),
    ]


def as_json(tried: Sequence[Tried]) -> list[dict[str, object]]:
    """Returns the outcome of each mutant, in the form in which it is written to a JSON file."""
    return [
        {
            "key": one.mutant.key,
            "line": one.mutant.line,
            "verdict": one.verdict,
            "reason": one.reason,
            "by": one.beside.by,
            "seconds": round(one.beside.seconds, 2),
        }
        for one in tried
    ]


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a package, module or function; may be repeated")
    names = [*OPERATORS, *ON_CONDITIONS, chosen.BY_HAND]
    parser.add_argument("--operator", action="append", default=[], choices=names, help="may be repeated")
    parser.add_argument("--changed-since", metavar="REVISION", help="first what differs from this commit")
    parser.add_argument("--sample", metavar="SEED", help="in the order that this draws, a few of each file at a time")
    parser.add_argument("--each", type=int, metavar="COUNT", help="at most so many of each function, as a seed draws")
    parser.add_argument("--seconds", type=float, default=_FOREVER_S, help="begin no mutant after that time")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--elsewhere",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="ask the other tests, too, where those beside let it pass",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a change's own function has a gap")
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    parser.add_argument("--json", type=Path)
    return parser


def batches_of(asked: argparse.Namespace) -> list[chosen.Batch]:
    """Returns the batches to try: those of changed functions come first.

    Raises:
        RuntimeError: there is no such commit.
    """
    touched = chosen.changed_since(asked.changed_since) if asked.changed_since else []
    if asked.changed_since and asked.sample is None:
        return touched
    others = chosen.matching(asked.only, asked.operator)
    if asked.each is not None:
        others = chosen.thinned(others, asked.each, asked.sample or "")
    if asked.sample is None:
        return others
    return [*chosen.sampled(touched, asked.sample), *chosen.sampled(others, asked.sample)]


def main() -> int:
    """Tries the chosen mutants, and prints the results. Returns the exit status."""
    parser = _arguments()
    asked = parser.parse_args()
    try:
        batches, known = batches_of(asked), harmless.reasons()
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    if asked.list:
        for mutant in (mutant for batch in batches for mutant in batch.mutants):
            _print(f"{mutant.path}:{mutant.line}: {mutant.key.partition(':')[2]}")
        return 0
    for line in chosen.stale():
        _print(f"stale: {line}")
    if not asked.only:
        for key in harmless.gone((one for batch in chosen.matching(()) for one in batch.mutants), known):
            _print(f"stale: harmless.txt: {key}")
    trying = trial.Trial(
        lambda what: _print(what if isinstance(what, str) else line_of(what)),
        known,
        asked.seconds,
        asks_elsewhere=asked.elsewhere,
    )
    tried = trying.run(batches, max(1, asked.jobs))
    for line in table(tried):
        _print(line)
    gaps = [one for one in tried if one.is_gap]
    for line in listed(gaps):
        _print(line)
    if asked.json:
        asked.json.write_text(json.dumps(as_json(tried), indent=1) + "\n")
    return 1 if asked.strict and any(one.is_changed or not asked.changed_since for one in gaps) else 0


if __name__ == "__main__":
    sys.exit(main())
