"""Takes what the requests of a replica say about the future to the pages that they leave, and sees what came of it."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import numpy as np

from kvcache.params import KVCacheParams
from kvcache.pool.hinted_baseline import HintedShadow
from kvcache.pool.idle_order import Pages
from kvcache.pool.lru_baseline import HintShare, LruShadow, Words
from kvcache.pool.pages import PagePool
from kvcache.pool.quotas import TenantQuotas
from kvcache.pool.retention import HintedOrder, page_hints
from kvcache.replica.block_table import BlockRows, Ints
from kvcache.replica.context import Context, TextContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.types import Retention

HasherOfRow = Callable[[int, Context], PrefixHasher]


class Retainer:
    """The hints and quotas of one replica.

    Until a request brings a hint there is nothing but the plain LRU order, and no shadow beside it. The first one
    costs a pass over the pool.

    Args:
        pool: whose pages.
        rows: of the replica.
        page_size: tokens of a page.
        hasher_of: row and context → the hasher of the request.
        params: of the manager.
    """

    def __init__(
        self, pool: PagePool, rows: BlockRows, page_size: int, hasher_of: HasherOfRow, params: KVCacheParams
    ) -> None:
        self._found = [0] * len(rows.request_ids)  # by row, pages that were published already
        self._pool = pool
        self._rows = rows
        self._page_size = page_size
        self._hasher_of = hasher_of
        self._most_hinted = params.max_hint_share
        self._contexts: dict[int, Context | ref[Context]] = {}  # by row; a hint may be given until the release
        # By row, pages that plain LRU would have found, and hints at their largest share; and those looked for.
        self._expected: dict[int, tuple[int, int, int]] = {}
        self._shadow: LruShadow | None = None
        self._trusting: HintedShadow | None = None
        self._share = HintShare(pool.num_pages, params.max_hint_share)
        self._order: HintedOrder | None = None
        self._quotas: TenantQuotas | None = None
        if params.tenant_quota < 1.0 or params.tenant_quotas:
            self._quotas = TenantQuotas(pool.num_pages, params.tenant_quota, params.tenant_quotas)
            self._order_pages()

    @property
    def share(self) -> float:
        """Of the idle pages, how many follow the hints: 0.0 before there was one."""
        return 0.0 if self._order is None else self._order.share

    def come(self, row: int, context: Context, found: int) -> None:
        """The row's request has come for pages, and has found so many of them published."""
        if found:
            self._found[row] += found
        if row in self._contexts:
            return
        if self._shadow is None and getattr(context, "retention", None) is not None:
            self._start()
        self.adopt(row, context)
        if self._shadow is not None and self._trusting is not None:
            last = (context.current_length - 1) // self._page_size
            words = self._hasher_of(row, context).digests(context.tokens, 0, last)[:, 0]
            unfindable = self._unfindable() - (last - int(self._rows.committed[row]))
            room = self._pool.num_pages - unfindable
            self._expected[row] = (self._shadow.visit(words, room), self._trusting.visit(words, room), len(words))

    def share_pages(self, rows: Ints) -> None:
        """A page of each of `rows` turned out to be published by others before."""
        for row in rows.tolist():
            self._found[row] += 1

    def adopt(self, row: int, context: Context) -> None:
        """The row is the request's."""
        # It may still be given a hint. While nobody gives any it lives no longer for our sake than for its owner's.
        weakly = self._order is None and isinstance(context, TextContext)
        self._contexts[row] = ref(context) if weakly else context

    def brought(self, words: Words) -> None:
        """Pages of these digests came from elsewhere: plain LRU would have them now, too."""
        if self._shadow is not None and self._trusting is not None:
            self._shadow.touch(words)
            self._trusting.touch(words)

    def reset(self) -> None:
        """Every idle page was forgotten."""
        if self._shadow is not None and self._trusting is not None:
            self._shadow.clear()
            self._trusting.clear()
            self._begin_with_what_is_there(self._shadow, self._trusting)

    def leave(self, row: int) -> None:
        """The row is about to be released."""
        kept = self._contexts.pop(row, None)
        self._found[row], found = 0, self._found[row]
        if kept is None:
            return
        context: Context | None = kept() if isinstance(kept, ref) else kept
        hint: object = getattr(context, "retention", None)
        retention = hint if isinstance(hint, Retention) else None  # a release cannot be refused for its hint
        if self._shadow is None and retention is not None:
            self._start()
        if self._order is not None:
            pages = self._rows.pages(row)[: self._rows.committed[row]]
            if self._quotas is not None:
                self._quotas.own(pages, getattr(context, "cache_salt", None))
            if self._shadow is not None and self._trusting is not None:
                words = self._pool.index.words_of(pages)
                self._judge(self._order, self._shadow, row, words[:found])
                self._forget_given_up(row, context, len(pages))
                hints = retention and page_hints(retention, len(pages), self._page_size)
                self._order.hint(pages, hints)
                self._shadow.touch(words)
                self._trusting.leave(words, hints)

    def _judge(self, order: HintedOrder, shadow: LruShadow, row: int, found: Words) -> None:
        """What the row has `found`, beside what others would have."""
        expected = self._expected.pop(row, None)
        if expected is None:
            return
        plain, trusting, looked = expected
        gained, promised = shadow.count(found) - plain, trusting - plain
        self._share.learn(gained * shadow.rate, promised * shadow.rate, looked)
        order.share = self._share.value

    def _forget_given_up(self, row: int, context: Context | None, computed: int) -> None:
        """Of a prompt that is given up before all of it was computed the shadows have pages that the pool has not."""
        last = (int(self._rows.prompt[row]) - 1) // self._page_size
        if context is not None and computed < last:
            self._forget(self._hasher_of(row, context).digests(context.tokens, computed, last)[:, 0])

    def _forget(self, words: Words) -> None:
        if self._shadow is not None and self._trusting is not None:
            self._shadow.forget(words)
            self._trusting.forget(words)

    def _unfindable(self) -> int:
        """Pages that running requests hold and that no shadow has: those past their prompts that are not full."""
        rows = self._rows
        findable = np.maximum(rows.committed, (rows.prompt - 1) // self._page_size)
        return int(np.maximum(rows.num_pages - findable, 0).sum())

    def _start(self) -> None:
        """The first hint."""
        if not self._most_hinted:
            return
        shadow = self._shadow = LruShadow(self._pool.num_pages)
        self._trusting = HintedShadow(self._pool.num_pages, shadow.rate, shadow.mask, self._most_hinted)
        order = self._order or self._order_pages()
        order.share = self._share.value
        self._begin_with_what_is_there(shadow, self._trusting)

    def _begin_with_what_is_there(self, *shadows: LruShadow | HintedShadow) -> None:
        pool = self._pool
        sampled = pool.index.published_words(shadows[0].mask)
        used = pool.holders[sampled] > 0
        idle = sampled[~used]
        if idle.size:  # all of them in the plain order: nothing has followed a hint yet
            idle = pool.lru.by_age(idle)[::-1]
        for shadow in shadows:
            shadow.touch(pool.index.words_of(idle))
            shadow.touch(pool.index.words_of(sampled[used]))

    def _order_pages(self) -> HintedOrder:
        pool = self._pool
        self._order = pool.idle = HintedOrder(pool.num_pages, pool.lru, self._quotas, self._left_by_quota)
        return self._order

    def _left_by_quota(self, pages: Pages) -> None:
        self._forget(self._pool.index.words_of(pages))
