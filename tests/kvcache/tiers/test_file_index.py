"""Which file goes for which, and which pages are found in those that stay."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.pool.index import Digests
from kvcache.tiers.file_index import NO_ENTRY, FileIndex


def digests(*numbers: int) -> Digests:
    return np.array([[number, number * 7] for number in numbers], np.uint64)


def index(*files: tuple[str, int, tuple[int, ...]], max_bytes: int = 100) -> FileIndex:
    """Files of pages of 10 bytes; each name with its bytes and pages."""
    made = FileIndex(max_bytes, 10, 2)
    for name, size, pages in files:
        assert made.room_for(size) == []
        made.add(name, size, digests(*pages))
    made.check()
    return made


@pytest.mark.parametrize(
    ("size", "gone"), [(30, []), (31, ["a"]), (50, ["a"]), (51, ["a", "b"]), (200, ["a", "b", "c"])]
)
def test_a_file_that_fits_evicts_nothing_and_one_that_does_not_no_more_than_it_needs(
    size: int, gone: list[str]
) -> None:
    made = index(("a", 20, (1,)), ("b", 20, (2,)), ("c", 30, (3,)))
    assert made.room_for(size) == gone
    assert made.names == {"a", "b", "c"} - {*gone}
    assert made.bytes == 70 - 20 * len(gone[:2]) - 30 * len(gone[2:])
    assert (made.find(digests(1, 2, 3)) == NO_ENTRY).tolist() == [name in gone for name in "abc"]
    made.check()


def test_the_least_recently_used_goes_first_and_use_of_one_page_is_use_of_its_file() -> None:
    made = index(("a", 30, (1, 2, 3)), ("b", 30, (4,)), ("c", 30, (5,)))
    made.use(made.find(digests(2)))
    made.use(made.find(digests(4)))
    assert made.room_for(20) == ["c"]
    assert made.room_for(50) == ["a"]
    made.check()


def test_pages_side_by_side_in_a_file_are_one_run_and_no_others() -> None:
    made = index(("a", 40, (1, 2, 3, 4)), ("b", 40, (5, 6, 7)))
    entries = made.find(digests(1, 2, 4, 3, 5, 6, 7))
    runs = [(name, first, at.tolist()) for name, first, at in made.whereabouts(entries)]
    assert runs == [("a", 0, [0, 1]), ("a", 3, [2]), ("a", 2, [3]), ("b", 0, [4, 5, 6])]
    assert made.whereabouts(entries[:0]) == []


def test_a_page_of_two_files_is_found_in_the_first_and_goes_with_it() -> None:
    made = index(("a", 20, (1, 2)), ("b", 30, (2, 3)))
    assert [name for name, _, _ in made.whereabouts(made.find(digests(2)))] == ["a"]
    made.forget("a")
    made.forget("a")
    made.check()
    assert (made.find(digests(1, 2, 3)) == NO_ENTRY).tolist() == [True, True, False]
    assert (made.bytes, made.names) == (30, {"b"})


def test_a_file_that_is_written_again_is_counted_once_with_its_new_pages() -> None:
    made = index(("a", 30, (1, 2)))
    made.add("a", 20, digests(2, 9))
    made.check()
    assert (made.bytes, made.names) == (20, {"a"})
    assert (made.find(digests(1, 2, 9)) == NO_ENTRY).tolist() == [True, False, False]


def test_pages_that_are_dropped_leave_the_others_of_their_file() -> None:
    made = index(("a", 30, (1, 2, 3)))
    made.drop(made.find(digests(2)))
    made.check()
    assert (made.find(digests(1, 2, 3)) == NO_ENTRY).tolist() == [False, True, False]
    assert [(first, at.tolist()) for _, first, at in made.whereabouts(made.find(digests(1, 3)))] == [(0, [0]), (2, [1])]
    assert made.pages.match(digests(1, 2, 3)).size == 1
    assert made.pages.match(digests(2, 3)).size == 0
    made.clear()
    made.check()
    assert (made.bytes, made.names, "a" in made) == (0, set(), False)
    made.add("b", 10, digests(*range(20, 30)))
    made.check()


def test_check_names_bytes_that_do_not_add_up() -> None:
    made = index(("a", 30, (1, 2, 3)))
    made.bytes = 20
    with pytest.raises(InvariantError, match="file tier: its files have 30 bytes; 20 are counted and 100 allowed"):
        made.check()
