import time
from collections.abc import Iterator

import msgspec
import pytest

from scheduler_adapters.sglang.ranks import RankFollower, RankLeader
from scheduler_adapters.sglang.rooms import RankOutput, RoomServer, endpoint
from transfer.connector.metadata import ConnectorMetadata, WorkerOutput
from transfer.errors import MetadataError

TOKEN = b"t" * 16


@pytest.fixture
def server() -> Iterator[RoomServer]:
    made = RoomServer("127.0.0.1", None)
    yield made
    made.close()


def test_a_rank_that_connects_late_gets_all_messages_once_and_in_order(server: RoomServer) -> None:
    leader, told = RankLeader(server, 2, TOKEN), [ConnectorMetadata(reqs_computed=[name]) for name in "abc"]
    for metadata in told[:2]:
        leader.tell(metadata)
    follower = RankFollower(endpoint("127.0.0.1", server.port), 1, TOKEN, None)
    heard, end = [], time.monotonic() + 10
    while len(heard) < 2 and time.monotonic() < end:
        for peer, message in server.received():
            assert leader.heard(peer, message) == (1, WorkerOutput())
        heard += follower.steps()
    follower.report(WorkerOutput())  # This is the second report, so the leader knows the rank already.
    leader.tell(told[2])
    while len(heard) < 3 and time.monotonic() < end:
        for peer, message in server.received():
            leader.heard(peer, message)
        heard += follower.steps()
    assert heard == told
    follower.close()


@pytest.mark.parametrize(
    ("rank", "token"), [(1, b"u" * 16), (0, TOKEN), (2, TOKEN), (-1, TOKEN)], ids=["token", "0", "2", "-1"]
)
def test_messages_that_come_from_no_rank_are_refused(server: RoomServer, rank: int, token: bytes) -> None:
    output = RankOutput(rank=rank, token=token, output=msgspec.msgpack.encode(WorkerOutput()))
    with pytest.raises(MetadataError, match=f"rank {rank}"):
        RankLeader(server, 2, TOKEN).heard(b"peer", output)


def test_an_invalid_output_names_its_rank(server: RoomServer) -> None:
    with pytest.raises(MetadataError, match="rank 1: "):
        RankLeader(server, 2, TOKEN).heard(b"peer", RankOutput(rank=1, token=TOKEN, output=b"\xff"))


def test_an_address_with_colons_is_bracketed() -> None:
    assert (endpoint("::1", 5), endpoint("10.0.0.7", 5)) == ("tcp://[::1]:5", "tcp://10.0.0.7:5")
