"""The whole model: every kind of move, wrong calls between the moves, and interrupts in the middle of calls. Also runs
the model on many managers.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvcache import FUTURE_TOKEN, TextContext
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.ahead import AheadMoves
from tests.kvcache.random_model.handover import Import
from tests.kvcache.random_model.interrupts import Interrupted, Interrupts, end_unknown
from tests.kvcache.random_model.matrix import FEATURES, LONGEST, PAGE_SIZE, World, drawn, pairs, with_needed
from tests.kvcache.random_model.moves import SeededChooser
from tests.kvcache.random_model.plain import Request
from tests.kvcache.random_model.wrong import WrongCalls
from tests.kvcache.tiers.stored_objects import StoredObjects

T = TypeVar("T")
MOVES_A_MANAGER = 200
# For each feature without a move of its own, the counters that show that the feature was at work. One counter above
# zero is enough.
SIGNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("window", "chunk", "windows alone"), ("slid",)),
    "sinks": ("told of sinks", "sinks apart"),
    "draft layers": ("computed again",),
    **dict.fromkeys(("latents", "shards", "replicas"), ("run",)),
    **dict.fromkeys(("states apart", "states in slabs"), ("state hit",)),
    "host": ("came from the host",),
    "files": ("read from files", "written to files"),
    "objects": ("read from objects", "written to objects"),
    "quotas": ("evicted",),
    "hints": ("hint",),
    "drafts": ("set back", "all right"),
    "imports": ("imported",),
    "leases": ("kept", "tell"),
    "lends": ("lend",),
    "forks": ("fork",),
    "preemption": ("came back",),
    "batches": ("run_batch",),
    "renames": ("rename",),
    "stale": ("stale",),
    "own contexts": ("own context",),
    "resets": ("reset",),
    "hostile": ("wrong call",),
    "interrupts": ("interrupted",),
    "overlap": ("land",),
    "tails": ("tail",),
    "late copies": ("late",),
    "weights": ("switch: finish", "switch: recompute", "switch: stop", "old pages"),
}


class Model(AheadMoves):
    """A manager and all moves that may happen to it."""

    def __init__(self, choose: Any, world: World, *more: Any) -> None:
        super().__init__(choose, world, *more)
        self.interrupts = Interrupts(self.manager, choose) if "interrupts" in self.features else None
        self.wrong = None
        if "hostile" in self.features:
            self.wrong = WrongCalls(
                self.manager, choose, self.live, self.open_import, self.open_tail, lambda: self.closed
            )

    @classmethod
    def of(cls, seed: int, features: Iterable[str] = (), params: dict[str, Any] | None = None) -> Model:
        """Returns a model with exactly these features. None of them may use files."""
        world = World(Path("nowhere"), StoredObjects())
        return cls(SeededChooser(seed), world, with_needed(features), None, params)

    def open_import(self) -> tuple[Any, Any, Any] | None:
        mine = next(iter(self.imports.values()), None)
        return None if mine is None else (mine.pending, mine.one.context, mine.copier)

    def open_tail(self) -> tuple[Any, Any] | None:
        mine = next(iter(self.tails), None)
        return None if mine is None else (mine.pending, mine.copier)

    def call(self, name: str, call: Callable[[], T]) -> T:
        return call() if self.interrupts is None else self.interrupts.call(name, call)

    def move(self) -> None:
        before = {one: one.tokens[:] for one in self.live.values()}
        try:
            super().move()
        except Interrupted as call:
            self.seen["interrupted"] += 1
            self.seen[f"interrupted: {call}"] += 1
            self.settle(before)
            if str(call) == "reset_prefix_cache":
                self.is_forgotten()
            self.same_books()
        if self.wrong is not None and self.choose.integer(0, 2) == 0:
            self.seen["wrong call"] += self.wrong.make()

    def settle(self, before: dict[Request, list[int]]) -> None:
        """After an interrupt, checks that the manager's state is right or that `recover` repairs it. Then ends all
        leases, imports and steps that the interrupted call has not returned to a caller.
        """
        assert self.interrupts is not None
        manager, books = self.manager, self.books
        if seam.marked(manager):
            self.seen["in the marked part"] += 1
            self.interrupts.recover({name: one.context for name, one in self.live.items()})
        self.end_unknown(before)
        self.leases = [lease for lease in self.leases if not lease.ours.is_over]
        for mine in [*self.stray, *self.left_tails]:
            manager.cancel_import(mine.pending)
        self.stray = [mine for mine in self.stray if mine.copier is not None and not mine.copier.is_over]
        self.left_tails = [mine for mine in self.left_tails if mine.copier is not None and not mine.copier.is_over]
        books.lenient = True
        books.host_foretold = False
        for one in self.live.values():
            one.unsure, one.passing, one.loads = True, None, []
            one.ends = one.ends or {0}
        books.learn()
        books.lenient = False
        self.state_hits = sum(states.hits for states in manager.states)
        for one in self.live.values():
            tables = zip(books.tables, one.rows, one.first, strict=True)
            one.first = [table.begins(row, first) for table, row, first in tables]
            one.ready = one.ready and one.room >= len(one.tokens)
            if manager.states and manager.states[one.replica].is_promised(one.name):
                one.state_told = one.cached  # The interrupted `block_table` may have given its state to readers.

    def end_unknown(self, before: dict[Request, list[int]]) -> None:
        """Ends the leases and imports that no caller has got. Also ends those whose state the model does not know."""
        manager = self.manager
        manager.check()
        report = manager.recover()
        assert report.call is None
        for one in before | dict.fromkeys(self.live.values(), ()):
            self.name(one)
        # The interrupted call may have made a copier and not returned it.
        for mine in (*self.imports.values(), *self.tails):
            mine.copier = mine.copier or next((one for one in report.copiers if one.pending is mine.pending), None)
        # The interrupted call may have lost the proof of this import.
        for mine in [mine for mine in self.tails if mine.is_taken]:
            self.tails.remove(mine)
            self.drop(mine)
        known = [*self.imports.values(), *self.stray, *self.tails, *self.left_tails]
        copiers = [mine.copier for mine in known if mine.copier is not None]
        self.end_unknown_steps(report.steps)
        end_unknown(manager, report, [one.ours for one in self.leases], [mine.pending for mine in known], copiers)
        for name in report.claimed:
            if name not in self.live and manager.contains(name):
                manager.release(name)
        for name, one in [*self.live.items()]:
            in_order = one in before and one.tokens[: len(before[one])] == before[one]
            goes_on = manager.contains(name) and self.goes_on(one) and in_order
            if not goes_on:
                if manager.contains(name):
                    manager.release(name)
                if (mine := self.imports.pop(name, None)) is not None:
                    self.drop(mine)
                del self.live[name]
                del self.replica(one).requests[name]

    def name(self, one: Request) -> None:
        """Learns the digests of all pages that an interrupted call may have published for a request."""
        known = [token for token in one.tokens if token != FUTURE_TOKEN]
        told = TextContext([*known, 0], LONGEST + 9, one.name, cache_salt=one.named[0], extra_keys=one.named[1])
        self.books.learn_drafts(one)
        every = seam.digests(self.manager, told) if self.caching else ()
        for table, digests in zip(self.books.tables, every, strict=False):
            for column, digest in enumerate(digests[: len(digests) - table.ahead]):
                self.names.learn(digest, table.content(known, one.named, column))

    def drop(self, mine: Import) -> None:
        """Forgets an import that has ended in any way."""
        self.manager.cancel_import(mine.pending)
        if mine.copier is not None:
            mine.copier.give_up()

    def goes_on(self, one: Request) -> bool:
        """Returns whether the model knows how many tokens a request has computed. The request must then have the pages
        of all these tokens, or no pages.
        """
        there = any(seam.rows(self.manager, one.name))
        if one.name in self.imports or self.is_written(one):
            mine = self.imports.get(one.name)
            return mine is not None and not mine.pending.closed and not mine.is_taken
        if not there:
            # The request's chunk has ended. The request continues without pages.
            if computed := seam.cached(self.manager, one.name):
                assert all(table.seen(computed) * PAGE_SIZE >= computed for table in self.replica(one).tables)
                return False
            one.cached, one.ready = 0, False
            return one.context.tokens.tolist() == one.tokens
        computed = one.context.computed_idx
        booked = seam.cached(self.manager, one.name) == one.cached
        # If `known` is false, the request has given up an import.
        known = bool(one.has_pages and (one.ready or one.cached))
        same = known and booked and one.context.tokens.tolist() == one.tokens
        return same and self.holds(one, computed)

    def holds(self, one: Request, computed: int) -> bool:
        """Returns whether the request's pages hold all tokens before `computed`."""
        states = self.manager.states
        if states and (one.name in states[one.replica].drafted):
            return False
        return computed == one.cached

    def finish(self) -> None:
        if self.interrupts is not None:
            self.manager.fetch([])  # An interrupted call may have copied pages that only the next call records.
        metrics = self.manager.metrics
        self.seen["came from the host"] += metrics.h2d_blocks_copied + metrics.h2d_states_copied
        self.seen["read from files"] += metrics.file_blocks_read
        self.seen["written to files"] += metrics.file_blocks_written
        self.seen["read from objects"] += metrics.object_blocks_read
        self.seen["written to objects"] += metrics.object_blocks_written
        self.seen["evicted"] += metrics.evictions
        self.seen["state hit"] += metrics.state_hits
        self.seen["states evicted"] += metrics.state_evictions
        self.seen["states from the host"] += metrics.h2d_states_copied
        self.seen["moved"] += seam.moved(self.manager)
        self.seen["tokens compared"] += self.books.kv.compared
        super().finish()

    @property
    def met(self) -> list[str]:
        """Returns the features that were seen at work on the manager."""
        return [one for one in FEATURES if one in self.features and any(self.seen[sign] for sign in SIGNS[one])]


class Run:
    """Runs managers one after another, each with several features.

    `wanted` lists pairs of features. Each manager has the pair that was at work together on the fewest earlier
    managers. If `only` names features, each manager has exactly these features instead.
    """

    def __init__(self, only: Iterable[str] = (), wanted: Sequence[tuple[str, str]] | None = None) -> None:
        self.only, self.wanted = frozenset(only), pairs() if wanted is None else wanted
        # For each pair of features, the number of managers on which both were at work.
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.features: frozenset[str] = frozenset()

    def manager(self, seed: int, moves: int = MOVES_A_MANAGER) -> None:
        """Runs one manager with this seed."""
        least = min(self.wanted, key=lambda pair: (self.pairs[pair], hash((seed, *map(FEATURES.index, pair)))))
        self.features = self.only or drawn(SeededChooser(seed), least)
        with tempfile.TemporaryDirectory() as folder:
            model = Model(SeededChooser(seed), World(Path(folder), StoredObjects()), self.features)
            for _ in range(moves):
                model.move()
            model.finish()
            model.close()
        met = model.met
        self.pairs.update((one, other) for at, one in enumerate(met) for other in met[at + 1 :])
        self.events.update(met)
        self.seen += model.seen
        self.seen["moves"] += moves
