"""The host tier: pages in host memory, how each replica uses them, and the base class of all lower tiers.

Soon after a replica publishes a page, the page is copied into a host slot (write-through). If the device has since
evicted pages of a prompt, they are copied back from host memory. Slots are managed in the same way as device pages. A
`PagePool` records which slots are published, held by a copy, or idle, and evicts the least recently used idle slots
first.
"""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.copies import Copy, PageMover
from kvcache.layout import allocate_host_rows
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import NO_SLOTS, Asked, PagesBelow, Slots
from kvcache.replica.rows import Pages, Rows, as_rows
from kvcache.tiers.page_files import FileRefusal, FileRefusals
from kvcache.unmoved import Unmoved

_T = TypeVar("_T")
# In bytes: how much is copied to the device between two steps for readers of leased pages. Copies for this manager's
# requests have no such limit.
_BROUGHT_BYTES = 8 << 20
PAUSE_S = 10.0
"""In seconds: how long a lower tier pauses after a failure."""


class HostTier:
    """Slots of host memory. Each slot holds one page of any replica.

    Each shard has one array, and a page lies at the same slot in all arrays. Slot 0 is the null slot. `pinned` says
    that a GPU copies from and to the memory. A caller may give its own `memory`: uint8 `[num_slots + 1, bytes]` of
    each shard. Raises `PoolTooSmallError` if not even one page fits.
    """

    def __init__(
        self,
        shard_bytes: Sequence[int],
        num_slots: int,
        digest_words: int,
        *,
        pinned: bool,
        memory: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.pool = PagePool(num_slots, digest_words)
        owner = self if pinned else None
        self.memory = list(memory or (allocate_host_rows(num_slots + 1, size, owner) for size in shard_bytes))
        self._rows = [memory.numpy() for memory in self.memory]
        self.unmoved = Unmoved({f"host pages of shard {shard}": memory for shard, memory in enumerate(self.memory)})
        self.lower: list[LowerTier] = []  # the tiers below the host tier, nearest first

    def touch(self, slots: Slots) -> None:
        """Mark `slots` as just used, except 0. They are in logical order, so the last of them is evicted first."""
        slots = slots[slots != NO_PAGE]
        self.pool.hold(slots)
        self.pool.release(slots)

    def parts(self, slots: Slots) -> list[list[NDArray[np.uint8]]]:
        """Returns the bytes of each slot, one array for each shard. The arrays are views of the tier's own memory."""
        return [[rows[slot] for rows in self._rows] for slot in slots.tolist()]


@dataclass(frozen=True, eq=False, slots=True)
class HostCopy:
    """A copy of pages into host slots, or from host slots to the device.

    Pages and slots are held until the copy is over. Until then, no other request finds pages that are copied to the
    device for a row, and nothing may read them.
    """

    pages: Pages
    slots: Slots
    # The pages are published under these digests when the copy is over. Empty if the pages are copied to the device for
    # a row, because these pages are not published by the copy.
    digests: Digests
    copy: Copy


@dataclass(eq=False, slots=True)
class Job:
    """A read, a write or a query to a store, which runs in a thread of a lower tier."""

    # the running work; its result is a function with which the loop's thread handles the outcome
    work: Future[Callable[[], None]]
    slots: Slots  # the host slots that the work reads or writes; they are held until the work has ended
    names: Sequence[bytes] = ()  # the names of the objects that are looked up or read
    dropped: bool = False  # whether the result is not needed any more, and will not be handled

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the work has ended, for at most `seconds`; None means without limit."""
        wait([self.work], seconds)


class TierThread(ThreadPoolExecutor):
    """One of the two threads of a lower tier, with its jobs."""

    def __init__(self, name: str) -> None:
        super().__init__(1, f"pagewire-{name}")
        # the jobs in the order of starting; a job stays here until the loop's thread has handled its result
        self.jobs: deque[Job] = deque()


class LowerTier:
    """A tier below the host tier: files or objects, which outlive the process.

    All state belongs to the loop's thread. Two other threads move bytes: one reads and one writes. The host slots that
    they read or write are held until they are done. The loop's thread polls for their results.
    """

    asks = False  # whether a remote store must be asked which pages it has
    # the most pages at the end of a run that are stored in a short object of their own (a tail), because a state
    # follows them
    longest_tail = 0

    def __init__(self, host: HostTier, of: str) -> None:
        self._host = host
        self._clock = time.monotonic
        self._reader, self._writer = TierThread(f"{of}-reads"), TierThread(f"{of}-writes")
        self._paused_until = 0.0  # a thread sets this after a failure; until this time the tier accepts no pages
        self.written: int = 0  # the number of pages written so far
        self.read: int = 0  # the number of pages read so far
        self.refusals = FileRefusals()  # how many pages were wrong, cut short or missing when they were read, by reason

    @abstractmethod
    def counts(self, noun: str) -> Mapping[str, int]:
        """Returns the tier's fields of `KVCacheMetrics`. `noun` is what the tier keeps: "blocks" or "states"."""

    # ---- reads into host slots

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that changes whenever the tier learns more about which pages it has."""

    @abstractmethod
    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:
        """Returns a mask of the `asked` pages that the tier is known to have.

        With `perhaps`, the mask also marks the `asked` pages that the tier may have.
        """

    def ask(self, digests: Digests, perhaps: Asked) -> bool:  # noqa: ARG002 - everything is known
        """Ask the store which of the pages in the mask `perhaps` it has. Pages with a known answer are not asked again.

        Returns whether an answer is on its way and is worth waiting for.
        """
        return False

    @abstractmethod
    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:
        """Begin to read the `wanted` pages, which the tier has, into host memory.

        The pages at the beginning of the prompt are read first, as many as the host has room for. `gain` is the number
        of pages whose tokens need not be computed once the `wanted` pages are read. With `wait`, the call waits a
        limited time for the pages.
        """

    @abstractmethod
    def brings(self, digests: Digests, wanted: Asked) -> bool:
        """Whether some of the `wanted` pages are being read and are still worth waiting for."""

    # ---- writes from host slots

    def offer(self, digests: Digests) -> None:
        """Record that the host tier now has the pages with these digests."""

    def used(self, digests: Digests) -> None:
        """Record that a request has used the pages with these digests."""

    def ended(self, digests: Digests) -> None:
        """Record that a request with these pages, `[tables, pages, words]`, has ended."""

    @abstractmethod
    def tick(self) -> None:
        """Handle the results of the threads, and give the threads new work. Never waits."""

    @abstractmethod
    def flush(self) -> None:
        """Write all pages that wait to be written, and wait until this is done."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all pages, so that no request finds any of them."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads once they have finished their current work. Safe to call twice."""

    # ---- after an interrupt, and recounts

    @property
    def held_slots(self) -> list[Slots]:
        """Returns the host slots of each read and write that has not ended."""
        return [job.slots for job in (*self._reader.jobs, *self._writer.jobs)]

    def stop(self) -> None:
        """Wait until both threads have done all work that was given to them."""
        for thread in (self._reader, self._writer):
            with suppress(RuntimeError):  # `submit` raises this error after `close` has stopped the thread
                thread.submit(nothing).result()

    def restart(self) -> None:
        """Drop all jobs, and forget which pages the tier has, after an interrupt. Call `stop` before this."""
        self._reader.jobs.clear()
        self._writer.jobs.clear()

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantError` if the tier's records contradict each other."""

    # ---- inside

    def _take_up(self, *threads: TierThread) -> None:
        """Handle the result of each job of these `threads`, if the job has ended."""
        for thread in threads:
            while thread.jobs and thread.jobs[0].work.done():
                self._end(thread.jobs.popleft())

    def _begin_job(
        self,
        thread: TierThread,
        work: Callable[[], _T],
        take: Callable[[_T], None],
        slots: Slots = NO_SLOTS,
        names: Sequence[bytes] = (),
    ) -> None:
        """Let a thread run `work`.

        When it has ended, the loop's thread passes its result to `take`, or its `OSError` to `_fail`.
        """
        thread.jobs.append(Job(thread.submit(self._work, work, take), slots, names))

    def _work(self, work: Callable[[], _T], take: Callable[[_T], None]) -> Callable[[], None]:
        """Run `work` in a thread of the tier. Returns a function, with which the loop's thread handles the result."""
        try:
            return partial(take, work())
        except OSError as error:
            self._paused_until = self._clock() + PAUSE_S
            return partial(self._fail, error)

    def _end(self, job: Job) -> None:
        try:
            if not (job.dropped or job.work.cancelled()):
                job.work.result()()
        finally:
            if job.slots.size:
                self._host.pool.release(job.slots)

    def _publish(
        self, slots: Slots, digests: Digests, tables: NDArray[np.integer[Any]], refusals: Sequence[FileRefusal | None]
    ) -> NDArray[np.bool_]:
        """Publish the pages that were read into `slots`, except the refused ones.

        Returns a mask of the published pages. `tables` has the block table of each page. `refusals` has the reason why
        each page is refused, or None.
        """
        right = np.array([refusal is None for refusal in refusals], np.bool_)
        index = self._host.pool.index
        index.tables[slots] = tables
        index.publish(slots[right], digests[right])
        self.read += int(right.sum())
        self.refusals.update(filter(None, refusals))
        return right

    @abstractmethod
    def _fail(self, error: OSError) -> None:
        """Called after a thread has raised `error`, and the pause has begun.

        Drops the pages that wait to be written.
        """


def nothing() -> None:
    """Do nothing. Used as work for a thread, and as the function that handles a result."""


class ReplicaTier(PagesBelow, PageReader):
    """The host tier as one replica uses it: its pages that wait to be copied to the host, and its copies to the device.

    `PagesBelow` documents the methods that a replica calls. The pool's journal reports the pages to copy to the host.
    It also reports pages that are about to be overwritten, because their copies cannot wait any longer.
    """

    keeps = True

    def __init__(
        self,
        host: HostTier,
        pool: PagePool,
        mover: PageMover,
        every: Callable[[Digests], Digests] = lambda digests: digests[None],
    ) -> None:
        """Connect a replica to the host tier.

        `every` is a function that takes the digests of tokens. It returns the digests of the pages with these tokens in
        all block tables.
        """
        self.host = host
        self.pool = pool
        self.lower = host.lower
        self._every = every
        self._mover = mover
        self._no_digests: Digests = pool.index.digests_of(NO_SLOTS)
        # for each page, whether its copy to the host is queued or running
        self.storing = np.zeros(pool.num_pages + 1, np.bool_)
        # The queue of published pages that wait to be copied to the host, oldest first. Each entry has pages and their
        # digests. An entry without pages records that a request has used the pages with these digests. If the digests
        # are `[tables, pages, words]`, such an entry records that a request with these pages has ended.
        self.waiting: deque[tuple[Pages, Digests]] = deque()
        # For each row, the copies of its pages to the device that have not begun or not ended.
        self._loads: dict[int, list[HostCopy]] = {}
        # copies to the device that no longer belong to a row; a copy stays here until `poll` sees that it has ended
        self._left: list[HostCopy] = []
        self.stores: deque[HostCopy] = deque()  # copies to the host that have not ended, oldest first
        self.stored = self.loaded = 0  # the number of pages copied to the host, and to the device, so far
        self.brought_at_once = max(1, _BROUGHT_BYTES // sum(memory.shape[1] for memory in host.memory))
        pool.journal.read(self, saves=True)

    # ---- to the host

    def came(self, pages: Pages, digests: Digests) -> None:
        """Queue published `pages` to be copied to the host."""
        # a fork publishes shared pages again, although copies of these pages are queued already
        new = ~self.storing[pages]
        if not new.all():
            pages, digests = pages[new], digests[new]
        if pages.size:
            self.storing[pages] = True
            self.waiting.append((pages, digests))

    def store(self, most: int) -> int:
        """Copy pages to the host, or begin to copy them. At most `most` pages that have waited longest are copied.

        Returns how many pages left the queue.
        """
        self.poll()
        pages, digests = self._take(most)
        if not pages.size:
            return 0
        pool = self.host.pool
        absent = (pool.index.find(digests) == NO_PAGE).nonzero()[0]
        # Copy only as many pages as there are free slots. All other slots are held by copies that have not ended yet.
        # The pages that find no slot have left the queue, and are not copied to the host.
        fits = absent[: pool.free_count]
        self.storing[pages] = False
        if fits.size:
            new, slots = pages[fits], pool.allocate(len(fits))
            pool.index.tables[slots] = self.pool.index.tables[new]
            self.storing[new] = True
            self.stores.append(HostCopy(new, slots, digests[fits], self._mover.store(new, slots)))
        self.poll()
        return len(pages)

    def going(self, pages: Pages) -> None:
        """Finish all pending copies of `pages` to the host, because the pages are about to be overwritten."""
        while self.storing[pages].any():
            if self.stores:
                self._await_stores()  # wait for asynchronous copies that an earlier step has begun
            else:
                self.store(len(self.waiting[0][0]))

    @property
    def is_loading(self) -> bool:
        """Whether there are asynchronous copies to the device whose end `poll` has not handled yet."""
        return bool(self._left)

    def poll(self) -> None:
        """Handle each asynchronous copy that has ended, and apply the uses that have waited for it."""
        while self.stores and self.stores[0].copy.over():
            store = self.stores.popleft()
            self.storing[store.pages] = False
            self.stored += len(store.pages)
            # If another replica has stored a page with the same content in the meantime, this slot becomes free again.
            self.host.pool.index.publish(store.slots, store.digests)
            self.host.pool.release(store.slots)
            for lower in self.lower:
                lower.offer(store.digests)
        for load in [load for load in self._left if load.copy.over()]:
            self._left.remove(load)
            self.loaded += len(load.pages)
            if load.digests.size:
                # If a row has published a page with the same content in the meantime, this page becomes free.
                self.pool.index.publish(load.pages, load.digests)
            self._end(load)
        self._pass_uses()

    def leave(self, row: int, pages: Pages, names: Digests, ends: Callable[[Digests], Asked]) -> None:
        """Called when the row is released. The copies to the device for this row are then not needed any more.

        A running copy holds its pages until the copy is over. `pages` are the row's published pages. The request's use
        of these pages is queued behind their copies to the host. If the use were recorded earlier, the host would
        evict the first pages of the prompt before the last pages, although the last pages are useless without the
        first pages.
        """
        for load in self._loads.pop(row, ()):
            if load.copy.begun:
                self._left.append(load)
            else:
                self._end(load)
        if pages.size:
            self.waiting.append((NO_SLOTS, self.pool.index.digests_of(pages)))
            if self.asks and len(names):
                every, stops = self._every(names), [len(names)]
                if self.longest_tail:
                    stops = [*(np.flatnonzero(ends(names)) + 1).tolist(), *stops]
                self.waiting.extend((NO_SLOTS, every[:, :stop]) for stop in stops)
            self._pass_uses()

    # ---- from the host

    def slots(self, digests: Digests) -> Slots:
        return self.host.pool.index.find(digests)

    def touch(self, digests: Digests) -> None:
        self.host.touch(self.slots(digests))

    def hold(self, slots: Slots) -> None:
        self.host.pool.hold(slots)

    def drop(self, slots: Slots) -> None:
        self.host.pool.release(slots)

    def used(self, digests: Digests) -> None:
        self.waiting.append((NO_SLOTS, digests))
        self._pass_uses()

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        self._keep(pages)
        load = HostCopy(pages, slots, self._no_digests, self._mover.load(slots, pages))
        self._loads.setdefault(row, []).append(load)

    # ---- the tiers below the host

    @property
    def generation(self) -> int:
        return self.host.pool.index.generation + self.answers

    @property
    def answers(self) -> int:
        return sum(lower.generation for lower in self.lower)

    @property
    def fetches(self) -> bool:
        return bool(self.lower)

    @property
    def asks(self) -> bool:
        return any(lower.asks for lower in self.lower)

    @property
    def longest_tail(self) -> int:
        return max((lower.longest_tail for lower in self.lower), default=0)

    @property
    def is_bringing(self) -> bool:
        self.poll()
        return any(load.digests.size for load in self._left)

    def has(self, digests: Digests, asked: Asked, *, perhaps: bool = False) -> Asked:
        found = self.host_has(digests, asked)
        for lower in self.lower:
            found |= lower.has_of(digests, asked & ~found, perhaps=perhaps)
        return found

    def may_have(self, digests: Digests, asked: Asked) -> Asked:
        return self.has(digests, asked, perhaps=True)

    def host_has(self, digests: Digests, asked: Asked) -> Asked:
        found = np.zeros_like(asked)
        found[asked] = self.host.pool.index.find(digests[asked]) != NO_PAGE
        return found

    def ask(self, digests: Digests, perhaps: Asked) -> bool:
        left, coming = perhaps & ~self.host_has(digests, perhaps), False
        for lower in self.lower:
            if lower.asks:  # during a pause after a failure, `has_of` returns no page, so nothing is asked
                coming |= lower.ask(digests, lower.has_of(digests, left, perhaps=True))
            left = left & ~lower.has_of(digests, left, perhaps=False)
        return coming

    def to_host(self, digests: Digests, wanted: Asked, gain: int, *, wait: bool) -> bool:
        slots = self.slots(digests[wanted])
        if np.count_nonzero(slots) == len(slots):
            return False
        # Pages that are fetched into host memory must not evict other wanted pages that are there already.
        self.host.touch(slots)
        coming = False
        for lower in self.lower:
            # `has_of` is called first, because it also handles reads that have ended
            there = lower.has_of(digests, wanted, perhaps=False)
            wanted = wanted & ~self.host_has(digests, wanted)
            there &= wanted
            lower.fetch(digests, there, wait=wait, gain=gain)
            coming |= lower.brings(digests, there)
            wanted &= ~there
        return coming

    def bring(self, pages: Pages, slots: Slots, digests: Digests) -> None:
        self._keep(pages)
        load = HostCopy(pages, slots, digests, self._mover.load(slots, pages))
        load.copy.begin()
        self._left.append(load)
        self.poll()  # if the CPU makes the copies, this copy is already over

    @property
    def is_copying(self) -> bool:
        """Whether pages or uses wait to reach the host, or copies have begun whose end `poll` has not handled yet."""
        return bool(self.waiting or self.stores or self._left)

    def arrive(self, rows: Rows) -> None:
        if self._loads:
            asked = as_rows(rows)
            for row in [row for row in self._loads if (asked == row).any()]:
                for load in self._loads[row]:
                    load.copy.order()
                # The copies are removed last. So after an interrupt, `arrive` orders them again.
                self._left += self._loads.pop(row)
        if self.is_copying:
            self.poll()

    def coming(self) -> list[Pages]:
        return [load.pages for load in self.open_loads]

    def store_all(self) -> None:
        while self.waiting or self.stores:
            self._await_stores()
            self.store(len(self.waiting[0][0]) if self.waiting else 0)

    def reset(self) -> None:
        """Forget the pages that wait to be copied to the host.

        All running copies are finished, because requests rely on the copies to the device.
        """
        for pages, _ in self.waiting:
            self.storing[pages] = False
        self.waiting.clear()
        self.store_all()
        self.load_all()

    def load_all(self) -> None:
        self.arrive(np.array(list(self._loads), np.int64))
        for load in self._left:
            load.copy.wait()
        self.poll()

    @property
    def open_loads(self) -> list[HostCopy]:
        """Returns all copies to the device that have not ended."""
        return [*self._left, *(load for loads in self._loads.values() for load in loads)]

    @property
    def held_slots(self) -> list[Slots]:
        """Returns the host slots of each copy that has not ended."""
        return [copy.slots for copy in (*self.open_loads, *self.stores)]

    def restart(self) -> None:
        """End all copies after an interrupt, when none of them runs any more. Queue the published pages again.

        The pool of the host tier must be built first. The uses that wait in the queue are lost.
        """
        for copies in (self._loads, self._left, self.stores, self.waiting):
            copies.clear()
        self.storing[:] = False
        published = np.flatnonzero(self.pool.index.published).astype(np.int32)
        digests = self.pool.index.digests_of(published)
        absent = self.host.pool.index.find(digests) == NO_PAGE
        self.came(published[absent], digests[absent])

    # ---- inside

    def _take(self, most: int) -> tuple[Pages, Digests]:
        taken: list[tuple[Pages, Digests]] = [(NO_SLOTS, self._no_digests)]
        while most > 0 and self.waiting and self.waiting[0][0].size:
            pages, digests = self.waiting.popleft()
            if len(pages) > most:
                self.waiting.appendleft((pages[most:], digests[most:]))
            taken.append((pages[:most], digests[:most]))
            most -= len(taken[-1][0])
        if len(taken) == 2:
            return taken[1]
        return np.concatenate([pages for pages, _ in taken]), np.concatenate([digests for _, digests in taken])

    def _pass_uses(self) -> None:
        """Apply the recorded uses that are at the head of the queue, before any page that waits to be copied."""
        while self.waiting and not self.waiting[0][0].size and not self.stores:
            _, digests = self.waiting.popleft()
            if digests.ndim > 2:
                for lower in self.lower:
                    lower.ended(digests)
                continue
            self.touch(digests)
            for lower in self.lower:
                lower.used(digests)

    def _await_stores(self) -> None:
        for store in self.stores:
            store.copy.wait()
        self.poll()

    def _end(self, load: HostCopy) -> None:
        self._let_go(load.pages)
        self.host.pool.release(load.slots)

    def _keep(self, pages: Pages) -> None:
        """Add a writer to `pages`, so that they are neither allocated nor read until `_let_go` drops the writer."""
        self.pool.add_writer(pages)

    def _let_go(self, pages: Pages) -> None:
        self.pool.drop_writer(pages)
