"""Moves KV cache pages between processes through NIXL."""

from transfer.companion import Progress, TransferCompanion
from transfer.connector_metadata import ConnectorMetadata, LoadRequest, SendRequest, WorkerOutput
from transfer.engine import KVTransferEngine
from transfer.errors import (
    AgentError,
    AlreadyConnectedError,
    EngineClosedError,
    HandshakeError,
    InvalidEngineError,
    InvalidLeaseError,
    InvalidTransferError,
    MetadataError,
    NoFreePortError,
    PeerFailedError,
    PullFailedError,
    SettingsMismatchError,
    TransferError,
    TransferFailedError,
    TransferIncompleteError,
    TransferParamsError,
    TransferTimeoutError,
    UnknownPeerError,
    UnknownTransferError,
)
from transfer.metadata import (
    WIRE_VERSION,
    KVTransferEngineMetadata,
    MemoryType,
    TensorAgentMetadata,
    TransferReqData,
    decode_metadata,
    decode_request,
    encode,
)
from transfer.ports import available_port
from transfer.settings import settings_fingerprint
from transfer.tensor_agent import TensorAgent
from transfer.transfer_params import RemotePages
from transfer.worker import NixlConnectorWorker
from transfer.worker_config import GroupConfig, StatePart, Timing, WorkerConfig

__all__ = [
    "WIRE_VERSION",
    "AgentError",
    "AlreadyConnectedError",
    "ConnectorMetadata",
    "EngineClosedError",
    "GroupConfig",
    "HandshakeError",
    "InvalidEngineError",
    "InvalidLeaseError",
    "InvalidTransferError",
    "KVTransferEngine",
    "KVTransferEngineMetadata",
    "LoadRequest",
    "MemoryType",
    "MetadataError",
    "NixlConnectorWorker",
    "NoFreePortError",
    "PeerFailedError",
    "Progress",
    "PullFailedError",
    "RemotePages",
    "SendRequest",
    "SettingsMismatchError",
    "StatePart",
    "TensorAgent",
    "TensorAgentMetadata",
    "Timing",
    "TransferCompanion",
    "TransferError",
    "TransferFailedError",
    "TransferIncompleteError",
    "TransferParamsError",
    "TransferReqData",
    "TransferTimeoutError",
    "UnknownPeerError",
    "UnknownTransferError",
    "WorkerConfig",
    "WorkerOutput",
    "available_port",
    "decode_metadata",
    "decode_request",
    "encode",
    "settings_fingerprint",
]
