"""The program in docs/nixl_connector.md runs as it stands, and is as short as a first look may be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import transfer

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs/nixl_connector.md").read_text()


def test_the_program_hands_a_request_over_with_public_names_alone(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(code.splitlines()) <= 40
    (names,) = re.findall(r"^from transfer import (.*)", code, re.MULTILINE)
    assert code.count("transfer import") == 1
    assert set(names.split(", ")) <= set(transfer.__all__)
    program = tmp_path / "hand_over.py"
    program.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[True, True]\n"), done.stderr
    assert f"`{done.stdout.strip()}`" in DOCUMENT
