"""The programs in docs/nixl_connector.md run as they stand, and are as short as a first look may be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transfer
from transfer.connector.config import LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs/nixl_connector.md").read_text()
NAMES = ["a hand-over", "two groups"]
PROGRAMS = dict(zip(NAMES, re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_public_names_alone_and_prints_what_is_said(name: str, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    assert len(code.splitlines()) <= 40
    (names,) = re.findall(r"^from transfer import (.*)", code, re.MULTILINE)
    assert code.count("transfer import") == 1
    assert set(names.split(", ")) <= set(transfer.__all__)
    program = tmp_path / "program.py"
    program.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"`{done.stdout.strip()}`" in DOCUMENT


def test_every_layout_is_in_the_table() -> None:
    assert dict(re.findall(r"^\| `([\w-]+)` \| `([a-z,]+)` \|$", DOCUMENT, re.MULTILINE)) == LAYOUTS
