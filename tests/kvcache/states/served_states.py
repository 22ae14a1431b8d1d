"""A manager with recurrent states and tiers, driven by a serving loop. KV and states are compared whenever a request
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.params import StateShape
from kvcache.replica.hashing import PrefixHasher
from kvcache.states.state_memory import kind_offsets, state_layouts
from kvcache.tiers.tiers import Tiers
from tests.kvcache.build import as_long_as
from tests.kvcache.kv import KVTokens, Run, kv_of
from tests.kvcache.served import SIZE, Served

SHAPE = StateShape(2, 5, 1, 1, 1, 2, torch.int64, torch.int64)  # A state takes as much memory as two or three pages.
STATE_BYTES = sum(kind_offsets(kinds)[-1] for kinds in state_layouts(SHAPE, 1))


class ServedStates(Served):
    """A manager with four rows on each replica, and with this many pages and states on each tier.

    With `slabs`, pages and states share one memory.
    """

    def __init__(
        self,
        pages: int = 80,
        host_slots: int = 120,
        host_states: int = 12,
        *,
        slabs: bool = True,
        dp: int = 1,
        every: int = 0,
        checks: bool = True,
        params: dict[str, Any] | None = None,
        layers: int = 1,
    ) -> None:
        bare = KVCacheParams(torch.int64, 1, 2)
        page, states = SIZE * bare.bytes_per_token(1), host_states * STATE_BYTES
        told: dict[str, Any] = {
            "states": SHAPE,
            "page_size": SIZE,
            "enable_prefix_caching": True,
            "enable_kvcache_swapping_to_host": True,
            "host_kvcache_swap_space_gb": (host_slots * page + states + 0.5) / 2**30,
            "tier_state_share": (states + 0.5) / (host_slots * page + states),
            "state_every_pages": every,
            **({} if slabs else {"state_copies": 4}),
            **(params or {}),
        }
        memory = pages * page + (0 if slabs else 9 * STATE_BYTES)
        made = KVCacheParams(torch.int64, 1, 2, n_devices=dp, data_parallel_degree=dp, **told)
        self.manager = PagedKVCacheManager(
            made,
            4 * dp,
            256,
            layers,
            ["cpu"] * dp,
            available_cache_memory=memory * dp,
            enable_runtime_checks=checks,
        )
        self.kv = KVTokens(self.manager)
        self.names = self.compared = 0

    @property
    def state_tiers(self) -> Tiers:
        tiers = self.manager._replicas.state_tiers
        assert tiers is not None
        return tiers

    def run(self, *contexts: TextContext) -> None:
        inputs = self.manager.fetch(contexts)
        runs = [Run.of(self.manager, context) for context in contexts]
        self.kv.run(runs, inputs)
        for run in runs:
            self._run_state(run)
        for context in contexts:
            context.update(1)
        self.manager.step(contexts)

    def _run_state(self, run: Run) -> None:
        """Compares the state before the run, and writes the state after it."""
        pages, values = self.manager.states[run.replica], kv_of(run.tokens, run.named, "state")
        page = pages.pages_at([run.request_id], [run.start])
        for tensor in pages.blocks[0]:
            wanted = int(values[run.start - 1]) if run.start else 0
            assert (tensor[page] == wanted).all(), f"{run.request_id}: another state after {run.start} tokens"
            tensor[page] = int(values[run.active - 1])
        self.compared += run.start > 0
        pages.advance(page, [run.active])

    def serve(
        self,
        tokens: Iterable[int],
        salt: str | None = None,
        replica: int = 0,
        keys: Any = (),
        chunk: int = 256,
        new: int = 1,
    ) -> int:
        """Runs one request in chunks. It generates `new` tokens, each of which is 1. Returns the number of tokens that
        it found cached at first.
        """
        context = self.claim(tokens, salt, replica, keys)
        cached, length = -1, context.end_idx
        for _ in as_long_as(lambda: context.end_idx < length + new):
            context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + chunk))
            assert self.manager.maybe_reserve(context)
            cached = context.start_idx if cached < 0 else cached
            self.run(context)
        self.manager.release(context.request_id)
        return cached

    def hasher(self, context: TextContext) -> PrefixHasher:
        return self.manager._replicas.each[0].hasher(None, context)
