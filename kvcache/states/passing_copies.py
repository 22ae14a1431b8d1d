"""`PassingCopies`: of requests the copies of their states that go along with them, from page to page.

Such a copy is of the last full page that its request has come to, and the next one takes its place. Where nobody holds
it, the next one is put where it lies: a step of many requests takes no page for that, and asks for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcache.pool.index import NO_PAGE, Digests, Pages
from kvcache.pool.pages import PagePool


class PassingCopies(dict[str, Digests]):
    """By request the digest, `[1, words]`, of the copy in `pool` that its next one takes the place of."""

    def renew(
        self, pool: PagePool, request_ids: Sequence[str], digests: Digests, write: Callable[[Pages], None]
    ) -> Pages | None:
        """The copies of all these requests, which `write` writes, found by `digests` from now on, and used last.

        None, and nothing has changed: one of them has none, or somebody holds it, or one of `digests` is kept by now.
        """
        before = [self[request_id] for request_id in request_ids if request_id in self]
        if not before:
            return None
        index, copies = pool.index, pool.index.find(np.concatenate(before))
        several = min(len(set(copies.tolist())), len(set(digests[:, 0].tolist()))) < len(digests)
        if several or (copies == NO_PAGE).any() or pool.holders[copies].any() or index.find(digests).any():
            return None
        pool.idle.renew(copies)
        pool.idle.remove(copies)
        pool.idle.forget(copies)
        index.withdraw(copies)
        write(copies)  # while nobody can find them
        index.publish(copies, digests)
        pool.idle.append(copies)
        for at, request_id in enumerate(request_ids):
            self[request_id] = digests[at : at + 1]
        return copies
