"""Random and mutated bytes for all code that reads bytes from a peer: `python -m tests.transfer.fuzz`.

There are three kinds of input. The first kind is noise. The second kind is a valid message with bytes flipped, cut,
doubled or inserted. The third kind is metadata whose fields were changed before it was sealed with the right key, as
only an engine of the fleet could do.

Each input must be accepted, or refused with an error of pagewire, in bounded time and memory. After it the next valid
message must be answered.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvcache.layout import PageLayout
from tests.transfer import fuzz_replies
from transfer.connector.config import WorkerConfig
from transfer.connector.scheduler import Offer
from transfer.engine.metadata import (
    WIRE_VERSION,
    KVTransferEngineMetadata,
    TensorAgentMetadata,
    decode_metadata,
    encode,
    sealed,
)
from transfer.errors import TransferError
from transfer.memory import MemoryType
from transfer.nixl.settings import agreed_settings
from transfer.plan.shapes import dense
from transfer.pull.lease import LeaseBook, LeaseRef, make_words
from transfer.pull.remote import RemoteEngine
from transfer.pull.source import OfferedPages
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.messages import (
    LeasedPages,
    LeaseQuery,
    LeaseRefusal,
    MetadataQuery,
    Ping,
    Pong,
    RankMetadata,
    ReaderNote,
    decode_note,
    decode_query,
    encode_message,
    open_pages,
    open_rank,
    sealed_pages,
    sealed_rank,
)
from transfer.wire.prompt import Prompt

KEY = b"fleet"
SLOW_S = 2.0
ENOUGH = 1000  # After this number of messages, each target must have refused some messages.
ODD = (
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    "",
    "x" * 1000,
    b"",
    b"\0" * 64,
    [],
    {},
    None,
    1.5,
    True,
)


def rank_metadata(rank: int = 0, engine_id: str = "p") -> RankMetadata:
    """Returns the metadata of a rank of a small engine, with made-up addresses."""
    page = PageLayout("bfloat16", 2, 2, 2, rank * 2, 2, 16, 8, "head,layer,side,token,dim")
    return RankMetadata(
        engine_id=engine_id,
        incarnation=f"{engine_id}1",
        rank=rank,
        ranks=2,
        hostname="host",
        agent_name=f"{engine_id}/{rank}",
        agent_metadata=b"nixl",
        memory_type=MemoryType.DRAM,
        layout=dense(page, 32),
        bases=(1 << 20,),
        device=0,
        words_addr=1 << 30,
        words=64,
        settings=agreed_settings(),
    )


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns `data` with a few bytes changed, cut, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1) if changed else 0
        match rng.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                changed[at:at] = changed[: rng.randint(0, 64)]
            case _ if changed:
                changed[at % len(changed)] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            case _:
                pass
    return bytes(changed)


def with_odd_values(value: Any, rng: random.Random, share: float) -> Any:
    """Returns a copy of decoded msgpack in which some values are replaced, dropped or doubled."""
    if rng.random() < share:
        number = isinstance(value, int) and rng.random() < 0.7
        return value * rng.choice((2, 3, 1000, -1)) + rng.randint(-2, 2) if number else rng.choice(ODD)
    if isinstance(value, dict):
        return {key: with_odd_values(item, rng, share) for key, item in value.items() if rng.random() > share / 4}
    if isinstance(value, list):
        items = [with_odd_values(item, rng, share) for item in value]
        return items * 2 if rng.random() < share else items
    return value


class Target:
    """Code that reads bytes. `feed` returns the result. Any exception other than an error of pagewire is a failure."""

    def __init__(self, name: str, seeds: list[bytes], take: Callable[[bytes], object]) -> None:
        self.name = name
        self.verdicts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._seeds = seeds
        self._take = take

    def feed(self, rng: random.Random) -> None:
        data = rng.randbytes(rng.randint(0, 200)) if rng.random() < 0.2 else mutated(rng.choice(self._seeds), rng)
        self.give(data)

    def give(self, data: bytes) -> None:
        # The test measures processor time, because this thread may have to wait for other threads.
        begin = time.thread_time()
        try:
            self._take(data)
            self.verdicts["taken"] += 1
        except TransferError:
            self.verdicts["refused"] += 1
        self.slowest_s = max(self.slowest_s, time.thread_time() - begin)


class SealedTarget(Target):
    """A target that reads wrong metadata of an engine with the right key."""

    def __init__(self) -> None:
        self._mine = open_rank(sealed_rank(rank_metadata(0, "d"), KEY), KEY)
        super().__init__("sealed metadata", [], self._plan)

    def feed(self, rng: random.Random) -> None:
        ranks: list[bytes] = []
        for rank in range(2):
            fields = msgspec.msgpack.decode(msgspec.msgpack.encode(rank_metadata(rank)))
            odd = msgspec.msgpack.encode(with_odd_values(fields, rng, rng.choice((0.0, 0.01, 0.03, 0.1))))
            try:
                ranks.append(sealed_rank(msgspec.msgpack.decode(odd, type=RankMetadata), KEY))
            except (msgspec.DecodeError, OverflowError):
                ranks.append(odd)
        self.give(msgspec.msgpack.encode(ranks))

    def _plan(self, data: bytes) -> None:
        found = [open_rank(rank, KEY) for rank in msgspec.msgpack.decode(data, type=list[bytes])]
        RemoteEngine(found, self._mine, {})


def engine_metadata() -> bytes:
    agent = TensorAgentMetadata(agent_name="a", metadata=b"nixl", base_addr=1 << 20, device_id=0)
    fields = {"total_num_pages": 4, "bytes_per_page": 1024, "memory_type": MemoryType.DRAM, "hostname": "h"}
    whole = KVTransferEngineMetadata(name="e", agents_meta=[[agent]], incarnation="1", version=WIRE_VERSION, **fields)
    return encode(sealed(whole))


def make_targets(server: HandshakeServer) -> list[Target]:
    book = LeaseBook([make_words(64)])
    for word_idx in range(8):
        book.grant(word_idx + 1, f"r{word_idx}", word_idx, 1e9, engines=1000)

    def hear(data: bytes) -> None:
        note = decode_note(data)
        if note is not None:
            book.hear(note)
        book.check()

    queries = [
        encode_message(MetadataQuery(query_id=1, engine_id="p", compatibility={"model": "m", "dtype": "bfloat16"})),
        encode_message(Ping(query_id=2, engine_id="p")),
        encode_message(LeaseQuery(query_id=3, engine_id="p", lease_id=5, num_tokens=20)),
        encode_message(LeaseRefusal(query_id=4, engine_id="p", lease_id=5, reader="d", rank=1, ranks=2)),
    ]
    pages = LeasedPages(
        engine_id="p",
        incarnation="i",
        lease_id=5,
        word_idx=1,
        duration_s=9.0,
        num_tokens=20,
        block_ids=((3, 4), (9,)),
        prompt_digest=b"d" * 32,
    )
    notes = [encode_message(ReaderNote(word_idx, "d", 0, 2, "done")) for word_idx in range(1, 9)]
    return [
        Target("handshake query", queries, lambda data: server._answer_to(decode_query(data))),
        Target("rank metadata", [sealed_rank(rank_metadata(), KEY)], lambda data: open_rank(data, KEY)),
        Target("engine metadata", [engine_metadata()], decode_metadata),
        Target("pages of a lease", [sealed_pages(pages, KEY)], lambda data: open_pages(data, "p", 5, KEY)),
        Target("reader's note", notes, hear),
        SealedTarget(),
    ]


class Flood:
    """Sends the same noise through the server's own socket, under many identities. Between the messages a valid client
    asks questions.
    """

    def __init__(self, server: HandshakeServer, seeds: list[bytes]) -> None:
        self.sent = 0
        self._server = server
        self._seeds = seeds
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.connect(self._server.endpoint)
        return socket

    def send(self, rng: random.Random) -> None:
        frames = [mutated(rng.choice(self._seeds), rng) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        if rng.random() < 0.001:
            frames = [b"\0" * 100_000]  # The frame is larger than the limit, so the server closes the connection.
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(1e-3)
        self.sent += 1
        if self.sent % 5000 == 0:
            self._socket.close()
            self._socket = self._connect()

    def still_answers(self) -> bool:
        client, answers = HandshakeClient(), list[object]()
        client.ask(self._server.endpoint, Ping(query_id=0, engine_id="p"), answers.append, 20.0)
        while not answers:
            client.poll()
            time.sleep(1e-4)
        client.close()
        return isinstance(answers[0], Pong)

    def close(self) -> None:
        self._socket.close()


def resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(messages: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Feeds all targets, and returns the failures. Exceptions other than errors of pagewire pass through."""
    rng = random.Random(seed)
    ranks = tuple(sealed_rank(rank_metadata(rank), KEY) for rank in range(2))
    offer = Offer("r", LeaseRef(5, 1, 9.0), 1, OfferedPages(Prompt(range(20)), 20, ((3, 4),)), offered={0})
    config = WorkerConfig(engine_id="p", incarnation="p1", groups=(), model="m")
    card = EngineCard("p", "p1", ranks, {"model": "m"}, lambda query: offer.answer(query, config, KEY))
    wrong: list[str] = []
    with HandshakeServer([card]) as server:
        server._throttle.admits = lambda _: True  # Without a throttle, no message is dropped unread.
        targets, flood = make_targets(server), Flood(server, [encode_message(Ping(query_id=1))])
        half_kib = 0
        for number in range(messages):
            if rng.random() < 0.2:
                flood.send(rng)
            else:
                rng.choices(targets, (10, 10, 10, 10, 10, 1))[0].feed(rng)
            if number == messages // 2:
                half_kib = resident_kib()
            if number % 20_000 == 19_999 and not flood.still_answers():
                wrong.append(f"after {number} messages the server answers no more")
        if not flood.still_answers():
            wrong.append("the server answers no more")
        flood.close()
        grown = resident_kib() - half_kib
        wrong += [
            f"{target.name}: one took {target.slowest_s:.1f} s" for target in targets if target.slowest_s > SLOW_S
        ]
        if messages >= ENOUGH:
            wrong += [f"{one.name}: nothing was refused" for one in targets[1:4] if not one.verdicts["refused"]]
        if server.counts["failed"]:
            wrong.append(f"the server failed on {server.counts['failed']} messages")
        for target in targets:
            say(f"{target.name}: {dict(target.verdicts)}, slowest {target.slowest_s * 1e3:.1f} ms")
        say(f"socket: {flood.sent} sent, {dict(server.counts)}; peak memory grew by {grown} KiB in the second half")
        if grown > 20_000:
            wrong.append(f"memory grew by {grown} KiB")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--replies", type=int, default=10_000, help="changed handshake replies, over real NIXL")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.perf_counter()
    wrong = run(args.messages, args.seed, print) + fuzz_replies.run(args.replies, args.seed, print)
    took = time.perf_counter() - begin
    print(f"{args.messages} messages, seed {args.seed}, {took:.0f} s: {wrong or 'nothing wrong'}")  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
