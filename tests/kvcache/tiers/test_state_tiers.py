"""A passing copy of a state follows a request until another request makes the copy permanent. The copy must be saved to
the host before it is overwritten.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvcache import KVCacheParams, PoolTooSmallError
from kvcache.states.state_memory import kind_offsets, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.tiers import StateTier, TierRoom, divide_tiers, state_mover
from tests.kvcache.build import states_of
from tests.kvcache.random_model.matrix import SHAPES
from tests.kvcache.states.served_states import ServedStates


def digest(number: int) -> np.ndarray:
    return np.array([[number]], np.uint64)


def tier_below(states: StatePages) -> StateTier:
    """Returns host memory with room for four states on one shard."""
    host = HostTier([kind_offsets(states.layouts[0])[-1]], 4, 1, pinned=False)
    return StateTier(host, states.pool, state_mover(states, host))


@pytest.mark.parametrize("together", [True, False])
def test_a_passing_copy_that_another_request_makes_permanent_is_saved_to_the_host(together: bool) -> None:
    states = states_of(SHAPES[1], 5)
    states.below = tier_below(states)
    pages = torch.tensor([states.allocate(name) for name in "ab"])
    for tensor in states.blocks[0]:
        tensor[pages] = 5
    states.advance(pages, [8, 8])
    states.keep("a", digest(1), 8, passing=True)
    states.keep("b", digest(1), 8, passing=False)
    assert not states.below.slots(digest(1))[0]
    for tensor in states.blocks[0]:
        tensor[pages[0]] = 7
    states.advance(pages[:1], [16])
    if together:
        assert states.keep_passing(["a"], digest(2), np.array([16]), [True]) == []
    else:
        states.keep("a", digest(2), 16, passing=True)
    assert states.below.slots(digest(1))[0]
    states.resume("b", digest(1), 8)
    assert all((tensor[pages[1]] == 5).all() for tensor in states.blocks[0])
    states.check(["a", "b"])


def test_copies_to_the_host_take_a_twentieth_of_a_step_and_copies_of_states_half_of_that() -> None:
    it = ServedStates()
    assert (it.tiers.share, it.state_tiers.share) == (0.05, 0.025)


def test_after_an_interrupt_complete_copies_are_queued_for_the_host_and_copies_to_the_device_end() -> None:
    states = states_of(SHAPES[1], 5)
    states.below = tier = tier_below(states)
    page = torch.tensor([states.allocate("a")])
    states.advance(page, [8])
    states.keep("a", digest(1), 8, passing=False)
    tier.store_all()
    states.forget_copies()
    slots = tier.slots(digest(1))
    tier.hold(slots)
    tier.restore(int(page[0]), page.numpy().astype(np.int32), slots)  # the interrupt has come before `arrive`
    states.keep("a", digest(2), 8, passing=False)
    states.rebuild([], np.zeros(6, np.int64))
    states.check([])
    assert not tier.open_loads
    assert [pages.tolist() for pages, _ in tier.waiting] == [states.pool.index.find(digest(2)).tolist()]


class Lower:
    """A tier below the host that says that it has the states of these digests, but never delivers one.

    Attributes:
        coming: whether it says that a state is on its way.
    """

    generation = 0

    def __init__(self, *there: int, asks: bool = False) -> None:
        self.there, self.asks, self.coming = there, asks, False
        # For each state that was asked for, its digest and the number of pages that need not be computed if it is
        # found.
        self.fetched: list[tuple[int, int]] = []

    def has_of(self, digests: np.ndarray, asked: np.ndarray, *, perhaps: bool) -> np.ndarray:  # noqa: ARG002
        return asked & np.isin(digests[:, :, 0], self.there)

    def ask(self, digests: np.ndarray, perhaps: np.ndarray) -> bool:  # noqa: ARG002
        return self.asks

    def fetch(self, digests: np.ndarray, wanted: np.ndarray, *, wait: bool, gain: int) -> None:  # noqa: ARG002
        self.fetched.append((int(digests[wanted][0, 0]), gain))

    def brings(self, digests: np.ndarray, wanted: np.ndarray) -> bool:  # noqa: ARG002
        return self.coming


def test_the_gain_of_a_state_is_all_pages_before_it_however_many_states_are_looked_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache.states.state_pages._LOOKED_AT", 4)
    states = states_of(SHAPES[1], 3)
    states.below = tier = tier_below(states)
    tier.host.lower.append(lower := Lower(2, 6, 7, 10))  # type: ignore[arg-type]
    prompt = np.concatenate([digest(number) for number in range(1, 11)])
    assert not states.bring_newest(prompt, wait=False)
    assert lower.fetched == [(10, 10), (7, 7), (6, 6), (2, 2)]


def test_a_lookup_says_whether_an_answer_or_a_state_is_on_its_way() -> None:
    states = states_of(SHAPES[1], 3)
    states.below = tier = tier_below(states)
    tier.host.lower.append(lower := Lower(1, asks=True))  # type: ignore[arg-type]
    assert states.bring_newest(digest(1), wait=False), "the store is asked for later states"
    assert lower.fetched == []
    lower.coming = True
    assert states.bring_newest(digest(1), wait=True)
    lower.asks = False
    assert states.bring_newest(digest(1), wait=False)
    lower.coming = False
    assert not states.bring_newest(digest(1), wait=False)
    assert lower.fetched == [(1, 1)] * 3


def test_files_are_asked_only_for_states_later_than_the_available_ones() -> None:
    states = states_of(SHAPES[1], 3)
    states.below = tier = tier_below(states)
    tier.host.lower.append(lower := Lower(1, 2, 3))  # type: ignore[arg-type]
    states.advance(torch.tensor([states.allocate("a")]), [16])
    prompt = np.concatenate([digest(number) for number in (1, 2, 3)])
    assert not states.bring_newest(prompt, wait=False)
    states.keep("a", digest(2), 16, passing=False)
    assert not states.bring_newest(prompt, wait=True)
    assert lower.fetched == [(3, 3), (2, 2), (1, 1), (3, 1)]


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_states_get_their_share_of_host_memory_and_files_and_pages_get_the_rest(share: float) -> None:
    state_bytes = kind_offsets(state_layouts(SHAPES[4], 1)[0])[-1]
    params = KVCacheParams(
        torch.int64,
        1,
        2,
        enable_prefix_caching=True,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=(80 * state_bytes + 8) / 2**30,
        file_tier_dir="folder",
        file_tier_key="model",
        file_tier_max_gb=1000 / 2**30,
        states=SHAPES[4],
        tier_state_share=share,
    )
    slots = int(80 * share)
    rest, files = (80 - slots) * state_bytes + 8, int(1000 * share)
    assert divide_tiers(params, 1) == TierRoom(rest, 1000 - files, slots, files)
    assert divide_tiers(dataclasses.replace(params, states=None), 1) == TierRoom(80 * state_bytes + 8, 1000, 0, 0)
    with pytest.raises(PoolTooSmallError, match="tier_state_share is 0.01: the share must hold 2 states"):
        divide_tiers(dataclasses.replace(params, tier_state_share=0.01), 1)


def test_a_state_that_finds_no_room_on_the_device_gives_back_its_slot_of_the_host() -> None:
    states = states_of(SHAPES[1], 2)
    states.below = tier = tier_below(states)
    states.advance(torch.tensor([states.allocate("a")]), [8])
    states.keep("a", digest(1), 8, passing=False)
    tier.store_all()
    states.allocate("b")
    assert not states.kept_after(digest(2)).any()
    slots = tier.slots(digest(1))
    assert slots.all()
    assert not states.bring_copy(digest(1), 8)
    assert tier.host.pool.holders[slots].tolist() == [0]
    states.release("b")
    assert states.bring_copy(digest(1), 8)


@pytest.mark.parametrize("on_the_device", [True, False])
def test_a_state_from_which_a_request_resumes_counts_as_used_in_every_tier(on_the_device: bool) -> None:
    states = states_of(SHAPES[1], 6)
    states.below = tier = tier_below(states)
    states.advance(torch.tensor([states.allocate("a")]), [8])
    for number in (1, 2, 3, 4):
        states.keep("a", digest(number), 8, passing=False)
    tier.store_all()
    if not on_the_device:
        states.forget_copies()
    states.resume("a", digest(1), 8)
    states.keep("a", digest(5), 8, passing=False)
    tier.store_all()
    assert [int(tier.slots(digest(number))[0] > 0) for number in (1, 2, 3, 4, 5)] == [1, 0, 1, 1, 1]
