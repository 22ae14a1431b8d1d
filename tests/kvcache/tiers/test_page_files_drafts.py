"""A draft lives as long as the process that writes it. The next start removes the drafts of killed processes and keeps
all other drafts.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvcache.tiers import page_files
from kvcache.tiers.page_files import (
    FileFormat,
    FileRefusal,
    SystemIO,
    draft_names,
    open_draft,
    read_rows,
    remove_abandoned,
)
from kvcache.tiers.page_folder import PageFolder
from tests.kvcache.killed_writers import drafts_in

LAYOUT = FileFormat(bytes(16), 64, 16)
WRITER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from kvcache.tiers.page_files import draft_names, open_draft
names = draft_names()
with ExitStack() as drafts:
    for folder in sys.argv[1:]:
        drafts.enter_context(open_draft(Path(folder) / next(names)))
    print("writing", flush=True)
    sys.stdin.read()
"""


def start(root: Path) -> PageFolder:
    folder = PageFolder(root, LAYOUT)
    folder.scan(frozenset(), first=True)
    return folder


def test_the_next_start_removes_only_the_drafts_of_ended_processes(tmp_path: Path) -> None:
    folder = start(tmp_path)
    places = (folder.path, folder.path.parent)
    command = [sys.executable, "-c", WRITER, *map(str, places)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        mine = ExitStack()
        mine.enter_context(open_draft(folder.path / next(folder._drafts)))
        assert len(drafts_in(tmp_path)) == 3
        start(tmp_path)
        assert len(drafts_in(tmp_path)) == 3, "each of them is being written"
        writer.kill()
    start(tmp_path)
    assert [path.parent for path in drafts_in(tmp_path)] == [folder.path], "the draft that is left must be ours"
    mine.close()
    start(tmp_path)
    assert drafts_in(tmp_path) == []


def test_files_with_other_names_are_not_taken_for_drafts(tmp_path: Path) -> None:
    names = ["README", "x.tmp", f"{'g' * 16}-1.tmp", f"{'0' * 16}-.tmp", f"{'0' * 16}-1.tmp.old"]
    for name in names:
        (tmp_path / name).touch()
    target = tmp_path / "target"
    target.touch()
    link = f"{'0' * 16}-2.tmp"
    (tmp_path / link).symlink_to(target)
    remove_abandoned(tmp_path, [*names, link, f"{'0' * 16}-3.tmp"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, link, "target"])


def test_without_file_locks_only_old_drafts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    names = draft_names()
    young, old = next(names), next(names)
    for name in (young, old):
        with open_draft(tmp_path / name):
            pass
    os.utime(tmp_path / old, (1, 1))
    remove_abandoned(tmp_path, [young, old])
    assert [path.name for path in tmp_path.iterdir()] == [young]


def test_a_draft_that_is_taken_for_abandoned_before_it_is_locked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every second draft, another process starts after the draft was made and before it is locked."""
    lock, taken = page_files._lock, []

    def lock_late(file: int) -> bool | None:
        taken.append(Path(f"/proc/self/fd/{file}").readlink())
        if len(taken) % 2:
            monkeypatch.setattr(page_files, "_lock", lock)
            remove_abandoned(taken[-1].parent, [taken[-1].name])
            assert not taken[-1].exists()
            monkeypatch.setattr(page_files, "_lock", lock_late)
        return lock(file)

    monkeypatch.setattr(page_files, "_lock", lock_late)
    folder = PageFolder(tmp_path, LAYOUT)
    assert len(taken) == 2
    assert (folder.path.parent / "current").read_text() == folder.path.name
    page = np.arange(64, dtype=np.uint8)
    digests = np.ones((1, 2), np.uint64)
    name, _ = folder.write(digests, [[page]], SystemIO())
    assert len(taken) == 4
    found = read_rows(folder.path / name, LAYOUT)
    assert not isinstance(found, FileRefusal)
    assert np.array_equal(found, digests)
