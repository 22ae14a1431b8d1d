"""Reads the stored bytes of each version of each format.

A change that cannot read these bytes needs a new version of the format. `python -m tests.test_kept` writes the bytes of
versions that have no stored bytes yet. It never overwrites stored bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvcache.endpoints.follower import Followed
from kvcache.errors import WatchError
from kvcache.replica.block_table import BlockTable
from kvcache.tiers import page_files
from kvcache.tiers.object_tier import ObjectFormat
from kvcache.tiers.page_files import FileFormat, SystemIO, read_pages, read_rows, write_pages
from kvcache.tiers.page_folder import namespace_of
from kvcache.watch.messages import Look, Owners, PoolLook
from pagewire.top import sources
from pagewire.top.sources import Heard, PlayedSource
from tests.transfer.plan_oracle import page_layout
from transfer.engine.metadata import (
    WIRE_VERSION,
    KVTransferEngineMetadata,
    TensorAgentMetadata,
    decode_metadata,
    encode,
    sealed,
)
from transfer.memory import MemoryType
from transfer.plan.shapes import dense
from transfer.wire import messages as wire

KEPT = Path(__file__).parent / "kept"
KEY = b"a key of this test"
FILES = page_files._MAGIC.decode().replace("/", "-")
RECORDING = sources._MAGIC.decode().strip().replace(" ", "-")


def _tag(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag).replace("/", "-")


NAMES = {
    **{name: f"wire-{wire.PROTOCOL}-{name}.bin" for name in ("rank", "query", "lease", "reply", "note")},
    "engine": f"engine-{WIRE_VERSION}.bin",
    "file": f"{FILES}-file.bin",
    "object": f"{FILES}-object.bin",
    "epoch": f"{FILES}-epoch.bin",
    "recording": f"{RECORDING}.bin",
    "look": f"{_tag(Look)}.bin",
    "table": f"{_tag(BlockTable)}.bin",
}
LAYOUT = FileFormat(bytes(range(16)), 32, 16)
OBJECTS = ObjectFormat(LAYOUT, 2)
DIGESTS = np.arange(1, 5, dtype=np.uint64).reshape(2, 2)
PAGES = np.arange(64, dtype=np.uint8).reshape(2, 32)
NAMESPACE = "93828eb68f86161b40969bfdbe8ebc7a"  # The namespace that a page folder derives from these three fields.
CELLS = np.array([0, 1, 2 | 7 << 8], np.uint32)


def kept(name: str) -> bytes:
    path = KEPT / NAMES[name]
    assert path.exists(), f"{path} is missing: keep the bytes of the new version with `python -m tests.test_kept`"
    return path.read_bytes()


def test_a_rank_s_metadata_is_read() -> None:
    rank = wire.open_rank(kept("rank"), KEY)
    assert (rank.engine_id, rank.rank, rank.ranks, rank.bases) == ("p", 0, 2, (1 << 20,))
    assert (rank.memory_type, rank.words, rank.compatibility) == (MemoryType.DRAM, 16, {"model": "m"})
    assert rank.layout.region_bytes[0] > 0


def test_what_a_lease_holds_is_read() -> None:
    pages = wire.open_pages(kept("lease"), "p", 7, KEY)
    assert (pages.word_idx, pages.num_tokens, pages.block_ids, pages.duration_s) == (3, 20, ((4, 5),), 10.0)


def test_messages_are_read() -> None:
    assert wire.decode_query(kept("query")) == wire.LeaseQuery(query_id=1, engine_id="p", lease_id=7, num_tokens=20)
    assert wire.decode_answer(kept("reply")) == wire.LeaseReply(query_id=1, pages=b"sealed", waits_for="prefill")
    assert wire.decode_note(kept("note")) == wire.ReaderNote(7, "d", 1, 2, "refused", "too late")


def test_metadata_of_an_engine_is_read() -> None:
    found = decode_metadata(kept("engine"), KEY)
    assert (found.name, found.total_num_pages, found.bytes_per_page) == ("e", 8, 64)
    assert found.agents_meta[0][0].metadata == b"nixl"


def test_a_page_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kept.pages"
    path.write_bytes(kept("file"))
    assert np.array_equal(np.asarray(read_rows(path, LAYOUT)), DIGESTS)
    found = np.zeros_like(PAGES)
    assert read_pages(path, LAYOUT, 0, DIGESTS, [[page] for page in found], SystemIO()) == [None, None]
    assert np.array_equal(found, PAGES)


def test_an_object_of_pages_is_read() -> None:
    found = np.zeros_like(PAGES)
    records = np.frombuffer(kept("object"), np.uint8).copy()
    assert OBJECTS.unpack(records, DIGESTS, [[page] for page in found]) == [None, None]
    assert np.array_equal(found, PAGES)
    assert OBJECTS.epoch_of(kept("epoch")) == "00000000000000ab"


def test_a_recorded_look_is_played(tmp_path: Path) -> None:
    path = tmp_path / "kept.rec"
    path.write_bytes(kept("recording"))
    followed = Followed()
    (heard,) = PlayedSource(path).poll({})
    look = followed.apply(heard.frames)
    assert (look.name, look.number, look.pools[0].counts) == ("p", 1, (0, 1, 1, 0, 0, 0))
    assert look.owners.request_ids == ("r",)
    assert np.array_equal(followed.cells["0"], CELLS)


def test_a_look_is_read() -> None:
    followed = Followed()
    look = followed.apply([kept("look"), b"", CELLS.tobytes()])
    assert look == _look()
    assert np.array_equal(followed.cells["0"], CELLS)


def test_a_block_table_is_read() -> None:
    assert msgspec.msgpack.decode(kept("table"), type=BlockTable) == _table()


def test_a_look_and_a_table_of_another_version_are_refused_by_name() -> None:
    look, table = (kept(name).replace(b"/1", b"/9", 1) for name in ("look", "table"))
    with pytest.raises(WatchError, match="it speaks 'look/9', and 'look/1' is known here: both sides need one version"):
        Followed().apply([look, b"", CELLS.tobytes()])
    with pytest.raises(msgspec.ValidationError, match="block_table/9"):
        msgspec.msgpack.decode(table, type=BlockTable)


def test_namespaces_keep_their_names() -> None:
    assert namespace_of("sha256", "a layout", "a key").hex() == NAMESPACE


def _file(folder: Path) -> bytes:
    name, _ = write_pages(folder, "0.tmp", LAYOUT, DIGESTS, [[page] for page in PAGES], SystemIO())
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    return data


def _object() -> bytes:
    records = np.zeros(OBJECTS.object_bytes, np.uint8)
    OBJECTS.pack(records, DIGESTS, [[page] for page in PAGES])
    return records.tobytes()


def _rank() -> bytes:
    rank = wire.RankMetadata(
        engine_id="p",
        incarnation="i",
        rank=0,
        ranks=2,
        hostname="h",
        agent_name="p/0@i",
        agent_metadata=b"nixl",
        memory_type=MemoryType.DRAM,
        layout=dense(page_layout(range(2)), 8),
        bases=(1 << 20,),
        device=0,
        words_addr=4096,
        words=16,
        compatibility={"model": "m"},
    )
    return wire.sealed_rank(rank, KEY)


def _lease() -> bytes:
    pages = wire.LeasedPages(
        engine_id="p",
        incarnation="i",
        lease_id=7,
        word_idx=3,
        duration_s=10.0,
        num_tokens=20,
        block_ids=((4, 5),),
        prompt_digest=bytes(32),
    )
    return wire.sealed_pages(pages, KEY)


def _engine() -> bytes:
    agent = TensorAgentMetadata(agent_name="a", metadata=b"nixl", base_addr=4096, device_id=0)
    found = KVTransferEngineMetadata(
        name="e",
        total_num_pages=8,
        bytes_per_page=64,
        memory_type=MemoryType.DRAM,
        hostname="h",
        agents_meta=[[agent]],
        incarnation="i",
        version=WIRE_VERSION,
    )
    return encode(sealed(found), KEY)


def _look() -> Look:
    owners = Owners(
        numbers=(7,),
        request_ids=("r",),
        tenants=("",),
        phases=("",),
        pools=("0",),
        pages=(1,),
        tokens=(16,),
        prompts=(16,),
    )
    return Look(
        name="p",
        incarnation="i",
        number=1,
        base=0,
        at=1.0,
        cost_s=0.0,
        page_size=16,
        page_bytes=64,
        pools=(PoolLook(name="0", num_pages=2, counts=(0, 1, 1, 0, 0, 0)),),
        owners=owners,
    )


def _table() -> BlockTable:
    return BlockTable(
        request_id="r",
        replica_idx=1,
        num_tokens=20,
        page_size=16,
        groups=((4, 5), (0, 7)),
        fingerprint="f",
        hash_algorithm="sha256",
        digests=bytes(range(16)),
        kinds=("window:1024",),
        seals=(b"seal",),
    )


def _recording(folder: Path) -> bytes:
    look = _look()
    path = folder / "recording.tmp"
    with sources._begun(path) as file:
        sources._write(file, Heard(1.0, "tcp://127.0.0.1:1", [msgspec.msgpack.encode(look), b"", CELLS.tobytes()]))
    data = path.read_bytes()
    path.unlink()
    return data


WRITERS: dict[str, Callable[[], bytes]] = {
    "rank": _rank,
    "lease": _lease,
    "query": lambda: wire.encode_message(wire.LeaseQuery(query_id=1, engine_id="p", lease_id=7, num_tokens=20)),
    "reply": lambda: wire.encode_message(wire.LeaseReply(query_id=1, pages=b"sealed", waits_for="prefill")),
    "note": lambda: wire.encode_message(wire.ReaderNote(7, "d", 1, 2, "refused", "too late")),
    "engine": _engine,
    "file": lambda: _file(KEPT),
    "object": _object,
    "epoch": lambda: OBJECTS.epoch_object("00000000000000ab"),
    "recording": lambda: _recording(KEPT),
    "look": lambda: msgspec.msgpack.encode(_look()),
    "table": lambda: msgspec.msgpack.encode(_table()),
}

if __name__ == "__main__":
    for kind, write in WRITERS.items():
        if not (KEPT / NAMES[kind]).exists():
            (KEPT / NAMES[kind]).write_bytes(write())
