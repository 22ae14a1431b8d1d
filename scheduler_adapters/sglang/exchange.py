"""`PageExchanger`: cached pages of SGLang's scheduler, lent to peers and fetched from them.

A request that names peers (`kv_hints`) stays in SGLang's queue while they are asked, for a bounded time, and while its
pages are pulled. SGLang then finds them in the cache. Whatever fails, it computes the prompt.

SGLang may run a batch while it plans the next one. That batch may still write to pages that are free by now, and may
still compute pages that are published by now. What is planned while a batch runs is therefore handed to the transfer
thread one turn of the loop later, when SGLang has processed the batch's result.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.runtime_context import get_exec, get_parallel

from kvcache.endpoints import addresses
from kvcache.layout import PageLayout, kv_kind
from scheduler_adapters.checkpoints import digest_of_checkpoint
from scheduler_adapters.peers.hints import next_sources, sources_in
from scheduler_adapters.peers.peer_blocks import PeerBlocks, give_back
from scheduler_adapters.sglang.cache import PagewireCache
from scheduler_adapters.sglang.cached_pages import CachedPages, QueuedPrompt
from scheduler_adapters.sglang.delayed import DelayedWork
from scheduler_adapters.sglang.engine import config_of, model_name, new_engine_id
from scheduler_adapters.sglang.pools import caches_of
from scheduler_adapters.sglang.settings import Settings
from scheduler_adapters.sglang.weights import served_weights
from transfer.connector.config import GroupConfig
from transfer.connector.lending import BlockLending
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import InvalidEngineError
from transfer.pull.asking import PageAsks
from transfer.pull.bell import Bell
from transfer.pull.lease import LENT_WORDS
from transfer.pull.lending import LendingLimits
from transfer.pull.seals import new_table_key
from transfer.pull.source import KVSource
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.handshake import HandshakeClient

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger("pagewire.sglang")

_WAIT_S = 100e-6
_WHAT = "PAGEWIRE_EXCHANGE"


def exchange_pages(cache: PagewireCache, context: TreeCacheBuildContext, settings: Settings) -> None:
    """Lets a scheduler's cache lend pages and ask for some, at the address in `PAGEWIRE_EXCHANGE`.

    Raises:
        InvalidEngineError: the scheduler has a feature that this does not support; the message names it.
    """
    parallel, place = get_parallel(), addresses.split(settings.exchange)
    arguments: Any = context.server_args
    if place is None:
        raise InvalidEngineError(f"{_WHAT} is {settings.exchange!r}: tcp://HOST:PORT is needed")
    refused = {
        f"--tp-size {context.tp_size}": context.tp_size > 1,
        f"--pp-size {parallel.pp_size}": parallel.pp_size > 1,
        f"context parallelism of {parallel.attn_cp_size}": parallel.attn_cp_size > 1,
        "speculative decoding": bool(arguments.speculative_algorithm),
        "--enable-memory-saver, which takes the memory of the registered pool away": (
            get_exec().features.enable_memory_saver
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise InvalidEngineError(f"{_WHAT} does not support {what}")
    cache.exchange = PageExchanger(cache, context, settings, (place[0], int(place[1]) + (parallel.dp_rank or 0)))


class PageExchanger:
    """The pages of one scheduler. Only its thread may use this object.

    Args:
        cache: SGLang's prefix cache.
        context: what SGLang says about the scheduler.
        settings: our settings.
        place: the host at which peers reach this process, and the port; 0 for a free one.

    Raises:
        InvalidEngineError: the pool is not supported.
        HandshakeError: the address cannot be bound.
    """

    def __init__(
        self, cache: PagewireCache, context: TreeCacheBuildContext, settings: Settings, place: tuple[str, int]
    ) -> None:
        host, port = addresses.in_endpoint(place[0]), place[1]
        model: Any = context.model_config
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        heads = model.get_total_num_kv_heads()
        found = caches_of(pool, tp_size=1, total_kv_heads=heads, window=0, asked=_WHAT)
        name = model_name(context.server_args, model)
        config = config_of(found, name, settings, (new_engine_id("cache", place[0]), 0, 1), place[0])
        self._config = msgspec.structs.replace(config, compatibility=_agreed(model))
        key, kind = new_table_key(), _kind(config.groups[0])
        self._worker = NixlConnectorWorker(self._config, table_key=key)
        self._worker.register_kv_caches(found.tensors)
        self._connector = NixlConnectorScheduler(self._config, host, f"tcp://{host}:{port}")
        self._cache = cache
        pages = CachedPages(cache)
        self._bell = Bell()
        limits = LendingLimits(int(settings.lend * cache.pool.num_pages), [LENT_WORDS if settings.lend else 0])
        self._lending = BlockLending(self._connector, pages, limits, 1, (), self._bell.ring, kind=kind, table_key=key)
        self._connector.lent = self._lending.answer
        self._connector.set_handshake_metadata({0: self._worker.get_handshake_metadata()})
        self._peers = self._reader(pages, kind, settings.ask_s)
        self._queued: dict[str, QueuedPrompt] = {}
        self._delayed = DelayedWork()
        self._sleeper: Any = None
        where = config.engine_id, self._connector.address
        logger.info("engine %s at %s exchanges cached pages with peers that have %s", *where, self.compatibility)

    @property
    def compatibility(self) -> dict[str, str]:
        """What must be equal at a peer, by name."""
        return self._config.fingerprint()

    def _reader(self, pages: CachedPages, kind: str, ask_s: float) -> PeerBlocks[QueuedPrompt]:
        secure = None if (keyring := self._connector.keyring) is None else keyring.secure_client
        client = HandshakeClient(secure, allowed=AllowedPeers(self._config.allowed_peers))
        refuse = give_back(self._connector)
        key = self._connector.key
        asks = PageAsks(client, self._config.engine_id, key, self.compatibility, kind, give_back=refuse)
        return PeerBlocks(self._connector, pages, asks, ask_s)

    @property
    def source(self) -> KVSource:
        """This scheduler, as requests name it in `kv_sources`."""
        return KVSource(self._connector.address, (self._config.engine_id,))

    @property
    def counts(self) -> dict[str, int]:
        """Pages lent so far, tokens pulled so far, and prompts by the outcome of their questions."""
        return {"lent_pages": self._lending.blocks_lent, **self._peers.counts}

    def step(self, scheduler: Any) -> None:
        """Handles what has arrived, without waiting. Called once in each turn of the scheduler's loop.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        self._wake(scheduler)
        self._bell.hear()
        batch = scheduler.last_batch
        is_running = scheduler.enable_overlap and batch is not None and not batch.is_empty()
        self._run(1 if is_running else 0)

    def _run(self, turns: int) -> None:
        self._lending.poll()
        self._peers.poll()
        self._peers.returned(self._peers.marker)
        self._peers.measure()
        for work in self._delayed.turn(self._connector.build_metadata(), turns):
            self._worker.start_load_kv(work)
        progress = self._connector.update(0, self._worker.take_output())
        self._lending.update(progress)
        self._peers.update(progress)

    def _wake(self, scheduler: Any) -> None:
        """Makes a question end the sleep of an idle scheduler (`--sleep-on-idle`)."""
        if self._sleeper is None and (sleeper := scheduler.idle_sleeper) is not None:
            self._sleeper = sleeper
            if (poller := getattr(sleeper, "poller", None)) is not None:
                poller.register(self._bell.fileno())

    @contextmanager
    def holding_back(self, scheduler: Any) -> Generator[None]:
        """Hides the requests that wait for pages of peers from SGLang's choice of the next batch."""
        queue: list[Req] = scheduler.waiting_queue
        self._forget({str(req.rid) for req in queue})
        hidden = {id(req) for req in queue if self._waits(req)}
        if hidden:
            scheduler.waiting_queue = [req for req in queue if id(req) not in hidden]
        try:
            yield
        finally:
            left: list[Req] = scheduler.waiting_queue
            stays, known = hidden | {id(req) for req in left}, {id(req) for req in queue}
            if hidden:
                new = [req for req in left if id(req) not in known]
                scheduler.waiting_queue = [req for req in queue if id(req) in stays] + new
            for req in queue:
                if id(req) not in stays:  # it runs now, which is measured
                    self._peers.waits(self._queued[str(req.rid)], req.prefix_len)

    def _waits(self, req: Req) -> bool:
        prompt = self._queued.get(str(req.rid))
        if prompt is None or prompt.req is not req:
            prompt = self._queued[str(req.rid)] = QueuedPrompt(self._cache, req)
            if req.output_ids or req.input_embeds is not None or req.positional_embed_overrides is not None:
                return False
            if (given := sources_in(req.kv_hints)) is not None:
                sources = next_sources(self.source, given)
                req.customized_info = {**(req.customized_info or {}), "kv_sources": sources}
            self._peers.begin(prompt)
        return self._peers.is_waiting(prompt.request_id) and self._peers.waits(prompt, self._cache.cached_tokens(req))

    def _forget(self, queued: set[str]) -> None:
        """Forgets the requests that neither wait nor run any more."""
        for name, prompt in list(self._queued.items()):
            if name not in queued and not prompt.req.kv.holds_kv:
                del self._queued[name]
                self._peers.drop(name)

    def end_all(self, reason: str) -> None:
        """Ends all leases and pulls. Afterwards no page is read or written. Waits for READs that are in flight."""
        self._lending.end_all(reason)
        self._peers.forget(reason)
        while self._lending.num_leases or self._peers.holds_blocks:
            self._run(0)
            time.sleep(_WAIT_S)
        self._queued.clear()

    def close(self) -> None:
        """Ends everything. Safe to call twice."""
        self._peers.close()
        self._connector.close()
        self._worker.shutdown()
        self._bell.close()


def _agreed(model: Any) -> dict[str, str]:
    """Returns what a peer must agree with besides the model's name and what a token stores.

    The pages' digests cover the name of the weights. Without one, they are those of the start.
    """
    text = model.hf_text_config
    rope = {name: getattr(text, name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    start = {} if served_weights().text else {"weights at the start": digest_of_checkpoint(str(model.model_path))}
    return {"computed in": str(model.dtype).removeprefix("torch."), "rope": json.dumps(rope, sort_keys=True)} | start


def _kind(group: GroupConfig) -> str:
    """Returns what a token stores, in the words of `PageExchange`."""
    layout = PageLayout(
        dtype=group.dtype,
        itemsize=getattr(torch, group.dtype).itemsize,
        num_layers=len(group.layers),
        sides=1 if group.kind == "mla" else 2,
        first_head=0,
        num_heads=group.num_kv_heads,
        page_size=group.block_size,
        head_dim=group.head_dim,
        order="layer,side,token,head,dim",
    )
    return kv_kind([layout])
