"""The messages between a manager and a watcher. A `Look` is a snapshot of every page and request.

A snapshot is complete, or lists the changes since an earlier snapshot. Each snapshot is one message: the header below,
in msgpack, and then two frames of little-endian uint32 for each pool. The first frame has the numbers of the changed
pages, and the second one their cells. In a complete snapshot the first frame is empty, and the second one has a cell
for every page, including the null page. A cell holds everything about a page: its state, its position in the eviction
order, whether it is shared, and its owner.
"""

import hashlib
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Cells: TypeAlias = NDArray[np.uint32]
STATE_BITS, AGE_SHIFT, SHARED_BIT, OWNER_SHIFT = 7, 3, 6, 8
MOST_OWNERS = (1 << 24) - 1

Label = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class PageState(IntEnum):
    """The state of a page. If several values apply, the last of them counts."""

    FREE = 0  # the page's content is not needed
    IDLE = 1  # the page is cached and has no holder, so it may be evicted
    HELD = 2  # a request holds the page
    LEASED = 3  # no request holds the page, but a lease keeps it for a reader
    WRITTEN = 4  # a transfer, or a copy from a lower tier, writes to the page
    QUARANTINED = 5  # the page's import was cancelled, but a write in flight may still reach the page


def states_of(cells: Cells) -> NDArray[np.uint8]:
    """Returns the `PageState` of each cell."""
    return (cells & STATE_BITS).astype(np.uint8)


def ages_of(cells: Cells) -> NDArray[np.uint8]:
    """Returns each idle page's position in the eviction order, in eighths: 0 is evicted first, 7 was released last."""
    return (cells >> AGE_SHIFT & 7).astype(np.uint8)


def owners_of(cells: Cells) -> Cells:
    """Returns the number of each cell's owner, as in `Owners.numbers`. The number is 0 if a page has no owner."""
    return cells >> np.uint32(OWNER_SHIFT)


@lru_cache(1 << 14)
def request_digest(request_id: str) -> str:
    """Returns a string that stands for a hidden request id.

    It is the same in every process, so that a request can be followed.
    """
    return "#" + hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


class _Versioned(msgspec.Struct, frozen=True):
    """The field that messages of all versions have. It names the type and version of the message.

    A message without this field has version 1.
    """

    type: str = ""


def other_version(message: bytes, known: type[msgspec.Struct]) -> str:
    """Returns an error message if the version of `message` is not `known`, otherwise ""."""
    try:
        found = msgspec.msgpack.decode(message, type=_Versioned).type
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    tag = known.__struct_config__.tag
    if found in ("", tag):
        return ""
    return f"it speaks {found[:40]!r}, and {tag!r} is known here: both sides need one version of pagewire"


class AskLook(msgspec.Struct, frozen=True, kw_only=True, tag="ask_look/1"):
    """A watcher's request for one snapshot. Snapshots are made only on request."""

    # the number of the last snapshot that the watcher received; 0 if there was none, so that the answer is complete
    known: Count = 0
    incarnation: Label = ""  # the random id of the endpoint that sent the last snapshot (`Look.incarnation`)
    # Whether the loop should recount all pages. The loop does not run steps during the recount. `CheckReport` has the
    # result.
    check: bool = False


class WatchRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="watch_refusal/1"):
    """The answer instead of a snapshot, if there are too many watchers, or if the request has another version."""

    refused: Label  # the reason


class PoolLook(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one pool."""

    name: Label  # the index of the replica, or the name of the tier
    num_pages: Annotated[int, Meta(ge=1, lt=1 << 31)]  # the number of pages without page 0, the null page
    counts: tuple[Count, ...]  # the number of pages in each `PageState`
    older: Count = 0  # the number of cached pages that other weights than the current ones have computed


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, leases and imports that own pages. Each field has one item for each owner, in the same order."""

    # the number by which cells name the owner, the same as long as the owner exists; 0 for a request without pages
    numbers: tuple[Count, ...] = ()
    request_ids: tuple[Label, ...] = ()  # the ids of the requests, or the `request_digest` of each id
    tenants: tuple[Label, ...] = ()  # for each owner, a digest of its `cache_salt`; empty without a salt
    phases: tuple[Label, ...] = ()
    pools: tuple[Label, ...] = ()
    pages: tuple[Count, ...] = ()
    tokens: tuple[Count, ...] = ()  # for each owner, the number of computed tokens
    prompts: tuple[Count, ...] = ()  # for each owner, the number of tokens in its prompt, or 0


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """An open lease."""

    request_id: Label
    pool: Label
    age_s: float
    # seconds to the lease's deadline, unless a reader renews the lease; None while its request runs
    left_s: float | None
    heard: Label = ""  # the last messages that readers sent about the lease


class PullRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pull in flight."""

    key: Label
    pool: Label
    source: Label
    stage: Label
    num_bytes: Count  # the number of bytes that the pull has read or is reading
    age_s: float | None  # seconds since the pull began; None if it has not begun
    left_s: float


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run of pages in the prefix tree, up to the next branch."""

    pool: Label
    page: Count  # the id of the first page of the run
    parent: Count  # the first page of the run that this run continues, or 0
    pages: Count
    below: Count  # the number of pages in this run and in all runs that continue it
    hits: Count  # how many requests have found the first page of the run


class EvictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that were evicted together."""

    age_s: float
    pool: Label
    reason: Label  # "LRU", "hint", "quota" or "reset"
    pages: Count
    again: Count  # how many of the evicted pages were published again later
    first: Label  # the beginning of the digest of one of the evicted pages


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last `PagedKVCacheManager.check`, which recounts all pages."""

    age_s: float
    seconds: float  # how long the recount took
    error: str  # the first discrepancy that the recount found; empty if there was none
    counts: dict[Label, tuple[Count, ...]]  # by pool: the number of pages in each `PageState` at the recount


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look/1"):
    """A description of a manager at one moment."""

    name: Label  # the name of the process
    incarnation: Label  # a random id of the endpoint that sends the snapshots
    number: Count  # the number of the snapshot
    base: Count  # the number of the earlier snapshot since which changes are listed; 0 for a complete snapshot
    at: float  # seconds since 1970
    cost_s: float  # how many seconds of processor time the last snapshot took
    page_size: Count
    page_bytes: Count
    pools: tuple[PoolLook, ...]
    owners: Owners
    leases: tuple[LeaseRow, ...] = ()
    pulls: tuple[PullRow, ...] = ()
    tree: tuple[TreeRow, ...] = ()
    evictions: tuple[EvictionRow, ...] = ()
    # For each reason, how many pages were evicted since snapshots began, and how many of them were published again.
    evicted: dict[Label, tuple[Count, Count]] = {}
    # Totals by name. A rate is the difference between two snapshots, divided by the time between them.
    figures: dict[Label, float] = {}
    check: CheckReport | None = None


class Beside(NamedTuple):
    """Data of components outside the manager: the phase of each request, leases, pulls, and totals in `figures`."""

    phases: dict[str, str] = {}  # noqa: RUF012  (these defaults are never changed)
    leases: tuple[LeaseRow, ...] = ()
    pulls: tuple[PullRow, ...] = ()
    figures: dict[str, float] = {}  # noqa: RUF012
