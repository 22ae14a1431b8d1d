"""The scheduler's side: what it asks of every rank, when it believes them, and what it makes of strangers' params."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from transfer.connector.config import GroupConfig, StatePart, Timing, WorkerConfig
from transfer.connector.metadata import ConnectorMetadata, Progress, WorkerOutput
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.errors import (
    HandshakeError,
    InvalidEngineError,
    InvalidLeaseError,
    InvalidTransferError,
    TransferParamsError,
)
from transfer.pull.lease import LeaseBook
from transfer.pull.lease_slots import LEASE_SLOTS

FULL = GroupConfig(layers={"a": 0}, block_size=8, head_dim=4)
WINDOW = GroupConfig(layers={"w": 1}, kind="sliding_window", window=10, block_size=8, head_dim=4)
STATE = GroupConfig(layers={"m": 2}, kind="mamba", state=(StatePart(kind="ssm", units=4),))


@pytest.fixture
def make() -> Iterator[Callable[..., NixlConnectorScheduler]]:
    made: list[NixlConnectorScheduler] = []

    def build(*groups: GroupConfig, tp: int = 1, **options: Any) -> NixlConnectorScheduler:
        config = WorkerConfig(
            engine_id="p", incarnation="i", groups=groups or (FULL,), model="m", tp_size=tp, timing=Timing(lease=7.0)
        )
        scheduler = NixlConnectorScheduler(config, **options)
        scheduler.set_handshake_metadata(dict.fromkeys(range(tp), b"rank"))
        made.append(scheduler)
        return scheduler

    yield build
    for scheduler in made:
        scheduler.close()


def offered(scheduler: NixlConnectorScheduler, request_id: str = "r", **options: Any) -> Progress:
    scheduler.offer(request_id, **options)
    scheduler.build_metadata()
    for rank in range(scheduler.config.ranks):
        progress = scheduler.update(rank, WorkerOutput(offered={request_id: ""}))
    return progress


def params(
    scheduler: NixlConnectorScheduler, request_id: str = "r", tokens: int = 20, **options: Any
) -> dict[str, Any]:
    return scheduler.params(request_id, [[5, 6, 7]] * len(scheduler.config.groups), tokens, **options)


def test_a_lease_s_id_leaves_when_it_stands_on_every_rank_and_not_before(make: Any) -> None:
    scheduler = make(tp=2)
    with pytest.raises(InvalidLeaseError, match="request 'r': no lease of it stands: it has none"):
        params(scheduler)
    scheduler.offer("r")
    metadata = scheduler.build_metadata()
    assert (metadata.reqs_to_send["r"].lease.duration_s, metadata.reqs_to_send["r"].running) == (7.0, False)
    with pytest.raises(InvalidLeaseError, match=r"ranks \[0, 1\] have not granted it yet"):
        params(scheduler)
    assert not scheduler.update(1, WorkerOutput(offered={"r": ""})).offered
    with pytest.raises(InvalidLeaseError, match=r"ranks \[0\] have not granted it yet"):
        params(scheduler)
    assert scheduler.update(0, WorkerOutput(offered={"r": ""})).offered == {"r"}
    made = params(scheduler)
    assert made["lease_id"] == f"{metadata.reqs_to_send['r'].lease.lease_id:#018x}"
    assert (made["tp_size"], made["remote_num_tokens"], made["remote_block_ids"]) == (2, 20, [[5, 6, 7]])


def test_pages_go_when_every_rank_s_lease_has_ended(make: Any) -> None:
    scheduler = make(tp=3)
    offered(scheduler)
    assert scheduler.update(1, WorkerOutput(sent={"r": "read"})).sent == {}
    assert scheduler.update(1, WorkerOutput(sent={"r": "read"})).sent == {}  # one rank twice is one rank
    assert scheduler.update(2, WorkerOutput(sent={"r": "expired"})).sent == {}
    with pytest.raises(InvalidLeaseError, match=r"it has ended on ranks \[1, 2\]: expired"):
        params(scheduler)
    assert scheduler.update(0, WorkerOutput(sent={"r": "read"})).sent == {"r": "expired"}
    assert scheduler.update(0, WorkerOutput(sent={"r": "read"})).sent == {}
    scheduler.offer("r")


def test_a_lease_that_one_rank_does_not_grant_ends_on_the_others(make: Any) -> None:
    scheduler = make(tp=2)
    scheduler.offer("r")
    scheduler.build_metadata()
    scheduler.update(0, WorkerOutput(offered={"r": ""}))
    assert not scheduler.update(1, WorkerOutput(offered={"r": "slot 0 is taken"})).sent
    assert scheduler.build_metadata().reqs_not_processed == {"r": "not granted by every rank"}
    assert scheduler.update(0, WorkerOutput(sent={"r": "not granted by every rank"})).sent == {"r": "slot 0 is taken"}


def test_an_aborted_request_is_told_of_no_more_and_its_pages_wait_for_the_ranks(make: Any) -> None:
    scheduler = make(tp=2)
    assert not scheduler.abort("r", "left")
    offered(scheduler)
    assert scheduler.abort("r", "left")
    with pytest.raises(InvalidLeaseError, match="it is being ended"):
        params(scheduler)
    assert scheduler.build_metadata().reqs_not_processed == {"r": "left"}
    assert scheduler.update(0, WorkerOutput(sent={"r": "left"})).sent == {}
    assert scheduler.update(1, WorkerOutput(sent={"r": "left"})).sent == {"r": "left"}


def test_a_request_has_one_lease_and_leases_have_slots_of_their_own(make: Any) -> None:
    scheduler = make()
    scheduler.offer("r")
    with pytest.raises(InvalidLeaseError, match="request 'r': its lease has not ended on every rank yet"):
        scheduler.offer("r")
    for number in range(LEASE_SLOTS - 1):
        scheduler.offer(f"r{number}")
    sends = scheduler.build_metadata().reqs_to_send
    assert {send.lease.slot for send in sends.values()} == set(range(LEASE_SLOTS))
    assert len({send.lease.lease_id for send in sends.values()}) == LEASE_SLOTS
    with pytest.raises(InvalidLeaseError, match="request 'x': all 4096 lease slots are taken"):
        scheduler.offer("x")
    scheduler.update(0, WorkerOutput(sent={"r5": "read"}))
    scheduler.offer("x")
    assert scheduler.build_metadata().reqs_to_send["x"].lease.slot == sends["r5"].lease.slot
    assert len(LeaseBook().words) == LEASE_SLOTS


def test_blocks_are_those_of_the_tokens_and_of_the_window(make: Any) -> None:
    scheduler = make(FULL, WINDOW, STATE)
    offered(scheduler)
    rows = [[*range(10, 18)], [*range(20, 28)], [1, 2, 3]]
    assert scheduler.params("r", rows, 49)["remote_block_ids"] == [[*range(10, 17)], [24, 25, 26], [3]]
    later = scheduler.params("r", [rows[0][3:], rows[1][3:], [3]], 49, first_blocks=(3, 3, 0))
    assert later["remote_block_ids"] == [[13, 14, 15, 16], [24, 25, 26], [3]]
    with pytest.raises(InvalidTransferError, match="group 0: blocks 0 to 8, 65 tokens fill 9 of 8"):
        scheduler.params("r", rows, 65)
    with pytest.raises(InvalidTransferError, match="blocks of 2 groups, there are 3"):
        scheduler.params("r", rows[:2], 49)


def test_the_time_of_a_running_request_s_lease_runs_when_it_is_computed(make: Any) -> None:
    scheduler = make()
    offered(scheduler, running=True)
    scheduler.computed("r")
    assert scheduler.build_metadata().reqs_computed == ["r"]


def loading(scheduler: NixlConnectorScheduler, read: Any, tokens: int = 21, computed: int = 0, **options: Any) -> Any:
    groups = len(scheduler.config.groups)
    scheduler.load("R", read, [[1, 2, 3]] * groups, tokens, computed, **options)
    return scheduler.build_metadata().reqs_to_recv["R"]


def test_what_was_made_is_read_and_loaded(make: Any) -> None:
    source, reader = make(tp=2), make()
    offered(source)
    read = reader.read("R", params(source))
    assert reader.external_tokens("R", read, 21, 8) == 12
    asked = loading(reader, read, 21, 8)
    where = asked.pages.source
    assert (where.address, where.engine_id, where.ranks) == (source.address, "p", 2)
    assert (asked.num_computed_tokens, asked.num_tokens, asked.total_tokens) == (8, 21, 20)
    assert (asked.first_blocks, asked.local_block_ids, asked.pages.block_ids) == ((1,), ((1, 2, 3),), ((5, 6, 7),))


def test_a_prompt_may_be_longer_or_shorter_than_what_the_source_computed(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    read = scheduler.read("R", params(scheduler))
    assert [scheduler.external_tokens("R", read, tokens, 0) for tokens in (10, 20, 21, 100)] == [10, 20, 20, 20]
    assert scheduler.external_tokens("R", read, 21, 24) == 0
    assert loading(scheduler, read, 10).total_tokens == 10


def test_a_state_after_more_tokens_than_the_request_has_is_of_no_use(make: Any) -> None:
    scheduler = make(FULL, STATE)
    offered(scheduler)
    read = scheduler.read("R", params(scheduler))
    assert scheduler.external_tokens("R", read, 20, 0) == 20
    with pytest.raises(TransferParamsError, match=r"request 'R'.*remote_num_tokens.* is 20: a state after more tokens"):
        scheduler.external_tokens("R", read, 19, 0)


def test_a_load_is_over_when_every_rank_says_so(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler)))
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended on every rank yet"):
        scheduler.load("R", scheduler.read("R", params(scheduler)), [[1]], 21, 0)
    assert not scheduler.update(0, WorkerOutput(received={"R"})).received
    assert not scheduler.update(0, WorkerOutput(received={"R"})).received
    assert scheduler.update(1, WorkerOutput(received={"R"})).received == {"R"}
    assert not scheduler.update(1, WorkerOutput(received={"R"})).received


def test_a_load_fails_once_and_the_other_ranks_give_it_up(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler)))
    failed = WorkerOutput(failed={"R": "lost"}, block_ids_with_errors={1, 2})
    progress = scheduler.update(0, failed)
    assert (progress.failed, progress.block_ids_with_errors, progress.received) == ({"R": "lost"}, {1, 2}, set())
    assert scheduler.build_metadata().reqs_to_cancel == {"R": "lost"}
    again = scheduler.update(1, failed)
    assert (again.failed, again.block_ids_with_errors) == ({}, set())
    scheduler.update(1, WorkerOutput(received={"R"}))
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_nothing_to_load_is_told_to_the_source_and_waited_for_by_nobody(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    asked = loading(scheduler, scheduler.read("R", params(scheduler)), 20, 24)
    assert asked.num_computed_tokens > asked.total_tokens == 20
    scheduler.load("R", scheduler.read("R", params(scheduler)), [[]], 20, 24)  # there is no load that has not ended


def test_params_can_be_made_in_the_step_that_tells_the_workers_of_the_lease(make: Any) -> None:
    scheduler = make(tp=2)
    scheduler.offer("r")
    with pytest.raises(InvalidLeaseError, match="have not granted it yet"):
        params(scheduler)
    early = params(scheduler, granted=False)
    for rank in range(2):
        scheduler.update(rank, WorkerOutput(offered={"r": ""}))
    assert params(scheduler) == early
    scheduler.abort("r", "the client left")
    with pytest.raises(InvalidLeaseError, match="it is being ended"):
        params(scheduler, granted=False)


def test_a_source_is_held_until_there_are_blocks(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    read = scheduler.read("R", params(scheduler))
    scheduler.hold("R", read)
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.hold("R", read)
    held = scheduler.build_metadata().reqs_to_recv["R"]
    assert (held.pages, held.local_block_ids) == (read, ())
    asked = loading(scheduler, read, 17, 8)
    assert (asked.num_computed_tokens, asked.total_tokens, asked.local_block_ids) == (8, 17, ((1, 2, 3),))
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.load("R", read, [[1, 2, 3]], 17, 8)
    scheduler.update(0, WorkerOutput(received={"R"}))
    assert scheduler.update(1, WorkerOutput(received={"R"})).received == {"R"}


def test_where_nothing_is_missing_after_all_a_held_source_is_waited_for(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    read = scheduler.read("R", params(scheduler))
    scheduler.hold("R", read)
    scheduler.build_metadata()
    assert loading(scheduler, read, 20, 24).local_block_ids
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}
    scheduler.hold("R", read)  # no rank has heard of this one: it is as if it had not been
    assert loading(scheduler, read, 20, 24).local_block_ids
    scheduler.load("R", read, [[]], 20, 24)


def test_a_source_that_could_not_be_held_is_not_loaded_from(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    read = scheduler.read("R", params(scheduler))
    scheduler.hold("R", read)
    scheduler.build_metadata()
    assert scheduler.update(0, WorkerOutput(failed={"R": "lost"})).failed == {"R": "lost"}
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.load("R", read, [[1, 2, 3]], 20, 0)


def test_a_load_is_given_up_on_every_rank(make: Any) -> None:
    scheduler = make()
    assert not scheduler.cancel("R", "left")
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler)))
    assert scheduler.cancel("R", "left")
    assert scheduler.build_metadata().reqs_to_cancel == {"R": "left"}
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_a_step_s_work_is_handed_out_once_and_travels(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    scheduler.save("r", [[1, 2]])
    scheduler.load("R", scheduler.read("R", params(scheduler)), [[1, 2, 3]], 21, 0)
    scheduler.offer("s", running=True, engines=2, block_ids=[[4, 5]])
    metadata = scheduler.build_metadata()
    for copy in (
        pickle.loads(pickle.dumps(metadata)),  # noqa: S301 -- our own bytes
        msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=ConnectorMetadata),
    ):
        assert copy == metadata
    assert scheduler.build_metadata() == ConnectorMetadata()
    assert not WorkerOutput()
    assert WorkerOutput(received={"r"})


def test_the_handshake_needs_every_rank_and_answers_for_the_last_said(make: Any) -> None:
    scheduler = make(tp=2)
    assert scheduler.address.startswith("tcp://127.0.0.1:")
    with pytest.raises(HandshakeError, match=r"metadata of ranks \[0\], it has 2"):
        scheduler.set_handshake_metadata({0: b"x"})
    before = scheduler.address
    assert scheduler.set_handshake_metadata({0: b"x", 1: b"y"}) == before
    scheduler.close()
    scheduler.close()
    with pytest.raises(HandshakeError, match="is not known yet"):
        _ = scheduler.address


def test_readers_are_told_the_name_they_can_reach(make: Any) -> None:
    scheduler = make(host="prefill-3")
    offered(scheduler)
    assert params(scheduler)["remote_host"] == "prefill-3"


def test_a_rank_that_there_is_not_is_refused(make: Any) -> None:
    with pytest.raises(InvalidTransferError, match="output of rank 1, there are 0 to 0"):
        make().update(1, WorkerOutput())
    with pytest.raises(InvalidEngineError):
        make(tp=0)
