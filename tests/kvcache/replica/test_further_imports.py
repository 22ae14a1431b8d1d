"""Hand-overs with several block tables: in each table, decode pulls exactly the pages that it lacks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcache import (
    BlockTable,
    BlockTableMismatchError,
    LayerGroup,
    PagedKVCacheManager,
    PromptTooLongError,
    SinkGroup,
    TextContext,
)
from kvcache.replica import imports
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.kv import KVTokens, goes_on
from tests.kvcache.random_model.matrix import layouts
from tests.kvcache.replica.test_further_tables import columns, gone

SIZE = 4
# The model has three tables. A window takes 2 pages.
FULL_TWICE = LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6)
PROMPT = [*range(100, 140)]
NEXT = 7


def make(groups: Any = FULL_TWICE, layers: int = 3, pages: int = 100, **options: Any) -> PagedKVCacheManager:
    params = {"groups": groups, **options.pop("params", {})}
    return manager_of(pages, page_size=SIZE, layers=layers, dtype=torch.int64, params=params, **options)


def computed(manager: PagedKVCacheManager, tokens: list[int], name: str = "p", chunk: int = 0) -> TextContext:
    """Returns a claimed request whose prompt was computed, in chunks of `chunk` tokens if `chunk` is given. The request
    also has its first new token.
    """
    context = TextContext(tokens, 256, name)
    manager.external_claim(name, 0)
    for _ in as_long_as(lambda: context.start_idx < len(tokens)):
        active = min(context.end_idx, context.start_idx + (chunk or len(tokens)))
        context.set_token_indices(active_idx=active)
        assert manager.maybe_reserve(context)
        KVTokens(manager).run_contexts([context], manager.fetch([context]))
        context.update(NEXT)
        manager.step([context])
    return context


def table_of(manager: PagedKVCacheManager, tokens: list[int], name: str = "p") -> BlockTable:
    computed(manager, tokens, name)
    return manager.block_table(name)


def receiver(manager: PagedKVCacheManager, tokens: list[int], name: str = "d") -> TextContext:
    manager.external_claim(name, 0)
    return TextContext([*tokens, NEXT], 256, name)


def copied(source: PagedKVCacheManager, target: PagedKVCacheManager, copier: Any) -> list[int]:
    """Copies the pages that the copier names now, and tells the copier that no more pages follow. Returns the number of
    copied pages of each table.
    """
    counts: list[int] = []
    for dst, src, (first, stop) in copier.take(last=True):
        assert first <= stop
        count = -(-stop // SIZE) - first // SIZE if first < stop else 0
        theirs, ours = np.asarray(src)[:count], np.asarray(dst)[:count]
        assert len(theirs) == len(ours) == count
        target.device_tensors[0][0][ours] = source.device_tensors[0][0][theirs]
        counts.append(count)
    target.check()
    return counts


def pulled(
    source: PagedKVCacheManager, target: PagedKVCacheManager, tokens: list[int], table: BlockTable, name: str = "d"
) -> tuple[TextContext, list[int]]:
    """Runs the request on the target over imported pages, and compares the KV of every token that it sees.

    Returns the number of copied pages of each table.
    """
    context = receiver(target, tokens, name)
    pending = target.import_block_table(context, table)
    assert pending is not None
    copier, counts = target.copier(pending), [0] * len(table.groups)
    if pending.needs_copy:
        counts = copied(source, target, copier)
    else:
        assert all(first <= stop for *_, (first, stop) in pending.take(last=True))
    target.commit_import(context, pending, copier.prove() if pending.needs_copy else None)
    goes_on(target, context, 9)
    return context, counts


def test_a_table_names_of_a_window_what_the_next_token_sees() -> None:
    manager = make()
    table = table_of(manager, PROMPT)
    assert [len(pages) for pages in table.groups] == [10, 10, 2]
    assert table.kinds == ("full", "window 6")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=BlockTable) == table
    assert [len(pages) for pages in manager.block_table("p", full_pages=True).groups] == [10, 10, 0]
    assert manager.block_table("p", first_page=3) == manager.block_table("p"), "several tables are told whole"


def test_only_the_pages_of_the_last_window_are_copied_and_held() -> None:
    source, target = make(), make()
    context, counts = pulled(source, target, PROMPT, table_of(source, PROMPT))
    assert counts == [10, 10, 2]
    assert context.tokens.tolist() == [*PROMPT, *[NEXT] * 10]
    assert columns(target, context, 1) == [10, 11, 12]


@pytest.mark.parametrize(("theirs", "ours"), [(False, True), (True, False), (False, False)])
def test_without_digests_too_only_the_pages_of_the_last_window_are_copied_and_held(*, theirs: bool, ours: bool) -> None:
    source, target = make(caching=theirs), make(caching=ours)
    context, counts = pulled(source, target, PROMPT, table_of(source, PROMPT))
    assert counts == [10, 10, 2]
    assert columns(target, context, 1) == [10, 11, 12]


@pytest.mark.parametrize("lost", [8, 9])
def test_if_only_the_window_was_evicted_only_its_pages_are_copied(lost: int) -> None:
    source, target = make(), make()
    table = table_of(source, PROMPT)
    pulled(source, target, PROMPT, table)
    target.release("d")
    gone(target, PROMPT, 1, lost)
    again, counts = pulled(source, target, PROMPT, table, "e")
    assert counts == [0, 0, 10 - lost]
    target.release(again.request_id)
    assert pulled(source, target, PROMPT, table, "f")[1] == [0, 0, 0]


def test_each_group_is_copied_from_its_own_first_missing_page_on() -> None:
    source, target = make(), make()
    table = table_of(source, PROMPT)
    pulled(source, target, PROMPT, table)
    target.release("d")
    gone(target, PROMPT, 0, 6)  # Table 1 is the table of the second full layer. It loses a page.
    assert pulled(source, target, PROMPT, table, "e")[1] == [4, 4, 0]


@pytest.mark.parametrize("covers", [21, 24, 38, 39])
def test_a_table_shorter_than_the_cached_prefix_copies_no_cached_page(covers: int) -> None:
    source, target = make(), make()
    pulled(source, target, PROMPT, table_of(source, PROMPT))
    part = table_of(source, PROMPT[:covers], "q")
    longer, counts = pulled(source, target, PROMPT, part, "e")
    assert sum(counts) == 0
    assert longer.tokens[:40].tolist() == PROMPT


def test_a_source_with_larger_pages_need_not_name_those_before_the_end_of_the_cached_prefix() -> None:
    table = BlockTable(
        request_id="p",
        replica_idx=0,
        num_tokens=20,
        page_size=16,
        groups=((1, 2), ()),
        fingerprint="",
        kinds=("window 6",),
    )
    context = TextContext(PROMPT, 256, "d")
    target = make((LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)), 2)
    replica = target._replicas.each[0]
    # All tokens of the table are cached here.
    imports._check_reach(replica, context, table, [0, 24])
    with pytest.raises(BlockTableMismatchError, match="names pages of window 6 .* from token 16 on are needed"):
        imports._check_reach(replica, context, table, [0, 16])


def test_a_table_shorter_than_the_prompt_leaves_the_rest_to_be_computed() -> None:
    source, target = make(), make()
    part = table_of(source, PROMPT[:22])
    context = receiver(target, PROMPT)
    pending = target.import_block_table(context, part)
    assert pending is not None
    copier = target.copier(pending)
    assert copied(source, target, copier) == [6, 6, 2]
    target.commit_import(context, pending, copier.prove())
    assert context.start_idx == 22
    goes_on(target, context, 9)


def test_chunks_are_copied_as_they_come_and_windows_at_the_end() -> None:
    source, target = make(), make()
    held = source.lease  # The lease begins before the prompt runs.
    prefill = TextContext(PROMPT, 256, "p")
    source.external_claim("p", 0)
    lease, pending, context, kv = held("p"), None, receiver(target, PROMPT), KVTokens(source)
    context = TextContext(PROMPT, 256, "d")
    copier: Any = None
    counts: list[list[int]] = []
    last = False
    while not last:
        prefill.set_token_indices(active_idx=min(prefill.end_idx, prefill.start_idx + 12))
        assert source.maybe_reserve(prefill)
        kv.run_contexts([prefill], source.fetch([prefill]))
        prefill.update(NEXT)
        source.step([prefill])
        last = prefill.end_idx > len(PROMPT)
        table = source.block_table("p", full_pages=not last)
        if last:
            source.release("p")
            context.update(NEXT)
        if pending is None:
            pending = target.import_block_table(context, table, partial=True)
            assert pending is not None
            copier = target.copier(pending)
        else:
            target.extend_import(context, pending, table, last=last)
        copies = copier.take(last=last)
        counts.append([max(0, -(-stop // SIZE) - first // SIZE) for _, _, (first, stop) in copies])
        for (dst, src, _), count in zip(copies, counts[-1], strict=True):
            target.device_tensors[0][0][np.asarray(dst)[:count]] = source.device_tensors[0][0][np.asarray(src)[:count]]
    assert counts == [[3, 3, 0], [3, 3, 0], [3, 3, 0], [1, 1, 2]]
    assert pending is not None
    target.commit_import(context, pending, copier.prove())
    goes_on(target, context, 9)
    source.end_lease(lease)
    assert source.num_free_blocks == source.total_num_pages


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    "groups",
    [
        (LayerGroup("full", (0,)), LayerGroup("window", (1,), 1)),
        (LayerGroup("full", (0,)), LayerGroup("window", (1,), 4)),
        (LayerGroup("full", (0,)), LayerGroup("chunked", (1,), 7)),
        (LayerGroup("window", (0,), 6), LayerGroup("chunked", (1,), 8)),
        (LayerGroup("chunked", (0,), 4), LayerGroup("chunked", (1,), 4)),
        (LayerGroup("full", (0,)), SinkGroup((1,), window=3, sinks=2)),
        (SinkGroup((0,), window=1, sinks=5), LayerGroup("window", (1,), 4)),
    ],
)
def test_the_last_table_of_a_growing_import_may_leave_out_the_last_known_token_or_have_it(
    groups: tuple[LayerGroup, ...], *, is_known: bool
) -> None:
    """The last table leaves out the last token that the request knew at the beginning, or the request gets one more
    token in the meantime. A query at the end of either table may see another first page of a window.
    """
    source, target = make(groups, 2), make(groups, 2)
    for length in range(5, 14):
        name, tokens = f"{length}", [length, *range(1, length)]
        table = table_of(source, tokens, name)
        source.release(name)
        context = TextContext([*tokens, NEXT] if is_known else tokens, 256, name)
        target.external_claim(name, 0)
        pages, width = (length - 1) // SIZE, len(table.digests) // (length // SIZE)
        named = tuple(table.groups[0][:pages] if kind == "full" else () for kind in target.layer_tables.kinds)
        first = msgspec.structs.replace(
            table, num_tokens=pages * SIZE, groups=named[: len(table.groups)], digests=table.digests[: pages * width]
        )
        pending = target.import_block_table(context, first, partial=True)
        assert pending is not None
        if not is_known:
            context.update(NEXT)
        target.extend_import(context, pending, table, last=True)
        target.check()
        copier = target.copier(pending)
        copied(source, target, copier)
        target.commit_import(context, pending, copier.prove())
        goes_on(target, context, 2)
        target.release(name)
        assert target.num_held_blocks == 0


def test_windows_give_back_while_a_prompt_is_leased_and_stay_once_readers_know() -> None:
    manager = make()
    context = TextContext(PROMPT, 256, "p")
    manager.external_claim("p", 0)
    lease = manager.lease("p")
    for _ in as_long_as(lambda: context.start_idx < len(PROMPT)):
        context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + 8))
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(NEXT)
        manager.step([context])
        assert len(columns(manager, context, 1)) <= 4
        manager.block_table("p", full_pages=True)
    table = manager.block_table("p")
    goes_on_without_comparing(manager, context, 20)
    assert columns(manager, context, 1) == [12, 13, 14], "the request needs no more pages than without a lease"
    assert manager._replicas.each[0].pool.holders[list(table.groups[2])].tolist() == [1, 1]
    assert manager.num_leased_blocks == 2
    assert manager.block_table("p").groups[2] != table.groups[2], "the table now names another window"
    manager.release("p")
    assert manager.num_leased_blocks == 15 + 15 + 2 + 3
    manager.reset_prefix_cache()
    manager.end_lease(lease)
    other = computed(manager, [*range(200, 240)], "o", 8)
    lease = manager.lease("o")
    manager.block_table("o")
    manager.end_lease(lease)
    goes_on_without_comparing(manager, other, 20)
    assert len(columns(manager, other, 1)) <= 3, "no reader is left"


def test_a_partial_page_that_a_reader_knows_is_not_replaced_by_the_full_page_found_elsewhere() -> None:
    manager = make()
    context = TextContext(PROMPT, 256, "p")
    manager.external_claim("p", 0)
    context.set_token_indices(active_idx=2)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(NEXT)
    manager.step([context])
    lease = manager.lease("p")
    told = [group[0] for group in manager.block_table("p").groups]
    computed(manager, PROMPT, "o")
    assert manager.maybe_reserve(context)
    assert context.start_idx > SIZE, "the page that the other request has computed was found"
    holders = manager._replicas.each[0].pool.holders
    assert holders[told].tolist() == [1, 1, 1], "the lease holds the page of each table"
    manager.end_lease(lease)
    assert holders[told].tolist() == [0, 0, 0]
    manager.release("p")
    manager.release("o")
    manager.check()


def goes_on_without_comparing(manager: PagedKVCacheManager, context: TextContext, steps: int) -> None:
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(NEXT)
        manager.step([context])


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("groups", [(), (LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 30))])
def test_pages_that_leases_keep_do_not_count_as_room_for_a_request(groups: Any, told: bool) -> None:
    """Another request has computed a full page of which this request has only the first tokens. If this request now
    shares the full page, the page of its own row belongs to the lease if a table has named it. Otherwise it is free.
    """
    manager = make(groups, pages=60)
    tables = len(manager.layer_tables.tables)
    windows = manager.layer_tables.kinds.count("window 30")
    context = TextContext([*range(12)], 999, "r")
    manager.external_claim("r", 0)
    context.set_token_indices(active_idx=6)
    assert manager.maybe_reserve(context)
    KVTokens(manager).run_contexts([context], manager.fetch([context]))
    context.update(NEXT)
    manager.step([context])
    lease = manager.lease("r")
    if told:
        manager.block_table("r")
    computed(manager, [*range(12)], "other")
    free = manager.num_free_blocks + (0 if told else tables)
    columns_to_come = (free - windows) // tables  # The window has no page for tokens 8 to 12.
    assert not manager.maybe_reserve(context, 1 + 4 * (columns_to_come + 1))
    assert manager.maybe_reserve(context, 1 + 4 * columns_to_come)
    manager.check()
    manager.end_lease(lease)


def test_a_pool_that_holds_the_last_window_is_enough() -> None:
    source, target = make(), make(pages=40)
    tokens = [*range(300, 360)]  # The prompt takes 15 pages in each table. A window keeps only 2 or 3 of its pages.
    table = table_of(source, tokens)
    alone = TextContext([*tokens, NEXT], 256, "whole")
    target.external_claim("whole", 0)
    with pytest.raises(PromptTooLongError, match="48 pages"):
        target.maybe_reserve(alone)
    pulled(source, target, tokens, table)


def test_other_groups_are_refused_by_name() -> None:
    table = table_of(make(), PROMPT)
    one = manager_of(page_size=SIZE)
    with pytest.raises(BlockTableMismatchError, match="'d': the block table has 3 page groups; this manager has 1"):
        one.import_block_table(receiver(one, PROMPT), table)
    other = make((LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 9)))
    context = receiver(other, PROMPT)
    with pytest.raises(BlockTableMismatchError, match="full, full, window 6; this manager has full, full, window 9"):
        other.import_block_table(context, table)
    assert other.fingerprint != make().fingerprint
    target = make()
    context = receiver(target, PROMPT)
    wrong: list[tuple[Any, str]] = [
        ((table.groups[0], table.groups[1][1:], table.groups[2]), "names 9 pages; its 40 tokens take 10"),
        ((*table.groups[:2], (*table.groups[0], *table.groups[2])), "names 12 pages"),
        ((*table.groups[:2], table.groups[2][:1]), "pages of window 6 from token 36 on; those from token 32 on"),
        ((*table.groups[:2], table.groups[0][:2]), "names a page twice"),
    ]
    for groups, reason in wrong:
        with pytest.raises(BlockTableMismatchError, match=reason):
            target.import_block_table(context, msgspec.structs.replace(table, groups=groups))
    with pytest.raises(
        BlockTableMismatchError, match="begins with page 1; with the layer kinds full, full, window 6 it begins with 0"
    ):
        target.import_block_table(context, msgspec.structs.replace(table, first_page=1))
    assert target.num_held_blocks == 0
    assert target.import_block_table(context, table) is not None


def test_an_extension_says_the_same_pages_and_reaches_the_window() -> None:
    source, target = make(), make()
    first = table_of(source, PROMPT[:20])
    whole = table_of(source, PROMPT, "q")
    context = TextContext(PROMPT, 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(
        context, msgspec.structs.replace(first, groups=(*first.groups[:2], ())), partial=True
    )
    assert pending is not None
    part = computed(source, PROMPT[:24], "r")
    with pytest.raises(
        BlockTableMismatchError,
        match=r"'d': the block table is the last and covers 24 tokens, but this import, which was begun for up to 39, "
        r"has no pages of the layers of kind window \(6 tokens\) before token 32: cancel it",
    ):
        target.extend_import(context, pending, source.block_table(part.request_id), last=True)
    context.update(NEXT)
    with pytest.raises(BlockTableMismatchError, match="covers 24 tokens, but the request starts at token 40"):
        target.extend_import(context, pending, source.block_table(part.request_id), last=True)
    other = (whole.groups[0], (*whole.groups[1][1:], 99), whole.groups[2])
    with pytest.raises(BlockTableMismatchError, match="other pages than the earlier table"):
        target.extend_import(context, pending, msgspec.structs.replace(whole, groups=other), last=True)
    short = (*whole.groups[:2], whole.groups[2][1:])
    with pytest.raises(BlockTableMismatchError, match="pages of window 6 from token 36 on"):
        target.extend_import(context, pending, msgspec.structs.replace(whole, groups=short), last=True)
    target.extend_import(context, pending, whole, last=True)


def test_no_request_gets_the_pages_of_a_cancelled_import_before_its_copier_ends() -> None:
    source, target = make(), make()
    table = table_of(source, PROMPT)
    context = receiver(target, PROMPT)
    pending = target.import_block_table(context, table)
    assert pending is not None
    copier = target.copier(pending)
    copier.take()
    target.release("d")
    target.cancel_import(pending)
    assert target.num_held_blocks == 22
    copier.give_up()
    assert target.num_held_blocks == 0


def test_random_hand_overs() -> None:
    """Hand-overs with all kinds of tables, in pools that are so small that windows are evicted. All bytes must be
    right, and only needed pages may be copied.
    """
    seen: Counter[str] = Counter()
    for number in range(6):
        choose = random.Random(number)
        features = choose.choice((("window",), ("chunk",), ("window", "chunk")))
        layers, groups = choose.choice(layouts(features))
        caching = choose.random() < 0.8
        source = make(groups, layers, pages=150, caching=caching)
        target = make(groups, layers, pages=choose.choice((60, 90)), caching=caching)
        prompts = [[choose.randrange(3) for _ in range(50)] for _ in range(2)]
        running: dict[str, TextContext] = {}
        for turn in range(25):
            base = choose.choice(prompts)
            tokens = [*base[: choose.randrange(5, 50)], *(choose.randrange(3) for _ in range(choose.randrange(9)))]
            name = f"{number}.{turn}"
            computed(source, tokens, name, choose.choice((0, 7)))
            while True:
                try:
                    context, counts = pulled(source, target, tokens, source.block_table(name), name)
                    break
                except AssertionError:
                    if not running:
                        raise
                    if target.contains(name):
                        target.release(name)
                    target.release(running.popitem()[0])
            running[name] = context
            seen["pulls"] += 1
            seen["windows alone"] += not counts[0] and sum(counts) > 0
            seen["less of a further table"] += any(0 < count < counts[0] for count in counts)
            source.release(name)
            if choose.random() < 0.6 or len(running) == 3:
                target.release(running.pop(choose.choice(list(running))).request_id)
        seen["evicted"] += target.metrics.evictions
        for name in running:
            target.release(name)
        assert target.num_free_blocks == target.total_num_pages
        assert source.num_free_blocks == source.total_num_pages
    assert seen["windows alone"] > 1, seen
    assert seen["less of a further table"] > 50, seen
    assert seen["evicted"] > 100, seen
