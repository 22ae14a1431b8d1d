"""`DecodeScheduler`: accepts requests, has prefill processes compute their prompts, pulls the pages, and decodes.

In one attempt, a prefill process computes the prompt of a request, and this process pulls the pages. A request holds
its pages from `import_block_table` on. No other request can find these pages before `commit_import`. The manager gives
these pages to no other request before the pull's last event, because a READ may still write to them. Therefore a pull
can outlive its attempt. If an attempt fails, its import is cancelled at once, but the manager takes the pages back only
when no transfer of the pull is in flight.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvcache.errors import AlreadyClaimedError, KVCacheError
from scheduler_adapters.errors import RefusedError
from scheduler_adapters.loop import Output, ServingLoop, finish_reason
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.prefill_router import PrefillConnection, own_pages, renewed
from scheduler_adapters.service.requests import (
    DecodeRequest,
    DecodeTimes,
    Importing,
    Recent,
    span_of,
    spec_of,
)
from scheduler_adapters.service.reserving import recommended, reserve
from scheduler_adapters.service.sockets import MAX_UNREAD, FrontendQueue
from transfer.pull.pull_state import PullEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache.replica.block_table import BlockTable
    from kvcache.replica.copier import ImportProof
    from scheduler_adapters.base import PulledPages
    from scheduler_adapters.service.sockets import Awaited, Context, Socket
    from transfer.pull.exchange import ExchangeEvent, PageExchange
    from transfer.wire.keys import Keyring

MAX_ATTEMPTS = 3
MAX_REFUSALS = 16
MAX_OPEN = 4096
"""The limit of open requests, which equals the number of lease words of a prefill process."""
_EXPIRE_S = 0.01


class DecodeScheduler:
    """Serves one frontend. Single-threaded.

    Args:
        name: name of this process.
        loop: the loop that decodes. It also computes a prompt again if a preemption has lost its pages.
        exchange: pulls pages into the pool of the loop's manager.
        context: the ZMQ context of the sockets to the prefill processes.
        prefills: endpoints of the prefill processes. A request goes to the one with the fewest prompt tokens to
            compute.
        frontend: a socket to the process that submits requests. The scheduler sends `Tokens` messages to it.
        max_unread: how many messages the frontend may leave unread. If there are more, all requests of this process
            fail.
        max_open: the most requests that may be open. Any further request is refused.
        chunkwise: whether to pull the first pages while the rest of the prompt is still computed.
        times: time limits of the phases.
        clock: a monotonic clock, in seconds.
        keyring: keys for the connections to prefill processes; None for plain sockets.
        trace: whether to create a trace span for each hand-over (`transfer.spans`).
        weights: names the weights of the model. Only prefill processes of equal weights are asked.

    Attributes:
        counts: counters by name. "late": messages that were repeated, or that belong to an attempt that is over.
            "retries": attempts that failed and were followed by another. "failed": requests that ended with an error.
            "pulled": pages that were pulled. "reused": pages that were not pulled, because this process had them
            cached.
        frontend: queue of messages to the frontend. While its `is_deaf` is set, submit no request.
        draining: whether the process refuses every new request.
        connections: the connections to the prefill processes.
    """

    def __init__(
        self,
        name: str,
        loop: ServingLoop[PulledPages],
        exchange: PageExchange,
        context: Context,
        prefills: Sequence[str],
        frontend: Socket,
        *,
        max_unread: int = MAX_UNREAD,
        max_open: int = MAX_OPEN,
        chunkwise: bool = True,
        times: DecodeTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
        trace: bool = False,
        weights: str = "",
    ) -> None:
        self._trace = trace
        self._weights, self._is_paused = weights, False
        self.name = name
        self.counts: Counter[str] = Counter()
        self.draining = False
        self._loop = loop
        self._manager = loop.manager
        self._exchange = exchange
        self.frontend = FrontendQueue(frontend, max_unread)
        self._chunkwise = chunkwise
        self._times = times or DecodeTimes()
        self._clock = clock
        hello = msg.Hello(reader=name, incarnation=exchange.incarnation)
        self._connect = partial(PrefillConnection, context, hello=hello, clock=clock, keyring=keyring)
        self.connections = [self._connect(endpoint) for endpoint in prefills]
        self._max_open = max_open
        self._requests: dict[str, DecodeRequest] = {}
        self._unasked: dict[str, DecodeRequest] = {}  # requests not yet sent to any prefill process
        # For each replica: the requests that wait there for free pages, in the order in which they were offered. Each
        # request is stored with the number of its attempt, because an entry from an earlier attempt is no longer valid.
        self._arrived: list[deque[tuple[DecodeRequest, int]]] = [deque() for _ in range(self._manager.num_replicas)]
        # One counter serves all requests, so that a reused request id gets new attempt numbers.
        self._attempts = itertools.count(1)
        self._submitted: Recent[int] = Recent()
        self._expire_at = 0.0

    @property
    def open_requests(self) -> int:
        """The number of open requests, unfinished pulls, and leases on pages that peers asked for by digest."""
        keys = {request.key for request in list(self._requests.values())} | self._exchange.open_pulls
        return len(keys) + self._exchange.lending.num_leases

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
        return [*(socket for prefill in self.connections for socket in prefill.sockets), *self._exchange.sockets]

    # ---- messages from the frontend

    def submit(self, message: msg.Submit) -> None:
        """Accepts a request. A repeated submission is dropped.

        A request that can never fit, or that exceeds the limit of open requests, fails at once. Others are unaffected.
        """
        if message.serial and not self._submitted.add(message.serial):
            self.counts["late"] += 1
            return
        name, serial, spec = message.request_id, message.serial, spec_of(message)
        try:
            if name in self._requests:
                raise AlreadyClaimedError(f"request {name!r} is already open")
            if self.draining or self._is_paused or len(self._requests) >= self._max_open:
                why = f"has {self._max_open} open requests, its limit"
                why = "is draining" if self.draining else "is about to change its weights" if self._is_paused else why
                raise RefusedError(f"request {name!r} is refused: decode process {self.name!r} {why}")
            self._loop.context_for(spec)
        except KVCacheError as error:
            again = isinstance(error, RefusedError)
            news = msg.Tokens(request_id=name, finished="error", error=str(error), serial=serial, elsewhere=again)
            self.frontend.send(news)
            return
        request = DecodeRequest.of(message, spec, next(self._attempts), self._clock() + self._times.wait_s)
        request.weights = self._weights
        request.span = span_of(message, self.name) if self._trace else None
        self._requests[name] = self._unasked[name] = request

    def abort(self, request_id: str, serial: int = 0) -> None:
        """Cancels a request in any phase; the frontend receives `cancelled`. A no-op if the request is over.

        A `serial` selects one submission, even if it has not arrived yet.
        """
        if serial and self._submitted.add(serial):  # the submission may arrive later, and is then dropped
            self.frontend.send(msg.Tokens(request_id=request_id, finished="cancelled", serial=serial))
            return
        request = self._requests.get(request_id)
        if request is not None and serial in (0, request.serial):
            self._give_up(request, "cancelled by the client", tell_prefill=True)
            self._finish(request, "cancelled")

    def drain(self) -> None:
        """Refuses each new request from now on, and lends no more pages."""
        self.draining = True
        self._exchange.lending.stop()

    def pause(self) -> None:
        """Refuses each new request from now on, until `resume`."""
        self._is_paused = True

    def resume(self, weights: str) -> None:
        """Accepts requests again, with the weights of this name. No request may be open."""
        self._is_paused, self._weights = False, weights

    def follow(self, prefills: Sequence[str]) -> None:
        """Connects to the prefill processes at these endpoints. Connections to live processes are kept."""
        self.connections = renewed(self.connections, prefills, self._connect)

    # ---- one round of the main loop

    def poll(self) -> bool:
        """Handles messages and events, starts pulls, and runs one step. Returns whether there was work; never waits.

        Raises:
            EngineClosedError: the transfer thread has died, so this process cannot continue.
        """
        busy = False
        if self.frontend.flush():
            self._give_up_frontend()
        for prefill in self.connections:
            for message in prefill.poll():
                self._on_message(prefill, message)
                busy = True
            self._on_losses(prefill)
        for happened in self._exchange.poll():
            self._on_event(happened)
            busy = True
        self._expire()
        self._ask()
        self._admit()
        for output in self._loop.step():
            self._on_output(output)
            busy = True
        return busy or self._loop.is_running

    def stats(self) -> msg.Stats:
        """Checks the manager's page counts (`check`), then returns the counters."""
        self._manager.check()
        return self.counters()

    def counters(self) -> msg.Stats:
        """Returns the counters. Safe from any thread. Some values may be one step older than others."""
        return msg.Stats(
            name=self.name,
            role="decode",
            pages_held=self._manager.num_held_blocks,
            open_requests=self.open_requests,
            phases=Counter(self.phases.values()),
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            preemptions=self._loop.preemptions,
            pages_pulled=self.counts["pulled"],
            pages_reused=self.counts["reused"],
            bytes_pulled=self._exchange.totals()[0],
            pull_seconds=self._exchange.pull_seconds,
            retries=self.counts["retries"],
            failed=self.counts["failed"],
            malformed=sum(prefill.malformed for prefill in self.connections),
            late=self.counts["late"],
        )

    def close(self) -> None:
        """Closes the connections. Safe to call twice."""
        for prefill in self.connections:
            prefill.close()

    # ---- messages from prefill processes

    def _ask(self) -> None:
        there = [prefill for prefill in self.connections if prefill.serves(self._weights)]
        if self._is_paused and not there:
            self._hand_back()
        for request in list(self._unasked.values()) if there else ():
            own = None if request.sources else own_pages(self._manager, self._exchange, request.new_context())
            if request.ask(there, self._times.prefill_s, chunkwise=self._chunkwise, own=own):
                request.move("asked", self._clock() + self._times.prefill_s)
                del self._unasked[request.request_id]

    def _hand_back(self) -> None:
        """Gives the requests that no prefill process computes back to the frontend.

        This process is about to change its weights, and the last prefill process of the present weights was lost or has
        changed its own. The requests would wait for it in vain, and the change for them.
        """
        for request in list(self._unasked.values()):
            request.blame(f"no prefill process has the weights that decode process {self.name!r} has until its change")
            self._finish(request, "error", elsewhere=True)

    def _on_message(self, prefill: PrefillConnection, message: msg.ToDecode) -> None:
        if not isinstance(message, msg.PagesOffer | msg.Failed):
            return  # the connection has handled the message; after a `Rejected`, the attempt ends at its deadline
        request = self._requests.get(message.request_id)
        now = (message.attempt, prefill)
        if request is None or (request.attempt, request.prefill) != now or request.phase == "decoding":
            self._on_late(prefill, message)
        elif isinstance(message, msg.Failed):
            self._fail(request, message.reason, final=message.final, tell_prefill=False, refused=message.elsewhere)
        elif request.offer is not None and request.offer.source != message.source:
            self._fail(request, f"prefill process {prefill.name!r} has offered two leases for one attempt")
        elif request.offers.has_had(message):
            self.counts["late"] += 1
        elif foreign := request.foreign(message):
            self._fail(request, f"prefill process {prefill.name!r} has offered the pages of another prompt: {foreign}")
        elif message.token is not None and not self._loop.knows(message.token):
            reason = f"prefill process {prefill.name!r} sent token {message.token}, which the model does not know"
            self._fail(request, reason)
        else:
            request.offers.add(message)
            while (offer := request.next_offer()) is not None:
                self._on_offer(request, offer)

    def _on_late(self, prefill: PrefillConnection, message: msg.PagesOffer | msg.Failed) -> None:
        self.counts["late"] += 1
        if isinstance(message, msg.PagesOffer):  # no request waits for this offer, so its pages need not be kept
            prefill.cancel(message.request_id, message.attempt, "too late")

    def _on_offer(self, request: DecodeRequest, offer: msg.PagesOffer) -> None:
        if request.phase == "asked":
            self._take_over(request, offer)
        if offer.token is not None and not self._on_first_token(request, offer.token):
            return
        if request.importing is not None:
            importing, last = request.importing, offer.token is not None
            self._extend(request, importing, [offer.table], importing.pending.tokens[1], last=last)

    def _take_over(self, request: DecodeRequest, offer: msg.PagesOffer) -> None:
        """Chooses a replica for the offered pages, and opens the pull there.

        From now on that replica renews the lease. The request waits until the replica has enough free pages.
        """
        patience_s = self._times.prefill_s + self._times.room_s
        request.move("offered", self._clock() + patience_s)
        request.replica = recommended(self._manager, request.new_context())
        self._exchange.open_pull(request.replica, request.key, offer.source, patience_s + self._times.pull_s)
        self._arrived[request.replica].append((request, request.attempt))

    def _on_first_token(self, request: DecodeRequest, token: int) -> bool:
        """Sends the first token to the frontend at once. Returns whether the request continues."""
        request.relieve()
        request.emitted.append(token)
        length = len(request.spec.prompt) + len(request.emitted)
        reason = finish_reason(request.spec, length, token, self._loop.runner.eos_token_ids)
        if reason:
            self._give_up(request, "ended with its first token", tell_prefill=True)
            self._finish(request, reason, (token,))
            return False
        self.frontend.send(request.news((token,)))
        request.deadline = self._clock() + (self._times.room_s if request.phase == "offered" else self._times.pull_s)
        if request.importing is not None:
            request.importing.context.update(token)
        return True

    # ---- pages

    def _admit(self) -> None:
        """Reserves pages for the requests whose pages were offered, in the order of the offers. Starts their pulls.

        Pages that are cached here are not pulled. While a preempted request waits in the loop, no pages are reserved
        here, because the preempted request takes precedence.
        """
        for queue in self._arrived:
            while queue and not self._loop.num_waiting:
                request, attempt = queue[0]
                offer = request.offer
                if offer is None or (request.phase, request.attempt) != ("offered", attempt):
                    queue.popleft()  # the request ended while it waited
                    continue
                first, *further = request.offers.tables
                last = offer.token is not None
                try:
                    context = request.new_context()
                    pending = reserve(self._manager, context, request.replica, first, last=last and not further)
                except KVCacheError as error:
                    queue.popleft()
                    self._fail(request, str(error), final=True)
                    continue
                if pending is None:
                    break
                queue.popleft()
                importing = request.importing = Importing(context, pending)
                request.move("pulling", self._clock() + (self._times.pull_s if last else self._times.prefill_s))
                start = pending.tokens[0]
                self.counts["reused"] += start // self._manager.page_size
                self._extend(request, importing, further, start, last=last)

    def _extend(
        self, request: DecodeRequest, importing: Importing, tables: Sequence[BlockTable], start: int, *, last: bool
    ) -> None:
        """Extends an import by the pages that `tables` name, and reads the import's tokens from `start` on.

        With `last`, the prompt has been computed completely, so no further table follows.
        """
        request.offers.imported()
        pending = importing.pending
        try:
            for at, table in enumerate(tables, 1):
                is_last = last and at == len(tables)
                self._manager.extend_import(importing.context, pending, table, last=is_last)
        except KVCacheError as error:
            self._fail(request, str(error))
        else:
            self._read(request, importing, last=last, new=start < pending.tokens[1])

    def _read(self, request: DecodeRequest, importing: Importing, *, last: bool, new: bool) -> None:
        """Reads the pages that were added to the import since the last call.

        With `last`, a fence follows: it reads the lease words, which shows that the lease was still valid when the data
        arrived.

        If no page had to be read at all, the request joins the loop at once.
        """
        if last and not importing.pending.needs_copy:
            self._give_up_source(request, "all of it was cached here", tell_prefill=True)
            self._join(request, importing, None)
        elif last or new:
            self._exchange.read(request.replica, request.key, importing.pending, last=last)

    def _join(self, request: DecodeRequest, importing: Importing, proof: ImportProof | None) -> None:
        """Commits the import of a request. The loop then runs the first token that was not imported."""
        self._manager.commit_import(importing.context, importing.pending, proof)
        request.importing = None
        self._loop.adopt(request.spec, importing.context)
        request.move("decoding", self._clock() + self._times.decode_s)

    def _on_event(self, happened: ExchangeEvent) -> None:
        """Passes the outcome of a pull to the attempt that started it, and to no other."""
        if not isinstance(happened.event, PullEvent):
            return  # pages that were lent to another process belong to no request here
        key, error = happened.event.key, happened.event.error
        request = self._requests.get(key.rpartition("#")[0])
        if request is None or request.key != key or request.phase not in ("offered", "pulling"):
            return
        if error:
            self._fail(request, error)
        elif request.importing is not None:
            self.counts["pulled"] += len(request.importing.pending.written)
            request.fenced(happened.event.times)
            self._join(request, request.importing, happened.proof)

    def _on_output(self, output: Output) -> None:
        request = self._requests[output.request_id]
        tokens = () if output.token is None else (output.token,)
        if output.finished:
            request.blame(output.error)
            self._finish(request, output.finished, tokens)
        else:
            self.frontend.send(request.news(tokens))

    # ---- the end, or another attempt

    def _on_losses(self, prefill: PrefillConnection) -> None:
        while prefill.lost:
            reason = prefill.lost.pop(0)
            for request in [one for one in self._requests.values() if one.prefill is prefill]:
                if request.phase != "decoding":
                    self._fail(request, reason, tell_prefill=False)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + _EXPIRE_S
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            self._fail(request, f"timed out in phase {request.phase!r} on decode process {self.name!r}")

    def _give_up_frontend(self) -> None:
        """Ends every request, because the frontend has left too many messages unread.

        The reason is queued for the frontend as the last message of each request.
        """
        reason = f"the frontend of decode process {self.name!r} has left {self.frontend.max_unread} messages unread"
        for request in list(self._requests.values()):
            self._give_up(request, reason, tell_prefill=True)
            request.blame(reason)
            self._finish(request, "error")

    def _fail(
        self,
        request: DecodeRequest,
        reason: str,
        *,
        final: bool = False,
        tell_prefill: bool = True,
        refused: bool = False,
    ) -> None:
        """Handles a failed attempt at a request.

        The request continues with another attempt, unless the failure is `final` or this was the last attempt allowed.
        A few attempts that prefill processes have `refused` before they began do not count.
        """
        again = request.phase in ("asked", "offered", "pulling")
        self._give_up(request, reason, tell_prefill=tell_prefill)
        request.reasons.append(reason)
        request.refusals += refused
        counted = len(request.reasons) - min(request.refusals, MAX_REFUSALS)
        if final or not again or counted >= MAX_ATTEMPTS:
            tried = len(request.reasons)
            request.blame(reason if tried == 1 else f"{tried} attempts: " + "; ".join(request.reasons))
            self._finish(request, "error")
            return
        self.counts["retries"] += 1
        request.begin_anew(next(self._attempts), self._clock() + self._times.wait_s)
        self._unasked[request.request_id] = request

    def _give_up(self, request: DecodeRequest, reason: str, *, tell_prefill: bool) -> None:
        """Releases what a request holds in this process and in its prefill process.

        Pages that a pull may still write stay reserved until that pull has ended.
        """
        if request.phase in ("asked", "offered", "pulling"):
            self._give_up_source(request, reason, tell_prefill=tell_prefill)
        if request.phase == "decoding":
            self._loop.abort(request.request_id)
        importing, request.importing = request.importing, None
        if importing is not None:
            self._manager.release(request.request_id)
            self._manager.cancel_import(importing.pending)

    def _give_up_source(self, request: DecodeRequest, reason: str, *, tell_prefill: bool) -> None:
        request.relieve()
        if request.offer is not None:
            self._exchange.cancel_pull(request.replica, request.key, reason)
        if tell_prefill and request.prefill is not None:
            request.prefill.cancel(request.request_id, request.attempt, reason)

    def _finish(
        self, request: DecodeRequest, finished: msg.Finished, tokens: tuple[int, ...] = (), *, elsewhere: bool = False
    ) -> None:
        """Ends a request. With `elsewhere`, it has not failed: another process can take it."""
        request.move("over")
        del self._requests[request.request_id]
        self._unasked.pop(request.request_id, None)
        self.counts["failed"] += finished == "error" and not elsewhere
        self.frontend.send(msgspec.structs.replace(request.news(tokens, finished), elsewhere=elsewhere))
