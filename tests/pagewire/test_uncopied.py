"""No object that owns or names live pages can be copied, pickled or sent to another process."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from contextlib import suppress

import pytest

import pagewire
from kvcache import InvalidRequestError, TextContext
from kvcache.replica.copier import ImportCopier
from kvcache.uncopied import Uncopied
from tests.kvcache.build import manager_of

LIVE = {
    *("Batch", "ImportCopier", "KVTransferEngine", "NixlConnectorScheduler", "NixlConnectorWorker", "PageExchange"),
    *("PageLease", "PagedKVCacheManager", "PendingImport", "ServingLoop", "StatePages", "StepInFlight"),
}
# Classes of values, of options and of parts that hold no pages. A new public class belongs to this list or to `LIVE`.
VALUES = {
    *(
        "Admission",
        "BlockTable",
        "ConnectorMetadata",
        "Context",
        "DraftGroup",
        "SinkGroup",
        "EngineCard",
        "EvictionOrder",
        "ExchangeEvent",
    ),
    *("GroupConfig", "GroupTable", "ImportProof", "KVCacheMetrics", "KVCacheParams", "KVCacheQuantizationConfig"),
    *("KVEvents", "KVTransferEngineMetadata", "LayerGroup", "LayerTables", "LeaseOver", "LeaseRef", "Lent"),
    *("LoadRequest", "LruOrder", "MemoryType", "ModelRunner", "NixlObjects", "Offered", "Output", "PageCopy"),
    *("PageDigests", "PageLayout", "PagedGenerator", "Pages", "Progress", "Prompt", "PullEvent", "PulledPages"),
    *("RaggedKVCacheInputSymbols", "RaggedKVCacheInputs", "RangeRetention", "Recovered", "Request", "RequestID"),
    *("Retention", "Routing", "SendRequest", "Source", "StatePart", "StateShape", "TensorAgent"),
    *("TensorAgentMetadata", "TextContext", "Timing", "TransferReqData", "Wanted", "WorkerConfig", "WorkerOutput"),
}


def _copied_by_spawn(given: object) -> None:
    multiprocessing.get_context("spawn").Process(target=print, args=(given,)).start()


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "spawn": _copied_by_spawn}


def test_every_public_class_is_live_or_a_value() -> None:
    public = {name for name in pagewire.__all__ if inspect.isclass(getattr(pagewire, name))}
    errors = {name for name in public if issubclass(getattr(pagewire, name), Exception)}
    assert public - errors == LIVE | VALUES
    for name in LIVE:
        assert issubclass(getattr(pagewire, name), Uncopied), name


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_a_manager_makes_is_not_copied(way: Callable[[object], object]) -> None:
    source, manager = manager_of(), manager_of()
    with source.claim(context := TextContext(range(9), 40, "r")):
        assert source.maybe_reserve(context)
        step = source.fetch_ahead([context])
        context.update(1)
        source.step([context])
        source.end_step(step)
        lease = source.lease("r")
        manager.external_claim("r")
        pending = manager.import_block_table(TextContext(range(11), 40, "r"), source.block_table("r"))
        assert pending is not None
        copier = manager.copier(pending)
        assert isinstance(copier, ImportCopier)
        for live in (source, source.batch([context]), step, lease, pending, copier, source.contents):
            with pytest.raises(InvalidRequestError, match=f"a {type(live).__name__} cannot be copied"):
                way(live)
        source.end_lease(lease)
        copier.give_up()
        manager.cancel_import(pending)
    manager.release("r")
    for one in (source, manager):
        one.check()
        with suppress(InvalidRequestError):
            one.close()
