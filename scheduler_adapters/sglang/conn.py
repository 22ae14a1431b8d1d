"""SGLang's transfer manager, sender, receiver and bootstrap server, implemented with our leases and pulls.

SGLang's own base classes provide the states and timeouts of a room, the HTTP rendezvous with its heartbeats, and the
agreement of ranks in each poll. A room is SGLang's number for a request. In SGLang's own backends, prefill writes pages
to decode. Here decode reads them: a sender offers its pages under a lease, and a receiver pulls them.
"""

from __future__ import annotations

import ctypes
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from kvcache.endpoints.addresses import in_endpoint
from scheduler_adapters.sglang.cache import PagewireCache
from scheduler_adapters.sglang.engine import building, caches, check_supported, new_engine_id, worker_config
from scheduler_adapters.sglang.leases import Computed, FollowerLeases, RoomLeases
from scheduler_adapters.sglang.pulls import Destination, RoomPulls
from scheduler_adapters.sglang.ranks import RankFollower, RankLeader
from scheduler_adapters.sglang.rooms import RoomClient, RoomServer, endpoint
from scheduler_adapters.sglang.settings import read_settings
from scheduler_adapters.sglang.weights import UnflushedTree, served_weights
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.prompt import Prompt
from transfer.wire.secret import fleet_keys

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs

STATES: Any = KVPoll
"""The states of a room. SGLang annotates them as enum members, but they are plain numbers."""
_INT32 = (1 << 31) - 1


class PagewireKVManager(CommonKVManager):
    """The transfers of one rank, on either side. SGLang creates the object.

    Raises:
        InvalidEngineError: a setting, a model or a topology is not supported; the message names it.
    """

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        self.leases: RoomLeases | FollowerLeases | None = None
        self.pulls: RoomPulls | None = None
        self._queue = building.get()
        check_supported(self._queue, args)
        self._settings = read_settings()
        self._keyring = fleet_keys("SGLang", self._settings.secret)[1]
        self._weights = served_weights()
        is_ours = isinstance(self._queue.scheduler.tree_cache, PagewireCache)  # it keeps versions apart by itself
        self._tree = None if is_ours else UnflushedTree(self._queue.scheduler)
        self._senders: weakref.WeakSet[PagewireKVSender] = weakref.WeakSet()
        self._worker: NixlConnectorWorker | None = None
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # SGLang's own socket, which this backend does not use
        if disaggregation_mode == DisaggregationMode.DECODE:
            self._start_decode()
            self._start_heartbeat_checker_thread()
        self._weights.tell(self)

    # ---- start

    def _start_worker(self, engine_id: str) -> NixlConnectorWorker:
        found = caches(self._queue, self.attn_tp_size)
        engine = engine_id, self.attn_tp_rank, self.attn_tp_size
        self.config = worker_config(self._queue, found, self._settings, engine, self.local_ip)
        worker = NixlConnectorWorker(self.config)
        worker.register_kv_caches(found.tensors)
        return worker

    def _shared(self, made: Callable[[], Any]) -> Any:
        """Returns the same object on every rank: rank 0 creates the object by calling `made`, and broadcasts it."""
        group = get_parallel().attn_tp_group
        return group.broadcast_object(made() if self.attn_tp_rank == 0 else None, src=0)

    def register_to_bootstrap(self) -> None:
        """Starts prefill's side, and registers it with SGLang's rendezvous."""
        server = RoomServer(self.local_ip, self._keyring) if self.attn_tp_rank == 0 else None
        engine_id, port, token = self._shared(
            lambda: (new_engine_id("prefill", self.local_ip), server and server.port, secrets.token_bytes(16))
        )
        worker = self._start_worker(engine_id)
        ranks = [worker.get_handshake_metadata()]
        if self.attn_tp_size > 1:
            ranks = get_parallel().attn_tp_group.all_gather_object(ranks[0])
        if server is None:
            follower = RankFollower(endpoint(self.local_ip, port), self.attn_tp_rank, token, self._keyring)
            self.leases = FollowerLeases(worker, follower, self)
        else:
            scheduler = NixlConnectorScheduler(self.config, in_endpoint(self.local_ip), endpoint(self.local_ip, 0))
            scheduler.set_handshake_metadata(dict(enumerate(ranks)))
            leader = RankLeader(server, self.attn_tp_size, token)
            timeout_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
            self.leases = RoomLeases(worker, scheduler, server, leader, self, timeout_s)
            self.rank_port = server.port
        super().register_to_bootstrap()

    def _start_decode(self) -> None:
        worker = self._worker = self._start_worker(self._shared(lambda: new_engine_id("decode", self.local_ip)))
        worker.set_weights(self.weights)
        alone = msgspec.structs.replace(self.config, tp_rank=0, tp_size=1)
        client = RoomClient(self._keyring, AllowedPeers(self.config.allowed_peers))
        self.pulls = RoomPulls(worker, NixlConnectorScheduler(alone), client, self)

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """Makes every rank of decode ask rank 0 of prefill, which answers for all ranks of prefill.

        The transfer plan then determines which pages of which rank are read.
        """
        info.target_tp_rank = 0
        info.target_tp_ranks = info.target_cp_ranks = info.target_pp_ranks = [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    # ---- weights

    @property
    def weights(self) -> dict[str, str]:
        """Identifies the weights, as names and values that both sides compare. Empty for those of the start."""
        return {"weights": self._weights.text} if self._weights.text else {}

    def add_sender(self, sender: PagewireKVSender) -> None:
        """Tells a sender about changes of the weights from now on."""
        self._senders.add(sender)

    def on_weights(self, before: str, *, changed: bool) -> None:
        """Called when SGLang has other weights, or another name for them (`weights.py`).

        Leases that decode may read at this moment stay as they are: each names the weights of its own pages.
        """
        if self._worker is not None:
            self._worker.set_weights(self.weights)
        if not changed:
            return
        if self._tree is not None:
            self._tree.on_change()
        for sender in list(self._senders):
            sender.on_change(before)
        if self.pulls is not None:
            self.pulls.on_change(f"the weights at decode have changed: {_named(before)}, now {self.named_weights}")

    @property
    def named_weights(self) -> str:
        """The current weights, for a message."""
        return _named(self._weights.text)

    def mixed(self, request: Req, others: Sequence[str]) -> str:
        """Returns why the pages of a computed prompt belong to no version of the weights; empty if they belong to one.

        Args:
            request: the request.
            others: versions that were current while the request had pages, before the current one.
        """
        if others:
            names = ", then ".join(map(_named, [*others, self._weights.text]))
            return f"the weights changed while the prompt was computed: {names}"
        if self._tree is not None and self._tree.is_stale and request.cached_tokens:
            return (
                f"{request.cached_tokens} tokens of the prompt were found in a prefix cache that was not flushed after "
                f"the weights had changed; now {self.named_weights}: flush it (flush_cache), or use "
                f"--radix-cache-backend pagewire"
            )
        return ""

    # ---- the outcome of a room

    def step(self) -> None:
        """Handles messages and events that have arrived, without waiting.

        Called in each iteration of the scheduler's loop.
        """
        if self.leases is not None:
            self.leases.step()
        if self.pulls is not None:
            self.pulls.step()

    def room_wanted(self, room: int) -> None:
        """Tells SGLang that decode has requested the room, so that prefill may compute its prompt."""
        self.update_status(room, STATES.WaitingForInput)

    def room_loading(self, room: int) -> None:
        """Tells SGLang that the room's pages are being read."""
        self.update_status(room, STATES.Transferring)

    def room_read(self, room: int) -> None:
        """Tells SGLang that decode has read all pages of the room."""
        self.update_status(room, STATES.Success)

    room_loaded = room_read

    def room_failed(self, room: int, reason: str) -> None:
        """Tells SGLang that the room's pages will not be read. If several reasons are reported, the first is kept."""
        if self.request_status.get(room) not in {None, KVPoll.Failed, KVPoll.Success}:
            self.record_failure(room, reason)
            self.update_status(room, STATES.Failed)

    def prefill_gone(self, address: str) -> None:
        """Forgets the connections to the process at `address`, which has exited.

        The next request asks the rendezvous for the new address.
        """
        with self.connection_lock:
            pool: dict[str, Any] = self.connection_pool  # a dict of lists, despite SGLang's annotation
            for key, infos in list(pool.items()):
                if any(endpoint(info["rank_ip"], info["rank_port"]) == address for info in infos):
                    del pool[key]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:  # noqa: ARG002  (only for backends that write)
        """Returns True once nothing can write to the pages of a failed request any more."""
        return self.pulls is None or self.pulls.is_over(bootstrap_room)

    def shutdown(self) -> None:
        """Ends every lease and load."""
        for side in (self.leases, self.pulls):
            if side is not None:
                side.shutdown()

    # ---- SGLang's metadata row of a room

    def read_row(self, index: int) -> tuple[bytes, ...]:
        """Returns a room's row of SGLang's metadata buffers, one entry per buffer."""
        return tuple(
            ctypes.string_at(pointer + index * size, size)
            for pointer, size in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True)
        )

    def write_row(self, index: int, row: Sequence[bytes]) -> None:
        """Writes a row into SGLang's metadata buffers.

        Raises ValueError if the sizes of the row's entries differ from the sizes of our buffers.
        """
        sizes = list(self.kv_args.aux_item_lens)
        if [len(data) for data in row] != sizes:
            raise ValueError(
                f"prefill's rows of metadata have {[len(data) for data in row]} bytes, but decode expects {sizes}: "
                f"both sides need the same model, speculative decoding and options of metadata"
            )
        for pointer, size, data in zip(self.kv_args.aux_data_ptrs, sizes, row, strict=True):
            ctypes.memmove(pointer + index * size, data, size)


class PagewireKVSender(CommonKVSender):
    """A request at prefill. Its pages are offered to decode when all of them are computed."""

    kv_mgr: PagewireKVManager
    aux_index: int  # `init` sets this attribute before anything is sent
    request: Req  # set by a hook (`plugin.py`)

    def __init__(
        self,
        mgr: PagewireKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._pages: list[int] = []
        self._num_tokens = 0
        self._is_offered = False
        self._others: list[str] = []  # earlier weights that some of the pages may have been computed with
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._leases.open(bootstrap_room)
        mgr.add_sender(self)

    def on_change(self, before: str) -> None:
        """Called when the weights have changed."""
        if self.request.kv.holds_kv and not self._is_offered:
            self._others.append(before)

    @property
    def _leases(self) -> RoomLeases | FollowerLeases:
        leases = self.kv_mgr.leases
        assert leases is not None  # noqa: S101  (SGLang makes senders only at prefill)
        return leases

    def send(
        self,
        kv_indices: NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object | None = None,  # noqa: ARG002  (for backends that read the indices later)
    ) -> None:
        """Adds the pages of a chunk of the prompt.

        After the last chunk, all pages of the request are offered to decode.
        """
        if self.conclude_state in {KVPoll.Success, KVPoll.Failed}:
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        self._pages += np.asarray(kv_indices).tolist()
        self._num_tokens += num_kv_tokens or 0
        self._record_transfer_indices(kv_indices, state_indices)
        self.curr_idx += len(kv_indices)
        if self.curr_idx < self.num_kv_indices:
            return
        blocks, firsts = [self._pages], [0]
        for pages in state_indices or ():  # `state_indices` has the last pages of the sliding window
            end = -(-self._num_tokens // self.kv_mgr.config.groups[1].block_size)
            blocks.append(np.asarray(pages).tolist())
            firsts.append(end - len(blocks[-1]))
        self._is_offered = True
        if reason := self.kv_mgr.mixed(self.request, self._others):
            self.kv_mgr.room_failed(self.bootstrap_room, reason)
            return
        # the weights are named here and not by the worker, because a lease outlives a change of the weights
        prompt = prompt_of(self.request)._replace(named=tuple(self.kv_mgr.weights.items()))
        row = self.kv_mgr.read_row(self.aux_index)
        self._leases.offer(self.bootstrap_room, Computed(blocks, firsts, self._num_tokens, row, prompt))
        self.kv_mgr.update_status(self.bootstrap_room, STATES.Transferring)

    def abort(self) -> None:
        """Ends the request. No reader reads its pages after this call."""
        super().abort()
        self._leases.close(self.bootstrap_room, "aborted at prefill")

    def clear(self) -> None:
        """Ends a request whose pages SGLang will release next. No reader reads the pages after this call."""
        super().clear()
        with self.kv_mgr.failure_lock:
            reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "given up at prefill")
        self._leases.close(self.bootstrap_room, reason)


class PagewireKVReceiver(CommonKVReceiver):
    """A request at decode. It asks the prefill server at once. It reads pages once both sides have reserved them."""

    kv_mgr: PagewireKVManager
    bootstrap_room: int  # never None, because the server is disaggregated
    request: Req  # set by a hook (`plugin.py`)

    def init(self, prefill_dp_rank: int) -> None:
        """Asks the prefill process for the room. SGLang has determined the process before this call."""
        self.kv_mgr.step()  # connections that were lost are dropped first, so that new ones are opened
        super().init(prefill_dp_rank)
        if self.conclude_state == STATES.Failed or not self.bootstrap_infos:
            return
        infos: Any = self.bootstrap_infos
        info = infos[0]
        self._pulls.want(self.bootstrap_room, endpoint(info["rank_ip"], info["rank_port"]), prompt_of(self.request))

    @property
    def _pulls(self) -> RoomPulls:
        pulls = self.kv_mgr.pulls
        assert pulls is not None  # noqa: S101  (SGLang makes receivers only at decode)
        return pulls

    def _register_kv_args(self) -> bool:
        return True  # prefill needs to know nothing about our memory

    def send_metadata(
        self,
        kv_indices: NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: NDArray[np.int32] | None = None,
    ) -> None:
        """Starts to read into the request's pages, which SGLang has allocated by now.

        Despite its name, the method sends nothing.
        """
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("loads into host pages are not supported")
        index = int(aux_index or 0)
        blocks = [np.asarray(kv_indices).tolist(), *(np.asarray(pages).tolist() for pages in state_indices or ())]
        firsts: list[int | None] = [(decode_prefix_len or 0) // self.kv_mgr.config.groups[0].block_size]
        self._pulls.place(
            self.bootstrap_room,
            Destination(
                blocks,
                firsts + [None] * (len(blocks) - 1),
                decode_prefix_len or 0,
                lambda row: self.kv_mgr.write_row(index, row),
            ),
        )
        self.init_time = time.time()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:  # noqa: ARG002
        self._pulls.give_up(self.bootstrap_room, "aborted at decode")

    def clear(self) -> None:
        """Forgets a request that SGLang has finished."""
        super().clear()
        self._pulls.forget(self.bootstrap_room)


class PagewireKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's rendezvous server. It does not compare page sizes, because those of the two sides may differ."""

    page_size = property(lambda self: None, lambda self, value: None)  # noqa: ARG005


def _named(weights: str) -> str:
    return weights or "as at the start"


def prompt_of(req: Req) -> Prompt:
    """Returns the tokens and the salt of a request, on which its KV depends. They are the same on both servers.

    SGLang replaces an image with tokens made from its hash. An adapter's number differs between servers, so the prompt
    does not include it. Therefore a router must send a request with an adapter only to servers that have this adapter.
    """
    tokens = np.concatenate([np.asarray(ids, np.int64) for ids in (req.origin_input_ids, req.output_ids)])
    return Prompt((tokens & _INT32).astype(np.int32), req.cache_salt or "")
