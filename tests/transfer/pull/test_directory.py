"""Engines are found by name. The address that one request gives for an engine affects no pull of another request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.transfer.clock import Clock
from tests.transfer.replicas import LOCAL, REMOTE, WHOLE, Engine, passing, pull, run, settled
from transfer.errors import HandshakeError
from transfer.failures import Failure, FailureKind
from transfer.pull import directory
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.source import Source
from transfer.pull.thread import TransferThread
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.keys import make_keyrings
from transfer.wire.messages import open_rank, sealed_rank


def opened(reader: Engine, source: Source, key: str = "r") -> None:
    """Returns a pull that has loaded its source and waits for pages."""
    pull(reader, source, key, groups=None, timeout_s=60.0)
    run(reader, until=lambda: all(rank.puller._pulls.get(key) for rank in reader.ranks))


def error_of(reader: Engine, key: str) -> str:
    return next(event.error for event in reader.pulls if event.key == key)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_second_engine_with_the_name_of_a_living_one_is_refused_with_both_addresses(engine: Any, tp: int) -> None:
    p, d, impostor = engine("p", tp), engine("d", tp), engine("p", tp, seed=50)
    d.blank()
    opened(d, p.source(p.offer()))
    wrong = impostor.source(impostor.offer())
    for key in ("a", "b"):
        pull(d, wrong, key)
    run(p, impostor, d, until=settled(d, "a", "b"))
    for key in ("a", "b"):
        assert p.serve() in error_of(d, key)
        assert impostor.serve() in error_of(d, key)
        assert "still answers at" in error_of(d, key)
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, impostor, d, until=settled(d, "r"))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))
    assert (d.replica.stats.failed_handshakes, len(d.replica.directory)) == (1, 1)


@pytest.mark.parametrize("how", ["silent", "another start at its address", "not there any more"])
def test_an_engine_may_return_at_another_address_once_the_old_one_is_silent(engine: Any, how: str) -> None:
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, dead_after_s=0.5, heartbeat_s=100.0)
    opened(d, p.source(p.offer()))
    if how == "silent":
        p.server.close()
    else:
        card = EngineCard("p" if how.startswith("another") else "q", "later", p.card.ranks)
        p.server._cards = {card.engine_id: card}
    successor, third = engine("p", seed=50), engine("p", seed=70)
    pull(d, successor.source(successor.offer()), key="new")
    pull(d, third.source(third.offer()), key="third")
    if how == "silent":
        run(successor, third, d, until=lambda: len(d.replica.directory._candidates("p")) == 2)
        run(successor, third, d, until=passing(clock, settled(d, "r")))
    run(p, successor, third, d, until=settled(d, "r", "new", "third"))
    assert error_of(d, "r")
    winner, loser = ("new", "third") if not error_of(d, "new") else ("third", "new")
    assert error_of(d, winner) == ""
    assert "still answers at" in error_of(d, loser)
    assert np.array_equal(d.heads(LOCAL), (successor if winner == "new" else third).heads(REMOTE))


def test_an_engine_that_was_lost_may_come_back_elsewhere_at_once(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"))
    # No later request has asked for this engine before its connection is lost.
    d.ranks[0].disconnect("p", Failure(FailureKind.SOURCE_GONE, "a READ from it failed"))
    successor = engine("p", seed=50)
    pull(d, successor.source(successor.offer()), "new")
    run(successor, d, until=settled(d, "new"))
    assert error_of(d, "new") == ""
    assert len(d.replica.directory) == 1


def test_an_impostor_with_copied_metadata_cannot_end_the_pulls_of_an_engine(engine: Any) -> None:
    """The impostor answers at its own address. It claims that the engine has restarted, or gives no answer."""
    clock = Clock()
    p, d = engine("p"), engine("d", clock=clock, dead_after_s=0.3, heartbeat_s=0.05)
    with HandshakeServer([p.card]) as copy:
        opened(d, p.source(p.offer()))
        opened(d, p.source(p.offer("s", 1))._replace(address=copy.endpoint), "s")
        copy.serve(EngineCard("p", "restarted", p.card.ranks))
        run(p, d, until=passing(clock, settled(d, "s"), answered=d))
        pull(d, p.source(p.offer("t", 2))._replace(address=copy.endpoint), "t")
        run(p, d, until=settled(d, "t"))
    assert all(error_of(d, key) for key in ("s", "t"))
    d.replica.add_pages("r", WHOLE, last=True)
    run(p, d, until=settled(d, "r"))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)


@pytest.mark.parametrize("refusing", [0, 1, 2])
@pytest.mark.parametrize("how", ["asked", "added"])
def test_an_engine_that_one_rank_cannot_load_is_kept_by_no_rank(
    engine: Any, monkeypatch: pytest.MonkeyPatch, refusing: int, how: str
) -> None:
    """If one rank cannot load an engine, the other ranks must not keep the engine. A later pull would otherwise read
    with only some of the ranks.
    """
    p, d = engine("p"), engine("d", 4)
    source = p.source(p.offer())
    d.blank()

    def load(_: object) -> None:
        raise HandshakeError("no room for it")

    with monkeypatch.context() as patched:
        patched.setattr(d.ranks[refusing], "load", load)
        if how == "added":
            with pytest.raises(HandshakeError, match="no room for it"):
                d.replica.directory.add(source.address, p.card.ranks)
        else:
            pull(d, source)
            run(p, d, until=settled(d, "r"))
            assert error_of(d, "r").endswith(f"handshake with engine 'p' at {source.address}: no room for it")
    assert [rank.remote("p") for rank in d.ranks] == [None] * 4
    assert len(d.replica.directory) == 0
    pull(d, p.source(p.offer("s", 1)), "s")
    run(p, d, until=settled(d, "s"))
    assert error_of(d, "s") == ""
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


class Crowd:
    """Two engines from which the reader pulls, and other engines that a request may name."""

    def __init__(self, engine: Callable[..., Engine]) -> None:
        self.good = [engine("p"), engine("q", seed=20)]
        self.impostors = [engine("p", seed=50), engine("q", seed=60), engine("z", seed=70)]
        self.clock = Clock()
        self.reader = engine("d", clock=self.clock, handshake_timeout_s=0.4, dead_after_s=1e3, heartbeat_s=0.1)
        p, q = self.good
        liars = [
            [EngineCard("p", "other", q.card.ranks), EngineCard("q", "other", p.card.ranks)],
            [p.card, EngineCard("q", p.incarnation, p.card.ranks), EngineCard("d", "i", p.card.ranks)],
            [EngineCard("p", p.incarnation, q.card.ranks), EngineCard("q", q.incarnation, (b"rubbish",))],
        ]
        self.servers = [HandshakeServer(cards) for cards in liars]
        self.deaf = zmq.Context.instance().socket(zmq.ROUTER)
        port = self.deaf.bind_to_random_port("tcp://127.0.0.1")
        self.engines = [*self.good, *self.impostors, self.reader]
        self.addresses = [
            *(one.serve() for one in self.engines),
            *(server.endpoint for server in self.servers),
            f"tcp://127.0.0.1:{port}",
            "tcp://127.0.0.1:9",
            "tcp://localhost:" + p.serve().rpartition(":")[2],
            "nonsense",
        ]
        self.incarnations = ["", "other", *(one.incarnation for one in self.engines)]
        self.leases = [one.offer(word_idx=1) for one in [*self.good, *self.impostors]]

    def draw(self, rng: random.Random) -> Source:
        lease = rng.choice([*self.leases, LeaseRef(new_lease_id(), rng.randrange(4), 5.0)])
        source = Source(rng.choice(self.addresses), rng.choice("pqzd"), lease)
        return source._replace(incarnation=rng.choice(self.incarnations))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.deaf.close(0)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_no_address_that_a_request_names_affects_a_pull_of_another_request(engine: Any, seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd(engine)
    d = crowd.reader
    for number, one in enumerate(crowd.good):
        opened(d, one.source(one.offer("r", word_idx=2)), f"good {number}")
    keys = [f"any {number}" for number in range(60)]
    for key in keys:
        pull(d, crowd.draw(rng), key, groups=rng.choice((WHOLE, WHOLE, None)), timeout_s=rng.choice((0.3, 3.0)))
        for _ in range(rng.choice((0, 1, 20))):
            crowd.clock.now += 0.002
            for one in crowd.engines:
                one.poll()
        if rng.random() < 0.1:
            d.replica.cancel(rng.choice(keys), "changed my mind")
    run(*crowd.engines, until=passing(crowd.clock, settled(d, *keys)))
    assert [event for event in d.pulls if event.key.startswith("good")] == []
    assert any(error_of(d, key) for key in keys)
    for number, one in enumerate(crowd.good):
        d.blank()
        d.replica.add_pages(f"good {number}", WHOLE, last=True)
        run(*crowd.engines, until=settled(d, f"good {number}"))
        assert d.pulls[-1] == PullEvent(f"good {number}", "", safe=True)
        assert np.array_equal(d.heads(LOCAL), one.heads(REMOTE))
    crowd.close()


# ---- the engine whose metadata is loaded


def changed(data: bytes, change: Callable[[bytearray], None]) -> bytes:
    """Returns a rank's metadata with a change in NIXL's part.

    The metadata is sealed again without a key, as anybody could do.
    """
    rank = open_rank(data)
    metadata = bytearray(rank.agent_metadata)
    change(metadata)
    return sealed_rank(msgspec.structs.replace(rank, agent_metadata=bytes(metadata)))


def any_bytes(rng: random.Random) -> Callable[[bytearray], None]:
    def change(metadata: bytearray) -> None:
        for _ in range(rng.randint(1, 4)):
            metadata[rng.randrange(len(metadata))] = rng.randrange(256)

    return change


def unseen(source: Engine) -> Engine:
    """Makes a source appear to run on another host: no process on this host confirms its metadata any more. Returns the
    source.
    """
    for rank in source.ranks:
        rank._agent._voucher.close()  # pyright: ignore[reportOptionalMemberAccess]
    return source


REFUSED = (
    "no key authenticates its metadata, and no process of this user on this host confirms it as its own; sources on "
    "other hosts need a shared `secret`, the same on both sides"
)


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_without_a_key_a_source_on_this_host_vouches_for_itself(engine: Any, tp: tuple[int, int]) -> None:
    p, d = engine("p", tp[0], key=b""), engine("d", tp[1], key=b"")
    for key, word_idx in (("r", 0), ("s", 1)):
        pull(d, p.source(p.offer(key, word_idx)), key)
        run(p, d, until=settled(d, key))
        assert d.pulls[-1] == PullEvent(key, "", safe=True)
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))


@pytest.mark.parametrize("change", [lambda data: data.append(0), any_bytes(random.Random(1))])
def test_metadata_that_no_process_of_this_host_vouches_for_is_refused_without_any_contact(
    engine: Any, change: Any
) -> None:
    """The source runs in this process. The process would crash if the reader loaded some of these bytes."""
    p, d = engine("p", key=b""), engine("d", key=b"")
    data = changed(p.card.ranks[0], change)
    with HandshakeServer([EngineCard("p", p.incarnation, (data,), p.card.compatibility)]) as liar:
        pull(d, p.source(p.offer())._replace(address=liar.endpoint))
        run(p, d, until=settled(d, "r"))
    assert d.pulls[-1].error.endswith(f"handshake with engine 'p' at {liar.endpoint}: {REFUSED}")
    assert d.replica.stats.failed_handshakes == 1
    with pytest.raises(HandshakeError, match=f"engine 'p' at {liar.endpoint}: {REFUSED}"):
        d.replica.directory.add(liar.endpoint, [data])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_source_on_another_host_is_refused_without_a_key(engine: Any, tp: int) -> None:
    p, d = unseen(engine("p", tp, key=b"")), engine("d", key=b"")
    source = p.source(p.offer())
    pull(d, source)
    run(p, d, until=settled(d, "r"))
    assert d.pulls[-1].error.endswith(f"handshake with engine 'p' at {source.address}: {REFUSED}")
    thread = TransferThread(d.replica)
    with pytest.raises(HandshakeError, match=f"engine 'p' at {source.address}: {REFUSED}"):
        thread.call(lambda replica: replica.directory.add(source.address, p.card.ranks))
    thread.close()


def test_an_engine_is_refused_if_nobody_vouches_for_one_of_its_ranks(engine: Any) -> None:
    p, d = engine("p", 2, key=b""), engine("d", key=b"")
    p.ranks[1]._agent._voucher.close()
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"))
    assert REFUSED in d.pulls[-1].error


@pytest.mark.parametrize("how", ["asked", "added"])
def test_with_a_key_no_voucher_is_asked(engine: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(directory, "is_vouched", lambda _: pytest.fail("asked"))
    p, d = engine("p", key=b"k"), engine("d", key=b"k")
    if how == "added":
        d.replica.directory.add(p.serve(), p.card.ranks)
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"))
    assert d.pulls[-1].error == ""


def test_keys_of_the_sockets_authenticate_only_metadata_that_comes_over_these_sockets(engine: Any) -> None:
    p, d = unseen(engine("p", key=b"")), engine("d", key=b"")
    (keyring,) = make_keyrings(1)
    d.replica.directory._client = d.replica._client = HandshakeClient(keyring.secure_client)
    p.server = HandshakeServer([p.card], secure=keyring.secure_server)
    source = p.source(p.offer())
    with pytest.raises(HandshakeError, match=REFUSED):
        d.replica.directory.add(source.address, p.card.ranks)
    pull(d, source)
    run(p, d, until=settled(d, "r"))
    assert d.pulls[-1] == PullEvent("r", "", safe=True)
