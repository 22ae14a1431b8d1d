from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import InvariantError
from kvcache.pool.index import NO_PAGE, PrefixIndex
from kvcache.pool.journal import PageReader
from tests.kvcache.random_model.interrupts import interrupted


def digests(*names: int, words: int = 4, bucket: int | None = None) -> np.ndarray:
    """Returns a digest for each name. With `bucket`, all digests belong to this bucket."""
    found = np.random.default_rng(5).integers(1, 1 << 63, (1000, words), np.uint64)[list(names)]
    if bucket is not None:
        found[:, 0] = bucket
        found[:, 1] = names
    return found


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_match_is_the_longest_run_from_the_first() -> None:
    index = PrefixIndex(20, 4)
    index.publish(pages(3, 5, 8), digests(0, 1, 2))
    assert index.match(digests(0, 1, 2)).tolist() == [3, 5, 8]
    assert index.match(digests(0, 1, 9)).tolist() == [3, 5]
    assert index.match(digests(9, 1, 2)).tolist() == []
    assert index.match(digests(0, 9, 2)).tolist() == [3]
    assert index.find(digests(0, 9, 2)).tolist() == [3, NO_PAGE, 8]
    assert index.find(digests()).tolist() == []


def test_may_have_answers_by_the_first_word() -> None:
    index = PrefixIndex(20, 4)
    everything = digests(*range(12))
    everything[:4, 0] += np.uint64(32) - everything[:4, 0] % np.uint64(32)
    index.publish(pages(1, 2, 3), everything[:3])
    index.publish(pages(4), everything[9:10])
    assert [index.may_have(digest) for digest in everything] == [at in (0, 1, 2, 9) for at in range(12)]


def test_the_page_published_first_stays_if_two_have_the_same_content() -> None:
    index = PrefixIndex(20, 4)
    index.publish(pages(3), digests(0))
    assert index.publish(pages(7, 8), digests(0, 1)).tolist() == [3, 8]
    assert index.published.nonzero()[0].tolist() == [3, 8]
    assert index.publish(pages(3), digests(0)).tolist() == [3]


@pytest.mark.parametrize("words", [2, 4])
def test_a_hit_compares_the_whole_digest(words: int) -> None:
    index = PrefixIndex(20, words)
    assert index.digest_words == words
    one = digests(0, words=words)
    index.publish(pages(1), one)
    for word in range(words):
        for bit in range(64):
            other = one.copy()
            other[0, word] ^= np.uint64(1) << np.uint64(bit)
            assert index.find(other).tolist() == [NO_PAGE]


def test_no_chain_is_followed_for_pages_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(20, 4)
    everything = digests(*range(8))
    everything[2:, 0] = np.arange(6) * 32
    index.publish(pages(1, 2, 3), everything[[0, 1, 2]])
    monkeypatch.setattr(PrefixIndex, "_find_exactly", lambda *_: pytest.fail("two digests share their first word"))
    assert index.find(everything).tolist() == [1, 2, 3, *[NO_PAGE] * 5]


def test_digests_that_share_their_first_word_are_told_apart() -> None:
    index = PrefixIndex(50, 4)
    everything = digests(*range(6), bucket=3)
    assert len(np.unique(everything[:, 0])) == 1
    index.publish(pages(1, 2), everything[:2])
    assert index.find(everything).tolist() == [1, 2, 0, 0, 0, 0]
    assert index.publish(pages(3, 4, 5, 6), everything[2:]).tolist() == [3, 4, 5, 6]
    assert index.find(everything[::-1]).tolist() == [6, 5, 4, 3, 2, 1]


def test_one_crowded_bucket_can_be_filled_and_emptied_in_any_order() -> None:
    index = PrefixIndex(50, 4)
    rng = np.random.default_rng(0)
    everything = digests(*range(50), bucket=3)
    for _ in range(20):
        order = rng.permutation(50)
        index.publish(pages(*(order + 1)), everything[order])
        index.check()
        gone = rng.permutation(50)[: rng.integers(1, 50)]
        index.withdraw_one(int(gone[0] + 1))
        index.check()
        index.withdraw(pages(*(gone[1:] + 1)))
        index.check()
        assert (index.find(everything) == NO_PAGE).nonzero()[0].tolist() == sorted(gone.tolist())
        index.withdraw(pages(*(set(range(1, 51)) - set((gone + 1).tolist()))))


@pytest.mark.parametrize(("num_pages", "buckets"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32)])
def test_there_are_as_many_chains_as_pages_and_every_bit_of_a_digest_chooses_one(num_pages: int, buckets: int) -> None:
    index = PrefixIndex(num_pages, 1)
    words = np.arange(num_pages, dtype=np.uint64) + np.uint64(num_pages * buckets)
    index.publish(np.arange(1, num_pages + 1, dtype=np.int32), words.reshape(-1, 1))
    assert len(index._heads) == buckets
    assert np.count_nonzero(index._heads) == num_pages


def test_a_long_chain_is_followed_to_its_end() -> None:
    index = PrefixIndex(50, 4)
    everything = digests(*range(60))
    everything[:, 0] = np.arange(60) * 64 + 3
    order = np.random.default_rng(0).permutation(60)
    index.publish(np.arange(1, 51, dtype=np.int32), everything[order[:50]])
    index.check()
    pages_of = dict(zip(order[:50].tolist(), range(1, 51), strict=True))
    assert index.find(everything).tolist() == [pages_of.get(name, NO_PAGE) for name in range(60)]
    assert [index.may_have(digest) for digest in everything] == [name in pages_of for name in range(60)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 39), unique=True)), max_size=30))
def test_any_sequence_equals_a_dict(moves: list[tuple[bool, list[int]]]) -> None:
    index, known, told = PrefixIndex(40, 4), dict[int, int](), dict[int, list[int]]()
    everything = digests(*range(40))
    everything[::3, 0] = 7  # Every third digest falls into the same bucket.

    class Reader(PageReader):
        def changed(self, pages: Any, come: bool, digests: Any) -> None:
            if isinstance(pages, int):
                assert (told.pop(pages)[-1], come) == (digests, False)
                return
            for page, digest in zip(pages.tolist(), digests.tolist(), strict=True):
                if come:
                    assert page not in told
                    told[page] = digest
                else:
                    assert told.pop(page) == digest

    index.journal.read(Reader())
    for add, names in moves:
        if add:
            free = [page for page in range(1, 41) if page not in known.values()]
            taken = {name: free.pop() for name in names if name not in known}
            if taken:
                index.publish(pages(*taken.values()), everything[list(taken)])
            known.update(taken)
        else:
            gone = [known.pop(name) for name in names if name in known]
            index.withdraw(pages(*gone[1:]))
            for page in gone[:1]:
                index.withdraw_one(page)
        index.check()
        assert index.find(everything).tolist() == [known.get(name, NO_PAGE) for name in range(40)]
        assert told == {page: everything[name].tolist() for name, page in known.items()}


def test_generation_counts_changes_only() -> None:
    index = PrefixIndex(8, 4)
    start = index.generation
    index.find(digests(1))
    index.withdraw(pages())
    assert index.generation == start
    index.publish(pages(1), digests(1))
    assert index.generation > start
    start = index.generation
    index.publish(pages(2), digests(1))
    assert index.generation == start
    index.withdraw(pages(1))
    assert index.generation > start
    index.publish(pages(1), digests(1))
    start = index.generation
    index.withdraw_one(1)
    assert index.generation > start


def test_check_names_a_broken_link() -> None:
    index = PrefixIndex(8, 4)
    index.publish(pages(1, 2, 3), digests(0, 1, 2, bucket=1))
    index._links[: index._first] = 0
    with pytest.raises(InvariantError, match="is published, but its digest finds page 0"):
        index.check()
    index = PrefixIndex(8, 4)
    index.publish(pages(1, 2, 3), digests(0, 1, 2, bucket=1))
    index._before[2] = index._before[1]
    with pytest.raises(InvariantError, match="page 2 is published, but link"):
        index.check()
    index = PrefixIndex(8, 4)
    index.publish(pages(1), digests(0))
    index.published[1] = False
    with pytest.raises(InvariantError, match="0 pages are published, but the chains have 1"):
        index.check()


def test_a_page_that_is_not_published_cannot_be_withdrawn() -> None:
    for gone in (pages(3), pages(3, 1)):
        index = PrefixIndex(8, 4)
        index.publish(pages(1, 2, 3), digests(0, 1, 2, bucket=1))
        index.withdraw_one(3)
        with pytest.raises(InvariantError, match="page 3 is not in the chain"):
            index.withdraw_one(3)
        with pytest.raises(InvariantError, match="page 3 is not in the chain"):
            index.withdraw(gone)
    index = PrefixIndex(40, 4)
    index.publish(np.arange(1, 41, dtype=np.int32), digests(*range(40), bucket=3))
    behind = np.flatnonzero(index._before[1:] < 41).astype(np.int32) + 1
    index.clear()
    with pytest.raises(InvariantError, match="is not in the chain"):
        index.withdraw(behind)  # The list has more pages than `withdraw` removes one by one.


def test_a_renamed_page_counts_neither_as_added_nor_as_removed() -> None:
    index, told = PrefixIndex(8, 1), list[object]()

    class Reader(PageReader):
        def changed(self, pages: object, come: bool, digests: object) -> None:
            told.append((pages, come, digests))

    digests = np.arange(1, 4, dtype=np.uint64).reshape(-1, 1)
    index.publish(np.array([1, 2, 3], np.int32), digests)
    index.journal.read(Reader())
    generation = index.generation
    index.rename(np.array([2, 3], np.int32), np.array([7, 5], np.int32))
    assert index.find(digests).tolist() == [1, 7, 5]
    assert index.generation > generation, "a caller with a remembered match has to look it up again"
    assert told == []
    index.check()
    index.withdraw_one(7)
    assert told == [(7, False, 2)]


def test_after_an_interrupt_all_published_pages_are_linked_again() -> None:
    index = PrefixIndex(8, 4)
    index.publish(pages(1, 2, 3), digests(0, 1, 2, bucket=1))
    index.publish(pages(4, 5), digests(3, 4))
    generation = index.generation
    index._links[:], index._before[:] = 3, 7
    index.rebuild()
    index.check()
    assert index.find(digests(0, 1, 2, bucket=1)).tolist() == [1, 2, 3]
    assert index.find(digests(3, 4, 5)).tolist() == [4, 5, 0]
    assert index.generation > generation, "a caller with a remembered match has to look it up again"
    index.withdraw(pages(2, 4))
    index.check()
    assert index.find(digests(0, 1, 2, bucket=1)).tolist() == [1, 0, 3]


def test_a_rebuild_that_is_interrupted_forgets_nothing_that_is_published() -> None:
    interrupts = 0
    for at in count(1):
        index = PrefixIndex(8, 4)
        index.publish(pages(2, 3, 5), digests(0, 1, 2))
        _, _, done = interrupted(index.rebuild, at, KeyboardInterrupt)
        index.rebuild()
        index.check()
        assert index.find(digests(0, 1, 2)).tolist() == [2, 3, 5], f"after bytecode {at}"
        if not done:
            break
        interrupts += 1
    assert interrupts > 30
