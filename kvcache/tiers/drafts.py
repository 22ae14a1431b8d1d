"""Files in our own folders, accessible to their owner alone and never opened through a link; and drafts of them.

A draft is a file that is being written; no process reads it before it is whole. Its writer holds a lock on it. The
kernel releases the lock when the process ends, however it ends, so a draft without a lock is left from a killed
process.
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
"""Prompts can be told from KV: files are for their owner alone, whatever the umask."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without waiting, where the name is a pipe's.
TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_ABANDONED_S = 3600.0  # where the file system has no locks: a file that is being written is younger


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[int]:
    """The descriptor of a folder, which is no link. Raises `OSError`."""
    folder = os.open(path, _FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(path: Path, flags: int = TO_READ) -> Generator[int]:
    """The descriptor of a file of a folder of ours. Neither is a link, which could name anybody's. Raises `OSError`."""
    with opened_folder(path.parent) as folder:
        file = os.open(path.name, flags, OWN_FILE, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def list_folder(path: Path) -> list[str]:
    """The names in a folder, which is no link. Raises `OSError`."""
    with opened_folder(path) as folder:
        return os.listdir(folder)  # noqa: PTH208 - a path cannot be held to what was opened


def draft_names() -> Iterator[str]:
    """Names that no process has used before, for any thread."""
    return map(f"{secrets.token_hex(8)}-{{}}.tmp".format, itertools.count())


@contextlib.contextmanager
def open_draft(path: Path) -> Generator[int]:
    """The descriptor of a new file, for its owner alone. It counts as being written until it is closed.

    A process that starts may take it for abandoned, and remove it, just before it is locked. It cannot be renamed then
    (FileNotFoundError): who writes it begins again under another name. Raises `OSError` if it cannot be made.
    """
    with opened(path, _TO_WRITE) as file:
        os.fchmod(file, OWN_FILE)
        _lock(file)
        yield file


def remove_abandoned(folder: Path, names: list[str]) -> None:
    """Remove the drafts among these names of a folder whose writers are gone. Raises no error."""
    for path in [folder / name for name in names if _NAME.fullmatch(name)]:
        with contextlib.suppress(OSError), opened(path, _TO_LOCK) as file:
            locked = _lock(file)
            if locked or (locked is None and time.time() - os.fstat(file).st_mtime > _ABANDONED_S):
                path.unlink()


def _lock(file: int) -> bool | None:
    """Whether we hold the lock now; None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
