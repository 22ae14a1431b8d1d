"""Random moves of a serving loop on a manager with any features. Each result is compared with the plain model."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from kvcache import (
    FUTURE_TOKEN,
    InvalidRequestError,
    NoFreeStatePageError,
    PageLease,
    PromptTooLongError,
    RangeRetention,
    Retention,
    StatePageError,
    TextContext,
    WeightsChangedError,
)
from kvcache.replica.context import Context
from tests.kvcache.kv import Keys, Named, Run, kv_of
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.books import Books
from tests.kvcache.random_model.matrix import LONGEST, PAGE_SIZE, ROWS, Chooser, World, build, drawn
from tests.kvcache.random_model.plain import Content, Digest, Names, Replica, Request, content, pages_of
from tests.kvcache.random_model.switches import RUNNING, VERSIONS

T = TypeVar("T")
WEIGHTS = {
    "claim": 6,
    "reserve": 8,
    "ask": 3,
    "run": 12,
    "run_batch": 4,
    "fork": 3,
    "rename": 2,
    "stale": 2,
    "release": 5,
    "preempt": 3,
    "lease": 3,
    "tell": 3,
    "end": 3,
    "lend": 2,
    "reset": 1,
    "speculate": 4,
    "hint": 4,
    "switch": 3,
}
OF_FEATURE = {
    "run_batch": "batches",
    "fork": "forks",
    "rename": "renames",
    "stale": "stale",
    "preempt": "preemption",
    "lease": "leases",
    "tell": "leases",
    "lend": "lends",
    "reset": "resets",
    "speculate": "drafts",
    "hint": "hints",
    "switch": "weights",
}
TENANTS = (None, "other", "third")


def known(one: Request) -> list[int]:
    """Returns the tokens of a request without its future token."""
    return [token for token in one.tokens if token != FUTURE_TOKEN]


class SeededChooser:
    """Random choices from a seed: fast, but without Hypothesis's shrinking."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)


class OwnContext:
    """A caller's own context class. It is no subclass of `TextContext` and has no hasher."""

    def __init__(self, inner: TextContext) -> None:
        self.__dict__["inner"] = inner  # Each access to an attribute of the context needs `inner`.

    def __getattr__(self, name: str) -> Any:
        if name == "prefix_hasher":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        inner: TextContext = self.__dict__["inner"]
        if hasattr(type(inner), name):
            setattr(inner, name, value)
        else:
            self.__dict__[name] = value


@dataclass(eq=False)
class Lease:
    """A lease, and the pages and states that its block tables have given to readers. Each table has its pages, the
    number of tokens, and the bytes of these tokens.
    """

    ours: PageLease
    one: Request | None  # The request whose pages are leased. A lease by content has None.
    told: list[tuple[list[int], int, torch.Tensor]] = field(default_factory=list[tuple[list[int], int, torch.Tensor]])
    state: tuple[int, Digest] | None = None


class Moves:
    """A manager with `features` (drawn if not given), its model, and the claimed requests."""

    def __init__(
        self,
        choose: Chooser,
        world: World,
        features: frozenset[str] | None = None,
        names: Names | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        self.choose = choose
        self.features = drawn(choose) if features is None else features
        built = build(choose, self.features, world, params)
        self.manager, self.caching = built.manager, built.caching
        self.names = names or Names()
        self.books = Books(built, self.names)
        self.live: dict[str, Request] = {}
        # Preempted requests. Each context says how many tokens its request had computed.
        self.away: list[TextContext] = []
        self.leases: list[Lease] = []
        self.past: list[tuple[list[int], Keys]] = [([1] * 9, ())]
        self.seen: Counter[str] = Counter()
        self.made = self.state_hits = 0
        self.told_fits = False
        # If true, pages are copied to the host at once. If false, pages are copied only when they are evicted.
        self.steady = choose.integer(0, 1) == 1
        self.books.host_foretold &= self.steady
        if "host" in self.features:
            seam.hold_copies(self.manager)
        if self.late:
            seam.end_copies_late(self.manager, self.is_over)
        if self.hinted:
            self.books.orders.begin(choose.pick((None, 0.5, 0.95)) if "hints" in self.features else None)
        self.kinds = [
            kind for kind, weight in self.weights().items() for _ in range(weight) if self.is_of(kind) in self.features
        ]

    def weights(self) -> dict[str, int]:
        return WEIGHTS

    def is_of(self, kind: str) -> str:
        """Returns the feature to which a move belongs. A move of every manager belongs to the first feature."""
        if kind == "end":
            return "leases" if "leases" in self.features else "lends"
        return OF_FEATURE.get(kind, next(iter(self.features), ""))

    @property
    def hinted(self) -> bool:
        return self.books.orders.hinted

    @property
    def slabs(self) -> bool:
        return self.manager.slab_pages > 0

    @property
    def steps_are_in_flight(self) -> bool:
        """Whether steps are in flight, so that released pages are not free yet."""
        return False

    @property
    def late(self) -> bool:
        """Returns whether copies to and from the host may end at any time. A call may then free pages before it takes
        pages.
        """
        return "late copies" in self.features

    def is_over(self) -> bool:
        """Draws whether a copy that has begun has ended."""
        over = self.choose.integer(0, 5) == 0
        self.seen["late"] += not over
        return over

    @property
    def exact(self) -> bool:
        """Whether the model knows exactly which pages a request finds. It knows them if all pages come from the
        request's own replica.
        """
        return "host" not in self.features

    def replica(self, one: Request) -> Replica:
        return self.books.replicas[one.replica]

    def call(self, name: str, call: Callable[[], T]) -> T:  # noqa: ARG002 - see `Interrupted`
        """Makes a call that may be interrupted."""
        return call()

    # ---- moves

    def move(self) -> None:
        """Makes one move, after which manager and model must agree."""
        kind = self.choose.pick(self.kinds or ["claim", "reserve", "run", "release"])
        move: Callable[[], bool] = getattr(self, kind)
        if move():
            self.seen[kind] += 1
        self.same_books()

    def claim(self) -> bool:
        """Claims a new or a preempted request. One request in three asks `admission` for a replica, and gets its pages
        on this replica.
        """
        context = self.choose.pick(self.away) if self.away and self.choose.integer(0, 1) else self.newcomer()
        replica = self.choose.integer(0, len(self.books.replicas) - 1)
        if self.choose.integer(0, 2) == 0:
            return self.admit(context)
        if len(self.books.replicas[replica].requests) == ROWS:
            return False
        return self.comes(context, replica) is not None

    def comes(self, context: TextContext, at: int) -> Request | None:
        """Claims the request on this replica, which has a free row. Returns None if there is no room for the request's
        state.
        """
        replica = self.books.replicas[at]
        room = self.has_state_room(at)
        try:
            self.call("external_claim", lambda: self.manager.external_claim(context.request_id, at))
        except NoFreeStatePageError:
            assert room is not True, "the claim was refused, but the replica has room for a state"
            self.seen["no state"] += 1
            self.books.learn()
            return None
        assert room is not False, "the request got a state page, but the replica has no room for one"
        tables = len(replica.tables)
        self.made += 1
        one = Request(context, at, self.made, context.tokens.tolist(), [{} for _ in range(tables)], [0] * tables)
        self.live[one.name] = replica.requests[one.name] = one
        self.seen["came back"] += context in self.away
        self.away = [other for other in self.away if other is not context]
        self.books.learn()
        return one

    def has_state_room(self, at: int) -> bool | None:
        """Returns whether a replica has room for one more state. Returns None if the answer depends on held pages that
        cannot be moved.
        """
        replica = self.books.replicas[at]
        if not self.slabs:
            has_room = not self.manager.states or self.manager.states[at].pool.has_room
            return has_room or (None if self.late else False)
        return None if (self.stay(at) and replica.has_slab()) or self.late else replica.has_slab()

    def stay(self, at: int) -> bool:
        """Returns whether some held pages cannot be moved. A page whose id is known to others stays until its request
        is released.
        """
        replica = self.books.replicas[at]
        told = any(one.state_told >= 0 for one in replica.requests.values())
        return bool(self.books.blurred or self.leases or told or replica.beside or not self.books.plain_states(at))

    def admit(self, context: TextContext) -> bool:
        """Checks `admission`: the request gets its row and pages on the recommended replica, and on no other
        replica.
        """
        if self.books.replicas[0].least(context.current_length, 0, context.active_idx, 1) > self.replica_pages:
            return False
        self.chunk(context)
        found = self.call("admission", lambda: self.manager.admission(context))
        self.books.learn()  # copies that have ended were taken up, and the claim may evict a state among them
        full = len(self.books.replicas[found.replica_idx].requests) == ROWS
        one = None if full else self.comes(context, found.replica_idx)
        if one is None:
            assert not found.fits
        else:
            self.told_fits = True
            self.reserve_one(one, 1)
            self.told_fits = False
            assert one.has_pages or not found.fits, f"{context}: {found}, but it got no pages"
            assert found.fits or not one.has_pages or self.slabs or not self.exact, f"{context}: {found}, but it fits"
        self.seen["fits" if found.fits else "does not fit"] += 1
        return one is not None

    @property
    def replica_pages(self) -> int:
        return self.books.replicas[0].num_pages

    def newcomer(self) -> TextContext:
        """Returns a prompt that shares a part or all of an earlier prompt."""
        choose = self.choose
        past, keys = choose.pick(self.past)
        tokens = past[: choose.integer(0, 2 * len(past))]  # In half of the cases the slice takes all tokens.
        tokens = tokens + [choose.integer(1, 2) for _ in range(choose.integer(1, 6))]
        salt = choose.pick(TENANTS) if "quotas" in self.features else None if choose.integer(0, 5) else "other"
        self.made += 1
        made = TextContext(tokens[: LONGEST // 2], LONGEST, f"r{self.made}", cache_salt=salt)
        made.extra_keys = keys if choose.integer(0, 3) else self.keys(made.end_idx)
        made.max_staleness = choose.pick((0, 0, 1, 3)) if "weights" in self.features else 0
        own = "own contexts" in self.features and choose.integer(0, 1)
        self.seen["own context"] += own
        return OwnContext(made) if own else made  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    def keys(self, length: int) -> Keys:
        """Returns extra keys for a prompt of this length: no keys, images near its end, or images anywhere. A page near
        the end becomes full only later.
        """
        kind = self.choose.integer(0, 5)
        if kind < 2:
            return ()
        first = max(0, length - 2 * PAGE_SIZE) if kind < 5 else 0
        at = [self.choose.integer(first, length + 2) for _ in range(self.choose.integer(1, 2))]
        return tuple((position, b"image%d" % self.choose.integer(0, 1)) for position in at)

    def any_of(self, requests: Sequence[Request]) -> Request | None:
        return self.choose.pick(requests) if requests else None

    @property
    def running(self) -> list[Request]:
        """Requests that do not wait for an import."""
        return [one for _, one in sorted(self.live.items())]

    @property
    def waiting(self) -> list[Request]:
        """Requests without pages, each of which fits into the pool."""
        return [one for one in self.running if not one.has_pages and not self.too_long(one)]

    def too_long(self, one: Request, steps: int = 1) -> bool:
        context, replica = one.context, self.replica(one)
        return replica.least(context.current_length, one.start, context.active_idx, steps) > replica.num_pages

    def reserve(self) -> bool:
        one = self.any_of(self.running)
        return one is not None and self.reserve_one(one, self.choose.integer(1, 3)) is not None

    def ask(self) -> bool:
        """Calls `admission` for a waiting request, and sometimes makes a change after the call. The remembered answer
        may then be out of date when the request is claimed, because its keys or the cached pages have changed.
        """
        one, between = self.any_of(self.waiting), self.choose.integer(0, 6)
        if one is None:
            return False
        self.call("admission", lambda: self.manager.admission(one.context))
        if between == 0 and "resets" in self.features:
            self.reset()
        elif between < 3 and "renames" in self.features and not one.gives_back:
            self.change(one.context)
        else:
            self.reserve()
            if one.has_pages or one.name not in self.live:
                return True
        return self.reserve_one(one, 1) is not None

    def stale(self) -> bool:
        """Sets the context of a request without pages to a wrong position."""
        one = self.any_of([one for one in self.waiting if one.context.active_idx])
        if one is None:
            return False
        one.context.set_token_indices(start_idx=self.choose.integer(0, one.context.active_idx - 1))
        return True

    def chunk(self, context: TextContext) -> None:
        """Sometimes limits the run to a chunk. Windows then get pages only for this chunk."""
        if context.active_length > 1 and self.choose.integer(0, 1):
            context.set_token_indices(active_idx=self.choose.integer(context.start_idx + 1, context.end_idx))
            self.seen["chunk"] += context.active_idx < context.end_idx

    # ---- reservations

    def reserve_one(self, one: Request, steps: int) -> bool | None:
        """Reserves pages for one request. Returns whether the request has its pages. Returns None if no pool would be
        large enough.
        """
        context, replica = one.context, self.replica(one)
        was, steps = context.active_idx, min(steps, LONGEST - context.current_length + 1)
        if not self.told_fits:
            self.chunk(context)
        before, start, length = (context.start_idx, context.active_idx), one.start, context.current_length
        if self.too_long(one, steps):
            with contextlib.suppress(PromptTooLongError):
                self.manager.maybe_reserve(context, steps)
                raise AssertionError(
                    f"{context.current_length} tokens and {steps} steps were reserved in {replica.num_pages} pages"
                )
            context.set_token_indices(active_idx=was)
            if one.gives_back and "weights" in self.features:  # it does so even if it is refused then
                self.gives_back(one)
                self.books.learn()
            return None
        self.fetch_below(context)
        if one.gives_back:
            self.gives_back(one)
        self.choose_weights(one, steps)
        is_new, looks = not one.has_pages, not one.has_pages or context.active_length > 1
        # The lookup first uses the contents that are being loaded for the request, and then the contents that it finds.
        if looks:
            self.books.use(one.loads)
            one.loads = []
        committed = replica.committed(one)
        device, low, high = self.ends(one, committed, steps) if looks else (committed, committed, committed)
        run = self.device_run(one, committed)
        if looks:  # Pages that an earlier lookup has found may have been evicted.
            one.shared = run * PAGE_SIZE
        there = self.call("maybe_reserve", lambda: self.manager.maybe_reserve(context, steps))
        if not looks and length + steps - 1 <= one.room:
            assert there, f"{one.name}: was refused pages that it already has"
            self.books.learn()
            return True
        if not there:
            assert (context.start_idx, context.active_idx) == before
            found = [device if device * PAGE_SIZE > start else committed]
            # With lower tiers, several replicas or partly filled pages, the request may continue from a later token.
            if not self.exact:
                found = [*range(committed, high + 1)]
            left = min(self.surplus_at(one, (before, start, steps), committed, end) for end in found)
            assert left < 0, f"{one.name}: refused, but {left} pages would be left"
            self.seen["refused"] += 1
            # The request may still run up to the end of its earlier reservation.
            context.set_token_indices(active_idx=was)
            self.books.learn()
            return False
        active = self.active_after(before, context)
        self.takes_weights(one, is_new=is_new)
        self.came(one, (before, start, steps, active), (committed, device, low, high))
        return True

    def gives_back(self, one: Request) -> None:
        """Records that the row of a request gives its pages back and is claimed anew."""
        replica = self.replica(one)
        self.books.gives_back(one)
        self.books.switches.left(one, {page: digest for digest, page in replica.there.items()})
        if self.steps_are_in_flight:  # The steps in flight may still use the pages that were given back.
            replica.beside |= {page for row in one.rows for page in row.values()}
        one.rows, one.first, one.gives_back = [{} for _ in one.rows], [0] * len(one.rows), False
        one.private = False

    def surplus_at(self, one: Request, asked: tuple[tuple[int, int], int, int], committed: int, end: int) -> int:
        """Returns how many free pages would be left if the request continued from block `end`."""
        (was, active), start, steps = asked
        went_on, length = (end * PAGE_SIZE if end > committed else start), len(one.tokens)
        active = active if went_on < active else min(length, went_on + active - was)
        replica = self.replica(one)
        plan = replica.plan(one, length, went_on, active, steps, end)
        return replica.surplus(one, plan, committed, freed=not self.is_leased(one) and not self.steps_are_in_flight)

    def active_after(self, before: tuple[int, int], context: TextContext) -> int:
        """Returns the end of a chunk after its start was moved from `before`."""
        start, (was, active) = context.start_idx, before
        return active if start < active else min(context.end_idx, start + active - was)

    def came(self, one: Request, asked: tuple[tuple[int, int], int, int, int], may: tuple[int, int, int, int]) -> None:
        """Checks the pages of a request after a reservation. The request must have pages for all blocks that it needs,
        and for no block after those that it may have.
        """
        (before, start, steps, active), (committed, device, low, high) = asked, may
        context, replica = one.context, self.replica(one)
        now = context.start_idx
        least, most = max(start, low * PAGE_SIZE), max(start, high * PAGE_SIZE)
        assert least <= now <= most, f"{one.name}: goes on from {now}, {least} to {most} may be"
        assert now < context.active_idx <= active <= context.end_idx, f"{context} was to run up to {active}"
        found = now // PAGE_SIZE if now > start else committed
        plan = replica.plan(one, len(one.tokens), now, active, steps, found)
        if self.exact:
            left = replica.surplus(one, plan, committed)
            assert left >= 0, f"{one.name}: has pages, {-left} too many"
        if now > start and self.manager.states:
            digest = self.names.digest_of[content(0, one.tokens, one.named, now // PAGE_SIZE - 1)]
            self.books.touch_state(one.replica, digest)
            self.state_hits += 1
        if now > start and committed:
            one.unnamed.add(committed - 1)
        self.cut(one, (start, now, active))
        self.seen["slid"] += sum(now > first for now, first in zip(plan.firsts, one.first, strict=True))
        self.seen["sinks apart"] += any(
            0 < table.sinks < first for table, first in zip(replica.tables, plan.firsts, strict=True)
        )
        one.prompt = len(one.tokens) if one.prompt < 0 else one.prompt
        self.books.learn(batch=[one])
        for number, (row, columns) in enumerate(zip(one.rows, plan.columns, strict=True)):
            assert sorted(row) == columns, f"{one.name}: table {number} has {sorted(row)}, {columns} is needed"
            brings = "host" in self.features and found > device
            for column in range(max(committed, start // PAGE_SIZE) if brings else committed, found):
                what = replica.tables[number].content(one.tokens, one.named, column)
                digest = self.names.digest_of.get(what)
                there = None if digest is None else replica.there.get(digest)
                # a copy that another request has waited for may have ended within this call, after the lookup
                here = row.get(column) == there or (brings and (there is None or self.late))
                assert column not in row or here, f"{one.name}: {column} is not shared"
        one.first = plan.firsts
        one.ready = True
        self.back_from_below(one, device, found)
        self.seen["hit"] += now > start
        self.seen["moved back"] += now < before[0]

    def cut(self, one: Request, at: tuple[int, int, int]) -> None:
        """Returns the end of a chunk at which a copy of the state is to be made."""
        start, now, active = at
        if not self.manager.states or not self.caching or one.private:
            assert one.context.active_idx == active
            return
        if now == start and active - now == 1:
            assert one.context.active_idx == active
            return
        last = len(one.tokens) - 1
        one.ends = one.ends or {one.shared, last - last % PAGE_SIZE}
        spacing = self.books.built.every * PAGE_SIZE
        spaced = {*range(0, active, spacing)} if spacing else set[int]()
        wanted = min((end for end in one.ends | spaced if now < end < active), default=active)
        may_be = {wanted} if self.exact and not one.unsure else {active, *range(0, active, PAGE_SIZE)}
        assert one.context.active_idx in may_be, f"{one.context}: its chunk was to end at {wanted}"
        self.seen["cut"] += one.context.active_idx < active

    def device_run(self, one: Request, committed: int) -> int:
        """Returns how many of the first blocks of the first table the device has, if this table keeps every token. For
        other tables the result counts all blocks.
        """
        end, last = committed, (len(one.tokens) - 1) // PAGE_SIZE
        replica = self.replica(one)
        if not replica.tables[0].is_prefix:
            return max(end, last) if self.caching else 0
        while end < last and replica.has(content(0, one.tokens, one.named, end)):
            end += 1
        return end if self.caching else 0

    def ends(self, one: Request, committed: int, steps: int) -> tuple[int, int, int]:
        """Returns three block numbers. The first is where the request continues with the pages of its own device. The
        second and the third are the first and the last possible ones with other tiers and replicas.
        """
        replica, names = self.replica(one), self.names
        if self.is_promised(one) or self.ends_provisionally(one, committed):
            return committed, committed, committed

        def there(_: int, what: Content) -> bool:
            return replica.has(what)

        def ends_here(what: Content) -> bool:
            return not self.manager.states or names.digest_of.get(what) in replica.kept

        device = replica.resume(one, committed, there, ends_here)
        if "host" not in self.features:
            return device, device, device
        host, states, run = self.books.host, seam.host_states(self.manager), self.device_run(one, committed)

        def in_host(what: Content) -> bool:
            return names.digest_of.get(what) in host

        def ends_below(what: Content) -> bool:
            return ends_here(what) or names.digest_of.get(what) in states

        if replica.is_plain:
            low = replica.resume(
                one, committed, lambda _, what: len(what) // PAGE_SIZE <= run or in_host(what), ends_below
            )
            low = low if "host" in self.features else device
        else:
            surely = len(replica.tables) * pages_of(len(one.tokens) + steps - 1) <= replica.free()
            lifts = surely and not one.has_pages and "host" in self.features
            low = replica.resume(one, committed, lambda _, what: replica.has(what) or in_host(what), ends_below)
            low = low if lifts else device
        everywhere = replica.resume(one, committed, lambda _, what: what in names.digest_of)
        return device, min(low, everywhere), everywhere

    def fetch_below(self, context: TextContext) -> None:
        """Waits, as a scheduler may, until pages from files and objects have arrived."""
        end = time.monotonic() + 10
        if not {"files", "objects"} & self.features:
            return
        while self.call("prefetch", lambda: self.manager.prefetch(context)):
            assert time.monotonic() < end, "pages from lower tiers do not arrive"
            time.sleep(0.0005)
        self.books.learn()

    def back_from_below(self, one: Request, device: int, found: int) -> None:
        """Records the contents that a request loads from host memory. With one block table, their use is recorded
        later. With several tables, the model stops predicting the evictions of the host.
        """
        if "host" not in self.features:
            return
        there = self.replica(one).there
        digests = [
            digest
            for number in range(len(one.rows))
            for column in range(min(device, found), found)
            if column in one.rows[number] and (digest := self.name_of(one, number, column)) not in there
        ]
        if len(one.rows) == 1:
            one.loads = digests
        else:
            self.books.host_foretold = False  # The model does not know which of these pages were in lower tiers.
        self.seen["came from below"] += len(digests)

    def name_of(self, one: Request, table: int, column: int) -> Digest:
        return self.names.digest_of[self.books.tables[table].content(one.tokens, one.named, column)]

    def ends_provisionally(self, one: Request, committed: int) -> bool:
        """Returns whether draft layers compute the KV of the last token of the request's `committed` pages again. The
        request then resumes at no later token.
        """
        has_drafts = any(table.ahead for table in self.books.tables)
        return has_drafts and 0 < one.cached == committed * PAGE_SIZE and one.cached >= one.prompt >= 0

    # ---- weights

    def switch(self) -> bool:
        """Sets other weights, or those of before again. Running requests finish, begin anew, or are stopped."""
        switches, live = self.books.switches, [one for one in self.running if one.has_pages]
        if any(not one.private and one.context.start_idx // PAGE_SIZE != self.committed(one) for one in live):
            return False  # what a step has computed and not recorded has no name yet
        kept = any(self.is_leased(one) or one.private for one in live)  # leases belong to the claim of before
        version, running = self.choose.pick(VERSIONS), self.choose.pick(("finish",) if kept else RUNNING)
        changes = switches.switch(version)
        self.call("set_weights", lambda: self.manager.set_weights(version, running))
        seam.begin_segments(self.manager)
        later = [one for one in self.running if one.gives_back]  # an earlier switch has said so
        for one in [*live, *(later if running == "stop" else ())] if changes else ():
            if running == "recompute":
                one.gives_back, one.ready, one.cached = True, False, 0
            elif running == "stop":
                with contextlib.suppress(WeightsChangedError):
                    self.manager.maybe_reserve(one.context)
                    raise AssertionError(f"{one.name}: was not stopped")
                self.leave(one)
            else:
                one.weights = (*one.weights, (one.context.start_idx, switches.mark()))
            self.seen[f"switch: {running}"] += 1
        self.books.learn()
        return True

    def choose_weights(self, one: Request, steps: int) -> None:
        """Chooses the versions of the pages that a request without pages looks for.

        The longest prefix is chosen, and of equal ones the newest.
        """
        if one.has_pages or "weights" not in self.features:
            return
        switches, found = self.books.switches, dict[tuple[tuple[int, bytes], ...], int]()

        def reach(weights: tuple[tuple[int, bytes], ...]) -> int:
            one.weights = weights
            return found.setdefault(weights, self.ends(one, 0, steps)[0])

        best = ((0, switches.name(switches.now)),)
        most, newer = reach(best), [switches.now]
        for version in switches.recent(one.context.max_staleness):
            mine, left = ((0, switches.name(version)),), newer[:]
            while left and reach(mine):
                longer = [(*mine, (reach(mine) * PAGE_SIZE, switches.name(later))) for later in left]
                at = max(range(len(longer)), key=lambda at: reach(longer[at]))
                if reach(longer[at]) <= reach(mine):
                    break
                mine, left = longer[at], left[:at]
            if reach(mine) > most:
                best, most = mine, reach(mine)
            newer.append(version)
        one.weights = best

    def takes_weights(self, one: Request, *, is_new: bool) -> None:
        """Records that a new request goes on under the current version behind the first pages that it has found."""
        if not is_new or "weights" not in self.features:
            return
        switches, start = self.books.switches, one.context.start_idx
        mine = tuple(key for key in one.weights if key[0] < start) or one.weights[:1] * (start > 0)
        if not mine or mine[-1][1] != switches.name(switches.now):
            mine = (*mine, (start, switches.name(switches.now)))
        self.seen["old pages"] += len(mine) > 1
        one.weights = mine
        told = [(at, version) for at, _, version in self.manager.lineage(one.name)]
        assert told == ([(at, switches.version_of(name)) for at, name in mine if at < start] if start else [])
        found = range(start // PAGE_SIZE)
        if not one.context.max_staleness:  # what it finds is of the current version
            return
        whats = (table.content(one.tokens, one.named, column) for table in self.books.tables for column in found)
        switches.used(one.replica, (self.names.digest_of[what] for what in whats if self.replica(one).has(what)))

    # ---- a step

    def is_promised(self, one: Request) -> bool:
        """Returns whether readers know the request's state page, which must then not change."""
        return bool(self.manager.states) and self.is_leased(one) and one.state_told == one.cached

    def is_leased(self, one: Request) -> bool:
        return any(lease.one is one for lease in self.leases)

    @property
    def ready(self) -> list[Request]:
        """The requests that may run a step."""
        may = (one for one in self.running if one.ready and not self.is_promised(one))
        return [one for one in may if one.room >= len(one.tokens) or one.context.active_idx < one.context.end_idx]

    def run(self) -> bool:
        one = self.any_of(self.ready)
        if one is None or len(one.tokens) == LONGEST:
            return False
        chunk = self.choose.integer(1, 30)
        if one.context.active_length > chunk:
            one.context.set_token_indices(active_idx=one.context.start_idx + chunk)
        self.compute([one.context], [one])
        self.update(one, self.choose.integer(1, 2))
        # With slabs, the pages of a skipped step cannot be moved, and the model does not know for how long.
        if "forks" in self.features and not self.slabs and self.choose.integer(0, 3) == 0:
            one.ready = one.room >= len(one.tokens)
            self.seen["skipped step"] += 1
            return True
        if self.caching and "renames" in self.features and self.choose.integer(0, 7) == 0:
            self.step_renamed(one)
        self.call("step", lambda: self.manager.step([one.context]))
        self.stepped([one])
        return True

    def update(self, one: Request, token: int) -> None:
        if one.context.active_idx == one.context.end_idx:
            one.tokens.append(token)
        one.context.update(token)

    def compute(self, batch: Sequence[Context], requests: Sequence[Request], *, decodes: bool = False) -> None:
        """Computes as the model would: checks the KV of every cached token, and writes the KV of all other tokens."""
        inputs = self.call("fetch", lambda: self.manager.fetch(batch))
        runs = [self.run_of(one, decodes=decodes) for one in requests]
        if "host" in self.features:
            for one in requests:
                self.books.use(one.loads)
                one.loads = []
            self.books.learn()
        self.books.kv.run(runs, inputs)
        for one, run in zip(requests, runs, strict=True):
            self.ran(one, run)
        for at, states in enumerate(self.manager.states):
            if not (mine := [run for run in runs if run.replica == at]):
                continue
            names = [run.request_id for run in mine]
            pages = states.pages_at(names, [run.start for run in mine])
            for page, run in zip(pages.numpy().astype(np.int64).tolist(), mine, strict=True):
                wanted = int(kv_of(run.tokens, run.named, "state")[run.start - 1]) if run.start else 0
                self.same_state(at, page, wanted, run)
            written = states.written(names, pages)
            for page, run in zip(written.numpy().astype(np.int64).tolist(), mine, strict=True):
                for shard in states.blocks:
                    for tensor in shard:
                        tensor[page] = int(kv_of(run.tokens, run.named, "state")[run.active - 1])
            states.advance(written, [run.active for run in mine])

    def same_state(self, at: int, page: int, wanted: int, run: Run) -> None:
        for shard in self.manager.states[at].blocks:
            for tensor in shard:
                assert (tensor[page] == wanted).all(), f"{run.request_id}: another state after {run.start} tokens"

    def run_of(self, one: Request, *, decodes: bool) -> Run:
        length = len(one.tokens)
        start, active = (length - 1, length) if decodes else (one.context.start_idx, one.context.active_idx)
        return Run(one.name, one.replica, one.named, [*one.tokens], start, active, one.again)

    def ran(self, one: Request, run: Run) -> None:
        """Records whether draft layers have to compute the KV of the last token of a run again."""
        self.seen["computed again"] += run.start == run.again and any(table.ahead for table in self.books.tables)
        one.again = run.active if run.active == len(run.tokens) else -1

    def stepped(self, requests: Sequence[Request], *, decodes: bool = False) -> None:
        for one in requests:
            one.cached = len(one.tokens) - 1 if decodes else one.context.start_idx
            one.ready = one.room >= len(one.tokens)
        if self.steady:
            seam.copy_below(self.manager)
        self.books.learn(stepped=requests)

    def run_batch(self) -> bool:
        """Runs several steps of a `Batch` over the requests with one token to run."""
        ready = [one for one in self.ready if one.context.active_length == 1]
        ready = [one for one in ready if one.context.active_idx == one.context.end_idx and one.start]
        if not ready:
            return False
        batch = self.manager.batch([one.context for one in ready])
        for _ in range(self.choose.integer(1, 8)):
            lengths = [len(one.tokens) for one in ready]
            most = self.replica_pages
            if max(lengths) == LONGEST or any(
                self.replica(one).least(length, length - 1, length, 1) > most
                for one, length in zip(ready, lengths, strict=True)
            ):
                break
            # The requests are reserved one after another, because the model must know the order of the evictions.
            if self.hinted and not all(self.reserve_one(one, 1) for one in ready):
                break  # Another test covers the order in which one call evicts several pages.
            if not self.reserve_all(batch, ready):
                break
            self.compute(batch, ready, decodes=True)
            tokens = [self.choose.integer(1, 2) for _ in ready]
            batch.update(tokens)
            for one, token in zip(ready, tokens, strict=True):
                one.tokens.append(token)
            self.call("step", lambda: self.manager.step(batch))
            self.stepped(ready, decodes=True)
            if any(self.is_promised(one) for one in ready):
                break
            self.manager.check()
        for one in ready:
            assert one.context.tokens.tolist() == one.tokens
            assert one.context.start_idx == one.context.end_idx - 1
        return True

    def reserve_all(self, batch: Any, ready: Sequence[Request]) -> bool:
        plans = [
            self.replica(one).plan(one, len(one.tokens), len(one.tokens) - 1, len(one.tokens), 1, self.committed(one))
            for one in ready
        ]
        there: list[bool] = self.call("reserve_batch", lambda: self.manager.reserve_batch(batch)).tolist()
        had = [len(one.tokens) <= one.room for one in ready]
        rows = [[{*row} for row in one.rows] for one in ready]
        self.books.learn(batch=ready)
        for one, is_there, plan, enough, before in zip(ready, there, plans, had, rows, strict=True):
            if is_there and not enough:
                assert [sorted(row) for row in one.rows] == plan.columns, one.name
                one.first = plan.firsts
            else:
                assert [{*row} for row in one.rows] == before, f"{one.name}: was refused, and its pages have changed"
                assert is_there == enough
            replica = self.replica(one)
            if not is_there and len(replica.tables) == 1:
                freed = not self.is_leased(one) and not self.steps_are_in_flight
                left = replica.surplus(one, plan, plan.found, freed=freed)
                assert left < 0, f"{one.name}: was refused, but there are enough pages"
        return all(there)

    def committed(self, one: Request) -> int:
        return self.replica(one).committed(one)

    def speculate(self) -> bool:
        """Runs guessed tokens after the known tokens, and removes some of the guessed tokens again."""
        ready = [one for one in self.ready if one.context.active_idx == one.context.end_idx]
        # Only requests with a hasher can drop tokens.
        ready = [one for one in ready if type(one.context) is TextContext]
        one = self.any_of([one for one in ready if min(one.room, LONGEST - 1) > len(one.tokens)])
        if one is None:
            return False
        context, start, end = one.context, one.context.start_idx, one.context.end_idx
        count = self.choose.integer(1, min(4, min(one.room, LONGEST - 1) - end))
        if self.manager.states and not self.draft(one):
            self.seen["no draft"] += 1
            return False
        for _ in range(count):
            self.update(one, self.choose.integer(1, 2))
        context.set_token_indices(start_idx=start)
        self.compute([context], [one])
        right = self.choose.integer(0, count)
        if right < count:
            context.set_token_indices(active_idx=end + right, end_idx=end + right)
            del one.tokens[end + right :]
            one.again = end + right
        self.update(one, self.choose.integer(1, 2))
        self.call("step", lambda: self.manager.step([context]))
        goes_back = bool(self.manager.states) and right < count
        assert context.start_idx == (start if goes_back else end + right)
        self.seen["set back" if right < count else "all right"] += 1
        self.stepped([one])
        return True

    def draft(self, one: Request) -> bool:
        """Asks for a second state page for a request, and returns whether the request has got it. Checks that the
        answer agrees with the free room in the model.
        """
        states, room, moved = (
            self.manager.states[one.replica],
            self.has_state_room(one.replica),
            seam.moved(self.manager),
        )
        there = self.call("draft", lambda: states.draft(one.name))
        assert there if room and not self.slabs else room is not False or not there
        assert seam.moved(self.manager) == moved, "a page was moved although the model expects it to stay"
        self.books.learn()
        return there

    # ---- salts, keys and hints

    def rename(self) -> bool:
        """Changes the salt or the keys of a request. The change is allowed while the request waits. It is refused while
        the request holds pages.
        """
        # A request that is about to give its pages back still has their names.
        one = self.any_of([one for one in self.running if not one.gives_back])
        if one is None:
            return False
        context, before = one.context, (one.context.cache_salt, one.context.extra_keys)
        self.change(context)
        if not one.has_pages:
            return True
        if context.active_length > 1 and not self.too_long(one):
            self.refused(one, lambda: self.manager.maybe_reserve(context))
        context.cache_salt, context.extra_keys = before
        return True

    def step_renamed(self, one: Request) -> None:
        """Checks that a step which publishes a page refuses a context with another salt or other keys."""
        if self.committed(one) == one.context.start_idx // PAGE_SIZE or one.unsure or one.private:
            return
        before: Named = one.context.cache_salt, one.context.extra_keys
        self.change(one.context)
        self.refused(one, lambda: self.manager.step([one.context]))
        one.context.cache_salt, one.context.extra_keys = before

    def change(self, context: TextContext) -> None:
        if self.choose.integer(0, 2):
            context.extra_keys = (*context.extra_keys, (self.choose.integer(0, context.end_idx), b"new"))
        else:
            context.cache_salt = "other" if context.cache_salt == "changed" else "changed"

    def refused(self, one: Request, call: Callable[[], object]) -> None:
        try:
            call()
        except InvalidRequestError as error:
            assert "while it holds pages" in str(error)  # noqa: PT017 - the moves run without pytest, too
            self.seen["rename refused"] += 1
            return
        raise AssertionError(f"{one.name}: other keys were taken")

    def hint(self) -> bool:
        """Lets time pass, and changes the hint of a running request. Only the hint at its release counts."""
        self.books.orders.now += self.choose.pick((0.0, 1.0, 100.0))
        one = self.any_of(self.running)
        if one is None:
            return False
        length, choose = len(one.tokens), self.choose
        ranges: list[RangeRetention] = []
        for _ in range(choose.integer(0, 2)):
            start = choose.pick((0, choose.integer(0, length)))
            end = choose.pick((None, start + choose.integer(1, length + PAGE_SIZE)))
            ranges.append(RangeRetention(start, end, *self.said()))
        one.context.retention = Retention(*self.said(), ranges=tuple(ranges)) if choose.integer(0, 5) else None
        return True

    def said(self) -> tuple[bool | None, int, float | None]:
        pick = self.choose.pick
        return pick((None, None, True, False)), pick((0, 25, 50, 50, 75, 100)), pick((None, None, 60.0, 90.0, 1000.0))

    # ---- forks and ends

    def fork(self) -> bool:
        """Forks a request that may have a step in flight, or may have run since its last step was recorded."""
        may = [one for one in self.running if one.has_pages and self.has_row(one.replica)]
        parent = self.any_of([one for one in may if 0 < one.cached < len(known(one)) and self.has_computed(one)])
        if parent is None:
            return False
        replica, room = self.replica(parent), self.has_state_room(parent.replica)
        self.made += 1
        child, tokens = parent.context.fork(f"r{self.made}"), known(parent)
        fulls, needed = self.shared_by_forks(parent), pages_of(len(tokens))
        fits = sum(needed - full for full in fulls) + replica.slab_pages <= replica.free()
        if replica.least(len(tokens), parent.cached, len(tokens), 1) > replica.num_pages:
            return False
        if refusal := self.fork_refusal(parent):
            try:
                self.manager.fork(parent.context, child)
            except NoFreeStatePageError:
                assert room is not True, "the fork was refused, but the replica has room for a state"
                return True
            except refusal as error:
                assert "step" in str(error)  # noqa: PT017 - the moves run without pytest, too
                self.seen[f"fork refused: {refusal.__name__}"] += 1
                return True
            raise AssertionError(f"{parent.name}: was forked, but what the child sees is gone")
        later = parent.cached < parent.context.start_idx
        try:
            there = self.call("fork", lambda: self.manager.fork(parent.context, child))
            assert there == fits
        except NoFreeStatePageError:
            assert room is not True
            there = False
        if there:
            rows = self.first_pages(parent, fulls)
            one = Request(child, parent.replica, self.made, tokens, rows, [*parent.first], parent.cached)
            one.ready, one.unsure, one.private = True, parent.unsure, parent.private
            one.weights = parent.weights
            one.prompt = one.again = parent.cached
            assert (child.start_idx, child.active_idx) == (parent.cached, len(tokens))
            self.seen["forked in flight" if parent.context.has_future_token else "forked late"] += later
            self.live[one.name] = replica.requests[one.name] = one
            self.books.learn()
            rows = self.first_pages(parent, fulls)
            assert self.first_pages(one, fulls) == rows, f"{one.name}: does not share the pages of its parent"
            own = [{*row} - {*before} for row, before in zip(one.rows, rows, strict=True)]
            assert own == [{*range(full, needed)} for full in fulls]
        else:
            self.books.learn()
        return there

    def shared_by_forks(self, parent: Request) -> list[int]:
        """Returns for each table how many of the first blocks a fork shares with its parent. Both compute the draft KV
        of the last token again.
        """
        return [(parent.cached - table.ahead) // PAGE_SIZE for table in self.books.tables]

    def first_pages(self, one: Request, ends: Sequence[int]) -> list[dict[int, int]]:
        rows = zip(one.rows, ends, strict=True)
        return [{column: page for column, page in row.items() if column < end} for row, end in rows]

    def fork_refusal(self, parent: Request) -> type[Exception] | None:
        """Returns the error with which a fork of this request is refused. None if it is not refused.

        A recurrent state has moved on with each run. Windows and chunks have moved on with each reservation.
        """
        if self.manager.states and parent.cached != parent.context.start_idx:
            return StatePageError
        tables = zip(self.books.tables, parent.first, strict=True)
        gone = any(table.seen(parent.cached) < first > table.sinks for table, first in tables)
        return InvalidRequestError if gone else None

    def has_computed(self, one: Request) -> bool:  # noqa: ARG002 - see `AheadMoves`
        """Returns whether the device has the KV of all tokens that count as computed."""
        return True

    def has_row(self, at: int) -> bool:
        return len(self.books.replicas[at].requests) < ROWS

    def release(self) -> bool:
        one = self.any_of([one for _, one in sorted(self.live.items())])
        if one is None:
            return False
        if "renames" in self.features and self.choose.integer(0, 7) == 0:
            one.context.cache_salt = "late"  # The manager does not see this change, so no page changes its tenant.
        self.leave(one)
        return True

    def preempt(self) -> bool:
        """Preempts a request, which returns later with the same context."""
        one = self.any_of([one for one in self.running if one.has_pages])
        if one is None or len(self.away) == 4:
            return False
        self.leave(one)
        self.away.append(one.context)
        return True

    def leave(self, one: Request) -> None:
        replica, said = self.replica(one), one.context.named
        self.past = [*self.past[-7:], ([token for token in one.tokens if token >= 0], one.context.extra_keys)]
        committed = 0 if one.unsure else self.committed(one)
        mine = {page for row in one.rows for page in row.values()}
        salt = next((self.books.orders.salt_of(d) for d, page in replica.there.items() if page in mine), said[0])
        if committed:  # The salt of the published pages counts, not the salt of the request's context.
            one.context.cache_salt = salt
        self.books.orders.say(replica, one, committed)
        one.context.cache_salt = said[0]
        digest_of = {page: digest for digest, page in replica.there.items()}
        # Pages after a page that is still being fetched from a lower tier cannot be read yet.
        found = LONGEST if one.unsure else committed
        pages = [
            page
            for row in one.rows
            for column, page in row.items()
            if column < pages_of(one.cached) or (page in digest_of and column < found)
        ]
        self.call("release", lambda: self.manager.release(one.name))
        self.books.switches.left(one, digest_of)
        del self.live[one.name]
        self.books.use([*one.loads, *(digest_of[page] for page in pages if page in digest_of)])
        self.books.leave(one)
        self.books.learn()
        mine = [
            parts
            for ours, parts in seam.leased(self.manager, one.replica)
            for lease in self.leases
            if lease.one is one and lease.ours is ours
        ]
        for parts in mine:
            held = [page for part in parts for page in part]
            # After an interrupt the model does not know which pages follow a page that is still being fetched.
            kept = {page for row in one.rows for column, page in row.items() if column < pages_of(one.cached)}
            assert (kept if one.unsure else {*pages}) <= {*held}, f"{one.name}: its lease has lost pages"
            extra = {*held} - {*pages}
            # A reset has hidden the cached pages that a request has found, but not run in yet.
            assert one.private or not extra & {page for row in one.rows for page in row.values()}, (
                f"{one.name}: leased uncomputed pages"
            )
            self.seen["kept"] += bool(pages)

    # ---- leases

    def lease(self) -> bool:
        # a lease keeps the pages that a request gives back because the weights have changed
        one = self.any_of([one for one in self.running if not (one.gives_back and "weights" in self.features)])
        if one is None or len(self.leases) >= 4:
            return False
        ours = self.call("lease", lambda: self.manager.lease(one.name))
        self.leases.append(Lease(ours, one))
        return True

    def tell(self) -> bool:
        """Makes a block table of a leased request. The pages in this table must not change from now on."""
        may = [
            lease
            for lease in self.leases
            if lease.one and lease.one.cached and self.live.get(lease.one.name) is lease.one
        ]
        may = [lease for lease in may if lease.one in self.running]
        # A request may find more cached tokens than it has computed. Its state is then ahead of its tokens until it
        # runs, and no table can be made, except a table for a prompt that still runs.
        full_pages = self.choose.integer(0, 3) == 0
        if self.manager.states and not full_pages:
            may = [lease for lease in may if lease.one and lease.one.context.start_idx == lease.one.cached]
        if not may:
            return False
        lease = self.choose.pick(may)
        one = lease.one
        assert one is not None
        table = self.call("block_table", lambda: self.manager.block_table(one.name, full_pages=full_pages))
        columns = pages_of(table.num_tokens)
        assert table.num_tokens == one.cached - (one.cached % PAGE_SIZE if full_pages else 0)
        for number, (of, row) in enumerate(zip(self.replica(one).tables, one.rows, strict=True)):
            first = min(columns, max(one.first[number], of.seen(table.num_tokens)))
            none = full_pages and not of.group.keeps_all
            pages, named = [*table.groups[number]], [] if none else of.columns(first, columns)
            assert pages == [row[column] for column in named], f"{one.name}: table {number} of the block table is wrong"
            # The next step computes the draft KV of the last token again.
            tokens = sum(min(PAGE_SIZE, table.num_tokens - column * PAGE_SIZE) for column in named) - of.ahead
            self.seen["told of sinks"] += bool(pages) and 0 < of.sinks < first
            if pages:
                lease.told.append((pages, tokens, self.bytes_of(lease, pages, tokens)))
                one.known.update(pages)
            self.seen["told of a window"] += bool(pages) and 0 < first < columns
            self.seen["not told of a window"] += none
        if not full_pages:
            one.state_told = one.cached
        return True

    def lend(self) -> bool:
        """Leases the cached pages of a prompt to a reader, whichever request has computed the pages."""
        if len(self.leases) >= 4 or not self.caching:
            return False
        at, context = self.choose.integer(0, len(self.books.replicas) - 1), self.newcomer()
        replica, contents = self.books.replicas[at], self.manager.contents
        first = self.choose.integer(0, (context.end_idx - 1) // PAGE_SIZE) if contents.takes_any_part else 0
        wanted, most = contents.digests(context, first), self.choose.pick((1 << 20, 1 << 20, 3))
        if "host" in self.features and self.choose.integer(0, 1):
            self.books.orders.blurred = True
            self.call("contents.bring", lambda: contents.bring("asker", at, wanted, most))
            # Pages that are fetched for no request count as the newest pages. The order among these pages is not
            # specified.
            self.books.foretold = False
            self.books.learn()
        asked = Request(
            context, at, 0, context.tokens.tolist(), [{} for _ in replica.tables], [0] * len(replica.tables)
        )
        if "weights" in self.features:  # a reader asks for pages of the current version alone
            asked.weights = ((0, self.books.switches.name(self.books.switches.now)),)
        names, states = self.books.names, bool(self.manager.states)
        end = replica.resume(
            asked,
            first,
            lambda _, what: replica.has(what),
            lambda what: not states or names.digest_of.get(what) in replica.kept,
        )
        if not states:
            assert contents.cached(at, wanted) == (end - first) * PAGE_SIZE
        found = self.call("contents.lease", lambda: contents.lease("asker", at, wanted, most))
        if found is None:
            needs_none = end == first or (
                not states
                and all(not table.columns(table.seen(end * PAGE_SIZE), end, first) for table in replica.tables)
            )
            assert needs_none or most < 1 << 20, f"{end} pages are cached, but none is lent"
            return False
        ours, table = found
        assert table.num_tokens == end * PAGE_SIZE or (most < 1 << 20 and table.num_tokens < end * PAGE_SIZE)
        end, lease = table.num_tokens // PAGE_SIZE, Lease(ours, None)
        if states:
            after = names.digest_of[content(0, asked.tokens, asked.named, end - 1)]
            assert table.groups[-1] == (replica.kept[after],), "the lent state is not the one after these pages"
            self.books.touch_state(at, after)
            lease.state = replica.kept[after], after
        for of, pages in zip(replica.tables, table.groups, strict=not states):
            columns = of.columns(of.seen(table.num_tokens), end, first)
            whats = [of.content(asked.tokens, asked.named, column) for column in columns]
            assert [*pages] == [replica.page_of(what) for what in whats], "the lent pages are not those of the prompt"
            if pages:
                tokens = len(pages) * PAGE_SIZE
                lease.told.append(([*pages], tokens, self.bytes_of(lease, [*pages], tokens)))
        self.leases.append(lease)
        self.books.learn()
        return True

    def end(self) -> bool:
        """Ends a lease. The request of the lease may be running, not running yet, or released."""
        if not self.leases:
            return False
        lease = self.choose.pick(self.leases)
        self.same_bytes(lease)
        at = lease.ours.replica_idx
        parts = next((parts for ours, parts in seam.leased(self.manager, at) if ours is lease.ours), list[list[int]]())
        self.seen["outlived"] += lease.one is None or self.live.get(lease.one.name) is not lease.one
        self.call("end_lease", lambda: self.manager.end_lease(lease.ours))
        assert lease.ours.is_over
        if self.choose.integer(0, 1):
            self.manager.end_lease(lease.ours)
        self.leases.remove(lease)
        if lease.state is not None and lease.state[0] not in seam.lent_states(self.manager, at):
            self.books.touch_state(at, lease.state[1])  # a copy is evicted in its turn after its last lease
        self.books.learn(leaving=[(at, page) for part in parts for page in reversed(part)])
        return True

    def bytes_of(self, lease: Lease, pages: list[int], tokens: int) -> torch.Tensor:
        """Returns the KV of the first `tokens` tokens, as readers find it in `pages`."""
        blocks = self.manager.device_tensors[lease.ours.replica_idx][0][pages]
        return blocks.transpose(1, 3).reshape(len(pages) * PAGE_SIZE, -1)[:tokens].clone()

    def same_bytes(self, lease: Lease) -> None:
        replica = self.books.replicas[lease.ours.replica_idx]
        held = replica.holders().keys() | replica.beside
        for pages, tokens, before in lease.told:
            assert torch.equal(self.bytes_of(lease, pages, tokens), before), f"{lease.ours}: pages were rewritten"
            assert {*pages} <= held, f"{lease.ours}: pages that readers know are free"
        if lease.state is not None:
            self.books.same_state(lease.ours.replica_idx, *lease.state)

    def reset(self) -> bool:
        for one in self.live.values():
            self.books.use(one.loads)
            one.loads = []
        self.call("reset_prefix_cache", self.manager.reset_prefix_cache)
        self.is_forgotten()
        self.books.learn(reset=True)
        return True

    def is_forgotten(self) -> None:
        """Records that nobody else will find what the requests of now have computed, or will compute."""
        for one in self.live.values():
            one.private |= any(one.rows)
            one.passing = None

    # ---- comparisons

    def same_books(self) -> None:
        self.manager.check()
        for lease in self.leases:
            self.same_bytes(lease)
        leased = {
            (at, page)
            for at in range(len(self.books.replicas))
            for _, parts in seam.leased(self.manager, at)
            for part in parts
            for page in part
        }
        assert self.manager.num_leased_blocks == len(leased)
        of_request = {lease.ours: lease.one for lease in self.leases if lease.one in self.running}
        for at in range(len(self.books.replicas)):
            for ours, parts in seam.leased(self.manager, at):
                if (one := of_request.get(ours)) is not None and not one.unsure:
                    held = {page for part in parts for page in part}
                    assert held <= one.known, f"{one.name}: its lease keeps pages that no reader knows"
                    self.seen["kept for readers"] += bool(held)
        for name, one in self.live.items():
            assert self.manager.get_req_blocks(name) == [page for _, page in sorted(one.rows[0].items())]
            assert self.manager.get_replica(one.context) == one.replica
        if self.caching and self.manager.states:
            assert sum(states.hits for states in self.manager.states) == self.state_hits
        for at, states in enumerate(self.manager.states):
            assert states.num_held >= len(self.books.replicas[at].requests)
        # A page from the host belongs to no tenant until a request has used the page and given it back.
        strays = "host" in self.features and {"imports", "lends", "interrupts"} & self.features
        if "quotas" in self.features and not self.slabs and not strays:
            self.same_tenants()

    def same_tenants(self) -> None:
        """Checks the number of each tenant's idle pages. A page whose eviction was interrupted is left out."""
        for at, replica in enumerate(self.books.replicas):
            theirs = Counter(self.books.orders.salt_of(digest) for digest in replica.order)
            del theirs[None]
            ours = {salt: count for salt, count in seam.tenants(self.manager, at).items() if count}
            few = self.books.blurred and Counter(ours) <= theirs
            assert few or ours == dict(theirs), f"tenants have {ours} idle pages, and not {theirs}"

    def finish(self) -> None:
        """Releases all requests and leases, and checks that every page is free."""
        self.books.everything_right()
        for name in [*self.live]:
            self.manager.release(name)
        for lease in self.leases:
            self.same_bytes(lease)
            self.manager.end_lease(lease.ours)
        seam.end_copies(self.manager)
        assert self.manager.num_free_blocks == self.manager.total_num_pages
        self.manager.check()

    def close(self) -> None:
        self.manager.close()
