"""`Replicas`: splits a call for a batch among the replicas, and carries it out on each of them."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.endpoints.publisher import EventPublisher
from kvcache.events.log import FILES, HOST, AnyLog, NoLog, Watched
from kvcache.events.wire import CacheSpec, spec_of
from kvcache.layer_groups import LayerTables
from kvcache.params import KVCacheParams, KVEvents
from kvcache.replica.batch import Gathered, Share
from kvcache.replica.context import Context, SafeContext, TextContext, read_context
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.recount import check_replica
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Found
from kvcache.replica.row_states import step_drafted
from kvcache.replica.rows import AllRows, Filled, PromptCounter, as_rows, rows_at
from kvcache.router import Router
from kvcache.states.state_pages import StatePages
from kvcache.steps_in_flight import StepInFlight, StepsInFlight
from kvcache.tiers.tiers import Tiers
from kvcache.types import Admission, KVCacheMetrics, RaggedKVCacheInputs, RequestID
from kvcache.under_way import Call
from kvcache.weights import MUST, Running, Version

_FETCH, _STEP, _RESERVE = Call("fetch"), Call("step"), Call("reserve_batch")


class Replicas:
    """All replicas of a manager. The methods raise the errors of the manager's methods that use them."""

    def __init__(
        self,
        placed: Sequence[PlacedReplica],
        rows: AllRows,
        params: KVCacheParams,
        tiers: tuple[Tiers | None, Tiers | None],
        states: list[StatePages],
        fingerprint: str,
    ) -> None:
        self.placed = placed
        self.fingerprint = fingerprint  # identifies the layout of a replica's pages and states on all shards
        self.rows = rows
        self._counters = [each.replica.counter for each in placed]
        self.tiers, self.state_tiers = tiers  # the tiers below the token pages, and below recurrent states
        self._all_tiers = [one for one in tiers if one is not None]
        self.each: list[Replica] = [each.replica for each in placed]
        self.states = states  # of each replica; empty for a model without recurrent layers
        self._kept = [replica.kept for replica in self.each]
        self.steps = StepsInFlight(placed)
        self.mark = self.each[0].mark  # the mark of the call that is changing the state of all replicas
        self._most = self.each[0].max_seq_len
        self._router = Router(len(placed), params.routing)
        self._events: EventPublisher | None = None
        self.event_endpoints: list[tuple[str, str | None]] = []  # the addresses of each replica's KV events and replays
        self._log: AnyLog = NoLog()  # records the changes that are reported as events, and the tokens of new pages
        self._in_chunks = self.each[0].tables.in_chunks
        self._in_slabs = self.each[0].pool.beside > 0  # whether pages move to make room for slabs

    @property
    def metrics(self) -> KVCacheMetrics:
        """The counters over all replicas since the replicas were made."""
        below = sum((tiers.metrics for tiers in self._all_tiers), KVCacheMetrics())
        return sum((replica.metrics for replica in self.each), below)

    def admission(self, context: SafeContext, num_steps: int = 1) -> Admission:
        """Returns the best replica for a new request."""
        if any(tiers.is_loading for tiers in self._all_tiers):
            # Steps handle copies from host memory that have ended. A loop that only waits does not run steps.
            with self.mark.changing(Call("admission")):
                self._take_up()
        one = self.each[0]
        length = one.length_of(context, num_steps, 0)
        claimed = [len(replica.rows.row_of) for replica in self.each]
        if self._router.routing.rule != "prefix":
            chosen = self._router.without_looking(claimed)
            stale = context.staleness and one.caching
            hasher = self._hashers(context, self.each[chosen : chosen + 1])[0] if stale else None
            found = self.each[chosen].find(context, hasher=hasher)
            new, fits = self._fits(chosen, context, length, found)
            return Admission(chosen, found.end, new, fits)
        if context.staleness and one.caching:
            hashers = self._hashers(context, self.each)
            found = [replica.find(context, hasher=of_it) for replica, of_it in zip(self.each, hashers, strict=True)]
        else:
            # The prompt is hashed once for all replicas, even if the context cannot carry the hasher.
            hasher = one.hasher(None, context) if one.caching else None
            found = [replica.find(context, hasher=hasher) for replica in self.each]
        missing, fits = zip(*(self._fits(at, context, length, one) for at, one in enumerate(found)), strict=True)
        chosen = self._router.recommend(missing, claimed, fits)
        return Admission(chosen, found[chosen].end, missing[chosen], fits[chosen])

    def _hashers(self, context: SafeContext, replicas: Sequence[Replica]) -> list[PrefixHasher]:
        """Returns the hasher by which the new request finds the longest prefix of each replica."""
        if not context.staleness:
            return [replicas[0].hasher(None, context)] * len(replicas)
        candidates = replicas[0].candidates(context)
        found = [candidates.best(replica.reach) for replica in replicas]
        candidates.keep(found[0])
        return found

    def prefetch(self, context: SafeContext) -> bool:
        """Begin to load the request's pages into the host tier. Returns whether any pages are on their way."""
        if not self.each[0].fetches:
            return False
        found = list(zip(self.each, self._hashers(context, self.each), strict=True))
        most, hasher = max(found, key=lambda one: one[0].find(context, hasher=one[1]).reached)
        digests = hasher.digests(context.tokens, 0, (context.end_idx - 1) // hasher.page_size)
        return most.fetch_prefix(digests, wait=False)

    def reserve(self, replica_idx: int, row: int, context: SafeContext, num_steps: int) -> bool:
        """Give one request its pages. If too few pages are free, returns False and changes nothing."""
        replica = self.each[replica_idx]
        # At its first reservation, a request uses cached pages even if it runs only one token.
        first_time = replica.rows.prompt_of[row] < 0
        if first_time and self._all_tiers:
            self._take_up()
        new_pages = replica.reserve(row, context, context.indices, num_steps)
        if new_pages is None:
            return False
        if first_time and len(self.each) > 1:  # with one replica, no replica has to be chosen
            self._router.admitted(replica_idx, new_pages)
        return True

    def reserve_batch(
        self,
        gathered: Gathered,
        num_steps: int,
        bind: Callable[[Context, int, int], None],
        claim_anew: Callable[[RequestID, int], int],
    ) -> NDArray[np.bool_]:
        """Reserve pages for each request. Returns bool `[batch]`. Raises before any request is changed.

        For each context that got its first pages, calls `bind` with the context, its replica and its row. Calls
        `claim_anew`, with a request and its replica, for each request that must begin anew. There is one
        exception: if a caller's own context raises when its indices are set, the requests before it keep their pages.
        """
        fits = gathered.slack >= num_steps - 1 and not gathered.is_read
        if fits or self._reserve_decoding(gathered, num_steps):
            self.mark.call = None
            return np.ones(len(gathered.contexts), np.bool_)
        places: list[int] = as_rows(gathered.places).tolist()
        at_rows = [divmod(place, self.rows.rows) for place in places]
        listed = gathered.contexts  # kept here, because `claim_anew` releases requests, and their list forgets them
        contexts = [read_context(context) for context in listed]
        for (replica_idx, row), context in zip(at_rows, contexts, strict=True):
            replica = self.each[replica_idx]
            is_new = not replica.rows.num_pages_of[row] or replica.begins_anew(row, "reserve_batch")
            if not is_new:
                replica.refuse_reservation(row, context, "reserve_batch")
            # A row without pages has computed nothing, whatever its context says: it may have been preempted.
            start = 0 if is_new else context.start_idx
            replica.length_of(context, num_steps, start)
        reserved = np.zeros(len(contexts), np.bool_)
        with self.mark.changing(_RESERVE) as mark:
            for at, ((replica_idx, row), context) in enumerate(zip(at_rows, contexts, strict=True)):
                mark.context = context
                if self.rows.stale[places[at]]:
                    if not self.each[replica_idx].can_begin_anew(row):
                        continue  # an earlier request of this batch has taken the room
                    claim_anew(context.request_id, replica_idx)
                reserved[at] = self.reserve(replica_idx, row, context, num_steps)
                if reserved[at]:
                    bind(listed[at], replica_idx, row)
        return reserved

    def fork(self, replica_idx: int, parent: int, row: int, end: int) -> None:
        """Let the claimed `row` share the computed pages of row `parent`, and give it pages up to column `end`."""
        for source, target in self.each[replica_idx].fork(parent, row, end):
            self.placed[replica_idx].memory.copy_page(source, target)

    def fetch_ahead(self, gathered: Gathered, num_steps: int) -> StepInFlight:
        """Do the same as `fetch`, but in separate tables, which stay unchanged until the step has ended."""
        count = len(gathered.contexts)
        self._kept[0].refuse_overlap(count)
        number = self.steps.free_tables(count)
        step = StepInFlight(self.steps, number, count, self.fetch(gathered, num_steps, number))
        self.mark.call = Call("fetch_ahead", functools.partial(self.steps.end, step))
        self.steps.begin(step)
        self.mark.call = None
        return step

    def fetch(self, gathered: Gathered, num_steps: int, number: int | None = None) -> list[RaggedKVCacheInputs]:
        """Returns the model's inputs, shard by shard and replica by replica.

        An error is raised before any token is counted as run. `number` selects the set of tables in which the inputs
        are built.
        """
        if gathered.slack < num_steps - 1 or (gathered.is_read and self._in_chunks):
            self._refuse_short(gathered, num_steps)
        counted = gathered.is_counted  # then these requests have been checked, and their prompts have been counted
        prompts: list[tuple[PromptCounter, list[tuple[int, int, int]]]] = []
        for share in () if counted else gathered.shares:
            replica, at = self.each[share.replica], share.at
            replica.refuse_rewrite(share.rows, gathered.starts[at])
            if (counter := replica.counter).open:
                prompts.append((counter, counter.prompts(share.rows, gathered.starts[at], gathered.actives[at])))
        self.mark.call = _FETCH
        if self._all_tiers:
            self._tick(gathered.shares)
        for counter, ran in prompts:
            counter.run(ran)
        fetched: list[RaggedKVCacheInputs] = []
        for share in gathered.shares:
            placed = self.placed[share.replica]
            fetched += placed.inputs(share.rows, *gathered.part(share), num_steps, number)
            if self._in_slabs:
                placed.replica.pool.moves.fetched(share.rows)
        self.mark.call = None
        if not counted:
            gathered.count_along(self._counters)
        return fetched

    def _refuse_short(self, gathered: Gathered, num_steps: int) -> None:
        """Raise unless each request has pages for its tokens, and still has the pages that its next query sees."""
        in_chunks = self._in_chunks
        if not in_chunks and gathered.room_after(num_steps) >= 0:
            return
        lengths = gathered.lengths_after(num_steps)
        for share in gathered.shares:
            replica, at = self.each[share.replica], share.at
            needed = lengths[at]
            if in_chunks and not gathered.is_counted:
                # With windows, a request needs pages only up to the end of the chunk that runs.
                actives = gathered.actives[at]
                needed = np.where(actives < gathered.ends[at], actives, needed)
                replica.tables.refuse_lost(share.rows, gathered.starts[at])
            replica.refuse_short(share.rows, needed, "fetch")

    def step(self, gathered: Gathered, settle: Callable[[], None] | None = None) -> None:
        """Publish pages that are full of computed tokens. Raises before anything is published.

        `settle` is given if some requests have drafted tokens. It is called after the pages were published.
        """
        for kept in self._kept:
            if kept.drafted and settle is None:
                step_drafted(self._kept, gathered, self.step)
                return
        computed = gathered.computed
        # a request may have run beyond its pages
        if gathered.slack < -1 and self.rows.slack(gathered.places, computed) < 0:
            for share in gathered.shares:
                self.each[share.replica].refuse_short(share.rows, computed[share.at], "step")
        if gathered.due > 0:  # no page is full
            self.mark.call = _STEP
            self._computed(gathered)
            full = []
        else:
            full = self._publish(gathered)
        if settle is not None:
            settle()
        for share in gathered.shares if self._in_slabs else ():
            self.each[share.replica].pool.moves.stepped(share.rows)
        for share, pages in full:
            self._kept[share.replica].computed(pages)
        self.mark.call = None

    def _publish(self, gathered: Gathered) -> list[tuple[Share, Filled]]:
        """Publish all pages of these requests that are full of computed tokens. Returns these pages.

        Sets the mark of the manager, and leaves it set: the caller clears the mark.
        """
        computed = gathered.computed
        # Pages that were full before the last token are already published. So only the requests whose last token fills
        # a page have to be checked.
        looked = None if gathered.due else gathered.turning()
        # All replicas hash before any of them publishes. So if the salt or keys of a request have changed, the call is
        # refused before it changes anything.
        full: list[tuple[Share, Filled]] = []
        for share in gathered.shares if looked is None else looked:
            at, rows, firsts, lasts = self.each[share.replica].filled(share.rows, computed[share.at])
            if at.size:
                if len(self.each) > 1 or looked is not None:
                    at = rows_at(share.at, at)
                digests = gathered.digests(at, firsts, lasts, self._hasher_of, self._log)
                full.append((share, Filled(rows, firsts, lasts, digests)))
        self.mark.call = _STEP
        for share, pages in full:
            self.each[share.replica].publish(pages)
        # Last, because `publish` passes replaced pages to leases as far as readers know them.
        self._computed(gathered)
        if gathered.lasts:
            gathered.published(any_full=bool(full))
        if self._log.is_read:
            self._log.end_call()
        return full

    def publish_events(self, options: KVEvents, params: KVCacheParams, tables: LayerTables) -> None:
        """From now on, report to subscribers what the pools and the tiers below them contain. Each replica is a rank.

        Recurrent states are reported as one more group, after the block tables. A state is cached only after some of a
        prompt's pages.
        """
        specs = [spec_of(table.group, params) for table in tables.tables] + [CacheSpec("mamba")] * bool(self.states)
        count, last = len(tables.tables), len(specs) - 1
        watched = [Watched(replica.pool.index, at * len(specs), count) for at, replica in enumerate(self.each)]
        watched += [Watched(one.pool.index, at * len(specs) + last, 1) for at, one in enumerate(self.states)]
        for tiers, first, of in ((self.tiers, 0, count), (self.state_tiers, last, 1)):
            if tiers is not None:
                watched.append(Watched(tiers.host.pool.index, HOST * len(specs) + first, of))
                if tiers.files is not None:
                    watched.append(Watched(tiers.files.index, FILES * len(specs) + first, of))
        size, weights = self.each[0].page_size, self.rows.weights
        self._events = EventPublisher(options, specs, len(self.each), size, watched, weights)
        self.event_endpoints = self._events.endpoints
        self._log = log = self._events.log
        for replica in self.each:
            replica.log = log

    def rebuild(self) -> None:
        """Release every request after an interrupt, and build all state anew.

        Published pages and states, leases, imports and steps in flight are kept. Waits until no device and no thread of
        a tier copies, reads or writes anything.
        """
        for placed in self.placed:
            placed.memory.settle()
        for tiers in self._all_tiers:
            tiers.restart()
        self.steps.park()
        for replica in self.each:
            replica.rebuild()
        if self._events is not None:
            self._events.agree()

    def forget(self) -> None:
        """Forget every page, in all tiers. Requests, leases and imports keep theirs, which nobody else finds."""
        # The tiers come first: copies that are under way end here, and publish what they have copied.
        for tiers in self._all_tiers:
            tiers.reset()
        for replica in self.each:
            replica.forget()

    def pages_by_version(self) -> dict[bytes | None, int]:
        """See `PagedKVCacheManager.num_blocks_by_weights`."""
        numbers = self.rows.weights.numbers
        counts = np.zeros(len(numbers) + 1, np.int64)
        for replica in self.each:
            of = replica.pool.versions.numbers(replica.pool.index.published.nonzero()[0])
            counts += np.bincount(np.where(of < 0, len(numbers), of), minlength=len(counts))
        found = {version: int(counts[number]) for version, number in numbers.items()}
        found[self.rows.weights.version] = found.pop(self.rows.weights.version)  # the most recent one comes last
        return found

    def set_weights(self, version: Version, running: Running) -> None:
        """Name pages by another version of the weights from now on. See `PagedKVCacheManager.set_weights`."""
        weights = self.rows.weights
        before = weights.now
        weights.switch(version)
        what = MUST[running] if weights.now is not before else 0
        for replica in self.each if weights.now.switches else ():
            for pool in (replica.pool, *replica.kept.pools):
                pool.set_version(weights.numbers[weights.version])
            replica.begin_segments()
            if what:
                replica.rows.mark_stale(what)

    @property
    def host_pages(self) -> tuple[int, int]:
        """The number of pages that fit into the host tier, and the number of pages that the host tier holds.

        Both are 0 if there is no host tier.
        """
        if not self.tiers:
            return 0, 0
        pool = self.tiers.host.pool
        return pool.num_pages, int(np.count_nonzero(pool.index.published[1:]))

    def flush(self) -> None:
        """Copy and write all pages and states that the tiers do not have yet."""
        for tiers in self._all_tiers:
            tiers.flush()

    def close(self, *, flush: bool) -> None:
        """Close the tiers and stop the events. With `flush`, first writes all published pages. Safe to call twice."""
        for tiers in self._all_tiers:
            tiers.close(flush=flush)
        if self._events is not None:
            self._events.close()

    def check(self) -> None:
        """Recount every replica, then the tiers below. Raises `InvariantError` at the first discrepancy.

        Raises `MovedMemoryError` if memory of pages or tables is no longer at its address.
        """
        for placed in self.placed:
            placed.check()
        for replica in self.each:
            check_replica(replica)
        self.steps.check()
        for tiers in self._all_tiers:
            tiers.check()

    def _tick(self, shares: Sequence[Share]) -> None:
        """Order the copies from host memory to the pages that a model reads now, and copy some pages to the host."""
        for share in shares:
            self.each[share.replica].tier.arrive(share.rows)
        for tiers in self._all_tiers:
            tiers.tick()

    def _take_up(self) -> None:
        """Handle copies from host memory that have ended, which may free pages."""
        for tiers in self._all_tiers:
            tiers.take_up()

    def _reserve_decoding(self, gathered: Gathered, num_steps: int) -> bool:
        """Reserve pages for a batch in which each request runs one token.

        Returns False if the requests must be reserved one by one.
        """
        # All requests had pages up to their last token. So only a request whose new token begins a page can need a
        # page.
        shares = gathered.turning(self._most) if gathered.slack == -1 and num_steps == 1 else None
        # If `shares` is None, any request may need pages. If it is empty, no request needs pages, and `slack` is
        # computed again.
        if not shares:
            prompts = shares is None and not gathered.is_counted
            if prompts and np.count_nonzero(gathered.actives - gathered.starts != 1):
                return False
            slack = gathered.room_after(1)
            if slack >= num_steps - 1:
                gathered.slack = slack
                return True
            if slack < -1:  # a request has no pages, or its context has more computed tokens than its pages hold
                return False
            shares = gathered.shares
        lengths = gathered.lengths_after(num_steps)
        self.mark.call = _RESERVE
        for share in shares:
            if not self.each[share.replica].reserve_decoding(share.rows, lengths[share.at]):
                self.mark.call = None
                return False
        gathered.slack = num_steps - 1  # among many requests, one of them probably needs a page for its next token
        return True

    def _computed(self, gathered: Gathered) -> None:
        """Record that the model has computed the tokens before each request's start."""
        gathered.keep_computed()
        if gathered.is_counted:  # the prompts of these requests have been counted
            return
        for share in gathered.shares:
            if (counter := self.each[share.replica].counter).open:
                computed = gathered.computed[share.at]
                counter.run(counter.prompts(share.rows, np.zeros_like(computed), computed))

    def _fits(self, replica_idx: int, context: SafeContext, length: int, found: Found) -> tuple[int, bool]:
        """Returns how many pages a new request needs besides the pages in `found`, and whether the request fits now."""
        replica = self.each[replica_idx]
        plan = replica.tables.plan(None, context.indices, length, found.end * replica.page_size, found)
        if not replica.has_room:
            return plan.new, False
        free = replica.pool.free_count - replica.pool.beside
        if replica.hit_may_change:
            return plan.new, replica.tables.most(context.indices, length) <= free
        return plan.new, plan.cost <= free

    def _hasher_of(self, place: int, context: Context) -> PrefixHasher:
        replica_idx, row = divmod(place, self.rows.rows)
        read = context if type(context) is TextContext else read_context(context)
        return self.each[replica_idx].hasher_of_pages(row, read)
