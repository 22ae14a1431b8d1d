"""Routers of the field follow our streams."""

from __future__ import annotations

import asyncio

import pytest

from tests.kvcache.events.followed import follow

pytest.importorskip("dynamo.llm")


def test_dynamos_selection_service_knows_what_two_managers_hold() -> None:
    followed = asyncio.run(follow(2, 200, rounds=3, seed=1, requests=60))
    assert followed.differences == []
    assert followed.seen["compared"] >= 200
    assert followed.seen["pages"] > 200


@pytest.mark.long
@pytest.mark.parametrize("managers", [2, 8])
def test_dynamos_selection_service_agrees_10_000_times(managers: int) -> None:
    followed = asyncio.run(follow(managers, 10_000, rounds=20, seed=0))
    assert followed.differences == []
    assert followed.seen["compared"] >= 10_000
    assert min(followed.seen[what] for what in ("evictions", "restarts", "resets", "lost")) > 0
