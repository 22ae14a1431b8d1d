"""ZMQ sockets reach names of both IP families, over whichever address answers.

The names are looked up by a stand-in for `socket.getaddrinfo`, because a test may not name the hosts of its machine.
`tests/hosts/test_names_on_hosts.py` does without it.
"""

from __future__ import annotations

import gc
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import zmq

from kvcache.endpoints import dialer
from kvcache.endpoints.addresses import has_ipv6
from kvcache.endpoints.sockets import bound_socket, connect, keep_alive
from transfer.wire.keys import make_keyrings

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
PATIENCE_S = 60
BOTH = ["127.0.0.1", "::1"]
DEAD = "192.0.2.1"
"""An address of no host (RFC 5737)."""
Names = dict[str, list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """Returns the known names with their addresses. At the end, the dialer's thread must have stopped."""
    known: Names = {}
    real = socket.getaddrinfo

    def looked_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if str(host).endswith(".example") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [answer for address in known.get(host, [host]) for answer in real(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    yield known
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.name == "pagewire-dialer" for thread in threading.enumerate()):
        gc.collect()
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def dealer(endpoint: str, keyring: Any = None) -> Any:
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RECONNECT_IVL, 10)
    keep_alive(made)
    if keyring is not None:
        keyring.secure_client(made)
    connect(made, endpoint)
    return made


def router(host: str, port: str = "0", keyring: Any = None) -> Any:
    shown = f"[{host}]" if ":" in host else host
    return bound_socket("echo", zmq.ROUTER, f"tcp://{shown}:{port}", 9, keyring and keyring.secure_server)


def heard(bound: Any, message: bytes) -> None:
    assert bound.poll(PATIENCE_S * 1000)
    assert bound.recv_multipart()[1] == message


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("lives", BOTH)
def test_a_peer_is_reached_at_either_address_of_its_name(names: Names, lives: str, keys: bool) -> None:
    ours, theirs = make_keyrings(2) if keys else (None, None)
    names["both"] = BOTH
    with closing(router(lives, keyring=ours)) as bound:
        port = bound.address.rpartition(":")[2]
        with closing(dealer(f"tcp://both:{port}", theirs)) as asking:
            asking.send(b"here")
            assert bound.poll(PATIENCE_S * 1000)
            who, said = bound.recv_multipart()
            bound.send_multipart([who, said * 100_000])
            assert asking.poll(PATIENCE_S * 1000)
            assert asking.recv() == said * 100_000


def test_a_silent_address_costs_a_quarter_of_a_second_and_not_the_connection(names: Names) -> None:
    names["both"] = [DEAD, "::1"]
    with closing(router("::1")) as bound, closing(dealer(f"tcp://both:{bound.address.rpartition(':')[2]}")) as asking:
        asking.send(b"here")
        heard(bound, b"here")


def test_a_peer_that_comes_back_at_the_other_address_is_reached_again(names: Names) -> None:
    names["both"] = BOTH
    first = router("127.0.0.1")
    port = first.address.rpartition(":")[2]
    with closing(dealer(f"tcp://both:{port}")) as asking:
        asking.send(b"first")
        heard(first, b"first")
        first.close()
        with closing(router("::1", port)) as second:
            said = b""
            deadline = time.monotonic() + PATIENCE_S
            while not said:  # libzmq drops what it has sent to a peer that has gone
                assert time.monotonic() < deadline
                asking.send(b"second")
                said = second.recv_multipart()[1] if second.poll(100) else b""
            assert said == b"second"


def test_a_peer_that_starts_later_and_a_name_that_is_known_later_are_reached(
    names: Names, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier messages are kept. The log names the host that is not reached."""
    monkeypatch.setattr(dialer, "_SILENT_S", 0.0)
    port = str(free_port())
    with closing(dealer(f"tcp://later.example:{port}")) as asking:
        asking.send(b"early")
        with caplog.at_level(logging.WARNING, "pagewire"):
            deadline = time.monotonic() + PATIENCE_S
            while f"tcp://later.example:{port} cannot be reached" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert "check that the name has the address" in caplog.text
        with closing(router("::1", port)) as bound:
            names["later.example"] = BOTH
            heard(bound, b"early")


def free_port() -> int:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        return taken.getsockname()[1]


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("host", BOTH)
def test_an_address_needs_no_thread(host: str) -> None:
    with closing(router(host)) as bound, closing(dealer(bound.address)) as asking:
        asking.send(b"here")
        heard(bound, b"here")
        assert "pagewire-dialer" not in [thread.name for thread in threading.enumerate()]


def test_another_process_is_not_carried(names: Names) -> None:
    """The peer hears nothing of a stranger, whose connection is closed at once."""
    names["both"] = BOTH
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.stdin.read()); print(s.recv(1))"
    with socket.create_server(("127.0.0.1", 0)) as peer, zmq.Context.instance().socket(zmq.DEALER) as owner:
        peer.setblocking(False)
        inner = dialer.dialed(owner, "both", peer.getsockname()[1], lambda _: None)
        at = "\0" + inner.removeprefix("ipc://@")
        done = subprocess.run([sys.executable, "-c", program], input=at, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "b''"
        with pytest.raises(BlockingIOError):
            peer.accept()


LAST_WORDS = """
import socket, sys, zmq
from kvcache.endpoints import dialer
from kvcache.endpoints.sockets import connect
dialer._LAST_WORDS_S = 60.0
real = socket.getaddrinfo
socket.getaddrinfo = lambda host, *a, **k: [x for at in ("127.0.0.1", "::1") for x in real(at, *a, **k)]
context = zmq.Context.instance()
with context.socket(zmq.DEALER) as telling:
    telling.setsockopt(zmq.LINGER, -1)
    telling.setsockopt(zmq.SNDHWM, 0)
    connect(telling, f"tcp://both:{sys.argv[1]}")
    for number in range(400):
        telling.send(number.to_bytes(4, "big") * 16384)
context.term()
print("over", flush=True)
"""


def test_the_last_words_of_a_process_arrive() -> None:
    """The peer reads slowly until libzmq has nothing left to send. The rest is then in the dialer's buffers."""
    with zmq.Context.instance().socket(zmq.ROUTER) as bound:
        bound.setsockopt(zmq.RCVHWM, 1)
        bound.setsockopt(zmq.RCVBUF, 1 << 12)
        port = bound.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-c", LAST_WORDS, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as telling:
            assert telling.stdout is not None
            number = 0
            while not select.select([telling.stdout], [], [], 0.002)[0]:
                heard(bound, number.to_bytes(4, "big") * 16384)
                number += 1
            assert telling.stdout.readline() == b"over\n"
            assert number < 399, "much must be left"
            for left in range(number, 400):
                heard(bound, left.to_bytes(4, "big") * 16384)
            assert telling.wait(PATIENCE_S) == 0
