"""The file tier: pages of the host tier in a folder, found by their digests. Outlives the process.

The loop's thread keeps all books. Two threads of the tier's own move the bytes, one for reads and one for writes, from
and to host slots that are held meanwhile. Several processes may share the folder: each looks for the others' files now
and then, and takes a file that is gone for a miss.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, PoolTooSmallError
from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.replica.resume import Asked, Slots
from kvcache.tiers.file_index import NO_ENTRY, Entries, FileIndex
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.page_files import FileFormat, FileRefusal, FileRefusals, read_pages, write_pages
from kvcache.tiers.page_folder import PageFolder, Scan
from kvcache.types import PageIO, Part

MakeIO = Callable[[Sequence[torch.Tensor]], PageIO]
"""Makes what moves the bytes for one thread, given the host memory that it moves them from and to."""

FILE_BYTES = 16 << 20
_LONGEST_QUEUED_S = 1.0  # then a file is written that is not full
_LONGEST_WAIT_S = 0.1  # of a reservation, for pages that are on their way
_RESCAN_S = 5.0
_PAUSE_S = 10.0  # after a write that failed
# What is wrong with the bytes of a file, and not with a call of the system.
_DAMAGE = frozenset({FileRefusal.CUT, FileRefusal.FOREIGN, FileRefusal.CORRUPTED})

_log = logging.getLogger("pagewire")


@dataclass(eq=False, slots=True)
class _Read:
    entries: Entries
    slots: Slots
    digests: Digests
    tables: NDArray[np.intp] | None  # of each page its block table, where there are several
    refusals: Future[list[FileRefusal | None]]  # of each page; None: it is right


@dataclass(eq=False, slots=True)
class _Write:
    slots: Slots
    names: Digests
    named: Future[tuple[str, int]]


class FileTier:
    """Files of pages below a host tier, least recently used first, of `max_bytes` together.

    `make_io` is called once for each of the two threads. Raises `PoolTooSmallError` where not a file of one page fits.
    """

    asks = False  # whether somebody has to be asked for what is there

    def __init__(self, folder: PageFolder, layout: FileFormat, max_bytes: int, host: HostTier, make_io: MakeIO) -> None:
        if not layout.most_in(max_bytes):
            raise PoolTooSmallError(f"file tier: {max_bytes} bytes do not hold a page: {layout.size_of(1)} are needed")
        self._folder = folder
        self._clock = time.monotonic
        self._layout = layout
        self._max_bytes = max_bytes
        self._host = host
        self._read_io, self._write_io = make_io(host.memory), make_io(host.memory)
        self._reader = ThreadPoolExecutor(1, "pagewire-file-reads")
        self._writer = ThreadPoolExecutor(1, "pagewire-file-writes")
        # A small host tier must not stand still while a file is written from its slots.
        most = (FILE_BYTES // layout.page_bytes, host.pool.num_pages // 4, layout.most_in(max_bytes))
        self.pages_a_file = max(1, min(most))
        self._index = FileIndex(max_bytes, layout.page_bytes, layout.digest_bytes // 8)
        if layout.tables > 1:
            self._index.pages.tables = np.zeros(len(self._index.pages.published), np.intp)
        self._queue: deque[tuple[float, Digests]] = deque()  # when they were offered
        self._reads: list[_Read] = []
        self._write: _Write | None = None
        self._scan: Future[Scan] | None = None
        self._scanned = self._clock()
        self._paused_until = 0.0
        self.written = self.read = 0  # pages so far
        self.refusals = FileRefusals()  # pages that were wrong, cut short or gone when they were to be read
        self._take_up_scan(folder.scan(layout, frozenset(), first=True))

    # ---- up: from files to host slots

    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:  # noqa: ARG002 - what there is, is known
        """Which of the `asked` pages of the block tables there are in files, `[tables, pages]`."""
        self._take_up_reads()
        found = np.zeros_like(asked)
        found[asked] = self._index.find(digests[asked]) != NO_ENTRY
        return found

    def ask(self, _digests: Digests, _perhaps: Asked, /) -> bool:
        """A no-op: the index of files is local."""
        return False

    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:  # noqa: ARG002 - it always pays
        """Begin to read the `wanted` pages, all of which there are, by column, as far as the host has room.

        `wait`, for at most `_LONGEST_WAIT_S`, for those that are on their way.
        """
        names = digests.swapaxes(0, 1)[wanted.T][: self._host.pool.free_count // 2]
        entries = self._index.find(names)
        absent = (self._host.pool.index.find(names) == NO_PAGE) & ~self._index.reading[entries]
        if absent.any():
            self._begin_reads(entries[absent], names[absent])
        if wait and self._reads:
            self._await_reads()
            self._take_up_reads()

    def brings(self, digests: Digests, wanted: Asked, /) -> bool:
        """Whether some of the `wanted` pages are on their way up."""
        self._take_up_reads()
        return bool(self._index.reading[self._index.find(digests[wanted])].any())

    @property
    def generation(self) -> int:
        """Counts the pages that come to files and go."""
        return self._index.pages.generation

    def coming(self, digests: Digests, _first: int, /) -> bool:
        """Whether some of these pages are on their way up."""
        self._take_up_reads()
        return bool(self._index.reading[self._index.find(digests)].any())

    # ---- down: from host slots to files

    def offer(self, digests: Digests) -> None:
        """The host tier has these pages now: they are written, if they are still there when their turn comes."""
        if self._clock() >= self._paused_until:
            self._queue.append((self._clock(), digests))

    def used(self, digests: Digests) -> None:
        """A request has used these pages: their files stay longer, and what was dropped is written again."""
        entries = self._index.find(digests)
        known = entries != NO_ENTRY
        self._index.use(entries[known])
        if not known.all():
            self.offer(digests[~known])

    def ended(self, digests: Digests) -> None:
        """A request is over: what it used, `used` has been told."""

    def tick(self) -> None:
        """Take up what the threads have done, and give them what is due. Never waits."""
        self._take_up_reads()
        if self._write is not None and self._write.named.done():
            self._take_up_write(self._write)
        if self._write is None and self._queue:
            queued = sum(len(digests) for _, digests in self._queue)
            if queued >= self.pages_a_file or self._clock() - self._queue[0][0] > _LONGEST_QUEUED_S:
                self._begin_write()
        if self._scan is not None and self._scan.done():
            self._take_up_scan(self._scan.result())
            self._scan = None
        if self._scan is None and self._clock() - self._scanned > _RESCAN_S:
            self._scanned = self._clock()
            self._scan = self._writer.submit(self._folder.scan, self._layout, self._index.names)

    def flush(self) -> None:
        """Write everything that was offered, and wait for it."""
        while self._write is not None or self._queue:
            if self._write is not None:
                self._write.named.exception()
                self._take_up_write(self._write)
            else:
                self._begin_write()

    def reset(self) -> None:
        """Forget every file, and let nobody find them: the folder starts anew."""
        self._queue.clear()
        self.flush()
        for read in self._reads:
            read.refusals.exception()
        self._take_up_reads()
        if self._scan is not None:
            self._scan.exception()
            self._scan = None
        for name in self._index.names:
            self._index.forget(name)
        self._writer.submit(self._folder.remove, self._folder.renew())

    def close(self) -> None:
        """End the threads, once all that was begun is done. Safe twice."""
        self._reader.shutdown()
        self._take_up_reads()  # the slots of what was still being read
        self._writer.shutdown()

    @property
    def files_refused(self) -> int:
        """Files that lay in the folder and were not taken up. `PageFolder.refusals` has the reasons."""
        return self._folder.refusals.total()

    @property
    def index(self) -> PrefixIndex:
        """The pages of all files that are known."""
        return self._index.pages

    @property
    def held_slots(self) -> list[Slots]:
        """The host slots of each open read and write: recounted by `check`."""
        return [read.slots for read in self._reads] + ([] if self._write is None else [self._write.slots])

    def settle(self) -> None:
        """Wait until both threads have done all that they were given."""
        for thread in (self._reader, self._writer):
            with contextlib.suppress(RuntimeError):  # it has ended
                thread.submit(_nothing).result()

    def mend(self) -> None:
        """Begin anew with no file, once the threads have settled: the next look at the folder finds what is there."""
        self._reads.clear()
        self._write = self._scan = None
        self._queue.clear()
        self._index.clear()
        self._scanned = self._clock() - _RESCAN_S

    def check(self) -> None:
        self._index.check()
        reading = np.concatenate([*(read.entries for read in self._reads), np.zeros(0, np.int32)])
        if not np.array_equal(np.sort(reading), np.flatnonzero(self._index.reading)):
            raise InvariantError(f"file tier: {len(reading)} entries are being read, others are marked")

    # ---- inside

    def _begin_reads(self, entries: Entries, digests: Digests) -> None:
        slots = self._host.pool.allocate(len(entries))
        self._index.reading[entries] = True
        self._index.use(entries)
        for name, first, at in self._index.whereabouts(entries):
            path, parts = self._folder.path / name, self._host.parts(slots[at])
            tables = self._index.pages.tables_of(entries[at])
            names = self._layout.names(digests[at], tables)
            refusals = self._reader.submit(self._read_file, path, first, names, parts)
            self._reads.append(_Read(entries[at], slots[at], digests[at], tables, refusals))

    def _read_file(self, path: Path, first: int, names: Digests, pages: list[list[Part]]) -> list[FileRefusal | None]:
        """In the thread of reads. The file counts as used just now: for other processes, and for the next start."""
        refusals = read_pages(path, self._layout, first, names, pages, self._read_io)
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
        return refusals

    def _await_reads(self) -> None:
        deadline = time.monotonic() + _LONGEST_WAIT_S
        for read in self._reads:
            try:
                read.refusals.exception(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return

    def _take_up_reads(self) -> None:
        while self._reads and self._reads[0].refusals.done():
            read = self._reads.pop(0)
            refusals = read.refusals.result()
            right = np.array([refusal is None for refusal in refusals], np.bool_)
            self._index.reading[read.entries] = False
            self._host.pool.index.say_tables(read.slots, read.tables)
            self._host.pool.index.publish(read.slots[right], read.digests[right])
            self._host.pool.release(read.slots)
            self.read += int(right.sum())
            self.refusals.update(refusal for refusal in refusals if refusal)
            if not right.all():
                still = self._index.find(read.digests) == read.entries  # not replaced meanwhile
                self._lose(read.entries[~right & still], set(refusals))

    def _lose(self, entries: Entries, refusals: set[FileRefusal | None]) -> None:
        """These pages, all of one file, could not be read. A file whose bytes are wrong is removed.

        Otherwise each start, and each process that shares the folder, would find the damaged page again, in place of
        the copy that has been written since. The other pages of the file are written again when they are used.
        """
        names = {name for name, _, _ in self._index.whereabouts(entries)}
        self._index.drop(entries)
        if refusals & _DAMAGE:
            for name in names:
                self._index.forget(name)
                self._writer.submit(Path.unlink, self._folder.path / name, missing_ok=True)

    def _begin_write(self) -> None:
        digests = np.concatenate([offered for _, offered in self._queue])[: self.pages_a_file]
        self._unqueue(len(digests))
        slots = self._host.pool.index.find(digests)
        _, once = np.unique(slots, return_index=True)  # offered twice, it is written once
        once = np.sort(once)
        once = once[(slots[once] != NO_PAGE) & (self._index.find(digests[once]) == NO_ENTRY)]
        slots, digests = slots[once], digests[once]
        if not slots.size:
            return
        self._host.pool.hold(slots)
        self._make_room(self._layout.size_of(len(slots)))
        parts = self._host.parts(slots)
        names = self._layout.names(digests, self._host.pool.index.tables_of(slots))
        named = self._writer.submit(_write, self._folder, self._layout, names, parts, self._write_io)
        self._write = _Write(slots, names, named)

    def _unqueue(self, count: int) -> None:
        while count:
            when, offered = self._queue.popleft()
            if len(offered) > count:
                self._queue.appendleft((when, offered[count:]))
            count -= min(count, len(offered))

    def _take_up_write(self, write: _Write) -> None:
        self._write = None
        self._host.pool.release(write.slots)
        try:
            name, size = write.named.result()
        except OSError as error:
            _log.warning("file tier: no page is written for %.0f s: %s", _PAUSE_S, error)
            self._paused_until = self._clock() + _PAUSE_S
            self._queue.clear()
            return
        self.written += len(write.names)
        self._add(name, size, write.names)

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
            self._writer.submit(Path.unlink, self._folder.path / name, missing_ok=True)


def _nothing() -> None:
    """What a thread does last of all that it was given."""


def _write(
    folder: PageFolder, layout: FileFormat, names: Digests, pages: Sequence[Sequence[Part]], io: PageIO
) -> tuple[str, int]:
    """Write a file of pages, into a folder that is made again where somebody has deleted or replaced it."""
    try:
        return write_pages(folder.path, next(folder.drafts), layout, names, pages, io)
    except (FileNotFoundError, NotADirectoryError):  # or the draft was taken for abandoned: hardly twice
        folder.make_again()
        return write_pages(folder.path, next(folder.drafts), layout, names, pages, io)
