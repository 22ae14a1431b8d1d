"""The scheduler's side of our vLLM connector: leases for prefilled requests, and loads for decode.

At prefill, a request whose pages a reader will read gets its lease together with its blocks. The lease is therefore
granted before the request ends and its `kv_transfer_params` are built. At decode, a request that names a source is
handled when it arrives: the source is told at once that a reader waits. The lease is then renewed for as long as vLLM
keeps the request in its queue. A dead source and invalid params are noticed before any block is allocated.

A request that cannot be loaded is still parked, and then reported as failed. vLLM then applies its
`kv_load_failure_policy`: the request fails, or vLLM computes the prompt and a warning is logged. Invalid input from
outside raises no exception here, because an exception would stop the engine.
"""

from __future__ import annotations

import hashlib
import logging
import reprlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from vllm.v1.request import RequestStatus

from kvcache.endpoints.addresses import in_endpoint, resolved
from scheduler_adapters.peers.hints import next_sources
from scheduler_adapters.vllm.cached_blocks import why_unfit
from scheduler_adapters.vllm.config import read_options, worker_config
from scheduler_adapters.vllm.metadata import RankHandshakeMetadata, StepMetadata, WorkersMetadata
from scheduler_adapters.vllm.prefix_exchange import NoPrefixes, Prefixes, PrefixExchange, say_unfit
from scheduler_adapters.vllm.resets import is_empty, watch_resets
from scheduler_adapters.vllm.samples import FirstSample, SharedLeases, SharedLoads, is_later_prompt
from scheduler_adapters.vllm.versions import IS_TRIED, OURS, TRIED, VLLM
from scheduler_adapters.vllm.weights import CHANGES, VersionWatch, named_adapter
from transfer.connector.config import GroupConfig
from transfer.connector.metadata import Progress
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.errors import EngineClosedError, InvalidEngineError, TransferError, TransferParamsError
from transfer.wire.handshake import differences
from transfer.wire.messages import Wanted
from transfer.wire.prompt import Prompt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from transfer.spans import HandoverSpan

logger = logging.getLogger("pagewire.vllm")
_DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_NULL = 0  # vLLM's null block, which replaces the blocks that a window no longer covers


class SchedulerSide:
    """The scheduler's side of one engine. Only the thread of vLLM's scheduler may use it.

    Attributes:
        manager: vLLM's block manager, set once it exists. It names the blocks to copy to host buffers, and is told
            which blocks must not be reused as cached.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        options = self._options = read_options(vllm_config, listens=True)
        config, transfer = worker_config(vllm_config, kv_cache_config), vllm_config.kv_transfer_config
        self.manager: KVCacheManager | None = None
        produces = bool(transfer and transfer.is_kv_producer)
        lend = (0.25 if produces else 0.0) if options.lend is None else options.lend
        self._unfit = why_unfit(vllm_config, kv_cache_config, config.groups)
        self._share = 0.0 if self._unfit else lend
        self._serves = produces or self._share > 0
        self._hash = str(vllm_config.cache_config.prefix_caching_hash_algo)
        self._prefixes: Prefixes = NoPrefixes()
        rescues = bool(transfer and transfer.kv_load_failure_policy == "recompute")
        self._failure_level = logging.WARNING if rescues else logging.ERROR
        self._saves = config.kv_buffer_device == "cpu"
        self._has_states = any(group.is_state for group in config.groups)
        self._shortens = any(group.is_state or group.window for group in config.groups)
        self._select = kv_cache_config.select_transfer_block_ids
        self._group_ids = kv_cache_config.transfer_group_ids  # vLLM's numbers of the transferred groups
        address = resolved(options.host.strip("[]")) if self._serves else "127.0.0.1"
        own = f"tcp://{in_endpoint(address)}:{options.port}"
        self._connector = NixlConnectorScheduler(config, in_endpoint(options.host), own, options.keys)
        self._sources: set[str] = set()  # requests that still run and whose pages a reader will read; each has a lease
        self._unoffered: dict[str, Request] = {}  # requests that got blocks for this step, and may get a lease
        self._from_cache: set[str] = set()  # requests with a lease that have found some of their pages in vLLM's cache
        self._leases, self._loads = SharedLeases(), SharedLoads()
        self._parked: set[str] = set()  # requests that vLLM has parked until their load has ended
        self._kept: set[str] = set()  # requests that have ended, and whose blocks vLLM keeps for a lease or a load
        # requests whose pages a reader will read, and whose blocks are not in host buffers yet
        self._unsaved: dict[str, Request] = {}
        self._waiting: dict[str, Wanted] = {}  # requests that will read from a source, and have no blocks yet
        self._refused: set[str] = set()  # requests that cannot be loaded, and have not got their blocks from vLLM yet
        self._next = StepMetadata()
        # how often the prefix cache was reset: so far, before the last step, and when the weights changed last
        self._resets, self._stepped, self._changed = 0, -1, -1
        self._is_told = False  # whether the log says that the cache was not reset after this change
        self._version, self._versions = "", VersionWatch(self._on_version, self._on_call)
        self._counts = Counter[str]()  # counts since the last `take_counts`
        # spans of traced requests that read from a source, until their load has ended
        self._spans: dict[str, HandoverSpan] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Sets vLLM's block manager, which exists later than this object."""
        self.manager = manager
        watch_resets(manager, self._on_reset, self._on_failed_reset)
        if self._unfit:
            say_unfit(self._unfit, self._options, self._share)
        else:
            self._prefixes = PrefixExchange(self._connector, manager, self._options, self._hash, self._share)

    def _on_reset(self) -> None:
        self._resets += 1

    def _on_version(self, name: str) -> None:
        """Handles the name that the user has given to the current weights."""
        self._next.version = name  # even if it is the last name, because the weights may have changed in between
        if name != self._version:
            self._version = name
            self._on_new_weights(self._stepped)

    def _on_call(self, method: object) -> None:
        """Handles a call of the workers' methods. A name that they have not got yet is not that of changed weights."""
        if method in CHANGES:
            self._next.version = ""

    def _on_new_weights(self, last: int) -> None:
        """Handles new weights. `last` says how often the cache had been reset before the last step with the old ones.

        A reset since then has left no block of the old weights. Without one, requests that found blocks in the cache
        lose their leases, even those that the first step with the new weights has granted.
        """
        if self._resets <= last:
            self._changed, self._is_told = self._resets, False
            self._prefixes.changed_weights()
            for request_id in self._from_cache:
                self._give_up(request_id, "the weights have changed, and the prefix cache was not reset")

    @property
    def _is_old(self) -> bool:
        """Whether vLLM's prefix cache may have blocks of earlier weights."""
        return self._changed == self._resets

    def _on_failed_reset(self) -> None:
        """Handles a reset of vLLM's prefix cache that has failed, so that one of the next can succeed.

        The blocks that peers read and that pulls fill are given up. A hand-over is not, because its request would fail.
        """
        self._prefixes.give_up("the prefix cache is to be reset")
        names = [*self._parked, *self._kept]
        held = f" {len(names)} hand-overs hold blocks until they have ended: {names[:8]}." if names else ""
        logger.warning(
            "the prefix cache was not reset.%s A lease that nobody reads ends after %g s. Reset it again",
            held,
            self._options.kv_lease_duration,
        )

    @property
    def groups(self) -> Sequence[GroupConfig]:
        """The transferred groups."""
        return self._connector.config.groups

    @property
    def lends(self) -> bool:
        """Whether a peer asks for cached blocks, or reads some."""
        return self._prefixes.pending

    def set_handshake_metadata(self, ranks: Mapping[tuple[int, int], RankHandshakeMetadata]) -> None:
        """Starts the handshake server, and logs that.

        Each key of `ranks` is a pair of a pipeline rank and a tensor-parallel rank.
        """
        tp_size, rank_0 = self._connector.config.tp_size, ranks[min(ranks)]
        first = rank_0.fingerprint
        if rank_0.incarnation == self._connector.config.incarnation:
            self._prefixes.start(first)
        else:  # after a sleep
            self._connector.reopened(rank_0.incarnation, rank_0.weights)
        if not self._serves:
            self._say_started("reads only")
            return
        for (pp, tp), rank in ranks.items():
            if differ := differences(first, rank.fingerprint, ("on this rank", "on rank 0")):
                raise InvalidEngineError(f"rank {pp * tp_size + tp} of this engine differs from rank 0: {differ}")
        data = {pp * tp_size + tp: rank.data for (pp, tp), rank in ranks.items()}
        address = self._connector.set_handshake_metadata(data, first)
        self._say_started(f"answers readers at {address}")

    def _say_started(self, does: str) -> None:
        if not IS_TRIED:
            logger.warning(
                "vLLM %s was not tried with this connector, only %s; it has what is needed", VLLM, ", ".join(TRIED)
            )
        logger.info(
            "pagewire %s under vLLM %s: engine %r %s; leases of %g s, keys: %s",
            OURS,
            VLLM,
            self._connector.config.engine_id,
            does,
            self._options.kv_lease_duration,
            self._options.secured_by,
        )

    def add(self, request: Request) -> None:
        """Handles a new request. If it names a source, the source is told that a reader waits."""
        request_id, params = request.request_id, request.kv_transfer_params
        if request.abort_immediately:  # vLLM has rejected the request, or a request of another id has failed
            self._connector.give_back(params, "the request was rejected")
            return
        self._prefixes.see(request)
        is_first = self._loads.join(request)
        if is_later_prompt(request_id) and isinstance(params, dict):
            logger.debug("request %r: only the first of several prompts in a request is handed over", request_id)
            self._prefixes.begin(request)
            return
        if is_first:
            self._begin(request)
        else:
            self._prefixes.begin(request)
        if _is_source(params):
            self._leases.join(request_id)
            self._shorten(request, params)

    def _begin(self, request: Request) -> None:
        """Handles the params of a new request, once for all samples of its prompt."""
        request_id, params = request.request_id, request.kv_transfer_params
        try:
            wanted = (
                None
                if params is None
                else self._connector.read(request_id, params, prompt_of(request, request.num_prompt_tokens))
            )
            if wanted is None:
                self._prefixes.begin(request)
            else:
                self._connector.hold(request_id, wanted)
                self._waiting[request_id] = wanted
                self._begin_span(request, wanted)
        except TransferError as error:
            self._counts["malformed_params"] += isinstance(error, TransferParamsError)
            self._connector.give_back(params, str(error))
            self._refuse(request_id, str(error))
        if isinstance(params, dict) and not isinstance(offers := params.get("do_remote_decode"), bool | None):
            self._counts["malformed_params"] += 1
            logger.warning(
                "request %r: kv_transfer_params['do_remote_decode'] is %s: true or false is expected; its pages are "
                "not offered to a reader",
                request_id,
                reprlib.repr(offers),
            )

    def _begin_span(self, request: Request, wanted: Wanted) -> None:
        """Begins a span if the request has trace headers."""
        if request.trace_headers:
            from transfer.spans import HandoverSpan  # noqa: PLC0415  (its packages are installed if vLLM traces)

            span = self._spans[request.request_id] = HandoverSpan(
                request.trace_headers,
                {
                    "gen_ai.request.id": request.request_id,
                    "pagewire.prefill": wanted.engine_id,
                    "pagewire.tokens": wanted.num_tokens,
                },
            )
            span.begin("room")

    def _end_span(self, request_id: str, error: str = "") -> None:
        """Ends the span of a request, with or without a load. A no-op if the request has no span."""
        if (span := self._spans.pop(request_id, None)) is not None:
            span.end(error)

    def _shorten(self, request: Request, params: dict[str, Any]) -> None:
        """Leaves the last token of a prompt to the decode side, which computes it in any case.

        Decode could not use a recurrent state that already includes the last token. With a sliding window, prefill
        would free a block that decode needs to compute this token.
        """
        if not self._shortens or request.num_prompt_tokens < 2 or params.get("_shortened"):
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-1]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        # There is no public way to remove a token. vLLM's own connector changes this attribute, too.
        del request._all_token_ids[-1]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        params["_shortened"] = True

    def _refuse(self, request_id: str, reason: str) -> None:
        self._refused.add(request_id)
        self._tell_failure(reason if request_id in reason else f"request {request_id!r}: {reason}")
        self._end_span(request_id, reason)

    def _tell_failure(self, reason: str) -> None:
        """Counts a failed load. Logs the reason, and whether vLLM will compute the prompt instead."""
        self._counts["failed_pulls"] += 1
        rescued = self._failure_level == logging.WARNING
        logger.log(self._failure_level, "%s%s", reason, "; its prompt is computed here instead" if rescued else "")

    def match(self, request: Request, num_computed_tokens: int) -> int | None:
        """Returns how many tokens a load would add to the computed ones. Has no side effect.

        Returns None if the first sample of the request's prompt still loads: the request then waits for its blocks.
        """
        request_id = request.request_id
        first = self._loads.first(request_id)
        if first is not None and self._is_loading(first):
            return None
        if request_id in self._refused or (first is not None and first.has_failed):
            return max(0, request.num_prompt_tokens - num_computed_tokens)
        wanted, limit = self._waiting.get(request_id), self._limit(request)
        if wanted is None and self._prefixes.waits(request, num_computed_tokens):
            return None
        if wanted is None or (self._has_states and wanted.num_tokens > limit):
            return 0
        return max(0, min(wanted.num_tokens, limit) - num_computed_tokens)

    def _is_loading(self, first: FirstSample) -> bool:
        """Whether the first sample of a prompt has not got its blocks, or its load has not ended."""
        if (request := first.request) is None:
            return False
        waits = request.request_id in self._waiting or request.request_id in self._refused
        return waits or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def _limit(self, request: Request) -> int:
        """Returns how many prompt tokens may be loaded.

        vLLM runs the last prompt token even if a load brings the KV of all prompt tokens. By then, vLLM has freed a
        block that only this token's window needs, and a recurrent state already includes the token. With windows or
        states, the last token is therefore not loaded.
        """
        return request.num_prompt_tokens - self._shortens

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Handles the allocation of blocks to a request. If a reader will read its pages, the pages are leased.

        If the request itself reads from a source, its load begins.
        """
        request_id = request.request_id
        first = self._loads.first(request_id)
        if request_id in self._leases:
            self._unoffered[request_id] = request
        elif request_id in self._refused or (first is not None and first.has_failed):
            self._refused.discard(request_id)
            self._park(request_id, num_external_tokens, fails=True)
        elif request_id in self._waiting:
            fails = not self._load(request, self._waiting.pop(request_id), blocks, num_external_tokens)
            if not num_external_tokens:
                self._end_span(request_id)  # all tokens are here, so there is nothing to load
            self._park(request_id, num_external_tokens, fails=fails)

    def _park(self, request_id: str, num_external_tokens: int, *, fails: bool) -> None:
        if num_external_tokens > 0:  # a request without tokens to load runs at once, because it waits for no load
            self._next.parked.add(request_id)
            self._parked.add(request_id)
            if fails:
                self._next.refused.add(request_id)

    def _offer_new(self, found: Mapping[str, int]) -> None:
        """Leases the pages of requests that have got their blocks. `found` is by request, and as in `_offer`."""
        for request_id, request in self._unoffered.items():
            self._offer(request, found.get(request_id, 1))  # if it does not run yet, another connector loads for it
        self._unoffered.clear()

    def _offer(self, request: Request, found: int) -> None:
        """Leases the pages of a request that has found `found` tokens of its prompt in vLLM's prefix cache."""
        if self._leases.holder(request.request_id) not in ("", request.request_id):
            return  # the request shares the lease of another sample of its prompt
        if found and self._is_old:
            self._refuse_old(request.request_id)
            return
        if request.request_id not in self._sources:  # a preempted request still has its lease
            try:
                self._connector.offer(request.request_id, running=True)
            except TransferError:
                logger.exception("request %r runs without a lease: no reader can get its pages", request.request_id)
                return
            self._sources.add(request.request_id)
            self._leases.hold(request.request_id)
        if found and self._leases.holder(request.request_id):
            self._from_cache.add(request.request_id)
        if self._saves:  # a preempted request is saved again, because its blocks have changed
            self._unsaved[request.request_id] = request

    def _refuse_old(self, request_id: str) -> None:
        """Leaves a request without a lease, because some of its pages may be of earlier weights."""
        if request_id in self._sources:  # it was preempted
            self._give_up(request_id, "it was preempted, and its pages may be of earlier weights now")
        if not self._is_told:
            logger.warning(
                "request %r, and all that find a prefix here, are not handed over: the prefix cache was not reset "
                "after the weights had changed. Reset it (reset_prefix_cache)",
                request_id,
            )
        self._is_told = True

    def _load(self, request: Request, wanted: Wanted, blocks: KVCacheBlocks, num_external_tokens: int) -> bool:
        """Makes every rank read the missing pages. Returns False if that is impossible."""
        block_ids, first_blocks = _without_null(self._select(blocks.get_block_ids()))
        # If no page is missing, the load only tells the source that the reader is done.
        total = self._limit(request) if num_external_tokens else request.num_prompt_tokens
        computed = min(wanted.num_tokens, total) - num_external_tokens
        try:
            if request.request_id in self._spans:
                self._spans[request.request_id].begin("read")
            self._connector.load(request.request_id, wanted, block_ids, total, computed, first_blocks=first_blocks)
        except TransferError as error:
            self._connector.cancel(request.request_id, str(error))
            self._end_span(request.request_id, str(error))
            self._tell_failure(f"request {request.request_id!r} cannot be loaded: {error}")
            return False
        return True

    def step(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Returns the work of this step, and starts to collect the work of the next step."""
        if self._unoffered:
            self._offer_new(_computed_before(scheduler_output))
        for request_id, request in list(self._unsaved.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if scheduled and request.num_computed_tokens + scheduled >= request.num_prompt_tokens and self.manager:
                blocks, _ = _without_null(self._select(self.manager.get_block_ids(request_id)))
                self._connector.save(request_id, blocks)
                del self._unsaved[request_id]
        metadata, self._next = self._next, StepMetadata()
        if scheduler_output.total_num_scheduled_tokens or self.manager is None or not is_empty(self.manager):
            self._stepped = self._resets
        metadata.resets = self._stepped
        metadata.marker = self._prefixes.step()
        metadata.step = self._connector.build_metadata()
        return metadata

    def update(self, metadata: WorkersMetadata) -> None:
        """Processes the workers' outputs."""
        self._prefixes.returned(metadata.marker)
        for rank, output in metadata.outputs:
            is_new = self._connector.has_new_weights(rank, output)
            progress = self._connector.update(rank, output)
            if is_new:  # first, because the blocks of this report's leases and pulls may have the old weights
                self._on_new_weights(metadata.changed_after)
            self._prefixes.update(progress)
            for request_id, (fence_at, over_at) in output.times.items():
                # every rank reports these times, but the span of a request ends only once
                if (span := self._spans.get(request_id)) is not None:
                    span.begin("fence", fence_at)
                    span.begin("commit", over_at)
            self._update(progress)

    def _update(self, progress: Progress) -> None:
        for request_id in progress.received - progress.failed.keys():
            self._end_span(request_id)
        for request_id, unwritten in progress.unwritten.items():
            self._hide(request_id, unwritten)
        for request_id, reason in progress.failed.items():
            self._end_span(request_id, reason)
            if self._waiting.pop(request_id, None) is not None:
                self._refuse(request_id, reason)
            else:
                self._tell_failure(reason)
        for request_id, reason in progress.sent.items():
            self._leases.over(request_id)
            self._from_cache.discard(request_id)
            if reason != "read":
                logger.warning("request %r: its pages were freed before they were read: %s", request_id, reason)

    def freed(self, request_ids: Iterable[str]) -> None:
        """Records that vLLM no longer waits for the lease or the load of some requests."""
        self._parked.difference_update(request_ids)
        self._kept.difference_update(request_ids)

    @property
    def frees_soon(self) -> bool:
        """Whether vLLM keeps blocks for a lease or a load that was given up, and ends within the next steps."""
        return any(map(self._connector.is_ending, self._kept))

    def _hide(self, request_id: str, unwritten: Mapping[int, int]) -> None:
        """Keeps partly loaded blocks out of vLLM's prefix cache.

        A block of this engine can be larger than a page of prefill. If prefill has already freed the first pages of
        such a block, the block is loaded only in part.

        The request itself does not need the missing tokens. In the next step, vLLM publishes the request's blocks. It
        begins after the blocks that the group's manager counts as cached. This method therefore raises the count past
        the incomplete blocks.
        """
        if self.manager is None:
            raise EngineClosedError(f"request {request_id!r}: vLLM has not bound its block manager")
        for number, token in unwritten.items():
            blocks = self.manager.coordinator.single_type_managers[self._group_ids[number]]
            if request_id in blocks.req_to_blocks:  # if the request is missing, it has ended, and its blocks are free
                cached = blocks.num_cached_block
                cached[request_id] = max(cached.get(request_id, 0), token // blocks.block_size + 1)

    def take_counts(self) -> dict[str, int]:
        """Returns the counts of failures since the last call, under the names that they have in our stats.

        Each request counts once.
        """
        counts, self._counts = self._counts, Counter[str]()
        counts.update(self._prefixes.take_counts())
        return {name: count for name, count in counts.items() if count}

    def ended(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of a request.

        Returns whether the request's blocks must be kept until its lease ends, and the params for a reader. If the
        request's own params have the key `kv_sources`, so have these: they say where its KV is for the next turn.
        """
        is_kept, params = self._ended(request, block_ids)
        own, given = self._prefixes.ended(request), request.kv_transfer_params
        if own is not None and isinstance(given, dict) and "kv_sources" in given and request.status in _DONE:
            params = {**(params or {}), "kv_sources": next_sources(own, given["kv_sources"])}
        return is_kept, params

    def _ended(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._refused.discard(request_id)
        self._waiting.pop(request_id, None)
        self._loads.leave(request)
        self._connector.cancel(request_id, f"the request has ended: {request.status}")
        # if the status is FINISHED_ERROR, `update` is about to report the failure
        if request.status != RequestStatus.FINISHED_ERROR:
            self._end_span(request_id, f"the request has ended: {request.status}")
        self._unsaved.pop(request_id, None)
        if request_id in self._parked:
            self._kept.add(request_id)
        if request_id not in self._leases:
            return False, None
        holder, is_last = self._leases.holder(request_id), self._leases.leave(request_id)
        is_kept = request_id in self._sources
        params = self._end_source(request, holder, block_ids)
        if is_last and holder:
            self._connector.computed(holder)
        return is_kept, params

    def _end_source(self, request: Request, holder: str, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Handles the end of a request whose pages were to be offered. Returns the params for a reader.

        Args:
            request: the request.
            holder: the sample of its prompt that has the lease; empty if none has.
            block_ids: the request's blocks in each group.
        """
        request_id = request.request_id
        if is_holder := request_id in self._sources:
            self._sources.remove(request_id)
            self._next.finished.add(request_id)
            self._kept.add(request_id)
        if request.status not in _DONE:
            if is_holder:
                self._give_up(request_id, f"the request has ended: {request.status}")
            return None
        # This number may include tokens of steps that are still in flight. The tokens of the prompt have all run.
        computed = request.num_computed_tokens
        tokens = computed if self._has_states else min(computed, request.num_prompt_tokens)
        try:
            if not is_holder:
                return self._connector.pointer(holder, tokens) if holder else None
            blocks, first_blocks = _without_null(self._select(block_ids))
            prompt = prompt_of(request, tokens)
            return self._connector.params(request_id, prompt, blocks, tokens, first_blocks=first_blocks)
        except TransferError:
            logger.exception("request %r: its params cannot be made, so no reader can get its pages", request_id)
            if is_holder:
                self._give_up(request_id, "its params could not be made")
            return None

    def _give_up(self, request_id: str, reason: str) -> None:
        """Ends the lease of a request that has ended."""
        self._connector.abort(request_id, reason)
        self._leases.over(request_id)

    def close(self) -> None:
        """Stops the handshake server. Safe to call twice."""
        self._connector.close()
        self._prefixes.close()


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Returns how many tokens each request of a step has before it: at its first step, those found in a cache."""
    cached = output.scheduled_cached_reqs
    found = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return found | {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}


def _is_source(params: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Returns whether a request's blocks are to be offered to a reader.

    A request that also names a source is refused, so its blocks are not offered.
    """
    if not isinstance(params, dict) or params.get("do_remote_decode") is not True:
        return False
    return params.get("do_remote_prefill") is None or params["do_remote_prefill"] is False


def _without_null(block_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Removes the null blocks at the beginning of each group.

    A null block stands for a block that a window no longer covers. The function returns the other blocks of each group,
    and the number of null blocks that were removed from each group.
    """
    first_blocks = [next((at for at, block in enumerate(group) if block != _NULL), len(group)) for group in block_ids]
    return [list(group[first:]) for group, first in zip(block_ids, first_blocks, strict=True)], first_blocks


def prompt_of(request: Request, num_tokens: int) -> Prompt:
    """Returns the first tokens of a request, its salt, and the keys of its adapter, images and embeddings.

    The request's KV depends on nothing else, because vLLM's block hashes have the same inputs. Here each input belongs
    to a position instead of a block. An adapter is represented by its name and a digest of its files, because they may
    have another path on the other side. An image or embedding is represented by vLLM's identifier, a hash of its
    content and of the model's name.
    """
    # A list that is first converted to an `array` takes a third of the time of a direct conversion.
    token_ids = np.array(array("i", request.all_token_ids[:num_tokens]), np.int32)
    named = [(0, f"adapter {request.lora_request.lora_name}")] if request.lora_request else []
    named += [(one.mm_position.offset, f"input {one.identifier}") for one in request.mm_features]
    keys = [(position, name.encode(errors="surrogatepass")) for position, name in named]
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds[:num_tokens].contiguous().view(torch.uint8).numpy()
        keys += [(position, b"row " + hashlib.sha256(row).digest()) for position, row in enumerate(rows)]
    adapters = (named_adapter(request.lora_request),) if request.lora_request else ()
    return Prompt(token_ids, request.cache_salt or "", tuple(keys), adapters)
