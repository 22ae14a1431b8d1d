"""What the processes of a disaggregated service say to each other: msgspec structs, msgpack on ZMQ, no pickle.

front ──Submit──► decode ──Prefill──► prefill
front ◄─Tokens──  decode ◄─Prefilled─ prefill
decode ──Pulling──► prefill     the READ is on its way: watch for its notification
decode ──Done─────► prefill     no READ will come (any more): let the pages go
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvcache.block_table import BlockTable
from scheduler_adapters.errors import WorkerError
from transfer.metadata import KVTransferEngineMetadata, TransferReqData

Role = Literal["prefill", "decode"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages; the name of the class is the tag."""


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """The first message in each direction between decode and prefill: who is there, and its transfer engine."""

    engine: KVTransferEngineMetadata


class Submit(Message, frozen=True, kw_only=True, tag=True):
    """Front to decode: serve this prompt."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    cache_salt: str | None = None


class Tokens(Message, frozen=True, kw_only=True, tag=True):
    """Decode to front: new tokens of a request, its end, or its failure."""

    request_id: str
    tokens: tuple[int, ...] = ()
    finished: Literal["eos", "length", "error"] | None = None
    error: str = ""


class Prefill(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: compute this prompt and keep its pages until told."""

    request_id: str
    prompt: tuple[int, ...]
    cache_salt: str | None = None


class Prefilled(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: the first token, and where the keys and values of the prompt lie."""

    request_id: str
    token: int
    table: BlockTable


class PrefillFailed(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: it will not come. Nothing is held."""

    request_id: str
    error: str


class Pulling(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: this READ is posted. The pages may go when its notification has come."""

    request_id: str
    transfer: TransferReqData


class Done(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: nothing reads the pages of this request, and nothing will."""

    request_id: str


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: set up, and connected to the other worker."""

    role: Role


class Fatal(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: this process ends because of this error."""

    role: Role
    error: str


class Ask(Message, frozen=True, kw_only=True, tag=True):
    """Front to worker: send `Stats`."""


class Stats(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: its counters now.

    Attributes:
        role: whose.
        pages_held: pages that some request holds, idle cached ones not counted.
        open_requests: requests on their way, or held for a reader.
        prompt_tokens: of the requests that were prefilled here.
        cached_tokens: those of them that came from the prefix cache.
        preemptions: requests that had to give way.
        pages_pulled: pages that READs brought here; a page of several shards counts once.
        pages_reused: pages of imported requests that were cached here already, and not pulled.
        bytes_pulled: bytes of the pulled pages, all shards.
        pull_seconds: time in which at least one READ was in flight.
    """

    role: Role
    pages_held: int
    open_requests: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    pages_pulled: int = 0
    pages_reused: int = 0
    bytes_pulled: int = 0
    pull_seconds: float = 0.0


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """Front to worker: end."""


AnyMessage = (
    Hello | Submit | Tokens | Prefill | Prefilled | PrefillFailed | Pulling | Done | Ready | Fatal | Ask | Stats | Stop
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The msgpack bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message that `encode` made `data` of.

    Raises:
        WorkerError: the bytes are no message of this version.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WorkerError(f"{len(data)} bytes ({data[:64]!r}) are no message: {error}") from error
