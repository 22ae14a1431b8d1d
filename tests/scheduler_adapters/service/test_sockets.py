"""Sockets whose peers send floods of messages and die. Also the pulse that detects stopped processes."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import (
    FrontendQueue,
    Pulse,
    Socket,
    bind_router,
    bounded_socket,
    join_frontend,
    received,
)
from tests import forked
from tests.kvcache.stranger import MORE_RSS, frame, rss
from tests.kvcache.stranger import flood as stranger_floods


def joined(context: Any, endpoint: str) -> Any:
    socket = context.socket(zmq.DEALER)
    join_frontend(socket, endpoint, "us", None)
    return socket


def connected(context: Any, endpoint: str) -> Any:
    socket = bounded_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"us")
    socket.connect(endpoint)
    return socket


_MADE: dict[str, Callable[[Any, str], Any]] = {"router": bind_router, "joined": joined, "dealer": connected}


def flood(conn: Connection, endpoint: str, kind: str) -> None:
    """Sends messages until the peer accepts no more, and then dies."""
    del conn
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER if kind == "router" else zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 1)
    to = []
    if kind == "router":
        socket.connect(endpoint)
    else:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(endpoint)
        to = [socket.recv_multipart()[0]]
    socket.setsockopt(zmq.SNDTIMEO, 500)
    for _ in itertools.count():
        try:
            socket.send_multipart([*to, bytes(64)])
        except zmq.Again:
            break
    os.kill(os.getpid(), signal.SIGKILL)


def survive(conn: Connection, endpoint: str, kind: str) -> None:
    """Reads the messages of a dead peer that had filled the queue, after several ZMQ heartbeats. Returns the number of
    batches.
    """
    socket = _MADE[kind](zmq.Context(), endpoint)
    if kind != "router":
        socket.send(b"here")
    conn.recv()
    time.sleep(1.5)
    conn.send(sum(1 for _ in itertools.takewhile(bool, iter(lambda: sum(1 for _ in received(socket)), -1))))


def test_a_stranger_at_a_port_without_keys_fills_no_memory_and_delays_no_peer(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        with closing(bind_router(context, "tcp://127.0.0.1:0")) as router:
            peer.connect(router.address)
            before = rss()
            for data in (frame(1, b"") * 32768, frame(1, bytes(1 << 20))):
                assert stranger_floods(router.address, b"DEALER", data, 256 << 20) < 256 << 20, "it was dropped"
                peer.send(b"a request")
                assert router.poll(30_000)
                assert [frames[1:] for frames in received(router)] == [[b"a request"]]
            assert rss() - before < 3 * MORE_RSS
        with closing(bind_router(context, f"ipc://{tmp_path}/p")) as private:
            assert private._gate is None, "in a private folder no gate is needed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", _MADE)
def test_peers_that_fill_a_queue_and_die_do_no_harm(kind: str, tmp_path: Path) -> None:
    """With ZMQ's heartbeats on these sockets, the assertion `!_io_error` would always end the process. Only a `Pulse`
    has heartbeats.
    """
    flooder, _ = forked.start(flood, f"ipc://{tmp_path}/s", kind)
    survivor, conn = forked.start(survive, f"ipc://{tmp_path}/s", kind)
    flooder.join(60)
    assert flooder.exitcode == -signal.SIGKILL
    conn.send("it has died")
    survivor.join(60)
    assert survivor.exitcode == 0
    assert conn.recv() > 3


@pytest.mark.parametrize("kind", _MADE)
def test_sockets_for_messages_are_kept_alive_only_by_tcp(kind: str, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = _MADE[kind](context, f"ipc://{tmp_path}/s")
    kept = (
        zmq.HEARTBEAT_IVL,
        zmq.TCP_KEEPALIVE,
        zmq.TCP_KEEPALIVE_IDLE,
        zmq.TCP_KEEPALIVE_INTVL,
        zmq.TCP_KEEPALIVE_CNT,
        zmq.TCP_MAXRT,
        zmq.CONNECT_TIMEOUT,
    )
    assert [socket.getsockopt(option) for option in kept] == [0, 1, 10, 5, 3, 15_000, 2_000]
    context.destroy(linger=0)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs a process with an idle ROUTER."""
    endpoint = f"ipc://{tmp_path}/peer"
    program = textwrap.dedent(f"""
        import time, zmq
        socket = zmq.Context().socket(zmq.ROUTER)
        socket.bind({endpoint!r})
        time.sleep(1000)
    """)
    process = subprocess.Popen([sys.executable, "-c", program])
    yield endpoint, process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_pulse_reports_processes_that_stop_or_die_and_not_busy_ones(
    peer: tuple[str, subprocess.Popen[bytes]],
) -> None:
    endpoint, process = peer
    context: zmq.Context[Any] = zmq.Context()
    pulse = Pulse(context, endpoint, None)
    assert not pulse.socket.poll(4000), (
        "the peer does not read, like a process that computes for long, and must not count as lost"
    )
    process.send_signal(signal.SIGSTOP)
    assert pulse.socket.poll(30_000)
    assert pulse.is_over
    pulse.close()
    pulse.close()
    process.send_signal(signal.SIGCONT)
    pulse = Pulse(context, endpoint, None)
    assert not pulse.socket.poll(1000)
    process.kill()
    assert pulse.socket.poll(30_000)
    pulse.close()
    with pytest.raises(zmq.ZMQError, match="Invalid argument .*'nowhere'"):
        Pulse(context, "nowhere", None)
    context.term()  # `term` would hang if a socket had been left open.


class Pipe:
    """A socket that holds two messages until the frontend reads them."""

    def __init__(self) -> None:
        self.held: deque[bytes] = deque()

    def send(self, data: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if len(self.held) == 2:
            raise zmq.Again
        self.held.append(data)


def test_a_deaf_frontend_hears_again_when_it_has_read_half_of_its_limit() -> None:
    """If the frontend counted as hearing again just below the limit, it would turn deaf and back with each message.
    Each change would be logged.
    """
    pipe, heard, said = Pipe(), list[object](), list[object]()
    queue = FrontendQueue(cast("Socket", pipe), max_unread=10)

    def send() -> bool:
        said.append(msg.Ready(name=str(len(said)), incarnation="1"))
        queue.send(said[-1])
        return queue.flush()

    def read(count: int) -> bool:
        """Lets the frontend read messages until this many messages wait. Returns whether the frontend has turned deaf
        meanwhile.
        """
        while len(queue._unread) > count:
            heard.append(msg.decode(pipe.held.popleft()))
            if queue.flush():
                return True
        return False

    for _ in range(2):  # turns deaf twice
        while len(queue._unread) < 10:
            assert not send(), "at its limit the frontend is not deaf yet"
        assert not queue.is_deaf
        assert send()
        assert not send(), "said once"
        for waiting, deaf in ((10, True), (6, True), (5, False)):
            assert not read(waiting)
            assert (len(queue._unread), queue.is_deaf) == (waiting, deaf)
    assert not read(0)
    assert not queue.is_behind
    assert [*heard, *map(msg.decode, pipe.held)] == said, "the messages must arrive in order, each of them once"


def test_a_new_message_waits_behind_older_ones_even_if_there_is_room() -> None:
    pipe, heard = Pipe(), list[object]()
    queue = FrontendQueue(cast("Socket", pipe), max_unread=10)
    said = [msg.Ready(name=str(number), incarnation="1") for number in range(5)]
    for message in said[:4]:
        queue.send(message)
    heard.append(msg.decode(pipe.held.popleft()))
    queue.send(said[4])  # before a flush
    assert len(queue._unread) == 3
    while queue.is_behind:
        queue.flush()
        heard += [msg.decode(pipe.held.popleft()) for _ in range(len(pipe.held))]
    assert heard == said
