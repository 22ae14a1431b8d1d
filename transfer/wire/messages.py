"""The messages between ranks: their metadata, the handshake's messages, and readers' notes.

Every message is tagged with its type and a version, and decoded by schema. A peer's description of itself is checked
here, before NIXL sees any of it, because wrong bytes can crash NIXL.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from transfer.errors import MetadataError
from transfer.memory import MemoryType
from transfer.plan.boxes import ADDRESS_LIMIT, ShardLayout, check

PROTOCOL = 3
"""Version of everything in this file. A peer with another version is refused with an error that names both versions."""

MAX_RANKS = 4096
MAX_METADATA_BYTES = 16 << 20
MAX_NOTE_BYTES = 1024
MAX_DIGEST_BYTES = 1 << 19
"""The largest size, in bytes, of all digests in a content query: 16,384 digests of sha256.

For a longer prompt, only the digests of its first pages are sent.
"""
MAX_LEASE_S = 86_400.0
MAX_TOKENS = (1 << 31) - 1
_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_T = TypeVar("_T")


class RankMetadata(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="rank/2"):
    """What a reader needs in order to pull from one rank of an engine. Safe to send between processes.

    Attributes:
        engine_id: id of the engine, which all its ranks share.
        incarnation: a random name, new at each start. Nothing that a reader has learnt about one incarnation is used
            for another.
        rank: index of this rank among `ranks`, counting tensor-parallel and pipeline ranks together.
        ranks: number of ranks of the engine that hold pages.
        hostname: name of the host that the rank runs on.
        agent_name: name of the rank's NIXL agent, which is never used twice.
        agent_metadata: NIXL's own description of that agent, opaque.
        memory_type: kind of memory that the regions are in.
        layout: geometry of its pages.
        bases: address of each region of the layout.
        device: index of the device that holds the regions; 0 for host memory.
        words_addr: address of the lease words, in host memory.
        words: number of lease words.
        checks_addrs: address of the page checksums of each group, in host memory. Empty if the rank records none.
        compatibility: entries that must agree so that the bytes mean the same: model, cache dtype and so on.
        settings: effective settings of UCX and NIXL that must agree.
        table_key: key for the seals of the engine's block tables (`transfer.pull.seals`). Empty without seals.
        digest: keyed digest over all other fields. `sealed_rank` fills it in.
    """

    engine_id: _Name
    incarnation: _Name
    rank: int
    ranks: int
    hostname: str
    agent_name: _Name
    agent_metadata: Annotated[bytes, Meta(min_length=1)]
    memory_type: MemoryType
    layout: ShardLayout
    bases: tuple[int, ...]
    device: Annotated[int, Meta(ge=0, le=1 << 16)]
    words_addr: int
    words: int
    checks_addrs: tuple[int, ...] = ()
    compatibility: dict[str, str] = {}
    settings: dict[str, str] = {}
    table_key: Annotated[bytes, Meta(max_length=64)] = b""
    digest: bytes = b""


class MetadataQuery(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="query/1"):
    """Asks an engine for the metadata of all its ranks.

    Attributes:
        query_id: id of the query. The answer repeats it.
        engine_id: the engine expected at the address; empty for any.
        compatibility: the compatibility map of the reader. An engine whose map has other values refuses and names the
            differences.
    """

    query_id: int
    engine_id: str = ""
    compatibility: dict[str, str] = {}


class MetadataReply(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="reply/1"):
    """Answers a `MetadataQuery`: the encoded `RankMetadata` of each rank."""

    query_id: int
    engine_id: str
    incarnation: str
    ranks: tuple[bytes, ...]


class Ping(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="ping/1"):
    """Asks for a sign of life from an engine; an empty `engine_id` means any engine at the address."""

    query_id: int
    engine_id: str = ""


class Pong(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="pong/1"):
    """Answers a `Ping`."""

    query_id: int
    engine_id: str
    incarnation: str


class Wanted(NamedTuple):
    """A lease that a reader asks a source for, and the prompt to which its pages must belong.

    Attributes:
        address: ZMQ endpoint of the source's handshake server.
        engine_id: the source.
        lease_id: the lease under which the source holds the pages.
        num_tokens: how many tokens to read at most, counted from the first token of the request.
        digest: the reader's own digest of these tokens and of everything else that their KV depends on.
        named: as in the reader's own `Prompt`.
    """

    address: str
    engine_id: str
    lease_id: int
    num_tokens: int
    digest: bytes
    named: tuple[tuple[str, str], ...] = ()

    @property
    def contact(self) -> tuple[str, str]:
        """Address and engine id of the source."""
        return (self.address, self.engine_id)


class LeaseQuery(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="lease-query/1"):
    """Asks an engine which pages a lease holds. The reader needs the request's first `num_tokens` tokens."""

    query_id: int
    engine_id: str
    lease_id: int
    num_tokens: int


class LeaseRefusal(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="lease-refusal/1"
):
    """Tells an engine that a reader will not read under a lease. A `Pong` acknowledges it.

    A reader sends a `ReaderNote` instead if it has loaded the engine.

    Attributes:
        query_id: id of the query. The answer repeats it.
        engine_id: the engine that has granted the lease.
        lease_id: the lease.
        reader: id of the reading engine.
        rank: index of the sending rank among `ranks`.
        ranks: number of ranks of the reading engine.
        reason: why the reader refuses.
    """

    query_id: int
    engine_id: str
    lease_id: int
    reader: _Name
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    reason: Annotated[str, Meta(max_length=512)] = ""


class LeaseReply(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="lease-reply/1"):
    """Answers a `LeaseQuery` or a `ContentQuery`.

    Attributes:
        query_id: id of the query.
        pages: sealed `LeasedPages`, once every rank has granted the lease.
        error: why nothing can be read under the lease. If `pages` and `error` are both empty, nothing can be read yet
            and the reader asks again.
        waits_for: what must still happen before the pages can be read. A reader that times out reports it.
        is_over: True if the error is that the lease has ended, or that there is no such lease.
    """

    query_id: int
    pages: bytes = b""
    error: str = ""
    waits_for: str = ""
    is_over: bool = False


class ContentQuery(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="content/1"):
    """Asks an engine to lease pages by digest. The engine leases the pages before the first one that it lacks.

    A `LeaseReply` answers it. The `LeasedPages` in the reply are empty if the engine has none of the pages, or may lend
    no more pages. The engine's serving loop decides which pages are leased. Replies before this decision say what they
    wait for, and the reader asks again.

    Attributes:
        query_id: id of the query. The answer repeats it.
        engine_id: the engine expected at the address; empty for any.
        ask_id: a random id, which stays the same when the query is repeated.
        reader: name of the reader, for the engine's own records.
        asker: id of the reading process, the same in all its queries. The engine lends a page to the same asker under
            only one lease at a time.
        compatibility: the reader's compatibility map, as in a `MetadataQuery`.
        kind: what the reader stores for each token (`kvcache.layout.kv_kind`). An engine with another kind refuses.
        page_size: tokens per page.
        hash_algorithm: the algorithm of the digests.
        digests: the digests of the pages, concatenated. Empty when a reader repeats a query that the engine has already
            acknowledged.
        first_page: index, within the prompt, of the first page that is asked for. Each digest covers all earlier pages
            of the prompt.
        named: as in the reader's own `Prompt`. An engine that has computed the pages with other values refuses.
    """

    query_id: int
    engine_id: str
    ask_id: int
    reader: _Name
    asker: Annotated[str, Meta(max_length=512)] = ""
    compatibility: dict[str, str] = {}
    kind: Annotated[str, Meta(max_length=512)]
    page_size: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    hash_algorithm: Annotated[str, Meta(max_length=64)]
    digests: Annotated[bytes, Meta(max_length=MAX_DIGEST_BYTES)]
    first_page: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    named: Annotated[dict[str, str], Meta(max_length=64)] = {}


class LeasedPages(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="pages/2"):
    """The pages that an engine holds under a lease that all its ranks have granted.

    Attributes:
        engine_id: the engine.
        incarnation: the incarnation of the engine that granted the lease.
        lease_id: the lease.
        word_idx: index of the lease word on every rank.
        duration_s: how long a renewal lasts, in seconds.
        num_tokens: the number of tokens whose KV the pages hold.
        block_ids: the blocks of each group of layers. The last block holds the last token, or the state after it.
        prompt_digest: digest of the first tokens of the prompt and of everything else that their KV depends on. The
            query names the number of tokens. In the answer to a `ContentQuery`, this field is the digest of the last
            page.
        table_seal: seal of the block table that a reader builds from the pages of a `ContentQuery`.
        named: what else the pages depend on: `Prompt.named`, and the weights if the engine has reported them.
        digest: keyed digest over all other fields. `sealed_pages` fills it in.
    """

    engine_id: str
    incarnation: _Name
    lease_id: int
    word_idx: Annotated[int, Meta(ge=0)] = msgspec.field(name="slot")
    duration_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    block_ids: tuple[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], ...]
    prompt_digest: bytes
    table_seal: Annotated[bytes, Meta(max_length=64)] = b""
    named: dict[str, str] = {}
    digest: bytes = b""


class QueryRefusal(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type", tag="refusal/1"):
    """Refuses a query, with the reason. `query_id` is -1 if the message had no id."""

    reason: str
    query_id: int = -1


class ReaderNote(msgspec.Struct, frozen=True, array_like=True, tag="note/1"):
    """A note from one rank of a reading engine about a lease, sent as a NIXL notification.

    Notes are idempotent: each names the reading rank, so that a repeated note counts once.

    Attributes:
        lease_id: the lease.
        engine_id: the reading engine.
        rank: index of the sending rank among `ranks`.
        ranks: number of ranks of the reading engine.
        verdict: "done": the rank has read all that it needs. "refused": the rank will not read any further. "renew":
            the rank still waits or reads.
        reason: the reason for a refusal.
    """

    lease_id: int
    engine_id: str
    rank: int
    ranks: int
    verdict: Literal["done", "refused", "renew"]
    reason: str = ""


Query = MetadataQuery | LeaseQuery | LeaseRefusal | ContentQuery | Ping
Answer = MetadataReply | LeaseReply | Pong | QueryRefusal

_encoder = msgspec.msgpack.Encoder()
_queries = msgspec.msgpack.Decoder(Query)
_answers = msgspec.msgpack.Decoder(Answer)
_notes = msgspec.msgpack.Decoder(ReaderNote)
_ranks = msgspec.msgpack.Decoder(RankMetadata)
_pages = msgspec.msgpack.Decoder(LeasedPages)


def encode_message(message: Query | Answer | ReaderNote | RankMetadata) -> bytes:
    """Returns the msgpack bytes of a message."""
    return _encoder.encode(message)


def decode_query(data: bytes) -> Query:
    """Returns the query in `data`. Raises `MetadataError` if it holds no query of this version."""
    return _decoded(_queries, data, "a query")


def decode_answer(data: bytes) -> Answer:
    """Returns the answer in `data`. Raises `MetadataError` if it holds no answer of this version."""
    return _decoded(_answers, data, "an answer")


def decode_note(data: bytes) -> ReaderNote | None:
    """Returns the note in `data`. Returns None if it is malformed or too long, or if its rank is out of range."""
    if len(data) > MAX_NOTE_BYTES:
        return None
    try:
        note = _notes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return note if 0 <= note.rank < note.ranks <= MAX_RANKS else None


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes, kind: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MetadataError(f"{len(data)} bytes cannot be read as {kind} of protocol {PROTOCOL}: {error}") from error


def digest_of(message: msgspec.Struct, key: bytes = b"") -> bytes:
    """Returns the digest over all fields of a message except its `digest`, under `key` if it is not empty."""
    blank = _encoder.encode(msgspec.structs.replace(message, digest=b""))
    return hashlib.blake2b(blank, digest_size=16, key=hashlib.sha256(key).digest() if key else b"").digest()


def sealed_rank(rank: RankMetadata, key: bytes = b"") -> bytes:
    """Returns the encoded metadata of a rank, sealed with a digest under `key`, which all peers must share."""
    return _encoder.encode(msgspec.structs.replace(rank, digest=digest_of(rank, key)))


def sealed_pages(pages: LeasedPages, key: bytes = b"") -> bytes:
    """Returns the encoded pages of a lease, sealed as by `sealed_rank`."""
    return _encoder.encode(msgspec.structs.replace(pages, digest=digest_of(pages, key)))


def _check_seal(where: str, message: RankMetadata | LeasedPages, key: bytes) -> None:
    if not hmac.compare_digest(message.digest, digest_of(message, key)):
        raise MetadataError(f"{where} was changed in transit or made with another key: its digest does not match")


def open_pages(data: bytes, engine_id: str, lease_id: int | None, key: bytes = b"") -> LeasedPages:
    """Decodes the result of `sealed_pages`.

    If `lease_id` is None, any lease of the engine is accepted. If `engine_id` is empty, any engine is accepted.

    Raises:
        MetadataError: the bytes are malformed, the seal does not match, or they belong to another engine or lease.
    """
    pages = _decoded(_pages, data, "the pages of a lease")
    lease_id, engine_id = pages.lease_id if lease_id is None else lease_id, engine_id or pages.engine_id
    where = f"the answer of engine {engine_id!r} about lease {lease_id:#018x}"
    _check_seal(where, pages, key)
    if (pages.engine_id, pages.lease_id) != (engine_id, lease_id):
        raise MetadataError(f"{where} names engine {pages.engine_id[:100]!r} and lease {pages.lease_id:#018x} instead")
    return pages


def open_rank(data: bytes, key: bytes = b"") -> RankMetadata:
    """Decodes the result of `sealed_rank`. Raises `MetadataError` if it is malformed, altered or inconsistent."""
    if len(data) > MAX_METADATA_BYTES:
        raise MetadataError(f"{len(data)} bytes of rank metadata; at most {MAX_METADATA_BYTES} are allowed")
    rank = _decoded(_ranks, data, "rank metadata")
    where = f"metadata of rank {rank.rank} of engine {rank.engine_id!r}"
    _check_seal(where, rank, key)
    if not 0 <= rank.rank < rank.ranks <= MAX_RANKS:
        raise MetadataError(f"{where}: rank {rank.rank} of {rank.ranks}; at most {MAX_RANKS} ranks are allowed")
    check(rank.layout)
    _check_memory(where, rank)
    return rank


def _check_memory(where: str, rank: RankMetadata) -> None:
    sizes = rank.layout.region_bytes
    if len(rank.bases) != len(sizes):
        raise MetadataError(f"{where}: has {len(rank.bases)} addresses for {len(sizes)} regions")
    if rank.checks_addrs and len(rank.checks_addrs) != len(rank.layout.groups):
        raise MetadataError(
            f"{where}: has page checks for {len(rank.checks_addrs)} groups, but its layout has "
            f"{len(rank.layout.groups)} groups"
        )
    checks = [(base, 8 * group.num_pages) for base, group in zip(rank.checks_addrs, rank.layout.groups, strict=False)]
    for base, size in [*zip(rank.bases, sizes, strict=True), (rank.words_addr, 8 * rank.words), *checks]:
        if not 0 < base < base + size <= ADDRESS_LIMIT:
            raise MetadataError(f"{where}: {size} bytes at {base:#x} are outside of any address space")
