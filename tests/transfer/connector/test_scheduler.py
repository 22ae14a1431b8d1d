"""Tests the connector's scheduler: its requests to every rank, the ranks' outputs that it accepts, and untrusted
params.
"""

from __future__ import annotations

import pickle
import time
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
    MetadataError,
    TransferParamsError,
)
from transfer.pull.lease import LEASE_WORDS
from transfer.wire.handshake import HandshakeClient
from transfer.wire.messages import LeaseQuery, LeaseRefusal, LeaseReply, Pong, open_pages
from transfer.wire.prompt import Prompt

FULL = GroupConfig(layers={"a": 0}, block_size=8, head_dim=4)
WINDOW = GroupConfig(layers={"w": 1}, kind="sliding_window", window=10, block_size=8, head_dim=4)
STATE = GroupConfig(layers={"m": 2}, kind="mamba", state=(StatePart(kind="ssm", units=4),))
PROMPT = Prompt(range(100))


@pytest.fixture
def make() -> Iterator[Callable[..., NixlConnectorScheduler]]:
    made: list[NixlConnectorScheduler] = []

    def build(*groups: GroupConfig, tp: int = 1, secret: str = "", **options: Any) -> NixlConnectorScheduler:
        config = WorkerConfig(
            engine_id="p",
            incarnation="i",
            groups=groups or (FULL,),
            model="m",
            tp_size=tp,
            timing=Timing(lease=7.0),
            secret=secret,
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
    told = [scheduler.update(rank, WorkerOutput(offered={request_id: ""})) for rank in range(scheduler.config.ranks)]
    return told[-1]


def params(
    scheduler: NixlConnectorScheduler, request_id: str = "r", tokens: int = 20, **options: Any
) -> dict[str, Any]:
    return scheduler.params(request_id, PROMPT, [[5, 6, 7]] * len(scheduler.config.groups), tokens, **options)


def answer(source: NixlConnectorScheduler, made: dict[str, Any], tokens: int = 20) -> LeaseReply:
    """Returns the source's answer to a reader that asks for `tokens` tokens of the lease in `made`."""
    query = LeaseQuery(query_id=7, engine_id="p", lease_id=int(made["lease_id"], 16), num_tokens=tokens)
    return source._leased(query)  # pyright: ignore[reportPrivateUsage]


def blocks(source: NixlConnectorScheduler, made: dict[str, Any], tokens: int = 20) -> list[list[int]]:
    reply = answer(source, made, tokens)
    return [list(group) for group in open_pages(reply.pages, "p", int(made["lease_id"], 16)).block_ids]


def test_what_a_lease_holds_is_told_when_it_stands_on_every_rank_and_not_before(make: Any) -> None:
    scheduler = make(tp=3)
    with pytest.raises(InvalidLeaseError, match="request 'r': it has no valid lease: none was granted"):
        params(scheduler)
    scheduler.offer("r", running=True)
    lease = scheduler.build_metadata().reqs_to_send["r"].lease
    assert lease.duration_s == 7.0
    made = params(scheduler)  # The params are made in the step that sends the lease to the workers.
    for rank, missing in ((1, [0, 2]), (0, [2])):
        assert not scheduler.update(rank, WorkerOutput(offered={"r": ""})).offered
        again = LeaseReply(query_id=7, waits_for=f"ranks {missing} have not granted it yet")
        assert (answer(scheduler, made), scheduler.is_offered("r")) == (again, False)
    assert scheduler.update(2, WorkerOutput(offered={"r": ""})).offered == {"r"}
    pages = open_pages(answer(scheduler, made, 17).pages, "p", lease.lease_id)
    assert (pages.incarnation, pages.word_idx, pages.duration_s) == ("i", lease.word_idx, 7.0)
    assert (pages.num_tokens, pages.block_ids, pages.prompt_digest) == (20, ((5, 6, 7),), PROMPT.digest(17))


def test_a_lease_that_params_name_is_given_back_once_with_the_reason(make: Any) -> None:
    source, reader = make(), make()
    offered(source)
    made = params(source)
    reader.give_back(made | {"remote_num_tokens": 0}, "wrong")
    reader.give_back(made | {"lease_id": 7}, "names no lease")
    ((named, reason),) = reader.build_metadata().to_give_back
    assert (named.address, named.lease_id, reason) == (source.address, int(made["lease_id"], 16), "wrong")
    assert reader.build_metadata().to_give_back == []
    assert open_pages(answer(source, made, named.num_tokens).pages, "p", named.lease_id).block_ids == ((5, 6, 7),)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_lease_ends_if_its_readers_refuse_it_over_the_side_channel(make: Any, engines: int) -> None:
    source = make(tp=2)
    offered(source, engines=engines)
    lease_id = int(params(source)["lease_id"], 16)
    refusal = LeaseRefusal(query_id=1, engine_id="p", lease_id=lease_id, reader="d", reason="fp8")
    client = HandshakeClient()

    def ask(**changes: Any) -> ConnectorMetadata:
        answers: list[object] = []
        client.ask(source.address, msgspec.structs.replace(refusal, **changes), answers.append)
        while not answers:
            client.poll()
            time.sleep(1e-3)
        assert isinstance(answers[0], Pong)
        return source.build_metadata()

    assert not ask(lease_id=5).reqs_not_processed
    if engines == 2:
        assert not ask().reqs_not_processed
        assert not ask(rank=1, ranks=2).reqs_not_processed, "another rank of the same engine"
    assert not source.is_ending("r")
    assert ask(reader="e").reqs_not_processed == {"r": "fp8"}
    assert source.is_ending("r")
    assert not ask().reqs_not_processed
    source.update(0, WorkerOutput(sent={"r": "fp8"}))
    progress = source.update(1, WorkerOutput(sent={"r": "fp8"}))
    assert (progress.sent, source.is_ending("r")) == ({"r": "fp8"}, False)
    client.close()


def test_other_requests_with_the_same_prompt_can_name_the_same_lease(make: Any) -> None:
    source = make()
    with pytest.raises(InvalidLeaseError, match="request 'r': it has no valid lease: none was granted"):
        source.pointer("r", 20)
    offered(source)
    early = source.pointer("r", 20)
    assert answer(source, early).waits_for == "its request is still computed"
    assert params(source) == early
    assert answer(source, early).pages
    source.abort("r", "over")
    with pytest.raises(InvalidLeaseError, match="it is being ended"):
        source.pointer("r", 20)


def test_weights_that_change_end_the_leases_that_were_granted_before(make: Any) -> None:
    source = make(tp=2)

    def told(rank: int, weights: str, **changes: Any) -> dict[str, str]:
        source.update(rank, WorkerOutput(weights={"weights": weights}, **changes))
        return source.build_metadata().reqs_not_processed

    source.offer("r")
    source.build_metadata()
    assert told(0, "a", offered={"r": ""}) == {}, "the lease was granted with these weights"
    assert told(1, "a", offered={"r": ""}) == {}
    made = source.params("r", PROMPT._replace(named=(("adapter", "poet"),)), [[5, 6, 7]], 20)
    pages = open_pages(answer(source, made).pages, "p", int(made["lease_id"], 16))
    assert pages.named == {"adapter": "poet", "weights": "a"}
    assert told(0, "a") == {}
    assert told(0, "b") == {"r": "the weights have changed: weights: 'b' now, 'a' before"}
    assert told(1, "b") == {}
    assert answer(source, made).is_over
    offered(source, "s")
    wanted = source.read("d", made, PROMPT._replace(named=(("adapter", "poet"),)))
    assert wanted is not None
    assert wanted.named == (("adapter", "poet"),)


def test_caches_that_are_registered_anew_have_another_incarnation_and_known_weights(make: Any) -> None:
    scheduler = make(tp=2)
    scheduler.offer("a")
    with pytest.raises(InvalidTransferError, match=r"\['a'\]"):
        scheduler.reopened("j", {"weights": "new"})
    scheduler.abort("a", "given up")
    for rank in range(2):
        scheduler.update(rank, WorkerOutput(sent={"a": "given up"}))
    scheduler.reopened("j", {"weights": "new"})
    assert scheduler.config.incarnation == "j"
    for rank in range(2):
        assert not scheduler.has_new_weights(rank, WorkerOutput(weights={"weights": "new"}))
        assert not scheduler.has_new_weights(rank, WorkerOutput())
        assert scheduler.has_new_weights(rank, WorkerOutput(weights={"weights": "newer"}))


def test_a_load_that_was_given_up_is_about_to_end(make: Any) -> None:
    source, reader = make(), make()
    offered(source)
    wanted = reader.read("d", params(source), PROMPT)
    assert wanted is not None
    reader.hold("d", wanted)
    assert not reader.is_ending("d")
    reader.cancel("d", "over")
    assert reader.is_ending("d")
    reader.update(0, WorkerOutput(received={"d"}))
    assert not reader.is_ending("d")


def test_the_pages_of_a_lease_are_told_when_its_request_is_computed(make: Any) -> None:
    scheduler = make()
    offered(scheduler, running=True)
    (lease_id,) = scheduler._by_lease
    again = LeaseReply(query_id=7, waits_for="its request is still computed")
    assert answer(scheduler, {"lease_id": hex(lease_id)}) == again
    params(scheduler)
    assert answer(scheduler, {"lease_id": hex(lease_id)}).pages


@pytest.mark.parametrize("tokens", [21, -1, 1 << 40])
def test_more_tokens_than_a_lease_holds_are_refused_with_both_numbers(make: Any, tokens: int) -> None:
    scheduler = make()
    offered(scheduler)
    answered = answer(scheduler, params(scheduler), tokens)
    assert not answered.is_over
    assert answered.error.endswith(f"it holds the pages of 20 tokens, but {tokens} tokens were asked for")


def test_a_lease_that_is_over_or_never_was_holds_nothing(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    made = params(scheduler)
    forged = {"lease_id": "0x1234"}
    assert answer(scheduler, forged).error == "lease 0x0000000000001234 has ended, or engine 'p' never had it"
    assert answer(scheduler, forged).is_over
    scheduler.update(0, WorkerOutput(sent={"r": "expired"}))
    assert "it has ended on ranks [0]: expired" in answer(scheduler, made).error
    assert answer(scheduler, made).is_over
    scheduler.update(1, WorkerOutput(sent={"r": "expired"}))
    assert "has ended, or engine 'p' never had it" in answer(scheduler, made).error
    offered(scheduler)  # The request gets a second lease, which may cover the same pages.
    assert params(scheduler)["lease_id"] != made["lease_id"]
    assert "has ended" in answer(scheduler, made).error
    aborted = params(scheduler)
    scheduler.abort("r", "left")
    assert "it is being ended" in answer(scheduler, aborted).error


def test_the_pages_of_a_lease_are_sealed_with_the_key_of_the_fleet(make: Any) -> None:
    scheduler = make(secret="known to all of a fleet")  # noqa: S106
    offered(scheduler)
    made = params(scheduler)
    with pytest.raises(MetadataError, match="was changed in transit or made with another key"):
        blocks(scheduler, made)


def test_pages_go_when_every_rank_s_lease_has_ended(make: Any) -> None:
    scheduler = make(tp=3)
    offered(scheduler)
    assert scheduler.update(1, WorkerOutput(sent={"r": "read"})).sent == {}
    assert scheduler.update(1, WorkerOutput(sent={"r": "read"})).sent == {}  # Two reports of one rank count once.
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
    assert not scheduler.update(1, WorkerOutput(offered={"r": "word 0 is taken"})).sent
    assert scheduler.build_metadata().reqs_not_processed == {"r": "not granted by every rank"}
    assert scheduler.update(0, WorkerOutput(sent={"r": "not granted by every rank"})).sent == {"r": "word 0 is taken"}


def test_an_aborted_request_is_no_longer_offered_and_its_pages_wait_for_the_ranks(make: Any) -> None:
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
    for number in range(LEASE_WORDS - 1):
        scheduler.offer(f"r{number}")
    sends = scheduler.build_metadata().reqs_to_send
    assert {send.lease.word_idx for send in sends.values()} == set(range(LEASE_WORDS))
    assert len({send.lease.lease_id for send in sends.values()}) == LEASE_WORDS
    with pytest.raises(InvalidLeaseError, match="request 'x': all 4096 lease words are taken"):
        scheduler.offer("x")
    scheduler.update(0, WorkerOutput(sent={"r5": "read"}))
    scheduler.offer("x")
    assert scheduler.build_metadata().reqs_to_send["x"].lease.word_idx == sends["r5"].lease.word_idx


def test_blocks_are_those_of_the_tokens_and_of_the_window(make: Any) -> None:
    scheduler = make(FULL, WINDOW, STATE)
    offered(scheduler)
    rows = [[*range(10, 18)], [*range(20, 28)], [1, 2, 3]]
    assert blocks(scheduler, scheduler.params("r", PROMPT, rows, 49)) == [[*range(10, 17)], [*range(20, 27)], [3]]
    later = scheduler.params("r", PROMPT, [rows[0][3:], rows[1][3:], [3]], 49, first_blocks=(3, 3, 0))
    assert blocks(scheduler, later) == [[13, 14, 15, 16], [23, 24, 25, 26], [3]]
    window = [*range(1000, 2000)]
    long = scheduler.params("r", Prompt(range(8000)), [window, window, [3]], 8000)
    assert blocks(scheduler, long, 8000)[1] == window[(8000 - 10 + 1 - 4096) // 8 :], (
        "this must also hold for blocks of 4,096 tokens"
    )
    with pytest.raises(InvalidTransferError, match="group 0: got blocks 0 to 8, but 65 tokens fill 9 blocks of 8"):
        scheduler.params("r", PROMPT, rows, 65)
    with pytest.raises(InvalidTransferError, match="got blocks for 2 groups; there are 3"):
        scheduler.params("r", PROMPT, rows[:2], 49)
    with pytest.raises(InvalidTransferError, match="request 'r': got pages for 49 tokens, but its prompt has 48"):
        scheduler.params("r", Prompt(range(48)), rows, 49)


def test_the_time_of_a_running_request_s_lease_runs_when_it_is_computed(make: Any) -> None:
    scheduler = make()
    offered(scheduler, running=True)
    scheduler.computed("r")
    assert scheduler.build_metadata().reqs_computed == ["r"]


def loading(scheduler: NixlConnectorScheduler, read: Any, tokens: int = 21, computed: int = 0, **options: Any) -> Any:
    groups = len(scheduler.config.groups)
    scheduler.load("R", read, [[1, 2, 3]] * groups, tokens, computed, **options)
    return scheduler.build_metadata().reqs_to_recv["R"]


def test_params_that_a_source_has_made_are_read_and_loaded(make: Any) -> None:
    source, reader = make(tp=2), make()
    offered(source)
    read = reader.read("R", params(source), PROMPT)
    asked = loading(reader, read, 21, 8)
    assert (asked.wanted, read.contact) == (read, (source.address, "p"))
    assert (asked.num_computed_tokens, asked.num_tokens, asked.total_tokens) == (8, 21, 20)
    assert (asked.first_blocks, asked.local_block_ids) == ((1,), ((1, 2, 3),))


def test_a_prompt_may_be_longer_or_shorter_than_what_the_source_computed(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    made = params(scheduler)
    assert [scheduler.read("R", made, Prompt(range(n))).num_tokens for n in (10, 20, 21, 100)] == [10, 20, 20, 20]
    read = scheduler.read("R", made, PROMPT)
    assert loading(scheduler, read, 10).total_tokens == 10


def test_a_state_that_covers_more_tokens_than_the_request_is_refused(make: Any) -> None:
    scheduler = make(FULL, STATE)
    offered(scheduler)
    assert scheduler.read("R", params(scheduler), Prompt(range(20))).num_tokens == 20
    with pytest.raises(TransferParamsError, match=r"request 'R'.*remote_num_tokens.* is 20, .* a state of more tokens"):
        scheduler.read("R", params(scheduler), Prompt(range(19)))


def test_a_load_is_over_when_every_rank_says_so(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler), PROMPT))
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended on every rank yet"):
        scheduler.load("R", scheduler.read("R", params(scheduler), PROMPT), [[1]], 21, 0)
    assert not scheduler.update(0, WorkerOutput(received={"R"})).received
    assert not scheduler.update(0, WorkerOutput(received={"R"})).received
    assert scheduler.update(1, WorkerOutput(received={"R"})).received == {"R"}
    assert not scheduler.update(1, WorkerOutput(received={"R"})).received


def test_a_load_fails_once_and_the_other_ranks_give_it_up(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler), PROMPT))
    failed = WorkerOutput(failed={"R": "lost"}, block_ids_with_errors={1, 2})
    progress = scheduler.update(0, failed)
    assert (progress.failed, progress.block_ids_with_errors, progress.received) == ({"R": "lost"}, {1, 2}, set())
    assert scheduler.build_metadata().reqs_to_cancel == {"R": "lost"}
    again = scheduler.update(1, failed)
    assert (again.failed, again.block_ids_with_errors) == ({}, set())
    scheduler.update(1, WorkerOutput(received={"R"}))
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_unwritten_blocks_of_any_rank_are_reported_when_every_rank_is_done(make: Any) -> None:
    scheduler = make(FULL, WINDOW, tp=2)
    offered(scheduler)
    for fails in (False, True):
        loading(scheduler, scheduler.read("R", params(scheduler), PROMPT))
        first = scheduler.update(0, WorkerOutput(received={"R"}, unwritten={"R": {1: 12}}))
        assert (first.received, first.unwritten) == (set(), {})
        if fails:
            scheduler.update(1, WorkerOutput(failed={"R": "lost"}))
        last = scheduler.update(1, WorkerOutput(received={"R"}, unwritten={"R": {1: 10}}))
        assert (last.received, last.unwritten) == ({"R"}, {} if fails else {"R": {1: 12}})


def test_with_nothing_to_load_the_source_is_notified_and_no_request_waits(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    asked = loading(scheduler, scheduler.read("R", params(scheduler), PROMPT), 20, 24)
    assert asked.num_computed_tokens > asked.total_tokens == 20
    # No load is open any more, so this call raises no error.
    scheduler.load("R", scheduler.read("R", params(scheduler), PROMPT), [[]], 20, 24)


def test_a_source_is_held_until_there_are_blocks(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    read = scheduler.read("R", params(scheduler), PROMPT)
    scheduler.hold("R", read)
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.hold("R", read)
    held = scheduler.build_metadata().reqs_to_recv["R"]
    assert (held.wanted, held.local_block_ids) == (read, ())
    asked = loading(scheduler, read, 17, 8)
    assert (asked.num_computed_tokens, asked.total_tokens, asked.local_block_ids) == (8, 17, ((1, 2, 3),))
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.load("R", read, [[1, 2, 3]], 17, 8)
    scheduler.update(0, WorkerOutput(received={"R"}))
    assert scheduler.update(1, WorkerOutput(received={"R"})).received == {"R"}


def test_if_nothing_is_missing_in_the_end_a_held_source_is_still_waited_for(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    read = scheduler.read("R", params(scheduler), PROMPT)
    scheduler.hold("R", read)
    scheduler.build_metadata()
    assert loading(scheduler, read, 20, 24).local_block_ids
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}
    scheduler.hold("R", read)  # No rank knows of this load yet, so the scheduler drops it without an event.
    assert loading(scheduler, read, 20, 24).local_block_ids
    scheduler.load("R", read, [[]], 20, 24)


def test_a_source_that_could_not_be_held_is_not_loaded_from(make: Any) -> None:
    scheduler = make(tp=2)
    offered(scheduler)
    read = scheduler.read("R", params(scheduler), PROMPT)
    scheduler.hold("R", read)
    scheduler.build_metadata()
    assert scheduler.update(0, WorkerOutput(failed={"R": "lost"})).failed == {"R": "lost"}
    with pytest.raises(InvalidTransferError, match="request 'R': its load has not ended"):
        scheduler.load("R", read, [[1, 2, 3]], 20, 0)


def test_a_load_is_given_up_on_every_rank(make: Any) -> None:
    scheduler = make()
    assert not scheduler.cancel("R", "left")
    offered(scheduler)
    loading(scheduler, scheduler.read("R", params(scheduler), PROMPT))
    assert scheduler.cancel("R", "left")
    assert scheduler.build_metadata().reqs_to_cancel == {"R": "left"}
    assert scheduler.update(0, WorkerOutput(received={"R"})).received == {"R"}


def test_the_work_of_a_step_is_handed_out_once_and_can_be_encoded(make: Any) -> None:
    scheduler = make()
    offered(scheduler)
    scheduler.save("r", [[1, 2]])
    scheduler.load("R", scheduler.read("R", params(scheduler), PROMPT), [[1, 2, 3]], 21, 0)
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


def test_the_handshake_needs_the_metadata_of_every_rank(make: Any) -> None:
    scheduler = make(tp=2)
    assert scheduler.address.startswith("tcp://127.0.0.1:")
    with pytest.raises(HandshakeError, match=r"got the metadata of ranks \[0\]; all 2 ranks are needed"):
        scheduler.set_handshake_metadata({0: b"x"})
    before = scheduler.address
    assert scheduler.set_handshake_metadata({0: b"x", 1: b"y"}) == before
    scheduler.close()
    scheduler.close()
    with pytest.raises(HandshakeError, match="is not known yet"):
        _ = scheduler.address


def test_readers_get_a_host_name_that_they_can_reach(make: Any) -> None:
    scheduler = make(host="prefill-3")
    offered(scheduler)
    assert params(scheduler)["remote_host"] == "prefill-3"


def test_a_rank_that_does_not_exist_is_refused(make: Any) -> None:
    with pytest.raises(InvalidTransferError, match="got the output of rank 1; there are ranks 0 to 0"):
        make().update(1, WorkerOutput())
    with pytest.raises(InvalidEngineError, match="tp_rank is 0: 0 to -1 is needed"):
        make(tp=0)
