"""A file of pages is damaged in 10,000 ways. Each page is then read back unchanged, or it is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from kvcache.tiers.page_files import FileFormat, FileRefusal, FileRefusals, SystemIO, read_pages, read_rows, write_pages

COUNT, PAGE_BYTES, WORDS = 5, 96, 2
LAYOUT = FileFormat(bytes(range(16)), PAGE_BYTES, 8 * WORDS)


class Written:
    """A file of five pages, each in two parts, as with two shards."""

    def __init__(self, folder: Path, layout: FileFormat = LAYOUT) -> None:
        rng = np.random.default_rng(5)
        self.layout = layout
        self.digests = rng.integers(0, 1 << 63, (COUNT, WORDS), np.uint64)
        self.content = rng.integers(0, 256, (COUNT, PAGE_BYTES), np.uint8)
        pages = [[page[:40], page[40:]] for page in self.content]
        self.name, self.size = write_pages(folder, "0-0.tmp", layout, self.digests, pages, SystemIO())
        self.path = folder / self.name
        self.bytes = self.path.read_bytes()

    def put(self, content: bytes | bytearray) -> None:
        """Replaces the content of the file. The existing file is overwritten, because it takes milliseconds to make a
        new one.
        """
        with self.path.open("r+b") as file:
            file.write(content)
            file.truncate()

    def read(self, first: int = 0, count: int = COUNT, refusals: FileRefusals | None = None) -> np.ndarray:
        """Reads some pages of the file, and compares the accepted pages with the originals. Returns which pages were
        accepted.
        """
        filled = np.full((count, PAGE_BYTES), 0xAA, np.uint8)
        pages = [[page[:40], page[40:]] for page in filled]
        wanted = self.digests[first : first + count]
        found = read_pages(self.path, self.layout, first, wanted, pages, SystemIO())
        if refusals is not None:
            refusals.update(refusal for refusal in found if refusal)
        right = np.array([refusal is None for refusal in found])
        assert (filled[right] == self.content[first : first + count][right]).all(), "a wrong byte was returned"
        return right


def test_written_pages_are_read_back(tmp_path: Path) -> None:
    it = Written(tmp_path)
    assert it.read().all()
    assert it.read(2, 2).all()
    assert len(it.bytes) == it.size == LAYOUT.size_of(COUNT)
    assert LAYOUT.count_of(it.size) == COUNT
    digests = read_rows(it.path, LAYOUT)
    assert not isinstance(digests, FileRefusal)
    assert np.array_equal(digests, it.digests)
    assert [*tmp_path.iterdir()] == [it.path]


def test_a_flipped_byte_makes_its_page_or_the_file_refused(tmp_path: Path) -> None:
    it = Written(tmp_path)
    rng = np.random.default_rng(1)
    table = COUNT * PAGE_BYTES
    for at in range(it.size):
        for flip in (1, 0x80, int(rng.integers(1, 256)), int(rng.integers(1, 256))):
            broken = bytearray(it.bytes)
            broken[at] ^= flip
            it.put(broken)
            right = it.read()
            whole = read_rows(it.path, LAYOUT)
            if at < table:
                assert right.sum() == COUNT - 1
                assert not right[at // PAGE_BYTES]
            else:
                assert isinstance(whole, FileRefusal)
            if table <= at < table + COUNT * LAYOUT.row_bytes:
                assert not right[(at - table) // LAYOUT.row_bytes]


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    it = Written(tmp_path)
    rng = np.random.default_rng(2)
    for length in range(it.size + 2 * PAGE_BYTES):
        tail = rng.integers(0, 256, max(0, length - it.size), np.uint8).tobytes()
        it.put(it.bytes[:length] + tail)
        it.read()
        assert (not isinstance(read_rows(it.path, LAYOUT), FileRefusal)) == (length == it.size)


def test_random_damage(tmp_path: Path) -> None:
    """The random damage overwrites, moves, doubles or cuts out runs of bytes, and exchanges whole pages and records."""
    it = Written(tmp_path)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(6500):
        broken = bytearray(it.bytes)
        first, length = int(rng.integers(it.size)), int(rng.integers(1, 120))
        kind = int(rng.integers(6))
        if kind == 0:
            broken[first : first + length] = rng.integers(0, 256, length, np.uint8).tobytes()
        elif kind == 1:
            del broken[first : first + length]
        elif kind == 2:
            broken[first:first] = broken[first : first + length]
        elif kind == 3:
            broken[first : first + length] = bytes(len(broken[first : first + length]))
        else:  # This change exchanges two pages or two rows.
            size, start = (PAGE_BYTES, 0) if kind == 4 else (LAYOUT.row_bytes, COUNT * PAGE_BYTES)
            one, two = (start + int(at) * size for at in rng.choice(COUNT, 2, replace=False))
            broken[one : one + size], broken[two : two + size] = (
                broken[two : two + size],
                broken[one : one + size],
            )
        it.put(broken)
        refused += int((~it.read()).sum())
    assert refused > 6500


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    others = {
        "namespace": FileFormat(bytes(16), PAGE_BYTES, 8 * WORDS),
        "page": FileFormat(LAYOUT.namespace, PAGE_BYTES // 2, 8 * WORDS),
        "digest": FileFormat(LAYOUT.namespace, PAGE_BYTES + 8, 8 * WORDS - 8),
    }
    it = Written(tmp_path)
    for name, layout in others.items():
        assert isinstance(read_rows(it.path, layout), FileRefusal), name
        it.layout = layout
        if layout.page_bytes == PAGE_BYTES:
            assert not it.read().any()


def test_a_row_names_the_block_table_of_its_page(tmp_path: Path) -> None:
    layout = FileFormat(LAYOUT.namespace, PAGE_BYTES, 8 * WORDS, 3)
    digests, tables = np.arange(2 * WORDS, dtype=np.uint64).reshape(2, WORDS), np.array([2, 1])
    pages = [[np.full(PAGE_BYTES, at, np.uint8)] for at in range(2)]

    def written(tables: np.ndarray) -> Path:
        name, size = write_pages(tmp_path, "t.tmp", layout, layout.names(digests, tables), pages, SystemIO())
        assert size == layout.size_of(2) == (tmp_path / name).stat().st_size == LAYOUT.size_of(2) + 16
        return tmp_path / name

    names = read_rows(written(tables), layout)
    assert not isinstance(names, FileRefusal)
    found, of_tables = layout.digests_and_tables(names)
    assert (found.tolist(), of_tables.tolist()) == (digests.tolist(), [2, 1])
    for asked, refusals in ((tables, [None, None]), (tables[::-1], [FileRefusal.FOREIGN] * 2)):
        wanted = layout.names(digests, asked)
        assert read_pages(written(tables), layout, 0, wanted, pages, SystemIO()) == refusals
    assert read_rows(written(np.array([2, 3])), layout) is FileRefusal.FOREIGN  # The file has no such table.
    assert isinstance(read_rows(written(tables), LAYOUT), FileRefusal)


def test_a_page_is_refused_under_another_digest(tmp_path: Path) -> None:
    it = Written(tmp_path)
    it.digests = it.digests[::-1].copy()
    it.content = it.content[::-1].copy()
    assert it.read().tolist() == [False, False, True, False, False]  # The reversal leaves the middle page at its index.


@pytest.mark.parametrize("resealed", [False, True])
def test_two_rows_with_each_others_digests(tmp_path: Path, resealed: bool) -> None:
    """The rows of two pages have each other's digests. The checksums stay with their pages. With `resealed`, the footer
    matches the changed file.
    """
    it = Written(tmp_path)
    start, width = COUNT * PAGE_BYTES, LAYOUT.row_bytes
    broken, size = bytearray(it.bytes), LAYOUT.digest_bytes
    for at, other in ((1, 3), (3, 1)):
        from_row = start + other * width
        broken[start + at * width : start + at * width + size] = it.bytes[from_row : from_row + size]
    if resealed:
        rows = bytes(broken[start : start + COUNT * width])
        broken[start + COUNT * width :] = LAYOUT.footer(rows, COUNT)
    it.put(broken)
    refused = FileRefusals()
    assert it.read(refusals=refused).tolist() == [True, False, True, False, True]
    assert refused == {"foreign": 2}
    known = read_rows(it.path, LAYOUT)
    assert isinstance(known, FileRefusal) != resealed
    if not isinstance(known, FileRefusal):
        assert np.array_equal(known, it.digests[[0, 3, 2, 1, 4]])
        it.digests = known
        it.content = it.content[[0, 3, 2, 1, 4]]
        refused = FileRefusals()
        assert it.read(refusals=refused).tolist() == [True, False, True, False, True]
        assert refused == {"corrupted": 2}


def test_a_file_with_the_same_page_twice_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    page = rng.integers(0, 256, PAGE_BYTES, np.uint8)
    name, _ = write_pages(tmp_path, "t.tmp", LAYOUT, np.ones((2, WORDS), np.uint64), [[page], [page]], SystemIO())
    assert read_rows(tmp_path / name, LAYOUT) is FileRefusal.FOREIGN


@pytest.mark.parametrize("kind", ["pipe", "folder", "empty", "gone", "link to nothing"])
def test_something_that_is_not_a_page_file_is_refused(tmp_path: Path, kind: str) -> None:
    it = Written(tmp_path)
    it.path.unlink()
    if kind == "pipe":
        os.mkfifo(it.path)
    elif kind == "folder":
        it.path.mkdir()
    elif kind == "empty":
        it.path.touch()
    elif kind == "link to nothing":
        it.path.symlink_to(tmp_path / "nothing")
    assert not it.read().any()
    if kind in ("pipe", "empty"):
        assert isinstance(read_rows(it.path, LAYOUT), FileRefusal)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(SystemIO):
        def write(self, file: int, *_: object) -> None:
            os.write(file, b"the first bytes")
            raise OSError(28, "No space left on device")

    page = np.zeros(PAGE_BYTES, np.uint8)
    with pytest.raises(OSError, match="No space"):
        write_pages(tmp_path, "t.tmp", LAYOUT, np.ones((1, WORDS), np.uint64), [[page]], Full())
    assert [*tmp_path.iterdir()] == []


def test_short_reads_and_writes_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    write, read = os.pwritev, os.preadv

    def few(call: object, file: int, parts: list[np.ndarray], offset: int) -> int:
        left = int(rng.integers(1, 150))
        taken = []
        for part in parts:
            taken.append(part[:left])
            left -= len(taken[-1])
        return call(file, [part for part in taken if len(part)], offset)  # type: ignore[operator]

    monkeypatch.setattr(os, "pwritev", lambda *given: few(write, *given))
    monkeypatch.setattr(os, "preadv", lambda *given: few(read, *given))
    for _ in range(20):
        it = Written(tmp_path)
        assert it.read().all()


@pytest.mark.parametrize("wide", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o777])
def test_a_file_with_wider_rights_is_restricted_to_its_owner(tmp_path: Path, wide: int) -> None:
    it = Written(tmp_path)
    it.path.chmod(wide)
    assert not isinstance(read_rows(it.path, LAYOUT), FileRefusal)
    assert stat.S_IMODE(it.path.stat().st_mode) == 0o600
