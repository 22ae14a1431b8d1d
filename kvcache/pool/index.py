"""`PrefixIndex`: page digest → page, for a whole prompt in a few numpy operations.

A hash table with chained buckets whose links are arrays over page ids: no Python object per page, and a removal frees
its place at once. Open addressing was rejected: its tombstones ask for a rebuild of the whole table now and then.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError

Pages = NDArray[np.int32]
Digests = NDArray[np.uint64]
Buckets = NDArray[np.intp]
Change = tuple[int, bool, Digests | int]
"""Of the index of this number pages have come (True) or gone: their digests; of one page that went the last word."""

NO_PAGE = 0  # the null page is never published


class PrefixIndex:
    """Published pages by digest, of `digest_words` 64-bit words. Every hit compares the whole digest."""

    def __init__(self, num_pages: int, digest_words: int) -> None:
        buckets = 1 << max(3, (num_pages - 1).bit_length())
        self._bucket_mask = np.uint64(buckets - 1)
        self._heads = np.zeros(buckets, np.int32)
        self._chosen = np.zeros(buckets, np.int32)  # scratch of _one_per_bucket: saves a sort per removal
        self._next = np.zeros(num_pages + 1, np.int32)
        self._digests = np.zeros((num_pages + 1, digest_words), np.uint64)
        self._words = self._digests[:, 0]  # enough to tell two digests apart, nearly always
        self.published = np.zeros(num_pages + 1, np.bool_)
        self.generation = 0  # counts the changes: a match made at the same generation still stands
        self.log: Callable[[Change], None] | None = None  # told of each change, with the number of this index
        self.number = 0

    def find(self, digests: Digests) -> Pages:
        """The published page of each digest, `NO_PAGE` where there is none. int32 `[len(digests)]`."""
        return self._find(digests, self._buckets(digests))

    def may_have(self, digest: NDArray[np.uint64]) -> bool:
        """Whether a published page has the digest's first word: a cheap question before a costly one."""
        word = int(digest[0])
        page = int(self._heads[word & int(self._bucket_mask)])
        while page != NO_PAGE and int(self._words[page]) != word:
            page = int(self._next[page])
        return page != NO_PAGE

    def match(self, digests: Digests) -> Pages:
        """The pages of the longest run of digests, from the first on, that are all published."""
        pages = self.find(digests)
        missing = np.flatnonzero(pages == NO_PAGE)
        return pages[: missing[0]] if missing.size else pages

    def publish(self, pages: Pages, digests: Digests) -> Pages:
        """Make `pages` findable by `digests`, distinct; the page of each by now: one published before, if there is."""
        buckets = self._buckets(digests)
        winners = self._find(digests, buckets)
        missing = winners == NO_PAGE
        if missing.all():
            self._insert(pages, digests, buckets)
            return pages
        winners[missing] = pages[missing]
        self._insert(pages[missing], digests[missing], buckets[missing])
        return winners

    def withdraw(self, pages: Pages) -> None:
        """Remove published `pages`, all distinct."""
        if not pages.size:
            return
        digests = self._digests[pages]
        self._changed(pages, False, digests)
        buckets = self._buckets(digests)
        while pages.size:
            # Two removals in one chain would each rewrite a link that the other has read: one a bucket and round.
            now = self._one_per_bucket(buckets)
            self._unlink(pages[now], buckets[now])
            pages, buckets = pages[~now], buckets[~now]

    def withdraw_one(self, page: int) -> None:
        """`withdraw` for one page: a fifth of the cost."""
        self._changed(page, False)
        bucket = int(self._words[page]) & int(self._bucket_mask)
        after, current, before = self._next[page], int(self._heads[bucket]), NO_PAGE
        while current not in (page, NO_PAGE):
            before, current = current, int(self._next[current])
        if current == NO_PAGE:
            raise InvariantError(f"page {page} is not in the chain of its digest")
        if before == NO_PAGE:
            self._heads[bucket] = after
        else:
            self._next[before] = after

    def digests_of(self, pages: Pages) -> Digests:
        """Digests that `pages` are found by, or were when they were withdrawn, uint64 `[len(pages), words]`."""
        return self._digests[pages]

    def words_of(self, pages: NDArray[np.integer]) -> NDArray[np.uint64]:
        """The first word of each of these digests, uint64 `[len(pages)]`."""
        return self._words[pages]

    def published_words(self, mask: np.uint64) -> Buckets:
        """The published pages whose first word has none of the bits of `mask`."""
        return np.flatnonzero(self.published & ((self._words & mask) == 0))

    def check(self) -> None:
        linked = np.flatnonzero(self.published).astype(np.int32)
        found = self.find(self._digests[linked])
        for page in linked[found != linked][:1]:
            raise InvariantError(f"page {page} is published, but its digest finds page {found[linked == page][0]}")
        steps = 0
        current = self._heads[self._heads != NO_PAGE]
        while current.size:
            steps += current.size
            current = self._next[current]
            current = current[current != NO_PAGE]
            if steps > len(linked):
                break
        if steps != len(linked):
            raise InvariantError(f"{len(linked)} pages are published, but the chains link {steps}")

    def _find(self, digests: Digests, buckets: Buckets) -> Pages:
        found = np.zeros(len(digests), np.int32)
        wanted, places, current = digests[:, 0], None, self._heads[buckets].astype(np.intp)
        while current.any():
            equal = self._words[current] == wanted
            if equal.any():
                hits = np.flatnonzero(equal)
                found[hits if places is None else places[hits]] = current[hits]
                current[hits] = NO_PAGE
            current = self._next[current].astype(np.intp)
            if places is None:  # few digests are behind others in their bucket: go on with those
                places = np.flatnonzero(current)
                current, wanted = current[places], wanted[places]
        hits = np.flatnonzero(found)
        if hits.size and self._digests[found[hits]].tobytes() != digests[hits].tobytes():
            self._find_exactly(found, digests, buckets)
        return found

    def _find_exactly(self, found: Pages, digests: Digests, buckets: Buckets) -> None:
        """Two digests share their first word: compare whole digests along the chains, one by one."""
        for at in np.flatnonzero(found):
            page = self._heads[buckets[at]]
            while page != NO_PAGE and not np.array_equal(self._digests[page], digests[at]):
                page = self._next[page]
            found[at] = page

    def _insert(self, pages: Pages, digests: Digests, buckets: Buckets) -> None:
        if not pages.size:
            return
        self._digests[pages] = digests
        self._changed(pages, True, digests)
        while pages.size:
            heads = self._heads[buckets]
            self._heads[buckets] = pages
            # Where several pages go to one bucket one of them was written: it links to the old head, the rest go again.
            placed = self._heads[buckets] == pages
            if placed.all():
                self._next[pages] = heads
                return
            self._next[pages[placed]] = heads[placed]
            pages, buckets = pages[~placed], buckets[~placed]

    def _changed(self, pages: Pages | int, come: bool, digests: Digests | None = None) -> None:
        """These pages are published by now, or not any more. Nothing else says so: who follows the log misses none."""
        self.published[pages] = come
        self.generation += 1
        if (log := self.log) is not None:
            log((self.number, come, self._digests.item(pages, -1) if digests is None else digests))

    def _unlink(self, pages: Pages, buckets: Buckets) -> None:
        current = self._heads[buckets]
        here = current == pages
        self._heads[buckets[here]] = self._next[pages[here]]
        while not here.all():
            pages, before = pages[~here], current[~here]
            current = self._next[before]
            if not before.all():
                raise InvariantError(f"page {pages[before == NO_PAGE][0]} is not in the chain of its digest")
            here = current == pages
            self._next[before[here]] = self._next[pages[here]]

    def _one_per_bucket(self, buckets: Buckets) -> NDArray[np.bool_]:
        order = np.arange(len(buckets), dtype=np.int32)
        self._chosen[buckets] = order
        return self._chosen[buckets] == order

    def _buckets(self, digests: Digests) -> Buckets:
        # intp here and below: numpy takes about twice as long to follow an index of another kind.
        return (digests[:, 0] & self._bucket_mask).astype(np.intp)
