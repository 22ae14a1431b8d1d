"""A manager has every method of the scheduler's protocols, with the same parameters."""

import inspect
from typing import Any

import pytest

from kvcache.layer_groups import LayerTables
from kvcache.manager import PagedKVCacheManager
from kvcache.replica.contents import PageContents
from kvcache.types import KVCacheMetrics
from scheduler_adapters.base import Pages, PulledPages
from tests.kvcache.build import manager_of

MEMBERS: dict[str, Any] = {
    name: member
    for protocol in (Pages, PulledPages)
    for name, member in vars(protocol).items()
    if not name.startswith("_")
}
NAMES = sorted(name for name, member in MEMBERS.items() if inspect.isfunction(member))


def parameters(call: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_the_managers_take_the_parameters_of_the_protocol(name: str) -> None:
    assert parameters(getattr(PagedKVCacheManager, name)) == parameters(MEMBERS[name])


def test_the_managers_have_the_methods_of_the_protocol() -> None:
    assert len(NAMES) > 12
    manager = manager_of()
    asked = MEMBERS.keys() - {*NAMES}
    counts = {"num_replicas", "page_size", "longest_request", "slab_pages", "total_num_pages", "num_held_blocks"}
    assert asked == {*counts, "metrics", "contents", "layer_tables"}
    assert {type(getattr(manager, name)) for name in asked} == {int, KVCacheMetrics, PageContents, LayerTables}
