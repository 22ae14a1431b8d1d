"""`EventPublisher`: a thread that builds events from the loop's record, and sends them to subscribers.

The loop only appends entries to a log, and the thread takes the entries from the log, so no subscriber can delay the
loop. Every buffer has a limit. If a buffer drops a message, subscribers see a gap in the sequence numbers, and can ask
for a replay. The answer has all batches from the requested number on. If some of these batches are no longer kept, the
answer has `AllBlocksCleared` and the whole state instead, in batches that are numbered from the requested number on.
The first sequence number is the clock in microseconds. So after a restart, a subscriber sees only higher numbers than
before. The first event is `AllBlocksCleared`.
"""

import bisect
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import chain

import numpy as np
import zmq

from kvcache.endpoints.sockets import SUBSCRIPTIONS, bound_socket
from kvcache.errors import InvalidParamsError
from kvcache.events.book import EventBook, Told
from kvcache.events.log import MOST_ENTRIES, Entry, EventLog, Watched
from kvcache.events.wire import END_OF_REPLAY, AllBlocksCleared, BlockStored, CacheSpec, EventBatch, KVEvent, encode
from kvcache.params import KVEvents
from kvcache.weights import Weights

_LOOK_MS = 5  # in milliseconds: how long the thread sleeps when the log is empty
# The thread pauses after this many entries, and after a number of tokens in events, because Python switches threads
# only after 5 ms, unless the running thread waits. The pause is long enough for a waiting thread to wake up.
_ENTRIES_A_TURN = 16
_TOKENS_A_TURN = 1 << 11
_PAUSE_S = 5e-5
# If the publisher's thread gets no time, the loop applies this many entries in each call. The thread sends the events
# later. If too many events wait to be sent, they are dropped, and the whole state is announced again.
_ENTRIES_OF_LOOP = 128
_MOST_UNTOLD = 1 << 12
_LOST_AT = 4 * MOST_ENTRIES  # if the log has more unread entries than this number, all unread entries are dropped
# In seconds. If there are no events for this time, an empty batch is sent. So a subscriber that missed the last batch
# notices the gap in the numbers.
_QUIET_S = 1.0
_RING_BYTES = 64 << 20
_TOKENS_A_BATCH = 1 << 16
_REPLAYED = 1000  # the largest number of batches in a replay; a subscriber that lacks more batches gets the whole state
_REPLAY_SHARE = 0.2  # the share of the thread's time that replays may take
# In bytes: how much of the answer to a replay request is sent in one turn. Each message counts as its bytes and
# `_MESSAGE_COST`. The next turns send the rest of the answer.
_BYTES_A_TURN = 1 << 18
_MESSAGE_COST = 1 << 12
# How many messages of an answer may wait in the socket for a peer. The rest of the answer waits in `_unsent`.
_UNREAD = 16
_UNREAD_S = 2.0  # in seconds: if a peer takes no message of its answer for this long, the rest of the answer is dropped
# The share of the thread's time for announcing the whole state to subscribers that are new or have missed too much. To
# keep to the share, each announcement is followed by a pause of limited length. A few announcements may come without
# their pauses, because several subscribers may return one after another.
_ANEW_SHARE = 0.2
_LEAST_ANEW_S, _MOST_ANEW_S = 0.5, 10.0
_ANEW_AHEAD = 2
_JOIN_S = 0.25  # in seconds: when this time has passed after a connection was made, its subscription has surely arrived
_END_S = 1.0

_log = logging.getLogger("pagewire")


class _Stream:
    """The sockets of one rank, its next sequence number, and the last batches that it sent."""

    def __init__(self, options: KVEvents, rank: int) -> None:
        address, replay_address = options.addresses(rank)
        self.rank = rank
        self._topic = options.topic.encode()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._most = options.buffer_steps
        self.sequence = time.time_ns() // 1000  # the number of the next batch to send
        self.sent_at = 0.0
        # The messages of the current answer that are not sent yet. Each begins with the peer's address.
        self._unsent: deque[tuple[bytes, ...]] = deque()
        self._taken_at = 0.0  # when the peer last took a message of the current answer; 0 if it has not taken any
        self.pub = bound_socket("kv_events", zmq.PUB, address, options.hwm, options.secure, SUBSCRIPTIONS)
        self.replay = None
        if replay_address is not None:
            try:
                self.replay = bound_socket("kv_events", zmq.ROUTER, replay_address, _UNREAD, options.secure)
            except InvalidParamsError:
                self.pub.close()
                raise
            # with ROUTER_MANDATORY, sending fails if the peer's queue is full or the peer is gone
            self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.joins = self.pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def addresses(self) -> tuple[str, str | None]:
        """The addresses to which the sockets are bound."""
        return self.pub.address, None if self.replay is None else self.replay.address

    def send(self, events: Sequence[KVEvent]) -> None:
        """Send a batch without waiting. A subscriber whose queue is full does not get it."""
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
        """Whether the answer to the last replay request is not completely sent yet."""
        return bool(self._unsent)

    def answer(self, book: EventBook) -> bool:
        """Read a request for a replay of all batches from a given number on, and prepare the answer. `reply` sends it.

        Returns False if there are too many of these batches, or if some are no longer kept. In both cases, the answer
        is the whole state.
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
        """Send as many messages of the current answer as the peer takes now. Returns whether the peer took any.

        The rest of the answer is dropped if the peer is gone, if it takes no message for `_UNREAD_S`, or if its queue
        was already full when it asked.
        """
        room, now = _BYTES_A_TURN, time.monotonic()
        while self._unsent and room > 0 and self.replay is not None:
            try:
                self.replay.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                if now - self._taken_at > _UNREAD_S:
                    self._unsent.clear()
                break
            except zmq.ZMQError:  # the peer is gone
                self._unsent.clear()
                break
            room -= _MESSAGE_COST + len(self._unsent.popleft()[-1])
            self._taken_at = now
        return room < _BYTES_A_TURN

    def take_joins(self) -> bool:
        """Returns whether a subscriber has connected since the last call."""
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
        """Returns the whole state as batches that are numbered from `first` on.

        No batch gets a higher number than the last batch that was sent. The subscriber also receives the batches that
        were sent after its request. These batches do no harm, because the last event about a page decides.
        """
        parts = list(batched(chain([AllBlocksCleared()], book.state(self.rank))))
        count = min(len(parts), max(1, self.sequence - first))
        parts[count - 1 :] = [list(chain.from_iterable(parts[count - 1 :]))]
        for number, part in enumerate(parts, first):
            yield number, self._encoded(part)

    def _encoded(self, events: Sequence[KVEvent]) -> bytes:
        return encode(EventBatch(time.time(), events, self.rank))


class _Worker:
    """The program of the publisher's thread.

    It holds no reference to the manager, so a manager that was never closed can be garbage-collected.
    """

    def __init__(self, options: KVEvents, log: EventLog, book: EventBook, ranks: int) -> None:
        self.streams: list[_Stream] = []
        self._log = log
        self._book = book
        self.closing = threading.Event()
        # A thread holds this lock while it uses the book. If the publisher's thread falls behind, the loop applies
        # entries to the book, too.
        self._applying = threading.Lock()
        self._behind = True  # whether the whole state has to be announced in the next turn
        self._untold: list[Told] = []  # events of entries that the loop has applied, which are not sent yet
        self._lost = False  # whether entries were dropped, so that the book no longer agrees with the caches
        self._replay_at = 0.0  # when the next replay may begin
        # The times at which the whole state must be announced, ascending. A time that is in the list is never changed.
        self._owed: list[float] = []
        self._told_anew_at = 0.0  # when the whole state was last announced
        # how long to pause after an announcement, so that announcements keep to their share of the time
        self._anew_s = _LEAST_ANEW_S
        self._paid_at = 0.0  # the time at which the pauses for all announcements so far are over
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
        while not self.closing.is_set():
            try:
                if self.turn():
                    time.sleep(_PAUSE_S)
                    self._poll(0)
                else:
                    self._poll(_LOOK_MS)
            except Exception:  # noqa: BLE001 - the whole state is announced anew
                _log.exception("KV events: a turn of the publisher thread failed")
                self._behind = True
                time.sleep(_QUIET_S)
        while self.turn():
            pass
        for stream in self.streams:
            stream.send([AllBlocksCleared()])
        deadline = time.monotonic() + _END_S
        # Dynamo's listener waits for its answer without a timeout, so the last events must reach it.
        while time.monotonic() < deadline:
            asked = self._answer(dict(self._poller.poll(0)))
            if not self._reply() and not asked and not self._is_answering():
                break
            time.sleep(_PAUSE_S)
        self._close()

    def catch_up(self) -> None:
        """Apply some entries to the book if the log is too long. The loop calls this method, so it must never wait.

        While the thread uses the book, this call applies nothing, and the log grows. If the log has more than
        `_LOST_AT` entries, all its entries are dropped. The next turn then begins with an empty book.
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
            self._lost = True  # set after the entries are dropped, so that no dropped entry gets into the new book

    def agree(self, indexes: Sequence[Watched]) -> None:
        """Apply the whole log to the book, and then the differences between book and indexes. Called by the loop."""
        with self._applying:
            self._untold += self._apply(self._take(len(self._log.entries)))
            for index, source, tables in indexes:
                pages = np.flatnonzero(index.published)
                digests, of = index.digests_of(pages), index.tables[pages]
                for table in range(tables):
                    self._untold += self._apply(self._book.differences(source + table, digests[of == table]))

    def turn(self) -> bool:
        """Send the events of all entries that were added since the last turn. Returns whether there were any."""
        with self._applying:
            if self._lost:
                self._lost = False
                self._begin_anew()
            started = time.thread_time()
            entries = self._take(_ENTRIES_A_TURN)
            told, self._untold = self._untold, []
            told += self._apply(entries)
            self._behind |= self._is_due() or self._book.has_switched
            behind, self._behind, self._book.has_switched = self._behind, False, False
            if behind:
                self._told_anew_at = time.monotonic()
                self._owed = [one for one in self._owed if one > self._told_anew_at]
            for stream in self.streams:
                self._send(stream, told, anew=behind)
            if behind:
                cost = time.thread_time() - started
                self._anew_s = min(_MOST_ANEW_S, max(_LEAST_ANEW_S, cost / _ANEW_SHARE))
                self._paid_at = max(self._paid_at, self._told_anew_at) + self._anew_s
        return bool(entries or told)

    def _is_due(self) -> bool:
        """Returns whether the whole state must be announced now."""
        now = time.monotonic()
        return bool(self._owed) and now >= max(self._owed[0], self._paid_at - _ANEW_AHEAD * self._anew_s)

    def _owe(self, at: float) -> None:
        """Plan an announcement of the whole state at the time `at`. Announcements planned earlier stay planned."""
        # The time is rounded to hundredths of a second, so that at most 100 announcements are planned for a second.
        if (at := math.ceil(at * 100) / 100) not in self._owed:
            bisect.insort(self._owed, at)

    def _apply(self, entries: Sequence[Entry]) -> list[Told]:
        try:
            return self._book.apply(entries)
        except Exception:  # noqa: BLE001 - events must not stop the manager; pages cached now are no longer reported
            _log.exception("KV events: the log could not be applied; the whole state is announced again")
            self._begin_anew()
            return []

    def _begin_anew(self) -> None:
        """Begin again with an empty book. A page that is cached now is not reported until it is stored again."""
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
        """Send a part of the answer to one replay request of each rank.

        Does nothing while replays have used up their share of the thread's time.
        """
        started = time.monotonic()
        if started < self._replay_at:
            time.sleep(timeout_ms / 1000)
            return
        ready = dict(self._poller.poll(0 if self._is_answering() else timeout_ms))
        started = time.monotonic()
        if any([stream.joins in ready and stream.take_joins() for stream in self.streams]):  # noqa: C419 - a list, as each is asked
            # The whole state is announced for a new subscriber, because it may never ask for a replay. For example,
            # vLLM's router asks no prefill processes.
            self._owe(started + _JOIN_S)
        asked = self._answer(ready)
        if self._reply() or asked:
            now = time.monotonic()
            self._replay_at = now + (now - started) * (1 / _REPLAY_SHARE - 1)
        elif self._is_answering():  # the peer did not take any part of its answer in this turn
            time.sleep(timeout_ms / 1000)

    def _answer(self, ready: Container[object]) -> bool:
        """Read one replay request of each rank, unless the rank is still sending an answer. Prepare the answers.

        Returns whether there was a request.
        """
        asked = [stream for stream in self.streams if stream.replay in ready and not stream.is_answering]
        for stream in asked:
            with self._applying:  # the loop also uses the book, when it calls `catch_up`
                # If the answer is the whole state, the state is also announced to all subscribers. vLLM's router needs
                # this: it uses a replay only if the replay's first number directly follows the number of the last batch
                # that it received.
                if not stream.answer(self._book):
                    # The new connection of this subscriber also plans an announcement at about this time. One
                    # announcement is enough.
                    self._owe(time.monotonic() + _JOIN_S)
        return bool(asked)

    def _reply(self) -> bool:
        return sum(stream.reply() for stream in self.streams) > 0

    def _is_answering(self) -> bool:
        return any(stream.is_answering for stream in self.streams)

    def _take(self, most: int) -> list[Entry]:
        taken: list[Entry] = []
        with contextlib.suppress(IndexError):  # the loop may clear the log meanwhile, when it calls `catch_up`
            while len(taken) < most:
                taken.append(self._log.entries.popleft())
        return taken

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()


class EventPublisher:
    """Publishes the changes of `indexes` until the publisher is closed or garbage-collected.

    `specs` describes each block table of a rank. `weights` are those of the manager. `log` is the record of the
    changes.

    Raises `InvalidParamsError` if an address cannot be bound. Also raises what `options.secure` raises.
    """

    def __init__(
        self,
        options: KVEvents,
        specs: Sequence[CacheSpec],
        ranks: int,
        page_size: int,
        indexes: Sequence[Watched],
        weights: Weights | None = None,
    ) -> None:
        self._indexes = indexes
        self.log = EventLog()
        capacity = sum(len(each.pages.published) for each in indexes)
        book = EventBook(ranks, capacity, page_size, *specs, reader=options.reader, weights=weights)
        self._worker = _Worker(options, self.log, book, ranks)
        self.log.full = self._worker.catch_up
        for each in indexes:
            self.log.watch(each)
        self.endpoints = [stream.addresses for stream in self._worker.streams]
        self._thread = threading.Thread(target=self._worker.run, name="pagewire-kv-events", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._worker.closing.set)

    def agree(self) -> None:
        """Report to subscribers how the contents of the indexes differ from the earlier reports."""
        self._worker.agree(self._indexes)

    def close(self) -> None:
        """Send the remaining events, and `AllBlocksCleared`. Waits for at most a second. Safe to call twice."""
        self._finalizer()
        self._thread.join(_END_S)


def batched(events: Iterable[KVEvent]) -> Iterable[list[KVEvent]]:
    """Split events into batches that each have a limited number of tokens."""
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
