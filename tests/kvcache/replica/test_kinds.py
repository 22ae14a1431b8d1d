"""Each kind of layers keeps the pages that its queries see, and no others: the contract of all `KeptPages`.

The columns of each kind are compared with what each query sees, token by token.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcache import (
    BlockTableMismatchError,
    DraftGroup,
    InvalidParamsError,
    KVCacheParams,
    LayerGroup,
    PagedKVCacheManager,
    RangeRetention,
    Retention,
    SinkGroup,
    StateShape,
    TextContext,
)
from kvcache.events.wire import spec_of
from kvcache.layer_groups import layer_tables
from kvcache.pool.lru_order import LruOrder
from kvcache.replica.kept_pages import KeptPages, ranges_of
from kvcache.replica.kinds import KINDS, kept_pages
from kvcache.replica.rows import AllRows, BlockRows, as_rows
from tests.kvcache.build import evict_idle, manager_of, proven

LONGEST = 60


def group_of(kind: str, window: int, sinks: int) -> LayerGroup:
    if kind == "draft":
        return DraftGroup((0,))
    return SinkGroup((0,), window, sinks) if kind == "sinks" else LayerGroup(kind, (0,), window * (kind != "full"))  # type: ignore[arg-type]


def sees(group: LayerGroup, query: int, token: int) -> bool:
    """Whether a query sees an earlier or its own token, from the definition of the kind."""
    if group.kind == "window":
        return query - token < group.window
    if group.kind == "chunked":
        return query // group.window == token // group.window
    if isinstance(group, SinkGroup):
        return query - token < group.window or token < group.sinks
    return True


def kept_of(group: LayerGroup, page_size: int) -> KeptPages:
    groups = layer_tables((group,), 1).groups
    return kept_pages(groups[0], 0, BlockRows(AllRows(1, 2, page_size), 0, LONGEST, groups, pinned=False))


DRAWN = given(
    kind=st.sampled_from(["full", "window", "chunked", "sinks", "draft"]),
    window=st.integers(1, 20),
    sinks=st.integers(1, 12),
    page_size=st.integers(1, 7),
    query=st.integers(0, LONGEST - 1),
)


@DRAWN
def test_a_row_keeps_the_columns_that_its_next_query_sees(
    kind: str, window: int, sinks: int, page_size: int, query: int
) -> None:
    group = group_of(kind, window, sinks)
    kept, end = kept_of(group, page_size), query // page_size + 1
    needed = {token // page_size for token in range(query + 1) if sees(group, query, token)}
    first = min(end, int(kept.seen(query)))
    mine = as_rows(kept.kept(first, end)).tolist()
    # The pages of sinks stay whole, and all pages between the sinks and a window that begins beside them stay, too.
    surplus = {*mine} - needed
    assert needed <= {*mine}, "a query lacks a page"
    assert not surplus or (isinstance(group, SinkGroup) and max(surplus) <= -(-sinks // page_size))
    assert mine == sorted(mine)
    assert int(kept.num_kept(first, end)) == len(mine)
    for start in range(end + 1):
        assert as_rows(kept.kept(first, end, start)).tolist() == [column for column in mine if column >= start]
    for moved in range(end + 1):
        kept.firsts[0] = moved
        gone = {*range(int(kept.leave_from(0)), moved)}
        assert kept.lacks(np.array([0]), np.array([query])).item() == bool(gone & needed)
    left = range(int(kept.leave_from(0)), first)
    assert not {*left} & {*mine}, "a page leaves the row, and stays"
    assert {*left} | {*mine} == {*range(end)}, "a page neither leaves nor stays"
    assert [column for begin, last in ranges_of(np.array(mine, np.int64)) for column in range(begin, last)] == mine


@DRAWN
def test_a_request_resumes_where_all_pages_that_the_next_query_sees_are_there(
    kind: str, window: int, sinks: int, page_size: int, query: int
) -> None:
    group, pages = group_of(kind, window, sinks), LONGEST // page_size
    rng = np.random.default_rng(query)
    for first in (0, 1, 2):
        there = rng.random((2, pages)) < 0.8
        good = group.good_ends(there, first, page_size)
        for end in range(1, pages + 1):
            needed = [
                page
                for page in range(first, first + end)
                if any(
                    sees(group, (first + end) * page_size, token)
                    for token in range(page * page_size, (page + 1) * page_size)
                )
            ]
            assert good[end - 1] == all(there[:, page - first].all() for page in needed)


@DRAWN
def test_no_request_holds_more_pages_than_the_group_says(
    kind: str, window: int, sinks: int, page_size: int, query: int
) -> None:
    group, step = group_of(kind, window, sinks), query % 9 + 1
    kept = kept_of(group, page_size)
    held = [
        int(kept.num_kept(min(end, int(kept.seen(start))), end))
        for start in range(LONGEST - step)
        for end in [-(-(start + step) // page_size)]
    ]
    assert max(held) <= group.most_pages(LONGEST, page_size, step)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_events(kind: type[LayerGroup]) -> None:
    params = KVCacheParams(torch.float16, n_kv_heads=1, head_dim=8)
    drawn = {LayerGroup: "window", SinkGroup: "sinks", DraftGroup: "draft"}[kind]
    spec = spec_of(group_of(drawn, 4, 2), params)
    assert (spec.kind, spec.is_told) == {
        "window": ("sliding_window", True),
        "sinks": ("sink_full_attention", True),
        "draft": (None, False),
    }[drawn]


@pytest.mark.parametrize(("window", "sinks"), [(0, 1), (4, 0), (4, -1), (4, 1.5)])
def test_a_group_with_sinks_refuses_sizes_that_are_none(window: int, sinks: int) -> None:
    with pytest.raises(InvalidParamsError, match="window|sinks"):
        SinkGroup((0,), window, sinks)
    with pytest.raises(InvalidParamsError, match="layers"):
        DraftGroup(())


@pytest.mark.parametrize("both", [0, 1])
def test_a_draft_page_is_found_only_with_the_next_page(both: int) -> None:
    """A prompt with another next page computes the draft page again; the main layers alone would find it."""
    groups = (LayerGroup("full", (0,)), DraftGroup((1,))) if both else (LayerGroup("full", (0, 1)),)
    params = KVCacheParams(torch.float16, 1, 8, page_size=4, groups=groups, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, 4, 64, 2, ["cpu"], available_cache_memory=1 << 20)
    prompt = [*range(20)]
    first = TextContext(prompt, 64, "first")
    with manager.claim(first):
        manager.maybe_reserve(first)
        manager.fetch([first])
        first.update(1)
        manager.step([first])
    found: list[int] = []
    for length in (9, 13, 17):
        other = TextContext([*prompt[:length], *[90] * 6], 64, f"other {length}")
        with manager.claim(other):
            manager.maybe_reserve(other)
            found.append(other.start_idx)
    assert found == ([4, 8, 12] if both else [8, 12, 16])


def test_a_draft_beside_windows_names_no_prefix_by_its_own_pages() -> None:
    """The draft's table is the first one here. Its pages have the digests of next pages, so it stands for no prefix."""
    groups = LayerGroup("window", (0,), 6), DraftGroup((1,))
    params = KVCacheParams(torch.float16, 1, 8, page_size=4, groups=groups, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, 4, 64, 2, ["cpu"], available_cache_memory=1 << 20)
    first, second = (TextContext([*range(22)], 64, name) for name in ("first", "second"))
    for one in (first, second):
        with manager.claim(one):
            manager.maybe_reserve(one)
            assert one.start_idx == (0 if one is first else 16)
            manager.fetch([one])
            one.update(1)
            manager.step([one])
            table = manager.block_table(one.request_id)
            assert table.digests == manager.contents.digests(one).digests
            assert table.kinds == ("draft", "window 6")


def test_the_first_page_of_a_row_publishes_no_draft_page_of_the_row_before() -> None:
    groups = LayerGroup("full", (0,)), DraftGroup((1,))
    params = KVCacheParams(torch.float16, 1, 8, page_size=4, groups=groups, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, 4, 16, 2, ["cpu"], available_cache_memory=1 << 20)
    published: list[int] = []
    for name, length in (("whole row", 15), ("one page", 4)):
        one = TextContext([length, *range(length - 1)], 16, name)
        manager.external_claim(name)
        manager.maybe_reserve(one)
        manager.fetch([one])
        one.update(1)
        manager.step([one])
        if length == 15:  # the token that fills the last column
            manager.maybe_reserve(one)
        published.append(int(np.count_nonzero(manager._replicas.each[0].pool.index.published)))
    assert published == [3 + 2, 3 + 2 + 1]


def drafting(pages: int = 64) -> PagedKVCacheManager:
    return manager_of(pages, layers=2, params={"groups": (LayerGroup("full", (0,)), DraftGroup((1,)))})


def run(manager: PagedKVCacheManager, context: TextContext) -> int:
    """Returns the token from which the request ran."""
    assert manager.maybe_reserve(context)
    start = context.start_idx
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    return start


def test_a_fork_does_not_write_the_draft_page_of_its_parent() -> None:
    """After full pages, both compute the draft KV of the last token again, each with its own next token."""
    manager = drafting()
    parent = TextContext(range(8), 64, "parent")
    manager.external_claim("parent")
    run(manager, parent)
    pages = manager.device_tensors[0][0]
    pages.copy_(torch.rand(pages.shape))
    child = TextContext([*range(8), 9], 64, "child")
    assert manager.fork(parent, child)
    parents, childs = (manager.block_table(one).groups for one in ("parent", "child"))
    assert childs[0] == parents[0]
    assert [one == other for one, other in zip(childs[1], parents[1], strict=True)] == [True, False]
    assert torch.equal(pages[childs[1][1]], pages[parents[1][1]])


@pytest.mark.parametrize("free", [2, 3])
def test_a_fork_needs_a_page_for_the_draft_kv_that_it_computes_again(free: int) -> None:
    manager = drafting(4 + free)
    parent = TextContext(range(8), 64, "parent")
    manager.external_claim("parent")
    run(manager, parent)
    assert manager.num_free_blocks == free
    assert manager.fork(parent, parent.fork("child")) == (free == 3)
    assert manager.num_free_blocks == free - 3 * (free == 3)


@pytest.mark.parametrize("forks", [True, False])
def test_a_request_whose_draft_kv_must_be_computed_again_resumes_at_no_later_token(*, forks: bool) -> None:
    """The source knew no token after its full pages. A hit after them would keep the draft KV of another next token."""
    manager, source = drafting(), drafting()
    first, goes_on = TextContext(range(8), 64, "first"), TextContext(range(30), 64, "goes on")
    other = TextContext(range(30), 64, "other")
    of = manager if forks else source
    of.external_claim("first")
    run(of, first)
    if not forks:
        manager.external_claim("goes on")
        pending = manager.import_block_table(goes_on, source.block_table("first"))
        assert pending is not None
        manager.commit_import(goes_on, pending, proven(manager, pending))
    with manager.claim(other):
        run(manager, other)
    if forks:
        assert manager.fork(first, goes_on)
    goes_on.set_token_indices(active_idx=10)
    assert run(manager, goes_on) == 8
    assert run(manager, goes_on) == 24, "now the next token is known"


@pytest.mark.parametrize(
    ("page_size", "named", "reason"),
    [
        (4, slice(0, 1), "names 1 pages of sinks 6 window 5, which has 2 pages of sinks"),
        (4, slice(0, 2), "names pages of sinks 6 window 5 from token 24 on; those from token 16 on are needed"),
        (8, slice(None), "has pages of 4 tokens; layers with attention sinks are imported only in pages of 8"),
    ],
)
def test_a_table_without_all_sinks_and_the_window_is_refused(page_size: int, named: slice, reason: str) -> None:
    def made(size: int) -> PagedKVCacheManager:
        groups = (SinkGroup((0,), window=5, sinks=6),)
        params = KVCacheParams(torch.float16, 1, 8, page_size=size, groups=groups, enable_prefix_caching=True)
        return PagedKVCacheManager(params, 4, 64, 1, ["cpu"], available_cache_memory=1 << 20)

    source, reader = made(4), made(page_size)
    prompt, theirs = TextContext(range(23), 64, "r"), TextContext(range(24), 64, "r")
    source.external_claim("r")
    assert source.maybe_reserve(prompt)
    source.fetch([prompt])
    prompt.update(23)
    source.step([prompt])
    table = source.block_table("r")
    assert [len(pages) for pages in table.groups] == [4]  # of six pages
    reader.external_claim("r")
    with pytest.raises(BlockTableMismatchError, match=reason):
        reader.import_block_table(theirs, msgspec.structs.replace(table, groups=(table.groups[0][named],)))
    reader.check()
    assert reader.num_held_blocks == 0


def test_a_model_of_draft_layers_alone_is_checked() -> None:
    """Its rows have published pages, but none that are named by their own tokens."""
    manager = manager_of(layers=1, params={"groups": (DraftGroup((0,)),)})
    for name, start in (("first", 0), ("second", 12)):
        context = TextContext(range(20), 64, name)
        with manager.claim(context):
            assert run(manager, context) == start
            manager.check()


def test_an_import_copies_no_draft_kv_that_its_source_computes_again() -> None:
    """The token after a table is not known when the table is made. The next step decides the KV of the last token."""
    source, reader = drafting(), drafting()
    theirs, ours = source.device_tensors[0][0], reader.device_tensors[0][0]
    prompt = TextContext(range(16), 64, "prompt")
    source.external_claim("prompt")
    lease = source.lease("prompt")
    run(source, prompt)
    goes_on = TextContext([*range(16), 1], 64, "goes on")
    reader.external_claim("goes on")
    pending = reader.import_block_table(goes_on, source.block_table("prompt", full_pages=True), partial=True)
    assert pending is not None
    copier = reader.copier(pending)

    def copy(*, last: bool) -> None:
        for dst, src, (token, stop) in copier.take(last=last):
            for position in range(token, stop):
                pages = np.asarray(dst)[position // 4 - token // 4], np.asarray(src)[position // 4 - token // 4]
                ours[pages[0], :, :, position % 4] = theirs[pages[1], :, :, position % 4]

    theirs.fill_(1)
    copy(last=False)
    run(source, prompt)
    theirs[source.block_table("prompt").groups[1][3], :, :, 3] = 2  # the step computes the draft KV of token 15 again
    goes_on.update(1)
    reader.extend_import(goes_on, pending, source.block_table("prompt"), last=True)
    copy(last=True)
    reader.commit_import(goes_on, pending, copier.prove())
    assert ours[reader.block_table("goes on").groups[1][3], 0, 0, :, 0, 0].tolist() == [1, 1, 1, 2]
    source.end_lease(lease)


def test_an_import_copies_no_draft_kv_from_a_manager_whose_request_goes_on_otherwise() -> None:
    source, other, reader = drafting(), drafting(), drafting()
    for manager, length in ((source, 16), (other, 8)):
        manager.external_claim("prompt")
        run(manager, TextContext(range(length), 64, "prompt"))
    context = TextContext(range(17), 64, "reader")
    reader.external_claim("reader")
    tables = source.block_table("prompt"), other.block_table("prompt")
    pending = reader.import_block_table(context, tables[0], others=tables[1:])
    assert pending is not None
    copier = reader.copier(pending)
    copier.take()
    (_, (of_full, of_draft)), *_ = copier.from_others()
    assert of_full.tokens == (0, 8)
    assert of_draft.tokens == (0, 0), "its token 7 belongs to another token 8"


def test_sinks_that_come_from_the_host_are_published_with_the_next_page() -> None:
    manager = manager_of(layers=1, host_slots=40, params={"groups": (SinkGroup((0,), window=4, sinks=2),)})
    for name, start in (("first", 0), ("second", 28)):
        context = TextContext(range(30), 64, name)
        with manager.claim(context):
            assert manager.maybe_reserve(context)
            assert run(manager, context) == start
            manager.check()
        assert manager.contents.cached(0, manager.contents.digests(context)) == 28
        manager.flush_tiers()
        evict_idle(manager)
        assert manager.contents.cached(0, manager.contents.digests(context)) == 0


@pytest.mark.parametrize("next_page", [True, False])
def test_a_state_in_the_middle_of_a_cached_prefix_is_resumed_from_beside_draft_layers(*, next_page: bool) -> None:
    """The draft page before the state is named by the page after it, which the lookup must not leave out."""
    groups = LayerGroup("full", (0,)), DraftGroup((1,))
    shape = StateShape(1, 1, 1, 1, 1, 2, torch.float32, torch.float32)
    manager = manager_of(40, layers=2, params={"groups": groups, "states": shape, "state_copies": 4})
    first = TextContext(range(9), 64, "first")
    second = TextContext([*range(9), *[1] * (2 + next_page), 5], 64, "second")
    (states,) = manager.states
    with manager.claim(first):
        while first.start_idx < 17:  # the state at token 12 is kept only until there is one at token 16
            assert manager.maybe_reserve(first)
            manager.fetch([first])
            states.advance(states.pages_at(["first"], [first.start_idx]), [first.active_idx])
            first.update(1)
            manager.step([first])
    with manager.claim(second):
        assert manager.maybe_reserve(second)
        assert second.start_idx == 8 * next_page


class SecondFirst(LruOrder):
    """Evicts page 2 before all others. The first request's main layers have it for the second page of its tokens."""

    def append(self, pages: NDArray[np.integer]) -> None:
        super().append(pages[np.argsort(pages != 2, kind="stable")])


@pytest.mark.parametrize("states", [False, True])
def test_a_draft_page_is_found_after_the_page_that_names_it_is_evicted(*, states: bool) -> None:
    """The digest of the evicted page is known from the tokens, so the hit has the page before it."""
    groups = LayerGroup("full", (0,)), DraftGroup((1,))
    shape = StateShape(1, 1, 1, 1, 1, 2, torch.float32, torch.float32)
    params: dict[str, object] = {"groups": groups, "eviction_order": SecondFirst}
    params |= {"states": shape, "state_copies": 4, "state_every_pages": 1} if states else {}
    manager = manager_of(8 + 4 * states, layers=2, params=params)  # 8 token pages
    published: list[int] = []

    def ran(name: str, first_token: int, length: int) -> int:
        one = TextContext([first_token, *range(1, length)], 64, name)
        with manager.claim(one):
            found = -1
            while one.start_idx < length:
                assert manager.maybe_reserve(one)
                found = one.start_idx if found < 0 else found
                manager.fetch([one])
                for of_rows in manager.states:
                    of_rows.advance(of_rows.pages_at([name], [one.start_idx]), [one.active_idx])
                one.update(1)
                manager.step([one])
        published.append(int(np.count_nonzero(manager._replicas.each[0].pool.index.published)))
        return found

    assert ran("first", 0, 9) == 0
    assert ran("other", 50, 9) == 0  # its six pages of eight evict one of the three that are published
    assert published == [3, 2 + 3]
    assert ran("again", 0, 9) == 4


def test_a_hint_for_tokens_after_the_published_pages_keeps_the_sinks_that_are_there() -> None:
    groups = LayerGroup("full", (0,)), SinkGroup((1,), window=4, sinks=8)
    manager = manager_of(40, layers=2, params={"groups": groups})
    for length in (3, 6, 40):  # in pages of 4 tokens: no page, a part of the sinks, and all of them
        context = TextContext([length, *range(length - 1)], 64, f"{length}")
        context.retention = Retention(True, 50, None, ranges=(RangeRetention(0, 60, True, 75, None),))
        with manager.claim(context):
            run(manager, context)
        manager.check()
    assert manager.num_held_blocks == 0
