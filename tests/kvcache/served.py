"""A manager with tiers, driven as a serving loop would drive it. KV is compared whenever a request reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import TextContext
from kvcache.tiers.tiers import Tiers
from tests.kvcache.build import manager_of
from tests.kvcache.kv import KVTokens

SIZE = 4
# In seconds. A busy machine may delay a thread by many seconds. The limit is below 60 s, which a call to a store may
# take in most tests, so a request that waits for a store that hangs makes its test fail.
LONGEST_WAIT_S = 50.0
Keys = tuple[tuple[int, bytes], ...]


def until(condition: Callable[[], object], seconds: float = LONGEST_WAIT_S) -> None:
    """Waits until a thread has made the condition true. Only a test that fails waits as long as `seconds`."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"it was not so after {seconds:g} s"
        time.sleep(0.001)


class Served:
    """A manager with a host tier. KV is compared whenever a request reads it."""

    def __init__(self, pages: int, host_slots: int, *, dtype: torch.dtype = torch.int64, **options: Any) -> None:
        self.manager = manager_of(pages, page_size=SIZE, dtype=dtype, host_slots=host_slots, **options)
        self.kv = KVTokens(self.manager)
        self.names = 0

    @property
    def tiers(self) -> Tiers:
        assert self.manager._replicas.tiers is not None
        return self.manager._replicas.tiers

    def claim(self, tokens: Iterable[int], salt: str | None = None, replica: int = 0, keys: Keys = ()) -> TextContext:
        self.names += 1
        context = TextContext([*tokens], 256, f"r{self.names}", cache_salt=salt, extra_keys=keys)
        self.manager.external_claim(context.request_id, replica)
        return context

    def run(self, *contexts: TextContext) -> None:
        self.kv.run_contexts(contexts, self.manager.fetch(contexts))
        for context in contexts:
            context.update(1)
        self.manager.step(contexts)

    def serve(
        self, tokens: Iterable[int], salt: str | None = None, replica: int = 0, keys: Keys = (), chunk: int = 256
    ) -> int:
        """Runs one request in chunks, from its claim to its release. Returns the number of tokens that it found
        cached.
        """
        context = self.claim(tokens, salt, replica, keys)
        assert self.manager.maybe_reserve(context)
        cached, length = context.start_idx, context.end_idx
        while context.end_idx == length:
            context.set_token_indices(active_idx=min(length, context.start_idx + chunk))
            self.run(context)
        self.manager.release(context.request_id)
        return cached

    def waiting(self, tokens: Iterable[int], salt: str | None = None) -> TextContext:
        """Returns the context of a request that no replica has claimed."""
        self.names += 1
        return TextContext([*tokens], 256, f"r{self.names}", cache_salt=salt)

    def fetch(self, tokens: Iterable[int], salt: str | None = None, seconds: float = LONGEST_WAIT_S) -> None:
        """Waits for a prompt's pages, as a scheduler does before it claims a request."""
        context = self.waiting(tokens, salt)
        until(lambda: not self.manager.prefetch(context), seconds)

    def again(self, tokens: Iterable[int], salt: str | None = None, **options: Any) -> int:
        """Calls `fetch` for the prompt, then `serve`."""
        self.fetch(tokens, salt)
        return self.serve(tokens, salt, **options)

    def digests(self, tokens: Iterable[int]) -> NDArray[np.uint64]:
        """Returns the digests of the full pages of a prompt."""
        context = TextContext([*tokens], 256)
        replica = self.manager._replicas.each[0]
        return replica.hasher(None, context).digests(context.tokens, 0, context.end_idx // SIZE)

    def fill(self, pages: int) -> None:
        """Serves a new prompt of this many pages. Other pages are evicted to make room."""
        self.names += 1
        self.serve([1000 + self.names, *range(pages * SIZE - 2)])
