# pyright: reportArgumentType=false, reportOperatorIssue=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Tests a bound socket: its limits, and its remains after a failed bind."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache.endpoints import sockets
from kvcache.endpoints.addresses import has_ipv6
from kvcache.endpoints.sockets import bound_socket, listener
from kvcache.errors import InvalidParamsError
from tests.alone import alone, open_files

ANY = "tcp://127.0.0.1:0"


IPV6 = ["tcp://[::1]:0"] if has_ipv6() else []


def open_sockets() -> int:
    """Counts the open sockets of the process's ZMQ context. An open socket would keep the process from ending."""
    return sum(not each.closed for each in zmq.Context.instance()._sockets)  # pyright: ignore[reportPrivateUsage]


def test_peers_have_limits_and_a_peer_that_disappears_is_noticed() -> None:
    socket = bound_socket("watch", zmq.ROUTER, ANY, 7)
    try:
        options = (zmq.SNDHWM, zmq.LINGER, zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_CNT)
        assert [socket.getsockopt(option) for option in options] == [7, 0, 1, 10, 3]
        assert [socket.getsockopt(option) for option in (zmq.TCP_MAXRT, zmq.CONNECT_TIMEOUT)] == [15_000, 2_000]
        assert 0 < socket.getsockopt(zmq.MAXMSGSIZE) <= 4096
    finally:
        socket.close()


def test_an_address_that_is_taken_is_refused_by_name_and_nothing_stays_open() -> None:
    taken = bound_socket("watch", zmq.ROUTER, ANY)
    try:
        address, before = taken.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), open_sockets()
        with pytest.raises(InvalidParamsError, match=f"kv_events: cannot bind '{address}': "):
            bound_socket("kv_events", zmq.PUB, address)
        assert open_sockets() == before
    finally:
        taken.close()


def test_a_socket_is_secured_before_it_is_bound_and_closed_if_that_fails() -> None:
    before = open_sockets()

    def secure(socket: Any) -> None:
        assert not socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        raise LookupError("no such key")

    with pytest.raises(LookupError, match="no such key"):
        bound_socket("watch", zmq.ROUTER, ANY, secure=secure)
    assert open_sockets() == before


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_the_address_of_a_closed_socket_with_keys_is_free_at_once(tmp_path: Path, transport: str) -> None:
    """libzmq listens until its own thread handles the close. Without a wait for this, 169 of 200 TCP addresses and 49
    of 50 ipc addresses were still taken.
    """
    for number in range(20):
        address = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/e{number}"
        first = bound_socket("first", zmq.ROUTER, address, secure=lambda _: None)
        address = first.address
        with zmq.Context.instance().socket(zmq.DEALER) as peer:
            peer.connect(address)
            peer.send(b"connected")
            assert first.recv_multipart()[1] == b"connected"
            first.close()
            bound_socket("again", zmq.ROUTER, address, secure=lambda _: None).close()


@pytest.mark.parametrize("address", [ANY, *IPV6, "ipc://e", "ipc://@pagewire-test-free", "inproc://e"])
def test_the_close_of_a_socket_with_keys_waits_only_while_its_address_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sockets, "_FREED_WITHIN_S", 3600.0)
    # Only an ipc address may have a file, and an abstract one has none. These files belong to somebody else.
    for name in {"ipc://@pagewire-test-free": ["@pagewire-test-free"], "inproc://e": ["e"]}.get(address, []):
        (tmp_path / name).write_text("kept")
    bound = bound_socket("first", zmq.ROUTER, address, secure=lambda _: None)
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.IPV6, 1)
        peer.connect(bound.address)
        peer.send(b"connected")
        assert bound.recv_multipart()[1] == b"connected"
        bound.close()
        bound.close()
    if not address.startswith("inproc://"):  # libzmq alone knows when such an address is free
        bound_socket("again", zmq.ROUTER, bound.address, secure=lambda _: None).close()
    assert all(path.read_text() == "kept" for path in tmp_path.iterdir())


@pytest.mark.parametrize("secure", [None, lambda _: None], ids=["gate", "keys"])
@pytest.mark.parametrize("address", ["tcp://*:0", *(["tcp://[::]:0"] if IPV6 else [])])
def test_every_address_of_the_host_reaches_a_socket_that_listens_at_all(address: str, secure: Any) -> None:
    with closing(bound_socket("echo", zmq.ROUTER, address, secure=secure)) as bound:
        port = bound.address.rpartition(":")[2]
        for host in ("127.0.0.1", *(["[::1]"] if IPV6 else [])):
            with zmq.Context.instance().socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.IPV6, 1)
                peer.connect(f"tcp://{host}:{port}")
                peer.send(host.encode())
                assert bound.poll(30_000), host
                assert bound.recv_multipart()[1] == host.encode()


def test_an_address_that_cannot_be_bound_says_why_and_leaves_no_file_open(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for address, why in (
            (f"tcp://127.0.0.1:{port}", errno.EADDRINUSE),
            ("tcp://192.0.2.1:0", errno.EADDRNOTAVAIL),
            ("tcp://127.0.0.1:99999", errno.EINVAL),
            ("tcp://127.0.0.1:port", errno.EINVAL),
            ("tcp://no-such-interface:0", errno.ENODEV),
            (f"ipc://{tmp_path}/none/e", errno.ENOENT),
            (f"ipc://{tmp_path}/{'x' * 200}", None),  # Python refuses such a path, and gives no number.
        ):

            def says_why(address: str = address, why: int | None = why) -> None:
                before = open_files()
                with pytest.raises(OSError, match=r"^\[Errno|too long") as error:
                    listener(address)
                assert error.value.errno == why, address
                assert open_files() == before, address

            alone(says_why)  # In this process, ZMQ opens and closes files of other sockets meanwhile.
            if why == errno.EADDRINUSE:
                with pytest.raises(InvalidParamsError, match=f"with keys: cannot bind .*{os.strerror(why)}"):
                    bound_socket("with keys", zmq.ROUTER, address, secure=lambda _: None)
