"""Finds, leases and imports pages by their content, no matter which request computed them.

A *column* is a position in a row of a block table: column 0 is for the page of the request's first `page_size` tokens,
column 1 for the page of the next `page_size` tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import check_request_id, integer, of_kind, refusal, whole
from kvcache.errors import BlockTableMismatchError, InvalidRequestError
from kvcache.replica import imports
from kvcache.replica.block_table import BlockTable, PageDigests, PendingImport
from kvcache.replica.context import Context, check_context, read_context
from kvcache.replica.copier import ImportProof
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.leases import PageLease
from kvcache.replica.replica import Replica
from kvcache.types import RequestID
from kvcache.uncopied import Uncopied
from kvcache.under_way import Call, UnderWay


class PageContents(Uncopied):
    """Looks up, lends and imports cached pages of a manager's replicas by their content (`manager.contents`)."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        fingerprint: str,
        mark: UnderWay,
        look_for_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._mark = mark
        # Called before each lookup: a reset of the cache that a message has asked for must come first.
        self._look_for_reset = look_for_reset
        self._replicas = replicas
        self._fingerprint = fingerprint

    def digests(self, context: Context, first_page: int = 0) -> PageDigests:
        """Returns the digests of the full pages of a prompt that may be fetched from elsewhere, from `first_page` on.

        The page of the last known token is left out if only that token completes it, because the last known token has
        to run. The result is empty if prefix caching is off, because no request could find pages that were fetched. If
        the model has layers with windows or chunks, or recurrent states, `first_page` is ignored: a longer prefix needs
        other pages of a window, or another state, than a shorter one. Raises `InvalidRequestError` if `context` is not
        a request context, or if `first_page` is negative or not an integer.
        """
        check_context(context, "digests")
        first_page = whole("first_page", first_page, 0, error=InvalidRequestError)
        one, read = self._replicas[0], read_context(context)
        last = (read.end_idx - 1) // one.page_size if one.caching else 0
        first_page = first_page if one.lends_any_part else 0
        hasher = one.hasher(None, read)
        digests = hasher.digests(read.tokens, min(first_page, last), last).tobytes()
        return PageDigests(one.page_size, one.hash_algorithm, digests, first_page)

    def cached(self, replica_idx: int, wanted: PageDigests) -> int:
        """Returns how many tokens of the `wanted` pages a request could skip, because the replica has cached them.

        A page counts as cached if the replica's devices have it. A recurrent state counts if the devices or host memory
        have it. Pages of another size, or with digests by another algorithm, are never cached.
        """
        replica = self._replicas[self._index("cached", replica_idx)]
        self._look_for_reset()
        size, algorithm, joined = _checked("cached", wanted)[:3]
        width = DIGEST_BYTES[replica.hash_algorithm]
        if (size, algorithm) != (replica.page_size, replica.hash_algorithm) or not joined or len(joined) % width:
            return 0
        digests = np.frombuffer(joined, np.uint64).reshape(-1, width // 8)
        return replica.tables.find(0, digests, replica.kept.ends(digests)).end * replica.page_size

    def lease(
        self, name: RequestID, replica_idx: int, wanted: PageDigests, most: int
    ) -> tuple[PageLease, BlockTable] | None:
        """Lease the longest run of wanted pages, from the first one on, that the devices of a replica have.

        The lease lasts until `end_lease`. It holds at most `most` pages. If states and pages share memory, the pages of
        the slab with the state are included in this number. Returns None if there is no such run. With several block
        tables, the run ends where all tables can resume, and the lease holds the pages that each table needs for that.
        With recurrent states, the run ends after a page for which the device keeps a state, and the lease holds that
        state, too. `name` identifies the reader in lists of leases. Raises `BlockTableMismatchError` if the wanted
        pages differ from the replica's in page size or hash algorithm, or if the replica caches no pages.
        """
        self._mark.check("contents.lease")
        replica, digests = self._wanted(name, replica_idx, wanted)
        self._look_for_reset()
        room = _most(name, most) - replica.pool.beside
        length, tables = replica.tables.whole(digests, room, replica.kept.lendable(digests))
        if not length:
            return None
        lease = PageLease(replica.leases, name, replica_idx)
        with self._mark.changing(Call("contents.lease", partial(replica.leases.end, lease))):
            besides = replica.kept.held_copies(digests[length - 1 : length])
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
        """Load wanted pages that only lower tiers have onto the devices, so that a later `lease` can hold them.

        Each call loads a few pages. The loaded pages, together with the wanted pages that are idle on the devices, take
        at most half of the free pages, because the requests of this manager come first. Returns whether some pages are
        on their way. Until these arrive, `lease` may find fewer pages. Raises the errors of `lease`.
        """
        self._mark.check("contents.bring")
        replica, digests = self._wanted(name, replica_idx, wanted)
        most = _most(name, most)
        self._look_for_reset()
        with self._mark.changing(Call("contents.bring")):
            return _bring(replica, digests[:most], wanted.first_page)

    @property
    def takes_any_part(self) -> bool:
        """Whether `import_pages` can be used.

        It needs prefix caching, one table of full attention, and no recurrent states.
        """
        return imports.takes_any_part(self._replicas[0])

    def import_pages(
        self, context: Context, replica_idx: int, table: BlockTable, others: Sequence[BlockTable] = ()
    ) -> PendingImport | None:
        """Reserve pages for full pages of a prompt that are to be copied from another manager.

        No request waits for this import. The pages may begin anywhere in the prompt. The import is copied like any
        other import, and ends with `commit_pages`, or with the manager's `cancel_import`. If a request computes the
        same prompt in the meantime, it finds the imported pages when it has computed all earlier pages. For `table` and
        `others`, see `import_block_table`. In addition, they must have this manager's page size and hash algorithm.
        Returns None if the import would take more than half of the free pages. Raises `BlockTableMismatchError` if a
        table does not fit the context, and `InvalidRequestError` if `replica_idx` is not the index of a replica.
        """
        self._mark.check("contents.import_pages")
        check_context(context, "contents.import_pages")
        read = read_context(context)
        replica = self._replicas[self._index(f"request {read.request_id!r}", replica_idx)]
        pending = imports.check_pages(replica, read, table, others)
        self._look_for_reset()
        known = replica.imports.each.copy()
        with self._mark.changing(Call("contents.import_pages", partial(replica.imports.cancel_all_but, known))):
            return pending if imports.begin_pages(replica, pending, table) else None

    def commit_pages(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """Publish the pages of an import made by `import_pages`, all of which have been copied.

        Afterwards the pages are cached, and no request holds them. For `proof`, see
        `PagedKVCacheManager.commit_import`.
        """
        self._mark.check("contents.commit_pages")
        replica = imports.own_import(self._replicas, pending, "commit_pages", is_open=True)
        with self._mark.changing(Call("contents.commit_pages")):
            imports.finish_pages(replica, pending, proof)

    def _index(self, name: str, replica_idx: int) -> int:
        """Returns `replica_idx` as an int. Raises `InvalidRequestError` if it is not the index of a replica."""
        return whole(f"{name}: replica_idx", replica_idx, 0, len(self._replicas) - 1, InvalidRequestError)

    def _wanted(self, name: RequestID, replica_idx: int, wanted: PageDigests) -> tuple[Replica, NDArray[np.uint64]]:
        """Returns the replica with this index, and the digests in `wanted` as an array.

        Raises `BlockTableMismatchError` if the replica caches no pages of this size and hash algorithm, or cannot lend
        pages from `wanted.first_page` on.
        """
        check_request_id(name, "contents")
        replica = self._replicas[self._index(f"request {name!r}", replica_idx)]
        _checked(f"request {name!r}", wanted)
        if wanted.named:
            raise BlockTableMismatchError(
                f"request {name!r}: asks for pages of {dict(wanted.named)}, which no digest here covers"
            )
        if wanted.first_page and not replica.lends_any_part:
            kept = "recurrent states (params.states)" if replica.tables.is_plain else "(params.groups)"
            raise BlockTableMismatchError(
                f"request {name!r}: asks for pages from page {wanted.first_page} on; a lease here covers a whole "
                f"prefix, because the model has {', '.join(replica.tables.kinds)} {kept}: ask from page 0"
            )
        width = DIGEST_BYTES[replica.hash_algorithm]
        ours, theirs = (replica.page_size, replica.hash_algorithm), (wanted.page_size, wanted.hash_algorithm)
        if not replica.caching or ours != theirs or len(wanted.digests) % width:
            cached = f"pages of {ours[0]} tokens with digests of {ours[1]}" if replica.caching else "no pages"
            raise BlockTableMismatchError(
                f"request {name!r}: asks for pages of {theirs[0]} tokens with digests of {theirs[1]!a} "
                f"({len(wanted.digests)} bytes of digests); this manager caches {cached}"
            )
        return replica, np.frombuffer(wanted.digests, np.uint64).reshape(-1, width // 8)


def _checked(name: str, wanted: PageDigests) -> PageDigests:
    """Returns `wanted`. Raises `BlockTableMismatchError` unless it is a `PageDigests` with correctly typed fields."""
    wrong, needed = BlockTableMismatchError, "PageDigests"
    of_kind(f"{name}: wanted", wanted, PageDigests, needed, wrong)
    of_kind(f"{name}: the digests", wanted.digests, bytes, "bytes", wrong)
    whole(f"{name}: first_page", wanted.first_page, 0, error=wrong)
    return wanted


def _most(name: str, most: int) -> int:
    """Returns a number of pages, at least 0. Raises `InvalidRequestError` if `most` is not an integer."""
    found = integer(most)
    if found is None:
        raise refusal(f"request {name!r}: most", most, "an integer", InvalidRequestError)
    return max(0, found)


def _bring(replica: Replica, digests: NDArray[np.uint64], first: int) -> bool:
    """Load some of the pages with these digests from lower tiers onto the device, and publish them.

    The first digest is that of page `first` of a prompt. Returns whether pages are on their way or were loaded.
    """
    tables, tier, pool = replica.tables, replica.tier, replica.pool
    if not tier.keeps or not len(digests):
        return False
    if tier.is_bringing:
        return True  # there is only one load at a time, because each copy takes time from this manager's own requests
    before = tier.generation
    digests = np.concatenate((np.zeros((first, digests.shape[1]), np.uint64), digests))
    coming = replica.fetch_prefix(digests, first, wait=False)
    wanted = tables.from_below(digests, tier.host_has, replica.kept.ends(digests), first)
    room = pool.free_count // 2 - pool.would_be_taken(wanted.here)
    count = max(0, min(len(wanted.digests), room, tier.brought_at_once))
    if count:
        names = wanted.digests[:count]
        tier.hold(slots := tier.slots(names))  # a page that `allocate` evicts must not be stored in these slots
        pool.hold(wanted.here)  # `allocate` must not evict wanted pages that the device already has
        pages = pool.allocate(count)
        pool.index.tables[pages] = wanted.tables[:count]
        tier.bring(pages, slots, names)
        pool.release(wanted.here)
        pool.release(pages)
    elif not coming and not wanted.lacking.any():
        coming = replica.kept.to_device(wanted, digests)
    return coming or count > 0 or tier.generation != before
