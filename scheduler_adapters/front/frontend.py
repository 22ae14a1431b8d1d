"""`Frontend`: tracks the processes of the fleet, assigns each request to a decode process, and follows its outcome.

The frontend learns about the processes from their `Ready` messages, which each process repeats, and tells each process
about the others. It counts a process as lost if a message to it cannot be sent, if its `Pulse` ends, or if another
process takes its name. If a decode process is lost, its requests go to another one, together with the tokens that the
client already has. Greedy decoding continues from these tokens exactly as the lost process would have.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from scheduler_adapters.errors import MessageError, RefusedError, ServiceError
from scheduler_adapters.front.holders import PageHolders
from scheduler_adapters.front.members import Member
from scheduler_adapters.front.rollout import Rollout
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import Context, Pulse, Socket, received
from transfer.stats import Buckets
from transfer.wire.keys import Keyring

MAX_ATTEMPTS = 3
ROLES: tuple[msg.Role, ...] = ("prefill", "decode")
_TICK_S = 0.25  # seconds between two checks of the processes
_WAIT_S = 10.0  # how long, in seconds, a request waits for a decode process if there is none
_DRAIN_S = 600.0  # how long, in seconds, a draining process may take to finish its requests
_ASK_S = 10.0
_UNSENT_S = 10.0  # seconds between two log lines about clients that left early

log = logging.getLogger("pagewire.front")


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt to serve a request at one decode process."""

    name: str
    request_id: str
    serial: int
    weights: str
    news: asyncio.Queue[msg.Tokens] = field(default_factory=asyncio.Queue[msg.Tokens])


@dataclass(slots=True, eq=False)
class FrontCounts:
    """Counts of requests by outcome.

    Attributes:
        open: requests that have not ended yet.
        ended: requests that have ended, by outcome.
        lost: attempts that ended because their decode process was lost or refused the request.
        unsent: requests whose client closed the connection before it had sent everything.
        cached_tokens: prompt tokens that prefill had cached, summed over all successful requests.
        computed_tokens: prompt tokens that prefill had to compute, summed over the same requests.
        new_tokens: tokens sent to clients.
        first_token: how long each request waited for its first token, in seconds.
    """

    open: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    lost: int = 0
    unsent: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    first_token: Buckets = field(default_factory=lambda: Buckets([0.001 * 2**i for i in range(17)]))


class Placement(Protocol):
    """Chooses the prefill process that computes a prompt."""

    async def place(self, request_id: str, prompt: Sequence[int], prefills: Collection[str]) -> str:
        """Chooses a process in `prefills`, reserves the prompt's load at the process, and returns its name."""
        ...

    async def prefilled(self, request_id: str) -> None:
        """Reports that the prompt of a request has been computed."""

    async def over(self, request_id: str) -> None:
        """Reports that a request has ended. Safe to call twice, and for a request that was never placed."""

    async def follow(self, members: Sequence[msg.Ready]) -> None:
        """Replaces the list of the prefill processes that can be chosen."""


class Frontend:
    """Serves requests from a fleet. Belongs to one event loop.

    Args:
        socket: a bound ROUTER (`sockets.bind_router`), to which the processes connect.
        placement: chooses the prefill process of each request. With None, the decode process chooses it. It guesses
            what a prefill process has cached from the prompts that it has sent there.
        keyring: keys of the fleet; None if it has none.

    Attributes:
        members: the processes of the fleet that have not left or been lost, by name.
        left: the last counters of each process that has drained, by name.
        counts: counts of requests by outcome.
        changed: is set whenever the list of processes, or one of them, has changed.
        rollout: changes the weights of the processes.
    """

    def __init__(self, socket: Socket, placement: Placement | None = None, keyring: Keyring | None = None) -> None:
        self.members: dict[str, Member] = {}
        self.left: dict[str, msg.Stats] = {}
        self.counts = FrontCounts()
        self._socket = socket
        self._context: Context = socket.context  # pyright: ignore[reportUnknownMemberType] -- pyzmq has no type here
        self._placement = placement
        self._holders = PageHolders(self._context)
        self._keyring = keyring
        self._attempts: dict[int, _Attempt] = {}
        # Serials start at the current time, so that a restarted frontend does not repeat the serials of its
        # predecessor.
        self._serials = itertools.count(time.time_ns() // 1000)
        self.changed = asyncio.Event()
        self.rollout = Rollout(self)
        self._is_due = False
        self._unsent_told = float("-inf")

    @property
    def capacity(self) -> int:
        """The most tokens that a request may have, including new ones.

        Raises `RefusedError` if there is no prefill or no decode process.
        """
        for role in ROLES:
            if not self._serving(role):
                raise RefusedError(f"no {role} process takes requests now")
        return min(member.ready.max_tokens for member in self.members.values())

    async def run(self) -> None:
        """Receives messages from the processes, and tells each process about the others. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.FD, self._poll)
        try:
            while True:
                self._poll()
                for name in [name for name, member in self.members.items() if member.pulse.is_over]:
                    self.lose(name, f"{name} is gone, or silent")
                self._tell_members()
                self.rollout.follow()
                self._holders.follow([one.ready for role in ROLES for one in self._serving(role)])
                if self._placement is not None:
                    await self._placement.follow([one.ready for one in self._serving("prefill")])
                await asyncio.sleep(_TICK_S)
        finally:
            loop.remove_reader(self._socket.FD)
            self._holders.close()
            self.rollout.close()
            for member in self.members.values():
                member.pulse.close()

    # ---- requests

    def count_unsent(self) -> None:
        """Counts a client that left before it had sent its whole request. Logs the count every few seconds."""
        self.counts.unsent += 1
        if time.monotonic() - self._unsent_told > _UNSENT_S:
            self._unsent_told = time.monotonic()
            log.warning("a client closed its connection while it sent a request (%d so far)", self.counts.unsent)

    async def generate(self, request: msg.Submit, decode: str = "") -> AsyncGenerator[msg.Tokens]:
        """Yields the tokens of a request as they arrive; the last message says why it ended.

        Closing the generator aborts the request.

        The method fills in the `serial` of `request`, and also its `prefill` if that is empty and there is a placement.
        The request goes to the process `decode`, unless that process is absent, was lost, or has refused the request.

        Raises:
            RefusedError: no process takes the request now. The client may send it again later.
            ServiceError: the request failed; the message has the reason.
        """
        begun, how, first = time.monotonic(), "cancelled", True
        self.counts.open += 1
        try:
            async with aclosing(self._attempted(request, decode)) as all_news:
                async for news in all_news:
                    if first:
                        self.counts.first_token.add(time.monotonic() - begun)
                    first = False
                    self.counts.new_tokens += len(news.tokens)
                    if news.finished:
                        how, cached = news.finished, min(news.cached_tokens, len(request.prompt))
                        self.counts.cached_tokens += cached
                        self.counts.computed_tokens += len(request.prompt) - cached
                    yield news
        except ServiceError as error:
            how = "refused" if isinstance(error, RefusedError) else "error"
            raise
        finally:
            self.counts.open -= 1
            self.counts.ended[how] += 1

    async def _attempted(self, request: msg.Submit, decode: str) -> AsyncGenerator[msg.Tokens]:
        """Yields the messages of `generate`, from as many attempts as are needed.

        The caller keeps the counts of requests.
        """
        request_id, weights = request.request_id, ""
        emitted: list[int] = []
        reasons: list[str] = []
        pulled = False
        refused: set[tuple[str, str]] = set()  # processes, and the weights that they had
        while len(reasons) < MAX_ATTEMPTS:
            attempt: _Attempt | None = None
            try:
                attempt = await self._submit(request, emitted, refused, decode, weights)
                weights = attempt.weights
                while True:
                    news = await attempt.news.get()
                    if news.finished == "error":
                        if not news.elsewhere:
                            raise ServiceError(news.error)
                        # a lost process is not added, because a new process may get the same name
                        if attempt.name in self.members:
                            refused.add((attempt.name, attempt.weights))
                        reasons.append(news.error)
                        self.counts.lost += 1
                        break
                    if self._placement is not None and not pulled:
                        await (self._placement.over if emitted else self._placement.prefilled)(request_id)
                        # decode sends tokens after the first one only when it has read the pages
                        pulled = bool(emitted)
                    emitted += news.tokens
                    yield news
                    if news.finished:
                        return
            finally:
                if attempt is not None:
                    self._forget(attempt)
                if self._placement is not None:
                    await asyncio.shield(self._placement.over(request_id))
        raise ServiceError(f"{len(reasons)} attempts: " + "; ".join(reasons))

    async def _submit(
        self, request: msg.Submit, emitted: Sequence[int], refused: set[tuple[str, str]], decode: str, weights: str
    ) -> _Attempt:
        """Asks a decode process to continue the answer after the tokens that the client already has.

        If there are any, they are of these `weights`, and the process must have the same.
        """
        prompt, prefill = (*request.prompt, *emitted), request.prefill
        while True:
            chosen = await self._choose(refused, decode, weights if emitted else "")
            if self._placement is not None and not prefill:
                there = [one.ready.name for one in self._equal(chosen)]
                prefill = await self._placement.place(request.request_id, prompt, there)
            name, of = chosen.ready.name, chosen.ready.weights
            if self.members.get(name) is not chosen or chosen.is_switching:
                continue
            sources = request.kv_sources or self._holders.sources(prompt, request.cache_salt, prefill, of)
            serial = next(self._serials)
            attempt = _Attempt(name, f"{request.request_id}.{serial}", serial, of)
            submit = msgspec.structs.replace(
                request,
                request_id=attempt.request_id,
                prompt=prompt,
                max_new_tokens=request.max_new_tokens - len(emitted),
                serial=serial,
                prefill=prefill,
                kv_sources=sources,
            )
            if self.send(name, submit):
                self._attempts[serial] = attempt
                self.members[name].serials.add(serial)
                return attempt

    async def _choose(self, refused: set[tuple[str, str]], wanted: str, weights: str = "") -> Member:
        """Returns the decode process `wanted`, or else the one with the fewest requests.

        Processes in `refused`, and those that change their weights, are left out. So are those of other weights than
        `weights`, unless that is empty. A process that has a prefill process of equal weights is preferred, and waited
        for while processes change their weights.
        """
        deadline = time.monotonic() + _WAIT_S
        while True:
            there = self._serving("decode")
            left = [member for member in there if (member.ready.name, member.ready.weights) not in refused]
            willing = [one for one in left if not one.is_switching and weights in ("", one.ready.weights)]
            paired = [one for one in willing if self._equal(one)]
            if chosen := paired or ([] if self.rollout.is_running else willing):
                return min(chosen, key=lambda one: (one.ready.name != wanted, len(one.serials)))
            if there and not left and not self.rollout.is_running:
                raise RefusedError(
                    f"no decode process accepts the request: {', '.join(sorted(dict(refused)))} have refused it"
                )
            if left and weights and not self.rollout.is_running:
                raise ServiceError(f"no process has the weights {weights} any more, which have begun the answer")
            await self.wait(deadline - time.monotonic())
            if self.rollout.is_running:
                deadline = time.monotonic() + _WAIT_S
            elif time.monotonic() >= deadline:
                raise RefusedError(f"no decode process has been available for {_WAIT_S:.0f} s")

    async def wait(self, seconds: float) -> None:
        """Waits until something about the processes has changed, but not longer than this."""
        self.changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), max(0.0, seconds))

    def _equal(self, decode: Member) -> list[Member]:
        """Returns the prefill processes that have the weights of a decode process, and keep them."""
        weights = decode.ready.weights
        return [one for one in self._serving("prefill") if one.ready.weights == weights and not one.is_switching]

    def _forget(self, attempt: _Attempt) -> None:
        """Forgets an attempt whose result is no longer wanted, and aborts it if it is still running."""
        if self._attempts.pop(attempt.serial, None) is not None:
            self.send(attempt.name, msg.Abort(request_id=attempt.request_id, serial=attempt.serial))
        if attempt.name in self.members:
            self.members[attempt.name].serials.discard(attempt.serial)

    # ---- processes

    async def drain(self, names: Collection[str]) -> None:
        """Drains these processes, and waits until they have left the fleet.

        Raises `ServiceError` if a process does not leave in time, or still holds pages when it leaves.
        """
        for name in names:
            self.send(name, msg.Drain())
        deadline = time.monotonic() + _DRAIN_S
        while any(name in self.members for name in names) and time.monotonic() < deadline:
            await self.wait(_TICK_S)
        for name in names:
            if name in self.members:
                raise ServiceError(f"the {name} process has not drained within {_DRAIN_S:.0f} s")
            if name in self.left and self.left[name].pages_held:
                raise ServiceError(
                    f"the {name} process has drained, but still holds {self.left[name].pages_held} pages"
                )

    async def stats(self) -> dict[str, msg.Stats]:
        """Returns the counters of all processes that answer within ten seconds."""
        asked = [name for name in list(self.members) if self.send(name, msg.Ask())]
        for name in asked:
            if name in self.members:
                self.members[name].stats = None
        deadline = time.monotonic() + _ASK_S
        while any(name in self.members and self.members[name].stats is None for name in asked):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.005)
        return {name: member.stats for name, member in self.members.items() if member.stats is not None}

    def _serving(self, role: msg.Role) -> list[Member]:
        return [one for one in self.members.values() if one.ready.role == role and not one.ready.draining]

    def _tell_members(self) -> None:
        """Tells each process which prefill processes are listening. A process that cannot be reached counts as lost."""
        prefills = tuple(one.ready.listen for one in self._serving("prefill"))
        for name in list(self.members):
            self.send(name, msg.Members(prefills=prefills))

    def send(self, name: str, message: msg.FromFrontend) -> bool:
        """Sends a message to a process. Returns whether it was sent.

        An unreachable process counts as lost. A process whose queue is full does not count as lost.
        """
        try:
            self._socket.send_multipart([name.encode(), msg.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self.lose(name, f"{name} is gone, or silent")
            return False
        self._poll_soon()
        return True

    def lose(self, name: str, reason: str) -> None:
        """Counts a process as lost. Its requests go to other processes."""
        member = self.members.pop(name, None)
        if member is None:
            return
        member.pulse.close()
        log.warning("%s; it had %d open requests", reason, len(member.serials))
        for serial in member.serials:
            attempt = self._attempts.pop(serial, None)
            if attempt is not None:
                lost = msg.Tokens(
                    request_id=attempt.request_id, finished="error", error=reason, serial=serial, elsewhere=True
                )
                attempt.news.put_nowait(lost)
        self.changed.set()

    # ---- messages

    def _poll_soon(self) -> None:
        """Polls again soon. ZMQ's descriptor signals an event only once, and `send` may have consumed that signal."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._is_due = False
        heard = False
        for sender, *frames in received(self._socket):
            heard = True
            name = sender.decode(errors="replace")
            try:
                self._on_message(name, msg.decode_frames(frames, msg.ToFrontend))
            except MessageError as error:
                log.warning("%s: %s", name, error)
        if heard:
            self._poll_soon()

    def _on_message(self, name: str, message: msg.AnyMessage) -> None:
        match message:
            case msg.Ready():
                self._on_ready(name, message)
            case msg.Tokens():
                self._on_tokens(name, message)
            case msg.Stats() if name in self.members:
                self.members[name].stats = message
            case msg.Loaded() if name in self.members:
                self.members[name].loaded = message
                self.changed.set()
            case msg.Left(stats=stats):
                self.left[name] = stats
                self.lose(name, f"{name} has drained: {stats.pages_held} pages held")
            case msg.Fatal(error=error):
                self.lose(name, f"{name} failed: {error}")
            case msg.Rejected(reason=reason):
                log.warning("%s could not be sent a message: %s", name, reason)
            case _:
                pass

    def _on_ready(self, name: str, ready: msg.Ready) -> None:
        known = self.members.get(name)
        if known is not None and known.ready.incarnation != ready.incarnation:
            self.lose(name, f"{name} was restarted")
            known = None
        if known is None:
            try:
                pulse = Pulse(self._context, ready.pulse, self._keyring)
            except zmq.ZMQError as error:
                log.warning("%s cannot be watched at %r, so it is not admitted: %s", name, ready.pulse, error)
                return
            log.warning("%s has joined", name)
            self.members[name] = Member(ready, pulse)
        elif ready.draining and not known.ready.draining:
            log.warning("%s is draining", name)
        self.members[name].ready = ready
        if known is None or known.ready != ready:
            self.changed.set()
            self._tell_members()

    def _on_tokens(self, name: str, message: msg.Tokens) -> None:
        attempt = self._attempts.get(message.serial)
        if attempt is None or attempt.name != name:
            # no client waits for the request, for example because an earlier frontend has sent it
            if message.finished is None:
                self.send(name, msg.Abort(request_id=message.request_id, serial=message.serial))
            return
        if message.finished is not None:
            del self._attempts[message.serial]
        attempt.news.put_nowait(message)
