"""The random moves with states in slabs, whose requests give hints and have quotas.

What goes first is for others to say (`HintedIdle`, `test_state_hints`): here every answer is right whatever goes, and
what a tenant has above its quota goes before what nobody has too much of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache import PagedKVCacheManager, RangeRetention, Retention, TextContext
from kvcache.pool.hinted_order import HintedOrder
from tests.kvcache.hinted_idle import hinted_order, trust
from tests.kvcache.moves import Chooser
from tests.kvcache.states.slab_moves import SlabMoves


class HintedSlabMoves(SlabMoves):
    """A manager of one budget with hints and quotas, beside its model."""

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.now, self.quota = 0.0, chooser.pick((1.0, 0.1, 0.3))
        super().__init__(chooser, params)
        share = chooser.pick((0.02, 0.5, 0.95))
        for replica in self.manager._replicas.each if self.caching else ():
            replica.hints._start()
            trust(replica.hints, share)
        for order in self.orders:
            order._clock = lambda: self.now

    @property
    def orders(self) -> list[HintedOrder]:
        """Those of pages and of copies."""
        pools = [replica.pool for replica in self.manager._replicas.each]
        pools += [states._pool for states in self.manager.states]
        return [order for pool in pools if (order := hinted_order(pool)) is not None]

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:
        return super().build(dp, slots, {**(params or {}), "tenant_quota": self.quota})

    def salt(self) -> str | None:
        return self.choose.pick((None, None, "other", "third"))

    def move(self) -> None:
        self.now += self.choose.pick((0.0, 0.0, 1.0, 100.0))
        if self.live and not self.choose.integer(0, 2):
            self.live[self.choose.pick(sorted(self.live))].retention = self.retention()
            self.seen["hint"] += 1
        super().move()
        for replica, states in zip(self.manager._replicas.each, self.manager.states, strict=True):
            if (quotas := replica.hints._quotas) is not None:
                self.seen["a tenant's copies"] += int(sum(quotas._slabs.values()))
                assert sum(quotas._slabs.values()) <= states.num_idle
                self.seen["too much"] += len(quotas._over)
            kept = np.flatnonzero(states.index.published)
            if (order := hinted_order(states._pool)) is not None:
                self.seen["a hinted copy"] += int(np.count_nonzero(order.codes[kept] != 2))

    def retention(self) -> Retention:
        choose = self.choose
        said = [
            (choose.pick((None, True, False)), choose.pick((0, 50, 100)), choose.pick((None, None, 60.0)))
            for _ in range(2)
        ]
        end = choose.integer(1, 40)
        return Retention(*said[0], ranges=(RangeRetention(0, end, *said[1]),) if choose.integer(0, 1) else ())

    def say_last(self, context: TextContext) -> None:
        """Another salt that no call has seen makes no copy another tenant's."""
        if self.choose.integer(0, 7) == 0:
            context.cache_salt = "late"
