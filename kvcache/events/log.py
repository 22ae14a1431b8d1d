"""The serving loop's record of changes to its caches.

Each call adds a few tuples, which refer to data that exists anyway. To save time, the loop does not look up, encode or
copy individual pages here. `EventBook` builds events from the entries of this record, in the publisher's thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests, PrefixIndex
from kvcache.pool.journal import Indices, PageReader
from kvcache.weights import Segments

HOST, FILES = -1, -2
"""The media that all ranks share. A medium is a replica, or one of these two. Each block table of a medium is a
*source*. Its number is the number of the medium times the number of tables, plus the index of the table.
"""
MOST_ENTRIES = 1 << 14
"""If the log has more entries than this, the loop itself applies some of them."""


class Hashed(Protocol):
    """The hasher of a request's pages, such as a `PrefixHasher`.

    Digests may be appended to `known`, but never changed.
    """

    known: bytearray
    width: int
    salt: str | None
    extra_keys: tuple[tuple[int, bytes], ...] | None
    segments: Segments


Ints = NDArray[np.int64]
PageTokens = NDArray[np.int32] | Sequence[bytes]
Described = tuple[Sequence[Hashed], Ints, Ints, PageTokens]
"""For each request: its hasher; the first and the last (excluded) of its newly hashed pages; and the tokens of these
pages as int32 bytes.

The publisher's thread may read it at once. It is a plain tuple, because creating an object with named fields would take
the loop more time than everything else that it records.
"""
Change = tuple[int | Indices, bool, Digests | int]
"""The source; whether its pages were added (True) or removed (False); and the digests of the pages. If a single page
was removed, its digest is given by its last word only.

If an index has pages of several block tables, the source is an array, with one number for each page.
"""
Entry = Change | Described | None
"""One of three things: a change of an index; a description of pages, which comes before the change that adds these
pages; or None at the end of a call of the manager.
"""


class Watched(NamedTuple):
    """An index whose changes are reported as events."""

    pages: PrefixIndex
    source: int  # the source number of the first block table; the numbers of the other tables follow it
    tables: int  # the number of block tables of the index


class NoLog:
    """The log of a manager without `KVCacheParams.kv_events`. It records nothing."""

    is_read = False

    def describe(self, described: Described, /) -> None:
        """Record nothing."""

    def end_call(self) -> None:
        """Record nothing."""


class EventLog:
    """The entries of one manager's log, oldest first.

    The loop appends entries, and the publisher's thread removes them.
    """

    is_read = True

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.describe: Callable[[Described], None] = self.entries.append
        self.full: Callable[[], None] | None = None  # called by the loop if the publisher's thread falls behind

    def watch(self, watched: Watched) -> None:
        """From now on, record every change of the index.

        Pages that are already in the index are recorded as if they were added now.
        """
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
    """Records the changes of one index. Each record has the number of the source that has changed."""

    def __init__(self, entries: deque[Entry], watched: Watched) -> None:
        self._append, self._several = entries.append, watched.tables > 1
        self._tables, self._source = watched.pages.tables, watched.source

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:
        self._append((self._source + self._tables[pages] if self._several else self._source, come, digests))
