"""`TableObjects`: the object tier of several block tables, whose prompts are looked up as a whole.

Each table has objects of its own: of the same pages of a prompt, named by the digest of the last one as this table's
pages are named. A request's objects are written when it ends, those of all tables that begin at one page before those
of the next, as far as the host has them whole: of a window also what the request let fall. Looked for are the objects
that the longest prefix needs: all of full layers, and of a window those that lie over what is seen behind its end.

What there is of a prompt is asked in two rounds, so that windows are asked for where the full layers' objects end. A
third asks for all of them where these are not there.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import LayerTables
from kvcache.pool.index import Digests
from kvcache.replica.resume import Asked
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.object_tier import MOST_ASKED, MOST_QUEUED, ObjectPiece, ObjectTier
from kvcache.tiers.page_objects import ObjectFormat
from kvcache.types import MakeObjectIO

_PRESENT, _UNKNOWN, _ABSENT = 1, 0, -1
_States = NDArray[np.int8]  # of each table and object


class TableObjects(ObjectTier):
    """An `ObjectTier` for the pages of `tables`, of one or more."""

    def __init__(
        self,
        layout: ObjectFormat,
        host: HostTier,
        make_io: MakeObjectIO,
        timeout_s: float,
        compute_page_s: float | None,
        tables: LayerTables,
    ) -> None:
        self._tables = len(tables.tables)
        self._windows = np.array([table.group.kind != "full" for table in tables.tables])
        super().__init__(layout, host, make_io, timeout_s, compute_page_s)

    # ---- up

    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:
        """Which of the `asked` pages are known to be there; `perhaps`: and those of which nothing is known yet."""
        self._take_up()
        found = np.zeros_like(asked)
        if self._clock() >= self._paused_until:
            over = self._over(asked)
            states = self._states(digests, over)
            there = over & (states >= (_UNKNOWN if perhaps else _PRESENT))
            pages = there.repeat(self._layout.count, axis=1)[:, : asked.shape[1]]
            found[:, : pages.shape[1]] = pages
        return found & asked

    def ask(self, digests: Digests, perhaps: Asked) -> bool:
        """Ask for objects over these pages of which nothing is known; whether an answer is on its way, and in time."""
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
        """Begin to read the `wanted` pages, which are there and the host lacks, as many as there is room for."""
        if self._epoch is None or not wanted.any():
            return
        count, room, pieces = self._layout.count, self._host.pool.free_count // 2, list[ObjectPiece]()
        for at, table in np.argwhere(self._over(wanted).T).tolist():
            begin = at * count
            pages = digests[table, begin : begin + count]
            name = pages[-1].tobytes()
            missing = wanted[table, begin : begin + count].nonzero()[0]
            run = pages[missing[0] : missing[-1] + 1][:room]
            if len(run) and name not in self._busy:
                pieces.append(ObjectPiece(name, int(missing[0]), run, table))
                room -= len(run)
        self._read_pieces(self._epoch, pieces, gain)

    def brings(self, digests: Digests, wanted: Asked) -> bool:
        """Whether some of the `wanted` pages are on their way up, and not for too long."""
        return self._waits(digests, self._over(wanted))

    # ---- down

    def ended(self, digests: Digests) -> None:
        """A request of these pages, `[tables, pages, words]`, is over: what the host has of them is written."""
        if self._tables == 1:
            super().used(digests[0])
            return
        if self._clock() < self._paused_until:
            return
        count = self._layout.count
        for end in range(count, digests.shape[1] + 1, count):
            for pages in digests[:, end - count : end]:
                name = pages[-1].tobytes()
                there = self._known.get(name, 0.0) is None
                if not there and len(self._queue) < MOST_QUEUED * self._tables:
                    self._queue[name] = pages

    def used(self, digests: Digests) -> None:
        """With several tables `ended` says what is to be written."""
        if self._tables == 1:
            super().used(digests)

    # ---- inside

    def _over(self, pages: Asked) -> Asked:
        """The objects over these pages, `[tables, objects]`.

        Of a prompt that is larger than the host tier what comes later would push out what came before: it is left out.
        """
        count, most = self._layout.count, self._host.pool.num_pages // 2 // self._tables
        objects, rest = divmod(min(pages.shape[1], most), count)
        objects += self._layout.tails and rest > 0 and pages.shape[1] <= most
        covered = np.zeros((self._tables, objects * count), np.bool_)
        covered[:, : pages.shape[1]] = pages[:, : objects * count]
        return np.logical_or.reduce(covered.reshape(self._tables, objects, count), axis=2)

    def _names(self, digests: Digests, objects: Asked) -> list[bytes]:
        """By page, then by table."""
        count, pages = self._layout.count, digests.shape[1]
        last = digests[:, [min((at + 1) * count, pages) - 1 for at in range(objects.shape[1])]]
        return [name.tobytes() for name in last.swapaxes(0, 1)[objects.T]]

    def _states(self, digests: Digests, objects: Asked) -> _States:
        states, now = np.full(objects.shape, _ABSENT, np.int8), self._clock()
        found = [self._known.get(name, 0.0) for name in self._names(digests, objects)]
        states.T[objects.T] = [_PRESENT if until is None else _ABSENT if now < until else _UNKNOWN for until in found]
        return states

    def _waits(self, digests: Digests, objects: Asked) -> bool:
        now = self._clock()  # what has come since `has_of` is looked at by whoever asks again
        return any(self._busy.get(name, now) > now for name in self._names(digests, objects))
