from __future__ import annotations

import pytest

from transfer.engine import peers
from transfer.engine.peers import NotificationBook

NAME = "0123456789abcdef" * 2


def test_a_transfer_is_complete_when_each_shard_has_said_so():
    book = NotificationBook(2)
    book.connect("p")
    book.accept("p", 1, NAME.encode())
    book.accept("p", 1, NAME.encode())
    assert not book.is_complete("p", NAME)
    book.accept("p", 0, NAME.encode())
    assert book.is_complete("p", NAME)
    assert book.counts == {"accepted": 2, "duplicate": 1}


@pytest.mark.parametrize("message", [b"", b"short", NAME.upper().encode(), b"\xff" * 32, NAME.encode() + b"\n"])
def test_malformed_names_open_no_entry(message: bytes):
    book = NotificationBook(1)
    book.connect("p")
    book.accept("p", 0, message)
    assert book.completed == {"p": {}}
    assert book.counts == {"malformed": 1}


def test_peers_that_are_not_connected_open_no_entry():
    book = NotificationBook(1)
    book.accept(None, 0, NAME.encode())
    book.accept("p", 0, NAME.encode())
    assert book.completed == {}
    assert book.counts == {"unknown": 2}


def test_disconnect_keeps_complete_transfers():
    book = NotificationBook(2)
    book.connect("p")
    other = NAME[::-1]
    for shard, name in ((0, NAME), (1, NAME), (0, other)):
        book.accept("p", shard, name.encode())
    book.disconnect("p")
    assert book.completed == {"p": {NAME: {0, 1}}}
    book.end("p", NAME)
    assert book.has_ended(NAME)
    book.accept("p", 0, NAME.encode())
    assert book.counts["late"] == 1


def test_a_transfer_that_was_given_up_ends_with_its_last_notification():
    book = NotificationBook(2)
    book.connect("p")
    book.given_up[NAME] = "the request"
    assert book.has_ended(NAME)
    book.accept("p", 0, NAME.encode())
    assert book.given_up
    book.accept("p", 1, NAME.encode())
    assert not book.given_up
    assert book.completed == {"p": {}}
    assert book.has_ended(NAME)


def test_a_peer_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "_MAX_OPEN", 10)
    monkeypatch.setattr(peers, "_MAX_ENDED", 10)
    book = NotificationBook(2)
    book.connect("p")
    for number in range(25):
        book.accept("p", 0, f"{number:032x}".encode())
        book.end("q", f"{number + 100:032x}")
    assert list(book.completed["p"]) == [f"{number:032x}" for number in range(15, 25)]
    assert not book.has_ended(f"{100:032x}")
    assert book.has_ended(f"{124:032x}")
