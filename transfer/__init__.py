"""Moves KV cache pages between processes through NIXL.

Imports `kvcache`: only its errors, checks of arguments, page layouts, block tables and the module that renders
metrics. Start reading at `docs/guides/prefill-decode.md`, then `pull/exchange.py`, where a hand-over begins,
`pull/lease.py` and `pull/pull.py`.
"""

from transfer.connector.config import GroupConfig, StatePart, Timing, WorkerConfig
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, Progress, SendRequest, WorkerOutput
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.engine.engine import KVTransferEngine
from transfer.engine.metadata import (
    WIRE_VERSION,
    KVTransferEngineMetadata,
    TensorAgentMetadata,
    TransferReqData,
    decode_metadata,
    decode_request,
    encode,
)
from transfer.engine.ports import available_port
from transfer.engine.tensor_agent import TensorAgent
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
from transfer.memory import MemoryType
from transfer.nixl.object_io import NixlObjects
from transfer.nixl.settings import settings_fingerprint
from transfer.pull.asking import Lent
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.lease import LeaseRef
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard
from transfer.wire.messages import Wanted
from transfer.wire.prompt import Prompt

__all__ = [
    "WIRE_VERSION",
    "AgentError",
    "AlreadyConnectedError",
    "ConnectorMetadata",
    "EngineCard",
    "EngineClosedError",
    "ExchangeEvent",
    "GroupConfig",
    "HandshakeError",
    "InvalidEngineError",
    "InvalidLeaseError",
    "InvalidTransferError",
    "KVTransferEngine",
    "KVTransferEngineMetadata",
    "LeaseOver",
    "LeaseRef",
    "Lent",
    "LoadRequest",
    "MemoryType",
    "MetadataError",
    "NixlConnectorScheduler",
    "NixlConnectorWorker",
    "NixlObjects",
    "NoFreePortError",
    "Offered",
    "PageExchange",
    "PeerFailedError",
    "Progress",
    "Prompt",
    "PullEvent",
    "PullFailedError",
    "SendRequest",
    "SettingsMismatchError",
    "Source",
    "StatePart",
    "TensorAgent",
    "TensorAgentMetadata",
    "Timing",
    "TransferError",
    "TransferFailedError",
    "TransferIncompleteError",
    "TransferParamsError",
    "TransferReqData",
    "TransferTimeoutError",
    "UnknownPeerError",
    "UnknownTransferError",
    "Wanted",
    "WorkerConfig",
    "WorkerOutput",
    "available_port",
    "decode_metadata",
    "decode_request",
    "encode",
    "settings_fingerprint",
]
