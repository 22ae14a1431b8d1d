"""`ReplicaHints`: applies the retention hints of requests to the pages that they release, and measures the benefit.

`StateHints` does the same for cached recurrent states, but measures nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import BY_QUOTA, EvictionOrder, Reasons
from kvcache.params import KVCacheParams
from kvcache.policies.baseline import Baseline
from kvcache.policies.hint_share import HintShare
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.replica.context import HasherOfRow, SafeContext
from kvcache.replica.policy import ReplicaPolicy, Words
from kvcache.replica.rows import Ints, Pages
from kvcache.replica.tables import RowTables
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints, page_hints


class ReplicaHints(ReplicaPolicy, PageReader):
    """The retention hints and tenant quotas of one replica.

    Hints are followed only as far as they prove useful. To measure how useful they are, two simulated caches
    (*baselines*) get the same requests as the pool. The first baseline evicts by plain LRU. The second baseline follows
    hints as far as it is allowed to. Before the first hint, there are no baselines, and pages are evicted by plain LRU
    (within quotas). The first hint costs one pass over the pool. Without prefix caching there are no cached pages, so
    hints are ignored.

    With several block tables, a hint for a prefix applies to every page that a request needs to resume after the
    prefix. In a table with a window, these are the last pages of the prefix. The baselines simulate only the pages of
    the first table. The pools of the baselines are smaller than the real pool, because the other tables and the states
    need a part of the real pool. A hint for a prefix also applies to the recurrent states that are cached within the
    prefix. The same share of pages and of states follows hints.
    """

    def __init__(
        self,
        tables: RowTables,
        hasher_of: HasherOfRow,
        digests_of: Callable[[int, SafeContext], Digests],
        salt_of: Callable[[int], str | None],
        params: KVCacheParams,
        copies: Sequence[PagePool],
    ) -> None:
        self._tables = tables
        self._rows, self._pool = rows, pool = tables.rows, tables.pool
        # For each row, how many pages of its request were already published when the request asked for them.
        self._found = [0] * len(rows.request_ids)
        self._hasher_of = hasher_of
        self._digests_of = digests_of  # returns the digests of the published pages of a row
        # Returns the salt of a row's pages, even if the request's context has another salt by now.
        self._salt_of = salt_of
        # Whether the caller has supplied an eviction order. This order then receives the hints, and decides how far to
        # follow them.
        self._has_own = params.eviction_order is not None
        self._most_hinted = 0.0 if self._has_own else params.max_hint_share
        self._of_copies = [StateHints(one, pool.beside) for one in copies]
        # For each row, three numbers of prompt pages: the pages that the baseline with plain LRU has found, the pages
        # that the baseline with hints has found, and the pages that were looked up.
        self._expected: dict[int, tuple[int, int, int]] = {}
        # The simulated caches: plain LRU, and one that follows hints for the largest share of pages that is allowed.
        # They exist from the first hint on.
        self._baselines: tuple[Baseline, Baseline] | tuple[()] = ()
        self.has_begun = False  # whether the baselines exist
        self._share = HintShare(pool.num_pages, params.max_hint_share)
        self._quotas: TenantQuotas | None = None
        if params.tenant_quota < 1.0 or params.tenant_quotas:
            self._quotas = TenantQuotas(pool.num_pages, params.tenant_quota, params.tenant_quotas)
            order = pool.idle if self._has_own else HintedOrder(pool.num_pages, pool.idle)
            pool.follow(QuotaOrder(order, self._quotas))
            pool.journal.read(self)
            self._begin_states()

    def left(self, rows: Ints, pages: Pages) -> None:
        for row in set(rows.tolist()):
            self._pool.idle.own(pages[rows == row], self._salt_of(row))

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        """Let the baselines forget the pages that a quota has evicted.

        The baselines simulate no quotas, but a quota would also have evicted these pages from them.
        """
        if self._baselines:
            self._forget(self._pool.index.words_of(pages[np.broadcast_to(why == BY_QUOTA, len(pages))]))

    @property
    def share(self) -> float:
        """The share of idle pages that are evicted according to hints, 0.0 to 1.0; 0.0 before the first hint.

        It grows while hints gain page hits over plain LRU, and shrinks while they lose hits (see `HintShare`).
        """
        return self._share.value if self._baselines else 0.0

    def come(self, row: int, context: SafeContext, found: int) -> None:
        """Record that the row's request asks for pages, and that `found` of the pages were already published.

        While `has_begun` is False, callers may skip this call for a request without a hint.
        """
        self._found[row] += found
        if self._rows.prompt.item(row) >= 0:  # the request has asked before, and the baselines have counted it
            return
        if not self._baselines and context.hint:
            self._start()
        if self._baselines:
            plain, hinted = self._baselines
            last = (context.end_idx - 1) // self._rows.page_size
            words = self._hasher_of(row, context).digests(context.tokens, 0, last)[:, 0]
            room = self._pool.num_pages - self._unfindable()
            hinted.widen(width := self._width())
            room = int(room / width) + last - int(self._rows.committed[row])
            self._expected[row] = (plain.visit(words, room), hinted.visit(words, room), len(words))

    def share_pages(self, rows: Ints) -> None:
        """Count one more found page for each of `rows`. The row now shares a page that was published before."""
        for row in rows.tolist():
            self._found[row] += 1

    def brought(self, pages: Pages, salt: str | None, words: Words) -> None:
        """Record that `pages` were copied from another manager, for a request with this `salt`.

        `words` has the first word of the digest of each page that the request finds in its prompt. The baselines also
        get these pages, because the pages would have been copied under plain LRU, too.
        """
        if self._quotas:
            self._pool.idle.own(pages, salt)
        for baseline in self._baselines:
            baseline.touch(words)

    def reset(self) -> None:
        """Empty the baselines, because the cache is empty now."""
        for baseline in self._baselines:
            baseline.clear()
        self._expected.clear()  # no request of before will find what the baselines expected

    def clear(self) -> None:
        """Forget all requests and the baselines after an interrupt, and which pages of each tenant are idle.

        Pages keep their hints and tenants. The pools report all idle pages again next. New baselines begin with the
        next hint.
        """
        self.has_begun, self._baselines = False, ()
        self._expected.clear()
        self._found = [0] * len(self._found)
        if self._quotas:
            self._quotas.clear()
        for copies in self._of_copies:
            copies.clear()

    def leave(self, row: int, context: SafeContext | None) -> None:
        """Record that the row is about to be released.

        `context` is the context of the row's request, or None if the request never got pages.
        """
        self._found[row], found = 0, self._found[row]
        if context is None:
            return
        retention = context.hint
        if not self._baselines and retention is not None:
            self._start()
        if not (self._baselines or self._quotas or self._has_own):
            return
        digests, size = self._digests_of(row, context), self._rows.page_size
        said = bool(self._baselines) or self._has_own
        ends = [one.end for one in retention.ranges] if retention is not None and said else []
        of_ranges = [end // size for end in ends if end is not None]
        columns, pages = self._tables.needed(row, digests, of_ranges)
        self._pool.hold(pages)
        order, hints = self._pool.idle, None
        if self._quotas:
            order.own(pages, self._salt_of(row))
        if said:
            hints = retention and page_hints(retention, len(digests), size)
            self._learn(row, context, digests[:, 0], hints, found)
            order.hint(pages, hints and hints.of(columns))
        self._pool.release(pages)
        for copies in self._of_copies if len(digests) and not self._has_own else ():
            resumed_at = [*of_ranges, (self._rows.prompt.item(row) - 1) // size, len(digests)]
            copies.leave(self._salt_of(row), digests, hints, resumed_at, self.share)

    def _learn(self, row: int, context: SafeContext, words: Words, hints: PageHints | None, found: int) -> None:
        """Update the baselines for a row that releases pages. `words` has the first word of the digest of each page.

        The first `found` pages were cached when the request asked for them. `hints` are the request's hints for these
        pages, or None. Compares these hits with the hits of each baseline, and adapts the share of pages that follow
        hints.
        """
        if not self._baselines:
            return
        plain, hinted = self._baselines
        if (expected := self._expected.pop(row, None)) is not None:
            by_plain, by_hinted, looked = expected
            gained, promised = plain.count(words[:found]) - by_plain, by_hinted - by_plain
            scale = int(plain.rate * self._width())
            self._share.learn(gained * scale, promised * scale, looked)
            self._pool.idle.trust(self._share.value)
        last = (int(self._rows.prompt[row]) - 1) // self._rows.page_size
        # The baselines got all pages of the prompt when the request asked for pages. A request that ends early has not
        # computed all of them, so the pool does not have the other pages.
        if len(words) < last:
            self._forget(self._hasher_of(row, context).digests(context.tokens, len(words), last)[:, 0])
        plain.touch(words)
        hinted.leave(words, hints)

    def _forget(self, words: Words) -> None:
        for baseline in self._baselines:
            baseline.forget(words)

    def _unfindable(self) -> int:
        """Returns the number of pages of running requests that no baseline contains.

        These are pages after the prompt and partly filled pages.
        """
        rows = self._rows
        findable = np.maximum(rows.committed, (rows.prompt - 1) // rows.page_size)
        past = int(np.maximum(rows.num_pages - findable, 0).sum())
        return past * self._tables.count + len(rows.row_of) * self._pool.beside

    def _width(self) -> float:
        """Returns how many pages of memory all cached content takes for each cached page of the first table."""
        return self._pool.width * self._tables.width()

    def _start(self) -> None:
        """Begin to follow hints. Called at the first hint."""
        if not self._most_hinted:
            return
        self.has_begun, num_pages = True, self._pool.num_pages
        self._baselines = baselines = Baseline(num_pages), Baseline(num_pages, self._most_hinted)
        self._follow_hints()
        self._pool.idle.trust(self._share.value)
        self._begin_with_what_is_there(baselines)

    def _begin_with_what_is_there(self, baselines: tuple[Baseline, Baseline]) -> None:
        pool = self._pool
        sampled = pool.index.published_words(baselines[0].mask)
        sampled = sampled[pool.index.tables[sampled] == 0]
        used = pool.holders[sampled] > 0
        idle = sampled[~used]
        idle = idle[np.argsort(pool.idle.positions(idle))][::-1]
        for baseline in baselines:
            baseline.touch(pool.index.words_of(idle))
            baseline.touch(pool.index.words_of(sampled[used]))

    def _follow_hints(self) -> None:
        """Begin to evict pages and states according to hints, unless this has begun already."""
        pool = self._pool
        if pool.idle.by_age:
            pool.follow(HintedOrder(pool.num_pages, pool.idle))
        self._begin_states()

    def _begin_states(self) -> None:
        for copies in self._of_copies:
            copies.begin(self._quotas)


class StateHints:
    """Retention hints and tenant quotas for the cached states of one replica.

    A prefix is found only up to a cached state, so a hint that keeps the pages of a prefix must also keep a state. A
    cached state has the hint of the last page before it.

    A hint to keep pages longer applies only to states from which a likely next request would resume. These are the
    newest states before three points: the end of each hinted range; the end of all tokens of the request, for the next
    turn of its conversation; and the end of its prompt, for the same prompt again or for a next turn without the
    model's reasoning. Hardly any request resumes from older states, and each state is as large as the pages of
    thousands of tokens. A hint to evict pages first applies to all states of the hinted pages, because no request is
    expected to need any of them.

    The cached states have an eviction order of their own, of the same kind as that of the pages. If states and pages
    share one memory, `SlabPool` decides whether a state or a page is evicted next. If states have separate memory, a
    tenant's quota is a share of the state pages. In shared memory, the tenant's pages and states count together, and
    each cached state counts as the number of pages in its slab. The baselines do not simulate states, because pages are
    enough to measure how useful hints are.
    """

    def __init__(self, pool: PagePool, slab_pages: int) -> None:
        self._slab_pages = slab_pages  # the number of pages of a slab; 0 if states have separate memory
        self._pool = pool
        self._quotas: TenantQuotas | None = None

    def begin(self, quotas: TenantQuotas | None) -> None:
        """From now on, evict cached states according to hints and `quotas`, in the same way as pages."""
        pool = self._pool
        if not pool.idle.by_age:  # the order of the states follows hints already
            return
        order: EvictionOrder = HintedOrder(pool.num_pages, pool.idle)
        if quotas:
            self._quotas = quotas if self._slab_pages else quotas.of_pool(pool.num_pages)
            order = QuotaOrder(order, self._quotas, self._slab_pages)
        pool.follow(order)

    def clear(self) -> None:
        """Forget which states of each tenant are idle. Called after an interrupt.

        The pool reports all idle states again next.
        """
        if self._quotas:
            self._quotas.clear()

    def leave(
        self, salt: str | None, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float
    ) -> None:
        """Called before a request with this `salt` is released.

        `digests` are the digests of its published pages. `hints` are the request's hints for these pages, or None.
        `ends` has the columns at which later requests are likely to resume. `share` is the share of idle pages that are
        evicted according to hints.
        """
        order = self._pool.idle
        order.trust(share)
        copies = self._pool.index.find(digests)
        columns = np.flatnonzero(copies != NO_PAGE)
        copies = copies[columns]
        # The states that have no tenant yet are assigned to the tenant of `salt`.
        owned = np.zeros(len(copies), np.bool_)
        if salt is not None and self._quotas:
            owned = self._quotas.ownerless(copies * max(1, self._slab_pages))
        said = _said_of(hints, columns, ends)
        if not np.count_nonzero(touched := said | owned):
            return
        # The pages are in reverse order: `release` makes the last page the first one to be evicted, and the oldest
        # state must be evicted first.
        at = np.flatnonzero(touched)[::-1]
        self._pool.hold(copies[at])
        order.own(copies[owned], salt)
        if hints is not None:
            order.hint(copies[said], hints.of(columns[said]))
        self._pool.release(copies[at])


def _said_of(hints: PageHints | None, columns: NDArray[np.intp], ends: Sequence[int]) -> NDArray[np.bool_]:
    """Returns a mask of the cached states to which the hints apply. Each state follows the page in one of `columns`.

    A hint to evict pages first applies to all states after these pages. Any other hint applies only to the last state
    before each column in `ends`, where later requests are likely to resume.
    """
    if hints is None:
        return np.zeros(len(columns), np.bool_)
    said = LEVEL_OF[hints.codes[columns]] < NEUTRAL
    newest = np.searchsorted(columns, ends) - 1
    said[newest[newest >= 0]] = True
    return said
