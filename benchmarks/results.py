"""Checks that committed results say how they were made, and finds results whose measured code has changed since.

`python -m benchmarks.results` reports both. A result that does not say how it was made fails the tests. A result that
is older than the measured code does not fail the tests, but this report and `make figures ARGS=--list` list it, and the
page of results mentions it below its table. A result is out of date if the code of a package or benchmark in its header
has changed (`benchmarks.measured`), or if it was made from a tree with uncommitted changes.
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
"""Reported as changed if a result's header does not name the code that was measured."""
_OF_MACHINE = ("cpu", "cores", "sha_extensions", "clock", "load")
_OF_VERSIONS = ("python", "torch", "nixl")


def load(name: str, folder: Path = RESULTS) -> Row:
    """Loads a result; empty if there is none."""
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
    """The packages and benchmarks that have changed since a result was made; empty if it is up to date."""
    measures = result.get("measures")
    if not isinstance(measures, dict) or not measures or result.get("uncommitted"):
        return [UNKNOWN]
    return changed(measures, root)


def main() -> int:
    """Prints the faults of headers and the changes. Returns exit status 1 if a result must be regenerated."""
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
