"""`LruOrder`: pages in the order in which they were appended. They are removed at the old end, or in the middle."""

import numpy as np

from kvcache.errors import InvariantError
from kvcache.eviction_order import EvictionOrder, Indices, Pages
from kvcache.pool.index import INDEX

CHUNK = 1 << 12  # entries in a chunk
# arrays, because numpy takes twice as long with a Python int
_BITS, _NOWHERE = np.array(12, np.int32), np.array(-1, np.int32)
_SCAN = 64
_NEAR = 8  # the most entries that `pop_one` tests one by one


class OrderLog:
    """Stores the entries of up to `most_orders` orders. A page is in one order at a time."""

    def __init__(self, num_pages: int, most_orders: int = 1) -> None:
        # The chunks have room for twice the pool's pages. So whenever all of them are in use, at least one order has
        # two neighbouring chunks whose valid entries fit into one chunk. Each order also needs two more chunks, for its
        # oldest and its newest entries.
        chunks = 2 * -(-num_pages // CHUNK) + 2 * most_orders
        self.entries = np.zeros((chunks, CHUNK), np.int32)
        self.stamp = np.full(num_pages + 1, -1, np.int32)
        self.live = np.zeros(chunks, np.int32)  # for each chunk, how many of its entries are valid
        self.spare = list(range(chunks))
        self.orders: list[LruOrder] = []

    def clear(self) -> None:
        """Remove every page from its order."""
        self.stamp[:] = _NOWHERE
        self.live[:] = 0
        self.spare[:] = range(len(self.live))
        for order in self.orders:
            order.begin()


class LruOrder(EvictionOrder):
    """The least recently used order of idle pages, which are published and have no holder.

    The order is a log of page ids in chunks, oldest first. An entry is valid only while the page's stamp has the
    position of the entry. So a page is removed from the middle of the log by clearing its stamp. A chunk without valid
    entries is reused. If there is no spare chunk, two neighbouring chunks whose valid entries fit into one are merged.
    Such a pair always exists, because the chunks have room for twice the pool's pages. A call costs at most the work
    for its own pages and one chunk. Compacting the whole log at once was rejected, because it would stop a server of 4
    million pages for 50 ms.

    Examples:
        >>> order = LruOrder(8)
        >>> order.append(np.array([3, 1, 2]))
        >>> order.remove(np.array([1]))  # a request uses this page again
        >>> order.append(np.array([1]))
        >>> order.pop(2).tolist(), order.pages().tolist()
        ([3, 2], [1])
    """

    by_age = True

    def __init__(self, num_pages: int, log: OrderLog | None = None) -> None:
        self.log = log = log or OrderLog(num_pages)  # the order's own log, or one that several orders share
        self._log, self._stamp, self._live, self._spare = log.entries, log.stamp, log.live, log.spare
        self._family = log.orders
        self.chunks: list[int] = []  # this order's chunks of the log, oldest first
        self.begin()
        self._family.append(self)  # appended last, because `OrderLog.clear` calls `begin` of each order in `_family`

    def begin(self) -> None:
        """Empty the order. The order keeps one spare chunk of the log."""
        self.chunks.clear()
        self._head = 0  # index of the next entry to test in the oldest chunk; earlier entries are invalid
        self._filled = CHUNK  # how many entries of the newest chunk are written
        self._open_chunk()
        self.count = 0

    def clear(self) -> None:
        self.log.clear()

    def append(self, pages: Pages | Indices) -> None:
        self.count += len(pages)
        while pages.size:
            if self._filled == CHUNK:
                self._open_chunk()
            chunk, first = self.chunks[-1], self._filled
            part = pages[: CHUNK - first]
            self._filled = first + len(part)
            self._log[chunk, first : self._filled] = part
            self._stamp[part] = np.arange(chunk * CHUNK + first, chunk * CHUNK + self._filled, dtype=np.int32)
            self._live[chunk] += len(part)
            pages = pages[len(part) :]

    def append_old(self, pages: Pages | Indices) -> None:
        self.count += len(pages)
        while pages.size:
            if not self._head:  # no room before the oldest entry
                self.chunks.insert(0, self._spare_chunk())
                self._head = CHUNK
            chunk, end = self.chunks[0], self._head
            part, pages = pages[-end:], pages[:-end]
            self._head = end - len(part)
            self._log[chunk, self._head : end] = part
            self._stamp[part] = np.arange(chunk * CHUNK + self._head, chunk * CHUNK + end, dtype=np.int32)
            self._live[chunk] += len(part)

    def remove(self, pages: Pages | Indices) -> None:
        if not len(pages):
            return
        chunks = self._stamp[pages] >> _BITS
        self._stamp[pages] = _NOWHERE
        self.count -= len(pages)
        first = chunks.item(0)
        # All pages are in one chunk, as is usual for a request.
        if (each := chunks.tobytes()) == each[:4] * len(pages):
            self._live[first] = live = self._live.item(first) - len(pages)
            if not live:
                self._give_up(first)
            return
        np.subtract.at(self._live, chunks, 1)
        for chunk in set(chunks[self._live[chunks] == 0].tolist()):
            self._give_up(chunk)

    def pop(self, count: int) -> Pages:
        if count > self.count:
            raise InvariantError(f"idle order: {count} pages were asked for, but it holds {self.count}")
        chunk, head = self.chunks[0], self._head
        left = self._live.item(chunk) - count
        # The chunk has no gaps, so a plain copy of its entries is enough. This halves the cost.
        if left > 0 and left + count == self._end_of(chunk) - head:
            pages = self._log[chunk, head : head + count].copy()
            self._stamp[pages.astype(INDEX)] = _NOWHERE
            self._live[chunk], self._head = left, head + count
            self.count -= len(pages)
            return pages
        taken: list[Pages] = []
        missing = count
        while missing:
            chunk = self.chunks[0]
            end = min(self._head + missing + _SCAN, self._end_of(chunk))
            entries = self._entries(chunk, self._head, end)
            live = entries[:missing]
            self._head = end if len(live) == len(entries) else self._stamp.item(live.item(-1)) % CHUNK + 1
            missing -= len(live)
            self._stamp[live.astype(INDEX)] = -1
            self._live[chunk] = left = self._live.item(chunk) - len(live)
            taken.append(live)
            if not left:
                self._give_up(chunk)
        self.count -= count
        return taken[0].copy() if len(taken) == 1 else np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def pop_one(self) -> int:
        """Do the same as `pop(1)` in a tenth of the time. The order must not be empty."""
        chunk, log, stamp, at = self.chunks[0], self._log, self._stamp, self._head
        start, last = chunk * CHUNK, at + _NEAR
        # The order is not empty, so its oldest chunk has a valid entry, and the loop never runs past the chunk.
        while stamp.item(page := log.item(chunk, at)) != start + at:
            at += 1
            if at == last:  # a long gap
                return int(self.pop(1)[0])
        stamp[page] = -1
        self.count -= 1
        self._live[chunk] = live = self._live.item(chunk) - 1
        if live:
            self._head = at + 1
        else:
            self._give_up(chunk)
        return page

    def oldest(self, most: int) -> Pages:
        """Returns the oldest page and up to `most - 1` pages after it, without removing them.

        Empty if the order is empty.
        """
        chunk = self.chunks[0]
        last = self._end_of(chunk)
        while True:
            end = min(self._head + most + _SCAN, last)
            live = self._entries(chunk, self._head, end)[:most]
            if live.size or end == last:
                return live
            self._head = end

    def first(self) -> int:
        return int(self.oldest(1)[0])

    def positions(self, pages: Indices) -> Indices:
        chunks = list(self.chunks)
        # A page that is not in the order has the stamp -1, which selects the last element of `starts`.
        starts = np.full(len(self._live) + 1, -1, np.int64)
        starts[chunks] = np.arange(len(chunks)) * CHUNK
        stamps = self._stamp[pages]
        return starts[stamps // CHUNK] + stamps % CHUNK

    def pages(self) -> Pages:
        return np.concatenate([self._entries(chunk, 0, self._end_of(chunk)) for chunk in self.chunks])

    def check(self) -> None:
        found = np.concatenate([order.pages() for order in self._family])
        stamped = np.flatnonzero(self._stamp >= 0)
        counts = sum(order.count for order in self._family)
        if not len(found) == counts == self._live.sum() or not np.array_equal(np.sort(found), stamped):
            raise InvariantError(
                f"idle order: its entries name {len(found)} pages, {len(stamped)} pages name an entry, the orders "
                f"count {counts} pages and the chunks {self._live.sum()}: these must be the same pages"
            )
        used = [chunk for order in self._family for chunk in order.chunks]
        if sorted(used + self._spare) != list(range(len(self._live))):
            raise InvariantError("eviction order of idle pages: a chunk of its entries is lost or used twice")

    def squeeze(self) -> bool:
        """Merge the two neighbouring chunks with the fewest valid entries. Returns False if no two fit into one."""
        # The newest chunk is left out if it is still being filled.
        chunks = self.chunks if self._filled == CHUNK else self.chunks[:-1]
        live = self._live[chunks]
        pairs = live[:-1] + live[1:]
        if not pairs.size or pairs.min() > CHUNK:
            return False
        at = int(np.argmin(pairs))
        kept, given = chunks[at : at + 2]
        entries = np.concatenate((self._entries(kept, 0, CHUNK), self._entries(given, 0, CHUNK)))
        self._log[kept, : len(entries)] = entries
        self._stamp[entries] = np.arange(kept * CHUNK, kept * CHUNK + len(entries), dtype=np.int32)
        self._live[kept], self._live[given] = len(entries), 0
        if at == 0:
            self._head = 0
        del self.chunks[at + 1]
        self._spare.append(given)
        return True

    def _entries(self, chunk: int, first: int, end: int) -> Pages:
        """Returns the valid entries from `first` to `end` of a chunk.

        If all of them are valid, the result is a view of the log.
        """
        pages, start = self._log[chunk, first:end], chunk * CHUNK
        counts = self._stamp[pages.astype(INDEX)] == np.arange(start + first, start + end, dtype=np.int32)
        return pages if np.count_nonzero(counts) == len(pages) else pages[counts]

    def _end_of(self, chunk: int) -> int:
        return self._filled if chunk == self.chunks[-1] else CHUNK

    def _give_up(self, chunk: int) -> None:
        """Add a chunk without valid entries to the spare chunks."""
        if chunk == self.chunks[0]:
            self._head = 0
        if len(self.chunks) == 1:
            self._filled = 0
            return
        if chunk == self.chunks[-1]:
            self._filled = CHUNK  # the chunk that was the newest chunk until now is full
        self.chunks.remove(chunk)
        self._spare.append(chunk)

    def _open_chunk(self) -> None:
        self.chunks.append(self._spare_chunk())
        self._filled = 0

    def _spare_chunk(self) -> int:
        if not self._spare and not self.squeeze():
            next(order for order in self._family if order is not self and order.squeeze())
        return self._spare.pop()
