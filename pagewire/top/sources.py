"""Where snapshots (`Look`) come from: processes that are asked for them, or a recording in a file.

A recording begins with a line that identifies the format. Each snapshot is four bytes with its length, and then a
compressed record of its time, the process's address, and the frames. If the process that wrote the recording was
killed, the recording is played up to the last complete snapshot.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from kvcache.endpoints.follower import Followed, WatchClient
from kvcache.errors import WatchError

_MAGIC = b"pagewire recording 1\n"
_AGAIN_S = 2.0  # in seconds: if a process does not answer for this time, it is asked again
_LENGTH = 4
# the most bytes of a snapshot; a limit is needed because a recording may come from an untrusted source
_MOST_BYTES = 1 << 28


class Heard(NamedTuple):
    """A snapshot that has arrived."""

    at: float  # seconds since 1970
    address: str
    frames: list[bytes]


class LiveSource:
    """Asks each process for `updates` snapshots a second, and records those that arrive."""

    def __init__(
        self,
        addresses: Sequence[str],
        updates: float,
        record: Path | None = None,
        secure: Callable[[Any], None] | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self._every_s = 1 / updates
        self._file = None if record is None else _begun(record)
        self._clients = {address: WatchClient(address, secure) for address in self.addresses}
        self._due = dict.fromkeys(self.addresses, 0.0)
        self._waits = dict.fromkeys(self.addresses, False)
        self._check = dict.fromkeys(self.addresses, False)

    def poll(self, followed: dict[str, Followed]) -> list[Heard]:
        """Returns the snapshots that have arrived, and asks the processes whose next snapshot is due."""
        found: list[Heard] = []
        for address, client in self._clients.items():
            while (frames := client.answer()) is not None:
                found.append(Heard(time.time(), address, frames))
                self._waits[address] = False
            now = time.monotonic()
            if now >= self._due[address] + (_AGAIN_S if self._waits[address] else 0.0):
                ask = followed[address].ask
                client.ask(msgspec.structs.replace(ask, check=self._check[address]))
                self._check[address] = False
                self._waits[address], self._due[address] = True, now + self._every_s
        for heard in found:
            if self._file is not None:
                _write(self._file, heard)
        return found

    def check(self) -> None:
        """Makes every process check its state."""
        self._check = dict.fromkeys(self.addresses, True)
        self._due = dict.fromkeys(self.addresses, 0.0)

    def close(self) -> None:
        """Closes the sockets and the recording."""
        for client in self._clients.values():
            client.close()
        if self._file is not None:
            self._file.close()


class PlayedSource:
    """Plays a recording at a chosen speed. `position` is in seconds from its beginning, up to `length`."""

    def __init__(self, path: Path, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed, self.position, self.paused = speed, 0.0, False
        self._heard = _read(path)
        self._clock, self._since = clock, clock()
        self._next = 0
        self.addresses = list(dict.fromkeys(heard.address for heard in self._heard))
        self.length = self._heard[-1].at - self._heard[0].at

    @property
    def now(self) -> float:
        """The time of the current position, in seconds since 1970."""
        return self._heard[0].at + self.position

    def poll(self, followed: dict[str, Followed]) -> list[Heard]:
        """Advances the position. Returns the snapshots from the previous position up to the new one."""
        del followed
        now = self._clock()
        if not self.paused:
            self.position = min(self.length, self.position + (now - self._since) * self.speed)
        self._since, first = now, self._next
        start = self._heard[0].at
        while self._next < len(self._heard) and self._heard[self._next].at - start <= self.position:
            self._next += 1
        return self._heard[first : self._next]

    def seek(self, seconds: float) -> None:
        """Moves to another position. The next poll returns all snapshots from the beginning up to that position.

        The caller must therefore first discard everything from earlier snapshots.
        """
        self.position = min(self.length, max(0.0, seconds))
        self._next = 0

    def close(self) -> None:
        """A no-op: no connection is open."""


def _begun(path: Path) -> IO[bytes]:
    try:
        file = path.open("wb")
        file.write(_MAGIC)
    except OSError as error:
        raise WatchError(f"--record {str(path)!r} cannot be written: {error.strerror}") from error
    return file


def _write(file: IO[bytes], heard: Heard) -> None:
    data = zlib.compress(msgspec.msgpack.encode(heard), 1)
    file.write(len(data).to_bytes(_LENGTH, "big") + data)
    file.flush()


def _read(path: Path) -> list[Heard]:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise WatchError(f"--play {str(path)!r} is not a recording")
            found = list(_looks(path, file))
    except OSError as error:
        raise WatchError(f"--play {str(path)!r}: {error.strerror}") from error
    if not found:
        raise WatchError(f"--play {str(path)!r} contains no snapshot")
    return found


def _looks(path: Path, file: IO[bytes]) -> Iterator[Heard]:
    """Yields the snapshots of a recording in order. An incomplete snapshot at the end is left out."""
    while len(length := file.read(_LENGTH)) == _LENGTH:
        at, size = file.tell() - _LENGTH, int.from_bytes(length, "big")
        if size > _MOST_BYTES:
            raise WatchError(f"--play {str(path)!r}: damaged at byte {at}: a snapshot of {size:,} bytes")
        data, opened = file.read(size), zlib.decompressobj()
        if len(data) < size:
            return
        try:
            look = opened.decompress(data, _MOST_BYTES)
            if not opened.eof:
                raise WatchError(f"--play {str(path)!r}: damaged at byte {at}: no end within {_MOST_BYTES:,} bytes")
            yield msgspec.msgpack.decode(look, type=Heard)
        except (zlib.error, msgspec.DecodeError) as error:
            raise WatchError(f"--play {str(path)!r}: damaged at byte {at}: {error}") from error
