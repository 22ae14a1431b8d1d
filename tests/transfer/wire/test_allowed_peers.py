from __future__ import annotations

import pytest

from transfer.errors import HandshakeError, InvalidEngineError
from transfer.wire.allowed_peers import AllowedPeers, host_of, listed_peers
from transfer.wire.handshake import HandshakeClient
from transfer.wire.messages import MetadataQuery, Ping

LISTED = AllowedPeers(["10.1.0.0/16", "192.168.7.7", "Prefill-0.example", "fd00::/8"])


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "tcp://127.9.9.9:1",
        "tcp://localhost:5600",
        "tcp://[::1]:5",
        "ipc:///run/p",
        "inproc://p",
        "tcp://10.1.255.3:5600",
        "tcp://192.168.7.7:1",
        "tcp://prefill-0.EXAMPLE:1",
        "tcp://[fd12::1]:9",
        "tcp://[::ffff:10.1.0.1]:9",
    ],
)
def test_this_host_and_what_is_listed_may_be_contacted(address: str) -> None:
    LISTED.check(address)
    alone = address.startswith(("ipc:", "inproc:", "tcp://127.", "tcp://localhost", "tcp://[::1]"))
    assert is_refused(AllowedPeers(), address) == (not alone), "without a list, only this host may be contacted"


def is_refused(peers: AllowedPeers, address: str) -> bool:
    try:
        peers.check(address)
    except HandshakeError:
        return True
    return False


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.2.0.1:5600",
        "tcp://192.168.7.8:1",
        "tcp://prefill-1.example:1",
        "tcp://8.8.8.8:53",
        "tcp://0.0.0.0:1",
        "tcp://[fe80::1]:9",
        "tcp://[::ffff:10.2.0.1]:9",
        "tcp://2130706433:1",
        "tcp://127.1:1",
        "tcp://0x7f000001:1",
    ],
)
def test_other_hosts_are_refused_with_the_address_and_the_list(address: str) -> None:
    with pytest.raises(HandshakeError) as caught:
        LISTED.check(address)
    assert address in str(caught.value)
    assert "10.1.0.0/16, 192.168.7.7, Prefill-0.example, fd00::/8" in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "tcp://", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://127.0.0.1:1;10.9.9.9:2", "tcp://*:1"],
)
def test_an_address_that_is_no_plain_endpoint_is_refused(address: str) -> None:
    with pytest.raises(HandshakeError, match="is not an endpoint"):
        LISTED.check(address)


@pytest.mark.parametrize("entry", ["", "10.0.0.0/33", "a b", "1.2.3", "*"])
def test_an_invalid_entry_is_refused(entry: str) -> None:
    with pytest.raises(InvalidEngineError, match="allowed_peers"):
        AllowedPeers([entry])


def test_the_own_host_is_what_an_endpoint_binds() -> None:
    assert host_of("tcp://10.0.0.1:0") == ("10.0.0.1",)
    assert host_of("tcp://[fd00::1]:*") == ("fd00::1",)
    assert [host_of(endpoint) for endpoint in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "ipc:///x")] == [()] * 4


def test_an_option_is_a_list_or_a_string_and_the_own_host_is_among_them() -> None:
    expected = ("10.0.0.1", "10.1.0.0/16", "prefill-0")
    for option in (["10.1.0.0/16", "prefill-0"], "10.1.0.0/16, prefill-0", "10.1.0.0/16,prefill-0,,10.0.0.1"):
        assert listed_peers(option, "tcp://10.0.0.1:5600") == expected
    assert listed_peers("", "tcp://0.0.0.0:1") == ()


def test_no_socket_is_opened_to_anybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    client, answers = HandshakeClient(allowed=LISTED), list[object]()
    monkeypatch.setattr(client, "_socket", lambda address: pytest.fail("a socket"))
    client.ask("tcp://10.2.0.1:1", MetadataQuery(query_id=0, engine_id="p", compatibility={}), answers.append)
    client.ask("tcp://8.8.8.8:1", Ping(query_id=0, engine_id="p"), answers.append, 2.0)
    assert not answers
    client.poll()
    assert ["is not in allowed_peers" in str(answer) for answer in answers] == [True, True]
    client.close()
