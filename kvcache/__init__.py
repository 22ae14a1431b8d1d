"""A paged KV cache: pages, block tables, a prefix index, and the manager that a serving loop drives."""

from kvcache.batch import Batch
from kvcache.block_table import BlockTable
from kvcache.context import Context, TextContext
from kvcache.copier import ImportCopier, ImportProof
from kvcache.errors import (
    AlreadyClaimedError,
    BlockTableMismatchError,
    InvalidParamsError,
    InvalidRequestError,
    InvariantError,
    KVCacheError,
    NoFreeRowError,
    NotReservedError,
    PoolTooSmallError,
    PromptTooLongError,
    SequenceTooLongError,
    UnknownArgumentError,
    UnknownRequestError,
)
from kvcache.inputs import RaggedKVCacheInputSymbols
from kvcache.layout import PageLayout
from kvcache.leases import PageLease
from kvcache.manager import PagedKVCacheManager
from kvcache.metrics import KVCacheMetrics
from kvcache.params import KVCacheParams
from kvcache.pending import PageCopy, PendingImport
from kvcache.routing import Routing
from kvcache.types import Admission, RaggedKVCacheInputs, RangeRetention, RequestID, Retention

__all__ = [
    "Admission",
    "AlreadyClaimedError",
    "Batch",
    "BlockTable",
    "BlockTableMismatchError",
    "Context",
    "ImportCopier",
    "ImportProof",
    "InvalidParamsError",
    "InvalidRequestError",
    "InvariantError",
    "KVCacheError",
    "KVCacheMetrics",
    "KVCacheParams",
    "NoFreeRowError",
    "NotReservedError",
    "PageCopy",
    "PageLayout",
    "PageLease",
    "PagedKVCacheManager",
    "PendingImport",
    "PoolTooSmallError",
    "PromptTooLongError",
    "RaggedKVCacheInputSymbols",
    "RaggedKVCacheInputs",
    "RangeRetention",
    "RequestID",
    "Retention",
    "Routing",
    "SequenceTooLongError",
    "TextContext",
    "UnknownArgumentError",
    "UnknownRequestError",
]
