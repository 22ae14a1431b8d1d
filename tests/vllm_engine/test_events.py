"""vLLM's own KV events with the connector. Blocks that decode has read from prefill appear in decode's stream."""

import time
import uuid
from typing import Any

import msgspec
import zmq

from tests.vllm_engine.engine import Shape, expected_tokens, run_until
from tests.vllm_engine.test_engine import PROMPT, Make, prefilled

BLOCK = 16


def stored(name: str, batches: int) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """Returns the parent and the tokens of each block by its hash. They come from vLLM's replay of all
    batches so far.
    """
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"inproc://{name}.replay")
    found: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    end, heard = time.monotonic() + 20, 0
    while heard < batches:  # vLLM's thread may not have sent all batches yet.
        assert time.monotonic() < end, f"{heard} of {batches} batches"
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        found, heard = {}, 0
        while (frames := received(socket))[2] != b"\xff" * 8:
            heard += 1
            for event in msgspec.msgpack.decode(frames[3])[1]:
                assert event["type"] == "BlockStored"
                parent = event["parent_block_hash"]
                for place, block in enumerate(event["block_hashes"]):
                    found[block] = parent, tuple(event["token_ids"][place * BLOCK : (place + 1) * BLOCK])
                    parent = block
    socket.close(linger=0)
    return found


def received(socket: Any) -> list[bytes]:
    assert socket.poll(10_000), "vLLM answers no replay"
    return socket.recv_multipart()


def test_blocks_that_decode_has_read_are_reported_as_prefill_reported_them(make: Make) -> None:
    names = [uuid.uuid4().hex for _ in range(2)]
    prefill, decode = make("kv_producer", Shape(events=names[0])), make("kv_consumer", Shape(events=names[1]))
    params = prefilled(prefill, "p", PROMPT)
    decode.add("d", PROMPT, 2, params)
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == expected_tokens(PROMPT, 2, decode.shape)
    computed, read = stored(names[0], 1), stored(names[1], 1)
    assert len(read) == len(PROMPT) // BLOCK
    assert read == computed
    assert [token for _, tokens in read.values() for token in tokens] == PROMPT[: len(read) * BLOCK]


def test_blocks_of_a_failed_load_are_not_reported(make: Make) -> None:
    names = [uuid.uuid4().hex for _ in range(2)]
    prefill, decode = make("kv_producer", Shape(events=names[0])), make("kv_consumer", Shape(events=names[1]))
    params = prefilled(prefill, "p", PROMPT)
    other = [token + 1 for token in PROMPT]  # The digest of prefill belongs to another prompt.
    decode.add("d", other, 2, params)
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.finish_reason("d") == "error"
    decode.add("next", PROMPT[:BLOCK], 1)
    run_until([decode], lambda: decode.finish_reason("next"))
    assert [tokens for _, tokens in stored(names[1], 1).values()] == [tuple(PROMPT[:BLOCK])]
