"""Pages of SGLang's real scheduler that are lent, and those that a pull fills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import BlockTableMismatchError
from kvcache.replica.block_table import PageDigests

PROMPT = [3 + place % 80 for place in range(100)]


@pytest.fixture
def pages(engine: Any) -> Any:
    from scheduler_adapters.sglang.cached_pages import CachedPages

    return CachedPages(engine.cache)


def queued(engine: Any, name: str, prompt: list[int], **fields: Any) -> Any:
    from scheduler_adapters.sglang.cached_pages import QueuedPrompt

    engine.submit(name, prompt, 2, **fields)
    return QueuedPrompt(engine.cache, engine.requests[name])


def evict_all(engine: Any) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine.cache.evict(EvictParams(num_tokens=1 << 20))


def computed(engine: Any, name: str, prompt: list[int]) -> bytes:
    """Computes a prompt. Returns the digests of its pages."""
    hashes = b"".join(queued(engine, name, prompt).block_hashes)
    engine.run()
    return hashes


def asked(engine: Any, digests: bytes, /, **changes: Any) -> PageDigests:
    return PageDigests(engine.page_size, "sha256", digests)._replace(**changes)


def test_held_pages_stay_until_they_are_freed(engine: Any, pages: Any) -> None:
    digests = computed(engine, "a", PROMPT)
    count = len(digests) // pages.hash_bytes
    first, again = pages.hold(asked(engine, digests), 99), pages.hold(asked(engine, digests), 2)
    assert first is not None
    assert again is not None
    assert (first.num_pages, again.num_pages) == (min(count, 99), 2)
    evict_all(engine)
    engine.cache.check()
    assert engine.cache.protected_size() == first.num_pages * engine.page_size
    assert pages.hold(asked(engine, digests), 99) is not None
    for held in (first, again, first):
        pages.free(held)
    engine.cache.check()
    evict_all(engine)
    assert pages.hold(asked(engine, digests), 99) is None
    assert pages.hold(asked(engine, digests), 0) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 7}, "pages of 7|but 7 by"),
        ({"hash_algorithm": "vllm sha256"}, "vllm sha256"),
        ({"digests": bytes(31)}, "are wanted"),
        ({"named": (("adapter 'x'", "files 1"),)}, "adapter 'x'"),
    ],
)
def test_pages_of_another_kind_are_refused(engine: Any, pages: Any, changes: dict[str, Any], words: str) -> None:
    digests = computed(engine, "a", PROMPT)
    with pytest.raises(BlockTableMismatchError, match=words):
        pages.hold(asked(engine, digests, **changes), 99)


def test_pages_that_a_pull_fills_are_counted_and_given_back(engine: Any, pages: Any) -> None:
    free = engine.allocator.available_size()
    most = free // engine.page_size // 2
    assert pages.take(0, most + 1) is None
    assert pages.take(3, 3) is None
    taken = pages.take(1, most + 1)
    assert taken is not None
    assert (taken.firsts, taken.end, len(set(taken.block_ids[0]))) == ((1,), most + 1, most)
    assert engine.cache.protected_size() == most * engine.page_size
    engine.step()  # SGLang finds no leak
    pages.give_up(taken)
    assert (engine.cache.protected_size(), engine.allocator.available_size()) == (0, free)


def test_a_pull_may_evict_cached_pages(engine: Any, pages: Any) -> None:
    for name in range(6):
        computed(engine, f"r{name}", [name + 3] * 95)
    cached, free = engine.cache.evictable_size(), engine.allocator.available_size()
    count = free // engine.page_size + 2
    assert 2 * count * engine.page_size <= free + cached
    taken = pages.take(0, count)
    assert taken is not None
    assert engine.cache.evictable_size() == cached - 2 * engine.page_size
    pages.give_up(taken)


def test_filled_pages_are_found_and_those_that_were_computed_meanwhile_are_kept(engine: Any, pages: Any) -> None:
    size = engine.page_size
    computed(engine, "a", [*PROMPT[: 2 * size], 1])
    waiting = queued(engine, "b", PROMPT)
    free = engine.allocator.available_size()
    taken = pages.take(1, 4)  # page 1 is cached, pages 2 and 3 are not
    assert taken is not None
    pages.publish(waiting, taken)
    assert engine.cache.cached_tokens(waiting.req) == 4 * size
    assert engine.allocator.available_size() == free - 2 * size
    assert engine.cache.protected_size() == 0
    engine.cache.check()
    engine.run()
    assert waiting.req.cached_tokens == 4 * size


def test_a_router_knows_a_page_by_the_first_word_of_its_digest(pages: Any) -> None:
    digest = bytes(range(248, 256)) + bytes(24)
    assert pages.number(digest) == int(np.frombuffer(digest, np.uint64)[0])


def test_a_request_asks_only_for_pages_that_it_may_use(engine: Any) -> None:
    size = engine.page_size
    prompt = queued(engine, "a", PROMPT, extra_key="other")
    assert len(prompt.block_hashes) == (len(PROMPT) - 1) // size
    assert (prompt.num_tokens, prompt.num_prompt_tokens, prompt.num_output_tokens) == (100, 100, 0)
    prompt.req.return_logprob, prompt.req.logprob_start_len = True, 40
    assert len(engine.cache.digests_of(prompt.req)) == 40 // size
    prompt.req.return_logprob = False
    engine.run()
