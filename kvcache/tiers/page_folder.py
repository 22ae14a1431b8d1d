"""The folder of page files: its files, its access rights, and its epochs. A reset begins a new epoch."""

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kvcache.errors import InvalidParamsError
from kvcache.pool.index import Digests
from kvcache.tiers.page_files import (
    FileFormat,
    FileRefusal,
    FileRefusals,
    draft_names,
    list_folder,
    open_draft,
    opened,
    opened_folder,
    read_rows,
    remove_abandoned,
    write_pages,
)
from kvcache.types import PageIO, Part

_FILE = re.compile(r"[0-9a-f]{32}\.pages")
_EPOCH = re.compile(r"epoch-[0-9a-f]{16}")
_CURRENT = "current"
_TRIES = 10
_HOME = re.compile(r"[0-9a-f]{32}")
_OWN_FOLDER = 0o700

_log = logging.getLogger("pagewire")


class Scan(NamedTuple):
    """The changes in the folder since the last scan.

    `found` has the new files as `(name, size, digests)`, the least recently used file first. `gone` has the names of
    the files that were removed.
    """

    found: list[tuple[str, int, Digests]]
    gone: list[str]


def namespace_of(*fields: str) -> bytes:
    """Returns 16 bytes that identify `fields`. If any field differs, the bytes differ."""
    joined = b"".join(struct.pack("<I", len(field.encode())) + field.encode() for field in ("files/1", *fields))
    return hashlib.sha256(joined).digest()[:16]


class PageFolder:
    """The files of one layout. They are in the folder of the current epoch of their namespace.

    The file `root/<namespace>/current` names that folder. A reset begins a new epoch with a new folder. So neither this
    process nor a later one finds the earlier files again. A process that shares the folder and was not reset goes on
    with the old folder, which is deleted. That process then has only misses, and never reads a wrong page.

    Only the owner may access these folders (0700). If an existing folder gives other users rights, the rights are
    removed. A folder that is a link, or that belongs to another user, is refused. If the root folder also contains
    other things, its rights are left as they are. Such a root is refused if other users may rename its contents. If a
    folder is deleted, the next write creates it again.

    Raises `InvalidParamsError` if this process cannot write there, or if other users could.
    """

    def __init__(self, root: Path, layout: FileFormat) -> None:
        self.layout = layout
        self._drafts = draft_names()
        self.refusals = FileRefusals()  # how many files were refused, by reason
        self._refused: set[str] = set()
        self._older: frozenset[str] = frozenset()  # the files that were in a joined folder before this process joined
        try:
            if root.is_symlink() and root.lstat().st_uid not in (os.geteuid(), 0):
                raise PermissionError(f"{root} is a link that belongs to user {root.lstat().st_uid}")
            self._root = root.resolve()
            self._home = self._root / layout.namespace.hex()
            self._make_home()
            self._epoch = self._read_epoch() or self._name_epoch(_new_epoch())
            self._make_epoch()
        except OSError as error:
            raise InvalidParamsError(f"file_tier_dir {str(root)!r} cannot be used: {error}") from error

    @property
    def path(self) -> Path:
        return self._home / self._epoch

    def renew(self) -> Path:
        """Begin a new epoch, or join the epoch that another process has begun.

        Returns the old folder, which is to be removed. Files that are already in a joined folder stay unknown: another
        process may have written them before this reset, with other weights.
        """
        before, current = self.path, self._read_epoch()
        self._older = frozenset()
        if current not in (None, self._epoch):
            self._epoch = current
            with contextlib.suppress(OSError):
                self._older = frozenset(list_folder(self.path))
            return before
        self._epoch = _new_epoch()
        try:
            self._make_home()
            self._name_epoch(self._epoch, replace=True)
            self._make_epoch()
        # A full disk is one possible cause. `current` is removed, so that the next start does not find the old files.
        except OSError as error:
            _log.warning("file tier: a reset could not record the name of its new folder: %s", error)
            with contextlib.suppress(OSError):
                (self._home / _CURRENT).unlink(missing_ok=True)
        return before

    def write(self, names: Digests, pages: Sequence[Sequence[Part]], io: PageIO) -> tuple[str, int]:
        """Write a file of these pages. Returns its name and size.

        If the folder was deleted or replaced, it is created again. If the call raises `OSError`, it leaves no file
        behind.
        """
        try:
            return write_pages(self.path, next(self._drafts), self.layout, names, pages, io)
        # The folder is gone, or another process took the draft for one that was left behind, and removed it. The second
        # cause is unlikely to occur twice.
        except (FileNotFoundError, NotADirectoryError):
            self._make_home()
            if self._read_epoch() is None:
                self._name_epoch(self._epoch)
            self._make_epoch()
            return write_pages(self.path, next(self._drafts), self.layout, names, pages, io)

    def scan(self, known: frozenset[str], *, first: bool = False) -> Scan:
        """Find the files that are not `known`, and remove broken files. Returns the changes.

        With `first`, also removes drafts that were left behind, and folders of old epochs.
        """
        if first:
            self._tidy()
        seen, found = set[str](), list[tuple[int, str, int, Digests]]()
        try:
            names = list_folder(self.path)
        except OSError:
            return Scan([], sorted(known))
        if first:
            remove_abandoned(self.path, names)
        for name in names:
            if not _FILE.fullmatch(name) or name in self._older:
                continue
            seen.add(name)
            if name not in known:
                found += self._look_at(name)
        found.sort(key=itemgetter(0, 1))
        return Scan([(name, size, digests) for _, name, size, digests in found], sorted(known - seen))

    @staticmethod
    def remove(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def _look_at(self, name: str) -> list[tuple[int, str, int, Digests]]:
        path = self.path / name
        try:
            status, found = path.lstat(), read_rows(path, self.layout)
        except FileNotFoundError:
            return []
        except OSError:
            found = FileRefusal.UNREADABLE
        else:
            if not isinstance(found, FileRefusal):
                return [(status.st_mtime_ns, name, self.layout.size_of(len(found)), found)]
            with contextlib.suppress(OSError):
                # Such a file was, for example, cut short by a crash. No other program uses names of this form.
                path.unlink()
        # Each refused file is counted once, although every scan finds a file that cannot be removed.
        if name not in self._refused:
            self._refused.add(name)
            self.refusals[found] += 1
        return []

    def _tidy(self) -> None:
        try:
            names = list_folder(self._home)
        except OSError:
            return
        remove_abandoned(self._home, names)
        current = self._read_epoch()
        for name in filter(_EPOCH.fullmatch, names):
            if current is not None and name not in (current, self._epoch):
                self.remove(self._home / name)

    def _make_home(self) -> None:
        if not self._root.exists():
            self._root.parent.mkdir(parents=True, exist_ok=True)
        _make_root(self._root)
        _make_own(self._home)

    def _make_epoch(self) -> None:
        """Create the folder of the epoch. If something else has this name, begin a new epoch."""
        try:
            _make_own(self.path)
        except (NotADirectoryError, PermissionError):
            self._epoch = self._name_epoch(_new_epoch(), replace=True)
            _make_own(self.path)

    def _read_epoch(self) -> str | None:
        try:
            with opened(self._home / _CURRENT) as file:
                name = os.read(file, 100).decode()
        except (OSError, UnicodeDecodeError):
            return None
        return name if _EPOCH.fullmatch(name) else None

    def _name_epoch(self, name: str, *, replace: bool = False) -> str:
        """Write the name of the epoch to `current`.

        If `replace` is False, and another process has written a name in the meantime, that name is kept.
        """
        for _ in range(_TRIES):
            # The error is raised if another process removed the draft before it was locked. Then the loop tries again.
            with contextlib.suppress(FileNotFoundError):
                return self._try_to_name(name, replace=replace)
            self._make_home()
        return self._try_to_name(name, replace=replace)

    def _try_to_name(self, name: str, *, replace: bool) -> str:
        draft, current = self._home / next(self._drafts), self._home / _CURRENT
        with open_draft(draft) as file:
            try:
                os.write(file, name.encode())
                if replace:
                    draft.replace(current)
                else:
                    os.link(draft, current)
            except FileExistsError:
                if named := self._read_epoch():
                    return named
                draft.replace(current)  # because `current` is broken
            finally:
                draft.unlink(missing_ok=True)
        return name


def _new_epoch() -> str:
    return f"epoch-{secrets.token_hex(8)}"


def _make_root(root: Path) -> None:
    """Create the root folder if it does not exist.

    Raises `OSError` if other users may rename its contents, because they could then replace our folders.
    """
    with contextlib.suppress(FileExistsError):
        root.mkdir(_OWN_FOLDER)
    status = root.stat()
    if status.st_uid == os.geteuid() and all(_HOME.fullmatch(name) for name in list_folder(root)):
        # A root with the sticky bit is meant to be shared, and the bit protects its contents.
        if not status.st_mode & stat.S_ISVTX:
            _make_own(root)
    elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users may rename its files: its mode is {stat.S_IMODE(status.st_mode):o}")


def _make_own(path: Path) -> None:
    """Create a folder that only its owner may access, or restrict the rights of an existing folder.

    Raises `OSError` if the path is a link, or another user's folder.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(_OWN_FOLDER)
    with opened_folder(path) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        if stat.S_IMODE(status.st_mode) != _OWN_FOLDER:
            os.fchmod(folder, _OWN_FOLDER)
