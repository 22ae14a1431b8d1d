"""The events that SGLang publishes about our cache, read by a subscriber of its socket."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_engine.subscriber import Prefix, Subscriber
from tests.sglang_engine.test_engine import NEW, PROMPTS, submit_all


@pytest.fixture
def subscriber(engine: Any) -> Iterator[Subscriber]:
    made = Subscriber(engine)
    yield made
    made.close()


def compare(subscriber: Subscriber, engine: Any) -> set[Prefix]:
    """Checks that the cache finds exactly the reported pages, page by page."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    told = subscriber.catch_up()
    assert len(subscriber.held) == len(told) == engine.cache.total_size() // engine.page_size
    for salt, tokens in told:
        key = RadixKey(array("q", tokens), cache_salt=salt)
        assert engine.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == len(tokens)
    subscriber.flush()
    assert not subscriber.catch_up()
    return told


def test_the_published_events_describe_the_cached_pages(subscriber: Subscriber, engine: Any) -> None:
    submit_all(engine, PROMPTS)
    submit_all(engine, PROMPTS[:2], cache_salt="tenant")
    engine.run()
    assert {salt for salt, _ in compare(subscriber, engine)} == {None, "tenant"}


@pytest.mark.parametrize("seed", range(3))
def test_the_events_stay_right_through_evictions_retractions_and_aborts(
    subscriber: Subscriber, engine: Any, seed: int
) -> None:
    chance = random.Random(seed)
    evicted = 0
    for place in range(40):
        prompt = [*chance.choice(PROMPTS)[: chance.randrange(150)], *[place] * chance.randrange(1, 30)]
        engine.submit(f"r{place}", prompt, chance.randrange(1, 30), cache_salt=chance.choice([None, "a"]))
        for _ in range(chance.randrange(4)):
            engine.step()
        if chance.random() < 0.1:
            engine.abort(chance.choice(list(engine.requests)))
        evicted += engine.cache.evictable_size() == 0
    engine.run()
    told = compare(subscriber, engine)
    assert told
    assert evicted


def test_the_events_equal_those_of_sglangs_own_tree(
    subscriber: Subscriber, engine: Any, model_dir: Path, page_size: int
) -> None:
    requests = {f"r{place}": prompt for place, prompt in enumerate(PROMPTS[:4])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_engine.engine", str(model_dir), "--page-size", str(page_size), "--events"],
        input=json.dumps([requests, NEW]),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = {(salt, tuple(tokens)) for salt, tokens in json.loads(done.stdout.splitlines()[-1])}
    engine.cached_tokens(requests, NEW)
    assert compare(subscriber, engine) == theirs
