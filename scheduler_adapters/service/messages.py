"""The messages between the processes of a disaggregated service: msgspec structs, msgpack on ZMQ, no pickle.

frontend ──Submit, Abort──► decode ──Hello──────────────────► prefill
frontend ◄─────Tokens────── decode ◄────────Welcome, Leaving── prefill
                            decode ──Prefill, Cancel─────────► prefill
                            decode ◄──────PagesOffer, Failed── prefill
frontend ──Ask, Drain, Stop, Members──► both
frontend ◄──Ready, Stats, Left, Fatal── both

Between decode and prefill each message belongs to one attempt: (request id, attempt). The types limit every number
and length, so a decoded message is safe to use. `Rejected` answers a message that could not be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvcache.params import HashAlgorithm
from kvcache.replica.block_table import BlockTable
from scheduler_adapters.errors import MessageError
from transfer.pull.source import Source

Role = Literal["prefill", "decode"]
Finished = Literal["eos", "length", "error", "cancelled"]

MAX_MESSAGE_BYTES = 16 << 20
_MAX_PROMPT = 1 << 20
_MAX_REASON = 2000

Name = Annotated[str, Meta(min_length=1, max_length=256)]
OptionalName = Annotated[str, Meta(max_length=256)]
Reason = Annotated[str, Meta(max_length=_MAX_REASON)]
Salt = Annotated[str, Meta(max_length=256)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Prompt = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=_MAX_PROMPT)]
TokenCount = Annotated[int, Meta(ge=1, le=_MAX_PROMPT)]
OptionalCount = Annotated[int, Meta(ge=0, le=_MAX_PROMPT)]
Attempt = Annotated[int, Meta(ge=1, lt=1 << 53)]
Serial = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages; the name of the class is the tag."""


class OfAttempt(Message, frozen=True, kw_only=True):
    """Base of what is said of one attempt at one request. What is of one that is over is dropped."""

    request_id: Name  # as the client calls the request
    attempt: Attempt  # a number of decode's, higher for each attempt at any request


class KVSource(msgspec.Struct, frozen=True):
    """A process that may have pages of a prompt, and is asked for them."""

    address: Name  # of its `PageExchange`
    engines: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]  # its replicas, the likeliest first
    tokens: Annotated[int, Meta(ge=0, le=_MAX_PROMPT)] = 0  # the least number of prompt tokens it has; 0: unknown


KVSources = Annotated[tuple[KVSource, ...], Meta(max_length=8)]


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill, first of all on each connection: the name of the decode process."""

    reader: Name  # the decode process; what it asked for on an earlier connection is over
    incarnation: Name  # random, new with each start


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode, the answer to `Hello`: the name of the prefill process and of its engines."""

    name: Name
    incarnation: Name
    engines: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1024)]
    address: OptionalName = ""  # of its `PageExchange`, where other processes ask for pages
    page_size: OptionalCount = 0  # tokens: pages of another size cannot be compared with its own


class Leaving(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: this process takes nothing new, and ends when what it has is read or over."""


class Rejected(Message, frozen=True, kw_only=True, tag=True):
    """Either way: a message could not be taken. It is never answered itself."""

    reason: Reason
    stranger: bool = False  # the sender is not known: it has to say `Hello` first, on a new connection


class Submit(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to decode: serve this prompt."""

    request_id: Name  # what the client calls the request; free again once it has ended
    prompt: Prompt
    max_new_tokens: TokenCount
    cache_salt: Salt | None = None  # requests with different salts never share a page
    ignore_eos: bool = False  # it ends by its length alone
    serial: Serial = 0  # of no other submission: one that comes again is dropped. 0: each is sent once
    prefill: OptionalName = ""  # the process to have it prefilled by, where it is there and has not failed at it
    traceparent: Annotated[str, Meta(max_length=256)] = ""  # of the trace that its hand-over belongs to (W3C's header)
    kv_sources: KVSources = ()  # who may have its pages; empty: decode says what it knows of the prefill processes


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to decode: the client does not want this request any more."""

    request_id: Name
    serial: Serial = 0  # of the submission that is meant, also of one yet to come; 0: the one that is on its way


class Tokens(Message, frozen=True, kw_only=True, tag=True):
    """Decode to frontend: new tokens of a request, its end, or its failure."""

    request_id: Name
    tokens: tuple[Token, ...] = ()  # those that follow the ones before
    finished: Finished | None = None  # why it ended; None while it goes on
    error: str = ""  # what failed, where `finished` is "error"
    serial: Serial = 0  # of the submission
    cached_tokens: OptionalCount = 0  # with the last: prompt tokens that prefill had cached
    elsewhere: bool = False  # with an error: this process refuses it for what it is, another one may take it


class Prefill(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: compute this prompt, and keep its pages under a lease."""

    prompt: Prompt  # those tokens included that the client has had already
    within_s: Seconds  # after these nobody waits for it any more
    chunkwise: bool = False  # offer pages while the rest of the prompt still runs
    new_pages: bool = False  # offers may leave out pages that one before has named
    cache_salt: Salt | None = None
    kv_sources: KVSources = ()  # who may have its pages, in the order in which they are asked


class PagesOffer(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: pages that may be read. Sent again, with a longer table, while the prompt still runs."""

    source: Source  # the same in every offer of an attempt
    table: BlockTable  # the pages by now; those that an offer before has named may be left out
    prompt_digest: bytes  # `Prompt.digest` of the tokens that these hold, as prefill has computed them
    token: Token | None = None  # the first new token; None if the prompt still runs
    cached_tokens: OptionalCount = 0  # of the prompt, that were not computed


class Failed(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: nothing more will come, and nothing is leased any more."""

    reason: Reason  # the first that is known
    final: bool = False  # it would fail elsewhere too


class Cancel(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: this attempt is no longer wanted, and its pages are no longer read."""

    reason: Reason


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: set up. A decode server may not have reached every prefill server yet, and waits for one.

    With `ServerConfig.ready_s` said again and again, and when the process begins to drain.
    """

    name: Name
    role: Role = "prefill"
    incarnation: OptionalName = ""  # random, new with each start
    listen: OptionalName = ""  # where a prefill process listens for decode processes
    max_tokens: OptionalCount = 0  # most tokens of a request, new ones included
    draining: bool = False  # takes nothing new
    page_size: OptionalCount = 0  # tokens
    kv_events: OptionalName = ""  # where its KV events are published
    kv_replay: OptionalName = ""  # where what was missed of them is asked for
    metrics: OptionalName = ""  # host:port at which Prometheus reads it
    watch: OptionalName = ""  # where who watches its pages asks
    pulse: OptionalName = ""  # where a `Pulse` of it connects to, and others ask for pages
    engines: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()  # of its replicas, likewise
    hash_algorithm: HashAlgorithm = "sha256"  # of its pages


class Fatal(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: this process ends because of this error."""

    name: Name
    error: str


class Ask(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: send `Stats`."""


class Stats(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: its counters now."""

    name: Name
    role: Role
    pages_held: int  # that somebody holds or a pull writes, idle cached ones not counted; state pages included
    open_requests: int  # on their way, or held for a reader; pulls that have not ended, too
    phases: dict[str, int] = {}  # requests by phase (`requests.py`), none that is over
    running: int = 0  # requests that the loop runs
    waiting: int = 0  # requests that wait for the loop, without pages
    prompt_tokens: int = 0  # of the requests that were prefilled here
    cached_tokens: int = 0  # those of them that came from the prefix cache
    preemptions: int = 0  # requests that had to give way
    pages_pulled: int = 0  # pages of ours that pulls filled; a page of several shards counts once
    pages_reused: int = 0  # pages of imported requests that were cached here already, and not pulled
    prefixes: dict[str, int] = {}  # prompts for which a source was named, by what came of it (`peer_prefixes.py`)
    taken_s: dict[str, float] = {}  # that prefixes took to "pull", and prompts to "compute"
    misjudged_s: dict[str, float] = {}  # by which their estimates were wrong, too long or too short
    bytes_pulled: int = 0  # that READs brought here, all shards
    pull_seconds: float = 0.0  # in which at least one READ was under way, the first contact with a source included
    retries: int = 0  # attempts that failed and were followed by another
    failed: int = 0  # requests
    malformed: int = 0  # messages that could not be decoded
    late: int = 0  # messages of attempts that were over, or that had come before
    faults: dict[str, int] = {}  # how often each was injected, where the process runs under chaos


class Left(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: drained; the process ends now, and this is what it leaves."""

    stats: Stats


class Members(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server, again and again: the processes there are. It also shows that the server can be reached."""

    prefills: Annotated[tuple[Name, ...], Meta(max_length=1024)]  # where prefill processes listen


class Drain(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: take nothing new, and end when nothing is on its way or held any more."""


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: end."""


ToPrefill = Hello | Prefill | Cancel | Rejected
ToDecode = Welcome | Leaving | PagesOffer | Failed | Rejected
FromFrontend = Submit | Abort | Ask | Members | Drain | Stop
ToFrontend = Tokens | Ready | Fatal | Stats | Left | Rejected
AnyMessage = ToPrefill | ToDecode | FromFrontend | ToFrontend

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
    """The message in the one frame that there must be, which must be one of the wanted types. Raises as `decode`."""
    if len(frames) != 1:
        raise MessageError(f"{len(frames)} frames are no message: 1 is expected")
    message = decode(frames[0])
    if not isinstance(message, wanted):
        raise MessageError(f"a {type(message).__name__} is not for this kind of process")
    return message


def clipped(reason: str) -> str:
    """A reason as messages may carry it."""
    return reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "..."
