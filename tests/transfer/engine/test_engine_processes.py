"""Tests two real processes, one of which dies, stops or comes back. Every byte is compared."""

from __future__ import annotations

import signal
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from tests.transfer.worker import digest, filled

BYTES = 1000


class Side:
    """A worker's engine, and the expected contents of its pools."""

    def __init__(self, worker: Any, name: str, dp: int, tp: int, pages: int, seed: int, size: int = BYTES) -> None:
        self.worker, self.name, self.dp, self.tp, self.pages = worker, name, dp, tp, pages
        self.metadata = worker("make", name, dp, tp, pages, size, seed)
        self._of = (pages, size, seed)

    @cached_property
    def expected(self) -> list[list[np.ndarray]]:
        pages, size, seed = self._of
        return [[filled(pages, size, seed + r * self.tp + t) for t in range(self.tp)] for r in range(self.dp)]

    def check(self) -> None:
        for replica, digests in enumerate(self.worker("digests")):
            for shard, found in enumerate(digests):
                expected = self.expected[replica][shard]
                if found != digest(expected):
                    got = np.frombuffer(self.worker("pool", replica, shard), np.uint8).reshape(expected.shape)
                    np.testing.assert_array_equal(got, expected, err_msg=f"{self.name} [{replica}][{shard}]")
                    pytest.fail("digests differ, and the bytes do not")


def join(left: Side, right: Side) -> None:
    left.worker("connect", right.metadata)
    right.worker("connect", left.metadata)


def check_move(starter: Side, other: Side, kind: str, rng: Any, count: int) -> None:
    """Moves random pages with one transfer, checks that both sides notice its end, and compares every byte of both
    pools.
    """
    source, target = (other, starter) if kind == "read" else (starter, other)
    src, dst = (rng.permutation(side.pages)[:count].tolist() for side in (source, target))
    src_replica, dst_replica = int(rng.integers(source.dp)), int(rng.integers(target.dp))
    request = starter.worker("start", kind, other.name, src, dst, src_replica, dst_replica)
    starter.worker("request", "sync_and_release", request, 20.0)
    other.worker("request", "sync_and_release", request, 20.0)
    for shard in range(source.tp):
        target.expected[dst_replica][shard][dst] = source.expected[src_replica][shard][src]
    source.check()
    target.check()
    assert other.worker("look", "completed_recv_transfers")[starter.name] == {}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("tp", "left_dp", "right_dp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 2), (2, 1, 2), (4, 2, 1)]
)
def test_every_byte_in_both_directions(
    couples: Any, transports: Any, transport: str, tp: int, left_dp: int, right_dp: int
):
    one, two = couples(transports[transport])
    left = Side(one, "left", left_dp, tp, 24, seed=1)
    right = Side(two, "right", right_dp, tp, 17, seed=1000)
    join(left, right)
    rng = np.random.default_rng(tp)
    for count in (1, 5, 17):
        for starter, other in ((left, right), (right, left)):
            for kind in ("read", "send"):
                check_move(starter, other, kind, rng, count)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_large_pages_move_whole(couples: Any, transports: Any, transport: str):
    one, two = couples(transports[transport])
    left = Side(one, "left", 1, 2, 64, seed=5, size=65536)
    right = Side(two, "right", 1, 2, 64, seed=50, size=65536)
    join(left, right)
    rng = np.random.default_rng(0)
    for kind in ("read", "send"):
        check_move(left, right, kind, rng, 64)
        check_move(right, left, kind, rng, 40)


@pytest.mark.slow
def test_many_transfers_in_flight_both_ways(couples: Any, transports: Any):
    one, two = couples(transports["shm"])
    left, right = Side(one, "left", 1, 2, 64, seed=7), Side(two, "right", 1, 2, 64, seed=70)
    join(left, right)
    # Each side pulls pages 32 to 63 of the other side into its own pages 0 to 31, one page per transfer.
    started = {
        side: [side.worker("start", "read", other.name, [32 + i], [i], 0, 0) for i in range(32)]
        for side, other in ((left, right), (right, left))
    }
    for side, other in ((left, right), (right, left)):
        for request in started[side]:
            side.worker("request", "sync_and_release", request, 20.0)
            other.worker("request", "sync_and_release", request, 20.0)
        for shard in range(2):
            side.expected[0][shard][:32] = other.expected[0][shard][32:]
    left.check()
    right.check()
    assert [side.worker("look", "inflight_read_transfers") for side in (left, right)] == [{}, {}]


@pytest.mark.slow
def test_settings_that_differ_are_refused_by_both(couples: Any, transports: Any):
    one, _ = couples(transports["shm"])
    _, two = couples(transports["tcp"])
    left, right = Side(one, "left", 1, 1, 4, seed=1), Side(two, "right", 1, 1, 4, seed=2)
    for side, other in ((left, right), (right, left)):
        with pytest.raises(Exception, match=r"UCX_TLS: .* at '(left|right)', .* at '(left|right)'") as caught:
            side.worker("connect", other.metadata)
        assert "SettingsMismatchError" in caught.value.kinds
        assert side.worker("look", "remote_connections") == {}
        side.check()


def failing(worker: Any, request: bytes, until: Any) -> Any:
    """Polls a transfer until it fails, and returns the error."""
    caught = []

    def raises() -> bool:
        try:
            assert not worker("request", "is_complete", request), "the transfer completed before its peer died"
        except worker.Raised as error:
            caught.append(error)
        return bool(caught)

    until(raises)
    return caught[0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dead_peer_fails_its_own_transfers_only(hire: Any, until: Any, transports: Any, transport: str):
    env = transports[transport]
    reader, mortal, witness = hire(env), hire(env), hire(env)
    left = Side(reader, "left", 1, 2, 64, seed=1, size=4096)
    right = Side(mortal, "right", 1, 2, 64, seed=2, size=4096)
    third = Side(witness, "third", 1, 2, 64, seed=3, size=4096)
    join(left, right)
    join(left, third)
    rng = np.random.default_rng(0)
    check_move(left, right, "read", rng, 4)
    # Over TCP the READ cannot end while the peer is stopped. Over shared memory it can end.
    mortal.signal(signal.SIGSTOP)
    if transport == "shm":
        mortal.signal(signal.SIGKILL)
    request = None
    try:
        request = reader("start", "read", "right", list(range(64)), list(range(64)), 0, 0)
    except reader.Raised as error:
        kinds, message = error.kinds, str(error)
    mortal.signal(signal.SIGKILL)
    if request is not None:
        error = failing(reader, request, until)
        kinds, message = error.kinds, str(error)
        with pytest.raises(Exception, match="peer 'right' is gone"):
            reader("request", "is_complete", request)
        reader("request", "cleanup_transfer", request)
    assert {"PeerFailedError", "ConnectionError"} <= set(kinds)
    assert "transfer" in message
    assert "right" in message
    assert list(reader("look", "failed_peers")) == ["right"]
    assert reader("look", "inflight_read_transfers") == {}
    with pytest.raises(Exception, match="peer 'right' was lost") as caught:
        reader("start", "send", "right", [0], [0], 0, 0)
    assert "PeerFailedError" in caught.value.kinds
    until(lambda: not reader("call", "quarantined_pages", 0))
    # The failed READ may have left any data in the reader's pages, and the reader may overwrite the data.
    for shard in range(2):
        left.expected[0][shard] = np.frombuffer(reader("pool", 0, shard), np.uint8).reshape(64, -1).copy()
    check_move(left, third, "read", rng, 64)
    check_move(third, left, "send", rng, 8)

    successor = Side(hire(env), "right", 1, 2, 16, seed=9, size=4096)
    with pytest.raises(Exception, match="another incarnation: disconnect that one first") as caught:
        reader("connect", successor.metadata)
    assert "AlreadyConnectedError" in caught.value.kinds
    reader("call", "disconnect", "right")
    join(left, successor)
    assert reader("look", "failed_peers") == {}
    check_move(left, successor, "read", rng, 16)
    check_move(successor, left, "read", rng, 16)


@pytest.mark.slow
def test_killed_in_mid_copy(hire: Any, until: Any):
    reader, mortal = hire(), hire()
    left = Side(reader, "left", 1, 1, 512, seed=1, size=1 << 20)
    right = Side(mortal, "right", 1, 1, 512, seed=2, size=1 << 20)
    join(left, right)
    first = reader("start", "read", "right", [0], [0], 0, 0)
    reader("request", "sync_and_release", first, 20.0)
    order = np.random.default_rng(1).permutation(512).tolist()
    reader.send("start", "read", "right", order, list(range(512)), 0, 0)
    request = reader.wait()
    mortal.signal(signal.SIGKILL)
    error = failing(reader, request, until)
    assert "PeerFailedError" in error.kinds
    assert "'right' is gone" in str(error)
    reader("request", "cleanup_transfer", request)
    until(lambda: not reader("call", "quarantined_pages", 0))


@pytest.mark.slow
def test_time_out_quarantines_until_the_end_is_known(hire: Any, until: Any, transports: Any):
    env = transports["tcp"]
    reader, slow = hire(env), hire(env)
    left, right = Side(reader, "left", 1, 2, 16, seed=1), Side(slow, "right", 1, 2, 16, seed=2)
    join(left, right)
    slow("set_polls", False)
    request = reader("start", "read", "right", [1, 2, 3], [4, 5, 6], 0, 0)
    with pytest.raises(Exception, match=r"did not end within 0\.3 s") as caught:
        reader("request", "sync_and_release", request, 0.3)
    assert {"TransferTimeoutError", "TimeoutError"} <= set(caught.value.kinds)
    assert reader("call", "quarantined_pages", 0) == {4, 5, 6}
    assert reader("look", "suspect_peers") == {"right"}
    assert reader("look", "inflight_read_transfers") == {}
    with pytest.raises(Exception, match=r"pages \[5, 6\] of 'left' are in quarantine"):
        reader("start", "read", "right", [7, 8, 9], [5, 6, 7], 0, 0)
    with pytest.raises(Exception, match="cleaned up or given up"):
        reader("request", "is_complete", request)
    slow("set_polls", True)
    until(lambda: not reader("call", "quarantined_pages", 0))
    for shard in range(2):
        left.expected[0][shard][[4, 5, 6]] = right.expected[0][shard][[1, 2, 3]]
    slow("request", "sync_and_release", request, 20.0)  # The source is notified although the call has failed.
    check_move(left, right, "read", np.random.default_rng(0), 16)
    assert reader("look", "suspect_peers") == frozenset()


@pytest.mark.slow
def test_disconnect_in_flight_drains_before_the_same_peer_returns(hire: Any, until: Any, transports: Any):
    env = transports["tcp"]
    reader, slow = hire(env), hire(env)
    left, right = Side(reader, "left", 1, 1, 16, seed=1), Side(slow, "right", 1, 1, 16, seed=2)
    join(left, right)
    slow("set_polls", False)
    request = reader("start", "read", "right", [1], [4], 0, 0)
    reader("call", "disconnect", "right")
    with pytest.raises(Exception, match="'right' was disconnected before transfer") as caught:
        reader("request", "is_complete", request)
    assert "PeerFailedError" in caught.value.kinds
    reader("request", "cleanup_transfer", request)
    assert reader("call", "quarantined_pages", 0) == {4}
    with pytest.raises(Exception, match="still move bytes"):
        reader("connect", right.metadata)
    slow("set_polls", True)
    until(lambda: not reader("call", "quarantined_pages", 0))
    reader("connect", right.metadata)
    left.expected[0][0][4] = right.expected[0][0][1]
    slow("request", "cleanup_transfer", request)
    check_move(left, right, "read", np.random.default_rng(0), 9)


@pytest.mark.slow
def test_a_dead_reader_leaves_its_source_alive(hire: Any):
    source, mortal, witness = hire(), hire(), hire()
    left = Side(source, "left", 1, 1, 256, seed=1, size=1 << 20)
    right = Side(mortal, "right", 1, 1, 256, seed=2, size=1 << 20)
    third = Side(witness, "third", 1, 1, 16, seed=3, size=1 << 20)
    join(left, right)
    join(left, third)
    first = mortal("start", "read", "left", [0], [0], 0, 0)
    mortal("request", "sync_and_release", first, 20.0)
    request = mortal(
        "start", "read", "left", list(range(256)), np.random.default_rng(0).permutation(256).tolist(), 0, 0
    )
    mortal.signal(signal.SIGKILL)
    assert not source("request", "is_complete", request)
    with pytest.raises(source.Raised, match=r"did not end within 0\.05 s"):
        source("request", "sync_and_release", request, 0.05)
    assert source("call", "quarantined_pages", 0) == set(range(256))
    source("call", "disconnect", "right")
    source("call", "release_quarantine", "right")
    assert source("call", "quarantined_pages", 0) == set()
    pulled = witness("start", "read", "left", [7], [9], 0, 0)
    witness("request", "sync_and_release", pulled, 20.0)
    source("request", "sync_and_release", pulled, 20.0)
    third.expected[0][0][9] = left.expected[0][0][7]
    third.check()
    left.check()
