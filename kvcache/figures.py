"""`PoolFigures`: properties of a manager that say how much of its memory is in use."""

from __future__ import annotations

import torch

from kvcache.replicas import Replicas
from kvcache.states.state_pages import StatePages
from kvcache.steps_in_flight import StepInFlight


class PoolFigures:
    """Figures over all replicas. None of these properties changes anything."""

    _replicas: Replicas
    num_replicas: int

    @property
    def states(self) -> tuple[StatePages, ...]:
        """The states of each replica's recurrent layers, with `hits` and `evictions` of copies; empty without any."""
        return tuple(replica.states for replica in self._replicas.hybrid)

    @property
    def further_groups(self) -> list[tuple[StatePages, ...]]:
        """The further page pools of each replica, besides the one for tokens: one for states, or none."""
        return [(pages,) for pages in self.states] or [()] * self.num_replicas

    @property
    def slab_pages(self) -> int:
        """Consecutive pages that each request takes for its state (`kvcache.pool.slabs`); 0: none."""
        return self._replicas.each[0].pool.beside

    @property
    def device_tensors(self) -> list[list[torch.Tensor]]:
        """The page tensors, `[replica][shard]`, of `pages + 1` pages each, for a transfer engine to register."""
        return [place.memory.blocks for place in self._replicas.placed]

    @property
    def total_num_pages(self) -> int:
        """Pages of all replicas, without the null page of each."""
        return sum(replica.pool.num_pages for replica in self._replicas.each)

    @property
    def num_free_blocks(self) -> int:
        """Pages of all replicas that a reservation can take, including cached pages without a holder."""
        return sum(replica.pool.free_count for replica in self._replicas.each)

    @property
    def num_held_blocks(self) -> int:
        """Pages of all replicas with a holder, or that a transfer or a step in flight writes, including states."""
        return self.total_num_pages - self.num_free_blocks + sum(states.num_held for states in self.states)

    @property
    def num_leased_blocks(self) -> int:
        """Pages of all replicas that leases of released requests hold. Those of claimed requests do not count."""
        return sum(replica.leases.num_pages for replica in self._replicas.each)

    @property
    def steps_in_flight(self) -> tuple[StepInFlight, ...]:
        """The steps that were fetched ahead and have not ended, oldest first."""
        return tuple(self._replicas.steps.open)

    @property
    def free_blocks_pct(self) -> float:
        """The free share of the pages, 0.0 to 1.0, as a mean over the replicas."""
        return sum(each.pool.free_count / each.pool.num_pages for each in self._replicas.each) / self.num_replicas

    @property
    def used_blocks_pct(self) -> float:
        """The used share of the pages, 0.0 to 1.0, as a mean over the replicas."""
        return 1.0 - self.free_blocks_pct

    @property
    def total_num_host_pages(self) -> int:
        """Pages of the host tier, which all replicas share; 0 if there is none."""
        return 0 if self._replicas.tiers is None else self._replicas.tiers.host.pool.num_pages

    @property
    def host_committed_block_pct(self) -> float:
        """The share of the host pages that hold a cached page, 0.0 to 1.0; 0.0 if there is no host tier."""
        tiers = self._replicas.tiers
        return 0.0 if tiers is None else float(tiers.host.pool.index.published[1:].mean())

    @property
    def hint_share(self) -> float:
        """The share of idle pages that follow retention hints at present, 0.0 to 1.0, as a mean over the replicas."""
        return sum(replica.hints.share for replica in self._replicas.each) / self.num_replicas
