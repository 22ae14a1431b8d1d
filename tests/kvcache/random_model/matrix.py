"""The features of a manager and its callers, the pairs of features that may be combined, and managers with any set of
features.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from kvcache import DraftGroup, KVCacheParams, LayerGroup, PagedKVCacheManager, SinkGroup
from kvcache.layer_groups import layer_tables
from kvcache.params import StateShape
from kvcache.sizing import page_bytes
from kvcache.states import state_memory
from kvcache.states.state_memory import kind_offsets
from tests.kvcache.tiers.stored_objects import StoredObjects

T = TypeVar("T")
PAGE_SIZE, ROWS, LONGEST = 3, 4, 60

BUILT = ("window", "chunk", "windows alone", "latents", "states apart", "states in slabs", "host", "files", "objects")
BUILT += ("quotas", "replicas", "shards", "sinks", "draft layers")
CALLED = ("hints", "drafts", "imports", "leases", "lends", "forks", "preemption", "batches", "renames", "stale")
CALLED += ("own contexts", "resets", "hostile", "interrupts", "overlap", "tails", "late copies", "weights")
FEATURES = BUILT + CALLED
NEEDED = {"files": "host", "objects": "host", "late copies": "host"}
"""Features that need another feature. If such a feature is wanted, both are used."""
ONE_OF = tuple(
    frozenset(one)
    for one in (
        *(("states apart", "states in slabs"), ("overlap", "states apart"), ("overlap", "states in slabs")),
        *(
            ("tails", one)
            for one in ("states apart", "states in slabs", "window", "chunk", "windows alone", "sinks", "draft layers")
        ),
        *(
            ("weights", one)
            for one in (
                *("states apart", "states in slabs", "host", "files", "objects", "draft layers", "hints", "imports"),
                *("interrupts", "overlap", "tails", "late copies"),
            )
        ),
    )
)
"""Features that exclude each other. For example, steps cannot be fetched ahead with recurrent states. With windows and
states, the end of a prompt cannot be imported by itself either; `wrong_tail` checks the refusal. The model does not
know what a switch of the weights does to some features. The oracle of contents combines it with all of them.
"""

_STATES = "it must be 0 with states, because a state is kept only after whole pages"
REFUSED: dict[frozenset[str], str] = {}
"""Sets of features that the manager refuses, with its message. If the manager accepts one, the test fails; then remove
the entry.
"""

# The keys are numbers of pages that a state takes. A page has one layer with one head of two elements for K and V.
SHAPES = {
    pages: StateShape(2, heads, 1, 1, 1, 2, torch.int64, torch.int64)
    for pages, heads in ((1, 2), (2, 5), (4, 9), (7, 20))
}


class Chooser(Protocol):
    """The source of random choices."""

    def integer(self, low: int, high: int) -> int: ...
    def pick(self, choices: Sequence[T]) -> T: ...


class World(NamedTuple):
    """The tiers that one manager leaves to the next one: a folder of files, and an object store."""

    folder: Path
    store: StoredObjects


def is_refused(features: Collection[str]) -> bool:
    return any(refused <= {*features} for refused in REFUSED)


def pairs() -> list[tuple[str, str]]:
    """All pairs of features that may be combined."""
    every = itertools.combinations(FEATURES, 2)
    return [pair for pair in every if not is_refused(pair) and not any({*pair} <= one for one in ONE_OF)]


def drawn(choose: Chooser, wanted: Iterable[str] = ()) -> frozenset[str]:
    """Draws the features of one manager: all features in `wanted`, and about half of the features that can be combined
    with them.
    """
    has = with_needed(wanted)
    for one in sorted(FEATURES, key=lambda _: choose.integer(0, 1 << 20)):
        more = has | with_needed([one])
        # Slow features are drawn less often. A feature that excludes many other features is drawn less often, too.
        odds = 4 if one in {"interrupts", "hostile"} else 2
        if choose.integer(1, odds) == 1 and not is_refused(more) and not any(len(more & two) > 1 for two in ONE_OF):
            has = more
    return has


def with_needed(features: Iterable[str]) -> frozenset[str]:
    has = {*features}
    return frozenset(has | {NEEDED[one] for one in has if one in NEEDED})


def table(met: Counter[tuple[str, str]], events: Counter[str]) -> str:
    """Returns a table of how often each pair of features was combined. A feature has one row, and each earlier feature
    has one column.
    """
    allowed = {*pairs()}
    lines = [" " * 20 + "".join(f"{number:>7}" for number in range(1, len(FEATURES)))]
    for at, one in enumerate(FEATURES):
        cells = [f"{met[other, one]:>7}" if (other, one) in allowed else f"{'-':>7}" for other in FEATURES[:at]]
        lines.append(f"{at + 1:>2} {one:<16} {''.join(cells)}  [{events[one]}]")
    return "\n".join(lines)


class Built(NamedTuple):
    """A manager, and the figures that its model needs."""

    manager: PagedKVCacheManager
    features: frozenset[str]
    caching: bool
    copies: int  # The number of state copies for which there is room, if states have separate memory.
    every: int  # The number of pages between two copies of a state.
    quotas: dict[str, float]
    quota: float


def build(
    choose: Chooser,
    features: frozenset[str],
    world: World,
    params: dict[str, Any] | None = None,
    layers: int = 0,
) -> Built:
    """Makes a manager with these features and otherwise random parameters.

    Prefix caching is sometimes off, if no feature needs it.
    """
    needs_caching = {"host", "quotas", "hints", "lends", "tails"} & features
    caching = bool(needs_caching or choose.integer(0, 3))
    dp, tp = (2 if "replicas" in features else 1), (2 if "shards" in features else 1)
    if layers:  # The caller asks for the layers of another manager.
        groups = (params or {}).get("groups", ())
    else:
        layers, groups = choose.pick(layouts(features))
    shape = (params or {}).get("states") or choose.pick([one for one in SHAPES.values() if one.heads % tp == 0])
    states, apart = bool(features & ONE_OF[0]), "states apart" in features
    copies, every = (choose.pick((0, 1, 2, 4, 8)), choose.pick((0, 0, 1, 2))) if caching and states else (0, 0)
    quota = choose.pick((0.1, 0.25, 1.0)) if "quotas" in features else 1.0
    quotas = {"third": choose.pick((0.0, 0.1, 0.5))} if "quotas" in features and (quota == 1.0 or copies) else {}
    told: dict[str, Any] = {"page_size": PAGE_SIZE, "enable_prefix_caching": caching, "groups": groups}
    told |= {"n_devices": dp * tp, "data_parallel_degree": dp, "is_mla": "latents" in features}
    told |= {"states": shape if states else None}
    told |= {"state_copies": copies} if apart else {}
    told |= {"state_every_pages": every} if states else {}
    told |= {"tenant_quota": quota, "tenant_quotas": quotas} if caching else {}
    told |= params or {}
    dtype = told.pop("dtype", torch.int64)
    plain = KVCacheParams(dtype, tp, 2, **told)
    page = page_bytes(plain, layer_tables(groups, layers).layers_per_page, PAGE_SIZE)
    of_tier = sum(kind_offsets(kinds)[-1] for kinds in state_memory.state_layouts(shape, tp)) if states else 0
    if "host" in features:
        told |= below(choose, features, world, page, of_tier, many=bool(groups))
    pages = choose.pick((12, 14, 17) if not groups else (24, 30, 36))
    memory = pages * page
    if apart:
        memory += (ROWS + copies + 1) * state_memory.page_bytes(state_memory.state_layouts(shape, tp))
    elif states:  # Each request takes a slab in addition to its pages.
        slab_pages = -(-state_memory.page_bytes(state_memory.state_layouts(shape, tp)) // page)
        # Tokens need at least as many pages as one slab has.
        memory = (max(pages, slab_pages) + choose.pick((1, 2, 3)) * slab_pages) * page
    made = KVCacheParams(dtype, tp, 2, **told)
    manager = PagedKVCacheManager(
        made, ROWS * dp, LONGEST, layers, ["cpu"] * (dp * tp), available_cache_memory=memory * dp
    )
    return Built(manager, features, caching, copies, every, quotas if caching else {}, quota if caching else 1.0)


def below(
    choose: Chooser, features: frozenset[str], world: World, page: int, state: int, *, many: bool
) -> dict[str, Any]:
    """Returns the params of the lower tiers for `pages` pages and for states of these sizes."""
    slots = choose.pick((12, 40, 120) if many else (6, 20, 60)) * (3 if {"files", "objects"} & features else 1)
    states = choose.pick((2, 3, 5, 20)) if state else 0
    space = slots * page + states * state
    told: dict[str, Any] = {
        "enable_kvcache_swapping_to_host": True,
        "host_kvcache_swap_space_gb": (space + 0.5) / 2**30,
        **({"tier_state_share": (states * state + 0.5) / space} if state else {}),
    }
    if "files" in features:
        told |= {"file_tier_dir": str(world.folder), "file_tier_max_gb": 1_000_000 / 2**30, "file_tier_key": "model"}
    if "objects" in features:
        told |= {"object_tier_io": world.store, "object_tier_pages": choose.pick((1, 2, 3)), "file_tier_key": "model"}
    return told


def layouts(features: Collection[str]) -> list[tuple[int, tuple[LayerGroup, ...]]]:
    """Returns choices of layers and their groups: those of full attention, windows and chunks, and then sinks and draft
    layers. Sinks and windows have less than a page, a page, or several pages.
    """
    if not {"sinks", "draft layers"} & {*features}:
        return _plain_layouts(features)
    base = [(0, ())] if {*features} & {"window", "chunk", "windows alone"} == {"windows alone"} else []
    base = base or [(layers, groups or (LayerGroup("full", (0,)),)) for layers, groups in _plain_layouts(features)]
    found: list[tuple[int, tuple[LayerGroup, ...]]] = []
    for layers, groups in base:
        for sinks, window in ((1, 1), (2, 5), (3, 4), (7, 8)) if "sinks" in features else ((0, 0),):
            mine = (SinkGroup((layers,), window, sinks),) if sinks else ()
            drafts = (DraftGroup((layers + len(mine),)),) if "draft layers" in features else ()
            found.append((layers + len(mine) + len(drafts), (*groups, *mine, *drafts)))
    return found


def _plain_layouts(features: Collection[str]) -> list[tuple[int, tuple[LayerGroup, ...]]]:
    """Returns choices of layers and their groups: windows of less than a page, of several pages or of the whole prompt,
    chunks, windows with chunks, and full layers in two tables.
    """
    full, of = LayerGroup("full", (0,)), {*features} & {"window", "chunk", "windows alone"}
    window = [LayerGroup("window", (1,), tokens) for tokens in (1, 2, 4, 7, 100)]
    chunk = [LayerGroup("chunked", (1,), tokens) for tokens in (4, 9)]
    if "windows alone" in of:
        windows = (
            [(LayerGroup("window", (0,), tokens),) for tokens in (1, 4, 7, 100)]
            if of != {"windows alone", "chunk"}
            else []
        )
        chunks = (
            [(LayerGroup("chunked", (0,), tokens),) for tokens in (4, 9)] if of != {"windows alone", "window"} else []
        )
        both = [
            (LayerGroup("window", (0,), 4), LayerGroup("chunked", (1,), 6)),
            (LayerGroup("chunked", (1,), 9), LayerGroup("window", (0,), 7), LayerGroup("window", (2,), 4)),
        ]
        return [(len(one), one) for one in (*windows, *chunks, *both)]
    if of == {"window"}:
        more = [(full, LayerGroup("window", (1,), 4), LayerGroup("window", (2,), 8))]
        more += [(LayerGroup("window", (0, 2), 5), LayerGroup("full", (1,)))]
        more += [(LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6))]
        return [*((2, (full, one)) for one in window), *((3, one) for one in more)]
    if of == {"chunk"}:
        return [*((2, (full, one)) for one in chunk), (2, (LayerGroup("full", (1,)), LayerGroup("chunked", (0,), 4)))]
    if of:
        third = LayerGroup("chunked", (2,), 6)
        return [
            (3, (full, LayerGroup("window", (1,), 7), third)),
            (4, (full, LayerGroup("window", (1,), 4), third, LayerGroup("window", (3,), 8))),
        ]
    return [(1, ())]
