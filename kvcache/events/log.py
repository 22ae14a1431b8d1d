"""What the serving loop writes down of its caches: references to what it has anyway, some tuples a call.

Nothing is looked up, encoded or copied page by page here. `EventBook` makes events of the entries, in another thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests, PrefixIndex
from kvcache.pool.journal import Indices, PageReader

HOST, FILES = -1, -2
"""Sources that all ranks share. Of several block tables each is a source: of replicas and of these the number of one,
times that of the tables, plus a page's table.
"""
MOST_ENTRIES = 1 << 14
"""Above so many the loop is called to help."""


class Hashed(Protocol):
    """What has hashed the pages of a request: a `PrefixHasher`. Digests of pages are only ever added."""

    known: bytearray
    width: int
    salt: str | None
    extra_keys: tuple[tuple[int, bytes], ...] | None


Ints = NDArray[np.int64]
PageTokens = NDArray[np.int32] | Sequence[bytes]
Described = tuple[Sequence[Hashed], Ints, Ints, PageTokens]
"""Of each request the pages from a first to a last one, hashed by now, and the int32 bytes of their tokens.

The other thread may read it at once. A plain tuple: an object with names takes the loop longer than all else that it
writes down.
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
