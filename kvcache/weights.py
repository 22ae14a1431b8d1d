"""`Weights`: the version of the model's weights, which is part of the name of every page.

The KV of a token depends on the weights as it does on the tokens before it. So the version of the weights seeds the
chain of page digests, beside the salt. Whatever finds pages by digest then keeps versions apart: the prefix index,
block tables, lower tiers, KV events and other processes. A switch to another version drops no page and visits none. It
only changes the seed of the names that are asked for from then on. If an earlier version comes back, its pages are
found again in every tier.

A request that runs on after a switch has KV of several versions. Its `Lineage` says which pages were computed under
which version:

    column      0     1     2     3     4     5
    weights   └──── "a" ────┘ └── "b", after "a" ──┘      the switch came while page 2 was being filled
    name      as any request   only this request and its forks know the mark of this segment
              under "a"

Pages 0 and 1 have the names that every request under "a" gives them. The names of the later pages contain a random
mark, because their KV depends on where the switch came. So no other request finds them.

A new request may ask for pages of earlier versions (`TextContext.max_staleness`). Its own pages begin exactly after
those that it found, so their KV is a function of tokens and segments alone. Their names contain the old prefix and the
new version, but no mark. So all samples of one prompt share them, and a request under one version never does.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from kvcache.arguments import integer, refusal
from kvcache.errors import InvalidParamsError, InvalidRequestError, KVCacheError

Version = int | bytes | str | None
"""The version of the weights as a caller gives it: a number below 2**128, 1 to 16 bytes, or a text, which is hashed.

None means that the caller has not said which version it is.
"""
Running = Literal["finish", "recompute", "stop"]
"""What running requests do when the weights change: see `PagedKVCacheManager.set_weights`."""
MUST: dict[Running, int] = {"finish": 0, "recompute": 1, "stop": 2}
"""What a row must do after a switch (`AllRows.stale`). After several switches, the largest number counts."""
STOP = MUST["stop"]
_BYTES = 16
_MARK_BYTES = 16


class Segment(NamedTuple):
    """A run of pages of one request, from column `first_page` on, that were computed under one version.

    Attributes:
        version: the version, as `version_bytes` returns it.
        mark: random bytes, known to this request and its forks; empty if every request with the same segments may
            share the pages.
    """

    first_page: int
    version: bytes | None = None
    mark: bytes = b""


Segments = tuple[Segment, ...]
UNSAID: Segments = (Segment(0),)
"""The segments of every request as long as no version of the weights was given."""


class Lineage(NamedTuple):
    """The segments of a request's pages, and the number of switches that had come when the last segment began."""

    segments: Segments
    switches: int


class Weights:
    """The current version of the weights. All replicas of a manager share it.

    Attributes:
        now: the lineage of a request whose pages are all of the current version.
        before: the version before the last switch.
        numbers: a number for each version that was current, in the order in which they came first, from 0.
        left: for each version that is not current any more, how many switches had come before the one that replaced it
            last. The most recent one comes last. A version that has returned keeps its old entry.

    Examples:
        >>> weights = Weights("step 1")
        >>> old = weights.now
        >>> weights.switch("step 2")
        >>> weights.now.segments == old.segments, weights.now.switches
        (False, 1)
        >>> weights.switch("step 1")  # a rollback: the pages of step 1 have their names again
        >>> weights.now.segments == old.segments
        True
    """

    def __init__(self, version: Version = None) -> None:
        self.now = Lineage((Segment(0, version_bytes("weights", version)),), 0)
        self.before = self.version
        self.numbers: dict[bytes | None, int] = {self.version: 0}
        self.left: dict[bytes | None, int] = {}

    @property
    def version(self) -> bytes | None:
        """The current version: 1 to 16 bytes, or None if none was given."""
        return self.now.segments[0].version

    def switch(self, version: Version) -> None:
        """Make `version` the current one. Does nothing if it is the current one already."""
        found = version_bytes("weights", version)
        if found != self.version:
            self.before = self.version
            self.numbers.setdefault(found, len(self.numbers))
            self.left.pop(self.version, None)
            self.left[self.version] = self.now.switches
            # One assignment, so that an interrupt finds either the old version or the new one.
            self.now = Lineage((Segment(0, found),), self.now.switches + 1)

    def recent(self, most: int) -> Iterator[bytes | None]:
        """Returns the earlier versions that are at most `most` switches old, the newest first.

        A version is as old as the number of switches since it was last current. So the version before the last switch
        is one switch old, and a rollback makes a version current again, whose age is then 0.

        >>> weights = Weights(1)
        >>> for version in (2, 3, 1, 4):
        ...     weights.switch(version)
        >>> [version[-1] for version in weights.recent(2)]
        [1, 3]
        """
        for version, epoch in reversed(self.left.items()):
            if self.now.switches - epoch > most:
                return
            if version != self.version:
                yield version

    def gone_on(self, lineage: Lineage, committed: int) -> Lineage:
        """Returns the lineage of a request of before a switch that goes on under the current version.

        Its first `committed` pages are published. The next page may have tokens of both versions, so a new segment
        begins with it.
        """
        kept = [segment for segment in lineage.segments if segment.first_page < committed]
        own = Segment(committed, self.version, os.urandom(_MARK_BYTES))
        return Lineage((*kept, own), self.now.switches)


def version_bytes(name: str, version: Version, error: type[KVCacheError] = InvalidParamsError) -> bytes | None:
    """Returns `version` as 1 to 16 bytes, or None.

    A number becomes 16 bytes, most significant first. A text becomes the first 16 bytes of its sha256. Raises `error`,
    which names the argument `name`, if `version` is anything else.

    >>> version_bytes("weights", 258).hex(), len(version_bytes("weights", "step 3"))
    ('00000000000000000000000000000102', 16)
    """
    needed = "an integer from 0 to 2**128 - 1, 1 to 16 bytes, UTF-8 text or None"
    if version is None:
        return None
    if isinstance(version, str):
        try:
            return hashlib.sha256(b"weights\0" + version.encode()).digest()[:_BYTES]
        except UnicodeEncodeError:
            raise refusal(name, version, needed, error) from None
    if isinstance(version, bytes) and 1 <= len(version) <= _BYTES:
        return version
    number = integer(version)
    if number is None or not 0 <= number < 1 << 8 * _BYTES:
        raise refusal(name, version, needed, error)
    return number.to_bytes(_BYTES, "big")


def check_running(running: object) -> Running:
    """Returns `running`. Raises `InvalidRequestError` if it is not a `Running`."""
    known: tuple[Running, ...] = get_args(Running)
    for one in known:
        if one == running:
            return one
    raise refusal("set_weights: running", running, f"one of {', '.join(known)}", InvalidRequestError)


def followed_by(segments: Segments, end: int, version: bytes | None) -> Segments:
    """Returns the segments of the first `end` pages of `segments`, followed by pages of `version`."""
    kept = tuple(segment for segment in segments if segment.first_page < end)
    if kept and kept[-1].version == version and not kept[-1].mark:
        return kept
    return *kept, Segment(end, version)


def first_own_page(segments: Segments) -> int:
    """Returns the first page that not every request under the version of the first segment finds."""
    return next((one.first_page for one in segments if one.mark or one.first_page), 1 << 62)


def has_keys(segments: Segments) -> bool:
    """Whether something besides the first version and the tokens names some of these pages (`keys_of`)."""
    last = segments[-1]  # it has a key if any has
    return bool(last.mark or last.first_page)


def keys_of(segments: Segments, page_size: int) -> tuple[tuple[int, bytes], ...]:
    """Returns what names the pages of each segment besides the first version and the tokens: `(position, key)`.

    The keys of different segments are different: the first byte of a key is the length of its mark.
    """
    return tuple(
        (one.first_page * page_size, struct.pack("B", len(one.mark)) + one.mark + _of_version(one.version))
        for one in segments
        if one.mark or one.first_page
    )


def _of_version(version: bytes | None) -> bytes:
    return b"" if version is None else b"=" + version


def last_name(segments: Segments, page: int | None = None) -> bytes:
    """Returns the name of the segment of `page`, or of the last segment. It tells the weights of the last tokens.

    It is the version, which is empty if none was given. If the pages before are of other versions, or only one request
    knows the pages, a digest of all segments up to this one follows.
    """
    if page is not None:
        segments = tuple(one for one in segments if one.first_page <= page)
    version = segments[-1].version or b""
    if not has_keys(segments):
        return version
    every = hashlib.sha256()
    for at, key in ((0, _of_version(segments[0].version)), *keys_of(segments, 1)):
        every.update(struct.pack("<QB", at, len(key)) + key)
    return version + every.digest()[:_BYTES]


def named_version(name: bytes | None) -> str:
    """Returns the name of a segment, or its version, as a text for a message."""
    return name.hex() if name else "of no given version"
