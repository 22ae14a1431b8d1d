"""`EventPublisher`: the thread that makes events of what a manager's loop writes down, and sends them.

Nothing that a subscriber does reaches the loop: it appends to a log, and this thread takes from it. Every buffer has an
end. Where a message is lost at one, a gap in the sequence says so, and a replay heals it: by the last batches, or by
`AllBlocksCleared` and everything that is there now, under the number that was asked for. The sequence begins at the
clock in microseconds, and the first event is `AllBlocksCleared`: a subscriber of before a restart sees it as later.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any, cast

import zmq

from kvcache.errors import InvalidParamsError
from kvcache.events.book import EventBook, Told
from kvcache.events.log import Entry, EventLog
from kvcache.events.wire import END_OF_REPLAY, AllBlocksCleared, BlockStored, Event, EventBatch, encode
from kvcache.kv_events import KVEvents

_LOOK_MS = 5  # between two looks at the log, where it was empty
# Python runs one thread at a time, and takes the turn away from none for 5 ms: so this one gives it up by itself, after
# so many entries, and while it tells of so many tokens. The pause is long enough for a thread that waits.
_ENTRIES_A_TURN = 16
_TOKENS_A_TURN = 1 << 11
_PAUSE_S = 5e-5
_QUIET_S = 1.0  # then an empty batch goes out: who has missed the last one learns of it
_RING_BYTES = 64 << 20
_TOKENS_A_BATCH = 1 << 16
_REPLAYED = 1000  # batches that a replay sends at most; who lacks more gets the state
_REPLAY_SHARE = 0.2  # of this thread's time, for replays
_ANEW_S = 10.0  # between two times that everybody is told everything, as somebody has missed too much
_QUESTION_BYTES = 1 << 10  # of a message to us: those of CURVE's greeting are the longest
_END_S = 1.0

_log = logging.getLogger("pagewire")


class _Stream:
    """The sockets of one rank, its sequence, and its last batches."""

    def __init__(self, options: KVEvents, rank: int) -> None:
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        address, replay_address = options.addresses(rank)
        self.rank = rank
        self._topic = options.topic.encode()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._most = options.buffer_steps
        self.sequence = time.time_ns() // 1000  # of the next batch
        self.sent_at = 0.0
        self.pub = _bound(context.socket(zmq.PUB), address, options, options.hwm)
        self.replay = None
        if replay_address is not None:
            try:
                self.replay = _bound(context.socket(zmq.ROUTER), replay_address, options, 2 * _REPLAYED)
            except InvalidParamsError:
                self.pub.close()
                raise

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Where the sockets are bound."""
        replay = None if self.replay is None else self.replay.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.pub.getsockopt_string(zmq.LAST_ENDPOINT), replay

    def send(self, events: Sequence[Event]) -> None:
        """Send a batch. Never waits: a subscriber that cannot take it misses it."""
        payload = self._encoded(events)
        self._ring.append((self.sequence, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > self._most or (self._ring_bytes > _RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft()[1])
        self.pub.send_multipart((self._topic, _frame(self.sequence), payload))
        self.sequence += 1
        self.sent_at = time.monotonic()

    def answer(self, book: EventBook) -> bool:
        """Answer one question for a replay: what was sent from a number on; False: that is no more, all is told."""
        if self.replay is None:
            return True
        asked = self.replay.recv_multipart(zmq.NOBLOCK)
        if len(asked) != 3 or len(asked[2]) != 8:
            return True
        first, oldest = int.from_bytes(asked[2], "big"), self._ring[0][0]
        if known := first >= oldest and self.sequence - first <= _REPLAYED:
            batches = ((number, payload) for number, payload in self._ring if number >= first)
        else:
            batches = self._state(book, first)
        for number, payload in batches:
            self._reply(asked[0], (self._topic, _frame(number), payload))
        self._reply(asked[0], (b"", END_OF_REPLAY, b""))
        return known

    def close(self) -> None:
        self.pub.close(linger=200)
        if self.replay is not None:
            self.replay.close(linger=200)

    def _reply(self, who: bytes, frames: tuple[bytes, ...]) -> None:
        if self.replay is not None:  # a peer whose queue is full, or that is gone, is not waited for
            self.replay.send_multipart((who, b"", *frames), zmq.NOBLOCK)

    def _state(self, book: EventBook, first: int) -> Iterable[tuple[int, bytes]]:
        """All that is there, under numbers from `first` on, none above the last that was sent.

        What was sent since the question comes to the subscriber as well, and changes nothing in the end: of each page
        the last that is told of it is true.
        """
        parts = list(batched(chain([AllBlocksCleared()], book.state(self.rank))))
        count = min(len(parts), max(1, self.sequence - first))
        parts[count - 1 :] = [list(chain.from_iterable(parts[count - 1 :]))]
        for number, part in enumerate(parts, first):
            yield number, self._encoded(part)

    def _encoded(self, events: Sequence[Event]) -> bytes:
        return encode(EventBatch(time.time(), events, self.rank))


class _Worker:
    """What the thread runs; it knows nothing of the manager, which may be forgotten without being closed."""

    def __init__(self, options: KVEvents, log: EventLog, book: EventBook, ranks: int) -> None:
        self.streams: list[_Stream] = []
        self._log = log
        self._book = book
        self._closing = threading.Event()
        self._applying = threading.Lock()  # the loop applies entries itself where the thread does not get to it
        self._behind = True  # subscribers are to be told everything anew
        self._replay_at = 0.0  # when the next question is answered, at the earliest
        self._anew_at = 0.0  # and when a question may have all be told to everybody
        self._poller = zmq.Poller()
        try:
            for rank in range(ranks):
                self.streams.append(_Stream(options, rank))
        except InvalidParamsError:
            self._close()
            raise
        for stream in self.streams:
            if stream.replay is not None:
                self._poller.register(stream.replay, zmq.POLLIN)

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                if self.turn():
                    time.sleep(_PAUSE_S)
                    self._poll(0)
                else:
                    self._poll(_LOOK_MS)
            except Exception:  # noqa: BLE001 - what could not be sent is told anew
                _log.exception("KV events: a turn failed")
                self._behind = True
                time.sleep(_QUIET_S)
        while self.turn():
            pass
        for stream in self.streams:
            stream.send([AllBlocksCleared()])
        while ready := dict(self._poller.poll(0)):  # Dynamo's listener waits for its answer without an end
            self._answer(ready)
        self._close()

    def stop(self) -> None:
        self._closing.set()

    def catch_up(self) -> None:
        """Called by the loop: the log is as long as it may be. Its entries are applied, and everything is told anew."""
        with self._applying:
            self._behind = True
            self._apply(self._take(len(self._log.entries)))

    def turn(self) -> bool:
        """Tell what was written down since the last turn; whether there was anything."""
        with self._applying:
            behind, self._behind = self._behind, False
            entries = self._take(_ENTRIES_A_TURN)
            told = self._apply(entries)
            for stream in self.streams:
                self._send(stream, told, anew=behind)
        return bool(entries)

    def _apply(self, entries: Sequence[Entry]) -> list[Told]:
        try:
            return self._book.apply(entries)
        except Exception:  # noqa: BLE001 - what is told is not worth the manager; of what is there by now nothing is told
            _log.exception("KV events: what was written down cannot be followed, and is begun anew")
            self._book, self._behind = self._book.begun_anew(), True
            return []

    def _send(self, stream: _Stream, told: Sequence[Told], *, anew: bool) -> None:
        if anew:
            events: Iterable[Event] = chain([AllBlocksCleared()], self._book.state(stream.rank))
        else:
            events = (event for source, event in told if source in (stream.rank, -1, -2))
        for part in batched(events):
            stream.send(part)
        if time.monotonic() - stream.sent_at > _QUIET_S:
            stream.send([])

    def _poll(self, timeout_ms: int) -> None:
        """Answer one question of each rank, unless replays have had their share of the time."""
        started = time.monotonic()
        if started < self._replay_at:
            time.sleep(timeout_ms / 1000)
            return
        ready = dict(self._poller.poll(timeout_ms))
        started = time.monotonic()
        self._answer(ready)
        if ready:
            now = time.monotonic()
            self._replay_at = now + (now - started) * (1 / _REPLAY_SHARE - 1)

    def _answer(self, ready: Container[object]) -> None:
        for stream in self.streams:
            if stream.replay in ready and not stream.answer(self._book) and time.monotonic() >= self._anew_at:
                # vLLM's router takes a replay up only where it leads without a gap to what it has heard.
                self._behind, self._anew_at = True, time.monotonic() + _ANEW_S

    def _take(self, most: int) -> list[Entry]:
        entries = self._log.entries
        return [entries.popleft() for _ in range(min(most, len(entries)))]

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()


class EventPublisher:
    """Publishes the log of one manager until it is closed, or forgotten.

    Raises `InvalidParamsError` where an address cannot be bound, and what `options.secure` raises.
    """

    def __init__(self, options: KVEvents, log: EventLog, book: EventBook, ranks: int) -> None:
        self._worker = _Worker(options, log, book, ranks)
        log.full = self._worker.catch_up
        self.endpoints = [stream.addresses for stream in self._worker.streams]
        self._thread = threading.Thread(target=self._worker.run, name="pagewire-kv-events", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def close(self) -> None:
        """Tell what is left, and that it is gone. Waits a second at most. Safe twice."""
        self._finalizer()
        self._thread.join(_END_S)


def batched(events: Iterable[Event]) -> Iterable[list[Event]]:
    """The events, in parts of not too many tokens."""
    part: list[Event] = []
    tokens = unpaused = 0
    for event in events:
        part.append(event)
        if isinstance(event, BlockStored):
            tokens += len(event.token_ids)
            unpaused += len(event.token_ids)
        if unpaused >= _TOKENS_A_TURN:
            time.sleep(_PAUSE_S)
            unpaused = 0
        if tokens >= _TOKENS_A_BATCH:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _frame(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _bound(socket: zmq.Socket[bytes], address: str, options: KVEvents, most: int) -> zmq.Socket[bytes]:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, most),
        (zmq.RCVHWM, 100),
        (zmq.MAXMSGSIZE, _QUESTION_BYTES),
        # A peer that is gone without a word has its queue freed. ZMQ's own heartbeats end the process (libzmq 4.3.5,
        # an assertion) where they find a peer that has filled our queue and is gone.
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.IPV6, int("[" in address)),
    ):
        socket.setsockopt(option, value)
    try:
        if options.secure is not None:
            options.secure(cast("Any", socket))
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise InvalidParamsError(f"kv_events: cannot bind {address}: {error}") from error
    except BaseException:
        socket.close()
        raise
    return socket
