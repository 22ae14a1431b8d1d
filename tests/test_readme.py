"""The README's programs run as they stand, and are as short as they are said to be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LINES = {"embedding": 24, "hand-over": 40}  # at most
PROGRAMS = dict(zip(LINES, re.findall(r"```python\n(.*?)```", README, re.DOTALL), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_prints_what_the_readme_says(name: str, tmp_path: Path) -> None:
    assert len(PROGRAMS[name].splitlines()) <= LINES[name]
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"`{done.stdout.strip()}`" in README


def test_every_make_target_has_its_help_line() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"help", "demo", "test", "check", "lint", "types", "bench", "clean"} <= listed
    for target in re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE):
        assert target in listed
