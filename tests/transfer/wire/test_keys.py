from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import zmq

from transfer.errors import HandshakeError
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.keys import Keyring, Throttle, load_keyring, make_keyrings, save_keyring
from transfer.wire.messages import MetadataQuery, MetadataReply, Ping, Pong, encode_message

CARD = EngineCard("e", "1", (b"rank",))


def ask(client: HandshakeClient, address: str, timeout_s: float = 10.0) -> object:
    answers: list[object] = []
    client.ask(address, MetadataQuery(query_id=0, engine_id="e", compatibility={}), answers.append, timeout_s)
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        client.poll()
        time.sleep(1e-3)
    client.close()
    return answers[0]


def test_only_clients_on_the_list_get_an_answer():
    engine, member, stranger = make_keyrings(3)
    engine = Keyring(
        service_public=engine.service_public,
        service_secret=engine.service_secret,
        public=engine.public,
        secret=engine.secret,
        allowed=(member.public,),
    )
    other_fleet = make_keyrings(1)[0]
    with HandshakeServer([CARD], secure=engine.secure_server) as server:
        assert isinstance(ask(HandshakeClient(member.secure_client), server.endpoint), MetadataReply)
        for secure in (stranger.secure_client, other_fleet.secure_client, None):
            assert isinstance(ask(HandshakeClient(secure), server.endpoint, 0.5), HandshakeError)
        assert server.counts == {"answered": 1}


def test_a_client_with_a_key_does_not_speak_to_an_engine_without():
    with HandshakeServer([CARD]) as server:
        assert isinstance(ask(HandshakeClient(make_keyrings(1)[0].secure_client), server.endpoint, 0.5), HandshakeError)
        assert server.counts == {}


def test_two_servers_of_one_process_keep_their_own_lists():
    first, second = make_keyrings(1)[0], make_keyrings(1)[0]
    with (
        HandshakeServer([CARD], secure=first.secure_server) as one,
        HandshakeServer([CARD], secure=second.secure_server) as two,
    ):
        assert isinstance(ask(HandshakeClient(first.secure_client), one.endpoint), MetadataReply)
        assert isinstance(ask(HandshakeClient(second.secure_client), two.endpoint), MetadataReply)
        assert isinstance(ask(HandshakeClient(first.secure_client), two.endpoint, 0.5), HandshakeError)


def test_a_keyring_goes_through_a_file_that_only_its_owner_reads(tmp_path: Path):
    keyring = make_keyrings(2)[1]
    path = tmp_path / "keys.json"
    save_keyring(keyring, path)
    assert load_keyring(path) == keyring
    with pytest.raises(HandshakeError, match=r"keys\.json"):
        save_keyring(keyring, path)
    path.chmod(0o644)
    with pytest.raises(HandshakeError, match="can be read by other users"):
        load_keyring(path)
    path.chmod(0o600)
    path.write_text('{"service_public": 1}')
    with pytest.raises(HandshakeError, match="service_public"):
        load_keyring(path)
    for wrong in ("abc", "k" * 41, "é" * 40):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(keyring, allowed=(keyring.public, wrong))))
        with pytest.raises(HandshakeError, match=r"allowed\[1\]"):
            load_keyring(path)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(keyring, service_secret=wrong)))
        with pytest.raises(HandshakeError, match=r"service_secret"):
            load_keyring(path)
    with pytest.raises(HandshakeError, match="No such file"):
        load_keyring(tmp_path / "none.json")


def test_a_keyring_without_the_service_key_is_refused():
    keyring = make_keyrings(1)[0]
    asker = Keyring(service_public=keyring.service_public, public=keyring.public, secret=keyring.secret)
    with pytest.raises(HandshakeError, match="service key"):
        HandshakeServer([CARD], secure=asker.secure_server)


def test_a_throttle_refills_and_bounds_everyone_together():
    now = [0.0]
    throttle = Throttle(10, lambda: now[0])
    assert sum(throttle.admits(b"a") for _ in range(100)) == 20
    now[0] = 1.0
    assert sum(throttle.admits(b"a") for _ in range(100)) == 10
    assert sum(throttle.admits(b"%d" % sender) for sender in range(10_000)) == 190
    assert len(throttle._buckets) == 4096


def test_the_sender_that_was_heard_last_is_forgotten_last():
    """If the last sender were forgotten first, a sender could flood the server with other names until it is forgotten.
    It would then get a full bucket again.
    """
    now = [0.0]
    throttle = Throttle(1, lambda: now[0])
    assert [throttle.admits(b"a") for _ in range(3)] == [True, True, False]
    for sender in range(4095):
        throttle.admits(b"%d" % sender)
    assert not throttle.admits(b"a")
    throttle.admits(b"one more")
    assert len(throttle._buckets) == 4096
    assert b"0" not in throttle._buckets
    now[0] = 1.0
    assert [throttle.admits(b"a") for _ in range(2)] == [True, False]


def test_a_sender_that_floods_is_ignored_and_the_next_one_answered():
    with HandshakeServer([CARD]) as server:
        # The clock stands still, so the speed of this machine does not matter.
        server._throttle = Throttle(100, lambda: 0.0)
        flood = zmq.Context.instance().socket(zmq.DEALER)
        flood.connect(server.endpoint)
        for number in range(2000):
            flood.send(encode_message(Ping(query_id=number)))
        answers: list[object] = []
        client = HandshakeClient()
        client.ask(server.endpoint, Ping(query_id=0, engine_id="e"), answers.append, 20.0)
        deadline = time.monotonic() + 30
        while not answers and time.monotonic() < deadline:
            client.poll()
            time.sleep(1e-3)
        client.close()
        assert isinstance(answers[0], Pong)
        while sum(server.counts.values()) < 2001 and time.monotonic() < deadline:
            time.sleep(1e-2)
        flood.close(linger=0)
        assert server.counts["throttled"] == 1800
        assert server.counts["answered"] == 201
