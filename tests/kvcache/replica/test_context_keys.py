"""Salts and extra keys of pages from this pool, from the host, from files, or from another manager. The compared KV
depends on the keys, so the content also shows a page with wrong keys.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import BlockTableMismatchError, InvalidRequestError, TextContext
from kvcache.replica.context import checked_keys, checked_salt
from tests.kvcache.kv import KVTokens
from tests.kvcache.served import SIZE, Keys, Served

PROMPT = [*range(100, 122)]  # five full pages of 4 tokens, and two more tokens
# The positions are in the first page (0 and 3), the second page (4), the last full page (17 and 19) and the partial
# page (20).
PLACES = [0, 3, 4, 17, 19, 20]


def files(tmp_path: Path) -> dict[str, Any]:
    return {"file_tier_dir": f"{tmp_path}/files", "file_tier_max_gb": 2.0**-10, "file_tier_key": "m"}


@pytest.mark.each_value
@pytest.mark.parametrize("tier", ["pool", "host", "files"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [SIZE, 256])
def test_pages_of_other_keys_are_not_found(tmp_path: Path, tier: str, place: int, chunk: int) -> None:
    """Two prompts differ in one key.

    They share only the pages before the page with that key, whichever prompt was computed first.
    """
    it = Served(8 if tier == "host" else 40, 40, params=files(tmp_path) if tier == "files" else {})
    image: Keys = ((place, b"image"),)
    it.serve(PROMPT, keys=image, chunk=chunk)
    if tier == "host":
        it.tiers.store_all()
        it.fill(8)
    if tier == "files":
        it.manager.flush_tiers()
        it.manager.close()
        it = Served(40, 40, params=files(tmp_path))
    shared = min(place // SIZE, 5) * SIZE
    for wrong in ((), ((place, b"other"),), ((place, b"image"), (place, b"more"))):
        assert it.serve([*PROMPT[:-1], len(wrong), 7, 8, 9], keys=wrong, chunk=chunk) in (shared, 20)
    assert it.serve([*PROMPT[:-1], 77], keys=((place, b"unseen"),)) == shared
    assert it.serve([*PROMPT[:-1], 78], keys=image) == 20
    it.manager.check()
    it.manager.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8)])
def test_a_table_of_other_keys_is_refused(make: Any, place: int, sizes: tuple[int, int]) -> None:
    source, target = make(40, page_size=sizes[0]), make(40, page_size=sizes[1])
    owner = TextContext(PROMPT, 64, "p", extra_keys=[(place, b"image")])
    source.external_claim("p")
    assert source.maybe_reserve(owner)
    for end in (4, 22):
        owner.set_token_indices(active_idx=end)
        source.fetch([owner])
        owner.update(7)
        source.step([owner])
    table = source.block_table("p")
    target.external_claim("d")
    for keys in ((), ((place, b"other"),)):
        plain = TextContext([*PROMPT, 7], 64, "d", extra_keys=keys)
        if place < 20:
            with pytest.raises(BlockTableMismatchError, match=f"from page {place // sizes[0]} on"):
                target.import_block_table(plain, table)
    right = TextContext([*PROMPT, 7], 64, "d", extra_keys=[(place, b"image")])
    pending = target.import_block_table(right, table)
    right.extra_keys = [(place, b"other")]
    with pytest.raises(InvalidRequestError, match="extra_keys changed while it holds pages"):
        target.extend_import(right, pending, table, last=True)
    right.extra_keys = [(place, b"image")]
    target.cancel_import(pending)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_random_keys_through_two_tiers(tmp_path: Path, seed: int) -> None:
    """A few prompts, salts and keys in a pool that is too small for them. Every byte that a request reads must belong
    to the request's own keys.
    """
    rng = random.Random(seed)
    it = Served(8, 16, params=files(tmp_path))
    cached = 0
    for _ in range(120):
        keys = tuple((rng.choice(PLACES), rng.choice([b"a", b"b"])) for _ in range(rng.choice([0, 0, 1, 2])))
        prompt = PROMPT[: rng.choice([9, 18, 22])]
        cached += it.serve(prompt, rng.choice([None, "s"]), keys=keys, chunk=rng.choice([4, 8, 256]))
        it.manager.check()
    it.manager.close()
    assert cached > 100
    assert it.manager.metrics.h2d_blocks_copied > 20
    assert isinstance(it.kv, KVTokens)
    assert it.kv.compared > 300


def test_a_salt_is_text_that_has_bytes_or_none() -> None:
    assert checked_salt("r", None) is None
    assert [checked_salt("r", salt) for salt in ("", "tenant", "Grüße")] == ["", "tenant", "Grüße"]
    for wrong in (b"tenant", 7, ["tenant"], "\ud800", True):
        with pytest.raises(InvalidRequestError, match="request 'r': cache_salt is .*: UTF-8 text or None is needed"):
            checked_salt("r", wrong)


def test_keys_are_bytes_of_their_own_at_positions_below_the_limit() -> None:
    changing = bytearray(b"image")
    keys = checked_keys("r", [(0, b"first"), ((1 << 31) - 1, changing), (np.int64(7), b"")])
    changing[:] = b"other"
    assert keys == ((0, b"first"), ((1 << 31) - 1, b"image"), (7, b""))
    assert [type(part) for key in keys for part in key] == [int, bytes] * 3
    assert checked_keys("r", ()) == ()
    for wrong in (7, None, [1], [(1, b"a", 2)], [()]):
        with pytest.raises(InvalidRequestError, match=r"request 'r': extra_keys is .*: a list of \(position, bytes\)"):
            checked_keys("r", wrong)
    for key in ((-1, b"a"), (1 << 31, b"a"), (0.5, b"a"), ("0", b"a"), (None, b"a"), (0, "a"), (0, None), (0, 7)):
        with pytest.raises(InvalidRequestError, match="request 'r': extra key .* at token .*: bytes at a position are"):
            checked_keys("r", [(0, b"good"), key])
