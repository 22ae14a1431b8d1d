"""The messages that the two roles of our connector exchange in each step. vLLM pickles them between processes."""

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
    """The work of one step, from the scheduler to every worker.

    vLLM stops the engine if a worker reports a request that vLLM does not wait for. A worker, however, also sees the
    end of leases and loads for which vLLM does not wait, for example because their requests still run. The worker
    therefore reports only the requests that a `StepMetadata` has named.

    Attributes:
        step: leases and loads.
        parked: requests that vLLM has parked until their load has ended.
        finished: requests whose blocks vLLM keeps until their lease has ended.
        refused: parked requests that cannot be loaded. They are reported as failed without a load.
        marker: the workers send this number back with the step's output, unless it is 0. When it has returned, all
            steps up to this one have ended, and write to no block any more.
        resets: how often vLLM's prefix cache had been reset before the last step that computed or kept anything.
        version: the name that the user has given to the current weights; empty if it has not changed.
    """

    step: ConnectorMetadata = field(default_factory=ConnectorMetadata)
    parked: set[str] = field(default_factory=set[str])
    finished: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])
    marker: int = 0
    resets: int = 0
    version: str = ""


@dataclass
class WorkersMetadata(KVConnectorWorkerMetadata):
    """The workers' reports after a step.

    Attributes:
        outputs: each rank's output, in order of arrival.
        marker: the marker of the step.
        changed_after: `StepMetadata.resets` of the last step before a worker's weights changed; -1 if none did.
    """

    outputs: list[tuple[int, WorkerOutput]]
    marker: int = 0
    changed_after: int = -1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Concatenates two reports.

        A rank can occur twice, because vLLM keeps a rank's report on a step that failed.
        """
        if not isinstance(other, WorkersMetadata):
            raise TypeError(f"got worker metadata of type {type(other).__name__}; WorkersMetadata is expected")
        return WorkersMetadata(
            self.outputs + other.outputs,
            max(self.marker, other.marker),
            max(self.changed_after, other.changed_after),
        )


@dataclass
class RankHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's metadata for the engine's handshake server, and the settings that must agree with a reader's.

    Attributes:
        data: from `NixlConnectorWorker.get_handshake_metadata`.
        fingerprint: the settings.
        incarnation: changes when the caches are registered anew.
        weights: as in `LoadedWeights.named`.
    """

    data: bytes
    fingerprint: dict[str, str]
    incarnation: str = ""
    weights: dict[str, str] = field(default_factory=dict[str, str])
