"""Sockets whose peers flood them and die, and the pulse over processes that are stopped."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_adapters.service.sockets import Pulse, bind_router, bounded_socket, join_frontend, received
from tests.kvcache.stranger import MORE_RSS, frame, rss
from tests.kvcache.stranger import flood as stranger_floods

MODULE = "tests.scheduler_adapters.service.test_sockets"


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


def flood(endpoint: str, kind: str) -> None:
    """Send until nothing is taken any more, and say so."""
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


def survive(endpoint: str, kind: str) -> None:
    """Read what a peer had sent that has filled our queue and died, some heartbeats of ZMQ later."""
    flooder = subprocess.Popen([sys.executable, "-m", MODULE, "flood", endpoint, kind])
    socket = _MADE[kind](zmq.Context(), endpoint)
    if kind != "router":
        socket.send(b"here")
    flooder.wait(60)
    time.sleep(1.5)
    count = sum(1 for _ in itertools.takewhile(bool, iter(lambda: sum(1 for _ in received(socket)), -1)))
    assert count > 3  # batches
    print("survived")  # noqa: T201


def test_a_stranger_at_a_port_without_keys_fills_no_memory_and_keeps_nobody(tmp_path: Path) -> None:
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
            assert private._gate is None, "nobody else gets into a folder of our own"


@pytest.mark.slow
@pytest.mark.parametrize("kind", _MADE)
def test_peers_that_fill_a_queue_and_die_do_no_harm(kind: str, tmp_path: Path) -> None:
    """With ZMQ's heartbeats on these sockets `!_io_error` ended the process, each time: so a `Pulse` has them alone."""
    command = [sys.executable, "-m", MODULE, "survive", f"ipc://{tmp_path}/s", kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


@pytest.mark.parametrize("kind", _MADE)
def test_sockets_that_carry_messages_are_kept_alive_by_tcp_alone(kind: str, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = _MADE[kind](context, f"ipc://{tmp_path}/s")
    kept = (
        zmq.HEARTBEAT_IVL,
        zmq.TCP_KEEPALIVE,
        zmq.TCP_KEEPALIVE_IDLE,
        zmq.TCP_KEEPALIVE_INTVL,
        zmq.TCP_KEEPALIVE_CNT,
    )
    assert [socket.getsockopt(option) for option in kept] == [0, 1, 10, 5, 3]
    context.destroy(linger=0)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process with a ROUTER that does nothing."""
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
def test_a_watch_tells_of_processes_that_stop_or_die_and_not_of_busy_ones(
    peer: tuple[str, subprocess.Popen[bytes]],
) -> None:
    endpoint, process = peer
    context: zmq.Context[Any] = zmq.Context()
    pulse = Pulse(context, endpoint, None)
    assert not pulse.socket.poll(4000), "nobody reads there, as a process that computes for long"
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
    with pytest.raises(zmq.ZMQError):
        Pulse(context, "nowhere", None)
    context.term()  # hangs where a socket was left


if __name__ == "__main__":
    {"flood": flood, "survive": survive}[sys.argv[1]](*sys.argv[2:])
