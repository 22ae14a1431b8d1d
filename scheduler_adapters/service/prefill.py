"""`PrefillScheduler`: computes prompts for decode processes, and keeps the pages under leases until they are read.

A request holds its pages while it runs. Afterwards its lease holds them until the lease has ended on every shard
(`LeaseOver`). A request is therefore released as soon as its prompt has been computed or the request has been given up.
No page is freed while its lease word, which readers check, is valid. The loop never preempts a running prompt, because
a prompt gets pages for all of its tokens when it is admitted.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from kvcache.errors import InvalidRequestError, KVCacheError
from kvcache.replica.block_table import BlockTable
from kvcache.replica.context import TextContext
from scheduler_adapters.base import PulledPages
from scheduler_adapters.errors import MessageError, ServiceError
from scheduler_adapters.loop import Output, Request, ServingLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.peer_prefixes import PeerPrefixes
from scheduler_adapters.service.requests import PrefillRequest, PrefillTimes, Recent, prompt_of
from scheduler_adapters.service.sockets import Awaited, Socket, received
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.lease import LEASE_WORDS
from transfer.pull.replica import LeaseOver, Offered

_EXPIRE_S = 0.01
# In seconds. A lease is usually granted within a fraction of a millisecond, while the model still runs. If the model
# has finished first, it is better to wait this long for the lease than to tell the reader only after the loop's next
# step.
_OFFERED_S = 5e-3


@dataclass(slots=True)
class _DecodeConnection:
    """A decode process, identified by its connection.

    If a decode process believes that this process has died, it opens a new connection.
    """

    name: str
    incarnation: str
    requests: dict[tuple[str, int], PrefillRequest] = field(default_factory=dict[tuple[str, int], PrefillRequest])
    # attempts that have begun or were cancelled
    begun: Recent[tuple[str, int]] = field(default_factory=Recent[tuple[str, int]])


class PrefillScheduler:
    """Serves the decode processes that connect. Single-threaded.

    Args:
        name: name of this process.
        loop: runs the prompts.
        exchange: leases the pages of the loop's manager.
        socket: a bound ROUTER (`sockets.bind_router`).
        times: time limits of the phases.
        clock: a monotonic clock, in seconds.
        weights: names the weights of the model. Prompts for readers of other weights are refused.

    Attributes:
        counts: counters by name. "malformed": messages that could not be decoded. "late": messages that were repeated,
            or that belong to an attempt that is over. "failed": requests that ended before all of their pages had been
            read.
        draining: whether the process refuses every new request.
        peers: asks other processes for cached pages of a prompt.
    """

    def __init__(
        self,
        name: str,
        loop: ServingLoop[PulledPages],
        exchange: PageExchange,
        socket: Socket,
        *,
        times: PrefillTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        weights: str = "",
    ) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.draining = self._is_paused = False
        self._loop = loop
        self._exchange = exchange
        self._socket = socket
        self._times = times or PrefillTimes()
        self._clock = clock
        self.peers = PeerPrefixes(loop.manager, exchange, clock)
        self._serial = itertools.count()
        self._readers: dict[bytes, _DecodeConnection] = {}
        self._requests: dict[str, PrefillRequest] = {}
        # requests that hold pages which have not been offered to the reader yet
        self._untold: dict[str, PrefillRequest] = {}
        self._expire_at = 0.0
        loop.on_admit, self.peers.on_pages = self._on_admit, loop.meet
        replicas = range(loop.manager.num_replicas)
        self._welcome = msg.Welcome(
            name=name,
            incarnation=exchange.incarnation,
            engines=tuple(exchange.engine_id(replica) for replica in replicas),
            address=exchange.address,
            page_size=loop.manager.page_size,
            weights=weights,
        )

    @property
    def open_requests(self) -> int:
        """The number of requests that run or are held for a reader, open pulls, and leases on pages by digest."""
        return len({*list(self._requests)} | self._exchange.open_pulls) + self._exchange.lending.num_leases

    @property
    def phases(self) -> dict[str, str]:
        """The phase of each open request. Safe from any thread."""
        return {key: request.phase for key, request in list(self._requests.items())}

    @property
    def is_idle(self) -> bool:
        """Whether the process has nothing to do until a message arrives.

        An idle process has no open request, no step to run and no open pull. No peer waits for an answer to a query for
        pages.
        """
        asked = self._exchange.open_pulls or self._exchange.lending.is_asked
        return not (self._requests or self._loop.has_work or asked)

    @property
    def has_drained(self) -> bool:
        """Whether the process drains, no request is open, and no step runs.

        A step can still run after the last request of its batch has ended.
        """
        return self.draining and not (self.open_requests or self._loop.has_work)

    @property
    def is_at_rest(self) -> bool:
        """Whether no request is open, and no step runs. Pages may still be lent."""
        return not (self._requests or self._loop.has_work)

    @property
    def sockets(self) -> list[Awaited]:
        """The sockets to wait on while `poll` finds nothing to do."""
        return [self._socket, *self._exchange.sockets]

    def poll(self) -> bool:
        """Handles messages and events, and runs one step. Returns whether there was work. Never waits long.

        Raises:
            EngineClosedError, ServiceError: the transfer thread has died or does not respond, so this process cannot
                continue.
        """
        busy = False
        for frames in received(self._socket):
            self._on_frames(frames)
            busy = True
        busy |= self._take_events()
        self._expire()
        if self._loop.num_running + self._loop.num_waiting == 1 and self.peers.begin_waiting():
            return busy
        for output in self._loop.step():
            self._on_output(output)
            busy = True
        self._offer_chunks()
        waiting = [one for one in self._untold.values() if one.phase == "leasing" and one.token is not None]
        for replica in {one.replica for one in waiting}:
            self._exchange.wait(replica, _OFFERED_S)
            busy |= self._take_events()
        return busy or self._loop.is_running

    def drain(self) -> None:
        """Refuses new requests from now on.

        Open requests still run. Their pages are kept until they have been read or their lease has ended.
        """
        if not self.draining:
            self.draining = True
            self._exchange.lending.stop()
            self._tell(msg.Leaving())

    def pause(self) -> None:
        """Refuses new requests from now on, until `resume`, and tells the readers."""
        self._is_paused = True
        self._tell(msg.Leaving())

    def resume(self, weights: str) -> None:
        """Accepts requests again, with the weights of this name, and tells the readers. No request may be open."""
        self._is_paused, self._welcome = False, msgspec.structs.replace(self._welcome, weights=weights)
        self._tell(self._welcome)
        if self.draining:
            self._tell(msg.Leaving())

    def _tell(self, message: msg.ToDecode) -> None:
        for reader in list(self._readers):
            self._send(reader, message)

    def stats(self) -> msg.Stats:
        """Checks the manager's page counts (`check`), then returns the counters."""
        self._loop.manager.check()
        return self.counters()

    def counters(self) -> msg.Stats:
        """Returns the counters. Safe from any thread. Some values may be one step older than others."""
        manager = self._loop.manager
        return msg.Stats(
            name=self.name,
            role="prefill",
            pages_held=manager.num_held_blocks,
            open_requests=self.open_requests,
            phases=Counter(self.phases.values()),
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            prompt_tokens=manager.metrics.prompt_tokens,
            cached_tokens=manager.metrics.cache_tokens,
            preemptions=self._loop.preemptions,
            pages_pulled=self.peers.pages_pulled,
            bytes_pulled=self._exchange.totals()[0],
            pull_seconds=self._exchange.pull_seconds,
            prefixes={**self.peers.counts},
            taken_s=self.peers.estimate.taken_s,
            misjudged_s=self.peers.estimate.misjudged_s,
            failed=self.counts["failed"],
            malformed=self.counts["malformed"],
            late=self.counts["late"],
        )

    # ---- messages from readers

    def _on_frames(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            message = msg.decode_frames(rest, msg.ToPrefill)
        except MessageError as error:
            self._reject(sender, str(error))
            return
        reader = self._readers.get(sender)
        match message:
            case msg.Hello():
                self._welcome_reader(sender, message)
            case msg.Prefill() if reader is not None:
                self._start(sender, reader, message)
            case msg.Cancel() if reader is not None:
                self._on_cancel(reader, message)
            case msg.Prefill() | msg.Cancel():
                self._send(sender, msg.Rejected(reason="say Hello first", stranger=True))
            case _:
                pass  # `Rejected` is never answered; otherwise two processes could reject each other for ever

    def _reject(self, sender: bytes, reason: str) -> None:
        self.counts["malformed"] += 1
        self._send(sender, msg.Rejected(reason=msg.clipped(reason)))

    def _welcome_reader(self, sender: bytes, hello: msg.Hello) -> None:
        """Registers a new connection of a decode process, and ends the requests of its earlier connections."""
        known = self._readers.get(sender)
        if known is not None and (known.name, known.incarnation) != (hello.reader, hello.incarnation):
            self._lose(sender, f"decode process {known.name!r} calls itself {hello.reader!r} now")
        self._readers.setdefault(sender, _DecodeConnection(hello.reader, hello.incarnation))
        self._send(sender, self._welcome)
        if self.draining or self._is_paused:
            self._send(sender, msg.Leaving())
        if sender not in self._readers:
            return  # the `Hello` is late: its connection has already been replaced and closed
        reason = f"decode process {hello.reader!r} has reconnected"
        for identity in [key for key, reader in self._readers.items() if reader.name == hello.reader and key != sender]:
            self._lose(identity, reason)
            # The old connection is usually closed by now. If the decode process still uses it, this message tells the
            # process that its attempts were given up. Without the message, the process would wait for them.
            self._send(identity, msg.Rejected(reason=msg.clipped(reason), stranger=True))

    def _lose(self, sender: bytes, reason: str) -> None:
        """Drops a reader. The reader's requests are no longer computed, and their pages are no longer kept for it."""
        reader = self._readers.pop(sender, None)
        for request in [] if reader is None else list(reader.requests.values()):
            self._end(request, reason, silent=True)

    def _start(self, sender: bytes, reader: _DecodeConnection, message: msg.Prefill) -> None:
        request_id, attempt = message.request_id, message.attempt
        if not reader.begun.add((request_id, attempt)):
            self.counts["late"] += 1
            return
        for other in [one for one in reader.requests.values() if one.request_id == request_id]:
            if other.attempt >= attempt:
                self.counts["late"] += 1
                return
            self._end(other, f"attempt {attempt} has begun", silent=True)
        key = f"{reader.name}/{request_id}#{attempt}.{next(self._serial)}"
        by = self._clock() + min(message.within_s, self._times.compute_s)
        request = PrefillRequest(
            request_id,
            attempt,
            "fetching",
            by,
            compute_by=by,
            reader=sender,
            key=key,
            chunkwise=message.chunkwise,
            new_pages=message.new_pages,
            prompt=prompt_of(message.prompt, message.cache_salt),
        )
        try:
            if why := self._refusal(message):
                self._fail(request, f"prefill process {self.name!r} {why}", elsewhere=True)
                return
            if len(self._requests) >= LEASE_WORDS:
                self._fail(request, f"prefill process {self.name!r} has {LEASE_WORDS} requests open")
                return
            asked = Request(key, message.prompt, 1, hold_pages=True, cache_salt=message.cache_salt)
            context = self._loop.context_for(asked)
        except KVCacheError as error:
            request.final = True
            self._fail(request, str(error).replace(repr(key), repr(request_id)))
        else:
            self._requests[key] = reader.requests[request_id, attempt] = request
            if not self.peers.begin(asked, context, message.kv_sources):
                self._queue(asked, context)

    def _refusal(self, message: msg.Prefill) -> str:
        """Returns why this process refuses a prompt that another process may accept; empty if it does not."""
        if self.draining:
            return "is draining"
        if self._is_paused:
            return "is about to change its weights"
        ours = self._welcome.weights
        differ = message.weights != ours
        return f"has the weights {ours or '-'}, but the request has {message.weights or '-'}" if differ else ""

    def _queue(self, asked: Request, context: TextContext) -> None:
        """Queues a request for the loop, which computes all pages that are not cached when the request's turn comes."""
        request = self._requests[asked.request_id]
        request.move("queued", request.compute_by)
        self._loop.add(asked, context)

    def _on_cancel(self, reader: _DecodeConnection, message: msg.Cancel) -> None:
        request = reader.requests.get((message.request_id, message.attempt))
        if request is None:
            self.counts["late"] += 1
            reader.begun.add((message.request_id, message.attempt))  # its `Prefill` message may still arrive
        else:
            self._end(request, message.reason, silent=True)

    # ---- progress of requests

    def _on_admit(self, key: str, replica: int, cached: int) -> None:
        """Requests a lease when a request is admitted. The lease is then usually granted before the model has run."""
        request = self._requests.get(key)
        if request is None:
            return  # this request belongs to another user of the loop
        self._untold[key] = request
        request.replica, request.cached_tokens, request.admitted = replica, cached, self._clock()
        self.peers.admitted(key, replica, cached)
        request.source = self._exchange.offer(key, self._times.lease_s, running=True)
        # There are as many lease words as there may be open requests. If no word is free, another user of the exchange
        # holds leases too.
        if request.source is None:
            self._fail(request, f"prefill process {self.name!r} has no lease word free on replica {replica}")
        else:
            request.move("leasing", self._clock() + self._times.step_s)

    def _on_output(self, output: Output) -> None:
        """Handles the end of a prompt. Its row is freed, but its pages stay held by the lease."""
        request = self._requests.get(output.request_id)
        if request is None or request.phase == "ending":
            return
        if output.token is None:
            self._end(request, output.error.replace(repr(request.key), repr(request.request_id)), final=True)
            return
        computed, took_s = len(request.prompt.token_ids) - request.cached_tokens, self._clock() - request.admitted
        request.token = output.token
        request.table = self._loop.manager.block_table(request.key, first_page=self._known_pages(request))
        if request.phase in ("computing", "offered"):
            self._offer(request)
        # The offer is sent first, because the reader is waiting for it. If the reader is gone, the offer could not be
        # sent, and the request has already been given up.
        self._loop.abort(request.key)
        self.peers.computed(request.key, computed, took_s, request.cached_tokens)

    def _offer_chunks(self) -> None:
        """Offers the full pages of prompts that are still being computed."""
        for request in list(self._untold.values()):
            if request.chunkwise and request.token is None and request.phase in ("computing", "offered"):
                self._offer(request)

    def _table(self, request: PrefillRequest) -> BlockTable | None:
        """Returns the block table of the pages that the reader may read now; None if it would name no new page."""
        if request.table is not None:
            return request.table
        try:
            first = self._known_pages(request)
            table = self._loop.manager.block_table(request.key, full_pages=True, first_page=first)
        except InvalidRequestError:
            return None  # the first chunk has not run yet
        return table if table.num_tokens > request.told else None

    def _known_pages(self, request: PrefillRequest) -> int:
        """Returns how many leading pages the next offer may leave out, because an earlier offer has named them."""
        return request.told // self._loop.manager.page_size if request.new_pages else 0

    def _take_events(self) -> bool:
        events = self._exchange.poll()
        for replica_event in events:
            self._on_event(replica_event)
        for waiting in self.peers.poll():
            self._queue(*waiting)
        return bool(events)

    def _on_event(self, happened: ExchangeEvent) -> None:
        match happened.event:
            case Offered(request_id=key, error=error):
                request = self._requests[key]
                if error:
                    self._fail(request, error)
                elif request.phase == "leasing" and request.token is None:
                    request.move("computing", request.compute_by)
                elif request.phase == "leasing":
                    self._offer(request)
            case LeaseOver(request_id=key, reason=reason):
                request = self._requests[key]
                if reason == "read":
                    self._forget(request)
                else:
                    self._fail(request, reason)
            case _:
                if (waiting := self.peers.on_event(happened)) is not None:
                    self._queue(*waiting)

    def _offer(self, request: PrefillRequest) -> None:
        """Tells the reader which pages it may read now. Sends nothing if no page is new to the reader."""
        table, source = self._table(request), request.source
        if table is None or source is None:
            return
        if request.token is not None:
            request.move("held")
            del self._untold[request.key]
        elif request.phase == "computing":
            request.move("offered", request.compute_by)
        request.told = table.num_tokens
        self._exchange.record_checksums(request.replica, table.groups)
        offer = msg.PagesOffer(
            request_id=request.request_id,
            attempt=request.attempt,
            source=source,
            table=table,
            prompt_digest=request.digest_of(table.num_tokens),
            token=request.token,
            cached_tokens=request.cached_tokens,
        )
        self._send(request.reader, offer)
        if request.token is None:
            request.digest_ahead()
        else:
            # This comes last, because it wakes the transfer thread. That thread would compete with this one for the
            # interpreter.
            self._exchange.start_clock(source)

    # ---- the end

    def _expire(self) -> None:
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + _EXPIRE_S
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            if request.phase == "ending":
                ago_s, name = self._times.step_s, request.request_id
                raise ServiceError(f"request {name!r}: its lease was revoked {ago_s} s ago, but has not ended")
            self._end(request, f"timed out in phase {request.phase!r} on prefill process {self.name!r}")

    def _end(self, request: PrefillRequest, reason: str, *, silent: bool = False, final: bool = False) -> None:
        """Gives a request up. Its computation stops at once. The request itself ends when its lease has ended."""
        request.silent, request.final = request.silent or silent, request.final or final
        self._loop.abort(request.key)
        if request.source is None:
            self._fail(request, reason)
        elif request.phase != "ending":
            request.blame(reason)
            request.move("ending", self._clock() + self._times.step_s)
            self._exchange.revoke(request.source, reason)

    def _fail(self, request: PrefillRequest, reason: str, *, elsewhere: bool = False) -> None:
        """Ends a request that no longer has a lease, and tells its reader why.

        If several reasons were recorded, the message has the first reason.
        """
        self.counts["failed"] += 1
        reason = request.blame(reason)
        self._forget(request)
        if not request.silent:
            attempt, clipped = request.attempt, msg.clipped(reason)
            failed = msg.Failed(request_id=request.request_id, attempt=attempt, reason=clipped, final=request.final)
            self._send(request.reader, msgspec.structs.replace(failed, elsewhere=elsewhere))

    def _forget(self, request: PrefillRequest) -> None:
        request.move("over")
        self.peers.drop(request.key)
        self._requests.pop(request.key, None)
        self._untold.pop(request.key, None)
        reader = self._readers.get(request.reader)
        if reader is not None:
            reader.requests.pop((request.request_id, request.attempt), None)
        self._loop.abort(request.key)

    def _send(self, reader: bytes, message: msg.ToDecode) -> None:
        try:
            self._socket.send_multipart([reader, msg.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the reader is gone, or its queue is full
            self._lose(reader, f"a decode process cannot be reached: {error}")
