"""The serving loop's record of changes to its caches: a few tuples per call, which refer to existing data.

To save time, the loop does not look up, encode or copy single pages here. `EventBook` makes events from the entries in
another thread, the publisher's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests, PrefixIndex
from kvcache.pool.journal import Indices, PageReader

HOST, FILES = -1, -2
"""Sources that all ranks share. A source is a place that can have pages: a replica, or one of these two. With several
block tables, each table of such a place is a source. Its number is the place's number times the number of tables, plus
the table's index.
"""
MOST_ENTRIES = 1 << 14
"""If the log has more entries than this, the loop helps the publisher's thread."""


class Hashed(Protocol):
    """The hasher of a request's pages, such as a `PrefixHasher`. It may only append digests."""

    known: bytearray
    width: int
    salt: str | None
    extra_keys: tuple[tuple[int, bytes], ...] | None


Ints = NDArray[np.int64]
PageTokens = NDArray[np.int32] | Sequence[bytes]
Described = tuple[Sequence[Hashed], Ints, Ints, PageTokens]
"""For each request: its hasher, its first and last newly hashed page, and the int32 bytes of these pages' tokens.

The publisher's thread may read it at once. It is a plain tuple, because an object with named fields would cost the loop
more than everything else that it records.
"""
Change = tuple[int | Indices, bool, Digests | int]
"""The source; whether its pages came (True) or were removed; and their digests. If a single page was removed, only the
last word of its digest is given.

If one index has pages of several block tables, the source is an array with a number for each page.
"""
Entry = Change | Described | None
"""A change of an index; or a description of pages, which precedes the change that adds them; or None at the end of a
call.
"""


class Watched(NamedTuple):
    """An index whose changes events report."""

    pages: PrefixIndex
    source: int  # the source of its first block table; the next tables have the next numbers
    tables: int  # the number of its block tables


class NoLog:
    """The log of a manager whose events nobody reads. It records nothing."""

    is_read = False

    def describe(self, described: Described, /) -> None:
        """Record nothing."""

    def end_call(self) -> None:
        """Record nothing."""


class EventLog:
    """The entries of one manager, oldest first.

    The loop appends entries; the publisher's thread removes them by `take`.
    """

    is_read = True

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.describe: Callable[[Described], None] = self.entries.append
        self.full: Callable[[], None] | None = None  # called by the loop if the publisher's thread falls behind

    def watch(self, watched: Watched) -> None:
        """Record every change of the index from now on. Pages that it already has are recorded as added now."""
        changes, index = IndexChanges(self.entries, watched), watched.pages
        index.journal.read(changes)
        if (there := np.flatnonzero(index.published)).size:
            changes.changed(there, come=True, digests=index.digests_of(there))

    def end_call(self) -> None:
        """Record the end of a call of the manager."""
        entries = self.entries
        entries.append(None)
        if len(entries) > MOST_ENTRIES and self.full is not None:
            self.full()


AnyLog = EventLog | NoLog


class IndexChanges(PageReader):
    """Records the changes of one index under the numbers of its sources."""

    def __init__(self, entries: deque[Entry], watched: Watched) -> None:
        self._append, self._several = entries.append, watched.tables > 1
        self._tables, self._source = watched.pages.tables, watched.source

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:
        self._append((self._source + self._tables[pages] if self._several else self._source, come, digests))
