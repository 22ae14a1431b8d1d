"""A transfer that is in flight when its peer is disconnected keeps its pages until it has ended."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

from tests.transfer.engine.test_engine import stuck, unstarted
from transfer.engine.postings import page_runs
from transfer.errors import AlreadyConnectedError, InvalidTransferError, PeerFailedError


def test_neighbours_on_both_sides_are_one_run():
    runs = page_runs("t", np.array([4, 9, 8, 2, 3]), np.array([1, 6, 5, 3, 4]), 100)
    assert [runs.local.tolist(), runs.remote.tolist(), runs.length.tolist()] == [
        [100, 300, 500],
        [400, 200, 800],
        [100, 200, 200],
    ]
    alone = page_runs("t", np.array([4, 4]), np.array([1, 2]), 100)  # a page may be read twice
    assert [alone.remote.tolist(), alone.length.tolist()] == [[400, 400], [100, 100]]
    with pytest.raises(InvalidTransferError, match="destination page 3 is named more than once"):
        page_runs("t", np.array([1, 2]), np.array([3, 3]), 100)


def test_pages_of_one_replica_are_not_those_of_another(make_engine: Any, monkeypatch: pytest.MonkeyPatch, until: Any):
    left, right = make_engine("left", dp=2), make_engine("right")
    left.connect(right.metadata)
    right.connect(left.metadata)
    with monkeypatch.context() as patched:
        stuck(patched, left.tensor_agents[1][0])
        slow = left.initiate_read_transfer(right.metadata, [0, 1], [3, 4], 0, 1)
        left.abandon_transfer(slow)
        left.poll()
        assert left.quarantined_pages(1) == {3, 4}
        assert left.quarantined_pages(0) == frozenset()
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(1))


def test_forgetting_a_writer_ends_only_its_own_transfers(
    pair: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, until: Any
):
    left, right = pair
    other = make_engine("other", tp=2)
    right.connect(other.metadata)
    with monkeypatch.context() as patched:
        stuck(patched, right.tensor_agents[0][0])
        right.abandon_transfer(right.initiate_read_transfer(left.metadata, [0], [3], 0, 0))
        right.abandon_transfer(unstarted("left", "right", [4]))
        right.abandon_transfer(unstarted("other", "right", [5]))
        assert right.quarantined_pages(0) == {3, 4, 5}
        right.release_quarantine("left")
        right.release_quarantine(uuid.uuid4().hex)
        assert right.quarantined_pages(0) == {3, 5}
    until(lambda: left.poll() + right.poll() >= 0 and right.quarantined_pages(0) == {5})


def test_transfers_in_flight_at_a_disconnect_are_watched_until_they_have_ended(
    pair: Any, monkeypatch: pytest.MonkeyPatch, until: Any
):
    """The engine watches the transfer even after its owner has cleaned the transfer up. The transfer may still move
    bytes, so the peer stays loaded.
    """
    left, right = pair
    with monkeypatch.context() as patched:
        stuck(patched, left.tensor_agents[0][0])
        slow = left.initiate_read_transfer(right.metadata, [0, 1], [3, 4], 0, 0)
        left.disconnect("right")
        (parked,) = left._postings.parked
        assert parked == slow.transfer_name
        with pytest.raises(PeerFailedError, match="'right' was disconnected before transfer .* had ended"):
            left.is_complete(slow)
        left.cleanup_transfer(slow)
        left.poll()
        assert left.quarantined_pages(0) == {3, 4}
        with pytest.raises(AlreadyConnectedError, match="still move bytes"):
            left.connect(right.metadata)
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(0))
    assert not left._postings.parked
    left.connect(right.metadata)
