"""Runs the object tier through NIXL's OBJ plugin, over a real S3 server. Pages and misses must be the same as without
NIXL.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcache import InvalidParamsError
from kvcache.types import ObjectRange
from tests.kvcache.served import Served
from tests.kvcache.tiers.stored_objects import DAMAGE, StoredObjects, damaged, objects_of, settled
from tests.transfer.nixl.moto_store import MotoStore, moto_store
from tests.transfer.nixl.slow_link import slow_link
from transfer import NixlObjects

PROMPT = range(33)
# In seconds, the longest limit that a manager takes. A busy machine delays processes and threads by many seconds, and
# a working store must keep the limit all the same. Only a test that fails waits this long.
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _a_flush_waits_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tiers.object_tier._LONGEST_FLUSH_S", LONG_S)


@pytest.fixture(scope="module")
def store() -> Iterator[MotoStore]:
    with moto_store() as made:
        yield made


@pytest.fixture(name="io")
def _io(store: MotoStore) -> Iterator[Any]:
    made = store.bucket("calls")(1 << 20, LONG_S)
    yield made
    made.close()


def served(objects: NixlObjects, key: str = "model", timeout_s: float = LONG_S, **options: Any) -> Served:
    """Returns a manager whose only lasting storage is this bucket. A busy machine stays within the default limit."""
    params = {
        "file_tier_key": key,
        "object_tier_io": objects,
        "object_tier_pages": 4,
        "object_tier_timeout_s": timeout_s,
        **options.pop("params", {}),
    }
    return Served(20, 60, params=params, **options)


def limit(it: Served, timeout_s: float) -> None:
    """Changes how long the manager's calls to the store may take from now on."""
    tier = objects_of(it)
    tier._timeout_s = timeout_s
    for io in (tier._read_io, tier._write_io):
        io._io._timeout_s = timeout_s  # pyright: ignore[reportAttributeAccessIssue]


def fetch_until(it: Served, condition: Callable[[], bool]) -> None:
    """Fetches six prompts in turn until the condition is true. The device and the host tier have lost their pages."""
    ends, first = time.monotonic() + LONG_S, 0
    while not condition():
        assert time.monotonic() < ends
        it.manager.flush_tiers()
        forget(it)
        it.fetch([first % 6, *PROMPT])
        first += 1


def forget(it: Served) -> None:
    """Serves other prompts until the device and the host tier have lost their earlier pages."""
    for _ in range(3):
        it.fill(18)


def test_an_object_is_written_whole_and_read_by_ranges(io: Any) -> None:
    content = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)
    io.memory[: len(content)] = content
    io.write([ObjectRange("a/1", 0, 0, 100_000), ObjectRange("a/2", 0, 100_000, 200_000)])
    assert io.exist(["a/2", "a/3", "a/1"]) == [True, False, True]
    io.memory[:] = 0
    wanted = [
        ObjectRange("a/2", 5_000, 7, 90_000),
        ObjectRange("a/3", 0, 100_000, 10),
        ObjectRange("a/1", 9, 200_000, 1),
    ]
    assert io.read(wanted) == [True, False, True]
    assert np.array_equal(io.memory[7:90_007], content[105_000:195_000])
    assert not io.memory[90_007:100_000].any()
    # The store has no object a/3, so it sends an error message instead. The ten bytes for the object receive the
    # beginning of the message. No byte may be written after these ten bytes.
    assert not io.memory[100_010:200_000].any()
    assert io.memory[200_000] == content[9]


def test_a_read_beyond_the_end_leaves_a_rest(io: Any) -> None:
    io.memory[:100] = 1
    io.write([ObjectRange("short", 0, 0, 100)])
    io.memory[:] = 9
    assert io.read([ObjectRange("short", 90, 0, 50), ObjectRange("short", 200, 50, 50)]) == [True, False]
    assert io.memory[:10].tolist() == [1] * 10
    assert (io.memory[10:50] == 9).all()
    assert (io.memory[100:] == 9).all()


def test_a_process_that_ends_is_an_error_and_the_next_call_has_another(io: Any) -> None:
    assert io.exist(["no"]) == [False]
    io._process.process.send_signal(signal.SIGKILL)
    with pytest.raises(OSError, match="bucket 'calls': exist: .*(objects has ended|Broken pipe|reset by peer)"):
        io.exist(["no"])
    assert io.exist(["no"]) == [False]


def test_a_process_ends_with_its_parent_whatever_it_does(io: Any, store: MotoStore) -> None:
    assert io.exist(["no"]) == [False]
    process = io._process.process
    store.stop()
    try:
        io._process.channel.sendall(b'{"call": "exist", "keys": ["no"]}\n')
        time.sleep(0.1)
        io._process.channel.close()
        assert process.wait(LONG_S) == 0
    finally:
        store.go_on()


def test_a_refusal_of_the_store_is_an_error_with_its_reason(store: MotoStore) -> None:
    io = NixlObjects("not-there", store.url, settings={"access_key": "a", "secret_key": "b"})(1 << 16, LONG_S)
    with pytest.raises(OSError, match="bucket 'not-there': write: RuntimeError: 1 of 1 objects could not be written"):
        io.write([ObjectRange("a", 0, 0, 10)])
    io.close()


def test_a_store_that_stops_is_an_error_in_time(store: MotoStore) -> None:
    io = store.bucket("calls")(1 << 16, LONG_S)
    io.exist(["no"])
    store.stop()
    io._timeout_s = 0.5
    try:
        for call in (
            lambda: io.exist(["no"]),
            lambda: io.read([ObjectRange("no", 0, 0, 10)]),
            lambda: io.write([ObjectRange("no", 0, 0, 10)]),
        ):
            with pytest.raises(OSError, match=re.escape("no answer in 0.5 s")):
                call()  # a call that waited for the store would wait until the test ends
    finally:
        store.go_on()
    io._timeout_s = LONG_S
    assert io.exist(["never"]) == [False]
    io.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket": ""}, "bucket is ''"),
        ({"bucket": 3}, "bucket is 3: a string is needed"),
        ({"bucket": "b", "endpoint": "store:9000"}, "endpoint is 'store:9000': an http or https URL is needed"),
        ({"bucket": "b", "prefix": None}, "prefix is None: a string is needed"),
        ({"bucket": "b", "settings": {"num_threads": 4}}, "num_threads is 4: a string is needed"),
    ],
)
def test_names_that_no_bucket_can_have(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=re.escape(message)):
        NixlObjects(**given)


def test_a_new_process_in_a_new_folder_finds_the_pages(store: MotoStore) -> None:
    objects = store.bucket("pages", "kv/")
    it = served(objects)
    assert it.serve(PROMPT) == 0
    it.manager.close()
    assert it.manager.metrics.object_blocks_written == 8
    assert [key for key in store.keys("pages") if not key.startswith("kv/")] == []
    again = served(objects)
    again.fetch(PROMPT)
    assert again.serve(PROMPT) == 32
    assert (again.kv.compared, again.manager.metrics.object_blocks_read) == (32, 8)
    again.manager.reset_prefix_cache()
    again.manager.check()
    again.manager.close()
    third = served(objects)
    third.fetch(PROMPT)
    assert third.serve(PROMPT) == 0
    third.manager.close()


@pytest.mark.parametrize("rounds", [pytest.param(2, marks=pytest.mark.ci), pytest.param(160, marks=pytest.mark.long)])
def test_broken_objects_of_a_real_store_are_misses(store: MotoStore, rounds: int) -> None:
    """In each round one manager writes 64 objects, the test damages them, and another manager reads them."""
    objects, rng, broken, refused = store.bucket("broken"), np.random.default_rng(3), 0, 0
    it = served(objects)
    prompts = [[first, *range(32)] for first in range(32)]
    for prompt in prompts:
        it.serve(prompt)
        it.manager.flush_tiers()
    it.manager.close()
    kept = StoredObjects()
    kept.objects = {key: store.request("GET", f"broken/{key}") for key in store.keys("broken")}
    assert len(kept.pages) == 64
    again = None
    for number in range(rounds):
        for key, content in kept.objects.items():
            damage = damaged(kept, key, DAMAGE[int(rng.integers(len(DAMAGE)))], rng)
            broken += damage != content
            store.request("DELETE", f"broken/{key}") if damage is None else store.request(
                "PUT", f"broken/{key}", damage
            )
        again = served(objects)
        for prompt in prompts[number % 2 :: 2] if rounds > 2 else prompts:
            again.fetch(prompt)
            again.serve(prompt)  # `serve` also compares the KV of the cached tokens.
        refused += again.manager.metrics.object_blocks_refused
        again.manager.check()
        assert again.manager.metrics.object_store_failures == 0
        objects_of(again)._queue.clear()
        again.manager.close()
    assert broken > 60 * rounds
    assert refused > 20 * rounds


@pytest.mark.few(1)
@pytest.mark.parametrize("left", [0, 1, 100])
def test_objects_that_are_cut_to_nothing_or_short_are_replaced(store: MotoStore, left: int) -> None:
    bucket = f"cut-{left}"
    objects, prompts = store.bucket(bucket), [[first, *PROMPT] for first in range(4)]
    it = served(objects)
    for prompt in prompts:
        it.serve(prompt)
        it.manager.flush_tiers()
    it.manager.close()
    right = {key: store.request("GET", f"{bucket}/{key}") for key in store.keys(bucket)}
    assert len(right) == 8
    for key, content in right.items():
        store.request("PUT", f"{bucket}/{key}", content[:left])
    for found in (0, 32):
        again = served(objects)
        for prompt in prompts:
            again.fetch(prompt)
            assert again.serve(prompt) == found
            again.manager.flush_tiers()
        assert again.manager.metrics.object_store_failures == 0
        again.manager.close()
        assert {key: store.request("GET", f"{bucket}/{key}") for key in store.keys(bucket)} == right


def test_requests_are_served_while_the_store_stops_and_continues(
    store: MotoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.tiers.host_tier.PAUSE_S", 0.3)
    it = served(store.bucket("stopped"))
    for first in range(6):
        it.serve([first, *PROMPT])
    it.manager.flush_tiers()
    assert it.manager.metrics.object_blocks_written == 6 * 8
    limit(it, 0.5)
    stop, rounds, ends = threading.Timer(0.2, store.stop), 0, time.monotonic() + LONG_S
    stop.start()
    try:
        while rounds < 12 or it.manager.metrics.object_store_failures == 0:
            forget(it)
            context = it.claim([rounds % 6, *PROMPT])
            while it.manager.prefetch(context):
                assert time.monotonic() < ends, "the store answers only after this loop"
                time.sleep(0.001)
            it.manager.release(context.request_id)
            it.serve([rounds % 6, *PROMPT])
            rounds += 1
        stop.join()
    finally:
        stop.cancel()
        store.go_on()
    limit(it, LONG_S)
    before = it.manager.metrics.object_blocks_read
    fetch_until(it, lambda: it.manager.metrics.object_blocks_read > before)
    it.manager.check()
    it.manager.close()


def test_requests_are_served_over_a_link_that_becomes_slow(store: MotoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tiers.host_tier.PAUSE_S", 0.3)
    with slow_link(store.url) as link:
        it = served(replace(store.bucket("slow"), endpoint=link.url))
        for first in range(6):
            it.serve([first, *PROMPT])
        it.manager.flush_tiers()
        forget(it)
        it.fetch([0, *PROMPT])
        assert it.serve([0, *PROMPT]) == 32
        # no delay, a tolerable delay, and a delay beyond every time limit
        for first, delay_s in enumerate((0.0, 0.0, 0.05, 0.05, 2 * LONG_S, 2 * LONG_S)):
            link.delay_s = delay_s
            limit(it, LONG_S if delay_s < 1.0 else 1.0)
            forget(it)
            forget(it)
            # A call that waited for the slow link would wait longer than `fetch` does before it fails.
            it.fetch([first, *PROMPT])
            assert it.serve([first, *PROMPT]) in {0, 32}  # `serve` also compares the KV of the tokens that it has found
            if delay_s < 1.0:
                assert it.manager.metrics.object_store_failures == 0
        fetch_until(it, lambda: it.manager.metrics.object_store_failures > 0)
        link.delay_s = 0.0
        limit(it, LONG_S)
        before = it.manager.metrics.object_blocks_read
        fetch_until(it, lambda: it.manager.metrics.object_blocks_read > before)
        it.manager.check()
        it.manager.close()


def test_a_link_that_carries_less_than_the_model_computes_is_not_read(
    store: MotoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = store.bucket("thin")
    writer = served(objects)
    writer.serve([*PROMPT])
    writer.manager.flush_tiers()
    writer.manager.close()
    # The tier tries one read every 30 s, because the store may have become faster. The whole test counts as 30 s.
    monkeypatch.setattr("kvcache.tiers.object_tier._TRY_S", 10 * LONG_S)
    with slow_link(store.url) as link:
        link.delay_s = 0.02
        it = served(replace(objects, endpoint=link.url), params={"object_tier_tokens_per_s": 1e4})
        it.fetch([*PROMPT])
        assert it.manager.metrics.object_blocks_read == 8  # Pages are read, because no read was measured before.
        for _ in range(4):  # computing the 32 tokens takes 3.2 ms
            forget(it)
            forget(it)
            it.fetch([*PROMPT])
        assert it.manager.metrics.object_blocks_read == 16
        it.manager.check()
        it.manager.close()


def test_a_store_that_is_not_there_costs_a_request_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tiers.host_tier.PAUSE_S", 1e3)  # The whole test lies within one pause.
    it = served(NixlObjects("none", "http://127.0.0.1:9"), timeout_s=0.3)
    for first in range(5):
        it.fetch([first, *PROMPT])
        if first == 0:
            # The request waits 0.3 s for an answer. The process that calls the store may take longer to start.
            settled(it)
        assert not objects_of(it)._reader.jobs, "nobody asks a store that has just failed"
        assert it.serve([first, *PROMPT]) == 0
    it.manager.flush_tiers()
    assert it.manager.metrics.object_store_failures == 1
    it.manager.check()
    it.manager.close()
    assert it.manager.metrics.object_blocks_written == 0
