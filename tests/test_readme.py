"""The README's programs run as they stand, and are as short as they are said to be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT, printed_by, programs_of

README = (ROOT / "README.md").read_text()
LINES = {"embedding": 24, "hand-over": 40}  # at most
PROGRAMS = dict(zip(LINES, programs_of(README), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_prints_what_the_readme_says(name: str, tmp_path: Path) -> None:
    assert len(PROGRAMS[name].splitlines()) <= LINES[name]
    assert f"`{printed_by(PROGRAMS[name], tmp_path)}`" in README


def test_every_make_target_has_its_help_line() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"help", "demo", "test", "check", "lint", "types", "bench", "clean"} <= listed
    for target in re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE):
        assert target in listed
