"""The serving loop's record of changes to its caches: a few tuples a call, which refer to data that it has anyway.

The loop looks up, encodes and copies no single pages here. `EventBook` turns the entries into events in another thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests, PrefixIndex
from kvcache.pool.journal import Indices, PageReader

HOST, FILES = -1, -2
"""Sources that all ranks share. With several block tables each table is a source: the number of the replica, or one of
these, times the number of tables, plus the number of the page's table.
"""
MOST_ENTRIES = 1 << 14
"""With more entries than this the loop has to help."""


class Hashed(Protocol):
    """The hasher of a request's pages: a `PrefixHasher`. It only ever adds digests of pages."""

    known: bytearray
    width: int
    salt: str | None
    extra_keys: tuple[tuple[int, bytes], ...] | None


Ints = NDArray[np.int64]
PageTokens = NDArray[np.int32] | Sequence[bytes]
Described = tuple[Sequence[Hashed], Ints, Ints, PageTokens]
"""For each request: its hasher, its first and last newly hashed page, and the int32 bytes of the pages' tokens.

The other thread may read it at once. It is a plain tuple, because making an object with named fields takes the loop
longer than everything else that it records.
"""
Change = tuple[int | Indices, bool, Digests | int]
"""A source's number, whether its pages came (True) or went, and their digests; for one page that went, the last word.

Where the pages of several block tables are in one index a number of each page.
"""
Entry = Change | Described | None
"""A change of an index; pages, described before they come; or the end of a call: what it described has come by then."""


class EventLog:
    """Entries of one manager, oldest first: its loop appends, `take` removes."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.describe: Callable[[Described], None] = self.entries.append
        self.full: Callable[[], None] | None = None  # called by the loop where nobody takes the entries

    def watch(self, index: PrefixIndex, source: int) -> None:
        """Write down every change of the index from now on; what is in it by now has come now."""
        changes = IndexChanges(self.entries, index, source)
        index.journal.read(changes)
        if (there := np.flatnonzero(index.published)).size:
            changes.changed(there, come=True, digests=index.digests_of(there))

    def end_call(self) -> None:
        """A call of the manager is at its end."""
        entries = self.entries
        entries.append(None)
        if len(entries) > MOST_ENTRIES and self.full is not None:
            self.full()


class IndexChanges(PageReader):
    """Writes down what changes of one index, which is the `source` of this number."""

    def __init__(self, entries: deque[Entry], index: PrefixIndex, source: int) -> None:
        self._append, self._index, self._source = entries.append, index, source

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:
        tables = self._index.tables
        self._append((self._source if tables is None else self._source + tables[pages], come, digests))
