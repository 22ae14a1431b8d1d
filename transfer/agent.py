"""One NIXL agent around one tensor, and the settings under which agents may meet. The only importer of nixl.

nixl is imported when the first agent is made: until then a program can still set the environment, which UCX reads once.
The settings here are for CMA between processes of one host: data moves by `process_vm_readv`, and notifications and the
detection of a dead peer go over shared memory, at a tenth of the latency of TCP and without a listening socket.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from transfer.errors import AgentError, InvalidEngineError
from transfer.metadata import MemoryType, TensorAgentMetadata, sealed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    import numpy.typing as npt
    import torch

Handle: TypeAlias = Any
"""A transfer of NIXL's in flight. Dead once released: NIXL crashes on its next use."""

Pages: TypeAlias = Any
"""A prepared list of NIXL's that describes every page of one tensor, ours or a peer's."""

_DEFAULTS = {
    "UCX_KEEPALIVE_INTERVAL": "1s",  # the default of 20 s is how long a message to a dead peer is taken silently
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",  # NIXL's INFO lines go to stdout
}
_HOST_TRANSPORTS = "posix,sysv,cma"
_SHARED_MEMORY = ("posix", "sysv")
_THIS_HOST_ONLY = {"posix", "sysv", "cma", "self", "sm", "shm", "mm", "xpmem", "knem", "cuda_ipc", "cuda_copy"}
_TRUE = {"y", "yes", "1", "on", "true"}
_BACKEND = "UCX"
# With a thread of its own, a post returns at once and the copy runs beside the caller. Without, it blocks until all is
# copied. Batches below 8 descriptors are still copied inline: that is faster than waking the thread.
_BACKEND_PARAMS = {"num_threads": "1", "split_batch_size": "8"}


def effective_settings(
    memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment variables that agents run with: those that are set, and our defaults for the others.

    A variable that is set is never changed. The transports are chosen for host memory only, since a GPU needs those
    that UCX finds there. Shared-memory transports are told to report a dead peer wherever they are named.

    Args:
        memory_type: memory that the agents will register.
        environ: the environment to read; the process's own where None.
    """
    environ = os.environ if environ is None else environ
    settings = {key: environ.get(key, value) for key, value in _DEFAULTS.items()}
    transports = environ.get("UCX_TLS", _HOST_TRANSPORTS if memory_type is MemoryType.DRAM else None)
    if transports is not None:
        settings["UCX_TLS"] = transports
        for transport in set(_SHARED_MEMORY) & _transports(transports):
            variable = f"UCX_{transport.upper()}_ERROR_HANDLING"
            settings[variable] = environ.get(variable, "y")
    return settings


def agreed_settings(
    memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns what two processes must have in common, in one spelling: transports, protocols and NIXL's version.

    Where they differ, the first contact crashes a process or never ends.
    """
    environ = os.environ if environ is None else environ
    effective = dict(environ) | effective_settings(memory_type, environ)
    agreed = {"nixl": _nixl_version(), "UCX_TLS": ",".join(sorted(_transports(effective.get("UCX_TLS", "all"))))}
    for key in ("UCX_PROTO_ENABLE", "UCX_ADDRESS_VERSION"):
        if key in effective:
            agreed[key] = effective[key].lower()
    for key, value in effective.items():
        if key.startswith("UCX_") and key.endswith("_ERROR_HANDLING") and value.lower() in _TRUE:
            agreed[key] = "y"
    return dict(sorted(agreed.items()))


def settings_fingerprint(memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None) -> str:
    """Returns a digest of `agreed_settings`: two processes may connect only if theirs are equal. Changes nothing."""
    return fingerprint_of(agreed_settings(memory_type, environ))


def fingerprint_of(settings: Mapping[str, str]) -> str:
    """Returns the digest of settings as `agreed_settings` returns them: 32 hexadecimal digits."""
    data = msgspec.msgpack.encode(dict(settings), order="sorted")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def reaches_other_hosts(settings: Mapping[str, str]) -> bool:
    """Tells whether the transports in `settings` go further than the machine they start on."""
    return not _transports(settings.get("UCX_TLS", "all")) <= _THIS_HOST_ONLY


def _transports(value: str) -> set[str]:
    return {transport.strip().lower() for transport in value.split(",") if transport.strip()}


@cache
def _nixl_version() -> str:
    return importlib.metadata.version("nixl")


@cache
def _api() -> Any:
    return importlib.import_module("nixl._api")


@cache
def _errors() -> tuple[type[Exception], ...]:
    """NIXL's exceptions have no base class of their own; its bindings add built-in ones for bad arguments."""
    bindings = importlib.import_module("nixl._bindings")
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*found, RuntimeError, ValueError, TypeError)


def _wrapped(doing: str, error: Exception) -> AgentError:
    lost = type(error).__name__ == "nixlRemoteDisconnectError"
    return AgentError(f"{doing}: {type(error).__name__}: {error}", peer_lost=lost)


@contextmanager
def _refusals(doing: str) -> Generator[None]:
    try:
        yield
    except _errors() as error:
        raise _wrapped(doing, error) from error


def _page_rows(base_addr: int, bytes_per_page: int, device_id: int, total_num_pages: int) -> npt.NDArray[np.uint64]:
    # One strided row, (address, length, device, stride, count), stands for any number of equal pages.
    return np.array([[base_addr, bytes_per_page, device_id, bytes_per_page, total_num_pages]], np.uint64)


@dataclass(eq=False)
class TensorAgent:
    """One tensor, registered with a NIXL agent of its own.

    Attributes:
        agent: the NIXL agent; None once closed.
        agent_name: its name, never used twice.
        tensor: the tensor; held so that its memory outlives the registration.
        base_addr: address of page 0.
        ucx_backend: NIXL's handle of the UCX backend.
        device_id: index of the device; 0 for host memory.
        agent_metadata: what another NIXL agent loads to reach this one.
        reg_dlist: NIXL's record of the registration.
        memory_type: where the tensor lives.
        local_pages: the prepared list of this tensor's pages; None where the agent was not made by `create_agent`.
    """

    agent: Any
    agent_name: str
    tensor: torch.Tensor
    base_addr: int
    ucx_backend: int
    device_id: int
    agent_metadata: bytes
    reg_dlist: Any
    memory_type: MemoryType = MemoryType.DRAM
    local_pages: Pages = None

    @classmethod
    def create_agent(
        cls,
        agent_name: str,
        listen_port: int,
        tensor: torch.Tensor,
        total_num_pages: int,
        elts_per_page: int,
        memory_type: MemoryType,
    ) -> TensorAgent:
        """Makes a NIXL agent, and registers the tensor's memory with it. The first call imports nixl.

        Args:
            agent_name: a name that no agent has had before.
            listen_port: handed to NIXL, but no listener is started: it would answer anyone on any interface, and
                metadata travels in messages of our own. 0 will do.
            tensor: any dtype; its elements cover one dense stretch of memory, page after page.
            total_num_pages: pages of the tensor.
            elts_per_page: elements of a page.
            memory_type: DRAM for a tensor on the CPU, VRAM for one on a GPU.

        Raises:
            InvalidEngineError: the pages do not make up the tensor.
            AgentError: nixl is missing, or refuses the settings, the memory or its type.
        """
        os.environ.update(effective_settings(memory_type))
        doing = f"making NIXL agent {agent_name!r}"
        if tensor.numel() != total_num_pages * elts_per_page:
            raise InvalidEngineError(
                f"{doing}: {total_num_pages} pages of {elts_per_page} elements are not the tensor's {tensor.numel()}"
            )
        try:
            api = _api()
        except ImportError as error:
            raise AgentError(f"{doing}: nixl cannot be imported: {error}") from error
        config = api.nixl_agent_config(
            enable_prog_thread=False,  # NIXL's own thread spins: it takes a whole core for each agent
            enable_listen_thread=False,
            listen_port=listen_port,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,  # without locks, a second thread means a crash
        )
        base_addr, device_id = tensor.data_ptr(), max(tensor.get_device(), 0)
        bytes_per_page = elts_per_page * tensor.element_size()
        region = [(base_addr, total_num_pages * bytes_per_page, device_id, "")]
        with _refusals(doing):
            agent = api.nixl_agent(agent_name, config)
            agent.create_backend(_BACKEND, _BACKEND_PARAMS)
            reg_dlist = agent.register_memory(region, memory_type.value)
            rows = _page_rows(base_addr, bytes_per_page, device_id, total_num_pages)
            local_pages = agent.prep_xfer_dlist("", rows, memory_type.value)
            metadata = bytes(agent.get_agent_metadata())
        backend = int(agent.backends[_BACKEND])
        return cls(
            agent, agent_name, tensor, base_addr, backend, device_id, metadata, reg_dlist, memory_type, local_pages
        )

    def to_metadata(self) -> TensorAgentMetadata:
        """Returns what a peer needs to know of this tensor, with its digest."""
        return sealed(
            TensorAgentMetadata(
                agent_name=self.agent_name,
                metadata=self.agent_metadata,
                base_addr=self.base_addr,
                device_id=self.device_id,
                region_bytes=self.tensor.numel() * self.tensor.element_size(),
            )
        )

    def add_peer(self, remote: TensorAgentMetadata) -> None:
        """Loads a peer's agent. The caller has checked every digest.

        Raises:
            AgentError: NIXL refuses the bytes, or finds another name in them.
        """
        with _refusals(f"agent {self.agent_name!r}: loading agent {remote.agent_name!r}"):
            found = self.agent.add_remote_agent(remote.metadata)
        name = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if name != remote.agent_name:
            self.agent.remove_remote_agent(name)
            raise AgentError(f"agent {self.agent_name!r}: the metadata of {remote.agent_name!r} is that of {name!r}")

    def remove_peer(self, agent_name: str) -> None:
        """Unloads a peer's agent. All handles and page lists made of it must be released before.

        Raises:
            AgentError: NIXL knows no such agent.
        """
        with _refusals(f"agent {self.agent_name!r}: unloading agent {agent_name!r}"):
            self.agent.remove_remote_agent(agent_name)

    def peer_pages(self, remote: TensorAgentMetadata, memory_type: MemoryType, total_num_pages: int) -> Pages:
        """Prepares the list of all pages of a loaded peer's tensor.

        Raises:
            AgentError: the pages are not within the memory that the peer has registered.
        """
        rows = _page_rows(remote.base_addr, remote.region_bytes // total_num_pages, remote.device_id, total_num_pages)
        with _refusals(f"agent {self.agent_name!r}: preparing the pages of {remote.agent_name!r}"):
            return self.agent.prep_xfer_dlist(remote.agent_name, rows, memory_type.value)

    def release_pages(self, pages: Pages) -> None:
        """Releases a page list. No transfer over it may be in flight.

        Raises:
            AgentError: NIXL refuses.
        """
        with _refusals(f"agent {self.agent_name!r}: releasing a page list"):
            pages.release()

    def post(
        self,
        is_read: bool,
        local_idxs: npt.NDArray[np.int32],
        remote: Pages,
        remote_idxs: npt.NDArray[np.int32],
        note: bytes,
    ) -> tuple[Handle, bool]:
        """Starts a transfer between pages of this tensor and a peer's.

        NIXL merges pairs that follow each other on both sides into one copy, so sorted pairs are faster.

        Args:
            is_read: READ into our pages; else WRITE into the peer's.
            local_idxs: int32 `[pairs]`, our pages.
            remote: the peer's page list.
            remote_idxs: int32 `[pairs]`, the peer's pages.
            note: what the peer is told once all bytes have arrived.

        Returns:
            The handle, and whether the transfer has ended already.

        Raises:
            AgentError: NIXL refuses, or the peer is gone. There is no handle then.
        """
        doing = f"agent {self.agent_name!r}: posting {len(local_idxs)} pages"
        with _refusals(doing):
            handle = self.agent.make_prepped_xfer(
                "READ" if is_read else "WRITE", self.local_pages, local_idxs, remote, remote_idxs, note
            )
        try:
            state = self.agent.transfer(handle)
        except _errors() as error:
            self.release(handle)
            raise _wrapped(doing, error) from error
        return handle, state == "DONE"

    def done(self, handle: Handle) -> bool:
        """Tells whether a transfer has ended well. Also moves it on, and sends its notification when it has.

        Raises:
            AgentError: the transfer ended in an error. The handle is to be released.
        """
        try:
            return self.agent.check_xfer_state(handle) == "DONE"
        except _errors() as error:
            raise _wrapped(f"agent {self.agent_name!r}: transfer", error) from error

    def release(self, handle: Handle) -> None:
        """Releases a handle, for the last use of it. A copy in flight is not stopped by that.

        Raises:
            AgentError: NIXL refuses.
        """
        with _refusals(f"agent {self.agent_name!r}: releasing a transfer"):
            handle.release()

    def notifications(self) -> list[tuple[str, bytes]]:
        """Returns the (agent name, message) pairs that came in since the last call. Also serves peers' transfers.

        The agent name is what the sender wrote: nothing proves it.

        Raises:
            AgentError: NIXL fails.
        """
        try:
            arrived: dict[str, list[bytes]] = self.agent.get_new_notifs()
        except _errors() as error:
            raise _wrapped(f"agent {self.agent_name!r}: notifications", error) from error
        return [(sender, message) for sender, messages in arrived.items() for message in messages]

    def close(self, *, in_flight: bool = False) -> None:
        """Destroys the NIXL agent. Safe to call twice. Every handle and every peer's page list is released before.

        Waits for a copy that its worker thread is at, and lets no byte move afterwards: the last barrier before the
        memory of a transfer that never ended can be used again.

        Args:
            in_flight: a handle was released before its transfer had ended. Memory is then given back by the agent's
                own destructor, after its worker has stopped: earlier, the worker would use it after it is freed.

        Raises:
            AgentError: NIXL failed to give something back. The agent is gone all the same.
        """
        agent, self.agent = self.agent, None
        pages, self.local_pages = self.local_pages, None
        registered, self.reg_dlist = self.reg_dlist, None
        if agent is None or in_flight:
            return
        with _refusals(f"closing agent {self.agent_name!r}"):
            if pages is not None:
                pages.release()
            agent.deregister_memory(registered)
