"""vLLM's router learns from the event streams which manager has the pages of a prompt, and sends the prompt to this
manager.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcache import KVEvents, PagedKVCacheManager
from kvcache.events.log import HOST
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.events.mirror import indexes_of, settled
from tests.kvcache.events.routed import PATIENCE_S, ROUTER, Router, Server

ANY = "tcp://127.0.0.1:0"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")]


class Holders:
    """Two managers, a server for each manager, and the router in front of the servers."""

    def __init__(self, log: Path) -> None:
        self.managers = [manager_of(64, params={"kv_events": KVEvents(ANY, ANY)}, host_slots=64) for _ in range(2)]
        self.servers = [Server(f"w{number}") for number in range(2)]
        streams = [manager.kv_event_endpoints[0] for manager in self.managers]
        self.router = Router({server.url: told for server, told in zip(self.servers, streams, strict=True)}, log)

    def until(self, tokens: list[int], who: str) -> None:
        """Waits until prompts with this beginning are sent to this manager."""
        deadline = time.monotonic() + PATIENCE_S
        while any(self.router.ask([*tokens, 7, nth]) != who for nth in range(3)):
            assert self.router.process.poll() is None, self.router.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.router.ask(tokens)}: {self.router.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def run(self, number: int, tokens: list[int]) -> None:
        manager: PagedKVCacheManager = self.managers[number]
        run_once(manager, tokens)
        settled(manager)

    def close(self) -> None:
        self.router.close()
        for server in self.servers:
            server.close()
        for manager in self.managers:
            manager.close()


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[Holders]:
    made = Holders(tmp_path / "router.log")
    yield made
    made.close()


def held(manager: PagedKVCacheManager, tier: int) -> set[bytes]:
    """Returns the digests that can be found in a tier. Tier 0 is the pool of the first replica."""
    index = indexes_of(manager, 0)[tier]
    return {one.tobytes() for one in index.digests_of(np.flatnonzero(index.published).astype(np.int32))}


def test_prompts_are_sent_to_the_manager_that_has_them_also_if_only_in_its_host_tier(holders: Holders) -> None:
    prompts = [[*range(1000, 1064)], [*range(2000, 2064)]]
    for number, tokens in enumerate(prompts):
        holders.run(number, tokens)
    pages = held(holders.managers[0], 0)
    assert len(pages) == 16
    for number, tokens in enumerate(prompts):
        holders.until(tokens, f"w{number}")
        assert Counter(holders.router.ask([*tokens, 9, nth]) for nth in range(10)) == {f"w{number}": 10}
    # The first manager's pool evicts the pages of the first prompt. Its host tier keeps them.
    holders.managers[0].flush_tiers()
    for start in range(3000, 3400, 100):
        holders.run(0, [*range(start, start + 64)])
    assert not pages & held(holders.managers[0], 0), "evicted"
    assert pages <= held(holders.managers[0], HOST)
    holders.until(prompts[0], "w0")
    assert Counter(holders.router.ask([*prompts[0], 11, nth]) for nth in range(10)) == {"w0": 10}
