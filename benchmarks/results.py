"""The committed results: whether each says how it was made, and what of it was measured has changed since.

`python -m benchmarks.results` reports both. A result that does not say how it was made is an error of the tests. One
that is older than what it measures is none: it stands in this report and in that of `make figures ARGS=--list`, and the
page of results says so below its table. It is old if the code of a package or of a benchmark that its header names is
not what it was (`benchmarks.measured`), or if it was made from a tree with changes that no commit has.
"""

# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.frame import HEADER, Row
from benchmarks.measured import ROOT, changed

RESULTS = ROOT / "benchmarks" / "results"
UNKNOWN = "what it measures"
"""Stands for all that a result measures where its header does not name it: that is taken for changed."""
_OF_MACHINE = ("cpu", "cores", "sha_extensions", "clock", "load")
_OF_VERSIONS = ("python", "torch", "nixl")


def load(name: str, folder: Path = RESULTS) -> Row:
    """A result; empty where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def faults(result: Mapping[str, object]) -> list[str]:
    """The fields that the header of a result lacks, in words; empty if none."""
    missing = [key for key in HEADER if key not in result]
    machine, versions = (result.get(key) for key in ("machine", "versions"))
    missing += [f"machine.{key}" for key in _OF_MACHINE if isinstance(machine, dict) and key not in machine]
    missing += [f"versions.{key}" for key in _OF_VERSIONS if isinstance(versions, dict) and key not in versions]
    found = [f"its header has no {', '.join(missing)}"] if missing else []
    if result.get("measures") == {}:
        found.append("it names nothing that it measures")
    return found


def changed_since(result: Mapping[str, object], root: Path = ROOT) -> list[str]:
    """Packages and benchmarks that have changed since a result was made; empty if the result is as new as they are."""
    measures = result.get("measures")
    if not isinstance(measures, dict) or not measures or result.get("uncommitted"):
        return [UNKNOWN]
    return changed(measures, root)


def main() -> int:
    """Print what headers lack and what has changed; exit status 1 where a result has to be made again."""
    argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__).parse_args()
    old = False
    for path in sorted(RESULTS.glob("*.json")):
        result = load(path.stem)
        found = [*faults(result), *(f"{what} has changed since" for what in changed_since(result))]
        old |= bool(found)
        if found:
            print(f"{path.stem}: {'; '.join(found)}")
    return int(old)


if __name__ == "__main__":
    sys.exit(main())
