"""Files in folders of our own, and drafts of them. Only their owner may access them, and none is opened through a link.

A draft is a file that is being written. No process reads it before it is whole. Its writer holds a lock on it, which
the kernel releases when the process ends, however it ends. So a draft without a lock was left by a killed process.
"""

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import time
from collections.abc import Generator, Iterator
from pathlib import Path

OWN_FILE = 0o600
"""Prompts can be derived from KV, so only the owner may access a file, whatever the umask."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# O_NONBLOCK: opening a pipe of that name must not wait.
TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_ABANDONED_S = 3600.0  # on a file system without locks, an older draft counts as abandoned


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[int]:
    """Open a folder that is not a link, and yield its descriptor. Raises `OSError`."""
    folder = os.open(path, _FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(path: Path, flags: int = TO_READ) -> Generator[int]:
    """Open a file in a folder and yield its descriptor. Neither may be a link. Raises `OSError`."""
    with opened_folder(path.parent) as folder:
        file = os.open(path.name, flags, OWN_FILE, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def list_folder(path: Path) -> list[str]:
    """The names in a folder that is not a link. Raises `OSError`."""
    with opened_folder(path) as folder:
        return os.listdir(folder)  # noqa: PTH208 - a path could name another folder by now


def draft_names() -> Iterator[str]:
    """Names that no process has used before. Any thread may draw from the iterator."""
    return map(f"{secrets.token_hex(8)}-{{}}.tmp".format, itertools.count())


@contextlib.contextmanager
def open_draft(path: Path) -> Generator[int]:
    """Create a file for its owner alone, and yield its descriptor. It counts as being written until it is closed.

    A process that starts may take the draft for abandoned and remove it just before it is locked. Renaming it then
    raises FileNotFoundError, and the writer begins again under another name. Raises `OSError` if it cannot be created.
    """
    with opened(path, _TO_WRITE) as file:
        os.fchmod(file, OWN_FILE)
        _lock(file)
        yield file


def remove_abandoned(folder: Path, names: list[str]) -> None:
    """Remove the drafts among these names of a folder whose writers have ended. Never raises."""
    for path in [folder / name for name in names if _NAME.fullmatch(name)]:
        with contextlib.suppress(OSError), opened(path, _TO_LOCK) as file:
            locked = _lock(file)
            if locked or (locked is None and time.time() - os.fstat(file).st_mtime > _ABANDONED_S):
                path.unlink()


def _lock(file: int) -> bool | None:
    """Try to lock the file. Returns whether that succeeded, or None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
