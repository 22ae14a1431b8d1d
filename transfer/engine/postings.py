"""The transfers that this engine has started, until NIXL reports the end of every copy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from transfer.engine.metadata import TransferReqData
from transfer.engine.peers import LoadedPeer
from transfer.engine.tensor_agent import TensorAgent
from transfer.errors import AgentError, InvalidTransferError, PeerFailedError, TransferFailedError, UnknownTransferError
from transfer.nixl.agent import Agent, Handle, is_over
from transfer.plan.intersection import Ints
from transfer.plan.runs import PagePairs, Runs

_MOST_FEW = 8
"""Up to this many runs, plain Python builds descriptors faster than numpy does."""
_GONE = " is gone, or has moved or freed its tensors"


def page_runs(label: str, src: Ints, dst: Ints, page_bytes: int) -> Runs:
    """Returns the runs that copy `src` pages to `dst` pages.

    Offsets are in bytes from page 0. The runs' `local` side has the offsets of `dst`, and the `remote` side has the
    offsets of `src`. Pairs of pages that are adjacent on both sides form one run.
    """
    if src.size != dst.size:
        raise InvalidTransferError(
            f"{label}: got {src.size} source pages for {dst.size} destination pages; the numbers must be equal"
        )
    if src.size == 1:
        return Runs(dst * page_bytes, src * page_bytes, np.full_like(dst, page_bytes))
    pairs = PagePairs(dst, src)
    if pairs.repeated is not None:
        raise InvalidTransferError(f"{label}: destination page {pairs.repeated} is named more than once")
    written, read, count = pairs.chained()
    length = np.full_like(written, page_bytes) if count is None else count * page_bytes
    return Runs(written * page_bytes, read * page_bytes, length)


@dataclass(eq=False)
class Posting:
    """One transfer: a NIXL handle for each shard. A handle is released as soon as its copy has ended, and never before.

    An earlier release would not stop the copy, and NIXL could no longer report the copy's end.

    Attributes:
        request: the transfer.
        connection: the connection to the transfer's peer.
        failure: why the transfer failed; None otherwise.
        pending: the agent and handle of each shard that has not ended.
    """

    request: TransferReqData
    connection: LoadedPeer
    failure: TransferFailedError | None = None
    pending: list[tuple[Agent, Handle]] = field(default_factory=list["tuple[Agent, Handle]"])

    def post(self, shards: Sequence[TensorAgent], runs: Runs) -> None:
        """Starts the copy of every shard. If NIXL refuses one (`AgentError`), the copies that were started continue."""
        request, note = self.request, self.request.transfer_name.encode()
        replica = request.src_replica_idx if request.is_read else request.dst_replica_idx
        for ours, theirs in zip(shards, self.connection.metadata.agents_meta[replica], strict=True):
            if request.is_read:
                here, there, operation = runs.local, runs.remote, "READ"
            else:
                here, there, operation = runs.remote, runs.local, "WRITE"
            if len(runs) <= _MOST_FEW:  # calls into numpy would take longer than the arithmetic
                lengths = runs.length.tolist()
                local = [(ours.base_addr + at, n, ours.device_id) for at, n in zip(here.tolist(), lengths, strict=True)]
                remote = [
                    (theirs.base_addr + at, n, theirs.device_id) for at, n in zip(there.tolist(), lengths, strict=True)
                ]
            else:
                at = Runs(ours.base_addr + here, theirs.base_addr + there, runs.length)
                local, remote = at.descriptors(ours.device_id, theirs.device_id)
            handle, done = ours.agent.post(operation, theirs.agent_name, local, remote, note)
            if done:
                ours.agent.release(handle)
            else:
                self.pending.append((ours.agent, handle))

    def poll(self) -> None:
        """Advances every copy, and releases the handles of ended copies. Raises the first `AgentError`, if any."""
        first: AgentError | None = None
        for agent, handle in list(self.pending):
            ended, error = is_over(agent, handle)
            if ended:
                self.pending.remove((agent, handle))
                first = first or error
        if first is not None:
            raise first

    def is_moving(self) -> bool:
        """Polls once. Returns whether any copy is still in flight. A copy that has failed counts as ended."""
        with suppress(AgentError):
            self.poll()
        return bool(self.pending)

    def drop(self) -> set[Agent]:
        """Releases the handles of all copies in flight. Call this just before their agents are destroyed.

        The copies continue until the agents are destroyed. Returns these agents.
        """
        pending, self.pending = self.pending, []
        for agent, handle in pending:
            with suppress(AgentError):
                agent.release(handle)
        return {agent for agent, _ in pending}


class Postings:
    """The transfers that one engine has started. `KVTransferEngine` documents the errors of its methods.

    Attributes:
        started: by name, the transfers that have not been cleaned up.
        parked: by name, the failed or given-up transfers that still have copies in flight.
    """

    def __init__(self, engine: str) -> None:
        self.started: dict[str, Posting] = {}
        self.parked: dict[str, Posting] = {}
        self._here = f"engine {engine!r}"

    def requests(self, *, is_read: bool) -> dict[str, TransferReqData]:
        """Returns the requests of the READs (or WRITEs) that have not been cleaned up, by transfer name."""
        return {name: one.request for name, one in self.started.items() if one.request.is_read is is_read}

    def start(self, posting: Posting, shards: Sequence[TensorAgent], runs: Runs) -> None:
        """Posts every shard of a transfer."""
        try:
            posting.post(shards, runs)
        except AgentError as error:
            raise self._fail(posting, error) from error
        self.started[posting.request.transfer_name] = posting

    def get(self, name: str) -> Posting:
        """Returns a transfer that has not been cleaned up. Raises `UnknownTransferError` if there is none."""
        if name not in self.started:
            raise UnknownTransferError(
                f"{self._here} has no transfer {name}: it never started, or was already cleaned up or given up"
            )
        return self.started[name]

    def is_done(self, posting: Posting) -> bool:
        """Whether a transfer has ended successfully. Raises the error of a transfer that has failed."""
        if posting.failure is not None:
            raise posting.failure.with_traceback(None)
        try:
            posting.poll()
        except AgentError as error:
            raise self._fail(posting, error) from error
        return not posting.pending

    def give_up(self, name: str) -> None:
        """Forgets a transfer in any state. If copies of the transfer are still in flight, it is parked."""
        posting = self.get(name)
        del self.started[name]
        posting.is_moving()
        self._park(posting)

    def disconnect(self, connection: LoadedPeer) -> None:
        """Fails the transfers that are in flight over a connection."""
        for name, posting in self.started.items():
            if posting.connection is not connection or posting.failure is not None:
                continue
            try:
                posting.poll()
            except AgentError as error:
                self._fail(posting, error)
            if posting.pending and posting.failure is None:
                peer = connection.metadata.name
                posting.failure = PeerFailedError(
                    f"{self._here}: peer {peer!r} was disconnected before transfer {name} had ended"
                )
                self._park(posting)

    def reap(self) -> set[LoadedPeer]:
        """Polls the parked transfers. Forgets ended transfers, and returns the connections of all other transfers."""
        self.parked = {name: posting for name, posting in self.parked.items() if posting.is_moving()}
        return {posting.connection for posting in self.parked.values()}

    def moving(self) -> set[Posting]:
        """Returns all transfers with copies in flight."""
        return {posting for posting in (*self.started.values(), *self.parked.values()) if posting.is_moving()}

    def _fail(self, posting: Posting, error: AgentError) -> TransferFailedError:
        kind, gone = (PeerFailedError, _GONE) if error.peer_lost else (TransferFailedError, "")
        name, connection = posting.request.transfer_name, posting.connection
        failure = kind(f"{self._here}: transfer {name} failed, peer {connection.metadata.name!r}{gone}: {error}")
        posting.failure = failure
        if error.peer_lost and connection.failure is None:
            connection.failure = failure
        self._park(posting)
        return failure

    def _park(self, posting: Posting) -> None:
        if posting.pending:
            self.parked[posting.request.transfer_name] = posting
