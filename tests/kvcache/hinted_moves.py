"""The random moves of groups of layers with retention hints and tenant quotas: the idle pages have another order.

What a request says holds for its own pages and, in the further tables, for those that the prefixes it names need. A
page's tenant is the salt of its content, whoever used it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from kvcache import RangeRetention, Retention, TextContext
from kvcache.replica.replica import Replica
from tests.kvcache.group_moves import GroupedReplica, GroupMoves, Seen
from tests.kvcache.hinted_idle import HintedIdle, hinted_order, said_of, trust
from tests.kvcache.model import Content, ModelHost
from tests.kvcache.moves import PAGE_SIZE, Chooser

TENANTS = (None, "other", "third")


class HintedReplica(GroupedReplica):
    """`real`: the replica beside which this is a model."""

    def __init__(
        self,
        num_pages: int,
        tables: list[Seen],
        host: ModelHost | None,
        real: Replica,
        retention_of: Callable[[str], Retention | None],
        *,
        caching: bool,
    ) -> None:
        super().__init__(num_pages, PAGE_SIZE, tables, host, caching=caching)
        self.order = HintedIdle(num_pages, lambda page: self.salt_of(self.content_of[page]))
        self.idle = self.order
        self.retention_of = retention_of
        hints = real.hints
        self.order.share = lambda: hints.share
        if hints._quotas is not None:
            ids = hints._quotas._ids
            self.order.order_of_tenants = lambda: [*sorted(ids, key=lambda salt: ids[salt])]
        self.beyond_own = 0  # pages that a hint holds for, and that the request had given back

    def salt_of(self, content: Content) -> str | None:
        """A page's tenant."""
        salt = content[2] if content[0] == "table" else content[0]
        return None if salt is None else str(salt)

    def release(self, name: str) -> None:
        if self.requests[name].committed:
            self.say(name)
        super().release(name)

    def say(self, name: str) -> None:
        """The request's hint goes to its published pages, and to those that the prefixes need that it names."""
        held, retention, size = self.requests[name], self.retention_of(name), self.page_size
        contents = [self.content_of[page] for page in held.pages[: held.committed]]
        ends = [one.end // size for one in (retention.ranges if retention else ()) if one.end is not None]
        beside: list[tuple[int, int]] = []
        for table, columns in enumerate(self.of(name).columns):
            wanted = {column for column in columns if column < held.committed}
            self.beyond_own -= len(wanted)
            for end in ends:
                wanted |= {*range(self.seen(table, end * size), min(end, held.committed))}
            found = [(column, self.page_of.get(("table", table, *contents[column]))) for column in sorted(wanted)]
            beside += [(column, page) for column, page in found if page is not None]
        self.beyond_own += len(beside)
        for _, page in beside:
            self._hold(page)
        for column, page in [*enumerate(held.pages[: held.committed]), *beside]:
            self.order.hint(page, retention and said_of(retention, column, size, self.order.now()))
        for _, page in reversed(beside):
            self._drop(page)

    def append(self, requests: list[tuple[str, int]]) -> None:
        """One more page for each request in each table; what falls out of all windows goes before a page is taken.

        `requests`: names, and the token that runs.
        """
        for name, start in requests:
            held, mine = self.requests[name], self.of(name)
            firsts = [self.seen(table, start) for table in range(len(self.tables))]
            if self.caching:
                firsts = [min(first, held.committed) for first in firsts]
            firsts = [max(before, first) for before, first in zip(mine.first, firsts, strict=True)]
            gone = [
                (column, table, page)
                for table, columns in enumerate(mine.columns)
                for column, page in columns.items()
                if column < firsts[table]
            ]
            for part in self.read(held, mine, firsts, set()):
                self._keep(held, part)
            self.leave(mine, gone)
            mine.first = firsts
        for name, _ in requests:
            mine = self.of(name)
            self.requests[name].pages.append(self._take())
            for columns in mine.columns:
                columns[mine.end] = self._take()
            mine.end += 1


class HintedMoves(GroupMoves):
    """A manager of groups beside its model: some give hints, some have quotas."""

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.now = 0.0
        self.hinting = chooser.integer(0, 2) > 0
        self.quota = chooser.pick((1.0, 1.0, 0.1, 0.25))
        self.quotas = {"third": chooser.pick((0.0, 0.1, 0.5))} if chooser.integer(0, 2) == 0 else {}
        super().__init__(chooser, params)
        self.hinting &= self.caching
        if not self.caching:
            self.quota, self.quotas = 1.0, {}
        first_share = chooser.pick((None, 0.5, 0.95))
        for replica in self.manager._replicas.each if self.hinting else ():
            replica.hints._follow_hints()
            assert (order := hinted_order(replica.pool)) is not None
            order._clock = lambda: self.now
            if first_share is not None:
                replica.hints._start()
                trust(replica.hints, first_share)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> Any:
        quotas = {"tenant_quota": self.quota, "tenant_quotas": self.quotas} if self.caching else {}
        return super().build(dp, slots, {**(params or {}), **quotas})

    def model(self) -> HintedReplica:
        numbers = self._numbers = getattr(self, "_numbers", count())
        tables = [(one.group.kind, one.group.window) for one in self.manager.layer_tables.tables[1:]]
        real = self.manager._replicas.each[next(numbers)]
        made = HintedReplica(
            self.pages, tables, self.host, real, lambda name: self.live[name].retention, caching=self.caching
        )
        made.order.now = lambda: self.now
        if self.caching:
            made.order.quota, made.order.quotas = self.quota, self.quotas
        return made

    @property
    def hinted(self) -> list[HintedReplica]:
        return [model for model in self.models if isinstance(model, HintedReplica)]

    def move(self) -> None:
        if self.hinting and self.choose.integer(0, 3) == 0:
            self.hint()
        super().move()

    def hint(self) -> None:
        """Time goes by, or some request says something else: what it says at its release counts."""
        self.now += self.choose.pick((0.0, 1.0, 100.0))
        if self.live:
            context = self.live[self.choose.pick(sorted(self.live))]
            context.retention = self.retention(context.end_idx)
            self.seen["hint"] += 1

    def retention(self, length: int) -> Retention | None:
        if self.choose.integer(0, 5) == 0:
            return None
        ranges: list[RangeRetention] = []
        for _ in range(self.choose.integer(0, 2)):
            start = self.choose.pick((0, self.choose.integer(0, length)))
            end = self.choose.pick((None, start + self.choose.integer(1, length + PAGE_SIZE)))
            ranges.append(RangeRetention(start, end, *self.said()))
        return Retention(*self.said(), ranges=tuple(ranges))

    def said(self) -> tuple[bool | None, int, float | None]:
        choose = self.choose
        return (
            choose.pick((None, None, True, False)),
            choose.pick((0, 25, 50, 50, 75, 100)),
            choose.pick((None, None, 60.0, 90.0, 1000.0)),
        )

    def salt(self) -> str | None:
        return self.choose.pick(TENANTS) if self.quota < 1.0 or self.quotas else super().salt()

    def say_last(self, context: TextContext) -> None:
        """Another salt that no call has seen makes no page another tenant's."""
        if self.choose.integer(0, 7) == 0:
            context.cache_salt = "late"

    def batch_reserve(self, batch: Sequence[TextContext], known: dict[str, list[int]]) -> list[bool]:
        """A decode step's pages are taken together where all requests of a replica lack one, and these are there."""
        wanted, together = dict[str, bool](), True
        for replica_idx, model in enumerate(self.hinted):
            mine = [context for context in batch if self.manager.get_replica(context) == replica_idx]
            short = [one for one in mine if len(known[one.request_id]) > model.room(one.request_id)]
            names = [(one.request_id, len(known[one.request_id]) - 1) for one in short]
            together &= all(model.of(name).end == len(model.requests[name].pages) for name, _ in names)
            together &= len(names) * (1 + len(model.tables)) <= model.free
            if together:
                model.append(names)
        for context in batch:
            wanted[context.request_id] = self.reserve_next(context, known[context.request_id])
        return [wanted[context.request_id] for context in batch]

    def of_groups(self) -> Counter[str]:
        found = super().of_groups()
        for model in self.hinted:
            found += model.order.seen
            found["hinted beyond the request's own"] += model.beyond_own
        return found

    def same_books(self) -> None:
        """As ever, and each tenant has as many idle pages."""
        super().same_books()
        for model, replica in zip(self.hinted, self.manager._replicas.each, strict=True):
            if (quotas := replica.hints._quotas) is not None:
                theirs = Counter(model.salt_of(model.content_of[page]) for page in model.order)
                ours = {salt: quotas._orders[owner].count for salt, owner in quotas._ids.items()}
                del theirs[None]
                assert {salt: number for salt, number in ours.items() if number} == dict(theirs)
