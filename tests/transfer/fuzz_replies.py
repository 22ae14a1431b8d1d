"""Sends handshake replies with a few changed bytes (`fuzz_replies.run`). They are sealed again without a key, as
anybody could do. The source is a separate process. This process is the reader, over real NIXL, so a run finishes only
if no reply has killed the reader. If the source vouches for the metadata of a reply, the reader also loads the metadata
and reads pages.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvcache.replica.block_table import PageCopy
from tests.forked import start
from tests.transfer.replicas import TOKENS, Engine
from transfer.failures import Failure, FailureKind
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard, HandshakeServer
from transfer.wire.messages import RankMetadata, open_rank, sealed_rank

AT_ONCE = 16
_WHOLE = [PageCopy([1, 2], [4, 5], (0, 2 * TOKENS))]


def serve(pipe: Connection) -> None:
    """Runs a source until the test closes the pipe."""
    source = Engine("p", key=b"")
    leases = [source.offer(f"r{word_idx}", word_idx, 1e6, engines=1 << 30) for word_idx in range(AT_ONCE)]
    pipe.send((source.card.ranks[0], leases))
    try:
        while True:
            source.replica.poll()
            if pipe.poll(1e-3):
                pipe.recv()
    except (EOFError, OSError):
        source.close()


def changed(data: bytes, engine_id: str, rng: random.Random) -> bytes:
    """Returns the metadata of a rank with 1 to 4 changed bytes. In four of five cases the changed bytes are in NIXL's
    own part.
    """
    rank = msgspec.structs.replace(open_rank(data), engine_id=engine_id)
    if rng.random() < 0.8:
        return sealed_rank(msgspec.structs.replace(rank, agent_metadata=_with_changes(rank.agent_metadata, rng)))
    odd = _with_changes(msgspec.msgpack.encode(rank), rng)
    try:
        return sealed_rank(msgspec.msgpack.decode(odd, type=RankMetadata))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return odd


def _with_changes(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        found[rng.randrange(len(found))] ^= rng.randint(1, 255)
    return bytes(found)


class _Source:
    """The process of the source. If a reply causes its death, a new process replaces it."""

    def __init__(self) -> None:
        self.deaths = -1
        self.process: Any = None
        self.start()

    def start(self) -> None:
        self.process, self.pipe = start(serve)
        found: tuple[bytes, list[LeaseRef]] = self.pipe.recv()
        self.metadata, self.leases = found
        self.deaths += 1

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        self.process.kill()


def run(replies: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Reads from `engines` engines with changed replies, several at once. Returns the failures."""
    rng, source = random.Random(seed), _Source()
    reader, became = Engine("d", seed=9, key=b""), Counter[str]()
    begun, open_keys, begin = 0, dict[str, int](), time.monotonic()
    with HandshakeServer([]) as liar:
        liar._throttle.admits = lambda sender: True
        while begun < replies or open_keys:
            if not source.process.is_alive():
                source.start()
            free = sorted({*range(AT_ONCE)} - {*open_keys.values()})
            while free and begun < replies:
                key, word_idx, begun = f"e{begun}", free.pop(), begun + 1
                data = changed(source.metadata, key, rng)
                incarnation = _incarnation(data)
                liar._cards = {**liar._cards, key: EngineCard(key, incarnation, (data,), {"model": "m"})}
                reader.replica.pull(key, Source(liar.endpoint, key, source.leases[word_idx]), 60.0)
                reader.replica.add_pages(key, _WHOLE, last=True)
                open_keys[key] = word_idx
            reader.poll()
            for event in [event for event in reader.pulls if event.safe and event.key in open_keys]:
                became[_kind(event.error)] += 1
                del open_keys[event.key]
                liar._cards.pop(event.key)
                known = reader.replica.directory
                for peer in [peer for peer in known._peers.values() if peer.contact[1] == event.key]:
                    known._forget(peer, Failure(FailureKind.OTHER, "enough of it"))
            reader.events.clear()
            time.sleep(5e-4)
    say(
        f"changed replies: {begun}, {dict(became)}; "
        f"deaths of the reader 0, of the source {source.deaths}; {time.monotonic() - begin:.0f} s"
    )
    reader.close()
    source.close()
    wrong = [f"a reply has ended the source {source.deaths} times"] if source.deaths else []
    if sum(became.values()) != replies:
        wrong.append(f"{replies - sum(became.values())} replies came to no end")
    return wrong


def _incarnation(data: bytes) -> str:
    try:
        return open_rank(data).incarnation
    except Exception:  # noqa: BLE001  (whatever is wrong with it, the reader is to say so)
        return "none"


def _kind(error: str) -> str:
    for part, kind in (
        ("no process of this user on this host", "vouched for by nobody"),
        ("handshake", "refused by us"),
    ):
        if part in error:
            return kind
    return "failed when it was read" if error else "read from"
