"""The folder of one run: sockets, key files and logs. It goes with the run, or when the next run starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from scheduler_adapters.errors import WorkerError

PREFIX = "pagewire-run-"
_TRIES = 10


class RunFolder:
    """A new folder in the system's folder for temporary files, for its owner alone.

    The run holds a lock on it. The kernel takes the lock back when the run ends in whatever way, so a folder whose lock
    is free belongs to a run that was killed: each new run removes those of its user.

    Attributes:
        path: of the folder.

    Raises:
        WorkerError: no folder can be made.
    """

    def __init__(self) -> None:
        try:
            _remove_abandoned(Path(tempfile.gettempdir()))
            for _ in range(_TRIES):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
                lock = _lock(self.path)
                if lock is not None:
                    self._lock = lock
                    return
                shutil.rmtree(self.path, ignore_errors=True)
        except OSError as error:
            raise WorkerError(f"no folder for the run can be made: {error}") from error
        raise WorkerError(f"no folder for the run can be locked: {self.path} was the last of {_TRIES}")

    def close(self) -> None:
        """Remove the folder and all that is in it. Safe twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the folder's lock; None where somebody else holds it, or the folder is gone.

    A folder that was just made may be taken for an abandoned one by another run that starts, and be gone once locked.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # not handed on to child processes
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(folder.stat(), os.fstat(lock)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove_abandoned(root: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_mine(entry):
                lock = _lock(Path(entry.path))
                if lock is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False
