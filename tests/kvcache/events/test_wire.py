"""Compares the messages of pagewire with bytes that vLLM 0.33's encoder has made."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    adapter_of,
    encode,
    hashes_of,
    keys_of_block,
)


def test_events_are_the_bytes_that_vllm_sends() -> None:
    removed = BlockRemoved([1], "GPU", group_idx=0)
    assert encode(AllBlocksCleared()).hex() == "81a474797065b0416c6c426c6f636b73436c6561726564"
    assert encode(removed).hex() == (
        "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055"
        "a967726f75705f69647800"
    )
    stored = BlockStored([7], None, [1, 2], 2, None, "GPU", None, [None], 0, "full_attention")
    assert encode(stored).hex() == (
        "de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f636b5f68617368c0"
        "a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
        "aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e"
    )
    assert encode(EventBatch(1.5, [], 0)).hex() == "93cb3ff80000000000009000"


def test_a_hash_is_the_low_half_of_the_last_16_bytes_read_big_endian() -> None:
    digest = bytes(range(32))
    words = np.frombuffer(digest, np.uint64).reshape(1, 4)
    assert hashes_of(words).tolist() == [int.from_bytes(digest, "big") & (1 << 64) - 1]


@pytest.mark.parametrize(
    ("keys", "adapter", "first", "second"),
    [
        ((), None, ("salt",), None),
        (((0, b"style"),), "style", ("style", "salt"), ("style",)),
        (((0, b"ab" * 32),), None, (("ab" * 32, 0), "salt"), None),
        (((0, b"\xff" * 32),), None, (("ff" * 32, 0), "salt"), None),
        (((5, b"picture"), (0, b"style")), "style", ("style", "salt"), ("style", ("picture", 1))),
        (((5, b"b"), (4, b"a")), None, ("salt",), (("a", 0), ("b", 1))),
    ],
)
def test_extra_keys_of_a_block(
    keys: tuple[tuple[int, bytes], ...], adapter: str | None, first: object, second: object
) -> None:
    assert adapter_of(keys) == adapter
    assert keys_of_block("salt", keys, 0, 4) == first
    assert keys_of_block("salt", keys, 1, 4) == second
