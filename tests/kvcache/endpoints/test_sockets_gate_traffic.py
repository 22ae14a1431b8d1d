"""Tests what a gate does with data that one side does not accept yet, how it ends, and that it sleeps while it is idle.

A plain Unix socket takes the place of the ZMQ socket behind the gate, so that the test decides when each side reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache.endpoints import sockets
from kvcache.endpoints.sockets import Gate, Limits, bound_socket
from tests.alone import alone, open_files
from tests.kvcache.stranger import GREETING, READY, frame, stranger

PATIENCE_S = 30.0
UNLIMITED = Limits(message_bytes=1 << 20, per_second=1e9)


def waited(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def send_some(end: socket.socket, data: bytes | memoryview) -> int:
    """Sends as much of the data as fits now. Returns the number of bytes."""
    end.setblocking(False)
    try:
        return end.send(data)
    except BlockingIOError:
        return 0
    finally:
        end.settimeout(PATIENCE_S)


def read_some(end: socket.socket, most: int) -> bytes:
    """Returns what has arrived, at most so many bytes."""
    end.setblocking(False)
    try:
        return end.recv(most)
    except BlockingIOError:
        return b""
    finally:
        end.settimeout(PATIENCE_S)


def read_exactly(end: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        data = end.recv(count - len(got))
        assert data, "the connection has ended"
        got += data
    return got


def fill(end: socket.socket, data: Callable[[], bytes], full: Callable[[], object]) -> bytes:
    """Sends data until no more fits on the way to the other side. Returns the sent data."""
    sent, rest, accepted_at = b"", b"", time.monotonic()
    while time.monotonic() - accepted_at < 0.05 or not full():
        rest = rest or data()
        if count := send_some(end, rest):
            sent, rest, accepted_at = sent + rest[:count], rest[count:], time.monotonic()
        else:
            time.sleep(0.001)
    return sent


class Ends:
    """A gate at an ipc address, with one peer and the connection that the gate has made for the peer."""

    def __init__(self, folder: Path, limits: Limits = UNLIMITED) -> None:
        with contextlib.ExitStack() as opened:
            self.gate = Gate("echo", f"ipc://{folder}/gate", limits)
            opened.callback(self.gate.close)
            inside = opened.enter_context(socket.socket(socket.AF_UNIX))
            inside.bind("\0" + self.gate.inner.removeprefix("ipc://@"))
            inside.listen()
            self.inside = inside
            self.peer = opened.enter_context(socket.socket(socket.AF_UNIX))
            self.peer.connect(f"{folder}/gate")
            self.behind = opened.enter_context(inside.accept()[0])
            for end in (self.peer, self.behind):
                end.settimeout(PATIENCE_S)
            waited(lambda: self.gate._peers)
            (self.connection,) = self.gate._peers
            self.close = opened.pop_all().close

    def fill_down(self) -> bytes:
        """Sends data to the peer until no more fits on the way. Returns this data."""
        return fill(self.behind, lambda: os.urandom(1 << 14), lambda: self.connection.down)

    def fill_up(self) -> bytes:
        """Sends frames of the peer until no more fit on the way. Returns the sent data."""
        return fill(self.peer, lambda: frame(0, bytes(1000)) * 100, lambda: self.connection.up)

    def close_gate(self, linger_s: float) -> threading.Thread:
        """Closes the gate in a thread. Returns when the gate listens no longer."""
        closer = threading.Thread(target=self.gate.close, args=(linger_s,), daemon=True)
        closer.start()
        waited(lambda: self.gate._listener.fileno() < 0)
        return closer

    def read_all(self) -> bytes:
        """Returns all that the peer receives until its connection ends."""
        got = b""
        while data := self.peer.recv(1 << 16):
            got += data
        return got


@pytest.fixture
def ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Ends]]:
    with contextlib.ExitStack() as opened:
        caplog.set_level(logging.DEBUG, "pagewire")
        yield lambda *given: opened.enter_context(closing(Ends(tmp_path, *given)))
    assert not [one for one in caplog.get_records("call") if "a turn of its gate failed" in one.getMessage()]


def turns(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list to which each further turn of the gate adds its begin."""
    begun, turn = list[float](), gate._turn

    def counted() -> None:
        begun.append(time.monotonic())
        turn()

    monkeypatch.setattr(gate, "_turn", counted)
    return begun


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_passes_in_both_directions_whichever_side_stops_reading(ends: Any, seed: int) -> None:
    it, chooser = ends(), random.Random(seed)
    up, down = GREETING + READY, chooser.randbytes(1 << 20)
    while len(up) < 1 << 20:
        up += frame(0, chooser.randbytes(chooser.choice([0, 10, 40, 5000, 60_000])))
    # for each direction: the sender, its data, the receiver, and the data that has arrived
    ways = [(it.peer, memoryview(up), it.behind, bytearray()), (it.behind, memoryview(down), it.peer, bytearray())]
    left = [len(up), len(down)]

    def moved(at: int, *, sends: bool, reads: bool) -> bool:
        sender, data, receiver, got = ways[at]
        before, first = (left[at], len(got)), len(data) - left[at]
        if sends and left[at]:
            left[at] -= send_some(sender, data[first : first + chooser.randrange(1, 1 << 16)])
        if reads:
            got += read_some(receiver, chooser.randrange(1, 1 << 16))
        return before != (left[at], len(got))

    def all_moved() -> bool:
        progress = [moved(at, sends=True, reads=True) for at in range(2)]
        return not any(progress) and [len(got) for *_, got in ways] == [len(up), len(down)]

    for _ in range(40):
        on = [[chooser.random() < 0.6 for _ in range(2)] for _ in ways]
        quiet = 0
        while quiet < 5:  # some milliseconds without progress: the way is full, or it is empty
            some = [moved(at, sends=sends, reads=reads) for at, (sends, reads) in enumerate(on)]
            quiet = 0 if any(some) else quiet + 1
            time.sleep(0.001 if quiet else 0)
    waited(all_moved)
    assert ways[0][3] == up
    assert ways[1][3] == down
    assert it.connection in it.gate._peers


def test_a_burst_passes_without_further_events_and_is_not_read_ahead(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = ends()
    longest = 0
    pass_up = it.gate._pass_up

    def watched(peer: Any) -> None:
        nonlocal longest
        longest = max(longest, len(peer.unread))
        pass_up(peer)

    monkeypatch.setattr(it.gate, "_pass_up", watched)
    frames = GREETING + READY + frame(0, b"") * 64 * 100  # a turn passes on 64 frames, and then waits 2 ms
    sender = threading.Thread(target=it.peer.sendall, args=(frames,), daemon=True)
    started = time.monotonic()
    sender.start()
    assert read_exactly(it.behind, len(frames)) == frames
    sender.join()
    assert time.monotonic() - started < PATIENCE_S
    assert 0 < longest < 2 * sockets._READ


@pytest.mark.parametrize(
    "waits", ["nothing", "data for the peer", "data for the ZMQ socket", "both", "a partial frame"]
)
def test_a_gate_sleeps_while_nothing_can_move(ends: Any, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    it = ends()
    begun = turns(it.gate, monkeypatch)
    it.peer.sendall(GREETING + READY + (frame(0, b"body")[:3] if waits == "a partial frame" else b""))
    if waits in ("data for the peer", "both"):
        it.fill_down()
    if waits in ("data for the ZMQ socket", "both"):
        it.fill_up()
    waited(lambda: begun)

    def rests() -> bool:
        count = len(begun)
        time.sleep(0.3)
        return len(begun) - count <= 2

    waited(rests)  # A busy machine can delay turns, but cannot cause more turns.


def test_a_closing_gate_sleeps_and_lets_nobody_in(ends: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A forked child may still have the listening socket, and somebody may connect to it."""
    it = ends()
    it.fill_down()
    with closing(socket.fromfd(it.gate._listener.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)) as of_a_child:
        closer = it.close_gate(PATIENCE_S)
        begun = turns(it.gate, monkeypatch)
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(of_a_child.getsockname())
            it.peer.recv(1)  # so that a turn ends
            time.sleep(0.3)
            assert len(begun) <= 10
            assert len(it.gate._peers) == 1
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
        late.connect(f"{tmp_path}/gate")
    it.behind.close()
    it.read_all()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_what_the_zmq_socket_has_sent_arrives_after_the_close_however_late_the_peer_reads(ends: Any) -> None:
    it = ends()
    sent = it.fill_down()
    it.behind.close()
    closer = it.close_gate(PATIENCE_S)
    time.sleep(0.2)
    assert it.read_all() == sent
    closer.join(PATIENCE_S)
    assert not it.gate._thread.is_alive()


@pytest.mark.parametrize("linger_s", [0.0, 0.2])
def test_a_peer_that_does_not_read_keeps_a_gate_open_no_longer_than_was_said(ends: Any, linger_s: float) -> None:
    it = ends()
    sent = it.fill_down()
    started = time.monotonic()
    it.gate.close(linger_s)
    assert linger_s <= time.monotonic() - started
    assert not it.gate._thread.is_alive()
    assert sent.startswith(it.read_all()), "the peer gets the data on its way, and then the end"
    it.gate.close(PATIENCE_S)


def test_a_gate_without_peers_ends_at_once_and_leaves_nothing_open(tmp_path: Path) -> None:
    def ends_at_once() -> None:
        before, started = open_files(), time.monotonic()
        gate = Gate("echo", f"ipc://{tmp_path}/gate", UNLIMITED)
        assert (tmp_path / "gate").is_socket()
        gate.close(10 * PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S
        assert not gate._thread.is_alive()
        assert open_files() == before

    alone(ends_at_once)  # In this process, ZMQ opens and closes files of other sockets meanwhile.
    assert not (tmp_path / "gate").exists()


def test_a_gate_of_a_process_without_standard_input_ends_too(tmp_path: Path) -> None:
    standard_input = os.dup(0)
    os.close(0)
    try:
        gate = Gate("echo", f"ipc://{tmp_path}/gate", UNLIMITED)
        assert gate._listener.fileno() == 0
        gate.close()
        assert not gate._thread.is_alive()
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_a_child_that_closes_its_copy_of_a_gate_leaves_the_gate_of_its_parent_alone(ends: Any, tmp_path: Path) -> None:
    it = ends()
    if not (child := os.fork()):
        it.gate.close()
        os._exit(it.gate._listener.fileno() != -1)  # as the child closes its copy of the socket, too
    assert os.waitpid(child, 0)[1] == 0
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(f"{tmp_path}/gate")
        late.sendall(GREETING)
        with it.inside.accept()[0] as behind:
            assert read_exactly(behind, len(GREETING)) == GREETING
    assert it.gate._thread.is_alive()


def test_peers_of_a_gate_that_ends_leave_nothing_open(ends: Any) -> None:
    it = ends()
    it.gate.close()
    assert it.peer.recv(1) == b""
    assert it.behind.recv(1) == b""
    assert it.connection.client.fileno() == it.connection.inner.fileno() == -1


def test_a_turn_that_fails_is_logged_and_the_gate_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Ends(tmp_path)) as it:
        turn, failed = it.gate._turn, list[float]()

        def fails() -> None:
            if not failed or time.monotonic() - failed[0] < 0.1:
                failed.append(time.monotonic())
                raise LookupError("a defect")
            turn()

        monkeypatch.setattr(it.gate, "_turn", fails)
        it.peer.sendall(GREETING)
        assert read_exactly(it.behind, len(GREETING)) == GREETING
        it.peer.sendall(READY)
        assert read_exactly(it.behind, len(READY)) == READY
    assert caplog.text.count("echo: a turn of its gate failed") == len(failed)
    assert 2 <= len(failed) <= 52, "it waits 2 ms after each"


def test_the_linger_of_a_socket_is_in_milliseconds() -> None:
    """The peer reads nothing until the socket is closed. Then it gets every message that the socket has accepted, if
    the linger is long. If the linger is short, the close does not wait for the peer.
    """
    for linger_ms in (1000 * PATIENCE_S, 50):
        bound = bound_socket("echo", zmq.ROUTER, "tcp://127.0.0.1:0", 100)
        with closing(stranger(bound.address)) as peer:
            peer.sendall(frame(0, b"ask"))
            name, _ = bound.recv_multipart()
            bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
            accepted = 0
            while bound.poll(1000, zmq.POLLOUT) and accepted < 3000:
                try:
                    bound.send_multipart([name, bytes(10_000)], zmq.DONTWAIT)
                    accepted += 1
                except zmq.Again:
                    break
            closer = threading.Thread(target=bound.close, args=(int(linger_ms),), daemon=True)
            closer.start()
            if linger_ms == 50:
                closer.join(PATIENCE_S)
                assert not closer.is_alive()
                continue
            time.sleep(0.2)
            got = b""
            while data := peer.recv(1 << 20):
                got += data
            assert got.count(frame(0, bytes(10_000))) == accepted > 100
            closer.join(PATIENCE_S)
            assert not closer.is_alive()
