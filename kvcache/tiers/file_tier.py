"""The file tier keeps pages of the host tier in files of a folder, where they are found by their digests.

The pages outlive the process. Several processes may share the folder. Each process scans the folder from time to time
for files that other processes have written. If a file that a process knows is gone, a lookup of one of its pages ends
as a miss.
"""

import contextlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, PoolTooSmallError
from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import Asked, Slots
from kvcache.tiers.callers_io import CallersPages
from kvcache.tiers.host_tier import PAUSE_S, HostTier, LowerTier
from kvcache.tiers.page_files import FileRefusal, read_pages
from kvcache.tiers.page_folder import PageFolder, Scan
from kvcache.types import PageIO, Part

Entries = NDArray[np.int32]

NO_ENTRY = NO_PAGE

MakeIO = Callable[[Sequence[torch.Tensor]], PageIO]
"""Makes the object with which one thread moves bytes between files and the given host memory."""

FILE_BYTES = 16 << 20
# In seconds: the longest time that pages wait to be written, if there are not enough of them to fill a file.
_LONGEST_QUEUED_S = 1.0
_LONGEST_WAIT_S = 0.1  # in seconds: the longest time that a reservation waits for pages that are being read from files
_RESCAN_S = 5.0
# The refusals that show wrong bytes in a file. The other refusals come from failed system calls.
_DAMAGE = frozenset({FileRefusal.CUT, FileRefusal.FOREIGN, FileRefusal.CORRUPTED})

_log = logging.getLogger("pagewire")


@dataclass(eq=False, slots=True)
class _File:
    number: int
    # the entry of each page of the file, in order; NO_ENTRY for a page that lookups no longer find in this file
    entries: Entries
    size: int


class FileIndex:
    """The pages of all known files.

    The files have at most `max_bytes` together. An *entry* is the index of a page in the arrays.
    """

    def __init__(self, max_bytes: int, page_bytes: int, digest_words: int) -> None:
        capacity = max_bytes // page_bytes
        self._max_bytes = max_bytes
        # the pool from which entries are allocated; each file holds the entries of its pages
        self._pool = PagePool(capacity, digest_words)
        self.pages = self._pool.index
        self._file_of = np.zeros(capacity + 1, np.int32)
        self._index_of = np.zeros(capacity + 1, np.int32)
        self._files: OrderedDict[str, _File] = OrderedDict()  # least recently used first
        self._names: dict[int, str] = {}
        self._numbers = 0
        self.bytes = 0  # the size of all files together
        # A mask of the entries that are being read. The caller sets and clears the marks. An entry keeps its mark even
        # if it is reused for another page.
        self.reading = np.zeros(capacity + 1, np.bool_)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def find(self, digests: Digests) -> Entries:
        """Returns the entry of the page with each of these digests; `NO_ENTRY` if no known file has the page."""
        return self.pages.find(digests)

    def whereabouts(self, entries: Entries) -> list[tuple[str, int, NDArray[np.intp]]]:
        """Split `entries` into runs of pages that lie next to each other in one file.

        Returns, for each run, the name of the file, the index of the run's first page in the file, and the run's
        indices in `entries`.
        """
        files, indices = self._file_of[entries], self._index_of[entries]
        cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(indices) != 1)) + 1
        runs = np.split(np.arange(len(entries)), cuts)
        return [(self._names[int(files[at[0]])], int(indices[at[0]]), at) for at in runs if at.size]

    def use(self, entries: Entries) -> None:
        """Mark the files of these entries as just used, so that they are removed after all other files."""
        for number in np.unique(self._file_of[entries]).tolist():
            self._files.move_to_end(self._names[number])

    def room_for(self, size: int) -> list[str]:
        """Forget the least recently used files until `size` more bytes fit.

        Returns the names of the forgotten files.
        """
        names: list[str] = []
        while self._files and self.bytes + size > self._max_bytes:
            names.append(next(iter(self._files)))
            self.forget(names[-1])
        return names

    def add(self, name: str, size: int, digests: Digests, tables: NDArray[np.intp]) -> None:
        """Add a file. `digests` has the distinct digests of its pages, and `tables` has the block table of each page.

        There must be room for the file. A known file of the same name is replaced.
        """
        self.forget(name)
        entries = self._pool.allocate(len(digests))
        self.pages.tables[entries] = tables
        known = self.pages.publish(entries, digests) != entries  # the pages that another known file also has
        self._pool.release(entries[known])
        self._numbers += 1
        self._file_of[entries], self._index_of[entries] = self._numbers, np.arange(len(entries))
        entries[known] = NO_ENTRY
        self._files[name] = _File(self._numbers, entries, size)
        self._names[self._numbers] = name
        self.bytes += size

    def forget(self, name: str) -> None:
        """Forget a file. Does nothing if the file is not known."""
        file = self._files.pop(name, None)
        if file is None:
            return
        self._let_go(file.entries[file.entries != NO_ENTRY])
        del self._names[file.number]
        self.bytes -= file.size

    def drop(self, entries: Entries) -> None:
        """Forget the pages of these entries. The other pages of their files stay."""
        for entry in entries.tolist():
            self._files[self._names[int(self._file_of[entry])]].entries[self._index_of[entry]] = NO_ENTRY
        self._let_go(entries)

    def clear(self) -> None:
        """Forget all files. The journal does not report the pages as removed."""
        self.pages.clear()
        self._pool.rebuild(*np.zeros((2, len(self.reading)), np.int64))
        self._files.clear()
        self._names.clear()
        self.bytes = 0
        self.reading[:] = False

    def check(self) -> None:
        listed = [file.entries[file.entries != NO_ENTRY] for file in self._files.values()]
        entries = np.concatenate([*listed, np.zeros(0, np.int32)])
        if not np.array_equal(np.sort(entries), np.flatnonzero(self.pages.published)):
            found = np.count_nonzero(self.pages.published)
            raise InvariantError(
                f"file tier: its files have {len(entries)} entries, but the index has {found} entries: both must have "
                "the same entries"
            )
        holders = np.bincount(entries, minlength=len(self.reading))
        try:
            self._pool.check(holders, np.zeros_like(holders))
        except InvariantError as error:
            raise InvariantError(f"file tier: {error}") from error
        size = sum(file.size for file in self._files.values())
        if not size == self.bytes <= self._max_bytes:
            raise InvariantError(
                f"file tier: its files have {size} bytes, but {self.bytes} are counted and {self._max_bytes} are "
                "allowed"
            )
        for name, file in self._files.items():
            there = np.flatnonzero(file.entries != NO_ENTRY)
            mine = file.entries[there]
            if self._names.get(file.number) != name or (self._file_of[mine] != file.number).any():
                raise InvariantError(f"file tier: {name} and its entries do not refer to each other")
            if not np.array_equal(self._index_of[mine], there):
                raise InvariantError(f"file tier: the entries of {name} have wrong positions of pages in the file")

    def _let_go(self, entries: Entries) -> None:
        self.pages.withdraw(entries)
        self._pool.release(entries)


class FileTier(LowerTier):
    """Files of pages, below a host tier.

    They take at most `max_bytes`, and the least recently used files are removed first. `make_io` is called once for
    each of the two threads. Raises `PoolTooSmallError` if `max_bytes` is too small for one page.
    """

    def __init__(self, folder: PageFolder, max_bytes: int, host: HostTier, make_io: MakeIO) -> None:
        layout = folder.layout
        if not layout.most_in(max_bytes):
            raise PoolTooSmallError(
                f"file tier: {max_bytes} bytes are less than one page: at least {layout.size_of(1)} are needed"
            )
        super().__init__(host, "file")
        self._folder = folder
        self._layout = layout
        self._max_bytes = max_bytes
        self._read_io, self._write_io = (CallersPages(make_io, host.memory) for _ in range(2))
        # The largest number of pages in a file. It is limited so that a small host tier has enough other slots while
        # the slots of one file are held for writing.
        most = (FILE_BYTES // layout.page_bytes, host.pool.num_pages // 4, layout.most_in(max_bytes))
        self.pages_a_file = max(1, min(most))
        self._index = FileIndex(max_bytes, layout.page_bytes, layout.digest_bytes // 8)
        # the digests of pages that the host tier has offered, with the time of the offer
        self._queue: deque[tuple[float, Digests]] = deque()
        self._scanned = self._clock()
        self._take_up_scan(folder.scan(frozenset(), first=True))

    # ---- reads from files into host slots

    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:  # noqa: ARG002 - all is known here
        self._take_up(self._reader)
        found = np.zeros_like(asked)
        found[asked] = self._index.find(digests[asked]) != NO_ENTRY
        return found

    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:  # noqa: ARG002 - it always pays
        """Begin to read the `wanted` pages. With `wait`, waits at most `_LONGEST_WAIT_S` for all running reads."""
        names = digests.swapaxes(0, 1)[wanted.T][: self._host.pool.free_count // 2]
        entries = self._index.find(names)
        absent = (self._host.pool.index.find(names) == NO_PAGE) & ~self._index.reading[entries]
        if absent.any():
            self._begin_reads(entries[absent], names[absent])
        if wait and self._reader.jobs:
            # The thread reads in order, so the newest read is the last one to end.
            self._reader.jobs[-1].wait(_LONGEST_WAIT_S)
            self._take_up(self._reader)

    def brings(self, digests: Digests, wanted: Asked) -> bool:
        self._take_up(self._reader)
        return bool(self._index.reading[self._index.find(digests[wanted])].any())

    @property
    def generation(self) -> int:
        """The number of times that pages were added to the known files or removed from them."""
        return self._index.pages.generation

    # ---- writes from host slots to files

    def offer(self, digests: Digests) -> None:
        """Queue pages that the host tier has now. They are written later, unless the host has lost them by then."""
        if self._clock() >= self._paused_until:
            self._queue.append((self._clock(), digests))

    def used(self, digests: Digests) -> None:
        """Record that a request has used the pages with these digests.

        Their files are then kept longer. Pages that are in no file are queued to be written again.
        """
        entries = self._index.find(digests)
        known = entries != NO_ENTRY
        self._index.use(entries[known])
        if not known.all():
            self.offer(digests[~known])

    def tick(self) -> None:
        self._take_up(self._reader, self._writer)
        if self._writer.jobs:
            return
        if self._clock() - self._scanned > _RESCAN_S:
            self._scanned = self._clock()
            self._begin_job(self._writer, partial(self._folder.scan, self._index.names), self._take_up_scan)
        elif self._queue:
            queued = sum(len(digests) for _, digests in self._queue)
            if queued >= self.pages_a_file or self._clock() - self._queue[0][0] > _LONGEST_QUEUED_S:
                self._begin_write()

    def flush(self) -> None:
        """Write all pages that were offered, and wait until they are written."""
        while self._writer.jobs or self._queue:
            if not self._writer.jobs:
                self._begin_write()
            for job in self._writer.jobs:
                job.wait()
            self._take_up(self._reader, self._writer)

    def reset(self) -> None:
        """Forget every file. Starts a new epoch, so that no process that starts later finds the old files."""
        self._queue.clear()
        self.flush()
        for job in self._reader.jobs:
            job.wait()
        self._take_up(self._reader)
        for name in self._index.names:
            self._index.forget(name)
        self._writer.submit(self._folder.remove, self._folder.renew())

    def close(self) -> None:
        """Finish all work that has begun, and stop the threads. Safe to call twice."""
        self._reader.shutdown()
        self._take_up(self._reader)  # handles the last reads, which frees their slots
        self._writer.shutdown()

    def counts(self, noun: str) -> Mapping[str, int]:
        reasons = FileRefusal if noun == "blocks" else ()
        return {
            f"file_{noun}_written": self.written,
            f"file_{noun}_read": self.read,
            f"file_{noun}_refused": self.refusals.total(),
            **{f"file_{noun}_{why}": self.refusals[why] for why in reasons},
            "files_refused": self._folder.refusals.total(),
        }

    @property
    def index(self) -> PrefixIndex:
        """The pages of all known files."""
        return self._index.pages

    def restart(self) -> None:
        """Drop all jobs, and forget which pages the tier has. The next scan of the folder finds all files again."""
        super().restart()
        self._queue.clear()
        self._index.clear()
        self._scanned = self._clock() - _RESCAN_S

    def check(self) -> None:
        self._index.check()
        reading, marked = sum(len(job.slots) for job in self._reader.jobs), np.count_nonzero(self._index.reading)
        if reading != marked:
            raise InvariantError(f"file tier: {reading} entries are being read, but {marked} are marked")

    # ---- inside

    def _begin_reads(self, entries: Entries, digests: Digests) -> None:
        slots = self._host.pool.allocate(len(entries))
        self._index.reading[entries] = True
        self._index.use(entries)
        for name, first, at in self._index.whereabouts(entries):
            path, parts = self._folder.path / name, self._host.parts(slots[at])
            tables = self._index.pages.tables[entries[at]]
            names = self._layout.names(digests[at], tables)
            read = partial(self._read_file, path, first, names, parts)
            take = partial(self._take_read, name, entries[at], slots[at], digests[at], tables)
            self._begin_job(self._reader, read, take, slots[at])

    def _read_file(self, path: Path, first: int, names: Digests, pages: list[list[Part]]) -> list[FileRefusal | None]:
        """Read pages of a file. Runs in the read thread.

        Also marks the file as just used. So other processes, and this process after a restart, keep the file longer.
        """
        refusals = read_pages(path, self._layout, first, names, pages, self._read_io)
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        return refusals

    def _take_read(
        self,
        name: str,
        entries: Entries,
        slots: Slots,
        digests: Digests,
        tables: NDArray[np.integer[Any]],
        refusals: list[FileRefusal | None],
    ) -> None:
        """Handle the end of a read of a file into `slots`.

        Publish the pages that were read, and drop the entries of refused pages. `tables` has the block table of each
        page. If the file has wrong bytes, the file is removed. Otherwise each process that starts or scans the folder
        would find the damaged pages again, in place of good copies that are written later. The file's good pages are
        written again when they are used.
        """
        self._index.reading[entries] = False
        right = self._publish(slots, digests, tables, refusals)
        if right.all():
            return
        # an entry that belongs to another page by now is kept
        lost = entries[~right & (self._index.find(digests) == entries)]
        self._index.drop(lost)
        if lost.size and not _DAMAGE.isdisjoint(refusals):
            self._index.forget(name)
            self._remove(name)

    def _begin_write(self) -> None:
        digests = np.concatenate([offered for _, offered in self._queue])[: self.pages_a_file]
        self._unqueue(len(digests))
        slots = self._host.pool.index.find(digests)
        _, once = np.unique(slots, return_index=True)  # a page that was offered twice is written once
        once = np.sort(once)
        once = once[(slots[once] != NO_PAGE) & (self._index.find(digests[once]) == NO_ENTRY)]
        slots, digests = slots[once], digests[once]
        if not slots.size:
            return
        self._host.pool.hold(slots)
        self._make_room(self._layout.size_of(len(slots)))
        parts = self._host.parts(slots)
        names = self._layout.names(digests, self._host.pool.index.tables[slots])
        write = partial(self._folder.write, names, parts, self._write_io)
        self._begin_job(self._writer, write, partial(self._take_written, names), slots)

    def _unqueue(self, count: int) -> None:
        while count:
            when, offered = self._queue.popleft()
            if len(offered) > count:
                self._queue.appendleft((when, offered[count:]))
            count -= min(count, len(offered))

    def _take_written(self, names: Digests, written: tuple[str, int]) -> None:
        name, size = written
        self.written += len(names)
        self._add(name, size, names)

    def _fail(self, error: OSError) -> None:
        _log.warning("file tier: a write failed; nothing more is written for %.0f s: %s", PAUSE_S, error)
        self._queue.clear()

    def _take_up_scan(self, scan: Scan) -> None:
        for name in scan.gone:
            self._index.forget(name)
        for name, size, names in scan.found:
            if name not in self._index and size <= self._max_bytes:
                self._add(name, size, names)

    def _add(self, name: str, size: int, names: Digests) -> None:
        self._make_room(size)
        self._index.add(name, size, *self._layout.digests_and_tables(names))

    def _make_room(self, size: int) -> None:
        for name in self._index.room_for(size):
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._writer.submit(Path.unlink, self._folder.path / name, missing_ok=True)
