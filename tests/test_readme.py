"""The README's example runs as it stands, and is as short as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_prints_what_the_readme_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 24
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"`{done.stdout.strip()}`" in README


def test_every_make_target_has_its_help_line() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"help", "demo", "test", "check", "lint", "types", "bench", "clean"} <= listed
    for target in re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE):
        assert target in listed
