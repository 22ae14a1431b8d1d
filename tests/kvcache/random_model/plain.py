"""A model of the manager in plain dictionaries: slow and obvious.

It is written from the documentation, not from the code.

The content of a page consists of the index of its block table, the salt, the keys, and every token up to the end of the
page. The model treats all tables alike: a *column* is the place of a page in a request. A table has the columns from
the first one that the next query sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache import DraftGroup, LayerGroup, SinkGroup, TextContext
from tests.kvcache.kv import Named
from tests.kvcache.random_model.matrix import PAGE_SIZE

Content = tuple[object, ...]
Digest = bytes


class Table(NamedTuple):
    """A block table. It says what its layers keep, and whether the table has pages for all known tokens or only for
    those that run.
    """

    group: LayerGroup
    number: int

    @property
    def holds_all(self) -> bool:
        return self.group.kind in {"full", "draft"}

    @property
    def ahead(self) -> int:
        """How many blocks after its own the content of a page covers: one in a table of draft layers, whose KV depends
        on the next token.
        """
        return int(isinstance(self.group, DraftGroup))

    @property
    def is_prefix(self) -> bool:
        """Whether the table's pages stand for the prefix: it has a page for each block, with this block's tokens."""
        return self.holds_all and not self.ahead

    @property
    def sinks(self) -> int:
        """The number of the first blocks that every query sees."""
        return pages_of(self.group.sinks) if isinstance(self.group, SinkGroup) else 0

    def seen(self, position: int) -> int:
        """Returns the index of the first block that the query at `position` sees, apart from sinks."""
        tokens = self.group.window
        if self.holds_all:
            return 0
        first = position - position % tokens if self.group.kind == "chunked" else position - tokens + 1
        return max(0, first) // PAGE_SIZE

    def columns(self, first: int, end: int, start: int = 0) -> list[int]:
        """Returns the blocks from `start` to `end` that are kept if the window begins at block `first`."""
        return [column for column in range(start, end) if column >= first or column < self.sinks]

    def begins(self, row: dict[int, int], default: int = 0) -> int:
        """Returns the block at which the window of a row begins. It is 0 if the window has no gap before it."""
        first = min((column for column in row if column >= self.sinks), default=default)
        return first if first > self.sinks else 0

    def content(self, tokens: list[int], named: Named, column: int) -> Content:
        """Returns the content that the page of a block must hold. It is as good as unknown if a later block that it
        covers is not full.
        """
        return content(self.number, tokens, named, column + self.ahead)

    def holds(self, what: Content, tokens: list[int], named: Named, column: int) -> bool:
        """Returns whether a page with this content holds the KV of a block. The KV of draft layers depends on the next
        token alone, so a page may have the name of another next block.
        """
        if not self.ahead:
            return what == self.content(tokens, named, column)
        decides = (column + 1) * PAGE_SIZE + 1

        def decisive(one: Content) -> Content:
            keys = tuple(key for key in named_of(one)[1] if key[0] < decides)
            return (one[0], named_of(one)[0], keys, *tokens_of(one)[:decides])

        mine = content(self.number, tokens, named, column + 1)
        return len(tokens_of(mine)) >= decides and decisive(what) == decisive(mine)


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def content(table: int, tokens: list[int], named: Named, column: int) -> Content:
    """Returns the content that the page of a block must hold."""
    end = (column + 1) * PAGE_SIZE
    return (table, named[0], tuple(sorted(key for key in named[1] if key[0] < end)), *tokens[:end])


def named_of(one: Content) -> Named:
    return one[1], one[2]  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def tokens_of(one: Content) -> list[int]:
    return [*one[3:]]  # type: ignore[list-item]  # pyright: ignore[reportReturnType]


class Names:
    """Maps digests to contents and back. Checks that each content has one digest, and that each digest stands for one
    content.
    """

    def __init__(self) -> None:
        self.content_of: dict[Digest, Content] = {}
        self.digest_of: dict[Content, Digest] = {}

    def learn(self, digest: Digest, what: Content) -> None:
        known = self.content_of.setdefault(digest, what)
        assert known == what, f"one digest stands for {known} and {what}"
        assert self.digest_of.setdefault(what, digest) == digest, f"two digests stand for {what}"


@dataclass(eq=False)
class Request:
    """A claimed request: its pages by table and block, and its progress."""

    context: TextContext
    replica: int
    claim: int
    tokens: list[int]  # The list is a copy, because reading a context makes it catch up with its batch.
    rows: list[dict[int, int]]
    first: list[int]  # For each table, the index of the first block that may have a page.
    cached: int = 0  # The number of tokens that were computed when the request's last step was recorded.
    published: int = 0  # The number of the request's pages that were published when the last call ended.
    ready: bool = False  # it may run
    shared: int = 0  # The number of the request's tokens whose pages the last lookup has found.
    ends: set[int] | None = None  # The tokens at which chunks of the request's prompt end. The state can be kept there.
    # The number of tokens before the state that a block table has given to readers. It is -1 if no block table has
    # given one.
    state_told: int = -1
    known: set[int] = field(default_factory=set)  # The pages that block tables have named to readers of a lease.
    # The contents that are being loaded for the request from host memory.
    loads: list[Digest] = field(default_factory=list)
    # A call was interrupted after the request's claim, so the model does not know which pages are published.
    unsure: bool = False
    passing: Digest | None = None  # The digest of the state copy that the request's next copy will replace.
    surely: bool = True  # False if the model does not know whether the copy will be replaced.
    # The request had pages when the cache was reset. It goes on with them alone: it publishes and finds nothing.
    private: bool = False
    # The request's import was cancelled. Its next reservation first gives its pages back.
    gives_back: bool = False
    # The number of tokens that were known when the request got its first pages, or that were computed elsewhere. -1 if
    # the request has had no pages.
    prompt: int = -1
    # Draft layers compute the KV of the token before this one again, because they did not know this token. -1: none.
    again: int = -1
    # Columns of draft pages that nobody will find: the page after them, which names them, came from the cache.
    unnamed: set[int] = field(default_factory=set)
    # The versions of the weights that computed the request's pages, as keys of its tokens, in addition to its own keys.
    weights: tuple[tuple[int, bytes], ...] = ()

    @property
    def name(self) -> str:
        return self.context.request_id

    @property
    def named(self) -> Named:
        return self.context.cache_salt, (*self.context.extra_keys, *self.weights)

    @property
    def has_pages(self) -> bool:
        return any(self.rows) and not self.gives_back

    @property
    def room(self) -> int:
        """The number of tokens for which the request has pages."""
        return min((max(row, default=-1) + 1 for row in self.rows), default=0) * PAGE_SIZE

    @property
    def start(self) -> int:
        """The number of tokens that the request has computed. It is 0 if the request has no pages, even if its context
        claims more.
        """
        return self.context.start_idx if self.has_pages else 0


class Plan(NamedTuple):
    """For each table, the blocks for which a request has pages after a reservation, and where its window begins."""

    columns: list[list[int]]
    firsts: list[int]
    found: int  # The index of the block after the last published block.


@dataclass
class Replica:
    """The state of one replica: its contents by digest, the holders of its pages, and its eviction order."""

    tables: list[Table]
    num_pages: int
    caching: bool
    order: list[Digest]
    there: dict[Digest, int] = field(default_factory=dict)
    # For each state copy the clock value of its last use. The least recently used copy is first.
    kept: dict[Digest, int] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    beside: set[int] = field(default_factory=set)  # The pages of leases, of imports, and of loads from lower tiers.
    slab_pages: int = 0  # The number of pages that each request takes for its state.
    slabs: int = 0  # The number of slabs that requests hold.
    evicted: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is only one table, which keeps every token."""
        return len(self.tables) == 1 and self.tables[0].is_prefix

    def holders(self) -> Counter[int]:
        """Returns, for each page, the number of rows that hold it."""
        return Counter(page for one in self.requests.values() for row in one.rows for page in row.values())

    def free(self) -> int:
        return self.num_pages - len(self.holders().keys() | self.beside) - self.slab_pages * self.slabs

    def has_slab(self) -> bool:
        """Returns whether there is room for a request's state. Pages before the first slab and after the last slab
        cannot hold a state.
        """
        return self.free() >= self.slab_pages and self.slabs < (self.num_pages + 1) // self.slab_pages - 1

    def committed(self, one: Request) -> int:
        """The number of the first blocks whose pages are all published."""
        if one.private:
            return 0
        pages = {*self.there.values()}
        end = max((max(row, default=-1) + 1 for row in one.rows), default=0)
        absent = (
            min((column + table.ahead for column in self.unfound(one, table, row, pages)), default=end)
            for table, row in zip(self.tables, one.rows, strict=True)
        )
        # Draft pages do not say whether the page after the first unpublished one is full, or came from the cache.
        most = one.published if any(table.ahead for table in self.tables) else end
        return min(*absent, most)

    def unfound(self, one: Request, table: Table, row: dict[int, int], pages: set[int]) -> list[int]:
        passed = one.unnamed if table.ahead else set[int]()
        return [column for column, page in row.items() if page not in pages and column not in passed]

    def resume(
        self,
        one: Request,
        first: int,
        has: Callable[[int, Content], bool],
        may_end: Callable[[Content], bool] = lambda _: True,
    ) -> int:
        """Returns the last block after `first` from which all tables can continue, or `first` if there is none. `has`
        says whether the content of a block is available. `may_end` says whether the state after a block of table 0
        is available.
        """
        if not self.caching or one.private:
            return first
        tokens, named = one.tokens, one.named
        last = known = (len(tokens) - 1) // PAGE_SIZE
        if self.tables[0].is_prefix:  # A hit ends where this table's pages end.
            lacking = (column for column in range(first, last) if not has(column, self.content_of(one, 0, column)))
            last = next(lacking, last)
        found = [
            {
                column
                for column in range(first, min(last, known - of.ahead))
                if has(column, self.content_of(one, of.number, column))
            }
            for of in self.tables
        ]
        for end in range(last, first, -1):
            needed = ({*table.columns(table.seen(end * PAGE_SIZE), end, first)} for table in self.tables)
            is_there = all(some <= there for some, there in zip(needed, found, strict=True))
            if is_there and may_end(content(0, tokens, named, end - 1)):
                return end
        return first

    def plan(self, one: Request, length: int, start: int, active: int, steps: int, found: int) -> Plan:
        """Returns the blocks that need pages if the request continues from `start` and has found `found` published
        blocks.
        """
        columns, firsts = list[list[int]](), list[int]()
        for number, table in enumerate(self.tables):
            end = length + steps - 1 if table.holds_all or active >= length else active
            first = table.seen(start)
            first = max(one.first[number], min(first, found) if self.caching and not one.private else first)
            columns.append(table.columns(first, max(max(one.rows[number], default=-1) + 1, found, pages_of(end))))
            firsts.append(first)
        return Plan(columns, firsts, found)

    def least(self, length: int, start: int, active: int, steps: int) -> int:
        """Returns how many pages a request takes if it finds no cached pages."""
        ends = [length + steps - 1 if one.holds_all or active >= length else active for one in self.tables]
        seen = (one.columns(one.seen(start), pages_of(end)) for one, end in zip(self.tables, ends, strict=True))
        return sum(map(len, seen)) + self.slab_pages

    def surplus(self, one: Request, plan: Plan, committed: int, *, freed: bool = True) -> int:
        """Returns how many free pages a reservation would leave if the device has these pages. A negative result means
        that the reservation does not fit. With `freed`, pages that leave the row become free unless other requests
        hold them.
        """
        tokens, named, holders = one.tokens, one.named, self.holders()
        new, taken, leaving = 0, set[int](), list[int]()
        for table, row, columns in zip(self.tables, one.rows, plan.columns, strict=True):
            for column in columns:
                what = table.content(tokens, named, column) if committed <= column < plan.found else None
                if what is not None and self.has(what):
                    taken.add(self.page_of(what))
                    leaving += [row[column]] if column in row else []
                else:
                    new += column not in row
            leaving += [page for column, page in row.items() if column not in columns]
        idle = sum(page not in holders and page not in self.beside for page in taken)
        free = sum(holders[page] == 1 and page not in self.beside for page in leaving) if freed else 0
        return self.free() - new - idle + free

    def content_of(self, one: Request, table: int, column: int) -> Content:
        return self.tables[table].content(one.tokens, one.named, column)

    def page_of(self, what: Content) -> int:
        return self.there[self.names.digest_of[what]]

    names: Names = field(default_factory=Names)

    def has(self, what: Content) -> bool:
        return self.names.digest_of.get(what) in self.there


def first_in_order(order: list[Digest]) -> Digest:
    """Returns the idle content that is evicted next: the first one by hints if the replica has hints, and the least
    recently used one if not.
    """
    first: Callable[[], Digest] | None = getattr(order, "first", None)
    return order[0] if first is None else first()
