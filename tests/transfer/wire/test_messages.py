"""A message is unchanged since its sender has sealed it, or reading it raises an error that names the fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from tests.transfer.plan_oracle import page_layout
from transfer.errors import MetadataError
from transfer.memory import MemoryType
from transfer.plan.boxes import ShardLayout
from transfer.plan.shapes import dense
from transfer.wire import messages as wire
from transfer.wire.messages import (
    MAX_NOTE_BYTES,
    LeasedPages,
    MetadataQuery,
    MetadataReply,
    Ping,
    Pong,
    QueryRefusal,
    RankMetadata,
    ReaderNote,
    decode_answer,
    decode_note,
    decode_query,
    encode_message,
    open_pages,
    open_rank,
    sealed_pages,
    sealed_rank,
)

LAYOUT = dense(page_layout(range(2)), 8)


def rank(**changes: object) -> RankMetadata:
    fields = {
        "engine_id": "p",
        "incarnation": "i",
        "rank": 0,
        "ranks": 2,
        "hostname": "h",
        "agent_name": "p/0@i",
        "agent_metadata": bytes(range(64)),
        "memory_type": MemoryType.DRAM,
        "layout": LAYOUT,
        "bases": (1 << 20,),
        "device": 0,
        "words_addr": 4096,
        "words": 16,
        "compatibility": {"model": "m"},
        "settings": {"UCX_TLS": "cma"},
    }
    return RankMetadata(**(fields | changes))


def test_a_decoded_rank_equals_the_sealed_one() -> None:
    found = open_rank(sealed_rank(rank()))
    assert msgspec.structs.replace(found, digest=b"") == rank()
    assert len(found.digest) == 16


def test_every_decoded_message_equals_the_encoded_one() -> None:
    queries = [MetadataQuery(query_id=3, engine_id="p", compatibility={"a": "b"}), Ping(query_id=4, engine_id="p")]
    answers = [
        MetadataReply(query_id=1, engine_id="p", incarnation="i", ranks=(b"x", b"")),
        Pong(query_id=2, engine_id="p", incarnation="i"),
        QueryRefusal(query_id=3, reason="no"),
    ]
    assert [decode_query(encode_message(query)) for query in queries] == queries
    assert [decode_answer(encode_message(answer)) for answer in answers] == answers
    note = ReaderNote((1 << 64) - 1, "d", 1, 2, "refused", "why")
    assert decode_note(encode_message(note)) == note


@pytest.mark.parametrize("key", [b"", b"secret"])
def test_no_bit_of_what_the_metadata_says_can_be_changed(key: bytes) -> None:
    data = sealed_rank(rank(), key)
    sealed, harmless = open_rank(data, key), 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        try:
            assert open_rank(bytes(damaged), key) == sealed  # The damaged byte was in the name of an optional key.
            harmless += 1
        except MetadataError:
            pass
    assert harmless < len(data) // 50


def test_no_byte_can_be_missing_or_more() -> None:
    data = sealed_rank(rank())
    for length in range(len(data)):
        with pytest.raises(MetadataError, match="cannot be read as rank metadata .*truncated"):
            open_rank(data[:length])
    with pytest.raises(MetadataError, match="trailing characters"):
        open_rank(data + b"\0")


def test_without_the_key_nothing_can_be_sealed() -> None:
    for ours, theirs in ((b"one", b"two"), (b"", b"two"), (b"one", b"")):
        with pytest.raises(MetadataError, match="changed in transit or made with another key"):
            open_rank(sealed_rank(rank(), ours), theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_id": ""}, "length >= 1 - at .*engine_id"),
        ({"agent_name": "x" * 513}, "length <= 512 - at .*agent_name"),
        ({"agent_metadata": b""}, "length >= 1 - at .*agent_metadata"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"ranks": 5000}, "rank 0 of 5000; at most 4096 ranks"),
        ({"bases": ()}, "0 addresses for 1 regions"),
        ({"bases": (1 << 20, 1 << 21)}, "2 addresses for 1 regions"),
        ({"bases": (0,)}, "bytes at 0x0 are outside of any address space"),
        ({"bases": ((1 << 63) - 1,)}, "are outside of any address space"),
        ({"words": 0}, "0 bytes at 0x1000 are outside"),
        ({"words_addr": -8}, "outside"),
        ({"device": -1}, ">= 0 - at .*device"),
        ({"checks_addrs": (8, 8)}, "has page checks for 2 groups, but its layout has 1 groups"),
        ({"checks_addrs": (0,)}, "outside"),
        ({"layout": ShardLayout((), (1,))}, "groups: 0 is not within 1 to 256"),
    ],
)
def test_metadata_that_does_not_add_up_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        open_rank(sealed_rank(rank(**changes)))


def test_a_box_that_reaches_out_of_its_region_is_refused() -> None:
    box = msgspec.structs.replace(LAYOUT.groups[0].boxes[0], offset=4)
    layout = ShardLayout((msgspec.structs.replace(LAYOUT.groups[0], boxes=(box,)),), LAYOUT.region_bytes)
    with pytest.raises(MetadataError, match="reaches byte"):
        open_rank(sealed_rank(rank(layout=layout)))


def test_metadata_beyond_the_limit_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_METADATA_BYTES", 100)
    with pytest.raises(MetadataError, match="bytes of rank metadata; at most 100 are allowed"):
        open_rank(sealed_rank(rank()))


def test_another_version_is_refused_by_name() -> None:
    data = encode_message(MetadataQuery(query_id=1)).replace(b"query/1", b"query/2")
    with pytest.raises(MetadataError, match=r"cannot be read as a query of protocol 3.*query/2"):
        decode_query(data)


@pytest.mark.parametrize("decode", [decode_query, decode_answer, open_rank])
def test_bytes_that_are_no_message_are_one_of_our_errors(decode: Callable[[bytes], object]) -> None:
    rng = random.Random(1)
    samples = [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        b"\xa2\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        encode_message(QueryRefusal(reason="x")),
    ]
    samples += [rng.randbytes(rng.randrange(1, 80)) for _ in range(500)]
    for data in samples:
        if decode is decode_answer and data == samples[5]:
            continue
        with pytest.raises(MetadataError, match="bytes cannot be read as .* of protocol 3"):
            decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"request-7:2",
        b"\x91" * 900,
        msgspec.msgpack.encode(["note/1", 1, "d", 0, 1, "done"]) + b"\0",
        msgspec.msgpack.encode(["note/1", 1, "d", 0, 1, "maybe"]),
        msgspec.msgpack.encode(["note/1", 1, "d", 1, 1, "done"]),
        msgspec.msgpack.encode(["note/1", 1, "d", -1, 1, "done"]),
        msgspec.msgpack.encode(["note/1", 1, "d", 0, 5000, "done"]),
        msgspec.msgpack.encode(["note/1", "1", "d", 0, 1, "done"]),
        msgspec.msgpack.encode(["note/1", 1, "d", 0, 1, "refused", "x" * MAX_NOTE_BYTES]),
    ],
)
def test_a_message_that_is_no_note_is_read_as_none(data: bytes) -> None:
    assert decode_note(data) is None


def test_the_pages_of_another_engine_or_lease_are_not_taken_for_these() -> None:
    """Two engines may share a key and use the same lease ids."""
    pages = LeasedPages(
        engine_id="p/1",
        incarnation="i",
        lease_id=5,
        word_idx=2,
        duration_s=9.0,
        num_tokens=17,
        block_ids=((3, 4),),
        prompt_digest=b"d" * 32,
    )
    data = sealed_pages(pages, b"key")
    for lease_id in (5, None):
        assert msgspec.structs.replace(open_pages(data, "p/1", lease_id, b"key"), digest=b"") == pages
        with pytest.raises(
            MetadataError, match=r"^the answer of engine 'p/0' about lease 0x0+5 names engine 'p/1' and lease"
        ):
            open_pages(data, "p/0", lease_id, b"key")
    with pytest.raises(
        MetadataError,
        match=r"^the answer of engine 'p/1' about lease 0x0+6 names engine 'p/1' and lease 0x0+5 instead$",
    ):
        open_pages(data, "p/1", 6, b"key")
    for key in (b"other", b""):
        with pytest.raises(MetadataError, match="another key"):
            open_pages(data, "p/1", 5, key)
