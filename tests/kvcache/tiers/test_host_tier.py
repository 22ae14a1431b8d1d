"""The host tier: an evicted page costs only a copy, and no request reads a page before its copy has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import InvariantError, KVCacheParams, PagedKVCacheManager, PoolTooSmallError, TextContext
from kvcache.copies import PageMover
from kvcache.pool.pages import PagePool
from kvcache.tiers.host_tier import HostTier, ReplicaTier
from tests.kvcache.build import manager_of, proven, run_once
from tests.kvcache.served import SIZE, Served


@pytest.fixture
def served() -> Iterable[Callable[..., Served]]:
    made: list[Served] = []

    def make(pages: int = 8, host_slots: int = 40, **options: Any) -> Served:
        made.append(Served(pages, host_slots, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()


PROMPT = range(17)  # four full pages of 4 tokens, and one more token


def test_the_documented_counters(served: Any) -> None:
    it = served(8, 40, dp=2)
    assert it.manager.total_num_host_pages == 40
    assert it.manager.host_committed_block_pct == 0.0
    it.serve(PROMPT)
    it.tiers.store_all()
    assert it.manager.host_committed_block_pct == 4 / 40
    assert it.manager.metrics.d2h_blocks_copied == 4
    it.manager.reset_metrics()
    assert it.manager.metrics.d2h_blocks_copied == 0


def test_pages_that_the_host_has_are_not_copied_again(served: Any) -> None:
    it = served()
    it.serve(PROMPT)
    it.tiers.store_all()
    it.fill(8)
    it.serve(PROMPT)
    it.tiers.store_all()
    assert it.manager.metrics.d2h_blocks_copied == 4 + 7  # `fill` has computed the seven other pages.


def test_step_without_fetch_publishes_no_page_that_has_not_arrived(served: Any) -> None:
    it = served(16, 40)
    it.serve(PROMPT)
    it.fill(16)
    careless, context = it.claim(PROMPT), it.claim(PROMPT)
    assert it.manager.maybe_reserve(careless)
    it.manager.step([careless])  # the four pages of the request are published, so their content must be right
    assert it.manager.maybe_reserve(context)
    assert it.manager.get_req_blocks(context.request_id)[:4] == it.manager.get_req_blocks(careless.request_id)[:4]
    it.run(context)
    assert it.kv.compared == 16


def test_a_request_given_up_before_it_runs_costs_no_copy(served: Any) -> None:
    it = served()
    it.serve(PROMPT)
    it.fill(8)
    before = it.manager.metrics.h2d_blocks_copied
    context = it.claim(PROMPT)
    assert it.manager.maybe_reserve(context)
    it.manager.release(context.request_id)
    assert it.manager.metrics.h2d_blocks_copied == before
    assert it.manager.num_free_blocks == 8
    it.manager.check()


def test_a_refused_reservation_changes_nothing(served: Any) -> None:
    it = served(8, 40)
    it.serve(PROMPT)
    it.fill(8)
    blocker = it.claim(range(100, 100 + 5 * SIZE))
    assert it.manager.maybe_reserve(blocker)
    context = it.claim(PROMPT)
    host = it.tiers.host.pool
    before = (host.free_count, it.manager.num_free_blocks)
    assert not it.manager.maybe_reserve(context)
    assert (host.free_count, it.manager.num_free_blocks) == before
    assert context.start_idx == 0
    it.manager.release(blocker.request_id)
    assert it.manager.maybe_reserve(context)
    assert context.start_idx == 16
    it.run(context)


def test_a_request_asked_for_twice_before_it_runs(served: Any) -> None:
    it = served(16, 40)
    it.serve(PROMPT)
    it.serve(range(25))
    it.fill(16)
    context = it.claim(range(26))
    context.set_token_indices(active_idx=20)
    assert it.manager.maybe_reserve(context)
    assert it.manager.maybe_reserve(context, num_steps=3)
    assert context.start_idx == 24
    it.run(context)
    assert it.kv.compared == 16 + 24


def test_a_refused_request_finds_pages_that_have_come_to_the_host_meanwhile() -> None:
    manager = manager_of(8, host_slots=40)
    holder, waiting = (TextContext(range(at, at + 17), 64) for at in (100, 0))
    for context in (holder, waiting):
        manager.external_claim(context.request_id)
    assert manager.maybe_reserve(holder)
    assert not manager.maybe_reserve(waiting), "neither the device nor the host has a page of the prompt"
    manager.release(holder.request_id)
    run_once(manager, range(17))
    run_once(manager, range(200, 231))  # This prompt evicts the first prompt from the device.
    assert manager.maybe_reserve(waiting)
    assert waiting.start_idx == 16
    manager.fetch([waiting])
    manager.close()


def test_the_same_content_stored_by_two_replicas_at_once_takes_one_slot(served: Any) -> None:
    it = served(8, 40, dp=2)
    it.tiers.share = 0.0
    it.serve(PROMPT, replica=0)
    it.serve(PROMPT, replica=1)
    it.tiers.store_all()
    assert it.manager.host_committed_block_pct == 4 / 40


class SlowCopies:
    """A clock that advances only when a tier makes copies."""

    def __init__(self, it: Served, copy_s: float) -> None:
        self.now = 0.0
        self._copy_s, self._store = copy_s, it.tiers.replicas[0].store
        it.tiers._clock, it.tiers._seen, it.tiers._batch, it.tiers._credit = self, 0.0, 1, 0.0
        it.tiers.replicas[0].store = self.store  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self) -> float:
        return self.now

    def store(self, most: int) -> int:
        count = self._store(most)
        self.now += self._copy_s * bool(count)
        return count


def waits(it: Served) -> int:
    return sum(len(pages) for pages, _ in it.tiers.replicas[0].waiting)


class Below:
    """A tier below the host that records which of its methods were called, in order."""

    generation, held_slots = 0, ()

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **_: self.said.append((name, given[0].shape[-2])) if name in {"offer", "used"} else None


def test_a_use_of_a_page_counts_once_the_pages_before_it_have_arrived(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is still being copied is not in the tier yet. If its use counted at once, the use would be forgotten
    when the page arrives. The first pages of a prompt would then be evicted before its last pages.
    """
    it = served(16, 40)
    tier, over = it.tiers.replicas[0], [False]
    below: Any = Below()
    store = tier._mover.store

    def beside(pages: Any, slots: Any) -> Any:
        store(pages, slots)
        return SimpleNamespace(over=lambda: over[0], wait=lambda: None)

    monkeypatch.setattr(tier, "_mover", SimpleNamespace(store=beside, load=tier._mover.load))
    it.tiers.share = 0.0
    it.serve(PROMPT)
    monkeypatch.setattr(tier, "lower", (below,))
    tier.store(4)
    tier.poll()
    assert len(tier.stores) == 1
    assert [len(pages) for pages, _ in tier.waiting] == [0], "the use of all four, as the request left"
    tier.store(4)
    assert below.said == []
    over[0] = True
    tier.poll()
    assert below.said == [("offer", 4), ("used", 4)]
    assert not tier.waiting


def test_a_step_spends_only_a_share_of_its_time_on_copies(served: Any) -> None:
    it = served(64, 256, max_seq_len=256)
    it.tiers.share = 0.0
    for _ in range(6):
        it.fill(8)
    clock, before = SlowCopies(it, 2**-10), waits(it)
    it.tiers.share = 1 / 16
    copied = []
    for _ in range(40):
        # This is the time of one step. Copies may use a part of the step that is half as long as a copy.
        clock.now += 2**-7
        it.tiers.tick()
        copied.append(before - waits(it))
    assert copied[:6] == [1, 1, 2, 2, 3, 3]
    assert copied[-1] == 20
    it.tiers.tick()
    assert before - waits(it) == 20  # no time has passed yet


def test_the_time_earned_in_a_long_pause_is_not_spent_at_once(served: Any) -> None:
    it = served(64, 256, max_seq_len=256)
    it.tiers.share = 0.0
    for _ in range(6):
        it.fill(8)
    clock, before = SlowCopies(it, 0.0009), waits(it)
    it.tiers.share = 0.05
    for copied in (6, 12, 18):
        clock.now += 3600
        it.tiers.tick()
        assert before - waits(it) == copied  # The copies take 5 ms.


def test_a_long_prompt_copied_late_does_not_outlive_its_head(served: Any) -> None:
    it = served(16, 14)
    it.tiers.share = 0.0
    it.serve([*range(33)])
    it.tiers.store_all()
    grown = it.claim([*range(41)])  # The request has eight cached pages and two new pages.
    assert it.manager.maybe_reserve(grown)
    it.run(grown)
    it.manager.release(grown.request_id)
    it.tiers.store_all()
    it.fill(9)  # The fill needs eight slots. It takes four of them from the last pages of the prompt.
    it.tiers.store_all()
    it.manager._replicas.each[0].pool.forget()
    assert it.serve([*range(41)]) == 6 * SIZE


def test_reset_forgets_the_host_pages_except_those_promised_to_a_request(served: Any) -> None:
    it = served(16, 40)
    it.serve(PROMPT)
    it.fill(16)
    context = it.claim(PROMPT)
    assert it.manager.maybe_reserve(context)
    it.manager.reset_prefix_cache()
    assert it.manager.host_committed_block_pct == 0.0
    it.run(context)
    assert it.kv.compared == 16
    it.manager.release(context.request_id)
    it.manager.reset_prefix_cache()
    assert it.serve(PROMPT) == 0


def test_pages_that_a_reset_forgets_are_not_copied_any_more(served: Any) -> None:
    it = served(16, 40)
    it.tiers.share = 0.0
    it.serve(PROMPT)
    it.manager.reset_prefix_cache()
    it.manager.flush_tiers()
    assert it.manager.metrics.d2h_blocks_copied == 0


def test_an_import_leaves_restored_pages_to_the_tier(served: Any) -> None:
    it, source = served(16, 40), served(16, 40)
    it.serve(PROMPT)
    it.fill(16)
    tokens = [*range(24)]
    giver = source.claim(tokens)
    assert source.manager.maybe_reserve(giver)
    source.run(giver)
    table = source.manager.block_table(giver.request_id)
    taker = it.claim([*tokens, 1])
    pending = it.manager.import_block_table(taker, table)
    assert pending is not None
    assert pending.tokens[0] == 16
    assert len(pending.parts[0].dst_pages) == 2
    theirs, ours = source.manager.device_tensors[0][0], it.manager.device_tensors[0][0]
    for src, dst in zip(pending.parts[0].src_pages.tolist(), pending.parts[0].dst_pages.tolist(), strict=True):
        ours[dst] = theirs[src]
    it.manager.commit_import(taker, pending, proven(it.manager, pending))
    # The other request finds the pages of the committed import, although the importing request has not run yet.
    another = it.claim([*tokens, 2])
    assert it.manager.maybe_reserve(another)
    assert another.start_idx == 24
    for context in (another, taker):
        it.manager.maybe_reserve(context)
        it.run(context)
    assert it.kv.compared == 24 + 24


def test_preempted_requests_give_back_slots_and_pages(served: Any) -> None:
    it = served(8, 40)
    it.serve(PROMPT)
    it.fill(8)
    for _ in range(3):
        context = it.claim(PROMPT)
        assert it.manager.maybe_reserve(context)
        it.manager.release(context.request_id)
    assert it.tiers.host.pool.free_count == 40
    assert it.serve(PROMPT) == 16


def test_a_tier_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(
        PoolTooSmallError, match="host_kvcache_swap_space_gb is 1e-09, 1 bytes: at least one page of 64 bytes must fit"
    ):
        manager_of(8, params={"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-9})


def test_a_full_tier_of_held_slots_keeps_nothing_and_refuses_nothing(served: Any) -> None:
    it = served(16, 4)
    it.serve(PROMPT)
    it.fill(16)
    it.serve(PROMPT)
    it.tiers.store_all()
    it.manager._replicas.each[0].pool.forget()
    holder = it.claim(PROMPT)
    assert it.manager.maybe_reserve(holder)
    assert holder.start_idx == 16  # all four slots of the host are held now
    it.serve(range(50, 67))
    it.tiers.store_all()
    it.run(holder)


def test_random_prompts_with_copies_by_the_clock(served: Any) -> None:
    """As in a server, no call waits for the copies to the host. The KV of every cached token is compared."""
    rng = np.random.default_rng(3)
    for seed in range(6):
        it = served(20, 60, dp=1 + seed % 2, checks=False)
        it.tiers._batch = 1 + seed
        live: list[TextContext] = []
        for _ in range(150):
            if len(live) < 4 and rng.random() < 0.6:
                tokens = [int(rng.integers(6)), *range(int(rng.integers(1, 40)))]
                context = it.claim(tokens, salt=[None, "t"][rng.integers(2)], replica=int(rng.integers(1 + seed % 2)))
                if it.manager.maybe_reserve(context) and rng.random() < 0.9:
                    live.append(context)
                else:
                    it.manager.release(context.request_id)
            if live and rng.random() < 0.7:
                batch = [context for context in live if it.manager.maybe_reserve(context)]
                it.run(*batch)
            if live and rng.random() < 0.3:
                it.manager.release(live.pop(int(rng.integers(len(live)))).request_id)
            it.manager.check()
        assert it.manager.metrics.h2d_blocks_copied > 10
        assert it.kv.compared > 1000


BREAKS: dict[str, tuple[Callable[[ReplicaTier], Any], str]] = {
    "a slot held by nobody": (lambda t: t.host.pool.holders.__setitem__(40, 1), "host tier: page 40 has 1 holders"),
    "a load without its slots": (lambda t: t.host.pool.release(t.open_loads[0].slots), "host tier: page"),
    "a load without a writer": (lambda t: t.pool.drop_writer(t.open_loads[0].pages), "writers"),
    "a page marked for nothing": (lambda t: t.storing.__setitem__(~t.storing, True), "page 0 must be both marked"),
    "a page queued twice": (lambda t: t.waiting.append(t.waiting[0]), "2 times"),
    "a page queued by another name": (
        lambda t: t.waiting.appendleft((t.waiting.popleft()[0], np.full((1, 4), 7, np.uint64))),
        "has got other contents",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_recounts_the_tier(name: str) -> None:
    it = Served(16, 40, checks=False)
    it.serve(PROMPT)
    it.fill(16)
    it.tiers.share = 0.0
    it.serve(range(300, 317))
    context = it.claim(PROMPT)
    assert it.manager.maybe_reserve(context)
    tier = it.tiers.replicas[0]
    assert tier.open_loads
    assert tier.waiting
    it.manager.check()
    change, message = BREAKS[name]
    change(tier)
    with pytest.raises(InvariantError, match=message):
        it.manager.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pages_are_copied_to_pinned_memory_and_back_while_the_model_runs() -> None:
    params = KVCacheParams(
        torch.int64,
        n_kv_heads=1,
        head_dim=2,
        enable_prefix_caching=True,
        page_size=SIZE,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=64 * 128 / 2**30,
    )
    manager = PagedKVCacheManager(params, 8, 256, 1, ["cuda"], available_cache_memory=16 * 128)
    for number in range(8):
        for _ in range(2):
            context = TextContext([number % 4, *range(30)], 64)
            manager.external_claim(context.request_id)
            assert manager.maybe_reserve(context)
            (inputs,) = manager.fetch([context])
            pages = inputs.lookup_table[0].long()
            first = context.start_idx // SIZE
            want = torch.arange(len(pages), device="cuda")[:first] * 10 + number % 4
            assert (inputs.blocks[pages[:first], 0, 0, 0, 0, 0] == want).all()
            inputs.blocks[pages[first:]] = (
                torch.arange(len(pages), device="cuda")[first:, None, None, None, None, None] * 10 + number % 4
            )
            context.update(1)
            manager.step([context])
            manager.check()
            manager.release(context.request_id)
    assert manager.metrics.h2d_blocks_copied


class OnePageBelow:
    """A lower tier with one page. When the host asks for the page, the tier takes a host slot at once."""

    asks = False

    def __init__(self, host: HostTier, word: int) -> None:
        self._host, self._word = host, word

    def has_of(self, digests: np.ndarray, asked: np.ndarray, **_: object) -> np.ndarray:
        return asked & (digests[:, :, 0] == self._word)

    def fetch(self, digests: np.ndarray, wanted: np.ndarray, **_: object) -> None:
        slots = self._host.pool.allocate(np.count_nonzero(wanted))
        self._host.pool.index.publish(slots, digests[wanted])
        self._host.pool.release(slots)

    def brings(self, *_: object) -> bool:
        return False


def test_loading_a_page_from_a_lower_tier_evicts_no_page_that_is_needed_with_it() -> None:
    host = HostTier([8], 3, 1, pinned=False)
    tier = ReplicaTier(host, PagePool(8, 1), PageMover([], None))
    slots, words = host.pool.allocate(3), np.array([[1], [2], [3]], np.uint64)
    host.pool.index.publish(slots, words)
    for at in range(3):  # The first slot is the least recently used one.
        host.pool.release(slots[at : at + 1])
    host.lower.append(OnePageBelow(host, 9))  # type: ignore[arg-type]
    prefix = np.array([[[1], [9]]], np.uint64)
    assert not tier.to_host(prefix, np.ones((1, 2), np.bool_), 2, wait=False)
    assert (tier.slots(prefix[0]) > 0).all()
    assert tier.slots(words).tolist() == [slots[0], 0, slots[2]]


def test_a_copy_from_the_host_never_goes_into_a_page_that_a_block_table_has_named_to_readers(served: Any) -> None:
    it = served(20, 60)
    leased = it.claim(PROMPT)
    leased.set_token_indices(active_idx=SIZE + 2)
    assert it.manager.maybe_reserve(leased)
    it.run(leased)
    lease = it.manager.lease(leased.request_id)
    table = it.manager.block_table(leased.request_id)
    named = [*table.groups[0]]
    it.manager.device_tensors[0][0][named[1]] += 1 << 40  # another KV than the next request computes
    before = it.manager.device_tensors[0][0][named].clone()
    it.serve(PROMPT)
    it.tiers.store_all()
    it.fill(15)
    assert it.manager.maybe_reserve(leased)
    it.manager.fetch([leased])
    assert torch.equal(it.manager.device_tensors[0][0][named], before)
    assert leased.start_idx == SIZE + 2
    it.manager.end_lease(lease)
