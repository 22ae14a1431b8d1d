"""What a watcher of a manager is told: a `Look` at every page and request, whole or as what changed since another one.

A look is one message: the header below, in msgpack, then for each pool two frames of little-endian uint32: the pages
that have changed, and their cells. A whole pool has an empty first frame, and a cell for every page, the null page too.
A cell says all of a page: its state, how soon it is evicted, whether it is shared, and whose it is.
"""

import hashlib
from enum import IntEnum
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
    """What a page is. Where several are true, it is the last of them."""

    FREE = 0  # its content is worth nothing
    IDLE = 1  # cached, findable, nobody's: it may be evicted
    HELD = 2  # a request has it
    LEASED = 3  # no request has it, a lease keeps it for its reader
    WRITTEN = 4  # a transfer or a copy from a lower tier writes it
    QUARANTINED = 5  # its import was given up, and something in flight may still write it


def states_of(cells: Cells) -> NDArray[np.uint8]:
    """The `PageState` of each cell."""
    return (cells & STATE_BITS).astype(np.uint8)


def ages_of(cells: Cells) -> NDArray[np.uint8]:
    """The eighth of the eviction order of each idle page: 0 goes first, 7 was released last."""
    return (cells >> AGE_SHIFT & 7).astype(np.uint8)


def owners_of(cells: Cells) -> Cells:
    """The number of each cell's owner (`Owners.numbers`); 0: no owner."""
    return cells >> np.uint32(OWNER_SHIFT)


def request_digest(request_id: str) -> str:
    """A substitute for a hidden request id. It is the same in every process, so that a request can be followed."""
    return "#" + hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


class _Versioned(msgspec.Struct, frozen=True):
    """The field that all messages of all versions have: name and version. Looks that carry none are of version 1."""

    type: str = ""


def other_version(message: bytes, known: type[msgspec.Struct]) -> str:
    """A sentence on a message of another version than the one that is known; empty if it is none of those."""
    try:
        found = msgspec.msgpack.decode(message, type=_Versioned).type
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    tag = known.__struct_config__.tag
    if found in ("", tag):
        return ""
    return f"it speaks {found[:40]!r}, and {tag!r} is known here: both sides need one version of pagewire"


class AskLook(msgspec.Struct, frozen=True, kw_only=True, tag="ask_look/1"):
    """A watcher's question; one look is the answer. Without questions no look is made."""

    known: Count = 0  # the number of the last look that came; 0: none, the answer is whole
    incarnation: Label = ""  # of the watch that it came from
    check: bool = False  # have the loop recount everything, which stops it meanwhile: `CheckReport` tells


class WatchRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="watch_refusal/1"):
    """The answer in place of a look: there are too many watchers."""

    refused: Label  # why


class PoolLook(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one pool."""

    name: Label  # the number of the replica, or the tier
    num_pages: Annotated[int, Meta(ge=1, lt=1 << 31)]  # the null page, 0, is not counted
    counts: tuple[Count, ...]  # pages by `PageState`


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and what else holds pages, in columns. A number stays its owner's while that is there."""

    numbers: tuple[Count, ...] = ()  # 0: it has no pages here
    request_ids: tuple[Label, ...] = ()  # or `request_digest` of each
    tenants: tuple[Label, ...] = ()  # a digest of `cache_salt`; empty: none
    phases: tuple[Label, ...] = ()
    pools: tuple[Label, ...] = ()
    pages: tuple[Count, ...] = ()
    tokens: tuple[Count, ...] = ()  # computed
    prompts: tuple[Count, ...] = ()  # tokens of the prompt, or 0


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that stands."""

    request_id: Label
    pool: Label
    age_s: float
    left_s: float | None  # seconds to its deadline, unless a reader renews it; None: its request still runs
    heard: Label = ""  # what readers have said


class PullRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pull in flight."""

    key: Label
    pool: Label
    source: Label
    stage: Label
    num_bytes: Count  # read, or on their way
    age_s: float | None  # None: it has not begun
    left_s: float


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the prefix tree between two branchings."""

    pool: Label
    page: Count  # the first of them
    parent: Count  # the first of those before them; 0: none
    pages: Count
    below: Count  # with all that follow
    hits: Count  # requests that found the first one


class EvictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that were given away together."""

    age_s: float
    pool: Label
    reason: Label  # "LRU", "hint", "quota" or "reset"
    pages: Count
    again: Count  # of them, that were asked for again, and computed or copied anew
    first: Label  # the digest of one, in part


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """A recount by the loop."""

    age_s: float
    seconds: float  # that it took
    error: str  # the first discrepancy; empty: the books agree
    counts: dict[Label, tuple[Count, ...]]  # of each pool the pages by `PageState` at that moment


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look/1"):
    """A look at a manager."""

    name: Label  # of the process
    incarnation: Label  # random, of the watch
    number: Count  # of the look
    base: Count  # the look that this one is a difference to; 0: it is whole
    at: float  # seconds since 1970
    cost_s: float  # processor time of the last look
    page_size: Count
    page_bytes: Count
    pools: tuple[PoolLook, ...]
    owners: Owners
    leases: tuple[LeaseRow, ...] = ()
    pulls: tuple[PullRow, ...] = ()
    tree: tuple[TreeRow, ...] = ()
    evictions: tuple[EvictionRow, ...] = ()
    evicted: dict[Label, tuple[Count, Count]] = {}  # by reason, pages since somebody looks, and those asked for again
    figures: dict[Label, float] = {}  # totals; a rate is the difference of two looks
    check: CheckReport | None = None


class Beside(NamedTuple):
    """Figures from outside the manager: phases by request id, leases, pulls, totals."""

    phases: dict[str, str] = {}  # noqa: RUF012  (defaults that nobody changes)
    leases: tuple[LeaseRow, ...] = ()
    pulls: tuple[PullRow, ...] = ()
    figures: dict[str, float] = {}  # noqa: RUF012
