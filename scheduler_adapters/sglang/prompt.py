"""What decode compares before it reads: a digest of the tokens that the pages are of, and of their salt."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def prompt_digest(req: Req | None, num_tokens: int) -> bytes:
    """Returns 32 bytes that are those of another request only where its first tokens and its salt are the same.

    Empty, which is compared with nothing, for what tokens alone do not tell: inputs that are no text. The number of an
    adapter is each server's own, so it is not part of it.
    """
    if req is None or req.multimodal_inputs is not None or req.input_embeds is not None:
        return b""
    found = hashlib.blake2b(digest_size=32, person=b"pagewire sglang")
    salt = (req.cache_salt or "").encode(errors="surrogatepass")
    found.update(num_tokens.to_bytes(8, "little") + len(salt).to_bytes(8, "little") + salt)
    found.update(array("q", (*req.origin_input_ids, *req.output_ids)[:num_tokens]).tobytes())
    return found.digest()
