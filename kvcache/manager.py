"""`PagedKVCacheManager`: what a serving loop drives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import arguments, sizing
from kvcache.cache_inputs import CacheInputs
from kvcache.check import checked_around
from kvcache.claims import Claims
from kvcache.handover import PageHandover
from kvcache.layout import PageLayout, replica_fingerprint, shard_layout
from kvcache.params import KVCacheParams, resolve_page_size
from kvcache.replica import imports
from kvcache.replica.batch import Batch
from kvcache.replica.block_table import BlockTable
from kvcache.replica.context import Context, TextContext, check_context, check_fork
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.pending import PageCopy, PendingImport
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.reset_endpoint import ResetEndpoint, check_endpoint
from kvcache.sizing import CacheSizing
from kvcache.status import CacheStatus
from kvcache.tiers.tiers import make_tiers
from kvcache.types import RaggedKVCacheInputs, RequestID

_log = logging.getLogger("pagewire")
_CHANGES_SOMETHING = (
    "external_claim",
    "release",
    "maybe_reserve",
    "reserve_batch",
    "fork",
    "fetch",
    "step",
    "lease",
    "end_lease",
    "import_block_table",
    "extend_import",
    "commit_import",
    "cancel_import",
    "reset_prefix_cache",
)


class PagedKVCacheManager(CacheSizing, CacheInputs, CacheStatus, PageHandover):
    """A paged KV cache over data-parallel replicas of tensor-parallel shards.

    The life of a request: `external_claim`, then for each step `maybe_reserve`, `fetch`, the model, `context.update`,
    `step`; at the end `release`. Not thread-safe: one serving loop owns it. Every error leaves it as it was.

    Args:
        params: shape and placement of the cache.
        max_batch_size: requests that may be claimed at a time, split evenly over the replicas.
        max_seq_len: most tokens of a request.
        num_layers: layers that contribute KV.
        devices: torch devices or their names, `params.n_devices` of them, replica by replica.
        session: orders device work: a CUDA stream, or an object with one as `stream`; None means the current one.
            Without a GPU among the devices there is none to order (a warning says so).
        available_cache_memory: bytes for pages over all devices.
        zmq_endpoint_base: opens a socket at `<base>-reset_prefix_cache`: a message there drops the prefix cache before
            the next lookup or `fetch`. Without prefix caching there is none to drop, and no socket (a warning says so).
        page_size: tokens of a page; `params.page_size`, where given, wins over the default.
        enable_runtime_checks: run `check` before and after every call that changes something (slow).

    Raises:
        InvalidParamsError: (a ValueError) an argument that cannot work.
        PoolTooSmallError: (a RuntimeError) the budget does not hold a page, or a device or the host not its share.
    """

    further_groups: Sequence[Any] = ()
    """What keeps pages of a request beside those of its tokens: one for each further group of its block table."""

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
        self._reset_endpoint: ResetEndpoint | None = None
        sizes = sizing.check_sizes(params, max_batch_size, max_seq_len, num_layers)
        every = sizing.check_devices(params, devices, here=True)
        stream = arguments.stream_of(session)
        arguments.flag("enable_runtime_checks", enable_runtime_checks)
        self.params = params
        self.page_size = resolve_page_size(params, page_size)
        _, self.max_seq_len, self.num_layers = sizes
        self.num_replicas = params.data_parallel_degree
        self.enable_prefix_caching = params.enable_prefix_caching
        self.enable_kvcache_swapping_to_host = params.enable_kvcache_swapping_to_host
        self.enable_runtime_checks = enable_runtime_checks
        tp = params.tensor_parallel_degree
        self.devices_per_replica = [every[first : first + tp] for first in range(0, len(every), tp)]
        self.layouts: list[PageLayout] = [
            shard_layout(params, sizes.num_layers, self.page_size, shard) for shard in range(tp)
        ]
        self.fingerprint = replica_fingerprint(self.layouts)
        pages = sizing.pages_per_replica(params, sizes.num_layers, self.page_size, available_cache_memory)
        sizing.refuse_what_no_host_holds(params, sizes, self.page_size, pages, every)
        self._max_rows = sizes.max_batch_size // self.num_replicas
        idle = ["session orders nothing without a GPU"] if stream is not None and every[0].type == "cpu" else []
        if zmq_endpoint_base is not None:
            check_endpoint(zmq_endpoint_base)
            idle += [] if params.enable_prefix_caching else ["zmq_endpoint_base opens nothing without prefix caching"]
        self._warn_of_what_falls_short(pages, [*params.without_effect(), *idle])
        # Tokens that the pages of each place (a row of a replica) hold; place -1, nobody's, holds none.
        self._room = [0] * (self._max_rows * self.num_replicas + 1)
        placed = [
            PlacedReplica(self._new_replica(pages, group, place * self._max_rows), self.layouts, group, stream)
            for place, group in enumerate(self.devices_per_replica)
        ]
        tiers = make_tiers(params, self.layouts, placed, stream)
        CacheStatus.__init__(self, Replicas(placed, params, tiers))
        self._claims = Claims(self._replicas.each, self._max_rows, self.page_size)
        self._place_of: Callable[[Any, int], int] = self._claims.bound.get
        if zmq_endpoint_base is not None and params.enable_prefix_caching:
            self._reset_endpoint = ResetEndpoint(zmq_endpoint_base)
        if enable_runtime_checks:  # on this object alone: without them a call costs nothing more
            for name in _CHANGES_SOMETHING:
                setattr(self, name, checked_around(getattr(self, name), self.check))

    # ---- claiming

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Bind a row of a replica to the request; takes no pages. With one replica `replica_idx` may be left out.

        Raises:
            AlreadyClaimedError: (a ValueError) naming the replica.
            InvalidRequestError: (a ValueError) no such replica, or none given where there are several.
            NoFreeRowError: (a ValueError) every row of the replica is claimed.
        """
        self._claims.claim(request_id, replica_idx)

    @contextmanager
    def claim(self, context: Context, replica_idx: int | None = None) -> Generator[int]:
        """Claim for the length of a `with` block, then release; gives the replica, the recommended one if not named."""
        check_context(context, "claim")
        if replica_idx is None:
            replica_idx = self.get_or_recommend_replica(context)
        self.external_claim(context.request_id, replica_idx)
        try:
            yield replica_idx
        finally:
            if self.contains(context.request_id):
                self.release(context.request_id)

    def contains(self, request_id: RequestID) -> bool:
        """Whether the request is claimed. Raises `InvalidRequestError` where the id is no string."""
        arguments.check_request_id(request_id, "contains")
        return request_id in self._claims.places

    def get_replica(self, context: Context) -> int:
        """The replica that the request is claimed on.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
        """
        check_context(context, "get_replica")
        return self._claims.locate(context.request_id, "get_replica")[1]

    def get_or_recommend_replica(self, context: Context) -> int:
        """The request's replica, or the one to claim it on, by `params.routing`. Raises as `admission`."""
        check_context(context, "get_or_recommend_replica")
        if context.request_id in self._claims.places:
            return self.get_replica(context)
        return self.admission(context).replica_idx

    def release(self, request_id: RequestID) -> None:
        """Give back the request's row and pages. With prefix caching its full pages stay findable while there is room.

        Pages under a lease stay as they are, for nobody else, until the lease has ended.

        Raises:
            UnknownRequestError: (a KeyError) not claimed, or released before.
        """
        self._claims.release(request_id)

    # ---- a step of the serving loop

    def maybe_reserve(self, data: Context, num_steps: int = 1) -> bool:
        """Give the request pages for all its known tokens and `num_steps` steps; cached ones where they match.

        On a prefix hit the context's `start_idx` moves to the end of the hit. False: too few pages, nothing changed;
        the same call may work once others have released theirs.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
            PromptTooLongError: (a RuntimeError) the whole pool is too small for it.
            SequenceTooLongError: (a RuntimeError) longer than `max_seq_len`.
            InvalidRequestError: (a ValueError) `num_steps` is no integer or below 1; no context, another object than
                the pages were reserved for, one whose salt or keys have changed since, or one that would compute anew
                what a lease promises to readers (as `fetch`).
            NotReservedError: (a RuntimeError) an import of its pages is pending.
        """
        # A decode step that stays on its page: 15 of 16 calls end here.
        try:
            place = self._place_of(data, -1)
        except TypeError:  # cannot be hashed
            place = -1
        if place >= 0 and type(num_steps) is int and num_steps > 0:
            most = self._room[place] - num_steps + 1
            if type(data) is TextContext:  # one call, where the protocol takes two
                if data.decodes_within(most):
                    return True
            elif data.active_length == 1 and data.current_length <= most:
                return True
        _, replica_idx, row = self._claims.own(data, "maybe_reserve")
        num_steps = arguments.steps(num_steps)
        if self._reset_endpoint is not None and data.active_length > 1:
            self._look_for_reset()
        if not self._replicas.reserve(replica_idx, row, data, num_steps):
            return False
        if place < 0:
            self._claims.bind(data, replica_idx, row)
        return True

    def reserve_batch(self, batch: Sequence[Context], num_steps: int = 1) -> NDArray[np.bool_]:
        """`maybe_reserve` for each request in turn: bool `[len(batch)]`. A refused one takes nothing from the others.

        Raises:
            Those of `maybe_reserve`, before any request is touched.
        """
        num_steps = arguments.steps(num_steps)
        gathered = self._claims.gather(batch, "reserve_batch")
        if self._reset_endpoint is not None and gathered.slack < 0 and (gathered.actives - gathered.starts > 1).any():
            self._look_for_reset()
        reserved = self._replicas.reserve_batch(gathered, num_steps)
        if gathered.unbound:
            self._claims.bind_reserved(gathered, reserved.tolist())
        return reserved

    def fork(self, parent: Context, child: Context, num_steps: int = 1) -> bool:
        """Claim `child` on the parent's replica with all that the parent had computed by its last `step`.

        Full pages are shared, the partly filled last page is copied. `child` is not claimed yet and knows at least one
        token more than was computed (`TextContext.fork` makes one). False: too few pages, nothing changed.

        Raises:
            UnknownRequestError: (a KeyError) the parent is not claimed.
            AlreadyClaimedError, NoFreeRowError: (ValueErrors) as `external_claim`, for the child.
            InvalidRequestError: (a ValueError) the child's tokens, salt or keys are not the parent's.
            PromptTooLongError, SequenceTooLongError: (RuntimeErrors) as `maybe_reserve`.
        """
        num_steps = arguments.steps(num_steps)
        replica, replica_idx, parent_row = self._claims.own(parent, "fork")
        check_context(child, "fork")
        check_fork(parent, child, int(replica.rows.cached[parent_row]))
        self._claims.claim(child.request_id, replica_idx)
        row, copied = replica.rows.row_of[child.request_id], None
        try:
            copied = replica.fork(parent_row, row, child, num_steps)
        finally:
            if copied is None:
                self._claims.release(child.request_id)
        if copied is None:
            return False
        self._claims.bind(child, replica_idx, row)
        if copied != (0, 0):
            self._replicas.placed[replica_idx].copy_page(*copied)
        return True

    def batch(self, contexts: Sequence[Context]) -> Batch:
        """Look the requests up once; the result is accepted wherever a sequence of contexts is.

        Raises:
            UnknownRequestError: (a KeyError) one is not claimed.
            InvalidRequestError: (a ValueError) one is named twice.
        """
        return self._claims.batch(contexts)

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """What the model reads to run the batch: one entry per device, replica by replica. Allocates nothing.

        Each replica sees its own requests, in batch order.

        Raises:
            UnknownRequestError: (a KeyError) a request is not claimed.
            InvalidRequestError: (a ValueError) a request is named twice, or `num_steps` is below 1; a request computes
                tokens anew that were in a block table under a lease that is still open.
            NotReservedError: (a RuntimeError) a request has too few pages: call `maybe_reserve` first.
            SequenceTooLongError: (a RuntimeError) longer than `max_seq_len`.
        """
        if type(num_steps) is not int or num_steps != 1:
            num_steps = arguments.steps(num_steps)
        if self._reset_endpoint is not None:
            self._look_for_reset()
        return self._replicas.fetch(self._claims.gather(batch, "fetch"), num_steps)

    def step(self, batch: Sequence[Context]) -> None:
        """Publish every page that is full of computed tokens. Call it after `context.update`.

        A request's page ids may change: content that was published before is shared, and the duplicate freed.

        Raises:
            UnknownRequestError: (a KeyError) a request is not claimed.
            InvalidRequestError: (a ValueError) a request is named twice.
            NotReservedError: (a RuntimeError) a request computed more tokens than it has pages for.
        """
        self._replicas.step(self._claims.gather(batch, "step"))

    # ---- pages from and for another manager

    def block_table(self, request_id: RequestID, *, full_pages: bool = False) -> BlockTable:
        """The pages of what the request had computed by its last `step`. Good while it is claimed, or a lease is open.

        `full_pages` leaves out the page that is not full. While the prompt still runs, only full ones stay as they are.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
            InvalidRequestError: (a ValueError) nothing computed yet.
        """
        replica, replica_idx, _ = self._claims.locate(request_id, "block_table")
        return imports.export_table(replica, replica_idx, request_id, self.fingerprint, full_pages=full_pages)

    def import_block_table(
        self, context: Context, table: BlockTable, num_steps: int = 1, *, partial: bool = False
    ) -> PendingImport | None:
        """Reserve the claimed request's pages and say which to copy from the maker of `table`. None: too few pages.

        Pages cached here are shared, not copied. `copier` gives the right to copy the others. The request can run after
        `commit_import`; after `cancel_import` it holds its pages and computes its tokens itself, or is released. The
        table may be of any page size and split; `partial`: it covers the first full pages only, and `extend_import`
        follows.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
            BlockTableMismatchError: (a ValueError) other tokens or another salt, or a malformed table.
            InvalidRequestError: (a ValueError) the request has pages already.
            PromptTooLongError, SequenceTooLongError: (RuntimeErrors) as `maybe_reserve`.
        """
        num_steps = arguments.steps(num_steps)
        replica, replica_idx, row = self._claims.own(context, "import_block_table")
        self._look_for_reset()
        pending = imports.begin_import(replica, replica_idx, context, table, num_steps, partial=partial)
        if pending is not None:
            self._claims.bind(context, replica_idx, row)
        return pending

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """What to copy beyond what was named before, now that the source's table covers more tokens.

        Raises as `import_block_table`, also for pages other than before, or an import that is closed.
        """
        imports.own_import(self._replicas.each, pending, "extend_import")
        replica, _, _ = self._claims.own(context, "extend_import")
        return imports.extend_import(replica, context, pending, table, last=last)

    # ---- what is where

    def get_req_blocks(self, request_id: RequestID) -> list[int]:
        """The request's page ids in logical order, shared ones included.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
        """
        replica, _, row = self._claims.locate(request_id, "get_req_blocks")
        return replica.rows.pages(row).tolist()

    @property
    def device_tensors(self) -> list[list[torch.Tensor]]:
        """The page tensors, `[replica][shard]`: what a transfer engine registers, of `total pages + 1` pages each."""
        return [place.blocks for place in self._replicas.placed]

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that nobody holds, on all tiers. Pages in use stay findable."""
        self._replicas.forget_idle()

    def check(self) -> None:
        """Recount everything.

        Raises:
            InvariantError: (a RuntimeError) naming the first discrepancy.
        """
        self._replicas.check()
        self._claims.check()

    def close(self) -> None:
        """Close the reset socket, and the file tier once all that is published is written. Safe twice."""
        self._replicas.close()
        if self._reset_endpoint is not None:
            self._reset_endpoint.close()
            self._reset_endpoint = None

    # ---- inside

    def _new_replica(self, pages: int, devices: Sequence[torch.device], first_place: int) -> Replica:
        return Replica(
            room=self._room,
            first_place=first_place,
            num_pages=pages,
            page_size=self.page_size,
            rows=self._max_rows,
            max_seq_len=self.max_seq_len,
            caching=self.enable_prefix_caching,
            hash_algorithm=self.params.hash_algorithm,
            pinned=any(device.type == "cuda" for device in devices),
        )

    def _look_for_reset(self) -> None:
        """Before pages are looked up: somebody may have asked for them to be forgotten."""
        if self._reset_endpoint is not None and self._reset_endpoint.asked():
            self.reset_prefix_cache()

    def _warn_of_what_falls_short(self, pages: int, without_effect: Sequence[str]) -> None:
        for sentence in without_effect:
            _log.warning("%s", sentence)
        if pages < self._max_rows:
            _log.warning("%d pages a replica for up to %d requests", pages, self._max_rows)
        if pages * self.page_size < self.max_seq_len:
            _log.warning(
                "a request of max_seq_len %d cannot run: %d pages of %d tokens", self.max_seq_len, pages, self.page_size
            )
