"""Predicts which idle content is evicted first: the least recently used content, or the first one by hints and quotas
(`HintedIdle`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache import Retention
from tests.kvcache.policies.hinted_idle import HintedIdle, said_of
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.matrix import PAGE_SIZE, Built
from tests.kvcache.random_model.plain import Digest, Names, Replica, Request, content


class Orders:
    """The orders in which a manager's replicas evict idle contents."""

    def __init__(self, built: Built, names: Names) -> None:
        self.built, self.names, self.now = built, names, 0.0
        self.hinted = bool({"hints", "quotas"} & built.features) and built.caching
        # Some pages have come from another manager. The model cannot predict what hints learn from these pages.
        self.blurred = False
        self.begun = False

    def begin(self, share: float | None) -> None:
        """Makes hints use the model's clock. `share` is the part of the pages that follows hints at first."""
        if "hints" in self.built.features and self.hinted:
            seam.say_time(self.built.manager, lambda: self.now, share)

    def order(self, at: int) -> list[Digest]:
        """The eviction order of a replica's idle contents."""
        if not self.hinted:
            return []
        manager, built = self.built.manager, self.built
        made = HintedIdle(manager.total_num_pages // manager.num_replicas, self.salt_of)
        made.share = lambda: seam.hint_share(manager, at)
        made.order_of_tenants = lambda: [*seam.tenants(manager, at)]
        made.now, made.quotas, made.quota = lambda: self.now, built.quotas, built.quota
        return made

    def salt_of(self, digest: Digest) -> str | None:
        salt = self.names.content_of[digest][1]
        return None if salt is None else str(salt)

    def is_exact(self, at: int) -> bool:  # noqa: ARG002 - all replicas alike
        """Returns whether the model can predict the next eviction on this replica."""
        return not self.hinted or not (self.blurred or {"host", "lends"} & self.built.features)

    def forget(self, replica: Replica, digest: Digest) -> None:
        """Records that this content was evicted."""
        if isinstance(replica.order, HintedIdle):
            replica.order.said.pop(digest, None)

    def begin_anew(self, replica: Replica, idle: Sequence[int]) -> None:
        """Takes the idle contents from the manager, without any history."""
        digest_of = {page: digest for digest, page in replica.there.items()}
        replica.order.clear()
        self.blurred = True
        for page in idle:
            replica.order.append(digest_of[page])

    def say(self, replica: Replica, one: Request, committed: int) -> None:
        """Records the hint of a request that leaves. The hint applies to the request's own contents, and to the
        contents of other tables that its prefix needs.
        """
        order, retention = replica.order, one.context.retention
        if not isinstance(order, HintedIdle) or not committed:
            return
        tokens, named, digest_of = one.tokens, one.named, self.names.digest_of
        ends = [part.end // PAGE_SIZE for part in (retention.ranges if retention else ()) if part.end is not None]
        kept = int(replica.tables[0].is_prefix)
        own = [(column, digest_of[content(0, tokens, named, column)]) for column in range(committed)] if kept else []
        beside: list[tuple[int, Digest]] = []
        for table in replica.tables[kept:]:
            wanted = {column for column in one.rows[table.number] if column < committed - table.ahead}
            for end in ends:
                wanted |= {*table.columns(table.seen(end * PAGE_SIZE), min(end, committed - table.ahead))}
            found = [(column, digest_of.get(table.content(tokens, named, column))) for column in sorted(wanted)]
            beside += [(column, digest) for column, digest in found if digest is not None and digest in replica.there]
        held = replica.holders().keys() | replica.beside
        idle = [digest for _, digest in beside if replica.there[digest] not in held]
        for digest in idle:
            order.remove(digest)
        for column, digest in [*own, *beside]:
            self.hint(order, digest, retention, column)
        for digest in reversed(idle):
            order.append(digest)

    def hint(self, order: HintedIdle, digest: Digest, retention: Retention | None, column: int) -> None:
        order.hint(digest, retention and said_of(retention, column, PAGE_SIZE, self.now))
