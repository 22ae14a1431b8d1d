"""The rival programs: how to install and run each one, and how to turn its output into rows."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.frame import Row, progress
from benchmarks.peers.environment import PeerError, needed, python_of

HERE = Path(__file__).resolve().parent
OTHERS = HERE / "others.py"
FOLDER = "rivals"
"""The subfolder of the scripts' folder that has the rivals' scripts."""
_LIMIT_S = 300.0


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `versions.toml`. That file says what each field means."""

    title: str
    package: str
    version: str
    script: str
    requirements: str
    library: tuple[str, str] | None = None


RIVALS = msgspec.convert(tomllib.loads((HERE / "versions.toml").read_text()), dict[str, Rival])


class Program:
    """A rival that can be run.

    Args:
        name: name of the rival.
        folder: folder of the peers' scripts.

    Raises:
        PeerError: its script or a library is missing, or its environment is missing and cannot be created.
    """

    def __init__(self, name: str, folder: Path) -> None:
        rival = RIVALS[name]
        self.title, self._name = rival.title, name
        self._script = str(needed(folder / FOLDER, rival.script))
        if rival.library is not None:
            _load(name, *rival.library)
        path = needed(folder / FOLDER, rival.requirements)
        arguments = ["--no-deps", "--requirement", str(path)]
        self._python = str(python_of(f"rival-{name}", arguments, path.read_bytes()))

    def fetches(self, blocks: Sequence[int], seconds: float) -> list[Row]:
        """The measurements of the rival's script: a row for each number of blocks that the script completes."""
        options = ["--seconds", str(seconds), "--blocks", ",".join(map(str, blocks))]
        lines, error = output_of([self._python, self._script, *options])
        if error:
            progress(f"{self.title}: {error}")
        return [_row(self.title, line) for line in lines if "blocks" in line]

    def faults(self) -> list[Row]:
        """Returns what the rival's reader reports if its source dies or reuses the memory."""
        return [*self._faults()]

    def _faults(self) -> Iterator[Row]:
        if self._name == "kvcr":
            for title, options in ((self.title, []), (f"{self.title}, with its guard", ["--guard"])):
                lines, error = output_of([self._python, self._script, "--kill", *options])
                yield _killed(title, lines, error)
        lines, error = output_of([self._python, str(OTHERS), self._name, self._script])
        if error:
            progress(f"{self.title}: {error}")
        yield from ({"program": self.title, **line} for line in lines)


def output_of(command: Sequence[str]) -> tuple[list[Row], str]:
    """The JSON lines that a program prints, and why it failed; "" if it did not fail."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(  # noqa: S603 - what the user pointed us to
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=_LIMIT_S)
        error = ""
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate()
        error = f"not over after {_LIMIT_S:.0f} s"
    if process.returncode and not error:
        error = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")], error


def _load(name: str, library: str, package: str) -> None:
    try:
        ctypes.CDLL(library)
    except OSError:
        raise PeerError(f"{name}: {library} is not installed: run apt-get install {package}") from None


def _row(title: str, line: Row) -> Row:
    size = line["blocks"] * line["block_bytes"]
    return {
        "program": title,
        "blocks": line["blocks"],
        "block_bytes": line["block_bytes"],
        "us_min": line["us"],
        "us_median": line["us_median"],
        "n": line["n"],
        "gbps": round(size / line["us"] / 1e3, 3),
        "cpu_s_per_gb": line["cpu_s_per_gb"],
        "access": "random",
    }


def _killed(title: str, lines: Sequence[Row], error: str) -> Row:
    """Turns the output of kvcr's script into a row.

    The row has the result, the memory that `close` reports, and the time at which a guard has freed the blocks.
    """
    row: Row = {"program": title, "the source": "is killed in the middle of the fetch", "told": error or "nothing"}
    for line in lines:
        if "told_after_s" in line:
            results = ", ".join(f"{count} {name}" for name, count in line["results"].items())
            row |= {"told_after_s": line["told_after_s"], "told": results, "usual_s": line["usual_s"]}
        if "from_the_guard_us" in line:
            row["told"] += f"; then from the guard in {line['from_the_guard_us'] / 1e6:.3f} s"
        if "close" in line:
            row["told"] += f"; close: {line['close'][:120]} after {line['s']} s"
    return row
