"""One rank of an engine: its agents, its lease words, and the pulls that it makes. Single-threaded."""

from __future__ import annotations

import itertools
import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike

from kvcache.unmoved import Unmoved
from transfer.errors import AgentError, EngineClosedError, HandshakeError, InvalidEngineError, TransferError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.nixl.settings import agreed_settings
from transfer.plan.boxes import ShardLayout
from transfer.pull.lease import LEASE_WORDS, LENT_WORDS, make_words
from transfer.pull.page_checks import PageChecks, Verifier
from transfer.pull.pull import Puller
from transfer.pull.remote import RemoteEngine
from transfer.pull.staging_area import StagingArea
from transfer.wire.messages import RankMetadata, ReaderNote, decode_note, open_rank, sealed_rank

log = logging.getLogger("pagewire.transfer")
_IN_TURN = 8
"""How many agents of unused sources are polled in one round, in turn."""


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """The identity of a rank, and the entries that must agree with a peer.

    Attributes:
        engine_id: id of the engine, which all its ranks share.
        incarnation: a random name, new at each start, which all ranks share. `new_incarnation` generates it.
        rank: index of this rank among `ranks`, counting tensor-parallel and pipeline ranks together.
        ranks: number of ranks of the engine.
        compatibility: entries that must agree so that the bytes mean the same: model, cache dtype and so on.
        key: shared secret for the digest over metadata. If it is empty, the digest only detects damage.
        table_key: key for the seals of the engine's block tables; empty if the engine makes no seals.
    """

    engine_id: str
    incarnation: str
    rank: int = 0
    ranks: int = 1
    compatibility: Mapping[str, str] = field(default_factory=dict[str, str])
    key: bytes = b""
    table_key: bytes = b""


def new_incarnation() -> str:
    """Returns a random name that no other incarnation has."""
    return uuid.uuid4().hex


class ShardMemory(NamedTuple):
    """The memory that a rank registers. It must stay mapped as long as any peer is alive.

    Attributes:
        layout: geometry of the pages of its shard.
        bases: address of each region of the layout.
        device: device of the regions.
        tensors: the tensors in the regions, by name. torch must not move them. A pull fails if one has moved.
    """

    layout: ShardLayout
    bases: Sequence[int]
    device: torch.device = torch.device("cpu")
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})

    @property
    def memory_type(self) -> MemoryType:
        """The kind of memory of the regions."""
        return MemoryType.VRAM if self.device.type == "cuda" else MemoryType.DRAM

    @property
    def device_index(self) -> int:
        """Index of the device; 0 for host memory."""
        return self.device.index or 0


class RankTransfer:
    """One rank's leases for readers, and its pulls from sources. Its owner's thread calls `poll` repeatedly.

    A NIXL copy can be stopped only by destroying its agent. Each source therefore has a separate reading agent, which
    is not the agent that serves peers, so that giving up one source disturbs no other.

    Args:
        identity: the identity of this rank.
        memory: the memory that holds the pages of this rank.
        checks: whether to record checksums of leased pages, for readers that verify them.
        verify: share of the pages, 0 to 1, that are compared with the source's checksums after they were read.
        stuck_s: how long copies of a failed pull may continue, in seconds. After that their agent is destroyed, and
            everything known about their source is forgotten.
        agent: creates an agent, given its name and memory type. Tests pass a function that injects faults.
        clock: a monotonic clock, in seconds.

    Attributes:
        unmoved: the tensors of the pages, which must stay at the addresses that were registered.
        words: uint64 `[words]`, the lease words. The owner's `LeaseBook` writes them.
        puller: the pulls of this rank.
        metadata: the rank's sealed metadata, for the handshake.

    Raises:
        InvalidEngineError: the addresses do not match the layout's regions, or checksums are requested for pages that
            are not in host memory.
        AgentError: NIXL cannot be used, or refuses the memory.
    """

    def __init__(
        self,
        identity: RankIdentity,
        memory: ShardMemory,
        *,
        checks: bool = False,
        verify: float = 0.0,
        stuck_s: float = 30.0,
        agent: Callable[[str, MemoryType], Agent] = Agent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout, bases, memory_type = memory.layout, memory.bases, memory.memory_type
        self._where = f"engine {identity.engine_id!r} rank {identity.rank}"
        if len(bases) != len(layout.region_bytes):
            raise InvalidEngineError(
                f"{self._where}: got {len(bases)} addresses, but the layout has {len(layout.region_bytes)} regions"
            )
        if (checks or verify) and memory_type is not MemoryType.DRAM:
            raise InvalidEngineError(
                f"{self._where}: page checks (verify) need pages in host memory, but these pages are in "
                f"{memory_type.value}"
            )
        self.identity = identity
        self.layout = layout
        self.bases = tuple(bases)
        self.memory_type = memory_type
        self.device = memory.device_index
        self.unmoved = Unmoved(memory.tensors)
        self.words = make_words(LEASE_WORDS + LENT_WORDS)
        self._verify = verify
        self._checks = PageChecks(layout, bases) if checks or verify else None
        self._shown_checks = self._checks if checks else None  # the checks that readers may compare
        self._staging = StagingArea(layout, bases) if memory_type is MemoryType.DRAM else None
        name = f"{identity.engine_id}/{identity.rank}@{identity.incarnation}"
        self.puller = Puller((identity.engine_id, identity.rank, identity.ranks), memory_type=memory_type, clock=clock)
        self._stuck_s = stuck_s
        self._make_agent = agent
        self._remotes: dict[str, RemoteEngine] = {}
        self._retiring: list[RemoteEngine] = []
        self._next = 0  # index of the first known source in the next poll's turn
        self._reader_names = (f"{name}/reader{number}" for number in itertools.count())  # no agent's name is used twice
        self._spare: Agent | None = None  # a reading agent without a peer, kept because creating one takes 10 ms
        self._agent: Agent | None = agent(name, memory_type)
        try:
            self._register_pages(self._agent)
            own = (self.words, *(self._checks.words if self._checks else ()))
            self._agent.register([(words.ctypes.data, words.nbytes, 0) for words in own], MemoryType.DRAM)
            self._spare = self._make_reader()
            self.metadata = sealed_rank(self._describe(name, self._agent.metadata), identity.key)
            # decodes our own metadata with the checks that peers will make
            self._mine = open_rank(self.metadata, identity.key)
            if not identity.key:
                self._agent.vouch(self._mine.agent_metadata)
        except BaseException:
            self.close()
            raise

    def _open(self) -> Agent:
        if self._agent is None:
            raise EngineClosedError(f"{self._where} was shut down")
        return self._agent

    def _make_reader(self) -> Agent:
        agent = self._make_agent(next(self._reader_names), self.memory_type)
        self._register_pages(agent)
        agent.register([(self.puller.words.ctypes.data, self.puller.words.nbytes, 0)], MemoryType.DRAM)
        if self._staging is not None:
            agent.register([(self._staging.address, self._staging.num_bytes, 0)], MemoryType.DRAM)
        return agent

    def _register_pages(self, agent: Agent) -> None:
        sizes = self.layout.region_bytes
        pages = [(base, size, self.device) for base, size in zip(self.bases, sizes, strict=True)]
        agent.register(pages, self.memory_type)

    def _describe(self, name: str, agent_metadata: bytes) -> RankMetadata:
        shown = self._shown_checks
        return RankMetadata(
            engine_id=self.identity.engine_id,
            incarnation=self.identity.incarnation,
            rank=self.identity.rank,
            ranks=self.identity.ranks,
            hostname=socket.gethostname(),
            agent_name=name,
            agent_metadata=agent_metadata,
            memory_type=self.memory_type,
            layout=self.layout,
            bases=self.bases,
            device=self.device,
            words_addr=self.words.ctypes.data,
            words=len(self.words),
            checks_addrs=tuple(words.ctypes.data for words in shown.words) if shown else (),
            compatibility=dict(self.identity.compatibility),
            settings=agreed_settings(self.memory_type),
            table_key=self.identity.table_key,
        )

    def remote(self, engine_id: str) -> RemoteEngine | None:
        """Returns the loaded engine of this id, unless it is known to be dead."""
        remote = self._remotes.get(engine_id)
        return None if remote is None or remote.failure else remote

    def inspect(self, ranks: Sequence[bytes], expected: tuple[str, str] | None = None) -> RemoteEngine:
        """Checks an engine's metadata without NIXL, and computes the transfer plans. Loads nothing.

        `ranks` has the sealed metadata of each rank of the engine. `expected` is the id and the incarnation that the
        engine must have.

        Raises:
            MetadataError: the metadata is damaged, or does not come from the ranks of one engine. NIXL has not seen it.
            SettingsMismatchError: the peer runs with other UCX settings or another version of NIXL.
            HandshakeError: the metadata belongs to another engine, or entries that must agree differ. The message has
                both values.
        """
        self._open()
        found = [open_rank(data, self.identity.key) for data in ranks]
        remote = RemoteEngine(found, self._mine, self.identity.compatibility)
        if expected not in {None, (remote.engine_id, remote.incarnation)}:
            raise HandshakeError(
                f"got the metadata of engine {remote.engine_id!r}, incarnation {remote.incarnation!r}; expected "
                f"{expected}"
            )
        if remote.engine_id == self.identity.engine_id:
            raise HandshakeError(f"{self._where}: an engine cannot read from itself")
        return remote

    def load(self, remote: RemoteEngine) -> RemoteEngine:
        """Loads an inspected engine. First forgets a loaded engine of the same id, whatever its incarnation.

        Raises:
            AgentError: NIXL refuses a rank. None of them stays loaded.
        """
        self._open()
        again = f"engine {remote.engine_id!r} was connected again"
        self.disconnect(remote.engine_id, Failure(FailureKind.SOURCE_GONE, again))
        self._reap()
        remote.staging = self._staging
        agent, self._spare = self._spare or self._make_reader(), None
        try:
            if self._verify and self._checks:
                for at in remote.read_ranks:
                    remote.verifier = Verifier(self._checks, self._mine, remote.ranks[at], self._verify, agent)
            remote.load(agent)
        except TransferError:
            self._put_back(agent)
            raise
        self._remotes[remote.engine_id] = remote
        return remote

    def disconnect(self, engine_id: str, failure: Failure, incarnation: str = "") -> None:
        """Fails the pulls from an engine, and forgets the engine and its metadata.

        A no-op if another `incarnation` is loaded. An empty `incarnation` matches any.
        """
        remote = self._remotes.get(engine_id)
        if remote is not None and incarnation in {"", remote.incarnation}:
            del self._remotes[engine_id]
            self.puller.fail_engine(remote, failure)
            self._retiring.append(remote)

    def record_checksums(self, pages: Sequence[ArrayLike]) -> None:
        """Records the checksums of pages, before they are leased. `pages` has the page ids of each group."""
        if self._shown_checks is not None:
            for group, ids in enumerate(pages):
                self._shown_checks.record(group, ids)

    def poll(self) -> list[ReaderNote | None]:
        """Serves peers and advances pulls. Returns the notes from readers, with None for each malformed note.

        Raises:
            AgentError: NIXL fails.
        """
        agent = self._open()
        notes = [decode_note(message) for _, message in agent.notifications()]
        for engine_id, remote in list(self._remotes.items()):
            if remote.failure is not None:
                self.disconnect(engine_id, remote.failure)
        for remote in self._to_poll():
            # No peer writes to this agent, but its own messages and the detection of dead peers need polls.
            with suppress(AgentError):
                remote.agent.notifications()
        self.puller.poll()
        self._give_up_stuck()
        self._reap()
        if not len(self.puller) and self._spare is None:
            with suppress(AgentError):  # the next source's request will report the error
                self._spare = self._make_reader()
        return notes

    def _to_poll(self) -> set[RemoteEngine]:
        """Returns the sources whose agents are polled now: all sources in use, and a few unused sources in turn."""
        known = list(self._remotes.values())
        if len(known) <= _IN_TURN:
            return {*known, *self._retiring}
        first = self._next if self._next < len(known) else 0
        self._next = first + _IN_TURN
        used = [remote for remote in self.puller.engines_in_use() if self._remotes.get(remote.engine_id) is remote]
        return {*known[first : first + _IN_TURN], *used, *self._retiring}

    def _give_up_stuck(self) -> None:
        """Destroys the agents of copies that NIXL never completes. There is no other way to stop such copies."""
        for remote in self.puller.stuck(self._stuck_s):
            log.warning(
                "engine %r: some copies did not end in time; the agent that makes them is destroyed", remote.engine_id
            )
            stuck = Failure(FailureKind.SOURCE_GONE, f"engine {remote.engine_id!r} is stuck")
            self.disconnect(remote.engine_id, stuck)
            self._stop(remote)

    def _stop(self, remote: RemoteEngine) -> None:
        """Destroys the agent that reads from a source, so that its copies in flight end."""
        pulls, agent = self.puller.abandon(remote), remote.agent
        with suppress(AgentError):  # the agent is gone in any case
            agent.close(in_flight=True)
        del agent
        self.puller.conclude(pulls)

    def _reap(self) -> None:
        for remote in [remote for remote in self._retiring if not self.puller.uses(remote)]:
            self._retiring.remove(remote)
            self._take_back(remote)

    def _take_back(self, remote: RemoteEngine) -> None:
        agent = remote.agent
        remote.unload()
        if agent.is_open:
            # The verifier's words were registered with this agent, and are freed with the verifier. Such an agent is
            # therefore destroyed instead of being reused.
            self._put_back(agent, reuse=remote.verifier is None)

    def _put_back(self, agent: Agent, *, reuse: bool = True) -> None:
        """Keeps an agent without a peer for the next source if `reuse` is True and none is kept. Else destroys it."""
        if self._spare is None and reuse:
            self._spare = agent
        else:
            self._destroy(agent)

    def _destroy(self, agent: Agent) -> None:
        try:
            agent.close()
        except AgentError as error:
            log.warning("%s: %s", self._where, error)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called. False in a forked child: leases and pulls belong to the parent."""
        return self._agent is not None and self._agent.is_own

    def close(self, drain_s: float = 1.0) -> None:
        """Ends every pull, and destroys the agents: no byte moves afterwards. Safe to call twice.

        The owner must end the leases before this call. In a forked child, the call does nothing.

        Args:
            drain_s: seconds to wait for copies in flight before their agents are destroyed.
        """
        if self._agent is None or not self.is_open:
            return
        shutdown = Failure(FailureKind.SHUTDOWN, "this rank was shut down")
        for remote in self._remotes.values():
            self.puller.fail_engine(remote, shutdown)
        deadline = time.monotonic() + drain_s
        while len(self.puller) and time.monotonic() < deadline:
            with suppress(AgentError):
                self.puller.poll()
            time.sleep(0.5e-3)
        for remote in (*self._remotes.values(), *self._retiring):
            if self.puller.uses(remote):
                self._stop(remote)
            if remote.agent.is_open:
                self._take_back(remote)
        self._remotes.clear()
        self._retiring.clear()
        agent, self._agent, spare, self._spare = self._agent, None, self._spare, None
        for one in filter(None, (spare, agent)):
            self._destroy(one)
