"""vLLM's router sends each prompt to the manager with most of its pages, through evictions, restarts and losses."""

from __future__ import annotations

import asyncio

import pytest

from tests.kvcache.events.routed import ROUTER, route

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")]


@pytest.mark.parametrize("pd", [False, True], ids=["workers", "prefill and decode"])
def test_each_prompt_is_sent_to_the_manager_with_most_of_its_pages(pd: bool) -> None:
    routed = asyncio.run(route(2, 40, 2, seed=1, requests=60, losses=False, pd=pd))
    assert routed.differences == []
    assert routed.seen["one holder"] > 10
    assert routed.seen["evictions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("managers", [2, 8])
def test_a_thousand_prompts_are_sent_to_the_right_manager(managers: int) -> None:
    routed = asyncio.run(route(managers, 1000, 10, seed=0, losses=True, pd=False))
    assert routed.differences == []
    assert routed.seen["one holder"] > 500
    assert min(routed.seen[what] for what in ("evictions", "restarts", "lost")) > 0
