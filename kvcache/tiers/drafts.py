"""Drafts: files that are being written, and that nobody reads before they are whole.

Who writes a draft holds a lock on it. The kernel takes the lock back when the process ends in whatever way, so a draft
whose lock is free is what a killed process has left.
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

from kvcache.tiers.own_files import OWN_FILE, open_in

_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_ABANDONED_S = 3600.0  # where the file system has no locks: a file that is being written is younger
_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


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
    (FileNotFoundError): who writes it begins again under another name.

    Raises:
        OSError: it cannot be made.
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
