"""`Prompt`: everything that the KV of a request depends on.

A reader compares the prompt's digest with the source's, and so knows that leased pages belong to its own prompt.
"""

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


def _packed(token_ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Returns tokens as little-endian int32 bytes."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype("<i4", copy=False).tobytes()
    packed = array("i", token_ids)  # for a list, `array` takes a third of the time that numpy takes
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
