"""The file that is removed to make room for another file, and the pages that are found in the remaining files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.pool.index import Digests
from kvcache.tiers.file_tier import NO_ENTRY, FileIndex

ONE_TABLE = np.array(0)


def digests(*numbers: int) -> Digests:
    return np.array([[number, number * 7] for number in numbers], np.uint64).reshape(-1, 2)


def index(*files: tuple[str, int, tuple[int, ...]], max_bytes: int = 100) -> FileIndex:
    """Returns an index of files with pages of 10 bytes. For each file, `files` has its name, its size in bytes, and its
    pages.
    """
    made = FileIndex(max_bytes, 10, 2)
    for name, size, pages in files:
        assert made.room_for(size) == []
        made.add(name, size, digests(*pages), ONE_TABLE)
    made.check()
    return made


def test_only_adjacent_pages_of_a_file_are_read_in_one_run() -> None:
    made = index(("a", 40, (1, 2, 3, 4)), ("b", 40, (5, 6, 7)))
    entries = made.find(digests(1, 2, 4, 3, 5, 6, 7))
    runs = [(name, first, at.tolist()) for name, first, at in made.whereabouts(entries)]
    assert runs == [("a", 0, [0, 1]), ("a", 3, [2]), ("a", 2, [3]), ("b", 0, [4, 5, 6])]
    assert made.whereabouts(entries[:0]) == []


def test_a_page_in_two_files_is_found_in_the_first_one_and_is_lost_with_it() -> None:
    made = index(("a", 20, (1, 2)), ("b", 30, (2, 3)))
    assert [name for name, _, _ in made.whereabouts(made.find(digests(2)))] == ["a"]
    made.forget("a")
    made.forget("a")
    made.check()
    assert (made.find(digests(1, 2, 3)) == NO_ENTRY).tolist() == [True, True, False]
    assert (made.bytes, made.names) == (30, {"b"})


def test_a_file_that_is_written_again_is_counted_once_with_its_new_pages() -> None:
    made = index(("a", 30, (1, 2)))
    made.add("a", 20, digests(2, 9), ONE_TABLE)
    made.check()
    assert (made.bytes, made.names) == (20, {"a"})
    assert (made.find(digests(1, 2, 9)) == NO_ENTRY).tolist() == [True, False, False]


def test_check_names_bytes_that_do_not_add_up() -> None:
    made = index(("a", 30, (1, 2, 3)))
    made.bytes = 20
    with pytest.raises(
        InvariantError, match="file tier: its files have 30 bytes, but 20 are counted and 100 are allowed"
    ):
        made.check()


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("_names", 1, "b", "a and its entries do not refer to each other"),
        ("_file_of", 2, 7, "and its entries do not refer to each other"),
        ("_index_of", slice(None), 1, "the entries of a have wrong positions of pages"),
        ("_max_bytes", None, 49, "its files have 50 bytes, but 50 are counted and 49 are allowed"),
    ],
)
def test_check_names_what_does_not_fit(column: str, at: Any, value: object, message: str) -> None:
    made = index(("a", 30, (1, 2, 3)), ("b", 20, (4, 5)))
    if at is None:
        setattr(made, column, value)
    else:
        getattr(made, column)[at] = value
    with pytest.raises(InvariantError, match=f"file tier: .*{message}"):
        made.check()


def test_check_names_an_entry_that_no_file_holds() -> None:
    made = index(("a", 30, (1, 2, 3)))
    made._pool.allocate(1)
    with pytest.raises(InvariantError, match="file tier: page 4 has 1 holders, but 0 are counted"):
        made.check()


def test_check_names_a_page_of_a_file_that_cannot_be_found() -> None:
    made = index(("a", 30, (1, 2, 3)))
    made.pages.withdraw_one(2)
    with pytest.raises(InvariantError, match="its files have 3 entries, but the index has 2 entries"):
        made.check()


def test_a_page_of_several_tables_keeps_its_table_and_a_mark_ends_with_a_clear() -> None:
    made = FileIndex(100, 10, 2)
    made.add("a", 30, digests(1, 2, 3), np.array([0, 2, 1]))
    entries = made.find(digests(2, 3))
    assert made.pages.tables[entries].tolist() == [2, 1]
    made.reading[entries] = True
    made.clear()
    assert not made.reading.any()


def test_entries_of_evicted_files_are_used_again() -> None:
    made = index(("a", 50, (1, 2, 3, 4, 5)))
    for turn in range(1, 30):
        pages = range(10 * turn, 10 * turn + 5)
        assert made.room_for(50) == ([] if turn == 1 else [f"{turn - 2}"] if turn > 2 else ["a"])
        made.add(f"{turn}", 50, digests(*pages), ONE_TABLE)
        made.check()
        assert (made.find(digests(*pages)) != NO_ENTRY).all()
        assert f"{turn}" in made


class PlainIndex:
    """A model of `FileIndex` made of plain lists. For each file it has the size, and the pages that are found in it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.files: dict[str, tuple[int, list[int | None]]] = {}  # least recently used first

    def place_of(self, page: int) -> tuple[str, int] | None:
        found = ((name, pages.index(page)) for name, (_, pages) in self.files.items() if page in pages)
        return next(found, None)

    def use(self, pages: list[int]) -> None:
        """Moves the used files to the end, in the order in which they were added. Their names are numbers."""
        for name in sorted({place[0] for page in pages if (place := self.place_of(page))}, key=int):
            self.files[name] = self.files.pop(name)

    def room_for(self, size: int) -> list[str]:
        gone: list[str] = []
        while self.files and sum(one for one, _ in self.files.values()) + size > self.max_bytes:
            gone.append(next(iter(self.files)))
            del self.files[gone[-1]]
        return gone

    def add(self, name: str, size: int, pages: list[int]) -> None:
        self.files[name] = size, [page if self.place_of(page) is None else None for page in pages]


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_of_an_index_are_those_of_plain_lists(seed: int) -> None:
    random, made, plain = np.random.default_rng(seed), FileIndex(300, 10, 2), PlainIndex(300)
    for move in range(300):
        pages = random.choice(40, int(random.integers(1, 8)), replace=False).tolist()
        entries = made.find(digests(*pages))
        places = [plain.place_of(page) for page in pages]
        assert (entries != NO_ENTRY).tolist() == [place is not None for place in places]
        entries, found = (
            entries[entries != NO_ENTRY],
            [page for page, place in zip(pages, places, strict=True) if place],
        )
        match int(random.integers(5)):
            case 0 | 1:
                size = int(random.integers(10 * len(pages), 100))
                assert made.room_for(size) == plain.room_for(size)
                made.add(f"{move}", size, digests(*pages), ONE_TABLE)
                plain.add(f"{move}", size, pages)
            case 2:
                made.use(entries)
                plain.use(found)
            case 3:
                made.drop(entries)
                for page in found:
                    name, at = plain.place_of(page) or ("", 0)
                    plain.files[name][1][at] = None
            case _:
                name = str(random.integers(move + 1))
                assert (name in made) == (name in plain.files)
                made.forget(name)
                plain.files.pop(name, None)
        made.check()
        assert list(made._files) == list(plain.files)
        assert made.names == plain.files.keys() == {*made._names.values()}, "a file that is gone leaves nothing behind"
        assert made.bytes == sum(size for size, _ in plain.files.values())
        there = [page for page in range(40) if plain.place_of(page)]
        runs = made.whereabouts(made.find(digests(*there)))
        assert [(name, first + at) for name, first, run in runs for at in range(len(run))] == [
            plain.place_of(page) for page in there
        ]
