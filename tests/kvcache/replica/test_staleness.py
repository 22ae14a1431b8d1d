"""Requests that allow pages of earlier weights find the longest prefix, and share what they compute with their like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvcache.replica.replica
from kvcache import BlockTableMismatchError, InvalidRequestError, PagedKVCacheManager, TextContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.replica import Replica
from kvcache.replica.staleness import Candidates
from kvcache.weights import Segment, Segments, Weights, followed_by, keys_of, last_name, version_bytes
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.served import Served

PROMPT = [*range(22)]  # five full pages of four tokens, and two tokens
A, B, C, D = (version_bytes("", name) for name in "abcd")


def made(pages: int = 64, **options: Any) -> PagedKVCacheManager:
    return manager_of(pages, params={"weights": "a", **options.pop("params", {})}, **options)


def asks(tokens: Sequence[int], most: int = 1, name: str | None = None) -> TextContext:
    return TextContext(tokens, 200, name, max_staleness=most)


def begun(manager: PagedKVCacheManager, context: Any, steps: int = 1, replica: int | None = None) -> Any:
    """Claims a request and runs some steps."""
    manager.external_claim(context.request_id, replica)
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
    return context


def found(manager: PagedKVCacheManager, tokens: Sequence[int], most: int) -> int:
    """Returns how many tokens a new request would find, and how many it does find."""
    context = asks(tokens, most)
    pages = manager.admission(context).cached_pages
    assert manager.admission(context).cached_pages == pages
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        assert context.start_idx == pages * manager.page_size
    return pages * manager.page_size


# ---- how old a version is


@pytest.mark.parametrize("most", [-1, 1 << 31, 1.5, True, None, "1"])
def test_a_staleness_is_a_number_of_switches(most: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'r': max_staleness is .*: an integer from 0"):
        asks(PROMPT, most, "r")
    assert asks(PROMPT, 3).fork().max_staleness == 3


@pytest.mark.parametrize("dp", [1, 2])
def test_pages_are_found_until_they_are_too_old(dp: int) -> None:
    manager = made(dp=dp)
    run_once(manager, PROMPT, 0)
    assert found(manager, PROMPT, 1) == 20
    for age, version in enumerate("bcd", 1):
        manager.set_weights(version)
        assert [found(manager, PROMPT, most) for most in range(5)] == [20 * (most >= age) for most in range(5)]


def test_a_version_is_as_old_as_the_switches_since_it_was_last_current() -> None:
    manager, prompts = made(), {name: [*range(at, at + 9)] for name, at in zip("abc", (0, 50, 100), strict=True)}
    for version in "abc":
        manager.set_weights(version)
        run_once(manager, prompts[version])
    manager.set_weights("a")
    assert [found(manager, prompts["a"], most) for most in range(3)] == [8, 8, 8], "a rollback makes it current"
    assert [found(manager, prompts["c"], most) for most in range(3)] == [0, 8, 8]
    assert [found(manager, prompts["b"], most) for most in range(3)] == [0, 0, 8]
    manager.set_weights("b")
    manager.set_weights("a")
    assert [found(manager, prompts["c"], most) for most in range(4)] == [0, 0, 0, 8]


# ---- the choice


def test_the_longest_prefix_is_taken_and_of_equal_ones_the_newest() -> None:
    manager = made()
    begun(manager, asks(PROMPT, 0))
    manager.set_weights("b")
    begun(manager, asks(PROMPT[:14], 0))
    assert manager.lineage(begun(manager, asks(PROMPT)).request_id) == ((0, 20, A), (20, 2, B))
    manager.set_weights("c")
    assert manager.lineage(begun(manager, asks(PROMPT)).request_id) == ((0, 12, B), (12, 10, C))
    assert manager.lineage(begun(manager, asks(PROMPT[:14], 2)).request_id) == ((0, 12, B), (12, 2, C))
    run_once(manager, PROMPT[:14])
    assert manager.lineage(begun(manager, asks(PROMPT[:14], 2)).request_id) == ((0, 14, C),), "nothing newer is shorter"


def test_a_prefix_of_several_versions_is_found_where_others_have_left_it() -> None:
    manager, tokens = made(), [*range(60)]
    for count, version in ((14, "a"), (26, "b"), (38, "c"), (50, "d")):
        manager.set_weights(version)
        context = begun(manager, asks(tokens[:count], 3))
        manager.release(context.request_id)
    last = begun(manager, asks(tokens, 3))
    assert manager.lineage(last.request_id) == ((0, 12, A), (12, 12, B), (24, 12, C), (36, 24, D))
    manager.set_weights("e")
    assert found(manager, tokens, 4) == 56
    assert found(manager, tokens, 3) == 0, "each of these prefixes begins with pages of the first version"


def test_no_segment_is_older_than_the_one_before_it() -> None:
    """Else the versions of one prefix would come in any order, and there would be far more of them to try."""
    manager, tokens = made(), [*range(60)]
    for count, version in ((14, "a"), (26, "c"), (38, "b")):
        manager.set_weights(version)
        manager.release(begun(manager, asks(tokens[:count], 3)).request_id)
    manager.set_weights("c")
    last = begun(manager, asks(tokens, 3))
    assert manager.lineage(last.request_id) == ((0, 12, A), (12, 48, C)), "the pages of b behind those of c are older"


# ---- what such requests compute


def test_samples_of_a_prompt_share_what_they_compute_behind_old_pages() -> None:
    manager = made()
    begun(manager, asks(PROMPT, 0))
    manager.set_weights("b")
    first = begun(manager, asks(PROMPT), 8)
    turn = [*first.tokens.tolist(), 1, 2, 3]
    second = begun(manager, asks(turn))
    assert manager.lineage(second.request_id) == ((0, 20, A), (20, 13, B))
    assert manager.get_req_blocks(second.request_id)[:7] == manager.get_req_blocks(first.request_id)[:7]
    twin = first.fork()
    assert manager.fork(first, twin)
    assert manager.lineage(twin.request_id) == manager.lineage(first.request_id)
    manager.release(first.request_id)
    assert manager.num_blocks_by_weights == {A: 5, B: 3}
    assert found(manager, turn, 1) == 32
    assert found(manager, turn, 0) == 0, "pages behind old pages are no pages of the current version"
    clean = begun(manager, asks(turn, 0))
    assert found(manager, turn, 0) == 32
    assert not {*manager.get_req_blocks(clean.request_id)} & {*manager.get_req_blocks(second.request_id)}


def test_a_request_that_is_claimed_again_finds_its_own_pages_until_they_are_too_old() -> None:
    manager = made()
    begun(manager, asks(PROMPT, 0))
    manager.set_weights("b")
    runs = begun(manager, asks(PROMPT), 8)
    manager.release(runs.request_id)
    begun(manager, runs)
    assert manager.lineage(runs.request_id) == ((0, 20, A), (20, 10, B))
    manager.set_weights("c", "recompute")
    assert manager.maybe_reserve(runs)
    assert runs.start_idx == 0, "the first pages are two switches old now"


def test_a_request_that_begins_anew_may_find_what_it_had() -> None:
    manager = made()
    runs = begun(manager, asks(PROMPT))
    manager.set_weights("b", "recompute")
    assert manager.maybe_reserve(runs)
    assert runs.start_idx == 20


def test_a_later_chunk_finds_what_another_sample_has_computed_behind_the_same_pages() -> None:
    manager, tokens = made(), [*range(50)]
    begun(manager, asks(tokens[:14], 0))
    manager.set_weights("b")
    contexts = [asks(tokens), asks(tokens)]
    for context in contexts:
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
        assert context.start_idx == 12
        context.set_token_indices(active_idx=16)
    manager.fetch(contexts)
    for context in contexts:
        context.update(0)
    manager.step(contexts)
    first, second = contexts
    manager.fetch([first])
    first.update(7)
    manager.step([first])
    assert manager.maybe_reserve(second)
    assert second.start_idx == 48
    assert manager.lineage(second.request_id) == ((0, 12, A), (12, 36, B))


def test_a_switch_while_such_a_request_runs_leaves_its_next_pages_to_it_alone() -> None:
    manager = made()
    begun(manager, asks(PROMPT, 0))
    manager.set_weights("b")
    runs = begun(manager, asks(PROMPT), 4)
    manager.set_weights("c")
    tokens = begun_again(manager, runs, 8)
    assert manager.lineage(runs.request_id) == ((0, 20, A), (20, 4, B), (24, 9, C))
    assert found(manager, tokens, 2) == 24


def begun_again(manager: PagedKVCacheManager, context: TextContext, steps: int) -> list[int]:
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
    return context.tokens.tolist()


def test_a_refused_reservation_leaves_no_lineage() -> None:
    manager = made(12)
    begun(manager, asks(PROMPT, 0, "old"))
    manager.set_weights("b")
    begun(manager, asks([*range(100, 122)], 0, "other"))
    waits = asks(PROMPT, 1, "waits")
    manager.external_claim("waits")
    assert not manager.maybe_reserve(asks([*PROMPT, 1, 2, 3], 1, "waits"))
    manager.release("other")
    waits.max_staleness = 0
    assert manager.maybe_reserve(waits)
    assert waits.start_idx == 0


def test_a_context_that_cannot_carry_a_hasher_finds_old_pages_too() -> None:
    class Own:
        """A context of an engine, without any of the optional attributes but one."""

        max_staleness: Any = 1

        def __init__(self, tokens: Sequence[int]) -> None:
            self._text = TextContext(tokens, 200, "own")

        def __getattr__(self, name: str) -> Any:
            if name in ("prefix_hasher", "cache_salt", "extra_keys", "retention", "computed_idx"):
                raise AttributeError(name)
            return getattr(self._text, name)

    manager = made()
    begun(manager, asks(PROMPT, 0))
    manager.set_weights("b")
    own: Any = Own(PROMPT)
    assert manager.admission(own).cached_pages == 5
    begun(manager, own, 4)
    assert manager.lineage("own") == ((0, 20, A), (20, 5, B))
    assert found(manager, [*own.tokens.tolist(), 0], 1) == 24
    own.max_staleness = -1
    with pytest.raises(InvalidRequestError, match="'own': max_staleness is -1"):
        manager.admission(own)


# ---- tiers, tables and the order of eviction


def test_old_pages_come_from_every_tier(tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 0.01, "file_tier_key": "model"}
    served = Served(8, 40, params={"weights": "a", **files})
    served.serve(PROMPT)
    served.manager.set_weights("b")
    served.serve([*range(50, 80)])  # the device has room for one of them
    context = asks([*PROMPT, 5])
    assert served.manager.admission(context).cached_pages == 0
    begun(served.manager, context)
    assert served.manager.metrics.h2d_blocks_copied == 5
    assert served.manager.lineage(context.request_id) == ((0, 20, A), (20, 3, B))
    served.manager.release(context.request_id)
    served.manager.close()
    later = Served(8, 40, params={"weights": "a", **files})
    later.manager.set_weights("b")
    context = asks([*PROMPT, 5])
    while later.manager.prefetch(context):
        pass
    begun(later.manager, context)
    assert later.manager.lineage(context.request_id) == ((0, 20, A), (20, 3, B))
    later.manager.close()


@pytest.mark.parametrize("first_page", [0, 5])
def test_a_reader_that_has_the_prefix_of_its_own_version_refuses_a_table_behind_old_pages(first_page: int) -> None:
    source, reader = made(), made(params={"weights": "b"})
    begun(source, asks(PROMPT, 0))
    source.set_weights("b")
    runs = begun(source, asks(PROMPT))
    run_once(reader, PROMPT)
    waits = asks(runs.tokens, 1)
    reader.external_claim(waits.request_id)
    with pytest.raises(BlockTableMismatchError, match="weights"):
        reader.import_block_table(waits, source.block_table(runs.request_id, first_page=first_page))


def test_an_import_takes_pages_of_the_current_version_only() -> None:
    source, reader = made(params={"weights": "b"}), made()
    run_once(reader, PROMPT)
    reader.set_weights("b")
    runs = begun(source, asks(PROMPT, 0))
    waits = asks(runs.tokens, 1)
    reader.external_claim(waits.request_id)
    pending = reader.import_block_table(waits, source.block_table(runs.request_id))
    assert pending is not None
    assert waits.start_idx == 0
    copier = reader.copier(pending)
    copier.take()
    reader.commit_import(waits, pending, copier.prove())
    assert reader.lineage(waits.request_id) == ((0, 22, B),)


def test_old_pages_that_are_in_use_are_evicted_in_their_turn() -> None:
    manager = made(16)
    run_once(manager, PROMPT)
    run_once(manager, [*range(50, 59)])
    manager.set_weights("b")
    run_once(manager, [*range(100, 109)])
    assert found(manager, PROMPT, 1) == 20
    begun(manager, asks([*range(200, 229)], 0))  # eight pages: seven are fresh
    begun(manager, asks([*range(300, 312)], 0))
    prompts = [PROMPT, [*range(50, 59)], [*range(100, 109)]]
    assert [manager.admission(asks(tokens)).cached_pages for tokens in prompts] == [5, 0, 0]


def test_a_page_that_was_used_under_other_weights_is_current_again_after_a_rollback() -> None:
    manager = made(16)
    run_once(manager, [*range(9)])
    manager.set_weights("b")
    assert found(manager, [*range(9)], 1) == 8
    manager.set_weights("a")
    run_once(manager, [*range(50, 59)])
    assert found(manager, [*range(9)], 0) == 8  # it is the newest one now
    begun(manager, asks([*range(200, 256)], 0))  # 14 pages: 12 are fresh
    assert [manager.admission(asks([*range(at, at + 9)], 0)).cached_pages for at in (0, 50)] == [2, 0]


# ---- names


def test_names_tell_every_segment() -> None:
    def of(*segments: tuple[int, bytes | None, bytes]) -> Segments:
        return tuple(Segment(first, version, mark) for first, version, mark in segments)

    several = [
        of((0, None, b"")),
        of((0, b"a", b"")),
        of((0, b"a", b""), (3, b"b", b"")),
        of((0, None, b""), (3, b"b", b"")),
        of((0, b"a", b""), (4, b"b", b"")),
        of((0, b"a", b""), (3, b"b", b"m" * 16)),
        of((0, b"a", b""), (3, b"m" * 16, b"")),
        of((0, b"a", b""), (3, None, b"m" * 16)),
        of((0, b"a", b""), (3, None, b"")),
        of((0, b"a", b""), (2, b"b", b""), (3, b"a", b"")),
    ]
    assert len({last_name(one) for one in several}) == len(several)
    assert len({(one[0].version, keys_of(one, 4)) for one in several}) == len(several)
    assert last_name(several[2], 2) == b"a"
    assert followed_by(several[9], 3, b"c") == of((0, b"a", b""), (2, b"b", b""), (3, b"c", b""))
    assert followed_by(several[9], 2, b"a") == several[1]
    assert followed_by(several[9], 0, b"c") == of((0, b"c", b""))


# ---- each rule


def follows_unnamed(segments: Segments, end: int, version: bytes | None) -> Segments:
    kept = tuple(segment for segment in segments if segment.first_page < end)
    return kept or (Segment(0, version),)


def follows_uncut(segments: Segments, end: int, version: bytes | None) -> Segments:
    return segments if segments[-1].version == version else (*segments, Segment(end, version))


def any_age(weights: Weights, _most: int) -> Any:
    return RECENT(weights, 1 << 30)


def reaches_the_device(replica: Replica, context: Any, hasher: Any) -> int:
    return replica.find(context, hasher=hasher).end


def not_used(_replica: Replica, _digests: Any) -> None:
    pass


RECENT = Weights.recent
SAMPLES = test_samples_of_a_prompt_share_what_they_compute_behind_old_pages
LEFT_OUT: dict[str, tuple[Any, str, Any, Callable[..., None]]] = {
    "the version is not named behind old pages": (kvcache.replica.replica, "followed_by", follows_unnamed, SAMPLES),
    "nothing is too old": (Weights, "recent", any_age, lambda: test_pages_are_found_until_they_are_too_old(1)),
    "used pages stay old": (Replica, "_use", not_used, test_old_pages_that_are_in_use_are_evicted_in_their_turn),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_rule_that_is_left_out_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, mutant, noticed = LEFT_OUT[what]
    noticed()
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        noticed()


def test_tiers_count_when_the_longest_prefix_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_old_pages_come_from_every_tier(tmp_path / "all")
    monkeypatch.setattr(Replica, "reach", reaches_the_device)
    with pytest.raises(AssertionError):
        test_old_pages_come_from_every_tier(tmp_path / "none")


def test_one_prompt_is_hashed_once_for_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = made()
    run_once(manager, PROMPT)
    for version in "bcd":
        manager.set_weights(version)
    context = asks(PROMPT, 9)
    assert manager.admission(context).cached_pages == 5
    hashed: list[PrefixHasher] = []

    def extended(hasher: PrefixHasher, _tokens: object, _last: int) -> None:
        hashed.append(hasher)

    monkeypatch.setattr(PrefixHasher, "_extend", extended)
    assert manager.admission(context).cached_pages == 5
    assert not hashed


@pytest.mark.parametrize("tokens", [20, 21])
def test_a_request_that_finds_all_under_its_own_version_tries_no_other(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, tried = made(), list[Segments]()
    run_once(manager, [*range(tokens)])
    for version in "ba":
        manager.set_weights(version)

    def of(self: Candidates, segments: Segments, real: Any = Candidates.of) -> PrefixHasher:
        tried.append(segments)
        return real(self, segments)

    monkeypatch.setattr(Candidates, "of", of)
    assert manager.admission(asks(range(tokens), 9)).cached_pages == (tokens - 1) // 4
    assert set(tried) == {(Segment(0, A),)}


def test_a_context_that_comes_from_another_manager_is_hashed_again() -> None:
    narrow, wide = made(), manager_of(64, page_size=8, params={"weights": "a"})
    for manager in (narrow, wide):
        run_once(manager, PROMPT)
        manager.set_weights("b")
    context = asks(PROMPT)
    for _ in range(2):
        assert [manager.admission(context).cached_pages for manager in (narrow, wide)] == [5, 2]
