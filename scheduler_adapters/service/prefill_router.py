"""The prefill processes as a decode process sees them: its connections to them, and their load.

For each prompt, `route` chooses the prefill process that computes it.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import zmq
from msgspec.structs import replace

from kvcache.endpoints.sockets import connect
from kvcache.replica.context import TextContext
from scheduler_adapters.base import PulledPages
from scheduler_adapters.errors import MessageError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import Context, Pulse, Socket, bounded_socket, has_news, monitor_of, received
from transfer.pull.exchange import PageExchange
from transfer.wire.keys import Keyring

CHUNK = 64
"""Prompts are compared in chunks of this many tokens, a few pages.

If two prompts differ within a chunk, they have only the chunks before it in common.
"""
_MOST_CHUNKS = 16_384  # a million tokens, more than a prefill process usually caches
_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # in seconds: pause before a lost connection is reopened; the pause doubles each time


def chunks_of(tokens: Sequence[int], cache_salt: str | None) -> list[int]:
    """Returns one number for each whole chunk of a prompt. The number is a hash of all tokens up to the chunk's end.

    Two chunks may get the same number by chance. The estimate of what a process has cached is then wrong, which does no
    other harm.
    """
    chunks: list[int] = []
    before = hash(cache_salt)
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        before = hash((before, tuple(tokens[start : start + CHUNK])))
        chunks.append(before)
    return chunks


class PromptHistory:
    """The latest prompts that were sent to one process, in chunks, used to guess what the process has cached."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def tokens_of(self, chunks: Sequence[int]) -> int:
        """Returns how many leading tokens of a prompt, in whole chunks, were sent to the process before."""
        known = next((at for at, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))
        return known * CHUNK

    def add(self, chunks: Sequence[int]) -> None:
        """Records that the prompt with these chunks was sent to the process.

        If there are too many chunks, the chunks of the oldest prompts are forgotten first. The last chunks of a prompt
        are forgotten before its first chunks.
        """
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > _MOST_CHUNKS:
            self._chunks.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prompts, because the process may have restarted with an empty cache."""
        self._chunks.clear()


class OwnPages(NamedTuple):
    """Pages of a prompt that the decode process itself has cached.

    Only decode processes compute the answers of a conversation, so earlier answers are cached only in decode processes.

    Attributes:
        source: the address at which prefill can ask for these pages, and the number of tokens in them.
        page_size: the page size of these pages, in tokens.
    """

    source: msg.KVSource
    page_size: int


def own_pages(manager: PulledPages, exchange: PageExchange, context: TextContext) -> OwnPages | None:
    """Returns the pages of a request that this process has cached, for example from earlier turns, or None."""
    contents, replicas = manager.contents, range(manager.num_replicas)
    wanted = contents.digests(context)
    cached = [contents.cached(replica, wanted) for replica in replicas]
    best = sorted(replicas, key=cached.__getitem__, reverse=True)
    if not cached[best[0]]:
        return None
    engines = tuple(exchange.engine_id(replica) for replica in best[:64])
    return OwnPages(msg.KVSource(exchange.address, engines, cached[best[0]]), manager.page_size)


class PrefillConnection:
    """The connection to one prefill process. After a loss, a new connection is opened; the lost one is not reused.

    A loss ends the connection's requests on both sides. Messages to a dead process may still wait in the socket of the
    lost connection. Because that socket is never used again, they cannot reach the process that replaces the dead one.

    Attributes:
        welcome: the process's description of itself; None while it is not connected.
        lost: the reason for each loss that the owner has not processed yet.
        load: prompt tokens of this decode process that the prefill process still has to compute.
        history: the prompts that were sent to the process. They show what the process has probably cached.
        malformed: number of messages that could not be decoded.
        leaving: whether the process accepts no new requests.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        hello: msg.Hello,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: msg.Welcome | None = None
        self.lost: list[str] = []
        self.load = 0
        self.history = PromptHistory()
        self.malformed = 0
        self.leaving = False
        self._context = context
        self._hello = hello
        self._clock = clock
        self._keyring = keyring
        self._pause_s = _PAUSE_S
        self._again_at = 0.0
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._pulse: Pulse | None = None
        self._open()

    @property
    def name(self) -> str:
        """The name of the process, or its endpoint until it has sent its name."""
        return self.endpoint if self.welcome is None else self.welcome.name

    @property
    def takes_requests(self) -> bool:
        """Whether the process is connected and still accepts requests."""
        return self.welcome is not None and not self.leaving

    def serves(self, weights: str) -> bool:
        """Whether the process accepts requests of these weights."""
        return self.takes_requests and self.welcome is not None and self.welcome.weights == weights

    @property
    def sockets(self) -> list[Socket]:
        """The sockets that become readable when the process sends something or is lost."""
        watched = None if self._pulse is None else self._pulse.socket
        return [socket for socket in (self._socket, self._monitor, watched) if socket is not None]

    def send(self, message: msg.ToPrefill) -> bool:
        """Sends without waiting. Returns whether the message could be queued."""
        if self._socket is None:
            return False
        try:
            self._socket.send(msg.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Tells the process that this attempt is no longer wanted, and that no READ of its pages is in flight."""
        self.send(msg.Cancel(request_id=request_id, attempt=attempt, reason=msg.clipped(reason)))

    def poll(self) -> Iterator[msg.ToDecode]:
        """Yields the messages that have arrived from the process. Losses are recorded in `lost`."""
        if self._socket is None:
            if self._clock() >= self._again_at:
                self._open()
            return
        if any(has_news(one) for one in self.sockets[1:]):
            self.lose(f"prefill process {self.name!r} is gone, or silent")
            return
        for frames in received(self._socket):
            match message := self._decoded(frames):
                case msg.Welcome():
                    if self.welcome is not None and self.welcome.weights != message.weights:
                        self.history.clear()
                    self.welcome, self._pause_s, self.leaving = message, _PAUSE_S, False
                    yield message
                case msg.Leaving():
                    self.leaving = True
                case msg.Rejected(stranger=True):
                    self.lose(f"prefill process {self.name!r} was restarted, or gave this connection up")
                    return
                case msg.PagesOffer() | msg.Failed() | msg.Rejected():
                    yield message
                case _:
                    pass

    def lose(self, reason: str) -> None:
        """Gives the connection up. A later `poll` opens a new one."""
        if self.welcome is not None:
            self.lost.append(reason)
        self.close()
        self.welcome, self.load = None, 0
        self.history.clear()
        self._again_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def close(self) -> None:
        """Closes the sockets. Safe to call twice."""
        socket, monitor, pulse = self._socket, self._monitor, self._pulse
        self._socket = self._monitor = self._pulse = None
        if socket is not None:
            socket.disable_monitor()
            socket.close()
        if monitor is not None:
            monitor.close()
        if pulse is not None:
            pulse.close()

    def _open(self) -> None:
        socket = bounded_socket(self._context, zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        if self._keyring is not None:
            self._keyring.secure_client(socket)
        self._monitor = monitor_of(socket, zmq.EVENT_DISCONNECTED)
        connect(socket, self.endpoint)
        self._pulse = Pulse(self._context, self.endpoint, self._keyring)
        self._socket = socket
        self.send(self._hello)

    def _decoded(self, frames: list[bytes]) -> msg.AnyMessage | None:
        try:
            return msg.decode_frames(frames, msg.ToDecode)
        except MessageError as error:
            self.malformed += 1
            self.send(msg.Rejected(reason=msg.clipped(str(error))))
            return None


def renewed(
    connections: Sequence[PrefillConnection], endpoints: Sequence[str], connect: Callable[[str], PrefillConnection]
) -> list[PrefillConnection]:
    """Returns the connections for the new `endpoints`. Connections to live processes are kept."""
    kept = [one for one in connections if one.endpoint in endpoints or one.welcome is not None]
    for one in connections:
        if one not in kept:
            one.close()
    known = {one.endpoint for one in kept}
    return kept + [connect(endpoint) for endpoint in endpoints if endpoint not in known]


def route(
    connections: Sequence[PrefillConnection],
    message: msg.Prefill,
    avoid: set[str],
    wanted: str = "",
    own: OwnPages | None = None,
) -> tuple[PrefillConnection, int] | None:
    """Sends a prompt to the prefill process that is expected to finish it first, given its load and history.

    If several processes are equally good, the one with the shortest history is chosen. A process in `avoid` is chosen
    only if no other process is connected. If `wanted` names a process, it takes precedence over load and history.
    Returns the chosen connection and the tokens that were added to its load, or None if no process accepted the prompt.
    """
    there = [one for one in connections if one.takes_requests]
    if not there:
        return None
    chunks = chunks_of(message.prompt, message.cache_salt)
    missing = {one: len(message.prompt) - one.history.tokens_of(chunks) for one in there}
    chosen = min(
        there, key=lambda one: (one.name in avoid, one.name != wanted, one.load + missing[one], len(one.history))
    )
    if not message.kv_sources:
        message = replace(message, kv_sources=_sources(missing, chosen, len(message.prompt), own))
    if not chosen.send(message):
        return None
    chosen.load += missing[chosen]
    chosen.history.add(chunks)
    return chosen, missing[chosen]


def _sources(
    missing: Mapping[PrefillConnection, int], chosen: PrefillConnection, length: int, own: OwnPages | None
) -> tuple[msg.KVSource, ...]:
    """Returns the processes that may have more tokens of a prompt cached than `chosen`, most tokens first.

    There are two candidates: the prefill process to which most tokens of this prompt were sent before, and the decode
    process itself, whose pages are in `own`. `missing` has, for each connected process, how many of the prompt's
    `length` tokens were never sent to it.
    """
    lacking: list[tuple[int, msg.KVSource]] = []
    best = min(missing, key=missing.__getitem__)
    if best.welcome and best.welcome.address:
        known = length - missing[best]
        lacking.append((missing[best], msg.KVSource(best.welcome.address, best.welcome.engines[:64], known)))
    if own is not None and chosen.welcome and chosen.welcome.page_size == own.page_size:
        lacking.append((length - own.source.tokens // CHUNK * CHUNK, own.source))
    return tuple(source for tokens, source in sorted(lacking, key=lambda one: one[0]) if tokens < missing[chosen])
