"""The prefill side of our SGLang transfer: leases the pages of each room until decode has read them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scheduler_adapters.sglang.ranks import RankFollower, RankLeader
from scheduler_adapters.sglang.rooms import (
    FromDecode,
    FromPrefill,
    RankOutput,
    RoomDropped,
    RoomFailed,
    RoomReady,
    RoomServer,
    short,
)
from transfer.connector.metadata import ConnectorMetadata, SendRequest, WorkerOutput
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import InvalidLeaseError, MetadataError, TransferError
from transfer.wire.prompt import Prompt

log = logging.getLogger("pagewire.sglang")

_MAX_UNOPENED = 65_536
_WAIT_S = 100e-6


class LeasesTold(Protocol):
    """Callbacks by which the leases tell SGLang's manager what happens to a room.

    A room is SGLang's number for a request.
    """

    def room_wanted(self, room: int) -> None:
        """Called when decode has asked for the room, so that its prompt may be computed."""
        ...

    def room_read(self, room: int) -> None:
        """Called when decode has read all pages of the room."""
        ...

    def room_failed(self, room: int, reason: str) -> None:
        """Called when it is certain that the room's pages will not be read."""
        ...


def _over(output: WorkerOutput) -> list[tuple[int, str]]:
    """Returns the rooms whose lease on a rank has ended or was refused, each with the reason."""
    refused = {name: error for name, error in output.offered.items() if error}
    return [(int(name), reason) for name, reason in (refused | output.sent).items()]


def _tell_end(told: LeasesTold, room: int, reason: str) -> None:
    if reason == "read":
        told.room_read(room)
    else:
        told.room_failed(room, f"the pages were leased and not read: {reason}")


@dataclass(slots=True, eq=False)
class Computed:
    """The computed pages of a room.

    Attributes:
        block_ids: the pages of each group.
        first_blocks: for each group, the index of its first page within the request.
        num_tokens: number of tokens in the pages.
        row: the room's row of SGLang's metadata.
        prompt: the prompt whose KV the pages hold.
    """

    block_ids: Sequence[Sequence[int]]
    first_blocks: Sequence[int]
    num_tokens: int
    row: tuple[bytes, ...]
    prompt: Prompt


@dataclass(slots=True, eq=False)
class _LeasedRoom:
    readers: set[bytes] = field(default_factory=set[bytes])
    opened: bool = False
    dropped: str = ""  # why decode no longer wants the room; empty while it does
    computed: Computed | None = None
    offered: bool = False  # whether a lease was requested and has not ended on this rank
    answer: FromPrefill | None = None


class RoomLeases:
    """The rooms of a prefill engine, as its rank 0 keeps them. Only the scheduler's thread may use it.

    Args:
        worker: our connector worker of this rank.
        scheduler: our connector's scheduler side of this engine.
        server: receives the messages from decode and from the other ranks.
        leader: sends commands to the other ranks.
        told: callbacks for the events of a room.
        expect_s: how long, in seconds, a room is kept that decode has asked for and that SGLang has not opened. After
            this time, the room fails.
    """

    def __init__(
        self,
        worker: NixlConnectorWorker,
        scheduler: NixlConnectorScheduler,
        server: RoomServer,
        leader: RankLeader,
        told: LeasesTold,
        expect_s: float,
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._server = server
        self._leader = leader
        self._told = told
        self._expect_s = expect_s
        self._rooms: dict[int, _LeasedRoom] = {}
        # Rooms that decode wants and SGLang has not opened yet, each with the time of decode's first message.
        self._unopened: OrderedDict[int, float] = OrderedDict()
        self._failed: OrderedDict[int, str] = OrderedDict()  # the latest failed rooms, with the reason
        self._waiting: list[int] = []  # rooms whose pages are computed, and that have no lease yet

    @property
    def open_count(self) -> int:
        """The number of rooms that SGLang has opened. A room that only decode has asked for is not counted."""
        return sum(known.opened for known in self._rooms.values())

    def open(self, room: int) -> None:
        """Opens the room of a new request. Messages from decode that arrived earlier now apply to it."""
        known = self._rooms.setdefault(room, _LeasedRoom())
        known.opened = True
        self._failed.pop(room, None)
        self._unopened.pop(room, None)
        self._tell_wishes(room, known)

    def offer(self, room: int, computed: Computed) -> None:
        """Requests a lease on the pages of a room.

        When every rank has granted it, decode is told that the pages can be read.
        """
        known = self._rooms[room]
        known.computed = computed
        self._waiting.append(room)
        self.step()

    def close(self, room: int, reason: str) -> None:
        """Forgets a room. No reader reads its pages after this call."""
        known = self._rooms.pop(room, None)
        if known is None:
            return
        if known.offered:
            self._scheduler.abort(str(room), reason)
            self._rooms[room] = known
            while known.offered:
                self.step()
                time.sleep(_WAIT_S)
            del self._rooms[room]
        if room in self._waiting:
            self._waiting.remove(room)
        if not isinstance(known.answer, RoomReady):
            self._answer(known, RoomFailed(room=room, reason=short(reason)))
            self._failed[room] = reason  # decode may still ask for the room after its end
            while len(self._failed) > _MAX_UNOPENED:
                self._failed.popitem(last=False)

    def step(self) -> None:
        """Handles messages from decode and events from the transfer thread, without waiting.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        self._hear()
        for room in self._waiting[:]:
            try:
                self._scheduler.offer(str(room))
            # No lease word is free, or an earlier request with this number still has a lease on some rank.
            except InvalidLeaseError:
                continue
            self._waiting.remove(room)
            self._rooms[room].offered = True
        metadata = self._scheduler.build_metadata()
        if metadata != ConnectorMetadata():
            self._leader.tell(metadata)
            self._worker.start_load_kv(metadata)
        output = self._worker.take_output()
        self._book(0, output)
        for room, reason in _over(output):
            known = self._rooms.get(room)
            if known is not None and known.offered:
                known.offered = False
                _tell_end(self._told, room, reason)

    def _book(self, rank: int, output: WorkerOutput) -> None:
        for name in self._scheduler.update(rank, output).offered:
            self._tell_ready(int(name))

    def _tell_ready(self, room: int) -> None:
        known = self._rooms.get(room)
        if known is None or known.computed is None:
            return
        made = known.computed
        try:
            params = self._scheduler.params(
                str(room), made.prompt, made.block_ids, made.num_tokens, first_blocks=tuple(made.first_blocks)
            )
        except TransferError as error:
            self._told.room_failed(room, str(error))
            return
        self._answer(known, RoomReady(room=room, params=msgspec.json.encode(params), row=made.row))

    def _answer(self, known: _LeasedRoom, answer: FromPrefill) -> None:
        known.answer = answer
        reached = [self._server.send(reader, answer) for reader in known.readers]
        if isinstance(answer, RoomReady) and not all(reached):
            log.warning("room %d: a rank of decode has disconnected; the room's lease will expire", answer.room)

    def _hear(self) -> None:
        for sender, message in self._server.received():
            if not isinstance(message, RankOutput):
                self._hear_decode(sender, message)
                continue
            try:
                self._book(*self._leader.heard(sender, message))
            except MetadataError as error:
                log.warning("%s", error)
        self._forget_unopened()

    def _hear_decode(self, reader: bytes, message: FromDecode) -> None:
        room = message.room
        known = self._rooms.get(room)
        if known is None and room in self._failed:
            self._server.send(reader, RoomFailed(room=room, reason=short(self._failed[room])))
            return
        if known is None:
            known = self._rooms[room] = _LeasedRoom()
            self._unopened[room] = time.monotonic()
        if isinstance(message, RoomDropped):
            known.dropped = message.reason or "decode has given it up"
        else:
            known.dropped = ""  # an earlier `RoomDropped` was about a previous request with the same room number
            known.readers.add(reader)
            if known.answer is not None:
                self._server.send(reader, known.answer)
        if known.opened:
            self._tell_wishes(room, known)

    def _tell_wishes(self, room: int, known: _LeasedRoom) -> None:
        if known.dropped:
            self._told.room_failed(room, f"decode: {known.dropped}")
        elif known.readers:
            self._told.room_wanted(room)

    def _forget_unopened(self) -> None:
        """Fails the rooms that SGLang did not open in time, oldest first."""
        now = time.monotonic()
        while self._unopened:
            room, since = next(iter(self._unopened.items()))
            if now - since < self._expect_s and len(self._unopened) <= _MAX_UNOPENED:
                return
            del self._unopened[room]
            reason = f"decode asked for room {room}, but prefill got no request for it within {now - since:.0f} s"
            self._answer(self._rooms.pop(room), RoomFailed(room=room, reason=reason))

    def shutdown(self) -> None:
        """Ends every lease, and closes the sockets."""
        self._worker.shutdown()
        self._scheduler.close()
        self._server.close()


class FollowerLeases:
    """The rooms of a prefill engine, as kept by any rank except rank 0.

    Rank 0 requests the leases. This rank grants a lease when its own pages of the room are computed.

    Args:
        worker: worker of this rank.
        follower: receives commands from rank 0.
        told: callbacks for the end of a room: its pages were read, or it failed.
    """

    def __init__(self, worker: NixlConnectorWorker, follower: RankFollower, told: LeasesTold) -> None:
        self._worker = worker
        self._follower = follower
        self._told = told
        self._computed: set[int] = set()
        self._offered: set[int] = set()
        # Leases that rank 0 has requested, and for which this rank's pages are not computed yet.
        self._unsent: dict[str, SendRequest] = {}

    @property
    def open_count(self) -> int:
        """The number of rooms with computed or leased pages here, plus the leases whose pages are not computed yet."""
        return len(self._computed | self._offered) + len(self._unsent)

    def open(self, room: int) -> None:
        """Opens the room of a new request.

        The room is accepted at once. Only rank 0 knows whether decode wants the room, and SGLang proceeds when all
        ranks agree.
        """
        self._told.room_wanted(room)

    def offer(self, room: int, computed: Computed) -> None:  # noqa: ARG002  (rank 0 has the same pages)
        """Reports that this rank has computed its pages of the room."""
        self._computed.add(room)
        self.step()

    def close(self, room: int, reason: str) -> None:
        """Forgets a room. No reader reads its pages on this rank after this call."""
        if room in self._offered:
            self._worker.start_load_kv(ConnectorMetadata(reqs_not_processed={str(room): reason}))
        while room in self._offered:
            self.step()
            time.sleep(_WAIT_S)
        self._computed.discard(room)

    def step(self) -> None:
        """Carries out rank 0's commands and reports events to it, without waiting.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        ended = WorkerOutput()
        for metadata in self._follower.steps():
            self._unsent |= metadata.reqs_to_send
            for name in [name for name in metadata.reqs_not_processed if name in self._unsent]:
                del self._unsent[name]
                ended.sent[name] = metadata.reqs_not_processed.pop(name)
            metadata.reqs_to_send = {}
            if metadata != ConnectorMetadata():
                self._worker.start_load_kv(metadata)
        if ready := {name: send for name, send in self._unsent.items() if int(name) in self._computed}:
            self._worker.start_load_kv(ConnectorMetadata(reqs_to_send=ready))
            for name in ready:
                del self._unsent[name]
                self._offered.add(int(name))
        output = self._worker.take_output()
        for told in (ended, output):
            if told:
                self._follower.report(told)
        for room, reason in _over(output):
            if room in self._offered:
                self._offered.discard(room)
                _tell_end(self._told, room, reason)

    def shutdown(self) -> None:
        """Ends every lease, and closes the socket."""
        self._worker.shutdown()
        self._follower.close()
