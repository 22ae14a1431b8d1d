"""The index also records the first word of a page's digest and the index of the page's block table. `clear` removes all
entries.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import InvariantError
from kvcache.pool.index import Digests, Pages, PrefixIndex

DIGESTS = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)


def pages(*ids: int) -> Pages:
    return np.array(ids, np.int32)


def index_of(published: Pages, digests: Digests = DIGESTS) -> PrefixIndex:
    index = PrefixIndex(8, 2)
    index.publish(published, digests[: len(published)])
    return index


def test_the_first_word_of_a_digest_is_still_known_after_its_page_is_gone() -> None:
    index = index_of(pages(5, 2, 7))
    assert index.words_of(pages(7, 5)).tolist() == [5, 1]
    index.withdraw_one(7)
    assert index.words_of(pages(7)).tolist() == [5]


def test_a_sample_has_the_published_pages_whose_word_has_none_of_its_bits() -> None:
    index = index_of(pages(5, 2, 7, 1))  # The pages have the words 1, 3, 5 and 7.
    assert index.published_words(np.uint64(0)).tolist() == [1, 2, 5, 7]
    assert index.published_words(np.uint64(2)).tolist() == [5, 7]
    index.withdraw_one(7)
    assert index.published_words(np.uint64(2)).tolist() == [5]


def test_after_a_clear_nothing_is_found_and_everything_can_be_published_again() -> None:
    index = index_of(pages(5, 2, 7))
    before = index.generation
    index.clear()
    assert index.generation > before, "an earlier match must not be used again"
    assert not index.published.any()
    assert index.find(DIGESTS).tolist() == [0] * 4
    index.check()
    index.publish(pages(2, 5), DIGESTS[:2])
    assert index.find(DIGESTS).tolist() == [2, 5, 0, 0]
    index.check()


def test_a_chain_that_has_no_end_is_named() -> None:
    digests = DIGESTS.copy()
    digests[:, 0] = (8, 16, 24, 32)
    index = index_of(pages(1, 2, 3), digests)
    index._links[1:4] = np.roll(np.arange(1, 4), -1)  # pyright: ignore[reportPrivateUsage]
    index._heads[0] = 1  # pyright: ignore[reportPrivateUsage]
    index._before[[2, 3, 1]] = 1, 2, 3  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(InvariantError, match="3 pages are published, but the chains have 4"):
        index.check()
