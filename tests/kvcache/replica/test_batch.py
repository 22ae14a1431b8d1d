"""A batch that is updated in arrays gives the same results as the plain calls, even if its contexts are also changed by
other calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvcache import (
    FUTURE_TOKEN,
    InvalidRequestError,
    NotReservedError,
    PagedKVCacheManager,
    SequenceTooLongError,
    TextContext,
)
from kvcache.replica.batch import _STEPS_KEPT, Batch
from tests.kvcache.random_model.interrupts import interrupted
from tests.kvcache.random_model.moves import OwnContext


def running(manager: PagedKVCacheManager, lengths: list[int], longest: int = 4096, name: str = "") -> list[TextContext]:
    """Returns requests whose prompts are computed, so that they are ready to decode."""
    contexts = [TextContext(np.arange(length) % 7 + at, longest, f"{name}{at}") for at, length in enumerate(lengths)]
    for at, context in enumerate(contexts):
        manager.external_claim(context.request_id, at % manager.num_replicas)
        assert manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(3)
    manager.step(contexts)
    return contexts


def indices(context: TextContext) -> tuple[int, int, int, list[int]]:
    return context.start_idx, context.active_idx, context.end_idx, context.tokens.tolist()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_batch_equals_the_plain_calls_over_hundreds_of_steps(make: Any, dp: int, caching: bool) -> None:
    lengths = [3, 9, 4, 17, 9, 8]  # Two prompts are equal, so their pages have the same digests.
    options = {"page_size": 4, "max_seq_len": 1024, "caching": caching, "dp": dp, "checks": False}
    plain, batched = make(2000, **options), make(2000, **options)
    ours, theirs = running(batched, lengths), running(plain, lengths)
    batch = batched.batch(ours)
    rng = np.random.default_rng(0)
    for step in range(_STEPS_KEPT + 60):
        tokens = rng.integers(0, 3, len(lengths))
        assert batched.reserve_batch(batch).all()
        fetched = batched.fetch(batch)
        assert all(plain.maybe_reserve(context) for context in theirs)
        for mine, wanted in zip(fetched, plain.fetch(theirs), strict=True):
            assert mine.cache_lengths.tolist() == wanted.cache_lengths.tolist()
            assert mine.max_lengths.tolist() == wanted.max_lengths.tolist()
            assert mine.lookup_table.shape == wanted.lookup_table.shape
            assert ((mine.lookup_table == 0) == (wanted.lookup_table == 0)).all()
        batch.update(tokens)
        for context, token in zip(theirs, tokens.tolist(), strict=True):
            context.update(token)
        batched.step(batch)
        plain.step(theirs)
        assert batched.num_free_blocks == plain.num_free_blocks
        if step % 20 == 0:
            batched.check()
            assert indices(ours[step % 6]) == indices(theirs[step % 6])
    assert [indices(context) for context in ours] == [indices(context) for context in theirs]
    assert batched.metrics == plain.metrics
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert batched.block_table(ours_one.request_id).digests == plain.block_table(theirs_one.request_id).digests


def test_steps_ahead_are_reserved_and_fetched(make: Any) -> None:
    manager = make(64, page_size=4)
    batch = manager.batch(running(manager, [4, 5]))
    for ahead in (9, 1, 3):
        assert manager.reserve_batch(batch, ahead).all()
        (entry,) = manager.fetch(batch, ahead)
        ends = batch.ends.max()
        assert entry.max_lengths.tolist() == [[1, ends + step] for step in range(ahead)]
        assert entry.lookup_table.shape[1] == -(-(ends + ahead - 1) // 4)
        batch.update([1, 1])
        manager.step(batch)


def test_a_request_past_the_longest_is_refused_where_another_takes_a_page(make: Any) -> None:
    manager = make(64, page_size=4, max_seq_len=6)
    batch = manager.batch(running(manager, [4, 2]))
    for _ in range(2):
        assert manager.reserve_batch(batch).all()
        manager.fetch(batch)
        batch.update([3, 3])
        manager.step(batch)
    # The first length exceeds the limit of 6 tokens. The second length ends with the first token of a page.
    assert batch.lengths.tolist() == [7, 5]
    with pytest.raises(SequenceTooLongError, match="7 tokens"):
        manager.reserve_batch(batch)


def test_a_request_that_was_claimed_again_is_examined_wherever_its_newest_token_lies(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [5, 6, 7])
    batch = manager.batch(contexts)
    rows = manager._replicas.each[0].rows
    for _ in range(2):
        assert manager.reserve_batch(batch).all()
        batch.update([3, 3, 3])
        manager.step(batch)
    manager.release("0")
    manager.external_claim("0")
    assert rows.capacity[0] == 0
    assert manager.reserve_batch(batch).all()
    assert rows.capacity[0] == 8
    assert rows.committed[0] == 1  # The request has found its first page. It computes its other pages again.
    assert contexts[0].start_idx == 4
    batch.update([3, 3, 3])
    manager.step(batch)
    assert rows.committed[0] == contexts[0].start_idx // 4 == 2


def test_a_request_that_was_claimed_again_for_another_context_is_refused(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [5, 6])
    batch = manager.batch(contexts)
    manager.release("0")
    manager.external_claim("0")
    with pytest.raises(NotReservedError, match="'0'"):
        manager.fetch(batch)
    assert manager.maybe_reserve(TextContext(contexts[0].tokens, 64, "0"))
    with pytest.raises(InvalidRequestError, match="'0'.*another context"):
        manager.fetch(batch)


def test_lengths_and_last_tokens_are_those_of_the_contexts(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 5, 7])
    batch = manager.batch(contexts)

    def expect() -> None:
        assert batch.lengths.tolist() == [context.end_idx for context in contexts]
        assert batch.last_tokens.tolist() == [int(context.tokens[-1]) for context in contexts]

    expect()
    for token in range(10, 13):
        assert manager.reserve_batch(batch).all()
        batch.update(np.array([token, token + 10, token + 20]))
        assert batch.last_tokens.tolist() == [token, token + 10, token + 20]
        assert batch.lengths.tolist() == [token - 4, token - 3, token - 1]
        manager.step(batch)
    contexts[0].update(7)
    assert contexts[0].tokens.tolist()[-4:] == [10, 11, 12, 7]
    assert batch.last_tokens.tolist()[0] == 7
    # The context is changed outside of the batch, so that its last chunk runs again.
    contexts[1].set_token_indices(start_idx=5, active_idx=6)
    expect()
    contexts[0].update(8)
    expect()


def test_a_step_past_the_pages_is_refused(make: Any) -> None:
    manager = make(64, page_size=4)
    batch = manager.batch(running(manager, [3, 2]))
    assert manager.reserve_batch(batch).all()
    batch.update(np.array([1, 1]))
    manager.step(batch)
    batch.update(np.array([1, 1]))
    with pytest.raises(NotReservedError, match="5 tokens computed, but its reserved pages hold 4"):
        manager.step(batch)
    with pytest.raises(InvalidRequestError, match="'0': its start_idx is 5, but at most 4 tokens are computed"):
        manager.reserve_batch(batch)
    for context in batch:
        context.set_token_indices(start_idx=context.start_idx - 1)
    assert manager.reserve_batch(batch).all()
    manager.step(batch)
    manager.check()


def test_a_context_that_was_moved_outside_of_the_batch_is_read_again(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 5, 6])
    batch, part = manager.batch(contexts), manager.batch(contexts[:2])
    for token in range(30):
        assert manager.reserve_batch(batch).all()
        batch.update([token] * 3)
        manager.step(batch)
        assert manager.maybe_reserve(contexts[token % 3])
        contexts[token % 3].update(90)  # This call advances the context without a batch.
        assert manager.reserve_batch(part).all()
        part.update([91, 92])  # This call advances the contexts in another batch.
        manager.step(part)
    assert contexts[0].tokens.tolist()[-4:] == [28, 91, 29, 91]
    assert contexts[2].tokens.tolist()[-2:] == [29, 90]
    # The batch has not read its contexts yet.
    assert batch.ends.tolist() != [context.end_idx for context in contexts]
    assert manager.fetch(batch)[0].cache_lengths.tolist() == [context.start_idx for context in contexts]


def test_invalid_tokens_change_nothing(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 5])
    batch = manager.batch(contexts)
    before = [indices(context) for context in contexts]
    for bad, message in (
        ([1], r"batch of 2 requests: got tokens of shape \(1,\)"),
        ([1.0, 2.0], "dtype float64"),
        ([1, -1], "request '1': token -1"),
        (np.array([1 << 31, 0]), "request '0': token 2147483648"),
        (np.array([0, -5], np.int32), "request '1': token -5"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            batch.update(bad)
    assert [indices(context) for context in contexts] == before


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8"])
def test_tokens_may_be_integers_of_any_size_and_byte_order(make: Any, dtype: str) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 5])
    batch = manager.batch(contexts)
    batch.update(np.array([101, 102], dtype))
    assert [int(one.tokens[-1]) for one in contexts] == [101, 102]
    if "i" in dtype:
        with pytest.raises(InvalidRequestError, match="'1': token -100 is not within"):
            batch.update(np.array([101, -100], dtype))


def test_a_batch_with_a_context_of_another_class_equals_the_plain_calls(make: Any) -> None:
    plain, batched = make(64, page_size=4), make(64, page_size=4)
    theirs, ours = running(plain, [9, 5]), running(batched, [9, 5])
    for manager, contexts in ((plain, theirs), (batched, ours)):
        for at, length in ((2, 3), (3, 6)):
            own: Any = OwnContext(TextContext(range(20, 20 + length), 64, f"{at}"))
            manager.external_claim(own.request_id)
            contexts.insert(0, own)
    batch = batched.batch(ours)
    for step in range(9):
        assert batched.reserve_batch(batch).all()
        assert plain.reserve_batch(theirs).all()
        same_inputs(batched.fetch(batch), plain.fetch(theirs))
        tokens = [step, step + 1, step + 2, step + 3]
        batch.update(tokens)
        for context, token in zip(theirs, tokens, strict=True):
            context.update(token)
        assert batch.last_tokens.tolist() == tokens
        batched.step(batch)
        plain.step(theirs)
        assert [indices(context) for context in ours] == [indices(context) for context in theirs]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert batched.block_table(mine.request_id).digests == plain.block_table(wanted.request_id).digests
    with pytest.raises(InvalidRequestError, match="'3': update_with_future_tokens needs a TextContext.* a OwnContext"):
        batch.update_with_future_tokens()


def test_a_context_of_another_class_may_have_run_all_tokens_that_are_known(make: Any) -> None:
    manager = make(64, page_size=4)
    own: Any = OwnContext(TextContext(range(8), 64, "own"))
    own.set_token_indices(active_idx=4)
    manager.external_claim("own")
    batch = manager.batch([own])
    assert manager.reserve_batch(batch).all()
    batch.update([0])
    manager.step(batch)
    vars(own).update(start_idx=8, active_length=0)
    manager.step(batch)
    wanted = manager.contents.digests(TextContext(range(9), 64)).digests
    assert manager.block_table("own").digests == wanted


def test_the_longest_request_is_refused_by_name_and_nobody_moves(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 6], longest=8)
    batch = manager.batch(contexts)
    assert manager.reserve_batch(batch, 3).all()
    batch.update([1, 1])
    with pytest.raises(SequenceTooLongError, match="request '1': token 9 is past its max_length 8"):
        batch.update([1, 1])
    assert [context.end_idx for context in contexts] == [6, 8]


def test_a_batch_ends_with_the_release_of_one_of_its_requests(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = running(manager, [4, 5, 6])
    batch = manager.batch(contexts)
    running(manager, [4], name="other")
    manager.release("other0")
    assert manager.reserve_batch(batch).all()  # The release of another request does not affect the batch.
    manager.release("1")
    for call in (manager.reserve_batch, manager.fetch, manager.step):
        with pytest.raises(InvalidRequestError, match="request '1': .* it was released after the batch was made"):
            call(batch)
    rest = manager.batch([contexts[0], contexts[2]])
    assert manager.reserve_batch(rest).all()


def test_a_full_pool_refuses_those_that_cross_a_page_and_nobody_else(make: Any) -> None:
    manager = make(5, page_size=4)
    # The requests have five pages. The first and the last request end at the end of a page.
    contexts = running(manager, [7, 6, 3])
    batch = manager.batch(contexts)
    assert manager.reserve_batch(batch).tolist() == [True, True, True]
    batch.update([1, 1, 1])
    manager.step(batch)
    assert manager.reserve_batch(batch).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match="'0': 9 tokens.*hold 8: call maybe_reserve"):
        manager.fetch(batch)


def test_a_batch_is_a_sequence(make: Any) -> None:
    manager = make(64)
    contexts = running(manager, [4, 5])
    batch = manager.batch(contexts)
    assert list(batch) == contexts
    assert batch[1] is contexts[1]
    assert batch[:1] == (contexts[0],)
    assert len(manager.batch([])) == 0
    empty = manager.batch([])
    assert manager.reserve_batch(empty).tolist() == []
    assert manager.fetch(empty)[0].lookup_table.shape == (0, 0)
    empty.update([])
    manager.step(empty)


@pytest.mark.parametrize("dp", [1, 2])
def test_prompts_that_ran_without_a_fetch_are_counted_by_step(make: Any, dp: int) -> None:
    manager = make(64, page_size=4, dp=dp)
    contexts = [TextContext(range(at, at + 3), 64, str(at)) for at in range(4)]
    for at, context in enumerate(contexts):
        manager.external_claim(context.request_id, at % dp)
    assert manager.reserve_batch(contexts).all()
    for context in contexts:
        context.update(3)
    manager.step(contexts)
    assert manager.metrics.input_tokens == 12


def moved_and_moved_back(batch: Batch, contexts: list[TextContext]) -> None:
    contexts[1].set_token_indices(start_idx=2, active_idx=3)
    assert batch.lengths.tolist() == [one.end_idx for one in contexts]
    contexts[1].set_token_indices(active_idx=contexts[1].end_idx)


@pytest.mark.parametrize(
    ("before", "every"),
    [
        pytest.param(moved_and_moved_back, 19, id="one moved and moved back"),
        pytest.param(lambda _, contexts: contexts[1].update(9), 17, id="one moved by itself"),
        pytest.param(lambda batch, _: [batch.update([1, 2, 3]) for _ in range(_STEPS_KEPT)], 19, id="log full"),
    ],
)
def test_wherever_an_update_is_interrupted_all_requests_have_their_token_or_none(
    make: Any, before: Callable[[Batch, list[TextContext]], object], every: int
) -> None:
    manager: PagedKVCacheManager = make(rows=3, pages=300)
    outcomes = Counter[int]()
    for at in count(1, every):
        contexts = running(manager, [5, 6, 7], name=f"{at}-")
        batch = manager.batch(contexts)
        batch.update([4, 5, 6])
        before(batch, contexts)
        ends = [one.end_idx for one in contexts]
        _, _, done = interrupted(lambda batch=batch: batch.update([8, 9, 8]), at, KeyboardInterrupt)
        (given,) = {one.end_idx - end for one, end in zip(contexts, ends, strict=True)}
        outcomes[given] += done
        if not given:
            batch.update([8, 9, 8])
        assert [one.end_idx for one in contexts] == [end + 1 for end in ends]
        assert [int(one.tokens[-1]) for one in contexts] == [8, 9, 8]
        for one in contexts:
            manager.release(one.request_id)
        if not done:
            break
    assert outcomes[0] > 5
    assert outcomes[1] > 0


class OneByOne(list[TextContext]):
    """Plain contexts with the interface of a batch, which are updated one by one."""

    def update_with_future_tokens(self) -> None:
        for context in self:
            context.update_with_future_token()

    def realize_future_tokens(self, tokens: Any) -> None:
        for context, token in zip(self, tokens.tolist(), strict=True):
            context.realize_future_token(token)


def same_inputs(ours: Any, theirs: Any) -> None:
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.cache_lengths.tolist() == wanted.cache_lengths.tolist()
        assert ((mine.lookup_table == 0) == (wanted.lookup_table == 0)).all()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("kind", ["batch", "contexts", "one request, one token a page"])
@pytest.mark.parametrize("early", [False, True], ids=["stepped when realized", "stepped in flight"])
def test_steps_that_are_planned_ahead_compute_and_publish_what_plain_ones_do(
    make: Any, dp: int, kind: str, early: bool
) -> None:
    lengths, size = ([3, 9, 4, 17, 9, 8], 4) if not kind.startswith("one") else ([3], 1)
    options = {"page_size": size, "max_seq_len": 1024, "dp": dp, "checks": False}
    plain, ahead = make(2000, **options), make(2000, **options)
    ours, theirs = (running(manager, lengths) for manager in (ahead, plain))
    batch = OneByOne(ours) if kind == "contexts" else ahead.batch(ours)
    usual, rng = plain.batch(theirs), np.random.default_rng(0)
    before, tokens = None, np.zeros(len(lengths), np.int64)
    for at in range(_STEPS_KEPT + 60):
        assert ahead.reserve_batch(batch).all()
        assert plain.reserve_batch(usual).all()
        step = ahead.fetch_ahead(batch)
        same_inputs(step.inputs, plain.fetch(usual))
        if before is not None:
            if at % 7 == 0:  # Some contexts are read although the batch has not yet given them their last tokens.
                assert [int(ours[place].tokens[-1]) for place in (0, at % len(ours))] == [FUTURE_TOKEN] * 2
            batch.realize_future_tokens(tokens)
            ahead.end_step(before)
            if not early:
                ahead.step(batch)
        batch.update_with_future_tokens()
        if early:
            ahead.step(batch)
        assert [ahead.block_table(one.request_id).num_tokens for one in ours] == usual.starts.tolist()
        before, tokens = step, rng.integers(0, 3, len(lengths))
        usual.update(tokens)
        plain.step(usual)
    assert before is not None
    batch.realize_future_tokens(tokens)
    ahead.step(batch)
    ahead.end_step(before)
    assert [indices(context) for context in ours] == [indices(context) for context in theirs]
    assert ahead.num_free_blocks == plain.num_free_blocks
    for one, other in zip(ours, theirs, strict=True):
        assert ahead.block_table(one.request_id).digests == plain.block_table(other.request_id).digests


def test_a_new_batch_of_requests_whose_tokens_are_to_come_goes_on(make: Any) -> None:
    manager = make(200, page_size=4)
    contexts = running(manager, [3, 9, 4])
    batch = manager.batch(contexts)
    manager.reserve_batch(batch)
    batch.update_with_future_tokens()
    fewer = manager.batch(contexts[1:])
    assert manager.reserve_batch(fewer).all()
    assert manager.fetch(fewer)[0].cache_lengths.tolist() == [10, 5]
    batch.realize_future_tokens([4, 5, 6])
    fewer.update_with_future_tokens()
    assert [one.tokens[-2:].tolist() for one in contexts] == [[3, 4], [5, FUTURE_TOKEN], [6, FUTURE_TOKEN]]
    fewer.realize_future_tokens([8, 9])
    fewer.update([1, 2])
    assert [one.tokens[-3:].tolist() for one in contexts] == [[2, 3, 4], [5, 8, 1], [6, 9, 2]]


def test_tokens_are_known_as_soon_as_they_are_realized(make: Any) -> None:
    manager = make(64, page_size=1)
    contexts = running(manager, [3, 9])
    batch = manager.batch(contexts)
    for token in range(4, 8):
        batch.update_with_future_tokens()
        batch.realize_future_tokens([token, token + 1])
        assert [int(one.tokens[-1]) for one in contexts] == [token, token + 1]


def test_a_batch_of_prompts_is_run_ahead(make: Any) -> None:
    manager = make(200, page_size=4)
    contexts = [TextContext(range(at, at + 5 + at), 64, f"{at}") for at in range(3)]
    for context in contexts:
        manager.external_claim(context.request_id)
    contexts[2].set_token_indices(active_idx=3)
    assert manager.reserve_batch(contexts).all()
    batch = manager.batch(contexts)
    manager.fetch_ahead(batch)
    batch.update_with_future_tokens()
    manager.step(batch)
    assert [manager.get_req_blocks(one.request_id) != [] for one in contexts] == [True] * 3
    assert manager._replicas.each[0].rows.cached[:3].tolist() == [0, 0, 0]
    batch.realize_future_tokens([7, 8, 9])
    manager.step(batch)
    assert manager._replicas.each[0].rows.cached[:3].tolist() == [5, 6, 3]
    assert [one.end_idx for one in contexts] == [6, 7, 7]


def test_future_tokens_are_refused_by_name_and_nobody_moves(make: Any) -> None:
    manager = make(200, page_size=4)
    contexts = running(manager, [3, 9], longest=12)
    batch = manager.batch(contexts)
    with pytest.raises(InvalidRequestError, match="'0': realize_future_tokens was called, but it has no future token"):
        batch.realize_future_tokens([1, 2])
    batch.update_with_future_tokens()
    for call in (batch.update_with_future_tokens, lambda: batch.update([1, 2])):
        with pytest.raises(InvalidRequestError, match="'0': update.*it already has a future token"):
            call()
    with pytest.raises(InvalidRequestError, match="token -4 is not within"):
        batch.realize_future_tokens([1, -4])
    batch.realize_future_tokens([1, 2])
    contexts[1].update_with_future_token()
    with pytest.raises(InvalidRequestError, match="'1': update was called, but it already has a future token"):
        batch.update([1, 2])
    contexts[1].realize_future_token(3)
    contexts[1].set_token_indices(end_idx=11, active_idx=11, start_idx=10)
    batch.update([1, 2])
    with pytest.raises(SequenceTooLongError, match="request '1': token 13 is past its max_length 12"):
        batch.update_with_future_tokens()
    assert [one.end_idx for one in contexts] == [6, 12]


@pytest.mark.parametrize("before", [0, _STEPS_KEPT - 1], ids=["log empty", "log full"])
def test_wherever_a_future_token_is_interrupted_all_requests_have_it_or_none(make: Any, before: int) -> None:
    manager: PagedKVCacheManager = make(rows=3, pages=300)
    outcomes = Counter[int]()
    for at in count(1, 19 if before else 3):
        contexts = running(manager, [5, 6, 7], name=f"{at}-")
        batch = manager.batch(contexts)
        for _ in range(before):
            batch.update([4, 5, 6])
        batch.update_with_future_tokens()
        assert contexts[1].has_future_token
        ends = [one.end_idx for one in contexts]
        _, _, cut = interrupted(lambda batch=batch: batch.realize_future_tokens([1, 2, 3]), at, KeyboardInterrupt)
        if {one.has_future_token for one in contexts} != {False}:
            batch.realize_future_tokens([1, 2, 3])
        assert [one.tokens[-1] for one in contexts] == [1, 2, 3]
        _, _, done = interrupted(lambda batch=batch: batch.update_with_future_tokens(), at, KeyboardInterrupt)
        (given,) = {one.end_idx - end for one, end in zip(contexts, ends, strict=True)}
        outcomes[given] += done
        if not given:
            batch.update_with_future_tokens()
        assert [one.computed_idx for one in contexts] == [one.end_idx - 2 for one in contexts]
        batch.realize_future_tokens([8, 9, 8])
        assert [one.tokens[-2:].tolist() for one in contexts] == [[1, 8], [2, 9], [3, 8]]
        for one in contexts:
            manager.release(one.request_id)
        if not done and not cut:
            break
    assert outcomes[0] > 5
    assert outcomes[1] > 0


def advance(group: Any, *, ahead: bool) -> None:
    """Give each request of a list or a batch token 3. With `ahead`, the token is a future token first."""
    if isinstance(group, Batch):
        if ahead:
            group.update_with_future_tokens()
            group.realize_future_tokens([3] * len(group))
        else:
            group.update([3] * len(group))
        return
    for context in group:
        if ahead:
            context.update_with_future_token()
            context.realize_future_token(3)
        else:
            context.update(3)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_publishes_what_a_list_publishes_whatever_was_computed_between_steps(make: Any, seed: int) -> None:
    """Prompts run in chunks, then decode, up to four tokens a step. Some steps are skipped, so that one step sees
    several updates. Requests are preempted and return at once, or leave, and another prompt takes their place.
    """
    pairs = [make(240, page_size=4, max_seq_len=400) for _ in range(2)]
    rng = np.random.default_rng(seed)
    lengths, moves = rng.integers(9, 60, 3).tolist(), rng.random((25, 6))
    chunk, happened = int(rng.integers(3, 30)), Counter[str]()
    seen: list[list[Any]] = []
    for of_batch, manager in enumerate(pairs):

        def arrived(at: int, length: int, manager: PagedKVCacheManager = manager) -> TextContext:
            context = TextContext(np.arange(length) % 7 + at % 5, 400, f"r{at}")
            manager.external_claim(context.request_id, 0)
            assert manager.maybe_reserve(context)
            return context

        contexts = [arrived(at, length) for at, length in enumerate(lengths)]
        group: Any = manager.batch(contexts) if of_batch else contexts
        seen.append([])
        for number, (takes_chunk, steps, futures, leaves, who, many) in enumerate(moves.tolist()):
            if leaves < 0.25:
                place = int(3 * who)
                manager.release(contexts[place].request_id)
                if leaves < 0.1:
                    contexts[place] = arrived(3 + number, int(9 + 500 * leaves))
                    group = manager.batch(contexts) if of_batch else contexts
                else:
                    manager.external_claim(contexts[place].request_id, 0)
                    assert manager.maybe_reserve(contexts[place])
                happened["left" if leaves < 0.1 else "preempted"] += 1
            for context in contexts:
                if takes_chunk < 0.8 and context.active_idx - context.start_idx > 1:
                    context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + chunk))
            decodes = all(context.active_idx == context.end_idx for context in contexts)
            num_steps = 1 + int(4 * many) if decodes else 1
            assert manager.reserve_batch(group, num_steps).all()
            manager.fetch(group, num_steps)
            for _ in range(num_steps):
                advance(group, ahead=futures < 0.2 and decodes)
            happened["several steps"] += num_steps > 1
            if steps < 0.7:
                manager.step(group)
            seen[-1].append([indices(context) for context in contexts])
            rows = manager._replicas.each[0].rows
            seen[-1].append((rows.committed.tolist(), rows.table.tolist(), manager.num_free_blocks))
            index = manager._replicas.each[0].pool.index
            seen[-1].append(index.digests_of(np.flatnonzero(index.published[1:]) + 1).tolist())
    assert seen[0] == seen[1]
    assert happened.total() > 4


def test_a_batch_calls_the_update_of_a_subclass(make: Any) -> None:
    class Noting(TextContext):
        noted = 0

        def update(self, token: int) -> None:
            self.noted += 1
            super().update(token)

    manager = make(20, page_size=4)
    context = Noting(np.arange(5), 40, "a")
    manager.external_claim("a", 0)
    assert manager.maybe_reserve(context)
    batch = manager.batch([context])
    for _ in range(3):
        batch.update([3])
    assert context.noted == 3


def test_fetch_refuses_indices_that_are_not_ordered(make: Any) -> None:
    manager = make(20, page_size=4)
    inner = TextContext(np.arange(13), 40, "a")
    manager.external_claim("a", 0)
    context = OwnContext(inner)
    assert manager.maybe_reserve(context)
    context.__dict__["start_idx"] = 99  # found before `__getattr__`
    for call in (lambda: manager.fetch([context]), lambda: manager.maybe_reserve(context)):
        with pytest.raises(InvalidRequestError, match="'a': start 99, active 13, end 13 are not ordered"):
            call()
