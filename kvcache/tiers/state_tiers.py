"""Recurrent states below the device. Like pages, cached states are also copied to host memory, files and objects.

A lower tier stores a state under the digest of the last page that it covers. A state is large, and a request needs only
one. So a state on the host is copied directly into the request's state page when the request reserves its pages. The
loop does not wait for this copy, because the device runs its later work after the copy.

Host memory is divided between pages and states once, at the start. A state is as large as hundreds of pages, so slots
of one common size would waste memory. Slots of different sizes cannot share memory either, because making room would
mean to move slots, and their content may just be written to files. Files are divided in the same way. A store is asked
for the newest state of a prompt: from its last page backwards, a few pages at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvcache.copies import PageMover
from kvcache.errors import PoolTooSmallError
from kvcache.layout import PageLayout, replica_fingerprint
from kvcache.params import KVCacheParams
from kvcache.pool.index import Pages
from kvcache.states.state_memory import kind_offsets, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.tiers.host_tier import HostTier, ReplicaTier
from kvcache.tiers.tiers import Kept, TierRoom, Tiers, make_tiers

_GB = 2**30
_LEAST_SLOTS = 2  # two slots, because a state may be read from a file into one slot while the other slot is held
_SHARE = 0.025  # the share of the loop thread's time that copies of states may take


class StateTier(ReplicaTier):
    """The host tier of recurrent states, as one replica uses it.

    When a state is loaded, its copy begins at once, and is ordered with the other work of the device.
    """

    def _keep(self, pages: Pages) -> None:
        self.pool.hold(pages)

    def _let_go(self, pages: Pages) -> None:
        self.pool.release(pages)


def divide_tiers(params: KVCacheParams, shards: int) -> TierRoom:
    """Divide host memory and files between pages and states. States get the share in `params`, pages the rest.

    `shards` is the number of shards of a replica. Raises `PoolTooSmallError` if fewer than two states fit.
    """
    space, most = (int((size or 0) * _GB) for size in (params.host_kvcache_swap_space_gb, params.file_tier_max_gb))
    state_bytes = sum(kind_offsets(kinds)[-1] for kinds in state_layouts(params.states, shards))
    if not state_bytes or not params.enable_kvcache_swapping_to_host:
        return TierRoom(space, most, 0, 0)
    share = params.tier_state_share
    slots = int(space * share) // state_bytes
    if slots < _LEAST_SLOTS:
        raise PoolTooSmallError(
            f"host_kvcache_swap_space_gb is {params.host_kvcache_swap_space_gb}, {space} bytes, and "
            f"tier_state_share is {share}: the share must hold {_LEAST_SLOTS} states ({_LEAST_SLOTS * state_bytes} "
            "bytes)"
        )
    file_bytes = int(most * share)
    return TierRoom(space - slots * state_bytes, most - file_bytes, slots, file_bytes)


def state_tiers(
    params: KVCacheParams, room: TierRoom, pages: Sequence[PageLayout], states: Sequence[StatePages]
) -> Tiers | None:
    """Returns the tiers below the states of all replicas, connected to these states.

    Returns None if `params` ask for no tier. `pages` has the layouts of the token pages. The digests of token pages
    name the states.
    """
    if not room.state_slots:
        return None
    layouts = states[0].layouts
    offsets = [kind_offsets(kinds) for kinds in layouts]
    kept = Kept(
        "states",
        [at[-1] for at in offsets],
        room.state_slots,
        room.state_file_bytes,
        replica_fingerprint([*pages, *chain.from_iterable(kinds.values() for kinds in layouts)]),
        objects_named=("objects of states",),
        apart=True,
        share=_SHARE,
    )
    on_gpu = any(one.device.type != "cpu" for one in chain.from_iterable(states[0].blocks))
    tiers = make_tiers(params, kept, pages[0].page_size, pinned=on_gpu)
    for one in states:
        one.below = StateTier(tiers.host, one.pool, state_mover(one, tiers.host))
        tiers.replicas.append(one.below)
    return tiers


def state_mover(states: StatePages, host: HostTier) -> PageMover:
    """Returns the object that copies states between state pages and slots of a host tier.

    A slot has a part for each kind of state.
    """
    parts = [
        (blocks, memory[:, first : first + layout.page_bytes])
        for kinds, layouts, memory in zip(states.blocks, states.layouts, host.memory, strict=True)
        for blocks, layout, first in zip(kinds, layouts.values(), kind_offsets(layouts), strict=False)
    ]
    return PageMover(parts, None)
