"""All tiers below the device pools: when copies are made, and the counters of the tiers.

Like pages, cached recurrent states are copied to host memory, files and objects.

A lower tier stores a state under the digest of the last page that it covers. A state is large, and a request needs only
one. So a state on the host is copied directly into the request's state page when the request reserves its pages. The
loop does not wait for this copy, because the device runs its later work after the copy.

Host memory is divided between pages and states once, at startup. A state is as large as hundreds of pages, so slots of
one common size would waste memory. Slots of different sizes cannot share memory either. Making room would require
moving slots, but a slot must not move while its content is being written to a file. Files are divided in the same way.
A store is asked for the newest state of a prompt: from the prompt's last page backwards, a few pages at a time.
"""

import math
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcache.copies import PageMover
from kvcache.errors import InvariantError, PoolTooSmallError
from kvcache.layer_groups import LayerTables
from kvcache.layout import PageLayout, replica_fingerprint
from kvcache.params import KVCacheParams
from kvcache.pool.index import Pages
from kvcache.pool.pages_below import NO_SLOTS
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.rows import Ints
from kvcache.states.state_memory import kind_offsets, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.tiers.file_tier import FileTier
from kvcache.tiers.host_tier import HostTier, ReplicaTier
from kvcache.tiers.object_tier import ObjectFormat, ObjectTier
from kvcache.tiers.page_files import FileFormat, SystemIO
from kvcache.tiers.page_folder import PageFolder, namespace_of
from kvcache.types import KVCacheMetrics

_SHARE = 0.05  # the share of the loop thread's time that copies of pages may take
_GB = 2**30
_LEAST_SLOTS = 2  # two slots, because a state may be read from a file into one slot while the other slot is held
_SHARE_OF_STATES = 0.025  # the share of the loop thread's time that copies of states may take
_MOST_CREDIT_S = 0.005  # in seconds: the most time for copies that accumulates while nothing is copied
_BATCH_BYTES = 1 << 20  # how many bytes the loop copies before it reads the clock again


class TierRoom(NamedTuple):
    """How host memory and files are divided between pages and states."""

    host_bytes: int  # for pages
    file_bytes: int  # for pages
    state_slots: int
    state_file_bytes: int


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


class Tiers:
    """The host tier of a manager, and the files and objects below it. The manager's replicas share them.

    At each `fetch`, a few published pages are copied to the host. These copies may take at most `share` (0.0 to 1.0) of
    the time since the last `fetch`. So they take the same share of a step's time, however long the step is. Pages that
    are about to be overwritten are copied at once.
    """

    def __init__(
        self,
        host: HostTier,
        files: FileTier | None,
        noun: str,
        share: float,
    ) -> None:
        self.host = host
        self.replicas: list[ReplicaTier] = []  # for each replica, its view of the host tier
        self.files = files
        self.lower = host.lower  # the tiers below the host, in the same list object that each `ReplicaTier` uses
        self._noun = noun  # what metrics call the contents of the tiers: "blocks" or "states"
        self._counted = [*self.lower]  # a copy of `lower`, for metrics that are read after `close`
        self._batch = max(1, _BATCH_BYTES // sum(memory.shape[1] for memory in host.memory))
        self.share = share
        self._credit = 0.0
        self._clock = time.perf_counter
        self._seen = self._clock()

    @property
    def metrics(self) -> KVCacheMetrics:
        counts = {
            f"h2d_{self._noun}_copied": sum(tier.loaded for tier in self.replicas),
            f"d2h_{self._noun}_copied": sum(tier.stored for tier in self.replicas),
        }
        for lower in self._counted:
            counts |= lower.counts(self._noun)
        return KVCacheMetrics(**counts)

    def tick(self) -> None:
        """Copy some published pages to the host. Called when a step is about to run.

        The copies take at most the part `share` of the time.
        """
        if not (self.lower or any(tier.is_copying for tier in self.replicas)):
            return  # the credit for the time until there is something to copy is added then
        now = self._clock()
        self._credit = min(self._credit + self.share * (now - self._seen), _MOST_CREDIT_S)
        self._seen = now
        for tier in self.replicas:
            tier.poll()
            while self._credit > 0 and tier.store(self._batch):
                before, self._seen = self._seen, self._clock()
                self._credit -= self._seen - before
        for lower in self.lower:
            lower.tick()

    @property
    def is_loading(self) -> bool:
        """Whether there are asynchronous copies to the device whose end `take_up` has not handled yet."""
        return any(tier.is_loading for tier in self.replicas)

    def take_up(self) -> None:
        """Handle each copy to the device that has ended.

        A caller needs this only while no step runs, because each step does it.
        """
        for tier in self.replicas:
            if tier.is_loading:
                tier.poll()

    def store_all(self) -> None:
        """Copy all published pages to the host, and wait until this is done."""
        for tier in self.replicas:
            tier.store_all()

    def flush(self) -> None:
        """Do `store_all`, and then write all pages that are not in files and objects yet."""
        self.store_all()
        for lower in self.lower:
            lower.flush()

    def close(self, *, flush: bool = True) -> None:
        """Close files and objects. With `flush`, first writes all published pages. Safe to call twice."""
        if self.lower and flush:
            self.flush()
        for lower in self.lower:
            lower.close()
        self.lower.clear()
        self.files = None

    def reset(self) -> None:
        """Forget every page, after all running copies have ended."""
        for tier in self.replicas:
            tier.reset()
        for lower in self.lower:
            lower.reset()
        self.host.pool.forget()

    def restart(self) -> None:
        """End all copies, reads and writes after an interrupt. Host memory keeps the pages that are complete.

        The folder of files is scanned again, and the store is asked again. Afterwards each replica's tier has to
        restart.
        """
        for lower in self.lower:
            lower.stop()
            lower.restart()
        self.host.pool.rebuild(*np.zeros((2, self.host.pool.num_pages + 1), np.int64))

    def _holders(self) -> Ints:
        """Returns how many copies, reads and writes hold each slot: int64 `[slots + 1]`."""
        held = [slots for tier in (*self.replicas, *self.lower) for slots in tier.held_slots]
        return np.bincount(np.concatenate([NO_SLOTS, *held]), minlength=self.host.pool.num_pages + 1)

    def check(self) -> None:
        """Count the holders of all host slots again, and check the queues of pages that wait to be copied.

        Raises `InvariantError` at the first discrepancy.
        """
        self.host.unmoved.check()
        for lower in self.lower:
            lower.check()
        holders = self._holders()
        for number, tier in enumerate(self.replicas):
            _check_queue(tier, number)
        try:
            self.host.pool.check(holders, np.zeros_like(holders))
        except InvariantError as error:
            raise InvariantError(f"host tier: {error}") from error


def _check_queue(tier: ReplicaTier, number: int) -> None:
    marked = np.zeros(tier.pool.num_pages + 1, np.int64)
    for store in tier.stores:
        marked[store.pages] += 1
    for pages, digests in tier.waiting:
        marked[pages] += 1
        if pages.size and not np.array_equal(tier.pool.index.digests_of(pages), digests):
            raise InvariantError(f"replica {number}: a page that waits to be copied has got other contents")
    for page in np.flatnonzero(marked > 1)[:1]:
        raise InvariantError(f"replica {number}: page {page} is queued {marked[page]} times for a copy")
    for page in np.flatnonzero((marked > 0) != tier.storing)[:1]:
        raise InvariantError(f"replica {number}: page {page} must be both marked and queued for a copy, or neither")


class TierContent(NamedTuple):
    """The kind of content that tiers keep (token pages or recurrent states), and how much of it they keep."""

    shard_bytes: Sequence[int]  # the bytes of one page or state on each shard
    slots: int  # the number of slots in host memory
    file_bytes: int  # the bytes in files
    # Identifies everything on which the content depends, except tokens, salt and keys, which the digest covers.
    fingerprint: str
    windows: Sequence[bool] = (False,)  # for each block table, whether later queries see only some of its pages
    are_states: bool = False


def make_tiers(params: KVCacheParams, kept: TierContent, page_size: int, *, pinned: bool) -> Tiers:
    """Returns the tiers that `params` ask for. They are not connected to replicas yet.

    `pinned` means that GPUs copy from and to the host memory.
    """
    digest_bytes = DIGEST_BYTES[params.hash_algorithm]
    host = HostTier(kept.shard_bytes, kept.slots, digest_bytes // 8, pinned=pinned)

    def layout(*fields: str, tables: int = 1) -> FileFormat:
        namespace = namespace_of(params.hash_algorithm, kept.fingerprint, params.file_tier_key, *fields)
        return FileFormat(namespace, sum(kept.shard_bytes), digest_bytes, tables)

    files, tables = None, len(kept.windows)
    if params.file_tier_dir is not None:
        named = ("tables named",) * (tables > 1)
        folder = PageFolder(Path(params.file_tier_dir), layout(*named, tables=tables))
        files = FileTier(folder, kept.file_bytes, host, params.file_tier_io or (lambda _: SystemIO()))
        host.lower.append(files)
    if params.object_tier_io is not None:
        count = 1 if kept.are_states else params.object_tier_pages
        named = ("objects of states",) if kept.are_states else ("objects", str(count))
        of_objects = ObjectFormat(layout(*named), count, tails=params.states is not None and count > 1)
        speed = params.object_tier_tokens_per_s
        # The number of seconds that the model takes to compute the tokens of a page.
        seconds = page_size / speed if speed else math.inf
        io, timeout = params.object_tier_io, params.object_tier_timeout_s
        host.lower.append(ObjectTier(of_objects, host, io, timeout, seconds, kept.windows, apart=kept.are_states))
    noun, share = ("states", _SHARE_OF_STATES) if kept.are_states else ("blocks", _SHARE)
    return Tiers(host, files, noun, share)


def page_tiers(
    params: KVCacheParams,
    room: TierRoom,
    layouts: Sequence[PageLayout],
    placed: Sequence[PlacedReplica],
    stream: Any,
    tables: LayerTables,
) -> Tiers | None:
    """Returns the tiers of token pages that `params` ask for, connected to the replicas.

    Returns None if they ask for none.
    """
    if not params.enable_kvcache_swapping_to_host:
        return None
    sizes = [layout.page_bytes for layout in layouts]
    if room.host_bytes < sum(sizes):
        raise PoolTooSmallError(
            f"host_kvcache_swap_space_gb is {params.host_kvcache_swap_space_gb}, {room.host_bytes} bytes: "
            f"at least one page of {sum(sizes)} bytes must fit"
        )
    kept = TierContent(
        sizes,
        room.host_bytes // sum(sizes),
        room.file_bytes,
        replica_fingerprint([*layouts], tables.described() if params.groups else ""),
        windows=[not table.group.keeps_all for table in tables.tables],
    )
    on_gpu = any(blocks.device.type != "cpu" for blocks in placed[0].memory.blocks)
    tiers = make_tiers(params, kept, layouts[0].page_size, pinned=on_gpu)
    for replica, memory in ((each.replica, each.memory) for each in placed):
        mover = PageMover([*zip(memory.blocks, tiers.host.memory, strict=True)], stream)
        replica.tier = ReplicaTier(tiers.host, replica.pool, mover, replica.tables.every)
        tiers.replicas.append(replica.tier)
    return tiers


class StateTier(ReplicaTier):
    """The host tier of recurrent states, as one replica uses it.

    When a state is loaded, its copy begins at once, and is ordered with the other work of the device.
    """

    def _keep(self, pages: Pages) -> None:
        self.pool.hold(pages)

    def _let_go(self, pages: Pages) -> None:
        self.pool.release(pages)


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
    kept = TierContent(
        [at[-1] for at in offsets],
        room.state_slots,
        room.state_file_bytes,
        replica_fingerprint([*pages, *chain.from_iterable(kinds.values() for kinds in layouts)]),
        are_states=True,
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
