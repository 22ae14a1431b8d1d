"""`Switches`: the versions of the weights as the plain model knows them, and which contents are of which version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvcache.weights import version_bytes
from tests.kvcache.random_model.matrix import PAGE_SIZE
from tests.kvcache.random_model.plain import Digest, Request

VERSIONS = (None, "a", "b", 3)
RUNNING: tuple[Any, ...] = ("finish", "recompute", "stop")
_NOBODYS = object()


class Switches:
    """All versions that were current, the current one last, and the version under which each content was last used."""

    def __init__(self) -> None:
        self.history: list[Any] = [None]
        self._of: dict[tuple[int, Digest], Any] = {}
        self._used: dict[tuple[int, Digest], Any] = {}
        self._marks = 0
        self.given_back: set[tuple[int, Digest]] = set()

    @property
    def now(self) -> Any:
        return self.history[-1]

    def switch(self, version: Any) -> bool:
        """Records a switch. Returns whether it changes the version."""
        changes = version != self.now
        if changes:
            self.history.append(version)
        return changes

    def recent(self, most: int) -> Iterator[Any]:
        """Returns the versions that were current in the last `most` switches, without the current one, newest first."""
        seen = [self.now]
        for version in self.history[-2 : -2 - most : -1]:
            if version not in seen:
                seen.append(version)
                yield version

    def name(self, version: Any) -> bytes:
        return b"weights %r" % (version,)

    def version_of(self, name: bytes) -> bytes | None:
        return version_bytes("", next(one for one in VERSIONS if self.name(one) == name))

    def mark(self) -> bytes:
        """Returns a key that no other request has."""
        self._marks += 1
        return b"mark %d" % self._marks

    def came(self, at: int, digests: Iterable[Digest]) -> None:
        """Records that contents were published on a replica."""
        now = {(at, digest): self.now for digest in digests}
        self._of |= now
        self._used |= now

    def used(self, at: int, digests: Iterable[Digest]) -> None:
        """Records that a request has found these contents."""
        self._used |= {(at, digest): self.now for digest in digests}

    def left(self, one: Request, digest_of: dict[int, Digest]) -> None:
        """Records that a request was released: nobody finds its pages of several versions any more."""
        first = next((at // PAGE_SIZE for at, key in one.weights if key.startswith(b"mark")), None)
        for row in one.rows if first is not None else ():
            for column, page in row.items():
                if column >= first and page in digest_of:
                    of = one.replica, digest_of[page]
                    self._of[of] = self._used[of] = _NOBODYS

    def is_old(self, at: int, digest: Digest) -> bool:
        return self.now not in (self._of[at, digest], self._used[at, digest])

    def gives_back(self, at: int, digests: Iterable[Digest]) -> None:
        """Records that a request is about to give back these contents, before it finds others or the same again."""
        self.given_back = {(at, digest) for digest in digests if self.is_old(at, digest)}

    def sort(self, at: int, order: list[Digest], idle: list[Digest]) -> None:
        """Move those of the contents `idle`, which have just joined the `order`, to its front if they are old."""
        old = [digest for digest in idle if self.is_old(at, digest) or (at, digest) in self.given_back]
        if old:
            order[:] = [*old, *(digest for digest in order if digest not in old)]
