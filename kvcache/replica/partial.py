"""Partial reuse: a request whose prompt ends or diverges within a cached page continues in a copy of that page.

Partial reuse is off by default. On public traces it gains less than one percentage point of hit rate. For each
published page it costs a few hundred bytes of Python objects. It helps if pages are long and prompts are short.

With several block tables, the page is copied in each table, provided that each table still has it. Only the page in the
first table is recorded here.
"""

from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.replica.context import SafeContext
from kvcache.replica.replica import Replica
from kvcache.replica.rows import Pages

# at most this many pages that continue the same prefix are compared with a prompt, newest first
_MOST_SIBLINGS = 64


class PartialReuse:
    """The published pages of one replica, grouped by the prefix that they continue.

    A page is copied only if at least `min_tokens` of its tokens fit the prompt. When a page is evicted, its entry
    stays. An entry is valid only while the page is published under the digest in the entry, and is replaced when the
    page is published again. So evictions need not look for entries.
    """

    def __init__(self, replica: Replica, min_tokens: int) -> None:
        self._replica = replica
        self._min_tokens = min_tokens
        self._siblings: dict[bytes, dict[int, tuple[bytes, NDArray[np.int32]]]] = {}  # prefix → page → (digest, tokens)
        self._prefix_of: dict[int, bytes] = {}

    def learn(self, row: int, context: SafeContext, first: int, last: int) -> None:
        """Record the pages in columns `first` to `last` (excluded) of the row, which were just published."""
        size, index = self._replica.page_size, self._replica.pool.index
        for at in range(first, last):
            if _has_key(context, at, size):
                continue
            page, prefix = int(self._replica.rows.table[0, row, at]), self._prefix(row, context, at)
            if not page or not prefix:
                continue
            self._siblings.get(self._prefix_of.pop(page, b""), {}).pop(page, None)
            tokens = np.array(context.tokens[at * size : (at + 1) * size], np.int32)
            digest = index.digests_of(np.array([page])).tobytes()
            self._siblings.setdefault(prefix, {})[page] = (digest, tokens)
            self._prefix_of[page] = prefix

    def clear(self) -> None:
        """Forget all pages."""
        self._siblings.clear()
        self._prefix_of.clear()

    def find(self, row: int, context: SafeContext) -> tuple[Pages, Pages, int] | None:
        """Finds cached pages that a row with reserved pages can copy. Returns None if there are no such pages.

        Returns the pages to copy, and the row's pages to copy them to: one page for each table. Also returns the number
        of tokens that are cached after the copy.
        """
        size, rows, start = self._replica.page_size, self._replica.rows, context.start_idx
        at = start // size
        if int(rows.committed[row]) != at or _has_key(context, at, size):
            return None
        own, pool, tables = rows.table[:, row, at].copy(), self._replica.pool, self._replica.tables
        # The last token that has a page is not compared, because it has to run. If a table has pages only for a chunk,
        # this is the last token of the chunk. A shared or published page of the row must not be overwritten.
        last = (context.active_idx if tables.in_chunks else context.end_idx) - 1
        wanted = np.asarray(context.tokens[at * size : min((at + 1) * size, last)])
        if len(wanted) < self._min_tokens or (pool.holders[own] != 1).any() or pool.index.published[own].any():
            return None
        siblings = self._siblings.get(self._prefix(row, context, at), {})
        best, length = None, max(self._min_tokens - 1, start - at * size)
        for digest, tokens in islice(reversed(siblings.values()), _MOST_SIBLINGS):
            same = _common(tokens, wanted)
            if same > length and (pages := tables.pages_of(np.frombuffer(digest, np.uint64)[None])).all():
                best, length = pages[:, 0], same
        return None if best is None else (best, own, at * size + length)

    def _prefix(self, row: int, context: SafeContext, at: int) -> bytes:
        """Returns bytes that identify the prefix before page `at`: the digest of page `at - 1`, or the salt.

        The salt is used for page 0. The result is empty if the digest is not known.
        """
        if at:
            return self._replica.published_digests(row, context, at - 1, at).tobytes()
        salt, _ = context.named
        return b"-" if salt is None else b"=" + salt.encode()


def _common(tokens: NDArray[np.int32], wanted: NDArray[np.integer[Any]]) -> int:
    differ = np.flatnonzero(tokens[: len(wanted)] != wanted)
    return int(differ[0]) if differ.size else len(wanted)


def _has_key(context: SafeContext, page: int, page_size: int) -> bool:
    """Whether an extra key belongs to a token in this page.

    If so, the page's KV also depends on the key, and equal tokens do not mean equal KV.
    """
    return any(position // page_size == page for position, _ in context.named[1])
