"""What the processes of a disaggregated service say to each other: msgspec structs, msgpack on ZMQ, no pickle.

front ──Submit, Abort──► decode ──Hello──────────────► prefill
front ◄─────Tokens────── decode ◄────────────Welcome── prefill
                         decode ──Prefill, Cancel────► prefill
                         decode ◄──────Offer, Failed── prefill

What a request is about between decode and prefill is its room: (request id, attempt). Every number and length has its
limit in the type, so that what was decoded may be used. `Rejected` answers what could not be decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from kvcache.replica.block_table import BlockTable
from scheduler_adapters.errors import MessageError
from transfer.pull.replica import Source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import UnionType

Role = Literal["prefill", "decode"]
Finished = Literal["eos", "length", "error", "cancelled"]

MAX_MESSAGE_BYTES = 16 << 20
_MAX_PROMPT = 1 << 20
_MAX_REASON = 2000

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Reason = Annotated[str, Meta(max_length=_MAX_REASON)]
Salt = Annotated[str, Meta(max_length=256)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Prompt = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=_MAX_PROMPT)]
Count = Annotated[int, Meta(ge=1, le=_MAX_PROMPT)]
Attempt = Annotated[int, Meta(ge=1, lt=1 << 53)]
Serial = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages; the name of the class is the tag."""


class OfRoom(Message, frozen=True, kw_only=True):
    """Base of what is said of one attempt at one request.

    Attributes:
        request_id: as the client calls the request.
        attempt: a number of decode's, higher for each attempt at any request. What is of one that is over is dropped.
    """

    request_id: Name
    attempt: Attempt


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill, first of all on each connection: who asks.

    Attributes:
        reader: the decode process; what it asked for on an earlier connection is over.
        incarnation: random, new with each start.
    """

    reader: Name
    incarnation: Name


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: who answers `Hello`, and what its engines are called."""

    name: Name
    incarnation: Name
    engines: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1024)]


class Rejected(Message, frozen=True, kw_only=True, tag=True):
    """Either way: a message could not be taken. It is never answered itself.

    Attributes:
        reason: why.
        stranger: nothing is known of the sender: it has to say `Hello` first, on a new connection.
    """

    reason: Reason
    stranger: bool = False


class Submit(Message, frozen=True, kw_only=True, tag=True):
    """Front to decode: serve this prompt.

    Attributes:
        request_id: what the client calls the request; free again once it has ended.
        prompt: its tokens.
        max_new_tokens: most tokens to generate.
        cache_salt: requests with different salts never share a page.
        serial: a number that the front gives no other submission: one that comes again is dropped. 0 for none: the
            front sends each submission once.
    """

    request_id: Name
    prompt: Prompt
    max_new_tokens: Count
    cache_salt: Salt | None = None
    serial: Serial = 0


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Front to decode: the client does not want this request any more.

    Attributes:
        request_id: of the request.
        serial: of the submission that is meant, also of one that is yet to come; 0 for the one that is on its way.
    """

    request_id: Name
    serial: Serial = 0


class Tokens(Message, frozen=True, kw_only=True, tag=True):
    """Decode to front: new tokens of a request, its end, or its failure.

    Attributes:
        request_id: as the client calls the request.
        tokens: those that follow the ones before.
        finished: why it ended; None while it goes on.
        error: what failed, where `finished` is "error".
        serial: of the submission.
    """

    request_id: Name
    tokens: tuple[Token, ...] = ()
    finished: Finished | None = None
    error: str = ""
    serial: Serial = 0


class Prefill(OfRoom, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: compute this prompt, and keep its pages under a lease.

    Attributes:
        prompt: its tokens, those included that the client has had already.
        within_s: seconds after which nobody waits for it any more.
        chunkwise: offer pages while the rest of the prompt still runs.
        cache_salt: requests with different salts never share a page.
    """

    prompt: Prompt
    within_s: Seconds
    chunkwise: bool = False
    cache_salt: Salt | None = None


class Offer(OfRoom, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: pages that may be read. Sent again, with a longer table, while the prompt still runs.

    Attributes:
        source: where they lie, and the lease over them, the same in every offer of a room.
        table: the pages by now.
        token: the first new token; None where the prompt still runs.
    """

    source: Source
    table: BlockTable
    token: Token | None = None


class Failed(OfRoom, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: nothing more will come, and nothing is leased any more.

    Attributes:
        reason: the first that is known.
        final: it would fail elsewhere too.
    """

    reason: Reason
    final: bool = False


class Cancel(OfRoom, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: nobody waits for this, and nothing of it is read any more."""

    reason: Reason


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: set up. A decode process may not have reached every prefill process yet, and waits for one."""

    name: Name


class Fatal(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: this process ends because of this error."""

    name: Name
    error: str


class Ask(Message, frozen=True, kw_only=True, tag=True):
    """Front to worker: send `Stats`."""


class Stats(Message, frozen=True, kw_only=True, tag=True):
    """Worker to front: its counters now.

    Attributes:
        name: whose.
        role: what it does.
        pages_held: pages that some request holds or a pull writes, idle cached ones not counted; state pages included.
        open_requests: requests on their way, or held for a reader; pulls that have not ended, too.
        prompt_tokens: of the requests that were prefilled here.
        cached_tokens: those of them that came from the prefix cache.
        preemptions: requests that had to give way.
        pages_pulled: pages of ours that pulls filled; a page of several shards counts once.
        pages_reused: pages of imported requests that were cached here already, and not pulled.
        bytes_pulled: bytes that READs brought here, all shards.
        pull_seconds: time in which at least one READ was under way, the first contact with a source included.
        retries: attempts that failed and were followed by another.
        failed: requests that failed.
        malformed: messages that could not be decoded.
        late: messages of attempts that were over, or that had come before.
        faults: how often each fault was injected, where the process runs under chaos.
    """

    name: Name
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
    retries: int = 0
    failed: int = 0
    malformed: int = 0
    late: int = 0
    faults: dict[str, int] = {}


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """Front to worker: end."""


ToPrefill = Hello | Prefill | Cancel | Rejected
ToDecode = Welcome | Offer | Failed | Rejected
FromFront = Submit | Abort | Ask | Stop
ToFront = Tokens | Ready | Fatal | Stats | Rejected
AnyMessage = ToPrefill | ToDecode | FromFront | ToFront

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The msgpack bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message that `encode` made `data` of.

    Raises:
        MessageError: the bytes are no message of this version, or a value in them is out of range.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes ({data[:64]!r}) are no message: {error}") from error


def decode_frames(frames: Sequence[bytes], wanted: UnionType) -> AnyMessage:
    """The message in the frames, which must be one of the wanted types.

    Raises:
        MessageError: there is more or less than one frame, or as `decode`, or it is of another type.
    """
    if len(frames) != 1:
        raise MessageError(f"{len(frames)} frames are no message: 1 is expected")
    message = decode(frames[0])
    if not isinstance(message, wanted):
        raise MessageError(f"a {type(message).__name__} is not for this kind of process")
    return message


def clipped(reason: str) -> str:
    """A reason as messages may carry it."""
    return reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "..."
