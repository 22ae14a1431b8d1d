"""Whatever connects or listens does so over IPv4 and over IPv6: pulls, the service's sockets, HTTP and metrics."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache.endpoints.addresses import has_ipv6
from kvcache.endpoints.sockets import bound_socket, connect, keep_alive
from kvcache.endpoints.watch import ManagerWatch
from pagewire.listening import in_url, listen
from scheduler_adapters.service.prometheus import serve_metrics
from scheduler_adapters.service.sockets import bind_router, join_frontend
from scheduler_adapters.sglang import rooms
from tests.pagewire.top.test_command import busy_manager
from tests.transfer.pull.test_ownership import MINE, Reader, Side, leased
from transfer.errors import HandshakeError
from transfer.wire.allowed_peers import AllowedPeers, host_of
from transfer.wire.keys import make_keyrings

ROOT = Path(__file__).parents[1]


def shared() -> Any:
    return zmq.Context.instance()  # pyright: ignore[reportUnknownVariableType] -- untyped there


HOSTS = [
    "127.0.0.1",
    pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")),
]
both = pytest.mark.parametrize("host", HOSTS)


@both
@pytest.mark.parametrize("secret", ["", "the secret of one fleet"])
def test_a_reader_pulls_from_a_source(host: str, secret: str) -> None:
    with contextlib.ExitStack() as made:
        sides: list[Any] = []
        for kind, name in ((Side, "p"), (Reader, "d")):
            sides.append(kind(name, exchange={"bind": f"tcp://{host}:0", "secret": secret}))
            made.callback(sides[-1].manager.close)
            made.callback(sides[-1].exchange.close)
        source, reader = sides
        assert source.exchange.address.startswith(f"tcp://{host}:")
        offer, context, pending = leased(source, reader)
        event, proof = reader.pull(source, offer, pending)
        assert event.error == ""
        reader.manager.commit_import(context, pending, proof)
        assert reader.values(pending) == {MINE}


@both
@pytest.mark.parametrize("keys", [False, True])
def test_a_process_joins_its_frontend(host: str, keys: bool) -> None:
    ours, theirs = make_keyrings(2) if keys else (None, None)
    context = shared()
    router = bind_router(context, f"tcp://{host}:0", ours)
    joined = context.socket(zmq.DEALER)
    try:
        join_frontend(joined, router.address, "us", theirs)
        joined.send(b"here")
        assert router.poll(10_000)
        assert router.recv_multipart() == [b"us", b"here"]
    finally:
        joined.close(0)
        router.close()


@both
@pytest.mark.parametrize("keys", [False, True])
def test_sglangs_ranks_reach_a_room_server(host: str, keys: bool) -> None:
    ours, theirs = make_keyrings(2) if keys else (None, None)
    router = bind_router(shared(), f"tcp://{host}:0", ours)
    rank = rooms.connect(router.address, theirs)
    try:
        rank.send(b"here")
        assert router.poll(10_000)
    finally:
        rank.close(0)
        router.close()


@both
@pytest.mark.parametrize("keys", [False, True])
def test_a_bound_socket_answers(host: str, keys: bool) -> None:
    ours, theirs = make_keyrings(2) if keys else (None, None)
    bound = bound_socket("watch", zmq.ROUTER, f"tcp://{host}:0", 1, ours.secure_server if ours else None)
    context = shared()
    asking = context.socket(zmq.DEALER)
    try:
        asking.setsockopt(zmq.LINGER, 0)
        keep_alive(asking)
        if theirs is not None:
            theirs.secure_client(asking)
        connect(asking, bound.address)
        asking.send(b"here")
        assert bound.poll(10_000)
    finally:
        asking.close(0)
        bound.close()


@both
def test_metrics_are_scraped(host: str) -> None:
    with serve_metrics(f"{host}:0", []) as address:
        assert address.startswith(f"{host}:")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            assert answer.status == 200


@both
@pytest.mark.parametrize("bare", [True, False])
def test_an_http_socket_accepts(host: str, bare: bool) -> None:
    given = host.strip("[]") if bare else host
    with listen(given, 0) as listening, socket.create_connection((host.strip("[]"), listening.getsockname()[1]), 30):
        assert in_url(given) == host


@pytest.fixture
def program() -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pagewire", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for one in started:
        one.send_signal(signal.SIGINT)
        one.communicate(timeout=60)


@both
def test_browsers_reach_top(host: str, program: Any) -> None:
    watch = ManagerWatch(busy_manager(), f"tcp://{host}:0")
    try:
        running = program("top", watch.address, "--web", "--web-host", host.strip("[]"))
        line = running.stdout.readline()
        found = re.search(r"http://\S+:\d+/", line)
        assert found, line
        assert found[0].startswith(f"http://{host}:")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(found[0], timeout=30)  # noqa: S310
    finally:
        watch.close()


@both
def test_clients_reach_a_front(host: str, program: Any, tmp_path: Path) -> None:
    """The front and its socket for servers listen on the same family."""
    (secret := tmp_path / "secret").write_text("a secret of the tests, of enough bytes")
    secret.chmod(0o600)
    addresses, plain = tmp_path / "addresses", host.strip("[]")
    where = ("--http-host", plain, "--http-port", "0", "--host", plain, "--address-file", str(addresses))
    running = program("serve", "front", *where, "--secret", f"file:{secret}")
    deadline = time.monotonic() + 60
    while not addresses.exists():
        assert running.poll() is None, running.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = json.loads(addresses.read_text())
    assert found["front"].startswith(f"tcp://{host}:")
    assert found["http"].startswith(f"http://{host}:")
    with urllib.request.urlopen(f"{found['http']}/v1/models", timeout=30) as answer:  # noqa: S310
        assert answer.status == 200


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
@pytest.mark.parametrize("given", ["::", "*"])
def test_the_wildcard_of_http_accepts_both_families(given: str) -> None:
    with listen(given, 0) as listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1]), 30).close()


@pytest.mark.parametrize("scope", ["eth0", "bond0.100", "Ethernet_1", "3"])
def test_an_address_with_a_scope_is_a_peer(scope: str) -> None:
    endpoint = f"tcp://[fe80::1%{scope}]:5600"
    AllowedPeers(["fe80::/10"]).check(endpoint)
    AllowedPeers(host_of(endpoint)).check(endpoint)
    with pytest.raises(HandshakeError, match="is not in allowed_peers"):  # another link, and so another host
        AllowedPeers(host_of(endpoint)).check("tcp://[fe80::1%eth7]:5600")


MAKERS = {
    "kvcache/endpoints/addresses.py": "asks for the family and for an interface's address",
    "kvcache/endpoints/dialer.py": "connects ZMQ's sockets to names",
    "kvcache/endpoints/sockets.py": "the one place of ZMQ's sockets and their gates",
    "pagewire/listening.py": "the one place of HTTP's sockets",
    "scheduler_adapters/service/fleet.py": "binds an ipc address alone",
    "scheduler_adapters/service/prometheus.py": "`prometheus_client` chooses the family of its own server",
    "transfer/engine/ports.py": "only asks whether a port is free",
    "transfer/nixl/object_store.py": "takes a socket that it was given",
    "transfer/nixl/vouchers.py": "Unix sockets alone",
}
"""The files that may open a socket at an address, each with the reason."""
_OPENING = {"create_server", "create_connection", "start_http_server", "start_server", "HTTPServer", "socket.socket"}


def opens_a_socket(source: str) -> bool:
    """Whether a file opens, connects or binds a socket by itself, not by `kvcache.endpoints.sockets` or `listen`."""
    tree = ast.parse(source)
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    by_itself = re.compile(r"(?!sockets\.)(.*socket|.*_idle|.*_sub|.*dealer)\.(connect|bind)")
    return any(call in _OPENING or call.split(".")[-1] in _OPENING or by_itself.fullmatch(call) for call in calls)


def test_sockets_are_opened_in_one_place() -> None:
    packages = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if opens_a_socket(path.read_text())} == set(MAKERS)


@pytest.mark.parametrize(
    ("source", "opens"),
    [
        ("self._socket.connect(address)", True),
        ("socket.bind(address)", True),
        ("made = socket.socket(socket.AF_INET)", True),
        ("socket.create_server((host, port))", True),
        ("connect(socket, address)", False),
        ("sockets.connect(socket, address)", False),
        ("self.directory.connect(place)", False),
    ],
)
def test_a_socket_that_is_opened_elsewhere_is_noticed(source: str, opens: bool) -> None:
    assert opens_a_socket(source) is opens
