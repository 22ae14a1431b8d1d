"""`StateObjects`: recurrent states in an object store, each an object of its own.

It is named by the digest of the last page of its tokens, in a namespace that no pages are in, and written as soon as
the host has it.
"""

from __future__ import annotations

from kvcache.layer_groups import layer_tables
from kvcache.layout import PageLayout
from kvcache.params import KVCacheParams
from kvcache.pool.index import Digests
from kvcache.replica.resume import Asked
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_objects import ObjectFormat
from kvcache.tiers.table_objects import TableObjects
from kvcache.tiers.tiers import compute_page_s


class StateObjects(TableObjects):
    """A `TableObjects` of one table, whose pages are states: of a prompt one is read, others than pages of it."""

    def offer(self, digests: Digests) -> None:
        """The host tier has these states now: they are written, if they are still there when their turn comes."""
        self.used(digests)

    def _over(self, pages: Asked) -> Asked:
        return pages  # however long the prompt is: it is read one at a time


def make_state_objects(
    params: KVCacheParams, layout: FileFormat, host: HostTier, page: PageLayout
) -> StateObjects | None:
    """Objects of states of this `layout`; None where the params ask for none. `page`: of tokens, on a shard."""
    if params.object_tier_io is None:
        return None
    states, tables, seconds = ObjectFormat(layout, 1), layer_tables((), 1), compute_page_s(params, page)
    return StateObjects(states, host, params.object_tier_io, params.object_tier_timeout_s, seconds, tables)
