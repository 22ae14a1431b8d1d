"""`pagewire top` over SGLang's real scheduler shows the cache as SGLang's state and pagewire's state describe it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache.endpoints import watch as endpoint
from kvcache.endpoints.follower import Followed, WatchClient
from kvcache.watch.messages import Look, PageState, owners_of, request_digest, states_of
from tests.sglang_engine.test_engine import NEW, PROMPTS, submit_all


class Watcher:
    """A client that watches the scheduler of this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.client = WatchClient(engine.cache.watch.address)
        self.followed = Followed()

    def look(self, *, check: bool = False) -> Look:
        self.client.ask(msgspec.structs.replace(self.followed.ask, check=check))
        frames = self.client.answer(20.0)
        assert frames is not None
        return self.followed.apply(frames)

    def compare(self) -> Counter[PageState]:
        """Compares the view with the scheduler page by page, while the scheduler is at rest. Returns the number of
        pages in each state.
        """
        look, cache = self.look(), self.engine.cache
        cells = self.followed.cells["0"]
        free = set(self.engine.allocator.get_all_free_pages().tolist())
        locked = {page for prefix in cache._locks for page in prefix.pages.tolist()}
        rows = {name: set(self.engine.pages_of(name)) for name, req in self.engine.requests.items() if req.kv.holds_kv}
        names = dict(zip(look.owners.numbers, look.owners.request_ids, strict=True))
        states, owners = states_of(cells).tolist(), owners_of(cells).tolist()
        for page in range(1, len(cells)):
            if page in free:
                wanted = PageState.FREE
            elif cache.pool.index.published[page] and page not in locked:
                wanted = PageState.IDLE
            else:
                wanted = PageState.HELD
            assert states[page] == wanted, page
            having = {name for name, pages in rows.items() if page in pages}
            assert bool(owners[page]) == bool(having and wanted == PageState.HELD), page
            assert not owners[page] or names[owners[page]] in map(request_digest, having), page
        return Counter(map(PageState, states[1:]))


@pytest.fixture
def watcher(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    from scheduler_adapters.sglang.settings import read_settings
    from scheduler_adapters.sglang.watch import watch

    monkeypatch.setattr(endpoint, "_LEAST_S", 0.0)
    monkeypatch.setattr(endpoint, "_SHARE", 1e6)
    watch(engine.cache, read_settings({}))
    assert engine.cache.watch is None, "no watch was requested"
    watch(engine.cache, read_settings({"PAGEWIRE_WATCH": "tcp://127.0.0.1:0"}))
    made = Watcher(engine)
    yield made
    made.client.close()
    engine.cache.watch.close()
    engine.cache.watch = None


@pytest.mark.parametrize("seed", range(3))
def test_every_page_is_shown_as_sglang_and_the_cache_describe_it(watcher: Watcher, engine: Any, seed: int) -> None:
    chance, seen = random.Random(seed), Counter[PageState]()
    phases = set[str]()
    for place in range(30):
        prompt = [*chance.choice(PROMPTS)[: chance.randrange(150)], *[place] * chance.randrange(1, 30)]
        engine.submit(f"r{place}", prompt, chance.randrange(1, 30), cache_salt=chance.choice([None, "a"]))
        for _ in range(chance.randrange(4)):
            engine.step()
            seen += watcher.compare()
            assert watcher.followed.look is not None
            phases |= set(watcher.followed.look.owners.phases)
        if chance.random() < 0.1:
            engine.abort(chance.choice(list(engine.requests)))
    engine.run()
    assert not watcher.compare()[PageState.HELD]
    assert {"prompt", "decoding"} <= phases <= {"waiting", "prompt", "decoding"}
    assert min(seen[state] for state in (PageState.FREE, PageState.IDLE, PageState.HELD)) > 20


def test_the_tree_evictions_and_recounts_are_shown(watcher: Watcher, engine: Any, page_size: int) -> None:
    look = watcher.look()
    assert look.page_size == page_size
    assert look.page_bytes > 0
    submit_all(engine, PROMPTS)
    engine.run()
    submit_all(engine, PROMPTS)
    engine.run()
    tree = watcher.look().tree
    assert sum(row.pages for row in tree) == engine.cache.total_size() // page_size
    assert max(row.hits for row in tree) > 0, "the pages must be found when the prompts come again"
    for number in range(20):
        engine.submit(f"new {number}", [number] * 60, 1)
        engine.run()
    look = watcher.look(check=True)
    assert look.evicted["LRU"][0] == engine.cache.pool.evictions > 0
    assert look.check is None, "the loop must not have done the check yet"
    engine.submit("one more", [1, 2, 3], 1)
    engine.run()
    report = watcher.look().check
    assert report is not None
    assert report.error == ""


def test_after_a_flush_the_watch_continues_with_the_new_pool(watcher: Watcher, engine: Any) -> None:
    engine.submit("first", PROMPTS[0], NEW)
    engine.run()
    assert watcher.compare()[PageState.IDLE] > 0
    before = watcher.followed.look
    assert engine.scheduler.flush_cache()
    assert not watcher.compare()[PageState.IDLE]
    after = watcher.followed.look
    assert before is not None
    assert after is not None
    assert after.incarnation != before.incarnation
    engine.submit("again", PROMPTS[0], NEW)
    engine.run()
    assert watcher.compare()[PageState.IDLE] > 0
    assert len(watcher.look().tree) > 0, "the new pool must be recorded"
    assert np.flatnonzero(owners_of(watcher.followed.cells["0"])).size == 0
