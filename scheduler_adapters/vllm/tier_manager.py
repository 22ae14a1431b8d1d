"""Decides which host slot holds which of vLLM's blocks, and moves slots to files and objects.

It runs in the process of vLLM's scheduler.

vLLM cannot handle a load that fails. A block therefore counts as found only while it is in a host slot, and its slot is
held until it is loaded. Blocks in files and objects are first read into slots; their request waits for that, a limited
time. A page that is gone, damaged or too late is a miss, and its tokens are computed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, PrepareStoreOutput, RequestOffloadingContext

from kvcache.errors import InvariantError
from kvcache.pool.index import NO_PAGE
from kvcache.tiers.host_tier import HostTier
from scheduler_adapters.vllm.tier_version import TierVersion
from scheduler_adapters.vllm.tier_worker import SlotsSpec
from scheduler_adapters.vllm.weights import VersionWatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext, ScheduleEndContext

    from kvcache.tiers.host_tier import LowerTier
    from scheduler_adapters.vllm.shared_slots import SharedSlots

DIGEST_WORDS = 4
_OF_LOWER = ("blocks_written", "blocks_read", "blocks_refused")
COUNTED = {
    "host_blocks_stored": "Blocks copied to host slots.",
    "host_blocks_loaded": "Blocks copied from host slots.",
    **{
        f"{tier}_{name}": f"{name.replace('_', ' ').capitalize()}, {tier}s."
        for tier in ("file", "object")
        for name in _OF_LOWER
    },
    "files_refused": "Files that were damaged, cut short or of another kind.",
    "object_store_failures": "Calls to the object store that failed or timed out.",
}
"""The counters, with their documentation in vLLM's metrics."""
_TICK_S = 0.1
_ONE = np.ones((1, 1), np.bool_)


@dataclass(eq=False, slots=True)
class _Lookups:
    """The results of a request's lookups.

    Attributes:
        pins: slots that are held until the request's load, by key.
        wanted: keys of this step that are in no slot, but perhaps below.
        absent: keys that were not found in time, or could not be read.
        read: keys that were read from files or objects for this request.
        deadline: when the request stops waiting.
    """

    pins: dict[OffloadKey, int] = field(default_factory=dict["OffloadKey", int])
    wanted: list[OffloadKey] = field(default_factory=list["OffloadKey"])
    absent: set[OffloadKey] = field(default_factory=set["OffloadKey"])
    read: set[OffloadKey] = field(default_factory=set["OffloadKey"])
    deadline: float | None = None


class TierManager(OffloadingManager):
    """The blocks of one engine in host slots, files and objects.

    vLLM enters it under `lock`. A thread writes pages that wait, also while the engine is idle.

    Args:
        host: the slots, with the tiers below.
        shared: the shared memory of each rank, which is that of `host`.
        wait_s: how long a request waits for files and objects, in seconds.
        sources: where vLLM's metrics say that tokens come from: from slots, and from below. None in versions that do
            not ask.
    """

    def __init__(
        self, host: HostTier, shared: Sequence[SharedSlots], wait_s: float, sources: tuple[Any, Any] | None
    ) -> None:
        self._host, self._wait_s, self._sources = host, wait_s, sources
        self._lock = threading.Lock()
        self._requests: dict[str, _Lookups] = {}
        self._pinned = 0
        # The slot of each block that workers are writing, and the number of the version by then.
        self._storing: dict[OffloadKey, tuple[int, int]] = {}
        self._loading: defaultdict[OffloadKey, list[int]] = defaultdict(list)
        self._retired: list[int] = []  # slots that workers may still use after a reset
        self._version = TierVersion(shared)
        self._is_reset = False  # whether all blocks are to be forgotten, unless the weights change before the next step
        self._versions = VersionWatch(self.named, self.called)
        self.counts: dict[str, int] = {"host_blocks_stored": 0, "host_blocks_loaded": 0}
        self._reported: dict[str, int] = {}
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._run, name="pagewire-tiers", daemon=True)
        self._ticker.start()

    @property
    def lock(self) -> threading.Lock:
        """Guards the slots and the tiers below."""
        return self._lock

    def bind(self, manager: KVCacheManager) -> None:
        """Sets vLLM's block manager."""
        with self._lock:
            self._version.bind(manager)

    # ---- loads

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Handles a new request."""
        self._requests[req_context.req_id] = _Lookups()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Returns whether a block is in a slot. If it may be below, asks vLLM to look it up again in the next step."""
        self._follow_weights()
        request = self._requests[req_context.req_id]
        if slot := self._slots([key]).item(0):
            if key not in request.pins and self._pinned < self._host.pool.num_pages // 2:
                self._host.pool.hold(np.array([slot], np.int32))
                request.pins[key] = slot
                self._pinned += 1
            return LookupResult.HIT
        if key in self._storing:
            return LookupResult.HIT_PENDING
        digest = self._digests([key])[None]
        if key in request.absent or not any(one.has_of(digest, _ONE, perhaps=True).any() for one in self._lower):
            return LookupResult.MISS
        request.wanted.append(key)
        return LookupResult.RETRY

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Returns where a found block came from."""
        if self._sources is None:
            return super().get_load_source(key, req_context)
        request = self._requests.get(req_context.req_id)
        return self._sources[request is not None and key in request.read]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Holds the slots of blocks that the request has found, until `complete_load`."""
        slots = self._slots(keys)
        if not slots.all():
            raise InvariantError(f"request {req_context.req_id!r}: a block left its slot after it was found")
        self._host.pool.hold(slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self._loading[key].append(slot)
        self._unpin(self._requests[req_context.req_id])
        return SlotsSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Releases the slots of blocks that are loaded."""
        ordered = _in_order(keys, req_context)
        self._host.pool.release(np.array([self._loading[key].pop() for key in ordered], np.int32))
        for key in ordered:
            if not self._loading[key]:
                del self._loading[key]
        self.counts["host_blocks_loaded"] += len(ordered)
        for lower in self._lower:
            lower.used(self._digests(ordered))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Marks blocks as just used. Those that have left their files, say because of damage, are written again."""
        digests = self._digests(_in_order(keys, req_context))
        slots = self._host.pool.index.find(digests)
        self._host.touch(slots)
        for lower in self._lower if slots.any() else ():
            lower.used(digests[slots != NO_PAGE])

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Handles the end of a request."""
        if (request := self._requests.pop(req_context.req_id, None)) is not None:
            self._unpin(request)

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Allocates slots to the blocks that have none. The last blocks get none if too few slots are free."""
        self._follow_weights()
        self.touch(keys, req_context)
        known = dict(zip(keys, self._slots(keys).tolist(), strict=True))
        new = [key for key, slot in known.items() if slot == NO_PAGE and key not in self._storing]
        new = new[: self._host.pool.free_count]
        slots = self._host.pool.allocate(len(new))
        self._storing.update(zip(new, ((slot, self._version.number) for slot in slots.tolist()), strict=True))
        return PrepareStoreOutput(keys_to_store=new, store_spec=SlotsSpec(slots), evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Publishes blocks that every rank has written. Blocks of replaced weights are dropped."""
        self._follow_weights()
        ordered = _in_order(keys, req_context)
        written = [self._storing.pop(key) for key in ordered]
        slots = np.array([slot for slot, _ in written], np.int32)
        right = np.array([success and number == self._version.number for _, number in written], np.bool_)
        digests = self._digests(ordered)[right]
        self._host.pool.index.publish(slots[right], digests)
        self._host.pool.release(slots)
        self.counts["host_blocks_stored"] += len(digests)
        for lower in self._lower if len(digests) else ():
            lower.offer(digests)

    # ---- the tiers below

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks for the blocks that lookups of this step wanted, and reads them into slots."""
        del context
        now = time.monotonic()
        for request in self._requests.values():
            wanted, request.wanted = request.wanted, []
            if not wanted:
                continue
            request.deadline = request.deadline or now + self._wait_s
            request.read.update(wanted)
            if not self._bring(wanted) or now > request.deadline:
                request.absent.update(wanted)  # those that have arrived by now are still found, in their slots

    def _bring(self, keys: Sequence[OffloadKey]) -> bool:
        """Asks for blocks below, and begins to read them. Returns whether it is worth waiting for some of them."""
        digests, waits = self._digests(keys)[None], False
        left = self._host.pool.index.find(digests[0])[None] == NO_PAGE
        for lower in self._lower:
            waits |= lower.ask(digests, lower.has_of(digests, left, perhaps=True))
            there = lower.has_of(digests, left, perhaps=False)
            if there.any():
                lower.fetch(digests, there, wait=False, gain=len(keys))
                waits |= lower.brings(digests, there)
                left &= ~there
        return waits

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            with self._lock:
                for lower in self._host.lower:
                    lower.tick()

    # ---- resets

    def reset_cache(self) -> None:
        """Forgets every block, in slots, files and objects, as soon as a request asks for one.

        vLLM's pause also calls this, before the weights are changed. If they are by then, all blocks stay under the
        names of their versions.
        """
        self._retired += [slot for slot, _ in self._storing.values()]
        self._retired += [slot for slots in self._loading.values() for slot in slots]
        self._storing.clear()
        self._loading.clear()
        self._unpin_all()
        self._is_reset = True

    def _reset_now(self) -> None:
        self._is_reset = False
        for lower in self._host.lower:
            lower.reset()
        self._host.pool.forget()

    def on_reset_flushed(self) -> None:
        """Frees the slots that workers used at the last reset."""
        retired, self._retired = self._retired, []
        self._host.pool.release_each(np.array(retired, np.int32))

    def named(self, version: str) -> None:
        """Handles the name that the user has given to the weights."""
        with self._lock:
            if self._version.named(version):
                self._renamed()

    def called(self, method: object) -> None:
        """Handles the end of a call of the workers' methods, which may have changed their weights."""
        del method
        with self._lock:
            if self._version.follow():
                self._renamed()

    def _follow_weights(self) -> None:
        """Looks, before blocks are found or stored, which weights they are of."""
        if self._version.follow():
            self._renamed()
        elif self._is_reset:
            self._reset_now()

    def _renamed(self) -> None:
        self._is_reset = False
        self._unpin_all()

    def _unpin_all(self) -> None:
        """Lets all requests look again."""
        for request in self._requests.values():
            self._unpin(request)
            request.absent.clear()
            request.wanted.clear()

    def shutdown(self) -> None:
        """Writes what waits to be written, and stops all threads."""
        self._stop.set()
        self._ticker.join()
        with self._lock:
            if self._is_reset:
                self._reset_now()
            self._close_lower()

    def _close_lower(self) -> None:
        for lower in self._host.lower:
            lower.flush()
            lower.close()
        self._host.lower.clear()

    def get_stats(self) -> OffloadingConnectorStats:
        """Returns how much the counters have grown since the last call."""
        for lower in self._host.lower:
            self.counts |= lower.counts("blocks")
        stats, before, self._reported = OffloadingConnectorStats(), self._reported, dict(self.counts)
        for name in COUNTED.keys() & self.counts.keys():
            if grown := self.counts[name] - before.get(name, 0):
                stats.increase_counter(metric_of(name), grown)
        return stats

    # ---- inside

    def _unpin(self, request: _Lookups) -> None:
        if request.pins:
            self._host.pool.release(np.array([*request.pins.values()], np.int32))
            self._pinned -= len(request.pins)
            request.pins.clear()

    @property
    def _lower(self) -> list[LowerTier]:
        """Files and objects, if they can have blocks of the current weights."""
        return self._host.lower if self._version.is_known else []

    def _slots(self, keys: Iterable[OffloadKey]) -> Any:
        return self._host.pool.index.find(self._digests(keys))

    def _digests(self, keys: Iterable[OffloadKey]) -> Any:
        """Returns the digests of blocks of the current version, uint64 `[blocks, DIGEST_WORDS]`.

        vLLM's key has a block's hash and its group. How long the hash is depends on vLLM's hash function.
        """
        salt = self._version.salt
        joined = b"".join(hashlib.sha256(key + salt).digest() for key in keys)
        return np.frombuffer(joined, np.uint64).reshape(-1, DIGEST_WORDS)

    def check(self) -> None:
        """Counts the holders of all slots again. Raises `InvariantError` at the first difference."""
        held = [slot for request in self._requests.values() for slot in request.pins.values()]
        held += [slot for slot, _ in self._storing.values()] + self._retired
        held += [slot for slots in self._loading.values() for slot in slots]
        below = [slots for lower in self._host.lower for slots in lower.held_slots]
        holders = np.bincount(
            np.concatenate([np.array(held, np.int32), *below]), minlength=self._host.pool.num_pages + 1
        )
        self._host.pool.check(holders, np.zeros_like(holders))
        for lower in self._host.lower:
            lower.check()


def metric_of(name: str) -> str:
    """Returns the name of a counter in vLLM's metrics."""
    return f"vllm:pagewire_{name}"


def _in_order(keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """Returns keys in the order of their tokens. vLLM hands over sets."""
    return sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)
