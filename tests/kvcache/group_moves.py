"""The random moves with groups of layers: the model of one replica has further tables, as plain dicts.

Written from the contract: a page of a further table is `(table, content)`, a request has of each table the columns that
its next token sees, and a hit goes as far as every table has what is seen after it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvcache import LayerGroup, TextContext
from tests.kvcache.model import Content, Held, ModelHost, ModelLease, ModelReplica, Named
from tests.kvcache.moves import LONGEST, PAGE_SIZE, Chooser, Moves

Seen = tuple[str, int]  # the kind of a table's layers, and its tokens


@dataclass
class Further:
    """A request's pages in the further tables, by column, and up to which column there are some."""

    columns: list[dict[int, int]]
    first: list[int]
    end: int = 0
    kept: int | None = None  # readers were told of what the query at this token sees
    told: int = 0  # and of no token from this one on


class GroupedReplica(ModelReplica):
    def __init__(
        self, num_pages: int, page_size: int, tables: list[Seen], host: ModelHost | None = None, *, caching: bool
    ) -> None:
        super().__init__(num_pages, page_size, host)
        self.tables, self.caching = tables, caching
        # Tables of one group follow one another, and no two groups here are alike.
        self.groups = [list(same) for _, same in itertools.groupby(range(len(tables)), key=lambda at: tables[at])]
        self.further: dict[str, Further] = {}
        self.slid = 0
        self.evicted_further = 0
        self.lifted = self.lifted_further = 0  # pages that came back from the host
        self.filled = 0  # requests that did not fit with what would have come back
        self.shortened = 0  # hits that the first table would have had longer

    def seen(self, table: int, position: int) -> int:
        """The first column that the query at `position` sees."""
        kind, tokens = self.tables[table]
        first = {"full": 0, "window": position - tokens + 1, "chunked": position - position % max(tokens, 1)}[kind]
        return max(0, first) // self.page_size

    def of(self, name: str) -> Further:
        fresh = Further([{} for _ in self.tables], [0] * len(self.tables))
        return self.further.setdefault(name, fresh)

    def room(self, name: str) -> int:
        return min(len(self.requests[name].pages), self.of(name).end) * self.page_size

    def reserve(self, name: str, tokens: list[int], named: Named, start: int, active: int, steps: int) -> int | None:  # noqa: C901
        held, mine, size = self.requests[name], self.of(name), self.page_size
        if active - start == 1 and len(tokens) + steps - 1 <= self.room(name):
            return start
        length = active - start
        if not held.pages:
            start = 0
            if self.host:
                self.lift(tokens, named, length, active, steps)
        looks = length > 1 or not held.pages
        hits = self.found_in_all(held, tokens, named, start) if looks else []
        first, found = held.committed, held.committed + len(hits)
        if hits:
            start = found * size
            active = min(len(tokens), start + length) if start >= active else active
        end = max(mine.end, found, -(-(active if active < len(tokens) else len(tokens) + steps - 1) // size))
        needed, fresh, held_more, gone = -(-(len(tokens) + steps - 1) // size), 0, [], []
        firsts: list[int] = []
        for table in range(len(self.tables)):
            now = self.seen(table, start)
            now = max(mine.first[table], min(now, found) if self.caching else now)
            firsts.append(now)
            taken = [
                (column, table, self.page_of[self.key(tokens, named, table, column)])
                for column in range(max(now, first), found)
            ]
            held_more += taken
            replaced = {column for column, _, _ in taken}
            gone += [
                (column, table, page)
                for column, page in mine.columns[table].items()
                if column < now or column in replaced
            ]
            fresh += max(0, end - max(mine.end, found, now))
        dropped = held.pages[first:found]
        more = max(0, needed - max(len(held.pages), found))
        available = self.free - sum(page not in self.holders for page in [*hits, *(one[2] for one in held_more)])
        read = self.read(held, mine, firsts, {(table, column) for column, table, _ in held_more})
        kept = [page for at, page in enumerate(dropped, first) if held.leases and at * size < held.cached]
        available += self.would_be_free([*dropped, *(one[2] for one in gone)], [*read, kept])
        if more + fresh > available:
            return None
        for _, _, page in held_more:
            self._hold(page)
        for part in read:
            self._keep(held, part)
        self.leave(mine, gone)
        for column, table, page in held_more:
            mine.columns[table][column] = page
        for page in hits:
            self._hold(page)
        self._keep(held, kept)
        for page in reversed(dropped):
            self._drop(page)
        held.pages[first:found] = hits
        held.committed = found
        held.pages += [self._take() for _ in range(more)]
        for table, now in enumerate(firsts):
            mine.columns[table] |= {column: self._take() for column in range(max(mine.end, found, now), end)}
        mine.first, mine.end = firsts, end
        return start

    def lift(self, tokens: list[int], named: Named, length: int, active: int, steps: int) -> None:
        """What the longest prefix needs that the host's pages give comes back, if the request then fits."""
        size, host = self.page_size, self.host
        assert host is not None

        def key(table: int, column: int) -> Content:
            return self.key(tokens, named, table, column) if table >= 0 else self.content(tokens, named, column)

        def wanted(end: int) -> list[Content]:
            """Of a prefix of so many pages what its next token sees, by column; table -1 is the first one."""
            return [
                key(table, column)
                for column in range(end)
                for table in range(-1, len(self.tables))
                if table < 0 or column >= self.seen(table, end * size)
            ]

        ends = range((len(tokens) - 1) // size, 0, -1)
        ends_here = (end for end in ends if self.may_end(key(-1, end - 1)))
        fits = (end for end in ends_here if all(one in self.page_of or host.has(one) for one in wanted(end)))
        end = next(fits, 0)
        contents = wanted(end)
        here = [self.page_of[one] for one in contents if one in self.page_of]
        lacking = [one for one in contents if one not in self.page_of]
        if not lacking:
            return
        needed = -(-(len(tokens) + steps - 1) // size)
        until = min(len(tokens), end * size + length) if end * size >= active else active
        columns = -(-(until if until < len(tokens) else len(tokens) + steps - 1) // size)
        needed += sum(columns - self.seen(table, end * size) for table in range(len(self.tables)))
        if needed - sum(page in self.holders for page in here) > self.free:
            self.filled += 1
            return
        host.hold("lift", lacking)
        for page in here:
            self._hold(page)
        brought = [self._take() for _ in lacking]
        for page, content in zip(brought, lacking, strict=True):
            self.page_of[content] = page
            self.content_of[page] = content
            self.lifted += 1
            self.lifted_further += content[0] == "table"
        for page in [*reversed(here), *reversed(brought)]:
            self._drop(page)
        host.drop({"lift"}, arrived=True)

    def may_end(self, content: Content) -> bool:  # noqa: ARG002 - of states
        """Whether a request may go on after this page for the sake of all else."""
        return True

    def queue(self, pages: list[int]) -> None:
        """Those of the further tables, table by table, are published before those of the first one."""
        tables = {page: self.content_of[page] for page in pages}
        further = [page for page in pages if tables[page][0] == "table"]
        super().queue(sorted(further, key=lambda page: int(str(tables[page][1]))))
        super().queue([page for page in pages if tables[page][0] != "table"])

    def used(self, name: str) -> list[Content]:
        held = self.requests[name]
        pages = [(at, table, page) for table, one in enumerate(self.of(name).columns) for at, page in one.items()]
        return [self.content_of[page] for at, _, page in sorted(pages) if at < held.committed]

    def would_be_free(self, leaving: list[int], kept: list[list[int]]) -> int:
        return sum(self.holders[page] == 1 for page in leaving if not any(page in part for part in kept))

    def read(self, held: Held, mine: Further, firsts: list[int], replaced: set[tuple[int, int]]) -> list[list[int]]:
        """What is computed and passes to the request's leases: of groups what falls out, then what is replaced."""
        parts: list[list[int]] = []
        for same in self.groups if held.leases else []:
            for falls in (True, False):
                for table in same:
                    told = 0 if self.tables[table][0] == "full" else self.columns_told(mine, table)
                    parts.append(
                        [
                            page
                            for column, page in sorted(mine.columns[table].items())
                            if told <= column and column * self.page_size < held.cached
                            if (
                                column < firsts[table] and column * self.page_size < mine.told
                                if falls
                                else (table, column) in replaced
                            )
                        ]
                    )
        return parts

    def columns_told(self, mine: Further, table: int) -> int:
        return 1 << 40 if mine.kept is None else self.seen(table, mine.kept)

    def found_in_all(self, held: Held, tokens: list[int], named: Named, start: int) -> list[int]:
        hits: list[int] = []
        for page in range(held.committed, (len(tokens) - 1) // self.page_size):
            found = self.page_of.get(self.content(tokens, named, page)) if self.caching else None
            if found is None:
                break
            hits.append(found)
        longest = len(hits)
        while hits and not self.goes_on(tokens, named, held.committed, held.committed + len(hits)):
            hits.pop()
        self.shortened += len(hits) < longest
        return hits if (held.committed + len(hits)) * self.page_size > start else []

    def goes_on(self, tokens: list[int], named: Named, committed: int, column: int) -> bool:
        return all(
            self.key(tokens, named, table, seen) in self.page_of
            for table in range(len(self.tables))
            for seen in range(max(committed, self.seen(table, column * self.page_size)), column)
        )

    def key(self, tokens: list[int], named: Named, table: int, column: int) -> Content:
        return ("table", table, *self.content(tokens, named, column))

    def _evict(self, victim: int) -> None:
        self.evicted_further += self.content_of[victim][0] == "table"
        super()._evict(victim)

    def leave(self, mine: Further, gone: list[tuple[int, int, int]]) -> None:
        for column, table, page in sorted(gone, reverse=True):
            del mine.columns[table][column]
            self._drop(page)
        self.slid += len(gone)

    def step(self, name: str, tokens: list[int], named: Named, start: int) -> tuple[int, list[int]]:
        before, new = self.requests[name].cached, list[int]()
        for table, columns in enumerate(self.of(name).columns):
            for column in range(self.requests[name].committed, start // self.page_size):
                if column in columns:
                    own, content = columns[column], self.key(tokens, named, table, column)
                    kept = self.page_of.setdefault(content, own)
                    if kept == own:
                        self.content_of[own] = content
                        new.append(own)
                    else:
                        self._hold(kept)
                        columns[column] = kept
                        self._keep(self.requests[name], [own] if column * self.page_size < before else [])
                        self._drop(own)
        shared, first = super().step(name, tokens, named, start)
        return shared, [*new, *first]

    def fork(self, parent: str, child: str, computed: int, length: int) -> bool:
        full, needed = computed // self.page_size, -(-length // self.page_size)
        if (needed - full) * (1 + len(self.tables)) > self.free or not super().fork(parent, child, computed, length):
            return False
        theirs = self.of(parent)
        columns = [{at: page for at, page in one.items() if at < full} for one in theirs.columns]
        for one in columns:
            for page in one.values():
                self._hold(page)
        for one in columns:
            one |= {at: self._take() for at in range(full, needed)}
        self.further[child] = Further(columns, list(theirs.first), needed)
        return True

    def release(self, name: str) -> None:
        mine, held = self.of(name), self.requests[name]
        self.beside[name] = self.used(name)
        pages = [(column, table, page) for table, one in enumerate(mine.columns) for column, page in one.items()]
        computed = max(held.committed, -(-held.cached // self.page_size))
        read = [page for column, _, page in sorted(pages) if column < computed]
        for lease in held.leases:  # what it takes of the first table comes before
            lease.parts += [held.pages[:computed]] * bool(computed) + [read] * bool(read)
            for page in [*held.pages[:computed], *read]:
                self._hold(page)
        held.leases = []
        self.leave(mine, pages)
        self.slid -= len(pages)
        del self.further[name]
        super().release(name)

    def lease(self, name: str) -> ModelLease:
        self.tell(name)
        return super().lease(name)

    def tell(self, name: str) -> None:
        """Readers know of what the request has computed by now."""
        mine, cached = self.of(name), self.requests[name].cached
        if cached:
            mine.kept = cached if mine.kept is None else min(mine.kept, cached)
            mine.told = max(mine.told, cached)

    def end_lease(self, lease: ModelLease) -> None:
        super().end_lease(lease)
        for name, held in self.requests.items():
            if not held.leases:
                self.of(name).kept, self.of(name).told = None, 0


def layouts() -> list[tuple[int, tuple[LayerGroup, ...]]]:
    """Layers, and how they are grouped: windows below a page, of pages, beyond all; chunks; both; full ones cut."""
    window, chunked = "window", "chunked"
    return [
        *((2, (LayerGroup("full", (0,)), LayerGroup(window, (1,), tokens))) for tokens in (1, 2, 4, 7, 100)),
        (3, (LayerGroup(window, (0, 2), 5), LayerGroup("full", (1,)))),
        *((2, (LayerGroup("full", (1,)), LayerGroup(chunked, (0,), tokens))) for tokens in (4, 9)),
        (
            4,
            (
                LayerGroup("full", (0,)),
                LayerGroup(window, (1,), 4),
                LayerGroup(chunked, (2,), 6),
                LayerGroup(window, (3,), 8),
            ),
        ),
        (3, (LayerGroup("full", (0, 1)), LayerGroup(window, (2,), 6))),
    ]


class GroupMoves(Moves):
    """A manager of groups beside its model."""

    host_slots = (0, 0, 12, 40, 120)

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.layers, groups = chooser.pick(layouts())
        self.pages = chooser.pick((24, 36))
        super().__init__(chooser, {"groups": groups, **(params or {})})

    def model(self) -> ModelReplica:
        tables = [(one.group.kind, one.group.window) for one in self.manager.layer_tables.tables[1:]]
        return GroupedReplica(self.pages, PAGE_SIZE, tables, self.host, caching=self.caching)

    @property
    def grouped(self) -> list[GroupedReplica]:
        return [model for model in self.models if isinstance(model, GroupedReplica)]

    def too_long(self, length: int, start: int, active: int, steps: int = 1) -> bool:
        return self.least_pages(length, start, active, steps) > self.pages

    def least_pages(self, length: int, start: int, active: int, steps: int) -> int:
        """Pages that a request which finds nothing takes."""
        model, until = self.grouped[0], active if active < length else length + steps - 1
        pages, columns = -(-(length + steps - 1) // PAGE_SIZE), -(-until // PAGE_SIZE)
        return pages + sum(columns - model.seen(table, start) for table in range(len(model.tables)))

    def reserve_one(self, context: TextContext, steps: int) -> bool:
        """Now and then only a chunk is to run: windows have pages for that alone."""
        steps = min(steps, LONGEST - context.current_length + 1)  # these pools hold longer requests than there may be
        before, refused = context.active_idx, self.seen["refused"]
        if not self.told_fits and context.active_length > 1 and self.choose.integer(0, 1):
            context.set_token_indices(active_idx=self.choose.integer(context.start_idx + 1, context.end_idx))
            self.seen["chunk"] += context.active_idx < context.end_idx
        asked = super().reserve_one(context, steps)
        if not asked or self.seen["refused"] > refused:  # who was reserved before runs what it was reserved for
            context.set_token_indices(active_idx=before)
        return asked

    def before_asking(self, context: TextContext) -> None:
        """It is told whether a chunk fits, and reserves for that one."""
        if context.active_length > 1 and self.choose.integer(0, 1):
            context.set_token_indices(active_idx=self.choose.integer(context.start_idx + 1, context.end_idx))

    def model_reserve(self, context: TextContext, steps: int) -> int | None:
        model = self.models[self.manager.get_replica(context)]
        named, tokens = (context.cache_salt, context.extra_keys), context.tokens.tolist()
        return model.reserve(context.request_id, tokens, named, context.start_idx, context.active_idx, steps)

    def tell(self) -> bool:
        """As with one table, and of each further one what the next token sees."""
        told = {id(lease): len(lease.told) for lease in self.leases}
        if not super().tell():
            return False
        lease = next(one for one in self.leases if len(one.told) > told[id(one)])
        name = lease.ours.request_id
        table = self.manager.block_table(name)
        model = self.models[lease.ours.replica_idx]
        assert isinstance(model, GroupedReplica)
        model.tell(name)
        columns = -(-table.num_tokens // PAGE_SIZE)
        for number, pages in enumerate(table.groups[1:]):
            left_out = columns - len(pages)
            assert left_out == min(columns, max(model.of(name).first[number], model.seen(number, table.num_tokens)))
            tokens = table.num_tokens - left_out * PAGE_SIZE
            if pages:
                lease.told.append((list(pages), tokens, self.bytes_of(lease, list(pages), tokens)))
            self.seen["told of a window"] += left_out > 0
        return True

    def of_groups(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for model in self.grouped:
            found["slid"] += model.slid
            found["came back beyond the first table"] += model.lifted_further
            found["did not fit with what would have come back"] += model.filled
            found["hit shortened"] += model.shortened
            found["evicted beyond the first table"] += model.evicted_further
        return found

    def same_books(self) -> None:
        super().same_books()
        names: dict[tuple[int, int], int] = {}
        for replica_idx, model in enumerate(self.grouped):
            replica = self.manager._replicas.each[replica_idx]
            assert replica.further is not None
            assert replica.further.slid == model.slid
            for name in model.requests:
                mine, row = model.of(name), replica.rows.row_of[name]
                for table, columns in enumerate(mine.columns):
                    ours = replica.further.table[table, row]
                    assert ours.nonzero()[0].tolist() == sorted(columns), (name, table, ours, columns)
                    for column, theirs in columns.items():
                        assert names.setdefault((replica_idx, int(ours[column])), theirs) == theirs
        assert len({(replica, theirs) for (replica, _), theirs in names.items()}) == len(names)
