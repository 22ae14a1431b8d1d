"""`PrefixIndex`: finds pages by digest, for a whole prompt in a few numpy operations.

It is a hash table with chained buckets, whose links are arrays, so a page costs no Python object, and a removal frees
its entry at once. Open addressing was rejected, because its tombstones require a rebuild of the whole table now and
then. The chains are doubly linked, and the heads of buckets are links like any other, so four operations remove any
number of pages. With single links, each removal would walk the chains, at a dozen operations for each link of the
longest chain.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import Pages
from kvcache.pool.journal import Digests, Journal

Buckets = NDArray[np.intp]

NO_PAGE = 0  # the id of the null page, which is never published
_FEW = 16  # if there are at most this many chains, each chain is followed in Python
_SIGNED = np.dtype(np.int64)
INDEX = np.dtype(np.intp)
"""The integer type that numpy uses for indices. Indexing by another type takes about twice as long."""


class PrefixIndex:
    """Finds published pages by their digests, which have `digest_words` words of 64 bits.

    A hit compares the whole digest.

    Examples:
        >>> index, digests = PrefixIndex(8, digest_words=1), np.array([[11], [22], [33]], np.uint64)
        >>> index.publish(np.array([5, 2], np.int32), digests[:2]).tolist()
        [5, 2]
        >>> index.find(digests).tolist()
        [5, 2, 0]
        >>> index.withdraw(np.array([5], np.int32))
        >>> index.match(digests).tolist()  # a prefix needs its first page
        []
    """

    def __init__(self, num_pages: int, digest_words: int) -> None:
        self.digest_words = digest_words
        buckets = 1 << max(3, (num_pages - 1).bit_length())
        self._bucket_mask = buckets - 1
        # `_bucket_masks` and `_firsts` are arrays, because numpy takes twice as long with a Python int.
        self._bucket_masks = np.array(self._bucket_mask)
        self._first = num_pages + 1  # the index of the first bucket's link, after the links of all pages
        self._firsts = np.array(self._first)
        # There is one link for each page, and then one for each bucket. A link has the next page in the chain, or
        # `NO_PAGE` at its end.
        self._links = np.zeros(self._first + buckets, np.int32)
        # for each published page, the index of the link that points to the page
        self._before = np.zeros(self._first, np.int32)
        self._heads = self._links[self._first :]  # a view
        self._digests = np.zeros((self._first, digest_words), np.uint64)
        # A view with one item per page. In this file, `put` and `take` on such views need a quarter of the time of
        # indexing by rows.
        self._records = self._digests.view(f"V{8 * digest_words}").reshape(-1)
        self._words = self._digests[:, 0]  # the first word of each digest, which nearly always tells two digests apart
        # Whether each link is in a chain: True for the links of all buckets and of published pages.
        self._linked = np.zeros(len(self._links), np.bool_)
        self._linked[self._first :] = True
        self.published = self._linked[: self._first]  # a view
        # the number of changes so far; the result of a lookup is valid while this number stays the same
        self.generation = 0
        self.journal = Journal()  # shared with the pool
        # For each page, the number of its block table, set before `publish`. The type is small, because a tier writes
        # it for every page.
        self.tables = np.zeros(num_pages + 1, np.int16)

    def find(self, digests: Digests, buckets: Buckets | None = None) -> Pages:
        """Returns the published page of each digest, or `NO_PAGE`: int32 `[len(digests)]`.

        `buckets` are those of the digests, if the caller has them.
        """
        if buckets is None:
            buckets = self._buckets(digests)
        found = np.zeros(len(digests), np.int32)
        wanted, open_at, current = digests[:, 0], None, self._heads[buckets]
        while len(current) > _FEW:
            at = current.astype(INDEX)
            equal = self._words[at] == wanted
            if np.count_nonzero(equal):
                hits = equal.nonzero()[0]  # `nonzero` takes half the time of `flatnonzero`
                found[hits if open_at is None else open_at[hits]] = current[hits]
                at[hits] = NO_PAGE
            current = self._links[at]
            left = current.nonzero()[0]  # the indices of the digests whose chains have not been followed to the end yet
            open_at = left if open_at is None else open_at[left]
            current, wanted = current[left], wanted[left]
        at_end = range(len(current)) if open_at is None else open_at.tolist()
        word_of, link_of = self._words.item, self._links.item
        for number, page, word in zip(at_end, current.tolist(), wanted.tolist(), strict=True):
            while page != NO_PAGE and word_of(page) != word:
                page = link_of(page)  # noqa: PLW2901 - along the chain
            found[number] = page
        if not (hits := found.nonzero()[0]).size:
            return found
        pages, asked = (found, digests) if hits.size == len(found) else (found[hits], digests.take(hits, axis=0))
        if self._digests.take(pages, axis=0).tobytes() != asked.tobytes():
            self._find_exactly(found, digests, buckets)
        return found

    def may_have(self, digests: Digests) -> bool:
        """Whether a published page may have the first digest. A cheap test, which compares only the first 64 bits."""
        word = digests.item(0)
        page = self._heads.item(word & self._bucket_mask)
        while page != NO_PAGE and self._words.item(page) != word:
            page = self._links.item(page)
        return page != NO_PAGE

    def match(self, digests: Digests) -> Pages:
        """Returns the pages of the longest run of digests, from the first on, that are all published."""
        pages = self.find(digests)
        if np.count_nonzero(pages) == len(pages):  # counting takes a third of the time of comparing the arrays
            return pages
        return pages[: (pages == NO_PAGE).argmax()]

    def publish(self, pages: Pages, digests: Digests) -> Pages:
        """Publish `pages` under distinct `digests`.

        Returns the page that now has each digest. If a page was already published under a digest, it keeps the digest.
        """
        buckets = self._buckets(digests)
        winners = self.find(digests, buckets)
        # For few pages, `count_nonzero` takes a fourth of the time of `any` and `all`.
        if not np.count_nonzero(winners):
            self._insert(pages, digests, buckets)
            return pages
        missing = winners == NO_PAGE
        winners[missing] = pages[missing]
        self._insert(pages[missing], digests[missing], buckets[missing])
        return winners

    def withdraw(self, pages: Pages) -> None:
        """Remove published `pages`, which are distinct."""
        if not pages.size:
            return
        at = pages.astype(INDEX)
        self._changed(at, False)
        self._unlink_pages(at)

    def _unlink_pages(self, at: Buckets) -> None:
        before = self._before[at]
        # If two neighbours in a chain are removed, the second page waits for the next round. If both pages were removed
        # in one round, each removal would rewrite a link that the other removal has already read.
        while (first := np.count_nonzero(linked := self._linked[link := before.astype(INDEX)])) < len(link):
            others = at[~linked]
            if first and len(others) > _FEW:
                self._unlink(at[linked], before[linked], link[linked])
                at, before = others, self._before[others]
            else:
                for page in others.tolist():  # the remaining pages are removed one by one, in any order
                    self._unlink_one(page)
                at, before = at[linked], before[linked]
        self._unlink(at, before, link)

    def rename(self, pages: Pages, others: Pages) -> None:
        """Move the digests of published `pages` to `others`. The journal does not report this."""
        self._digests[others] = digests = self.digests_of(pages)
        self.published[pages] = False
        self.generation += 1
        self._unlink_pages(pages.astype(INDEX))
        self.published[others] = True
        self._link(others.astype(INDEX), others, self._buckets(digests))

    def withdraw_one(self, page: int) -> None:
        """Do the same as `withdraw` for one page, in a fifth of the time."""
        self._changed(page, False)
        self._unlink_one(page)

    def _unlink_one(self, page: int) -> None:
        links, before = self._links, self._before.item(page)
        if links.item(before) != page:
            raise InvariantError(f"page {page} is not in the chain of its digest")
        links[before] = after = links.item(page)
        self._before[after] = before

    def digests_of(self, pages: Pages | Buckets) -> Digests:
        """Returns the digests of `pages`, uint64 `[len(pages), words]`.

        For a page that is not published, the result has the page's last digest.
        """
        return self._digests.take(pages, axis=0)

    def words_of(self, pages: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Returns the first word of the digest of each of `pages`, uint64 `[len(pages)]`."""
        return self._words[pages]

    def published_words(self, mask: np.uint64) -> Buckets:
        """Returns the published pages whose digests begin with a word that has none of the bits of `mask`."""
        return np.flatnonzero(self.published & ((self._words & mask) == 0))

    def rebuild(self) -> None:
        """Link the published pages anew after an interrupt. The journal does not report this."""
        pages = np.flatnonzero(self.published).astype(np.int32)
        self._links[:] = NO_PAGE
        self.generation += 1
        self._link(pages.astype(INDEX), pages, self._buckets(self.digests_of(pages)))

    def clear(self) -> None:
        """Unpublish every page. The journal does not report this."""
        self.published[:] = False
        self._links[:] = NO_PAGE
        self.generation += 1

    def check(self) -> None:
        linked = np.flatnonzero(self.published).astype(np.int32)
        found = self.find(self._digests[linked])
        for page in linked[found != linked][:1]:
            raise InvariantError(f"page {page} is published, but its digest finds page {found[linked == page][0]}")
        for page in linked[self._links[self._before[linked]] != linked][:1]:
            raise InvariantError(f"page {page} is published, but link {self._before[page]} does not point to it")
        steps = 0
        current = self._links[self._first :]
        while (current := current[current != NO_PAGE]).size:
            steps += current.size
            if steps > len(linked):
                break
            current = self._links[current]
        if steps != len(linked):
            raise InvariantError(f"{len(linked)} pages are published, but the chains have {steps} pages")

    def _find_exactly(self, found: Pages, digests: Digests, buckets: Buckets) -> None:
        """Replace each page in `found` with the page in the same chain whose whole digest is equal.

        Called if the first words of digests are equal, but the digests differ. Compares page by page.
        """
        for at in np.flatnonzero(found):
            page = self._heads[buckets[at]]
            while page != NO_PAGE and not np.array_equal(self._digests[page], digests[at]):
                page = self._links[page]
            found[at] = page

    def _insert(self, pages: Pages, digests: Digests, buckets: Buckets) -> None:
        if not pages.size:
            return
        at = pages.astype(INDEX)
        self._records.put(at, digests.view(self._records.dtype).reshape(-1))
        self._changed(at, True)
        self._link(at, pages, buckets)

    def _link(self, at: Buckets, pages: Pages, buckets: Buckets) -> None:
        """Put `pages` into the chains of their `buckets`. `at` is a copy of `pages` in the type `INDEX`."""
        while True:
            heads = self._heads[buckets]
            self._heads[buckets] = pages
            self._links[at] = heads
            # If several pages belong to one bucket, only one of them was written as the bucket's head, and links to the
            # old head. The other pages go through the loop again.
            written = self._heads[buckets]
            # the next line also writes the null page's entry, which is never read
            self._before[heads.astype(INDEX)] = written
            self._before[at] = buckets + self._firsts
            lost = (written != pages).nonzero()[0]
            if not lost.size:
                return
            at, pages, buckets = at[lost], pages[lost], buckets[lost]

    def _changed(self, pages: Buckets | int, come: bool) -> None:
        """Mark `pages` as published if `come` is True, and as not published if it is False. Notify readers.

        Every change of the index goes through this method.
        """
        self.published[pages] = come
        self.generation += 1
        if told := self.journal.changed:
            digests = self._digests.item(pages, -1) if isinstance(pages, int) else self.digests_of(pages)
            for tell in told:
                tell(pages, come, digests)

    def _unlink(self, at: Buckets, before: Pages, link: Buckets) -> None:
        """Remove the pages with the ids `at` from their chains.

        `before` has the index of the link that points to each page.

        `link` is a copy of `before` in the type `INDEX`.
        """
        # For few pages, comparing bytes takes a third of the time of comparing arrays.
        if self._links[link].astype(INDEX).tobytes() != at.tobytes():
            raise InvariantError(f"page {at[self._links[link] != at][0]} is not in the chain of its digest")
        after = self._links[at]
        self._links[link] = after
        self._before[after.astype(INDEX)] = before

    def _buckets(self, digests: Digests) -> Buckets:
        """Returns the bucket of each digest, in the type `INDEX`."""
        return digests.view(_SIGNED)[:, 0] & self._bucket_masks
