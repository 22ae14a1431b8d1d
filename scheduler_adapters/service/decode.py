"""`DecodeScheduler`: takes requests in, has them prefilled elsewhere, pulls their pages, and generates the rest.

Who holds what: a request holds pages here from `import_block_table` on. Nobody else can find them before
`commit_import`, and nobody else gets them before the pull's last event: until then a READ may still write there.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from kvcache.errors import AlreadyClaimedError, KVCacheError
from scheduler_adapters.errors import TooManyOpenError
from scheduler_adapters.loop import Output, Request, ServingLoop, finish_reason
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.front import MAX_UNREAD, Front
from scheduler_adapters.service.prefills import Prefills
from scheduler_adapters.service.pulls import Pulls
from scheduler_adapters.service.requests import DecodeRoom, DecodeTimes, Recent
from transfer.pull.pull_state import PullEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler_adapters.base import PulledPages
    from scheduler_adapters.service.prefill_router import PrefillLink
    from scheduler_adapters.service.sockets import Context, Socket
    from transfer.pull.exchange import ExchangeEvent, PageExchange
    from transfer.wire.keys import Keyring

MAX_ATTEMPTS = 3
MAX_OPEN = 4096
"""Requests on their way at a time: as many as a prefill process has lease words for."""
_EXPIRE_S = 0.01


class DecodeScheduler:
    """Serves one front. One thread calls it.

    Args:
        name: of this process.
        loop: decodes; prompts whose pages it lost to preemption it computes itself.
        exchange: pulls into the pages of the loop's manager.
        context: makes the sockets to the prefill processes.
        prefills: endpoints of the prefill processes. A request goes to the one with the fewest prompt tokens to do.
        front: a socket to whoever submits requests; `Tokens` are sent to it.
        max_unread: messages that the front may leave unread; beyond that its requests fail.
        max_open: requests that the front may have on their way; beyond that each further one is refused.
        chunkwise: pull pages while the rest of the prompt still runs.
        times: of each phase.
        clock: seconds, monotonic.
        keyring: what we show prefill processes, and know them by; None for plain sockets.

    Attributes:
        counts: messages that were "late", attempts that were followed by another ("retries"), requests that "failed".
        front: what the front is told goes through it. While it `is_deaf`, nothing should be submitted.
        links: to the prefill processes.
    """

    def __init__(
        self,
        name: str,
        loop: ServingLoop[PulledPages],
        exchange: PageExchange,
        context: Context,
        prefills: Sequence[str],
        front: Socket,
        *,
        max_unread: int = MAX_UNREAD,
        max_open: int = MAX_OPEN,
        chunkwise: bool = True,
        times: DecodeTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
    ) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._loop = loop
        self._exchange = exchange
        self.front = Front(front, max_unread)
        self._chunkwise = chunkwise
        self._times = times or DecodeTimes()
        self._clock = clock
        hello = msg.Hello(reader=name, incarnation=exchange.incarnation)
        self._prefills = Prefills(context, prefills, hello, clock, keyring)
        self.links = self._prefills.links
        self._max_open = max_open
        self._rooms: dict[str, DecodeRoom] = {}
        self._pulls = Pulls(loop.manager, exchange)
        # Of each replica the rooms that wait for its pages, in the order of their offers, each with its attempt.
        self._arrived: list[deque[tuple[DecodeRoom, int]]] = [deque() for _ in range(loop.manager.num_replicas)]
        # Counted over all requests: a request whose id comes again is told from the earlier one.
        self._attempts = itertools.count(1)
        self._submitted: Recent[int] = Recent()
        self._expire_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether a prefill process is there. Requests wait for one."""
        return self._prefills.connected

    @property
    def open_requests(self) -> int:
        """Requests on their way, and pulls of others that have not ended."""
        return len(self._rooms) + self._pulls.num_left_over

    @property
    def sockets(self) -> list[Socket]:
        """What to wait for while `poll` finds nothing to do."""
        return self._prefills.sockets

    # ---- what the front says

    def submit(self, message: msg.Submit) -> None:
        """Have a prompt prefilled; what comes again is dropped.

        What can never fit, or is one too many, fails at once, and alone.
        """
        if message.serial and not self._submitted.add(message.serial):
            self.counts["late"] += 1
            return
        name, serial = message.request_id, message.serial
        request = Request(name, message.prompt, message.max_new_tokens, cache_salt=message.cache_salt)
        try:
            if name in self._rooms:
                raise AlreadyClaimedError(f"request {name!r} is on its way already")
            if len(self._rooms) >= self._max_open:
                raise TooManyOpenError(
                    f"request {name!r} is one too many: decode process {self.name!r} has {self._max_open} on their way"
                )
            self._loop.context_for(request)
        except KVCacheError as error:
            self._emit(msg.Tokens(request_id=name, finished="error", error=str(error), serial=serial))
            return
        attempt, deadline = next(self._attempts), self._clock() + self._times.wait_s
        self._rooms[name] = DecodeRoom(name, attempt, "waiting", deadline, request=request, serial=serial)

    def abort(self, request_id: str, serial: int = 0) -> None:
        """Forget a request, wherever it is; the front hears `cancelled`. Nothing happens where it is over.

        With the `serial` of a submission that one is meant, even if it is yet to come.
        """
        if serial and self._submitted.add(serial):
            # Its submission comes too late now.
            self._emit(msg.Tokens(request_id=request_id, finished="cancelled", serial=serial))
            return
        room = self._rooms.get(request_id)
        if room is not None and serial in (0, room.serial):
            self._give_up(room, "cancelled by the client", tell_prefill=True)
            self._finish(room, "cancelled")

    # ---- a round

    def poll(self) -> bool:
        """Take messages and events in, start pulls, run one step. Whether there was anything to do; never waits.

        Raises:
            EngineClosedError: the transfer thread has died: this process cannot go on.
        """
        busy = False
        if self.front.flush():
            self._give_up_front()
        for link in self.links:
            for message in link.poll():
                self._on_message(link, message)
                busy = True
            self._on_losses(link)
        for happened in self._exchange.poll():
            self._on_event(happened)
            busy = True
        self._expire()
        self._ask()
        self._admit()
        for output in self._loop.step():
            self._on_output(output)
            busy = True
        return busy or self._loop.num_running > 0

    def stats(self) -> msg.Stats:
        """Counters now. Waits for the transfer thread."""
        self._loop.manager.check()
        return msg.Stats(
            name=self.name,
            role="decode",
            pages_held=self._loop.manager.num_held_blocks,
            open_requests=self.open_requests,
            preemptions=self._loop.preemptions,
            pages_pulled=self._pulls.counts["pulled"],
            pages_reused=self._pulls.counts["reused"],
            bytes_pulled=self._exchange.totals()[0],
            pull_seconds=self._exchange.pull_seconds,
            retries=self.counts["retries"],
            failed=self.counts["failed"],
            malformed=self._prefills.malformed,
            late=self.counts["late"],
        )

    def close(self) -> None:
        """Close the connections. Safe twice."""
        self._prefills.close()

    # ---- having a prompt prefilled

    def _ask(self) -> None:
        for room in [room for room in self._rooms.values() if room.phase == "waiting"]:
            if self._prefills.ask(room, self._times.prefill_s, chunkwise=self._chunkwise):
                room.move("asked", self._clock() + self._times.prefill_s)

    def _on_message(self, link: PrefillLink, message: msg.ToDecode) -> None:
        match message:
            case msg.Offer() | msg.Failed():
                room = self._rooms.get(message.request_id)
                if room is None or (room.attempt, room.link) != (message.attempt, link) or room.phase == "decoding":
                    self._on_late(link, message)
                elif isinstance(message, msg.Failed):
                    self._fail(room, message.reason, final=message.final, tell_prefill=False)
                elif room.source not in (None, message.source):
                    self._fail(room, f"prefill process {link.name!r} has offered two leases for one attempt")
                elif room.has_had(message.table, message.token):
                    self.counts["late"] += 1
                elif message.token is not None and not self._loop.knows(message.token):
                    reason = f"prefill process {link.name!r} sent token {message.token}, which the model does not know"
                    self._fail(room, reason, final=False, tell_prefill=True)
                else:
                    self._on_offer(room, message)
            case _:
                pass  # what the link itself needs, or says that a message of ours was no good: its deadline tells

    def _on_late(self, link: PrefillLink, message: msg.Offer | msg.Failed) -> None:
        self.counts["late"] += 1
        if isinstance(message, msg.Offer):  # nobody waits for it: its pages must not be kept
            link.cancel(message.request_id, message.attempt, "too late")

    def _on_offer(self, room: DecodeRoom, offer: msg.Offer) -> None:
        room.table = offer.table
        if room.phase == "asked":
            self._take_over(room, offer)
        if offer.token is not None and not self._on_first_token(room, offer.token):
            return
        if room.phase == "pulling":
            self._extend(room)

    def _take_over(self, room: DecodeRoom, offer: msg.Offer) -> None:
        """Keep the lease alive from now on; queue for pages."""
        times = self._times
        room.move("offered", self._clock() + times.prefill_s + times.room_s)
        room.source = offer.source
        self._pulls.open(room, offer.source, times.prefill_s + times.room_s + times.pull_s)
        self._arrived[room.replica].append((room, room.attempt))

    def _on_first_token(self, room: DecodeRoom, token: int) -> bool:
        """Emit it at once. Whether there is more to do."""
        room.token = token
        self._prefills.relieve(room)
        room.emitted.append(token)
        length = len(room.request.prompt) + len(room.emitted)
        reason = finish_reason(room.request, length, token, self._loop.runner.eos_token_ids)
        if reason:
            self._give_up(room, "ended with its first token", tell_prefill=True)
            self._finish(room, reason, (token,))
            return False
        self._emit(msg.Tokens(request_id=room.request_id, tokens=(token,), serial=room.serial))
        patience_s = self._times.room_s if room.phase == "offered" else self._times.pull_s
        room.deadline = self._clock() + patience_s
        if room.context is not None:
            room.context.update(token)
        return True

    # ---- pages

    def _admit(self) -> None:
        """Reserve pages for requests that were offered, in order, and pull what is not cached here.

        A preempted request comes first: it had its pages already.
        """
        for queue in self._arrived:
            while queue and not self._loop.num_waiting:
                room, attempt = queue[0]
                if (room.phase, room.attempt) != ("offered", attempt):
                    queue.popleft()  # it ended while it waited
                    continue
                try:
                    if not self._pulls.reserve(room):
                        break
                except KVCacheError as error:
                    queue.popleft()
                    self._fail(room, str(error), final=True)
                    continue
                queue.popleft()
                waits = self._times.pull_s if room.token is not None else self._times.prefill_s
                room.move("pulling", self._clock() + waits)
                if not self._pulls.begin(room):
                    self._join_cached(room)

    def _extend(self, room: DecodeRoom) -> None:
        try:
            more = self._pulls.extend(room)
        except KVCacheError as error:
            self._fail(room, str(error))
        else:
            if not more:
                self._join_cached(room)

    def _join_cached(self, room: DecodeRoom) -> None:
        self._give_up_source(room, "all of it was cached here", tell_prefill=True)
        self._join(room)

    def _join(self, room: DecodeRoom) -> None:
        self._loop.adopt(room.request, self._pulls.commit(room))
        room.move("decoding", self._clock() + self._times.decode_s)

    def _on_event(self, happened: ExchangeEvent) -> None:
        event = happened.event
        if not isinstance(event, PullEvent):
            return  # this process leases nothing
        room = self._pulls.on_event(event, happened.proof)
        if room is not None and event.error:
            self._fail(room, event.error)
        elif room is not None:
            self._join(room)

    def _on_output(self, output: Output) -> None:
        room = self._rooms[output.request_id]
        tokens = () if output.token is None else (output.token,)
        if output.finished:
            room.blame(output.error)
            self._finish(room, output.finished, tokens)
        else:
            self._emit(msg.Tokens(request_id=output.request_id, tokens=tokens, serial=room.serial))

    # ---- the end, or another attempt

    def _on_losses(self, link: PrefillLink) -> None:
        while link.lost:
            reason = link.lost.pop(0)
            for room in [room for room in self._rooms.values() if room.link is link and room.phase != "decoding"]:
                self._fail(room, reason, tell_prefill=False)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + _EXPIRE_S
        for room in [room for room in self._rooms.values() if room.deadline <= now]:
            self._fail(room, f"timed out in phase {room.phase!r} on decode process {self.name!r}")

    def _give_up_front(self) -> None:
        """The front has left too much unread: its requests end, their pages go, and it may read why."""
        reason = f"the front of decode process {self.name!r} has left {self.front.max_unread} messages unread"
        for room in list(self._rooms.values()):
            self._give_up(room, reason, tell_prefill=True)
            room.blame(reason)
            self._finish(room, "error")

    def _fail(self, room: DecodeRoom, reason: str, *, final: bool = False, tell_prefill: bool = True) -> None:
        """An attempt has come to nothing. Another one follows, unless it would fail as well or was the last."""
        avoid, again = room.link, room.phase in ("asked", "offered", "pulling")
        self._give_up(room, reason, tell_prefill=tell_prefill)
        room.reasons.append(reason)
        if final or not again or len(room.reasons) >= MAX_ATTEMPTS:
            room.blame(
                reason if len(room.reasons) == 1 else f"{len(room.reasons)} attempts: " + "; ".join(room.reasons)
            )
            self._finish(room, "error")
            return
        self.counts["retries"] += 1
        if avoid is not None:
            room.avoid.add(avoid.name)
        room.attempt = next(self._attempts)
        room.token = room.table = room.source = room.link = None
        room.move("waiting", self._clock() + self._times.wait_s)

    def _give_up(self, room: DecodeRoom, reason: str, *, tell_prefill: bool) -> None:
        """Give back what the room holds, here at once and there by a message; pages that are written stay held."""
        if room.phase in ("asked", "offered", "pulling"):
            self._give_up_source(room, reason, tell_prefill=tell_prefill)
        if room.phase == "decoding":
            self._loop.abort(room.request_id)
        self._pulls.release(room)

    def _give_up_source(self, room: DecodeRoom, reason: str, *, tell_prefill: bool) -> None:
        self._prefills.relieve(room)
        self._pulls.cancel(room, reason)
        if tell_prefill and room.link is not None:
            room.link.cancel(room.request_id, room.attempt, reason)

    def _finish(self, room: DecodeRoom, finished: msg.Finished, tokens: tuple[int, ...] = ()) -> None:
        room.move("over")
        del self._rooms[room.request_id]
        self.counts["failed"] += finished == "error"
        error, name, serial = room.reason if finished == "error" else "", room.request_id, room.serial
        self._emit(msg.Tokens(request_id=name, tokens=tokens, finished=finished, error=error, serial=serial))

    def _emit(self, message: msg.Tokens) -> None:
        self.front.send(message)
