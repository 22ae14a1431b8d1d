"""The value types that callers of the manager pass and receive."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

RequestID = str
"""The name of a request: any string that is unique among the claimed requests of one manager."""


class RaggedKVCacheInputs(NamedTuple):
    """The inputs of a model's attention on one device, as `PagedKVCacheManager.fetch` returns them.

    Valid until the manager's next `maybe_reserve`, `step` or `release`, because the tensors are views of its tables.
    The inputs of `fetch_ahead` are valid until `end_step`.

    Attributes:
        blocks: the whole pool of this device, `[pages + 1, sides, layers, page_size, heads, head_dim]`, strided. Page 0
            is the null page.
        cache_lengths: int32 `[batch]`, the number of each request's tokens whose KV is in the cache.
        lookup_table: int32 `[batch, columns]`, page ids in logical order. Unused entries name the null page, 0. If
            groups of layers have several tables (`PagedKVCacheManager.layer_tables`), it is `[tables, batch, columns]`,
            and entries that have left a window also name the null page.
        max_lengths: int32 `[num_steps, 2]` on the host: the longest active run and the longest context of each step.
        kv_scales: the scales of quantised values, in the same pages (`KVCacheParams.kvcache_quant_config`), or None.
            `[pages + 1, sides, layers, page_size, heads, head_dim / quantization_granularity]`, strided. If a scale
            covers a whole page, the extents of tokens and heads are 1.
    """

    blocks: torch.Tensor
    cache_lengths: torch.Tensor
    lookup_table: torch.Tensor
    max_lengths: torch.Tensor
    kv_scales: torch.Tensor | None = None


class Admission(NamedTuple):
    """The best replica for an unclaimed request, and whether a claim there would succeed."""

    replica_idx: int
    cached_pages: int  # how many pages of the request are published on that replica
    missing_pages: int  # how many pages must be allocated on that replica for the request
    # Whether a row and the missing pages are free now. If True, `external_claim` and `maybe_reserve` succeed, provided
    # that nothing else happens first. If False, the request must wait until another request is released. With the rule
    # `prefix`, False means that the request fits on no replica. With other rules, it means that the request does not
    # fit on this replica. If recurrent states share memory with token pages, the claim itself may evict cached pages
    # that the lookup has found. `fits` is then computed from the most pages that the request can need, so it may be
    # False for a request that would fit.
    fits: bool


Part = NDArray[np.uint8]
"""The bytes of a part of a page in memory."""


class PageIO(Protocol):
    """Moves bytes between an open file, from `offset` on, and consecutive parts of memory.

    It moves all bytes or raises `OSError`. Any other exception counts as an `OSError`, too.
    """

    def write(self, file: int, parts: Sequence[Part], offset: int) -> None: ...  # noqa: D102 - see the class
    def read(self, file: int, parts: Sequence[Part], offset: int) -> None: ...  # noqa: D102


class ObjectRange(NamedTuple):
    """A range of bytes of an object, from `offset` on.

    `start` is where these bytes lie in the memory of an `ObjectIO`.
    """

    key: str
    offset: int
    start: int
    size: int


class ObjectIO(Protocol):
    """Moves bytes between objects of a store and `memory`, for one thread.

    No call takes much longer than the time limit that was given to `MakeObjectIO`. If the store fails or is too slow, a
    call raises `OSError`, and the next call may raise it, too. Data that arrives later is never written to `memory`.
    Any other exception, or a wrong number of answers, counts as a failure of the store, too.
    """

    @property
    def memory(self) -> Part: ...  # noqa: D102 - see the class
    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Returns whether the object of each key exists."""
        ...

    def write(self, objects: Sequence[ObjectRange]) -> None:
        """Write whole objects, each from offset 0 on. No reader sees an object before it is complete."""

    def read(self, ranges: Sequence[ObjectRange]) -> list[bool]:
        """Read these ranges. Returns whether each was read: False if its object is absent.

        If an object is shorter than a range, the rest of the range is left as it was.
        """
        ...

    def close(self) -> None: ...  # noqa: D102


MakeObjectIO = Callable[[int, float], ObjectIO]
"""Makes an `ObjectIO`, given the size of its memory in bytes and the seconds that a call may take. Never raises."""


class KVCacheMetrics(msgspec.Struct, frozen=True):
    """Counts of what a manager did since it was created or since `reset_metrics`, over all replicas."""

    # The number of prompt tokens that a model ran. Each token is counted once. Decoded tokens, and tokens of refused
    # reservations, are not counted.
    input_tokens: int = 0
    cache_tokens: int = 0  # the number of prompt tokens that did not run, because their pages were cached
    h2d_blocks_copied: int = 0  # the number of pages copied from the host tier
    d2h_blocks_copied: int = 0  # the number of pages copied to the host tier
    evictions: int = 0  # the number of published pages that were evicted
    file_blocks_written: int = 0  # the number of pages written to the file tier
    file_blocks_read: int = 0  # the number of pages read from the file tier into the host tier
    # the number of pages of the file tier that were not read, for one of the next five reasons
    file_blocks_refused: int = 0
    file_blocks_gone: int = 0  # the number of refused pages whose file was deleted
    # the number of refused pages whose file is a link or a folder, or cannot be read by the system
    file_blocks_unreadable: int = 0
    file_blocks_cut: int = 0  # the number of refused pages whose file has changed its size
    file_blocks_foreign: int = 0  # the number of refused pages whose file has other pages in their place
    file_blocks_corrupted: int = 0  # the number of refused pages whose checksum does not match
    object_blocks_written: int = 0  # the number of pages written to the object store
    object_blocks_read: int = 0  # the number of pages read from the object store into the host tier
    object_blocks_refused: int = 0  # the number of pages of objects that were not accepted: damaged, cut short or gone
    object_store_failures: int = 0  # the number of calls to the object store that failed or timed out
    h2d_states_copied: int = 0  # the number of recurrent states copied from the host tier
    d2h_states_copied: int = 0  # the number of recurrent states copied to the host tier
    file_states_written: int = 0  # the number of recurrent states written to the file tier
    file_states_read: int = 0  # the number of recurrent states read from the file tier into the host tier
    # the number of recurrent states of the file tier that were not read, for the same reasons as pages
    file_states_refused: int = 0
    object_states_written: int = 0  # the number of recurrent states written to the object store
    object_states_read: int = 0  # the number of recurrent states read from the object store into the host tier
    # the number of recurrent states of objects that were not accepted: damaged, cut short or gone
    object_states_refused: int = 0
    state_hits: int = 0  # the number of requests that resumed from a cached recurrent state
    state_evictions: int = 0  # the number of cached recurrent states that were evicted from the device
    # the number of files in the file tier's folder that were not accepted: broken, or of another kind
    files_refused: int = 0

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompt tokens that were cached, 0.0 to 1.0."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: "KVCacheMetrics") -> "KVCacheMetrics":
        return KVCacheMetrics(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __sub__(self, other: "KVCacheMetrics") -> "KVCacheMetrics":
        return KVCacheMetrics(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))
