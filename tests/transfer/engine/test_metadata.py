from __future__ import annotations

import contextlib

import msgspec
import pytest

from transfer.engine.metadata import (
    WIRE_VERSION,
    KVTransferEngineMetadata,
    TensorAgentMetadata,
    TransferReqData,
    check_metadata,
    decode_metadata,
    decode_request,
    encode,
    sealed,
)
from transfer.errors import InvalidTransferError, MetadataError
from transfer.memory import MemoryType

PAGES, BYTES = 10, 4096


def agent(name: str = "a/0.0@1", **changes: object) -> TensorAgentMetadata:
    fields = {"agent_name": name, "metadata": b"opaque", "base_addr": 1 << 20, "device_id": 0}
    return TensorAgentMetadata(**(fields | changes))


def engine(**changes: object) -> KVTransferEngineMetadata:
    fields = {
        "name": "a",
        "total_num_pages": PAGES,
        "bytes_per_page": BYTES,
        "memory_type": MemoryType.DRAM,
        "hostname": "here",
        "agents_meta": [[agent()]],
        "incarnation": "1",
        "settings": {"nixl": "1"},
        "version": WIRE_VERSION,
    }
    return sealed(KVTransferEngineMetadata(**(fields | changes)))


REQUEST = TransferReqData(
    dst_name="d",
    src_name="s",
    transfer_name="0" * 32,
    transfer_ids=[1, 2],
    src_idxs=[3],
    dst_idxs=[4],
    src_replica_idx=0,
    dst_replica_idx=1,
)


def test_decoded_metadata_equals_the_encoded_one():
    assert decode_metadata(encode(engine())) == engine()
    assert check_metadata(engine()) == engine()


def test_a_checked_copy_does_not_follow_the_original():
    original = engine()
    checked = check_metadata(original)
    original.agents_meta.clear()
    assert len(checked.agents_meta) == 1


def test_every_changed_byte_is_found():
    data = encode(engine())
    passed = []
    for place in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[place] ^= bit
            with contextlib.suppress(MetadataError):
                passed.append(decode_metadata(bytes(changed)))
    assert passed == [engine()] * len(passed)
    # Some changes in the key of a tag are accepted. They lose only the name of an optional field.
    assert len(passed) <= 16


def test_every_cut_is_found():
    data = encode(engine())
    for length in range(len(data)):
        with pytest.raises(MetadataError, match="are not engine metadata"):
            decode_metadata(data[:length])
    with pytest.raises(MetadataError, match="trailing characters"):
        decode_metadata(data + b"\0")


def test_metadata_with_only_the_documented_fields_is_refused():
    bare = TensorAgentMetadata(agent_name="a", metadata=b"x", base_addr=1, device_id=0)
    documented = KVTransferEngineMetadata(
        name="a", total_num_pages=1, bytes_per_page=1, memory_type=MemoryType.DRAM, hostname="h", agents_meta=[[bare]]
    )
    with pytest.raises(MetadataError, match="wire version 0"):
        check_metadata(documented)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}; this engine speaks {WIRE_VERSION}"),
        ({"name": ""}, r"length >= 1 - at `\$.name`"),
        ({"incarnation": ""}, "lacks an incarnation"),
        ({"total_num_pages": 0}, r">= 1 - at `\$.total_num_pages`"),
        ({"total_num_pages": 1 << 31}, r"<= 2147483647 - at `\$.total_num_pages`"),
        ({"bytes_per_page": 0}, r">= 1 - at `\$.bytes_per_page`"),
        ({"total_num_pages": True}, "bool"),
        ({"bytes_per_page": 4096.0}, "float"),
        ({"name": 7}, "int"),
        ({"memory_type": "DISK"}, "DISK"),
        ({"agents_meta": []}, "shard counts"),
        ({"agents_meta": [[]]}, "shard counts"),
        ({"agents_meta": [[agent()], [agent("b"), agent("c")]]}, r"shard counts \[1, 2\]"),
        ({"agents_meta": [[agent(), agent()]]}, "one agent name twice"),
        ({"agents_meta": [[agent(metadata=b"")]]}, r"length >= 1 - at .*metadata`"),
        ({"agents_meta": [[agent(name="")]]}, r"length >= 1 - at .*agent_name`"),
        ({"agents_meta": [[agent(base_addr=0)]]}, r">= 1 - at .*base_addr`"),
        ({"agents_meta": [[agent(base_addr=-4096)]]}, r">= 1 - at .*base_addr`"),
        ({"agents_meta": [[agent(base_addr=(1 << 63) - 1)]]}, "outside of any address space"),
        ({"agents_meta": [[agent(device_id=-1)]]}, r">= 0 - at .*device_id`"),
    ],
)
def test_inconsistent_metadata_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(MetadataError, match=message):
        check_metadata(engine(**changes))


def test_an_unsealed_change_is_refused():
    with pytest.raises(MetadataError, match="engine 'b' was changed in transit"):
        check_metadata(msgspec.structs.replace(engine(), name="b"))
    changed = msgspec.structs.replace(agent(), metadata=b"opaqu3")
    with pytest.raises(MetadataError, match="engine 'a' was changed in transit"):
        check_metadata(msgspec.structs.replace(engine(), agents_meta=[[changed]]))


@pytest.mark.parametrize("other", [None, b"bytes", {}, REQUEST])
def test_other_objects_are_refused(other: object):
    with pytest.raises(MetadataError, match="expected KVTransferEngineMetadata"):
        check_metadata(other)


def test_values_that_cannot_be_encoded_are_refused():
    with pytest.raises(MetadataError, match="cannot be encoded"):
        check_metadata(msgspec.structs.replace(engine(), total_num_pages=1 << 70))


def test_decoded_requests_equal_the_encoded_ones():
    assert decode_request(encode(REQUEST)) == REQUEST
    read = msgspec.structs.replace(REQUEST, is_read=True, version=WIRE_VERSION)
    assert decode_request(encode(read)) == read


def test_the_initiator_is_the_source_of_a_write_and_the_destination_of_a_read():
    assert REQUEST.initiator == "s"
    assert msgspec.structs.replace(REQUEST, is_read=True).initiator == "d"


def test_defaults_are_not_sent():
    assert b"is_read" not in encode(REQUEST)


def test_requests_of_another_kind_or_version_are_refused():
    with pytest.raises(InvalidTransferError, match="not a transfer request"):
        decode_request(encode(engine()))
    with pytest.raises(InvalidTransferError, match=f"wire version {WIRE_VERSION + 1}"):
        decode_request(encode(msgspec.structs.replace(REQUEST, version=WIRE_VERSION + 1)))
    with pytest.raises(InvalidTransferError, match="not a transfer request"):
        decode_request(encode(REQUEST)[:-3])
    with pytest.raises(MetadataError, match="not engine metadata"):
        decode_metadata(encode(REQUEST))


def test_with_a_key_only_bytes_that_were_encoded_with_it_are_looked_at():
    data = encode(engine(), key=b"ours")
    assert decode_metadata(data, key=b"ours") == engine()
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for wrong in (*changed, b"", data[:31], data[:-1], encode(engine()), encode(engine(), key=b"theirs")):
        with pytest.raises(MetadataError, match="are not engine metadata encoded with this key"):
            decode_metadata(wrong, key=b"ours")
