"""The folder of page files: its names, and what else lies there."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import shutil
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidParamsError
from kvcache.page_files import FileFormat, read_rows

_FILE = re.compile(r"[0-9a-f]{32}\.pages")
_TEMPORARY = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_EPOCH = re.compile(r"epoch-[0-9a-f]{16}")
_CURRENT = "current"
_ABANDONED_S = 3600.0  # a file that is being written is younger


class Scan(NamedTuple):
    """What changed in the folder: names, sizes and digests of files that are new, the least recently used first."""

    found: list[tuple[str, int, NDArray[np.uint64]]]
    gone: list[str]


def namespace_of(*fields: str) -> bytes:
    """16 bytes that differ where one of the fields does."""
    joined = b"".join(struct.pack("<I", len(field.encode())) + field.encode() for field in ("files/1", *fields))
    return hashlib.sha256(joined).digest()[:16]


class PageFolder:
    """Files of one namespace, in the folder of the current epoch.

    `root/<namespace>/current` names that folder. A reset starts a new epoch, as a file of before must not be found
    again, here or after a restart. Who shares the folder and has not been reset goes on alone in the old one, which is
    removed under it: it misses, and finds nothing wrong.

    Args:
        root: made if it is not there.
        namespace: of every file.

    Raises:
        InvalidParamsError: (a ValueError) nothing can be written there.
    """

    def __init__(self, root: Path, namespace: bytes) -> None:
        self._home = root / namespace.hex()
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count()
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._epoch = self._read_epoch() or self._name_epoch(replace=False)
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidParamsError(f"file_tier_dir {str(root)!r} cannot be used: {error}") from error

    @property
    def path(self) -> Path:
        """The folder of the current epoch."""
        return self._home / self._epoch

    def temporary_name(self) -> str:
        """A name that no process has used before."""
        return f"{self._process}-{next(self._numbers)}.tmp"

    def renew(self) -> Path:
        """Start a new epoch, or join one that somebody else has started; the folder to remove."""
        before, current = self.path, self._read_epoch()
        self._epoch = current if current not in (None, self._epoch) else self._name_epoch(replace=True)
        self.path.mkdir(parents=True, exist_ok=True)
        return before

    def scan(self, layout: FileFormat, known: frozenset[str], *, first: bool = False) -> Scan:
        """What is in the folder beside the files `known`; what is broken is removed. Raises nothing.

        `first`: remove what others have left behind, too.
        """
        if first:
            self._tidy()
        seen, found = set[str](), list[tuple[int, str, int, NDArray[np.uint64]]]()
        try:
            with os.scandir(self.path) as listed:
                names = [entry.name for entry in listed]
        except OSError:
            return Scan([], sorted(known))
        for name in names:
            if first and _TEMPORARY.fullmatch(name):
                _remove_abandoned(self.path / name)
            if not _FILE.fullmatch(name):
                continue
            seen.add(name)
            if name not in known:
                found += self._look_at(layout, name)
        found.sort(key=_by_age)
        return Scan([(name, size, digests) for _, name, size, digests in found], sorted(known - seen))

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove a folder of an epoch that is over."""
        shutil.rmtree(folder, ignore_errors=True)

    def _look_at(self, layout: FileFormat, name: str) -> list[tuple[int, str, int, NDArray[np.uint64]]]:
        path = self.path / name
        try:
            status = path.stat()
            digests = read_rows(path, layout)
            if digests is None:
                path.unlink(missing_ok=True)  # cut short when a machine failed, say: its name is ours, nobody misses it
                return []
        except OSError:
            return []
        return [(status.st_mtime_ns, name, layout.size_of(len(digests)), digests)]

    def _tidy(self) -> None:
        try:
            others = [entry.name for entry in os.scandir(self._home) if _EPOCH.fullmatch(entry.name)]
        except OSError:
            return
        current = self._read_epoch()
        for name in others:
            if current is not None and name not in (current, self._epoch):
                self.remove(self._home / name)

    def _read_epoch(self) -> str | None:
        try:
            name = (self._home / _CURRENT).read_text()
        except (OSError, UnicodeDecodeError):
            return None
        return name if _EPOCH.fullmatch(name) else None

    def _name_epoch(self, *, replace: bool) -> str:
        """Name a new epoch; without `replace` the one that somebody else has named meanwhile, if so."""
        name, temporary = f"epoch-{secrets.token_hex(8)}", self._home / self.temporary_name()
        temporary.write_text(name)
        try:
            if not replace:
                try:
                    os.link(temporary, self._home / _CURRENT)
                except FileExistsError:
                    named = self._read_epoch()
                    if named is not None:
                        return named
                else:
                    return name
            temporary.replace(self._home / _CURRENT)  # a broken one, too
        finally:
            temporary.unlink(missing_ok=True)
        return name


def touch(path: Path) -> None:
    """Let a file count as used just now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _by_age(found: tuple[int, str, int, NDArray[np.uint64]]) -> tuple[int, str]:
    return found[:2]


def _remove_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            path.unlink()
