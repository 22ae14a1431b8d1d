"""Recurrent states below the device: kept copies also go to host memory, files and objects, as pages do.

A lower tier stores a state under the digest of the last page of its tokens. A state is large, and a request needs only
one. So it is copied from the host directly into the request's state page when that is reserved. The loop does not wait
for this copy: the device starts later work after it.

The memory of the host tier is divided beforehand. A state is as large as hundreds of pages, so slots of one size would
waste memory, and pages that are being written to files cannot be moved to make room. Files are divided in the same way.
A store is asked for the newest state: from the last page backwards, a few pages at a time.
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
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.resume import NO_SLOTS, Asked
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_room import StateLayouts, kind_offsets
from kvcache.tiers.host_tier import HostLoad, HostTier, ReplicaTier
from kvcache.tiers.object_tier import ObjectTier
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_folder import namespace_of
from kvcache.tiers.page_objects import ObjectFormat
from kvcache.tiers.tiers import Tiers, compute_page_s, file_tier_of

_GB = 2**30
_LEAST_SLOTS = 2  # one is read from a file while another is held
_LOOKED_AT = 128  # of a prompt's pages, at once, for the newest state after one of them
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

    def ask_newest(self, digests: Digests) -> bool:
        """Have asked for the last of these states, of which nothing is known; whether an answer is on its way.

        Further back only where there is none.
        """
        before = self._answers
        for end in range(len(digests), 0, -_LOOKED_AT):
            some = digests[None, max(0, end - _LOOKED_AT) : end]
            there = self.has(some, np.ones(some.shape[:2], np.bool_))
            if self._ask(some, there):
                return True
            if there.any():
                break
        return self._answers != before  # an answer that has come just now may lead to more

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Have the last of these states that there is brought to the host, which has none; is it on its way?

        Where it cannot be read the one before it, and so on. `wait`: for a while, and not for answers.
        """
        before = self._answers
        for end in range(len(digests), 0, -_LOOKED_AT):
            first = max(0, end - _LOOKED_AT)
            some = digests[None, first:end]
            there = self.has(some, np.ones(some.shape[:2], np.bool_))
            if self._ask(some, there) and not wait:
                return True
            for at in np.flatnonzero(there[0])[::-1].tolist():
                one = np.zeros_like(there)
                one[0, at] = True
                if self.to_host(some, one, first + at + 1, wait=wait):
                    return True
                if self.in_host(some[0, at : at + 1])[0]:
                    return False
        return self._answers != before  # an answer that has come just now may lead to more

    @property
    def _answers(self) -> int:
        """Counts what is known anew of what lies below."""
        return sum(lower.generation for lower in self.lower)

    def _ask(self, digests: Digests, there: Asked) -> bool:
        """Have asked for those that are later than what is `there`; whether an answer is on its way."""
        later = np.ones_like(there)
        later[:, : there.shape[1] - int(there[0, ::-1].argmax()) if there.any() else 0] = False
        return self.ask(digests, later)

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

    def bring_copy(self, page: int, digest: Digests) -> None:
        """Bring the state of this digest, which the host has, into a held page, where it is found once it is there."""
        slots = self.host.pool.index.find(digest)
        self.host.pool.hold(slots)
        load = HostLoad(slots, np.array([page], np.int32), digests=digest)
        self._begin(load)
        self._left.append(load)
        self.poll()

    def _end(self, load: HostLoad) -> None:
        self._let_go(int(load.pages[0]))
        self.host.pool.release(load.slots)


class Divided(NamedTuple):
    """The division of the tiers' memory: the params for pages, and the part for states."""

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
) -> tuple[Tiers, list[StateTier]] | None:
    """The tiers of the states of these `replicas`, of the `layouts` of each shard; None where the params ask for none.

    And each replica's side of them. `pages`: the layouts of the pages of tokens, whose digests name the states.
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
    objects_name = namespace_of(params.hash_algorithm, fingerprint, params.file_tier_key, "objects of states")
    files = file_tier_of(params, layout, divided.file_bytes, host)
    objects = None
    if params.object_tier_io is not None:  # each state is an object of its own
        alone, seconds = ObjectFormat(replace(layout, namespace=objects_name), 1), compute_page_s(params, pages[0])
        io, timeout = params.object_tier_io, params.object_tier_timeout_s
        objects = ObjectTier(alone, host, io, timeout, seconds, apart=True)
    sides = [StateTier(host, places, offsets) for places in replicas]
    return Tiers(host, sides, files, objects, share=_SHARE, counted_as="states"), sides


def _bounds(kinds: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Where each kind begins and ends in a slot."""
    sizes = [blocks[0].numel() * blocks.element_size() for blocks in kinds]
    return [(first, first + size) for (first, _), size in zip(pairwise(offsets), sizes, strict=True)]
