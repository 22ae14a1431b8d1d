"""Recurrent states and token pages share one memory. The tokens are the model's own if states are evicted and if pages
are evicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import NoFreeRowError, PoolTooSmallError, PromptTooLongError
from kvcache.replica.context import TextContext
from scheduler_adapters.hf.runner import (
    HFRunner,
    kv_params_of,
    manager_for,
    num_layers_of,
)
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request
from tests.kvcache.build import state_pages
from tests.scheduler_adapters.serving import assert_nothing_held, loop_of, own_tokens, serve

pytestmark = pytest.mark.slow

MODEL = "bamba"
PAGE, NEW = 8, 20
SYSTEM = ByteTokenizer().encode("What all of these prompts begin with. ")
ENDS = ("Who wrote it?", "And who read it, some time later?", "x", "Was it long?")
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)[1:]] for text in ENDS]


def one_budget(
    model: Any, slabs: int, pages: int = 0, *, rows: int = 8, shards: int = 1, caching: bool = True, checks: bool = True
) -> Any:
    """Returns a manager with memory for this many states and token pages."""
    cache = kv_params_of(model.config, page_size=PAGE, n_devices=shards, enable_prefix_caching=caching)
    page = PAGE * cache.bytes_per_token(num_layers_of(model.config))
    options: dict[str, Any] = {"enable_runtime_checks": checks}
    probe = manager_for(model, cache, rows, 4096, ["cpu"] * shards, **(options | {"available_cache_memory": 4 << 20}))
    options["available_cache_memory"] = (slabs * probe.slab_pages + pages) * page
    return manager_for(model, cache, rows, 4096, ["cpu"] * shards, **options)


def running(manager: Any, name: str, prompt: list[int]) -> TextContext:
    context = TextContext(prompt, 4096, name)
    manager.external_claim(name)
    assert manager.maybe_reserve(context)
    return context


def step(manager: Any, runner: HFRunner, *contexts: TextContext) -> None:
    assert all(manager.maybe_reserve(context) for context in contexts)
    tokens = runner.run(contexts, manager.fetch(contexts))
    for context, token in zip(contexts, tokens, strict=True):
        context.update(token)
    manager.step(contexts)


def spread(manager: Any) -> tuple[Any, np.ndarray]:
    """Takes pages so that the next request gets pages in each of the remaining slabs. Returns the pool and the taken
    pages.
    """
    pool = manager._replicas.each[0].pool
    taken = pool.allocate(pool.free_count)
    keep = taken % pool.slab_pages != 1
    pool.release(taken[~keep])
    return pool, taken[keep]


@pytest.mark.parametrize("known", ["", "lease", "fetch", "table"])
def test_a_request_runs_on_from_moved_pages_and_those_that_others_know_stay(model: Any, known: str) -> None:
    manager = one_budget(model, 3, 20, caching=False, checks=False)
    runner = HFRunner(model, manager.states)
    manager.external_claim("r")
    pool, taken = spread(manager)
    pool.moves.staying, staying = lambda: np.ones(pool.num_pages + 1, np.bool_), pool.moves.staying
    low = taken // pool.slab_pages == 1
    pool.release(taken[low])
    context = TextContext(PROMPTS[0][:20], 4096, "r")
    assert manager.maybe_reserve(context)
    pool.release(taken[~low])
    pool.moves.staying = staying
    manager.check()
    before = manager.get_req_blocks("r")
    step(manager, runner, context)
    lease = manager.lease("r") if known == "lease" else None
    if known == "table":
        assert manager.block_table("r").groups[0] == tuple(before)
    fetched = None
    if known == "fetch":
        assert manager.maybe_reserve(context)
        fetched = manager.fetch([context])
    rows = manager._replicas.each[0].rows
    rows.changed[:] = False  # The flags are cleared, as if the table had just been copied to a device.
    claim_all(manager)
    assert (manager.get_req_blocks("r") == before) == bool(known)
    assert rows.changed[rows.row_of["r"]] != bool(known)
    assert (pool.moved > 0) != bool(known)
    if fetched is not None:
        (token,) = runner.run([context], fetched)
        context.update(token)
        manager.step([context])
        claim_all(manager)
        assert pool.moved
    if lease is not None:
        manager.end_lease(lease)
    while context.current_length < 20 + NEW:
        step(manager, runner, context)
    assert context.tokens[20:].tolist() == own_tokens(model, PROMPTS[0][:20], NEW)
    manager.release("r")
    assert_nothing_held(manager)
    manager.external_claim("r")
    assert not (pool.moves._runs_now() | pool.moves._told)[rows.row_of["r"]], (
        "the request is new, so none of its pages was told to anyone"
    )


def claim_all(manager: Any) -> None:
    """Claims as many requests as there is room for, and releases them."""
    claimed: list[str] = []
    with pytest.raises(NoFreeRowError, match="all 5 state pages are held"):  # noqa: PT012 - some fit
        for number in range(8):
            manager.external_claim(f"other {number}")
            claimed.append(f"other {number}")
            manager.check()
    for name in claimed:
        manager.release(name)


def test_a_fork_continues_in_a_slab_of_its_own(model: Any) -> None:
    expected = own_tokens(model, PROMPTS[0], NEW)
    manager = one_budget(model, 3, 24)
    runner = HFRunner(model, manager.states)
    parent = running(manager, "parent", PROMPTS[0])
    step(manager, runner, parent)
    child = parent.fork("child")
    assert manager.fork(parent, child)
    third = parent.fork("third")
    held = manager.num_held_blocks
    with pytest.raises(NoFreeRowError, match="state pages are held"):  # noqa: PT012 - some fit
        while manager.fork(parent, third):
            third = parent.fork(third.request_id + "d")
    for name in [name for name in manager._claims.places if name.startswith("third")]:
        manager.release(name)
    assert manager.num_held_blocks == held
    while parent.current_length < len(PROMPTS[0]) + NEW:
        step(manager, runner, parent, child)
    for context in (parent, child):
        assert context.tokens[len(PROMPTS[0]) :].tolist()[:NEW] == expected
        manager.release(context.request_id)
    assert_nothing_held(manager)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_request_continues_after_a_cancelled_import_from_its_cached_or_saved_state(
    model: Any, *, evicted: bool
) -> None:
    expected = own_tokens(model, PROMPTS[0], NEW)
    source, target = (one_budget(model, 4, 24) for _ in range(2))
    giver, taker = loop_of(source, model), loop_of(target, model)
    serve(giver, [Request("r", PROMPTS[0], 1, hold_pages=True)])
    serve(taker, [Request("r", PROMPTS[0], 1)])
    context = taker.context_for(Request("r", [*PROMPTS[0], expected[0]], NEW - 1))
    target.external_claim("r")
    if evicted:
        found = target.states[0]._found
        target.states[0]._found = lambda digest: 0 if target.states[0].hits else found(digest)
    pending = target.import_block_table(context, source.block_table("r"))
    assert pending.tokens[0] > 0
    _, here = state_pages(pending)
    for blocks in target.states[0].blocks[0]:
        blocks[here] = 7
    target.cancel_import(pending)
    assert target.states[0].tokens_of("r") == context.start_idx > 0
    assert not target.states[0]._saved
    if evicted:
        target.states[0]._found = found
    taker.adopt(Request("r", PROMPTS[0], NEW), context)
    tokens = expected[:1]
    while taker.has_work:
        tokens += [int(output.token or 0) for output in taker.step()]
    assert tokens == expected
    assert_nothing_held(target)


def test_the_slab_of_an_import_whose_request_is_gone_is_pages_again_once_nothing_writes_it(model: Any) -> None:
    source, target = one_budget(model, 4, 24), one_budget(model, 5, 30)
    serve(loop_of(source, model), [Request("r", PROMPTS[0], 1, hold_pages=True)])
    context = loop_of(target, model).context_for(Request("r", [*PROMPTS[0], 5], NEW))
    target.external_claim("r")
    pending = target.import_block_table(context, source.block_table("r"))
    taken = target._replicas.each[0].pool.taken
    target.release("r")
    target.check()
    assert (np.flatnonzero(taken).tolist(), target.states[0].num_held) == ([state_pages(pending)[1]], 1)
    target.cancel_import(pending)
    assert not taken.any()
    assert_nothing_held(target)


def test_a_request_needs_room_for_its_pages_and_its_state(model: Any) -> None:
    manager = one_budget(model, 1, 12, caching=False)
    most = manager.total_num_pages - manager.slab_pages
    context = TextContext([5] * (most * PAGE), 4096, "r")
    assert manager.admission(context).fits
    with pytest.raises(PromptTooLongError, match=f"need {manager.total_num_pages + 1} pages"):
        manager.admission(TextContext([5] * (most * PAGE + 1), 4096, "longer"))
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        assert not manager.admission(TextContext([5], 4096, "other")).fits
        with pytest.raises(NoFreeRowError, match="'other'"):
            manager.external_claim("other")
    with pytest.raises(PoolTooSmallError, match=r"at least \d+ pages are needed"):
        one_budget(model, 1, 1)


@pytest.mark.parametrize("beside", [0, 1])
def test_a_request_fits_if_its_pages_are_free_beside_its_slab(model: Any, beside: int) -> None:
    manager = one_budget(model, 3, 12, caching=False)
    pages = manager.total_num_pages - 2 * manager.slab_pages - beside
    with manager.claim(context := TextContext([5] * (pages * PAGE), 4096, "r")):
        assert manager.maybe_reserve(context)
        assert manager.states[0].pool.has_room
        assert manager.admission(TextContext([5], 4096, "other")).fits == bool(beside)
