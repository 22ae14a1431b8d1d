"""Remakes every committed result, one after another, and the tables in the docs: `make figures`.

`python -m benchmarks.figures [--quick] [--only GROUP,GROUP] [--list]`. The listed durations are for two idle cores.
`--quick` tries every program with fewer sizes and repeats, writes to `benchmarks/out`, and does not change the docs. A
result from a tree with uncommitted changes counts as out of date. `--list` also says what has changed since each result
was made. The exit status is 1 if a program failed; the other results are written nevertheless.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import readme, results
from benchmarks.frame import progress, table
from benchmarks.measured import ROOT

OUT = ROOT / "benchmarks" / "out"
_BUSY = 0.5
"""At a higher load, figures are not reliable."""


class Step(NamedTuple):
    """One program that produces results.

    Attributes:
        group: the group that selects it.
        made: names of the results that it writes.
        command: the arguments for the interpreter. `{folder}` stands for the folder of results.
        seconds: the duration of the program.
        quick: the command of a quick trial, and the trial's duration.
        environment: the environment below `.venvs` whose interpreter runs the program; empty for the current one.
    """

    group: str
    made: tuple[str, ...]
    command: str
    seconds: int
    quick: tuple[str, int]
    environment: str = ""


_MANAGER = (
    *("decode_step", "admission", "growing_conversation", "release", "evict", "memory", "recommend", "waiting"),
    *("layer_groups", "overlap", "settings", "weights"),
)
_GROWTH = ("growth", "growth_transfer")
_TRACES = ("trace_replay", "trace_hints", "trace_routing")


def _all(names: Sequence[str]) -> str:
    return f"-m benchmarks {' '.join(names)} --json-dir {{folder}}"


def _alone(name: str, options: str = "") -> str:
    return f"-m benchmarks.{name}{options} --json {{folder}}/{name}.json"


STEPS = (
    Step("manager", _MANAGER, _all(_MANAGER), 340, (_all(_MANAGER) + " --quick", 80)),
    Step("pull", ("pull",), _alone("pull"), 660, (_alone("pull", " --quick"), 150)),
    Step("peers", ("peers",), _alone("peers", " --rounds 3"), 1080, (_alone("peers", " --quick"), 240)),
    Step("growth", _GROWTH, _all(_GROWTH), 480, (_all(_GROWTH) + " --quick", 100)),
    Step("safety", ("verify_price",), _alone("verify_price"), 20, (_alone("verify_price", " --quick"), 8)),
    Step("safety", ("first_contact",), _alone("first_contact"), 30, (_alone("first_contact", " --quick"), 10)),
    Step("safety", ("prompt_digest",), _alone("prompt_digest"), 10, (_alone("prompt_digest", " --quick"), 5)),
    Step("safety", ("hashing",), _alone("hashing"), 30, (_alone("hashing", " --quick"), 15)),
    Step("installed", ("installed",), _alone("installed"), 30, (_alone("installed", " --quick"), 15)),
    Step("safety", ("scrape",), _alone("scrape"), 20, (_alone("scrape", " --quick"), 10)),
    Step("serving", ("handover",), _alone("handover"), 150, (_alone("handover", " --quick"), 40)),
    Step(
        "serving",
        ("first_token",),
        _alone("first_token"),
        240,
        (_alone("first_token", " --requests 24 --rounds 1"), 45),
    ),
    Step("serving", ("fleet",), _alone("fleet"), 180, (_alone("fleet", " --requests 60"), 60)),
    Step("serving", ("prefix_peers",), _alone("prefix_peers"), 900, (_alone("prefix_peers", " --rounds 1"), 150)),
    Step("serving", ("both_ends",), _alone("both_ends"), 300, (_alone("both_ends", " --rounds 2"), 120)),
    Step("serving", ("asking",), _alone("asking"), 30, (_alone("asking", " --quick"), 10)),
    Step("serving", ("placement",), _alone("placement"), 420, (_alone("placement", " --requests 60"), 120)),
    Step(
        "engines",
        ("vllm_serve",),
        _alone("vllm_serve", " --ways ours,theirs"),
        1080,
        (_alone("vllm_serve", " --repeats 4 --rounds 1"), 300),
        environment="vllm-serve",
    ),
    Step(
        "engines",
        ("vllm_conversations",),
        _alone("vllm_conversations", " --choices --idle"),
        1500,
        (_alone("vllm_conversations", " --quick"), 240),
        environment="vllm-serve",
    ),
    Step(
        "engines",
        ("vllm_answers",),
        _alone("vllm_answers", " --ways ours,theirs,none"),
        3600,
        (_alone("vllm_answers", " --ways ours --models llama --requests 100"), 240),
        environment="vllm-serve",
    ),
    Step("watch", ("watch",), _alone("watch"), 480, (_alone("watch", " --quick"), 180)),
    Step("events", ("events",), _alone("events"), 300, (_alone("events", " --quick"), 150)),
    Step("tiers", ("tiers",), _alone("tiers"), 150, (_alone("tiers", " --quick"), 40)),
    Step("tiers", ("objects",), _alone("objects"), 90, (_alone("objects", " --quick"), 15)),
    Step("gpu", ("gpu",), _alone("gpu"), 120, (_alone("gpu", " --only loop"), 20)),
    Step("traces", _TRACES, _all(_TRACES), 420, (_all(_TRACES) + " --quick", 60)),
    Step(
        "kills",
        ("kills",),
        "-m tests.scheduler_adapters.kills --runs 240 --seed 7 --json {folder}/kills.json",
        1800,
        ("-m tests.scheduler_adapters.kills --runs 4 --seed 7 --json {folder}/kills.json", 60),
    ),
)
GROUPS = tuple(dict.fromkeys(step.group for step in STEPS))


def listed(steps: Sequence[Step], *, quick: bool) -> str:
    """Lines that list the steps with their durations."""
    rows = [
        {
            "group": step.group,
            "results": " ".join(step.made),
            "minutes": round((step.quick[1] if quick else step.seconds) / 60, 1),
            "changed since": ", ".join(_changed_since(step.made)),
        }
        for step in steps
    ]
    total = sum(step.quick[1] if quick else step.seconds for step in steps) / 60
    return f"{table(rows)}\n{total:.0f} minutes in all"


def _changed_since(made: Sequence[str]) -> list[str]:
    return sorted({what for name in made for what in results.changed_since(results.load(name))})


def run(step: Step, folder: Path, *, quick: bool) -> bool:
    """Runs one step. Returns False if it failed."""
    interpreter = ROOT / ".venvs" / step.environment / "bin" / "python" if step.environment else Path(sys.executable)
    if not interpreter.exists():
        progress(f"{' '.join(step.made)}: left out, because {interpreter} does not exist: `make test-engines` makes it")
        return True
    command = [str(interpreter), *(step.quick[0] if quick else step.command).format(folder=folder).split()]
    progress(f"{' '.join(step.made)}: about {(step.quick[1] if quick else step.seconds) / 60:.1f} minutes")
    start = time.monotonic()
    failed = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - our own files
    progress(
        f"{' '.join(step.made)}: {'FAILED' if failed else 'done'} in {(time.monotonic() - start) / 60:.1f} minutes"
    )
    return not failed


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="try every program with fewer sizes, and write to benchmarks/out"
    )
    parser.add_argument(
        "--only", default=",".join(GROUPS), help=f"groups to run, with commas between: {', '.join(GROUPS)} (all)"
    )
    parser.add_argument("--list", action="store_true", help="list the programs and their durations, and run none")
    chosen = parser.parse_args()
    chosen.only = chosen.only.split(",")
    unknown = [name for name in chosen.only if name not in GROUPS]
    if unknown:
        parser.error(f"no group {unknown[0]!r}: there are {', '.join(GROUPS)}")
    return chosen


def main() -> int:
    """Runs the steps, and writes the tables."""
    chosen = arguments()
    steps = [step for step in STEPS if step.group in chosen.only]
    print(listed(steps, quick=chosen.quick), flush=True)
    if chosen.list:
        return 0
    load = os.getloadavg()[0]
    if load > _BUSY and not chosen.quick:
        progress(f"the load is {load:.1f}: this machine is busy, so the figures are less reliable")
    folder = OUT if chosen.quick else results.RESULTS
    passed = [run(step, folder, quick=chosen.quick) for step in steps]
    if not chosen.quick:
        for page in readme.PAGES:
            page.write_text(readme.rendered(page.read_text()))
    failed = [" ".join(step.made) for step, good in zip(steps, passed, strict=True) if not good]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
