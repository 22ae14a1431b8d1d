"""Engines in one process over real NIXL: the calls that they refuse, the state after an error, and the resources that
they give back at the end.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcache import MovedMemoryError
from tests.forked import start
from transfer import (
    AgentError,
    AlreadyConnectedError,
    EngineClosedError,
    InvalidEngineError,
    InvalidTransferError,
    KVTransferEngine,
    MemoryType,
    MetadataError,
    PeerFailedError,
    SettingsMismatchError,
    TensorAgent,
    TransferFailedError,
    TransferIncompleteError,
    TransferReqData,
    TransferTimeoutError,
    UnknownPeerError,
    UnknownTransferError,
)
from transfer.engine.metadata import sealed


def page_of(engine: KVTransferEngine, page: int, shard: int = 0, replica: int = 0) -> list[int]:
    flat = engine.tensor_agents[replica][shard].tensor.reshape(engine.total_num_pages, -1)
    return flat[page].tolist()


def pull(left: KVTransferEngine, right: KVTransferEngine, src: Any = (1,), dst: Any = (2,)) -> TransferReqData:
    return left.initiate_read_transfer(right.metadata, list(src), list(dst), 0, 0)


def finish(left: KVTransferEngine, right: KVTransferEngine, request: TransferReqData) -> None:
    """Polls both sides until the transfer ends. The first contact of two agents needs both to be polled."""
    deadline = time.monotonic() + 20
    while not (left.is_complete(request) and right.is_complete(request)):
        assert time.monotonic() < deadline
        left.poll()
        right.poll()
    left.cleanup_transfer(request)
    right.cleanup_transfer(request)


def unstarted(source: str, destination: str, pages: Any = (0,)) -> TransferReqData:
    """Returns a WRITE whose notifications have not arrived."""
    return TransferReqData(
        dst_name=destination,
        src_name=source,
        transfer_name=uuid.uuid4().hex,
        transfer_ids=[0, 1],
        src_idxs=list(pages),
        dst_idxs=list(pages),
        src_replica_idx=0,
        dst_replica_idx=0,
    )


def works(left: KVTransferEngine, right: KVTransferEngine) -> None:
    """Checks that a page can be moved with an engine that has just raised an error."""
    if "left" not in right.remote_connections:
        right.connect(left.metadata)
    finish(left, right, pull(left, right, [5], [7]))
    assert [page_of(left, 7, shard) for shard in range(2)] == [page_of(right, 5, shard) for shard in range(2)]
    assert not left.inflight_read_transfers
    assert not left.quarantined_pages(0)


# ---- the constructor ----


def test_attributes(make_engine: Any):
    engine = make_engine("e", dp=2, tp=3, pages=5, bytes_per_page=64)
    assert (engine.name, engine.dp, engine.tp, engine.total_num_pages, engine.bytes_per_page) == ("e", 2, 3, 5, 64)
    assert engine.memory_type is MemoryType.DRAM
    assert [len(shards) for shards in engine.tensor_agents] == [3, 3]
    assert engine.remote_connections == engine.remote_agent_to_engine == {}
    assert engine.inflight_send_transfers == engine.inflight_read_transfers == engine.completed_recv_transfers == {}
    meta = engine.metadata
    assert (meta.name, meta.total_num_pages, meta.bytes_per_page, meta.memory_type) == ("e", 5, 64, MemoryType.DRAM)
    assert [[agent.agent_name for agent in shards] for shards in meta.agents_meta] == [
        [f"e/{r}.{t}@{meta.incarnation}" for t in range(3)] for r in range(2)
    ]


ONE = torch.zeros(4, 64)
LONG = torch.zeros(16, 64)


@pytest.mark.parametrize(
    ("tensors", "pages", "message"),
    [
        ([], 4, "at least 1"),
        ([[]], 4, "at least 1"),
        ([[ONE], []], 4, r"\[1, 0\] tensors"),
        ([ONE], 4, "a list with one list for each replica"),
        (ONE, 4, "a list with one list for each replica"),
        ([["tensor"]], 4, "of type str"),
        ([[ONE]], 0, "total_num_pages is 0"),
        ([[ONE]], -1, "total_num_pages is -1"),
        ([[ONE]], True, "total_num_pages is True"),
        ([[ONE]], 4.0, "total_num_pages is 4.0"),
        ([[ONE]], 1 << 31, "total_num_pages is 2147483648"),
        ([[ONE]], 3, "cannot be divided into 3 equal pages"),
        ([[torch.zeros(0)]], 1, "0 elements"),
        ([[ONE, torch.zeros(8, 64)]], 4, "512 elements"),
        ([[ONE, torch.zeros(4, 64, dtype=torch.int32)]], 4, "of torch.int32"),
        ([[torch.zeros(4, 128)[:, :64]]], 4, "leaves gaps"),
        ([[torch.zeros(4, 1).expand(4, 64)]], 4, "leaves gaps"),
        ([[torch.zeros(64, 4).t()]], 4, "pages must be the outermost axis"),
        ([[torch.zeros(4, 64, device="meta")]], 4, "on meta"),
        ([[torch.zeros(4, 64).to_sparse()]], 4, "sparse"),
        ([[ONE], [ONE]], 4, r"tensor \[0\]\[0\] and tensor \[1\]\[0\] share memory"),
        ([[LONG[4:8], LONG[7:11]]], 4, r"tensor \[0\]\[0\] and tensor \[0\]\[1\] share memory"),
        (
            [[LONG[3:7], LONG[8:12]], [LONG[12:16], LONG[0:4]]],
            4,
            r"tensor \[1\]\[1\] and tensor \[0\]\[0\] share memory",
        ),
    ],
)
def test_tensors_that_are_no_pools_are_refused(tensors: Any, pages: Any, message: str):
    with pytest.raises(InvalidEngineError, match=message) as caught:
        KVTransferEngine("e", tensors, total_num_pages=pages)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["", None, 7])
def test_an_engine_needs_a_name(name: Any):
    with pytest.raises(InvalidEngineError, match="needs a name"):
        KVTransferEngine(name, [[ONE]], total_num_pages=4)


def test_a_strided_view_with_pages_outermost_moves_whole_pages():
    # The memory is [page, head, layer, side, token, dim]. The view is [page, side, layer, token, head, dim].
    views = [
        torch.arange(6 * 192, dtype=torch.int32).reshape(6, 2, 3, 2, 4, 4).permute(0, 3, 2, 4, 1, 5) + seed
        for seed in (0, 10_000)
    ]
    assert not views[0].is_contiguous()
    with (
        KVTransferEngine("v", [[views[0]]], total_num_pages=6) as left,
        KVTransferEngine("w", [[views[1]]], total_num_pages=6) as right,
    ):
        left.connect(right.metadata)
        right.connect(left.metadata)
        before = views[0].clone()
        finish(left, right, pull(left, right, [4, 0], [1, 2]))
    before[[1, 2]] = views[1][[4, 0]]
    assert torch.equal(views[0], before)


def test_a_failed_constructor_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    made: list[TensorAgent] = []
    create = TensorAgent.create_agent

    def third_fails(*args: Any) -> TensorAgent:
        if len(made) == 2:
            raise AgentError("no third agent")
        made.append(create(*args))
        return made[-1]

    monkeypatch.setattr(TensorAgent, "create_agent", third_fails)
    engine = KVTransferEngine.__new__(KVTransferEngine)
    with pytest.raises(AgentError, match="no third agent"):
        engine.__init__("e", [[torch.zeros(4, 64) for _ in range(4)]], total_num_pages=4)
    assert [agent.agent.is_open for agent in made] == [False, False]
    engine.cleanup()
    engine.cleanup()


# ---- connect and disconnect ----


def test_connect_fills_the_maps_and_disconnect_empties_them(make_engine: Any):
    left, right = make_engine("left", dp=2, tp=2), make_engine("right", tp=2, pages=3)
    left.connect(right.metadata)
    assert left.remote_connections == {"right": right.metadata}
    assert set(left.remote_agent_to_engine) == {agent.agent_name for agent in right.metadata.agents_meta[0]}
    assert set(left.remote_agent_to_engine.values()) == {"right"}
    assert left.completed_recv_transfers == {"right": {}}
    left.disconnect("right")
    assert left.remote_connections == left.remote_agent_to_engine == left.completed_recv_transfers == {}
    with pytest.raises(UnknownPeerError, match="'left' is not connected to engine 'right'") as caught:
        left.disconnect("right")
    assert isinstance(caught.value, KeyError)
    left.connect(right.metadata)


def test_peers_that_do_not_fit_are_refused(make_engine: Any):
    left = make_engine("left")
    with pytest.raises(MetadataError, match="pages of 1024 and 512 bytes"):
        left.connect(make_engine("small", bytes_per_page=512).metadata)
    with pytest.raises(MetadataError, match="1 and 2 shards"):
        left.connect(make_engine("wide", tp=2).metadata)
    with pytest.raises(MetadataError, match="of its own name"):
        left.connect(left.metadata)
    far = sealed(msgspec.structs.replace(make_engine("far").metadata, hostname="elsewhere"))
    with pytest.raises(
        MetadataError, match=r"'elsewhere', and UCX_TLS=cma,cuda_copy,posix,sysv cannot reach another host"
    ):
        left.connect(far)
    assert left.remote_connections == {}


def test_other_settings_are_refused_by_name(make_engine: Any):
    left, right = make_engine("left"), make_engine("right").metadata
    other = msgspec.structs.replace(right, settings=right.settings | {"nixl": "9"})
    with pytest.raises(SettingsMismatchError, match=r"nixl: '9' at 'right', .* at 'left'"):
        left.connect(sealed(other))
    left.connect(right)


def test_connecting_twice_is_refused(pair: Any, make_engine: Any):
    left, right = pair
    with pytest.raises(AlreadyConnectedError, match="to engine 'right' already$"):
        left.connect(right.metadata)
    with pytest.raises(AlreadyConnectedError, match="another incarnation: disconnect that one first"):
        left.connect(make_engine("right", tp=2).metadata)
    thief = sealed(msgspec.structs.replace(right.metadata, name="thief"))
    with pytest.raises(MetadataError, match="belongs to 'right'"):
        left.connect(thief)
    works(left, right)


def test_nixl_bytes_of_another_agent_are_refused_and_nothing_stays_loaded(make_engine: Any):
    left, right, third = make_engine("left", tp=2), make_engine("right", tp=2), make_engine("third", tp=2)
    first, second = right.metadata.agents_meta[0]
    wrong = msgspec.structs.replace(second, metadata=third.metadata.agents_meta[0][1].metadata)
    with pytest.raises(AgentError, match="got that of 'third"):
        left.connect(sealed(msgspec.structs.replace(right.metadata, agents_meta=[[first, wrong]])))
    assert left.remote_connections == left.remote_agent_to_engine == {}
    left.connect(right.metadata)
    left.connect(third.metadata)
    works(left, right)


def test_an_address_outside_of_the_registered_memory_is_refused(make_engine: Any):
    left, right = make_engine("left", tp=2), make_engine("right", tp=2)
    moved = [
        [
            msgspec.structs.replace(agent, base_addr=agent.base_addr + 4 * right.bytes_per_page)
            for agent in right.metadata.agents_meta[0]
        ]
    ]
    wrong = sealed(msgspec.structs.replace(right.metadata, agents_meta=moved))
    left.connect(wrong)
    for kind in ("read", "send"):
        # With the changed addresses, page 7 of the peer is beyond the peer's memory.
        pages = ([7], [0]) if kind == "read" else ([0], [7])
        with pytest.raises(TransferFailedError, match="of 1 runs of 'right"):
            getattr(left, f"initiate_{kind}_transfer")(wrong, *pages, 0, 0)
    left.disconnect("right")
    left.connect(right.metadata)
    works(left, right)


# ---- starting a transfer ----


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([], [], "at least one page"),
        ([0], [], "at least one page"),
        ([0, 1], [0], "2 source pages for 1 destination"),
        ([6], [0], "src_idxs holds page 6; the engine has pages 0 to 5"),
        ([0], [8], "dst_idxs holds page 8; the engine has pages 0 to 7"),
        ([0], [-1], "page -1"),
        ([0], [1 << 32], "page 4294967296"),
        ([0], [1 << 80], "beyond 64 bits"),
        ([0], [1.0], "1.0"),
        ([0, 1], [0, True], "True"),
        ([0], ["1"], "'1'"),
        ([0], [None], "None"),
        ([[0]], [0], r"shape \[1, 1\]"),
        ([[0], [0, 1]], [0, 1], "is not a list of integers"),
        (0, [0], r"shape \[\]"),
        (None, [0], r"shape \[\]"),
        (np.array([0.0]), [0], "is not a page number"),
        ([0, 1], [3, 3], "destination page 3 is named more than once"),
    ],
)
def test_bad_pages_are_refused(pair: Any, src: Any, dst: Any, message: str):
    left, right = pair
    with pytest.raises(InvalidTransferError, match=message) as caught:
        left.initiate_read_transfer(right.metadata, src, dst, 0, 0)
    assert isinstance(caught.value, ValueError)
    works(left, right)


@pytest.mark.parametrize("replica", [1, -1, True, 0.0, None])
def test_bad_replicas_are_refused(pair: Any, replica: Any):
    left, right = pair
    with pytest.raises(InvalidTransferError, match="src_replica_idx"):
        left.initiate_read_transfer(right.metadata, [0], [0], replica, 0)
    with pytest.raises(InvalidTransferError, match="dst_replica_idx"):
        left.initiate_send_transfer(right.metadata, [0], [0], 0, replica)
    works(left, right)


def test_unknown_peers_are_refused(pair: Any, make_engine: Any):
    left, right = pair
    with pytest.raises(UnknownPeerError, match="not connected to engine 'third'"):
        left.initiate_read_transfer(make_engine("third", tp=2).metadata, [0], [0], 0, 0)
    with pytest.raises(UnknownPeerError, match="disconnect it and connect again"):
        left.initiate_send_transfer(make_engine("right", tp=2).metadata, [0], [0], 0, 0)
    with pytest.raises(InvalidTransferError, match="expected a peer's metadata"):
        left.initiate_send_transfer("right", [0], [0], 0, 0)
    right.disconnect("left")
    with pytest.raises(UnknownPeerError, match="engine 'right' is not connected to engine 'left'"):
        right.initiate_send_transfer(left.metadata, [0], [0], 0, 0)
    right.connect(left.metadata)
    works(left, right)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda pages: np.array(pages, np.uint64), lambda pages: [*map(np.int32, pages)]]
)
def test_pages_may_be_any_list_of_integers(pair: Any, kind: Any):
    left, right = pair
    request = left.initiate_read_transfer(right.metadata, kind([3, 1]), kind([0, 7]), 0, 0)
    assert (request.src_idxs, request.dst_idxs) == ([3, 1], [0, 7])
    finish(left, right, request)
    assert page_of(left, 0) == page_of(right, 3)
    assert page_of(left, 7) == page_of(right, 1)


def test_the_request_says_what_was_started(pair: Any):
    left, right = pair
    read = pull(left, right, [1, 2], [3, 4])
    assert (read.src_name, read.dst_name, read.is_read, read.initiator) == ("right", "left", True, "left")
    assert len(read.transfer_ids) == 2
    write = left.initiate_send_transfer(right.metadata, [5, 6], [1, 2], 0, 0)
    assert (write.src_name, write.dst_name, write.is_read, write.initiator) == ("left", "right", False, "left")
    assert left.inflight_read_transfers == {read.transfer_name: read}
    assert left.inflight_send_transfers == {write.transfer_name: write}
    for request in (read, write):
        finish(left, right, request)
    assert left.inflight_send_transfers == left.inflight_read_transfers == {}


# ---- completion ----


def test_both_sides_learn_of_the_end_once(pair: Any, until: Any):
    left, right = pair
    request = pull(left, right)
    until(lambda: left.is_complete(request) and right.is_complete(request))
    assert right.completed_recv_transfers == {"left": {request.transfer_name: {0, 1}}}
    assert right.is_complete(request)
    for engine in (left, right):
        engine.cleanup_transfer(request)
        with pytest.raises(UnknownTransferError, match=request.transfer_name):
            engine.is_complete(request)
        with pytest.raises(UnknownTransferError, match="cleaned up or given up"):
            engine.cleanup_transfer(request)
    assert right.completed_recv_transfers == {"left": {}}


def test_an_incomplete_transfer_is_not_cleaned_up(pair: Any, monkeypatch: pytest.MonkeyPatch):
    left, right = pair
    agent = left.tensor_agents[0][1]
    stuck(monkeypatch, agent)
    request = pull(left, right)
    with pytest.raises(TransferIncompleteError, match="has not ended yet"):
        left.cleanup_transfer(request)
    with pytest.raises(TransferIncompleteError, match="of 'left' has not ended yet"):
        right.cleanup_transfer(unstarted("left", "right"))
    monkeypatch.undo()
    finish(left, right, request)


def test_requests_of_others_are_refused(pair: Any):
    left, right = pair
    request = pull(left, right)
    finish(left, right, request)
    foreign = msgspec.structs.replace(request, src_name="x", dst_name="y")
    with pytest.raises(InvalidTransferError, match="'left' has no part"):
        left.is_complete(foreign)
    for call in (left.is_complete, left.cleanup_transfer, left.abandon_transfer, left.sync_and_release):
        with pytest.raises(InvalidTransferError, match="expected TransferReqData"):
            call("request")
    with pytest.raises(UnknownPeerError, match="not connected to engine 'x'"):
        left.is_complete(msgspec.structs.replace(request, dst_name="x", src_name="left"))
    with pytest.raises(InvalidTransferError, match="replica of transfer"):
        right.is_complete(msgspec.structs.replace(request, src_replica_idx=4))
    never = msgspec.structs.replace(request, transfer_name=uuid.uuid4().hex)
    with pytest.raises(UnknownTransferError, match="engine 'left' has no transfer"):
        left.is_complete(never)
    assert not right.is_complete(never)
    works(left, right)


def meet(agent: TensorAgent, engine: KVTransferEngine) -> None:
    """Loads the agent of an engine's first shard into an unrelated agent."""
    first = engine.metadata.agents_meta[0][0]
    agent.agent.add_peer(first.agent_name, first.metadata)


def test_unexpected_notifications_are_counted_and_dropped(pair: Any, make_engine: Any, until: Any):
    left, right = pair
    stranger = make_engine("stranger", tp=2)

    def arrived(count: int) -> bool:
        for engine in (left, right, stranger):  # At the first contact, both agents must be polled.
            engine.poll()
        return sum(right.notification_counts.values()) == count

    for agent in stranger.tensor_agents[0]:
        meet(agent, right)
        agent.agent.notify(right.metadata.agents_meta[0][0].agent_name, b"0" * 32)
    left0 = left.tensor_agents[0][0].agent
    to = [agent.agent_name for agent in right.metadata.agents_meta[0]]
    request = pull(left, right)
    until(lambda: left.is_complete(request) and right.is_complete(request))
    for message in (b"short", b"\xff" * 32, b"Z" * 32, request.transfer_name.encode()):
        left0.notify(to[0], message)
    until(lambda: arrived(8))
    right.cleanup_transfer(request)
    left0.notify(to[0], request.transfer_name.encode())
    until(lambda: arrived(9))
    assert right.notification_counts == {"accepted": 2, "unknown": 2, "malformed": 3, "duplicate": 1, "late": 1}
    assert right.completed_recv_transfers == {"left": {}}
    # The notification has the right content, but the agent of another shard has sent it. It does not count for this
    # shard.
    meet(left.tensor_agents[0][1], right)
    left.tensor_agents[0][1].agent.notify(to[0], uuid.uuid4().hex.encode())
    until(lambda: arrived(10) and right.notification_counts["unknown"] == 3)


# ---- faults ----


def stuck(monkeypatch: pytest.MonkeyPatch, agent: TensorAgent) -> None:
    """Makes every copy of `agent` appear unfinished until `monkeypatch.undo`."""
    post = agent.agent.post
    monkeypatch.setattr(agent.agent, "post", lambda *args: (post(*args)[0], False))
    monkeypatch.setattr(agent.agent, "done", lambda _handle: False)


@pytest.mark.parametrize("kind", ["read", "send"])
def test_a_failed_post_of_a_later_shard_leaves_nothing_half_posted(
    pair: Any, monkeypatch: pytest.MonkeyPatch, until: Any, kind: str
):
    left, right = pair
    first, second = left.tensor_agents[0]
    stuck(monkeypatch, first)

    def refuse(*_: Any) -> None:
        raise AgentError("no")

    monkeypatch.setattr(second.agent, "post", refuse)
    start = getattr(left, f"initiate_{kind}_transfer")
    with pytest.raises(TransferFailedError, match="peer 'right': no"):
        start(right.metadata, [1, 2], [3, 4], 0, 0)
    assert left.inflight_read_transfers == left.inflight_send_transfers == {}
    pages = {3, 4} if kind == "read" else {1, 2}
    assert left.quarantined_pages(0) == pages
    left.poll()
    assert left.quarantined_pages(0) == pages
    with pytest.raises(InvalidTransferError, match=r"of 'left' are in quarantine"):
        start(right.metadata, [1, 2], [3, 4], 0, 0)
    monkeypatch.undo()
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(0))
    works(left, right)


def test_a_lost_peer_fails_what_it_had_and_says_so(pair: Any, monkeypatch: pytest.MonkeyPatch, until: Any):
    left, right = pair
    first, second = left.tensor_agents[0]
    stuck(monkeypatch, first)
    stuck(monkeypatch, second)
    request = pull(left, right, [0, 1], [2, 3])

    def lost(_handle: Any) -> bool:
        raise AgentError("gone", peer_lost=True)

    monkeypatch.setattr(second.agent, "done", lost)
    for _ in range(2):
        with pytest.raises(PeerFailedError, match=f"transfer {request.transfer_name} failed, peer 'right' is gone"):
            left.is_complete(request)
    assert left.quarantined_pages(0) == {2, 3}
    assert list(left.failed_peers) == ["right"]
    with pytest.raises(PeerFailedError, match="peer 'right' was lost"):
        pull(left, right)
    left.cleanup_transfer(request)
    monkeypatch.undo()
    left.disconnect("right")
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(0))
    left.connect(right.metadata)
    works(left, right)


def test_a_time_out_leaves_only_quarantine(pair: Any, monkeypatch: pytest.MonkeyPatch, until: Any):
    left, right = pair
    stuck(monkeypatch, left.tensor_agents[0][0])
    request = pull(left, right, [0, 1], [2, 3])
    with pytest.raises(TransferTimeoutError, match="peer 'right' did not end within 0.05 s") as caught:
        left.sync_and_release(request, 0.05)
    assert isinstance(caught.value, TimeoutError)
    assert left.inflight_read_transfers == {}
    assert left.quarantined_pages(0) == {2, 3}
    assert left.suspect_peers == {"right"}
    with pytest.raises(UnknownTransferError, match="engine 'left' has no transfer"):
        left.cleanup_transfer(request)
    monkeypatch.undo()
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(0))
    works(left, right)
    assert left.suspect_peers == frozenset()


def test_a_time_out_on_the_passive_side_waits_for_the_last_notification(pair: Any, until: Any):
    left, right = pair
    request = unstarted("left", "right", [2, 3])
    with pytest.raises(TransferTimeoutError, match="with peer 'left'"):
        right.sync_and_release(request, 0.02)
    assert right.quarantined_pages(0) == {2, 3}
    with pytest.raises(UnknownTransferError, match="engine 'right': transfer .* was cleaned up or given up"):
        right.is_complete(request)
    with pytest.raises(InvalidTransferError, match=r"pages \[3\] of 'right' are in quarantine"):
        right.initiate_read_transfer(left.metadata, [0], [3], 0, 0)
    for shard, agent in enumerate(left.tensor_agents[0]):
        assert right.quarantined_pages(0) == {2, 3}
        agent.agent.notify(right.metadata.agents_meta[0][shard].agent_name, request.transfer_name.encode())
        until(lambda: left.poll() + right.poll() == 1)
    assert right.quarantined_pages(0) == frozenset()
    assert right.completed_recv_transfers == {"left": {}}


def test_quarantine_of_a_dead_writer_ends_at_the_callers_word(pair: Any):
    left, right = pair
    request = unstarted("left", "right", [5])
    right.abandon_transfer(request)
    right.disconnect("left")
    assert right.quarantined_pages(0) == {5}
    right.release_quarantine("left")
    assert right.quarantined_pages(0) == frozenset()
    right.connect(left.metadata)
    works(left, right)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_an_invalid_time_out_is_refused(pair: Any, timeout: float):
    left, right = pair
    request = pull(left, right)
    with pytest.raises(InvalidTransferError, match="timeout_s is"):
        left.sync_and_release(request, timeout)
    finish(left, right, request)


def test_a_lost_peer_ends_its_own_transfers(pair: Any, monkeypatch: pytest.MonkeyPatch):
    left, right = pair
    request = unstarted("left", "right", [5])
    assert not right.is_complete(request)

    def lost(*_: Any) -> None:
        raise AgentError("gone", peer_lost=True)

    monkeypatch.setattr(right.tensor_agents[0][0].agent, "post", lost)
    with pytest.raises(PeerFailedError, match="peer 'left' is gone, or has moved or freed its tensors: gone"):
        right.initiate_read_transfer(left.metadata, [0], [0], 0, 0)
    with pytest.raises(PeerFailedError, match="cannot end, because peer 'left' was lost"):
        right.sync_and_release(request)
    with pytest.raises(UnknownTransferError, match="engine 'right': transfer .* was cleaned up or given up"):
        right.cleanup_transfer(request)


def test_abandoning_a_transfer_that_has_ended_holds_nothing(pair: Any, until: Any):
    left, right = pair
    request = pull(left, right)
    until(lambda: left.is_complete(request) and right.is_complete(request))
    for engine in (left, right):
        engine.abandon_transfer(request)
        assert engine.quarantined_pages(0) == frozenset()
        with pytest.raises(UnknownTransferError, match="cleaned up or given up"):
            engine.abandon_transfer(request)


def test_disconnect_fails_what_is_in_flight_and_waits_for_it(pair: Any, monkeypatch: pytest.MonkeyPatch, until: Any):
    left, right = pair
    done = pull(left, right, [0], [0])
    until(lambda: left.is_complete(done) and right.is_complete(done))
    stuck(monkeypatch, left.tensor_agents[0][0])
    request = pull(left, right, [0, 1], [2, 3])
    left.disconnect("right")
    assert left.is_complete(done)
    with pytest.raises(PeerFailedError, match="'right' was disconnected before transfer"):
        left.is_complete(request)
    assert left.quarantined_pages(0) == {2, 3}
    with pytest.raises(AlreadyConnectedError, match="still move bytes"):
        left.connect(right.metadata)
    left.cleanup_transfer(request)
    left.cleanup_transfer(done)
    monkeypatch.undo()
    until(lambda: right.poll() + left.poll() >= 0 and not left.quarantined_pages(0))
    left.connect(right.metadata)
    works(left, right)


# ---- cleanup ----


def test_cleanup_twice_and_nothing_after_it(make_engine: Any):
    left, right = make_engine("left"), make_engine("right")
    left.connect(right.metadata)
    right.connect(left.metadata)
    request = pull(left, right)
    finish(left, right, request)
    agents = left.tensor_agents[0]
    left.cleanup()
    left.cleanup()
    assert left.tensor_agents == []
    assert not agents[0].agent.is_open
    assert left.remote_connections == {}
    for call in (
        lambda: left.connect(right.metadata),
        lambda: left.disconnect("right"),
        lambda: pull(left, right),
        lambda: left.is_complete(request),
        lambda: left.sync_and_release(request),
        left.poll,
    ):
        with pytest.raises(EngineClosedError, match="'left' was cleaned up"):
            call()


def clean_up_with_a_copy_in_flight(conn: Connection) -> None:
    """Runs in a process of its own. Reports how many bytes are written after the engine was cleaned up."""
    tensors = [torch.randint(0, 256, (256, 1 << 18), dtype=torch.uint8) for _ in range(2)]
    left, right = (KVTransferEngine(name, [[of]], total_num_pages=256) for name, of in zip("lr", tensors, strict=True))
    left.connect(right.metadata)
    pull(left, right, range(256), np.random.default_rng(0).permutation(256))
    left.cleanup(drain_s=0)
    after = tensors[0].clone()
    time.sleep(0.1)
    conn.send(int((tensors[0] != after).sum()))
    os._exit(0)


def test_cleanup_with_a_copy_in_flight():
    """NIXL may abort a process if its copy is cut off, as `test_transport` shows. No byte is written after the
    abort.
    """
    process, conn = start(clean_up_with_a_copy_in_flight)
    process.join(100)
    if process.exitcode == 0:
        assert conn.recv() == 0
    else:
        assert process.exitcode == -signal.SIGABRT


def test_cleanup_gives_up_on_a_transfer_that_never_ends(make_engine: Any, monkeypatch: pytest.MonkeyPatch):
    left, right = make_engine("left", tp=2), make_engine("right", tp=2)
    left.connect(right.metadata)
    stuck(monkeypatch, left.tensor_agents[0][0])
    pull(left, right)
    left.cleanup(drain_s=0.1)  # a call that waited for the transfer would never return


def test_the_context_manager_cleans_up():
    with KVTransferEngine("e", [[torch.zeros(4, 64)]], total_num_pages=4) as engine:
        assert engine.tensor_agents
    assert engine.tensor_agents == []


def test_torch_cannot_move_registered_tensors_and_moved_ones_are_noticed(pair: Any) -> None:
    left, right = pair
    tensor = left.tensor_agents[0][0].tensor
    with pytest.raises(MovedMemoryError, match="torch cannot move this memory"):
        tensor.share_memory_()
    finish(left, right, pull(left, right))
    request = pull(left, right)
    storage = tensor.untyped_storage()
    tensor.set_(tensor.clone())
    with pytest.raises(MovedMemoryError, match="this memory was moved from 0x"):
        left.is_complete(request)
    with pytest.raises(MovedMemoryError, match="this memory was moved from 0x"):
        pull(left, right)
    assert storage.nbytes()
