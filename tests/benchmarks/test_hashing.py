from __future__ import annotations

import gc

import numpy as np

from benchmarks import hashing
from kvcache.params import usable_hashes


def test_the_polynomials_digests_are_its_values_whatever_the_page_size() -> None:
    tokens, key = np.arange(64, dtype=np.int32) * 7919 % 50021 << 12, hashing.PRIME // 5
    whole = hashing.KeyedPolynomial(key, 8)
    wanted = 1
    for token in tokens.view(np.uint32).tolist():
        wanted = (wanted * key + token) % hashing.PRIME
    assert whole.prompt(tokens)[-1] == wanted.to_bytes(16, "little")
    assert whole.prompt(tokens)[3::4] == hashing.KeyedPolynomial(key, 32).prompt(tokens)
    before = int.from_bytes(whole.prompt(tokens[:8])[0], "little")
    assert whole.step([before], tokens[8:16]) == [whole.prompt(tokens)[1]]


def test_every_hash_is_measured_in_both_cases() -> None:
    try:
        rows = hashing.measure((256,), 2)
    finally:
        gc.unfreeze()
    for case, further in (
        ("prompt", {*hashing.CANDIDATES, "keyed polynomial", "blake3, one call"}),
        ("step", {*hashing.CANDIDATES}),
    ):
        assert {row["hash"] for row in rows if row["case"] == case} >= {*usable_hashes(), *further}
    assert all(row["us_min"] > 0 for row in rows)
    assert not hashing.hasher("blake3", 16).known
