from __future__ import annotations

import pytest

from transfer.engine import notifications as inbox
from transfer.engine.notifications import Inbox

NAME = "0123456789abcdef" * 2


def test_a_transfer_is_complete_when_each_shard_has_said_so():
    box = Inbox(2)
    box.connect("p")
    assert box.accept("p", 1, NAME.encode()) is None
    assert box.accept("p", 1, NAME.encode()) is None
    assert not box.is_complete("p", NAME)
    assert box.accept("p", 0, NAME.encode()) == NAME
    assert box.is_complete("p", NAME)
    assert box.counts == {"accepted": 2, "duplicate": 1}


@pytest.mark.parametrize("message", [b"", b"short", NAME.upper().encode(), b"\xff" * 32, NAME.encode() + b"\n"])
def test_malformed_names_open_no_entry(message: bytes):
    box = Inbox(1)
    box.connect("p")
    assert box.accept("p", 0, message) is None
    assert box.completed == {"p": {}}
    assert box.counts == {"malformed": 1}


def test_peers_that_are_not_connected_open_no_entry():
    box = Inbox(1)
    assert box.accept(None, 0, NAME.encode()) is None
    assert box.accept("p", 0, NAME.encode()) is None
    assert box.completed == {}
    assert box.counts == {"unknown": 2}


def test_disconnect_keeps_what_is_complete():
    box = Inbox(2)
    box.connect("p")
    other = NAME[::-1]
    for shard, name in ((0, NAME), (1, NAME), (0, other)):
        box.accept("p", shard, name.encode())
    box.disconnect("p")
    assert box.completed == {"p": {NAME: {0, 1}}}
    box.end("p", NAME)
    assert box.has_ended(NAME)
    assert box.accept("p", 0, NAME.encode()) is None
    assert box.counts["late"] == 1


def test_a_peer_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inbox, "_MAX_OPEN", 10)
    monkeypatch.setattr(inbox, "_MAX_ENDED", 10)
    box = Inbox(2)
    box.connect("p")
    for number in range(25):
        box.accept("p", 0, f"{number:032x}".encode())
        box.end("q", f"{number + 100:032x}")
    assert list(box.completed["p"]) == [f"{number:032x}" for number in range(15, 25)]
    assert not box.has_ended(f"{100:032x}")
    assert box.has_ended(f"{124:032x}")
