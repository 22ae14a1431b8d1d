"""Windows and recurrent states in one manager: the tokens from which a prompt can resume, the pages that move to make
room for a state, and the pages and states of a hand-over.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcache import (
    BlockTable,
    BlockTableMismatchError,
    InvalidRequestError,
    LayerGroup,
    PagedKVCacheManager,
    TextContext,
)
from kvcache.errors import NoFreeStatePageError
from kvcache.params import StateShape
from tests.kvcache.books import books_of, first_difference
from tests.kvcache.build import as_long_as, manager_of, proven, state_pages
from tests.kvcache.kv import KVTokens, kv_of
from tests.kvcache.replica.test_further_tables import gone

SIZE, NEXT = 4, 7
# The window has 6 tokens: the first query after a page sees this page and the page before it.
GROUPS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)
SHAPE = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)
LARGE = StateShape(2, 20, 1, 1, 1, 2, torch.int64, torch.int64)  # a state is as large as 6 pages
PROMPT = [*range(100, 140)]


def make(
    pages: int = 100,
    copies: int | None = 20,
    every: int = 1,
    shape: StateShape = SHAPE,
    files: dict[str, Any] | None = None,
    **options: Any,
) -> PagedKVCacheManager:
    """Makes a manager. If `copies` is None, states share memory with pages. `files` has the params of a file tier below
    `host_slots`.
    """
    told = {"groups": GROUPS} | (files or {}) | {"states": shape, "state_copies": copies, "state_every_pages": every}
    # The manager gets `own` pages for the states in addition to `pages` for tokens.
    own = 0 if copies is None else (options.get("rows", 8) + copies + 1) * 8
    return manager_of(pages + own, page_size=SIZE, layers=2, dtype=torch.int64, params=told, **options)


def run(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Runs a chunk of a model whose state is one number, which depends on all tokens so far."""
    name = context.request_id
    KVTokens(manager).run_contexts([context], manager.fetch([context]))
    states = manager.states[manager.get_replica(context)]
    pages = states.pages_at([name], [context.start_idx])
    values = kv_of(context.tokens.tolist(), (context.cache_salt, context.extra_keys), "state")
    for tensor in states.blocks[0]:
        wanted = int(values[context.start_idx - 1]) if context.start_idx else 0
        assert (tensor[pages] == wanted).all(), f"another state after {context.start_idx} tokens"
        tensor[pages] = int(values[context.active_idx - 1])
    states.advance(pages, [context.active_idx])
    context.update(NEXT)
    manager.step([context])
    manager.check()


def start(manager: PagedKVCacheManager, tokens: list[int], name: str = "r") -> TextContext:
    context = TextContext(tokens, 256, name)
    manager.external_claim(name, 0)
    assert manager.maybe_reserve(context)
    return context


def served(manager: PagedKVCacheManager, tokens: list[int], name: str = "r", *, release: bool = True) -> list[int]:
    """Runs a request. Returns the token from which it resumed, and the token at which each of its chunks ended."""
    context = start(manager, tokens, name)
    ends = [context.start_idx]
    for _ in as_long_as(lambda: context.start_idx < len(tokens)):
        assert manager.maybe_reserve(context)
        run(manager, context)
        ends.append(context.start_idx)
    if release:
        manager.release(name)
    return ends


def without_state_at(manager: PagedKVCacheManager, pages: int) -> None:
    replica = manager._replicas.each[0]
    digests = replica.hasher(None, TextContext(PROMPT, 256)).digests(np.array(PROMPT, np.int32), pages - 1, pages)
    manager.states[0]._forget(digests)


@pytest.mark.parametrize("copies", [60, None])
@pytest.mark.parametrize(
    ("windows", "states", "found"),
    [
        ((), (), 9),
        ((8,), (), 8),  # Page 8 of the window was evicted. The query after page 9 would see page 8.
        ((), (9,), 8),
        ((7,), (), 7),
        ((7,), (7,), 6),  # If only one of the two objects were lost, a longer prefix would be found.
        ((8,), (8, 7), 6),
        ((8, 5), (8, 7, 5), 4),
        ((4, 7), (7, 4), 3),
        ((), (9, 8, 7, 6, 5, 4, 3, 2, 1), 0),
    ],
)
def test_a_prompt_is_found_up_to_the_last_end_from_which_windows_and_state_can_resume(
    copies: int | None, windows: tuple[int, ...], states: tuple[int, ...], found: int
) -> None:
    manager = make(copies=copies)
    served(manager, PROMPT)
    for column in windows:
        gone(manager, PROMPT, 0, column)
    for pages in states:
        without_state_at(manager, pages)
    admitted = manager.admission(TextContext(PROMPT, 256, "asked"))
    assert (admitted.fits, admitted.cached_pages) == (True, found)
    assert served(manager, PROMPT, "again")[0] == found * SIZE


def test_a_state_is_kept_where_a_prompt_diverges_even_if_the_windows_there_are_gone() -> None:
    manager = make(every=0)
    served(manager, PROMPT)
    for column in range(9):
        gone(manager, PROMPT, 0, column)
    other = [*PROMPT[: 5 * SIZE + 1], *[1] * 10]
    assert served(manager, other, "second") == [0, 5 * SIZE, 7 * SIZE, len(other)]
    third = [*PROMPT[: 5 * SIZE + 1], *[2] * 10]
    assert served(manager, third, "third")[0] == 5 * SIZE


def handed(source: PagedKVCacheManager, target: PagedKVCacheManager, table: BlockTable) -> tuple[TextContext, Any]:
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(context, table)
    assert pending is not None
    target.check()
    for dst, src, (first, stop) in pending.take(last=True)[:-1]:
        count = -(-stop // SIZE) - first // SIZE if first < stop else 0
        theirs, ours = np.asarray(src)[:count], np.asarray(dst)[:count]
        target.device_tensors[0][0][ours] = source.device_tensors[0][0][theirs]
    there, here = state_pages(pending)
    for mine, theirs in zip(target.states[0].blocks[0], source.states[0].blocks[0], strict=True):
        mine[here] = theirs[there]
    return context, pending


@pytest.mark.parametrize("copies", [20, None])
@pytest.mark.parametrize("here", ["nothing", "all", "no window", "no state"])
def test_an_import_copies_the_missing_pages_of_each_table_and_the_state(copies: int | None, here: str) -> None:
    source, target = make(copies=copies), make(copies=copies)
    served(source, PROMPT, release=False)
    table = source.block_table("r")
    assert [len(pages) for pages in table.groups] == [10, 2, 1]
    assert table.kinds == ("window 6",)
    if here != "nothing":
        served(target, PROMPT)
    if here == "no window":
        for column in range(10):
            gone(target, PROMPT, 0, column)
    if here == "no state":
        for pages in range(1, 11):
            without_state_at(target, pages)
    context, pending = handed(source, target, table)
    assert pending.tokens == ((0 if here == "nothing" else 40), 40)
    assert [one.first for one in pending.parts[1:-1]] == [{"nothing": 32, "no window": 32}.get(here, 40)]
    assert context.start_idx == (40 if here == "all" else 0)
    target.commit_import(context, pending, proven(target, pending))
    for _ in range(9):
        assert target.maybe_reserve(context)
        run(target, context)
    target.release("d")
    assert served(target, [*PROMPT, *[NEXT] * 5], "again")[0] == 44


@pytest.mark.parametrize(("window", "kept"), [(4, 1), (1, 0), (6, 1)])
def test_an_imported_state_is_cached_if_a_page_of_the_first_window_names_it(window: int, kept: int) -> None:
    """A window of 4 tokens has the last page of the prefix alone. A window of one token begins after the prefix."""
    groups = {"groups": (LayerGroup("window", (0, 1), window),)}
    source, target = make(files=groups), make(files=groups)
    served(source, PROMPT, release=False)
    context, pending = handed(source, target, source.block_table("r"))
    target.commit_import(context, pending, proven(target, pending))
    assert target.states[0].num_kept == kept
    target.check()


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("copies", [20, None])
@pytest.mark.parametrize("covers", [3, 16, 23, 35])
def test_an_import_with_fewer_tokens_than_the_cached_prefix_leaves_the_state_of_that_prefix(
    covers: int, copies: int | None, *, evicts: bool
) -> None:
    """The request resumes after its cached prefix, although the import brings the state after fewer tokens."""
    source, target = make(copies=copies), make(copies=copies)
    served(source, PROMPT[:covers], release=False)
    served(target, PROMPT[: 36 if covers > 30 else 25])
    context, pending = handed(source, target, source.block_table("r"))
    assert context.start_idx > covers
    if evicts:
        target.reset_prefix_cache()
    target.commit_import(context, pending, proven(target, pending))
    target.check()
    for _ in range(9):
        assert target.maybe_reserve(context)
        run(target, context)
    target.release("d")
    assert target.num_held_blocks == 0


def test_a_cancelled_import_begins_anew() -> None:
    source, target = make(), make()
    served(source, PROMPT, release=False)
    _, pending = handed(source, target, source.block_table("r"))
    target.cancel_import(pending)
    target.check()
    target.release("d")
    assert served(target, PROMPT, "again")[0] == 0
    assert target.num_held_blocks == 0


def test_a_block_table_with_another_number_of_tables_is_refused_by_name() -> None:
    source, target = make(), make()
    served(source, PROMPT, release=False)
    table = source.block_table("r")
    plain = manager_of(20, page_size=SIZE, layers=2, dtype=torch.int64, params={"states": SHAPE, "state_copies": 0})
    for manager, count in ((target, 2), (plain, 3)):
        fewer = msgspec.structs.replace(table, groups=table.groups[3 - count :])
        manager.external_claim("d", 0)
        with pytest.raises(BlockTableMismatchError, match=f"has {len(fewer.groups)} page groups; this manager has"):
            manager.import_block_table(TextContext([*PROMPT, NEXT], 256, "d"), fewer)
        manager.release("d")


def in_each_slab(manager: PagedKVCacheManager) -> TextContext:
    """Returns a request that has pages in each slab. A second request ran in turn with it and was then released."""
    context, other = TextContext(PROMPT[:20], 256, "r"), TextContext([1] * 20, 256, "other")
    for one in (context, other):
        manager.external_claim(one.request_id, 0)
    for _ in as_long_as(lambda: context.start_idx < 50):
        for one in (context, other):
            assert manager.maybe_reserve(one)
            run(manager, one)
    manager.release("other")
    assert manager.maybe_reserve(context)
    return context


@pytest.mark.parametrize("known", ["", "lease", "fetch", "table"])
def test_window_pages_are_moved_to_make_room_for_a_state_unless_others_know_their_ids(known: str) -> None:
    manager = make(pages=60, copies=None, every=0, rows=16, checks=False, shape=LARGE)
    pool: Any = manager._replicas.each[0].pool
    context = in_each_slab(manager)
    replica = manager._replicas.each[0]

    def own() -> tuple[list[int], list[int]]:
        return manager.get_req_blocks("r"), replica.tables.pages(0, 99)[replica.rows.num_pages[0] :].tolist()

    before, lease = own(), manager.lease("r") if known == "lease" else None
    if known == "table":
        manager.block_table("r")
    if known == "fetch":
        manager.fetch([context])
    assert pool.moves.staying()[[*before[0], *before[1]]].tolist() == [bool(known)] * sum(map(len, before))
    claimed = 0
    with pytest.raises(NoFreeStatePageError, match="all 9 state pages are held"):  # noqa: PT012 - some fit
        for claimed in range(16):
            manager.external_claim(f"other {claimed}", 0)
            manager.check()
    assert [ours == pages for ours, pages in zip(own(), before, strict=True)] == [bool(known)] * 2
    assert (pool.moved > 0) != bool(known)
    for number, pages in enumerate(own()):
        of_tables = pool.index.tables[pages][pool.index.published[pages]]
        assert of_tables.size
        assert (of_tables == number).all(), "followers of the events know which table the pages belong to"
    for number in range(claimed):
        manager.release(f"other {number}")
    if lease is not None:
        manager.end_lease(lease)
    for _ in range(9):
        run(manager, context)
        assert manager.maybe_reserve(context)
    manager.release("r")
    manager.check()
    tokens = context.tokens.tolist()
    assert served(manager, tokens, "again")[0] == (len(tokens) - 1) // SIZE * SIZE


def test_a_claim_or_a_fork_without_room_for_its_state_changes_nothing() -> None:
    """Every slab is held, so no state can be made for the new request. The cached pages stay cached, and no row is
    taken.
    """
    manager = make(26, None, 0, LARGE)
    served(manager, PROMPT[:9], "before")
    context = start(manager, PROMPT[:5])
    run(manager, context)
    for number in range(2):
        manager.external_claim(f"other {number}", 0)
    child = context.fork("child")
    before = books_of(manager, [context, child])
    calls = {"no room": lambda: manager.external_claim("no room", 0), "child": lambda: manager.fork(context, child)}
    for name, call in calls.items():
        with pytest.raises(NoFreeStatePageError, match=f"request '{name}': all 3 state pages are held"):
            call()
        assert not (changed := first_difference(before, books_of(manager, [context, child]))), changed
    manager.check()


@pytest.mark.parametrize("copies", [60, None])
def test_a_state_that_a_reader_of_a_lease_knows_is_not_replaced_by_a_later_cached_state(copies: int | None) -> None:
    manager = make(pages=300, copies=copies)
    context = TextContext(PROMPT, 256, "leased")
    manager.external_claim("leased", 0)
    context.set_token_indices(active_idx=8)
    assert manager.maybe_reserve(context)
    run(manager, context)
    started = context.start_idx
    lease = manager.lease("leased")
    manager.block_table("leased")
    served(manager, PROMPT, "other")
    states = manager.states[0]
    page = states.page_of("leased")
    before = [tensor[page].clone() for tensor in states.blocks[0]]
    assert manager.maybe_reserve(context)
    assert (context.start_idx, states.tokens_of("leased")) == (started, started)
    assert all(torch.equal(tensor[page], was) for tensor, was in zip(states.blocks[0], before, strict=True))
    manager.end_lease(lease)
    assert manager.maybe_reserve(context)
    assert context.start_idx > started
    run(manager, context)


def test_requests_of_a_batch_whose_leased_states_leave_room_for_one_begin_anew_one_after_the_other() -> None:
    manager = make(copies=0, rows=3)
    contexts = [start(manager, [*range(at, at + 9)], f"r{at}") for at in (0, 50)]
    for context in contexts:
        run(manager, context)
    leases = [manager.lease(context.request_id) for context in contexts]
    manager.set_weights("b", "recompute")
    assert manager.reserve_batch(contexts).tolist() == [True, False]
    assert [len(manager.get_req_blocks(context.request_id)) for context in contexts] == [3, 3]
    manager.check()
    with pytest.raises(NoFreeStatePageError, match="'r50'"):
        manager.reserve_batch(contexts)
    manager.end_lease(leases[1])
    assert manager.reserve_batch(contexts).all()
    assert contexts[1].start_idx == 0
    run(manager, contexts[1])


def test_a_step_that_would_overwrite_the_state_of_a_running_step_is_refused() -> None:
    manager = make()
    context = start(manager, PROMPT, "r")
    assert manager.maybe_reserve(context)
    with pytest.raises(InvalidRequestError, match="fetch_ahead of 1 requests: .* cannot overlap"):
        manager.fetch_ahead([context])
    run(manager, context)  # as an ordinary step
    manager.release("r")
