"""One tensor of pages, registered with its own NIXL agent. `KVTransferEngine` has one for each shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcache.unmoved import Unmoved
from transfer.engine.metadata import TensorAgentMetadata
from transfer.errors import InvalidEngineError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent

_BACKGROUND_RUNS = 8


@dataclass(eq=False)
class TensorAgent:
    """One tensor, registered with its own NIXL agent.

    Attributes:
        agent: the NIXL agent.
        agent_name: name of the agent, which is never used twice.
        tensor: the tensor. It is kept here so that its memory outlives the registration.
        base_addr: address of page 0.
        ucx_backend: NIXL's handle for the UCX backend.
        device_id: index of the device; 0 for host memory.
        agent_metadata: metadata that another NIXL agent loads in order to reach this agent.
        reg_dlist: NIXL's record of the registration.
        unmoved: keeps the tensor at its address.
    """

    agent: Agent
    agent_name: str
    tensor: torch.Tensor
    base_addr: int
    ucx_backend: int
    device_id: int
    agent_metadata: bytes
    reg_dlist: Any
    unmoved: Unmoved

    @classmethod
    def create_agent(
        cls,
        agent_name: str,
        listen_port: int,  # noqa: ARG003  (documented)
        tensor: torch.Tensor,
        total_num_pages: int,
        elts_per_page: int,
        memory_type: MemoryType,
    ) -> TensorAgent:
        """Creates a NIXL agent, and registers the tensor's memory with it. The first call imports nixl.

        Args:
            agent_name: a name that no agent has had before.
            listen_port: ignored; pass 0. No listener is started, because it would answer any process on any interface.
                The metadata travels in our own messages instead.
            tensor: a tensor of any dtype. Its elements must cover one dense range of memory, page after page.
            total_num_pages: pages of the tensor.
            elts_per_page: elements per page.
            memory_type: DRAM for a tensor on the CPU, VRAM for one on a GPU.

        Raises:
            InvalidEngineError: the tensor has a different number of elements.
            AgentError: nixl is missing, or refuses the settings, the memory or its type.
        """
        if tensor.numel() != total_num_pages * elts_per_page:
            raise InvalidEngineError(
                f"making NIXL agent {agent_name!r}: {total_num_pages} pages of {elts_per_page} elements do not fill "
                f"the tensor's {tensor.numel()} elements"
            )
        agent = Agent(agent_name, memory_type, background_runs=_BACKGROUND_RUNS)
        base, device = tensor.data_ptr(), max(tensor.get_device(), 0)
        registered = agent.register([(base, tensor.nbytes, device)])
        unmoved = Unmoved({f"the tensor of agent {agent_name!r}": tensor})
        return cls(agent, agent_name, tensor, base, agent.backend, device, agent.metadata, registered, unmoved)

    def to_metadata(self) -> TensorAgentMetadata:
        """Returns the metadata of this tensor for a peer."""
        return TensorAgentMetadata(
            agent_name=self.agent_name,
            metadata=self.agent_metadata,
            base_addr=self.base_addr,
            device_id=self.device_id,
        )
