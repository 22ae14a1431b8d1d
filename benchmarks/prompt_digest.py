"""What does it cost to verify that a source's pages belong to the reader's own prompt?

`digest` is the time to make the digest of a prompt whose tokens are a list, as in a scheduler, or an array. `answer` is
the source's work for each rank that asks which pages a lease holds; blocks have 16 tokens. `ask` is the time from the
question to the checked answer over the loopback interface, with the source's server in the same process.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import numpy as np

from benchmarks.frame import Row, options, pin, report, samples, summary
from transfer.connector.config import GroupConfig, WorkerConfig
from transfer.connector.scheduler import Offer
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.source import OfferedPages, check_tokens, source_in
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.messages import LeaseQuery, LeaseReply, Wanted
from transfer.wire.prompt import Prompt

KEY = b"k" * 32
CONFIG = WorkerConfig(
    engine_id="p", incarnation="i", groups=(GroupConfig(layers={"layer.0": 0}, head_dim=8),), model="m"
)


def digests(tokens: int, repeats: int) -> list[Row]:
    """Measures the digest of `tokens` tokens, once from a list and once from an array."""
    ids = np.random.default_rng(0).integers(0, 150_000, tokens, np.int32)
    listed = Prompt(ids.tolist(), "a salt")
    steps: dict[str, Callable[[object], object]] = {
        "digest of a list": lambda _: listed.digest(tokens),
        "digest of an array": lambda _: Prompt(ids, "a salt").digest(tokens),
        "list to array": lambda _: np.array(array("i", listed.token_ids), np.int32),
    }
    return [
        {"operation": name, "tokens": tokens, **summary(samples(repeats, lambda: None, measured))}
        for name, measured in steps.items()
    ]


def answers(tokens: int, repeats: int) -> list[Row]:
    """Returns the answer of a source about a lease that covers `tokens` tokens."""
    prompt = Prompt(np.random.default_rng(0).integers(0, 150_000, tokens, np.int32))
    blocks = tuple(np.random.default_rng(1).permutation(tokens).tolist()[: -(-tokens // 16)])
    offer = Offer("r", LeaseRef(new_lease_id(), 0, 30.0), 1, OfferedPages(prompt, tokens, (blocks,)), offered={0})
    query = LeaseQuery(query_id=0, engine_id="p", lease_id=offer.lease.lease_id, num_tokens=tokens)

    def leased(query: LeaseQuery) -> LeaseReply:
        return offer.answer(query, CONFIG, KEY)

    def ask(wanted: Wanted) -> None:
        heard: list[object] = []
        client.ask(wanted.address, query, heard.append)
        while not heard:
            time.sleep(1e-5)  # leaves time to the other side, because both sides share a core and an interpreter
            client.poll()
        (reply,) = heard
        if not isinstance(reply, LeaseReply):
            raise TypeError(f"the source has answered {reply}")
        _, pages = source_in(wanted, reply.pages, KEY)
        check_tokens("request 'r'", wanted, pages)

    client = HandshakeClient()
    with HandshakeServer([EngineCard("p", "i", (), leased=leased)]) as server:
        wanted = Wanted(server.endpoint, "p", offer.lease.lease_id, tokens, prompt.digest(tokens))
        made = [
            ("answer", samples(repeats, lambda: query, leased)),
            ("ask", samples(repeats, lambda: wanted, ask)),
        ]
    client.close()
    return [{"operation": name, "tokens": tokens, **summary(times)} for name, times in made]


def rows(sizes: tuple[int, ...], repeats: int) -> list[Row]:
    """All rows: for digests and for answers."""
    return [row for tokens in sizes for row in (*digests(tokens, repeats), *answers(tokens, repeats))]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    report("prompt_digest", rows((1_000,) if chosen.quick else (1_000, 10_000, 100_000), 100), chosen)


if __name__ == "__main__":
    main()
