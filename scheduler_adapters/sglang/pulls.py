"""The decode side of our SGLang transfer: asks the prefill server for each request, and reads the request's pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from scheduler_adapters.sglang.rooms import RoomClient, RoomDropped, RoomFailed, RoomReady, RoomWanted, short
from transfer.connector.metadata import ConnectorMetadata
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import TransferError
from transfer.wire.messages import Wanted
from transfer.wire.prompt import Prompt


class PullsTold(Protocol):
    """Callbacks by which the pulls tell SGLang's manager what happens to a room at decode."""

    def room_loading(self, room: int) -> None:
        """Called when reads of the room's pages begin."""
        ...

    def room_loaded(self, room: int) -> None:
        """Called when the room's pages and its metadata row have been read."""
        ...

    def room_failed(self, room: int, reason: str) -> None:
        """Called when the room's pages will not be read.

        Before `is_over` returns True, something may still write to the local pages.
        """
        ...

    def prefill_gone(self, address: str) -> None:
        """Called when the prefill process at `address` has exited."""
        ...


@dataclass(slots=True, eq=False)
class Destination:
    """The local pages that a room is read into.

    Attributes:
        block_ids: local pages of each group.
        first_blocks: for each group, the index of its first page within the request. None for a window group, whose
            pages end with the last token.
        num_computed_tokens: prompt tokens that are already local.
        write_row: stores the room's metadata row; raises ValueError if the row does not fit.
    """

    block_ids: Sequence[Sequence[int]]
    first_blocks: Sequence[int | None]
    num_computed_tokens: int
    write_row: Callable[[Sequence[bytes]], None]


@dataclass(slots=True, eq=False)
class _WantedRoom:
    room: int
    key: str
    endpoint: str
    prompt: Prompt
    destination: Destination | None = None
    ready: RoomReady | None = None
    wanted: Wanted | None = None
    is_held: bool = False  # whether prefill's lease is renewed because there is no destination yet
    is_loading: bool = False  # whether a READ may write to the local pages
    is_given_up: bool = False


class RoomPulls:
    """The rooms of one rank of decode. Only the scheduler's thread may use it.

    Args:
        worker: our connector worker of this rank.
        scheduler: our connector's scheduler side, which serves this rank alone. SGLang makes the ranks agree in each
            poll.
        client: sends messages to prefill.
        told: callbacks for the events of a room.
    """

    def __init__(
        self, worker: NixlConnectorWorker, scheduler: NixlConnectorScheduler, client: RoomClient, told: PullsTold
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._client = client
        self._told = told
        self._numbers = itertools.count()
        self._rooms: dict[int, _WantedRoom] = {}
        # Rooms whose lease is renewed or whose pages are read. A room that was given up stays here until its read has
        # ended.
        self._open: dict[str, _WantedRoom] = {}

    @property
    def open_count(self) -> int:
        """The number of rooms that are open or whose local pages may still be written."""
        return len(self._rooms) + len(self._open)

    def want(self, room: int, endpoint: str, prompt: Prompt) -> None:
        """Asks the prefill process at `endpoint` for a room. The room's pages must hold the KV of `prompt`."""
        known = self._rooms[room] = _WantedRoom(room, f"{room}#{next(self._numbers)}", endpoint, prompt)
        if error := self._client.send(endpoint, RoomWanted(room=room)):
            self._fail(known, error)

    def place(self, room: int, destination: Destination) -> None:
        """Sets the local pages of a room. From now on, prefill's pages may be read into them."""
        if (known := self._rooms.get(room)) is not None:
            known.destination = destination
            self._load(known)

    def give_up(self, room: int, reason: str) -> None:
        """Tells prefill that a room is no longer wanted. Its local pages may be reused once `is_over` returns True."""
        if (known := self._rooms.pop(room, None)) is not None:
            self._drop(known, reason)

    def forget(self, room: int) -> None:
        """Forgets a room that SGLang has finished."""
        self.give_up(room, "given up")

    def on_change(self, reason: str) -> None:
        """Fails the rooms that have KV of the weights before: pages that are read, or a prefix that was cached here.

        Rooms that prefill has not answered yet go on. Prefill's answer names the weights of its pages.
        """
        for known in list(self._rooms.values()):
            cached = known.destination.num_computed_tokens if known.destination is not None else 0
            if known.wanted is not None or cached:
                self._fail(known, reason)

    def is_over(self, room: int) -> bool:
        """Returns True once nothing can write to the local pages of a room any more."""
        self.step()
        return not any(known.room == room and known.is_loading for known in self._open.values())

    def step(self) -> None:
        """Handles messages from prefill and events from the transfer thread, without waiting.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        for message in self._client.received():
            known = self._rooms.get(message.room)
            if known is None or known.ready is not None:
                continue
            if isinstance(message, RoomFailed):
                self._fail(known, f"prefill: {message.reason}", is_told=True)
            else:
                known.ready = message
                self._load(known)
        for endpoint in self._client.lost():
            self._told.prefill_gone(endpoint)
            for known in list(self._rooms.values()):
                if known.endpoint == endpoint and known.ready is None:
                    self._fail(known, f"the prefill process at {endpoint} is gone")
        metadata = self._scheduler.build_metadata()
        if metadata != ConnectorMetadata():
            self._worker.start_load_kv(metadata)
        progress = self._scheduler.update(0, self._worker.take_output())
        for key, reason in progress.failed.items():
            self._fail(self._open[key], reason)
        for key in progress.received:
            self._received(self._open.pop(key))

    def _load(self, known: _WantedRoom) -> None:
        """Starts to read the room's pages if prefill has leased them and there is a destination.

        Without a destination, the call only starts to renew prefill's lease.
        """
        if known.ready is None or known.is_loading:
            return
        try:
            if known.wanted is None:
                known.wanted = self._read(known, known.ready)
            if known.destination is None:
                self._hold(known, known.wanted)
            else:
                self._begin(known, known.wanted, known.destination)
        except (TransferError, msgspec.DecodeError) as error:
            self._fail(known, str(error))

    def _read(self, known: _WantedRoom, ready: RoomReady) -> Wanted:
        wanted = self._scheduler.read(known.key, msgspec.json.decode(ready.params), known.prompt)
        if wanted is None:
            raise TransferError(f"room {known.room}: prefill's params name no pages")
        return wanted

    def _hold(self, known: _WantedRoom, wanted: Wanted) -> None:
        if not known.is_held:
            self._scheduler.hold(known.key, wanted)
            self._open[known.key] = known
            known.is_held = True

    def _begin(self, known: _WantedRoom, wanted: Wanted, destination: Destination) -> None:
        total, done = wanted.num_tokens, destination.num_computed_tokens
        firsts: list[int] = []
        for group, blocks, first in zip(
            self._scheduler.config.groups, destination.block_ids, destination.first_blocks, strict=True
        ):
            end = -(-total // group.block_size)
            firsts.append(end - len(blocks) if first is None else first)
            if firsts[-1] + len(blocks) != end or firsts[-1] < 0:
                raise TransferError(
                    f"room {known.room}: prefill has {total} tokens, which end in page {end - 1} (page "
                    f"size {group.block_size}), but SGLang named {len(blocks)} local pages, starting at page "
                    f"{firsts[-1]}"
                )
        self._scheduler.load(known.key, wanted, destination.block_ids, total, done, first_blocks=tuple(firsts))
        self._told.room_loading(known.room)
        if done >= total and not known.is_held:
            self._received(known)  # no page has to be read
            return
        self._open[known.key] = known
        known.is_loading = True

    def _received(self, known: _WantedRoom) -> None:
        known.is_loading = False
        if known.is_given_up or known.ready is None or known.destination is None:
            return
        try:
            known.destination.write_row(known.ready.row)
        except ValueError as error:
            self._fail(known, str(error))
            return
        del self._rooms[known.room]
        self._told.room_loaded(known.room)

    def _fail(self, known: _WantedRoom, reason: str, *, is_told: bool = False) -> None:
        if not known.is_given_up:
            self._rooms.pop(known.room, None)
            self._drop(known, reason, is_told=is_told)
            self._told.room_failed(known.room, reason)

    def _drop(self, known: _WantedRoom, reason: str, *, is_told: bool = False) -> None:
        known.is_given_up = True
        if known.key in self._open:
            self._scheduler.cancel(known.key, reason)
        # without this message, prefill would keep the pages until the lease runs out, although no rank reads them
        if not is_told:
            self._client.send(known.endpoint, RoomDropped(room=known.room, reason=short(reason)))

    def shutdown(self) -> None:
        """Gives up every load, and closes the sockets."""
        self._worker.shutdown()
        self._scheduler.close()
        self._client.close()
