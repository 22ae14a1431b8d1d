"""The messages between the processes of a disaggregated service: msgspec structs, sent as msgpack over ZMQ.

frontend ──Submit, Abort──► decode ──Hello──────────────────► prefill
frontend ◄─────Tokens────── decode ◄────────Welcome, Leaving── prefill
                            decode ──Prefill, Cancel─────────► prefill
                            decode ◄──────PagesOffer, Failed── prefill
frontend ──Ask, Drain, Stop, Members──► both
frontend ◄──Ready, Stats, Left, Fatal── both

Between decode and prefill, each message belongs to one attempt, named by (request id, attempt). The types limit every
number and length, so a decoded message is safe to use. `Rejected` answers a message that could not be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvcache.layer_groups import LayerGroup
from kvcache.params import HashAlgorithm
from kvcache.replica.block_table import BlockTable
from scheduler_adapters.errors import MessageError
from transfer.pull.source import KVSource, Source

Role = Literal["prefill", "decode"]
Finished = Literal["eos", "length", "error", "cancelled"]

MAX_MESSAGE_BYTES = 16 << 20
_MAX_PROMPT = 1 << 20
_MAX_REASON = 2000

Name = Annotated[str, Meta(min_length=1, max_length=256)]
OptionalName = Annotated[str, Meta(max_length=256)]
Path = Annotated[str, Meta(max_length=4096)]
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
    """Base of the messages about one attempt at a request. A message about an attempt that is over is dropped."""

    request_id: Name  # the client's id of the request
    attempt: Attempt  # number of the attempt, chosen by decode; it increases with each attempt at any request


KVSources = Annotated[tuple[KVSource, ...], Meta(max_length=8)]


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Decode to prefill, the first message on each connection: the name of the decode process."""

    reader: Name  # name of the decode process; when it connects again, the requests of its earlier connections end
    incarnation: Name  # a random name, new with each start of the process


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode, the answer to `Hello`: the names of the prefill process and of its engines."""

    name: Name
    incarnation: Name
    engines: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1024)]
    address: OptionalName = ""  # endpoint of its `PageExchange`, where other processes ask for pages
    page_size: OptionalCount = 0  # in tokens; another process can use its pages only if the page sizes are equal
    # Names its weights. Repeated when these have changed: the process computes prompts only for readers of equal ones.
    weights: OptionalName = ""


class Leaving(Message, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: this process accepts no new requests.

    When all of its requests are read or over, it exits, or changes its weights and says `Welcome` again.
    """


class Rejected(Message, frozen=True, kw_only=True, tag=True):
    """Between decode and prefill: a message could not be handled. `Rejected` itself is never answered."""

    reason: Reason
    stranger: bool = False  # the sender is unknown and must say `Hello` first, on a new connection


class Submit(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to decode: serve this prompt."""

    request_id: Name  # the client's id for the request; it can be used again once the request has ended
    prompt: Prompt
    max_new_tokens: TokenCount
    cache_salt: Salt | None = None  # requests with different salts never share a page
    ignore_eos: bool = False  # True: an end-of-sequence token does not end the request
    serial: Serial = 0  # identifies the submission, so that a repetition is dropped; 0 if submissions are not repeated
    # the prefill process to use, unless that process is absent or has already failed at this request
    prefill: OptionalName = ""
    traceparent: Annotated[str, Meta(max_length=256)] = ""  # W3C header of the trace that the hand-over belongs to
    # Processes that may have pages of the prompt. If empty, decode itself chooses the sources: the prefill process that
    # was sent most of this prompt, and its own cached pages.
    kv_sources: KVSources = ()


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to decode: the client no longer wants this request."""

    request_id: Name
    # serial number of the submission to abort, even if that has not arrived yet; 0 for the open submission
    serial: Serial = 0


class Tokens(Message, frozen=True, kw_only=True, tag=True):
    """Decode to frontend: new tokens of a request, its end, or its failure."""

    request_id: Name
    tokens: tuple[Token, ...] = ()  # the tokens after those already sent
    finished: Finished | None = None  # why it ended; None while it continues
    error: str = ""  # the failure, if `finished` is "error"
    serial: Serial = 0  # serial of the submission
    weights: OptionalName = ""  # names the weights that have computed them
    cached_tokens: OptionalCount = 0  # only in the last message: the number of prompt tokens that prefill had cached
    elsewhere: bool = False  # only with an error: this process refuses the request, but another process may take it


class Prefill(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: compute this prompt, and keep its pages under a lease."""

    prompt: Prompt  # includes the tokens that the client already has
    within_s: Seconds  # seconds after which the reader no longer waits for the prompt
    chunkwise: bool = False  # whether to offer the first pages while the rest of the prompt is still computed
    new_pages: bool = False  # whether an offer may leave out pages that an earlier offer has named
    cache_salt: Salt | None = None
    kv_sources: KVSources = ()  # processes that may have pages of the prompt, in the order in which to ask them
    weights: OptionalName = ""  # the reader's weights; a process with other weights refuses


class PagesOffer(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: the pages that may be read now. Later offers of the same attempt name further pages."""

    source: Source  # the same in every offer of an attempt
    table: BlockTable  # the pages computed so far; the table may leave out pages that an earlier offer has named
    prompt_digest: bytes  # `Prompt.digest` of the tokens whose KV the pages hold, computed from prefill's own tokens
    token: Token | None = None  # the first new token; None while the prompt is still computed
    cached_tokens: OptionalCount = 0  # prompt tokens that prefill had cached


class Failed(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: the attempt has ended, and no page is leased any more."""

    reason: Reason  # the first reason that was recorded
    final: bool = False  # whether the request would fail at any other process too
    elsewhere: bool = False  # this process has not begun, because it is about to leave or has other weights


class Cancel(OfAttempt, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: this attempt is no longer wanted, and no READ of its pages is in flight."""

    reason: Reason


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: the process is set up. A decode server may still be waiting for a prefill server.

    If `ServerConfig.ready_s` is set, the message is repeated at that interval, and once more when the process begins to
    drain.
    """

    name: Name
    role: Role = "prefill"
    incarnation: OptionalName = ""  # a random name, new with each start of the process
    listen: OptionalName = ""  # endpoint at which a prefill process accepts decode processes
    max_tokens: OptionalCount = 0  # most tokens of a request, including new ones
    draining: bool = False  # accepts nothing new
    page_size: OptionalCount = 0  # in tokens
    kv_events: OptionalName = ""  # endpoint where its KV events are published
    kv_replay: OptionalName = ""  # endpoint that replays missed KV events
    metrics: OptionalName = ""  # host:port of its Prometheus metrics
    watch: OptionalName = ""  # endpoint where its pages can be watched
    pulse: OptionalName = ""  # endpoint for a `Pulse`, and for peers that ask for pages
    # engine ids of its replicas, which peers name when they ask for pages
    engines: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    hash_algorithm: HashAlgorithm = "sha256"  # algorithm of its page hashes
    # the layer group of each block table, by the `group_idx` of its KV events; empty for one table of full attention
    layer_groups: Annotated[tuple[LayerGroup, ...], Meta(max_length=1024)] = ()
    has_states: bool = False  # whether it has recurrent states, whose KV events follow those of the block tables
    weights: OptionalName = ""  # names its weights


class Fatal(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: this process exits because of this error."""

    name: Name
    error: str


class Ask(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: send `Stats`."""


class Stats(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: its current counters."""

    name: Name
    role: Role
    pages_held: int  # pages that a request or lease holds or a pull writes; state pages count, idle cached pages do not
    open_requests: int  # requests that are open or whose pages wait for a reader, and open pulls
    phases: dict[str, int] = {}  # requests by phase (`requests.py`), except "over"
    running: int = 0  # requests that the loop runs
    waiting: int = 0  # requests that wait for the loop and hold no pages
    prompt_tokens: int = 0  # prompt tokens of the requests that were prefilled here
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    preemptions: int = 0  # how often a request was preempted
    pages_pulled: int = 0  # pages here that pulls filled; a page that is split over several shards counts once
    pages_reused: int = 0  # pages of imported requests that were cached here and not pulled
    prefixes: dict[str, int] = {}  # number of prompts for which a source was named, by outcome (`peer_prefixes.py`)
    taken_s: dict[str, float] = {}  # total seconds taken to "pull" prefixes and to "compute" prompts
    # for "pull" and for "compute": the sum of the absolute errors of the time estimates, in seconds
    misjudged_s: dict[str, float] = {}
    bytes_pulled: int = 0  # bytes that READs brought here, over all shards
    pull_seconds: float = 0.0  # seconds in which at least one READ or first contact with a source was under way
    retries: int = 0  # attempts that failed and were followed by another
    failed: int = 0  # requests that failed
    malformed: int = 0  # messages that could not be decoded
    late: int = 0  # repeated messages, and messages about attempts that were over
    faults: dict[str, int] = {}  # injected faults by kind, if the process runs with fault injection


class Loaded(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend, the answer to `Load`: the name of the weights that were loaded, or why they were not."""

    name: Name
    model: Path
    weights: OptionalName = ""
    error: Reason = ""


class Left(Message, frozen=True, kw_only=True, tag=True):
    """Server to frontend: the process has drained and exits now. These are its final counters."""

    stats: Stats


class Members(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server, sent repeatedly: the prefill processes that serve at present.

    Decode processes connect to these prefill processes. Each message also shows a server that the frontend can reach
    it.
    """

    prefills: Annotated[tuple[Name, ...], Meta(max_length=1024)]  # endpoints where prefill processes listen


class Load(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: load the weights of this directory, and go on with the present ones until `Switch`.

    Weights that were loaded before are dropped. An empty `model` only drops these.
    """

    model: Path


class Switch(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: refuse new requests, and use the loaded weights when no request is open.

    The process then sends `Ready` with the new weights, and accepts requests again.
    """

    weights: Name  # names the weights that were loaded


class Drain(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: accept no new request, and exit when no request is open or held any more."""


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """Frontend to server: exit now."""


ToPrefill = Hello | Prefill | Cancel | Rejected
ToDecode = Welcome | Leaving | PagesOffer | Failed | Rejected
FromFrontend = Submit | Abort | Ask | Members | Load | Switch | Drain | Stop
ToFrontend = Tokens | Ready | Fatal | Stats | Loaded | Left | Rejected
AnyMessage = ToPrefill | ToDecode | FromFrontend | ToFrontend

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Returns the msgpack bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Returns the message that `encode` turned into `data`.

    Raises:
        MessageError: the bytes are not a message of this version, or a value in them is out of range.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes ({data[:64]!r}) are not a message: {error}") from error


def decode_frames(frames: Sequence[bytes], wanted: UnionType) -> AnyMessage:
    """Returns the message in a list of exactly one frame. The message must be of a type in `wanted`.

    Raises the same errors as `decode`.
    """
    if len(frames) != 1:
        raise MessageError(f"{len(frames)} frames are not a message: exactly 1 is needed")
    message = decode(frames[0])
    if not isinstance(message, wanted):
        raise MessageError(f"a {type(message).__name__} is not for this kind of process")
    return message


def clipped(reason: str) -> str:
    """Returns a reason, cut to the length that messages allow."""
    return reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "..."
