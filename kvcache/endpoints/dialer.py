"""Connects ZMQ sockets to names that have addresses of both IP families, or that are not known yet.

libzmq tries a single address of a name, of one family that is chosen beforehand. So it never reaches a peer that
listens at another address of the name. Therefore libzmq connects to an abstract Unix socket of this process instead.
For each of these connections, a thread connects to the name. It looks the name up anew, and tries all addresses of both
families as RFC 8305 recommends: the next one after a quarter of a second, or at once if an address refuses. The first
connection wins, and its traffic is passed on unchanged.

The thread runs while such a ZMQ socket exists. Sockets at addresses, and at names of one family, need no dialer.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

_ATTEMPT_S, _STAGGER_S = 10.0, 0.25
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0
_SILENT_S, _SAID_S = 5.0, 60.0  # how long attempts fail before the log says so, and the pause between two messages
_LAST_WORDS_S = 1.0  # how long an exiting process waits until its data has been sent
_LOOK_S = 0.01  # how often it looks
_READ = 1 << 16  # in bytes
_CREDENTIALS = struct.Struct("3i")  # the process, user and group of a peer
_log = logging.getLogger("pagewire")
_lock = threading.Lock()


def dialed(owner: object, host: str, port: int, prepare: Callable[[socket.socket], None]) -> str:
    """Returns a ZMQ address that leads to this address for as long as `owner` exists.

    `prepare` sets the options of each connection to it.
    """
    name = f"pagewire-dialer-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listening.bind("\0" + name)
    listening.listen()
    with _lock:
        if not _running:
            _running.append(_Dialer())
        (dialer,) = _running
        dialer.num_sockets += 1
    dialer.serve(owner, listening, lambda inner: _Carrier(inner, host, port, prepare))
    return f"ipc://@{name}"


class _Carrier:
    """Carries the traffic of one connection that libzmq has made to one that is made here."""

    def __init__(self, inner: socket.socket, host: str, port: int, prepare: Callable[[socket.socket], None]) -> None:
        self._inner, self._host, self._port, self._prepare = inner, host, port, prepare
        self._outer: asyncio.StreamWriter | None = None  # None until the address has answered

    async def run(self) -> None:
        """Returns when both connections have ended."""
        peer = self._inner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[0] != os.getpid():
            self._inner.close()
            return
        from_zmq, to_zmq = await asyncio.open_unix_connection(sock=self._inner)
        dialing = asyncio.create_task(self._dial())
        try:
            with contextlib.suppress(OSError):
                early = await _read_until(dialing, from_zmq)
                if early is None or self._outer is None:
                    return
                self._outer.write(early)
                await _first_of({_pump(from_zmq, self._outer), _pump(dialing.result(), to_zmq)})
        finally:
            dialing.cancel()
            for writer in filter(None, (to_zmq, self._outer)):
                writer.close()  # what was written before is still sent
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _dial(self) -> asyncio.StreamReader:
        """Tries to connect until it succeeds. Returns the stream from the peer."""
        begin, pause_s, silent_until = time.monotonic(), _LEAST_PAUSE_S, time.monotonic() + _SILENT_S
        while True:
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    reader, self._outer = await asyncio.open_connection(
                        self._host, self._port, happy_eyeballs_delay=_STAGGER_S, interleave=1
                    )
                self._prepare(self._outer.get_extra_info("socket"))
            except (OSError, UnicodeError) as error:
                if (now := time.monotonic()) >= silent_until:
                    silent_until = now + _SAID_S
                    why = f"{now - begin:.0f} s: {str(error) or 'no answer'}"
                    hint = "check that the name has the address at which the peer listens"
                    _log.warning("tcp://%s:%d cannot be reached for %s; %s", self._host, self._port, why, hint)
            else:
                return reader
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def is_quiet(self) -> bool:
        """Whether everything that libzmq has sent was passed on, as far as it can be passed on."""
        if self._outer is None or self._inner.fileno() < 0:
            return True
        waits = bool(select.select([self._inner], [], [], 0)[0])
        return not waits and not self._outer.transport.get_write_buffer_size()


async def _read_until(dialing: asyncio.Task[object], reader: asyncio.StreamReader) -> bytes | None:
    """Reads until the task is done. Returns the bytes, or None if the connection has ended.

    These are few bytes: libzmq sends a greeting, and then waits for the greeting of its peer.
    """
    early = b""
    reading = asyncio.create_task(reader.read(_READ))
    try:
        while not dialing.done():
            await asyncio.wait({dialing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                if not (data := reading.result()):
                    return None
                early += data
                reading = asyncio.create_task(reader.read(_READ))
        return early + (reading.result() if reading.done() else b"")
    finally:
        reading.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()


async def _first_of(works: set[Coroutine[Any, Any, None]]) -> None:
    """Waits until one of these is done, and cancels the others."""
    _, others = await asyncio.wait([asyncio.create_task(one) for one in works], return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()


class _Dialer:
    """The thread that runs all carriers of this process."""

    def __init__(self) -> None:
        self.num_sockets = 0  # guarded by `_lock`
        self._carried: dict[asyncio.Task[None], _Carrier] = {}
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        threading.Thread(target=self._run, name="pagewire-dialer", daemon=True).start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._over.wait())

    def serve(self, owner: object, listening: socket.socket, carrier: Callable[[socket.socket], _Carrier]) -> None:
        """Carries each connection to `listening`, until `owner` is garbage."""

        def accept() -> None:
            with contextlib.suppress(BlockingIOError):
                inner = listening.accept()[0]
                inner.setblocking(False)
                made = carrier(inner)
                task = self._loop.create_task(made.run())
                self._carried[task] = made
                task.add_done_callback(self._ended)

        def forget() -> None:
            self._loop.remove_reader(listening)
            listening.close()
            with _lock:
                self.num_sockets -= 1
            self._end_if_idle()

        def is_gone() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(forget)

        self._loop.call_soon_threadsafe(self._loop.add_reader, listening, accept)
        weakref.finalize(owner, is_gone).atexit = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._carried[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection by name ended with an error", exc_info=error)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        with _lock:
            if self.num_sockets or self._carried:
                return
            if self in _running:
                _running.remove(self)
        self._over.set()

    async def drained(self) -> None:
        """Returns when all data of this process has been sent, or after `_LAST_WORDS_S`."""
        end, quiet = time.monotonic() + _LAST_WORDS_S, 0
        while quiet < 2 and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            quiet = quiet + 1 if all(one.is_quiet() for one in self._carried.values()) else 0

    def drain(self) -> None:
        """Runs `drained` from another thread."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self.drained(), self._loop).result(2 * _LAST_WORDS_S)


_running: list[_Dialer] = []  # the dialer of this process, if a socket needs it; guarded by `_lock`


def _drain_at_exit() -> None:
    for dialer in _running:
        dialer.drain()


atexit.register(_drain_at_exit)
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
os.register_at_fork(after_in_child=_running.clear)
