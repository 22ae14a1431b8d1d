"""A service with keyed sockets serves its clients. A client without a key, or with a wrong key, gets no answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire import cli
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import bind_router
from transfer.errors import HandshakeError
from transfer.wire.keys import Keyring, make_keyrings

HELLO = msg.encode(msg.Hello(reader="d", incarnation="i"))


@pytest.fixture
def router(tmp_path: Path) -> Any:
    ours, _ = make_keyrings(2)
    socket = bind_router(zmq.Context.instance(), f"ipc://{tmp_path}/p", ours)
    yield socket, ours, f"ipc://{tmp_path}/p"
    socket.close()


def heard(router: Any, keyring: Keyring | None, within_ms: int = 400) -> bool:
    socket, _, endpoint = router
    client = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    if keyring is not None:
        keyring.secure_client(client)
    client.connect(endpoint)
    client.send(HELLO)
    came = bool(socket.poll(within_ms))
    if came:
        assert socket.recv_multipart()[1:] == [HELLO]
    client.close()
    return came


def test_a_socket_with_keys_hears_only_the_listed_clients(router: Any) -> None:
    ours = router[1]
    stranger = make_keyrings(1)[0]
    assert not heard(router, None)
    assert not heard(router, stranger)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    unlisted = Keyring(service_public=ours.service_public, public=public, secret=secret)
    assert not heard(router, unlisted)
    assert heard(router, ours, within_ms=20_000)


def test_keys_are_refused_if_the_list_would_not_be_checked(tmp_path: Path) -> None:
    context: Any = zmq.Context()
    with pytest.raises(HandshakeError, match="allow-list"):
        bind_router(context, f"ipc://{tmp_path}/p", make_keyrings(1)[0])
    context.destroy(linger=0)


@pytest.mark.usefixtures("forked_fleets")
def test_the_demo_serves_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--curve", "--requests", "3", "--max-new-tokens", "4", "--json", str(tmp_path / "figures.json")]
    assert cli.main(command) == 0, capsys.readouterr()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tokens_equal"]
    assert figures["leaked_pages"] == 0
