from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
from blake3 import blake3

from kvcache.params import HashAlgorithm
from kvcache.replica.hashing import DIGEST_BYTES, PrefixHasher, next_digests, page_rows

ALGORITHMS: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)


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


def test_digests_are_the_same_in_another_process_and_for_any_integer_dtype() -> None:
    code = (
        "import numpy as np; from kvcache.replica.hashing import PrefixHasher;"
        "t = np.arange(40, dtype=np.int64) * 7919 % 50021;"
        "print(PrefixHasher('sha256', 4, 's').digests(t, 0, 10).tobytes().hex())"
    )
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert there.stdout.strip() == PrefixHasher("sha256", 4, "s").digests(tokens(40), 0, 10).tobytes().hex()


def test_one_page_of_many_requests_is_hashed_as_each_alone() -> None:
    """Also where a key is still to come, and where pages before are not hashed yet: those take the slow way."""
    rows = page_rows(tokens(8), 4)
    keys: list[Any] = [None, ((6, b"image"),), ((9, b"late"),), None]
    hashers = [PrefixHasher("sha256", 4, None, key) for key in keys]
    for hasher in hashers[:3]:
        hasher.digests(tokens(4), 0, 1)
    slow: list[int] = []

    def slowly(at: int) -> bytes:
        slow.append(at)
        return hashers[at].digests(tokens(8), 1, 2).tobytes()

    found = next_digests(hashers, [1] * 4, [rows[1]] * 4, slowly)
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


def test_keys_come_in_page_by_page_however_the_request_grows() -> None:
    keys = ((9, b"late"), (0, b"lora"), (2, b"image"))
    whole = PrefixHasher("sha256", 4, None, keys).digests(tokens(20), 0, 5)
    grown = PrefixHasher("sha256", 4, None, keys)
    for pages in range(1, 6):
        assert (grown.digests(tokens(20), 0, pages) == whole[:pages]).all()
    assert not grown.keys_left


def test_a_copy_goes_on_by_itself() -> None:
    first = PrefixHasher("sha256", 4, None, ((9, b"late"),))
    first.digests(tokens(8), 0, 2)
    twin = first.copy()
    other = tokens(16)
    other[12] += 1
    assert (twin.digests(other, 0, 4)[3] != first.digests(tokens(16), 0, 4)[3]).any()
    assert (twin.digests(other, 0, 3) == first.digests(tokens(16), 0, 3)).all()
