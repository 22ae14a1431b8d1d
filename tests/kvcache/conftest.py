from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache import PagedKVCacheManager
from kvcache.tiers import host_tier
from tests.kvcache.build import manager_of
from tests.kvcache.tiers.stored_objects import StoredObjects


@pytest.fixture
def make() -> Iterator[Callable[..., PagedKVCacheManager]]:
    """Returns a function that makes managers. After the test, all of these managers are checked and closed."""
    made: list[PagedKVCacheManager] = []

    def build(*args: Any, **kwargs: Any) -> PagedKVCacheManager:
        made.append(manager_of(*args, **kwargs))
        return made[-1]

    yield build
    for manager in made:
        manager.check()
        manager.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredObjects]:
    """Returns an object store that closes and checks every manager over it.

    After a failure, the managers leave it alone for so long that the pause does not end on a busy machine.
    """
    monkeypatch.setattr(host_tier, "PAUSE_S", 600.0)
    made = StoredObjects()
    yield made
    made.close()
