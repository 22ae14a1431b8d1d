from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvcache import LayerGroup
from tests.kvcache.replica.tables_below import WINDOW, Make
from tests.kvcache.served import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterable[Make]:
    """Returns a function that makes managers with several block tables, a host tier and files. After the test, the
    managers are checked and closed.
    """
    made: list[Served] = []

    def make(
        pages: int = 40,
        host_slots: int = 80,
        groups: tuple[LayerGroup, ...] = WINDOW,
        *,
        files: bool = False,
        key: str = "model",
        **options: Any,
    ) -> Served:
        layers = sum(len(group.layers) for group in groups)
        params = {"groups": groups, **options.pop("params", {})}
        if files:
            params |= {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3, "file_tier_key": key}
        made.append(Served(pages, host_slots, layers=layers, params=params, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()
