"""The programs in our documents, which run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def printed_by(code: str, folder: Path) -> str:
    """What a program prints, which must end well and say nothing on standard error."""
    program = folder / "program.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
