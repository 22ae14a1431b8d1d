"""Page hashes: the digest of page `i` covers all tokens of a prompt up to the end of page `i`.

A running hash takes the pages one after another, and yields a digest after each page. So equal digests mean equal
prefixes, and each page costs one update and one digest. The alternative, hashing the parent's digest and the page
(`parent + page`), takes 60 % longer with sha256.

hashlib needs two calls and an allocation for each page. If `chained.c` was compiled, one call hashes all pages of a
prompt, or one page of each request of a step. `chained.c` uses the sha256 of the libcrypto that hashlib uses, and
produces the same digests.
"""

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from copy import copy
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.params import HashAlgorithm
from kvcache.weights import UNSAID, Segments, has_keys, keys_of

ExtraKeys = tuple[tuple[int, bytes], ...]
"""`(position, key)` of each input other than tokens. The KV of the token at `position` and of all later tokens depends
on it.
"""
DIGEST_BYTES: dict[HashAlgorithm, int] = {"sha256": 32, "blake3": 32, "xxh3_128": 16}
_OF_WEIGHTS = 1 << 31
"""This bit of a key's length says that the key belongs to a segment. Keys of contexts are shorter than that."""
_TOKEN, _WORD = np.dtype("<i4"), np.dtype(np.uint64)
_AT_ONCE = 1 << 17
"""The largest number of tokens that one call to the C code hashes. Computing a digest counts as 16 tokens. No other
Python thread runs during the call, so it must be short. Even without SHA instructions it takes less than 5 ms, which is
the interval at which Python switches threads.
"""
PLAIN = "PAGEWIRE_PLAIN_SHA256"
"""The name of an environment variable. If it is set to a non-empty value, hashlib computes every sha256."""


def _compiled() -> tuple[type[Any], str]:
    """Returns the class from `chained.c`, or `_NotCompiled`.

    Also returns a string that says which sha256 is used, and why. `chained.c` is used if it was compiled, if the
    environment variable does not turn it off, and if it produces the same digests as hashlib.
    """
    if os.environ.get(PLAIN):
        return _NotCompiled, f"hashlib: {PLAIN} is set"
    try:
        from kvcache.replica.chained import Sha256Chain  # noqa: PLC0415 - optional
    except ImportError as error:
        return _NotCompiled, f"hashlib: {error}"
    text, chain = bytes(range(192)), Sha256Chain(b"seed")
    chain.extend(text, 96)
    if bytes(chain.known) != b"".join(hashlib.sha256(b"seed" + text[:length]).digest() for length in (96, 192)):
        return _NotCompiled, "hashlib: chained.c gives other digests here"
    return Sha256Chain, "chained.c"


class _NotCompiled:
    """Stands in for the class `Sha256Chain` if hashlib is used. Never instantiated."""


_Chain, SHA256_BY = _compiled()
"""`SHA256_BY`: the sha256 that this process uses. Either "chained.c", or "hashlib: " and the reason why C is not used.
"""


class PrefixHasher:
    """The page digests of one request. New pages add digests as the request grows. No digest is computed twice.

    Two pages have the same digest if and only if algorithm, page size, salt, version of the weights, and all tokens and
    extra keys up to the end of the page are the same. A missing salt (None) is distinct from every salt, including the
    empty one; the same holds for versions. Digests do not depend on the process, so they can be compared across hosts.
    An attacker can construct collisions of `xxh3_128`, but not of sha256 and blake3. `segments` has the versions under
    which the request's pages were computed (`kvcache.weights`).

        tokens    0 … 15        16 … 31       32 … 39
        digest    d0 = H(salt, weights, tokens)
                  d1 = H(d0, tokens)          a page that is not full has no digest

    Examples:
        >>> tokens, one = np.arange(40), PrefixHasher("sha256", page_size=16, salt=None)
        >>> one.digests(tokens, 0, 2).shape  # two full pages of four words
        (2, 4)
        >>> same, other = PrefixHasher("sha256", 16, None), PrefixHasher("sha256", 16, salt="ada")
        >>> bool((same.digests(tokens, 0, 2) == one.digests(tokens, 0, 2)).all())
        True
        >>> bool((other.digests(tokens, 0, 2) == one.digests(tokens, 0, 2)).any())
        False
    """

    __slots__ = (
        *("algorithm", "extra_keys", "fitted", "keys_left", "known", "matches", "named", "others", "page_size"),
        *("running", "salt", "segments", "width"),
    )

    def __init__(
        self,
        algorithm: HashAlgorithm,
        page_size: int,
        salt: str | None,
        extra_keys: ExtraKeys | None = None,
        segments: Segments = UNSAID,
    ) -> None:
        self.algorithm: HashAlgorithm = algorithm
        self.page_size = page_size
        self.salt = salt
        self.segments = segments
        self.named = salt, extra_keys  # what the context gives
        # the lineage of the pages for which a replica has last found that this hasher `fits`
        self.fitted: object = None
        self.extra_keys = extra_keys
        # the request's hashers for other segments, as long as it may choose among them (`Candidates`)
        self.others: dict[Segments, PrefixHasher] = _NO_OTHERS
        self.width = DIGEST_BYTES[algorithm]
        self._begin()
        # The last lookup in each prefix index or tier: the generation at the lookup, the first and the last page that
        # were looked up, and the result (see `Replica.find`).
        self.matches: dict[object, tuple[int, int, int, Any]] = {}

    def _begin(self) -> None:
        """Start over, with no page hashed."""
        running = _seeded(self.algorithm, self.page_size, self.salt, self.segments[0].version).copy()
        # The extra keys that are not hashed yet, as `(page, bytes to hash)`. The next one is at the end of the list.
        # The bytes begin with -1, which is never a token. Then come the position and the length of the key, so that it
        # is clear where the key ends.
        self.keys_left = self._keys_to_come() if self.extra_keys or has_keys(self.segments) else []
        self.known = _known(running, b"")  # the digests of all hashed pages, one after another
        # The running hash after all pages in `known`. It is None while pages are being hashed, and stays None after an
        # interrupt.
        self.running: Any = running

    def begin_if_interrupted(self) -> None:
        """Start over if hashing was interrupted, which leaves `running` at None."""
        if self.running is None:
            self._begin()

    def fits(
        self,
        algorithm: HashAlgorithm,
        page_size: int,
        named: tuple[str | None, ExtraKeys],
        segments: Segments = UNSAID,
    ) -> bool:
        """Whether this hasher has this algorithm, page size and `segments`, and the salt and extra keys in `named`."""
        same = self.named == named and self.segments == segments
        return same and self.page_size == page_size and self.algorithm == algorithm

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the pages whose digests are known."""
        return len(self.known) // self.width * self.page_size

    def _keys_to_come(self) -> list[tuple[int, bytes]]:
        own = [(position, key, _OF_WEIGHTS) for position, key in keys_of(self.segments, self.page_size)]
        every = own + [(position, key, 0) for position, key in self.extra_keys or ()]
        return [
            (position // self.page_size, struct.pack("<iII", -1, position, len(key) | kind) + key)
            for position, key, kind in sorted(every, reverse=True)
        ]

    def copy(self) -> "PrefixHasher":
        self.begin_if_interrupted()
        twin = copy(self)
        twin.running = twin.running.copy()
        twin.known = _known(twin.running, self.known)
        twin.keys_left, twin.matches, twin.others = self.keys_left[:], {}, _NO_OTHERS
        return twin

    def digests(self, tokens: NDArray[np.integer[Any]], first: int, last: int) -> NDArray[np.uint64]:
        """Returns the digests of pages `first` to `last` (excluded): uint64 `[pages, DIGEST_BYTES / 8]`.

        `tokens` are all known tokens of the request.
        """
        width = self.width
        if len(self.known) < last * width:
            self._extend(tokens, last)
        # read-only, and a copy: while an array refers to `known`, no digest can be added
        wanted = bytes(memoryview(self.known)[first * width : last * width])
        return np.ndarray((last - first, width // 8), _WORD, wanted)

    def _extend(self, tokens: NDArray[np.integer[Any]], last: int) -> None:
        """Hash all pages before page `last` that have no digest yet. `tokens` are all known tokens of the request."""
        self.begin_if_interrupted()
        running, self.running = self.running, None
        size, keys, page = self.page_size, self.keys_left, len(self.known) // self.width
        while page < last:
            while keys and keys[-1][0] == page:
                running.update(keys.pop()[1])
            end = min(last, keys[-1][0]) if keys else last
            self._take(running, tokens[page * size : end * size])
            page = end
        self.running = running

    def _take(self, running: Any, tokens: NDArray[np.integer[Any]]) -> None:
        """Hash `tokens`, which are whole pages without extra keys."""
        size = self.page_size
        if type(running) is _Chain:
            at_once = max(1, _AT_ONCE // (size + 16)) * size
            while len(tokens) > at_once:
                running.extend(np.ascontiguousarray(tokens[:at_once], _TOKEN), size * _TOKEN.itemsize)
                tokens = tokens[at_once:]
            running.extend(np.ascontiguousarray(tokens, _TOKEN), size * _TOKEN.itemsize)
            return
        digest = running.digest
        # Each page takes only two Python calls, because a prompt may have thousands of pages.
        self.known += b"".join([digest() for _ in map(running.update, page_rows(tokens, size))])


_NO_OTHERS: dict[Segments, PrefixHasher] = {}  # never changed


@functools.lru_cache(maxsize=256)
def _seeded(algorithm: HashAlgorithm, page_size: int, salt: str | None, weights: bytes | None = None) -> Any:
    """Returns the running hash before the first page. The hash is cached, so callers must update a copy."""
    # Each field is preceded by its length, so different fields never produce the same bytes. The version of the weights
    # is one more field, so its seed begins differently: tokens after a seed without it could have the same bytes.
    fields = [algorithm.encode(), str(page_size).encode(), b"" if salt is None else b"=" + salt.encode()]
    if weights is not None:
        fields.append(weights)
    kind = b"pagewire/1" if weights is None else b"pagewire/2"
    seed = kind + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    if algorithm == "blake3":
        from blake3 import blake3  # noqa: PLC0415 - optional: see `usable_hashes`

        return blake3(seed)
    if algorithm == "xxh3_128":
        return xxhash.xxh3_128(seed)
    return hashlib.sha256(seed) if _Chain is _NotCompiled else _Chain(seed)


def _known(running: Any, digests: bytes | bytearray) -> bytearray:
    """Returns the byte array to which a hasher appends its digests. The array begins with `digests`.

    If `running` is a `_Chain`, its own array is returned, because the C code appends to that array.
    """
    return running.known if type(running) is _Chain else bytearray(digests)


def token_bytes(tokens: NDArray[np.integer[Any]]) -> bytes:
    """Returns a copy of `tokens` as bytes, in the form in which they are hashed."""
    return np.ascontiguousarray(tokens, _TOKEN).tobytes()


def page_rows(tokens: NDArray[np.integer[Any]], page_size: int) -> list[bytes]:
    """Returns the bytes of each page of `tokens`, in the form in which they are hashed. The last page must be full."""
    # One call turns a view of the raw bytes into bytes objects. Slicing a memoryview page by page takes twice as long.
    return np.ascontiguousarray(tokens, _TOKEN).reshape(-1).view(_page_type(page_size)).tolist()


@functools.cache
def _page_type(page_size: int) -> np.dtype[Any]:
    return np.dtype((np.void, page_size * _TOKEN.itemsize))


def next_digests(
    hashers: Sequence[PrefixHasher],
    firsts: Sequence[int],
    pages: NDArray[np.integer[Any]],
    slow: Callable[[int], bytes],
) -> NDArray[np.uint64]:
    """Returns the digest of one page of each request: page `firsts[i]` of request i, whose tokens are `pages[i]`.

    `pages` is `[requests, page_size]`. The result is uint64 `[requests, words]`. `slow(i)` must return the digest for
    request i. It is called if an earlier page of the request has no digest yet, or if some extra keys of the request
    are not hashed yet.
    """
    hashers[0].begin_if_interrupted()
    if type(hashers[0].running) is _Chain:
        return _next_in_c(hashers, firsts, np.ascontiguousarray(pages, _TOKEN), slow)
    found: list[bytes] = []
    for hasher, first, row in zip(hashers, firsts, page_rows(pages, pages.shape[1]), strict=True):
        known, running = hasher.known, hasher.running
        if len(known) != first * hasher.width or hasher.keys_left or running is None:
            found.append(slow(len(found)))
            continue
        hasher.running = None
        running.update(row)
        digest: bytes = running.digest()
        known += digest
        hasher.running = running
        found.append(digest)
    return np.frombuffer(b"".join(found), np.uint64).reshape(len(found), -1)


_KEYS_LEFT, _RUNNING = attrgetter("keys_left"), attrgetter("running")


def _next_in_c(
    hashers: Sequence[PrefixHasher], firsts: Sequence[int], pages: NDArray[np.int32], slow: Callable[[int], bytes]
) -> NDArray[np.uint64]:
    """Do `next_digests` with `chained.c`. Usually one call hashes the pages of all requests."""
    if not any(map(_KEYS_LEFT, hashers)):
        try:
            digests = _Chain.extend_each(list(map(_RUNNING, hashers)), list(firsts), pages)
        except TypeError:  # raised if the `running` of a hasher is None after an interrupt
            digests = None
        if digests is not None:
            return np.frombuffer(digests, np.uint64).reshape(len(hashers), -1)
    found: list[bytes] = []
    for at, hasher in enumerate(hashers):
        hasher.begin_if_interrupted()
        digest = None if hasher.keys_left else _Chain.extend_each([hasher.running], [firsts[at]], pages[at])
        found.append(slow(at) if digest is None else digest)
    return np.frombuffer(b"".join(found), np.uint64).reshape(len(found), -1)
