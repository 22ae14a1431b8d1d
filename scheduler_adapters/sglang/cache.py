"""Our prefix index behind SGLang's cache interface: `--radix-cache-backend pagewire`. Written for SGLang 0.5.23.

Importing this module imports SGLang. SGLang finds it through its plugin group if pagewire is installed beside it
(`plugin.register` is the entry point).

Ownership: SGLang keeps its rows, its free pages and its scheduler. We own the pages that hold a published prefix: page
states, digests, index and eviction order (`kvcache.pool.pages.PagePool`, `kvcache.replica.hashing`). In our pool,
SGLang counts as the single holder of each page that is free in SGLang or not yet published. `checkpoint` publishes a
page, and replaces that hold with locks on the page. `evict` gives the page back to SGLang:

    of SGLang ──checkpoint──► published, locked ──unlock──► published, idle ──evict──► of SGLang
                                     ▲                             │
                                     └─────────────lock────────────┘

A cached prefix is found page by page, by chained digests. There is no tree to split, and eviction works on single
pages, the last pages of a prefix first. The price is one hash for each page of a request. For a prompt of 32,768 tokens
that takes 0.4 ms in pages of 64, 1 ms in pages of 16, and 20 ms in pages of 1, SGLang's default. SGLang's tree takes
0.1 ms in pages of 1. Use `--page-size 16` or more.

The version of the weights is part of each page's name (`kvcache.weights`), so a change of the weights needs no flush.
Afterwards, requests find pages of the current version only. A request that runs on has KV of several versions. It
publishes its further pages under names that only it knows.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, default_radix_cache_factory
from sglang.srt.runtime_context import get_schedule

from kvcache.endpoints.watch import Watch
from kvcache.errors import InvalidParamsError, InvariantError
from kvcache.params import HashAlgorithm
from kvcache.pool.pages import PagePool
from kvcache.replica.hashing import DIGEST_BYTES, ExtraKeys, PrefixHasher
from kvcache.weights import Lineage, Weights, first_own_page
from scheduler_adapters.sglang.events import Digests, event_recorder, record_removed, record_stored
from scheduler_adapters.sglang.weights import served_weights

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

Pages: TypeAlias = NDArray[np.int32]
Tokens: TypeAlias = NDArray[np.int64]

ALGORITHM: HashAlgorithm = "sha256"  # tenants share a server, so an attacker must not be able to construct collisions
_MAX_TOKEN = (1 << 31) - 1  # digests cover int32 tokens


def build(context: TreeCacheBuildContext) -> BasePrefixCache:
    """Returns the cache for a scheduler, or SGLang's own if prefix caching is off.

    Raises:
        InvalidParamsError: (a ValueError) a setting needs a feature that this cache lacks; the message names it.
    """
    if context.disable_radix_cache:
        return default_radix_cache_factory(context)
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    refused = {
        "a sliding-window model": context.is_hybrid_swa,
        "a model with recurrent state": context.is_hybrid_ssm,
        "the hierarchical cache": context.enable_hierarchical_cache,
        "keys of token pairs (EAGLE)": params.is_eagle,
        "sessions in the cache": params.enable_session_radix_cache,
        "the schedule policy dfs-weight, which reads a tree": get_schedule().schedule_policy == "dfs-weight",
        f"pages of {allocator.page_size} tokens in the pool and {params.page_size} in the cache": (
            allocator.page_size != params.page_size
        ),
        f"the pool {type(allocator).__name__}": (
            type(allocator) not in {PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator}
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise InvalidParamsError(f"--radix-cache-backend pagewire does not support {what}")
    return PagewireCache(params)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cached prefix. SGLang uses it in place of a node of its own prefix tree.

    Attributes:
        pages: int32, in logical order.
        digests: uint64 `[pages, words]`, the digest of each page.
        generation: the generation of the index when the prefix was found. As long as the index has this generation, the
            prefix has these pages.
    """

    pages: Pages
    digests: Digests
    generation: int = -1


@dataclass(slots=True)
class _HashedIds:
    """A request's hashed tokens, its hasher, the weights of its pages, and the result of its last lookup."""

    hasher: PrefixHasher
    tokens: Tokens
    lineage: Lineage
    found: Prefix | None = None
    pages_asked: int = 0


class CacheExchange(Protocol):
    """What lends pages of the cache and fetches those of peers (`exchange.py`)."""

    def end_all(self, reason: str) -> None:
        """Ends all leases and pulls. Afterwards no page is read or written."""
        ...

    def close(self) -> None:
        """Ends everything. Safe to call twice."""
        ...


class PagewireCache(BasePrefixCache):
    """SGLang's prefix cache over our index and page states.

    Args:
        params: the parameters that SGLang gives every cache: its row pool, its allocator, the page size.

    Attributes:
        pool: the pages and their index. Each `reset` replaces it.
        watch: serves `pagewire top`; None if the cache is not watched.
        exchange: lends pages to peers and fetches theirs; None without `PAGEWIRE_EXCHANGE`.
    """

    digest_words = DIGEST_BYTES[ALGORITHM] // 8

    def __init__(self, params: CacheInitParams) -> None:
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self.root_node = Prefix(np.zeros(0, np.int32), np.zeros((0, self.digest_words), np.uint64))
        self._offsets = torch.arange(self.page_size, device=self.device)
        self._hashed: weakref.WeakKeyDictionary[Req, _HashedIds] = weakref.WeakKeyDictionary()
        self._events = self.kv_events = event_recorder(params)  # SGLang reads and removes events from this attribute
        self.watch: Watch | None = None
        self.exchange: CacheExchange | None = None
        self._served = served_weights()
        self._weights = Weights(self._served.text or None)
        self._served.tell(self)
        self.reset()
        if params.enable_metrics:
            self.init_metrics_collector()

    # ---- SGLang's interface: lookups

    def reset(self) -> None:
        """Forgets everything. SGLang clears its own pools at the same time, and no request is running."""
        if self.exchange is not None:
            self.exchange.end_all("SGLang flushes its cache")
        num_pages = self.token_to_kv_pool_allocator.size // self.page_size
        self.pool = PagePool(num_pages, self.digest_words)
        self.pool.allocate(num_pages)  # at first SGLang holds all pages
        self._published = 0
        self._taken = 0  # pages that pulls fill
        self._locks: Counter[Prefix] = Counter()
        self._hashed.clear()  # earlier results refer to the old index
        self._events.record_all_cleared()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Returns the longest cached prefix of a key, in whole pages."""
        if self.watch is not None:
            self.watch.attend()
        prefix = self._find(params.key, params.req)
        return MatchResult(
            device_prefix_len=len(prefix.pages) * self.page_size,
            last_device_node=prefix,
            last_host_node=prefix,
            best_match_node=prefix,
        )

    def touch_prefix(self, key: RadixKey) -> None:
        """Marks the cached prefix of a key as used now."""
        prefix = self._find(key, None)
        self.pool.hold(prefix.pages)
        self.pool.release(prefix.pages)

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        """Returns the token slots of a prefix's pages, as int64."""
        return self._slots(node.pages)

    # ---- SGLang's interface: publishing, locks and eviction

    def checkpoint(self, req: Req, *, up_to: int, **_: Any) -> None:
        """Publishes and locks the full pages of a request's first `up_to` tokens, which must have been computed.

        If another page with the same content was already published, the request's row is changed to name that page, and
        the request's own page is given back.
        """
        ids, protected = req.full_untruncated_fill_ids, req.kv.cache_protected_len // self.page_size
        hashed, digests = self._hashed_of(ids, up_to, req.cache_salt, req.extra_key, req)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        own = self._pages_of(row[: len(digests) * self.page_size])
        kept = self._publish(own, digests, protected)
        prefix = Prefix(kept, digests, self.pool.index.generation)
        lock = self.lock(prefix)
        duplicate = own != kept
        new = ~duplicate
        new[:protected] = False
        told = new.copy()
        told[first_own_page(hashed.lineage.segments) :] = False  # no router should look for pages that nobody finds
        record_stored(self._events, req, hashed.tokens, digests, told)
        journal = self.pool.journal
        if protected and not req.kv.cache_inserted_len:
            for tell in journal.found:
                tell(kept[:protected])
        for tell in journal.followed:
            tell(kept[new], np.concatenate((kept[:1] * 0, kept[:-1]))[new])
        if duplicate.any():
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(0, len(kept) * self.page_size)), self._slots(kept))
            self._give_back(own[duplicate])
        self.unlock(req.lock)
        req.lock, req.last_node = lock, prefix
        req.kv.cache_protected_len = len(kept) * self.page_size
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, req.kv.cache_protected_len)

    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        """Locks a prefix against eviction.

        Raises `InvariantError` if one of its pages was evicted since it was matched.
        """
        index = self.pool.index
        if node.generation != index.generation and not np.array_equal(index.find(node.digests), node.pages):
            raise InvariantError(f"a prefix of {len(node.pages)} pages is locked after some of them were evicted")
        before = self.pool.free_count
        self.pool.hold(node.pages)
        self._locks[node] += 1
        return IncLockRefResult(delta=(self.pool.free_count - before) * self.page_size)

    def dec_lock_ref(self, node: Prefix, params: DecLockRefParams | None = None) -> DecLockRefResult:  # noqa: ARG002
        """Releases one lock of a prefix. Raises `InvariantError` if the prefix is not locked."""
        if not self._locks[node]:
            raise InvariantError(f"a prefix of {len(node.pages)} pages is unlocked more often than locked")
        before = self.pool.free_count
        self.pool.release(node.pages)
        self._locks[node] -= 1
        if not self._locks[node]:
            del self._locks[node]
        return DecLockRefResult(delta=(self.pool.free_count - before) * self.page_size)

    def evict(self, params: EvictParams) -> EvictResult:
        """Gives unlocked pages back to SGLang, the least recently used pages first.

        Gives back as few pages as are needed for `num_tokens` tokens, or all unlocked pages if these hold fewer tokens.
        """
        started = time.perf_counter()
        count = min(-(-max(0, params.num_tokens) // self.page_size), self.pool.free_count)
        if not count:
            return EvictResult()
        pages = self.pool.allocate(count)
        record_removed(self._events, self.pool.index.digests_of(pages))
        self._give_back(pages)
        self._published -= count
        self.update_eviction_metrics(count * self.page_size, started)
        return EvictResult(num_tokens_evicted=count * self.page_size)

    def on_weights(self, before: str, *, changed: bool) -> None:  # noqa: ARG002  (a new name makes new pages, too)
        """Called when SGLang has other weights, or another name for them (`weights.py`).

        A request that holds KV goes on. The pages that it has published keep their names. What it publishes from now on
        gets names that no other request can find.
        """
        self._weights.switch(self._served.text or None)
        for req, known in list(self._hashed.items()):
            if req.kv.holds_kv:
                salt, keys = known.hasher.named
                lineage = self._weights.gone_on(known.lineage, req.kv.cache_protected_len // self.page_size)
                self._hashed[req] = self._new_hashed(salt, keys or (), lineage)
        self._events.record_all_cleared()

    # ---- SGLang's interface: counts

    def evictable_size(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - SGLang's returns 0 literally
        """Cached tokens that `evict` can take."""
        return self.pool.free_count * self.page_size

    def protected_size(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        """Cached tokens that are locked, and those of pages that pulls fill."""
        return self.total_size() - self.evictable_size()

    def total_size(self) -> int:
        """Cached tokens, and those of pages that pulls fill."""
        return (self._published + self._taken) * self.page_size

    def pretty_print(self) -> None:
        """Prints the counts that SGLang reports when it runs out of memory."""
        print(f"pagewire: {self.total_size()} tokens cached, {self.evictable_size()} of them evictable")  # noqa: T201

    def check(self) -> None:
        """Recounts everything. An `InvariantError` names the first discrepancy."""
        pool = self.pool
        holders = (~pool.index.published).astype(np.int64)  # SGLang holds each page that is not published
        holders[0] = 0
        for prefix, count in self._locks.items():
            holders[prefix.pages] += count
        pool.check(holders, np.zeros_like(holders))
        published = np.flatnonzero(pool.index.published)
        if len(published) != self._published:
            raise InvariantError(f"{len(published)} pages are published, but {self._published} are counted")
        free = self.free_pages()
        both = np.intersect1d(published, free)
        if both.size:
            raise InvariantError(f"page {both[0]} is cached here, but free in SGLang's allocator")

    def release_host_resources(self) -> None:
        """Called when the server ends. Closes the exchange."""
        if self.exchange is not None:
            self.exchange.close()

    # ---- called by `exchange.py` and `cached_pages.py`

    def digests_of(self, req: Req) -> Digests:
        """Returns the digests of the full pages that a waiting request may find cached: uint64 `[pages, words]`."""
        return self._waiting(req)[1]

    def cached_tokens(self, req: Req) -> int:
        """Returns how many tokens of a waiting request are cached, in full pages."""
        return len(self._found(*self._waiting(req)).pages) * self.page_size

    def _waiting(self, req: Req) -> tuple[_HashedIds, Digests]:
        ids = req.origin_input_ids + req.output_ids
        limit = max(0, len(ids) - 1)  # SGLang computes the last token in any case
        if req.return_logprob and req.logprob_start_len >= 0:
            limit = min(limit, req.logprob_start_len)
        return self._hashed_of(ids, limit, req.cache_salt, req.extra_key, req)

    def take(self, count: int) -> Pages | None:
        """Takes free pages from SGLang, at most half of those that are free or can be evicted. None for more."""
        allocator, need = self.token_to_kv_pool_allocator, count * self.page_size
        free: int = allocator.available_size()
        if count <= 0 or 2 * need > free + self.evictable_size():
            return None
        if need > free:
            self.evict(EvictParams(num_tokens=need - free))
        slots = allocator.alloc(need)
        if slots is None:
            return None
        self._taken += count
        return self._pages_of(slots)

    def adopt(self, req: Req, pages: Pages, digests: Digests, first: int) -> None:
        """Publishes taken pages, which a pull has filled.

        Args:
            req: the request that has waited for them.
            pages: the pages, from page `first` of the request on.
            digests: the digests of the request's pages up to the last of them: uint64 `[first + pages, words]`.
            first: the index of the first page.
        """
        self._taken -= len(pages)
        kept = self.pool.index.publish(pages, digests[first:])
        is_new = kept == pages
        self._published += int(is_new.sum())
        self.pool.release(pages[is_new])
        if not is_new.all():
            self._give_back(pages[~is_new])
        hashed, now = self._waiting(req)
        if len(now) >= len(digests) and np.array_equal(now[: len(digests)], digests):  # no router needs other names
            record_stored(
                self._events, req, hashed.tokens, digests, np.concatenate((np.zeros(first, np.bool_), is_new))
            )

    def give_up(self, pages: Pages) -> None:
        """Gives taken pages back to SGLang. Nothing may write to them any more."""
        self._taken -= len(pages)
        self._give_back(pages)

    # ---- called for `pagewire top`, in a thread of its own

    def free_pages(self) -> Pages:
        """Returns the pages that are free in SGLang. Called for `pagewire top`."""
        allocator: Any = self.token_to_kv_pool_allocator
        return allocator.get_all_free_pages().cpu().numpy()

    def requests(self) -> list[Req]:
        """Returns the live requests whose prefix has been looked up. Called for `pagewire top`."""
        return [req for ref in self._hashed.keyrefs() if (req := ref()) is not None]

    # ---- internals

    def _find(self, key: RadixKey, req: Req | None) -> Prefix:
        if key.is_bigram:
            raise InvalidParamsError("keys of token pairs (EAGLE) are not supported")
        return self._found(*self._hashed_of(key.token_ids, key.limit, key.cache_salt, key.extra_key, req))

    def _found(self, hashed: _HashedIds, digests: Digests) -> Prefix:
        index, found = self.pool.index, hashed.found
        if found is None or found.generation != index.generation or hashed.pages_asked != len(digests):
            pages = index.match(digests)
            found = Prefix(pages, digests[: len(pages)], index.generation) if len(pages) else self.root_node
            # SGLang looks a waiting request up again and again, so the result is kept.
            hashed.found, hashed.pages_asked = found, len(digests)
        return found

    def _hashed_of(
        self, ids: Any, limit: int | None, salt: str | None, extra_key: str | None, req: Req | None
    ) -> tuple[_HashedIds, Digests]:
        """Returns the record of a request's tokens, and the digests of its whole pages.

        `ids` is an `array('q')`; only its first `limit` entries are used.

        The digests end before the first token that is not an int32. If the request was hashed before, only its new
        tokens are hashed, unless its earlier tokens have changed. Earlier tokens change when the request is aborted.
        A request without KV begins anew, under the current weights.
        """
        tokens = np.frombuffer(ids, np.int64)[:limit] if len(ids) else np.zeros(0, np.int64)
        kept = None if req is None else self._hashed.get(req)
        known = 0 if kept is None else min(len(kept.tokens), len(tokens))
        goes_on = kept is not None and req is not None and req.kv.holds_kv
        lineage = kept.lineage if kept is not None and goes_on else self._weights.now
        if kept is None or kept.lineage != lineage or not np.array_equal(kept.tokens[:known], tokens[:known]):
            keys = () if extra_key is None else ((0, extra_key.encode()),)
            known, kept = 0, self._new_hashed(salt or None, keys, lineage)
        new = tokens[known:]
        if len(new) and not 0 <= int(new.min()) <= int(new.max()) <= _MAX_TOKEN:
            tokens = tokens[: known + int(np.argmax((new < 0) | (new > _MAX_TOKEN)))]
        if len(tokens) > len(kept.tokens):
            # a copy, because SGLang extends its array in place, which is impossible while a view exists
            kept.tokens = tokens.copy()
        if req is not None:
            self._hashed[req] = kept
        return kept, kept.hasher.digests(kept.tokens, 0, len(tokens) // self.page_size)

    def _new_hashed(self, salt: str | None, keys: ExtraKeys, lineage: Lineage) -> _HashedIds:
        hasher = PrefixHasher(ALGORITHM, self.page_size, salt, keys, lineage.segments)
        return _HashedIds(hasher, np.zeros(0, np.int64), lineage)

    def _publish(self, own: Pages, digests: Digests, protected: int) -> Pages:
        """Publishes a request's pages, except for the first `protected` ones.

        Returns, for each digest, the page that is published under it.

        SGLang no longer holds a newly published page after this call. `checkpoint` locks the page immediately
        afterwards.
        """
        kept = np.concatenate((own[:protected], self.pool.index.publish(own[protected:], digests[protected:])))
        new = kept[protected:][kept[protected:] == own[protected:]]
        self._published += len(new)
        self.pool.release(new)
        return kept

    def _give_back(self, pages: Pages) -> None:
        """Gives pages back to SGLang as free. They must have no other holder."""
        self.token_to_kv_pool_allocator.free_segment(self._slots(pages), start_pos=0)

    def _pages_of(self, slots: torch.Tensor) -> Pages:
        # One copy to the host for each checkpoint: the index is on the host, and the row may be on a GPU.
        return (slots[:: self.page_size] // self.page_size).to("cpu", torch.int32).numpy()

    def _slots(self, pages: Pages) -> torch.Tensor:
        first = torch.from_numpy(pages.astype(np.int64)).to(self.device) * self.page_size
        return (first[:, None] + self._offsets).reshape(-1)
