"""A NIXL agent: the memory that it registers, the peers that it knows, the transfers that it posts.

nixl is imported when the first agent is created. Its settings are environment variables. NIXL reads them on import, and
UCX when an agent is created, so they are set only during that time.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from transfer.errors import AgentError
from transfer.memory import MemoryType
from transfer.nixl.environment import environment
from transfer.nixl.settings import effective_settings
from transfer.nixl.vouchers import Voucher

Handle: TypeAlias = Any
"""A NIXL transfer in flight. A handle must not be used after its release, because NIXL would crash."""

Descriptors: TypeAlias = "npt.NDArray[np.uint64]"
"""uint64 `[runs, 3]`: address, bytes and device of each run."""

RunList: TypeAlias = "Descriptors | list[tuple[int, int, int]]"
"""`Descriptors`, or a list if there are few runs, because a list is quicker to create."""

BACKGROUND_RUNS = 128
"""Transfers of at least this many runs are copied by a NIXL thread. Smaller ones are copied by the posting thread."""

WORD_BYTES = 8
"""The number of bytes that `read_word` reads."""

_FIRST = [0]
_agents: WeakSet[Any] = WeakSet()


def _keep_in_fork() -> None:
    """Keeps every agent alive in a forked child.

    In the child, NIXL's destructor would wait for a thread that only the parent has.
    """
    for agent in _agents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


os.register_at_fork(after_in_child=_keep_in_fork)


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that NIXL raises.

    NIXL's own exceptions have no common base class, and its bindings also raise built-in exceptions.
    """
    bindings = importlib.import_module("nixl._bindings")
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*found, RuntimeError, ValueError, TypeError)


def _agent_error(doing: str, error: Exception) -> AgentError:
    lost = type(error).__name__ == "nixlRemoteDisconnectError"
    return AgentError(f"{doing}: {type(error).__name__}: {error}", peer_lost=lost)


@contextmanager
def nixl_errors(doing: str) -> Generator[None]:
    """Turns NIXL's exceptions within the block into an `AgentError` that says what was being done."""
    try:
        yield
    except _errors() as error:
        raise _agent_error(doing, error) from error


class Agent:
    """One NIXL agent over any number of regions. Single-threaded. Raises `AgentError` if NIXL refuses or fails.

    A transfer is described by arrays of addresses. NIXL can also prepare lists of descriptors in advance. For pages
    this does not pay: it would save only a hundredth of the time that it takes to post a descriptor. The lists would
    have to describe the whole pool at first contact, and would be lost with each connection. Adjacent pages of a
    request could not be joined into one descriptor. `read_word` does use prepared lists: it reads the same words
    repeatedly, one at a time, and a list of one word saves a third of the time of the call.

    Args:
        name: a name that no agent has had before.
        memory_type: type of the memory that most of the agent's regions are in. It determines the transports.
        background_runs: a transfer of at least this many runs is copied by a NIXL thread. The call that posts the
            transfer then returns at once, unless that thread is busy. For a smaller transfer, the call returns when
            everything is copied, which is faster than waking the thread.
        files: parameters of NIXL's POSIX plugin, for an agent that moves bytes to files and has no peers.

    Attributes:
        backend: NIXL's handle for the plugin.
    """

    def __init__(
        self,
        name: str,
        memory_type: MemoryType = MemoryType.DRAM,
        *,
        background_runs: int = BACKGROUND_RUNS,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.memory_type = memory_type
        self._registered: list[Any] = []
        self._voucher: Voucher | None = None
        # NIXL's prepared lists of one word, by peer and address; the peer "" stands for this agent
        self._words: dict[tuple[str, int], int] = {}
        self._owner = os.getpid()
        plugin = "UCX" if files is None else "POSIX"
        params = {"num_threads": "1", "split_batch_size": str(background_runs)} if files is None else dict(files)
        with environment(effective_settings(memory_type)):
            try:
                api: Any = importlib.import_module("nixl._api")
            except ImportError as error:
                raise AgentError(
                    f"making NIXL agent {name!r}: nixl cannot be imported (pip install 'pagewire[transfer]'): {error}"
                ) from error
            config = api.nixl_agent_config(
                # NIXL's own progress thread spins, and would take a whole core for each agent
                enable_prog_thread=False,
                # NIXL's listener would answer any process; our own messages carry the metadata instead
                enable_listen_thread=False,
                listen_port=0,
                backends=[],
                # Without locks, a call from a second thread would crash.
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            with nixl_errors(f"making NIXL agent {name!r}"):
                self._agent: Any = api.nixl_agent(name, config)
                _agents.add(self._agent)
                self._agent.create_backend(plugin, params)
                self.backend = int(self._agent.backends[plugin])
        # `post` calls the bindings directly, because NIXL's Python wrappers first check the type of each argument,
        # which takes a quarter of the call. The bindings' agent object is not stored here: it is destroyed with its
        # last reference, and `close` must be able to destroy it.
        bindings: Any = importlib.import_module("nixl._bindings")
        self._descriptors, self._ended = bindings.nixlXferDList, bindings.NIXL_SUCCESS
        self._self = bindings.NIXL_INIT_AGENT
        self._handle: Any = api.nixl_xfer_handle

    def register(self, regions: Sequence[tuple[int, int, int]], memory_type: MemoryType | None = None) -> Any:
        """Registers regions, each given as (address, bytes, device). Returns NIXL's record of the registration.

        The regions must stay mapped until `close`, and also while a peer that may read them is alive. `memory_type`
        defaults to the agent's own.
        """
        rows = [(*region, "") for region in regions]
        with nixl_errors(f"agent {self.name!r}: registering {len(rows)} regions"):
            self._registered.append(self._agent.register_memory(rows, (memory_type or self.memory_type).value))
        return self._registered[-1]

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called yet."""
        return self._agent is not None

    @property
    def is_own(self) -> bool:
        """Whether this process created the agent. A forked child cannot use its parent's agent."""
        return self._owner == os.getpid()

    @property
    def plugins(self) -> list[str]:
        """Returns the names of the plugins that this version of NIXL has. Not all of them load on every host."""
        with nixl_errors(f"agent {self.name!r}: its plugins"):
            return sorted(self._agent.get_plugin_list())

    @property
    def metadata(self) -> bytes:
        """The current metadata. Another NIXL agent loads this metadata in order to reach this agent."""
        with nixl_errors(f"agent {self.name!r}: its metadata"):
            return bytes(self._agent.get_agent_metadata())

    def vouch(self, metadata: bytes) -> None:
        """Proves to readers on this host that this metadata is the agent's own; see `transfer.nixl.vouchers`."""
        self._voucher = Voucher(metadata)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Loads the metadata of a peer, so that transfers can name the peer.

        The caller must have checked the metadata's length and digest: wrong bytes can crash the process.
        """
        with nixl_errors(f"agent {self.name!r}: loading agent {peer!r}"):
            found = self._agent.add_remote_agent(metadata)
        loaded = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if loaded != peer:
            self._agent.remove_remote_agent(loaded)
            raise AgentError(f"agent {self.name!r}: expected the metadata of {peer!r}, got that of {loaded!r}")

    def remove_peer(self, peer: str) -> None:
        """Unloads a peer. All handles of transfers with it must have been released."""
        with nixl_errors(f"agent {self.name!r}: unloading agent {peer!r}"):
            for key in [key for key in self._words if key[0] == peer]:
                self._agent.agent.releasedDlistH(self._words.pop(key))
            self._agent.remove_remote_agent(peer)

    def post(
        self,
        operation: Literal["READ", "WRITE"],
        peer: str,
        local: RunList,
        remote: RunList,
        note: bytes = b"",
        memory_types: tuple[MemoryType, MemoryType] | None = None,
    ) -> tuple[Handle, bool]:
        """Starts a READ into our memory or a WRITE into a peer's.

        Returns its handle and whether the transfer has already ended.

        Both sides are registered memory, in runs of equal lengths. If a note is given, the peer gets it when all bytes
        have arrived. `memory_types` are the types of the local and the remote memory; None means the agent's own type
        for both.
        """
        here, there = memory_types or (self.memory_type, self.memory_type)
        agent, bound = self._agent, self._agent.agent
        # `nixl_errors` is not used here, because two context managers and their messages would add a third to the time
        # of a small READ.
        try:
            local_list = self._descriptors(agent.nixl_mems[here.value], local)
            remote_list = self._descriptors(agent.nixl_mems[there.value], remote)
            made = bound.createXferReq(agent.nixl_ops[operation], local_list, remote_list, peer, note, [])
            handle = self._handle(bound, made)
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: {operation} of {len(local)} runs of {peer!r}", error) from error
        return handle, self.start(handle)

    def read(
        self,
        peer: str,
        local: RunList,
        remote: RunList,
        memory_types: tuple[MemoryType, MemoryType] = (MemoryType.DRAM, MemoryType.DRAM),
    ) -> Handle | None:
        """Starts to READ runs of a peer's memory into ours.

        Returns the handle, or None if the READ has already ended.
        """
        here, there = memory_types
        agent, bound = self._agent, self._agent.agent
        try:  # reading `_value_` takes a third of the time of reading `value`
            local_list = self._descriptors(agent.nixl_mems[here._value_], local)
            remote_list = self._descriptors(agent.nixl_mems[there._value_], remote)
            made = bound.createXferReq(agent.nixl_ops["READ"], local_list, remote_list, peer, b"", [])
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: READ of {len(local)} runs of {peer!r}", error) from error
        return self._posted(bound, made)

    def read_word(self, peer: str, local: int, remote: int, note: bytes) -> Handle | None:
        """Like `read`, for 8 bytes from the address `remote` of a peer to the address `local` in our host memory.

        The peer gets the note when the word has arrived.
        """
        agent, bound, words = self._agent, self._agent.agent, self._words
        try:
            if (here := words.get(("", local))) is None:
                here = words["", local] = self._prepared(self._self, local)
            if (there := words.get((peer, remote))) is None:
                there = words[peer, remote] = self._prepared(peer, remote)
            made = bound.makeXferReq(agent.nixl_ops["READ"], here, _FIRST, there, _FIRST, note, [], False)
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: READ of a word of {peer!r}", error) from error
        return self._posted(bound, made)

    def _prepared(self, owner: str, address: int) -> int:
        words = self._descriptors(self._agent.nixl_mems[MemoryType.DRAM.value], [(address, WORD_BYTES, 0)])
        return self._agent.agent.prepXferDlist(owner, words, [])

    def _posted(self, bound: Any, made: int) -> Handle | None:
        """Posts a transfer by its raw number. Creating and releasing a handle object would double the cost."""
        try:
            has_ended = bound.postXferReq(made) == self._ended
        except _errors() as error:
            with nixl_errors(f"agent {self.name!r}: releasing a transfer"):
                bound.releaseXferReq(made)
            raise _agent_error(f"agent {self.name!r}: posting", error) from error
        if not has_ended:
            return self._handle(bound, made)
        try:
            bound.releaseXferReq(made)
        except _errors():  # the transfer has ended, so it does not matter if the release fails
            pass
        return None

    def start(self, handle: Handle) -> bool:
        """Posts a transfer. Returns whether it has already ended. Releases the handle on an error."""
        try:
            return self._agent.transfer(handle) == "DONE"
        except _errors() as error:
            with nixl_errors(f"agent {self.name!r}: releasing a transfer"):
                handle.release()
            raise _agent_error(f"agent {self.name!r}: posting", error) from error

    def done(self, handle: Handle) -> bool:
        """Returns whether a transfer has ended successfully.

        The call also advances the transfer, and sends its note when it has ended.

        On an error, the caller must release the handle.
        """
        try:
            return self._agent.check_xfer_state(handle) == "DONE"
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: transfer", error) from error

    def release(self, handle: Handle) -> None:
        """Releases a handle, which must not be used after this. A copy in flight is not stopped."""
        try:
            handle.release()
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: releasing a transfer", error) from error

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message to a peer without blocking. The message may be lost if the peer is stopped."""
        with nixl_errors(f"agent {self.name!r}: notifying {peer!r}"):
            self._agent.send_notif(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Returns the (agent name, message) pairs that have arrived since the last call.

        Also serves the peers' transfers.

        The agent name is what the sender claims. Nothing proves it.
        """
        if self._voucher is not None:
            self._voucher.poll()
        try:
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except _errors() as error:
            raise _agent_error(f"agent {self.name!r}: notifications", error) from error
        return [(sender, message) for sender, messages in arrived.items() for message in messages]

    def close(self, *, in_flight: bool = False) -> None:
        """Destroys the NIXL agent. Safe to call twice.

        The caller must first release every handle and remove every peer.

        This call waits for the copy that the agent's thread is working on. No byte moves after the call. If a transfer
        never ends, closing the agent is therefore the last way to make the transfer's memory usable again. In a forked
        child, the call only drops the reference to the agent.

        Args:
            in_flight: True if a handle was released before its transfer had ended. The agent's own destructor then
                deregisters the memory, after its worker has stopped. If the memory were deregistered earlier, the
                worker could use memory that is already freed.
        """
        if self._voucher is not None:
            self._voucher.close()
        agent, self._agent = self._agent, None
        registered, self._registered = self._registered, []
        words, self._words = self._words, {}
        if agent is None or in_flight or not self.is_own:
            return
        with nixl_errors(f"closing agent {self.name!r}"):
            for prepared in words.values():
                agent.agent.releasedDlistH(prepared)
            for dlist in registered:
                agent.deregister_memory(dlist)


def is_over(agent: Agent, handle: Handle) -> tuple[bool, AgentError | None]:
    """Returns whether a transfer has ended, and its error if the transfer failed.

    Releases the handle if the transfer has ended.
    """
    failed: AgentError | None = None
    try:
        if not agent.done(handle):
            return False, None
    except AgentError as error:
        failed = error
    with suppress(AgentError):  # the transfer has ended, so it does not matter if the release fails
        agent.release(handle)
    return True, failed
