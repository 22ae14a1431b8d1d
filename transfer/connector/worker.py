"""`NixlConnectorWorker`: one rank of an engine. It connects the step loop that runs the model with the transfer thread.

Its methods have the same names and meanings as the methods of vLLM's worker class of the same name. The class has no
code for tensor parallelism, page sizes, layouts or replicated heads. A box says where a part of a layer's KV lies in
memory, and the boxes of the two sides describe all of these properties. The transfer plan is computed from the boxes.
The step loop only hands work to the transfer thread and takes events from it. Only set-up, `take_output`,
`get_kv_connector_stats` and `shutdown` make the loop wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from kvcache.uncopied import Uncopied
from transfer.connector.cache_layout import Cache, cache_layout
from transfer.connector.config import WorkerConfig, check_config, check_groups
from transfer.connector.host_buffer import CopyBlocks, HostBuffers, needs_host_buffer
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, WorkerOutput
from transfer.connector.worker_book import WorkerBook
from transfer.errors import EngineClosedError, InvalidEngineError, InvalidTransferError
from transfer.plan.page_lists import kernel_pages
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory
from transfer.pull.replica import LeaseOffer, ReplicaTransfer
from transfer.pull.thread import TransferThread, start_thread
from transfer.stats import StatsSnapshot
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.handshake import HandshakeClient
from transfer.wire.keys import Keyring
from transfer.wire.messages import Wanted
from transfer.wire.secret import fleet_keys

_GRANT_S = 5.0
"""The longest time, in seconds, that a step waits for its leases to be granted.

A reader that asks for the pages before every rank has granted the lease is told to ask again.
"""


class NixlConnectorWorker(Uncopied):
    """Moves the pages of one rank. The object is single-threaded: only the thread of the step loop may call it.

    Args:
        config: the rank, and the layout of its caches.
        keyring: keys for the side channel. If it is None, the keys are derived from the config's shared secret; without
            a secret, the sockets are plain.
        table_key: as in `BlockLending`.

    Raises:
        InvalidEngineError: no worker can be created from the config.
    """

    def __init__(self, config: WorkerConfig, keyring: Keyring | None = None, *, table_key: bytes = b"") -> None:
        self._table_key = table_key
        self._thread: TransferThread | None = None
        self._rank: RankTransfer | None = None
        self._host: HostBuffers | None = None
        self._copy: CopyBlocks | None = None
        self._heard: TransferThread | None = None  # whose events are taken, even after `shutdown`
        self._has_news = self._is_shut = False
        self._close: Callable[[], object] | None = None
        self.config = check_config(config)
        self._key, self._keyring = fleet_keys(self._where, config.secret, config.key, keyring)
        self._book = WorkerBook(config.groups)

    def register_kv_caches(self, kv_caches: Mapping[str, Cache]) -> None:
        """Registers the caches of this rank's layers.

        After this call, other engines can read from this rank, and this rank can read from them.

        Args:
            kv_caches: the tensor of each layer, with its dimensions in the order of its group's layout. A layer may
                also have several tensors: K and V separately, or the parts of a state. The tensors must not be freed
                while a peer that may read them is alive.

        Raises:
            InvalidEngineError: the tensors do not match the config, or NIXL cannot register their device.
            AgentError: NIXL cannot be used.
        """
        self._register(kv_caches, ())

    def register_cross_layers_kv_caches(self, kv_cache: torch.Tensor, layers: Sequence[str] = ()) -> None:
        """Registers one tensor that holds the caches of several layers, for a model with one group.

        Args:
            kv_cache: the tensor. The layout of the group names its dimensions, one of which is "layer".
            layers: the layers that it holds, in order; all layers of the group if empty.

        Raises:
            InvalidEngineError: as for `register_kv_caches`; or the model has several groups.
        """
        if len(self.config.groups) != 1:
            raise InvalidEngineError(
                f"engine {self.config.engine_id!r}: it has {len(self.config.groups)} groups; "
                "a cross-layer tensor needs exactly one"
            )
        names = tuple(layers) or tuple(self.config.groups[0].layers)
        self._register({names[0]: kv_cache}, names)

    def _register(self, kv_caches: Mapping[str, Cache], cross_layer: Sequence[str]) -> None:
        if self._rank is not None:
            raise InvalidEngineError(f"{self._where}: its caches are already registered")
        memory = cache_layout(self.config, kv_caches, cross_layer)
        if needs_host_buffer(self.config, memory.device):
            host = self._host or self.initialize_host_xfer_buffer(kv_caches)
            memory = cache_layout(self.config, host.caches, cross_layer)
        self._book.whole_pages = self._host is not None
        self._start(memory)

    def _start(self, memory: ShardMemory) -> None:
        config = self.config
        identity = RankIdentity(
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            rank=config.rank,
            ranks=config.ranks,
            compatibility=config.fingerprint(),
            key=self._key,
            table_key=self._table_key,
        )
        self._rank = RankTransfer(identity, memory, checks=config.page_checks, verify=config.verify)
        secure = None if self._keyring is None else self._keyring.secure_client
        replica = ReplicaTransfer(
            [self._rank],
            HandshakeClient(secure, allowed=AllowedPeers(config.allowed_peers)),
            handshake_timeout_s=config.timing.handshake,
            heartbeat_s=config.timing.heartbeat,
            dead_after_s=config.timing.dead_after,
            idle_s=config.timing.idle,
        )
        self._thread = start_thread(replica)
        self._heard = self._thread
        # The finalizer also closes the thread when the worker is garbage-collected or the interpreter exits, because a
        # NIXL agent that is still open would then abort the process.
        self._close = weakref.finalize(self, self._thread.close)

    def set_weights(self, weights: Mapping[str, str]) -> None:
        """Tells which weights the engine has. Call this after `register_kv_caches`, and whenever the weights change.

        From then on, this rank refuses leases that were computed with other weights. The scheduler's side ends the
        leases that were granted before.

        Args:
            weights: names and values, such as a digest of the checkpoint. They must not depend on the rank.
        """
        self._running().replica.weights = self._book.output.weights = dict(weights)

    def initialize_host_xfer_buffer(self, kv_caches: Mapping[str, Cache]) -> HostBuffers:
        """Allocates host memory as large as the caches.

        This host memory will be registered with NIXL in place of the caches.

        `register_kv_caches` calls this if pages on the device must go through host memory.
        """
        self._host = HostBuffers(self.config, kv_caches, self._copy)
        return self._host

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        """Sets the function that copies pages between the device and host buffers.

        Has no effect without host buffers.
        """
        self._copy = copy_operation
        if self._host is not None:
            self._host.copy = copy_operation

    def get_handshake_metadata(self) -> bytes:
        """Returns this rank's metadata for the engine's handshake server.

        Raises:
            EngineClosedError: no caches are registered, or the worker was shut down.
        """
        return self._running().replica.ranks[0].metadata

    def add_remote_agent(self, address: str, ranks: Sequence[bytes]) -> str:
        """Loads an engine whose metadata did not arrive through the handshake. Returns its id.

        Args:
            address: ZMQ endpoint at which the engine answers pings. It must be spelled as in the requests that will
                name the engine.
            ranks: the result of `get_handshake_metadata` on each of its ranks.

        Raises:
            TransferError: a setting of the engine does not match ours; the message has both values. None of the
                engine's ranks stays loaded.
        """
        return self._running().call(lambda replica: replica.directory.add(address, ranks))

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Starts the work of one step. At a source, this grants leases, starts their clocks and ends them.

        At a reader, it begins, continues and cancels loads, and tells other engines which of their leases will not be
        read.

        An error in one load fails only that load. `get_failed_loads` reports it.

        Raises:
            InvalidTransferError: the step names a request that still has an earlier lease or load. No work of the step
                was started.
            EngineClosedError: the worker was shut down, or its thread has died.
        """
        thread, leases = self._running(), self._book.leases
        self._drain()
        self._book.check_new(metadata)
        for request_id, send in metadata.reqs_to_send.items():
            self._book.lease(request_id, send.lease.lease_id)
            pages = [self._pages(*group) for group in enumerate(send.block_ids)] if self.config.page_checks else None
            thread.offer(LeaseOffer(request_id, send.lease, send.engines, pages, send.running))
        for request_id in metadata.reqs_computed:
            if request_id in leases:
                thread.call_soon(ReplicaTransfer.start_clock, leases[request_id])
        for request_id, reason in metadata.reqs_not_processed.items():
            if request_id in leases:
                thread.call_soon(ReplicaTransfer.revoke, leases[request_id], reason)
        for request_id, asked in metadata.reqs_to_recv.items():
            self._load(thread, request_id, asked)
        for request_id, reason in metadata.reqs_to_cancel.items():
            if (load := self._book.find(request_id)) is not None:
                load.cancelled = True
                thread.call_soon(ReplicaTransfer.cancel, load.key, reason)
        for wanted, reason in metadata.to_give_back:
            self._give_back(thread, wanted, reason)

    def _give_back(self, thread: TransferThread, wanted: Wanted, reason: str) -> None:
        thread.call_soon(ReplicaTransfer.refuse, wanted, reason, self.config.timing.load)

    def _load(self, thread: TransferThread, request_id: str, asked: LoadRequest) -> None:
        before = self._book.find(request_id)
        if before is not None and (before.error or before.cancelled):
            # The load has failed or was cancelled. The request cannot begin a new load before this one is in
            # `received`.
            return
        load = before or self._book.begin(request_id)
        try:
            groups = self._book.ask(load, asked)
        except InvalidTransferError as error:
            self._book.fail(load, str(error), safe=before is None)
            if before is None:
                self._give_back(thread, asked.wanted, str(error))
            else:
                thread.call_soon(ReplicaTransfer.cancel, load.key, str(error))
            return
        if before is None:
            thread.pull(load.key, asked.wanted, groups, self.config.timing.load)
        elif groups is not None:
            thread.add_pages(load.key, groups, last=True)

    def _pages(self, group: int, blocks: Sequence[int]) -> list[int]:
        return kernel_pages(blocks, self.config.groups[group].block_pages).tolist()

    def save_kv_to_host(self, metadata: ConnectorMetadata) -> None:
        """Copies the blocks that `reqs_to_save` names to the host buffers.

        Must be called before the leases of these requests are granted.

        Raises:
            InvalidTransferError: a request's blocks have a different number of groups than the config.
        """
        if self._host is None:
            return
        for request_id, groups in metadata.reqs_to_save.items():
            check_groups(f"request {request_id!r}", self.config.groups, groups)
            for number, blocks in enumerate(groups):
                self._host.save(number, self._pages(number, blocks))

    def _drain(self) -> None:
        while self._heard is not None and self._heard.events:
            event = self._heard.take()
            self._has_news = True
            if not isinstance(event, PullEvent):
                self._book.on_lease(event)
            elif (load := self._book.on_pull(event)) is not None and self._host is not None:
                for number, pages in enumerate(load.pages):
                    self._host.restore(number, pages)

    def _are_granted(self) -> bool:
        """Whether every requested lease has been granted or refused."""
        if self._book.ungranted:
            self._drain()
        return not self._book.ungranted

    def _output(self) -> WorkerOutput:
        """Processes the pending events. Returns all events since the output was last taken."""
        self._drain()
        return self._book.output

    def take_output(self) -> WorkerOutput:
        """Returns all events since the last call, for the scheduler's side.

        The method first waits until the requested leases are granted or refused. The wait takes a fraction of a
        millisecond, most of it while the model runs. Without the wait, an engine might never report the leases to its
        scheduler, because an engine that becomes idle runs no further step.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        if self._thread is not None:
            self._thread.wait(self._are_granted, _GRANT_S)
        self._raise_failure()
        output, self._book.output = self._output(), WorkerOutput()
        return output

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Returns the requests that have finished on this rank since the last call, each once.

        Returns:
            Two sets of requests. The first set has the requests whose lease has ended. Their pages may be freed when
                all ranks have reported them. The second set has the requests whose load has ended, successfully or not.
                No transfer of such a load is still in flight.

        Raises:
            EngineClosedError: the transfer thread has died.
        """
        self._raise_failure()
        output = self._output()
        sent, output.sent = output.sent, {}
        received, output.received = output.received, set()
        return set(sent), received

    def get_failed_loads(self) -> dict[str, str]:
        """Returns the loads that have failed since the last call, each once, with the reason.

        The pages of such a request must not be reused before `get_finished` has returned the request as received.
        """
        output = self._output()
        failed, output.failed = output.failed, {}
        return failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the local blocks, in all groups, of the loads that have failed since the last call."""
        output = self._output()
        blocks, output.block_ids_with_errors = output.block_ids_with_errors, set()
        return blocks

    def get_kv_connector_stats(self) -> StatsSnapshot | None:
        """Returns the counters since the start and the percentiles since the last call.

        Returns None if no event has happened since that call.
        """
        self._drain()
        if not self._has_news or self._thread is None:
            return None
        self._has_news = False
        return self._thread.snapshot()

    @property
    def threads(self) -> list[TransferThread]:
        """The transfer thread of this rank, for statistics. Empty before `register_kv_caches` and after `shutdown`."""
        return [] if self._thread is None else [self._thread]

    @property
    def _where(self) -> str:
        return f"engine {self.config.engine_id!r} rank {self.config.rank}"

    def _running(self) -> TransferThread:
        if self._thread is None:
            why = "it was shut down" if self._is_shut else "no caches are registered: register_kv_caches comes first"
            raise EngineClosedError(f"{self._where}: {why}")
        return self._thread

    def _raise_failure(self) -> None:
        if self._thread is not None:
            self._thread.raise_failure()

    def shutdown(self) -> None:
        """Ends every lease and load. No byte moves after this call.

        The next `get_finished` reports the requests whose lease or load was still open.

        Safe to call twice, and after a failed start.
        """
        self._thread, self._is_shut = None, True
        rank, self._rank = self._rank, None
        if self._close is not None:
            self._close()
        elif rank is not None:
            rank.close()
