"""No process of a test outlives the test run, even if it has its own session or no parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import orphans

ROOT = Path(__file__).parents[1]
# Starts a process in another session. The parent of this process ends at once, and the process has a child. A signal to
# a process group reaches neither of them.
ESCAPES = """
import os, time
os.setsid()
if os.fork():
    os._exit(0)
os.fork()
# in a single write: with unbuffered stdout, `print` may write the text and the newline separately
os.write(1, b"%d\\n" % os.getpid())
time.sleep(60)
"""
# The test continues after both processes have reported their ids. A process that ends earlier would report no id.
TEST = """
import pathlib, subprocess, sys, time
def test_that_leaves_processes():
    with open({told!r}, "w") as file:
        subprocess.run([sys.executable, "-c", {escapes!r}], stdout=file, check=True)
    while len(pathlib.Path({told!r}).read_text().split()) < 2:
        time.sleep(0.01)
    {then}
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def told(path: Path, count: int = 2) -> list[int]:
    deadline = time.monotonic() + 30
    while len(pids := path.read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return list(map(int, pids))


@pytest.fixture
def left(tmp_path: Path) -> list[int]:
    """Returns two processes that have lost their parent."""
    with (tmp_path / "told").open("w") as file:
        subprocess.run([sys.executable, "-c", ESCAPES], stdout=file, check=True)
    return told(tmp_path / "told")


def test_an_escaped_process_becomes_a_child_again_and_is_ended(left: list[int]) -> None:
    before = set(orphans.children()) - set(left)
    assert all(map(is_alive, left))
    ended = orphans.end_children(but=before)
    assert {int(line.partition(":")[0]) for line in ended} == set(left)
    assert all("os.setsid()" in line for line in ended)
    assert not any(map(is_alive, left))


def test_processes_that_are_to_stay_are_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert orphans.end_children(but=set(orphans.children())) == []
        assert process.poll() is None
        process.kill()


def leaves(folder: Path, then: str) -> tuple[Path, Path]:
    """Writes a test that leaves two processes behind and then runs the given code. Returns the test, and the file that
    has the process ids.
    """
    path, file = folder / "test_leaves.py", folder / "told"
    path.write_text(TEST.format(told=str(file), escapes=ESCAPES, then=then))
    return path, file


@pytest.mark.parametrize("then", ["pass", "time.sleep(60)"], ids=["passes", "runs out of time"])
def test_the_runs_of_mutants_leave_nothing(tmp_path: Path, then: str) -> None:
    path, file = leaves(tmp_path, then)
    options, limit_s = ["-q", "-p", "no:cacheprovider"], 60.0 if then == "pass" else 4.0
    code = f"from tests.mutants.forker import run; print(run([{str(path)!r}], {options}, {limit_s}, compiled=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert f"'status': {0 if then == 'pass' else None}" in done.stdout
    if then == "pass":
        assert not any(map(is_alive, told(file)))
    # On a busy machine, the time of the test may be over before the processes have reported their ids.
    elif file.exists():
        assert not any(map(is_alive, map(int, file.read_text().split())))


def test_a_test_file_that_leaves_processes_fails(tmp_path: Path) -> None:
    path, file = leaves(tmp_path, "from tests import orphans; orphans.GRACE_S = 0.1")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(path)]
    own = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=own, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "processes that tests have left behind, now killed" in done.stdout
    assert not any(map(is_alive, told(file)))
