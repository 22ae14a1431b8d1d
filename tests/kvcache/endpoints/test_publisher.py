"""Tests an event stream in bad conditions: a requested replay is too old, a subscriber does not read, or a subscriber
asks too often.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import zmq

from kvcache import InvalidParamsError, KVEvents, PagedKVCacheManager
from kvcache.endpoints.publisher import _Stream, _Worker
from kvcache.events.book import EventBook
from kvcache.events.log import EventLog
from kvcache.events.wire import END_OF_REPLAY, BlockRemoved, BlockStored, CacheSpec
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.events.mirror import PATIENCE_S, Known, Mirror, settled, worker_of
from tests.kvcache.served import until

ANY = "tcp://127.0.0.1:0"
_names = itertools.count()  # A closed socket blocks its name for some time, so each test takes a new name.


@pytest.fixture
def manager() -> Iterator[PagedKVCacheManager]:
    made = manager_of(32, max_seq_len=120, params={"kv_events": KVEvents(ANY, ANY, topic="kv@a@m", buffer_steps=4)})
    yield made
    made.close()


def run(manager: PagedKVCacheManager, *starts: int) -> None:
    for start in starts:
        compute(manager, start)
        settled(manager)


def compute(manager: PagedKVCacheManager, start: int) -> None:
    run_once(manager, range(start, start + 30))


def asked(manager: PagedKVCacheManager, first: int) -> list[tuple[int, list[Any]]]:
    """Returns the numbers and events of the answer to a replay request from number `first` on."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(manager.kv_event_endpoints[0][1])
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[int, list[Any]]] = []
    while True:
        assert socket.poll(int(PATIENCE_S * 1000))
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            socket.close(linger=0)
            return found
        assert topic == b"kv@a@m"
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert abs(stamp - time.time()) < PATIENCE_S
        assert rank == 0
        found.append((int.from_bytes(number, "big"), events))


def test_the_sequence_begins_at_the_clock_with_all_cleared() -> None:
    before = time.time_ns() // 1000
    made = manager_of(16, params={"kv_events": KVEvents(ANY, ANY)})
    settled(made)
    first = worker_of(made).streams[0]._ring[0]
    assert before <= first[0] <= time.time_ns() // 1000
    assert msgspec.msgpack.decode(first[1])[1] == [{"type": "AllBlocksCleared"}]
    made.close()


def test_batches_in_the_ring_are_sent_again_on_request(manager: PagedKVCacheManager) -> None:
    run(manager, 1, 101)
    last = settled(manager)[0]
    numbers = [number for number, _ in asked(manager, last)]
    assert numbers[0] == last
    assert asked(manager, last + 100) == []


def test_a_request_for_batches_older_than_the_ring_gets_the_whole_state(manager: PagedKVCacheManager) -> None:
    run(manager, *range(1, 1000, 100))
    first = worker_of(manager).streams[0]._ring[0][0]
    for old in (0, first - 1):
        told = asked(manager, old)
        assert told[0][0] == old
        assert told[0][1][0] == {"type": "AllBlocksCleared"}
        stored = {block for _, events in told for event in events[0:] for block in event.get("block_hashes", ())}
        with Mirror(manager.kv_event_endpoints[0]) as mirror:
            mirror.settle(manager, 0)
            assert stored == set(mirror.there["GPU"])


def test_the_whole_state_comes_in_parts_with_numbers_up_to_the_last_one(
    manager: PagedKVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(manager, 1, 101, 201)
    monkeypatch.setattr("kvcache.endpoints.publisher._TOKENS_A_BATCH", 28)
    told = asked(manager, 5)
    numbers = [number for number, _ in told]
    assert numbers == [5, 6, 7]
    assert len(told[0][1]) == 2
    worker = worker_of(manager)
    with worker._applying:  # If few sequence numbers are left, the last message has all remaining pages.
        few = list(worker.streams[0]._state(worker._book, worker.streams[0].sequence - 2))
    assert [number - worker.streams[0].sequence for number, _ in few] == [-2, -1]
    assert [len(msgspec.msgpack.decode(payload)[1]) for _, payload in few] == [2, 2]


def test_a_manager_that_closes_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # After one answer the next answer has to wait.
    monkeypatch.setattr("kvcache.endpoints.publisher._REPLAY_SHARE", 1e-6)
    made = manager_of(16, params={"kv_events": KVEvents(ANY, ANY, topic="kv@a@m")})
    run(made, 1)
    assert asked(made, 0)
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(made.kv_event_endpoints[0][1])
        socket.send_multipart([b"", bytes(8)])
        assert not socket.poll(300)
        made.close()
        assert socket.poll(int(PATIENCE_S * 1000))


def test_a_malformed_question_gets_no_answer(manager: PagedKVCacheManager) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(manager.kv_event_endpoints[0][1])
    for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"], [b"", bytes(9)]):
        socket.send_multipart(frames)
    assert asked(manager, 0)
    assert not socket.poll(0)
    socket.close(linger=0)


def test_a_ring_is_bounded_in_batches_and_in_bytes(
    manager: PagedKVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(manager, *range(1, 1000, 100))
    stream = worker_of(manager).streams[0]
    assert len(stream._ring) == 4
    monkeypatch.setattr("kvcache.endpoints.publisher._RING_BYTES", 10)
    run(manager, 3001)
    assert len(stream._ring) == 1
    assert stream._ring_bytes == len(stream._ring[0][1])


def test_a_subscriber_that_stops_reading_misses_messages_and_recovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._QUIET_S", 0.02)
    address = f"ipc://{tmp_path}/s"
    made = manager_of(32, params={"kv_events": KVEvents(address, ANY, hwm=1, buffer_steps=2)}, dp=2)
    assert [pub for pub, _ in made.kv_event_endpoints] == [address, f"{address}_dp1"]
    with Mirror(made.kv_event_endpoints[0]).begin() as mirror:
        run(made, *range(1, 20_000, 100))
        before = mirror.replays
        mirror.settle(made, 0)
        mirror.check_same(made, 0)
        assert mirror.replays >= before
    made.close()


def test_a_flood_of_questions_takes_a_share_of_the_threads_time_and_no_memory(manager: PagedKVCacheManager) -> None:
    run(manager, 1)
    worker = worker_of(manager)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(manager.kv_event_endpoints[0][1])
    for _ in range(5000):
        socket.send_multipart([b"", bytes(8)])
    run(manager, 101)  # `run` also waits until the publisher has reported its pages.
    until(lambda: worker._replay_at > 0)  # a busy machine may deliver the questions late
    started = time.thread_time()
    run(manager, 201)
    assert time.thread_time() - started < 1
    socket.close(linger=0)


@pytest.fixture
def stream() -> Iterator[_Stream]:
    # Both ends are in this process, so ZMQ's queues are the only buffers between them.
    made = _Stream(KVEvents(ANY, f"inproc://replays-{next(_names)}"), 0)
    yield made
    made.close()


def test_the_ring_is_replayed_only_if_it_has_no_gap() -> None:
    """The batch before the oldest kept batch is no longer there. A follower that asks for it gets the whole state."""
    few = KVEvents(ANY, f"inproc://replays-{next(_names)}", buffer_steps=4)
    with contextlib.closing(_Stream(few, 0)) as stream:
        begin, book = stream.sequence, EventBook(1, 8, 4, CacheSpec("full_attention"))
        for number in range(10):
            stream.send([BlockRemoved([number], "GPU")])
        for first, known in (
            (begin, False),
            (begin + 5, False),
            (begin + 6, True),
            (begin + 9, True),
            (begin + 10, True),
        ):
            socket = peer_of(stream, first)
            assert stream.answer(book) == known
            *told, end = [int.from_bytes(message[3], "big") for message in stream._unsent]
            assert end == int.from_bytes(END_OF_REPLAY, "big")
            assert told == ([*range(first, begin + 10)] if known else [first])
            stream._unsent.clear()
            socket.close(linger=0)


def peer_of(stream: _Stream, first: int) -> zmq.Socket[bytes]:
    """Returns a peer that has asked for all messages from number `first` on and has not read yet."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(stream.addresses[1])
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    return socket


def asking(stream: _Stream, first: int) -> zmq.Socket[bytes]:
    """Makes a peer as `peer_of` does, and yields it while the stream answers it."""
    socket = peer_of(stream, first)
    assert stream.answer(EventBook(1, 8, 4, CacheSpec("full_attention")))
    return socket


def is_gone(stream: _Stream) -> bool:
    """Returns whether the stream's socket has noticed that the answered peer has disconnected."""
    assert stream.replay is not None
    try:
        stream.replay.send_multipart([stream._unsent[0][0], b""], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno == zmq.EHOSTUNREACH
    return False


def read(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Returns the numbers of the messages that have arrived at a peer."""
    found: list[bytes] = []
    while socket.poll(0):
        found.append(socket.recv_multipart()[2])
    return found


def test_an_answer_goes_out_in_parts_as_its_reader_takes_it(stream: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._BYTES_A_TURN", 4 * (4096 + 1000))
    first = stream.sequence
    for _ in range(60):
        stream.send([BlockRemoved([1], "x" * 1000)])
    socket = asking(stream, first)
    got: list[bytes] = []
    while stream.is_answering:
        stream.reply()
        some = read(socket)
        assert len(some) <= 4
        got += some
    assert got == [*((first + at).to_bytes(8, "big") for at in range(60)), END_OF_REPLAY]
    socket.close(linger=0)


def test_few_messages_of_unread_answers_are_kept(stream: _Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stream.sequence
    for _ in range(300):
        stream.send([])
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.endpoints.publisher._UNREAD_S", 0.05)
        deaf = asking(stream, first)
        waited(lambda: not stream.reply() and not stream.is_answering)
    gone = asking(stream, first)
    gone.close(linger=0)
    waited(lambda: is_gone(stream))
    assert not stream.reply()
    assert not stream.is_answering
    reader, got = asking(stream, first), list[bytes]()
    while stream.is_answering:
        stream.reply()
        got += read(reader)
    assert len(got) == 301
    # The peer keeps asking. The publisher stores no part of the answers, and the answers delay no other peer.
    for _ in range(20):
        deaf.send_multipart([b"", first.to_bytes(8, "big")])
        assert stream.answer(EventBook(1, 8, 4, CacheSpec("full_attention")))
        assert not stream.reply()
        assert not stream.is_answering
    assert len(read(deaf)) <= 16 + 1
    for socket in (deaf, reader):
        socket.close(linger=0)


def test_one_answer_is_sent_at_a_time() -> None:
    worker = _Worker(
        KVEvents(ANY, f"inproc://replays-{next(_names)}"),
        EventLog(),
        EventBook(1, 8, 4, CacheSpec("full_attention")),
        1,
    )
    (stream,) = worker.streams
    first = stream.sequence
    for _ in range(40):
        stream.send([])
    peers = [peer_of(stream, first) for _ in range(2)]
    got: list[bytes] = []
    for number in (1, 2):
        assert worker._answer({stream.replay})
        assert not worker._answer({stream.replay}), "the other peer has to wait"
        while worker._is_answering():
            worker._reply()
            got += [one for peer in peers for one in read(peer)]
        assert len(got) == 41 * number
    for socket in peers:
        socket.close(linger=0)
    worker._close()


def failing(*_: object, **__: object) -> Any:
    raise MemoryError


def test_changes_that_could_not_be_sent_are_replaced_by_the_whole_state(
    manager: PagedKVCacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._QUIET_S", 0.02)
    stream = worker_of(manager).streams[0]
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        with monkeypatch.context() as patch:
            patch.setattr(stream, "send", failing)
            compute(manager, 1)
            waited(lambda: "a turn of the publisher thread failed" in caplog.text)
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert mirror.events[0] == {"type": "AllBlocksCleared"}, (
            "the whole state is sent, not only the changes after the failure"
        )


def test_after_an_error_in_the_events_all_pages_are_reported_as_gone_and_the_loop_continues(
    manager: PagedKVCacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(manager)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        run(manager, 1, 101)
        for met_by in (worker.turn, worker.catch_up):
            with monkeypatch.context() as patch:
                idle = threading.Event()
                patch.setattr(worker, "turn", idle.set)  # It returns None: there are no events.
                assert idle.wait(PATIENCE_S), "the thread has not ended its last turn"
                patch.setattr(worker._book, "apply", failing)
                compute(manager, 201)
                met_by()
                waited(lambda: "is announced again" in caplog.text)
                caplog.clear()
            mirror.settle(manager, 0)
            assert not any(mirror.there.values())
            run(manager, 301, 401)
            mirror.settle(manager, 0)
            assert len(mirror.there["GPU"]) == 14
            run(manager, *range(1001, 2000, 100))  # These prompts evict every earlier page.
            mirror.settle(manager, 0)
            mirror.check_same(manager, 0)


def waited(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_subscribers_with_a_key_receive_events() -> None:
    from transfer.wire.keys import make_keyrings

    ours, stranger = make_keyrings(2)
    ours = msgspec.structs.replace(ours, allowed=(ours.public,))
    made = manager_of(16, params={"kv_events": KVEvents(ANY, ANY, secure=ours.secure_server)})
    sockets = [zmq.Context.instance().socket(zmq.SUB) for _ in range(2)]
    for socket, keyring in zip(sockets, (ours, stranger), strict=True):
        keyring.secure_client(socket)
        socket.connect(made.kv_event_endpoints[0][0])
        socket.subscribe(b"")
    assert sockets[0].poll(PATIENCE_S * 1000)
    assert not sockets[1].poll(200)
    for socket in sockets:
        socket.close(linger=0)
    made.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "127.0.0.1:1"}, "endpoint is '127.0.0.1:1': an address"),
        ({"endpoint": None}, "endpoint is None"),
        ({"replay_endpoint": "tcp://127.0.0.1"}, "replay_endpoint is .* with a port"),
        ({"topic": b"x"}, "topic is b'x': text is needed"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": 0}, "hwm is 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        KVEvents(**options)


def test_an_address_that_is_taken_is_refused_and_leaves_nothing(manager: PagedKVCacheManager) -> None:
    taken = manager.kv_event_endpoints[0][0]
    with pytest.raises(InvalidParamsError, match=f"cannot bind '{taken}'"):
        manager_of(16, params={"kv_events": KVEvents(ANY, taken)})


def test_each_rank_has_the_port_after_the_one_before() -> None:
    options = KVEvents("tcp://127.0.0.1:5557", "inproc://replay")
    assert options.addresses(0) == ("tcp://127.0.0.1:5557", "inproc://replay")
    assert options.addresses(3) == ("tcp://127.0.0.1:5560", "inproc://replay_dp3")


def test_without_a_prefix_cache_nothing_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    made = manager_of(16, caching=False, params={"kv_events": KVEvents(ANY)})
    assert made.kv_event_endpoints == []
    assert "kv_events changes nothing without enable_prefix_caching" in caplog.text


def test_events_of_long_runs_are_several() -> None:
    from kvcache.replica.hashing import PrefixHasher

    size, pages = 1024, 40
    tokens = np.arange(size * pages, dtype=np.int32)
    hasher = PrefixHasher("sha256", size, None, ())
    digests = hasher.digests(tokens, 0, pages)
    book = EventBook(1, pages, size, CacheSpec("full_attention"))
    one = np.array([0]), np.array([pages])
    told = [event for _, event in book.apply([([hasher], *one, [tokens.tobytes()]), (0, True, digests)])]
    assert [len(event.block_hashes) for event in told if isinstance(event, BlockStored)] == [16, 16, 8]
    assert [event.parent_block_hash for event in told[1:] if isinstance(event, BlockStored)] == [
        told[0].block_hashes[-1],  # type: ignore[union-attr]
        told[1].block_hashes[-1],  # type: ignore[union-attr]
    ]


def test_a_follower_that_missed_too_much_causes_a_new_whole_state_but_not_too_often(
    manager: PagedKVCacheManager,
) -> None:
    run(manager, 1)
    worker = worker_of(manager)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        asked(manager, 0)
        mirror.until(lambda: {"type": "AllBlocksCleared"} in mirror.events)
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        # The publisher behaves as if it had resent a large cache several times.
        worker._paid_at = time.monotonic() + 60
        del mirror.events[:]
        asked(manager, 0)
        run(manager, 101)
        mirror.settle(manager, 0)
        assert {"type": "AllBlocksCleared"} not in mirror.events
        worker._paid_at = 0.0  # The publisher may now send the state again. No follower has to ask for it.
        mirror.until(lambda: {"type": "AllBlocksCleared"} in mirror.events)
        assert not worker._owed


def test_a_late_subscriber_that_cannot_ask_gets_the_whole_state() -> None:
    made = manager_of(32, max_seq_len=120, params={"kv_events": KVEvents(ANY)})
    run(made, 1, 101)
    told: list[int] = []
    for number in range(4):
        with Mirror(made.kv_event_endpoints[0]) as mirror:
            mirror.until(lambda mirror=mirror: bool(mirror.there.get("GPU")))
            mirror.check_same(made, 0)
            told.append(len(mirror.there["GPU"]))
        run(made, 201 + 100 * number)
    made.close()
    assert told == sorted(told), "each follower knows the pages that were cached before it came"
    assert told[0] > 0


def test_the_whole_state_is_sent_only_some_time_after_a_subscription_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._JOIN_S", 60.0)
    made = manager_of(32, max_seq_len=120, params={"kv_events": KVEvents(ANY)})
    worker = worker_of(made)
    with Mirror(made.kv_event_endpoints[0]):
        waited(lambda: worker._owed)
        assert worker._owed[0] > time.monotonic() + 20
    made.close()


class Churning:
    """A subscriber that reconnects again and again in its own thread."""

    def __init__(self, address: str, every_s: float) -> None:
        self.count = 0
        self._address, self._every_s = address, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._ended.is_set():
                with context.socket(zmq.SUB) as socket:
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.subscribe(b"")
                    socket.connect(self._address)
                    self.count += 1
                    self._ended.wait(self._every_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("every_s", [0.5, 0.15])
def test_a_peer_that_reconnects_all_the_time_does_not_keep_events_from_others(every_s: float) -> None:
    made = manager_of(32, max_seq_len=120, params={"kv_events": KVEvents(ANY)})
    run(made, 1, 101)
    with Churning(made.kv_event_endpoints[0][0], every_s) as churning:
        waited(lambda: churning.count > 5)
        for _ in range(3):
            before = churning.count
            with Mirror(made.kv_event_endpoints[0]) as late:
                late.until(lambda late=late: bool(late.there.get("GPU")))
                late.check_same(made, 0)
            assert churning.count - before < 5 / every_s, "half of what it takes where each moves the deadline"
    made.close()


def test_an_outdated_replay_request_causes_a_whole_state_while_a_peer_reconnects_all_the_time(
    manager: PagedKVCacheManager,
) -> None:
    run(manager, 1)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        replays = mirror.replays
        with Churning(manager.kv_event_endpoints[0][0], 0.1) as churning:
            waited(lambda: churning.count > 5)
            for _ in range(3):
                del mirror.events[:]
                asked(manager, 0)
                mirror.until(lambda: {"type": "AllBlocksCleared"} in mirror.events)
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert mirror.replays == replays, "the follower got the state without asking for a replay"


def test_followers_that_return_one_after_another_get_the_state_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The followers reconnect, as they do after SIGKILL. The cache is so large that its state may be sent only every 10
    s.
    """
    monkeypatch.setattr("kvcache.endpoints.publisher._LEAST_ANEW_S", 10.0)
    options = {"kv_events": KVEvents(ANY)}
    made = manager_of(32, max_seq_len=120, params=options)
    address = made.kv_event_endpoints[0][0]
    run(made, 1, 101)
    waits_ms = (10, 1200)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        followers = [stack.enter_context(context.socket(zmq.SUB)) for _ in waits_ms]
        for socket, wait_ms in zip(followers, waits_ms, strict=True):
            for option, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, wait_ms), (zmq.RECONNECT_IVL_MAX, 0)):
                socket.setsockopt(option, value)
            socket.subscribe(b"")
            socket.connect(address)
        for stream in worker_of(made).streams:
            stream.send = lambda _: None  # A killed process sends no more messages.
        made.close()
        for socket in followers:
            while socket.poll(200):
                socket.recv_multipart()
        made = manager_of(32, max_seq_len=120, params={"kv_events": KVEvents(address)})
        run(made, 1, 101)
        began = time.monotonic()
        known = [Known() for _ in followers]
        for socket, one in zip(followers, known, strict=True):
            while len(one.there.get("GPU", ())) < 14:
                assert socket.poll(int(PATIENCE_S * 1000))
                one.take_up(msgspec.msgpack.decode(socket.recv_multipart()[2])[1])
        assert time.monotonic() - began < 8, "the first follower has not used up the time for the second one"
        assert known[0].there == known[1].there
    made.close()


def test_peers_that_fill_a_queue_and_die_do_no_harm(manager: PagedKVCacheManager) -> None:
    """With ZMQ's own heartbeats such peers sometimes ended this process. The sockets therefore use no heartbeats."""
    stream = worker_of(manager).streams[0]
    assert stream.pub.getsockopt(zmq.HEARTBEAT_IVL) == stream.replay.getsockopt(zmq.HEARTBEAT_IVL) == 0
