"""Prefill and decode as two servers: each drives its own loop and manager, and a transfer thread moves the pages.

Who holds what: prefill holds the pages of a request from its first token until the notification of the READ has come,
or decode says `Done`. Decode holds the pages that it reads into from `import_block_table` on; nobody else can find them
before `commit_import`. A READ that fails gives them back only when nothing of it is in flight any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from kvcache.context import TextContext
from kvcache.errors import AlreadyClaimedError, KVCacheError, NoFreeRowError
from scheduler_adapters import messages as msg
from scheduler_adapters.errors import WorkerError
from scheduler_adapters.loop import Output, Request, ServingLoop, finish_reason
from scheduler_adapters.transfer_thread import Posted, TransferThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache.block_table import BlockTable
    from kvcache.replica import PendingImport
    from transfer.metadata import KVTransferEngineMetadata


def received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The frames of every message that has come, without waiting."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class PrefillServer:
    """Computes prompts for the decode servers that ask, and keeps the pages until they have been read.

    Args:
        loop: serves the prompts.
        thread: runs the transfer engine over the loop's pages.
        socket: a bound ROUTER, to which decode servers connect.
    """

    def __init__(self, loop: ServingLoop, thread: TransferThread, socket: zmq.Socket[bytes]) -> None:
        self._loop = loop
        self._thread = thread
        self._socket = socket
        self._engine = thread.call(lambda engine: engine.metadata)
        self._reader: dict[str, bytes] = {}  # request to the decode server that asked for it

    @property
    def open_requests(self) -> int:
        """Requests on their way, or held for their reader."""
        return len(self._reader)

    def poll(self) -> bool:
        """Take messages and events in, and run one step. Whether there was anything to do; never waits."""
        self._thread.raise_failure()
        busy = False
        for sender, data in received(self._socket):
            self._on_message(sender, msg.decode(data))
            busy = True
        while self._thread.events:
            event = self._thread.events.popleft()
            self._let_go(event.request_id)
            busy = True
        for output in self._loop.step():
            self._hand_over(output)
            busy = True
        return busy or self._loop.num_running > 0

    def stats(self) -> msg.Stats:
        """Counters now."""
        manager = self._loop.manager
        manager.check()
        return msg.Stats(
            role="prefill",
            pages_held=manager.total_num_pages - manager.num_free_blocks,
            open_requests=self.open_requests,
            prompt_tokens=manager.metrics.prompt_tokens,
            cached_tokens=manager.metrics.cache_tokens,
            preemptions=self._loop.preemptions,
        )

    def _on_message(self, sender: bytes, message: msg.AnyMessage) -> None:
        match message:
            case msg.Hello(engine=engine):
                self._thread.call(lambda ours: ours.connect(engine))
                self._send(sender, msg.Hello(engine=self._engine))
            case msg.Prefill():
                self._start(sender, message)
            case msg.Pulling(request_id=request_id, transfer=transfer) if request_id in self._reader:
                self._thread.watch(request_id, transfer)
            case msg.Done(request_id=request_id):
                self._thread.unwatch(request_id)
                self._let_go(request_id)
            case _:
                pass  # of a request that is over: it needs no answer

    def _start(self, sender: bytes, message: msg.Prefill) -> None:
        request_id = message.request_id
        request = Request(request_id, message.prompt, 1, hold_pages=True, cache_salt=message.cache_salt)
        try:
            self._loop.add(request)
        except KVCacheError as error:
            self._send(sender, msg.PrefillFailed(request_id=request_id, error=str(error)))
        else:
            self._reader[request_id] = sender

    def _hand_over(self, output: Output) -> None:
        """The first token is there: tell decode, with the table of the pages that wait for it."""
        request_id = output.request_id
        if output.token is None:
            self._send(self._reader.pop(request_id), msg.PrefillFailed(request_id=request_id, error=output.error))
            return
        table = self._loop.manager.block_table(request_id)
        self._send(self._reader[request_id], msg.Prefilled(request_id=request_id, token=output.token, table=table))

    def _let_go(self, request_id: str) -> None:
        if self._reader.pop(request_id, None) is not None:
            self._loop.abort(request_id)

    def _send(self, reader: bytes, message: msg.AnyMessage) -> None:
        # A ROUTER drops what it cannot deliver: a decode server that is gone asks for nothing any more.
        self._socket.send_multipart([reader, msg.encode(message)])


@dataclass(slots=True, eq=False)
class _Arrival:
    """A request that prefill has handed over, until it joins the decode batch."""

    request: Request
    context: TextContext
    table: BlockTable
    pending: PendingImport | None = None


class DecodeServer:
    """Takes requests in, has them prefilled, pulls their pages, and generates the rest.

    Args:
        loop: decodes; prompts whose pages it lost to preemption it computes itself.
        thread: runs the transfer engine over the loop's pages.
        prefill: a DEALER, connected to the prefill server.
        front: a socket to whoever submits requests; `Tokens` are sent to it.
    """

    def __init__(
        self, loop: ServingLoop, thread: TransferThread, prefill: zmq.Socket[bytes], front: zmq.Socket[bytes]
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._prefill = prefill
        self._front = front
        self._source: KVTransferEngineMetadata | None = None
        self._open: set[str] = set()
        self._prefilling: dict[str, Request] = {}
        self._arrived: deque[_Arrival] = deque()
        self._pulling: dict[str, _Arrival] = {}
        self._pages_pulled = self._pages_reused = 0
        engine, self._bytes_per_page = thread.call(lambda ours: (ours.metadata, ours.bytes_per_page * ours.tp))
        self._send(msg.Hello(engine=engine))

    @property
    def connected(self) -> bool:
        """Whether the two engines know each other. Requests before that wait at prefill's socket, and are not lost."""
        return self._source is not None

    @property
    def open_requests(self) -> int:
        """Requests on their way."""
        return len(self._open)

    def submit(self, message: msg.Submit) -> None:
        """Have a prompt prefilled. What can never fit fails at once, and alone."""
        request = Request(message.request_id, message.prompt, message.max_new_tokens, cache_salt=message.cache_salt)
        try:
            if request.request_id in self._open:
                raise AlreadyClaimedError(f"request {request.request_id!r} is on its way already")
            self._loop.context_for(request)
        except KVCacheError as error:
            self._front.send(msg.encode(msg.Tokens(request_id=request.request_id, finished="error", error=str(error))))
            return
        self._open.add(request.request_id)
        self._prefilling[request.request_id] = request
        self._send(msg.Prefill(request_id=request.request_id, prompt=message.prompt, cache_salt=message.cache_salt))

    def poll(self) -> bool:
        """Take messages and events in, start imports, run one step. Whether there was anything to do; never waits."""
        self._thread.raise_failure()
        busy = False
        for (data,) in received(self._prefill):
            self._on_message(msg.decode(data))
            busy = True
        while self._thread.events:
            self._on_event(self._thread.events.popleft())
            busy = True
        self._import_arrived()
        for output in self._loop.step():
            tokens = () if output.token is None else (output.token,)
            self._tell(output.request_id, tokens, output.finished, output.error)
            busy = True
        return busy or self._loop.num_running > 0

    def stats(self) -> msg.Stats:
        """Counters now."""
        manager = self._loop.manager
        manager.check()
        return msg.Stats(
            role="decode",
            pages_held=manager.total_num_pages - manager.num_free_blocks,
            open_requests=self.open_requests,
            preemptions=self._loop.preemptions,
            pages_pulled=self._pages_pulled,
            pages_reused=self._pages_reused,
            bytes_pulled=self._pages_pulled * self._bytes_per_page,
            pull_seconds=self._thread.pull_seconds,
        )

    def _on_message(self, message: msg.AnyMessage) -> None:
        match message:
            case msg.Hello(engine=engine):
                self._thread.call(lambda ours: ours.connect(engine))
                self._source = engine
            case msg.Prefilled(request_id=request_id) if request_id in self._prefilling:
                self._take_over(self._prefilling.pop(request_id), message)
            case msg.PrefillFailed(request_id=request_id, error=error) if request_id in self._prefilling:
                del self._prefilling[request_id]
                self._tell(request_id, (), "error", error)
            case msg.Prefilled(request_id=request_id):
                self._send(msg.Done(request_id=request_id))  # nobody waits for it: its pages must not be kept
            case _:
                pass  # of a request that is over

    def _take_over(self, request: Request, message: msg.Prefilled) -> None:
        """Emit the first token at once; queue the rest of the request for its pages."""
        length = len(request.prompt) + 1
        reason = finish_reason(request, length, message.token, self._loop.runner.eos_token_ids)
        self._tell(request.request_id, (message.token,), reason)
        if reason:
            self._send(msg.Done(request_id=request.request_id))
            return
        context = TextContext(
            [*request.prompt, message.token],
            len(request.prompt) + request.max_new_tokens,
            request.request_id,
            request.cache_salt,
        )
        self._arrived.append(_Arrival(request, context, message.table))

    def _import_arrived(self) -> None:
        """Reserve pages for requests that were handed over, in order, and pull what is not cached here.

        A preempted request comes first: it had its pages already.
        """
        while self._arrived and not self._loop.num_waiting:
            arrival = self._arrived[0]
            try:
                pending = self._reserve(arrival)
            except KVCacheError as error:
                self._arrived.popleft()
                self._give_up(arrival, str(error))
                continue
            if pending is None:
                return
            self._arrived.popleft()
            self._pull(arrival, pending)

    def _reserve(self, arrival: _Arrival) -> PendingImport | None:
        """A row and pages; None, and nothing taken, where one is short."""
        manager, context = self._loop.manager, arrival.context
        replica = manager.get_or_recommend_replica(context)
        try:
            manager.external_claim(context.request_id, replica)
        except NoFreeRowError:
            return None
        pending = None
        try:
            pending = manager.import_block_table(context, arrival.table)
        finally:
            if pending is None:
                manager.release(context.request_id)
        return pending

    def _pull(self, arrival: _Arrival, pending: PendingImport) -> None:
        arrival.pending = pending
        self._pages_reused += len(arrival.table.groups[0]) - len(pending.src_pages)
        if not len(pending.src_pages):
            self._send(msg.Done(request_id=pending.request_id))
            self._join(arrival, pending)
            return
        if self._source is None:
            raise WorkerError(f"request {pending.request_id!r} was handed over before the engines were connected")
        self._pulling[pending.request_id] = arrival
        pages = (pending.src_pages.tolist(), pending.dst_pages.tolist())
        replicas = (pending.src_replica_idx, pending.replica_idx)
        self._thread.pull(pending.request_id, self._source, pages, replicas)

    def _on_event(self, event: object) -> None:
        if isinstance(event, Posted):
            self._send(msg.Pulling(request_id=event.request_id, transfer=event.transfer))
            return
        arrival = self._pulling.pop(event.request_id)
        pending = arrival.pending
        if event.error:
            self._loop.manager.cancel_import(pending)
            self._loop.manager.release(event.request_id)
            self._give_up(arrival, event.error)
            return
        self._pages_pulled += len(pending.dst_pages)
        self._join(arrival, pending)

    def _join(self, arrival: _Arrival, pending: PendingImport) -> None:
        self._loop.manager.commit_import(arrival.context, pending)
        self._loop.adopt(arrival.request, arrival.context)

    def _give_up(self, arrival: _Arrival, error: str) -> None:
        request_id = arrival.request.request_id
        self._send(msg.Done(request_id=request_id))
        self._tell(request_id, (), "error", error)

    def _tell(self, request_id: str, tokens: tuple[int, ...], finished: str | None, error: str = "") -> None:
        if finished:
            self._open.discard(request_id)
        message = msg.Tokens(request_id=request_id, tokens=tokens, finished=finished, error=error)
        self._front.send(msg.encode(message))

    def _send(self, message: msg.AnyMessage) -> None:
        self._prefill.send(msg.encode(message))
