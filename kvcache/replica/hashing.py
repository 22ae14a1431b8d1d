"""Page hashes: the digest of page `i` covers every token from the first to the end of page `i`.

One running hash takes the pages in turn and gives its digest after each. That makes the digests a chain (equal digest,
equal prefix) at the cost of one update and one digest a page; hashing `parent + page` anew takes sha256 60 % longer.
"""

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from copy import copy
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.params import HashAlgorithm
from kvcache.replica.keys import ExtraKeys

DIGEST_BYTES: dict[HashAlgorithm, int] = {"sha256": 32, "blake3": 32, "xxh3_128": 16}
_TOKEN = np.dtype("<i4")


class PrefixHasher:
    """The page digests of one request, extended as it grows and never computed twice.

    Two hashers agree on a page exactly when algorithm, page size, salt (None is one of its own), and all tokens and
    extra keys up to its end agree, in any process: the digests may be compared across hosts. With `xxh3_128` collisions
    can be crafted; with sha256 and blake3 not.
    """

    __slots__ = ("algorithm", "extra_keys", "keys_left", "known", "matches", "page_size", "running", "salt", "width")

    def __init__(
        self, algorithm: HashAlgorithm, page_size: int, salt: str | None, extra_keys: ExtraKeys | None = None
    ) -> None:
        self.algorithm: HashAlgorithm = algorithm
        self.page_size = page_size
        self.salt = salt
        self.extra_keys = extra_keys
        self.running: Any = _seeded(algorithm, page_size, salt).copy()  # after the pages whose digests are known
        self.known = bytearray()  # those digests, one after another
        self.width = DIGEST_BYTES[algorithm]
        # The extra keys of pages to come, `(page, bytes to hash)`, the next one last. -1 is no token: where one is due
        # it says that a key follows, and the length says where the key ends.
        self.keys_left: list[tuple[int, bytes]] = []
        if extra_keys:
            marked = [
                (position // page_size, struct.pack("<iII", -1, position, len(key)) + key)
                for position, key in sorted(extra_keys)
            ]
            self.keys_left = marked[::-1]
        # Index → the generation of it, first and last page, and what they were found as (see `Replica.match`).
        self.matches: dict[object, tuple[int, int, int, NDArray[np.int32]]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the pages whose digests are known."""
        return len(self.known) // self.width * self.page_size

    def copy(self) -> "PrefixHasher":
        twin = copy(self)
        twin.running, twin.known = self.running.copy(), self.known[:]
        twin.keys_left, twin.matches = self.keys_left[:], {}
        return twin

    def digests(self, tokens: NDArray[np.integer[Any]], first: int, last: int) -> NDArray[np.uint64]:
        """Digests of pages `first` to `last` (excluded) of all known `tokens`: uint64 `[pages, DIGEST_BYTES / 8]`."""
        width = self.width
        known = len(self.known) // width
        if known < last:
            self._extend(tokens[known * self.page_size : last * self.page_size])
        wanted = bytes(self.known[first * width : last * width])
        return np.frombuffer(wanted, np.uint64).reshape(last - first, width // 8)

    def _extend(self, tokens: NDArray[np.integer[Any]]) -> None:
        update, digest, keys = self.running.update, self.running.digest, self.keys_left
        listed = page_rows(tokens, self.page_size)
        found: list[bytes] = []
        page = len(self.known) // self.width
        last, rows = page + len(listed), iter(listed)
        while page < last:
            while keys and keys[-1][0] == page:
                update(keys.pop()[1])
            end = min(last, keys[-1][0]) if keys else last
            # No step but these two for a page without a key: a prompt has thousands.
            found += [digest() for _ in map(update, islice(rows, end - page))]
            page = end
        self.known += b"".join(found)


@functools.lru_cache(maxsize=256)
def _seeded(algorithm: HashAlgorithm, page_size: int, salt: str | None) -> Any:
    """The running hash before the first page. It is copied, never updated."""
    # Each field with its length, so that no two choices of fields give the same bytes.
    fields = (algorithm.encode(), str(page_size).encode(), b"" if salt is None else b"=" + salt.encode())
    seed = b"pagewire/1" + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    if algorithm == "blake3":
        from blake3 import blake3  # noqa: PLC0415 - an extra: see `usable_hashes`

        return blake3(seed)
    return hashlib.sha256(seed) if algorithm == "sha256" else xxhash.xxh3_128(seed)


def token_bytes(tokens: NDArray[np.integer[Any]]) -> bytes:
    """A copy of `tokens` as they are hashed."""
    return np.ascontiguousarray(tokens, _TOKEN).tobytes()


def page_rows(tokens: NDArray[np.integer[Any]], page_size: int) -> list[bytes]:
    """The bytes of each page of `tokens`, a whole number of pages, as they are hashed."""
    # A view of raw bytes becomes bytes objects in one call: half the cost of slicing a memoryview page by page.
    return np.ascontiguousarray(tokens, _TOKEN).reshape(-1).view(_page_type(page_size)).tolist()


@functools.cache
def _page_type(page_size: int) -> np.dtype[Any]:
    return np.dtype((np.void, page_size * _TOKEN.itemsize))


def next_digests(
    hashers: Sequence[PrefixHasher], firsts: Sequence[int], rows: Sequence[bytes], slow: Callable[[int], bytes]
) -> NDArray[np.uint64]:
    """The digest of one page of each request: page `firsts`, whose bytes are `rows`. uint64 `[requests, words]`.

    `slow(at)` gives it where pages before that one are not hashed yet, or an extra key is to come.
    """
    found: list[bytes] = []
    for hasher, first, row in zip(hashers, firsts, rows, strict=True):
        known = hasher.known
        if len(known) != first * hasher.width or hasher.keys_left:
            found.append(slow(len(found)))
            continue
        running = hasher.running
        running.update(row)
        digest: bytes = running.digest()
        known += digest
        found.append(digest)
    return np.frombuffer(b"".join(found), np.uint64).reshape(len(found), -1)
