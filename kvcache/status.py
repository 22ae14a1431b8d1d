"""How full the cache is, what it did, and where a request that waits would be best off."""

from __future__ import annotations

from kvcache import arguments
from kvcache.metrics import KVCacheMetrics
from kvcache.replica.context import Context, check_context
from kvcache.replicas import Replicas
from kvcache.types import Admission


class CacheStatus:
    """The figures of a manager, over all its replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._metrics_before = KVCacheMetrics()

    @property
    def total_num_pages(self) -> int:
        """Pages of all replicas; the null page of each is not counted."""
        return sum(replica.pool.num_pages for replica in self._replicas.each)

    @property
    def num_free_blocks(self) -> int:
        """Pages of all replicas that a reservation can take; cached pages that nobody holds count."""
        return sum(replica.pool.free_count for replica in self._replicas.each)

    @property
    def num_held_blocks(self) -> int:
        """Pages of all replicas that somebody holds or a transfer writes; idle cached ones are not counted."""
        return self.total_num_pages - self.num_free_blocks

    @property
    def num_leased_blocks(self) -> int:
        """Pages of all replicas that leases of released requests hold. Those of claimed ones are their rows' still."""
        return sum(replica.leases.num_pages for replica in self._replicas.each)

    @property
    def free_blocks_pct(self) -> float:
        """Free share of the pages, 0.0 to 1.0, mean over the replicas."""
        replicas = self._replicas.each
        return sum(replica.pool.free_count / replica.pool.num_pages for replica in replicas) / len(replicas)

    @property
    def used_blocks_pct(self) -> float:
        """Used share of the pages, 0.0 to 1.0, mean over the replicas."""
        return 1.0 - self.free_blocks_pct

    @property
    def total_num_host_pages(self) -> int:
        """Pages of the host tier, which all replicas share: 0 where there is none."""
        tiers = self._replicas.tiers
        return 0 if tiers is None else tiers.host.pool.num_pages

    @property
    def host_committed_block_pct(self) -> float:
        """Share of the host pages that can be found, 0.0 to 1.0: 0.0 where there is no host tier."""
        tiers = self._replicas.tiers
        return 0.0 if tiers is None else float(tiers.host.pool.index.published[1:].mean())

    @property
    def hint_share(self) -> float:
        """Of the idle pages, how many follow retention hints now, 0.0 to 1.0, mean over the replicas."""
        retainers = [replica.retainer for replica in self._replicas.each]
        return sum(retainer.share for retainer in retainers if retainer is not None) / len(retainers)

    def admission(self, context: Context, num_steps: int = 1) -> Admission:
        """Where a request that is not claimed yet is best claimed, and whether it could have a row and pages now.

        Raises:
            PromptTooLongError, SequenceTooLongError: (RuntimeErrors) as `maybe_reserve`: it fits on no replica, ever.
        """
        num_steps = arguments.steps(num_steps)
        check_context(context, "admission")
        self._look_for_reset()
        return self._replicas.admission(context, num_steps)

    def prefetch(self, context: Context) -> bool:
        """Begin to bring the request's pages from files to the host tier; whether some are on their way.

        Worth a call when a request is queued, and while it waits: `maybe_reserve` takes what has come by then, waits a
        tenth of a second at most, once, for what has not, and takes what comes later when it is called for a later
        chunk. Does nothing without a file tier.
        """
        check_context(context, "prefetch")
        self._look_for_reset()
        return self._replicas.prefetch(context)

    def flush_tiers(self) -> None:
        """Copy all published pages to the host tier, write them to files, and wait for it.

        Nobody has to: pages are copied beside the steps, and before they are evicted. It is for a process that is about
        to stop, or to be measured.
        """
        if self._replicas.tiers is not None:
            self._replicas.tiers.flush()

    def _look_for_reset(self) -> None:
        """What comes before a lookup."""

    @property
    def metrics(self) -> KVCacheMetrics:
        """What was done since the manager was made or `reset_metrics`, over all replicas."""
        return self._replicas.metrics - self._metrics_before

    def reset_metrics(self) -> None:
        """Start counting from zero."""
        self._metrics_before = self._replicas.metrics
