"""The program in docs/transfer.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/transfer.md").read_text()


def test_many_requests_in_one_loop_end_in_each_way_and_no_page_stays_held(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    (printed,) = re.findall(r"^It prints\n\n((?:    .*\n)+)", DOCUMENT, re.MULTILINE)
    assert done.stdout.split() == printed.split()
