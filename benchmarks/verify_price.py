"""What does safety cost? Times a pull without a fence, with a fence, and with some or all pages checked.

Run `python -m benchmarks.verify_price [--quick] [--json FILE]`. Source and reader are agents of one process, which
polls them in turn. The variants alternate, so that other load of the machine affects all of them. The source
records the checksums of its pages.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import numpy as np

from benchmarks.frame import header, now, options, table, write
from benchmarks.pools import expect
from benchmarks.pulls.engines import HEAD_MAJOR, huge_pages
from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from transfer.plan.shapes import dense
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import LeaseOffer, ReplicaTransfer
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer

PAGE = PageLayout("bfloat16", 2, 4, 2, 0, 4, 16, 64, HEAD_MAJOR)
UNFENCED = "no fence"
_STATISTICS = (
    "us_min and us_median: minimum and median of n pulls; ratio: of the minima, ratio_median: median of the ratios "
    "within a round; seal_us: minimum"
)
SHARES = {UNFENCED: 0.0, "fence": 0.0, "sample 5 %": 0.05, "digest": 1.0}


class Price(msgspec.Struct, frozen=True):
    """One variant: the microseconds of the whole pull, and those that the source's checksums took beforehand."""

    variant: str
    pages: int
    page_bytes: int
    us_min: float
    us_median: float
    ratio: float
    ratio_median: float
    seal_us: float
    n: int


def make(name: str, pages: int, *, checks: bool, verify: float) -> tuple[ReplicaTransfer, EngineCard]:
    """An engine with one rank, over a pool in huge pages."""
    pool = huge_pages(pages * PAGE.page_bytes)
    pool[:] = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8).repeat(len(pool) >> 16)
    incarnation = new_incarnation()
    identity = RankIdentity(engine_id=name, incarnation=incarnation)
    rank = RankTransfer(identity, ShardMemory(dense(PAGE, pages), [pool.ctypes.data]), checks=checks, verify=verify)
    _POOLS.append(pool)
    return ReplicaTransfer([rank], HandshakeClient()), EngineCard(name, incarnation, (rank.metadata,))


_POOLS: list[np.ndarray] = []


def take_fence_away(reader: ReplicaTransfer) -> None:
    """Makes a reader report success when its READs end, whatever the lease word holds. Only for timing."""
    puller: Any = reader.ranks[0].puller

    def go_on(pull: Any) -> None:
        if not pull.fenced:
            puller._tell(pull, pull.read_ranks, "done")  # noqa: SLF001 - what the fence carries otherwise
            pull.told += sorted(pull.read_ranks)
            pull.marking = 0
            puller._passed(pull)  # noqa: SLF001

    puller._fence = go_on  # noqa: SLF001


def measure(count: int, rounds: int) -> list[Price]:
    """Pulls `count` pages, scattered in both pools, `rounds` times with each variant."""
    pages = max(2 * count, 64)
    source, card = make("source", pages, checks=True, verify=0.0)
    readers = {name: make(f"reader {name}", pages, checks=False, verify=share)[0] for name, share in SHARES.items()}
    take_fence_away(readers[UNFENCED])
    rng = np.random.default_rng(1)
    times: dict[str, list[float]] = {name: [] for name in SHARES}
    seals: list[float] = []
    with HandshakeServer([card]) as server:
        for number in range(rounds + 2):
            theirs, ours = (rng.permutation(pages)[:count].astype(np.int32) for _ in range(2))
            for name, reader in readers.items():
                lease = LeaseRef(new_lease_id(), number % 512, 60.0)
                start = now()
                source.ranks[0].record_checksums([theirs])
                seals.append((now() - start) / 1e3)
                source.offer(LeaseOffer("r", lease))
                start = now()
                reader.pull("r", Source(server.endpoint, "source", lease), 60.0)
                reader.add_pages("r", [PageCopy(ours, theirs, (0, 16 * count))], last=True)
                while not reader.events:
                    reader.poll()
                    if number < 2:
                        source.poll()  # the source must poll for the first contact to succeed
                times[name].append((now() - start) / 1e3)
                expect(reader.events.popleft() == PullEvent("r", "", safe=True), "a pull ends well")
                source.poll()
                source.events.clear()
    for replica in (source, *readers.values()):
        replica.close()
    base = times[UNFENCED][2:]
    return [
        Price(
            name,
            count,
            PAGE.page_bytes,
            round(min(took[2:]), 1),
            round(statistics.median(took[2:]), 1),
            round(min(took[2:]) / min(base), 3),
            round(statistics.median(a / b for a, b in zip(took[2:], base, strict=True)), 3),
            round(min(seals), 1),
            rounds,
        )
        for name, took in times.items()
    ]


def main() -> None:
    """Runs the benchmark and prints its rows."""
    chosen = options(__doc__)
    rounds = 5 if chosen.quick else 30
    prices = [*measure(1, 20 * rounds), *measure(64, 4 * rounds), *measure(2048, rounds)]
    rows = [msgspec.to_builtins(price) for price in prices]
    print(f"\nverify_price\n{table(rows)}", flush=True)
    if chosen.json:
        command = "python -m benchmarks.verify_price" + (" --quick" if chosen.quick else "")
        write(chosen.json, {**header(command, _STATISTICS), "rows": rows})


if __name__ == "__main__":
    main()
