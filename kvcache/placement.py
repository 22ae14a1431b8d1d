"""`place_replicas`: builds the replicas of a manager on their devices, and the tiers below them."""

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from kvcache.layout import replica_fingerprint
from kvcache.policies.factory import order_of, set_policy
from kvcache.pool.pages import PagePool
from kvcache.pool.slabs import SlabPool
from kvcache.replica.devices import PageMemory, PlacedReplica, ReplicaPageMoves
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.kept import Kept
from kvcache.replica.replica import MakeKept, Replica
from kvcache.replica.row_states import RowStates
from kvcache.replica.rows import AllRows, BlockRows
from kvcache.replicas import Replicas
from kvcache.sizing import Needs, Sizes
from kvcache.states.state_memory import room_apart, room_in_slabs, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.tiers.tiers import divide_tiers, page_tiers, state_tiers
from kvcache.under_way import UnderWay
from kvcache.weights import Weights


def place_replicas(
    needs: Needs, sizes: Sizes, devices: Sequence[Sequence[torch.device]], stream: Any, pages: int, mark: UnderWay
) -> Replicas:
    """Build replicas of `pages` pages each on their `devices`, and the tiers below them. All of them share `mark`."""
    (params, tables, page_size), layouts, slab_pages = needs, needs.layouts, needs.slab_pages
    words = DIGEST_BYTES[params.hash_algorithm] // 8
    rows = sizes.max_batch_size // len(devices)
    room = divide_tiers(params, len(layouts))
    weights = Weights(params.weights)
    every = AllRows(len(devices), rows, page_size, caching=params.enable_prefix_caching, weights=weights)
    placed, states = list[PlacedReplica](), list[StatePages]()
    for group in devices:
        pinned = any(device.type == "cuda" for device in group)
        block_rows = BlockRows(every, len(placed), sizes.max_seq_len, tables.groups, pinned=pinned)
        order = order_of(params, pages)
        memory = PageMemory(layouts, pages, group, stream)
        pool = SlabPool(pages, words, slab_pages, order) if slab_pages else PagePool(pages, words, order)
        make_kept: MakeKept = Kept
        if params.states is not None:
            if isinstance(pool, SlabPool):
                state_room = room_in_slabs(params.states, pool, memory.rows)
            else:
                state_room = room_apart(params.states, params.states_apart(rows), group, words)
            states.append(StatePages(params.states, state_room, mark))
            make_kept = functools.partial(RowStates, states[-1], params)
        replica = Replica(params, tables, block_rows, pool, mark, make_kept)
        if slab_pages:
            pool.moves = ReplicaPageMoves(replica, functools.partial(memory.copy_pages_of, memory))
        set_policy(replica, params)
        placed.append(PlacedReplica(replica, memory))
    of_states = state_layouts(params.states, len(layouts))
    every_layout = [*layouts, *chain.from_iterable(kinds.values() for kinds in of_states)]
    fingerprint = replica_fingerprint(every_layout, tables.described() if params.groups else "")
    tiers = page_tiers(params, room, layouts, placed, stream, tables)
    below_states = state_tiers(params, room, layouts, states)
    replicas = Replicas(placed, every, params, (tiers, below_states), states, fingerprint)
    if params.kv_events is not None and params.enable_prefix_caching:
        replicas.publish_events(params.kv_events, params, tables)
    return replicas
