"""A source leases a state together with the pages before it. A process that imports them keeps both."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import BlockTable, BlockTableMismatchError, LayerGroup, PageDigests, PageLease, TextContext
from tests.kvcache.kv import kv_of
from tests.kvcache.served import LONGEST_WAIT_S, SIZE
from tests.kvcache.states.served_states import ServedStates

PROMPT = [*range(1, 42)]  # ten full pages of 4 tokens, and one more token
WAYS = pytest.mark.parametrize("slabs", [True, False])
WINDOWS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)
NO_HOST = {"enable_kvcache_swapping_to_host": False, "host_kvcache_swap_space_gb": None, "tier_state_share": 0.5}


def of(slabs: bool, **options: Any) -> ServedStates:
    return ServedStates(slabs=slabs, params={**NO_HOST, **options.pop("params", {})}, **options)


def wanted(it: ServedStates, prompt: list[int] = PROMPT) -> PageDigests:
    return it.manager.contents.digests(TextContext([*prompt], 256, "theirs"))


def leased(it: ServedStates, most: int = 100) -> tuple[PageLease, BlockTable] | None:
    found = it.manager.contents.lease("theirs", 0, wanted(it), most)
    it.manager.check()
    return found


def state_in(it: ServedStates, page: int) -> set[int]:
    """Returns the value with which a state page is filled."""
    tensors = [tensor[page].flatten() for tensor in chain.from_iterable(it.manager.states[0].blocks)]
    return {*torch.cat(tensors).numpy().astype(np.int64).tolist()}


def value_after(tokens: int) -> set[int]:
    return {int(kv_of(PROMPT, (None, ()), "state")[tokens - 1])}


@WAYS
def test_the_pages_are_leased_up_to_the_last_state_and_the_state_with_them(slabs: bool) -> None:
    it = of(slabs, every=4)
    assert leased(it) is None
    it.serve(PROMPT)
    held = leased(it)
    assert held is not None
    lease, table = held
    assert (table.num_tokens, [*map(len, table.groups)]) == (40, [10, 1])
    assert state_in(it, table.groups[1][0]) == value_after(40)
    assert it.manager.num_held_blocks == 10 + 1 + (0 if not slabs else it.manager.slab_pages)
    it.manager.reset_prefix_cache()
    for other in range(6):  # Together, these prompts need more pages than are free during the lease.
        it.serve([100 + other, *range(60)])
    assert state_in(it, table.groups[1][0]) == value_after(40)  # No other request has written to the leased state page.
    it.manager.end_lease(lease)
    it.manager.end_lease(lease)
    it.manager.check()
    assert it.manager.num_held_blocks == 0


@WAYS
def test_an_earlier_state_is_lent_if_the_last_one_is_gone_or_the_pages_up_to_it_are_too_many(slabs: bool) -> None:
    it = of(slabs, every=4)
    it.serve(PROMPT)
    slab = it.manager.slab_pages
    for most, pages in ((10 + slab, 10), (9 + slab, 8), (7 + slab, 4), (3 + slab, 0)):
        held = leased(it, most)
        if held is None:
            assert not pages
            continue
        assert (len(held[1].groups[0]), state_in(it, held[1].groups[1][0])) == (pages, value_after(pages * SIZE))
        it.manager.end_lease(held[0])
    states = it.manager.states[0]
    context = it.waiting(PROMPT)
    states._forget(it.hasher(context).digests(context.tokens, 9, 10))  # pyright: ignore[reportPrivateUsage]
    held = leased(it)
    assert held is not None
    assert held[1].num_tokens == 32
    it.manager.end_lease(held[0])
    assert it.manager.contents.cached(0, wanted(it)) == 32
    states.forget_copies()
    assert leased(it) is None
    assert it.manager.contents.cached(0, wanted(it)) == 0


def test_with_states_a_part_of_a_prefix_is_not_lent() -> None:
    it = of(slabs=True)
    it.serve(PROMPT)
    assert it.manager.contents.digests(TextContext([*PROMPT], 256, "theirs"), 3) == wanted(it)
    with pytest.raises(BlockTableMismatchError, match="from page 3 on; .* the model has full recurrent states"):
        it.manager.contents.lease("theirs", 0, wanted(it)._replace(first_page=3), 9)


@WAYS
def test_only_the_last_pages_of_a_window_are_lent_with_the_state(slabs: bool) -> None:
    it = of(slabs, layers=2, params={"groups": WINDOWS})
    it.serve(PROMPT)
    held = leased(it)
    assert held is not None
    assert [*map(len, held[1].groups)] == [10, 2, 1]
    it.manager.end_lease(held[0])


@WAYS
def test_an_imported_state_is_found_even_if_its_request_never_ran_here(slabs: bool) -> None:
    source, reader = of(slabs), of(slabs)
    source.serve(PROMPT)
    held = leased(source)
    assert held is not None
    for _ in range(2):
        context = reader.claim(PROMPT)
        pending = reader.manager.import_block_table(context, held[1])
        assert pending is not None
        copier = reader.manager.copier(pending)
        *pages, state = copier.take()
        here = reader.manager.states[0].blocks[0]
        for mine, theirs in zip(here, source.manager.states[0].blocks[0], strict=True):
            mine[torch.as_tensor(state.dst_pages).long()] = theirs[torch.as_tensor(state.src_pages).long()]
        blocks, theirs = (one.manager.device_tensors[0][0] for one in (reader, source))
        for copy in pages:
            blocks[torch.as_tensor(copy.dst_pages).long()] = theirs[torch.as_tensor(copy.src_pages).long()]
        reader.manager.commit_import(context, pending, copier.prove())
        reader.manager.release(context.request_id)
        reader.manager.check()
        assert reader.manager.contents.cached(0, wanted(reader)) == 40
    assert reader.serve(PROMPT) == 40
    assert reader.compared == 1


def brought(it: ServedStates) -> int:
    """Asks for the pages of the prompt, as a reader does, until no page is being loaded any more. Returns the number of
    questions.
    """
    asked, deadline = 0, time.monotonic() + LONGEST_WAIT_S
    while it.manager.contents.bring("theirs", 0, wanted(it), 100):
        it.manager.check()
        asked += 1
        assert time.monotonic() < deadline
    return asked


@WAYS
def test_a_state_in_a_lower_tier_is_loaded_after_its_pages(slabs: bool, tmp_path: Path) -> None:
    told = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3, "file_tier_key": "model"}
    it = ServedStates(slabs=slabs, params=told)
    it.serve(PROMPT)
    it.manager.close()
    again = ServedStates(slabs=slabs, params=told)
    brought(again)
    held = leased(again)
    assert held is not None
    assert held[1].num_tokens == 40
    assert state_in(again, held[1].groups[1][0]) == value_after(40)
    again.manager.end_lease(held[0])
    assert again.serve(PROMPT) == 40
    assert again.compared == 1
    again.manager.states[0].forget_copies()  # The host still has the state. The pages are still on the device.
    assert leased(again) is None
    brought(again)
    held = leased(again)
    assert held is not None
    again.manager.end_lease(held[0])
    again.manager.close()


def test_no_state_is_loaded_if_it_needs_more_than_half_of_the_free_pages() -> None:
    it = ServedStates(pages=40)
    it.serve(PROMPT)
    it.manager.flush_tiers()
    it.manager.states[0].forget_copies()
    pool = it.manager._replicas.each[0].pool  # pyright: ignore[reportPrivateUsage]
    running = it.claim(range(500, 500 + SIZE * (pool.free_count - 2 * pool.beside - 10 - 3)))
    assert it.manager.maybe_reserve(running)
    assert brought(it) == 0
    assert leased(it) is None
    it.manager.release(running.request_id)
    brought(it)
    assert leased(it) is not None


def test_making_room_for_a_state_from_the_host_does_not_reuse_its_slot() -> None:
    """The host has two slots. Its next free slot is the slot of the prompt's state. Making room on the device evicts
    another state to the host, which must not go to the slot that is about to be read.
    """
    it = ServedStates(slabs=False, host_states=2)
    it.serve(PROMPT)
    it.serve(range(500, 505))
    it.manager.flush_tiers()
    states = it.manager.states[0]
    states.forget_copies()
    others = [it.claim(range(number, number + 5)) for number in (100, 200, 300, 400)]
    assert all(it.manager.maybe_reserve(other) for other in others)
    it.run(*others)
    for other in others:
        it.manager.release(other.request_id)  # The host has not stored the copy of this request's state yet.
    for number in range(len(others)):
        it.claim([number])  # holds a page
    it.manager.contents.bring("theirs", 0, wanted(it), 100)
    assert states.pool.evictions == 1
    held = leased(it)
    assert held is not None
    assert state_in(it, held[1].groups[1][0]) == value_after(40)


@pytest.mark.parametrize("have", [0, 4])
def test_no_state_is_loaded_before_the_pages_that_are_needed_with_it(have: int) -> None:
    it = ServedStates(pages=40, slabs=False)
    it.serve(PROMPT)
    it.manager.flush_tiers()
    for number in range(2):
        it.serve(range(1000 * (number + 1), 1000 * (number + 1) + 38 * SIZE))
    states = it.manager.states[0]
    states.forget_copies()
    (tier,) = it.tiers.replicas
    if have:
        tier.brought_at_once = have
        assert it.manager.contents.bring("theirs", 0, wanted(it), 100)
        tier.brought_at_once = 100
    replica = it.manager._replicas.each[0]  # pyright: ignore[reportPrivateUsage]
    digests = it.digests(PROMPT)
    assert (replica.pool.index.find(digests) > 0).sum() == have
    running = it.claim(range(500, 500 + SIZE * (39 - 2 * have)))
    assert it.manager.maybe_reserve(running)
    assert replica.pool.free_count // 2 == have, "the pages that are here already are half of the free pages"
    assert not it.manager.contents.bring("theirs", 0, wanted(it), 100)
    assert not it.manager.states[0].pool.index.find(digests).any()
    it.manager.release(running.request_id)
    brought(it)
    held = leased(it)
    assert held is not None
    assert state_in(it, held[1].groups[1][0]) == value_after(40)
    it.manager.end_lease(held[0])
    it.manager.close()
