"""Tests a worker with its ranks in one process, over real NIXL: loads, leases, layers, host buffers and shutdown."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.transfer.pair_model import GroupSpec, Pair, RankCaches, Side, worker_config
from tests.transfer.pair_ranks import EngineUnderTest, run_until, transfer
from transfer.connector.config import Timing
from transfer.connector.host_buffer import HostBuffers
from transfer.connector.metadata import ConnectorMetadata, SendRequest
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import EngineClosedError, InvalidEngineError, InvalidTransferError
from transfer.pull.lease import LeaseRef
from transfer.wire.messages import Wanted
from transfer.wire.prompt import Prompt

ROOT = Path(__file__).resolve().parents[3]
PLAIN = Side()
PROMPT = Prompt(range(24))
FULL = (GroupSpec(layers=(0, 1)),)
HYBRID = (
    GroupSpec(layers=(0,)),
    GroupSpec(kind="sliding_window", layers=(1,), window=9),
    GroupSpec(kind="mamba", layers=(2,)),
)


def a_pair(groups: Any = FULL, source: Side = PLAIN, reader: Side = PLAIN, tokens: int = 21, computed: int = 0) -> Pair:
    return Pair(
        groups,
        source,
        reader,
        tokens,
        computed,
        source_blocks=tuple((9,) if spec.kind == "mamba" else (3, 8, 4) for spec in groups),
        reader_blocks=tuple((9,) if spec.kind == "mamba" else (1, 2, 5)[computed // 8 :] for spec in groups),
    )


def worker(one: EngineUnderTest, rank: int = 0) -> NixlConnectorWorker:
    return one.ranks[rank].host.worker


def offer(source: EngineUnderTest, pair: Pair, request_id: str = "r", **options: Any) -> dict[str, Any]:
    source.call("fill_source", pair)
    source.scheduler.offer(request_id, **options)
    run_until(lambda: source.scheduler.is_offered(request_id), source)
    return source.scheduler.params(request_id, PROMPT, pair.source_blocks, pair.num_tokens)


def load(
    reader: EngineUnderTest,
    pair: Pair,
    params: dict[str, Any],
    request_id: str = "r",
    prompt: Prompt = PROMPT,
    **options: Any,
) -> None:
    wanted = reader.scheduler.read(request_id, params, prompt)
    reader.scheduler.load(request_id, wanted, pair.reader_blocks, pair.num_tokens, pair.computed, **options)


def hold(reader: EngineUnderTest, params: dict[str, Any]) -> Wanted:
    read = reader.scheduler.read("r", params, PROMPT)
    reader.scheduler.hold("r", read)
    return read


def lie(source: EngineUnderTest, request_id: str, blocks: list[int]) -> None:
    """Makes a source report these wrong blocks for a request."""
    offer = source.scheduler._offers[request_id]
    offer.held = offer.held._replace(block_ids=(tuple(blocks),))


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1)])
def test_a_hybrid_s_pages_windows_and_states_arrive(engine: Any, tp: tuple[int, int]) -> None:
    pair = a_pair(HYBRID, Side(tp=tp[0], layout="NHD"), Side(tp=tp[1], layout="packed"), 22)
    pair = replace(pair, reader_blocks=((1, 2, 5), (2, 5), (9,)))
    source, reader = engine("p", HYBRID, pair.source), engine("d", HYBRID, pair.reader)
    transfer(pair, source, reader)
    assert (reader.failed, source.sent) == ({}, {"r": "read"})
    assert reader.call("compare", pair) == [[] for _ in reader.ranks]


def test_a_prefix_that_is_there_is_not_read_again(engine: Any) -> None:
    pair = a_pair(computed=8)
    source, reader = engine("p"), engine("d")
    transfer(pair, source, reader)
    assert reader.call("compare", pair) == [[]]
    (stats,) = reader.call("stats")
    # The worker reads 16 of 24 tokens. The factors are layers, sides, heads, tokens, dims and bytes of an element.
    assert stats.num_bytes == 2 * 2 * 4 * 16 * 4 * 4


def test_if_everything_is_cached_the_source_is_notified_and_nothing_is_received(engine: Any) -> None:
    pair = a_pair(tokens=16, computed=16)
    source, reader = engine("p", side=Side(tp=2)), engine("d", side=Side(tp=2))
    transfer(pair, source, reader)
    for _ in range(20):
        reader.step()
    assert (reader.received, reader.failed) == (set(), {})
    assert reader.call("compare", pair) == [[], []]
    assert [stats.num_bytes for stats in reader.call("stats")] == [0, 0]


def test_a_second_request_needs_no_second_handshake(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    for request_id in ("r", "s", "t"):
        transfer(a_pair(), source, reader, request_id)
    # The source was asked for its metadata, and for the pages of each lease.
    assert source.scheduler._server.counts["answered"] in {4, 5}
    assert (source.sent, reader.received) == ({"r": "read", "s": "read", "t": "read"}, {"r", "s", "t"})


def test_ids_are_reported_once_by_the_documented_calls(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    pair = a_pair()
    params = offer(source, pair)
    load(reader, pair, params)
    theirs, ours = worker(source), worker(reader)
    ours.start_load_kv(reader.scheduler.build_metadata())
    sent, received = set[str](), set[str]()
    deadline = time.monotonic() + 10
    while not (sent and received) and time.monotonic() < deadline:
        sent |= theirs.get_finished()[0]
        received |= ours.get_finished()[1]
    assert (sent, received) == ({"r"}, {"r"})
    assert theirs.get_finished() == ours.get_finished() == (set(), set())
    assert ours.get_block_ids_with_load_errors() == set()
    stats = ours.get_kv_connector_stats()
    assert (stats.pulls, stats.interval_pulls) == (1, 1)
    assert ours.get_kv_connector_stats() is None
    assert theirs.get_kv_connector_stats().leases == {"read": 1}


def test_a_failed_load_is_reported_once_with_the_blocks_of_every_group(engine: Any) -> None:
    pair = replace(a_pair(HYBRID, tokens=22), reader_blocks=((1, 2, 5), (12, 15), (9,)))
    source, reader = engine("p", HYBRID), engine("d", HYBRID)
    params = offer(source, pair)
    source.scheduler.abort("r", "preempted")
    run_until(lambda: source.sent, source)
    load(reader, pair, params, first_blocks=(0, 1, 0))
    run_until(lambda: reader.received, source, reader)
    assert list(reader.failed) == ["r"]
    assert f"lease {params['lease_id']} has ended" in reader.failed["r"]
    assert reader.bad_blocks == {1, 2, 5, 12, 15, 9}
    assert source.sent == {"r": "preempted"}
    for _ in range(20):
        reader.step()
    assert list(reader.failed) == ["r"]


def test_an_error_of_one_load_affects_no_other(engine: Any) -> None:
    source, reader = engine("p", side=Side(tp=2)), engine("d")
    pair = a_pair(source=Side(tp=2))
    wrong: dict[str, tuple[dict[str, Any], Prompt, str]] = {
        "short": ({}, PROMPT, "blocks of 8 tokens"),
        "range": ({}, PROMPT, "remote page 2000 does not exist: the pages are 0 to 23"),
        "more": (
            {"remote_num_tokens": 22},
            Prompt(range(30)),
            "holds the pages of 21 tokens, but 22 tokens were asked for",
        ),
        "lease": ({"lease_id": "0x123"}, PROMPT, "lease 0x0000000000000123 has ended, or engine 'p' never had it"),
        "engine": ({"remote_engine_id": "q"}, PROMPT, "engine 'q' is not here: ['p']"),
        "port": ({"remote_port": 9}, PROMPT, "no answer from tcp://127.0.0.1:9 in "),
        "prompt": ({}, Prompt([*range(20), 7]), "holds the pages of another prompt: the digest of its first 21"),
        "salt": ({}, PROMPT._replace(salt="another tenant's"), "holds the pages of another prompt"),
        "keys": ({}, PROMPT._replace(keys=((20, b"an image"),)), "holds the pages of another prompt"),
    }
    for request_id, (change, prompt, _) in wrong.items():
        params = offer(source, pair, request_id)
        load(reader, replace(pair, reader_blocks=((11, 12, 13),)), params | change, request_id, prompt)
    lie(source, "short", [3])
    lie(source, "range", [3, 8, 2000])
    load(reader, pair, offer(source, pair, "good"), "good")
    run_until(lambda: len(reader.received) == 10, source, reader)
    assert set(reader.failed) == set(wrong)
    assert all(f"request {request_id!r}" in reason for request_id, reason in reader.failed.items())
    # The internal key of a request contains "#". No reason of a failure shows this key.
    assert not any("#" in reason for reason in reader.failed.values())
    for request_id, (_, _, part) in wrong.items():
        assert part in reader.failed[request_id], reader.failed[request_id]
    # Every lease that the params name has ended. Params that name no lease have ended none.
    named = {"good", "short", "range", "more", "prompt", "salt", "keys"}
    run_until(lambda: set(source.sent) >= named, source, reader)
    assert set(source.sent) == named
    for tensor in reader.ranks[0].host.caches.tensors.values():
        # The pages get other contents, because the pull has read them before its fence failed.
        tensor[:, [11, 12, 13]] = -1
    assert reader.call("compare", pair) == [[]]


def test_too_few_blocks_of_ours_are_an_error_of_their_request(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    pair = a_pair()
    params = offer(source, pair)
    load(reader, replace(pair, reader_blocks=((1, 2),)), params)
    run_until(lambda: reader.received, source, reader)
    assert "local pages: got 2, but tokens 0 to 24 take 3 pages" in reader.failed["r"]
    run_until(lambda: source.sent, source, reader)  # The source is notified, too.
    assert "local pages" in source.sent["r"]


def test_blocks_that_cannot_be_resolved_fail_their_request_and_the_step_continues(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    pair = a_pair()
    bad, good = offer(source, pair, "bad"), offer(source, pair, "good")
    load(reader, replace(pair, reader_blocks=((11, 12),)), bad, "bad", first_blocks=(2,))
    load(reader, pair, good, "good")
    run_until(lambda: len(reader.received) == 2, source, reader)
    assert reader.failed == {
        "bad": "request 'bad': group 0: its blocks on this engine begin with token 16, but the load starts at token 0"
    }
    assert reader.bad_blocks == {11, 12}
    assert reader.call("compare", pair) == [[]]
    run_until(lambda: len(source.sent) == 2, source, reader)
    assert "its blocks on this engine begin with token 16" in source.sent["bad"]


def test_blocks_for_a_held_source_that_cannot_be_resolved_end_the_load(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    pair = a_pair()
    read = hold(reader, offer(source, pair))
    run_until(lambda: len(worker(reader)._rank.puller), source, reader)
    reader.scheduler.load("r", read, pair.reader_blocks, 21, 0, first_blocks=(9,))
    run_until(lambda: reader.received and source.sent, source, reader)
    assert "its blocks on this engine begin with token 72" in reader.failed["r"]
    assert "its blocks on this engine begin with token 72" in source.sent["r"]


@pytest.mark.parametrize("computed", [0, 8, 21])
def test_a_lease_is_renewed_while_its_reader_has_no_blocks(engine: Any, computed: int) -> None:
    pair = a_pair(computed=computed, reader=Side(tp=2))
    # The lease is long enough for a thread that a busy machine does not run for two seconds.
    source, reader = engine("p", key=b"k", timing=Timing(lease=3.0)), engine("d", side=pair.reader, key=b"k")
    read = hold(reader, offer(source, pair))
    end = time.monotonic() + 4.0
    run_until(lambda: time.monotonic() > end, source, reader)
    assert not source.sent
    reader.scheduler.load("r", read, pair.reader_blocks, pair.num_tokens, computed)
    run_until(lambda: source.sent and reader.received, source, reader)
    assert (reader.failed, source.sent) == ({}, {"r": "read"})
    assert reader.call("compare", pair) == [[], []]


def test_a_held_source_is_let_go_when_its_reader_gives_up(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    hold(reader, offer(source, a_pair()))
    reader.step()
    assert reader.scheduler.cancel("r", "the client left")
    run_until(lambda: reader.received and source.sent, source, reader)
    assert (reader.failed, reader.bad_blocks, source.sent) == ({}, set(), {"r": "the client left"})


def test_an_unread_lease_ends_by_itself(engine: Any) -> None:
    source = engine("p", timing=Timing(lease=0.2))
    offer(source, a_pair())
    run_until(lambda: source.sent, source)
    assert source.sent["r"].startswith("expired after 0.2 s")


def test_pages_go_through_host_buffers_if_a_device_cannot_be_registered(engine: Any) -> None:
    side = Side(host_buffer=True, layout="NHD")
    source, reader = engine("p", HYBRID, side), engine("d", HYBRID, side)
    pair = replace(a_pair(HYBRID, side, side, 24), reader_blocks=((1, 2, 5), (5,), (9,)))
    pair = replace(pair, reader_blocks=((1, 2, 5), (2, 5), (9,)))
    copies: list[tuple[Any, ...]] = []
    host = worker(reader)._host
    assert isinstance(host, HostBuffers)

    def copy(here: Any, there: Any, ids: Any, other: Any, way: str) -> None:
        copies.append((sorted(here), list(ids), way))
        host.copy_pages(here, there, ids, other, way)

    worker(reader).set_host_xfer_buffer_ops(copy)
    transfer(pair, source, reader)
    assert reader.call("compare", pair) == [[]]
    assert [way for _, _, way in copies] == ["h2d"] * 3
    assert copies[0] == (["model.layers.0.mixer"], [1, 2, 5], "h2d")


def test_a_device_that_cannot_be_registered_is_refused_without_the_host_buffer_option() -> None:
    config = worker_config(FULL, Side(), 0, "e", "i")
    strange = NixlConnectorWorker(msgspec.structs.replace(config, registrable=("cuda",)))
    with pytest.raises(InvalidEngineError, match="memory on 'cpu' cannot be registered.*kv_buffer_device is ''"):
        strange.register_kv_caches(RankCaches(FULL, Side(), 0).tensors)
    strange.shutdown()


def test_metadata_may_come_by_another_way_than_the_handshake(engine: Any) -> None:
    source, reader = engine("p", side=Side(tp=2)), engine("d")
    metadata = [worker(source, rank).get_handshake_metadata() for rank in range(2)]
    assert worker(reader).add_remote_agent(source.scheduler.address, metadata) == "p"
    transfer(a_pair(source=Side(tp=2)), source, reader)
    assert source.scheduler._server.counts["answered"] == 1, (
        "the source answered for the pages of the lease, and not for its metadata"
    )


def test_page_checks_find_a_page_that_changed_on_its_way(engine: Any) -> None:
    side = Side(layout="blocks-first")
    source, reader = engine("p", side=side, page_checks=True), engine("d", side=side, verify=1.0)
    pair = a_pair(source=side, reader=side)
    source.call("fill_source", pair)
    source.scheduler.offer("r", block_ids=pair.source_blocks)
    run_until(lambda: source.scheduler.is_offered("r"), source)
    # The page changes after its checksum was computed.
    source.ranks[0].host.caches.tensors["model.layers.1.mixer"][8, 0, 0, 0, 0] ^= 1
    load(reader, pair, source.scheduler.params("r", PROMPT, pair.source_blocks, 21))
    run_until(lambda: reader.received, source, reader)
    assert "1 pages still differ from their source" in reader.failed["r"]


def test_starting_a_lease_or_load_twice_is_refused_and_changes_nothing(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    pair = a_pair()
    params = offer(source, pair)
    lease = LeaseRef(5, 9, 1.0)
    with pytest.raises(InvalidTransferError, match="request 'r': its lease 0x[0-9a-f]+ has not ended yet"):
        worker(source).start_load_kv(
            ConnectorMetadata(reqs_to_send={"q": SendRequest(lease=lease), "r": SendRequest(lease=lease)})
        )
    assert worker(source)._book.leases.keys() == {"r"}
    load(reader, pair, params)
    metadata = reader.scheduler.build_metadata()
    worker(reader).start_load_kv(metadata)
    with pytest.raises(InvalidTransferError, match="request 'r': its load has not ended yet"):
        worker(reader).start_load_kv(metadata)
    run_until(lambda: reader.received, source, reader)
    assert not reader.failed


def test_only_leases_that_stand_are_started_or_ended() -> None:
    source, did = NixlConnectorWorker(worker_config(FULL, Side(), 0, "e", "i")), []
    source._thread = SimpleNamespace(call_soon=lambda method, *given: did.append((method.__name__, *given)))
    source._book.leases["r"] = 5
    source.start_load_kv(ConnectorMetadata(reqs_computed=["r", "x"], reqs_not_processed={"r": "left", "x": "left"}))
    assert did == [("start_clock", 5), ("revoke", 5, "left")]


def test_shutting_down_reports_open_leases_and_loads_and_can_be_done_twice(engine: Any) -> None:
    source, reader = engine("p"), engine("d")
    hold(reader, offer(source, a_pair()))
    run_until(lambda: len(worker(reader)._rank.puller), source, reader)
    ours, theirs = worker(reader), worker(source)
    for _ in range(2):
        ours.shutdown()
        theirs.shutdown()
    assert ours.get_finished() == (set(), {"r"})
    assert ours.get_failed_loads() == {"r": "request 'r': this engine was shut down"}
    assert theirs.get_finished() == ({"r"}, set())
    for call in (
        lambda: ours.start_load_kv(ConnectorMetadata()),
        ours.get_handshake_metadata,
        lambda: ours.add_remote_agent("tcp://x:1", [b""]),
    ):
        with pytest.raises(EngineClosedError, match="engine 'd' rank 0: it was shut down"):
            call()
    assert ours.get_kv_connector_stats() is None


def test_shutting_down_after_a_failed_start_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = worker_config(FULL, Side(), 0, "e", "i")
    fresh = NixlConnectorWorker(config)
    with pytest.raises(EngineClosedError, match="no caches are registered: register_kv_caches comes first"):
        fresh.start_load_kv(ConnectorMetadata())
    fresh.shutdown()
    broken = NixlConnectorWorker(config)
    with monkeypatch.context() as patched:
        patched.setattr("transfer.connector.worker.start_thread", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            broken.register_kv_caches(RankCaches(FULL, Side(), 0).tensors)
    broken.shutdown()
    broken.shutdown()
    with pytest.raises(EngineClosedError, match="engine 'e' rank 0: it was shut down"):
        broken.get_handshake_metadata()


def test_caches_are_registered_once(engine: Any) -> None:
    source = engine("p")
    with pytest.raises(InvalidEngineError, match="engine 'p' rank 0: its caches are already registered"):
        worker(source).register_kv_caches(source.ranks[0].host.caches.tensors)


def test_a_worker_that_is_dropped_ends_its_thread() -> None:
    dropped = NixlConnectorWorker(worker_config(FULL, Side(), 0, "e", "i"))
    dropped.register_kv_caches(RankCaches(FULL, Side(), 0).tensors)
    thread = dropped._thread._thread
    del dropped
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


CHILD = """
from tests.transfer.pair_model import GroupSpec, RankCaches, Side, worker_config
from transfer.connector.worker import NixlConnectorWorker
groups = (GroupSpec(),)
caches = RankCaches(groups, Side(), 0)
left = NixlConnectorWorker(worker_config(groups, Side(), 0, "e", "i"))
left.register_kv_caches(caches.tensors)
print("ready")
"""


def test_an_interpreter_that_ends_with_a_worker_open_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
