"""What the two roles of our connector tell each other each step. vLLM pickles it from process to process."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from transfer.connector.metadata import ConnectorMetadata, WorkerOutput


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work, from the scheduler to every worker.

    A worker sees leases and loads end that vLLM does not ask about (of requests that still run, or never came to wait):
    it reports the end of what is named here, and of nothing else. vLLM ends the engine where it is told of a request
    that it does not wait for.

    Attributes:
        step: leases and loads.
        parked: requests that vLLM has parked until a load of theirs is over.
        finished: requests whose blocks vLLM keeps until their lease is over.
        refused: of the parked, those that cannot be loaded: they fail without any load.
    """

    step: ConnectorMetadata = field(default_factory=ConnectorMetadata)
    parked: set[str] = field(default_factory=set[str])
    finished: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])


@dataclass
class WorkersMetadata(KVConnectorWorkerMetadata):
    """What the workers have to say after a step: each rank's output, in the order they came."""

    outputs: list[tuple[int, WorkerOutput]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both; a rank may be in it twice, where vLLM has kept what it said in a step that failed."""
        if not isinstance(other, WorkersMetadata):
            raise TypeError(f"metadata of {type(other).__name__} beside ours")
        return WorkersMetadata(self.outputs + other.outputs)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """What the engine's handshake server tells of one rank, and what must agree with a reader, as the rank knows it."""

    data: bytes
    fingerprint: dict[str, str]
