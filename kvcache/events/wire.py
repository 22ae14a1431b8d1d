"""KV events as vLLM 0.33 sends them: msgpack maps whose kind is under "type", in batches for each rank.

The fields, their order and their defaults are the same as in vLLM's `kv_events.py`. A field that vLLM omits when it is
None is also omitted here. No event has a field that its reader does not know, because vLLM's router 0.1.17 drops the
whole batch of such an event. Therefore each stream is written for one reader (`KVEvents.reader`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import LayerGroup
from kvcache.params import KVCacheParams, KVEventsReader

Hashes = NDArray[np.uint64]
"""Hashes of pages: the low 64 bits of their digests, which are read as big-endian integers."""
BlockKeys = tuple[str | tuple[str, int], ...]
"""Everything besides tokens on which a block's KV depends: the name of an adapter, a salt, and `(identifier, offset)`
of each image.
"""

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_IDENTIFIER_BYTES = 32
_FOLLOWED = ("full_attention", "mla_attention")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Reports that consecutive blocks of one prompt were stored.

    `token_ids` has the tokens of all blocks, and `extra_keys` has one item for each block. Some fields are never set
    here. They are declared nevertheless, because a map begins with the number of its fields, and its bytes must be the
    bytes that vLLM would send.
    """

    block_hashes: list[int]
    parent_block_hash: int | None  # the block before the first of these blocks; None if the first block begins a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[BlockKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    # The salt of the blocks' prompt. SGLang and Dynamo have this field, vLLM has not: only streams for Dynamo set it.
    cache_salt: str | None = None


class CacheSpec(NamedTuple):
    """The kind of layers whose KV a group of blocks holds, as vLLM names it."""

    kind: str | None  # None if the events do not name the kind
    window: int | None = None  # the length of a sliding window, in tokens
    # False if no event reports the blocks, because no router can follow them: a block is named by its next block
    is_told: bool = True


_SPECS = {
    "full": CacheSpec("full_attention"),
    "window": CacheSpec("sliding_window"),
    "chunked": CacheSpec("chunked_local_attention"),
    "sinks": CacheSpec("sink_full_attention"),
    "draft": CacheSpec(None, is_told=False),
}


def spec_of(group: LayerGroup, params: KVCacheParams) -> CacheSpec:
    """Returns the kind of the group's layers."""
    if group.kind == "full" and params.is_mla:
        return CacheSpec("mla_attention")
    return _SPECS[group.kind]._replace(window=group.window if group.kind == "window" else None)


def specs_for(reader: KVEventsReader, specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """Returns the kinds that a stream for this reader names.

    Dynamo 1.6.1 ignores groups of windows, chunks and states. If it is not told a kind, it follows group 0. So the
    first group of a model without full attention is announced without its kind.
    """
    first, *others = specs
    hidden = reader == "dynamo" and first.kind not in _FOLLOWED
    return [first._replace(kind=None, window=None) if hidden else first, *others]


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Reports that these blocks are no longer in this medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Reports that no block is left in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one rank that are sent together, in order. `ts` is the time in seconds since 1970."""

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode


def hashes_of(digests: NDArray[np.uint64]) -> Hashes:
    """Returns the hashes of the pages with these digests. `digests` is uint64 `[pages, words]`."""
    return digests[:, -1].byteswap()


def adapter_of(keys: Sequence[tuple[int, bytes]]) -> str | None:
    """Returns the name of the adapter among a request's extra keys, or None if there is none.

    The name is a string at position 0 that is not a hexadecimal digest.
    """
    for position, key in keys:
        name = None if position else _text(key)
        if name is not None and len(name) != 2 * _IDENTIFIER_BYTES:
            return name
    return None


def keys_of_block(salt: str | None, keys: Sequence[tuple[int, bytes]], block: int, block_size: int) -> BlockKeys | None:
    """Returns the `extra_keys` of a block: its adapter, the images that begin in it, and the salt.

    Only the first block of a prompt has the salt.
    """
    adapter = adapter_of(keys)
    found: list[str | tuple[str, int]] = [] if adapter is None else [adapter]
    for position, key in sorted(keys):
        text = _text(key)
        is_adapter = position == 0 and text is not None and text == adapter
        if position // block_size == block and not is_adapter:
            found.append((key.hex() if text is None else text, position % block_size))
    if block == 0 and salt:
        found.append(salt)
    return tuple(found) or None


def _text(key: bytes) -> str | None:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None
