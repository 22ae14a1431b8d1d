"""One data-parallel replica: its pages, its prefix index, and the rows of its running requests."""

from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import (
    InvalidRequestError,
    NoFreeRowError,
    NotReservedError,
    PromptTooLongError,
    SequenceTooLongError,
    WeightsChangedError,
)
from kvcache.events.log import AnyLog, NoLog
from kvcache.layer_groups import LayerTables
from kvcache.params import HashAlgorithm, KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import PagesBelow
from kvcache.pool.versions import NO_VERSION
from kvcache.replica.context import ContextIndices, HasherOfRow, SafeContext
from kvcache.replica.copier import ImportBook
from kvcache.replica.hashing import ExtraKeys, PrefixHasher
from kvcache.replica.kept import Kept
from kvcache.replica.leases import PageLease, PageLeases
from kvcache.replica.one_table import OneTable
from kvcache.replica.policy import ReplicaPolicy
from kvcache.replica.resume import Found, Reservation
from kvcache.replica.rows import NEVER, BlockRows, Filled, Ints, Pages, PromptCounter, Rows, as_rows, rows_at
from kvcache.replica.staleness import Candidates
from kvcache.replica.tables import RowTables
from kvcache.types import KVCacheMetrics, RequestID
from kvcache.under_way import UnderWay
from kvcache.weights import STOP, Lineage, followed_by, named_version

MakeKept = Callable[[RowTables, HasherOfRow], Kept]

_NO_PAGES: Pages = np.zeros(0, np.int32)
_FIRST = np.zeros(1, np.int64)  # the indices in a list of one request


class Replica:
    """The rules of one replica, without devices: its block tables, its pool of token pages, and what else rows keep.

    `make_kept` makes what rows keep besides token pages, such as recurrent states. An exported block table names the
    token pages first, and then the pages of `kept`.
    """

    def __init__(
        self,
        params: KVCacheParams,
        tables: LayerTables,
        rows: BlockRows,
        pool: PagePool,
        mark: UnderWay,
        make_kept: MakeKept = Kept,
    ) -> None:
        self.mark = mark  # the manager's mark
        self.page_size = rows.page_size
        self.max_seq_len = rows.max_seq_len
        self.caching = params.enable_prefix_caching
        self.hash_algorithm: HashAlgorithm = params.hash_algorithm
        self.pool = pool
        self.rows = rows
        one = tables.kinds == ("full",)
        self.imports = ImportBook(self.pool, rows, self.mark, shares_ahead=not one)
        self.leases = PageLeases(self.pool, rows)
        # For each row, the hasher of a context that cannot carry it, and the salt and keys of the request's pages. The
        # key `None` stands for a request without a row. It never has an entry.
        self._hashers: dict[int | None, PrefixHasher] = {}
        self._named: dict[int | None, tuple[str | None, ExtraKeys]] = {}
        # for each row with pages, the versions of the weights under which its pages were computed
        self._lineages: dict[int | None, Lineage] = {}
        # The rows that may have pages of other weights: those with pages at a switch, and those that use old pages.
        self._mixed: set[int | None] = set()
        # For each row for which pages came from a lower tier, the column after its found pages. Until those from below
        # have arrived, `committed` is lower, although the found pages after them have their names.
        self._found: dict[int, int] = {}
        self.weights = rows.weights
        self.counter = PromptCounter(rows)
        self.tables = (OneTable if one else RowTables)(tables, pool, rows, self.leases, caching=self.caching)
        # A request of up to this many tokens always fits into an empty pool, so its pages need not be counted.
        self._always_fits = min(self.max_seq_len, (pool.num_pages - pool.beside) // self.tables.count * self.page_size)
        self.kept = make_kept(self.tables, self.hasher)
        self.hints = ReplicaPolicy()
        self.tier = PagesBelow()
        # The lookup that `find` begins with. If a request cannot resume anywhere, it returns all published pages that
        # the request could use, and `find` shortens the result. For a single table, `run` is the whole lookup.
        self._run = self.tables.find if self.kept.resumes_anywhere and not one else self.tables.run
        self.log: AnyLog = NoLog()  # the log in which pages are described for KV events

    @property
    def metrics(self) -> KVCacheMetrics:
        return self.kept.metrics + KVCacheMetrics(self.counter.ran, self.counter.found, evictions=self.pool.evictions)

    @property
    def lends_any_part(self) -> bool:
        """Whether this replica can lend some pages of a prompt to a reader that has all earlier pages of the prompt."""
        return self.tables.is_plain and self.kept.resumes_anywhere

    @property
    def has_room(self) -> bool:
        """Whether the replica can claim one more request."""
        return bool(self.rows.free) and self.kept.has_room

    @property
    def hit_may_change(self) -> bool:
        """Whether a new request may resume from a token other than the one that `find` returns.

        There are two reasons. Lower tiers are looked up only when the request reserves pages. If they have more pages
        than the device, the request resumes from a later token. It then needs other pages of a window. If states and
        pages share memory, making room for the state of a new request may evict pages that the request would find.
        """
        costs = self.caching and self.kept.room_may_cost
        return costs or (self.tier.keeps and not self.tables.is_plain)

    @property
    def generation(self) -> int:
        """A number that changes whenever the device or a lower tier gets or loses pages."""
        return self.pool.index.generation + self.tier.generation + self.kept.generation

    def check_free(self, request_id: RequestID) -> None:
        """Raise `NoFreeRowError` if the replica has no room for one more request."""
        if not self.rows.free:
            raise NoFreeRowError(
                f"request {request_id!r}: all {len(self.rows.request_ids)} rows of the replica are claimed"
            )
        self.kept.check_free(request_id)

    def claim(self, request_id: RequestID, row: int | None = None) -> int:
        """Bind a row to the request and return it. `check_free` must have found room. A given `row` must be free."""
        row = self.rows.claim(request_id, row)
        self.kept.claim(row)
        return row

    def reserve(self, row: int, context: SafeContext, indices: ContextIndices, num_steps: int) -> int | None:
        """Give the row pages for all known tokens of `context` and for `num_steps` steps.

        Cached pages with the same content are used. `indices` are those of the context. Returns the number of newly
        allocated pages. If there are too few free pages, returns None and changes nothing.
        """
        rows, size = self.rows, self.page_size
        have = rows.num_pages_of[row]
        before, active, known = indices
        length, decodes, start = known + num_steps - 1, active - before == 1, before if have else 0
        if length > self._always_fits:
            self.refuse_long(context, length, start)
        if have and decodes:
            # The row's pages are full, and it needs one more page.
            if -(-length // size) == have + 1 and self.tables.is_plain:
                # This also catches a pending import, because a row's capacity is -1 while its import is pending.
                if start > rows.capacity_of[row]:
                    self.refuse_pending(row, "maybe_reserve")
                    self.refuse_ahead(row, start)
                if not self.pool.free_count:
                    return None
                rows.table[0, row, have] = self.pool.allocate_one()
                rows.grow(row, have + 1)
                return 1
            if length <= rows.capacity_of[row]:
                # The row's last page has room. The context need not be checked, because `fetch` and `step` do that.
                return 0
        if have or row in self.imports.of_row or row in self.imports.to_give_back:
            self.refuse_reservation(row, context, "maybe_reserve")
            self.refuse_renamed(row, context)
        if context.staleness and not have and self.caching and self.weights.now.switches:
            return self._reserve_stale(row, context, indices, length)
        if have and decodes:  # the request only decodes, so there is nothing to look up
            plan = self.tables.plan(row, indices, length, start, self.tables.nothing(rows.committed_of[row]))
        else:
            plan = self._plan(row, context, indices, length, start)
        return self.act(row, context, indices, plan)

    def _reserve_stale(self, row: int, context: SafeContext, indices: ContextIndices, length: int) -> int | None:
        """Do the same as `reserve` for a row without pages, whose request may use pages of earlier weights."""
        candidates = self.candidates(context)
        candidates.keep(chosen := candidates.best(self.reach))
        switches, version, taken = self.weights.now.switches, self.weights.version, None
        # The row has the lineage of what it looks for, and then of what it has found.
        self._lineages[row] = Lineage(chosen.segments, switches)
        try:
            plan = self._plan(row, context, indices, length, 0)
            segments = followed_by(chosen.segments, plan.cached // self.page_size, version)
            candidates.keep(candidates.of(segments))
            self._lineages[row] = Lineage(segments, switches)
            taken = self.act(row, context, indices, plan)
        finally:
            if taken is None:
                self._lineages.pop(row, None)
        if taken is not None:
            self._mixed.add(row)
            self._use(chosen.digests(context.tokens, 0, plan.cached // self.page_size))
        return taken

    def _use(self, digests: Digests) -> None:
        """Let the pages and states with these digests be evicted in their turn, whatever their version is."""
        self.pool.versions.use(self.tables.pages_of(digests))
        for pool in self.kept.pools:
            pool.versions.use(pool.index.find(digests))

    def candidates(self, context: SafeContext) -> Candidates:
        """Returns the hashers by which a request without pages may find pages of this replica and its tiers."""
        return Candidates(context, self.weights, self.hash_algorithm, self.page_size)

    def reach(self, context: SafeContext, hasher: PrefixHasher) -> int:
        """Returns how many pages a new request can use under the names of `hasher`, from this device or a lower tier.

        A remote store is asked what it has, and its answer counts when it has come.
        """
        last = (context.end_idx - 1) // self.page_size
        if not last:
            return 0
        if not self.tier.keeps:
            first = hasher.digests(context.tokens, 0, 1)
            if self.tables.keeps_prefix and not self.pool.index.may_have(first):
                return 0
            return self.find(context, hasher=hasher).end
        digests = hasher.digests(context.tokens, 0, last)
        if self.tier.asks:
            self._ask(digests, 0, wait=False)
        ends = self.kept.ends(digests, anywhere=True)
        return self.tables.from_below(digests, self.tier.has, ends).pages

    def act(self, row: int, context: SafeContext, indices: ContextIndices, plan: Reservation) -> int | None:
        """Carry out a reservation. Returns the number of new pages.

        If there are too few free pages, returns None and changes nothing. `indices` are those of the context. If
        something must be kept after some token, the context's chunk is cut to end there.
        """
        plan = self.kept.plan(row, context, plan)
        free, (before, active, known) = self.pool.free_count, indices
        if plan.cost > free:
            return None
        if plan.start != before or plan.active != active:
            # `run_from` comes first, because a caller's own context may raise. Nothing after it raises.
            context.run_from(plan.start, plan.active)
        if not self.rows.num_pages_of[row]:
            before = 0
        if plan.slots.size:  # first, because pages that are evicted below may take host slots
            self.tier.hold(plan.slots)
        found = plan.committed - self.rows.committed_of[row]
        if self.tables.keeps_prefix:
            found = plan.spans[0].found.shape[-1]
        self.kept.take(row, plan)
        restored = self.tables.take(row, plan)
        if plan.slots.size:
            self.tier.restore(row, restored, plan.slots)
            self._found[row] = plan.cached // self.page_size
        self._named[row] = context.named
        if row not in self._lineages:
            self._lineages[row] = self.weights.now
        if self.hints.has_begun or context.hint:
            self.hints.come(row, context, found)
        self.counter.admit(row, known)
        if plan.cached:
            self.counter.hit(row, before, plan.start)
        return plan.new

    def length_of(self, context: SafeContext, num_steps: int, start: int) -> int:
        """Returns how many tokens need a page: all known tokens, and one for each of `num_steps` steps but the last.

        The last step also produces a token, but no step computes its KV. `start` is the token from which the request
        runs. Raises `PromptTooLongError` or `SequenceTooLongError` if the pool can never hold that many tokens.
        """
        length = context.end_idx + num_steps - 1
        if length > self._always_fits:
            self.refuse_long(context, length, start)
        return length

    def refuse_long(self, context: SafeContext, length: int, start: int) -> None:
        """Raise if a request that runs from token `start` can never get pages for `length` tokens."""
        if length > self.max_seq_len:
            steps = length + 1 - context.end_idx
            raise SequenceTooLongError(
                f"request {context.request_id!r}: needs {length} tokens (with {steps} steps), "
                f"but max_seq_len is {self.max_seq_len}"
            )
        needed = self.tables.least(context.indices, length, start)
        if needed + self.pool.beside > self.pool.num_pages:
            raise PromptTooLongError(
                f"request {context.request_id!r}: {length} tokens need {needed + self.pool.beside} pages, "
                f"but the pool has {self.pool.num_pages} pages of {self.page_size} tokens"
            )

    def find(self, context: SafeContext, row: int | None = None, hasher: PrefixHasher | None = None) -> Found:
        """Returns the published pages with which a request can resume, after the pages that its row has published.

        The last known token is never in these pages, because it has to run to produce the next token. `hasher` is the
        context's hasher, if the caller has it.
        """
        first, tokens = 0 if row is None else self.rows.committed_of[row], context.tokens
        last = (len(tokens) - 1) // self.page_size
        if not self.caching or last <= first or row in self.rows.private:
            return self.tables.nothing(first)
        if first and not self.tables.resumes_beyond(row, first):
            return self.tables.nothing(first)
        hasher, index = hasher or self.hasher(row, context), self.pool.index
        kept = hasher.matches.get(index)
        if kept is not None and kept[:3] == (index.generation, first, last):
            # A waiting request is looked up often. Here, the index has not changed since the last lookup.
            found = kept[3]
        else:
            found = self._run(first, hasher.digests(tokens, first, last))
            hasher.matches[index] = (index.generation, first, last, found)
        return self.kept.shortened(found, hasher, context, row) if found.end > first else found

    def look_up(self, row: int, context: SafeContext, start: int) -> Found:
        """Find the pages with which the row's request can resume, on the device and in lower tiers.

        The pages come after the row's own columns. `start` is the token from which the request would run without these
        pages.
        """
        found = self.find(context, row)
        if not self.tier.keeps or row in self.rows.private:
            return found
        first = max(found.first, start // self.page_size)
        if self.leases.told.item(row) > first * self.page_size:
            # A copy from below would go into the row's own page, which readers may know already.
            return found
        # Lower tiers are not looked up here for a request that has pages in several tables. They are looked up after
        # `step`.
        if self.tables.is_plain or not self.rows.num_pages_of[row]:
            last = (context.end_idx - 1) // self.page_size
            if found.end < last:
                below = self._with_below(row, context, first, last)
                # `find` is called again, because what `kept` needs may have come to the host in the meantime
                return below or self.find(context, row)
        return found

    def fetch_prefix(self, digests: Digests, first: int = 0, *, wait: bool) -> bool:
        """Load pages into host memory, so that a request can resume after the longest possible prefix of these digests.

        Returns whether any pages are on their way. The caller already has the first `first` pages. The call also loads
        everything that `kept` needs to resume after the prefix. With `wait`, it waits a limited time for running reads,
        but not for a remote store to say what it has. A remote store is asked for the longest prefix that may exist.
        """
        tables, tier = self.tables, self.tier
        if len(digests) <= first or not self.fetches:
            return False
        before, coming = tier.generation, False
        if tier.asks:
            coming, known = self._ask(digests, first, wait=wait)
            if known is None:
                return True
            digests = known
        wanted = tables.from_below(digests, tier.has, self.kept.ends(digests, anywhere=True), first)
        there = tables.from_below(digests, tier.host_has, self.kept.ends(digests), first)
        if wanted.pages > there.pages:
            # A request that does not wait resumes with pages that are on the host now. These pages must not be evicted
            # to make room for other pages.
            tier.touch(there.digests)
            coming = self.kept.to_host(digests[: wanted.pages], there.pages, wait=wait) or coming
            coming |= tier.to_host(wanted.every, wanted.lacking, wanted.pages - there.pages, wait=wait)
        # The store may have answered during this call. The caller should then call again, to send the next query.
        return coming or (tier.asks and tier.generation != before)

    @property
    def fetches(self) -> bool:
        """Whether there are tiers below the host."""
        return self.tier.fetches or self.kept.fetches

    def _ask(self, digests: Digests, first: int, *, wait: bool) -> tuple[bool, Digests | None]:
        """Ask remote stores whether they have what the prompt needs, as far as this is not known yet.

        Returns whether an answer is on its way, and the digests of the pages that may exist. The second value is None
        if the caller must wait for the answer before it can decide which pages to load.
        """
        perhaps = self.tables.from_below(digests, self.tier.may_have, None, first)
        coming = self.tier.ask(perhaps.every, perhaps.lacking)
        return self.kept.ask(self.tier, digests, first, coming=coming, wait=wait)

    def plan_fork(self, parent: int, child: SafeContext, num_steps: int) -> int | None:
        """Returns the number of columns that a fork of row `parent` would have.

        The fork shares the parent's computed pages. Returns None if there are too few free pages. Changes nothing.
        Raises `InvalidRequestError` if the parent has freed pages that the child sees, and the errors of
        `Kept.check_fork`.
        """
        self.refuse_pending(parent, "fork")
        self._refuse_stopped(parent, "fork")
        self.kept.check_fork(parent)
        self.refuse_renamed(parent, child)
        computed = self.rows.cached.item(parent)
        self.tables.refuse_fork(parent, computed)
        needed = -(-self.length_of(child, num_steps, computed) // self.page_size)
        new = self.tables.new_of_fork(computed, needed)
        return needed if new + self.pool.beside <= self.pool.free_count else None

    def fork(self, parent: int, row: int, end: int) -> list[tuple[int, int]]:
        """Let `row` share the computed pages of row `parent`. `end` is the number of columns that `plan_fork` returned.

        Returns a pair for each page to which both requests write in their next step: the parent's page, and the page to
        copy it to. The caller must make the copy now instead of at the next write.
        """
        rows, computed = self.rows, self.rows.cached.item(parent)
        full = computed // self.page_size
        rows.stale[row] = rows.stale[parent]
        copies = self.tables.fork(parent, row, computed, end)
        if parent in rows.private:
            rows.private.add(row)
        rows.commit(row, min(full, rows.committed_of[parent]))
        rows.cached[row] = computed
        self._named[row], self._lineages[row] = self._named[parent], self._lineages[parent]
        if parent in self._mixed:
            self._mixed.add(row)
        self.counter.ran_elsewhere(row, computed)
        self.kept.fork(parent, row)
        return copies

    def grant(self, lease: PageLease, row: int) -> None:
        """Open a lease of the request in this row. If the request cannot be leased now, raises and changes nothing."""
        self.refuse_pending(row, "lease")
        self.leases.grant(lease, row, self.kept.held(row))

    def reserve_decoding(self, rows: Rows, lengths: Ints) -> bool:
        """Give each of `rows` pages for `lengths` tokens, one of which is to run. Either all rows get pages, or none.

        Returns False if too few pages are free, if a row needs more than one page, or if a row needs the checks of
        `reserve`. If the result is False, the caller must call `reserve` for each row.
        """
        block_rows = self.rows
        beyond = lengths - block_rows.capacity[rows]
        short = (beyond > 0).nonzero()[0]
        if not short.size:
            return True
        lacking = rows_at(rows, short)
        # In a decode step, a row needs at most one new page. Other cases go through `reserve`, one request at a time.
        if np.count_nonzero(beyond[short] > block_rows.size) or np.count_nonzero(block_rows.prompt[lacking] < 0):
            return False
        longest = np.count_nonzero(lengths[short] > self.max_seq_len)
        return not (longest or self.imports.of_row) and self.tables.append(lacking)

    def filled(self, rows: Rows, computed: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns the rows with full pages that are not published, of which `computed` tokens are computed.

        The result is four arrays: their positions in `rows`, the rows, and for each of them the first and the last
        (excluded) of these pages. Changes nothing.
        """
        ends = self.rows.commit_at[rows]
        if len(computed) == 1 and computed.item() >= ends.item():  # numbers instead of arrays, as in `least`
            row = rows.start if isinstance(rows, slice) else rows.item()
            numbers = np.array((row, self.rows.committed_of[row], computed.item() // self.page_size))
            return _FIRST, numbers[:1], numbers[1:2], numbers[2:]
        at = (computed >= ends).nonzero()[0]
        filled = rows_at(rows, at)
        return at, filled, self.rows.committed[filled], computed[at] // self.rows.size

    def publish(self, full: Filled) -> None:
        """Publish full pages of computed tokens. Content that is already published is shared instead.

        The caller records how many tokens are computed.
        """
        filled, firsts, lasts, digests = full
        if self.tier.keeps:
            self.tier.arrive(filled)
        flat_rows, columns = filled, firsts
        if len(filled) == 1:  # numpy repeats the row itself
            last: int = lasts.item()
            self._publish(filled, np.arange(firsts.item(), last), digests)
            self.rows.commit(filled.item(), last)
            return
        if len(digests) > len(filled):
            counts = lasts - firsts
            flat_rows = np.repeat(filled, counts)
            columns = np.arange(len(flat_rows)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
        if len(set(digests[:, 0].tolist())) == len(digests):
            self._publish(flat_rows, columns, digests)
        # In one step, two rows may fill pages with the same content. The second row then shares the first row's page.
        else:
            for row in filled:
                mine = flat_rows == row
                self._publish(flat_rows[mine], columns[mine], digests[mine])
        self.rows.commit(filled, lasts)

    def hasher(self, row: int | None, context: SafeContext) -> PrefixHasher:
        """Returns the request's hasher. The context keeps the hasher, or this object if the context cannot carry it."""
        # The salt and keys of a request without pages may still change. `refuse_renamed` refuses later changes.
        named, lineage = self._named.get(row, context.named), self.weights.now
        if row in self._lineages:
            lineage = self.lineage(row)
        kept, segments = context.prefix_hasher or self._hashers.get(row), lineage.segments
        if kept is None or not kept.fits(self.hash_algorithm, self.page_size, named, segments):
            kept = context.prefix_hasher = PrefixHasher(self.hash_algorithm, self.page_size, *named, segments)
            if row is not None and context.prefix_hasher is not kept:
                self._hashers[row] = kept
        kept.named, kept.fitted = named, lineage
        return kept

    def hasher_of_pages(self, row: int, context: SafeContext) -> PrefixHasher:
        """Do the same as `hasher` for a row with pages. Raises the error of `refuse_renamed`."""
        kept, named, lineage = context.prefix_hasher, context.named, self._lineages.get(row)
        # In nearly all steps nothing has changed, and objects are compared instead of their contents.
        if (
            kept is not None
            and kept.fitted is lineage is self.weights.now
            and kept.named is named is self._named.get(row)
        ):
            return kept
        self.refuse_renamed(row, context)
        return self.hasher(row, context)

    def lineage(self, row: int | None) -> Lineage:
        """Returns the lineage of the row's pages. For a row without pages, and for None, it is that of new pages.

        If the weights have changed since the last call for this row, a new segment begins after its published and found
        pages. So it has begun before anything computed since then is named.
        """
        known, now = self._lineages.get(row), self.weights.now
        if known is None or row is None:
            return now
        if known.switches != now.switches:
            known = self._lineages[row] = self.weights.gone_on(known, self._named_columns(row))
        return known

    def _named_columns(self, row: int) -> int:
        """Returns the number of the row's columns, from the first on, whose pages have their names."""
        return max(self.rows.committed_of[row], self._found.get(row, 0))

    def begin_segments(self) -> None:
        """Begin a new segment for every row that publishes no page: nothing tells later how far it had come by now.

        For the other rows, `lineage` does so later.
        """
        self._mixed.update(self._lineages)
        for row in self.rows.private if self.caching else self.rows.row_of.values():
            known = self._lineages.get(row)
            if known is not None and known.switches != self.weights.now.switches:
                full = self.rows.cached.item(row) // self.page_size
                self._lineages[row] = self.weights.gone_on(known, full)

    def tokens_by_version(self, row: int) -> tuple[tuple[int, int, bytes | None], ...]:
        """See `PagedKVCacheManager.lineage`."""
        known, size = self._lineages.get(row, self.weights.now), self.page_size
        if known.switches != self.weights.now.switches:  # the next page that it fills begins a new segment
            known = self.weights.gone_on(known, self._named_columns(row))
        segments = known.segments
        computed = max(self.rows.cached.item(row), self._named_columns(row) * size)
        ends = [*(min(computed, segment.first_page * size) for segment in segments[1:]), computed]
        return tuple(
            (segment.first_page * size, end - segment.first_page * size, segment.version)
            for segment, end in zip(segments, ends, strict=True)
            if end > segment.first_page * size
        )

    def published_digests(self, row: int, context: SafeContext | None, first: int = 0, last: int = NEVER) -> Digests:
        """Returns the digests of the tokens in the row's published columns `first` to `last` (excluded).

        If no table keeps the pages of all tokens, the digests are computed from the context. The result is empty if the
        context has dropped tokens of these columns after their pages were published.
        """
        last = max(first, min(last, self.rows.committed_of[row]))
        if self.tables.keeps_prefix:
            return self.pool.index.digests_of(self.rows.pages(row)[first:last])
        return self.own_digests(row, context, first, last)

    def own_digests(self, row: int, context: SafeContext | None, first: int, last: int) -> Digests:
        """Returns the digests of the context's tokens in columns `first` to `last` (excluded) of the row.

        The result is empty if caching is off, or if the context has fewer tokens.
        """
        if context is None or not self.caching or context.end_idx < last * self.page_size:
            return self.pool.index.digests_of(_NO_PAGES)
        return self.hasher(row, context).digests(context.tokens, first, last)

    def salt(self, row: int) -> str | None:
        """Returns the salt of the row's pages. Any thread may call this."""
        return self._named.get(row, (None, ()))[0]

    def release(self, row: int, context: SafeContext | None) -> None:
        """Free the row and its pages. `context` is that of the request, or None if the request has no pages.

        Pages of an import that is not closed stay with the transfer until it is closed. Leased pages stay with their
        leases.
        """
        request_id = self.rows.request_ids[row]
        self.hints.leave(row, context)
        names = self.published_digests(row, context) if self.tier.keeps else None
        self.imports.leave(row)
        self._hashers.pop(row, None)
        self._named.pop(row, None)
        self.counter.open.discard(row)
        pages = self.tables.pages(row, self.rows.num_pages_of[row]).copy()
        if names is not None:
            full = self.tables.pages(row, self.rows.committed_of[row])
            self.tier.leave(row, full[self.pool.index.published[full]], names, self.kept.ends)
        self.leases.leave(row, self.tables.pages)
        if self.pool.versions.differ:
            self.pool.versions.name(self._own_pages(row), NO_VERSION)
        self._lineages.pop(row, None)
        self._mixed.discard(row)
        self._found.pop(row, None)
        self.rows.unbind(row)
        self.pool.release(pages)
        self.kept.release(request_id)

    def _own_pages(self, row: int) -> Pages:
        """Returns the row's pages that only its request and its forks find, because the weights changed before them."""
        lineage = self._lineages.get(row)
        first = next((one.first_page for one in lineage.segments if one.mark), None) if lineage else None
        pages = self.rows.table[:, row, : 0 if first is None else self.rows.num_pages.item(row)][:, first:]
        return pages[pages != NO_PAGE]

    def forget(self) -> None:
        """Let nobody find any page or state of before, neither now nor when running requests compute more.

        Requests, leases and imports keep their pages.
        """
        for row in self._lineages:  # afterwards nothing tells how far a request had come at the last switch
            self.lineage(row)
        self.rows.make_private()
        self.imports.make_private()
        self.pool.forget()
        self.hints.reset()
        self.kept.forget()

    def rebuild(self) -> None:
        """Release every row after an interrupt, and build all state of pages anew.

        Published pages, leases, imports and steps in flight keep their pages. The tiers must have been restarted, and
        `pool.parked` must have the pages of the steps.
        """
        self.leases.leave_all(self.tables.pages)
        self.imports.leave_all()
        self.rows.clear()
        for of_rows in (self._hashers, self._named, self._lineages, self._mixed, self._found, self.counter.open):
            of_rows.clear()
        self.hints.clear()
        self.tier.restart()
        self.kept.rebuild(self.imports.written_besides, self.leases.holders)
        self.pool.rebuild(*self.counted())

    def counted(self) -> tuple[Ints, Ints]:
        """Returns two counts for each page, int64 `[num_pages + 1]`: its holders, and its writers.

        Rows and leases are holders. Writers are imports, copies from a lower tier, and steps in flight for which a
        released page is parked.
        """
        holders, writers = (np.zeros(self.pool.num_pages + 1, np.int64) for _ in range(2))
        for row in self.rows.row_of.values():
            np.add.at(holders, self.tables.pages(row, self.rows.num_pages_of[row]), 1)
        holders += self.leases.holders()
        written = [pending.written for pending in self.imports.each]
        for pages in chain(written, self.tier.coming(), *self.pool.parked):
            np.add.at(writers, pages, 1)
        return holders, writers

    def check(self) -> None:
        """Compare state that is derived from the rows with a recount. Raises `InvariantError` at a discrepancy."""
        self.tables.check()
        self.leases.check()
        self.imports.check()
        self.pool.check(*self.counted())
        self.kept.check(self.rows.row_of, self.imports.written_besides, self.leases.holders)

    # ---- refusals

    def refuse_reservation(self, row: int, context: SafeContext, call: str) -> None:
        """Raise `KVCacheError` if the request's import is pending, or the request must not run from `start_idx`."""
        self.refuse_pending(row, call)
        if self.rows.num_pages_of[row]:  # a row without pages has no lease and no computed tokens
            start = context.start_idx
            if self.leases.told.item(row) > start:
                raise self.leases.rewrite(row, start)
            self.refuse_ahead(row, start)

    def refuse_renamed(self, row: int, context: SafeContext) -> None:
        """Raise `InvalidRequestError` if the context's salt or keys have changed since the row got its pages."""
        found = context.named
        named = self._named.get(row, found)
        if found is not named and found != named:
            field = "cache_salt" if found[0] != named[0] else "extra_keys"
            raise InvalidRequestError(
                f"request {self.rows.request_ids[row]!r}: its {field} changed while it holds pages: "
                f"release it first, or change it back"
            )

    def refuse_ahead(self, row: int, start: int) -> None:
        """Raise `InvalidRequestError` if a row with pages cannot have computed all tokens before token `start`.

        While the prompt runs, only tokens that were found in the cache, fetched or stepped can be computed. After the
        prompt, all tokens for which the row has pages can be computed.
        """
        if start > self.rows.capacity_of[row]:
            raise self.counter.ahead(row, start, self.rows.capacity_of[row])
        if row in self.counter.open:
            self.counter.refuse_ahead(row, start)

    def refuse_pending(self, row: int, call: str) -> None:
        if (pending := self.imports.of_row.get(row)) is not None:
            reason = "import is pending: call commit_import or cancel_import first"
            if pending.closed:
                reason = "cancelled import may still be written: call prove or give_up of its copier first"
            raise NotReservedError(f"request {self.rows.request_ids[row]!r}: {call} while its {reason}")
        if row in self.imports.to_give_back:
            raise NotReservedError(
                f"request {self.rows.request_ids[row]!r}: {call} would write to pages of its cancelled import, which "
                "other requests may share: call maybe_reserve first to give them back, or release it if it is leased"
            )

    def begins_anew(self, row: int, call: str) -> bool:
        """Whether the row's request must give its pages back and begin anew, because the weights have changed.

        Raises `WeightsChangedError` if the request was stopped, and the errors of `refuse_pending` and of
        `Kept.check_free`.
        """
        if not self.rows.stale.item(row):
            return False
        self._refuse_stopped(row, call)
        self.refuse_pending(row, call)
        if not self.can_begin_anew(row):
            self.kept.check_free(self.rows.request_ids[row] or "")
        return True

    def can_begin_anew(self, row: int) -> bool:
        """Whether the row's request can be claimed anew. Its lease may keep its recurrent state."""
        return row not in self.leases.of_row or self.kept.has_room

    def refuse_stale(self, row: int, call: str) -> None:
        """Raise `NotReservedError` or `WeightsChangedError` if the weights have changed, and the row must not run."""
        self._refuse_stopped(row, call)
        if self.rows.stale[row]:
            raise NotReservedError(
                f"request {self.rows.request_ids[row]!r}: {call}: its pages are of before the weights changed to "
                f"{named_version(self.weights.version)}: call maybe_reserve first, and compute its tokens anew"
            )

    def refuse_rewrite(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` if one of `rows` would recompute tokens that others may read as they are."""
        if self.leases.of_row:
            self.leases.refuse_rewrite(rows, starts)
        if self._mixed:
            self._refuse_other_weights(rows, starts)

    def _refuse_other_weights(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` if one of `rows` would recompute tokens in pages with KV of other weights.

        Requests under those weights may find these pages, or use them now. In the first page of a segment of its own,
        tokens of before the switch may stand. If a request recomputed them, and its fork did not, one name would stand
        for two pages.
        """
        size = self.page_size
        named = self.rows.committed[rows]
        if self._found:
            named = np.array([self._named_columns(row) for row in as_rows(rows).tolist()])
        kept = np.maximum(self.rows.cached[rows], named * size)
        for at in (starts < kept).nonzero()[0].tolist():
            row, start = int(as_rows(rows)[at]), int(starts[at])
            last = self.lineage(row).segments[-1]
            own = (last.first_page + bool(last.mark)) * size
            if start < own:
                raise InvalidRequestError(
                    f"request {self.rows.request_ids[row]!r}: would recompute from token {start}, but the pages of its "
                    f"first {own} tokens may hold KV of other weights: release the request and claim it again"
                )

    def _refuse_stopped(self, row: int, call: str) -> None:
        if self.rows.stale[row] == STOP:
            raise WeightsChangedError(
                f"request {self.rows.request_ids[row]!r}: {call}: the weights changed from "
                f"{named_version(self.weights.before)} to {named_version(self.weights.version)}, and set_weights "
                "stopped it: release it, and claim it again to compute its tokens anew"
            )

    def refuse_short(self, rows: Rows, lengths: Ints, call: str) -> None:
        """Raise `NotReservedError` unless each of `rows` has pages for its first `lengths` tokens."""
        room = self.rows.capacity[rows]
        if call == "step":  # it may have begun before its requests became stale
            room = self.rows.room(rows)
            barred = [*self.imports.of_row, *self.imports.to_give_back]
            room[np.isin(as_rows(rows), barred)] = -1
        if not np.count_nonzero(lengths > room):  # for few rows, `count_nonzero` takes a fourth of the time of `any`
            return
        at = int(np.flatnonzero(lengths > room)[0])
        row = int(as_rows(rows)[at])
        self.refuse_pending(row, call)
        self.refuse_stale(row, call)
        text = f"request {self.rows.request_ids[row]!r}: {lengths[at]} tokens"
        if call == "step":
            text += " computed"
        elif lengths[at] > self.max_seq_len:
            raise SequenceTooLongError(f"{text}, but max_seq_len is {self.max_seq_len}")
        raise NotReservedError(f"{text}, but its reserved pages hold {room[at]}: call maybe_reserve first")

    # ---- inside

    def _plan(self, row: int, context: SafeContext, indices: ContextIndices, length: int, start: int) -> Reservation:
        """Looks up cached pages. Returns the reservation that gives the row pages for `length` tokens.

        `start` is the token from which the request runs if no more pages are found.
        """
        found = self.look_up(row, context, start)
        if found.end * self.page_size > start:
            start = found.end * self.page_size
        # The row has computed all tokens of the found pages. `step` will replace the row's own pages by the found
        # pages.
        elif found.end > found.first:
            found = self.tables.nothing(found.first)
        return self.tables.plan(row, indices, length, start, found)

    def _with_below(self, row: int, context: SafeContext, first: int, last: int) -> Found | None:
        """Look up pages `first` to `last` (excluded) in lower tiers. Returns None if the request needs no such page."""
        tables, tier, hasher = self.tables, self.tier, self.hasher(row, context)
        now = self.generation, first, last
        if (kept := hasher.matches.get(tier)) is not None and kept[:3] == now:
            # A waiting request is looked up many times. The tiers have not changed since its last lookup.
            return None
        if self.rows.num_pages_of[row]:
            # The row's pages may be replaced below, so the device must first run the copies from host memory to them.
            tier.arrive(np.array([row]))
        digests = hasher.digests(context.tokens, 0, last)
        coming = self.fetch_prefix(digests, first, wait=self.rows.prompt_of[row] < 0)
        wanted = tables.from_below(digests, tier.host_has, self.kept.ends(digests, row), first)
        if wanted.lacking.any():
            slots = tier.slots(wanted.every[wanted.lacking])
            return Found(first, wanted.pages, wanted.found, wanted.columns, wanted.reach, slots)
        if not coming:
            hasher.matches[tier] = *now, None
        return None

    def _publish(self, rows: Ints, columns: Ints, digests: NDArray[np.uint64]) -> None:
        """Publish the page in column `columns[i]` of `rows[i]`, for each i. All `digests` are different."""
        pages, names, shared = self.tables.publish(rows, columns, digests)
        if shared.size:
            self.hints.share_pages(shared)
        for tell in self.pool.journal.came:
            tell(pages, names)
