"""What does the first request to an engine cost the reader's host, before its first byte moves?

The engine has 64 layers of 100,000 pages. Each layer has its own tensor and region: 51 GB of address space that is
never touched. `connect` is the whole first contact: decoding and checking the metadata, choosing sources, making plans,
and loading the peer into NIXL. `pull` is the time that the first pull of 2,048 pages takes after `connect`. No part of
the work depends on the number of pages, so a pool of a hundredth of the size has the same cost.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from transfer.plan.boxes import ShardLayout
from transfer.plan.shapes import PACKED_HND
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.remote import RemoteEngine
from transfer.wire.messages import open_rank

LAYERS, HEADS, PAGE_SIZE, DIM, PULLED = 64, 8, 16, 16, 2048


def shard(pages: int, heads: range, layers: int = LAYERS) -> ShardLayout:
    """A rank that holds the heads `heads` of every layer."""
    page = PageLayout("bfloat16", 2, layers, 2, heads.start, len(heads), PAGE_SIZE, DIM, "layer,head,token,side,dim")
    return per_layer(page, pages, PACKED_HND)


@contextmanager
def ranks(engine_id: str, pages: int, tp: int, layers: int = LAYERS) -> Iterator[list[RankTransfer]]:
    """The ranks of an engine whose memory is only reserved address space, which is never touched."""
    incarnation, made, memories = new_incarnation(), list[RankTransfer](), list[mmap.mmap]()
    try:
        for rank in range(tp):
            layout = shard(pages, range(rank * HEADS // tp, (rank + 1) * HEADS // tp), layers)
            bases: list[int] = []
            for num_bytes in layout.region_bytes:
                memories.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                bases.append(np.frombuffer(memories[-1], np.uint8).ctypes.data)
            identity = RankIdentity(engine_id=engine_id, incarnation=incarnation, rank=rank, ranks=tp)
            made.append(RankTransfer(identity, ShardMemory(layout, bases)))
        yield made
    finally:
        for one in made:
            one.close()


def contact(pages: int, tp: int, repeats: int, layers: int = LAYERS) -> list[Row]:
    """The rows for one size: a reader with one rank and a source with `tp` ranks."""
    with ranks("p", pages, tp, layers) as source, ranks("d", pages, 1, layers) as (reader,):
        metadata = [rank.metadata for rank in source]
        mine = open_rank(reader.metadata)
        rng = np.random.default_rng(0)
        groups = [PageCopy(rng.permutation(pages)[:PULLED], rng.permutation(pages)[:PULLED], (0, PULLED * 16))]
        steps = {
            "connect": lambda _: reader.load(reader.inspect(metadata)),
            "decode and check": lambda _: [open_rank(data) for data in metadata],
            "plan": lambda opened: RemoteEngine(opened, mine, {}),
            "pull": lambda remote: remote.parts("r", groups),
        }
        given = {
            "plan": lambda: [open_rank(data) for data in metadata],
            "pull": lambda: RemoteEngine([open_rank(data) for data in metadata], mine, {}),
        }
        shape = {"pages": pages, "layers": layers, "source_ranks": tp, "metadata_bytes": sum(map(len, metadata))}
        return [
            {"operation": name, **shape, **summary(samples(repeats, given.get(name, lambda: None), measured))}
            for name, measured in steps.items()
        ]


def rows(sizes: Sequence[int], repeats: int) -> list[Row]:
    """All rows."""
    return [row for tp in (1, 8) for pages in sizes for row in contact(pages, tp, repeats)]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    report(
        "first_contact", rows((100_000,) if chosen.quick else (PULLED, 100_000), 20 if chosen.quick else 100), chosen
    )


if __name__ == "__main__":
    main()
