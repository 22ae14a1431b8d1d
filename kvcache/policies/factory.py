"""Chooses the eviction order and the policy that the parameters ask for. The only door to the policies."""

from kvcache.eviction_order import EvictionOrder
from kvcache.params import KVCacheParams
from kvcache.policies.hints import ReplicaHints
from kvcache.policies.over_order import CheckedOrder
from kvcache.replica.replica import Replica


def order_of(params: KVCacheParams, num_pages: int) -> EvictionOrder | None:
    """Returns the caller's own order for a pool of `num_pages` pages, checked. None means the pool's own, plain LRU."""
    make = params.eviction_order
    return None if make is None else CheckedOrder(num_pages, make(num_pages))


def set_policy(replica: Replica, params: KVCacheParams) -> None:
    """Give a new replica the policy for hints and quotas. Without prefix caching there are no idle pages to order."""
    if params.enable_prefix_caching:
        replica.hints = ReplicaHints(
            replica.tables, replica.hasher, replica.published_digests, replica.salt, params, replica.kept.pools
        )
