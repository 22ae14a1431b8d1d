"""Small values that cross the manager's border."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

RequestID = str
"""What names a request: any string, unique among the claimed requests of one manager."""


class RaggedKVCacheInputs(NamedTuple):
    """What a model's attention reads on one device, as `PagedKVCacheManager.fetch` hands it out.

    Valid until the manager's next `maybe_reserve`, `step` or `release`: the tensors are views of its tables.

    Attributes:
        blocks: the whole pool of this device, `[pages + 1, sides, layers, page_size, heads, head_dim]`, strided
            (page 0 is the null page).
        cache_lengths: int32 `[batch]`, tokens of each request whose KV is in the cache.
        lookup_table: int32 `[batch, columns]`, page ids in logical order; unused entries name the null page, 0.
        max_lengths: int32 `[num_steps, 2]` on the host: of each step the longest active run and the longest context.
    """

    blocks: torch.Tensor
    cache_lengths: torch.Tensor
    lookup_table: torch.Tensor
    max_lengths: torch.Tensor


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client knows about the future of a request's pages. A hint biases the order of eviction, never locks.

    Attributes:
        session_continues: another request is expected to extend this one (True), none is (False), or unknown (None).
        priority: 0 (first to go) to 100 (last to go).
        ttl_s: seconds for which the hint is worth anything.
    """

    session_continues: bool | None = None
    priority: int = 50
    ttl_s: float | None = None
