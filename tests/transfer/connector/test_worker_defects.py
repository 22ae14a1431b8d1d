"""Known defects of other connectors, one test for each. This connector must have none of them."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgspec
import pytest
import zmq

from benchmarks.pulls.layouts import dense_strides
from kvcache.replica.block_table import PageCopy
from tests.transfer.pair_model import GroupSpec, Pair, Side
from tests.transfer.pair_ranks import EngineUnderTest, children, run_until, transfer
from tests.transfer.replicas import Engine, run
from transfer.connector.config import Timing
from transfer.connector.metadata import ConnectorMetadata, SendRequest
from transfer.errors import HandshakeError, MetadataError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.plan.boxes import Group, ShardLayout
from transfer.plan.page_lists import BlocksOfGroup
from transfer.plan.shapes import SPLIT_HND, from_tensor
from transfer.pull.lease import LeaseRef
from transfer.pull.remote import RemoteEngine
from transfer.wire.messages import RankMetadata, open_rank, sealed_rank
from transfer.wire.prompt import Prompt

PLAIN = Side()
PROMPT = Prompt(range(64))
FULL = (GroupSpec(layers=(0, 1)),)


def check_exchange(engine: Any, pair: Pair) -> tuple[EngineUnderTest, EngineUnderTest]:
    source, reader = engine("p", pair.groups, pair.source), engine("d", pair.groups, pair.reader)
    transfer(pair, source, reader)
    assert reader.failed == {}
    assert source.sent == {"r": "read"}
    assert reader.call("compare", pair) == [[] for _ in reader.ranks]
    return source, reader


def offer(source: EngineUnderTest, pair: Pair, request_id: str = "r", **options: Any) -> dict[str, Any]:
    source.call("fill_source", pair)
    source.scheduler.offer(request_id, **options)
    run_until(lambda: source.scheduler.is_offered(request_id), source)
    return source.scheduler.params(request_id, PROMPT, pair.source_blocks, pair.num_tokens)


def test_1_latents_of_more_source_ranks_are_released_by_every_rank_at_once(engine: Any) -> None:
    latent = (GroupSpec(kind="mla", dim=12),)
    pair = Pair(latent, Side(tp=2), Side(tp=1), 16, source_blocks=((3, 4),), reader_blocks=((1, 2),))
    begin = time.monotonic()
    source, _ = check_exchange(engine, pair)
    # The source knows that the reader is done, so it did not wait for the lease to expire.
    assert time.monotonic() - begin < source.scheduler.config.timing.lease / 2
    assert [rank.host.worker._running().replica.leases.ids() for rank in source.ranks] == [[], []]
    assert [rank.host.worker._running().replica.leases.counts["accepted"] for rank in source.ranks] == [1, 1]


def test_2_a_failed_load_of_several_groups_does_not_pass_for_a_good_one(engine: Any) -> None:
    groups = (
        GroupSpec(layers=(0,)),
        GroupSpec(kind="sliding_window", layers=(1,), window=30),
        GroupSpec(kind="mamba", layers=(2,)),
    )
    pair = Pair(groups, PLAIN, PLAIN, 16, source_blocks=((3, 4), (5, 6), (7,)), reader_blocks=((1, 2), (11, 12), (21,)))
    source, reader = engine("p", groups), engine("d", groups)
    params = offer(source, pair) | {"lease_id": "0xbad"}
    reader.scheduler.load("r", reader.scheduler.read("r", params, PROMPT), pair.reader_blocks, 16, 0)
    run_until(lambda: reader.received, source, reader)
    assert set(reader.failed) == {"r"}
    assert reader.bad_blocks == {1, 2, 11, 12, 21}


def test_3_failures_of_many_handshakes_are_each_told_once_while_the_loop_asks(engine: Any) -> None:
    reader = engine("d", timing=Timing(handshake=0.15))
    ours = reader.ranks[0].host.worker
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "x",
        "remote_host": "127.0.0.1",
        "remote_num_tokens": 8,
        "lease_id": "0x1",
    }
    for number in range(60):
        where = {"remote_engine_id": f"dead{number % 20}", "remote_port": 1 + number % 20}
        pages = reader.scheduler.read(f"r{number}", params | where, PROMPT)
        reader.scheduler.load(f"r{number}", pages, [[number % 24]], 9, 0)
    ours.start_load_kv(reader.scheduler.build_metadata())
    failed, received, blocks = list[str](), list[str](), set[int]()
    deadline = time.monotonic() + 20
    while len(received) < 60 and time.monotonic() < deadline:
        failed += ours.get_failed_loads()
        blocks |= ours.get_block_ids_with_load_errors()
        received += ours.get_finished()[1]
    failed += ours.get_failed_loads()
    blocks |= ours.get_block_ids_with_load_errors()
    assert sorted(failed) == sorted(received) == sorted(f"r{number}" for number in range(60))
    assert blocks == set(range(24))


@pytest.mark.parametrize("tp", [(4, 2), (2, 4), (4, 1), (3, 4)])
def test_4_more_ranks_than_heads_are_no_mismatch(engine: Any, tp: tuple[int, int]) -> None:
    groups = (GroupSpec(layers=(0, 1), heads=2),)
    pair = Pair(groups, Side(tp=tp[0]), Side(tp=tp[1]), 19, source_blocks=((3, 4, 9),), reader_blocks=((1, 2, 5),))
    check_exchange(engine, pair)


def test_5_clocks_of_two_processes_need_not_agree() -> None:
    source = Engine("p", 2, clock=lambda: time.monotonic() + 1e7)
    reader = Engine("d", clock=lambda: time.monotonic() - 1e7)
    try:
        lease = source.offer(duration_s=20.0)
        reader.replica.pull("r", source.source(lease), 20.0)
        reader.replica.add_pages("r", [PageCopy([1], [2], (0, 16))], last=True)
        run(source, reader, until=lambda: reader.pulls and source.overs)
        assert (reader.pulls[0].error, source.overs[0].reason) == ("", "read")
    finally:
        source.close()
        reader.close()


def test_6_a_short_lease_ends_before_a_long_one_that_is_older(engine: Any) -> None:
    theirs = engine("p").ranks[0].host.worker
    sends = {
        "long": SendRequest(lease=LeaseRef(1, 0, 60.0)),
        "short": SendRequest(lease=LeaseRef(2, 1, 0.1)),
        "longer": SendRequest(lease=LeaseRef(3, 2, 90.0)),
    }
    for request_id, send in sends.items():
        theirs.start_load_kv(ConnectorMetadata(reqs_to_send={request_id: send}))
    sent, deadline = set[str](), time.monotonic() + 20
    while not sent and time.monotonic() < deadline:
        sent = theirs.get_finished()[0]
    assert sent == {"short"}


def test_7_a_group_with_nothing_to_load_reads_nothing(engine: Any) -> None:
    groups = (GroupSpec(kind="sliding_window", layers=(0,), window=1), GroupSpec(layers=(1,)))
    pair = Pair(groups, PLAIN, PLAIN, 16, source_blocks=((5, 6), (7, 8)), reader_blocks=((), (1, 2)))
    _, reader = check_exchange(engine, pair)
    (stats,) = reader.call("stats")
    assert stats.num_bytes == 2 * 4 * 16 * 4 * 4  # Sides, heads, tokens, dims and bytes of an element, for one layer.


@pytest.mark.parametrize("longer", [1, 8, 30])
def test_8_a_prompt_that_is_longer_than_the_source_s_is_loaded_as_far_as_it_goes(engine: Any, longer: int) -> None:
    source, reader = engine("p"), engine("d")
    pair = Pair(FULL, PLAIN, PLAIN, 16, source_blocks=((3, 4),), reader_blocks=((1, 2, 9, 10, 11, 12),))
    params = offer(source, pair)
    reader.scheduler.load("r", reader.scheduler.read("r", params, PROMPT), pair.reader_blocks, 16 + longer, 0)
    run_until(lambda: reader.received, source, reader)
    assert reader.failed == {}
    assert reader.call("compare", pair) == [[]]


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("layouts", [("blocks-first", "blocks-first"), ("blocks-first-HND", "blocks-first")])
def test_9_keys_and_values_stay_apart_where_blocks_first_pages_differ(
    engine: Any, layouts: tuple[str, str], tp: tuple[int, int]
) -> None:
    there, here = Side(tp=tp[0], layout=layouts[0], block_size=4), Side(tp=tp[1], layout=layouts[1], block_size=16)
    pair = Pair(FULL, there, here, 30, source_blocks=((9, 3, 11, 7, 0, 2, 1, 4),), reader_blocks=((6, 2),))
    check_exchange(engine, pair)


def test_10_a_failed_request_is_not_over_while_a_sibling_read_runs() -> None:
    source, reader = Engine("p", 2), Engine("d")
    try:
        reader.hindrances[0].held, reader.hindrances[0].refuse = True, {1}
        reader.replica.pull("r", source.source(source.offer()), 20.0)
        reader.replica.add_pages("r", [PageCopy([1], [2], (0, 16))], last=True)
        run(source, reader, until=lambda: reader.pulls)
        for _ in range(50):
            reader.poll()
        assert [event.safe for event in reader.pulls] == [False]
        reader.hindrances[0].held = False
        run(source, reader, until=lambda: len(reader.pulls) == 2)
        assert reader.pulls[1].safe
    finally:
        source.close()
        reader.close()


def test_11_what_is_known_of_sources_does_not_grow_with_their_restarts(engine: Any) -> None:
    reader = engine("d", timing=Timing(idle=0.05, heartbeat=0.05))
    pair = Pair(FULL, PLAIN, PLAIN, 8, source_blocks=((3,),), reader_blocks=((1,),))
    for number in range(6):
        source = engine(f"p{number}")
        transfer(pair, source, reader, f"r{number}")
        source.close()
    rank = reader.ranks[0].host.worker._rank
    directory = reader.ranks[0].host.worker._thread.replica.directory
    run_until(lambda: not len(directory) and not rank._retiring, reader)
    assert rank._remotes == {}
    assert reader.failed == {}


def metadata(pages: int, layers: int, engine_id: str) -> RankMetadata:
    """Returns the metadata of an engine with `pages` pages. The engine allocates no memory."""
    shape = (2, pages, 2, 16, 64)
    boxes = tuple(
        from_tensor(
            shape, dense_strides(shape, 2), SPLIT_HND, dtype="bfloat16", itemsize=2, region=at, first=(at, 0, 0, 0)
        )
        for at in range(layers)
    )
    num_bytes = 2 * pages * 2 * 16 * 64 * 2
    return RankMetadata(
        engine_id=engine_id,
        incarnation="i",
        rank=0,
        ranks=1,
        hostname="h",
        agent_name=engine_id,
        agent_metadata=b"x",
        memory_type=MemoryType.DRAM,
        layout=ShardLayout((Group(16, pages, boxes),), (num_bytes,) * layers),
        bases=tuple((1 << 40) + at * num_bytes for at in range(layers)),
        device=0,
        words_addr=4096,
        words=16,
    )


def test_12_first_contact_makes_nothing_for_each_page() -> None:
    peaks: dict[int, int] = {}
    for pages in (100, 100_000):
        ours, theirs = metadata(pages, 64, "d"), sealed_rank(metadata(pages, 64, "p"))
        tracemalloc.start()
        remote = RemoteEngine([open_rank(theirs)], ours, {})
        parts = remote.parts("r", [BlocksOfGroup([1, 2], (0, 32), 0, [5, 7], 32)])
        peaks[pages] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(part.num_bytes for part in parts) == 64 * 2 * 2 * 2 * 16 * 64 * 2
    assert peaks[100_000] < 1.2 * peaks[100] < 4e6, peaks


def test_13_nothing_is_loaded_of_a_peer_that_does_not_fit(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    add_peer = Agent.add_peer
    monkeypatch.setattr(Agent, "add_peer", lambda self, peer, data: (loaded.append(peer), add_peer(self, peer, data)))
    reader = engine("d")
    ours = reader.ranks[0].host.worker
    source = engine("p")
    good = source.ranks[0].host.worker.get_handshake_metadata()
    opened = open_rank(good)
    wrong = [
        (
            msgspec.structs.replace(opened, compatibility={"model": "other"}),
            HandshakeError,
            "model: 'other' at the source, 'test'",
        ),
        (msgspec.structs.replace(opened, settings={"UCX_TLS": "tcp"}), MetadataError, "UCX_TLS: 'tcp' at the source"),
        (
            msgspec.structs.replace(opened, ranks=2),
            MetadataError,
            r"engine 'p': got ranks \[0\]; all 2 ranks are needed",
        ),
        (
            msgspec.structs.replace(opened, layout=msgspec.structs.replace(opened.layout, groups=(Group(8, 4, ()),))),
            MetadataError,
            "group 0, 'kv': no remote shard holds layer 0, head 0",
        ),
    ]
    for changed, kind, message in wrong:
        with pytest.raises(kind, match=message):
            ours.add_remote_agent(source.scheduler.address, [sealed_rank(changed)])
    with pytest.raises(MetadataError, match="cannot be read as rank metadata .*truncated"):
        ours.add_remote_agent(source.scheduler.address, [good[:-1]])
    assert loaded == []
    transfer(Pair(FULL, PLAIN, PLAIN, 8, source_blocks=((3,),), reader_blocks=((1,),)), source, reader)
    assert loaded == [opened.agent_name]


@pytest.mark.slow
def test_14_a_reader_that_dies_costs_its_source_a_lease_and_no_more(engine: Any) -> None:
    source = engine("p", timing=Timing(lease=3.0))
    (process,) = children(1)
    reader = EngineUnderTest([process], FULL, PLAIN, "d")
    try:
        pair = Pair(FULL, PLAIN, PLAIN, 16, source_blocks=((3, 4),), reader_blocks=((1, 2),))
        source.call("fill_source", pair)
        source.scheduler.offer("r")
        run_until(lambda: source.scheduler.is_offered("r"), source)
        params = source.scheduler.params("r", PROMPT, pair.source_blocks, 16)
        reader.scheduler.hold("r", reader.scheduler.read("r", params, PROMPT))
        begin = time.monotonic()
        # The reader has no blocks for longer than the lease lasts. It renews the lease meanwhile.
        while time.monotonic() < begin + 4.0:
            source.step()
            reader.step()
            assert not source.sent
        process.process.kill()
        run_until(lambda: source.sent, source)
        assert source.sent["r"].startswith("expired")
    finally:
        reader.scheduler.close()
        process.stop()


def test_15_a_question_for_a_rank_that_there_is_not_ends_no_listener(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    for message in (b"\x93\xacget_meta_msg\x00\x63", b"\x92\xacget_meta_msg\x63", b"\xc1", b""):
        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(source.scheduler.address)
        socket.send(message)
        assert b"cannot be read as a query of protocol 3" in socket.recv()
        socket.close()
    transfer(Pair(FULL, PLAIN, PLAIN, 8, source_blocks=((3,),), reader_blocks=((1,),)), source, reader)
    assert reader.failed == {}
