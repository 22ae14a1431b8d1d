"""Compares each replica's part of a batch with a loop over the requests."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.replica.batch import Share, as_run, shares_at, shares_of_all
from kvcache.replica.rows import as_rows


def listed(shares: list[Share]) -> dict[int, list[tuple[int, int]]]:
    """Returns the requests of each replica: their indices in the batch, and their rows."""
    return {
        share.replica: list(zip(as_rows(share.at).tolist(), as_rows(share.rows).tolist(), strict=True))
        for share in shares
    }


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("ordered", [True, False])
def test_shares_are_those_of_each_replica_in_batch_order(count: int, ordered: bool) -> None:
    rng = np.random.default_rng(count)
    for requests in (0, 1, 2, 9, 40):
        replicas = rng.integers(0, count, requests)
        if ordered:
            replicas.sort()
        rows = rng.permutation(requests)
        wanted: dict[int, list[tuple[int, int]]] = {replica: [] for replica in range(count)}
        for place, (replica, row) in enumerate(zip(replicas.tolist(), rows.tolist(), strict=True)):
            wanted[replica].append((place, row))
        assert listed(shares_of_all(replicas, rows, count)) == wanted
        some = np.flatnonzero(rng.integers(0, 2, requests))
        chosen = {replica: [pair for pair in pairs if pair[0] in some.tolist()] for replica, pairs in wanted.items()}
        assert listed(shares_at(replicas, rows, some)) == {one: pairs for one, pairs in chosen.items() if pairs}


def test_only_what_ascends_by_one_is_a_run() -> None:
    assert as_run(np.array([3, 4, 5])) == slice(3, 6)
    assert as_run(np.array([3])) == slice(3, 4)
    assert as_run(np.array([], np.int64)) == slice(0, 0)
    for indices in ([3, 5], [4, 3], [3, 3, 5], [3, 5, 4, 6], [1, 3, 5]):
        assert isinstance(as_run(np.array(indices)), np.ndarray)
    turned: list[int] = as_rows(as_run(np.array([0, 2, 1, 3]))).tolist()
    assert turned == [0, 2, 1, 3]
