from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.params import HashAlgorithm
from kvcache.replica import hashing
from kvcache.replica.hashing import DIGEST_BYTES, ExtraKeys, PrefixHasher, next_digests, token_bytes
from tests.kvcache.replica.compiled import compiled_chain

ALGORITHMS: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)


@pytest.fixture(autouse=True, params=["hashlib", "chained.c"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes every test run twice: with each of the two implementations of sha256."""
    monkeypatch.setattr(hashing, "_Chain", hashing._NotCompiled if request.param == "hashlib" else compiled_chain())
    hashing._seeded.cache_clear()
    yield request.param
    hashing._seeded.cache_clear()


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32) * 7919 % 50021


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extending_equals_hashing_at_once(algorithm: HashAlgorithm) -> None:
    whole = PrefixHasher(algorithm, 4, None).digests(tokens(40), 0, 10)
    assert whole.shape == (10, DIGEST_BYTES[algorithm] // 8)
    grown = PrefixHasher(algorithm, 4, None)
    for pages in (1, 1, 3, 7, 10):
        assert (grown.digests(tokens(pages * 4 + 1), 0, pages) == whole[:pages]).all()
    assert (grown.digests(tokens(40), 3, 6) == whole[3:6]).all()
    assert len(np.unique(whole, axis=0)) == 10


@pytest.mark.parametrize(("algorithm", "whole"), [("sha256", hashlib.sha256), ("blake3", blake3)])
def test_strong_digests_are_whole_and_cover_the_prefix(algorithm: HashAlgorithm, whole: Any) -> None:
    hasher = PrefixHasher(algorithm, 4, "salt")
    fields = (algorithm.encode(), b"4", b"=salt")
    seed = b"pagewire/1" + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    for page in range(3):
        wanted = whole(seed + tokens((page + 1) * 4).tobytes()).digest()
        assert hasher.digests(tokens(12), page, page + 1).tobytes() == wanted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_anything_that_differs_makes_every_later_digest_differ(algorithm: HashAlgorithm) -> None:
    base = PrefixHasher(algorithm, 4, None).digests(tokens(24), 0, 6)
    for place in range(24):
        changed = tokens(24)
        changed[place] += 1
        other = PrefixHasher(algorithm, 4, None).digests(changed, 0, 6)
        assert (other == base).all(axis=1).tolist() == [page < place // 4 for page in range(6)]


def test_no_two_choices_of_salt_and_page_size_agree() -> None:
    found = [
        PrefixHasher(algorithm, size, salt).digests(tokens(24), 0, 1).tobytes()
        for algorithm, size, salt in itertools.product(ALGORITHMS, (4, 8, 16), (None, "", "a", "4", "=a", "a\0"))
    ]
    assert len(set(found)) == len(found)


def test_one_page_of_many_requests_is_hashed_as_each_alone() -> None:
    """Many requests are hashed in one call. A request takes the slow path if it has a key on a later page or if its
    earlier pages are not hashed yet.
    """
    second = np.repeat(tokens(8)[None, 4:], 4, axis=0)
    keys: list[Any] = [None, ((6, b"image"),), ((9, b"late"),), None]
    hashers = [PrefixHasher("sha256", 4, None, key) for key in keys]
    for hasher in hashers[:3]:
        hasher.digests(tokens(4), 0, 1)
    slow: list[int] = []

    def slowly(at: int) -> bytes:
        slow.append(at)
        return hashers[at].digests(tokens(8), 1, 2).tobytes()

    found = next_digests(hashers, [1] * 4, second, slowly)
    assert slow == [1, 2, 3]
    for at, key in enumerate(keys):
        assert (found[at] == PrefixHasher("sha256", 4, None, key).digests(tokens(8), 1, 2)[0]).all()


def test_extra_keys_join_the_chain_at_their_page() -> None:
    plain = PrefixHasher("sha256", 4, None).digests(tokens(24), 0, 6)
    for position in range(24):
        keyed = PrefixHasher("sha256", 4, None, ((position, b"image"),)).digests(tokens(24), 0, 6)
        assert (keyed == plain).all(axis=1).tolist() == [page < position // 4 for page in range(6)]


def test_no_two_choices_of_keys_agree_and_none_looks_like_tokens() -> None:
    choices = [
        (),
        ((0, b""),),
        ((0, b"a"),),
        ((1, b"a"),),
        ((0, b"ab"),),
        ((0, b"a"), (0, b"b")),
        ((0, b"a"), (1, b"b")),
        ((0, tokens(4).tobytes()),),
    ]
    found = [PrefixHasher("sha256", 4, None, keys).digests(tokens(8), 0, 1).tobytes() for keys in choices]
    assert len(set(found)) == len(found)


def test_keys_are_hashed_page_by_page_however_the_request_grows() -> None:
    keys = ((9, b"late"), (0, b"lora"), (2, b"image"))
    whole = PrefixHasher("sha256", 4, None, keys).digests(tokens(20), 0, 5)
    grown = PrefixHasher("sha256", 4, None, keys)
    for pages in range(1, 6):
        assert (grown.digests(tokens(20), 0, pages) == whole[:pages]).all()
    assert not grown.keys_left


def test_a_key_after_the_last_full_page_changes_no_digest_yet() -> None:
    waits = PrefixHasher("sha256", 4, None, ((30, b"late"),))
    assert (waits.digests(tokens(10), 0, 2) == PrefixHasher("sha256", 4, None).digests(tokens(10), 0, 2)).all()
    assert waits.num_tokens == 8


def test_tokens_are_hashed_as_little_endian_words_whatever_their_type() -> None:
    for kind in (np.int32, np.int64, np.uint32):
        assert token_bytes(np.array([1, 258], kind)[::-1]) == b"\x02\x01\0\0\x01\0\0\0"


def test_a_copy_goes_on_by_itself() -> None:
    first = PrefixHasher("sha256", 4, None, ((9, b"late"),))
    first.digests(tokens(8), 0, 2)
    twin = first.copy()
    other = tokens(16)
    other[12] += 1
    assert (twin.digests(other, 0, 4)[3] != first.digests(tokens(16), 0, 4)[3]).any()
    assert (twin.digests(other, 0, 3) == first.digests(tokens(16), 0, 3)).all()


def test_one_more_page_of_every_request_is_hashed_in_one_call_if_no_key_follows() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1 << 31, (5, 20), dtype=np.int32)
    hashers = [PrefixHasher("sha256", 4, None, ((1, b"image"),)) for _ in prompts]
    befores = [1, 4, 2, 1, 3]  # For each hasher, the number of pages that it has hashed before, at most 4.
    for hasher, prompt, before in zip(hashers, prompts, befores, strict=True):
        hasher.digests(prompt, 0, before)
    twins = [hasher.copy() for hasher in hashers]
    pages = np.stack([prompt[4 * at : 4 * at + 4] for prompt, at in zip(prompts, befores, strict=True)])
    found = next_digests(hashers, befores, pages, pytest.fail)
    for at, (hasher, twin, before) in enumerate(zip(hashers, twins, befores, strict=True)):
        assert (found[at] == twin.digests(prompts[at], before, before + 1)[0]).all()
        assert (found[at] == PrefixHasher("sha256", 4, None, ((1, b"image"),)).digests(prompts[at], before, 5)[0]).all()
        assert (hasher.digests(prompts[at], 0, 5) == twin.digests(prompts[at], 0, 5)).all()


def test_long_prompts_are_hashed_in_parts_that_are_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PrefixHasher("sha256", 4, None).digests(tokens(80), 0, 20)
    for at_once in (1, 20, 25, 79, 80, 400):
        monkeypatch.setattr(hashing, "_AT_ONCE", at_once)
        assert (PrefixHasher("sha256", 4, None).digests(tokens(80), 0, 20) == whole).all()


def check_walk(steps: list[tuple[str, int]], page_size: int, salt: str | None, keys: ExtraKeys, seed: int) -> None:
    """Runs hashers that grow, are copied, and hash pages together. Compares the digests of each hasher with digests
    that hashlib computes over the whole input.
    """
    rng = np.random.default_rng(seed)
    marks = [b""] * 64  # For each page, the bytes of the extra keys that are hashed before the page.
    for position, key in sorted(keys):
        marks[position // page_size] += struct.pack("<iII", -1, position, len(key)) + key
    fields = (b"sha256", str(page_size).encode(), b"" if salt is None else b"=" + salt.encode())
    head = b"pagewire/1" + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    hashers, prompts = [PrefixHasher("sha256", page_size, salt, keys)], [np.zeros(0, np.int32)]

    def grown(of: int, count: int) -> np.ndarray:
        prompts[of] = np.concatenate((prompts[of], rng.integers(0, 1 << 31, count * page_size, dtype=np.int32)))
        return prompts[of]

    def slow(at: int) -> bytes:
        last = len(prompts[at]) // page_size
        return hashers[at].digests(prompts[at], last - 1, last).tobytes()

    for what, count in steps:
        if what == "extend":
            at = count % len(hashers)
            grown(at, count)
            hashers[at].digests(prompts[at], 0, len(prompts[at]) // page_size)
        elif what == "copy" and len(hashers) < 4:
            at = count % len(hashers)
            hashers.append(hashers[at].copy())
            prompts.append(prompts[at])
        elif what == "all":
            firsts = [len(prompt) // page_size for prompt in prompts]
            pages = np.stack([grown(at, 1)[-page_size:] for at in range(len(hashers))])
            next_digests(hashers, firsts, pages, slow)
    for hasher, prompt in zip(hashers, prompts, strict=True):
        whole, wanted = hashlib.sha256(head), b""
        for at in range(len(prompt) // page_size):
            whole.update(marks[at] + prompt[at * page_size : (at + 1) * page_size].tobytes())
            wanted += whole.digest()
        assert bytes(hasher.known) == wanted
        assert hasher.num_tokens == len(prompt)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(("extend", "copy", "all")), st.integers(0, 5)), max_size=9),
    page_size=st.sampled_from((1, 3, 4, 16, 128)),
    salt=st.sampled_from((None, "", "tenant")),
    keys=st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=4)), max_size=3).map(tuple),
    seed=st.integers(0, 1 << 20),
)
def test_hashers_agree_with_hashlib_however_tokens_arrive(
    steps: list[tuple[str, int]], page_size: int, salt: str | None, keys: ExtraKeys, seed: int
) -> None:
    check_walk(steps, page_size, salt, keys, seed)


def test_a_hasher_fits_only_what_it_was_made_for() -> None:
    hasher, keys = PrefixHasher("sha256", 4, "a", ((1, b"k"),)), ((1, b"k"),)
    assert hasher.fits("sha256", 4, ("a", keys))
    assert not hasher.fits("xxh3_128", 4, ("a", keys))
    assert not hasher.fits("sha256", 8, ("a", keys))
    assert not hasher.fits("sha256", 4, (None, keys))
    assert not hasher.fits("sha256", 4, ("a", ()))


def test_an_interrupted_hasher_begins_anew() -> None:
    hasher, tokens = PrefixHasher("sha256", 4, "a", ((5, b"k"),)), np.arange(16)
    right = hasher.digests(tokens, 0, 4)
    hasher.known[:] = hasher.known[:32]
    hasher.running = None  # The test simulates an interrupt in the second page.
    assert (hasher.digests(tokens, 0, 4) == right).all()
    hasher.running = None
    assert (hasher.copy().digests(tokens, 0, 4) == right).all()
