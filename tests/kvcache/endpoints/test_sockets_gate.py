# pyright: reportArgumentType=false, reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Tests a gate in front of a socket: the data that it passes on, the data that it refuses, and what a hostile peer
costs in memory and delays.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache import InvalidParamsError, KVEvents
from kvcache.endpoints import sockets
from kvcache.endpoints.addresses import has_ipv6
from kvcache.endpoints.follower import WatchClient
from kvcache.endpoints.reset import ResetEndpoint
from kvcache.endpoints.sockets import (
    QUESTIONS,
    SUBSCRIPTIONS,
    BoundSocket,
    FrameCounter,
    Gate,
    GateError,
    Limits,
    bound_socket,
    listener,
)
from kvcache.endpoints.watch import ManagerWatch
from kvcache.watch.messages import AskLook
from tests.kvcache.build import manager_of
from tests.kvcache.stranger import GREETING, MORE_RSS, READY, flood, frame, rss, stranger

ANY = "tcp://127.0.0.1:0"
PATIENCE_S = 30.0


def waited(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- what is followed


def passed(limits: Limits, data: bytes, chooser: random.Random) -> tuple[bytes, int]:
    """Returns the data that the gate passes on if this data arrives in pieces of random length."""
    counter, out, rest, frames = FrameCounter(limits), b"", b"", 0
    while data or rest:
        piece = chooser.randrange(1, 40)
        rest, data = rest + data[:piece], data[piece:]
        most = chooser.randrange(1, 4)
        count, begun = counter.passes(rest, most)
        assert begun <= most
        out, rest, frames = out + rest[:count], rest[count:], frames + begun
        if not data and begun < most and not count:
            break
    return out, frames


def test_data_within_the_limits_is_passed_on_in_whatever_pieces_it_arrives() -> None:
    chooser, messages = random.Random(1), 0
    for _ in range(300):
        stream, frames = GREETING + READY, 1
        for _ in range(chooser.randrange(1, 12)):
            count = chooser.randrange(1, 5)
            messages += 1
            frames += count
            for at in range(count):
                body = chooser.randbytes(chooser.choice([0, 1, 9, 200, 255, 256, 300]))
                stream += frame(0 if at == count - 1 else 1, body)
                if chooser.random() < 0.2:
                    stream, frames = stream + frame(4, b"\x04PING\0\0"), frames + 1
        for limits in (Limits(message_bytes=1200), Limits(message_bytes=1200, subscription_bytes=1 << 20)):
            assert passed(limits, stream, chooser) == (stream, frames)
    assert messages > 1000


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (frame(1, b"") * 9, "frames"),
        (frame(0, bytes(1025)), "bytes"),
        (frame(1, bytes(600)) * 2, "bytes"),
        (b"\x03" + (1 << 62).to_bytes(8, "big"), "bytes"),
        (b"\x06" + (1 << 62).to_bytes(8, "big"), "bytes"),
        (b"\x08\x00", "protocol"),
        ((frame(1, bytes(1000)) + frame(0, b"")) * 5, "subscriptions"),
        (frame(4, b"\x09SUBSCRIBE" + bytes(900)) * 5, "subscriptions"),
        (frame(4, b"\x06CANCEL" + bytes(900)) * 5, "subscriptions"),
    ],
)
def test_a_peer_that_exceeds_a_limit_is_distinguished_from_the_others(data: bytes, limit: str) -> None:
    for seed in range(20):
        limits = Limits(message_bytes=1024, subscription_bytes=4096 if limit == "subscriptions" else math.inf)
        with pytest.raises(GateError) as error:
            passed(limits, GREETING + READY + data, random.Random(seed))
        assert error.value.limit == limit


def test_data_that_is_not_zmtp_3_without_keys_does_not_pass() -> None:
    for begin in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\x00" * 40,
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING[:10] + b"\x01",
    ):
        with pytest.raises(GateError, match="ZMTP 3"):
            passed(QUESTIONS, begin, random.Random(1))


# ---- floods of real sockets


class Served:
    """A socket of pagewire, with a question that an honest peer asks."""

    def __init__(self, address: str, kind: bytes, ask: Callable[[], None]) -> None:
        self.address, self.kind, self.ask = address, kind, ask


@pytest.fixture(params=["reset", "replay", "events", "watch"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(closing(manager_of(32, params={"kv_events": KVEvents(ANY, ANY)})))
        if request.param == "reset":
            endpoint = stack.enter_context(closing(ResetEndpoint(f"ipc://{tmp_path}/pw")))
            push = stack.enter_context(zmq.Context.instance().socket(zmq.PUSH))
            push.connect(endpoint.address)

            def ask_reset() -> None:
                endpoint.is_asked = False
                push.send(b"")
                waited(lambda: endpoint.is_asked)

            yield Served(endpoint.address, b"PUSH", ask_reset)
        elif request.param == "watch":
            watch = stack.enter_context(closing(ManagerWatch(manager)))
            client = stack.enter_context(closing(WatchClient(watch.address)))

            def ask_look() -> None:
                client.ask(AskLook())
                assert client.answer(PATIENCE_S) is not None

            yield Served(watch.address, b"DEALER", ask_look)
        else:
            events, replay = manager.kv_event_endpoints[0]
            peer = stack.enter_context(
                zmq.Context.instance().socket(zmq.DEALER if request.param == "replay" else zmq.SUB)
            )
            peer.connect(replay if request.param == "replay" else events)
            if request.param == "events":
                peer.subscribe(b"")

            def ask() -> None:
                if request.param == "replay":
                    peer.send_multipart([b"", bytes(8)])
                assert peer.poll(PATIENCE_S * 1000)
                while peer.poll(20):
                    peer.recv_multipart()

            yield Served(replay, b"DEALER", ask) if request.param == "replay" else Served(events, b"SUB", ask)


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (frame(1, b"") * 32768, 4 << 20),  # The message is endless: it has 2 million frames.
        (frame(1, bytes(1000)) * 64, 512 << 20),
        (
            frame(4, b"\x09SUBSCRIBE" + bytes(900)) * 64,
            1 << 17,
        ),  # Connections that subscribe to nothing have to wait, so only few connections are open at a time.
    ],
    ids=["empty frames", "long frames", "commands"],
)
def test_an_endless_message_is_dropped_and_neither_fills_memory_nor_delays_other_peers(
    served: Served, data: bytes, most: int
) -> None:
    served.ask()
    before = rss()
    sent = flood(served.address, served.kind, data, most)
    served.ask()
    assert rss() - before < MORE_RSS
    if most > 1 << 17:
        assert sent < most, "the message was dropped"


def test_a_message_of_many_frames_from_a_real_peer_asks_for_no_reset(tmp_path: Path) -> None:
    with closing(ResetEndpoint(f"ipc://{tmp_path}/pw")) as endpoint, zmq.Context() as context:
        before = rss()
        with context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.RECONNECT_IVL, 60_000)
            push.connect(endpoint.address)
            for _ in range(20_000):
                push.send(b"", zmq.SNDMORE)
            push.send(b"")
            with context.socket(zmq.PUSH) as honest:
                honest.connect(endpoint.address)
                assert not endpoint.is_asked
                honest.send(b"")
                waited(lambda: endpoint.is_asked)
        assert rss() - before < MORE_RSS


# ---- a gate by itself


@pytest.fixture
def echo() -> Iterator[Callable[[Limits], BoundSocket]]:
    with contextlib.ExitStack() as stack:

        def made(limits: Limits) -> BoundSocket:
            return stack.enter_context(closing(bound_socket("echo", zmq.ROUTER, ANY, 100, limits=limits)))

        yield made


def gate_of(bound: BoundSocket) -> Gate:
    gate = bound._gate
    assert isinstance(gate, Gate)
    return gate


def test_a_peer_beyond_the_limit_is_disconnected_at_once_and_the_others_stay(
    echo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bound = echo(Limits(message_bytes=100, peers=3))
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(closing(stranger(bound.address))) for _ in range(3)]
        one_more = stack.enter_context(
            closing(socket.create_connection(("127.0.0.1", int(bound.address.rpartition(":")[2]))))
        )
        one_more.settimeout(PATIENCE_S)
        assert one_more.recv(1) == b""
        for peer in peers:
            peer.sendall(frame(0, b"x"))
            assert bound.poll(PATIENCE_S * 1000)
            assert bound.recv_multipart()[1] == b"x"
        peers[0].close()
        waited(lambda: len(gate_of(bound)._peers) == 2)
        stack.enter_context(closing(stranger(bound.address)))
    assert gate_of(bound).dropped == {"peers": 1}
    assert "echo: dropped a peer of tcp://127.0.0.1:" in caplog.text
    assert "more than 3 peers" in caplog.text


def test_peers_cannot_use_up_the_file_descriptors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.endpoints.sockets.resource.getrlimit", lambda _: (1024, 4096))
    assert Limits(message_bytes=1).most_peers == 170
    assert SUBSCRIPTIONS.most_peers == 170
    monkeypatch.setattr("kvcache.endpoints.sockets.resource.getrlimit", lambda _: (1 << 20, 1 << 20))
    assert Limits(message_bytes=1).most_peers == 1024


def test_a_peer_has_so_many_messages_a_second_and_the_others_are_heard_meanwhile(echo: Any) -> None:
    bound, heard, started = echo(Limits(message_bytes=100, per_second=1000.0)), 0, time.monotonic()
    with closing(stranger(bound.address)) as loud, closing(stranger(bound.address)) as honest:
        loud.setblocking(False)
        rest = frame(0, b"") * 200_000
        for at in range(20):
            with contextlib.suppress(BlockingIOError):
                rest = rest[loud.send(rest) :]
            honest.sendall(frame(0, b"honest"))
            answered = False
            while not answered:
                assert bound.poll(PATIENCE_S * 1000)
                answered = bound.recv_multipart()[1] == b"honest"
                heard += not answered
            assert at >= 0
        while bound.poll(50) and heard < 4000:
            bound.recv_multipart()
            heard += 1
        assert 0 < heard <= 2000 + 1000 * (time.monotonic() - started)


def test_messages_sent_before_the_close_arrive_and_the_address_is_free_again() -> None:
    bound = bound_socket("echo", zmq.ROUTER, ANY, 100)
    address = bound.address
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.connect(address)
        peer.send(b"ask")
        assert bound.poll(PATIENCE_S * 1000)
        name, _ = bound.recv_multipart()
        for _ in range(50):
            bound.send_multipart([name, bytes(1000)])
        bound.close(linger=20_000)
        for _ in range(50):
            assert peer.poll(PATIENCE_S * 1000)
            assert len(peer.recv()) == 1000
    bound.close()
    again = bound_socket("echo", zmq.ROUTER, address)
    assert again.address == address
    again.close()


def test_a_gate_listens_at_the_same_addresses_as_zmq(tmp_path: Path) -> None:
    for address, shown in (
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:"),
        ("tcp://*:*", "tcp://[::]:" if has_ipv6() else "tcp://0.0.0.0:"),
        ("tcp://lo:0", "tcp://127.0.0.1:"),
        (f"ipc://{tmp_path}/s", f"ipc://{tmp_path}/s"),
        ("ipc://@pagewire-test-gate", "ipc://@pagewire-test-gate"),
    ):
        with (
            closing(bound_socket("echo", zmq.ROUTER, address)) as bound,
            zmq.Context.instance().socket(zmq.DEALER) as peer,
        ):
            assert bound.address.startswith(shown)
            peer.setsockopt(zmq.LINGER, 0)
            sockets.keep_alive(peer)
            sockets.connect(peer, bound.address)
            peer.send(b"here")
            assert bound.poll(PATIENCE_S * 1000)
            bound.recv_multipart()
    assert not (tmp_path / "s").exists()
    for address in (
        "tcp://127.0.0.1",
        "tcp://:1",
        "tcp://nowhere:1",
        "tcp://127.0.0.1:99999",
        f"ipc://{tmp_path}/{'x' * 200}",
    ):
        with pytest.raises(OSError, match=r"^\[Errno|Invalid|too long"):
            listener(address)
        with pytest.raises(InvalidParamsError, match="cannot bind"):
            bound_socket("echo", zmq.ROUTER, address)


@pytest.mark.parametrize("taken", ["by a manager", "by ZMQ", "by many who wait", "by a file"])
def test_an_ipc_address_is_not_taken_from_a_living_process(tmp_path: Path, taken: str) -> None:
    base, path = f"ipc://{tmp_path}/e", tmp_path / "e-reset_prefix_cache"
    with contextlib.ExitStack() as stack:
        if taken == "by a manager":
            stack.enter_context(closing(ResetEndpoint(base)))
        elif taken == "by ZMQ":
            stack.enter_context(zmq.Context.instance().socket(zmq.PULL)).bind(f"ipc://{path}")
        elif taken == "by a file":
            path.write_text("kept")
        else:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(0)
            for _ in range(2):
                stack.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                ).connect_ex(str(path))
        with pytest.raises(InvalidParamsError, match=r"zmq_endpoint_base .*/e.* cannot bind .*Address already in use"):
            ResetEndpoint(base)
        assert path.exists()


def test_a_socket_with_keys_does_not_take_an_ipc_address_from_a_living_process_either(tmp_path: Path) -> None:
    """With keys there is no gate, because libzmq itself listens at the address."""
    address = f"ipc://{tmp_path}/e"
    with closing(bound_socket("first", zmq.PULL, address, secure=lambda _: None)):
        with pytest.raises(InvalidParamsError, match=r"second: cannot bind .*Address already in use"):
            bound_socket("second", zmq.PULL, address, secure=lambda _: None)
        with zmq.Context.instance().socket(zmq.PUSH) as peer:
            peer.connect(address)
    bound_socket("again", zmq.PULL, address, secure=lambda _: None).close()


def test_a_peer_that_the_zmq_socket_refuses_is_dropped_once_it_has_the_reason() -> None:
    with closing(bound_socket("echo", zmq.ROUTER, ANY)) as bound:
        with closing(stranger(bound.address, b"PUB")) as peer:  # a ROUTER does not talk to a PUB
            while peer.recv(1 << 10):
                pass
        waited(lambda: not gate_of(bound)._peers)


@pytest.fixture
def connection() -> Iterator[tuple[sockets._Connection, socket.socket, socket.socket]]:
    """Yields a connection, its peer, and the other end of its inner connection."""
    with contextlib.ExitStack() as opened:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        (client, peer), (inner, zmq_socket) = [[opened.enter_context(one) for one in pair] for pair in pairs]
        for own in (client, inner):
            own.setblocking(False)
        yield sockets._Connection(client, inner, QUESTIONS), peer, zmq_socket


def test_a_connection_polls_only_for_what_it_can_handle(connection: Any) -> None:
    one, _, _ = connection
    reads, writes = selectors.EVENT_READ, selectors.EVENT_WRITE
    assert one.interest() == (reads, reads)
    one.up = b"waits for the ZMQ socket"
    assert one.interest() == (0, reads | writes)
    one.up, one.is_held = b"", True
    assert one.interest() == (0, reads)
    one.is_held, one.down = False, memoryview(b"waits for the peer")
    assert one.interest() == (reads | writes, 0)
    one.down, one.is_ending = memoryview(b""), True
    assert one.interest() == (reads, 0)


def test_a_connection_keeps_what_neither_side_accepts_yet(connection: Any) -> None:
    one, peer, zmq_socket = connection
    for send in (one.send_up, one.send_down):
        data = os.urandom(1 << 22)
        one.up, one.down = data, memoryview(data)
        for _ in range(8):
            send()
        left = one.up if send == one.send_up else one.down
        assert 0 < len(left) < len(data)
        other = zmq_socket if send == one.send_up else peer
        there = other.recv(len(data) - len(left), socket.MSG_WAITALL)
        assert there + left == data


def test_a_socket_that_a_killed_process_has_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "e-reset_prefix_cache"))
        left.listen()
    with closing(ResetEndpoint(f"ipc://{tmp_path}/e")):
        assert (tmp_path / "e-reset_prefix_cache").is_socket()


def test_no_other_process_can_reach_the_socket_behind_a_gate() -> None:
    with closing(bound_socket("echo", zmq.ROUTER, ANY)) as bound:
        name = gate_of(bound).inner.removeprefix("ipc://@")
        read, write = os.pipe()
        if not (child := os.fork()):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect("\0" + name)
                peer.settimeout(PATIENCE_S)
                with contextlib.suppress(ConnectionError):
                    os.write(write, b"let in" if peer.recv(1) else b"closed")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 10) == b"closed"
        os.close(read)
        os.close(write)
