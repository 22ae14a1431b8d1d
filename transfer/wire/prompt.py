"""`Prompt`: everything that the KV of a request depends on.

A reader compares the prompt's digest with the source's, and so knows that leased pages belong to its own prompt.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_PERSON, _PAGES = b"pagewire prompt", b"pagewire pages"


class Content(Protocol):
    """Identifies the KV in the pages of a lease. A reader compares it with the KV that its own request needs."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that digests can cover."""
        ...

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """See `Prompt.named`."""
        ...

    def digest(self, num_tokens: int) -> bytes:
        """Returns bytes that identify the first `num_tokens` tokens and everything else that their KV depends on."""
        ...


class Prompt(NamedTuple):
    """The tokens of a request, and everything else that its KV depends on.

    Attributes:
        token_ids: at least all tokens whose KV is read or leased; each below 2**31.
        salt: requests with different salts share no pages.
        keys: pairs `(position, key)`. From the token at `position` on, the KV also depends on the key: an adapter, or
            the content of an image.
        named: pairs `(name, value)` of further things that the KV depends on, such as the digest of an adapter's files.
            They are no part of `digest`. They are compared one by one, so that an error can name the difference.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    salt: str = ""
    keys: tuple[tuple[int, bytes], ...] = ()
    named: tuple[tuple[str, str], ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of known tokens."""
        return len(self.token_ids)

    def digest(self, num_tokens: int) -> bytes:
        """Returns 32 bytes that identify the first `num_tokens` tokens, the salt, and all keys at these tokens.

        The digest is the same in every process and on every machine. It is collision-resistant: in practice, no two
        different prompts have the same digest.
        """
        salt = self.salt.encode(errors="surrogatepass")  # JSON may contain lone surrogates
        keys = sorted(key for key in self.keys if key[0] < num_tokens)
        found = hashlib.blake2b(digest_size=32, person=_PERSON)
        # Each part is preceded by its length, so that no two prompts give the same bytes.
        found.update(struct.pack("<QQQ", num_tokens, len(salt), len(keys)) + salt)
        for position, key in keys:
            found.update(struct.pack("<QQ", position, len(key)) + key)
        found.update(_packed(self.token_ids[:num_tokens]))
        return found.digest()


class HashedPages(NamedTuple):
    """The full pages of a prompt, named by hashes that somebody else has made, such as an engine's prefix cache.

    Attributes:
        page_size: tokens of a page.
        algorithm: names how the hashes were made.
        hashes: the hash of each page from `first_page` on, concatenated. Each covers all earlier tokens of the prompt,
            the salt and all keys.
        width: bytes of a hash.
        first_page: the index in the prompt of the page of the first hash.
        named: as in a `Prompt`.
    """

    page_size: int
    algorithm: str
    hashes: bytes
    width: int
    first_page: int = 0
    named: tuple[tuple[str, str], ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of tokens up to the end of the last page."""
        return (self.first_page + len(self.hashes) // self.width) * self.page_size

    def digest(self, num_tokens: int) -> bytes:
        """Returns 32 bytes that identify the pages up to token `num_tokens`. Empty if none of the pages ends there."""
        pages, rest = divmod(num_tokens, self.page_size)
        at = (pages - self.first_page - 1) * self.width
        if rest or not 0 <= at < len(self.hashes):
            return b""
        found = hashlib.blake2b(digest_size=32, person=_PAGES)
        found.update(struct.pack("<QQ", num_tokens, self.page_size) + self.algorithm.encode() + b"\0")
        found.update(self.hashes[at : at + self.width])
        return found.digest()


def _packed(token_ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Returns tokens as little-endian int32 bytes."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype("<i4", copy=False).tobytes()
    packed = array("i", token_ids)  # for a list, `array` takes a third of the time that numpy takes
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
