"""Files of pages: their layout, and how they are written and read. A read returns either the right page or none.

A file holds a run of pages that were written together. After the pages come a record for each page, and a footer:

    page 0 │ page 1 │ … │ row 0 │ row 1 │ … │ footer
                          digest, checksum    magic, namespace, page bytes, count, checksums of rows and footer

If there are several block tables, each digest is followed by the index of the page's table.

A separate file for each page was rejected, because in the time that a new file takes, many pages can be written. The
pages come first in the file and have one size, so each page can be read alone. If a file was cut short, it does not
end with a footer.

A page's checksum covers the namespace, the digest and the page's bytes. So a page that lies in the place of another
page, or that belongs to another model, is refused in the same way as a corrupted page. Checksums protect only against
accidents: a user who may write to the folder can write any page with a matching checksum.

Only the owner may access the files, and no file is opened through a link. A *draft* is a file that is still being
written. No process reads it until it is complete. The writer of a draft holds a lock on the draft. The kernel releases
the lock when the writer's process exits, even if the process was killed. So a draft without a lock was left behind by a
process that was killed.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.pool.index import Digests
from kvcache.types import PageIO, Part

_MAGIC = b"pgwire/1"
_FOOTER = struct.Struct("<8s16sQII16s")
_SUM_BYTES = 16
_Move = Callable[[int, Sequence[Part], int], int]
_MOST_PARTS = 1024  # the largest number of buffers in one call of preadv or pwritev
_OWN_FILE = 0o600
"""The mode of all files, whatever the umask is. Only the owner may access them, because prompts can be derived from KV.
"""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# With O_NONBLOCK, opening does not wait if the name belongs to a pipe.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_DRAFT = re.compile(r"[0-9a-f]{16}-[0-9]+\.tmp")
_ABANDONED_S = 3600.0  # in seconds: on a file system without locks, a draft older than this counts as left behind


class FileRefusal(StrEnum):
    """The reason why a page or a file was refused."""

    GONE = "gone"  # there is no file or object of this name any more
    UNREADABLE = "unreadable"  # the name belongs to a link, a folder or a pipe, or a system call failed
    CUT = "cut"  # a file of pages cannot have this size, or the file ends before the page does
    FOREIGN = "foreign"  # the file has pages of another model or layout, or the digests differ from the expected ones
    CORRUPTED = "corrupted"  # the checksum does not match the page's content


FileRefusals = Counter[FileRefusal]


class SystemIO:
    """Reads and writes files with preadv and pwritev.

    In `benchmarks.tiers`, `SystemIO` was at least as fast as NIXL's POSIX plugin with each of its queues.
    """

    def write(self, file: int, parts: Sequence[Part], offset: int) -> None:
        _all_of(cast("_Move", os.pwritev), file, parts, offset)

    def read(self, file: int, parts: Sequence[Part], offset: int) -> None:
        _all_of(cast("_Move", os.preadv), file, parts, offset)


def _all_of(call: _Move, file: int, parts: Sequence[Part], offset: int) -> None:
    left = deque(parts)
    while left:
        done = call(file, [*itertools.islice(left, _MOST_PARTS)], offset)
        if not done:
            raise OSError(errno.EIO, f"{sum(map(len, left))} bytes are missing at {offset}")
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The layout of all files of one folder."""

    namespace: bytes  # 16 bytes that identify everything besides tokens on which the content of a page depends
    page_bytes: int  # the number of bytes of one page, on all shards together
    digest_bytes: int  # the number of bytes of one digest
    tables: int = 1  # the number of block tables

    @property
    def name_bytes(self) -> int:
        """The size of a page's name in its record, in bytes.

        The name is the page's digest, and with several tables also its table's index.
        """
        return self.digest_bytes + (8 if self.tables > 1 else 0)

    @property
    def row_bytes(self) -> int:
        return self.name_bytes + _SUM_BYTES

    def names(self, digests: Digests, tables: NDArray[np.integer[Any]]) -> Digests:
        """Returns the names of the pages with these digests in these block tables, uint64 `[pages, words]`."""
        return digests if self.tables == 1 else np.column_stack((digests, tables.astype(np.uint64)))

    def digests_and_tables(self, names: Digests) -> tuple[Digests, NDArray[np.intp]]:
        """Returns the digests and the block tables from which `names` made these names."""
        if self.tables == 1:
            return names, np.zeros(len(names), np.intp)
        return np.ascontiguousarray(names[:, :-1]), names[:, -1].astype(np.intp)

    def size_of(self, count: int) -> int:
        return count * (self.page_bytes + self.row_bytes) + _FOOTER.size

    def count_of(self, size: int) -> int:
        """Returns the number of pages in a file of `size` bytes; 0 if a file of pages cannot have that size."""
        count, rest = divmod(size - _FOOTER.size, self.page_bytes + self.row_bytes)
        return 0 if rest or count < 0 else count

    def most_in(self, size: int) -> int:
        return max(0, size - _FOOTER.size) // (self.page_bytes + self.row_bytes)

    def row(self, digest: bytes, parts: Sequence[Part]) -> bytes:
        """Returns the record of a page: its digest and its checksum."""
        running = xxhash.xxh3_128(self.namespace + digest)
        for part in parts:
            running.update(part)  # pyright: ignore[reportArgumentType] - any buffer will do
        return digest + running.digest()

    def judge(self, row: bytes, digest: bytes, parts: Sequence[Part]) -> FileRefusal | None:
        """Returns the reason why a page is refused, or None if it is the right page.

        `row` is the record of the page in its file, `digest` is the digest that it should have, and `parts` are its
        bytes.
        """
        if row[: self.name_bytes] != digest:
            return FileRefusal.FOREIGN
        return None if row == self.row(digest, parts) else FileRefusal.CORRUPTED

    def footer(self, rows: bytes, count: int) -> bytes:
        fields = (_MAGIC, self.namespace, self.page_bytes, count, self.name_bytes)
        covered = _FOOTER.pack(*fields, bytes(_SUM_BYTES))[:-_SUM_BYTES]
        return covered + xxhash.xxh3_128_digest(covered + rows)


def write_pages(
    folder: Path, draft: str, layout: FileFormat, names: Digests, pages: Sequence[Sequence[Part]], io: PageIO
) -> tuple[str, int]:
    """Write a file of pages. Its name is derived from its content. Returns its name and its size.

    Until the file is complete, its name is `draft`, and no reader opens it. The file is not synced to the disk. It
    survives if the process is killed. After a crash of the machine it may be damaged, which the checksums reveal. If
    the call raises `OSError`, it leaves no file behind. It raises `FileNotFoundError` if the folder or the draft is
    gone (see `open_draft`).
    """
    rows = b"".join(layout.row(name.tobytes(), parts) for name, parts in zip(names, pages, strict=True))
    name = xxhash.xxh3_128_hexdigest(layout.namespace + rows) + ".pages"
    path = folder / draft
    try:
        with open_draft(path) as file:
            io.write(file, [part for parts in pages for part in parts], 0)
            end = rows + layout.footer(rows, len(names))
            SystemIO().write(file, [np.frombuffer(end, np.uint8)], len(names) * layout.page_bytes)
            # closing a duplicate flushes the file, because a network file system may report a failed write only at
            # close
            os.close(os.dup(file))
            try:
                path.rename(folder / name)
            except IsADirectoryError:  # a folder has the name that the file should get
                name = f"{secrets.token_hex(16)}.pages"
                path.rename(folder / name)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return name, layout.size_of(len(names))


def read_rows(path: Path, layout: FileFormat) -> Digests | FileRefusal:
    """Returns the names of all pages in a file, uint64 `[pages, words]`. If the file is refused, returns the reason.

    If other users may access the file, their access rights are removed. Raises `OSError` if a system call fails.
    """
    with opened(path) as file:
        status = os.fstat(file)
        count = layout.count_of(status.st_size)
        start = count * layout.page_bytes
        end = os.pread(file, status.st_size - start, start) if count else b""
        if count and status.st_mode & 0o077:
            os.fchmod(file, _OWN_FILE)
    if not stat.S_ISREG(status.st_mode):
        return FileRefusal.UNREADABLE
    rows, footer = end[: count * layout.row_bytes], end[count * layout.row_bytes :]
    if not count or len(footer) != _FOOTER.size:
        return FileRefusal.CUT
    wanted = layout.footer(rows, count)
    if footer[:-_SUM_BYTES] != wanted[:-_SUM_BYTES]:
        return FileRefusal.FOREIGN
    if footer != wanted:
        return FileRefusal.CORRUPTED
    table = np.frombuffer(rows, np.uint8).reshape(count, -1)
    names = np.ascontiguousarray(table[:, : layout.name_bytes]).view(np.uint64)
    unknown = layout.tables > 1 and (names[:, -1] >= layout.tables).any()  # a block table that does not exist
    twice = len({name.tobytes() for name in names}) < len(names)
    return FileRefusal.FOREIGN if unknown or twice else names


def read_pages(
    path: Path, layout: FileFormat, first: int, names: Digests, pages: Sequence[Sequence[Part]], io: PageIO
) -> list[FileRefusal | None]:
    """Read pages of a file into the buffers `pages`, from its page number `first` on.

    Returns for each page the reason why it is refused, or None. `names` are the names that these pages must have. If a
    page is refused, the content of its buffers is undefined. Never raises.
    """
    width = layout.row_bytes
    try:
        with opened(path) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return [FileRefusal.UNREADABLE] * len(pages)
            count = layout.count_of(status.st_size)
            start = count * layout.page_bytes + first * width
            rows = os.pread(file, len(pages) * width, start) if first + len(pages) <= count else b""
            if len(rows) != len(pages) * width:
                return [FileRefusal.CUT] * len(pages)
            io.read(file, [part for parts in pages for part in parts], first * layout.page_bytes)
    except FileNotFoundError:
        return [FileRefusal.GONE] * len(pages)
    except OSError:
        return [FileRefusal.UNREADABLE] * len(pages)
    return [
        layout.judge(rows[at * width : (at + 1) * width], name.tobytes(), parts)
        for at, (name, parts) in enumerate(zip(names, pages, strict=True))
    ]


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[int]:
    """Open a folder, and yield its descriptor. Raises `OSError` if the path is a link."""
    folder = os.open(path, _FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(path: Path, flags: int = _TO_READ) -> Generator[int]:
    """Open a file, and yield its descriptor. Raises `OSError` if the file or its folder is a link."""
    with opened_folder(path.parent) as folder:
        file = os.open(path.name, flags, _OWN_FILE, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def list_folder(path: Path) -> list[str]:
    """Returns the names of all files in a folder. Raises `OSError` if the path is a link."""
    with opened_folder(path) as folder:
        return os.listdir(folder)  # noqa: PTH208 - a path could name another folder by now


def draft_names() -> Iterator[str]:
    """Yield names of drafts that no process has used before. Any thread may take names from the iterator."""
    return map(f"{secrets.token_hex(8)}-{{}}.tmp".format, itertools.count())


@contextlib.contextmanager
def open_draft(path: Path) -> Generator[int]:
    """Create a draft that only its owner may access, and yield its descriptor.

    The draft is locked until the descriptor is closed. Just before the draft is locked, another process may take it for
    an abandoned draft, and remove it. Renaming the draft then raises `FileNotFoundError`, and the writer must begin
    again under another name. Raises `OSError` if the file cannot be created.
    """
    with opened(path, _TO_WRITE) as file:
        os.fchmod(file, _OWN_FILE)
        _lock(file)
        yield file


def remove_abandoned(folder: Path, names: list[str]) -> None:
    """Remove each draft among the files `names` in `folder` whose writer process has exited. Never raises.

    A writer keeps its draft locked. On a file system without locks, a draft is removed if it is older than an hour.
    """
    for path in [folder / name for name in names if _DRAFT.fullmatch(name)]:
        with contextlib.suppress(OSError), opened(path, _TO_LOCK) as file:
            locked = _lock(file)
            if locked or (locked is None and time.time() - os.fstat(file).st_mtime > _ABANDONED_S):
                path.unlink()


def _lock(file: int) -> bool | None:
    """Try to lock the file. Returns whether it is locked now, or None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
