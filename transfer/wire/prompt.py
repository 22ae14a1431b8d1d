"""`Prompt`: what the KV of a request depends on. Its digest is by what a reader knows that pages are of its request."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PERSON = b"pagewire prompt"


class Prompt(NamedTuple):
    """The tokens of a request, and what else its KV depends on.

    Attributes:
        token_ids: all of which the KV is read or leased, or more; below 2**31.
        salt: requests of different salts share nothing.
        keys: `(position, key)`: what the KV depends on from this token on, say an adapter, or the content of an image.
    """

    token_ids: Sequence[int] | NDArray[np.int32]
    salt: str = ""
    keys: tuple[tuple[int, bytes], ...] = ()

    def digest(self, num_tokens: int) -> bytes:
        """Returns 32 bytes that are those of another prompt only where its first tokens are the same.

        And its salt, and all keys of these tokens. The digest is the same in every process and on every machine, and
        nobody can find two prompts that have one.
        """
        salt = self.salt.encode(errors="surrogatepass")  # whatever JSON may hold
        keys = sorted(key for key in self.keys if key[0] < num_tokens)
        found = hashlib.blake2b(digest_size=32, person=_PERSON)
        # Each part goes in after its length: no two prompts give the same bytes.
        found.update(struct.pack("<QQQ", num_tokens, len(salt), len(keys)) + salt)
        for position, key in keys:
            found.update(struct.pack("<QQ", position, len(key)) + key)
        found.update(_packed(self.token_ids[:num_tokens]))
        return found.digest()


def _packed(token_ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Tokens as little-endian int32."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype("<i4", copy=False).tobytes()
    packed = array("i", token_ids)  # a third of the time that numpy takes for a list
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
