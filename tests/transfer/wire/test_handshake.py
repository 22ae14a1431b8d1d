"""Tests the handshake server and its clients: no message ends the server, and a silent peer delays no other peer."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.kvcache.stranger import MORE_RSS, flood, frame, rss
from tests.transfer.clock import Clock
from transfer.errors import HandshakeError
from transfer.wire import handshake
from transfer.wire.handshake import MAX_QUERY_BYTES, EngineCard, HandshakeClient, HandshakeServer, differences
from transfer.wire.keys import Throttle
from transfer.wire.messages import (
    ContentQuery,
    LeaseQuery,
    LeaseReply,
    MetadataQuery,
    MetadataReply,
    Ping,
    Pong,
    QueryRefusal,
    decode_answer,
    encode_message,
)

CARD = EngineCard("p", "first", (b"rank 0", b"rank 1"), {"model": "m", "dtype": "bf16"})
SAME = {"model": "m", "dtype": "bf16"}


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with HandshakeServer([CARD]) as running:
        yield running


@pytest.fixture
def client() -> Iterator[HandshakeClient]:
    asking = HandshakeClient()
    yield asking
    asking.close()


@pytest.fixture
def dealer(server: HandshakeServer) -> Iterator[Callable[[], zmq.Socket[bytes]]]:
    """Returns a function that makes a bare socket, connected to the server."""
    sockets: list[zmq.Socket[bytes]] = []

    def make(kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(server.endpoint)
        sockets.append(socket)
        return socket

    yield make
    for socket in sockets:
        socket.close()


def waits_of(server: HandshakeServer) -> int:
    (waits,) = [
        line.split()[1]
        for line in Path(f"/proc/self/task/{server._thread.native_id}/status").read_text().splitlines()
        if line.startswith("voluntary")
    ]
    return int(waits)


def test_an_idle_server_sleeps_and_ends_at_once(client: HandshakeClient) -> None:
    server, answers = HandshakeServer([CARD]), list[Any]()
    client.ask(server.endpoint, Ping(query_id=0, engine_id="p"), answers.append, 5.0)
    deadline = time.monotonic() + 20
    while not answers and time.monotonic() < deadline:
        client.poll()
    assert isinstance(answers[0], Pong)
    before = waits_of(server) - 4
    while waits_of(server) - before > 3:  # A busy machine can delay waits, but cannot cause more waits.
        assert time.monotonic() < deadline
        before = waits_of(server)
        time.sleep(0.5)
    started = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - started < 5
    assert not server._thread.is_alive()


def received(router: zmq.Socket[bytes], client: HandshakeClient, seconds: float = 20.0) -> list[bytes]:
    """Returns the next question that a socket receives while the client polls."""
    deadline = time.monotonic() + seconds
    while not router.poll(1):
        client.poll()
        assert time.monotonic() < deadline, f"no question after {seconds} s"
    return router.recv_multipart()


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A peer whose answers and times the test controls."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    yield socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    socket.close(0)


class Answers(list[Any]):
    """Collects the answers to questions. `wait` polls until there are `count` answers."""

    def __init__(self, client: HandshakeClient) -> None:
        super().__init__()
        self.client = client

    def wait(self, count: int, seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        while len(self) < count:
            assert time.monotonic() < deadline, f"{len(self)} of {count} answers after {seconds} s: {self}"
            self.client.poll()
            time.sleep(5e-4)
        return self[-1]


@pytest.fixture
def answers(client: HandshakeClient) -> Answers:
    return Answers(client)


def test_metadata_comes_from_the_engine_that_was_asked_for(
    server: HandshakeServer, client: Any, answers: Answers
) -> None:
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    reply = answers.wait(1)
    assert isinstance(reply, MetadataReply)
    assert (reply.engine_id, reply.incarnation, reply.ranks) == ("p", "first", (b"rank 0", b"rank 1"))


def test_one_server_answers_for_every_engine_of_its_process(
    server: HandshakeServer, client: Any, answers: Answers
) -> None:
    server.serve(EngineCard("q", "other", (b"x",)))
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="q", compatibility={}), answers.append)
    assert answers.wait(1).ranks == (b"x",)
    server.serve(EngineCard("q", "restarted", (b"y",)))
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="q", compatibility={}), answers.append)
    assert (answers.wait(2).incarnation, answers[-1].ranks) == ("restarted", (b"y",))
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    assert answers.wait(3).incarnation == "first"


def test_a_sign_of_life_names_the_incarnation(server: HandshakeServer, client: Any, answers: Answers) -> None:
    client.ask(server.endpoint, Ping(query_id=0, engine_id="p"), answers.append, 20.0)
    assert isinstance(answers.wait(1), Pong)
    assert answers[0].incarnation == "first"


def test_an_engine_that_is_not_here_is_refused_by_name(server: HandshakeServer, client: Any, answers: Answers) -> None:
    for ask in (
        lambda: client.ask(
            server.endpoint, MetadataQuery(query_id=0, engine_id="x", compatibility=SAME), answers.append
        ),
        lambda: client.ask(server.endpoint, Ping(query_id=0, engine_id="x"), answers.append, 20.0),
    ):
        ask()
        error = answers.wait(len(answers) + 1)
        assert isinstance(error, HandshakeError)
        assert f"{server.endpoint} refuses: engine 'x' is not here: ['p']" in str(error)
    assert server.counts["refused"] == 2


def test_compatibility_is_compared_first_and_both_values_are_named(
    server: HandshakeServer, client: Any, answers: Answers
) -> None:
    client.ask(
        server.endpoint,
        MetadataQuery(query_id=0, engine_id="p", compatibility={"model": "m", "dtype": "fp8", "page": "16"}),
        answers.append,
    )
    error = answers.wait(1)
    differ = "dtype: 'bf16' at the source, 'fp8' at the reader, page: None at the source, '16' at the reader"
    assert str(error) == f"{server.endpoint} refuses: engine 'p' is not compatible: {differ}"


def test_differences_name_what_either_side_has() -> None:
    assert differences({"a": "1"}, {"a": "1"}) == ""
    assert differences({"a": "1"}, {"a": "1", "b": "2"}) == "b: '2' at the source, None at the reader"
    found = differences({"a": "1", "b": "2"}, {"a": "3"})
    assert found == "a: '3' at the source, '1' at the reader, b: None at the source, '2' at the reader"


def test_if_values_are_long_only_the_differing_properties_are_named() -> None:
    reader, source = {"g": "full, 4 layers, 2 heads, window 0"}, {"g": "full, 4 layers, 8 heads, window 9"}
    assert differences(reader, source) == "g: '8 heads, window 9' at the source, '2 heads, window 0' at the reader"
    assert differences({"g": "a, b"}, {"g": "a, b, c"}) == "g: 'a, b, c' at the source, 'a, b' at the reader"


def test_an_address_that_cannot_be_asked_is_an_error(client: Any, answers: Answers) -> None:
    client.ask("ipc://" + "x" * 200, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    assert str(answers.wait(1)).startswith("cannot ask 'ipc://xxx")


def test_no_received_message_ends_the_server(
    server: HandshakeServer, dealer: Any, client: Any, answers: Answers
) -> None:
    rng = random.Random(5)
    query = encode_message(MetadataQuery(query_id=1, engine_id="p", compatibility=SAME))
    samples: list[list[bytes]] = [[], [b""], [b"", b""], [b"", b"", b""], [query, query], [b""] * 40, [b"\x91" * 5000]]
    samples += [[b"\x81" * 60000], [query[:-1]], [query + b"\0"], [encode_message(QueryRefusal(reason="x"))]]
    # vLLM sends this query for a missing rank. It would end the thread that answers.
    samples += [[b"\x93\xacget_meta_msg\0\x63"]]
    samples += [[rng.randbytes(rng.randrange(100))] for _ in range(60)]
    for sample in samples:
        socket = dealer()
        if sample:
            socket.send_multipart(sample)
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    assert isinstance(answers.wait(1), MetadataReply)
    deadline = time.monotonic() + 20
    told = len(samples) - 2  # One sample sends no message. The gate drops the sample with 40 frames.
    while server.counts["malformed"] < told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.counts["malformed"] == told
    assert server.counts["failed"] == 0


def test_a_message_of_millions_of_frames_reaches_neither_the_server_nor_its_memory(
    server: HandshakeServer, client: Any, answers: Answers
) -> None:
    before = rss()
    for data in (frame(1, b"") * 32768, frame(1, bytes(1 << 16)) * 16):
        assert flood(server.endpoint, b"DEALER", data, 64 << 20) < 64 << 20, "it was dropped"
        client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
        assert isinstance(answers.wait(len(answers) + 1), MetadataReply)
    assert rss() - before < MORE_RSS
    assert server.counts["malformed"] == 0


def test_a_malformed_query_is_answered_with_the_reason(dealer: Any) -> None:
    socket = dealer()
    socket.send(b"nonsense")
    answer = decode_answer(socket.recv())
    assert isinstance(answer, QueryRefusal)
    assert "8 bytes cannot be read as a query of protocol 3" in answer.reason
    assert answer.query_id == -1


def test_a_query_beyond_the_limit_costs_its_own_connection_only(
    server: HandshakeServer, dealer: Any, client: Any, answers: Answers
) -> None:
    dealer().send(bytes(MAX_QUERY_BYTES + 1))
    client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    assert isinstance(answers.wait(1), MetadataReply)


def test_an_error_of_our_own_is_counted_and_the_next_query_answered(
    server: HandshakeServer, dealer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    socket = dealer()
    with monkeypatch.context() as patched:
        patched.setattr(server, "_answer_to", lambda query: 1 / 0)
        socket.send(encode_message(Ping(query_id=1)))
        deadline = time.monotonic() + 20
        while not server.counts["failed"] and time.monotonic() < deadline:
            time.sleep(0.01)
    assert server.counts["failed"] == 1
    assert "could not be answered" in caplog.text
    socket.send(encode_message(Ping(query_id=2)))
    assert isinstance(decode_answer(socket.recv()), Pong)


def test_a_req_socket_is_answered_too(dealer: Any) -> None:
    socket = dealer(zmq.REQ)
    socket.send(encode_message(Ping(query_id=9)))
    assert decode_answer(socket.recv()) == Pong(query_id=9, engine_id="p", incarnation="first")


def test_a_port_that_is_taken_is_an_error_that_names_it(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=f"cannot bind '{server.endpoint}'"):
        HandshakeServer([CARD], server.endpoint)


def test_the_server_binds_only_the_loopback_by_default(server: HandshakeServer) -> None:
    assert server.endpoint.startswith("tcp://127.0.0.1:")


def test_closing_twice_is_fine_and_frees_the_port() -> None:
    first = HandshakeServer([CARD])
    first.close()
    first.close()
    deadline = time.monotonic() + 20
    while True:  # ZMQ frees the port shortly after `close` has returned.
        try:
            second = HandshakeServer([CARD], first.endpoint)
        except HandshakeError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            break
    assert second.endpoint == first.endpoint
    second.close()


def test_each_peer_has_its_own_time(server: HandshakeServer, client: Any) -> None:
    got: list[tuple[str, Any]] = []
    client._clock = clock = Clock()
    for number, seconds in enumerate((0.4, 0.2)):
        client.ask(
            f"tcp://127.0.0.1:{9 + number}",
            MetadataQuery(query_id=0, engine_id="p", compatibility=SAME),
            lambda a, s=seconds: got.append((f"{s}", a)),
            seconds,
        )
    client.ask(
        server.endpoint,
        MetadataQuery(query_id=0, engine_id="p", compatibility=SAME),
        lambda a: got.append(("alive", a)),
        5.0,
    )
    deadline = time.monotonic() + 20
    while len(got) < 3:
        client.poll()
        time.sleep(1e-3)
        clock.now += 0.01 if got else 0.0
        assert time.monotonic() < deadline
    assert [name for name, _ in got] == ["alive", "0.2", "0.4"]
    assert "no answer from tcp://127.0.0.1:10 in 0.2 s" in str(got[1][1])
    assert client._asked == {}


def test_a_peer_that_is_reached_may_be_busy_for_longer_than_one_that_is_not(
    router: tuple[zmq.Socket[bytes], str], client: Any, answers: Answers
) -> None:
    socket, address = router
    client._clock = clock = Clock()
    client.ask(address, Ping(query_id=0, engine_id="p"), answers.append, 0.3)
    identity, _ = received(socket, client)
    for _ in range(10):  # This is three times as long as a peer may be unreachable.
        clock.now += 0.1
        client.poll()
    assert not answers
    socket.send_multipart([identity, encode_message(Pong(query_id=0, engine_id="p", incarnation="i"))])
    assert isinstance(answers.wait(1), Pong)


def test_a_lost_message_is_asked_for_again(
    router: tuple[zmq.Socket[bytes], str], client: Any, answers: Answers
) -> None:
    socket, address = router
    client._clock = clock = Clock()
    client.ask(address, Ping(query_id=0, engine_id="p"), answers.append, 0.3)
    first = received(socket, client)
    clock.now += 0.2
    second = received(socket, client)
    assert second == first
    for identity, _ in (first, second):
        socket.send_multipart([identity, encode_message(Pong(query_id=0, engine_id="p", incarnation="i"))])
    answers.wait(1)
    client.ask(address, Ping(query_id=0, engine_id="p"), answers.append, 0.3)
    answers_before = len(answers)
    received(socket, client)
    assert len(answers) == answers_before, (
        "the second answer to the first question was taken for an answer to this question"
    )


def test_a_peer_that_is_reached_and_never_answers_is_given_up(
    router: tuple[zmq.Socket[bytes], str], client: Any, answers: Answers
) -> None:
    client._clock = clock = Clock()
    client.ask(router[1], Ping(query_id=0, engine_id="p"), answers.append, 0.1)
    received(router[0], client)
    while not answers and clock.now < 200:
        clock.now += 0.025
        client.poll()
    assert f"no answer from {router[1]} in 0.6 s" in str(answers.wait(1))
    assert client._asked == {}


def test_a_peer_that_dies_with_a_question_is_given_up_in_the_time_of_one_out_of_reach(
    router: tuple[zmq.Socket[bytes], str], client: Any, answers: Answers
) -> None:
    socket, address = router
    client._clock = clock = Clock()
    client.ask(address, Ping(query_id=0, engine_id="p"), answers.append, 0.5)
    received(socket, client)
    socket.close(0)
    (asking,) = client._sockets.values()
    deadline = time.monotonic() + 20
    while asking.poll(0, zmq.POLLOUT):  # until the socket has noticed that its peer is gone
        assert time.monotonic() < deadline
    clock.now += 0.5
    client.poll()
    assert isinstance(answers[0], HandshakeError), "the wait must not be six times 0.5 s"


def test_a_question_is_answered_once_and_late_answers_are_dropped() -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    clock = Clock()
    client, got = HandshakeClient(clock=clock), []
    try:
        client.ask(
            f"tcp://127.0.0.1:{port}", MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), got.append, 0.1
        )
        client.ask(f"tcp://127.0.0.1:{port}", Ping(query_id=0, engine_id="p"), got.append, 5.0)
        asked = [received(router, client) for _ in range(2)]
        while not got and clock.now < 200:
            clock.now += 0.025
            client.poll()
        assert isinstance(got[0], HandshakeError)
        identity = asked[0][0]
        late = MetadataReply(query_id=0, engine_id="p", incarnation="i", ranks=(b"x",))
        pong = Pong(query_id=1, engine_id="p", incarnation="i")
        for message in (encode_message(late), b"rubbish", encode_message(pong), encode_message(pong)):
            router.send_multipart([identity, message])
        deadline = time.monotonic() + 20
        while len(got) < 2 and time.monotonic() < deadline:
            client.poll()
        for _ in range(20):
            client.poll()
            time.sleep(1e-3)
        assert got[1:] == [pong]
    finally:
        client.close()
        router.close(0)


def test_an_answer_of_another_engine_is_not_accepted(client: Any, answers: Answers) -> None:
    asked, other = (zmq.Context.instance().socket(zmq.ROUTER) for _ in range(2))
    addresses = [f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}" for router in (asked, other)]
    wrong = Answers(client)
    try:
        client.ask(addresses[0], Ping(query_id=0, engine_id="p"), answers.append, 5.0)
        client.ask(addresses[1], Ping(query_id=0, engine_id="p"), wrong.append, 5.0)
        identity, _ = received(asked, client)
        theirs, _ = received(other, client)
        other.send_multipart([theirs, encode_message(Pong(query_id=0, engine_id="p", incarnation="false"))])
        other.send_multipart([theirs, encode_message(Pong(query_id=1, engine_id="p", incarnation="own"))])
        wrong.wait(1)
        assert not answers
        asked.send_multipart([identity, encode_message(Pong(query_id=0, engine_id="p", incarnation="true"))])
        assert answers.wait(1).incarnation == "true"
    finally:
        asked.close(0)
        other.close(0)


@pytest.mark.parametrize("ranks", [(), (b"",) * 4097])
def test_an_engine_of_no_ranks_or_of_too_many_is_refused(
    ranks: tuple[bytes, ...], client: Any, answers: Answers
) -> None:
    with HandshakeServer([EngineCard("p", "i", ranks)]) as server:
        client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility={}), answers.append)
        assert f"answers for {len(ranks)} ranks; 1 to 4096 are allowed" in str(answers.wait(1))


def test_errors_are_reported_by_poll_and_never_from_within_the_call(client: Any, answers: Answers) -> None:
    client.ask("no address", MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    assert not answers
    assert isinstance(answers.wait(1), HandshakeError)


def test_an_answer_may_make_its_asker_forget_the_address(server: HandshakeServer, client: Any) -> None:
    got: list[Any] = []

    def forget(answer: Any) -> None:
        got.append(answer)
        client.forget(server.endpoint)

    for _ in range(3):
        client.ask(server.endpoint, Ping(query_id=0, engine_id="p"), forget, 20.0)
    deadline = time.monotonic() + 20
    while len(got) < 3 and time.monotonic() < deadline:
        client.poll()
        time.sleep(1e-3)
    assert len(got) == 3
    assert client._sockets == {}


def test_many_questions_to_one_engine_are_all_answered(server: HandshakeServer, client: Any, answers: Answers) -> None:
    for _ in range(40):
        client.ask(server.endpoint, MetadataQuery(query_id=0, engine_id="p", compatibility=SAME), answers.append)
    answers.wait(40)
    assert len({answer.query_id for answer in answers}) == 40
    assert len(client._sockets) == 1


def test_the_engine_that_has_a_lease_is_asked_for_its_pages(
    server: HandshakeServer, client: HandshakeClient, answers: Answers
) -> None:
    queries: list[LeaseQuery] = []

    def leased(query: LeaseQuery) -> LeaseReply:
        queries.append(query)
        return LeaseReply(query_id=query.query_id, error="none")

    server.serve(EngineCard("q", "second", (), leased=leased))
    client.ask(
        server.endpoint, LeaseQuery(query_id=0, engine_id="q", lease_id=(1 << 64) - 1, num_tokens=7), answers.append
    )
    assert answers.wait(1).error == "none"
    assert [(query.engine_id, query.lease_id, query.num_tokens) for query in queries] == [("q", (1 << 64) - 1, 7)]
    client.ask(server.endpoint, LeaseQuery(query_id=0, engine_id="p", lease_id=5, num_tokens=7), answers.append)
    assert "engine 'p' answers no lease queries: its readers learn of leases in other messages" in str(answers.wait(2))


def test_leases_may_be_asked_for_hundreds_of_times_at_once(server: HandshakeServer, client: Any) -> None:
    """Each rank asks for the lease of each request. The metadata is asked for only once."""
    server._throttle = server_throttle = Throttle(100, lambda: 0.0)
    answers = Answers(client)
    server.serve(EngineCard("q", "second", (), leased=lambda query: LeaseReply(query_id=query.query_id)))
    for _ in range(500):
        client.ask(server.endpoint, LeaseQuery(query_id=0, engine_id="q", lease_id=5, num_tokens=7), answers.append)
    answers.wait(500)
    assert server.counts["throttled"] == 0
    assert server_throttle.admits(b"anybody")


class Lender:
    """A lender whose answers about pages by content the test sets. The lender counts its calls."""

    def __init__(self, server: HandshakeServer, client: HandshakeClient) -> None:
        self.looks, self.answers = 0, list[Any]()
        self.says: dict[str, Any] = {"waits_for": "its loop"}
        self._server, self._client = server, client
        server.serve(dataclasses.replace(CARD, lent=self._lent))

    def _lent(self, query: ContentQuery) -> LeaseReply:
        self.looks += 1
        return LeaseReply(query_id=query.query_id, **self.says)

    def ask(self, ask_id: int) -> None:
        query = ContentQuery(
            query_id=0,
            engine_id="p",
            ask_id=ask_id,
            reader="k of d",
            compatibility=SAME,
            kind="",
            page_size=16,
            hash_algorithm="sha256",
            digests=bytes(32),
        )
        self._client.ask(self._server.endpoint, query, self.answers.append, 30.0)

    def until(self, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            self._client.poll()
            assert time.monotonic() < deadline


@pytest.mark.parametrize("said", [{"pages": b"sealed"}, {"error": "it lends nothing"}])
def test_a_question_for_pages_is_answered_when_there_is_more_to_say_than_what_is_waited_for(
    server: HandshakeServer, client: HandshakeClient, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    monkeypatch.setattr(handshake, "_HOLD_S", 1e3)
    lender = Lender(server, client)
    lender.ask(1)
    lender.until(lambda: lender.looks)
    server.look_again()  # The answer to this call belongs to another question.
    lender.until(lambda: lender.looks >= 2)
    client.poll()
    assert not lender.answers
    lender.says = said
    server.look_again()
    lender.until(lambda: lender.answers)
    (answer,) = lender.answers
    assert {"pages": b"", "error": "", **said} == {"pages": answer.pages, "error": answer.error}
    assert server.counts["answered"] == 1


def test_a_reader_that_asks_for_pages_soon_learns_what_is_waited_for(
    server: HandshakeServer, client: HandshakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_HOLD_S", 0.01)
    lender = Lender(server, client)
    lender.ask(1)
    lender.until(lambda: lender.answers)
    assert lender.answers[0].waits_for == "its loop"
    assert not server._held


def test_of_many_questions_for_pages_only_the_first_are_held(
    server: HandshakeServer, client: HandshakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_HOLD_S", 1e3)
    monkeypatch.setattr(handshake, "_MOST_HELD", 2)
    lender = Lender(server, client)
    for ask_id in range(3):
        lender.ask(ask_id)
    lender.until(lambda: lender.answers)
    assert [answer.waits_for for answer in lender.answers] == ["its loop"]
    assert len(server._held) == 2
    assert not any(held.query.digests for held in server._held.values()), (
        "digests must not be kept, because each question may bring half a MiB"
    )
