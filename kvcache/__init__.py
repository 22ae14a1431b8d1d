"""A paged KV cache: pages, block tables, a prefix index, and the manager that a serving loop drives.

Imports no other package of the project. Start reading at `manager.py`, which callers use, and `replica/replica.py`,
which has the rules. `docs/concepts/architecture.md` describes the modules.
"""

from importlib.metadata import distributions

from kvcache.copies import page_rows
from kvcache.errors import (
    AlreadyClaimedError,
    BlockTableMismatchError,
    InterruptedCallError,
    InvalidParamsError,
    InvalidRequestError,
    InvariantError,
    KVCacheError,
    ManagerClosedError,
    MovedMemoryError,
    NoFreeRowError,
    NoFreeStatePageError,
    NotReservedError,
    PoolTooSmallError,
    PromptTooLongError,
    SequenceTooLongError,
    StatePageError,
    UnknownArgumentError,
    UnknownRequestError,
    WeightsChangedError,
)
from kvcache.eviction_order import EvictionOrder
from kvcache.layer_groups import GroupTable, LayerGroup, LayerTables
from kvcache.layout import PageLayout
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVCacheParams, KVCacheQuantizationConfig, KVEvents, Routing, StateShape
from kvcache.pool.lru_order import LruOrder
from kvcache.recovery import Recovered
from kvcache.replica.batch import Batch
from kvcache.replica.block_table import BlockTable, PageCopy, PageDigests, PendingImport
from kvcache.replica.context import FUTURE_TOKEN, Context, TextContext
from kvcache.replica.copier import ImportCopier, ImportProof
from kvcache.replica.draft import DraftGroup
from kvcache.replica.hashing import SHA256_BY
from kvcache.replica.inputs import RaggedKVCacheInputSymbols
from kvcache.replica.leases import PageLease
from kvcache.replica.sinks import SinkGroup
from kvcache.retention import RangeRetention, Retention
from kvcache.states.state_pages import StatePages
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import Admission, KVCacheMetrics, RaggedKVCacheInputs, RequestID
from kvcache.weights_digest import weights_of

# The version is "unknown" if the package runs from a folder and was never installed.
__version__ = next((found.version for found in distributions(name="pagewire")), "unknown")

__all__ = [
    "FUTURE_TOKEN",
    "SHA256_BY",
    "Admission",
    "AlreadyClaimedError",
    "Batch",
    "BlockTable",
    "BlockTableMismatchError",
    "Context",
    "DraftGroup",
    "EvictionOrder",
    "GroupTable",
    "ImportCopier",
    "ImportProof",
    "InterruptedCallError",
    "InvalidParamsError",
    "InvalidRequestError",
    "InvariantError",
    "KVCacheError",
    "KVCacheMetrics",
    "KVCacheParams",
    "KVCacheQuantizationConfig",
    "KVEvents",
    "LayerGroup",
    "LayerTables",
    "LruOrder",
    "ManagerClosedError",
    "MovedMemoryError",
    "NoFreeRowError",
    "NoFreeStatePageError",
    "NotReservedError",
    "PageCopy",
    "PageDigests",
    "PageLayout",
    "PageLease",
    "PagedKVCacheManager",
    "PendingImport",
    "PoolTooSmallError",
    "PromptTooLongError",
    "RaggedKVCacheInputSymbols",
    "RaggedKVCacheInputs",
    "RangeRetention",
    "Recovered",
    "RequestID",
    "Retention",
    "Routing",
    "SequenceTooLongError",
    "SinkGroup",
    "StatePageError",
    "StatePages",
    "StateShape",
    "StepInFlight",
    "TextContext",
    "UnknownArgumentError",
    "UnknownRequestError",
    "WeightsChangedError",
    "__version__",
    "page_rows",
    "weights_of",
]
