"""`PrefixExchange`: blocks by content, lent to other engines and fetched from them, as vLLM's scheduler sees it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from scheduler_adapters.peers.peer_blocks import PeerBlocks, give_back, kinds_of
from scheduler_adapters.vllm.cached_blocks import CachedBlocks
from scheduler_adapters.vllm.engine_loop import wake, watch_loop
from scheduler_adapters.vllm.options import Options
from transfer.connector.lending import KIND, BlockLending
from transfer.connector.metadata import Progress
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.pull.asking import PageAsks
from transfer.pull.lease import LENT_WORDS
from transfer.pull.lending import LendingLimits
from transfer.pull.source import KVSource
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.handshake import HandshakeClient

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger("pagewire.vllm")


class Prefixes(Protocol):
    """The calls of vLLM's scheduler that concern prefixes cached by other servers."""

    @property
    def pending(self) -> bool:
        """Whether the engine must run a step even if it has no requests."""
        ...

    def start(self, fingerprint: Mapping[str, str]) -> None:
        """Called when the workers have registered their caches. A peer must have the same `fingerprint`."""
        ...

    def see(self, request: Request) -> None:
        """Called once for each new request, also for one whose KV is not pulled."""
        ...

    def begin(self, request: Request) -> None:
        """Handles a new request that loads nothing under a lease."""
        ...

    def waits(self, request: Request, computed: int) -> bool:
        """Whether a request, of which vLLM has cached `computed` tokens, should wait for blocks of other engines."""
        ...

    def step(self) -> int:
        """Called before a step. Returns the marker that the step must carry."""
        ...

    def update(self, progress: Progress) -> None:
        """Takes out of a rank's report what is not about a request of vLLM, and handles it."""
        ...

    def returned(self, marker: int) -> None:
        """Handles the marker that has returned with a step."""
        ...

    def changed_weights(self) -> None:
        """Called when the weights have changed, and vLLM's cache may have blocks of the weights before."""
        ...

    def give_up(self, reason: str) -> None:
        """Ends everything that holds blocks. Their blocks are free after one of the next steps."""
        ...

    def ended(self, request: Request) -> KVSource | None:
        """Handles the end of a request. Returns where its KV is, for the next turn of its conversation."""
        ...

    def take_counts(self) -> Mapping[str, int]:
        """Returns counts since the last call."""
        ...

    def close(self) -> None:
        """Ends all queries. Safe to call twice."""


class NoPrefixes:
    """Nothing is lent or asked for."""

    pending = False

    def start(self, fingerprint: Mapping[str, str]) -> None:
        """Does nothing."""

    def see(self, request: Request) -> None:
        """Does nothing."""

    def begin(self, request: Request) -> None:
        """Does nothing."""

    def waits(self, request: Request, computed: int) -> bool:  # noqa: ARG002
        """Returns False."""
        return False

    def step(self) -> int:
        """Returns 0."""
        return 0

    def update(self, progress: Progress) -> None:
        """Does nothing."""

    def returned(self, marker: int) -> None:
        """Does nothing."""

    def changed_weights(self) -> None:
        """Does nothing."""

    def give_up(self, reason: str) -> None:
        """Does nothing."""

    def ended(self, request: Request) -> KVSource | None:  # noqa: ARG002
        """Returns None."""
        return None

    def take_counts(self) -> Mapping[str, int]:
        """Returns nothing."""
        return {}

    def close(self) -> None:
        """Does nothing."""


class PrefixExchange:
    """Lends vLLM's cached blocks, and fetches those of other engines.

    Args:
        connector: moves the blocks.
        manager: vLLM's block manager.
        options: the limits.
        algorithm: name of vLLM's hash.
        share: fraction of the blocks that may be lent; 0 for none.
    """

    def __init__(
        self, connector: NixlConnectorScheduler, manager: KVCacheManager, options: Options, algorithm: str, share: float
    ) -> None:
        groups = connector.config.groups
        self._connector, self._options, self._share = connector, options, share
        self._blocks = CachedBlocks(manager, groups, algorithm)
        self._kinds = kinds_of([group.window for group in groups])
        self._peers: PeerBlocks[Request] | None = None
        limits = LendingLimits(int(share * manager.block_pool.num_gpu_blocks), [LENT_WORDS if share else 0])
        self._lending = BlockLending(connector, self._blocks, limits, len(groups), self._kinds, wake)
        self._lent = 0
        if share:
            watch_loop()
            connector.lent = self._lending.answer

    def start(self, fingerprint: Mapping[str, str]) -> None:
        """See `Prefixes`."""
        config, options = self._connector.config, self._options
        if not options.ask_timeout:
            return
        secure = None if (keyring := self._connector.keyring) is None else keyring.secure_client
        client = HandshakeClient(secure, allowed=AllowedPeers(config.allowed_peers))
        asks = PageAsks(
            client,
            config.engine_id,
            self._connector.key,
            fingerprint,
            KIND,
            len(config.groups),
            self._kinds,
            give_back=give_back(self._connector),
        )
        self._peers = PeerBlocks(self._connector, self._blocks, asks, options.ask_timeout)

    @property
    def pending(self) -> bool:
        """See `Prefixes`."""
        is_busy = self._peers is not None and self._peers.is_busy
        return is_busy or self._lending.is_asked or bool(self._lending.num_leases)

    def see(self, request: Request) -> None:
        """See `Prefixes`."""
        self._blocks.see(request)

    def begin(self, request: Request) -> None:
        """See `Prefixes`."""
        if self._peers is not None:
            self._peers.begin(request)

    def waits(self, request: Request, computed: int) -> bool:
        """See `Prefixes`."""
        return self._peers is not None and self._peers.waits(request, computed)

    def step(self) -> int:
        """See `Prefixes`."""
        self._lending.poll()
        if self._peers is None:
            return 0
        self._peers.poll()
        self._peers.measure()
        return self._peers.marker

    def update(self, progress: Progress) -> None:
        """See `Prefixes`."""
        self._lending.update(progress)
        if self._peers is not None:
            self._peers.update(progress)

    def returned(self, marker: int) -> None:
        """See `Prefixes`."""
        if self._peers is not None:
            self._peers.returned(marker)

    def changed_weights(self) -> None:
        """See `Prefixes`."""
        self._blocks.changed_weights()
        self.give_up("the weights have changed")

    def give_up(self, reason: str) -> None:
        """See `Prefixes`."""
        self._lending.end_all(reason)
        if self._peers is not None:
            self._peers.forget(reason)

    def ended(self, request: Request) -> KVSource | None:
        """See `Prefixes`."""
        if self._peers is not None:
            self._peers.measure()
            self._peers.drop(request.request_id)
        self._blocks.over(request)
        pages = request.num_computed_tokens // self._blocks.page_size
        if not self._share or not pages:
            return None
        engines = (self._connector.config.engine_id,)
        return KVSource(self._connector.address, engines, pages * self._blocks.page_size)

    def take_counts(self) -> Mapping[str, int]:
        """See `Prefixes`."""
        lent, self._lent = self._lending.blocks_lent - self._lent, self._lending.blocks_lent
        tokens = 0 if self._peers is None else self._peers.counts.pop("peer_prefix_tokens", 0)
        return {"lent_blocks": lent, "peer_prefix_tokens": tokens}

    def close(self) -> None:
        """See `Prefixes`."""
        if self._peers is not None:
            self._peers.close()


def say_unfit(reason: str, options: Options, share: float) -> None:
    """Logs why nothing is lent or asked for. Raises nothing: prompts are computed as without peers."""
    if share or options.ask_timeout:
        logger.info("cached blocks are neither lent nor asked for: %s", reason)
