"""The viewer's side of `pagewire top`. It asks for snapshots (`Look`), and keeps the cells of every pool up to date."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
import numpy as np
import zmq

from kvcache.arguments import shown
from kvcache.endpoints.sockets import connect, keep_alive
from kvcache.errors import WatchError
from kvcache.watch.messages import AskLook, Cells, Look, WatchRefusal, other_version

_MOST_BYTES = 1 << 30
_decoder, _refusals = msgspec.msgpack.Decoder(Look), msgspec.msgpack.Decoder(WatchRefusal)


class Followed:
    """What is known about one watched process, as of the last snapshot that was received.

    Attributes:
        look: the last snapshot; None before the first one.
        cells: the cells of each pool, by the pool's name: uint32 `[num_pages + 1]`.
    """

    def __init__(self) -> None:
        self.look: Look | None = None
        self.cells: dict[str, Cells] = {}

    @property
    def ask(self) -> AskLook:
        """A request for the changes since the last snapshot."""
        if self.look is None:
            return AskLook()
        return AskLook(known=self.look.number, incarnation=self.look.incarnation)

    def apply(self, frames: Sequence[Any]) -> Look:
        """Apply a snapshot.

        If it is malformed, or does not follow the last one, raises `WatchError` and changes nothing.
        """
        if len(frames) == 1:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                raise WatchError(f"the process refuses to be watched: {_refusals.decode(frames[0]).refused}")
        try:
            look = _decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
            why = other_version(frames[0], Look) if frames else ""
            raise WatchError(why or f"{len(frames)} frames are not a snapshot: {error}") from error
        if look.base and (self.look is None or self.look.incarnation != look.incarnation):
            raise WatchError(
                f"snapshot {look.number} has only the changes since snapshot {look.base}, which was not received"
            )
        if look.base and self.look is not None and self.look.number < look.base:
            raise WatchError(
                f"snapshot {look.number} has only the changes since snapshot {look.base}, but the last snapshot "
                f"was {self.look.number}"
            )
        if len(frames) != 1 + 2 * len(look.pools):
            needed = 1 + 2 * len(look.pools)
            raise WatchError(f"a snapshot of {len(look.pools)} pools came in {len(frames)} frames: {needed} are needed")
        parts = [_changes(look, at, frames, self.cells) for at in range(len(look.pools))]
        for pool, (pages, cells) in zip(look.pools, parts, strict=True):
            if pages.size:
                self.cells[pool.name][pages] = cells
            elif cells.size:
                self.cells[pool.name] = cells.copy()
        self.look = look
        return look


def _changes(look: Look, at: int, frames: Sequence[Any], known: Mapping[str, Cells]) -> tuple[Cells, Cells]:
    """Returns the pages of a pool that have changed, and their cells.

    If the snapshot has all cells, the array of pages is empty. The page numbers are checked, because they are used as
    indices here.
    """
    pool = look.pools[at]
    try:
        pages, cells = (np.frombuffer(frame, np.uint32) for frame in frames[1 + 2 * at : 3 + 2 * at])
    except ValueError as error:
        raise WatchError(f"pool {pool.name!r}: {error}") from error
    whole = not pages.size and cells.size == pool.num_pages + 1
    partly = look.base and pages.size == cells.size and (not pages.size or int(pages.max()) <= pool.num_pages)
    partly = partly and pool.name in known and known[pool.name].size == pool.num_pages + 1
    if not whole and not partly:
        raise WatchError(
            f"pool {pool.name!r} of {pool.num_pages} pages: {pages.size} pages and {cells.size} cells are not a change "
            "to it"
        )
    return pages, cells


class WatchClient:
    """Asks one address for snapshots. No call waits, unless `answer` gets a timeout.

    `secure` prepares the socket before it connects. `Keyring.secure_client` of `transfer` turns CURVE on. Raises
    `WatchError` if the address is invalid.
    """

    def __init__(self, address: str, secure: Callable[[Any], None] | None = None) -> None:
        self.address = address
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        self._socket = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 4), (zmq.MAXMSGSIZE, _MOST_BYTES)):
            self._socket.setsockopt(option, value)
        keep_alive(self._socket)
        try:
            if secure is not None:
                secure(self._socket)
            connect(self._socket, address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise WatchError(f"{shown(address)} cannot be watched: {error}") from error

    def ask(self, ask: AskLook) -> None:
        """Send a request. It is dropped if the socket's queue is full."""
        with suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)

    def answer(self, timeout_s: float = 0.0) -> list[bytes] | None:
        """Return the frames of one snapshot, or None if none arrives within `timeout_s` seconds."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._socket.close()
