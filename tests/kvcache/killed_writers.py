"""Kills a process while it writes pages, starts another process on the same folder, and compares every page that the
second process serves.

Run `python -m tests.kvcache.killed_writers --rounds 50`. With `--write DIR` the program is the process that gets
killed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.kvcache.served import SIZE, Served

PROMPTS, PAGES = 60, 50  # Each page has 32 KiB.


@dataclass
class Tally:
    rounds: int = 0
    in_a_write: int = 0
    drafts_kept: int = 0  # The number of a living writer's drafts that a starting process has kept.
    files: int = 0
    pages_served: int = 0
    pages_refused: int = 0


def served(folder: Path) -> Served:
    """Returns a manager on the folder. All KV that requests read from this manager is compared."""
    files = {"file_tier_dir": str(folder), "file_tier_max_gb": 0.5, "file_tier_key": "k"}
    return Served(PAGES + 4, 400, head_dim=512, max_seq_len=512, checks=False, params=files)


def prompt_of(number: int) -> list[int]:
    """Returns a prompt of `PAGES` full pages and one more token."""
    return [number, *range(PAGES * SIZE)]


def write(folder: Path) -> None:
    """Serves prompts and writes their pages as fast as possible, until this process is killed."""
    it = served(folder)
    files, index = it.tiers.files, it.tiers.host.pool.index
    assert files is not None
    print("writing", flush=True)  # noqa: T201
    for number in range(PROMPTS):
        it.serve(prompt_of(number))
        it.tiers.store_all()
        # The same pages are written again to files of the same names, so that all of the time is spent on writing.
        for _ in range(10):
            for name in files._index.names:
                files._index.forget(name)
            files.offer(index.digests_of(np.flatnonzero(index.published).astype(np.int32)))
            files.flush()
    while True:
        time.sleep(1)


def drafts_in(folder: Path) -> list[Path]:
    """Returns the draft files below a folder. A draft is being written, or its writer has stopped."""
    return [*folder.rglob("*.tmp")]


def is_written(draft: Path) -> bool:
    """Returns whether the draft's writer holds its lock. A writer may be stopped before it holds the lock. Its draft is
    then removed, and a living writer would begin a new draft.
    """
    with draft.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def kill_one(folder: Path, after_s: float, tally: Tally) -> None:
    """Runs one round on an empty folder. One process starts while the writer lives, and another process starts after
    the writer's end.
    """
    command = [sys.executable, "-m", "tests.kvcache.killed_writers", "--write", str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            time.sleep(after_s)
            writer.send_signal(signal.SIGSTOP)
            # Waits until all threads have stopped, because until then any of them may finish a write.
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            left = [draft for draft in drafts_in(folder) if is_written(draft)]
            served(folder).manager.close()
            assert drafts_in(folder) == left, "a draft of a living writer was removed"
            tally.drafts_kept += len(left)
        finally:
            writer.kill()  # A stopped process ends only by SIGKILL.
    again = served(folder)
    tally.rounds += 1
    tally.in_a_write += bool(left)
    assert not drafts_in(folder), "a draft of a killed writer was kept"
    tally.files += len([*folder.rglob("*.pages")])
    for number in range(PROMPTS):
        again.serve(prompt_of(number))  # The call raises an error at the first wrong byte.
    again.manager.check()
    again.manager.close()
    tally.pages_served += again.manager.metrics.file_blocks_read
    tally.pages_refused += again.manager.metrics.file_blocks_refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.write)
    tally, chance = Tally(), random.Random(chosen.seed)
    for _ in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as folder:
            kill_one(Path(folder), chance.uniform(0.0, 1.0), tally)
    print(f"no wrong byte: {asdict(tally)}")  # noqa: T201


if __name__ == "__main__":
    main()
