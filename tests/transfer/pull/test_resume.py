"""A pull fails half way and continues from another source with the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcache.replica.block_table import PageCopy
from tests.transfer.replicas import TOKENS, Engine, run
from transfer.pull.replica import LeaseOver

OURS, FIRST, SECOND = [3, 9, 1, 12], [5, 2, 8, 14], [7, 6, 11, 4]


def chunk(theirs: list[int], at: int) -> list[PageCopy]:
    return [PageCopy(OURS[at : at + 1], theirs[at : at + 1], (at * TOKENS, (at + 1) * TOKENS))]


def test_pages_that_passed_are_kept_and_only_the_rest_is_pulled_from_another_source(
    engine: Callable[..., Engine],
) -> None:
    first, second, reader = engine("p", 2), engine("q"), engine("d", 2)
    for pool, at in ((first.pools[0], 0), (first.pools[1], 2)):  # Both sources hold the same tokens.
        pool[FIRST] = second.pools[0][SECOND][:, at : at + 2]
    reader.blank()
    lease = first.offer()
    reader.replica.pull("r", first.source(lease), 60.0)
    for at in range(2):
        reader.replica.add_pages("r", chunk(FIRST, at), last=False)
    run(first, reader, until=lambda: reader.replica.look_up("r").passed == 2)
    first.replica.revoke(lease.lease_id, "aborted")
    for pool in first.pools:
        pool[FIRST] = 0xAB  # The source has reused the pages for another prompt.
    reader.replica.add_pages("r", chunk(FIRST, 2), last=False)
    run(first, reader, until=lambda: reader.pulls and reader.pulls[-1].safe)
    failed = reader.pulls[-1]
    assert "no longer held the pages" in failed.error
    assert failed.passed == 2

    again = second.offer("s")
    reader.replica.pull("s", second.source(again), 60.0)
    for at in range(failed.passed, 4):
        reader.replica.add_pages("s", chunk(SECOND, at), last=at == 3)
    run(second, reader, until=lambda: reader.pulls[-1].key == "s" and second.of(LeaseOver))
    assert reader.pulls[-1].error == ""
    assert np.array_equal(reader.heads(OURS), second.heads(SECOND))
    page_bytes = second.pools[0][0].nbytes
    # The count has only the bytes of the second pull.
    assert sum(record.num_bytes for record in reader.replica.stats._last) == 2 * page_bytes
