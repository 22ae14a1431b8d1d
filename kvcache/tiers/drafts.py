"""Files of the folders that are ours, for their owner alone and never through a link; and drafts of them.

A draft is a file that is being written, and that nobody reads before it is whole. Who writes one holds a lock on it.
The kernel takes the lock back when the process ends in whatever way, so a draft whose lock is free is what a killed
process has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import time
from pathlib import Path

OWN_FILE = 0o600
"""Prompts can be told from KV: files are for their owner alone, whatever the umask."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without waiting, where the name is a pipe's.
TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_ABANDONED_S = 3600.0  # where the file system has no locks: a file that is being written is younger


def open_folder(path: Path) -> int:
    """The descriptor of a folder, which is no link. Raises `OSError`."""
    return os.open(path, _FOLDER)


def open_in(path: Path, flags: int = TO_READ) -> int:
    """Open a file of a folder of ours. Neither of them is a link, which could name anybody's. Raises `OSError`."""
    folder = open_folder(path.parent)
    try:
        return os.open(path.name, flags, OWN_FILE, dir_fd=folder)
    finally:
        os.close(folder)


def list_folder(path: Path) -> list[str]:
    """The names in a folder, which is no link. Raises `OSError`."""
    folder = open_folder(path)
    try:
        return os.listdir(folder)  # noqa: PTH208 - a path cannot be held to what was opened
    finally:
        os.close(folder)


class DraftNames:
    """Names that no process has used before."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count()

    def __next__(self) -> str:
        return f"{self._process}-{next(self._numbers)}.tmp"


def create_draft(path: Path) -> int:
    """The descriptor of a new file, for its owner alone. It counts as being written until it is closed.

    A process that starts may take it for abandoned, and remove it, just before it is locked. It cannot be renamed then
    (FileNotFoundError): who writes it begins again under another name. Raises `OSError` where it cannot be made.
    """
    file = open_in(path, _TO_WRITE)
    try:
        os.fchmod(file, OWN_FILE)
        _lock(file)
    except OSError:
        os.close(file)
        raise
    return file


def remove_abandoned(folder: Path, names: list[str]) -> None:
    """Remove the drafts among these names of a folder that nobody writes any more. Raises nothing."""
    for path in [folder / name for name in names if _NAME.fullmatch(name)]:
        with contextlib.suppress(OSError):
            file = open_in(path, _TO_LOCK)
            try:
                locked = _lock(file)
                if locked or (locked is None and time.time() - os.fstat(file).st_mtime > _ABANDONED_S):
                    path.unlink()
            finally:
                os.close(file)


def _lock(file: int) -> bool | None:
    """Whether we hold the lock now; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
