"""Files of the folders that are ours: for their owner alone, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

OWN_FILE = 0o600
"""Prompts can be told from KV: files are for their owner alone, whatever the umask."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_in(path: Path, flags: int) -> int:
    """Open a file of a folder of ours. Neither the file nor the folder is a link, which could name anybody's.

    Raises:
        OSError: it cannot be opened so.
    """
    folder = os.open(path.parent, _FOLDER)
    try:
        return os.open(path.name, flags, OWN_FILE, dir_fd=folder)
    finally:
        os.close(folder)


def list_folder(path: Path) -> list[str]:
    """The names in a folder, which is no link.

    Raises:
        OSError: it cannot be listed.
    """
    folder = os.open(path, _FOLDER)
    try:
        return os.listdir(folder)  # noqa: PTH208 - a path cannot be held to what was opened
    finally:
        os.close(folder)
