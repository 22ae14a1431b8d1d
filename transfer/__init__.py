"""Moves KV cache pages between processes through NIXL."""

from transfer.engine import KVTransferEngine
from transfer.errors import (
    AgentError,
    AlreadyConnectedError,
    EngineClosedError,
    InvalidEngineError,
    InvalidTransferError,
    MetadataError,
    NoFreePortError,
    PeerFailedError,
    SettingsMismatchError,
    TransferError,
    TransferFailedError,
    TransferIncompleteError,
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

__all__ = [
    "WIRE_VERSION",
    "AgentError",
    "AlreadyConnectedError",
    "EngineClosedError",
    "InvalidEngineError",
    "InvalidTransferError",
    "KVTransferEngine",
    "KVTransferEngineMetadata",
    "MemoryType",
    "MetadataError",
    "NoFreePortError",
    "PeerFailedError",
    "SettingsMismatchError",
    "TensorAgent",
    "TensorAgentMetadata",
    "TransferError",
    "TransferFailedError",
    "TransferIncompleteError",
    "TransferReqData",
    "TransferTimeoutError",
    "UnknownPeerError",
    "UnknownTransferError",
    "available_port",
    "decode_metadata",
    "decode_request",
    "encode",
    "settings_fingerprint",
]
