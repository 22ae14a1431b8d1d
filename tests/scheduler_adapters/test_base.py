"""The managers are what a scheduler is told to call: each name, with the same parameters."""

import inspect
from typing import Any

import pytest

from kvcache.manager import PagedKVCacheManager
from scheduler_adapters.base import Pages, PulledPages
from scheduler_adapters.hf.hybrid import HybridKVCacheManager
from tests.kvcache.build import manager_of

MEMBERS = {
    name: member
    for protocol in (Pages, PulledPages)
    for name, member in vars(protocol).items()
    if not name.startswith("_")
}
PROPERTIES = {name for name, member in MEMBERS.items() if isinstance(member, property)}


def parameters(call: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize("manager", [PagedKVCacheManager, HybridKVCacheManager])
@pytest.mark.parametrize("name", sorted(MEMBERS.keys() - PROPERTIES))
def test_a_manager_takes_what_its_protocol_says(manager: type[PagedKVCacheManager], name: str) -> None:
    assert parameters(getattr(manager, name)) == parameters(MEMBERS[name])


def test_a_manager_has_what_its_protocol_says() -> None:
    assert len(MEMBERS) > 15
    manager = manager_of()
    assert {type(getattr(manager, name)) for name in PROPERTIES - {"metrics"}} == {int}
    assert "metrics" in PROPERTIES
