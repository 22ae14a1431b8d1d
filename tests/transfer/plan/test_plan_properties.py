"""Random layouts, topologies and pulls: several groups, padded strides in any order, any page sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.transfer.plan.test_staging import views
from tests.transfer.plan_oracle import ITEMSIZE, copied, empty_pool, fill, region_starts
from transfer.plan.boxes import Box, Group, ShardLayout, check
from transfer.plan.plan import plan
from transfer.plan.shapes import from_tensor
from transfer.plan.source_ranks import sources

AXES = ("page", "layer", "side", "head", "token", "dim")
DIMS = 2


@dataclass(frozen=True)
class Pull:
    """The pull of one request. For each group it has the tokens and the pages on each side."""

    local: ShardLayout
    remotes: list[ShardLayout]
    tokens: list[tuple[int, int]]
    local_pages: list[list[int]]
    remote_pages: list[list[list[int]]]
    rank: int


@st.composite
def strided(
    draw: DrawFn, held: tuple[str, range, range, int], page_size: int, pages: int, region: int, offset: int
) -> Box:
    kind, layers, heads, sides = held
    sizes = {"page": pages, "layer": len(layers), "side": sides, "head": len(heads), "token": page_size, "dim": DIMS}
    strides, step = dict[str, int](), ITEMSIZE
    for axis in draw(st.permutations(AXES)):
        strides[axis] = step
        step = step * sizes[axis] + ITEMSIZE * draw(st.sampled_from([0, 0, 0, 1, 3]))
    return from_tensor(
        [sizes[axis] for axis in AXES],
        [strides[axis] for axis in AXES],
        ",".join(AXES),
        dtype="float32",
        itemsize=ITEMSIZE,
        region=region,
        offset=offset,
        kind=kind,
        first=(layers.start, 0, heads.start, 0),
    )


def cuts(draw: DrawFn, total: int) -> list[range]:
    """Returns a range of `total` elements, divided at random places."""
    inner = draw(st.sets(st.integers(1, total - 1), max_size=2)) if total > 1 else set()
    return [range(first, end) for first, end in pairwise([0, *sorted(inner), total])]


@st.composite
def shards(draw: DrawFn, held: list[tuple[str, range, range, int]], states: list[bool]) -> ShardLayout:
    """Returns a shard that holds a range of layers and heads for each group, in one or several boxes and regions."""
    groups: list[Group] = []
    region_bytes: list[int] = [ITEMSIZE]
    for (kind, layers, heads, sides), state in zip(held, states, strict=True):
        page_size = 1 if state else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
        pages = draw(st.integers(24 // page_size + 1, 24 // page_size + 3)) if not state else draw(st.integers(1, 3))
        boxes: list[Box] = []
        for part in cuts(draw, len(layers)):
            of_part = range(layers.start + part.start, layers.start + part.stop)
            apart = draw(st.booleans())
            offset = 0 if apart else region_bytes[-1]
            region = len(region_bytes) if apart else len(region_bytes) - 1
            box = draw(strided((kind, of_part, heads, sides), page_size, pages, region, offset))
            end = offset + (pages - 1) * box.page_stride + box.span
            region_bytes = [*region_bytes, end] if apart else [*region_bytes[:-1], end]
            boxes.append(box)
        groups.append(Group(page_size, pages, tuple(boxes), state=state))
    return check(ShardLayout(tuple(groups), tuple(region_bytes)))


@st.composite
def pulls(draw: DrawFn) -> Pull:
    kinds = draw(st.lists(st.sampled_from(["kv", "kv", "ssm"]), min_size=1, max_size=3))
    states = [kind == "ssm" for kind in kinds]
    models = [(draw(st.integers(1, 3)), draw(st.integers(1, 4)), 1 if kind == "ssm" else 2) for kind in kinds]
    ours: list[tuple[str, range, range, int]] = []
    theirs: list[list[tuple[str, range, range, int]]] = []
    for kind, (layers, heads, sides) in zip(kinds, models, strict=True):
        ours.append((kind, draw(st.sampled_from(cuts(draw, layers))), draw(st.sampled_from(cuts(draw, heads))), sides))
        grid = [(kind, *part, sides) for part in product(cuts(draw, layers), cuts(draw, heads))]
        theirs.append(grid + [draw(st.sampled_from(grid)) for _ in range(draw(st.integers(0, 2)))])
    number = max(map(len, theirs))
    remotes = [draw(shards([grid[rank % len(grid)] for grid in theirs], states)) for rank in range(number)]
    local = draw(shards(ours, states))
    tokens: list[tuple[int, int]] = []
    for state in states:
        start = draw(st.integers(0, 23))
        tokens.append((0, 1) if state else (start, draw(st.integers(start, 24))))
    return Pull(
        local,
        remotes,
        tokens,
        draw(page_lists(local, tokens)),
        [draw(page_lists(remote, tokens)) for remote in remotes],
        draw(st.integers(0, 7)),
    )


@st.composite
def page_lists(draw: DrawFn, layout: ShardLayout, tokens: list[tuple[int, int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for group, (start, stop) in zip(layout.groups, tokens, strict=True):
        in_order = range(group.num_pages)
        pages = draw(st.permutations(in_order)) if draw(st.booleans()) else in_order
        found.append([*pages[: -(-stop // group.page_size) - start // group.page_size]])
    return found


@settings(max_examples=80, deadline=None)
@given(pulls(), st.booleans())
def test_a_pull_of_any_shape_copies_each_element_once(pull: Pull, staged: bool) -> None:
    pool, starts = empty_pool(pull.local), region_starts(pull.local)
    expected = empty_pool(pull.local)
    for index, part in sources(pull.local, pull.remotes, pull.rank):
        remote = pull.remotes[index]
        made = plan(part, remote, (starts, region_starts(remote)))
        for group, tokens in enumerate(pull.tokens):
            ours, theirs = pull.local_pages[group], pull.remote_pages[index][group]
            source = _filled(remote, group, theirs, (0, 160), tokens[0])
            if staged:
                staging = made.staging(group)
                area = np.full(staging.num_bytes(tokens) // ITEMSIZE, -1, np.int32)
                copied(staging.runs(theirs, tokens, 0, region_starts(remote)), source, area)
                staging.permute(ours, tokens, area.view(np.uint8), views(pull.local, pool))
            else:
                runs = made.runs(group, ours, theirs, tokens)
                copied(runs, source, pool)
            if tokens[0] < tokens[1]:
                sizes = part.groups[group].page_size, remote.groups[group].page_size
                stop = min(-(-tokens[1] // size) * size for size in sizes)
                filled = _filled(part, group, ours, (tokens[0], stop), tokens[0])
                expected = np.where(filled >= 0, filled, expected)
    assert np.array_equal(pool, expected)


def _filled(
    layout: ShardLayout, group: int, pages: list[int], tokens: tuple[int, int], first_token: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Returns a pool in which only the pages of one group are filled."""
    lists = [pages if number == group else [] for number in range(len(layout.groups))]
    return fill(layout, lists, tokens, first_token // layout.groups[group].page_size)
