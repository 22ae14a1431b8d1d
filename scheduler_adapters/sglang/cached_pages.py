"""`CachedPages`: the pages that our cache holds for SGLang, found by digest. Only the scheduler's thread may use them.

The digest of a page covers all tokens before its end, the salt, the extra key, in which SGLang also puts the adapter,
and the name of the weights (`weights.py`). The digests are those of `PagedKVCacheManager`, so its processes find these
pages, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.errors import BlockTableMismatchError
from kvcache.replica.block_table import PageDigests
from scheduler_adapters.peers.peer_blocks import TakenBlocks
from scheduler_adapters.sglang.cache import ALGORITHM, PagewireCache, Prefix
from transfer.connector.lending import HeldBlocks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class QueuedPrompt:
    """A waiting request, as peers are asked about it. Its hashes are those of the weights when it was asked first.

    Args:
        cache: the cache that hashes its pages.
        req: the request.
    """

    skip_reading_prefix_cache = False

    def __init__(self, cache: PagewireCache, req: Req) -> None:
        self._cache, self.req = cache, req
        self.request_id, self.num_tokens = str(req.rid), len(req.origin_input_ids) + len(req.output_ids)
        self.num_prompt_tokens = len(req.origin_input_ids)
        self.kv_hints: Any = req.kv_hints
        self._hashes: list[bytes] | None = None

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.req.output_ids)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The digests of the full pages that the request may find cached."""
        if self._hashes is None:
            self._hashes = [row.tobytes() for row in self._cache.digests_of(self.req)]
        return self._hashes


class CachedPages:
    """The cached pages of a scheduler, for peers that read some and for pulls that fill some.

    Args:
        cache: SGLang's prefix cache.
    """

    hash_bytes = 8 * PagewireCache.digest_words
    hashed_by = ALGORITHM

    def __init__(self, cache: PagewireCache) -> None:
        self._cache = cache
        self._held: defaultdict[HeldBlocks, list[Prefix]] = defaultdict(list)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._cache.page_size

    # For readers: `transfer.connector.lending.BlockSource`

    def hold(self, wanted: PageDigests, most: int) -> HeldBlocks | None:
        """See `transfer.connector.lending.BlockSource.hold`."""
        self._check(wanted)
        index, digests = self._cache.pool.index, _rows(wanted.digests)
        pages = index.match(digests)[: max(0, most)]
        if not len(pages):
            return None
        prefix, held = Prefix(pages, digests[: len(pages)], index.generation), _held(pages.tolist())
        self._cache.inc_lock_ref(prefix)
        self._held[held].append(prefix)
        return held

    def free(self, held: HeldBlocks) -> None:
        """Gives up held pages, which SGLang may then evict."""
        self._cache.dec_lock_ref(self._held[held].pop())
        if not self._held[held]:
            del self._held[held]

    def _check(self, wanted: PageDigests) -> None:
        """Raises `BlockTableMismatchError` unless pages with these digests hold what the reader needs."""
        ours, theirs = (self.page_size, self.hashed_by), (wanted.page_size, wanted.hash_algorithm)
        if ours != theirs or len(wanted.digests) % self.hash_bytes:
            raise BlockTableMismatchError(
                f"the cached pages cannot be lent: SGLang caches pages of {ours[0]} tokens by {ours[1]!r}, but "
                f"{theirs[0]} by {theirs[1]!a} are wanted"
            )
        if wanted.named:
            raise BlockTableMismatchError(
                f"the cached pages cannot be lent: no digest here covers {dict(wanted.named)}, which the reader names"
            )

    # For a pull: `scheduler_adapters.peers.peer_blocks.PeerPool`

    def number(self, block_hash: bytes) -> int:
        """See `PeerPool.number`. `events.py` tells routers the first 64 bits of a digest."""
        return int.from_bytes(block_hash[:8], "little")

    def named(self, request: QueuedPrompt) -> tuple[tuple[str, str], ...]:
        """See `PeerPool.named`. The digests cover everything."""
        del request
        return ()

    def take(self, first: int, end: int) -> TakenBlocks | None:
        """Takes pages that are free in SGLang, at most half of those that are free or can be evicted."""
        pages = self._cache.take(end - first)
        return None if pages is None else TakenBlocks((first,), end, (tuple(pages.tolist()),))

    def publish(self, request: QueuedPrompt, taken: TakenBlocks) -> None:
        """See `PeerPool.publish`."""
        hashes = request.block_hashes[: taken.end]
        self._cache.adopt(request.req, _pages(taken), _rows(b"".join(hashes)), taken.firsts[0])

    def give_up(self, taken: TakenBlocks) -> None:
        """See `PeerPool.give_up`."""
        self._cache.give_up(_pages(taken))


def _held(pages: Sequence[int]) -> HeldBlocks:
    return HeldBlocks(len(pages), (tuple(pages),))


def _pages(taken: TakenBlocks) -> Any:
    return np.array(taken.block_ids[0], np.int32)


def _rows(digests: bytes) -> Any:
    """Returns digests as uint64 `[pages, words]`."""
    return np.frombuffer(digests, np.uint64).reshape(-1, PagewireCache.digest_words)
