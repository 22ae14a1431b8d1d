"""Pages by content: those that a prompt needs, and leases of those that are cached, whichever request computed them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import BlockTableMismatchError
from kvcache.replica.block_table import BlockTable, PageDigests
from kvcache.replica.context import Context, check_context, hasher_of
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.leases import PageLease
from kvcache.replica.replica import Replica
from kvcache.types import RequestID
from kvcache.under_way import UnderWay


class PageContents:
    """The contents of the pages of a manager's replicas, as `manager.contents`."""

    def __init__(self, replicas: Sequence[Replica], fingerprint: str, mark: UnderWay) -> None:
        self._mark = mark
        self._replicas = replicas
        self._fingerprint = fingerprint

    def digests(self, context: Context, first_page: int = 0) -> PageDigests:
        """The digests of all full pages that a request may get from elsewhere, or of those from a logical page on.

        They never cover its last known token. The result is empty if prefix caching is off: pulled pages could not be
        found again. With windows, chunks or states the result always has all pages: a longer prefix needs other pages
        of a window, or another state. Raises `InvalidRequestError` if `context` is no request context.
        """
        check_context(context, "digests")
        one = self._replicas[0]
        last = (context.current_length - 1) // one.page_size if one.caching else 0
        first_page = first_page if one.lends_any_part else 0
        hasher = hasher_of(context, one.hash_algorithm, one.page_size)
        digests = hasher.digests(context.tokens, min(first_page, last), last).tobytes()
        return PageDigests(one.page_size, one.hash_algorithm, digests, first_page)

    def cached(self, replica_idx: int, wanted: PageDigests) -> int:
        """How many tokens of wanted pages, of `digests`, a request could go on from, from the first on.

        Pages count where a replica's devices have them, a recurrent state where its host memory has it, too.
        """
        replica = self._replicas[replica_idx]
        digests = np.frombuffer(wanted.digests, np.uint64).reshape(-1, DIGEST_BYTES[replica.hash_algorithm] // 8)
        ends = replica.states.ends(None, digests)
        return replica.tables.find(0, digests, ends).end * replica.page_size if len(digests) else 0

    def lease(
        self, name: RequestID, replica_idx: int, wanted: PageDigests, most: int
    ) -> tuple[PageLease, BlockTable] | None:
        """Hold the longest run of wanted pages, from their first on, that a replica's devices have, until `end_lease`.

        The lease holds at most `most` pages, including those of a slab with a state. Returns None if there are none.
        With several block tables it is the longest run that all tables can continue from, with the pages that each
        needs for it. With recurrent states the run ends after a page whose state the device keeps; that state is held
        too. `name` identifies the asker in lists of leases. Raises `BlockTableMismatchError` if the pages here cannot
        be compared with these.
        """
        self._mark.check("contents.lease")
        replica, digests = self._wanted(name, replica_idx, wanted)
        room = most - replica.pool.beside
        length, tables = replica.tables.whole(digests, room, replica.states.copies(digests))
        if not length:
            return None
        lease = PageLease(replica.leases, name, replica_idx)
        with self._mark.changing("contents.lease", lease):
            besides = replica.states.held_copy(digests[length - 1 : length])
            replica.leases.grant_pages(lease, np.concatenate(tables), besides)
        table = BlockTable(
            request_id=name,
            replica_idx=replica_idx,
            num_tokens=(wanted.first_page + length) * replica.page_size,
            page_size=replica.page_size,
            groups=tuple(tuple(pages.tolist()) for pages in (*tables, *(held.pages for held in besides))),
            fingerprint=self._fingerprint,
            hash_algorithm=replica.hash_algorithm,
            digests=digests[:length].tobytes(),
            first_page=wanted.first_page,
            kinds=replica.tables.kinds_named,
        )
        return lease, table

    def bring(self, name: RequestID, replica_idx: int, wanted: PageDigests, most: int) -> bool:
        """Have those of the pages that `lease` would hold brought to the devices which only lower tiers have.

        A few at each call, and with those that are there half of the free pages at most: whoever runs here comes first.
        Whether some are on their way: until then `lease` may find fewer. Raises as `lease`.
        """
        self._mark.check("contents.bring")
        replica, digests = self._wanted(name, replica_idx, wanted)
        with self._mark.changing("contents.bring"):
            return _bring(replica, digests[: max(0, most)], wanted.first_page)

    def _wanted(self, name: RequestID, replica_idx: int, wanted: PageDigests) -> tuple[Replica, NDArray[np.uint64]]:
        """The replica, and the digests if they are of pages like its own."""
        replica = self._replicas[replica_idx]
        if wanted.first_page and not replica.lends_any_part:
            kept = "recurrent states (params.states)" if replica.tables.is_plain else "(params.groups)"
            raise BlockTableMismatchError(
                f"request {name!r}: asks for pages from page {wanted.first_page} on, and of "
                f"{', '.join(replica.tables.kinds)} {kept} a lease is of a whole prefix"
            )
        width = DIGEST_BYTES[replica.hash_algorithm]
        ours, theirs = (replica.page_size, replica.hash_algorithm), (wanted.page_size, wanted.hash_algorithm)
        if not replica.caching or ours != theirs or len(wanted.digests) % width:
            cached = f"pages of {ours[0]} tokens by {ours[1]}" if replica.caching else "no page"
            raise BlockTableMismatchError(
                f"request {name!r}: asks for {len(wanted.digests)} bytes of digests of pages of {theirs[0]} tokens by "
                f"{theirs[1]!a}, cached here is {cached}"
            )
        return replica, np.frombuffer(wanted.digests, np.uint64).reshape(-1, width // 8)


def _bring(replica: Replica, digests: NDArray[np.uint64], first: int) -> bool:
    """Have a few more of these pages, of those from page `first` of a prompt on, on the device, published."""
    tables, tier, pool, states = replica.tables, replica.tier, replica.pool, replica.states
    if not tier.keeps or not len(digests):
        return False
    if tier.is_bringing:
        return True  # few at a time: a copy may take the caller's time, whose own requests come first
    before = tier.generation
    digests = np.concatenate((np.zeros((first, digests.shape[1]), np.uint64), digests))
    coming = replica.fetch_prefix(digests, first, wait=False)
    wanted = tables.from_below(digests, tier.host_has, states.ends(None, digests), first)
    room = pool.free_count // 2 - pool.would_be_taken(wanted.here)
    count = max(0, min(len(wanted.digests), room, tier.brought_at_once))
    if count:
        names = wanted.digests[:count]
        tier.hold(slots := tier.slots(names))  # an eviction below may make room for the page that it evicts
        pool.hold(wanted.here)  # what makes room for the rest is not what is needed beside it
        pages = pool.allocate(count)
        pool.index.say_tables(pages, wanted.tables[:count])
        tier.bring(pages, slots, names)
        pool.release(wanted.here)
        pool.release(pages)
    elif not coming and not wanted.lacking.any():
        coming = states.bring_copy(wanted, digests)
    return coming or count > 0 or tier.generation != before
