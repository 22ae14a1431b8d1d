"""Our manager's KV events can be read by vLLM's own classes, and equal the bytes of vLLM's encoder."""

import msgspec
import pytest
import torch
import zmq
from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcache import KVCacheParams, KVEvents, PagedKVCacheManager, TextContext
from kvcache.events import wire as ours
from kvcache.replica.hashing import PrefixHasher

ANY = "tcp://127.0.0.1:0"
STORED = [
    ([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0, "full_attention"),
    ([7], 3, [1, 2], 2, None, "CPU", "style", [("style", ("ab" * 32, 1), "salt")], 0, "mla_attention"),
    ([7, 8], None, [], 0, None, "STORAGE", None, None, 0, None),
]


@pytest.mark.parametrize("fields", STORED)
def test_bytes_are_those_of_vllms_encoder(fields: tuple[object, ...]) -> None:
    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        given = {"BlockStored": fields, "BlockRemoved": ([1, 2], "GPU", 0)}.get(kind, ())
        mine, other = (getattr(module, kind)(*given) for module in (ours, theirs))
        batch = theirs.KVEventBatch(ts=1.5, events=[other], data_parallel_rank=1)
        assert ours.encode(ours.EventBatch(1.5, [mine], 1)) == msgspec.msgpack.encode(batch)


def test_vllms_subscriber_reads_our_stream() -> None:
    params = KVCacheParams(torch.uint8, 1, 1, enable_prefix_caching=True, page_size=4, kv_events=KVEvents(ANY, ANY))
    manager = PagedKVCacheManager(params, 4, 64, 1, ["cpu"], available_cache_memory=1 << 10)
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(manager.kv_event_endpoints[0][0])
    socket.subscribe(b"")
    decoder = msgspec.msgpack.Decoder(type=theirs.KVEventBatch)
    received(socket)  # it listens
    context = TextContext(range(1, 14), 64, cache_salt="tenant", extra_keys=[(0, b"style")])
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    manager.reset_prefix_cache()
    events: list[object] = []
    while len(events) < 2:
        events += decoder.decode(received(socket)).events
    stored, removed = events
    hasher = PrefixHasher("sha256", 4, "tenant", ((0, b"style"),))
    hasher.digests(context.tokens, 0, 3)
    hashes = [maybe_convert_block_hash(bytes(hasher.known[at : at + 32])) for at in (0, 32, 64)]
    assert stored == theirs.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[*range(1, 13)],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name="style",
        extra_keys=[("style", "tenant"), ("style",), ("style",)],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert isinstance(removed, theirs.BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(hashes)
    socket.close(linger=0)
    manager.close()


def received(socket: zmq.Socket) -> bytes:
    assert socket.poll(60_000), "nothing comes"
    topic, number, payload = socket.recv_multipart()
    assert topic == b""
    assert len(number) == 8
    return payload
