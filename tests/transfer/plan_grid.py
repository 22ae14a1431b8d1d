"""Compares the plan with copying element by element, for every pair of layouts of a grid.

    python -m tests.transfer.plan_grid [--processes N] [--sample K] [--seed S] [--staged]

The grid: 1 to 8 heads (and one latent) × TP 1 to 8 on both sides × pipelines of 1 to 3 stages on both sides × page
sizes of 4, 8, 12 and 16 on both sides × six orders on both sides, and every rank of the reader. It is checked in steps:

1. For each topology and each of the reader's ranks, `sources` runs, and every cell must come from exactly one shard
   that holds it. The result is a set of triples: the reader's shard, a part of it, and the remote shard.
2. There are far fewer distinct triples than topologies, because a layout does not say how many ranks its model has. For
   each distinct triple, and all orders and page sizes of both sides, the pull is planned and carried out, and every
   element of the reader's pool is compared with a pool that was filled by definition. This leaves out no case: `plan`
   is a pure function, and it is called with each distinct input. (If two plans are equal in every number, the runs of
   the first are carried out for the second too.)

With `--sample K`, K random triples with layouts are checked in place of all.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from multiprocessing import Pool as Processes

import msgspec
import numpy as np

from tests.transfer.plan_oracle import (
    ITEMSIZE,
    ORDERS,
    UNTOUCHED,
    Pool,
    copied,
    empty_pool,
    fill,
    logical_of,
    page_layout,
    region_starts,
    share,
)
from transfer.plan.boxes import Box, Index, ShardLayout, check, sub_box
from transfer.plan.group_plan import GroupPlan
from transfer.plan.plan import plan
from transfer.plan.runs import Runs
from transfer.plan.shapes import dense
from transfer.plan.source_ranks import sources

HEADS = range(1, 9)
RANKS = range(1, 9)
STAGES = range(1, 4)
LAYERS = 3
PAGE_SIZES = (4, 8, 12, 16)
LAYOUTS = tuple(product(ORDERS, PAGE_SIZES))
TOKENS = 48
MIDDLE = (6, 45)
"""A range of tokens that starts and ends within a page, whatever the page size.

It is long enough that pages of any two sizes overlap in every possible way.
"""


@dataclass(frozen=True, order=True)
class Held:
    """The part of a model that a shard holds."""

    sides: int
    layers: tuple[int, int]
    heads: tuple[int, int]


@dataclass(frozen=True, order=True)
class Triple:
    """A reader's shard, a remote shard, and the part of the reader's shard that the remote shard fills."""

    local: Held
    part: Held
    remote: Held


@cache
def layout(held: Held, order: str, page_size: int) -> ShardLayout:
    sizes = {"layers": held.layers[1] - held.layers[0], "sides": held.sides, "page_size": page_size}
    pages = TOKENS // page_size + 2  # The pool has two pages more than the request.
    return check(dense(page_layout(range(*held.heads), order=order, **sizes), pages, held.layers[0]))


@cache
def page_list(page_size: int, side: int) -> list[int]:
    """Returns all pages of a request on one side: first consecutive pages, and then shuffled pages."""
    needed = TOKENS // page_size
    found = random.Random(10 * page_size + side).sample(range(needed + 2), needed)
    found[: needed // 2 + 1] = sorted(found[: needed // 2 + 1])
    return found


def held_by(heads: int, sides: int, ranks: int, stages: int) -> list[Held]:
    """Returns the shards of an engine, stage by stage and rank by rank."""
    found: list[Held] = []
    for stage, rank in product(range(stages), range(ranks)):
        layers, of_heads = share(LAYERS, stages, stage), share(heads, ranks, rank)
        found.append(Held(sides, (layers.start, layers.stop), (of_heads.start, of_heads.stop)))
    return found


def topologies() -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields all combinations of heads, sides, and the ranks and stages of both engines."""
    for (heads, sides), *both in product([*((heads, 2) for heads in HEADS), (1, 1)], RANKS, STAGES, RANKS, STAGES):
        yield (heads, sides, *both)


def triples(heads: int, sides: int, ranks: int, stages: int, their_ranks: int, their_stages: int) -> set[Triple]:
    """Returns the parts that every rank of the reader reads.

    Checks that each cell is read exactly once, from a shard that holds it.
    """
    ours, theirs = held_by(heads, sides, ranks, stages), held_by(heads, sides, their_ranks, their_stages)
    remotes = [layout(held, ORDERS[0], 4) for held in theirs]
    found: set[Triple] = set()
    for rank, held in enumerate(ours):
        times = dict.fromkeys(product(range(*held.layers), range(*held.heads)), 0)
        for index, part in sources(layout(held, ORDERS[0], 4), remotes, rank % ranks):
            for box in part.groups[0].boxes:
                read = Held(sides, (box.first[0], box.end[0]), (box.first[2], box.end[2]))
                assert (box.first[1], box.end[1], box.first[3], box.end[3]) == (0, sides, 0, 2)
                for layer, head in product(range(*read.layers), range(*read.heads)):
                    times[layer, head] += 1
                    assert theirs[index].layers[0] <= layer < theirs[index].layers[1]
                    assert theirs[index].heads[0] <= head < theirs[index].heads[1]
                found.add(Triple(held, read, theirs[index]))
        assert set(times.values()) == {1}, (heads, sides, ranks, stages, their_ranks, their_stages, rank)
    return found


@cache
def filled(held: Held, order: str, page_size: int, side: int) -> Pool:
    """Returns a pool that holds the whole request, written element by element."""
    return fill(layout(held, order, page_size), [page_list(page_size, side)], (0, TOKENS))


@cache
def places(held: Held, order: str, page_size: int) -> tuple[Pool, Pool, Pool]:
    """Returns the layer, head and token of each element of the reader's pool. An element without a token has -1."""
    pool = filled(held, order, page_size, 0)
    layer, _, head, token, _ = logical_of(pool)
    return tuple(np.where(pool >= 0, axis, -1) for axis in (layer, head, token))


def expected(triple: Triple, local: tuple[str, int], tokens: tuple[int, int]) -> Pool:
    """Returns the expected pool of the reader. Only elements of the part and of the pulled tokens are written."""
    wanted = np.array(True)
    limits = (triple.part.layers, triple.part.heads, tokens)
    for axis, (first, end) in zip(places(triple.local, *local), limits, strict=True):
        wanted = wanted & (axis >= first) & (axis < end)
    return np.where(wanted, filled(triple.local, *local, 0), UNTOUCHED)


def part_of(layout: ShardLayout, held: Held) -> ShardLayout:
    """Returns a layout that is cut to ranges of layers and heads. The ranges are one box or several boxes."""

    def kept(box: Box) -> Iterator[Box]:
        (first_layer, side, first_head, dim), (end_layer, end_side, end_head, end_dim) = box.first, box.end
        first: Index = (max(first_layer, held.layers[0]), side, max(first_head, held.heads[0]), dim)
        end: Index = (min(end_layer, held.layers[1]), end_side, min(end_head, held.heads[1]), end_dim)
        if first[0] < end[0] and first[2] < end[2]:
            yield sub_box(box, first, end)

    groups = tuple(
        msgspec.structs.replace(group, boxes=tuple(part for box in group.boxes for part in kept(box)))
        for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups)


def mismatches(
    triple: Triple, local: tuple[str, int], *, staged: bool, remotes: Iterable[tuple[str, int]]
) -> list[str]:
    """Pulls a triple from several remote layouts into one local layout. Returns the faults."""
    whole = layout(triple.local, *local)
    part = part_of(whole, triple.part)
    size, wrong = local[1], list[str]()
    right: dict[tuple[int, int], Pool] = {}
    for order, remote_size in remotes:
        pulls = [MIDDLE, (0, TOKENS)] if remote_size == size else [MIDDLE]
        for tokens in pulls:
            stop = min(-(-tokens[1] // size) * size, -(-tokens[1] // remote_size) * remote_size)
            if (span := (tokens[0], stop)) not in right:
                right[span] = expected(triple, local, span)
            pool = pulled(whole, part, triple.remote, (order, remote_size), tokens, staged=staged)
            if not np.array_equal(pool, right[span]):
                wrong.append(f"{triple} {local} from {order} {remote_size}, tokens {tokens}")
    return wrong


def pulled(
    whole: ShardLayout, part: ShardLayout, held: Held, remote: tuple[str, int], tokens: tuple[int, int], *, staged: bool
) -> Pool:
    """Returns the reader's pool after a pull."""
    there, size = layout(held, *remote), whole.groups[0].page_size
    local_pages = page_list(size, 0)[tokens[0] // size :]
    remote_pages = page_list(remote[1], 1)[tokens[0] // remote[1] :]
    pool = empty_pool(whole)
    (start,), (remote_start,) = bases = region_starts(whole), region_starts(there)
    made = plan(part, there, bases)
    if not staged:
        given = local_pages, remote_pages, tokens
        copied(runs_of(made.groups[0], lambda: made.runs(0, *given), tokens), filled(held, *remote, 1), pool)
        return pool
    staging = made.staging(0)
    area = np.full(staging.num_bytes(tokens) // ITEMSIZE, -1, np.int32)
    copied(staging.runs(remote_pages, tokens, 0, [remote_start]), filled(held, *remote, 1), area)
    memory = pool.view(np.uint8)[start : start + whole.region_bytes[0]]
    staging.permute(local_pages, tokens, area.view(np.uint8), [memory])
    return pool


def runs_of(made: GroupPlan, make: Callable[[], Runs], tokens: tuple[int, int]) -> Runs:
    """Returns the runs of a pull. Equal plans share their runs, because the page lists follow from the sizes."""
    key = [made.local.page_size, made.remote.page_size, made.local.num_pages, made.remote.num_pages, tokens]
    for stack in made.stacks:
        key += [stack.itemsize, stack.axes, stack.token, stack.local_page, stack.remote_page]
        key += [array.tobytes() for array in (stack.local_region, stack.local_offset, stack.remote_region)]
        key += [stack.remote_offset.tobytes()]
    found = _KNOWN.get(known := tuple(key))
    if found is None:
        if len(_KNOWN) >= 20_000:
            _KNOWN.clear()
        found = _KNOWN[known] = make()
    return found


_KNOWN: dict[tuple[object, ...], Runs] = {}


def alike(triple: Triple) -> tuple[object, ...]:
    """Returns a key that is equal for triples with equal plans."""
    found: list[int] = [triple.local.sides]
    for axis in ("layers", "heads"):
        local, part, remote = (getattr(held, axis) for held in (triple.local, triple.part, triple.remote))
        found += [
            local[1] - local[0],
            part[0] - local[0],
            part[1] - part[0],
            part[0] - remote[0],
            remote[1] - remote[0],
        ]
    return (*found, triple)


def _of_triple(triple: Triple, *, staged: bool) -> tuple[int, list[str]]:
    wrong = [line for local in LAYOUTS for line in mismatches(triple, local, staged=staged, remotes=LAYOUTS)]
    return len(LAYOUTS) ** 2, wrong


def sample(found: Iterable[Triple], number: int, seed: int, *, staged: bool) -> list[str]:
    """Checks `number` random triples, each in random layouts. Returns the faults."""
    rng = random.Random(seed)
    listed, wrong = sorted(found), list[str]()
    for _ in range(number):
        triple, local, remote = rng.choice(listed), rng.choice(LAYOUTS), rng.choice(LAYOUTS)
        wrong += mismatches(triple, local, staged=staged, remotes=[remote])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transfer.plan_grid", description=__doc__)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many to share the work between (1)")
    parser.add_argument("--sample", type=int, metavar="K", help="K random pairs in place of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--staged", action="store_true", help="pull through a staging area")
    chosen = parser.parse_args()
    begin, found, reads, topology_count = time.monotonic(), set[Triple](), 0, 0
    for topology in topologies():
        found |= triples(*topology)
        topology_count += 1
        reads += topology[2] * topology[3]
    say = partial(print, flush=True)
    say(
        f"{topology_count} topologies, {reads} ranks that read, each cell from one shard; {len(found)} distinct "
        f"triples, {time.monotonic() - begin:.0f} s"
    )
    say(f"with all layouts: {topology_count * len(LAYOUTS) ** 2} pairs of layouts, {reads * len(LAYOUTS) ** 2} pulls")
    begin, checked, wrong = time.monotonic(), 0, list[str]()
    if chosen.sample is not None:
        checked, wrong = chosen.sample, sample(found, chosen.sample, chosen.seed, staged=chosen.staged)
    else:
        listed = sorted(found, key=alike)
        with Processes(chosen.processes) as processes:
            for done, (pairs, lines) in enumerate(
                processes.imap(partial(_of_triple, staged=chosen.staged), listed, chunksize=8), start=1
            ):
                checked, wrong = checked + pairs, wrong + lines
                if done % 200 == 0:
                    say(f"{done} of {len(listed)} triples, {time.monotonic() - begin:.0f} s, {len(wrong)} wrong")
    say("\n".join(wrong[:20]) or "no element differs")
    way = "staged" if chosen.staged else "direct"
    say(f"{checked} distinct pairs of layouts, {way}, {time.monotonic() - begin:.0f} s, {len(wrong)} mismatches")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
