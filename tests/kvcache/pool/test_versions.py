"""The numbers of the versions of pages say which pages are old, and how many are."""

from __future__ import annotations

import numpy as np

from kvcache.pool.versions import NO_VERSION, PageVersions, SeveralVersions


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)


def old(versions: PageVersions) -> list[int]:
    return [page for page in range(5) if versions.are_old(ids(page))[0]]


def test_before_a_switch_all_pages_are_of_the_first_version_and_none_is_old() -> None:
    versions = PageVersions()
    versions.name(ids(1), 0)
    versions.use(ids(1))
    versions.moved(ids(1), ids(2))
    assert not versions.differ
    assert versions.numbers(ids(3, 4)).tolist() == [0, 0]
    assert versions.are_old(ids(3, 4)).tolist() == [False, False]
    assert versions.num_older(np.ones(5, np.bool_)) == 0


def test_a_page_is_old_that_was_computed_and_last_used_under_other_versions() -> None:
    versions, all_pages = SeveralVersions(4), np.ones(5, np.bool_)
    assert versions.differ
    assert (old(versions), versions.num_older(all_pages)) == ([], 0)
    versions.begin(1)
    assert old(versions) == [0, 1, 2, 3, 4]
    versions.changed(ids(1), True, 0)
    versions.use(ids(2))
    versions.changed(ids(3), False, 0)
    assert old(versions) == [0, 3, 4]
    assert versions.numbers(ids(*range(5))).tolist() == [0, 1, 0, 0, 0]
    assert versions.num_older(all_pages) == 4
    assert versions.num_older(np.array([False, True, True, False, False])) == 1
    versions.moved(ids(1, 2), ids(3, 4))
    assert old(versions) == [0]
    assert versions.numbers(ids(3, 4)).tolist() == [1, 0]
    versions.begin(2)
    assert old(versions) == [0, 1, 2, 3, 4]
    versions.name(ids(4), 2)
    assert old(versions) == [0, 1, 2, 3]
    versions.begin(0)
    assert old(versions) == [1, 3, 4], "page 2 was computed under this version, although another one has used it"


def test_pages_of_no_version_are_old_under_each() -> None:
    versions = SeveralVersions(4)
    versions.name(ids(2), NO_VERSION)
    for number in (0, 1, 2):
        versions.begin(number)
        assert 2 in old(versions)
        assert versions.num_older(np.array([False, False, True, False, False])) == 1
