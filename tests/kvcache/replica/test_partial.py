from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import InvalidParamsError, LayerGroup, PagedKVCacheManager, StateShape, TextContext
from kvcache.replica.partial import PartialReuse
from tests.kvcache.build import manager_of
from tests.kvcache.test_params import params

PAGE = 4


def made(make: Any, pages: int = 64, least: int = 1, **options: Any) -> PagedKVCacheManager:
    return make(pages, page_size=PAGE, params={"partial_reuse_min_tokens": least}, **options)


def content(manager: PagedKVCacheManager, context: TextContext, count: int) -> list[int]:
    """Returns the content of the first `count` tokens, as `run` wrote it. It must be the same on every shard."""
    pages = manager.get_req_blocks(context.request_id)
    shards = [
        [int(blocks[pages[at // PAGE], 0, 0, at % PAGE, 0, 0]) for at in range(count)]
        for blocks in manager.device_tensors[manager.get_replica(context)]
    ]
    assert all(shard == shards[0] for shard in shards)
    return shards[0]


def run(manager: PagedKVCacheManager, context: TextContext, token: int = 7) -> None:
    """Computes as a model whose KV is the token itself. Checks that all cached tokens are present."""
    assert content(manager, context, context.start_idx) == context.tokens[: context.start_idx].tolist()
    manager.fetch([context])
    pages = manager.get_req_blocks(context.request_id)
    for blocks in manager.device_tensors[manager.get_replica(context)]:
        for at in range(context.start_idx, context.active_idx):
            blocks[pages[at // PAGE], :, :, at % PAGE] = float(context.tokens[at])
    context.update(token)
    manager.step([context])


def served(manager: PagedKVCacheManager, tokens: Any, **options: Any) -> int:
    """Runs one request. Returns the number of tokens that it found."""
    context = TextContext(tokens, 256, **options)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        found = context.start_idx
        run(manager, context)
    return found


def test_a_prompt_that_leaves_a_cached_one_within_a_page_goes_on_from_there(make: Any) -> None:
    manager = made(make, tp=2, heads=2)
    assert served(manager, range(12)) == 0
    assert served(manager, [*range(6), 90, 91, 92]) == 6
    assert served(manager, range(3)) == 2  # The prompt ends within the first page. Its last token has to run.
    assert served(manager, [*range(10)]) == 9
    assert served(manager, [50, *range(9)]) == 0
    assert manager.metrics.cache_tokens == 17


FULL, WINDOW, CHUNKED = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6), LayerGroup("chunked", (1,), 8)


def served_in_tables(manager: PagedKVCacheManager, tokens: list[int], chunk: int = 64) -> int:
    """Runs one request in chunks. Its KV is the token and the index of the block table. Returns the number of tokens
    that it found.
    """
    context, replica = TextContext(tokens, 256), manager._replicas.each[0]
    found, blocks = -1, manager.device_tensors[0][0]
    with manager.claim(context):
        table = replica.rows.table[:, replica.rows.row_of[context.request_id]]
        while len(context.tokens) == len(tokens):
            context.set_token_indices(active_idx=min(len(tokens), context.start_idx + chunk))
            assert manager.maybe_reserve(context)
            found = context.start_idx if found < 0 else found
            manager.fetch([context])
            for number, pages in enumerate(table):
                for at, token in enumerate(tokens[: context.active_idx]):
                    page, wanted = int(pages[at // PAGE]), float(token + 1000 * number)
                    if page and at < context.start_idx:
                        assert blocks[page, 0, 0, at % PAGE, 0, 0] == wanted, f"table {number}, token {at}"
                    elif at >= context.start_idx:
                        blocks[page, :, :, at % PAGE] = wanted
            context.update(7)
            manager.step([context])
    return found


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, CHUNKED), (LayerGroup("window", (0, 1), 6),)], ids=str)
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_partial_page_is_copied_in_each_of_several_tables(groups: tuple[LayerGroup, ...], chunk: int) -> None:
    manager = manager_of(64, layers=2, params={"partial_reuse_min_tokens": 1, "groups": groups})
    assert served_in_tables(manager, [*range(21)], chunk) == 0
    assert served_in_tables(manager, [*range(18), 90, 91, 92], chunk) == 18
    assert served_in_tables(manager, [*range(10)], 64) == 9
    manager.check()


def test_no_partial_page_is_copied_if_one_table_has_lost_it() -> None:
    told = {"partial_reuse_min_tokens": 1, "groups": (FULL, WINDOW)}
    manager = manager_of(64, layers=2, checks=False, params=told)
    served_in_tables(manager, [*range(21)])
    index, tokens = manager._replicas.each[0].pool.index, TextContext(range(21), 64)
    digests = np.frombuffer(manager.contents.digests(tokens).digests, np.uint64).reshape(-1, 4)
    page = manager._replicas.each[0].tables.pages_of(digests[4:])[1]
    index.withdraw(page)
    assert served_in_tables(manager, [*range(18), 90, 91, 92]) == 16


def test_no_part_of_a_page_is_reused_behind_a_recurrent_state() -> None:
    shape = StateShape(1, 2, 1, 1, 1, 2, torch.float32)
    with pytest.raises(InvalidParamsError, match="it must be 0 with states, because a state is kept"):
        params(partial_reuse_min_tokens=1, states=shape, enable_prefix_caching=True)


def test_an_exact_page_is_shared_and_not_copied(make: Any) -> None:
    manager = made(make)
    served(manager, range(13))
    context = TextContext(range(13), 64)
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 12
    assert manager.num_free_blocks == 64 - 4


@pytest.mark.parametrize(("least", "found"), [(0, 4), (1, 6), (2, 6), (3, 4)])
def test_too_few_common_tokens_are_not_copied(make: Any, least: int, found: int) -> None:
    manager = made(make, least=least)
    served(manager, range(12))
    assert served(manager, [*range(6), 90, 91, 92]) == found


def test_the_longest_of_several_pages_is_copied(make: Any) -> None:
    manager = made(make)
    for third in ([4, 60, 60, 60], [4, 5, 60, 60], [4, 5, 6, 60], [4, 61, 60, 60]):
        served(manager, [0, 1, 2, 3, *third, 99])
    assert served(manager, range(9)) == 7


def test_only_the_latest_of_many_pages_after_one_prefix_are_compared(make: Any) -> None:
    manager = made(make, pages=200)
    for other in range(100, 170):
        served(manager, [0, 1, 2, 3, other, 5, 6, 7, 99])
    assert served(manager, [0, 1, 2, 3, 169, 5, 60]) == 6
    assert served(manager, [0, 1, 2, 3, 100, 5, 60]) == 4


def test_salts_and_keys_stay_apart(make: Any) -> None:
    manager = made(make)
    served(manager, range(12), cache_salt="a", extra_keys=[(5, b"image")])
    assert served(manager, [*range(3), 90, 91], cache_salt="b") == 0
    assert served(manager, [*range(3), 90, 91]) == 0
    assert served(manager, [*range(3), 90, 91], cache_salt="a") == 3
    assert served(manager, [*range(7), 90, 91], cache_salt="a") == 4  # The image is in the second page.


def test_a_page_that_was_evicted_is_not_copied(make: Any) -> None:
    manager = made(make, pages=3)
    served(manager, range(8))
    served(manager, range(100, 112))
    assert served(manager, [*range(3), 90]) == 0


def test_a_page_that_others_hold_is_not_written_to(make: Any) -> None:
    manager = make(64, page_size=PAGE)
    run_whole = TextContext(range(12), 64, "other")
    context = TextContext([*range(6), 90, 91], 64, "r")
    with manager.claim(run_whole), manager.claim(context):
        assert manager.maybe_reserve(run_whole)
        run(manager, run_whole)
        replica = manager._replicas.each[0]
        partial, row = PartialReuse(replica, 1), replica.rows.row_of["r"]
        partial.learn(replica.rows.row_of["other"], run_whole, 0, 3)
        assert manager.maybe_reserve(context)
        assert context.start_idx == 4
        own = np.array([manager.get_req_blocks("r")[1]], np.int32)
        found = (manager.get_req_blocks("other")[1], own.item(), 6)
        assert partial.find(row, context) == found
        replica.pool.hold(own)
        assert partial.find(row, context) is None
        replica.pool.release(own)
        assert partial.find(row, context) == found
        partial.clear()
        assert partial.find(row, context) is None
        partial.learn(replica.rows.row_of["other"], run_whole, 0, 3)
        assert partial.find(row, context) == found


def test_a_failed_reserve_copies_nothing(make: Any) -> None:
    manager = made(make, pages=4)
    served(manager, range(8))
    hog = TextContext(range(200, 208), 64)
    with manager.claim(hog):
        assert manager.maybe_reserve(hog)
        context = TextContext([*range(6), *range(90, 96)], 64)
        manager.external_claim(context.request_id)
        assert not manager.maybe_reserve(context)
        assert context.start_idx == 0
    assert manager.maybe_reserve(context)
    assert context.start_idx == 6


@pytest.mark.parametrize("seed", range(12 if "PAGEWIRE_LONG_TESTS" in os.environ else 4))
def test_every_token_that_counts_as_cached_is_present(make: Any, seed: int) -> None:
    rng = random.Random(seed)
    manager = made(make, pages=rng.choice([12, 30]), least=rng.choice([0, 1, 3]), dp=rng.choice([1, 2]), rows=4)
    past, live = [[1, 2, 3]], list[TextContext]()
    for _ in range(250):
        move = rng.random()
        if move < 0.3 and len(live) < 4:
            old = rng.choice(past)
            tokens = [*old[: rng.randint(0, len(old))], *(rng.randint(1, 3) for _ in range(rng.randint(1, 9)))][:24]
            live.append(TextContext(tokens, 40))
            manager.external_claim(live[-1].request_id, rng.randint(0, manager.num_replicas - 1))
        elif move < 0.8 and live:
            context = rng.choice(live)
            if context.end_idx < 40 and manager.maybe_reserve(context):
                if context.active_length > 5 and rng.random() < 0.5:
                    context.set_token_indices(active_idx=context.start_idx + rng.randint(1, 5))
                run(manager, context, rng.randint(1, 3))
        elif move < 0.85 and live and live[0].active_length == 1 and len(live) < 4:
            child = live[0].fork()
            try:
                forked = manager.fork(live[0], child)
            except ValueError:
                continue  # The parent's last step has not been recorded, or the parent's replica has no free row.
            if forked:
                live.append(child)
        elif live:
            context = live.pop(rng.randrange(len(live)))
            past = [*past[-6:], context.tokens.tolist()]
            manager.release(context.request_id)
    assert manager.metrics.cache_tokens > 0, "no page was found, so this test has shown nothing"


def test_invalid_options_are_named() -> None:
    with pytest.raises(InvalidParamsError, match="partial_reuse_min_tokens is -1"):
        params(partial_reuse_min_tokens=-1)
    with pytest.raises(InvalidParamsError, match="partial_reuse_min_tokens needs enable_prefix_caching"):
        params(partial_reuse_min_tokens=2)


def test_copies_do_not_touch_the_page_they_come_from(make: Any) -> None:
    manager = made(make)
    served(manager, range(12))
    before = [blocks.clone() for blocks in manager.device_tensors[0]]
    published = [page for page in range(65) if manager._replicas.each[0].pool.index.published[page]]
    served(manager, [*range(6), 90, 91, 92])
    for blocks, old in zip(manager.device_tensors[0], before, strict=True):
        assert torch.equal(blocks[published], old[published])
