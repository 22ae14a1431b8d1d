"""The table in `docs/guides/routers.md` says what real routers and our front count."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.kvcache.events.routed import ROUTER
from tests.scheduler_adapters.front.routers import CASES, MEASURED, all_counts, sent

pytest.importorskip("dynamo.llm")


def test_dynamo_and_the_front_count_what_the_table_says() -> None:
    written = json.loads(MEASURED.read_text())
    found = asyncio.run(all_counts())
    assert found == {name: {key: one[key] for key in found[name]} for name, one in written.items()}
    assert all(one["front"] in (one["server"], None) for one in found.values()), "the front is never wrong"


@pytest.mark.ci
@pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")
@pytest.mark.parametrize("name", CASES)
def test_vllms_router_follows_what_the_table_says(name: str) -> None:
    assert sent(name) is json.loads(MEASURED.read_text())[name]["router"]
