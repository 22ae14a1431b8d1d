"""`ReplicaHints`: applies requests' retention hints to the pages that they release, and measures how well they work.

`StateHints` applies them to cached recurrent states.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import BY_QUOTA, Reasons
from kvcache.params import KVCacheParams
from kvcache.pool.hinted_order import HintedBaseline, HintedOrder, HintShare, LruBaseline, Words
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.pool.quotas import NoQuotas, TenantQuotas
from kvcache.replica.context import HasherOfRow, SafeContext
from kvcache.replica.rows import BlockRows, Ints, Pages
from kvcache.replica.tables import RowTables
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints, page_hints
from kvcache.states.state_pages import StatePages


class ReplicaHints(PageReader):
    """The hints and quotas of one replica.

    Until a request brings a hint, there is only the plain LRU order, and no simulated caches (baselines) are kept. The
    first hint costs a pass over the pool. Without prefix caching no page is ever idle, and nothing is counted.

    With several block tables, a hint for a prefix applies to every page that a request needs to resume after the
    prefix. In a table with a window, these are the last pages. The baselines simulate only the pages of the first
    table, in a pool that is smaller by the share of the other tables. A hint for a prefix also applies to the recurrent
    states that are cached after it, as far as hints have proved right for pages.
    """

    def __init__(
        self,
        pool: PagePool,
        rows: BlockRows,
        tables: RowTables,
        hasher_of: HasherOfRow,
        digests_of: Callable[[int, SafeContext], Digests],
        salt_of: Callable[[int], str | None],
        params: KVCacheParams,
        states: Sequence[StatePages],
    ) -> None:
        self._found = [0] * len(rows.request_ids)  # by row: how many pages were already published
        self._pool = pool
        self._rows = rows
        self._hasher_of = hasher_of
        self._digests_of = digests_of  # returns the digests of a row's published pages
        self._salt_of = salt_of  # returns the salt of a row's pages, even if its context has changed its salt since
        caching = params.enable_prefix_caching
        # A caller's own eviction order receives the hints, and decides how far to follow them.
        self._has_own = params.eviction_order is not None
        self._most_hinted = params.max_hint_share if caching and not self._has_own else 0.0
        self._tables = tables
        self._of_states = [StateHints(pages, rows, salt_of, pool.beside) for pages in states]
        # By row: how many pages plain LRU would have found, how many hints would have found, and how many were looked
        # up.
        self._expected: dict[int, tuple[int, int, int]] = {}
        # Simulated caches: plain LRU, and hints at their largest share. They exist from the first hint on.
        self._baselines: tuple[LruBaseline, HintedBaseline] | tuple[()] = ()
        self.has_begun = False  # whether the baselines exist
        self._share = HintShare(pool.num_pages, params.max_hint_share)
        self._quotas = NoQuotas()
        if caching and (params.tenant_quota < 1.0 or params.tenant_quotas):
            self._quotas = TenantQuotas(pool.num_pages, params.tenant_quota, params.tenant_quotas)
            order = pool.idle if self._has_own else HintedOrder(pool.num_pages, pool.idle)
            pool.follow(self._quotas.over(order))
            pool.journal.read(self)
            self._begin_states()

    def left(self, rows: Ints, pages: Pages) -> None:
        for row in set(rows.tolist()):
            self._pool.idle.own(pages[rows == row], self._salt_of(row))

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        """Let the baselines forget pages that a tenant's quota has evicted: it would evict them there, too."""
        if self._baselines:
            self._forget(self._pool.index.words_of(pages[np.broadcast_to(why == BY_QUOTA, len(pages))]))

    @property
    def share(self) -> float:
        """The share of idle pages that follows hints; 0.0 before the first hint."""
        return self._share.value if self._baselines else 0.0

    def come(self, row: int, context: SafeContext, found: int) -> None:
        """Called when the row's request asks for pages. `found` of them were already published.

        For a request without a hint, the call may be left out until `has_begun` is True.
        """
        self._found[row] += found
        if self._rows.prompt.item(row) >= 0:  # the request has asked before
            return
        if not self._baselines and context.hint:
            self._start()
        if self._baselines:
            plain, hinted = self._baselines
            last = (context.end_idx - 1) // self._rows.page_size
            words = self._hasher_of(row, context).digests(context.tokens, 0, last)[:, 0]
            room = self._pool.num_pages - self._unfindable()
            hinted.widen(width := self._width())
            room = int(room / width)
            room += last - int(self._rows.committed[row])
            self._expected[row] = (plain.visit(words, room), hinted.visit(words, room), len(words))

    def share_pages(self, rows: Ints) -> None:
        """Count one more already published page for each of `rows`: each now shares a page of another request."""
        for row in rows.tolist():
            self._found[row] += 1

    def brought(self, pages: Pages, salt: str | None, words: Words) -> None:
        """Record that held `pages` were copied here for a request. They belong to the tenant with this `salt`.

        `words` has the first words of the digests of all pages of its prompt that the request finds. The baselines get
        these pages as well, because plain LRU would have them now, too.
        """
        if self._quotas.limited:
            self._pool.idle.own(pages, salt)
        for baseline in self._baselines:
            baseline.touch(words)

    def reset(self) -> None:
        for baseline in self._baselines:
            baseline.clear()
        self._begin_with_what_is_there()

    def begin_orders(self) -> None:
        """After an interrupt: restore the hinted orders of pages and states if there was a hint.

        The records of tenants' idle pages are cleared, because the pools report all idle pages next.
        """
        self._quotas.clear()
        for states in self._of_states:
            states.clear()
        if self._baselines:
            self._follow_hints()

    def mend(self) -> None:
        """After the pool is repaired: restart the baselines with its pages, and forget each row's expected hits."""
        self._expected.clear()
        free = [row for row, request_id in enumerate(self._rows.request_ids) if request_id is None]
        for row in free:
            self._found[row] = 0
        if self._baselines:
            self._begin_baselines()
            self._begin_with_what_is_there()

    def leave(self, row: int, context: SafeContext | None) -> None:
        """Called before the row is released. `context` is None if the request never got pages."""
        self._found[row], found = 0, self._found[row]
        if context is None:
            return
        retention = context.hint
        if not self._baselines and retention is not None:
            self._start()
        if not (self._baselines or self._quotas.limited or self._has_own):
            return
        digests, size = self._digests_of(row, context), self._rows.page_size
        said = bool(self._baselines) or self._has_own
        ends = [one.end for one in retention.ranges] if retention is not None and said else []
        of_ranges = [end // size for end in ends if end is not None]
        columns, pages = self._tables.needed(row, digests, of_ranges)
        self._pool.hold(pages)
        order, hints = self._pool.idle, None
        if self._quotas.limited:
            order.own(pages, self._salt_of(row))
        if said:
            hints = retention and page_hints(retention, len(digests), size)
            self._learn(row, context, digests[:, 0], hints, found)
            order.hint(pages, hints and hints.of(columns))
        self._pool.release(pages)
        for states in self._of_states if len(digests) and not self._has_own else ():
            states.leave(row, digests, hints, of_ranges, self.share)

    def _learn(self, row: int, context: SafeContext, words: Words, hints: PageHints | None, found: int) -> None:
        """Update the baselines: the row releases pages with these digests and `hints`.

        The first `found` pages were hits.
        """
        if not self._baselines:
            return
        plain, hinted = self._baselines
        self._judge(plain, row, words[:found])
        self._forget_given_up(row, context, len(words))
        plain.touch(words)
        hinted.leave(words, hints)

    def _judge(self, plain: LruBaseline, row: int, found: Words) -> None:
        """Compare the pages that the row has `found` with those that the baselines would have found."""
        expected = self._expected.pop(row, None)
        if expected is None:
            return
        by_plain, by_hinted, looked = expected
        gained, promised = plain.count(found) - by_plain, by_hinted - by_plain
        scale = int(plain.rate * self._width())
        self._share.learn(gained * scale, promised * scale, looked)
        self._pool.idle.trust(self._share.value)

    def _forget_given_up(self, row: int, context: SafeContext, computed: int) -> None:
        """Forget pages of a prompt that was abandoned half computed. The baselines have them, but the pool does not."""
        last = (int(self._rows.prompt[row]) - 1) // self._rows.page_size
        if computed < last:
            self._forget(self._hasher_of(row, context).digests(context.tokens, computed, last)[:, 0])

    def _forget(self, words: Words) -> None:
        for baseline in self._baselines:
            baseline.forget(words)

    def _unfindable(self) -> int:
        """How many pages of running requests no baseline has: pages after the prompt, and partly filled pages."""
        rows = self._rows
        findable = np.maximum(rows.committed, (rows.prompt - 1) // rows.page_size)
        past = int(np.maximum(rows.num_pages - findable, 0).sum())
        return past * self._tables.count + len(rows.row_of) * self._pool.beside

    def _width(self) -> float:
        """How many cached pages all tables and states have for each cached page of the first table."""
        return self._pool.width * self._tables.width()

    def _start(self) -> None:
        """Start to follow hints. Called at the first hint."""
        if not self._most_hinted:
            return
        self._begin_baselines()
        self._follow_hints()
        self._pool.idle.trust(self._share.value)
        self._begin_with_what_is_there()

    def _begin_baselines(self) -> None:
        self.has_begun, plain = True, LruBaseline(self._pool.num_pages)
        self._baselines = plain, HintedBaseline(self._pool.num_pages, plain.rate, plain.mask, self._most_hinted)

    def _begin_with_what_is_there(self) -> None:
        if not self._baselines:
            return
        pool = self._pool
        sampled = pool.index.published_words(self._baselines[0].mask)
        sampled = sampled[pool.index.tables[sampled] == 0]
        used = pool.holders[sampled] > 0
        idle = sampled[~used]
        idle = idle[np.argsort(pool.idle.positions(idle))][::-1]
        for baseline in self._baselines:
            baseline.touch(pool.index.words_of(idle))
            baseline.touch(pool.index.words_of(sampled[used]))

    def _follow_hints(self) -> None:
        """Let pages and states follow hints, unless they already do."""
        pool = self._pool
        if pool.idle.by_age:
            pool.follow(HintedOrder(pool.num_pages, pool.idle))
        self._begin_states()

    def _begin_states(self) -> None:
        for states in self._of_states:
            states.begin(self._quotas)


class StateHints:
    """Retention hints and tenant quotas for the cached states of one replica.

    A prefix is found only up to a cached state, so a hint that keeps its pages must keep a state, too. A cached state
    has the hint of the last page of its tokens.

    A hint to stay longer applies only to states from which a likely next request would resume. These are the newest
    states before the end of each hinted range, before the end of all tokens of the request (for the next turn of its
    conversation), and before the end of its prompt (for the same prompt again, or for a next turn without the model's
    reasoning). No request resumes from older states, and each state is as large as the pages of thousands of tokens. A
    hint to be evicted first applies to all states, because no request will need any of them.

    The cached states have a separate eviction order, of the same kind as pages. If both share one memory, `SlabPool`
    decides whether a state or a page is evicted next. If states have separate memory, a tenant's quota is a share of
    the state pages. In shared memory the tenant's pages and states count together, a state as a slab. The baselines do
    not simulate states, because pages suffice to show how well hints work.
    """

    def __init__(
        self, pages: StatePages, rows: BlockRows, salt_of: Callable[[int], str | None], slab_pages: int
    ) -> None:
        self._rows, self._salt_of = rows, salt_of
        self._slab_pages = slab_pages  # the number of pages of a slab; 0 if states have separate memory
        self._pool = pages.pool
        self._quotas = NoQuotas()

    def begin(self, quotas: NoQuotas) -> None:
        """From now on, apply hints and `quotas`: cached states get an eviction order of the kind that pages have."""
        pool = self._pool
        if pool.idle.by_age:  # False if they already have such an order
            self._quotas = quotas if self._slab_pages else quotas.of_pool(pool.num_pages)
            pool.follow(self._quotas.over(HintedOrder(pool.num_pages, pool.idle), self._slab_pages))

    def clear(self) -> None:
        """After an interrupt: forget which states of each tenant are idle. The pool reports all of them again."""
        self._quotas.clear()

    def leave(self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float) -> None:
        """Called before the row's request is released. `hints` are those of its published columns, or None.

        `digests`: the digests of these columns. `ends`: the end columns of hinted ranges. `share`: the share of cached
        pages that follows hints. Later requests likely resume at the end of a hinted range, of the prompt, or of all
        tokens.
        """
        order, size, salt = self._pool.idle, self._rows.page_size, self._salt_of(row)
        order.trust(share)
        copies = self._pool.index.find(digests)
        columns = np.flatnonzero(copies != NO_PAGE)
        copies = copies[columns]
        prompt = (self._rows.prompt.item(row) - 1) // size
        columns_before = [*ends, prompt, len(digests)]
        said, owned = _said_of(hints, columns, columns_before), self._owned(salt, copies)
        if not np.count_nonzero(touched := said | owned):
            return
        # reversed, because `release` evicts the last one first, which must be the oldest state
        at = np.flatnonzero(touched)[::-1]
        self._pool.hold(copies[at])
        order.own(copies[owned], salt)
        if hints is not None:
            order.hint(copies[said], hints.of(columns[said]))
        self._pool.release(copies[at])

    def _owned(self, salt: str | None, copies: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns a mask of the states that have no owner yet, if this tenant has a quota and must own them."""
        if salt is None:
            return np.zeros(len(copies), np.bool_)
        return self._quotas.ownerless(copies * max(1, self._slab_pages))


def _said_of(hints: PageHints | None, columns: NDArray[np.intp], ends: Sequence[int]) -> NDArray[np.bool_]:
    """Returns a mask: to which of the states after the pages of `columns` the hints apply.

    `ends` says where requests may resume.
    """
    if hints is None:
        return np.zeros(len(columns), np.bool_)
    said = LEVEL_OF[hints.codes[columns]] < NEUTRAL
    newest = np.searchsorted(columns, ends) - 1
    said[newest[newest >= 0]] = True
    return said
