"""Recurrent states below the device: copies that stay are kept in host memory and in files, as pages are.

A state lies below under the digest of the last page of its tokens. It is large, and is asked for one at a time: so it
comes from the host right into the state page of the request that goes on from it, when this is reserved. Of a request
nobody waits for a copy beside the device: what the device is told to do from then on begins after it.

The memory of the host tier is divided beforehand: a state takes as much as hundreds of pages, so slots of one size for
both would waste it, and pages that are being written to files cannot be moved to make room for one. Files are divided
alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.copies import PageMover
from kvcache.errors import PoolTooSmallError
from kvcache.layout import PageLayout, replica_fingerprint
from kvcache.metrics import KVCacheMetrics
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.pages_below import NO_SLOTS
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_slabs import StateLayouts, kind_offsets
from kvcache.tiers.file_tier import FileTier
from kvcache.tiers.host_tier import HostLoad, HostTier, ReplicaTier
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_folder import namespace_of
from kvcache.tiers.tiers import Tiers, file_tier_of

_GB = 2**30
_LEAST_SLOTS = 2  # one is read from a file while another is held
_SHARE = 0.025  # of the time that passes, for copies that take the loop's own


class StatePlaces(NamedTuple):
    """The state pages of one replica, and what tells who holds them.

    `blocks`: of each shard and kind, `[pages + 1, ...]`. `let_go` gives up one hold of a page.
    """

    pool: PagePool
    blocks: Sequence[Sequence[torch.Tensor]]
    let_go: Callable[[int], None]


class StateTier(ReplicaTier):
    """One replica's side of the host tier of states: which are to be copied there, and which come back."""

    def __init__(self, host: HostTier, places: StatePlaces, offsets: Sequence[Sequence[int]]) -> None:
        movers = [
            PageMover(blocks, memory[:, first:last], None)
            for kinds, memory, at in zip(places.blocks, host.memory, offsets, strict=True)
            for blocks, (first, last) in zip(kinds, _bounds(kinds, at), strict=True)
        ]
        super().__init__(host, places.pool, movers)
        self._let_go = places.let_go

    def in_host(self, digests: Digests) -> NDArray[np.bool_]:
        """Which of these states the host has."""
        return self.host.pool.index.find(digests) != NO_PAGE

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Have the last of these states that there is in files brought to the host, which has none; is it on its way?

        Where it cannot be read the one before it, and so on. `wait`: for a while.
        """
        for lower in self.lower:
            there = lower.has_of(digests[None], np.ones((1, len(digests)), np.bool_), perhaps=False)[0]
            for at in np.flatnonzero(there)[::-1].tolist():
                one = digests[at : at + 1]
                lower.promote(one, 0, wait=wait)
                if lower.coming(one, 0):  # takes up what has come
                    return True
                if self.in_host(one)[0]:
                    return False
        return False

    def used(self, digest: Digests) -> None:
        """A request goes on from this state, wherever it lies."""
        self.waiting.append((NO_SLOTS, digest))
        self._pass_uses()

    def fill(self, page: int, digest: Digests) -> bool:
        """Bring the state of this digest into a held page: whatever reads it from now on reads that. False: no such.

        The page has one more holder until the copy is over.
        """
        slots = self.host.pool.index.find(digest)
        if slots[0] == NO_PAGE:
            return False
        self.host.pool.hold(slots)
        load = HostLoad(slots, np.array([page], np.int32))
        self.pool.hold(load.pages)
        for mark in self._begin(load):
            mark.order()
        self._left.append(load)
        self.poll()
        return True

    def _end(self, load: HostLoad) -> None:
        self._let_go(int(load.pages[0]))
        self.host.pool.release(load.slots)


class StateTiers(Tiers):
    """The host tier of a manager's states, and files below it."""

    def __init__(self, host: HostTier, replicas: Sequence[StateTier], files: FileTier | None) -> None:
        super().__init__(host, replicas, files)
        self.each = replicas

    def tick(self) -> None:
        """As the base; what has come by now is taken up."""
        for tier in self.replicas:
            tier.poll()
        super().tick()

    @property
    def metrics(self) -> KVCacheMetrics:
        pages = super().metrics
        return KVCacheMetrics(
            h2d_states_copied=pages.h2d_blocks_copied,
            d2h_states_copied=pages.d2h_blocks_copied,
            file_states_written=pages.file_blocks_written,
            file_states_read=pages.file_blocks_read,
            file_states_refused=pages.file_blocks_refused,
            files_refused=pages.files_refused,
        )


class Divided(NamedTuple):
    """What of the tiers' memory is for pages, in the params, and what for states."""

    pages: KVCacheParams
    slots: int
    file_bytes: int


def divide_tiers(params: KVCacheParams, shards: int) -> Divided:
    """Divide host memory and files between pages and states on so many shards; pages have what no state fills.

    Raises `PoolTooSmallError` for room for fewer than two states.
    """
    if params.states is None or not params.enable_kvcache_swapping_to_host:
        return Divided(params, 0, 0)
    state_bytes = sum(kind_offsets(kinds)[-1] for kinds in state_layouts(params.states, shards))
    share, space = params.tier_state_share, int((params.host_kvcache_swap_space_gb or 0) * _GB)
    slots = int(space * share) // state_bytes
    if slots < _LEAST_SLOTS:
        raise PoolTooSmallError(
            f"host_kvcache_swap_space_gb is {params.host_kvcache_swap_space_gb}, {space} bytes, of which "
            f"tier_state_share is {share}: {_LEAST_SLOTS} states take {_LEAST_SLOTS * state_bytes}"
        )
    left = (space - slots * state_bytes) / _GB
    most = int((params.file_tier_max_gb or 0) * _GB)
    file_bytes = int(most * share)
    files = None if params.file_tier_max_gb is None else (most - file_bytes) / _GB
    return Divided(replace(params, host_kvcache_swap_space_gb=left, file_tier_max_gb=files), slots, file_bytes)


def make_state_tiers(
    params: KVCacheParams,
    divided: Divided,
    pages: Sequence[PageLayout],
    layouts: StateLayouts,
    replicas: Sequence[StatePlaces],
) -> StateTiers | None:
    """The tiers of the states of these `replicas`, of the `layouts` of each shard; None where the params ask for none.

    `pages`: the layouts of the pages of tokens, whose digests name the states.
    """
    if not divided.slots:
        return None
    offsets = [kind_offsets(kinds) for kinds in layouts]
    sizes = [at[-1] for at in offsets]
    on_gpu = any(blocks.device.type != "cpu" for blocks in chain.from_iterable(replicas[0].blocks))
    words = DIGEST_BYTES[params.hash_algorithm] // 8
    host = HostTier(sizes, divided.slots, words, pinned=on_gpu)
    of_states = chain.from_iterable(kinds.values() for kinds in layouts)
    fingerprint = replica_fingerprint([*pages, *of_states])
    namespace = namespace_of(params.hash_algorithm, fingerprint, params.file_tier_key)
    layout = FileFormat(namespace, sum(sizes), DIGEST_BYTES[params.hash_algorithm])
    files = file_tier_of(params, layout, divided.file_bytes, host)
    tiers = StateTiers(host, [StateTier(host, places, offsets) for places in replicas], files)
    tiers.share = _SHARE
    return tiers


def _bounds(kinds: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Where each kind begins and ends in a slot."""
    sizes = [blocks[0].numel() * blocks.element_size() for blocks in kinds]
    return [(first, first + size) for (first, _), size in zip(pairwise(offsets), sizes, strict=True)]
