from __future__ import annotations

import numpy as np

from kvcache.pool.pages import PagePool


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_what_a_release_would_free_is_what_it_frees() -> None:
    """Pages of one holder and of two, with a writer and without, published and not."""
    pool = PagePool(20, 2)
    held = pool.allocate(8)
    pool.index.publish(held[::2], np.arange(1, 9, dtype=np.uint64).reshape(4, 2))
    pool.hold(held[4:])
    pool.add_writer(held[2:6])
    assert pool.would_be_freed(held) == 2
    assert pool.would_be_freed(held[4:]) == 0
    assert pool.would_be_freed(pages()) == 0
    before = pool.free_count
    pool.release(held)
    assert pool.free_count == before + 2
    assert pool.would_be_taken(held) == 2
    assert pool.would_be_freed(held[4:]) == 2  # of the four with one holder two are being written
    pool.drop_writer(held[2:6])
    assert pool.would_be_freed(held) == 4
    assert pool.would_be_taken(held) == 4


def test_a_page_that_nobody_holds_but_a_transfer_writes_is_not_idle_and_may_be_held() -> None:
    pool = PagePool(8, 2)
    held = pool.allocate(3)
    pool.index.publish(held, np.arange(1, 7, dtype=np.uint64).reshape(3, 2))
    pool.add_writer(held[1:2])
    pool.release(held)
    assert sorted(pool.idle.pages().tolist()) == [held[0], held[2]]
    pool.hold(held)
    assert pool.idle.count == 0
    pool.release(held)
    pool.drop_writer(held[1:2])
    pool.check(np.zeros(9, np.int64), np.zeros(9, np.int64))
    assert pool.idle.count == 3
