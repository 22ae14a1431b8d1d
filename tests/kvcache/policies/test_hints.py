# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Hints and quotas of the requests of a manager."""

from __future__ import annotations

import random
from typing import Any
from weakref import ref

import numpy as np
import pytest

from kvcache import InvalidParamsError, LruOrder, PagedKVCacheManager, RangeRetention, Retention, TextContext
from kvcache.eviction_order import BY_HINT, BY_QUOTA, BY_TURN
from kvcache.retention import PageHints
from kvcache.under_way import Call
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.policies.hinted_idle import trust

LAST, FIRST = Retention(session_continues=True), Retention(session_continues=False)


def serve(manager: PagedKVCacheManager, tokens: list[int], retention: Retention | None = None, **options: Any) -> int:
    return run_once(manager, tokens, retention=retention, **options)


def prompt(name: int, pages: int = 2) -> list[int]:
    """Returns a prompt of full pages of 4 tokens, and one more token."""
    return [*[name] * (4 * pages), 0]


def trusting(manager: PagedKVCacheManager) -> PagedKVCacheManager:
    """Makes all idle pages follow hints, as they would after hints have been right for a while."""
    serve(manager, prompt(1000), LAST)
    for replica in manager._replicas.each:
        trust(replica.hints, 0.95)
    manager.reset_prefix_cache()
    return manager


def found(manager: PagedKVCacheManager, *names: int) -> list[bool]:
    """Returns which of these prompts are cached. The call changes no state."""
    pages = [manager._replicas.each[0].find(TextContext(prompt(name), 64)).end for name in names]
    return [count > 0 for count in pages]


def test_content_that_a_hint_puts_first_is_evicted_first() -> None:
    manager = trusting(manager_of(40, checks=False))
    for name in range(10):
        serve(manager, prompt(name), FIRST if name % 2 else LAST)
    for name in range(100, 115):
        serve(manager, prompt(name))
    assert found(manager, *range(10)) == [True, False] * 5


def test_the_hint_may_come_at_the_end_and_may_be_for_a_range() -> None:
    manager = trusting(manager_of(40, checks=False))
    context = TextContext([*prompt(1)[:8], *prompt(2)], 64)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        context.update(0)
        manager.step([context])
        context.retention = Retention(session_continues=False, ranges=(RangeRetention(0, 8, priority=100),))
    for name in range(100, 119):
        serve(manager, prompt(name))
    assert manager._replicas.each[0].find(TextContext([*prompt(1)[:8], *prompt(2)], 64)).end == 2


def test_without_hints_there_is_no_baseline_and_the_plain_order() -> None:
    manager = manager_of(40, checks=False)
    for name in range(50):
        serve(manager, prompt(name % 30))
    hints = manager._replicas.each[0].hints
    assert not hints._baselines
    assert type(manager._replicas.each[0].pool.idle).__name__ == "LruOrder"
    assert hints.share == 0.0


def test_a_share_of_zero_ignores_hints() -> None:
    manager = manager_of(40, checks=False, params={"max_hint_share": 0.0})
    for name in range(50):
        serve(manager, prompt(name), FIRST)
    assert type(manager._replicas.each[0].pool.idle).__name__ == "LruOrder"


def rounds(manager: PagedKVCacheManager, first: Retention | None, last: Retention | None, often: int = 8) -> list[int]:
    """Runs a few prompts again and again, with prompts between them that occur only once. Returns the number of tokens
    found in each half of the rounds.
    """
    halves = []
    for half in range(2):
        hits = 0
        for number in range(200):
            hits += serve(manager, prompt(number % often), last)
            for once in range(2):
                serve(manager, prompt(10_000 * (half + 1) + 2 * number + once), first)
        halves.append(hits)
    return halves


def test_the_share_grows_while_hints_are_right_and_shrinks_while_they_are_wrong() -> None:
    # With 8 prompts, each prompt recurs after 48 pages, so plain LRU finds none of them. With 4 prompts, each prompt
    # recurs after 24 pages, so plain LRU finds all of them.
    manager = manager_of(40, checks=False)
    assert manager.hint_share == 0.0
    assert rounds(manager, FIRST, LAST)[1] > 0.95 * 200 * 8
    assert manager.hint_share == 0.95
    rounds(manager, LAST, FIRST, often=4)
    assert manager.hint_share == 0.02
    manager.check()


def test_the_share_of_a_manager_is_the_mean_over_its_replicas() -> None:
    manager = manager_of(40, dp=2)
    serve(manager, prompt(1), LAST, replica=1)
    trust(manager._replicas.each[1].hints, 0.5)
    assert manager.hint_share == 0.25
    manager.close()


def test_hints_that_are_all_wrong_cost_next_to_nothing() -> None:
    plain, misled = manager_of(60, checks=False), manager_of(60, checks=False)
    wanted = rounds(plain, None, None)
    got = rounds(misled, LAST, FIRST)
    assert wanted[1] == 200 * 8  # Plain LRU finds all pages of the recurring prompts.
    assert sum(got) > 0.97 * sum(wanted)


def words_of(manager: PagedKVCacheManager, *names: int) -> dict[int, int]:
    """Returns the first word of each page of these prompts, with the name of the prompt."""
    words: dict[int, int] = {}
    for name in names:
        context = TextContext(prompt(name), 64)
        digests = manager._replicas.each[0].hasher(None, context).digests(context.tokens, 0, 2)
        words |= dict.fromkeys(digests[:, 0].tolist(), name)
    return words


def test_the_first_hint_takes_over_what_is_cached() -> None:
    manager = manager_of(40, checks=False)
    for name in range(19):
        serve(manager, prompt(name))
    serve(manager, prompt(0), LAST)
    hints = manager._replicas.each[0].hints
    assert hints._baselines
    words = words_of(manager, *range(19))
    plain = hints._baselines[0]
    oldest_first = [words[plain._words[page]] for page in plain._order.pages()]
    assert oldest_first == [name for name in (*range(1, 19), 0) for _ in range(2)]
    manager.check()
    running = TextContext(prompt(5), 64)
    fresh = manager_of(40, checks=False)
    fresh.external_claim(running.request_id)
    assert fresh.maybe_reserve(running)
    running.update(0)
    fresh.step([running])
    serve(fresh, prompt(6), LAST)
    # includes those of the running request  # pyright: ignore[reportGeneralTypeIssues]
    assert len(fresh._replicas.each[0].hints._baselines[0]._ids) == 4


def evidence(manager: PagedKVCacheManager) -> list[int]:
    """Returns a list to which each later request adds a number of pages. The manager learns from these numbers how many
    pages may follow hints. A number counts the pages that hints have gained or promise to gain.
    """
    learned: list[int] = []
    hints = manager._replicas.each[0].hints
    hints._share.learn = lambda gained, promised, looked: learned.extend((gained, promised))
    return learned


def test_requests_without_hints_are_evidence_after_the_first_hint() -> None:
    manager = manager_of(40, checks=False)
    serve(manager, prompt(0), LAST)
    learned = evidence(manager)
    serve(manager, prompt(0))
    assert learned == [0, 0]


def recover(manager: PagedKVCacheManager) -> None:
    """Repairs the manager as if a call had been interrupted."""
    manager._mark.call = Call("reserve_batch")
    manager.recover()
    manager.check()


def test_after_an_interrupt_the_next_hint_begins_anew_and_pages_keep_the_hints_of_before() -> None:
    manager = manager_of(40, checks=False)
    serve(manager, prompt(1), LAST)
    hints, order = manager._replicas.each[0].hints, manager._replicas.each[0].pool.idle
    assert hints.has_begun
    codes = order.codes.copy()  # type: ignore[attr-defined]
    hints._found[0] = 2  # The test simulates an interrupt of a request's first reservation.
    recover(manager)
    assert (hints.has_begun, hints.share, hints._found[0]) == (False, 0.0, 0)
    assert np.array_equal(order.codes, codes)  # type: ignore[attr-defined]
    serve(manager, prompt(2), LAST)
    assert hints.has_begun
    assert {*hints._baselines[0]._ids} >= {*words_of(manager, 1)}, "they know the pages of before"
    manager.check()


def test_after_an_interrupt_a_tenant_has_the_pages_that_it_had() -> None:
    manager = manager_of(40, checks=False, params={"tenant_quota": 0.5})
    for name in range(8):
        serve(manager, prompt(name), cache_salt="a")
    recover(manager)
    for name in range(8, 12):
        serve(manager, prompt(name), cache_salt="b")
    assert [manager._replicas.each[0].find(TextContext(prompt(name), 64, cache_salt="a")).end for name in range(8)] == (
        [2] * 8
    )


def test_the_plain_baseline_has_the_hits_of_plain_lru() -> None:
    """Neutral hints change nothing. The baseline must therefore have the same hits as the cache, even with concurrent
    and aborted requests.
    """
    manager = manager_of(40, checks=False, rows=4)
    neutral, rng = Retention(), random.Random(0)
    serve(manager, prompt(0), neutral)
    learned = evidence(manager)
    for number in range(300):
        names = {rng.choice([number + 100, rng.randint(0, 14)]) for _ in range(rng.randint(1, 3))}
        running = [TextContext(prompt(name), 64, retention=neutral) for name in names]
        for context in running:
            manager.external_claim(context.request_id, 0)
            assert manager.maybe_reserve(context)
        for context in running:
            context.update(0)
        manager.step(running)
        for context in running:
            manager.release(context.request_id)
        given_up = TextContext(prompt(number + 1000), 64, retention=neutral)
        manager.external_claim(given_up.request_id, 0)
        assert manager.maybe_reserve(given_up)
        manager.release(given_up.request_id)
        if number == 150:
            manager.reset_prefix_cache()
    assert len(learned) > 600
    assert set(learned) == {0}
    manager.check()


@pytest.mark.parametrize("computed", range(5))
def test_the_baseline_has_only_the_computed_part_of_an_aborted_prompt(computed: int) -> None:
    """If the baseline also had the tokens that did not run, hints would be blamed for missing hits that no eviction
    order could have had.
    """
    manager, neutral = manager_of(40, checks=False), Retention()
    serve(manager, prompt(0), neutral)
    learned = evidence(manager)
    tokens = prompt(1, pages=4)
    for found in (0, computed):  # In the second round the request finds the pages that the first round has computed.
        context = TextContext(tokens, 64, retention=neutral)
        with manager.claim(context):
            for page in range(found, computed):
                context.set_token_indices(active_idx=4 * (page + 1))
                assert manager.maybe_reserve(context)
                manager.fetch([context])
                context.update(0)
                manager.step([context])
            assert manager.maybe_reserve(context)
            assert context.start_idx == 4 * computed
    assert serve(manager, tokens, neutral) == 4 * computed
    assert serve(manager, tokens, neutral) == 16
    assert set(learned) == {0}
    manager.check()


def test_a_fork_inherits_the_hint_of_its_parent() -> None:
    manager = trusting(manager_of(40, checks=False))
    parent = TextContext(prompt(1), 64)
    manager.external_claim(parent.request_id)
    assert manager.maybe_reserve(parent)
    parent.update(7)
    manager.step([parent])
    child = parent.fork()
    child.retention = LAST
    assert manager.fork(parent, child)
    manager.release(parent.request_id)
    manager.release(child.request_id)
    for name in range(100, 130):
        serve(manager, prompt(name))
    assert found(manager, 1) == [True]


def test_a_tenant_above_its_quota_evicts_its_own_pages() -> None:
    manager = manager_of(40, checks=False, params={"tenant_quota": 0.2, "tenant_quotas": {"big": 0.5}})
    for name in range(8):
        serve(manager, prompt(name))
    for name in range(100, 130):
        serve(manager, prompt(name), cache_salt="small")
    manager.check()
    assert all(found(manager, *range(8)))
    for name in range(200, 230):
        serve(manager, prompt(name), cache_salt="big")
    manager.check()
    pages = [page for page in range(1, 41) if manager._replicas.each[0].pool.index.published[page]]
    held = owned(manager)
    assert len(pages) >= 38
    assert held["big"] >= 18
    assert held["small"] <= 8


def test_gains_of_a_sample_are_scaled_up_to_all_pages() -> None:
    """In a large pool the baselines follow only a sample of the pages. The gains and losses of the sample are scaled up
    to all pages.
    """
    manager = manager_of(4096, checks=False, rows=1, max_seq_len=4 * 4096)
    serve(manager, prompt(0), LAST)
    hints = manager._replicas.each[0].hints
    assert hints._baselines
    assert hints._baselines[0].rate == 4
    trust(hints, 0.95)
    learned = evidence(manager)
    hits = 0
    for turn in range(4):
        hits += serve(manager, prompt(1, 1000), LAST) // 4
        for other in range(5):
            serve(manager, prompt(100 + 5 * turn + other, 1000), FIRST)
    assert hits == 3000
    assert sum(learned[::2]) == pytest.approx(3000, rel=0.2)
    assert sum(learned[1::2]) == pytest.approx(3000, rel=0.2)


def owned(manager: PagedKVCacheManager, replica: int = 0) -> dict[str, int]:
    """Returns the number of idle pages of each tenant."""
    quotas = manager._replicas.each[replica].hints._quotas
    assert quotas is not None
    return {salt: quotas._orders[owner].count for salt, owner in quotas._ids.items() if quotas._orders[owner].count}


def test_pages_belong_to_the_tenant_that_computed_them_whatever_salt_the_context_has_at_its_release() -> None:
    manager = manager_of(40, params={"tenant_quota": 0.5})
    context = TextContext(prompt(1), 64, cache_salt="a")
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    context.cache_salt = "b"
    manager.release(context.request_id)
    assert owned(manager) == {"a": len(prompt(1)) // 4}


def test_new_content_of_an_evicted_page_does_not_belong_to_the_former_tenant() -> None:
    manager = manager_of(12, host_slots=40, params={"tenant_quota": 0.9})
    serve(manager, prompt(1))
    wanted = manager.contents.digests(TextContext(prompt(1), 64), 0)
    for name in range(2, 9):
        serve(manager, prompt(name), cache_salt="a")
    assert sum(owned(manager).values()) == manager._replicas.each[0].pool.idle.count
    before = owned(manager)["a"], manager.metrics.evictions
    while manager.contents.bring("theirs", 0, wanted, 100):
        manager.check()
    assert (evicted := manager.metrics.evictions - before[1]) > 0
    assert owned(manager) == {"a": before[0] - evicted}


def test_evictions_for_a_quota_are_not_counted_against_hints() -> None:
    manager = manager_of(40, checks=False, params={"tenant_quota": 0.2})
    rng = random.Random(0)
    serve(manager, prompt(0), Retention())
    learned = evidence(manager)
    for _ in range(300):
        salt = rng.choice([None, "a", "a"])
        serve(manager, prompt(rng.randint(0, 14)), Retention(), cache_salt=salt)
    assert manager.metrics.evictions > 20
    assert set(learned) == {0}
    manager.check()


def test_baselines_keep_pages_that_the_manager_evicts_by_age_or_hint_but_not_those_evicted_for_quotas() -> None:
    """The manager's evictions by age and by hints do not change what the baselines keep, because the baselines evict in
    their own order. An eviction for a quota also removes the page from the baselines.
    """
    manager = manager_of(40, checks=False, params={"tenant_quota": 0.2})
    serve(manager, prompt(0), Retention())
    replica = manager._replicas.each[0]
    pages = np.flatnonzero(replica.pool.index.published).astype(np.int32)
    words = replica.pool.index.words_of(pages)
    plain, hinted = replica.hints._baselines  # pyright: ignore[reportAssignmentType]

    def kept() -> list[tuple[bool, bool]]:
        return [(word in plain._ids, word in hinted._ids) for word in words.tolist()]

    for why in (BY_TURN, BY_HINT, np.array([BY_TURN, BY_HINT], np.uint8)):
        replica.hints.gone(pages, why)
        assert kept() == [(True, True), (True, True)]
    replica.hints.gone(pages, np.array([BY_HINT, BY_QUOTA], np.uint8))
    assert kept() == [(True, True), (False, False)]
    replica.hints.gone(pages, BY_QUOTA)
    assert kept() == [(False, False), (False, False)]


def test_pages_that_two_requests_compute_at_a_time_count_as_found_by_the_second() -> None:
    manager = manager_of(40)
    serve(manager, prompt(0), Retention())
    learned = evidence(manager)
    running = [TextContext(prompt(1), 64, retention=Retention()) for _ in range(2)]
    for context in running:
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
        assert context.start_idx == 0
        context.update(0)
    manager.step(running)
    for context in running:
        manager.release(context.request_id)
    assert learned == [0, 0, 0, 0]


def test_pages_found_chunk_by_chunk_are_counted_once() -> None:
    manager = manager_of(40)
    serve(manager, prompt(1), Retention())
    learned = evidence(manager)
    running = TextContext(prompt(1, pages=4), 64, retention=Retention())
    with manager.claim(running):
        assert manager.maybe_reserve(running)
        assert running.start_idx == 8
        # Plain LRU would have found all pages of this prompt among the pages of `running`.
        assert serve(manager, prompt(1, pages=4), Retention()) == 8
        assert manager.maybe_reserve(running)
        assert running.start_idx == 16
        running.update(0)
        manager.step([running])
    assert learned == [-2, 0, 2, 0]  # At the largest share, hints promise no more than plain LRU.


def test_a_reset_empties_the_baselines_and_teaches_nothing_about_running_requests() -> None:
    manager = manager_of(40)
    serve(manager, prompt(0), Retention())
    learned = evidence(manager)
    running = TextContext(prompt(0), 64, retention=Retention())
    manager.external_claim(running.request_id)
    assert manager.maybe_reserve(running)
    assert running.start_idx == 8
    running.update(0)
    manager.step([running])
    manager.reset_prefix_cache()
    assert serve(manager, prompt(0), Retention()) == 0
    so_far = [*learned]
    manager.release(running.request_id)  # it found nothing that a simulated cache would have found
    assert learned == so_far == [0] * len(so_far)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_hint_share": 1.5}, "max_hint_share is 1.5"),
        ({"tenant_quota": -0.1}, "tenant_quota is -0.1"),
        ({"tenant_quotas": {"a": 2.0}}, r"tenant_quotas\['a'\] is 2.0"),
    ],
)
def test_impossible_shares_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        manager_of(4, params=values)


def some_hint(rng: random.Random) -> Retention | None:
    ranges = tuple(
        RangeRetention(start, rng.choice([None, start + 6]), rng.choice([True, False, None]), rng.randint(0, 100))
        for start in rng.sample(range(9), rng.randint(0, 2))
    )
    hint = Retention(rng.choice([True, False, None]), rng.randint(0, 100), rng.choice([None, 0.001, 50.0]), ranges)
    return rng.choice([None, hint, hint])


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_with_random_hints_and_quotas_every_page_is_accounted_for(seed: int) -> None:
    """Random hints, quotas, forks, refusals and resets. `check` runs after each move."""
    rng = random.Random(seed)
    options = {"tenant_quota": 0.3, "max_hint_share": rng.choice([0.5, 1.0])}
    manager = manager_of(16, dp=2, rows=4, checks=False, params=options)
    live: list[TextContext] = []
    for _ in range(250):
        salt = rng.choice([None, "a", "b"])
        tokens = [*[rng.randint(1, 3)] * 4 * rng.randint(0, 4), *[rng.randint(1, 3)] * rng.randint(1, 6)]
        context = TextContext(tokens, 64, cache_salt=salt, retention=some_hint(rng))
        replica = manager.get_or_recommend_replica(context)
        if sum(manager.get_replica(other) == replica for other in live) < 4:
            manager.external_claim(context.request_id, replica)
            if manager.maybe_reserve(context):
                live.append(context)
                if rng.random() < 0.9:
                    context.update(rng.randint(1, 3))
                    manager.step([context])
            else:
                manager.release(context.request_id)
        if live and rng.random() < 0.6:
            context = live.pop(rng.randrange(len(live)))
            context.retention = some_hint(rng)
            manager.release(context.request_id)
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
        manager.check()
    for context in live:
        manager.release(context.request_id)
    manager.check()
    assert manager.num_free_blocks == manager.total_num_pages
    assert manager.metrics.evictions > 20
    assert manager.metrics.cache_tokens > 100


def test_a_context_that_its_owner_drops_is_kept_until_its_release() -> None:
    manager = manager_of(40)
    dropped = TextContext(prompt(1), 64)
    manager.external_claim(dropped.request_id)
    assert manager.maybe_reserve(dropped)
    name, seen = dropped.request_id, ref(dropped)
    del dropped
    # The request's pages are tied to the lifetime of its context, so the manager keeps the context.
    assert seen() is not None
    manager.release(name)
    assert seen() is None
    trusting(manager)
    hinted = TextContext(prompt(2), 64, retention=LAST)
    manager.external_claim(hinted.request_id)
    assert manager.maybe_reserve(hinted)
    hinted.update(0)
    manager.step([hinted])
    name = hinted.request_id
    del hinted
    manager.release(name)
    for number in range(100, 130):
        serve(manager, prompt(number))
    assert found(manager, 2) == [True]


class Plain:
    """A caller's own context class whose instances allow no weak references."""

    __slots__ = ("_inner", "prefix_hasher", "retention")

    def __init__(self, inner: TextContext) -> None:
        self._inner = inner
        self.retention: Retention | None = None
        self.prefix_hasher: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_context_of_another_class_may_bring_its_hint_at_the_end_too() -> None:
    manager = manager_of(40)
    context = Plain(TextContext(prompt(1), 64))
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)  # pyright: ignore[reportArgumentType]
    assert manager.hint_share == 0.0
    context.retention = LAST
    manager.release(context.request_id)
    assert manager.hint_share == 0.2


class Heard(LruOrder):
    """A caller's own eviction order that records which of its methods were called."""

    by_age = False

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.heard: list[tuple[object, ...]] = []

    def hint(self, pages: np.ndarray, hints: PageHints | None) -> None:
        self.heard.append(("hint", len(pages), hints and hints.codes.tolist()))

    def own(self, pages: np.ndarray, salt: str | None) -> None:
        self.heard.append(("own", len(pages), salt))


def test_an_order_of_the_callers_own_is_told_of_hints_and_nothing_else_follows_them() -> None:
    orders: list[Heard] = []

    def make(num_pages: int) -> Heard:
        orders.append(Heard(num_pages))
        return orders[-1]

    manager = manager_of(40, dp=2, params={"eviction_order": make})
    idle = [replica.pool.idle for replica in manager._replicas.each]
    assert len(orders) == 2, "one for each replica"
    serve(manager, prompt(1, 3), LAST)
    serve(manager, prompt(2, 2))
    for name in range(100, 150):
        serve(manager, prompt(name, 2))
    heard = [one for order in orders for one in order.heard if one[1]]
    assert heard[:2] == [("hint", 3, [4, 4, 4]), ("hint", 2, None)]
    assert [replica.pool.idle for replica in manager._replicas.each] == idle
    assert not any(replica.hints.share for replica in manager._replicas.each)


def test_a_quota_holds_before_an_order_of_the_callers_own() -> None:
    manager = manager_of(40, params={"eviction_order": Heard, "tenant_quota": 0.1})
    for name in range(4):
        serve(manager, prompt(name, 2), cache_salt="owned")
    for name in range(10, 26):
        serve(manager, prompt(name, 2))
    found = [serve(manager, prompt(name, 2)) for name in range(10, 26)]
    assert found.count(8) == 16, "pages without a tenant stay, and so do four pages of the tenant"
    manager.check()
