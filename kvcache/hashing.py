"""Page hashes: the digest of page `i` covers every token from the first to the end of page `i`.

One running hash takes the pages in turn and gives its digest after each. That makes the digests a chain (equal digest,
equal prefix) at the cost of one update and one digest a page; hashing `parent + page` anew takes sha256 60 % longer.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.context import Context
from kvcache.params import HashAlgorithm

DIGEST_BYTES: dict[HashAlgorithm, int] = {"sha256": 32, "xxh3_128": 16}
_TOKEN = np.dtype("<i4")


class PrefixHasher:
    """The page digests of one request, extended as it grows and never computed twice.

    Two hashers agree on a page exactly when algorithm, page size, salt and all tokens up to its end agree, in any
    process: the digests may be compared across hosts. With `xxh3_128` collisions can be crafted; with sha256 not.
    """

    __slots__ = ("_digests", "_running", "algorithm", "page_size", "pages", "salt")

    def __init__(self, algorithm: HashAlgorithm, page_size: int, salt: str | None) -> None:
        self.algorithm: HashAlgorithm = algorithm
        self.page_size = page_size
        self.salt = salt
        # Each field with its length, so that no two choices of fields give the same bytes.
        fields = (algorithm.encode(), str(page_size).encode(), b"" if salt is None else b"=" + salt.encode())
        seed = b"pagewire/1" + b"".join(struct.pack("<I", len(field)) + field for field in fields)
        self._running: Any = hashlib.sha256(seed) if algorithm == "sha256" else xxhash.xxh3_128(seed)
        self._digests = bytearray()
        self.pages = 0
        """Pages hashed so far."""

    def digests(self, tokens: NDArray[np.integer[Any]], first: int, last: int) -> NDArray[np.uint64]:
        """Digests of the pages `first` to `last` (excluded) as uint64 `[pages, DIGEST_BYTES / 8]`.

        `tokens` are all tokens of the request so far, at least `last * page_size` of them.
        """
        width = DIGEST_BYTES[self.algorithm]
        known = self.pages
        if known < last:
            self._extend(tokens[known * self.page_size : last * self.page_size])
        wanted = bytes(self._digests[first * width : last * width])
        return np.frombuffer(wanted, np.uint64).reshape(last - first, width // 8)

    def extend_by_page(self, row: bytes) -> bytes:
        """The digest of the next page, whose tokens are `row` (little-endian int32)."""
        self._running.update(row)
        digest: bytes = self._running.digest()
        self._digests += digest
        self.pages += 1
        return digest

    def _extend(self, tokens: NDArray[np.integer[Any]]) -> None:
        update, digest = self._running.update, self._running.digest
        found: list[bytes] = []
        for row in page_rows(tokens, self.page_size):
            update(row)
            found.append(digest())
        self._digests += b"".join(found)
        self.pages += len(found)


def page_rows(tokens: NDArray[np.integer[Any]], page_size: int) -> list[bytes]:
    """The bytes of each page of `tokens`, a whole number of pages, as they are hashed."""
    # A view of raw bytes becomes bytes objects in one call: half the cost of slicing a memoryview page by page.
    return np.ascontiguousarray(tokens, _TOKEN).reshape(-1).view(f"V{page_size * _TOKEN.itemsize}").tolist()


def hasher_of(context: Context, algorithm: HashAlgorithm, page_size: int) -> PrefixHasher:
    """The hasher that the context carries if it is of this kind, else a new one, left there if it has the attribute."""
    salt: str | None = getattr(context, "cache_salt", None)
    kept: PrefixHasher | None = getattr(context, "prefix_hasher", None)
    if kept is not None and (kept.algorithm, kept.page_size, kept.salt) == (algorithm, page_size, salt):
        return kept
    made = PrefixHasher(algorithm, page_size, salt)
    if hasattr(context, "prefix_hasher"):
        context.prefix_hasher = made  # pyright: ignore[reportAttributeAccessIssue] - an optional attribute
    return made
