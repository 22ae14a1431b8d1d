"""`EventPublisher`: the thread that makes events of what a manager's loop writes down, and sends them.

Nothing that a subscriber does reaches the loop: it appends to a log, and this thread takes from it. Every buffer has an
end. Where a message is lost at one, a gap in the sequence says so, and a replay heals it: by the last batches, or by
`AllBlocksCleared` and everything that is there now, under the number that was asked for. The sequence begins at the
clock in microseconds, and the first event is `AllBlocksCleared`: a subscriber of before a restart sees it as later.
"""

import bisect
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import zmq

from kvcache.errors import InvalidParamsError
from kvcache.events.book import EventBook, Told
from kvcache.events.log import MOST_ENTRIES, Entry, EventLog
from kvcache.events.wire import END_OF_REPLAY, AllBlocksCleared, BlockStored, EventBatch, KVEvent, encode
from kvcache.kv_events import KVEvents
from kvcache.pool.index import PrefixIndex
from kvcache.sockets import SUBSCRIPTIONS, bound_socket

_LOOK_MS = 5  # between two looks at the log, where it was empty
# Python runs one thread at a time, and takes the turn away from none for 5 ms: so this one gives it up by itself, after
# so many entries, and while it tells of so many tokens. The pause is long enough for a thread that waits.
_ENTRIES_A_TURN = 16
_TOKENS_A_TURN = 1 << 11
_PAUSE_S = 5e-5
# Where the thread is starved the loop helps it, by so many entries a call. What is to be told of them waits for the
# thread; above so many events everything is told anew.
_ENTRIES_OF_LOOP = 128
_MOST_UNTOLD = 1 << 12
_LOST_AT = 4 * MOST_ENTRIES  # above so many entries, which nobody has come to, they are dropped
_QUIET_S = 1.0  # then an empty batch goes out: who has missed the last one learns of it
_RING_BYTES = 64 << 20
_TOKENS_A_BATCH = 1 << 16
_REPLAYED = 1000  # batches that a replay sends at most; who lacks more gets the state
_REPLAY_SHARE = 0.2  # of this thread's time, for replays
_BYTES_A_TURN = 1 << 18  # of an answer, with what a message costs beside its bytes; the rest waits for the next turns
_MESSAGE_COST = 1 << 12
_UNREAD = 16  # messages that wait for a peer; the others wait here, of one answer at a time
_UNREAD_S = 2.0  # that a peer may take nothing of its answer; then the rest is dropped
# The share of this thread's time that goes into announcing the whole state to new subscribers, and to those that have
# missed too much. The pause after an announcement is bounded; a few announcements may run ahead of the share, since
# several subscribers may come back one after the other.
_ANEW_SHARE = 0.2
_LEAST_ANEW_S, _MOST_ANEW_S = 0.5, 10.0
_ANEW_AHEAD = 2
_JOIN_S = 0.25  # from a connection on, until its subscription is here
_END_S = 1.0

_log = logging.getLogger("pagewire")


class _Stream:
    """The sockets of one rank, its sequence, and its last batches."""

    def __init__(self, options: KVEvents, rank: int) -> None:
        address, replay_address = options.addresses(rank)
        self.rank = rank
        self._topic = options.topic.encode()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._most = options.buffer_steps
        self.sequence = time.time_ns() // 1000  # of the next batch
        self.sent_at = 0.0
        self._unsent: deque[tuple[bytes, ...]] = deque()  # what is left of the answer under way, its first for the peer
        self._taken_at = 0.0  # when the peer took something of it last; 0: nothing yet
        self.pub = bound_socket("kv_events", zmq.PUB, address, options.hwm, options.secure, SUBSCRIPTIONS)
        self.replay = None
        if replay_address is not None:
            try:
                self.replay = bound_socket("kv_events", zmq.ROUTER, replay_address, _UNREAD, options.secure)
            except InvalidParamsError:
                self.pub.close()
                raise
            self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says of a peer that its queue is full, or that it is gone
        self.joins = self.pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Where the sockets are bound."""
        return self.pub.address, None if self.replay is None else self.replay.address

    def send(self, events: Sequence[KVEvent]) -> None:
        """Send a batch. Never waits: a subscriber that cannot take it misses it."""
        payload = self._encoded(events)
        self._ring.append((self.sequence, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > self._most or (self._ring_bytes > _RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft()[1])
        self.pub.send_multipart((self._topic, _frame(self.sequence), payload))
        self.sequence += 1
        self.sent_at = time.monotonic()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return bool(self._unsent)

    def answer(self, book: EventBook) -> bool:
        """Begin to answer one request for a replay of the batches from a number on.

        Returns False if those are no longer kept: the answer is then the whole state. The answer is made now; `reply`
        sends it.
        """
        if self.replay is None:
            return True
        asked = self.replay.recv_multipart(zmq.NOBLOCK)
        if len(asked) != 3 or len(asked[2]) != 8:
            return True
        who, first, oldest = asked[0], int.from_bytes(asked[2], "big"), self._ring[0][0]
        if known := first >= oldest and self.sequence - first <= _REPLAYED:
            batches = ((number, payload) for number, payload in self._ring if number >= first)
        else:
            batches = self._state(book, first)
        self._unsent.extend((who, b"", self._topic, _frame(number), payload) for number, payload in batches)
        self._unsent.append((who, b"", b"", END_OF_REPLAY, b""))
        self._taken_at = 0.0
        return known

    def reply(self) -> bool:
        """Send a part of the answer under way, as much as its reader takes; whether it took any.

        A peer that has taken something may read on; of one that takes nothing for long, or whose queue was full when it
        asked, or that is gone, the rest is dropped.
        """
        room, now = _BYTES_A_TURN, time.monotonic()
        while self._unsent and room > 0 and self.replay is not None:
            try:
                self.replay.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                if now - self._taken_at > _UNREAD_S:
                    self._unsent.clear()
                break
            except zmq.ZMQError:  # it is gone
                self._unsent.clear()
                break
            room -= _MESSAGE_COST + len(self._unsent.popleft()[-1])
            self._taken_at = now
        return room < _BYTES_A_TURN

    def take_joins(self) -> bool:
        """Whether a subscriber has connected since the last call."""
        found = False
        while self.joins.poll(0):
            self.joins.recv_multipart()
            found = True
        return found

    def close(self) -> None:
        self.pub.disable_monitor()
        self.joins.close(linger=0)
        self.pub.close(linger=200)
        if self.replay is not None:
            self.replay.close(linger=200)

    def _state(self, book: EventBook, first: int) -> Iterable[tuple[int, bytes]]:
        """All cached pages, in batches numbered from `first` on, none above the last number that was sent.

        The subscriber also receives the batches sent since its question. They do no harm: the last event about a page
        is the one that holds.
        """
        parts = list(batched(chain([AllBlocksCleared()], book.state(self.rank))))
        count = min(len(parts), max(1, self.sequence - first))
        parts[count - 1 :] = [list(chain.from_iterable(parts[count - 1 :]))]
        for number, part in enumerate(parts, first):
            yield number, self._encoded(part)

    def _encoded(self, events: Sequence[KVEvent]) -> bytes:
        return encode(EventBatch(time.time(), events, self.rank))


class _Worker:
    """The thread's program. It holds no reference to the manager, which may be dropped without being closed."""

    def __init__(self, options: KVEvents, log: EventLog, book: EventBook, ranks: int) -> None:
        self.streams: list[_Stream] = []
        self._log = log
        self._book = book
        self._closing = threading.Event()
        self._applying = threading.Lock()  # the loop applies entries itself where the thread does not get to it
        self._behind = True  # subscribers are to be told everything anew
        self._untold: list[Told] = []  # of entries that the loop has applied
        self._lost = False  # entries were dropped: what the books say is no more true
        self._replay_at = 0.0  # when the next question is answered, at the earliest
        self._owed: list[float] = []  # from when on those wait who are to be told everything, ascending; none moves
        self._told_anew_at = 0.0  # when everybody was told everything last
        self._anew_s = _LEAST_ANEW_S  # in which that is paid off
        self._paid_at = 0.0  # when all of it will have been
        self._poller = zmq.Poller()
        try:
            for rank in range(ranks):
                self.streams.append(_Stream(options, rank))
        except InvalidParamsError:
            self._close()
            raise
        for stream in self.streams:
            self._poller.register(stream.joins, zmq.POLLIN)
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
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:  # Dynamo's listener waits for its answer without an end
            asked = self._answer(dict(self._poller.poll(0)))
            if not self._reply() and not asked and not self._is_answering():
                break
            time.sleep(_PAUSE_S)
        self._close()

    def stop(self) -> None:
        self._closing.set()

    def catch_up(self) -> None:
        """Called by the loop: the log is as long as it may be. Does not wait, and takes some entries off it.

        While the thread uses the books the log grows on; at last its entries are dropped, and the books begun anew.
        """
        entries = self._log.entries
        if self._applying.acquire(blocking=False):
            try:
                self._untold += self._apply(self._take(_ENTRIES_OF_LOOP))
                if len(self._untold) > _MOST_UNTOLD:
                    self._untold, self._behind = [], True
            finally:
                self._applying.release()
        elif len(entries) > _LOST_AT:
            entries.clear()
            self._lost = True  # after that: who begins anew sees none of those entries

    def agree(self, indexes: Mapping[int, PrefixIndex], tables: int) -> None:
        """Called by the loop: what was written down is applied, then what the books and the indexes do not agree in."""
        with self._applying:
            self._untold += self._apply(self._take(len(self._log.entries)))
            for number, index in indexes.items():
                pages = np.flatnonzero(index.published).astype(np.int32)
                digests, of = index.digests_of(pages), index.tables_of(pages)
                for table in range(1 if of is None else tables):
                    mine = digests if of is None else digests[of == table]
                    self._untold += self._apply(self._book.differences(number + table, mine))

    def turn(self) -> bool:
        """Tell what was written down since the last turn; whether there was anything."""
        with self._applying:
            if self._lost:
                self._lost = False
                self._begin_anew()
            self._behind |= self._is_due()
            behind, self._behind = self._behind, False
            if behind:
                self._told_anew_at = time.monotonic()
                self._owed = [one for one in self._owed if one > self._told_anew_at]
            started = time.thread_time()
            entries = self._take(_ENTRIES_A_TURN)
            told, self._untold = self._untold, []
            told += self._apply(entries)
            for stream in self.streams:
                self._send(stream, told, anew=behind)
            if behind:
                cost = time.thread_time() - started
                self._anew_s = min(_MOST_ANEW_S, max(_LEAST_ANEW_S, cost / _ANEW_SHARE))
                self._paid_at = max(self._paid_at, self._told_anew_at) + self._anew_s
        return bool(entries or told)

    def _is_due(self) -> bool:
        """Whether a subscriber is to be told everything now."""
        now = time.monotonic()
        return bool(self._owed) and now >= max(self._owed[0], self._paid_at - _ANEW_AHEAD * self._anew_s)

    def _owe(self, at: float) -> None:
        """Announce the whole state at the time `at`. This moves no announcement that is due already."""
        if (at := math.ceil(at * 100) / 100) not in self._owed:  # so many a second at most
            bisect.insort(self._owed, at)

    def _apply(self, entries: Sequence[Entry]) -> list[Told]:
        try:
            return self._book.apply(entries)
        except Exception:  # noqa: BLE001 - what is told is not worth the manager; of what is there by now nothing is told
            _log.exception("KV events: what was written down cannot be followed, and is begun anew")
            self._begin_anew()
            return []

    def _begin_anew(self) -> None:
        """Start with an empty book. Pages cached until now are reported only when they are stored again."""
        self._book, self._behind = self._book.begun_anew(), True

    def _send(self, stream: _Stream, told: Sequence[Told], *, anew: bool) -> None:
        if anew:
            events: Iterable[KVEvent] = chain([AllBlocksCleared()], self._book.state(stream.rank))
        else:
            events = (event for source, event in told if self._book.is_of(source, stream.rank))
        for part in batched(events):
            stream.send(part)
        if time.monotonic() - stream.sent_at > _QUIET_S:
            stream.send([])

    def _poll(self, timeout_ms: int) -> None:
        """Answer a question of each rank, part by part, unless replays have had their share of the time."""
        started = time.monotonic()
        if started < self._replay_at:
            time.sleep(timeout_ms / 1000)
            return
        ready = dict(self._poller.poll(0 if self._is_answering() else timeout_ms))
        started = time.monotonic()
        if any([stream.joins in ready and stream.take_joins() for stream in self.streams]):  # noqa: C419 - of each
            # A new or returning subscriber may be unable to ask: vLLM's router asks prefill processes for no replay.
            self._owe(started + _JOIN_S)
        asked = self._answer(ready)
        if self._reply() or asked:
            now = time.monotonic()
            self._replay_at = now + (now - started) * (1 / _REPLAY_SHARE - 1)
        elif self._is_answering():  # its reader takes its time
            time.sleep(timeout_ms / 1000)

    def _answer(self, ready: Container[object]) -> bool:
        """Begin to answer a question of each rank that has none under way; whether there was any."""
        asked = [stream for stream in self.streams if stream.replay in ready and not stream.is_answering]
        for stream in asked:
            with self._applying:  # the loop may be called to help
                # vLLM's router takes a replay up only where it leads without a gap to what it has heard.
                if not stream.answer(self._book):
                    self._owe(time.monotonic() + _JOIN_S)  # one who is new asks, too: both are told at once
        return bool(asked)

    def _reply(self) -> bool:
        return sum(stream.reply() for stream in self.streams) > 0

    def _is_answering(self) -> bool:
        return any(stream.is_answering for stream in self.streams)

    def _take(self, most: int) -> list[Entry]:
        taken: list[Entry] = []
        with contextlib.suppress(IndexError):  # the loop may drop them all meanwhile
            while len(taken) < most:
                taken.append(self._log.entries.popleft())
        return taken

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()


class EventPublisher:
    """Publishes the log of one manager until it is closed, or forgotten.

    Raises `InvalidParamsError` if an address cannot be bound, and what `options.secure` raises.
    """

    def __init__(self, options: KVEvents, log: EventLog, book: EventBook, ranks: int) -> None:
        self._worker = _Worker(options, log, book, ranks)
        log.full = self._worker.catch_up
        self.endpoints = [stream.addresses for stream in self._worker.streams]
        self._thread = threading.Thread(target=self._worker.run, name="pagewire-kv-events", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def agree(self, indexes: Mapping[int, PrefixIndex], tables: int) -> None:
        """Tell what these indexes, by their sources, have come to have or to lack while nobody wrote it down.

        `tables`: block tables of an index of pages.
        """
        self._worker.agree(indexes, tables)

    def close(self) -> None:
        """Tell what is left, and that it is gone. Waits a second at most. Safe twice."""
        self._finalizer()
        self._thread.join(_END_S)


def batched(events: Iterable[KVEvent]) -> Iterable[list[KVEvent]]:
    """The events, in parts of not too many tokens."""
    part: list[KVEvent] = []
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
