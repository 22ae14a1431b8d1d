"""Pages of another version of the weights are never found, and those of an earlier version are found again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcache.replica.imports
from kvcache import (
    Batch,
    BlockTableMismatchError,
    InterruptedCallError,
    InvalidParamsError,
    InvalidRequestError,
    LayerGroup,
    ManagerClosedError,
    NotReservedError,
    PagedKVCacheManager,
    StateShape,
    TextContext,
    WeightsChangedError,
)
from kvcache.pool.lru_order import LruOrder
from kvcache.replica.hashing import PrefixHasher
from kvcache.weights import (
    MUST,
    UNSAID,
    Lineage,
    Segment,
    Segments,
    Weights,
    first_own_page,
    followed_by,
    has_keys,
    keys_of,
    last_name,
    named_version,
    version_bytes,
)
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.random_model.interrupts import interrupted
from tests.kvcache.served import Served

PROMPT = [*range(22)]  # five full pages of four tokens, and two tokens


def made(version: Any = "a", **options: Any) -> PagedKVCacheManager:
    params = {"weights": version, **options.pop("params", {})}
    return manager_of(params=params, **options)


def begun(
    manager: PagedKVCacheManager, tokens: Sequence[int], name: str | None = None, replica: int | None = None
) -> TextContext:
    """Returns a claimed request that has run its prompt."""
    context = TextContext(tokens, 200, name)
    manager.external_claim(context.request_id, replica)
    assert manager.maybe_reserve(context)
    step(manager, [context])
    return context


def step(manager: PagedKVCacheManager, contexts: Sequence[TextContext], count: int = 1, token: int = 7) -> None:
    for _ in range(count):
        assert manager.reserve_batch(contexts).all()
        manager.fetch(contexts)
        if isinstance(contexts, Batch):
            contexts.update(np.full(len(contexts), token))
        else:
            for one in contexts:
                one.update(token)
        manager.step(contexts)


def found(manager: PagedKVCacheManager, tokens: Sequence[int]) -> int:
    """Returns how many of the tokens a new request would find."""
    return manager.admission(TextContext(tokens, 200)).cached_pages * manager.page_size


# ---- versions


def test_a_version_is_a_number_bytes_or_a_text() -> None:
    assert version_bytes("weights", None) is None
    assert version_bytes("weights", np.int64(3)) == bytes(15) + b"\3" == version_bytes("weights", 3)
    assert version_bytes("weights", (1 << 128) - 1) == bytes([255]) * 16
    assert version_bytes("weights", b"\3") == b"\3"
    assert version_bytes("weights", "step 3") == hashlib.sha256(b"weights\0step 3").digest()[:16]


@pytest.mark.parametrize("version", [-1, 1 << 128, b"", bytes(17), "\ud800", 1.5, True, [1]])
def test_another_version_is_refused_and_changes_nothing(version: Any) -> None:
    with pytest.raises(InvalidParamsError, match="weights"):
        made(version)
    manager = made()
    run_once(manager, PROMPT)
    with pytest.raises(InvalidRequestError, match=r"set_weights: version.*2\*\*128 - 1, 1 to 16 bytes"):
        manager.set_weights(version)
    with pytest.raises(InvalidRequestError, match="set_weights: running is 'drop': one of finish, recompute, stop"):
        manager.set_weights("b", "drop")  # type: ignore[arg-type]
    assert manager.weights == version_bytes("", "a")
    assert found(manager, PROMPT) == 20


def test_a_version_is_one_more_field_of_the_first_seed() -> None:
    def digests(salt: str | None, version: Any) -> bytes:
        segments = (Segment(0, version_bytes("", version)),)
        return PrefixHasher("sha256", 4, salt, (), segments).digests(np.arange(8), 0, 2).tobytes()

    seed = b"pagewire/2" + b"\6\0\0\0sha256" + b"\1\0\0\0004" + b"\0\0\0\0" + b"\1\0\0\0w"
    assert digests(None, b"w")[:32] == hashlib.sha256(seed + np.arange(4, dtype="<i4").tobytes()).digest()
    every = [digests(*case) for case in [(None, None), (None, b"w"), (None, b"\0w"), ("w", None), ("w", b"w")]]
    assert len(set(every)) == len(every)


def test_a_lineage_keeps_the_segments_with_published_pages() -> None:
    weights = Weights("a")
    first = weights.now
    weights.switch("b")
    second = weights.gone_on(first, 5)
    weights.switch("a")
    third, again = (weights.gone_on(second, committed) for committed in (9, 5))
    assert [(one.first_page, one.version) for one in third.segments] == [
        (0, weights.version),
        (5, version_bytes("", "b")),
        (9, weights.version),
    ]
    assert [one.first_page for one in again.segments] == [0, 5]
    marks = {one.mark for lineage in (second, third, again) for one in lineage.segments}
    assert len(marks) == 4, "a mark for each segment, and none for the first"
    assert weights.gone_on(first, 0).segments[0].mark, "a first page of two versions is nobody else's"
    assert last_name(third.segments) != last_name(first.segments) == weights.version


# ---- new and waiting requests


def test_a_version_is_as_old_as_the_switches_since_it_was_last_current() -> None:
    weights = Weights("1")
    assert (weights.now, weights.left) == (Lineage((Segment(0, version_bytes("", "1")),), 0), {})
    for version in "2134":
        weights.switch(version)
    of = {version_bytes("", one): one for one in "1234"}
    ages = [[of[version] for version in weights.recent(most)] for most in range(5)]
    assert ages == [[], ["3"], ["3", "1"], ["3", "1", "2"], ["3", "1", "2"]]
    assert [of[version] for version in weights.numbers] == ["1", "2", "3", "4"]
    weights.switch("3")
    assert [of[version] for version in weights.recent(4)] == ["4", "1", "2"], (
        "the current version is not an earlier one"
    )
    assert of[weights.before] == "4"


A, B = b"a", b"b"


def test_segments_of_one_version_are_one_unless_a_request_alone_knows_them() -> None:
    two = (Segment(0, A), Segment(3, B))
    assert followed_by((Segment(0, A),), 2, B) == (Segment(0, A), Segment(2, B))
    assert followed_by((Segment(0, A),), 2, A) == (Segment(0, A),)
    assert followed_by(two, 5, B) == two
    assert followed_by(two, 5, A) == (*two, Segment(5, A))
    assert followed_by(two, 3, B) == two
    assert followed_by(two, 3, A) == (Segment(0, A),)
    assert followed_by(two, 0, A) == (Segment(0, A),)
    marked = (Segment(0, A), Segment(3, A, b"m"))
    assert followed_by(marked, 5, A) == (*marked, Segment(5, A))


def test_what_names_the_pages_of_segments_besides_the_first_version() -> None:
    plain, two, marked = (Segment(0, A),), (Segment(0, A), Segment(3, B)), (Segment(0, A, b"m"),)
    assert [first_own_page(one) for one in (UNSAID, plain, two, marked, (*plain, Segment(4, A, b"m")))] == [
        1 << 62, 1 << 62, 3, 0, 4,
    ]  # fmt: skip
    assert [has_keys(one) for one in (UNSAID, plain, two, marked)] == [False, False, True, True]
    assert keys_of(plain, 4) == ()
    assert keys_of(two, 4) == ((12, b"\0=b"),)
    assert keys_of(marked, 4) == ((0, b"\1m=a"),)
    assert keys_of((Segment(0, A), Segment(2)), 4) == ((8, b"\0"),)


def test_the_name_of_a_segment_tells_all_segments_before_it() -> None:
    chains = [
        (Segment(0, first), *rest)
        for first in (A, B, None)
        for rest in ((), (Segment(2, B),), (Segment(3, B),), (Segment(2, B, b"m"),), (Segment(2),))
    ]
    names = [last_name(one) for one in chains]
    assert len({*names}) == len(names)
    assert {len(name) for one, name in zip(chains, names, strict=True) if len(one) > 1} == {16, 17}
    assert names[0] == A
    assert last_name((Segment(0),)) == b""
    assert last_name(chains[1], 1) == A
    assert last_name(chains[1], 2) == names[1]
    assert [named_version(name) for name in (None, b"", b"\x01")] == 2 * ["of no given version"] + ["01"]


def test_of_two_switches_the_stricter_one_counts_and_a_stop_counts_most() -> None:
    assert MUST["finish"] == 0
    assert MUST["finish"] < MUST["recompute"] < MUST["stop"]


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_nothing_of_another_version_is_found_and_a_rollback_finds_all(algorithm: str) -> None:
    manager = made(params={"hash_algorithm": algorithm})
    assert run_once(manager, PROMPT) == 0
    manager.set_weights("b")
    assert found(manager, PROMPT) == run_once(manager, PROMPT) == 0
    assert run_once(manager, PROMPT) == 20
    for version in ("a", "b", None, "a"):
        manager.set_weights(version)
        assert found(manager, PROMPT) == (0 if version is None else 20)


def test_a_waiting_request_gets_the_version_of_its_next_lookup() -> None:
    manager = made()
    run_once(manager, PROMPT)
    waits = TextContext(PROMPT, 200)
    assert manager.admission(waits).cached_pages == 5
    digests = manager.contents.digests(waits)
    manager.set_weights("b")
    assert manager.admission(waits).cached_pages == 0
    assert manager.contents.digests(waits) != digests
    manager.external_claim(waits.request_id)
    assert manager.maybe_reserve(waits)
    assert waits.start_idx == 0


def test_the_same_version_changes_nothing() -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    manager.set_weights("a")
    step(manager, [runs], 4)
    assert found(manager, [*PROMPT, 7, 7, 0]) == 24, "its page is everybody's"


def test_every_tier_keeps_several_versions(tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 0.01, "file_tier_key": "model"}
    served = Served(6, 40, params={"weights": "a", **files})
    assert served.serve(PROMPT) == 0
    served.manager.set_weights("b")
    assert served.serve([*PROMPT, 9]) == 0
    assert served.serve([*range(50, 72)]) == 0  # the device has room for one of them
    served.manager.set_weights("a")
    assert served.serve(PROMPT) == 20
    assert served.manager.metrics.h2d_blocks_copied > 0
    served.manager.close()
    later = Served(6, 40, params={"weights": "b", **files})
    assert later.again(PROMPT) == 20
    later.manager.set_weights("c")
    assert later.again(PROMPT) == 0
    later.manager.close()


# ---- running requests


class FrontFirst(LruOrder):
    """Evicts the first page of a prompt first, so that the host has it and the device has the pages after it."""

    def append(self, pages: Any) -> None:
        super().append(pages[::-1])


FULL, WINDOW = LayerGroup("full", (0,)), LayerGroup("window", (1,), 9)
STATE = StateShape(1, 1, 1, 1, 1, 2, torch.float32, torch.float32, form="linear")
# For each kind of layers, the params, and how many of a prompt's pages are evicted from the device.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 2),
    "window": ({"groups": (FULL, WINDOW)}, 2),
    "windows alone": ({"groups": (LayerGroup("window", (0,), 9), LayerGroup("window", (1,), 13))}, 5),
    "chunks": ({"groups": (FULL, LayerGroup("chunked", (1,), 16))}, 2),
    "state": ({"states": STATE, "state_copies": 8}, 4),
    "window and state": ({"groups": (FULL, WINDOW), "states": STATE, "state_copies": 8}, 4),
}


def ran(manager: PagedKVCacheManager, context: TextContext, tokens: int) -> None:
    """Runs a claimed request, and its recurrent state if the model has one, until it has so many tokens."""
    while context.end_idx < tokens:
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        for states in manager.states:
            states.advance(states.pages_at([context.request_id], [context.start_idx]), [context.active_idx])
        context.update(7)
        manager.step([context])


@pytest.mark.parametrize("kind", KINDS)
def test_pages_found_after_those_that_come_from_the_host_keep_their_names_at_a_switch(kind: str) -> None:
    params, evicted = KINDS[kind]
    layers, params = len(params.get("groups", "1")), {"eviction_order": FrontFirst, **params}
    manager = made("a", pages=60, layers=layers, page_size=4, params=params, host_slots=80)
    replica = manager._replicas.each[0]
    first, again = (TextContext(PROMPT, 200, name) for name in ("first", "again"))
    manager.external_claim("first")
    ran(manager, first, len(PROMPT) + 1)
    manager.release("first")
    manager.flush_tiers()
    replica.pool.release(replica.pool.allocate(replica.pool.free_count - replica.pool.idle.count + evicted))
    manager.external_claim("again")
    assert manager.maybe_reserve(again)
    assert again.start_idx == 20
    assert replica.rows.committed.item(replica.rows.row_of["again"]) < 5, "the first pages have not arrived yet"
    manager.set_weights("b")
    of_a, of_b = (version_bytes("", name) for name in "ab")
    assert manager.lineage("again") == ((0, 20, of_a),)
    again.set_token_indices(start_idx=17, active_idx=18)
    told = "has freed the pages" if "window" in kind else "first 24 tokens may hold KV of other weights"
    with pytest.raises(InvalidRequestError, match=told):
        manager.fetch([again])
    again.set_token_indices(start_idx=20, active_idx=again.end_idx)
    ran(manager, again, len(PROMPT) + 5)
    manager.check()
    assert manager.lineage("again") == ((0, 20, of_a), (20, 6, of_b))
    manager.release("again")
    assert found(manager, PROMPT) == 0
    manager.set_weights("a")
    assert found(manager, PROMPT) == 20
    manager.check()
    manager.close()


def as_list(_manager: PagedKVCacheManager, context: TextContext) -> Sequence[TextContext]:
    return [context]


def as_batch(manager: PagedKVCacheManager, context: TextContext) -> Sequence[TextContext]:
    return manager.batch([context])


@pytest.mark.parametrize("how", [as_list, as_batch])
def test_a_running_request_finishes_with_pages_of_its_own(
    how: Callable[[PagedKVCacheManager, TextContext], Sequence[TextContext]],
) -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    contexts = how(manager, runs)
    step(manager, contexts, 5)  # another page is full
    before = manager.get_req_blocks(runs.request_id)
    manager.set_weights("b")
    step(manager, contexts, 8)
    assert manager.get_req_blocks(runs.request_id)[: len(before)] == before
    tokens = runs.tokens.tolist()
    assert found(manager, tokens) == 0
    manager.set_weights("a")
    assert found(manager, tokens) == 24
    step(manager, contexts, 8)
    assert found(manager, runs.tokens.tolist()) == 24, "its KV is still of both versions"
    manager.release(runs.request_id)
    assert found(manager, tokens) == 24


def test_a_request_that_goes_on_finds_no_more_pages_of_before() -> None:
    manager = made()
    run_once(manager, [*range(40)])
    runs = TextContext([*range(16), *range(60, 84)], 200)
    manager.external_claim(runs.request_id)
    assert manager.maybe_reserve(runs)
    runs.set_token_indices(active_idx=20)
    manager.fetch([runs])
    run_once(manager, [*range(16), *range(60, 84)])
    runs.update(0)
    manager.set_weights("b")
    manager.step([runs])
    runs.set_token_indices(active_idx=24)
    assert manager.maybe_reserve(runs)
    assert runs.start_idx == 20


@pytest.mark.parametrize("kind", ["is stale", "is a fork"])
def test_the_last_request_with_old_pages_may_not_recompute_them_either(kind: str) -> None:
    """No request of before runs any more. This one came after the switch."""
    manager = made()
    before = begun(manager, PROMPT, "before")
    if kind == "is a fork":
        manager.set_weights("b")
        last = before.fork("last")
        last.update(1)
        assert manager.fork(before, last)
        manager.release("before")
    else:
        manager.release("before")
        manager.set_weights("b")
        last = TextContext(PROMPT, 200, "last", max_staleness=1)
        manager.external_claim("last")
        assert manager.maybe_reserve(last)
    last.set_token_indices(start_idx=3, active_idx=4)
    with pytest.raises(InvalidRequestError, match="'last': would recompute from token 3, .* other weights"):
        manager.fetch([last])
    manager.release("last")
    assert not manager._replicas.each[0]._mixed


@pytest.mark.parametrize("recomputes", ["parent", "child"])
def test_of_a_request_and_its_fork_none_recomputes_a_page_of_both_versions(
    recomputes: str,
) -> None:
    """Both would publish the page by one name: one with KV of both versions, the other with KV of the new one alone."""
    manager = made()
    parent = begun(manager, PROMPT, "parent")
    manager.set_weights("b")
    child = parent.fork("child")
    child.update(1)
    assert manager.fork(parent, child)
    one = {"parent": parent, "child": child}[recomputes]
    one.set_token_indices(start_idx=20, active_idx=one.end_idx)
    assert manager.maybe_reserve(one)
    with pytest.raises(InvalidRequestError, match=f"'{recomputes}': would recompute from token 20, .* first 24 tokens"):
        manager.fetch([one])
    one.set_token_indices(start_idx=22, active_idx=one.end_idx)
    step(manager, [parent, child], 5)
    manager.check()


@pytest.mark.parametrize("how", [as_list, as_batch])
@pytest.mark.parametrize("kind", ["goes on", "is stale", "caches nothing"])
def test_a_request_may_not_recompute_tokens_in_pages_of_other_weights(
    kind: str, how: Callable[[PagedKVCacheManager, TextContext], Sequence[TextContext]]
) -> None:
    manager = made(caching=kind != "caches nothing")
    runs = begun(manager, PROMPT, "runs")
    runs.set_token_indices(start_idx=3, active_idx=4)
    manager.fetch([runs])  # under the same weights, the model would write the same bytes again
    manager.set_weights("b")
    if kind == "is stale":
        runs = TextContext(PROMPT, 200, "stale", max_staleness=1)
        manager.external_claim("stale")
        assert manager.maybe_reserve(runs)
        assert runs.start_idx == 20
    of_others = 20 if kind == "is stale" else 24  # page 5 of a request that goes on may have tokens of both versions
    for start in (3, 19):
        runs.set_token_indices(start_idx=start, active_idx=start + 1)
        assert manager.maybe_reserve(runs)
        told = rf"'{runs.request_id}': would recompute from token {start}, .* first {of_others} tokens may hold KV"
        for call in (manager.fetch, manager.fetch_ahead):
            with pytest.raises(InvalidRequestError, match=told):
                call(how(manager, runs))
    runs.set_token_indices(start_idx=20 if kind == "is stale" else 22, active_idx=runs.end_idx)
    step(manager, [runs], 6)
    assert manager.maybe_reserve(runs)
    runs.set_token_indices(start_idx=25, active_idx=26)  # in a page of its own weights
    manager.fetch([runs])
    runs.set_token_indices(start_idx=3, active_idx=4)
    manager.release(runs.request_id)
    manager.external_claim(runs.request_id)
    assert manager.maybe_reserve(runs)
    assert len(manager.fetch(how(manager, runs))) == 1
    manager.check()


def test_forks_share_the_lineage_and_then_go_their_own_ways() -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    manager.set_weights("b")
    step(manager, [runs], 3)
    twin = runs.fork()
    assert manager.fork(runs, twin)
    step(manager, [runs, twin], 5)
    pages = [manager.get_req_blocks(one.request_id) for one in (runs, twin)]
    assert pages[0][:7] == pages[1][:7], "the same tokens under the same weights"
    manager.set_weights("c")
    step(manager, [runs, twin], 8)
    pages = [manager.get_req_blocks(one.request_id) for one in (runs, twin)]
    assert pages[0][:7] == pages[1][:7]
    assert not {*pages[0][7:]} & {*pages[1][7:]}, "each has its own mark since the switch"


def test_a_released_request_begins_anew_under_the_current_weights() -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    manager.set_weights("b")
    step(manager, [runs], 8)
    manager.release(runs.request_id)
    assert manager.admission(runs).cached_pages == 0
    manager.external_claim(runs.request_id)
    assert manager.maybe_reserve(runs)
    step(manager, [runs])
    assert found(manager, runs.tokens.tolist()) == 28, "all of its pages are of one version again"


def test_a_lease_keeps_its_pages_after_a_switch() -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    lease = manager.lease(runs.request_id)
    pages = manager.block_table(runs.request_id).groups
    manager.set_weights("b")
    manager.release(runs.request_id)
    assert manager.num_held_blocks == 6
    manager.set_weights("a")
    assert begun(manager, PROMPT, "again").start_idx == 22
    assert manager.get_req_blocks("again")[:5] == [*pages[0][:5]]
    manager.end_lease(lease)


def test_a_recovered_manager_has_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = made(checks=False)
    run_once(manager, PROMPT)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Weights, "switch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.set_weights("b")
    with pytest.raises(InterruptedCallError, match="set_weights was interrupted"):
        manager.admission(TextContext(PROMPT, 200))
    assert manager.recover().call == "set_weights"
    assert manager.weights == version_bytes("", "b")
    assert found(manager, PROMPT) == 0
    manager.close()
    with pytest.raises(ManagerClosedError):
        manager.set_weights("c")


def test_a_request_says_which_tokens_are_of_which_version() -> None:
    manager = made()
    runs = begun(manager, PROMPT, "runs")
    one, two = manager.weights, version_bytes("", "b")
    assert manager.lineage("runs") == ((0, 22, one),)
    manager.set_weights("b")
    assert manager.lineage("runs") == ((0, 20, one), (20, 2, two)), "the page that was being filled is of both"
    step(manager, [runs], 6)
    assert manager.lineage("runs") == ((0, 20, one), (20, 8, two))
    manager.set_weights("a", "recompute")
    assert manager.maybe_reserve(runs)
    assert manager.lineage("runs") == ((0, 20, one),), "its first pages are found again"
    waits = TextContext(PROMPT, 200, "waits")
    manager.external_claim("waits")
    assert manager.lineage("waits") == ()
    assert waits.start_idx == 0


def test_a_reset_after_a_switch_leaves_the_lineage_as_it_was() -> None:
    manager = made()
    runs = begun(manager, PROMPT, "runs")
    one, two = manager.weights, version_bytes("", "b")
    manager.set_weights("b")
    step(manager, [runs])
    manager.reset_prefix_cache()
    assert manager.lineage("runs") == ((0, 20, one), (20, 3, two))
    step(manager, [runs], 5)
    assert manager.lineage("runs") == ((0, 20, one), (20, 8, two))


@pytest.mark.parametrize("caching", [True, False])
def test_a_request_that_publishes_nothing_says_it_too(caching: bool) -> None:
    manager = made(caching=caching)
    runs = begun(manager, PROMPT, "runs")
    if caching:
        manager.reset_prefix_cache()
    one, two = manager.weights, version_bytes("", "b")
    manager.set_weights("b")
    step(manager, [runs], 6)
    assert manager.lineage("runs") == ((0, 20, one), (20, 8, two))
    manager.set_weights("b")
    manager.set_weights("a")
    step(manager, [runs], 4)
    assert manager.lineage("runs") == ((0, 20, one), (20, 8, two), (28, 4, one))
    assert found(manager, runs.tokens.tolist()) == 0


def test_a_switch_that_is_interrupted_anywhere_and_made_again_keeps_the_numbers_of_versions_apart() -> None:
    done, at = True, 0
    while done:
        at += 1
        weights = Weights("a")
        weights.switch("b")
        weights.switch("c")
        _, _, done = interrupted(lambda weights=weights: weights.switch("b"), at, KeyboardInterrupt)
        weights.switch("b")
        assert [weights.numbers[version_bytes("", version)] for version in "abc"] == [0, 1, 2], at
    assert at > 20


def test_pages_are_counted_by_version() -> None:
    manager = made(dp=2)
    one, two = manager.weights, version_bytes("", "b")
    run_once(manager, PROMPT, 0)
    assert manager.num_blocks_by_weights == {one: 5}
    manager.set_weights("b")
    run_once(manager, PROMPT, 1)
    run_once(manager, [*range(50, 59)], 0)
    assert manager.num_blocks_by_weights == {one: 5, two: 7}
    manager.set_weights("a")
    assert [*manager.num_blocks_by_weights.items()] == [(two, 7), (one, 5)], "the current version is the last one"
    runs = begun(manager, PROMPT[:10], replica=0)
    manager.set_weights("b")
    step(manager, [runs], 4)
    manager.release(runs.request_id)
    assert manager.num_blocks_by_weights == {one: 5, two: 7}, "a page of both versions is nobody's"


# ---- recompute and stop


@pytest.mark.parametrize("how", [as_list, as_batch])
def test_a_request_that_is_to_be_recomputed_begins_anew(
    how: Callable[[PagedKVCacheManager, TextContext], Sequence[TextContext]],
) -> None:
    manager = made()
    lower, runs = begun(manager, [1]), begun(manager, PROMPT)
    manager.release(lower.request_id)
    contexts = how(manager, runs)
    step(manager, contexts, 3)
    assert manager.reserve_batch(contexts).all()
    manager.set_weights("b", "recompute")
    for call in (manager.fetch, manager.fetch_ahead):
        with pytest.raises(NotReservedError, match=r"before the weights changed to a491.* call maybe_reserve first"):
            call(contexts)
    run_once(manager, PROMPT[:9])  # under the new weights
    assert manager.reserve_batch(contexts, 2).all()
    assert runs.start_idx == 8
    assert manager.fetch(contexts)[0].cache_lengths.tolist() == [8]
    step(manager, contexts, 4)
    manager.check()
    assert found(manager, runs.tokens.tolist()) == 28
    manager.set_weights("a")
    assert found(manager, runs.tokens.tolist()) == 24


def test_maybe_reserve_recomputes_as_reserve_batch_does() -> None:
    manager = made(pages=8)
    runs, other = begun(manager, PROMPT, "runs"), TextContext([9], 200, "other")
    manager.external_claim("other")
    assert manager.maybe_reserve(other)
    lease = manager.lease("runs")
    manager.set_weights("b", "recompute")
    assert not manager.maybe_reserve(runs), "the lease keeps its pages"
    assert manager.get_req_blocks("runs") == []
    assert manager.num_held_blocks == 7
    manager.end_lease(lease)
    assert manager.maybe_reserve(runs)
    assert (runs.start_idx, runs.active_idx) == (0, 23)


@pytest.mark.parametrize("running", ["recompute", "stop"])
def test_a_step_that_began_before_a_switch_ends_while_an_import_is_open(running: Any) -> None:
    source, manager = made(), made()
    runs = TextContext(range(50, 60), 200, "runs")
    manager.external_claim("runs")
    assert manager.maybe_reserve(runs)
    manager.fetch([runs])
    pending, waits = imported(source, manager, begun(source, PROMPT))
    manager.set_weights("b", running)
    runs.update(7)
    manager.step([runs])
    assert manager.lineage("runs") == ((0, 10, manager.weights),)
    with pytest.raises(NotReservedError, match="import is pending"):
        manager.step([waits])
    manager.cancel_import(pending)


def test_a_batch_names_the_pages_of_a_request_that_begins_anew_where_it_was() -> None:
    manager = made()
    runs = TextContext(range(7), 200)
    manager.external_claim(runs.request_id)
    assert manager.maybe_reserve(runs)
    batch = manager.batch([runs])
    step(manager, batch)
    assert manager.reserve_batch(batch).all()
    manager.fetch(batch)
    manager.set_weights("b", "recompute")
    batch.update(np.array([7]))
    manager.step(batch)  # it fills a page whose name nobody else knows
    run_once(manager, [*range(7), 7, 7])
    before = runs.start_idx
    step(manager, batch, 5)
    assert before == 8, "the hit ends where the request was, so that its context does not change"
    assert found(manager, runs.tokens.tolist()) == 12


def test_a_step_in_flight_ends_and_publishes_nothing_under_the_new_version() -> None:
    manager = made()
    runs = begun(manager, [*range(22)])
    runs.update_with_future_token()
    ahead = manager.fetch_ahead([runs]) if manager.maybe_reserve(runs) else None
    assert ahead is not None
    manager.set_weights("b", "recompute")
    runs.realize_future_token(7)
    runs.update(7)
    manager.step([runs])
    manager.end_step(ahead)
    assert found(manager, [*range(22), 7, 7, 7]) == 0
    assert manager.maybe_reserve(runs)
    assert runs.start_idx == 0


@pytest.mark.parametrize("how", [as_list, as_batch])
def test_a_stopped_request_is_refused_until_it_is_released(
    how: Callable[[PagedKVCacheManager, TextContext], Sequence[TextContext]],
) -> None:
    manager = made()
    runs = begun(manager, PROMPT, "runs")
    contexts = how(manager, runs)
    manager.set_weights("b", "stop")
    manager.set_weights("c", "recompute")
    manager.set_weights("d")
    calls: list[Callable[[], Any]] = [
        lambda: manager.maybe_reserve(runs),
        lambda: manager.reserve_batch(contexts),
        lambda: manager.fetch(contexts),
        lambda: manager.fetch_ahead(contexts),
        lambda: manager.fork(runs, runs.fork()),
    ]
    for call in calls:
        with pytest.raises(WeightsChangedError, match=r"'runs'.*the weights changed from e8c8.* to e87b.*: release it"):
            call()
    manager.check()
    manager.release("runs")
    again = begun(manager, PROMPT, "runs")
    step(manager, [again], 4)
    assert found(manager, again.tokens.tolist()) == 24


def test_a_fork_must_do_what_its_parent_must() -> None:
    manager = made()
    runs = begun(manager, PROMPT)
    manager.set_weights("b", "recompute")
    twin = runs.fork()
    assert manager.fork(runs, twin)
    with pytest.raises(NotReservedError, match="before the weights changed"):
        manager.fetch([twin])
    assert manager.maybe_reserve(twin)
    assert twin.start_idx == 0


def test_an_import_that_is_committed_after_a_switch_must_begin_anew() -> None:
    source, reader = made("a"), made("a")
    pending, waits = imported(source, reader, begun(source, PROMPT))
    reader.set_weights("b", "recompute")
    with pytest.raises(NotReservedError, match="import is pending"):
        reader.maybe_reserve(waits)
    committed(reader, pending, waits)
    with pytest.raises(NotReservedError, match="before the weights changed"):
        reader.fetch([waits])
    assert reader.maybe_reserve(waits)
    assert waits.start_idx == 0


# ---- block tables and imports


def imported(source: PagedKVCacheManager, reader: PagedKVCacheManager, runs: TextContext, **how: Any) -> Any:
    """Returns an import of the request's table, and the context that waits for it."""
    table = source.block_table(runs.request_id, **how)
    waits = TextContext(runs.tokens, 200)
    reader.external_claim(waits.request_id)
    pending = reader.import_block_table(waits, table, partial=bool(how))
    assert pending is not None
    return pending, waits


def committed(reader: PagedKVCacheManager, pending: Any, waits: TextContext) -> None:
    copier = reader.copier(pending)
    copier.take()
    reader.commit_import(waits, pending, copier.prove())


@pytest.mark.parametrize("caching", [True, False])
def test_a_table_of_other_weights_is_refused(caching: bool) -> None:
    source, reader = made("a", caching=caching), made("b", caching=caching)
    runs = begun(source, PROMPT)
    a, b = (named_version(version_bytes("", version)) for version in "ab")
    said = f"request '.*': the block table has tokens of the weights {a}, but this request runs under {b}"
    for how in ({}, {"full_pages": True}):  # also where the digests of full pages would tell it
        with pytest.raises(BlockTableMismatchError, match=said):
            imported(source, reader, runs, **how)
    source.set_weights("b")
    step(source, [runs])
    with pytest.raises(BlockTableMismatchError, match="weights"):
        imported(source, reader, runs)
    assert reader.num_held_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_last_page_of_two_versions_is_refused_by_readers_of_both(caching: bool) -> None:
    source = made("a", caching=caching)
    runs = begun(source, PROMPT[:21])
    source.set_weights("b")
    step(source, [runs], 2)  # no page is full of them
    for version in ("a", "b"):
        with pytest.raises(BlockTableMismatchError, match="weights"):
            imported(source, made(version), runs)
    if caching:  # the pages before are of one version
        pending, _ = imported(source, reader := made("a"), runs, full_pages=True)
        assert pending.num_tokens == 20
        reader.cancel_import(pending)


def test_an_import_that_began_before_a_switch_publishes_under_no_version() -> None:
    source, reader = made("a"), made("a")
    runs = begun(source, PROMPT)
    pending, waits = imported(source, reader, runs)
    reader.set_weights("b")
    committed(reader, pending, waits)
    assert found(reader, PROMPT) == 0
    reader.set_weights("a")
    assert found(reader, PROMPT) == 0


def test_pages_that_nobody_waits_for_are_published_under_the_version_of_their_table() -> None:
    source, reader = made("a"), made("a")
    runs = begun(source, [*range(20)])
    table = source.block_table(runs.request_id)
    pending = reader.contents.import_pages(TextContext(PROMPT, 200), 0, table)
    assert pending is not None
    reader.set_weights("b")
    copier = reader.copier(pending)
    copier.take()
    reader.contents.commit_pages(pending, copier.prove())
    assert found(reader, PROMPT) == 0
    assert [*reader.num_blocks_by_weights.values()] == [5, 0], "pages of before, which are evicted first"
    reader.set_weights("a")
    assert found(reader, PROMPT) == 20


@pytest.mark.parametrize("caching", [True, False])
def test_a_switch_during_a_pull_lets_it_go_on_in_its_own_version_or_fail(caching: bool) -> None:
    source, reader = made("a", caching=caching), made("a", caching=caching)
    runs = TextContext(PROMPT, 200)
    source.external_claim(runs.request_id)
    runs.set_token_indices(active_idx=12)
    step(source, [runs])
    pending, waits = imported(source, reader, runs, full_pages=True)
    step(source, [runs])
    table = source.block_table(runs.request_id)
    reader.set_weights("b")
    if not caching:
        with pytest.raises(BlockTableMismatchError, match="no digests"):
            reader.extend_import(waits, pending, source.block_table(runs.request_id, full_pages=True), last=False)
        return
    reader.extend_import(waits, pending, source.block_table(runs.request_id, full_pages=True), last=False)
    fresh = made("b", caching=caching)
    other = begun(fresh, [*PROMPT, 5])
    with pytest.raises(BlockTableMismatchError, match="weights"):
        reader.extend_import(waits, pending, fresh.block_table(other.request_id, full_pages=True), last=False)
    assert table.weights == version_bytes("", "a")


# ---- each place that carries the version


def hashers_of_before(batch: Batch, at: list[int], hasher_of: Any) -> Any:
    batch._hashed_under = batch._every.weights.now
    return HASHERS(batch, at, hasher_of)


def goes_on_unmarked(weights: Weights, lineage: Lineage, _committed: int) -> Lineage:
    return Lineage(lineage.segments, weights.now.switches)


def tells_nothing(_segments: Segments, _page: int | None = None) -> bytes:
    return b""


HASHERS = Batch.hashers
LEFT_OUT: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "a batch keeps its hashers": (
        Batch,
        "hashers",
        hashers_of_before,
        lambda: test_a_running_request_finishes_with_pages_of_its_own(as_batch),
    ),
    "a table does not tell its last tokens": (
        kvcache.replica.imports,
        "last_name",
        tells_nothing,
        lambda: test_a_last_page_of_two_versions_is_refused_by_readers_of_both(caching=True),
    ),
    "a segment begins with no mark": (
        Weights,
        "gone_on",
        goes_on_unmarked,
        lambda: test_a_running_request_finishes_with_pages_of_its_own(as_list),
    ),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_version_that_is_left_out_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, mutant, noticed = LEFT_OUT[what]
    noticed()
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        noticed()
