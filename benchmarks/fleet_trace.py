"""Requests of a public trace, scaled down to the small model by a factor of 32.

A block of the trace, 512 tokens, becomes one page of 16 tokens. Its tokens are the first 16 bytes of the sha256 of its
id, so prompts share pages here exactly if they share blocks in the trace. The last block of a prompt, and the output,
have one token for each 32 tokens of the original, rounded up. Arrival times are not used, because the small model has
its own speed.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvcache.errors import KVCacheError

BLOCK = 512
SCALE = 32
PAGE = BLOCK // SCALE


class TraceError(KVCacheError):
    """A trace cannot be read, or has too few requests."""


class TraceRequest(NamedTuple):
    """A request to the small model: its prompt, and the number of tokens to generate."""

    prompt: tuple[int, ...]
    new: int


class _Line(msgspec.Struct):
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: Annotated[list[int], Meta(min_length=1)]


def read_requests(path: Path, count: int) -> list[TraceRequest]:
    """The first `count` requests of a trace in the Mooncake format, scaled down.

    Raises:
        TraceError: a line is wrong (the message names file, line and fault), or there are too few requests.
    """
    decoder, found = msgspec.json.Decoder(_Line), list[TraceRequest]()
    try:
        with path.open("rb") as lines:
            for line in lines:
                if len(found) == count:
                    break
                read = decoder.decode(line)
                found.append(scaled(read.hash_ids, read.input_length, read.output_length))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(f"{path}, line {len(found) + 1}: {error}") from error
    if len(found) < count:
        raise TraceError(f"{path} has {len(found)} requests, and {count} are needed")
    return found


def scaled(hash_ids: list[int], input_length: int, output_length: int) -> TraceRequest:
    """One request of a trace, scaled down.

    Raises:
        ValueError: the blocks do not match the length.
    """
    if -(-input_length // BLOCK) != len(hash_ids):
        raise ValueError(f"{input_length} tokens do not fit {len(hash_ids)} blocks of {BLOCK} tokens")
    tokens = [token for block in hash_ids for token in page_of(block)]
    return TraceRequest(tuple(tokens[: -(-input_length // SCALE)]), max(1, -(-output_length // SCALE)))


def page_of(block: int) -> bytes:
    """The tokens of a block: bytes, all of which the small model knows."""
    return hashlib.sha256(str(block).encode()).digest()[:PAGE]


def synthetic_requests(count: int, seed: int) -> list[TraceRequest]:
    """Generates requests in place of a trace: conversations with a common beginning that then diverge."""
    rng, found = random.Random(seed), list[TraceRequest]()  # noqa: S311  (guards nothing)
    for number in range(count):
        shared = rng.randrange(1, 8)
        blocks = [*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + rng.randrange(1, 16))]
        length = BLOCK * (len(blocks) - 1) + rng.randrange(1, BLOCK + 1)
        found.append(scaled(blocks, length, rng.randrange(1, 16 * SCALE)))
    return found


def ideal_hit_rate(requests: list[TraceRequest]) -> float:
    """The share of the prompts' full pages that one process with an infinite cache would find cached."""
    seen, hits, pages = set[tuple[int, ...]](), 0, 0
    for request in requests:
        for end in range(PAGE, len(request.prompt) + 1, PAGE):
            page = request.prompt[end - PAGE : end]  # a page here stands for the whole prefix, as a block's id does
            hits, pages = hits + (page in seen), pages + 1
            seen.add(page)
    return hits / pages if pages else 0.0
