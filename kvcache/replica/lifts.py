"""Where a request has several block tables, what tiers below have of its prefix is brought up before it takes pages.

A page of any table lies below under its table's digest. Those that the longest prefix needs which all tables can go on
from are published on the device, as if nobody had evicted them; the reservation finds them there. With one table pages
come up into the request's own, when it runs (`PagesBelow.restore`): there is but one run of them.
"""

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.replica.hashing import PrefixHasher, token_bytes
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
    _, wanted = _fetched(replica, digests, wait=replica.rows.prompt[row] < 0)
    start = wanted.pages * replica.page_size
    if not len(wanted.digests):
        hasher.matches[tier] = now
    elif fits(replica, context, num_steps, wanted):
        if replica.log is not None:
            run = token_bytes(context.tokens[:start])
            replica.log.describe(([hasher], np.array([0]), np.array([wanted.pages]), [run]))
        tier.lift(wanted.digests, wanted.tables, wanted.here)
        replica.hints.brought(digests[: wanted.pages, 0])


def fits(replica: Replica, context: Context, num_steps: int, wanted: FromBelow) -> bool:
    """Whether a request without pages could be reserved if what is `wanted` were on the device."""
    start, pool = wanted.pages * replica.page_size, replica.pool
    needed = replica.tables.least(context, context.current_length + num_steps - 1, start)
    return needed - len(wanted.here) + pool.would_be_taken(wanted.here) <= pool.free_count


def prefetch(replica: Replica, hasher: PrefixHasher, context: Context) -> bool:
    """Begin to bring to the host what `lift` will ask for; whether some is on its way."""
    last = (context.current_length - 1) // replica.page_size
    return last > 0 and _fetched(replica, hasher.digests(context.tokens, 0, last), wait=False)[0]


def bring(replica: Replica, digests: Digests) -> bool:
    """As `PagesBelow.bring`, of all tables: of what the longest prefix needs a few pages at each call."""
    tier, pool = replica.tier, replica.pool
    if not tier.keeps or not len(digests):
        return False
    coming, wanted = _fetched(replica, digests, wait=False)
    room = pool.free_count // 2 - pool.would_be_taken(wanted.here)
    count = max(0, min(len(wanted.digests), room, tier.brought_at_once))
    if count:
        tier.lift(wanted.digests[:count], wanted.tables[:count], wanted.here)
    return coming or count > 0


def _fetched(replica: Replica, digests: Digests, *, wait: bool) -> tuple[bool, FromBelow]:
    """Have what the longest prefix needs brought to the host; whether some is on its way, and what can be lifted now.

    With recurrent states that prefix ends after a page after which there is one, anywhere, which is brought as well.
    Where somebody has to be asked for what lies below, the questions are those of the longest prefix that there may be.
    """
    tables, tier, states = replica.tables, replica.tier, replica.states
    coming, before = False, tier.generation
    if tier.asks:
        coming = tier.ask(tables.from_below(digests, tier.may_have))
    wanted = tables.from_below(digests, tier.has, states.there(digests))
    coming |= states.bring_newest(digests[: wanted.pages], wait=wait)
    ends = states.ends(None, digests)
    if len(wanted.digests):
        there = tables.from_below(digests, tier.host_has, ends)
        coming |= tier.to_host(wanted, wanted.pages - there.pages, wait=wait)
    if len(wanted.digests) or states.keeps:  # not all of it may be there yet
        wanted = tables.from_below(digests, tier.host_has, ends)
    # An answer that has come just now may be another question.
    return coming or (tier.asks and tier.generation != before), wanted
