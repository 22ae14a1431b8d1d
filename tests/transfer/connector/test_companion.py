"""The scheduler's side: what it asks of every rank, when it believes them, and what it makes of strangers' params."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from transfer.connector.companion import TransferCompanion
from transfer.connector.config import GroupConfig, StatePart, Timing, WorkerConfig
from transfer.connector.metadata import ConnectorMetadata, Progress, WorkerOutput
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
def make() -> Iterator[Callable[..., TransferCompanion]]:
    made: list[TransferCompanion] = []

    def build(*groups: GroupConfig, tp: int = 1, **options: Any) -> TransferCompanion:
        config = WorkerConfig(
            engine_id="p", incarnation="i", groups=groups or (FULL,), model="m", tp_size=tp, timing=Timing(lease=7.0)
        )
        companion = TransferCompanion(config, **options)
        companion.set_handshake_metadata(dict.fromkeys(range(tp), b"rank"))
        made.append(companion)
        return companion

    yield build
    for companion in made:
        companion.close()


def offered(companion: TransferCompanion, request_id: str = "r", **options: Any) -> Progress:
    companion.offer(request_id, **options)
    companion.build_metadata()
    for rank in range(companion.config.ranks):
        progress = companion.update(rank, WorkerOutput(offered={request_id: ""}))
    return progress


def params(companion: TransferCompanion, request_id: str = "r", tokens: int = 20, **options: Any) -> dict[str, Any]:
    return companion.params(request_id, [[5, 6, 7]] * len(companion.config.groups), tokens, **options)


def test_a_lease_s_id_leaves_when_it_stands_on_every_rank_and_not_before(make: Any) -> None:
    companion = make(tp=2)
    with pytest.raises(InvalidLeaseError, match="request 'r': no lease of it stands: it has none"):
        params(companion)
    companion.offer("r")
    metadata = companion.build_metadata()
    assert (metadata.reqs_to_send["r"].lease.duration_s, metadata.reqs_to_send["r"].running) == (7.0, False)
    with pytest.raises(InvalidLeaseError, match=r"ranks \[0, 1\] have not granted it yet"):
        params(companion)
    assert not companion.update(1, WorkerOutput(offered={"r": ""})).offered
    with pytest.raises(InvalidLeaseError, match=r"ranks \[0\] have not granted it yet"):
        params(companion)
    assert companion.update(0, WorkerOutput(offered={"r": ""})).offered == {"r"}
    made = params(companion)
    assert made["lease_id"] == f"{metadata.reqs_to_send['r'].lease.lease_id:#018x}"
    assert (made["tp_size"], made["remote_num_tokens"], made["remote_block_ids"]) == (2, 20, [[5, 6, 7]])


def test_pages_go_when_every_rank_s_lease_has_ended(make: Any) -> None:
    companion = make(tp=3)
    offered(companion)
    assert companion.update(1, WorkerOutput(sent={"r": "read"})).sent == {}
    assert companion.update(1, WorkerOutput(sent={"r": "read"})).sent == {}  # one rank twice is one rank
    assert companion.update(2, WorkerOutput(sent={"r": "expired"})).sent == {}
    with pytest.raises(InvalidLeaseError, match=r"it has ended on ranks \[1, 2\]: expired"):
        params(companion)
    assert companion.update(0, WorkerOutput(sent={"r": "read"})).sent == {"r": "expired"}
    assert companion.update(0, WorkerOutput(sent={"r": "read"})).sent == {}
    companion.offer("r")


def test_a_lease_that_one_rank_does_not_grant_ends_on_the_others(make: Any) -> None:
    companion = make(tp=2)
    companion.offer("r")
    companion.build_metadata()
    companion.update(0, WorkerOutput(offered={"r": ""}))
    assert not companion.update(1, WorkerOutput(offered={"r": "slot 0 is taken"})).sent
    assert companion.build_metadata().reqs_not_processed == {"r": "not granted by every rank"}
    assert companion.update(0, WorkerOutput(sent={"r": "not granted by every rank"})).sent == {"r": "slot 0 is taken"}


def test_an_aborted_request_is_told_of_no_more_and_its_pages_wait_for_the_ranks(make: Any) -> None:
    companion = make(tp=2)
    assert not companion.abort("r", "left")
    offered(companion)
    assert companion.abort("r", "left")
    with pytest.raises(InvalidLeaseError, match="it is being ended"):
        params(companion)
    assert companion.build_metadata().reqs_not_processed == {"r": "left"}
    assert companion.update(0, WorkerOutput(sent={"r": "left"})).sent == {}
    assert companion.update(1, WorkerOutput(sent={"r": "left"})).sent == {"r": "left"}


def test_a_request_has_one_lease_and_leases_have_slots_of_their_own(make: Any) -> None:
    companion = make()
    companion.offer("r")
    with pytest.raises(InvalidLeaseError, match="request 'r': its lease has not ended on every rank yet"):
        companion.offer("r")
    for number in range(LEASE_SLOTS - 1):
        companion.offer(f"r{number}")
    sends = companion.build_metadata().reqs_to_send
    assert {send.lease.slot for send in sends.values()} == set(range(LEASE_SLOTS))
    assert len({send.lease.lease_id for send in sends.values()}) == LEASE_SLOTS
    with pytest.raises(InvalidLeaseError, match="request 'x': all 4096 lease slots are taken"):
        companion.offer("x")
    companion.update(0, WorkerOutput(sent={"r5": "read"}))
    companion.offer("x")
    assert companion.build_metadata().reqs_to_send["x"].lease.slot == sends["r5"].lease.slot
    assert len(LeaseBook().words) == LEASE_SLOTS


def test_blocks_are_those_of_the_tokens_and_of_the_window(make: Any) -> None:
    companion = make(FULL, WINDOW, STATE)
    offered(companion)
    rows = [[*range(10, 18)], [*range(20, 28)], [1, 2, 3]]
    assert companion.params("r", rows, 49)["remote_block_ids"] == [[*range(10, 17)], [24, 25, 26], [3]]
    later = companion.params("r", [rows[0][3:], rows[1][3:], [3]], 49, first_blocks=(3, 3, 0))
    assert later["remote_block_ids"] == [[13, 14, 15, 16], [24, 25, 26], [3]]
    with pytest.raises(InvalidTransferError, match="group 0: blocks 0 to 8, 65 tokens fill 9 of 8"):
        companion.params("r", rows, 65)
    with pytest.raises(InvalidTransferError, match="blocks of 2 groups, there are 3"):
        companion.params("r", rows[:2], 49)


def test_a_running_request_tells_how_much_is_to_come(make: Any) -> None:
    companion = make()
    offered(companion, running=True)
    made = params(companion, tokens=16, total_tokens=50)
    assert (made["remote_num_tokens"], made["remote_total_tokens"]) == (16, 50)
    companion.computed("r")
    assert companion.build_metadata().reqs_computed == ["r"]


def loading(companion: TransferCompanion, read: Any, tokens: int = 21, computed: int = 0, **options: Any) -> Any:
    groups = len(companion.config.groups)
    companion.load("R", read, [[1, 2, 3]] * groups, tokens, computed, **options)
    return companion.build_metadata().reqs_to_recv["R"]


def test_what_was_made_is_read_and_loaded(make: Any) -> None:
    source, reader = make(tp=2), make()
    offered(source)
    read = reader.read("R", params(source))
    assert reader.external_tokens("R", read, 21, 8) == 12
    asked = loading(reader, read, 21, 8)
    where = asked.pages.source
    assert (where.address, where.engine_id, where.ranks) == (source.address, "p", 2)
    assert (asked.num_computed_tokens, asked.num_tokens, asked.total_tokens, asked.last) == (8, 21, 20, True)
    assert (asked.first_blocks, asked.local_block_ids, asked.pages.block_ids) == ((1,), ((1, 2, 3),), ((5, 6, 7),))


def test_a_prompt_may_be_longer_or_shorter_than_what_the_source_computed(make: Any) -> None:
    companion = make()
    offered(companion)
    read = companion.read("R", params(companion))
    assert [companion.external_tokens("R", read, tokens, 0) for tokens in (10, 20, 21, 100)] == [10, 20, 20, 20]
    assert companion.external_tokens("R", read, 21, 24) == 0
    assert loading(companion, read, 10).total_tokens == 10


def test_a_state_after_more_tokens_than_the_request_has_is_of_no_use(make: Any) -> None:
    companion = make(FULL, STATE)
    offered(companion)
    read = companion.read("R", params(companion))
    assert companion.external_tokens("R", read, 20, 0) == 20
    with pytest.raises(
        TransferParamsError, match=r"request 'R'.*remote_total_tokens.* is 20: a state after more tokens"
    ):
        companion.external_tokens("R", read, 19, 0)


def test_a_load_is_over_when_every_rank_says_so(make: Any) -> None:
    companion = make(tp=2)
    offered(companion)
    loading(companion, companion.read("R", params(companion)))
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended on every rank yet"):
        companion.load("R", companion.read("R", params(companion)), [[1]], 21, 0)
    assert not companion.update(0, WorkerOutput(received={"R"})).received
    assert not companion.update(0, WorkerOutput(received={"R"})).received
    assert companion.update(1, WorkerOutput(received={"R"})).received == {"R"}
    assert not companion.update(1, WorkerOutput(received={"R"})).received


def test_a_load_fails_once_and_the_other_ranks_give_it_up(make: Any) -> None:
    companion = make(tp=2)
    offered(companion)
    loading(companion, companion.read("R", params(companion)))
    failed = WorkerOutput(failed={"R": "lost"}, block_ids_with_errors={1, 2})
    progress = companion.update(0, failed)
    assert (progress.failed, progress.block_ids_with_errors, progress.received) == ({"R": "lost"}, {1, 2}, set())
    assert companion.build_metadata().reqs_to_cancel == {"R": "lost"}
    again = companion.update(1, failed)
    assert (again.failed, again.block_ids_with_errors) == ({}, set())
    companion.update(1, WorkerOutput(received={"R"}))
    assert companion.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_nothing_to_load_is_told_to_the_source_and_waited_for_by_nobody(make: Any) -> None:
    companion = make()
    offered(companion)
    asked = loading(companion, companion.read("R", params(companion)), 20, 24)
    assert asked.num_computed_tokens > asked.total_tokens == 20
    assert asked.last
    companion.load("R", companion.read("R", params(companion)), [[]], 20, 24)  # there is no load that has not ended


def test_params_can_be_made_in_the_step_that_tells_the_workers_of_the_lease(make: Any) -> None:
    companion = make(tp=2)
    companion.offer("r")
    with pytest.raises(InvalidLeaseError, match="have not granted it yet"):
        params(companion)
    early = params(companion, granted=False)
    for rank in range(2):
        companion.update(rank, WorkerOutput(offered={"r": ""}))
    assert params(companion) == early
    companion.abort("r", "the client left")
    with pytest.raises(InvalidLeaseError, match="it is being ended"):
        params(companion, granted=False)


def test_a_source_is_held_until_there_are_blocks(make: Any) -> None:
    companion = make(tp=2)
    offered(companion)
    read = companion.read("R", params(companion))
    companion.hold("R", read)
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        companion.hold("R", read)
    held = companion.build_metadata().reqs_to_recv["R"]
    assert (held.pages, held.local_block_ids, held.last) == (read, (), False)
    asked = loading(companion, read, 17, 8)
    assert (asked.num_computed_tokens, asked.total_tokens, asked.last) == (8, 17, True)
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        companion.load("R", read, [[1, 2, 3]], 17, 8)
    companion.update(0, WorkerOutput(received={"R"}))
    assert companion.update(1, WorkerOutput(received={"R"})).received == {"R"}


def test_where_nothing_is_missing_after_all_a_held_source_is_waited_for(make: Any) -> None:
    companion = make()
    offered(companion)
    read = companion.read("R", params(companion))
    companion.hold("R", read)
    companion.build_metadata()
    assert loading(companion, read, 20, 24).last
    assert companion.update(0, WorkerOutput(received={"R"})).received == {"R"}
    companion.hold("R", read)  # no rank has heard of this one: it is as if it had not been
    assert loading(companion, read, 20, 24).last
    companion.load("R", read, [[]], 20, 24)


def test_a_source_that_could_not_be_held_is_not_loaded_from(make: Any) -> None:
    companion = make(tp=2)
    offered(companion)
    read = companion.read("R", params(companion))
    companion.hold("R", read)
    companion.build_metadata()
    assert companion.update(0, WorkerOutput(failed={"R": "lost"})).failed == {"R": "lost"}
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        companion.load("R", read, [[1, 2, 3]], 20, 0)


def test_a_load_goes_on_as_its_source_computes_until_all_is_asked_for(make: Any) -> None:
    companion = make()
    offered(companion, running=True)
    blocks = [[*range(5, 12)]]
    chunk = lambda tokens: companion.params("r", blocks, tokens, total_tokens=50)  # noqa: E731 -- one expression
    asked = loading(companion, companion.read("R", chunk(13)), 51)
    assert (asked.pages.num_tokens, asked.total_tokens, asked.last) == (13, 50, False)
    companion.load_more("R", chunk(30))
    asked = companion.build_metadata().reqs_to_recv["R"]
    assert (asked.num_computed_tokens, asked.pages.num_tokens, asked.last) == (0, 30, False)
    assert (asked.local_block_ids, asked.pages.block_ids) == (((1, 2, 3),), ((5, 6, 7, 8),))
    companion.load_more("R", chunk(41))
    companion.load_more("R", chunk(50))  # two in one step are one
    asked = companion.build_metadata().reqs_to_recv["R"]
    assert (asked.pages.num_tokens, asked.last) == (50, True)
    companion.load_more("R", chunk(50))
    assert companion.build_metadata().reqs_to_recv == {}


def test_the_first_chunk_grows_while_no_rank_has_heard_of_it(make: Any) -> None:
    companion = make()
    offered(companion, running=True)
    companion.load("R", companion.read("R", params(companion, tokens=9, total_tokens=24)), [[1, 2, 3]], 25, 0)
    companion.load_more("R", params(companion, tokens=24, total_tokens=24))
    asked = companion.build_metadata().reqs_to_recv["R"]
    assert (asked.num_computed_tokens, asked.pages.num_tokens, asked.last) == (0, 24, True)


def test_more_pages_of_another_lease_are_refused(make: Any) -> None:
    companion = make()
    offered(companion, running=True)
    offered(companion, "s", running=True)
    loading(companion, companion.read("R", params(companion, tokens=16, total_tokens=24)), 25)
    for wrong, key in (
        (params(companion, "s", tokens=24, total_tokens=24), "lease_id"),
        (params(companion, tokens=24, total_tokens=24) | {"remote_engine_id": "q"}, "remote_engine_id"),
        (params(companion, tokens=24), "remote_total_tokens"),
    ):
        if key == "remote_total_tokens":
            wrong["remote_total_tokens"] = 25
        with pytest.raises(
            TransferParamsError, match=rf"request 'R': kv_transfer_params\['{key}'\] is .*, the load began with"
        ):
            companion.load_more("R", wrong)
    companion.load_more("unknown", params(companion))
    companion.update(0, WorkerOutput(failed={"R": "lost"}))
    companion.load_more("R", params(companion, tokens=24, total_tokens=24))
    assert companion.build_metadata().reqs_to_recv == {}


def test_a_load_is_given_up_on_every_rank(make: Any) -> None:
    companion = make()
    assert not companion.cancel("R", "left")
    offered(companion)
    loading(companion, companion.read("R", params(companion)))
    assert companion.cancel("R", "left")
    assert companion.build_metadata().reqs_to_cancel == {"R": "left"}
    assert companion.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_a_step_s_work_is_handed_out_once_and_travels(make: Any) -> None:
    companion = make()
    offered(companion)
    companion.save("r", [[1, 2]])
    companion.load("R", companion.read("R", params(companion)), [[1, 2, 3]], 21, 0)
    companion.offer("s", running=True, engines=2, block_ids=[[4, 5]])
    metadata = companion.build_metadata()
    for copy in (
        pickle.loads(pickle.dumps(metadata)),  # noqa: S301 -- our own bytes
        msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=ConnectorMetadata),
    ):
        assert copy == metadata
    assert companion.build_metadata() == ConnectorMetadata()
    assert not WorkerOutput()
    assert WorkerOutput(received={"r"})


def test_the_handshake_needs_every_rank_and_answers_for_the_last_said(make: Any) -> None:
    companion = make(tp=2)
    assert companion.address.startswith("tcp://127.0.0.1:")
    with pytest.raises(HandshakeError, match=r"metadata of ranks \[0\], it has 2"):
        companion.set_handshake_metadata({0: b"x"})
    before = companion.address
    assert companion.set_handshake_metadata({0: b"x", 1: b"y"}) == before
    companion.close()
    companion.close()
    with pytest.raises(HandshakeError, match="is not known yet"):
        _ = companion.address


def test_readers_are_told_the_name_they_can_reach(make: Any) -> None:
    companion = make(host="prefill-3")
    offered(companion)
    assert params(companion)["remote_host"] == "prefill-3"


def test_a_rank_that_there_is_not_is_refused(make: Any) -> None:
    with pytest.raises(InvalidTransferError, match="output of rank 1, there are 0 to 0"):
        make().update(1, WorkerOutput())
    with pytest.raises(InvalidEngineError):
        make(tp=0)
