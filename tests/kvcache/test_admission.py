"""`admission` says which replica is best for a request, and whether the request fits on any replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import Admission, PagedKVCacheManager, PromptTooLongError, Routing, SequenceTooLongError, TextContext
from kvcache.layer_groups import LayerGroup
from kvcache.params import RoutingRule, StateShape
from kvcache.replica.hashing import PrefixHasher
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.random_model.seam import end_copies_late


def running(manager: PagedKVCacheManager, tokens: Any, replica: int) -> TextContext:
    context = TextContext(tokens, 256)
    manager.external_claim(context.request_id, replica)
    assert manager.maybe_reserve(context)
    return context


def test_admission_says_how_many_pages_are_cached_and_how_many_are_missing() -> None:
    manager = manager_of(20, dp=2)
    run_once(manager, range(30), 1)
    assert manager.admission(TextContext(range(30), 64)) == Admission(1, 7, 1, True)
    assert manager.admission(TextContext(range(30), 64), num_steps=4) == Admission(1, 7, 2, True)
    assert manager.admission(TextContext(range(50, 55), 64)).missing_pages == 2


def test_a_prompt_that_never_fits_says_so_and_touches_nothing() -> None:
    manager = manager_of(8, dp=2)
    before = manager.metrics
    for call in (manager.admission, manager.get_or_recommend_replica):
        with pytest.raises(PromptTooLongError, match="33 tokens need 9 pages, but the pool has 8"):
            call(TextContext(range(33), 64))
        with pytest.raises(SequenceTooLongError, match="300 tokens .* max_seq_len is 256"):
            call(TextContext(range(300), 300))
    assert manager.metrics == before


def test_admission_prefers_a_replica_where_the_request_fits_and_says_if_there_is_none() -> None:
    manager = manager_of(10, dp=2)
    run_once(manager, range(28), 0)
    # Ten pages are free. The request needs its seven cached pages and two more pages.
    waiting = TextContext(range(36), 64)
    assert manager.admission(waiting) == Admission(0, 7, 2, True)
    busy = running(manager, range(100, 108), 0)
    assert manager.admission(waiting) == Admission(1, 0, 9, True)
    other = running(manager, range(200, 208), 1)
    found = manager.admission(waiting)
    assert not found.fits
    manager.external_claim(waiting.request_id, found.replica_idx)
    assert not manager.maybe_reserve(waiting)  # `admission` has predicted this refusal.
    manager.release(waiting.request_id)
    manager.release(busy.request_id)
    assert manager.admission(waiting).fits
    assert other.start_idx == 0


def test_idle_pages_of_a_hit_do_not_count_as_room() -> None:
    manager = manager_of(10)
    run_once(manager, range(28), 0)
    assert manager.admission(TextContext(range(40), 64)) == Admission(0, 7, 3, True)
    blocker = running(manager, range(100, 104), 0)
    # Nine pages are free. Seven of them are cached pages of the request, and it needs three more pages.
    assert manager.admission(TextContext(range(40), 64)) == Admission(0, 7, 3, False)
    manager.release(blocker.request_id)


def test_pages_count_as_room_as_soon_as_their_copies_from_the_host_have_ended() -> None:
    """The loop waits and runs no step. `admission` has to notice that the copies have ended."""
    manager, copies_end = manager_of(8, host_slots=16), True
    end_copies_late(manager, lambda: copies_end)
    run_once(manager, range(24))
    manager.flush_tiers()
    run_once(manager, range(100, 131))  # This prompt evicts the first prompt from the device.
    copies_end = False
    context = running(manager, range(24), 0)
    assert context.start_idx == 20
    manager.release(context.request_id)
    waiting = TextContext(range(200, 232), 64)
    assert manager.admission(waiting) == Admission(0, 0, 8, False)
    copies_end = True
    assert manager.admission(waiting) == Admission(0, 0, 8, True)


@pytest.mark.parametrize(
    ("pages", "missing", "options"),
    [
        (10, 2, {}),
        (10, 2, {"host_slots": 20}),
        (18, 4, {"layers": 2, "params": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 8))}}),
    ],
)
def test_pages_that_a_running_request_holds_need_no_room(pages: int, missing: int, options: dict[str, Any]) -> None:
    manager = manager_of(pages, **options)
    holder = running(manager, range(28), 0)
    manager.fetch([holder])
    holder.update(1)
    manager.step([holder])
    waiting = TextContext(range(36), 64)
    assert manager.admission(waiting) == Admission(0, 7, missing, True)
    manager.external_claim(waiting.request_id)
    assert manager.maybe_reserve(waiting)


def test_a_replica_without_a_row_is_full() -> None:
    manager = manager_of(16, dp=2, rows=1)
    run_once(manager, range(30), 0)
    held = running(manager, range(100, 104), 0)
    assert manager.admission(TextContext(range(30), 64)).replica_idx == 1
    running(manager, range(200, 204), 1)
    assert not manager.admission(TextContext(range(30), 64)).fits
    manager.release(held.request_id)
    assert manager.admission(TextContext(range(30), 64)) == Admission(0, 7, 1, True)


@pytest.mark.parametrize(("rule", "wanted"), [("least-loaded", [0, 1, 2, 0]), ("round-robin", [0, 1, 2, 0])])
def test_the_old_routing_rules_can_be_chosen(rule: RoutingRule, wanted: list[int]) -> None:
    manager = manager_of(32, dp=3, params={"routing": Routing(rule=rule)})
    run_once(manager, range(30), 2)
    given = []
    for _ in range(4):
        context = TextContext(range(30), 64)
        given.append(manager.get_or_recommend_replica(context))
        manager.external_claim(context.request_id, given[-1])
        assert manager.maybe_reserve(context)
    assert given == wanted


def test_the_old_routing_rules_say_whether_the_request_fits_on_their_replica() -> None:
    manager = manager_of(8, dp=2, params={"routing": Routing(rule="round-robin")})
    running(manager, range(20), 1)
    assert manager.admission(TextContext(range(20), 64)) == Admission(0, 0, 5, True)
    running(manager, range(100, 120), 0)
    found = manager.admission(TextContext(range(100, 120), 64))
    assert (found.replica_idx, found.fits) == (1, False)


class Plain:
    """A caller's own context class that cannot have a hasher."""

    request_id, start_idx = "plain", 0
    active_idx = end_idx = active_length = current_length = 30
    tokens = np.arange(30)
    __slots__ = ()

    def update(self, token: int) -> None:
        raise NotImplementedError

    def set_token_indices(self, **indices: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("make", [Plain, lambda: TextContext(range(30), 64)])
def test_the_prompt_is_hashed_once_for_all_replicas(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    take = PrefixHasher._take
    monkeypatch.setattr(
        PrefixHasher,
        "_take",
        lambda self, running, tokens: (hashed.append(len(tokens) // 4), take(self, running, tokens)),
    )
    manager = manager_of(20, dp=4)
    run_once(manager, range(30), 2)
    hashed.clear()
    assert manager.admission(make()).replica_idx == 2
    assert hashed == [7]


def test_without_caching_admission_considers_only_room_and_load() -> None:
    manager = manager_of(20, dp=2, caching=False)
    run_once(manager, range(30), 0)
    context = TextContext(range(30), 64)
    assert manager.admission(context) == Admission(1, 0, 8, True)
    assert context.prefix_hasher is None


def test_a_request_counts_as_load_once_however_often_it_reserves_pages(make: Any) -> None:
    manager = make(64, page_size=4, dp=2)
    context = TextContext(range(10), 64, "r")
    manager.external_claim("r", 1)
    loads: list[list[float]] = []
    for _ in range(12):
        assert manager.maybe_reserve(context)
        loads.append(list(manager._replicas._router._loads))
        manager.fetch([context])
        context.update(3)
        manager.step([context])
    assert loads == [[0.0, 3.0]] * 12


def with_states(pages: int, rows: int, **states: Any) -> PagedKVCacheManager:
    """Returns a manager with recurrent states, in which a request has computed 12 tokens of its prompt and is still
    running.
    """
    shape = StateShape(2, 9, 1, 1, 1, 2, torch.int64, torch.int64)
    manager = manager_of(pages, rows=rows, dtype=torch.int64, params={"states": shape, **states})
    first = TextContext(range(13), 64, "first")
    manager.external_claim("first")
    assert manager.maybe_reserve(first)
    at = manager.states[0].pages_at(["first"], [0])
    manager.states[0].advance(at, [first.active_idx])
    first.update(0)
    manager.step([first])
    assert first.start_idx == 12
    assert manager.states[0].num_kept == 1
    return manager


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("others", "fits"), [(0, True), (1, False)])
def test_admission_foresees_a_claim_that_evicts_the_state_to_resume_from(shared: bool, others: int, fits: bool) -> None:
    """The claim takes a state page and evicts the state from which the request would resume. The request then finds no
    prefix, and the pages are too few for the whole prompt.
    """
    # With shared memory a state takes three pages, so the pool has four slabs. The last free slab has the copy. With
    # separate memory, three states take the memory of ten pages and leave six pages. The last free state page has the
    # copy.
    manager = with_states(15, 4) if shared else with_states(16, 3, state_copies=0)
    for at in range(others):
        if shared:
            running(manager, [500 + at], 0)
        else:
            manager.external_claim(f"other{at}")
    waiting = TextContext([*range(12), 900], 64)
    found = manager.admission(waiting)
    assert (found.cached_pages, found.fits) == (3 if fits or shared else 0, fits)
    manager.external_claim(waiting.request_id)
    assert manager.maybe_reserve(waiting) == fits
    assert waiting.start_idx == (12 if fits else 0)


def test_admission_foresees_pages_that_only_a_hit_in_host_memory_makes_necessary() -> None:
    """A request reserves a chunk of 4 tokens. At the beginning of the prompt, the chunk needs one page of the window.
    With the host's pages, the chunk begins at token 28 and needs three pages of the window.
    """
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 8))
    manager = manager_of(60, layers=2, host_slots=2000, params={"groups": groups})
    prompt, fitted = list(range(30)), {True: 0, False: 0}
    run_once(manager, prompt, 0)
    manager.flush_tiers()
    run_once(manager, range(100, 210), 0)  # This prompt evicts the first prompt from the device.
    for held in range(60, 120, 2):
        other, context = running(manager, range(1000, 1000 + held), 0), TextContext(prompt, 64)
        context.set_token_indices(active_idx=4)
        told = manager.admission(context).fits
        manager.external_claim(context.request_id)
        got = manager.maybe_reserve(context)
        assert got or not told, f"{held} tokens held, {manager.num_free_blocks} pages free"
        fitted[told] += 1
        manager.release(context.request_id)
        manager.release(other.request_id)
    assert min(fitted.values()) > 1
