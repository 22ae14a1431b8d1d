"""The object tier keeps pages of the host tier in an object store, where they are found by their digests.

The pages outlive the machine. All state belongs to the loop's thread. Two other threads talk to the store: one asks and
reads, the other writes. The loop never waits for these threads. If pages have not arrived when a request needs them,
the request computes the tokens of these pages. A store that fails, or does not answer in time, is not used for a while.

When a request is released, the pages of its prompt are written, many pages to one object. This tier never lists or
deletes objects. The rules of the bucket must let old objects expire. Looking up an expired object ends as a miss.

An object holds `count` consecutive pages of a prompt. Each page is followed by a record, as in a file of pages:

    page 0 │ row 0 │ page 1 │ row 1 │ …
             digest, checksum

The first `count` pages of a prompt are one object, the next `count` pages are another one, and so on. If fewer than
`count` pages are left at the end, they are in no object. With `tails`, they form a shorter object, a tail. Tails are
used for recurrent states, because another request resumes only where a run ends, which may be after any page. An object
is named by the digest of its last page, which covers the tokens of all its pages. So the objects that a lookup asks for
follow from the prompt alone, and no list of objects has to be kept or read. Consecutive pages of an object can be read
as one range.

Each block table has its own objects. The first object of each table covers the same pages of a prompt, and so do the
second objects, and so on. The first objects of all tables are written first, then the second objects of all tables. An
object is written only if the host has all its pages. An object of a table with a window also includes pages that have
fallen out of the request's window.

A lookup asks for the objects that a request needs to resume after the longest prefix. A table of full attention needs
all objects of the prefix. A table with a window needs only the objects with tokens that a query at the end of the
prefix sees.

A lookup asks the store in two rounds. The first round finds where the existing objects of the tables of full attention
end. The second round asks for the objects that the tables with windows need at this end. If some of these objects do
not exist, a third round asks for all objects of the tables with windows.
"""

import logging
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages_below import NO_SLOTS, Asked, Slots
from kvcache.tiers.callers_io import CallersObjects
from kvcache.tiers.host_tier import PAUSE_S, HostTier, Job, LowerTier, nothing
from kvcache.tiers.page_files import FileFormat, FileRefusal
from kvcache.types import MakeObjectIO, ObjectRange, Part

# In seconds. After this time pages are read again, even if reading has been slower than computing so far. The store may
# have become faster.
_TRY_S = 30.0
_WEIGHT = 0.25  # the weight of the newest value in a running average
MEMORY_BYTES = 16 << 20  # in bytes: how much a thread moves in one call, unless a single object is larger
_EPOCH = re.compile(rb"[0-9a-f]{16}")
_EPOCH_BYTES = 16
_FIRST_EPOCH = "0" * _EPOCH_BYTES  # the epoch of a namespace that was never reset
# in seconds: how long an object is assumed to be absent after the store has answered that it is absent
_ABSENT_S = 10.0
_LONGEST_FLUSH_S = 10.0
_MOST_KNOWN = 1 << 16  # the largest number of objects for which the tier remembers whether they exist
MOST_ASKED = 256  # the largest number of objects of one block table in a query to the store
MOST_QUEUED = 256  # the largest number of objects of one block table that wait to be written
_PRESENT, _UNKNOWN, _ABSENT = 1, 0, -1
_States = NDArray[np.int8]  # `[tables, objects]`

_log = logging.getLogger("pagewire")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """The layout of all objects of one namespace. `count` is a part of the namespace."""

    page: FileFormat
    count: int  # the number of pages in an object
    # whether the last pages of a run form an object of their own even if they are fewer than `count`
    tails: bool = False

    @property
    def record_bytes(self) -> int:
        """The size of a page together with its record, in bytes."""
        return self.page.page_bytes + self.page.row_bytes

    @property
    def object_bytes(self) -> int:
        return self.count * self.record_bytes

    def bounds(self, pages: int) -> list[tuple[int, int]]:
        """Returns the range of pages, `(first, end)`, in each object for a run of `pages` pages."""
        ends = [*range(self.count, pages + 1, self.count)]
        if self.tails and pages % self.count:
            ends.append(pages)
        return [*zip([0, *ends], ends, strict=False)]

    def key(self, epoch: str, name: bytes) -> str:
        return f"{self.page.namespace.hex()}/{epoch}/{name.hex()}"

    @property
    def epoch_key(self) -> str:
        """The key of the object that names the epoch."""
        return f"{self.page.namespace.hex()}/current"

    def epoch_object(self, epoch: str) -> bytes:
        text = epoch.encode()
        return text + xxhash.xxh3_128_digest(self.page.namespace + text)

    def epoch_of(self, content: bytes) -> str | None:
        """Returns the name of the epoch in the `content` of the object at `epoch_key`.

        Returns None if the content is broken, or belongs to another namespace.
        """
        text = content[:_EPOCH_BYTES]
        right = _EPOCH.fullmatch(text) and content == self.epoch_object(text.decode())
        return text.decode() if right else None

    def pack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> None:
        """Write pages and their records into the buffer `records`, one page after another."""
        for digest, parts, page, row in self._records(records, digests, pages):
            np.concatenate(parts, out=page)
            row[:] = np.frombuffer(self.page.row(digest, parts), np.uint8)

    def blank(self, records: Part) -> None:
        """Clear the digest and checksum of each page in `records` before a read.

        `unpack` then refuses every page that was not read.
        """
        records.reshape(-1, self.record_bytes)[:, self.page.page_bytes :] = 0

    def unpack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> list[FileRefusal | None]:
        """Copy pages from the buffer `records` to `pages`. Returns for each page the reason why it is refused, or None.

        If a page is refused, its bytes in `pages` are undefined.
        """
        found: list[FileRefusal | None] = []
        for digest, parts, page, row in self._records(records, digests, pages):
            at = 0
            for part in parts:
                part[:] = page[at : at + len(part)]
                at += len(part)
            found.append(self.page.judge(row.tobytes(), digest, parts) if row.any() else FileRefusal.CUT)
        return found

    def _records(
        self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]
    ) -> list[tuple[bytes, Sequence[Part], Part, Part]]:
        """Returns a tuple for each page: its digest, its parts in `pages`, its bytes in `records`, and its record."""
        rows = records.reshape(-1, self.record_bytes)
        cut = self.page.page_bytes
        return [
            (digest.tobytes(), parts, record[:cut], record[cut:])
            for digest, parts, record in zip(digests, pages, rows, strict=True)
        ]


class ObjectPiece(NamedTuple):
    """Consecutive pages that are read from one object."""

    name: bytes
    skip: int  # how many pages of the object come before the pages to read
    digests: Digests
    table: int  # the block table to which the pages belong


class ReadRates:
    """How long recent reads from the store have taken, as measured by the read thread.

    These times decide whether reading a prompt's pages is faster than computing its tokens.
    """

    def __init__(self, compute_page_s: float) -> None:
        self._compute_page_s = compute_page_s
        self.answer_s = 0.0  # the running average of the seconds until the store has answered which objects exist
        self.page_s = 0.0  # the running average of the seconds for each page of a read, without the time for an answer
        self._is_measured = False  # whether a read was measured; it may have taken no longer than an answer
        self._tried = -math.inf  # the time of the last read of pages that seemed faster to compute

    def asked(self, seconds: float) -> None:
        self.answer_s = _mean(self.answer_s, seconds)

    def fetched(self, pages: int, seconds: float) -> None:
        self.page_s = _mean(self.page_s, max(0.0, seconds - self.answer_s) / pages)
        self._is_measured = True

    def pays(self, pages: int, before: int, gain: int, now: float) -> bool:
        """Whether reading `pages` pages is faster than computing `gain` pages.

        `before` other pages are already being read. Returns True until the first read has been measured. Later it also
        returns True every `_TRY_S` seconds, even if reading seems slower, because the store may have become faster.
        """
        if not self._is_measured or (self.answer_s + (before + pages) * self.page_s) / self._compute_page_s < gain:
            return True
        if now - self._tried < _TRY_S:
            return False
        self._tried = now
        return True


def _mean(before: float, newest: float) -> float:
    """Returns the running average after one more value. `before` is the average so far, or 0 if there is none."""
    return before + _WEIGHT * (newest - before) if before else newest


class ObjectTier(LowerTier):
    """Objects of pages, below a host tier, and below the file tier if there is one.

    `make_io` is called once for each of the two threads. A request waits at most `timeout_s` until it knows which
    objects exist, and then at most `timeout_s` for their pages. `compute_page_s` is the number of seconds that the
    model takes for the tokens of a page. If it is infinite, reading always counts as faster. `windows` says for each
    block table whether later queries see only some of its pages. `apart` means that the pages are recurrent states. A
    request reads only one state, however long its prompt is, and each state is written as soon as the host has it.
    """

    asks = True

    def __init__(
        self,
        layout: ObjectFormat,
        host: HostTier,
        make_io: MakeObjectIO,
        timeout_s: float,
        compute_page_s: float = math.inf,
        windows: Sequence[bool] = (False,),
        *,
        apart: bool = False,
    ) -> None:
        super().__init__(host, "object")
        self._layout = layout
        self.longest_tail = layout.count - 1 if layout.tails else 0
        self._windows = np.array(windows)
        self._tables, self._apart = len(windows), apart
        self._answers = 0
        self._timeout_s = timeout_s
        self.rates = ReadRates(compute_page_s)
        size = max(layout.object_bytes, MEMORY_BYTES)
        self._objects_at_once = size // layout.object_bytes
        self._read_io, self._write_io = (CallersObjects(make_io, size, timeout_s) for _ in range(2))
        self._epoch = ""  # the name of the current epoch; empty until it has been read from the store
        self._untold = False  # whether a new epoch must still be written to the store
        # For each known object, None if it exists. If not, the time until which it is assumed to be absent.
        self._known: OrderedDict[bytes, float | None] = OrderedDict()
        self._broken: set[bytes] = set()  # objects whose content is wrong, so that they must be written again
        # For each object that is being looked up or read, the time until which requests wait for it.
        self._busy: dict[bytes, float] = {}
        # the objects that wait to be written, with the digests of their pages
        self._queue: OrderedDict[bytes, Digests] = OrderedDict()
        self.failures = 0  # the number of calls to the store that failed or timed out
        self._ask([])

    # ---- reads from objects into host slots

    @property
    def generation(self) -> int:
        """The number of times that the tier has learned whether an object exists."""
        return self._answers

    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:
        self._take_up(self._reader, self._writer)
        found = np.zeros_like(asked)
        if self._clock() >= self._paused_until:
            over = self._over(asked)
            states = self._states(digests, over)
            there = over & (states >= (_UNKNOWN if perhaps else _PRESENT))
            pages = there.repeat(self._layout.count, axis=1)[:, : asked.shape[1]]
            found[:, : pages.shape[1]] = pages
        return found & asked

    def ask(self, digests: Digests, perhaps: Asked) -> bool:
        over = self._over(perhaps)
        states = self._states(digests, np.ones_like(over))
        unknown = over & (states == _UNKNOWN)
        if unknown[~self._windows].any():
            unknown[self._windows] = False
        elif unknown.any() and (states[self._windows] == _ABSENT).any():
            last = int(np.argwhere(over)[:, 1].max()) + 1
            unknown[:, :last] = states[:, :last] == _UNKNOWN
        names = [name for name in self._names(digests, unknown) if name not in self._busy]
        if names:
            self._ask(names[: MOST_ASKED * self._tables])
        return self._waits(digests, unknown)

    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:  # noqa: ARG002 - it never waits
        count, pool, pieces = self._layout.count, self._host.pool, list[ObjectPiece]()
        room = pool.free_count // 2
        for at, table in np.argwhere(self._over(wanted).T).tolist():
            begin = at * count
            pages = digests[table, begin : begin + count]
            name = pages[-1].tobytes()
            if name in self._busy:
                break  # the later pages of the prompt are useless until this object has arrived
            missing = wanted[table, begin : begin + count].nonzero()[0]
            run = pages[missing[0] : missing[-1] + 1][:room]
            if len(run):
                pieces.append(ObjectPiece(name, int(missing[0]), run, table))
                room -= len(run)
        before, new = (sum(map(len, each)) for each in (self.held_slots, [piece.digests for piece in pieces]))
        if not pieces or not self.rates.pays(new, before, gain, self._clock()):
            return
        for first in range(0, len(pieces), self._objects_at_once):
            batch = pieces[first : first + self._objects_at_once]
            names = np.concatenate([piece.digests for piece in batch])
            slots = pool.allocate(len(names))
            read = partial(self._read, self._epoch, batch, self._host.parts(slots))
            take = partial(self._take_pages, batch, names, slots)
            self._begin_read(read, take, [piece.name for piece in batch], slots)

    def brings(self, digests: Digests, wanted: Asked) -> bool:
        return self._waits(digests, self._over(wanted))

    # ---- writes from host slots to objects

    def offer(self, digests: Digests) -> None:
        """Record that the host tier now has the pages with these digests.

        Recurrent states are queued to be written at once. Token pages are queued when their request ends.
        """
        if self._apart:
            self.ended(digests[None])

    def used(self, digests: Digests) -> None:
        """Record that a request has used the pages with these digests.

        Recurrent states are queued again, because the store may have lost them.
        """
        self.offer(digests)

    def ended(self, digests: Digests) -> None:
        """Record that a request with these pages, `[tables, pages, words]`, has ended.

        The objects that may be absent from the store are queued to be written.
        """
        if self._clock() < self._paused_until:
            return
        for begin, end in self._layout.bounds(digests.shape[1]):
            for pages in digests[:, begin:end]:
                name = pages[-1].tobytes()
                there = self._known.get(name, 0.0) is None
                if not there and len(self._queue) < MOST_QUEUED * self._tables:
                    self._queue[name] = pages

    def tick(self) -> None:
        self._take_up(self._reader, self._writer)
        if self._writer.jobs or self._clock() < self._paused_until:
            return
        if self._untold:
            self._begin_job(self._writer, partial(self._tell, self._epoch), self._take_told)
        elif self._queue and self._epoch:
            self._begin_write()
        elif self._queue and not self._reader.jobs:
            self._ask([])

    def flush(self) -> None:
        """Write the queued objects, and wait until they are written.

        Waits at most `_LONGEST_FLUSH_S`, and stops when the store fails.
        """
        deadline = self._clock() + _LONGEST_FLUSH_S
        while (self._queue or self._untold or self._writer.jobs) and self._clock() < deadline:
            self.tick()
            if self._clock() < self._paused_until:
                return
            if jobs := self._writer.jobs or self._reader.jobs:
                jobs[0].wait(max(0.0, deadline - self._clock()))

    def reset(self) -> None:
        """Forget all earlier objects.

        Once the new epoch is in the store, processes that start later ignore these objects, too.
        """
        for job in (*self._reader.jobs, *self._writer.jobs):
            job.names, job.dropped = (), True
        self._epoch = secrets.token_hex(8)
        self._untold = True
        self._forget()
        self.tick()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._take_up(self._reader, self._writer)
        self._read_io.close()
        self._write_io.close()

    def counts(self, noun: str) -> Mapping[str, int]:
        return {
            f"object_{noun}_written": self.written,
            f"object_{noun}_read": self.read,
            f"object_{noun}_refused": self.refusals.total(),
            "object_store_failures": self.failures,
        }

    def restart(self) -> None:
        super().restart()
        self._forget()
        self._answers += 1

    def check(self) -> None:
        busy = {name for job in self._reader.jobs for name in job.names}
        if busy != self._busy.keys():
            raise InvariantError(
                f"object tier: {len(busy)} objects are being looked up or read, but {len(self._busy)} are marked"
            )

    # ---- inside

    def _work(self, work: Callable[[], _T], take: Callable[[_T], None]) -> Callable[[], None]:
        """Run `work` in a thread of the tier, unless a call to the store has failed in the last `PAUSE_S` seconds.

        Returns a function, with which the loop's thread handles the result.
        """
        return nothing if self._clock() < self._paused_until else super()._work(work, take)

    def _end(self, job: Job) -> None:
        for name in job.names:
            self._busy.pop(name, None)
        super()._end(job)

    def _fail(self, error: OSError) -> None:
        _log.warning("object tier: a call failed; the store is not used for %.0f s: %s", PAUSE_S, error)
        self.failures += 1
        self._queue.clear()

    def _forget(self) -> None:
        for known in (self._queue, self._known, self._broken, self._busy):
            known.clear()

    def _know(self, name: bytes, absent_until: float | None) -> None:
        self._answers += 1
        self._known[name] = absent_until
        self._known.move_to_end(name)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _begin_read(
        self, work: Callable[[], _T], take: Callable[[_T], None], names: list[bytes], slots: Slots = NO_SLOTS
    ) -> None:
        """Let the read thread run `work`, which looks up or reads the objects `names`."""
        self._busy.update(dict.fromkeys(names, self._clock() + self._timeout_s))
        self._begin_job(self._reader, work, take, slots, names)

    # ---- lookups in the store

    def _ask(self, names: list[bytes]) -> None:
        """Ask the store which of the objects `names` exist."""

        def take(answer: tuple[str, list[bool]]) -> None:
            self._epoch, there = answer
            for name, known in zip(names, there, strict=True):
                self._know(name, None if known else self._clock() + _ABSENT_S)

        self._begin_read(partial(self._asked, self._epoch, names), take, names)

    def _asked(self, epoch: str, names: list[bytes]) -> tuple[str, list[bool]]:
        """Ask for the epoch if it is not known, and whether each object exists. Runs in the read thread."""
        epoch = epoch or self._find_epoch()
        began = self._clock()
        there = self._read_io.exist([self._layout.key(epoch, name) for name in names]) if names else []
        if names:
            self.rates.asked(self._clock() - began)
        return epoch, there

    def _find_epoch(self) -> str:
        io, key, size = self._read_io, self._layout.epoch_key, len(self._layout.epoch_object(_FIRST_EPOCH))
        if not io.exist([key])[0]:
            return _FIRST_EPOCH
        content = io.memory[:size]
        content[:] = 0
        io.read([ObjectRange(key, 0, 0, size)])
        if (epoch := self._layout.epoch_of(content.tobytes())) is None:
            raise OSError(f"object {key} names no epoch; call reset_prefix_cache to rewrite it")
        return epoch

    def _tell(self, epoch: str) -> None:
        content = np.frombuffer(self._layout.epoch_object(epoch), np.uint8)
        self._write_io.memory[: len(content)] = content
        self._write_io.write([ObjectRange(self._layout.epoch_key, 0, 0, len(content))])

    def _take_told(self, _: None) -> None:
        self._untold = False

    def _over(self, pages: Asked) -> Asked:
        """Returns a mask, `[tables, objects]`, of the objects that contain at least one of these pages.

        The end of a prompt that is too long for the host tier is left out, because its pages would evict the prompt's
        own first pages from the host.
        """
        if self._apart:
            return pages
        count, most = self._layout.count, self._host.pool.num_pages // 2 // self._tables
        objects, rest = divmod(min(pages.shape[1], most), count)
        objects += self._layout.tails and rest > 0 and pages.shape[1] <= most
        covered = np.zeros((self._tables, objects * count), np.bool_)
        covered[:, : pages.shape[1]] = pages[:, : objects * count]
        return np.logical_or.reduce(covered.reshape(self._tables, objects, count), axis=2)

    def _names(self, digests: Digests, objects: Asked) -> list[bytes]:
        """Returns the names of the objects in this mask.

        The names are ordered by the position in the prompt, then by table.
        """
        count, pages = self._layout.count, digests.shape[1]
        last = digests[:, [min((at + 1) * count, pages) - 1 for at in range(objects.shape[1])]]
        return [name.tobytes() for name in last.swapaxes(0, 1)[objects.T]]

    def _states(self, digests: Digests, objects: Asked) -> _States:
        states, now = np.full(objects.shape, _ABSENT, np.int8), self._clock()
        found = [self._known.get(name, 0.0) for name in self._names(digests, objects)]
        states.T[objects.T] = [_PRESENT if until is None else _ABSENT if now < until else _UNKNOWN for until in found]
        return states

    def _waits(self, digests: Digests, objects: Asked) -> bool:
        now = self._clock()  # results that came after the call to `has_of` are handled at the next call
        return any(self._busy.get(name, now) > now for name in self._names(digests, objects))

    # ---- reads

    def _read(self, epoch: str, pieces: list[ObjectPiece], pages: list[list[Part]]) -> list[list[FileRefusal | None]]:
        """Read pages of objects. Runs in the read thread.

        For each page of each piece, returns the reason why it is refused, or None if the right page is in its slot.
        """
        io, width, began = self._read_io, self._layout.record_bytes, self._clock()
        sizes = [len(piece.digests) * width for piece in pieces]
        starts = np.cumsum([0, *sizes]).tolist()
        self._layout.blank(io.memory[: starts[-1]])
        there = io.read(
            [
                ObjectRange(self._layout.key(epoch, piece.name), piece.skip * width, start, size)
                for piece, start, size in zip(pieces, starts, sizes, strict=False)
            ]
        )
        self.rates.fetched(len(pages), self._clock() - began)
        found, left = list[list[FileRefusal | None]](), iter(pages)
        for piece, start, size, whole in zip(pieces, starts, sizes, there, strict=False):
            mine = [next(left) for _ in piece.digests]
            records = io.memory[start : start + size]
            gone: list[FileRefusal | None] = [FileRefusal.GONE] * len(mine)
            found.append(self._layout.unpack(records, piece.digests, mine) if whole else gone)
        return found

    def _take_pages(
        self, pieces: list[ObjectPiece], digests: Digests, slots: Slots, found: list[list[FileRefusal | None]]
    ) -> None:
        tables = np.repeat([piece.table for piece in pieces], [len(piece.digests) for piece in pieces])
        self._publish(slots, digests, tables, [*chain.from_iterable(found)])
        for piece, refusals in zip(pieces, found, strict=True):
            if any(refusals):
                self._know(piece.name, self._clock() + _ABSENT_S)
                # An object that could not be read at all also counts as broken. For example, an empty object exists,
                # but reading a range of it always fails.
                self._broken.add(piece.name)

    # ---- writes

    def _begin_write(self) -> None:
        """Begin to write the objects that have waited longest.

        An object is left out if the host no longer has all its pages.
        """
        pool, batch, held = self._host.pool, dict[bytes, Digests](), list[Slots]()
        while self._queue and len(batch) < self._objects_at_once:
            name, digests = self._queue.popitem(last=False)
            slots = pool.index.find(digests)
            if (slots != NO_PAGE).all() and self._known.get(name, 0.0) is not None:
                batch[name] = digests
                held.append(slots)
        if batch:
            slots = np.unique(np.concatenate(held))  # a page may belong both to a tail and to a full object
            pool.hold(slots)
            pages = [self._host.parts(each) for each in held]
            write = partial(self._write, self._epoch, batch, pages, frozenset(self._broken & batch.keys()))
            self._begin_job(self._writer, write, partial(self._take_written, batch), slots)

    def _write(
        self, epoch: str, batch: dict[bytes, Digests], pages: list[list[list[Part]]], broken: frozenset[bytes]
    ) -> list[bytes]:
        """Write each object of the batch that is absent from the store or broken. Returns the names of these objects.

        Runs in the write thread.
        """
        io, size, ranges, written = self._write_io, self._layout.object_bytes, list[ObjectRange](), list[bytes]()
        keys = [self._layout.key(epoch, name) for name in batch]
        there = io.exist(keys)
        for (name, digests), key, known, parts in zip(batch.items(), keys, there, pages, strict=True):
            if not known or name in broken:
                start, length = len(ranges) * size, len(digests) * self._layout.record_bytes
                self._layout.pack(io.memory[start : start + length], digests, parts)
                ranges.append(ObjectRange(key, 0, start, length))
                written.append(name)
        if ranges:
            io.write(ranges)
        return written

    def _take_written(self, batch: dict[bytes, Digests], written: list[bytes]) -> None:
        self.written += sum(len(batch[name]) for name in written)
        self._broken.difference_update(written)
        # An object that was found to be broken during the write must be written again.
        for name in batch.keys() - self._broken:
            self._know(name, None)
