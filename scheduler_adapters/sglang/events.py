"""Reports the contents of the cache in SGLang's own KV event stream (`--kv-events-config`).

SGLang's recorder keeps the events until its scheduler publishes them. For SGLang, a block's hash is only an identifier.
We pass the first word of the page's digest, which covers the salt and the extra key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

Digests: TypeAlias = NDArray[np.uint64]


def event_recorder(params: CacheInitParams) -> KVCacheEventRecorder:
    """Returns SGLang's recorder. It records nothing if events are off."""
    return KVCacheEventRecorder(
        enabled=params.enable_kv_cache_events,
        page_size=params.page_size,
        dynamo_format=params.dynamo_kv_event_format,
        lora_names=params.kv_event_lora_names,
    )


def record_stored(
    recorder: KVCacheEventRecorder, req: Req, tokens: NDArray[np.int64], digests: Digests, new: NDArray[np.bool_]
) -> None:
    """Records that the pages of a prompt that are True in `new` were published.

    Each run of consecutive new pages becomes one event. The event also names the page before the run.

    Args:
        recorder: SGLang's recorder.
        req: the request of the prompt.
        tokens: the tokens of the prompt. They fill at least all of its pages.
        digests: digests of all its pages.
        new: bool `[pages]`, whether each page was published now.
    """
    if not recorder.enabled or not new.any():
        return
    hashes, size, names = _hashes(digests), recorder.page_size, recorder.lora_names
    edges = np.flatnonzero(np.diff(new, prepend=False, append=False))
    for first, last in edges.reshape(-1, 2).tolist():
        recorder.enqueue(
            BlockStored(
                block_hashes=hashes[first:last],
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=tokens[first * size : last * size].tolist(),
                block_size=size,
                lora_id=None,
                medium=StorageMedium.GPU,
                cache_salt=req.cache_salt,
                session_id=req.session_id,
                lora_name=(names.resolve if recorder.dynamo_format else names.get)(req.extra_key),
            )
        )


def record_removed(recorder: KVCacheEventRecorder, digests: Digests) -> None:
    """Records evicted pages."""
    if recorder.enabled:
        recorder.enqueue(BlockRemoved(block_hashes=_hashes(digests), medium=StorageMedium.GPU))


def _hashes(digests: Digests) -> list[int]:
    return digests[:, 0].view(np.int64).tolist()
