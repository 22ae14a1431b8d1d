"""Variables that are set for a moment, while other threads read the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transfer.nixl.environment import environment

ROOT = Path(__file__).resolve().parents[3]

READERS = """
import ctypes, os, sys, threading
from transfer.nixl.environment import _kept, environment

getenv = ctypes.CDLL(None).getenv  # releases the GIL, as a library of C does
getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
ended, counts = threading.Event(), []

def read():
    count = 0
    while not ended.is_set():
        assert getenv(b"LAST_OF_ALL") == b"here"
        count += 1
    counts.append(count)

os.environ.update({f"OTHER_{number}": "x" * 50 for number in range(40)})
os.environ["LAST_OF_ALL"] = "here"
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads:
    thread.start()
for turn in range(1_000):
    before = dict(os.environ)
    with environment({f"FOR_A_MOMENT_{number}": str(turn) for number in range(12)} | {"OTHER_3": "y"}):
        assert getenv(b"FOR_A_MOMENT_11") == str(turn).encode() and getenv(b"OTHER_3") == b"y"
        kept = bytearray(4096)  # takes memory that has been freed
    assert dict(os.environ) == before and getenv(b"FOR_A_MOMENT_11") is None and getenv(b"OTHER_3") == b"x" * 50
ended.set()
for thread in threads:
    thread.join()
assert len(counts) == 3 and min(counts) > 0, counts
assert len(_kept) < 5, "a process that makes agents all its life grows"
print("read", sum(counts))
"""


def _child(name: str) -> str | None:
    """Returns the value of a variable as a program that is started now gets it."""
    show = f"import os; print(os.environ.get({name!r}, 'none'), end='')"
    return subprocess.run([sys.executable, "-S", "-c", show], capture_output=True, text=True, check=True).stdout


def test_threads_that_read_the_environment_live_on_while_it_changes():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", READERS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert done.stdout.startswith("read ")


def test_programs_that_are_started_see_what_the_environment_has():
    with environment({"PAGEWIRE_MOMENT": "1"}):
        assert _child("PAGEWIRE_MOMENT") == "1"
    assert _child("PAGEWIRE_MOMENT") == "none"
    assert _child("PATH") == os.environ["PATH"]


@pytest.mark.parametrize("change", ["added", "changed", "removed"])
def test_a_change_by_somebody_else_within_the_block_stays(change: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEWIRE_OTHER", "old")
    monkeypatch.delenv("PAGEWIRE_NEW", raising=False)
    name, value = ("PAGEWIRE_NEW" if change == "added" else "PAGEWIRE_OTHER"), "new"
    with environment({"PAGEWIRE_MOMENT": "1"}):
        if change == "removed":
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert os.environ.get(name, "none") == ("none" if change == "removed" else value)
    assert _child(name) == os.environ.get(name, "none")
    assert "PAGEWIRE_MOMENT" not in os.environ
    assert _child("PAGEWIRE_MOMENT") == "none"
    with environment({"PAGEWIRE_MOMENT": "2"}):
        assert (_child("PAGEWIRE_MOMENT"), _child(name)) == ("2", os.environ.get(name, "none"))


def test_blocks_within_an_error_restore_what_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEWIRE_OTHER", "old")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="within"), environment({"PAGEWIRE_OTHER": "1", "PAGEWIRE_MOMENT": "1"}):
        raise ValueError("within")
    assert dict(os.environ) == before
    assert _child("PAGEWIRE_OTHER") == "old"
