from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.fuzz import rank_metadata
from transfer.errors import HandshakeError, InvalidEngineError, MetadataError
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.keys import make_keyrings
from transfer.wire.messages import MetadataQuery, MetadataReply, open_rank, sealed_rank
from transfer.wire.secret import Secret, fleet_keys, read_secret

TEXT = "correct horse battery staple"


def ask(client: HandshakeClient, address: str, timeout_s: float = 10.0) -> object:
    answers: list[object] = []
    client.ask(address, MetadataQuery(query_id=0, engine_id="e", compatibility={}), answers.append, timeout_s)
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        client.poll()
        time.sleep(1e-3)
    client.close()
    return answers[0]


def test_all_who_know_the_secret_have_the_same_keys_and_each_key_is_another() -> None:
    one, same, other = Secret(TEXT.encode()), Secret(TEXT.encode()), Secret(TEXT.encode() + b"!")
    assert (one.metadata_key, one.keyring) == (same.metadata_key, same.keyring)
    keys = [one.metadata_key, other.metadata_key]
    keys += [key for found in (one, other) for key in (found.keyring.secret, found.keyring.service_secret)]
    assert len(set(keys)) == 6
    assert one.keyring.allowed == (one.keyring.public,)


def test_a_secret_opens_its_own_fleet_s_sockets_and_metadata_and_no_other_s() -> None:
    ours, theirs = Secret(TEXT.encode()), Secret(b"another secret of a fleet")
    with HandshakeServer([EngineCard("e", "1", (b"rank",))], secure=ours.keyring.secure_server) as server:
        assert isinstance(ask(HandshakeClient(ours.keyring.secure_client), server.endpoint), MetadataReply)
        refused = ask(HandshakeClient(theirs.keyring.secure_client), server.endpoint, 0.5)
    assert isinstance(refused, HandshakeError)
    assert "s; a peer with other keys, or without keys, never answers" in str(refused)
    data = sealed_rank(rank_metadata(), ours.metadata_key)
    assert open_rank(data, ours.metadata_key).engine_id == "p"
    with pytest.raises(MetadataError, match="made with another key"):
        open_rank(data, theirs.metadata_key)


def test_a_secret_is_read_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    monkeypatch.setenv("FLEET_SECRET", TEXT)
    found = [read_secret(text) for text in (TEXT, f"file:{path}", "env:FLEET_SECRET")]
    assert len({secret.metadata_key for secret in found if secret}) == 1
    assert None not in found
    assert read_secret("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short", "has 5 bytes; at least 16 are needed"),
        ("env:NO_SUCH_VARIABLE", "the environment variable 'NO_SUCH_VARIABLE' is not set"),
        ("file:/no/such/file", "No such file"),
    ],
)
def test_an_invalid_secret_is_refused_and_not_shown(text: str, message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        read_secret(text)
    assert TEXT not in repr(Secret(TEXT.encode()))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(0o640)
    with pytest.raises(InvalidEngineError, match="can be read by other users"):
        read_secret(f"file:{path}")


def test_keys_come_from_the_options_or_from_the_secret() -> None:
    (keyring,) = make_keyrings(1)
    assert fleet_keys("e", "") == (b"", None)
    assert fleet_keys("e", "", b"k", keyring) == (b"k", keyring)
    key, shared = fleet_keys("e", TEXT)
    assert len(key) == 32
    assert shared is not None
    assert fleet_keys("other", TEXT) == (key, shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((TEXT, b"k"), "engine 'e': got both a key and a shared secret; give only one"),
        ((TEXT, b"", make_keyrings(1)[0]), "engine 'e': got both a keyring and a shared secret; give only one"),
        (("short",), "has 5 bytes; at least 16"),
    ],
)
def test_a_secret_excludes_other_options(options: Any, message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        fleet_keys("engine 'e'", *options)
