"""The committed results: whether each says how it was made, and whether what it measured has changed since.

`python -m benchmarks.results` names those that have to be made again. A result that is old is an error of the tests,
unless `results/not_remade.toml` gives a reason: `--excuse REASON` writes it for all that are old, and `make figures`
takes out what it makes again. A result is old if the code of a package or of a benchmark that its header names is not
what it was (`benchmarks.measured`), or if it was made from a tree with changes that no commit has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.frame import HEADER, Row
from benchmarks.measured import ROOT, changed

RESULTS = ROOT / "benchmarks" / "results"
NOT_REMADE = "not_remade.toml"
_ABOUT = (
    "# Results that are older than what they measure, or have no whole header, and why they are here still.\n"
    "# `make figures` makes them again and takes them out.\n"
)
_OF_MACHINE = ("cpu", "cores", "sha_extensions", "clock", "load")
_OF_VERSIONS = ("python", "torch", "nixl")


def load(name: str, folder: Path = RESULTS) -> Row:
    """A result; empty where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def faults(result: Mapping[str, object], root: Path = ROOT) -> list[str]:
    """What is wrong with a result, in words; empty: nothing."""
    missing = [key for key in HEADER if key not in result]
    machine, versions, measures = (result.get(key) for key in ("machine", "versions", "measures"))
    missing += [f"machine.{key}" for key in _OF_MACHINE if isinstance(machine, dict) and key not in machine]
    missing += [f"versions.{key}" for key in _OF_VERSIONS if isinstance(versions, dict) and key not in versions]
    found = [f"its header has no {', '.join(missing)}"] if missing else []
    if isinstance(measures, dict):
        found += [f"{path} has changed since" for path in changed(measures, root)]
        found += [] if measures else ["it names nothing that it measures"]
    if result.get("uncommitted"):
        found.append("it was made from changes that no commit has")
    return found


def excused(folder: Path = RESULTS) -> dict[str, str]:
    """The reason of each result that may be old, by its name."""
    path = folder / NOT_REMADE
    return tomllib.loads(path.read_text()) if path.exists() else {}


def write_excuses(reasons: Mapping[str, str], folder: Path = RESULTS) -> None:
    """Write the list anew; an empty one has its heading alone."""
    lines = [f"{name} = {json.dumps(reason, ensure_ascii=False)}\n" for name, reason in sorted(reasons.items())]
    (folder / NOT_REMADE).write_text(_ABOUT + "".join(lines))


def remade(names: Iterable[str], folder: Path = RESULTS) -> None:
    """Take results out of the list that were made again and have no fault."""
    done = {name for name in names if not faults(load(name, folder))}
    write_excuses({name: reason for name, reason in excused(folder).items() if name not in done}, folder)


def old(folder: Path = RESULTS) -> dict[str, list[str]]:
    """The faults of each result that has some, by its name."""
    found = {path.stem: faults(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}
    return {name: each for name, each in found.items() if each}


def main() -> int:
    """Print what is old; exit status 1 where there is something that has no excuse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--excuse", metavar="REASON", help="put all that are old into the list, with this reason")
    chosen = parser.parse_args()
    found, reasons = old(), excused()
    if chosen.excuse:
        reasons |= {name: reasons.get(name, chosen.excuse) for name in found}
        write_excuses({name: reason for name, reason in reasons.items() if name in found})
    for name, each in found.items():
        print(f"{name}: {'; '.join(each)}" + (f" (excused: {reasons[name]})" if name in reasons else ""))
    return 1 if found.keys() - reasons.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
