"""The host tier: pages in host memory, and what one replica does with them.

A page that a replica publishes is copied into a host slot soon after (write-through); a prompt whose pages have left
the device takes them up from there. Slots are kept as device pages are: a `PagePool` says which are published, held by
a copy, or idle, least recently used first.
"""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.copies import CopyMark, PageMover
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.replica.pages_below import PagesBelow
from kvcache.replica.resume import NO_SLOTS, Asked, Slots
from kvcache.replica.rows import Pages, Rows, as_rows
from kvcache.storage import allocate_host_rows
from kvcache.tiers.page_files import FileRefusals

_BROUGHT_BYTES = 8 << 20  # for others than our rows, between two steps


class HostTier:
    """Slots of host memory, each for one page of any replica: the shards of a page side by side, one array a shard.

    Slot 0 stands for none. `pinned`: a GPU copies from and to the memory. `tables`: the pages are of several block
    tables, and the index says of which. Raises `PoolTooSmallError`.
    """

    def __init__(
        self, shard_bytes: Sequence[int], num_slots: int, digest_words: int, *, pinned: bool, tables: bool = False
    ) -> None:
        self.pool = PagePool(num_slots, digest_words)
        if tables:
            self.pool.index.tables = np.zeros(num_slots + 1, np.intp)
        owner = self if pinned else None
        self.memory = [allocate_host_rows(num_slots + 1, size, owner) for size in shard_bytes]
        self._rows = [memory.numpy() for memory in self.memory]
        self.lower: list[LowerTier] = []  # where the pages are that left it, the nearest first

    def touch(self, slots: Slots) -> None:
        """Published `slots`, in logical order, were used just now: they go last, and their tail first of them."""
        self.pool.hold(slots)
        self.pool.release(slots)

    def parts(self, slots: Slots) -> list[list[NDArray[np.uint8]]]:
        """The bytes of every shard of each slot, as arrays over the tier's own memory."""
        return [[rows[slot] for rows in self._rows] for slot in slots.tolist()]


@dataclass(eq=False, slots=True)
class HostLoad:
    """Pages on their way back to the device: no other request can find them, and none may read them yet."""

    slots: Slots
    pages: Pages
    marks: list[CopyMark] | None = None  # None until it is begun, then one for each shard that copies beside us
    digests: Digests | None = None  # of pages that no row has: they are published when they are there


class HostStore(NamedTuple):
    """Pages whose copies into host slots run beside us."""

    pages: Pages
    slots: Slots
    digests: Digests
    marks: list[CopyMark]


@dataclass(eq=False, slots=True)
class Job:
    """What a thread of a tier does."""

    done: Future[Any]
    take: Callable[[], None]  # takes its result up, in the loop's thread; raises what the thread has raised
    slots: Slots  # held until it is done
    names: Sequence[bytes] = ()  # of objects that are asked for or read
    era: int = 0  # resets of its tier before it


class LowerTier:
    """Where the pages are that the host tier does not have: files or objects, which outlive the process.

    The loop's thread keeps all books. Two threads of the tier's own move the bytes, one for reads and one for writes,
    from and to host slots that are held meanwhile. The loop takes up what they have done when it comes by.
    """

    asks = False  # whether somebody has to be asked for what is there

    def __init__(self, host: HostTier, of: str) -> None:
        self._host = host
        self._clock = time.monotonic
        self._reader = ThreadPoolExecutor(1, f"pagewire-{of}-reads")
        self._writer = ThreadPoolExecutor(1, f"pagewire-{of}-writes")
        self._jobs: deque[Job] = deque()  # of the thread of reads, in order
        self._writes: deque[Job] = deque()  # of the thread of writes: one at a time
        self._paused_until = 0.0  # after what has failed
        self.written: int = 0  # pages so far
        self.read: int = 0  # likewise
        self.refusals = FileRefusals()  # pages that were wrong, cut short or gone when they were to be read

    # ---- up, to host slots

    @property
    @abstractmethod
    def generation(self) -> int:
        """Counts what has become known of what is there."""

    @abstractmethod
    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:
        """Which of the `asked` pages are known to be there; `perhaps`: and those of which nothing is known yet."""

    def ask(self, digests: Digests, perhaps: Asked) -> bool:  # noqa: ARG002 - all is known
        """Ask for these pages, of which nothing is known; whether an answer is on its way, and in time."""
        return False

    @abstractmethod
    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:
        """Begin to read the `wanted` pages, all of which there are, by column, as far as the host has room.

        `gain`: of how many pages the tokens need not be computed then. `wait`: for a while.
        """

    @abstractmethod
    def brings(self, digests: Digests, wanted: Asked) -> bool:
        """Whether some of the `wanted` pages are on their way up, and not for too long."""

    # ---- down, from host slots

    def offer(self, digests: Digests) -> None:
        """The host tier has these pages now."""

    def used(self, digests: Digests) -> None:
        """A request has used these pages."""

    def ended(self, digests: Digests) -> None:
        """A request of these pages, `[tables, pages, words]`, is over."""

    @abstractmethod
    def tick(self) -> None:
        """Take up what the threads have done, and give them what is due. Never waits."""

    @abstractmethod
    def flush(self) -> None:
        """Write what is to be written, and wait for it."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all pages, so that no request finds them any more."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, once what they are at is done. Safe twice."""

    # ---- after an interrupt, and recounts

    @property
    def held_slots(self) -> list[Slots]:
        """The host slots of each open read and write."""
        return [job.slots for job in (*self._jobs, *self._writes)]

    def settle(self) -> None:
        """Wait until both threads have done all that they were given."""
        for thread in (self._reader, self._writer):
            with suppress(RuntimeError):  # it has ended
                thread.submit(_nothing).result()

    def mend(self) -> None:
        """Begin anew with nothing known of what is there, once the threads have settled."""
        self._jobs.clear()
        self._writes.clear()

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantError` if the books do not agree."""

    # ---- inside

    def _take_up_reads(self) -> None:
        self._take_up_from(self._jobs)

    def _take_up(self) -> None:
        """Take up all that the threads have done."""
        self._take_up_reads()
        self._take_up_from(self._writes)

    def _take_up_from(self, jobs: deque[Job]) -> None:
        while jobs and jobs[0].done.done():
            self._end(jobs.popleft())

    def _end(self, job: Job) -> None:
        try:
            job.take()
        except CancelledError:
            pass
        except OSError as error:
            self._fail(error)
        finally:
            self._give_back(job)

    def _give_back(self, job: Job) -> None:
        if job.slots.size:
            self._host.pool.release(job.slots)

    @abstractmethod
    def _fail(self, error: OSError) -> None:
        """A thread has met this error: pause."""


def _nothing() -> None:
    """What a thread does last of all that it was given."""


class ReplicaTier(PagesBelow, PageReader):
    """One replica's side of the host tier: the pages to be copied there, and those on their way back.

    `PagesBelow` documents the methods that a replica calls. The tier reads from the pool's journal which pages to copy,
    and when a copy can wait no longer.
    """

    keeps = True

    def __init__(
        self,
        host: HostTier,
        pool: PagePool,
        movers: Sequence[PageMover],
        *,
        every: Callable[[Digests], Digests] | None = None,
        longest_tail: int = 0,
    ) -> None:
        """`every`, `longest_tail`: where there are objects, which are written when a request is over.

        `every` gives, of the first table's digests, those of all tables' pages. `longest_tail`: most pages of an object
        that has not all, as its last page is one after which there is a state; 0: there are no such objects.
        """
        self.host = host
        self.pool = pool
        self.lower = host.lower
        self._every, self.longest_tail = every, longest_tail
        self._movers = movers
        self._at_once = all(mover.at_once for mover in movers)
        self._no_digests: Digests = pool.index.digests_of(NO_SLOTS)
        self.storing = np.zeros(pool.num_pages + 1, np.bool_)  # whether it waits to be copied, or is being copied
        # Published pages to be copied to the host, oldest first, with their digests; an entry without pages says that
        # those digests were used, or, `[tables, pages, words]`, that their request is over.
        self.waiting: deque[tuple[Pages, Digests]] = deque()
        self._loads: dict[int, list[HostLoad]] = {}  # by row, what is on its way back for it
        self._left: list[HostLoad] = []  # begun, and their rows do not wait for them any more
        self.stores: deque[HostStore] = deque()  # copies that are begun and not over, oldest first
        self.stored = self.loaded = 0  # pages so far
        self.brought_at_once = max(1, _BROUGHT_BYTES // sum(memory.shape[1] for memory in host.memory))
        pool.journal.read(self, saves=True)

    # ---- to the host

    def came(self, pages: Pages, digests: Digests) -> None:
        """`pages` are to be copied."""
        new = ~self.storing[pages]  # a fork publishes again what it shares
        if not new.all():
            pages, digests = pages[new], digests[new]
        if pages.size:
            self.storing[pages] = True
            self.waiting.append((pages, digests))

    def store(self, most: int) -> int:
        """Copy, or begin to copy, the `most` pages that wait longest; returns how many were taken off the queue."""
        self._pass_uses()  # where copies that ran beside us held them up
        pages, digests = self._take(most)
        if not pages.size:
            return 0
        pool = self.host.pool
        absent = pool.index.find(digests) == NO_PAGE
        new, names = pages[absent], digests[absent]
        fits = min(len(new), pool.free_count)  # if copies hold all other slots, the remaining pages are not kept
        if fits:
            slots = pool.allocate(fits)
            pool.index.say_tables(slots, self.pool.index.tables_of(new[:fits]))
            marks = [mark for mover in self._movers for mark in mover.store(new[:fits], slots)]
            self.stores.append(HostStore(new[:fits], slots, names[:fits], marks))
            self.stored += fits
        kept = np.ones(len(pages), np.bool_)
        kept[np.flatnonzero(absent)[:fits]] = False
        self.storing[pages[kept]] = False
        self.poll()
        self._pass_uses()
        return len(pages)

    def going(self, pages: Pages) -> None:
        """What is still to be copied of `pages` is copied now."""
        while self.storing[pages].any():
            if self.stores:
                self._await_stores()  # copies that run beside us, on their way since an earlier step
            else:
                self.store(self._next_entry())

    @property
    def is_loading(self) -> bool:
        """Whether copies to the device were begun whose end was not taken up yet."""
        return bool(self._left)

    def poll(self) -> None:
        """Take up what the copies beside us have brought to its end."""
        while self.stores and all(mark.over() for mark in self.stores[0].marks):
            pages, slots, digests, _ = self.stores.popleft()
            self.storing[pages] = False
            # Another replica may have stored the same content meanwhile: then this slot is free again.
            self.host.pool.index.publish(slots, digests)
            self.host.pool.release(slots)
            for lower in self.lower:
                lower.offer(digests)
        for load in [load for load in self._left if all(mark.over() for mark in load.marks or ())]:
            self._left.remove(load)
            if load.digests is not None:
                self.pool.index.publish(load.pages, load.digests)  # a row may have brought the same: then it is free
            self._end(load)

    def forget_waiting(self) -> None:
        for pages, _ in self.waiting:
            self.storing[pages] = False
        self.waiting.clear()

    def leave(self, row: int, pages: Pages, names: Digests, ends: Callable[[Digests], Asked]) -> None:
        """The row no longer needs the pages being restored for it; a running copy keeps its pages until its end.

        The use of `pages` counts once the last of them are copied. Otherwise these would be evicted last, after the
        first pages, without which they are worthless.
        """
        for load in self._loads.pop(row, ()):
            if load.marks is None:
                self._end(load)
            else:
                self._left.append(load)
        if pages.size:
            self.waiting.append((NO_SLOTS, self.pool.index.digests_of(pages)))
            if self._every is not None and len(names):
                every, stops = self._every(names), [len(names)]
                if self.longest_tail:
                    stops = [*(np.flatnonzero(ends(names)) + 1).tolist(), *stops]
                self.waiting.extend((NO_SLOTS, every[:, :stop]) for stop in stops)
            self._pass_uses()

    # ---- and back

    def slots(self, digests: Digests) -> Slots:
        return self.host.pool.index.find(digests)

    def hold(self, slots: Slots) -> None:
        self.host.pool.hold(slots)

    def used(self, digests: Digests) -> None:
        self.waiting.append((NO_SLOTS, digests))
        self._pass_uses()

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        load = HostLoad(slots, pages)
        self._keep(pages)
        self._loads.setdefault(row, []).append(load)
        if not self._at_once:
            self._begin(load)

    # ---- what lies below

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
    def is_bringing(self) -> bool:
        self.poll()
        return any(load.digests is not None for load in self._left)

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
            if lower.asks:  # one that is left alone may have nothing
                coming |= lower.ask(digests, lower.has_of(digests, left, perhaps=True))
            left = left & ~lower.has_of(digests, left, perhaps=False)
        return coming

    def to_host(self, digests: Digests, wanted: Asked, gain: int, *, wait: bool) -> bool:
        slots = self.slots(digests[wanted])
        if np.count_nonzero(slots) == len(slots):
            return False
        self.host.touch(slots[slots != NO_PAGE])  # what is fetched must not push out what is needed beside it
        coming = False
        for lower in self.lower:
            there = lower.has_of(digests, wanted, perhaps=False)  # first, as it takes up what has come
            wanted = wanted & ~self.host_has(digests, wanted)
            there &= wanted
            lower.fetch(digests, there, wait=wait, gain=gain)
            coming |= lower.brings(digests, there)
            wanted &= ~there
        return coming

    def bring(self, pages: Pages, slots: Slots, digests: Digests) -> None:
        load = HostLoad(slots, pages, digests=digests)
        self._keep(pages)
        self._begin(load)
        self._left.append(load)
        self.poll()  # a copy that has taken the caller's time is over

    def arrive(self, rows: Rows) -> None:
        """Copies that take the caller's time are made now, not before: a request that is given up first costs none."""
        asked = as_rows(rows) if self._loads else np.zeros(0, np.int64)
        for row in [row for row in self._loads if (asked == row).any()]:
            for load in self._loads[row]:
                for mark in self._begin(load):
                    mark.order()
                self._left.append(load)
            del self._loads[row]  # last: what interrupts a load has it begun again
        self.poll()

    def coming(self, row: int | None = None) -> list[Pages]:
        return [load.pages for load in (self.open_loads if row is None else self._loads.get(row, ()))]

    def store_all(self) -> None:
        while self.waiting or self.stores:
            self._await_stores()
            self.store(self._next_entry())

    def load_all(self) -> None:
        self.arrive(np.array(list(self._loads), np.int64))
        for load in self._left:
            for mark in load.marks or ():
                mark.wait()
        self.poll()

    @property
    def open_loads(self) -> list[HostLoad]:
        """Every load that is not over: recounted by `check`."""
        return [*self._left, *(load for loads in self._loads.values() for load in loads)]

    def mend(self, rows: Iterable[int]) -> None:
        claimed = {*rows}
        self._loads = {row: loads for row, loads in self._loads.items() if row in claimed}
        self._left.clear()  # all of these are over by now
        self.storing[:] = False
        for store in self.stores:
            self.storing[store.pages] = True
        kept, index = deque[tuple[Pages, Digests]](), self.pool.index
        for pages, digests in self.waiting:
            stay = index.published[pages] & ~self.storing[pages]
            stay &= (index.digests_of(pages) == digests).all(axis=1) if pages.size else True
            if not pages.size:
                kept.append((pages, digests))
            elif stay.any():
                self.storing[pages[stay]] = True
                kept.append((pages[stay], digests[stay]))
        self.waiting = kept
        # A page may have been published just before the interrupt, or have left the queue and come no further.
        published = np.flatnonzero(index.published & ~self.storing).astype(np.int32)
        digests = index.digests_of(published)
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

    def _next_entry(self) -> int:
        self._pass_uses()
        return len(self.waiting[0][0]) if self.waiting else 0

    def _pass_uses(self) -> None:
        """Let the uses count that no page waits before."""
        while self.waiting and not self.waiting[0][0].size and not self.stores:
            _, digests = self.waiting.popleft()
            if digests.ndim > 2:
                for lower in self.lower:
                    lower.ended(digests)
                continue
            slots = self.host.pool.index.find(digests)
            self.host.touch(slots[slots != NO_PAGE])
            for lower in self.lower:
                lower.used(digests)

    def _await_stores(self) -> None:
        for store in self.stores:
            for mark in store.marks:
                mark.wait()
        self.poll()

    def _begin(self, load: HostLoad) -> list[CopyMark]:
        if load.marks is None:
            load.marks = [mark for mover in self._movers for mark in mover.load(load.slots, load.pages)]
            self.loaded += len(load.pages)
        return load.marks

    def _end(self, load: HostLoad) -> None:
        self._let_go(load.pages)
        self.host.pool.release(load.slots)

    def _keep(self, pages: Pages) -> None:
        """Keep `pages` from all others, and from readers, until `_let_go`."""
        self.pool.add_writer(pages)

    def _let_go(self, pages: Pages) -> None:
        self.pool.drop_writer(pages)
