"""A caller may make public objects with wrong values. Such objects can still be shown, compared and hashed, because a
log, a set or a debugger may use an object before a call refuses it.
"""

from __future__ import annotations

import pytest

import kvcache
import transfer
from tests.forged import public_classes, survives

# Classes whose constructors refuse every wrong value.
REFUSING = {
    *(kvcache.Batch, kvcache.Context, kvcache.EvictionOrder, kvcache.ImportCopier, kvcache.KVCacheParams),
    *(kvcache.LayerGroup, kvcache.PagedKVCacheManager, kvcache.RangeRetention, kvcache.StatePages, kvcache.StateShape),
    *(kvcache.PageLease, kvcache.StepInFlight, kvcache.SinkGroup, kvcache.DraftGroup),
    *(kvcache.TextContext, transfer.KVTransferEngine, transfer.MemoryType, transfer.NixlConnectorScheduler),
    *(transfer.NixlConnectorWorker, transfer.PageExchange),
}


@pytest.mark.parametrize(
    "kind", [*public_classes(kvcache), *public_classes(transfer)], ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)
def test_an_object_that_a_caller_has_forged_can_be_shown_compared_and_hashed(kind: type) -> None:
    assert bool(survives(kind)) != (kind in REFUSING)
