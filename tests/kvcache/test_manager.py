"""Compares each public method with the documented behaviour, and with the intended differences from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    AlreadyClaimedError,
    InvalidParamsError,
    InvalidRequestError,
    KVCacheError,
    KVCacheParams,
    NoFreeRowError,
    NotReservedError,
    PagedKVCacheManager,
    PoolTooSmallError,
    PromptTooLongError,
    SequenceTooLongError,
    StateShape,
    TextContext,
    UnknownRequestError,
)


def claimed(manager: PagedKVCacheManager, tokens: Any, replica: int | None = None, **options: Any) -> TextContext:
    context = TextContext(tokens, 4096, **options)
    manager.external_claim(context.request_id, replica)
    return context


def run(manager: PagedKVCacheManager, contexts: list[TextContext], token: int = 7) -> None:
    """Runs one step of a serving loop without a model."""
    for context in contexts:
        assert manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(token)
    manager.step(contexts)


# ---- the worked example of the documentation: 1,000 tokens, pages of 128 tokens, ten steps


@pytest.fixture
def worked(make: Any) -> tuple[PagedKVCacheManager, TextContext]:
    manager = make(16, page_size=128, max_seq_len=2048)
    context = claimed(manager, range(1000))
    assert manager.maybe_reserve(context, num_steps=10)
    return manager, context


def test_fetch_returns_the_lengths_and_the_table_of_the_worked_example(worked: Any) -> None:
    manager, context = worked
    (entry,) = manager.fetch([context], num_steps=10)
    assert entry.cache_lengths.tolist() == [0]
    assert entry.cache_lengths.dtype == entry.lookup_table.dtype == entry.max_lengths.dtype == torch.int32
    # The prompt takes ceil(1009 / 128) adjacent pages.
    assert entry.lookup_table.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert entry.max_lengths.tolist() == [[1000, 1000], *([1, 1000 + step] for step in range(1, 10))]
    assert entry.blocks is manager.device_tensors[0][0]
    assert entry.blocks.shape == (17, 2, 1, 128, 1, 2)


def test_ten_updates_then_a_step_commit_the_full_pages(worked: Any) -> None:
    manager, context = worked
    for token in range(10):
        context.update(token)
    assert (context.start_idx, context.active_idx, context.end_idx) == (1009, 1010, 1010)
    manager.step([context])
    again = claimed(manager, range(1000))
    assert manager.maybe_reserve(again)
    assert again.start_idx == 7 * 128
    assert manager.get_req_blocks(again.request_id)[:7] == manager.get_req_blocks(context.request_id)[:7]


def test_increment_cache_lengths_adds_the_tokens_that_ran(worked: Any) -> None:
    manager, context = worked
    entries = manager.fetch([context], num_steps=3)
    table = entries[0].lookup_table
    first = manager.increment_cache_lengths(entries, SimpleNamespace(input_row_offsets=torch.tensor([0, 1000])))
    assert first is entries
    assert first[0].cache_lengths.tolist() == [1000]
    assert first[0].max_lengths.tolist() == [[1, 1001], [1, 1002]]
    assert first[0].lookup_table is table
    for _ in range(2):
        manager.increment_cache_lengths(entries, SimpleNamespace(input_row_offsets=[torch.tensor([0, 1])]))
    assert entries[0].cache_lengths.tolist() == [1002]
    assert entries[0].max_lengths.shape == (0, 2)


# ---- claiming


def test_a_claim_takes_a_row_but_no_page(make: Any) -> None:
    manager = make(8, rows=2)
    assert manager.external_claim("a") is None
    assert manager.contains("a")
    assert not manager.contains("b")
    assert manager.num_free_blocks == 8
    assert manager.get_req_blocks("a") == []
    with pytest.raises(AlreadyClaimedError, match="'a'.*replica 0"):
        manager.external_claim("a")
    manager.external_claim("b")
    with pytest.raises(NoFreeRowError, match="'c'.*2 rows"):
        manager.external_claim("c")
    manager.release("a")
    manager.external_claim("c")


def test_with_several_replicas_a_claim_has_to_name_one(make: Any) -> None:
    manager = make(8, dp=2)
    for bad in (None, 2, -1):
        with pytest.raises(InvalidRequestError, match=rf"'a'.*{bad}.*0 to 1 is needed"):
            manager.external_claim("a", bad)
    assert not manager.contains("a")
    manager.external_claim("a", replica_idx=1)
    with pytest.raises(AlreadyClaimedError, match="replica 1"):
        manager.external_claim("a", replica_idx=1)


@pytest.mark.parametrize("call", ["maybe_reserve", "get_replica", "release", "get_req_blocks", "block_table"])
def test_an_unclaimed_request_is_a_key_error_that_names_it(make: Any, call: str) -> None:
    manager, context = make(8), TextContext([1], 8, "ghost")
    argument = context if call in ("maybe_reserve", "get_replica") else "ghost"
    with pytest.raises(KeyError, match=f"'ghost': {call}") as caught:
        getattr(manager, call)(argument)
    assert isinstance(caught.value, (KVCacheError, UnknownRequestError))


@pytest.mark.parametrize("wrong", [5, None, ["a"]])
def test_a_call_that_only_asks_also_refuses_what_is_no_request(make: Any, wrong: Any) -> None:
    manager = make(8)
    with pytest.raises(InvalidRequestError, match="contains: request_id is .*: a string is needed"):
        manager.contains(wrong)
    for call in ("get_replica", "get_or_recommend_replica", "admission", "prefetch", "maybe_reserve"):
        with pytest.raises(InvalidRequestError, match=f"^{call} of .*: request_id is None: a string is needed"):
            getattr(manager, call)(wrong)


@pytest.mark.parametrize("call", ["fetch", "step", "reserve_batch", "batch", "get_data_parallel_splits"])
def test_a_batch_with_an_unclaimed_or_repeated_request_is_refused(make: Any, call: str) -> None:
    manager = make(8)
    known = claimed(manager, [1, 2, 3])
    with pytest.raises(UnknownRequestError, match="ghost"):
        getattr(manager, call)([known, TextContext([1], 8, "ghost")])
    with pytest.raises(InvalidRequestError, match="named twice"):
        getattr(manager, call)([known, known])
    assert manager.num_free_blocks == 8


@pytest.mark.parametrize("call", ["fetch", "step", "reserve_batch", "batch", "get_data_parallel_splits"])
def test_a_batch_that_is_no_sequence_of_requests_is_refused_and_a_repeated_request_is_named(
    make: Any, call: str
) -> None:
    manager = make(8)
    first, twice = claimed(manager, [1], request_id="first"), claimed(manager, [2], request_id="twice")
    with pytest.raises(InvalidRequestError, match=f"^{call} got 5: a sequence of request contexts is needed"):
        getattr(manager, call)(5)
    with pytest.raises(InvalidRequestError, match=f"^{call} of None: request_id is None: a string is needed"):
        getattr(manager, call)([first, None])
    with pytest.raises(InvalidRequestError, match=f"^request 'twice': is named twice in one {call}"):
        getattr(manager, call)([first, twice, twice])


def test_claim_as_a_context_manager_releases_at_the_end(make: Any) -> None:
    manager, context = make(8), TextContext(range(9), 64)
    with manager.claim(context) as replica:
        assert replica == manager.get_replica(context) == 0
        assert manager.maybe_reserve(context)
        assert manager.num_free_blocks == 5
    assert not manager.contains(context.request_id)
    assert manager.num_free_blocks == 8
    with pytest.raises(ZeroDivisionError, match="the block's own"), manager.claim(context):
        raise ZeroDivisionError("the block's own")
    assert not manager.contains(context.request_id)
    with manager.claim(context):
        # The `with` block has released the request, so its end gives nothing back.
        manager.release(context.request_id)
    assert manager.num_free_blocks == 8


# ---- reserving


def test_a_prompt_larger_than_the_pool_is_refused_before_anything_changes(make: Any) -> None:
    manager = make(4, page_size=4)
    context = claimed(manager, range(17), request_id="big")
    with pytest.raises(PromptTooLongError, match="'big': 17 tokens need 5 pages, but the pool has 4") as caught:
        manager.maybe_reserve(context)
    assert isinstance(caught.value, RuntimeError)
    assert manager.num_free_blocks == 4
    assert context.start_idx == 0


def test_a_sequence_past_max_seq_len_is_an_error_that_names_both(make: Any) -> None:
    manager = make(64, page_size=4, max_seq_len=20)
    context = claimed(manager, range(20), request_id="long")
    assert manager.maybe_reserve(context)
    with pytest.raises(SequenceTooLongError, match="'long': .*21 tokens.*max_seq_len is 20"):
        manager.maybe_reserve(context, num_steps=2)
    with pytest.raises(SequenceTooLongError, match="'long': .*21 tokens.*max_seq_len is 20"):
        manager.fetch([context], num_steps=2)


@pytest.mark.parametrize(
    ("tokens", "steps", "pages"), [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 1, 2), (5, 4, 2), (5, 5, 3)]
)
def test_pages_are_reserved_for_every_step_but_the_last_token(make: Any, tokens: int, steps: int, pages: int) -> None:
    manager = make(8, page_size=4)
    context = claimed(manager, range(tokens))
    assert manager.maybe_reserve(context, num_steps=steps)
    assert len(manager.get_req_blocks(context.request_id)) == pages
    assert manager.maybe_reserve(context, num_steps=steps)
    assert len(manager.get_req_blocks(context.request_id)) == pages


def test_steps_below_one_are_refused(make: Any) -> None:
    manager = make(8)
    context = claimed(manager, [1])
    for call in (manager.maybe_reserve, lambda c, n: manager.fetch([c], n), lambda c, n: manager.reserve_batch([c], n)):
        with pytest.raises(InvalidRequestError, match="num_steps is 0"):
            call(context, 0)


def test_reserve_batch_gives_each_its_answer(make: Any) -> None:
    manager = make(5, page_size=4)
    contexts = [claimed(manager, range(start, start + 8)) for start in (0, 100, 200)]
    assert manager.reserve_batch(contexts).tolist() == [True, True, False]
    assert manager.reserve_batch(manager.batch(contexts[:2])).tolist() == [True, True]
    too_long = claimed(manager, range(21))
    before = manager.num_free_blocks
    manager.release(contexts[0].request_id)
    with pytest.raises(PromptTooLongError, match="21 tokens need 6 pages, but the pool has 5 pages of 4 tokens"):
        manager.reserve_batch([contexts[2], too_long])
    assert manager.num_free_blocks == before + 2  # The first request of the batch has taken no page.


# ---- prefix caching


def test_salts_keep_requests_apart(make: Any) -> None:
    manager = make(32, page_size=4)
    run(manager, [claimed(manager, range(9), cache_salt="a")])
    for salt, start in (("b", 0), (None, 0), ("", 0), ("a", 8)):
        context = claimed(manager, range(9), cache_salt=salt)
        assert manager.maybe_reserve(context)
        assert context.start_idx == start, salt


def test_evicted_pages_are_handed_out_in_ascending_order(make: Any) -> None:
    manager = make(12, page_size=4)
    owners = [claimed(manager, range(start, start + 17)) for start in (0, 100)]
    run(manager, owners)
    assert manager.num_free_blocks == 2
    # The last owner releases first. Each owner's last page is evicted before its first page.
    for owner in owners[::-1]:
        manager.release(owner.request_id)
    assert manager.maybe_reserve(claimed(manager, range(300, 316)))  # The request takes the empty pages.
    assert manager.metrics.evictions == 0
    following = claimed(manager, range(200, 220))
    assert manager.maybe_reserve(following)
    assert manager.metrics.evictions == 5
    pages = manager.get_req_blocks(following.request_id)
    assert pages == sorted(pages)


# ---- fetch


def test_fetch_never_allocates(make: Any) -> None:
    manager = make(8, page_size=4)
    context = claimed(manager, range(4), request_id="short")
    with pytest.raises(NotReservedError, match="'short': 4 tokens.*hold 0.*maybe_reserve"):
        manager.fetch([context])
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    with pytest.raises(NotReservedError, match="'short': 5 tokens.*hold 4"):
        manager.fetch([context], num_steps=2)
    assert manager.num_free_blocks == 7


def test_unused_entries_name_the_null_page(make: Any) -> None:
    manager = make(8, page_size=4)
    long, short = claimed(manager, range(9)), claimed(manager, range(50, 52))
    assert manager.reserve_batch([long, short]).all()
    (entry,) = manager.fetch([long, short])
    assert entry.lookup_table.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert not entry.blocks[0].any()


def test_rows_in_claim_order_are_a_view_of_the_block_table(make: Any) -> None:
    manager = make(32, page_size=4)
    contexts = [claimed(manager, range(start, start + 5)) for start in (0, 10)]
    assert manager.reserve_batch(contexts).all()
    first, second = manager.fetch(contexts)[0], manager.fetch(contexts)[0]
    assert first.lookup_table.data_ptr() == second.lookup_table.data_ptr()


def test_an_empty_batch_and_an_empty_replica(make: Any) -> None:
    manager = make(8, page_size=4, dp=2)
    context = claimed(manager, range(5), 1)
    assert manager.maybe_reserve(context)
    empty, full = manager.fetch([context])
    assert empty.lookup_table.shape == (0, 0)
    assert empty.cache_lengths.shape == (0,)
    assert empty.max_lengths.tolist() == [[0, 0]]
    assert full.max_lengths.tolist() == [[5, 5]]
    assert [len(entry.cache_lengths) for entry in manager.fetch([])] == [0, 0]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)])
def test_entries_are_replica_major_and_shards_share_a_table(make: Any, dp: int, tp: int) -> None:
    manager = make(16, page_size=4, dp=dp, tp=tp, heads=4)
    contexts = [claimed(manager, range(at, at + 6), at % dp) for at in range(5)]
    assert manager.reserve_batch(contexts).all()
    entries = manager.fetch(contexts)
    assert len(entries) == dp * tp
    for replica in range(dp):
        wanted = [manager.get_req_blocks(context.request_id) for context in contexts[replica::dp]]
        for shard in range(tp):
            entry = entries[replica * tp + shard]
            assert entry.lookup_table.tolist() == wanted
            assert entry.blocks.shape == (17, 2, 1, 4, 4 // tp, 2)
            assert entry.blocks is manager.device_tensors[replica][shard]
    pools = {entry.blocks.data_ptr() for entry in entries}
    assert len(pools) == dp * tp


def test_a_page_is_stored_head_by_head(make: Any) -> None:
    manager = make(4, page_size=8, layers=3, heads=2, head_dim=5)
    blocks = manager.device_tensors[0][0]
    assert blocks.shape == (5, 2, 3, 8, 2, 5)
    # The order in memory is page, head, layer, side, token, dim.
    assert blocks.permute(0, 4, 2, 1, 3, 5).is_contiguous()


def test_an_mla_page_has_no_separate_keys_and_values(make: Any) -> None:
    manager = make(4, page_size=4, heads=1, tp=2, params={"is_mla": True})
    assert [tuple(blocks.shape) for blocks in manager.device_tensors[0]] == [(5, 1, 1, 4, 1, 2)] * 2
    assert manager.total_num_pages == 4


# ---- step and release


def test_step_refuses_tokens_that_have_no_page_before_touching_any_request(make: Any) -> None:
    manager = make(8, page_size=4)
    fine, wrong = claimed(manager, range(4)), claimed(manager, range(50, 54), request_id="wrong")
    assert manager.maybe_reserve(fine)
    fine.update(1)
    wrong.update(1)
    with pytest.raises(NotReservedError, match="'wrong': 4 tokens computed.*hold 0"):
        manager.step([fine, wrong])
    with pytest.raises(InvalidRequestError, match="none of its tokens are computed yet"):
        manager.block_table(fine.request_id)  # The prompt has run, but no `step` has recorded it.


# ---- replicas


def test_the_recommendation_is_the_request_s_own_replica_or_else_the_one_with_the_fewest_claims(make: Any) -> None:
    manager = make(32, page_size=4, dp=3)
    first = claimed(manager, range(5), 2)
    assert manager.get_or_recommend_replica(first) == 2
    fresh = TextContext(range(50, 55), 64)
    assert manager.get_or_recommend_replica(fresh) == 0
    manager.external_claim("x", 0)
    assert manager.get_or_recommend_replica(fresh) == 1


def test_recommendation_follows_a_cached_prefix(make: Any) -> None:
    manager = make(64, page_size=4, dp=2)
    run(manager, [owner := claimed(manager, range(80), 1)])
    manager.release(owner.request_id)
    assert manager.get_or_recommend_replica(TextContext(range(90), 128)) == 1
    assert manager.get_or_recommend_replica(TextContext(range(200, 290), 512)) == 0


def test_data_parallel_splits_are_cumulative_and_need_a_batch_ordered_by_replica(make: Any) -> None:
    manager = make(16, dp=2)
    one, two, three = (claimed(manager, [1, 2], replica) for replica in (0, 1, 1))
    splits = manager.get_data_parallel_splits([one, two, three])
    assert splits.dtype == torch.int64
    assert splits.tolist() == [0, 1, 3]
    assert manager.get_data_parallel_splits([]).tolist() == [0, 0, 0]
    with pytest.raises(InvalidRequestError, match="order its requests by replica"):
        manager.get_data_parallel_splits([two, one])


def test_increment_cache_lengths_splits_the_offsets_by_replica_and_refuses_wrong_ones(make: Any) -> None:
    manager = make(16, page_size=4, dp=2, tp=2, heads=2)
    contexts = [claimed(manager, range(count), replica) for count, replica in ((3, 0), (5, 1), (2, 1))]
    assert manager.reserve_batch(contexts, 2).all()
    entries = manager.fetch(contexts, 2)
    before = list(entries)
    ran = SimpleNamespace(input_row_offsets=torch.tensor([0, 3, 8, 10]), data_parallel_splits=[0, 1, 3])
    for offsets, splits, message in (
        ([0, 3, 8], [0, 1, 2], "replica 1: got 1 row offsets for 2 requests"),
        ([0, 3, 8, 10], [0, 1], r"data_parallel_splits is \[0, 1\]: it must divide 3 requests among 2 replicas"),
        ([0, 3, 8, 10], [0, 2, 3], "replica 0: got 2 row offsets for 1 requests"),
    ):
        bad = SimpleNamespace(input_row_offsets=torch.tensor(offsets), data_parallel_splits=splits)
        with pytest.raises(InvalidRequestError, match=message):
            manager.increment_cache_lengths(entries, bad)
        assert entries == before
    manager.increment_cache_lengths(entries, ran)
    assert [entry.cache_lengths.tolist() for entry in entries] == [[3], [3], [5, 2], [5, 2]]


# ---- counters


def test_a_prompt_is_counted_when_it_runs_or_at_the_latest_by_its_step(make: Any) -> None:
    manager = make(32, page_size=4)
    context = claimed(manager, range(10))
    assert manager.maybe_reserve(context)
    context.set_token_indices(active_idx=6)
    manager.fetch([context])
    assert manager.metrics.input_tokens == 6
    context.update(0)
    manager.step([context])
    assert manager.metrics.input_tokens == 6
    context.update(7)  # The token has run without a `fetch`.
    manager.step([context])
    assert manager.metrics.input_tokens == 10
    run(manager, [context])
    assert manager.metrics.input_tokens == 10


def test_shares_are_fractions_over_replicas(make: Any) -> None:
    manager = make(8, page_size=4, dp=2)
    assert manager.total_num_pages == 16
    assert manager.maybe_reserve(claimed(manager, range(16), 0))
    assert manager.num_free_blocks == 12
    assert manager.free_blocks_pct == pytest.approx(0.75)
    assert manager.used_blocks_pct == pytest.approx(0.25)
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (0, 0.0)


# ---- construction


@pytest.mark.parametrize("checks", [True, False])
def test_runtime_checks_recount_before_and_after_each_change_of_the_state(
    make: Any, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recounts, check = list[bool](), PagedKVCacheManager.check

    def recount(manager: PagedKVCacheManager) -> None:
        recounts.append(manager.contains("a"))
        check(manager)

    monkeypatch.setattr(PagedKVCacheManager, "check", recount)
    manager = make(8, checks=checks)
    manager.external_claim("a")
    assert recounts == [False, True] * checks
    with pytest.raises(AlreadyClaimedError):
        manager.external_claim("a")
    manager.contains("a")
    assert recounts == [False, True] * checks, "a refused call and a question change nothing"


def test_attributes(make: Any) -> None:
    manager = make(8, page_size=4, dp=2, tp=2)
    assert manager.page_size == 4
    assert manager.num_replicas == 2
    assert manager.enable_prefix_caching
    assert not manager.enable_kvcache_swapping_to_host
    assert manager.devices_per_replica == [[torch.device("cpu")] * 2] * 2


def test_further_groups_are_the_state_pages_of_each_replica(make: Any) -> None:
    assert make(8, dp=2).further_groups == [(), ()]
    shape = StateShape(1, 1, 1, 1, 1, 2, torch.float32)
    manager = make(16, dp=2, rows=2, params={"states": shape})
    assert manager.further_groups == [(pages,) for pages in manager.states]
    assert len(manager.states) == 2


def test_input_symbols_have_the_shapes_of_fetch(make: Any) -> None:
    manager = make(8, page_size=4, dp=2)
    symbols = manager.input_symbols()
    assert [each.inputs.blocks.shape for each in symbols] == [each.blocks.shape for each in manager.fetch([])]
    assert [each.inputs.blocks.shape[2] for each in manager.input_symbols(num_layers=3)] == [3, 3]


def params(**changes: Any) -> KVCacheParams:
    return KVCacheParams(**{"dtype": torch.float32, "n_kv_heads": 1, "head_dim": 2, **changes})


def test_the_page_size_of_the_params_replaces_the_default_but_two_different_sizes_are_refused() -> None:
    build = {
        "max_batch_size": 1,
        "max_seq_len": 64,
        "num_layers": 1,
        "devices": ["cpu"],
        "available_cache_memory": 1 << 16,
    }
    assert PagedKVCacheManager(params(), **build).page_size == 128
    assert PagedKVCacheManager(params(), **build, page_size=32).page_size == 32
    assert PagedKVCacheManager(params(page_size=16), **build).page_size == 16
    assert PagedKVCacheManager(params(page_size=16), **build, page_size=16).page_size == 16
    with pytest.raises(InvalidParamsError, match="32 in the call and 16 in the params"):
        PagedKVCacheManager(params(page_size=16), **build, page_size=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"devices": ["cpu", "cpu"]}, "2 devices given, params.n_devices is 1"),
        ({"available_cache_memory": None}, "available_cache_memory"),
        ({"available_cache_memory": 2047}, "2047 bytes.*at least one page of 2048 bytes must fit"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "max_batch_size": 1,
        "max_seq_len": 64,
        "num_layers": 1,
        "devices": ["cpu"],
        "available_cache_memory": 1 << 16,
    }
    with pytest.raises((InvalidParamsError, PoolTooSmallError), match=message):
        PagedKVCacheManager(params(), **{**good, **changes})


def test_a_new_manager_warns_if_it_has_too_few_pages(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    make(2, page_size=4, rows=8, max_seq_len=256)
    assert "2 pages a replica for up to 8 requests" in caplog.text
    assert "max_seq_len 256 cannot run: a replica has 2 pages of 4 tokens" in caplog.text


def test_any_object_with_the_attributes_of_a_context_is_accepted(make: Any) -> None:
    class Own:
        """A scheduler's own context class without a hasher and a salt."""

        def __init__(self, tokens: list[int]) -> None:
            self.request_id = f"own-{id(self)}"
            self.tokens = np.array(tokens, np.int64)
            self.start_idx, self.active_idx = 0, len(tokens)

        @property
        def end_idx(self) -> int:
            return len(self.tokens)

        current_length = end_idx

        @property
        def active_length(self) -> int:
            return self.active_idx - self.start_idx

        def update(self, token: int) -> None:
            self.tokens = np.append(self.tokens, token)
            self.start_idx, self.active_idx = self.active_idx, len(self.tokens)

        def set_token_indices(
            self, start_idx: int | None = None, active_idx: int | None = None, end_idx: int | None = None
        ) -> None:
            assert end_idx is None
            self.start_idx = self.start_idx if start_idx is None else start_idx
            self.active_idx = self.active_idx if active_idx is None else active_idx

    manager = make(32, page_size=4)
    first, second = Own(list(range(10))), Own(list(range(10)))
    for own in (first, second):
        manager.external_claim(own.request_id)
        for _ in range(6):
            run(manager, [own])  # type: ignore[list-item]
    assert second.start_idx == first.start_idx == 15
    assert manager.get_req_blocks(first.request_id)[:3] == manager.get_req_blocks(second.request_id)[:3]
    assert manager.metrics.cache_tokens == 8
    shipped = claimed(manager, range(10))
    assert manager.maybe_reserve(shipped)
    assert shipped.start_idx == 8  # The class of a context does not change its digests.
    row = manager._replicas.each[0].rows.row_of[first.request_id]
    manager.release(first.request_id)
    other = Own([7] * 10)
    manager.external_claim(other.request_id)
    assert manager._replicas.each[0].rows.row_of[other.request_id] == row
    assert manager.maybe_reserve(other)  # type: ignore[arg-type]
    assert other.start_idx == 0  # the request does not inherit digests from the row's previous request


def test_a_context_that_refuses_its_new_start_changes_no_page(make: Any) -> None:
    class Stubborn(TextContext):
        def set_token_indices(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError("nowhere else")

    manager = make(32, page_size=4)
    run(manager, [claimed(manager, range(10))])
    free = manager.num_free_blocks
    stubborn = Stubborn(range(10), 64)
    manager.external_claim(stubborn.request_id)
    with pytest.raises(ZeroDivisionError, match="nowhere else"):
        manager.maybe_reserve(stubborn)
    assert manager.num_free_blocks == free
    assert manager.get_req_blocks(stubborn.request_id) == []
