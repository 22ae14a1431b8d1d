"""Counters of the manager, read as one frozen value."""

from __future__ import annotations

import msgspec


class KVCacheMetrics(msgspec.Struct, frozen=True):
    """What a manager did since it was made or `reset_metrics`, over all replicas.

    Attributes:
        input_tokens: prompt tokens that ran, each counted once: not decode steps, not refused reservations.
        cache_tokens: prompt tokens that did not have to run, as their pages were found.
        h2d_blocks_copied: pages copied from the host tier.
        d2h_blocks_copied: pages copied to the host tier.
        evictions: published pages that were given away.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    h2d_blocks_copied: int = 0
    d2h_blocks_copied: int = 0
    evictions: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in all."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that were found, 0.0 to 1.0."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        return KVCacheMetrics(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __sub__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        return KVCacheMetrics(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))
