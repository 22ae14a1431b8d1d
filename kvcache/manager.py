"""`PagedKVCacheManager`: the cache manager that a serving loop calls."""

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import arguments, sizing
from kvcache.claims import Claims
from kvcache.endpoints.reset import check_endpoint, open_endpoint
from kvcache.errors import InvalidRequestError
from kvcache.layer_groups import layer_tables
from kvcache.params import KVCacheParams, resolve_page_size
from kvcache.placement import place_replicas
from kvcache.recovery import Recovered, recover
from kvcache.replica import imports, inputs
from kvcache.replica.batch import Batch
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.contents import PageContents
from kvcache.replica.context import Context, TextContext, check_context, check_fork, read_context
from kvcache.replica.copier import ImportCopier, ImportProof
from kvcache.replica.leases import PageLease, granted_by
from kvcache.states.state_pages import StatePages
from kvcache.steps_in_flight import StepInFlight, check_step
from kvcache.types import Admission, KVCacheMetrics, RaggedKVCacheInputs, RequestID
from kvcache.uncopied import Uncopied
from kvcache.under_way import CLOSE, Call, CheckedUnderWay, UnderWay
from kvcache.weights import Running, Version, check_running, version_bytes

_CLAIM, _RELEASE, _RESERVE = Call("external_claim"), Call("release"), Call("maybe_reserve")


class PagedKVCacheManager(Uncopied):
    """A paged KV cache over data-parallel replicas of tensor-parallel shards.

    The life of a request: `external_claim`; for each step `maybe_reserve`, `fetch`, the model, `context.update`,
    `step`; at the end `release`. A `with manager.claim(context)` block claims and releases the request. Not
    thread-safe: one serving loop owns the manager.

    Every error that a call raises itself is a `KVCacheError`, and leaves the state unchanged. Another exception in the
    middle of a call (Ctrl-C, out of memory) may leave the state half changed. Then every call raises
    `InterruptedCallError` until `recover` has built it anew. An error from a caller's own context leaves the state
    unchanged. In addition to the errors that a call documents:

    - `UnknownRequestError` (a KeyError): a request is not claimed.
    - `InvalidRequestError` (a ValueError): an invalid argument; `num_steps` below 1; a request named twice; a context
      other than the one for which the pages were reserved; a context whose salt or keys have changed since then.
    - `NotReservedError` (a RuntimeError): an import of a request's pages is pending.
    - `PromptTooLongError`, `SequenceTooLongError` (RuntimeErrors), from calls that count pages: the whole pool is too
      small for a request, or the request is longer than `max_seq_len`.

    Args:
        params: shape and placement of the cache.
        max_batch_size: the most requests that may be claimed at a time, split evenly over the replicas.
        max_seq_len: the largest number of tokens in a request.
        num_layers: the number of layers that have KV.
        devices: `params.n_devices` torch devices or their names, replica by replica.
        session: the CUDA stream that orders device work, or an object with a `stream`; None means the current stream.
        available_cache_memory: the number of bytes for pages, over all devices together.
        zmq_endpoint_base: opens a socket at `<base>-reset_prefix_cache`. A message there drops the prefix cache before
            the next lookup or `fetch`. Without prefix caching no socket is opened, and a warning is logged.
        page_size: the number of tokens per page. Leave it out if `params.page_size` is given.
        enable_runtime_checks: whether to run `check` before and after every change of the state (slow).

    Raises:
        InvalidParamsError: (a ValueError) an argument is invalid.
        PoolTooSmallError: (a RuntimeError) the budget is too small for one page, or a device or the host is too small
            for its share.

    Examples:
        >>> import torch
        >>> from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
        >>> params = KVCacheParams(torch.float16, n_kv_heads=2, head_dim=64, page_size=16, enable_prefix_caching=True)
        >>> manager = PagedKVCacheManager(params, 8, 256, 1, ["cpu"], available_cache_memory=1 << 20)
        >>> first = TextContext(range(40), max_length=256)
        >>> with manager.claim(first):
        ...     _ = manager.maybe_reserve(first)
        ...     inputs = manager.fetch([first])  # what the model needs to compute 40 tokens
        ...     first.update(7)
        ...     manager.step([first])
        >>> second = TextContext([*range(40), 7, 9], max_length=256)
        >>> with manager.claim(second):
        ...     _ = manager.maybe_reserve(second)
        ...     second.start_idx  # two pages are found
        32
    """

    estimated_memory_size = staticmethod(sizing.estimated_memory_size)
    infer_optimal_batch_size = staticmethod(sizing.infer_optimal_batch_size)
    max_supported_sequence_length = staticmethod(sizing.max_supported_sequence_length)

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
        session: Any = None,
        available_cache_memory: int | None = None,
        zmq_endpoint_base: str | None = None,
        page_size: int = 128,
        enable_runtime_checks: bool = False,
    ) -> None:
        sizes = sizing.check_sizes(params, max_batch_size, max_seq_len, num_layers)
        every = sizing.check_devices(params, devices, here=True)
        stream = sizing.stream_of(session, every)
        self.enable_runtime_checks = arguments.flag("enable_runtime_checks", enable_runtime_checks)
        self.params = params
        self.page_size = resolve_page_size(params, page_size)
        _, self.max_seq_len, self.num_layers = sizes
        self.num_replicas = params.data_parallel_degree
        self.enable_prefix_caching = params.enable_prefix_caching
        self.enable_kvcache_swapping_to_host = params.enable_kvcache_swapping_to_host
        tp = params.tensor_parallel_degree
        self.devices_per_replica = devices_of = [every[first : first + tp] for first in range(0, len(every), tp)]
        self.layer_tables = tables = layer_tables(params.groups, self.num_layers)  # the layers of each block table
        needs = sizing.Needs(params, tables, self.page_size)
        self.layouts = needs.layouts
        pages = sizing.pages_per_replica(needs, sizes, available_cache_memory, every)
        check_endpoint(zmq_endpoint_base)
        sizing.warn_of_shortages(needs, sizes, pages)
        self.longest_request = needs.longest_request(pages, self.max_seq_len)  # in tokens, alone on its replica
        self._mark = CheckedUnderWay() if enable_runtime_checks else UnderWay()  # names the call that changes the state
        self._replicas = place_replicas(needs, sizes, devices_of, stream, pages, self._mark)
        self.fingerprint = self._replicas.fingerprint
        self.kv_event_endpoints: list[tuple[str, str | None]] = self._replicas.event_endpoints
        self._claims = Claims(self._replicas.each, self._replicas.rows, self._replicas.steps.open)
        # finds pages by content
        self.contents = PageContents(self._replicas.each, self.fingerprint, self._mark, self._look_for_reset)
        # Three attributes for decode steps. `_place_of` returns the place of a context. The others have two numbers for
        # each place: how many tokens its pages can hold, and the start of its context (`TextContext.count_along`).
        self._place_of: Callable[[Any, int], int] = self._claims.bound.get
        self._capacity, self._starts = self._replicas.rows.capacity_of, self._replicas.rows.start_of
        self._metrics_before = KVCacheMetrics()
        self._reset_endpoint = open_endpoint(zmq_endpoint_base, caching=params.enable_prefix_caching)
        if isinstance(self._mark, CheckedUnderWay):
            # A weak reference, because a watch knows the mark, and must not keep the manager alive.
            check = weakref.WeakMethod(self.check)
            self._mark.recount = lambda: None if (found := check()) is None else found()

    # ---- claiming

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Bind a row of a replica to the request. Takes no pages. With a single replica, `replica_idx` may be omitted.

        Raises `AlreadyClaimedError`, or `NoFreeRowError` if every row of the replica is claimed (both ValueErrors). The
        latter's subclass `NoFreeStatePageError` means that there is no room for the request's recurrent state.
        """
        mark = self._mark
        if mark.call:
            mark.refuse("external_claim")
        chosen = self._claims.free_at(request_id, replica_idx)
        # sets the mark without `changing`, which saves a seventh of the call's time
        mark.call = _CLAIM
        self._claims.claim(request_id, chosen)
        mark.call = None

    @contextmanager
    def claim(self, context: Context, replica_idx: int | None = None) -> Generator[int]:
        """Claim the request for a `with` block, and release it at the end.

        Yields the replica, by default the recommended one. If a call is interrupted inside the block, the
        block's own error propagates, and `recover` releases the request.
        """
        check_context(context, "claim")
        if replica_idx is None:
            replica_idx = self.get_or_recommend_replica(context)
        request_id = context.request_id
        self.external_claim(request_id, replica_idx)
        try:
            yield replica_idx
        finally:
            if request_id in self._claims.places and not self._mark.is_interrupted:
                self.release(request_id)

    def contains(self, request_id: RequestID) -> bool:
        """Whether the request is claimed."""
        self._mark.check_books("contains")
        arguments.check_request_id(request_id, "contains")
        return request_id in self._claims.places

    def get_replica(self, context: Context) -> int:
        """Returns the replica on which the request is claimed."""
        self._mark.check_books("get_replica")
        check_context(context, "get_replica")
        return self._claims.locate(context.request_id, "get_replica")[1]

    def get_or_recommend_replica(self, context: Context) -> int:
        """Returns a claimed request's replica, or else the replica on which to claim it, by `params.routing`."""
        self._mark.check("get_or_recommend_replica")
        check_context(context, "get_or_recommend_replica")
        known = context.request_id in self._claims.places
        return self.get_replica(context) if known else self.admission(context).replica_idx

    def admission(self, context: Context, num_steps: int = 1) -> Admission:
        """Returns the best replica for an unclaimed request, and whether a row and enough pages are free there now."""
        self._mark.check("admission")
        num_steps = arguments.steps(num_steps)
        check_context(context, "admission")
        self._look_for_reset()
        return self._replicas.admission(read_context(context), num_steps)

    def prefetch(self, context: Context) -> bool:
        """Begin to load the request's pages from files or objects into the host tier.

        Returns whether any pages are on their way. Call this while a request waits. `maybe_reserve` uses the pages that
        have arrived, and waits once for up to 100 ms for the other pages. Pages that arrive later are used if
        `maybe_reserve` is called for a later chunk of the prompt.
        """
        self._mark.check("prefetch")
        check_context(context, "prefetch")
        self._look_for_reset()
        read = read_context(context)
        with self._mark.changing(Call("prefetch")):
            return self._replicas.prefetch(read)

    def release(self, request_id: RequestID) -> None:
        """Free the request's row and pages. With prefix caching its full pages stay findable while there is room.

        All tokens of its context become active. Leased pages stay unchanged, and are not reused until their lease ends.
        """
        mark = self._mark
        if mark.call:  # the mark is tested here, at a third of the cost of a method call
            mark.check_books("release")
        place, context = self._claims.leaving(request_id)
        mark.call = _RELEASE
        self._claims.release(request_id, place, context)
        mark.end()

    # ---- a step of the serving loop

    def maybe_reserve(self, data: Context, num_steps: int = 1) -> bool:
        """Give the request pages for all its known tokens and `num_steps` steps. Matching cached pages are used.

        `start_idx` of the context moves to the end of a prefix hit. A request without pages has computed nothing: it
        starts at its hit, or at 0, whatever its context says. Therefore a preempted request can be claimed again with
        the same context. If too few pages are free, returns False and changes nothing. The same call may succeed after
        other requests have released pages. There is one exception with several block tables: the pages of the request's
        own cancelled import are freed first, so a refused request has no pages left.

        Raises `InvalidRequestError`, as `reserve_batch` and `fetch` do, in two cases: the `start_idx` of a request with
        pages is beyond the tokens that the request can have computed, or the request would recompute tokens that
        readers of its lease may have read.
        """
        mark = self._mark
        if mark.call:
            mark.refuse("maybe_reserve")
        # The usual decode step, which needs no new page. With pages of 16 tokens, 15 of 16 calls end here.
        try:
            place = self._place_of(data, -1)
        except TypeError:  # raised if the context is not hashable
            place = -1
        room = self._capacity[place]  # at place -1, which stands for an unknown context, nothing fits
        if type(num_steps) is int and 0 < num_steps <= room - self._starts[place]:
            return True
        if type(num_steps) is not int or num_steps != 1:
            num_steps = arguments.steps(num_steps)
        if place >= 0 and data.active_length == 1 and data.current_length <= room - num_steps + 1:
            return True
        replica, replica_idx, row = self._claims.own(data, "maybe_reserve")
        if self._reset_endpoint.is_asked:
            self._look_for_reset()
        context = data if type(data) is TextContext else read_context(data)
        mark.call, mark.context = _RESERVE, context
        try:
            # The request cannot run in the pages of its cancelled import, so they are freed, unless they are leased.
            gives_back = row in replica.imports.to_give_back and row not in replica.leases.of_row
            if gives_back or (replica.rows.num_pages_of[row] and replica.begins_anew(row, "maybe_reserve")):
                row, place = self._claims.claim_anew(context.request_id, replica_idx), -1
            reserved = self._replicas.reserve(replica_idx, row, context, num_steps)
        except Exception as error:
            mark.fail(error)
            raise
        if reserved and place < 0:
            self._claims.bind(data, replica_idx, row)
        mark.context = mark.call = None  # `context` is cleared first: it must be None whenever `call` is None
        return reserved

    def reserve_batch(self, batch: Sequence[Context], num_steps: int = 1) -> NDArray[np.bool_]:
        """Call `maybe_reserve` for each request. Returns bool `[len(batch)]`.

        A refused request takes no page. An error is raised before any request is changed.
        """
        self._mark.check("reserve_batch")
        num_steps = arguments.steps(num_steps)
        gathered = self._claims.gather(batch, "reserve_batch")
        self._look_for_reset()
        return self._replicas.reserve_batch(gathered, num_steps, self._claims.bind, self._claims.claim_anew)

    def fork(self, parent: Context, child: Context, num_steps: int = 1) -> bool:
        """Claim `child` on the parent's replica, with everything that the parent had computed by its last `step`.

        Full pages are shared, and a partly filled last page is copied. `child` must not be claimed yet, must have the
        parent's salt and keys, and must have more tokens than the parent has computed (`TextContext.fork` makes one).
        If too few pages are free, returns False and changes nothing. Also raises the errors of `external_claim`.
        """
        self._mark.check("fork")
        num_steps = arguments.steps(num_steps)
        replica, replica_idx, parent_row = self._claims.own(parent, "fork")
        check_context(child, "fork")
        check_fork(parent, child, int(replica.rows.cached[parent_row]))
        read = read_context(child)
        self._claims.free_at(read.request_id, replica_idx)
        end = replica.plan_fork(parent_row, read, num_steps)
        if end is None:
            return False
        with self._mark.changing(Call("fork"), read):
            # `run_from` comes first, because a caller's own context may raise. Nothing after it raises.
            read.run_from(replica.rows.cached.item(parent_row), read.end_idx)
            row = self._claims.claim(read.request_id, replica_idx)
            self._replicas.fork(replica_idx, parent_row, row, end)
            self._claims.bind(child, replica_idx, row)
        return True

    def batch(self, contexts: Sequence[Context]) -> Batch:
        """Look up the requests once. Every call that takes a list of contexts also takes the resulting `Batch`."""
        self._mark.check("batch")
        return self._claims.batch(contexts)

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """Returns the model's inputs for the batch: one entry per device, replica by replica. Allocates no pages.

        The inputs of a replica have that replica's requests, in batch order. Raises `NotReservedError` if a request has
        too few pages, and `InvalidRequestError` if it would recompute tokens in pages of other weights (`set_weights`).
        """
        if self._mark.call:
            self._mark.refuse("fetch")
        if type(num_steps) is not int or num_steps != 1:
            num_steps = arguments.steps(num_steps)
        if self._reset_endpoint.is_asked:
            self._look_for_reset()
        return self._replicas.fetch(self._claims.gather(batch, "fetch"), num_steps)

    def fetch_ahead(self, batch: Sequence[Context], num_steps: int = 1) -> StepInFlight:
        """Do the same as `fetch`, for a loop that plans a step while the previous one runs.

        The `inputs` of the returned step stay valid until `end_step`. Pages that are released before that, for whatever
        reason, are not allocated again until the step has ended. Therefore a request may be released while the device
        runs it, and `maybe_reserve` may return False until the step has ended. Two steps may be in flight. Raises
        `InvalidRequestError` for a third step, and for a model with recurrent states.
        """
        if self._mark.call:
            self._mark.refuse("fetch_ahead")
        num_steps = arguments.steps(num_steps)
        self._look_for_reset()
        return self._replicas.fetch_ahead(self._claims.gather(batch, "fetch_ahead"), num_steps)

    def end_step(self, step: StepInFlight) -> None:
        """End a step that was fetched ahead, when the device has run it or will not run it. Safe to call twice."""
        self._mark.check_books("end_step")
        step = check_step(step, self._replicas.steps)
        with self._mark.changing(Call("end_step", functools.partial(self._replicas.steps.end, step))):
            self._replicas.steps.end(step)

    def step(self, batch: Sequence[Context]) -> None:
        """Publish every page that is full of computed tokens. Call this after `context.update`.

        Page ids of a request may change: if the same content was published before, that page is shared, and the
        duplicate is freed. Raises `NotReservedError` if a request has computed more tokens than its pages hold.
        """
        if self._mark.call:
            self._mark.refuse("step")
        self._replicas.step(self._claims.gather(batch, "step"))

    def increment_cache_lengths(
        self, kv_cache_inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any
    ) -> Sequence[RaggedKVCacheInputs]:
        """Returns the inputs of the next step of a multi-step run.

        In the next step, the tokens of the previous step count as cached.

        If `kv_cache_inputs` is a list, the list is changed in place and returned. `prev_model_inputs.input_row_offsets`
        are the offsets `[batch + 1]` of the ragged batch. If the offsets are in a list, its first item is used. With
        several replicas, `prev_model_inputs.data_parallel_splits` `[replicas + 1]` assigns the requests to replicas.
        """
        return inputs.increment_cache_lengths(kv_cache_inputs, prev_model_inputs, replicas=self.num_replicas)

    def get_data_parallel_splits(self, context_batch: Sequence[Context]) -> torch.Tensor:
        """Returns 0, and for each replica the index after its last request in the batch: int64 `[num_replicas + 1]`."""
        self._mark.check("get_data_parallel_splits")
        gathered = self._claims.gather(context_batch, "get_data_parallel_splits")
        return inputs.data_parallel_splits(gathered.replicas, self.num_replicas)

    def input_symbols(
        self, devices: Sequence[torch.device | str] | None = None, num_layers: int | None = None
    ) -> list[inputs.RaggedKVCacheInputSymbols]:
        """Returns the shapes of `fetch`'s entries as meta tensors with named dynamic dimensions, for `torch.export`.

        `devices` and `num_layers`, if given, replace the manager's own. Raises `InvalidParamsError` if they are
        invalid.
        """
        if devices is not None:
            sizing.check_devices(self.params, devices)
        layers = self.num_layers if num_layers is None else sizing.check_layers(num_layers)
        pages = [replica.pool.num_pages + 1 for replica in self._replicas.each]
        return inputs.input_symbols(self.params, layers, self.page_size, pages)

    # ---- pages for and from another manager

    def block_table(self, request_id: RequestID, *, full_pages: bool = False, first_page: int = 0) -> BlockTable:
        """Returns the pages that the request had computed by its last `step`.

        Valid while the request is leased. Without a lease it is valid only until the request's next `maybe_reserve`,
        `step` or `release`: windows free pages, the model overwrites the recurrent state, and duplicates are merged.

        The call does not wait for a device. If the pages are on a GPU, do not pass the table to another process before
        the model has run.

        With `full_pages`, the table is for a prompt that still runs. It leaves out a last page that is not full, the
        pages of windows, and the recurrent state. Readers refuse it as the last table if it lacks any of these. The
        result begins with page `first_page` of the prompt if the model has a single block table of full attention.
        Otherwise `first_page` is ignored.
        """
        self._mark.check("block_table")
        replica, _, row = self._claims.locate(request_id, "block_table")
        bound = self._claims.context_at(self._claims.places[request_id])
        context = None if bound is None else read_context(bound)
        return imports.export_table(
            replica, row, context, self.fingerprint, full_pages=full_pages, first_page=first_page
        )

    def lease(self, request_id: RequestID, *, seal: Callable[[BlockTable], bytes] | None = None) -> PageLease:
        """Hold the pages of a claimed request until `end_lease`, including pages that it computes after this call.

        The lease keeps every page that a `block_table` of the request names, even if the page falls out of a window. A
        table with `full_pages` names no page of a window, so a prompt with such tables needs no more pages than without
        a lease. When the request is released, for whatever reason, its row becomes free, but its pages stay unchanged
        while any of its leases is open. The pages also stay findable by their prefix. From now on, each `block_table`
        of the request also has the bytes that `seal` returns for it.
        """
        self._mark.check("lease")
        replica, replica_idx, row = self._claims.locate(request_id, "lease")
        if not (seal is None or callable(seal)):
            raise arguments.refusal(f"request {request_id!r}: seal", seal, "a function", InvalidRequestError)
        lease = PageLease(replica.leases, request_id, replica_idx, seal)
        with self._mark.changing(Call("lease", functools.partial(replica.leases.end, lease))):
            replica.grant(lease, row)
        return lease

    def end_lease(self, lease: PageLease) -> None:
        """End a lease that no reader uses any more. Pages without another holder are freed. Safe to call twice."""
        self._mark.check_books("end_lease")
        granted = granted_by(lease, [replica.leases for replica in self._replicas.each])
        end = functools.partial(granted.end, lease)
        with self._mark.changing(Call("end_lease", end)):
            end()

    def import_block_table(
        self,
        context: Context,
        table: BlockTable,
        num_steps: int = 1,
        *,
        partial: bool = False,
        others: Sequence[BlockTable] = (),
    ) -> PendingImport | None:
        """Reserve pages for the claimed request, and find the pages to copy from the manager that made `table`.

        Returns None if too few pages are free. The request shares the pages that this manager has cached. The object
        that `copier` returns copies the remaining pages. The request can run after `commit_import`.

        After `cancel_import`, a request with one block table can compute its tokens in its pages. With several block
        tables, call `maybe_reserve` first: it replaces the request's pages unless they are leased. A request that is
        not leased and has not run may also import again. Its pages are freed before the new import begins, so the
        request has no pages if the new import returns None.

        The table may have any page size and split. It must cover fewer tokens than the context knows, because the last
        known token runs here. With `partial`, the table covers only the first full pages of the prompt, and
        `extend_import` must follow. `others` are tables from other managers that hold some of the same tokens, in pages
        of the same size as `table`. Each page may be copied from any manager that has the page. Raises
        `BlockTableMismatchError` (a ValueError) if a table does not fit.
        """
        self._mark.check("import_block_table")
        num_steps = arguments.steps(num_steps)
        replica, replica_idx, row = self._claims.own(context, "import_block_table")
        self._look_for_reset()
        read = read_context(context)
        known = replica.imports.each.copy()
        call = Call("import_block_table", functools.partial(replica.imports.cancel_all_but, known))
        with self._mark.changing(call, read):
            if replica.imports.is_given_up(row) and row not in replica.leases.of_row:
                imports.check_tables(replica, read, table, others, partial=partial)
                row = self._claims.claim_anew(read.request_id, replica_idx)
            pending = imports.begin_import(replica, row, read, table, num_steps, partial=partial, others=others)
            if pending is not None:
                self._claims.bind(context, replica_idx, row)
        return pending

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """Returns the additional pages to copy, now that the source's table covers more tokens.

        Raises the errors of `import_block_table`, and also if the earlier pages differ or the import is closed.
        """
        self._mark.check("extend_import")
        replica, _, row = self._claims.own(context, "extend_import")
        read = read_context(context)
        with self._mark.changing(Call("extend_import")):
            return imports.extend_import(replica, row, read, pending, table, last=last)

    def copier(self, pending: PendingImport) -> ImportCopier:
        """Return the object that may copy into an open import's pages and prove the copy.

        An import has only one copier.
        """
        self._mark.check("copier")
        books = imports.own_import(self._replicas.each, pending, "copier", is_open=True).imports
        books.refuse_taken(pending)
        with self._mark.changing(Call("copier", functools.partial(books.copiers.pop, pending, None))):
            return books.make_copier(pending)

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """Commit an import after all its pages were copied: its tokens count as cached, and full pages are published.

        `proof` comes from the import's copier. If an endpoint of `transfer` reads the pages, the event of a successful
        pull carries the proof. The proof must belong to this import and cover its whole table. Pass None if no page had
        to be copied (`pending.needs_copy` is False).
        """
        self._mark.check("commit_import")
        replica, _, row = self._claims.own(context, "commit_import")
        read = read_context(context)
        with self._mark.changing(Call("commit_import"), read):
            imports.finish_import(replica, row, read, pending, proof)

    def cancel_import(self, pending: PendingImport) -> None:
        """Cancel an import. Safe to call twice.

        Until its copier has stopped writing, no other request gets its pages, and its own request cannot run. If you
        have written to the pages without a copier, this call is your promise that no write is in flight any more.
        """
        self._mark.check_books("cancel_import")
        replica = imports.own_import(self._replicas.each, pending, "cancel_import")
        replica.imports.refuse_unknown(pending)
        if not pending.closed:
            with self._mark.changing(Call("cancel_import")):
                replica.imports.cancel(pending)

    # ---- pages and counters

    def get_req_blocks(self, request_id: RequestID) -> list[int]:
        """Returns the request's page ids in the first block table, in logical order, including shared pages."""
        self._mark.check_books("get_req_blocks")
        replica, _, row = self._claims.locate(request_id, "get_req_blocks")
        pages = replica.rows.pages(row)
        return pages[pages > 0].tolist()

    @property
    def metrics(self) -> KVCacheMetrics:
        """The counters over all replicas, since the manager was made or since `reset_metrics`."""
        return self._replicas.metrics - self._metrics_before

    def reset_metrics(self) -> None:
        """Reset the counters to zero."""
        self._metrics_before = self._replicas.metrics

    # ---- figures: how much of the memory is in use

    @property
    def states(self) -> tuple[StatePages, ...]:
        """The states of each replica's recurrent layers, with `hits` and `evictions`; empty without such layers."""
        return tuple(self._replicas.states)

    @property
    def further_groups(self) -> list[tuple[StatePages, ...]]:
        """The page pools of each replica besides its pool of token pages: one pool of state pages, or none."""
        return [(pages,) for pages in self.states] or [()] * self.num_replicas

    @property
    def slab_pages(self) -> int:
        """The number of consecutive pages that a request takes for its state (`kvcache.pool.slabs`); 0 for none."""
        return self._replicas.each[0].pool.beside

    @property
    def device_tensors(self) -> list[list[torch.Tensor]]:
        """The page tensors, `[replica][shard]`, each of `pages + 1` pages. A transfer engine must register them."""
        return [placed.memory.blocks for placed in self._replicas.placed]

    @property
    def total_num_pages(self) -> int:
        """The number of pages on all replicas, without their null pages."""
        return sum(replica.pool.num_pages for replica in self._replicas.each)

    @property
    def num_free_blocks(self) -> int:
        """The number of pages of all replicas that can be reserved, including cached pages without a holder."""
        return sum(replica.pool.free_count for replica in self._replicas.each)

    @property
    def num_held_blocks(self) -> int:
        """The number of token and state pages, on all replicas, that are held or being written."""
        return self.total_num_pages - self.num_free_blocks + sum(states.num_held for states in self.states)

    @property
    def num_leased_blocks(self) -> int:
        """The number of pages, on all replicas, that are held by leases of released requests."""
        return sum(replica.leases.num_pages for replica in self._replicas.each)

    @property
    def steps_in_flight(self) -> tuple[StepInFlight, ...]:
        """The steps that were fetched ahead and have not ended, oldest first."""
        return tuple(self._replicas.steps.open)

    @property
    def free_blocks_pct(self) -> float:
        """The share of pages that are free, 0.0 to 1.0: the mean over the replicas."""
        return sum(each.pool.free_count / each.pool.num_pages for each in self._replicas.each) / self.num_replicas

    @property
    def used_blocks_pct(self) -> float:
        """The share of pages that are in use, 0.0 to 1.0: the mean over the replicas."""
        return 1.0 - self.free_blocks_pct

    @property
    def total_num_host_pages(self) -> int:
        """The number of pages of the host tier, which all replicas share; 0 if there is none."""
        return self._replicas.host_pages[0]

    @property
    def host_committed_block_pct(self) -> float:
        """The share of the host tier's pages that hold a cached page, 0.0 to 1.0; 0.0 if there is no host tier."""
        most, held = self._replicas.host_pages
        return held / most if most else 0.0

    @property
    def hint_share(self) -> float:
        """The share of idle pages that currently follow retention hints, 0.0 to 1.0: the mean over the replicas."""
        return sum(replica.hints.share for replica in self._replicas.each) / self.num_replicas

    # ---- weights

    @property
    def weights(self) -> bytes | None:
        """The current version of the weights: 1 to 16 bytes, or None if none was given."""
        return self._replicas.rows.weights.version

    @property
    def num_blocks_by_weights(self) -> dict[bytes | None, int]:
        """The number of cached pages on all replicas for each version that was current, the most recent one last.

        Pages of several versions count for the one under which they were completed, and for none after their request
        was released. The call visits all pages.
        """
        return self._replicas.pages_by_version()

    def lineage(self, request_id: RequestID) -> tuple[tuple[int, int, bytes | None], ...]:
        """Returns which of the request's computed tokens are of which version: `(first token, tokens, version)`.

        Cached pages that the request uses count for the version that computed them (`TextContext.max_staleness`). A
        page during which the weights changed counts for the later version, and so do the tokens that were not in a full
        page when they changed. The same holds for an import that was not committed by then. The result is empty if
        nothing is computed.
        """
        self._mark.check_books("lineage")
        replica, _, row = self._claims.locate(request_id, "lineage")
        return replica.tokens_by_version(row)

    def set_weights(self, version: Version, running: Running = "finish") -> None:
        """Say that the model has other weights from now on, on all replicas at once.

        `version` names the weights: a number below 2**128, 1 to 16 bytes, or a text. From now on, only requests that
        allow it (`TextContext.max_staleness`) find pages or states of another version, on the device or in any tier. No
        page is dropped. If an earlier version is set again, its pages are found again as far as they are still there.
        The call visits no page. It takes microseconds, and some more for each request with "recompute" and "stop". The
        first one allocates 8 bytes for each page. It may come at any time, but not between `fetch` and the run of
        tokens that a request computes a second time. A step counts for the new version unless `step` was called for it
        before.

        `running` says what becomes of requests that have pages:

        - "finish": they keep their pages and run on, so that their KV is of both versions. The pages that they fill
          from now on are found by nobody but their forks.
        - "recompute": their next `maybe_reserve` or `reserve_batch` gives their pages back, as a preemption does. They
          then run from the start, or from a hit, as a new request would. Until then, `fetch` raises `NotReservedError`.
          If a lease keeps a request's recurrent state, and there is no room for another state, that call raises
          `NoFreeStatePageError` and changes nothing.
        - "stop": every later call for them that would run them raises `WeightsChangedError` until they are released.

        Pages of other versions are evicted first: those that are idle already are the oldest, and those that become
        idle later go before them. Only pages above a tenant's quota are evicted even earlier. A page with a retention
        hint, and one that a request with `max_staleness` has used since the switch, keeps its turn. After a rollback,
        idle pages keep their places in this order. KV events do not name versions. So routers are told only the pages
        of the current version that any request finds, after an `AllBlocksCleared` at the switch.

        Steps in flight, leases and imports go on with the pages that they have. Leases keep these, whatever the request
        does. An import that is committed later counts as a request that ran before.

        Does nothing if `version` is the current one. Raises `InvalidRequestError` if an argument is invalid.
        """
        self._mark.check("set_weights")
        found = version_bytes("set_weights: version", version, InvalidRequestError)
        check_running(running)
        switch = functools.partial(self._replicas.set_weights, found, running)
        with self._mark.changing(Call("set_weights", switch)):
            switch()
            self._claims.look_again()

    # ---- resets, recovery and the end

    def reset_prefix_cache(self) -> None:
        """Forget every cached page and state, in all tiers.

        Requests that run, leases and open imports keep their pages. Nobody else finds these pages, and nothing that
        these requests compute later is cached, except after a release and a new claim.
        """
        self._mark.check("reset_prefix_cache")
        with self._mark.changing(Call("reset_prefix_cache", self._replicas.forget)):
            self._replicas.forget()

    def _look_for_reset(self) -> None:
        if self._reset_endpoint.is_asked:
            # The mark is set before the flag is cleared, so if this call is interrupted, `recover` repeats the reset.
            with self._mark.changing(Call("reset_prefix_cache", self._replicas.forget)):
                self._reset_endpoint.is_asked = False  # a message during the reset causes another reset
                self._replicas.forget()

    def flush_tiers(self) -> None:
        """Copy all published pages and states to all lower tiers, and wait until they are written.

        Call this before a shutdown. While steps run, published pages are copied gradually without this call.
        """
        self._mark.check("flush_tiers")
        with self._mark.changing(Call("flush_tiers")):
            self._replicas.flush()

    def check(self) -> None:
        """Recount everything. Raises `InvariantError` or `MovedMemoryError` (RuntimeErrors) if anything is wrong."""
        self._mark.check_books("check")
        self._replicas.check()
        self._claims.check()

    def recover(self) -> Recovered:
        """Build the state anew after a call was interrupted. If no call was interrupted, changes nothing.

        Every request is released: claim it again with the same context, as after a preemption. Complete published pages
        and states stay cached. Leases, imports and steps in flight go on, and keep their pages. Objects that the
        interrupted call has made are ended. Waits until no copy is in flight. If `recover` itself is interrupted, call
        it again.

        Raises `InvariantError` (a RuntimeError) if the state is still wrong. Then only `close` works.
        """
        return recover(self._replicas, self._claims, self._mark)

    def close(self) -> None:
        """Close the sockets and the lower tiers, after all published pages have been written. Safe to call twice.

        Afterwards, held pages can still be given back (`release`, `end_lease`, `cancel_import`, `end_step`, a copier's
        `give_up`), and the state can still be read (`check`, `contains`, `get_replica`, `get_req_blocks`, `metrics` and
        other figures). Every other call raises `ManagerClosedError` (a RuntimeError).

        `close` also works if an interrupted call has left the state unrepaired. It then writes no more pages.
        """
        mark = self._mark
        right = not mark.is_interrupted
        if right:
            mark.call = CLOSE
        self._replicas.close(flush=right)
        self._reset_endpoint.close()
        if right:
            mark.end()
        mark.close()
