"""Where a request has several block tables, what tiers below have of its prefix is brought up before it takes pages.

A page of any table lies below under its table's digest. Those that the longest prefix needs which all tables can go on
from are published on the device, as if nobody had evicted them; the reservation finds them there. With one table pages
come up into the request's own, when it runs (`PagesBelow.restore`): there is but one run of them.
"""

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.replica.hashing import token_bytes
from kvcache.replica.pages_below import fetch_prefix
from kvcache.replica.replica import Replica
from kvcache.replica.resume import NO_SLOTS, FromBelow


def lift(replica: Replica, row: int, context: Context, num_steps: int) -> None:
    """Bring up what the row's request, which has no pages yet, will look up; nothing is reserved.

    Only where the request then fits: one that is refused is to leave everything as it was.
    """
    tier = replica.tier
    if not tier.keeps or replica.rows.num_pages[row]:
        return
    replica.length_of(context, num_steps, 0)  # raises as the reservation will, before anything moves
    if not (last := (context.current_length - 1) // replica.page_size):
        return
    hasher = replica.hasher(row, context)
    digests = hasher.digests(context.tokens, 0, last)
    changed = replica.pool.index.generation + tier.generation + replica.states.generation
    now = changed, 0, last, NO_SLOTS
    if (kept := hasher.matches.get(tier)) is not None and kept[:3] == now[:3]:
        return  # a waiting request is asked again and again: nothing has come or gone since
    fetch_prefix(replica.tables, tier, replica.states, digests, wait=replica.rows.prompt[row] < 0)
    wanted = _there(replica, digests)
    start = wanted.pages * replica.page_size
    if not len(wanted.digests):
        hasher.matches[tier] = now
    elif fits(replica, context, num_steps, wanted):
        if replica.log is not None:
            run = token_bytes(context.tokens[:start])
            replica.log.describe(([hasher], np.array([0]), np.array([wanted.pages]), [run]))
        tier.lift(wanted)
        replica.hints.brought(digests[: wanted.pages, 0])


def fits(replica: Replica, context: Context, num_steps: int, wanted: FromBelow) -> bool:
    """Whether a request without pages could be reserved if what is `wanted` were on the device."""
    start, pool = wanted.pages * replica.page_size, replica.pool
    needed = replica.tables.least(context, context.current_length + num_steps - 1, start)
    return needed - len(wanted.here) + pool.would_be_taken(wanted.here) <= pool.free_count


def bring(replica: Replica, digests: Digests, first: int) -> bool:
    """Have a few pages at each call, of what the longest prefix needs, on the device, published, for others than rows.

    `digests`: of the pages from page `first` of a prompt on. To be called again while it says that some are on their
    way.
    """
    tier, pool, states = replica.tier, replica.pool, replica.states
    if not tier.keeps or not len(digests):
        return False
    if tier.is_bringing:
        return True  # few at a time: a copy may take the caller's time, whose own requests come first
    before = tier.generation
    digests = np.concatenate((np.zeros((first, digests.shape[1]), np.uint64), digests))
    coming = fetch_prefix(replica.tables, tier, states, digests, first, wait=False)
    wanted = _there(replica, digests, first)
    room = pool.free_count // 2 - pool.would_be_taken(wanted.here)
    count = max(0, min(len(wanted.digests), room, tier.brought_at_once))
    if count:
        tier.bring(wanted, count)
    return coming or count > 0 or tier.generation != before


def _there(replica: Replica, digests: Digests, first: int = 0) -> FromBelow:
    """What can be lifted now."""
    return replica.tables.from_below(digests, replica.tier.host_has, replica.states.ends(None, digests), first)
