"""`Share`: the requests of one replica in a batch."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvcache.replica.rows import Ints, Rows, rows_at


class Share(NamedTuple):
    """The requests of a batch that are in one replica: their places in the batch, and their rows."""

    replica: int
    at: Rows  # a slice if they are consecutive, so that arrays are read without a copy
    rows: Rows


def shares_of_all(replicas: Ints, rows: Ints, count: int) -> list[Share]:
    """The share of each of `count` replicas, including empty ones. `replicas`, `rows`: by request, in batch order."""
    order = np.argsort(replicas, kind="stable")
    bounds = np.searchsorted(replicas[order], np.arange(count + 1)).tolist()
    rows = rows[order]
    return [
        Share(replica, as_run(order[first:last]), as_run(rows[first:last]))
        for replica, (first, last) in enumerate(pairwise(bounds))
    ]


def shares_at(replicas: Ints, rows: Rows, places: Ints) -> list[Share]:
    """The share of each replica that has requests at these places of the batch."""
    if not places.size:
        return []
    mine, own = replicas[places], rows_at(rows, places)
    if np.count_nonzero(mine == mine[0]) == len(mine):
        return [Share(mine.item(0), places, own)]
    order = np.argsort(mine, kind="stable")
    mine, own, places = mine[order], own[order], places[order]
    bounds = [0, *(np.diff(mine).nonzero()[0] + 1).tolist(), len(mine)]
    return [Share(mine.item(first), places[first:last], own[first:last]) for first, last in pairwise(bounds)]


def as_run(indices: Ints) -> Rows:
    """`indices` as a slice if they are consecutive."""
    count = len(indices)
    if not count:
        return slice(0, 0)
    first = indices.item(0)
    if count > 1 and (indices.item(-1) - first != count - 1 or np.count_nonzero(indices[1:] - indices[:-1] != 1)):
        return indices
    return slice(first, first + count)
