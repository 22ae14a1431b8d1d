"""Tests a fleet's secret and its list of allowed peers, between two exchanges over real sockets and NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvcache import BlockTable, InvalidRequestError, TextContext
from tests.transfer.pull.test_lending import LONGER, asked, computed
from tests.transfer.pull.test_ownership import MINE, Reader, Side, leased, manager_of
from transfer.errors import EngineClosedError, InvalidEngineError, InvalidLeaseError, MetadataError
from transfer.pull import directory
from transfer.pull.exchange import PageExchange
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.source import Source
from transfer.wire.keys import make_keyrings
from transfer.wire.messages import MetadataQuery, encode_message, open_rank

SECRET, OTHER = "the secret of one fleet", "the secret of another one"
QUICK = {"handshake_timeout_s": 1.0}  # for readers that get no answer at all


@pytest.fixture
def side() -> Iterator[Callable[..., Any]]:
    made: list[Side] = []

    def make(kind: type[Side], name: str, *, caching: bool = False, **options: Any) -> Side:
        made.append(kind(name, exchange=options, caching=caching))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close()
        one.manager.close()


def test_with_a_common_secret_sockets_and_metadata_have_keys_and_no_voucher_is_asked(
    side: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(directory, "is_vouched", lambda _: pytest.fail("asked, with keys"))
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    source, reader = side(Side, "p", secret=SECRET), side(Reader, "d", secret=f"file:{path}")
    offer, context, pending = leased(source, reader)
    event, proof = reader.pull(source, offer, pending)
    assert event.error == ""
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) == {MINE}
    (rank,) = source.exchange.threads[0].call(lambda replica: replica.ranks)
    with pytest.raises(MetadataError, match="another key"):
        open_rank(rank.metadata)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(source.exchange.address)
    plain.send(encode_message(MetadataQuery(query_id=1, engine_id="p/0", compatibility={})))
    assert not plain.poll(500)
    plain.close()


@pytest.mark.parametrize(
    ("source_s", "reader_s", "said"),
    [
        (SECRET, OTHER, "s; a peer with other keys, or without keys, never answers"),
        ("", SECRET, "s; a peer with other keys, or without keys, never answers"),
        (SECRET, "", "no answer from"),
    ],
)
def test_if_the_secrets_differ_or_one_is_missing_a_pull_fails_with_that_reason(
    side: Any, source_s: str, reader_s: str, said: str
) -> None:
    source, reader = side(Side, "p", secret=source_s), side(Reader, "d", secret=reader_s, replica_options=QUICK)
    offer, _, pending = leased(source, reader)
    event, proof = reader.pull(source, offer, pending)
    assert event.error.startswith("handshake with engine 'p/0'")
    assert source.exchange.address in event.error
    assert said in event.error
    assert SECRET not in event.error
    assert proof is None
    reader.manager.cancel_import(pending)


def test_a_source_that_a_reader_cannot_load_gets_its_pages_back_at_once(side: Any) -> None:
    """Notes about leases go through NIXL, which has not loaded the source. The lease would last for minutes."""
    source, reader = side(Side, "p"), side(Reader, "d", compatibility={"cache dtype": "fp8"})
    for refuses in (lambda offer: None, lambda offer: reader.exchange.refuse(0, offer, "not wanted")):
        offer, _, pending = leased(source, reader)
        refuses(offer)
        event, proof = reader.pull(source, offer, pending)
        assert "cache dtype: None at the source, 'fp8' at the reader" in event.error
        assert proof is None
        source.until(lambda: any(one.event.lease_id == offer.lease.lease_id for one in source.of(LeaseOver)))  # noqa: B023
        reader.manager.cancel_import(pending)
        reader.manager.release("r")
        assert source.manager.num_leased_blocks == 0
    reasons = [one.event.reason for one in source.of(LeaseOver)]
    assert "is not compatible: cache dtype" in reasons[0]
    assert reasons[1] == "not wanted" or "is not compatible" in reasons[1]


@pytest.mark.parametrize(("allowed", "said"), [((), "is not in allowed_peers"), (("10.2.0.0/16",), "no answer from")])
def test_only_listed_hosts_are_contacted(side: Any, allowed: tuple[str, ...], said: str) -> None:
    source, reader = side(Side, "p"), side(Reader, "d", allowed_peers=allowed, replica_options=QUICK)
    offer, _, pending = leased(source, reader)
    reader.exchange.open_pull(0, "k", offer._replace(address="tcp://10.2.255.1:9"), 20.0)
    reader.exchange.read(0, "k", pending, last=True)
    event, _ = reader.end(source)
    assert said in event.error
    assert "10.2.255.1" in event.error
    reader.manager.cancel_import(pending)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": "short"}, "has 5 bytes; at least 16 are needed"),
        ({"secret": "env:NO_SUCH_VARIABLE"}, "the environment variable 'NO_SUCH_VARIABLE' is not set"),
        ({"secret": SECRET, "keyring": make_keyrings(1)[0]}, "exchange 'p': got both a keyring and a shared secret"),
        ({"allowed_peers": ["10.0.0.0/33"]}, "allowed_peers"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        PageExchange(manager_of(), "p", **options)


def test_an_offer_can_travel_as_bytes_and_is_checked_when_it_is_decoded(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    source.compute()
    offer = source.offer()
    assert [(card.engine_id, card.incarnation) for card in source.exchange.cards] == [
        (offer.engine_id, offer.incarnation)
    ]
    sent = msgspec.msgpack.encode((offer, source.manager.block_table("r")))
    source.manager.release("r")
    heard, table = msgspec.msgpack.decode(sent, type=tuple[Source, BlockTable])
    assert heard == offer
    context, pending = reader.reserve(table)
    event, proof = reader.pull(source, heard, pending)
    assert event.error == ""
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) == {MINE}
    for wrong in (offer._replace(address=""), offer._replace(lease=offer.lease._replace(lease_id=0))):
        with pytest.raises(msgspec.ValidationError, match="Expected `(int|str)`"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Source)


def test_the_time_of_an_offer_runs_at_once_or_from_the_end_of_its_request(side: Any) -> None:
    source = side(Side, "p")
    source.compute()
    ran, runs = (source.exchange.offer("r", 0.2, running=running) for running in (False, True))
    source.manager.release("r")

    def over() -> list[int]:
        return [happened.event.lease_id for happened in source.of(LeaseOver)]

    source.until(over)  # No reader came, so the lease expires.
    source.until(lambda: len(source.of(Offered)) == 2)
    assert over() == [ran.lease.lease_id]
    assert source.manager.num_leased_blocks == 4
    source.exchange.start_clock(runs)
    source.until(lambda: len(over()) == 2)
    assert source.idle


def test_an_offer_is_ended_only_by_its_own_exchange(side: Any) -> None:
    source, other = side(Side, "p"), side(Side, "q")
    source.compute()
    offer = source.offer()
    for call in (lambda: other.exchange.revoke(offer, "over"), lambda: other.exchange.start_clock(offer)):
        with pytest.raises(
            InvalidLeaseError, match="engine 'p/0' made this offer, but the engines of this process are \\['q/0'\\]"
        ):
            call()
    source.exchange.revoke(offer, "over")
    source.until(lambda: source.of(LeaseOver))


def test_a_pull_in_one_call_is_refused_before_it_takes_the_copier(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    offer, context, pending = leased(source, reader)
    reader.exchange.open_pull(0, "k", offer, 60.0)
    with pytest.raises(InvalidRequestError, match="'k': its pull is already open on replica 0"):
        reader.exchange.pull("k", offer, pending, 60.0)
    # The refused pull has not taken the import's copier, so this pull still works.
    reader.exchange.read(0, "k", pending, last=True)
    event, proof = reader.end(source)
    assert event.error == ""
    reader.manager.commit_import(context, pending, proof)
    with pytest.raises(InvalidRequestError, match="its import is closed|this import was already"):
        reader.exchange.pull("k", offer, pending, 60.0)


def test_cached_pages_are_not_read_and_the_source_is_notified(side: Any) -> None:
    source, reader = side(Side, "p", caching=True), side(Reader, "d", caching=True)
    for key, needed in (("first", True), ("second", False)):
        offer, context, pending = leased(source, reader)
        assert pending.needs_copy == needed
        reader.exchange.pull(key, offer, pending, 60.0)
        event, proof = reader.end(source, key)
        assert event.error == ""
        reader.manager.commit_import(context, pending, proof)
        reader.manager.release("r")
        source.until(lambda: any(one.event.lease_id == offer.lease.lease_id for one in source.of(LeaseOver)))  # noqa: B023
    assert [one.event.reason for one in source.of(LeaseOver)] == ["read", "read"]
    assert reader.exchange.totals()[1] == 0


@pytest.mark.parametrize("how", ["a duration that cannot be", "a thread that was closed", "no word is free"])
def test_an_offer_that_fails_holds_no_page(side: Any, how: str) -> None:
    source = side(Side, "p")
    source.compute()
    free = source.exchange._words[0]._free
    if how.startswith("a duration"):
        assert source.exchange.offer("r", -1.0) is not None
        source.until(lambda: source.of(Offered))
        assert "-1" in source.of(Offered)[0].event.error
    elif how.startswith("a thread"):
        source.exchange.threads[0].close()
        with pytest.raises(EngineClosedError, match="the transfer thread was closed"):
            source.exchange.offer("r", 30.0)
        assert sorted(free) == [*source.exchange._words[0].words]
    else:
        del free[1:]
        first = source.offer()
        assert source.exchange.offer("r", 30.0) is None
        source.exchange.revoke(first, "over")
        source.until(lambda: source.of(LeaseOver))
    assert source.manager.num_leased_blocks == 0
    source.manager.release("r")
    assert source.idle
    source.manager.check()


def test_the_slot_of_a_lease_goes_back_to_where_it_was_taken(side: Any) -> None:
    source, reader = side(Side, "p", caching=True, lend=1.0), side(Reader, "d", caching=True)
    computed(source)
    lent = asked(reader, source, TextContext(LONGER, 32, "mine"))
    assert lent.source is not None
    reader.exchange.refuse(0, lent.source, "not wanted")
    source.until(lambda: source.manager.num_leased_blocks == 0)
    exchange = source.exchange
    for words in (exchange._words[0], exchange._lent_words[0]):
        assert sorted(words._free) == [*words.words]


def test_pages_stay_held_while_a_thread_that_cannot_be_ended_may_use_them(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    offer, context, pending = leased(source, reader)
    reader.exchange.pull("k", offer, pending, 60.0)
    for one in (source, reader):
        thread = one.exchange.threads[0]
        with monkeypatch.context() as stuck:
            stuck.setattr(thread, "close", lambda: None)
            one.exchange.close()
        assert not thread.is_closed
    assert source.manager.num_leased_blocks > 0, "the lease word may still be read, so the pages must stay leased"
    reader.manager.release(context.request_id)
    reader.manager.cancel_import(pending)
    assert not reader.idle, "a READ may still write to the pages, so they must stay held"
    for one in (reader, source):
        one.exchange.close()
        assert one.idle
