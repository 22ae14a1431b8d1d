"""Runs the programs in the documents and examples exactly as they are printed."""

import os
import sys
from pathlib import Path

from tests.forked import ForkedProgram

ROOT = Path(__file__).resolve().parents[1]
# Behaves like `python -W error PROGRAM`.
_RUN = """import runpy, sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {folder!r})
runpy.run_path({program!r}, run_name="__main__")
"""


def printed_by(code: str, folder: Path) -> str:
    """Runs a program and returns its output. The program must end without an error and write nothing to standard
    error.
    """
    program = folder / "program.py"
    program.write_text(code)
    return printed(program, folder)


def printed(program: Path, folder: Path) -> str:
    """Runs a program in a file as `printed_by` does. Files that the program writes go to `folder`. The program runs in
    a fork of a process that has imported torch, because this import would take most of the time of such a program.
    """
    said = folder / "printed", folder / "errors"
    with said[0].open("w") as output, said[1].open("w") as errors:
        code = _RUN.format(folder=str(program.parent), program=str(program))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = ForkedProgram([sys.executable, "-c", code], output, environment, errors)
        process.stdin.close()
        status = process.wait(180.0)
    complaints = said[1].read_text()
    assert (status, complaints) == (0, ""), f"{program.name} ended with {status} and said: {complaints}"
    return said[0].read_text().strip()
