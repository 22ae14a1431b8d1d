"""One tensor of pages, registered with a NIXL agent of its own: what `KVTransferEngine` is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from transfer.engine.metadata import TensorAgentMetadata, sealed
from transfer.errors import InvalidEngineError
from transfer.memory import MemoryType
from transfer.nixl.agent import (
    BACKEND,
    Handle,
    is_done,
    load_peer,
    make_nixl_agent,
    refusals,
    start,
    take_notifications,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

Pages: TypeAlias = Any
"""A prepared list of NIXL's that describes every page of one tensor, ours or a peer's."""


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
        doing = f"making NIXL agent {agent_name!r}"
        if tensor.numel() != total_num_pages * elts_per_page:
            raise InvalidEngineError(
                f"{doing}: {total_num_pages} pages of {elts_per_page} elements are not the tensor's {tensor.numel()}"
            )
        agent = make_nixl_agent(agent_name, listen_port, memory_type)
        base_addr, device_id = tensor.data_ptr(), max(tensor.get_device(), 0)
        bytes_per_page = elts_per_page * tensor.element_size()
        region = [(base_addr, total_num_pages * bytes_per_page, device_id, "")]
        with refusals(doing):
            reg_dlist = agent.register_memory(region, memory_type.value)
            rows = _page_rows(base_addr, bytes_per_page, device_id, total_num_pages)
            local_pages = agent.prep_xfer_dlist("", rows, memory_type.value)
            metadata = bytes(agent.get_agent_metadata())
        backend = int(agent.backends[BACKEND])
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
        load_peer(self.agent, self.agent_name, remote.agent_name, remote.metadata)

    def remove_peer(self, agent_name: str) -> None:
        """Unloads a peer's agent. All handles and page lists made of it must be released before.

        Raises:
            AgentError: NIXL knows no such agent.
        """
        with refusals(f"agent {self.agent_name!r}: unloading agent {agent_name!r}"):
            self.agent.remove_remote_agent(agent_name)

    def peer_pages(self, remote: TensorAgentMetadata, memory_type: MemoryType, total_num_pages: int) -> Pages:
        """Prepares the list of all pages of a loaded peer's tensor.

        Raises:
            AgentError: the pages are not within the memory that the peer has registered.
        """
        rows = _page_rows(remote.base_addr, remote.region_bytes // total_num_pages, remote.device_id, total_num_pages)
        with refusals(f"agent {self.agent_name!r}: preparing the pages of {remote.agent_name!r}"):
            return self.agent.prep_xfer_dlist(remote.agent_name, rows, memory_type.value)

    def release_pages(self, pages: Pages) -> None:
        """Releases a page list. No transfer over it may be in flight.

        Raises:
            AgentError: NIXL refuses.
        """
        with refusals(f"agent {self.agent_name!r}: releasing a page list"):
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
        with refusals(doing):
            handle = self.agent.make_prepped_xfer(
                "READ" if is_read else "WRITE", self.local_pages, local_idxs, remote, remote_idxs, note
            )
        return handle, start(self.agent, self.agent_name, handle)

    def done(self, handle: Handle) -> bool:
        """Tells whether a transfer has ended well. Also moves it on, and sends its notification when it has.

        Raises:
            AgentError: the transfer ended in an error. The handle is to be released.
        """
        return is_done(self.agent, self.agent_name, handle)

    def release(self, handle: Handle) -> None:
        """Releases a handle, for the last use of it. A copy in flight is not stopped by that.

        Raises:
            AgentError: NIXL refuses.
        """
        with refusals(f"agent {self.agent_name!r}: releasing a transfer"):
            handle.release()

    def notifications(self) -> list[tuple[str, bytes]]:
        """Returns the (agent name, message) pairs that came in since the last call. Also serves peers' transfers.

        The agent name is what the sender wrote: nothing proves it.

        Raises:
            AgentError: NIXL fails.
        """
        return take_notifications(self.agent, self.agent_name)

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
        with refusals(f"closing agent {self.agent_name!r}"):
            if pages is not None:
                pages.release()
            agent.deregister_memory(registered)
