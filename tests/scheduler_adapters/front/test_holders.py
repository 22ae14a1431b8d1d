"""The front learns from the KV events of real managers which processes have a prompt's pages, and asks these
processes.
"""

import dataclasses
import itertools
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from kvcache import KVEvents, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.endpoints.publisher import _JOIN_S
from kvcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from kvcache.params import StateShape
from scheduler_adapters.front.holders import PageHolders, PageSet, _hashes, _ProcessPages
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.server import _ready
from tests.kvcache.build import manager_of
from tests.kvcache.events.mirror import settled, worker_of
from tests.scheduler_adapters.front.routers import run
from tests.scheduler_adapters.front.served import Served, encoded, tokens_of
from tests.scheduler_adapters.front.test_placement import make_manager
from tests.scheduler_adapters.serving import own_tokens

PAGE = 16
PROMPT = list(range(1, 201))


def test_the_recorded_pages_equal_a_set() -> None:
    rng, pages, expected = random.Random(1), PageSet(), set[int]()
    gone: list[int] = []
    for _ in range(300):
        some = [rng.randrange(1 << 64) for _ in range(rng.randrange(30))]
        some += rng.sample(sorted(expected), min(9, len(expected))) + gone[-5:]
        if rng.random() < 0.6:
            pages.add(some)
            expected |= set(some)
        else:
            pages.remove(some)
            expected -= set(some)
            gone = some
        asked = np.array([*some, rng.randrange(1 << 64)], np.uint64)
        assert pages.has(asked).tolist() == [one in expected for one in asked.tolist()]
        assert len(pages) == len(expected)
    pages.clear()
    assert not len(pages)


def test_a_page_takes_at_most_16_bytes_and_the_number_of_pages_is_limited() -> None:
    rng, count = np.random.default_rng(1), 200_000
    tracemalloc.start()
    try:
        pages = PageSet(count)
        for start in range(0, count, 1000):
            pages.add(rng.integers(0, 1 << 63, 1000, np.uint64).tolist())
            if start % 10_000 == 0:
                pages.remove(pages._sorted[:500].tolist())
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * count < len(pages) <= count
    assert taken / len(pages) <= 16
    pages.add(rng.integers(0, 1 << 63, count, np.uint64).tolist())
    assert len(pages) == count


@pytest.fixture
def managers() -> Iterator[dict[str, PagedKVCacheManager]]:
    made = {name: make_manager() for name in ("p1", "p2", "d1")}
    yield made
    for manager in made.values():
        manager.close()


@pytest.fixture
def holders() -> Iterator[PageHolders]:
    context: zmq.Context[Any] = zmq.Context()
    made = PageHolders(context)
    yield made
    made.close()
    context.destroy(linger=0)


def ready(name: str, manager: PagedKVCacheManager, incarnation: str = "1") -> msg.Ready:
    events = manager.kv_event_endpoints[0][0]
    return msg.Ready(
        name=name, incarnation=incarnation, page_size=PAGE, kv_events=events, pulse=f"at {name}", engines=(f"{name}/0",)
    )


def compute(manager: PagedKVCacheManager, prompt: list[int], salt: str | None = None) -> None:
    context = TextContext(prompt, len(prompt) + 1, cache_salt=salt)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])


def source(name: str, tokens: int) -> msg.KVSource:
    return msg.KVSource(f"at {name}", (f"{name}/0",), tokens)


def until(found: Callable[[], object], wanted: object) -> None:
    deadline = time.monotonic() + 60
    while found() != wanted:
        assert time.monotonic() < deadline, (found(), wanted)
        time.sleep(0.01)


def test_a_process_with_more_of_a_prompt_than_the_chosen_one_is_named_as_a_source(
    managers: dict[str, PagedKVCacheManager], holders: PageHolders
) -> None:
    members = [ready(name, manager) for name, manager in managers.items()]
    holders.follow(members)
    compute(managers["p1"], PROMPT[:100])
    compute(managers["d1"], PROMPT)
    compute(managers["p2"], PROMPT, "tenant")
    d1, p1 = source("d1", 192), source("p1", 96)
    until(lambda: holders.sources([*PROMPT, 7], None, "p2"), (d1, p1))
    assert holders.sources([*PROMPT, 7], None, "p1") == (d1,)
    assert holders.sources([*PROMPT, 7], None, "") == (d1, p1)
    assert holders.sources([*PROMPT[:100], 7], None, "p1") == ()
    until(lambda: holders.sources(PROMPT, "tenant", "p1"), (source("p2", 192),))
    managers["d1"].reset_prefix_cache()
    until(lambda: holders.sources([*PROMPT, 7], None, "p2"), (p1,))
    holders.follow([*members[:2], msgspec.structs.replace(members[2], kv_events="")])
    assert holders.sources([*PROMPT, 7], None, "p2") == (), (
        "one process publishes no events, so the front must leave the choice to decode"
    )


def test_a_process_that_leaves_is_forgotten_and_is_followed_again_when_it_returns(
    managers: dict[str, PagedKVCacheManager], holders: PageHolders
) -> None:
    compute(managers["d1"], PROMPT)
    members = [ready(name, manager) for name, manager in managers.items()]
    restarted = ready("d1", managers["d1"], "2")
    for d1 in (members[2], restarted):
        holders.follow([*members[:2], d1])
        assert holders._followed["d1"].ready is d1
        until(lambda: holders.sources(PROMPT, None, "p1"), (source("d1", 192),))
    holders.follow(members[:2])
    assert holders.sources(PROMPT, None, "p1") == ()


def test_after_a_gap_nothing_is_known_until_all_pages_are_reported_again(holders: PageHolders) -> None:
    context: zmq.Context[Any] = zmq.Context()
    stream = context.socket(zmq.XPUB)
    stream.setsockopt(zmq.XPUB_VERBOSE, 1)
    stream.setsockopt(zmq.RCVTIMEO, 10_000)
    port = stream.bind_to_random_port("tcp://127.0.0.1")
    member = msg.Ready(name="p", page_size=1, kv_events=f"tcp://127.0.0.1:{port}", pulse="at p", engines=("p/0",))

    def tell(number: int, hashes: list[int]) -> None:
        stored = BlockStored(hashes, None, [], 1, None, "GPU", None)
        stream.send_multipart([b"", number.to_bytes(8, "big"), encode(EventBatch(0.0, [stored]))])

    def known() -> int:
        holders.follow([member])
        return sum(len(pages) for pages in holders._followed["p"].pages.values())

    try:
        holders.follow([member])
        assert stream.recv() == b"\x01"
        tell(7, [1, 2, 3])
        until(known, 3)
        stream.send_multipart([b"", (8).to_bytes(8, "big"), b"no batch"])
        tell(9, [4])
        until(known, 4)
        tell(11, [5])
        until(known, 0)
        while stream.recv() != b"\x01":  # The front subscribes again. It may unsubscribe before or after this.
            pass
        tell(12, [6])
        until(known, 1)
    finally:
        context.destroy(linger=0)


def test_pages_of_a_group_that_the_process_has_not_named_do_not_count() -> None:
    context: zmq.Context[Any] = zmq.Context()
    member = msg.Ready(name="p", page_size=1, kv_events="inproc://p", pulse="at p", engines=("p/0",))
    known = _ProcessPages(context, member)
    try:
        for group in (0, 1, 2):
            known._take(BlockStored([1, 2, 3], None, [], 1, None, "GPU", None, group_idx=group))
        known._take(BlockRemoved([1, 2], "GPU", group_idx=1))
        assert known.tokens_of(np.array([1, 2, 3], np.uint64)) == 3
        known._take(BlockRemoved([3], "GPU", group_idx=0))
        known._take(BlockStored([3], None, [], 1, None, "CPU", None, group_idx=1))
        assert known.tokens_of(np.array([1, 2, 3], np.uint64)) == 2
        assert len(known.pages) == 1
        known._take(AllBlocksCleared())
        assert known.tokens_of(np.array([1, 2, 3], np.uint64)) == 0
        assert known.tokens_of(np.zeros(0, np.uint64)) == 0
    finally:
        known.close()
        context.destroy(linger=0)


FULL, WINDOW, CHUNKS = LayerGroup("full", (0,)), LayerGroup("window", (0,), 6), LayerGroup("chunked", (0,), 8)
KINDS: dict[str, tuple[LayerGroup, ...]] = {
    "full": (FULL,),
    "window": (WINDOW,),
    "chunks": (CHUNKS,),
    "full, window": (FULL, dataclasses.replace(WINDOW, layers=(1,))),
    "window, chunks": (WINDOW, dataclasses.replace(CHUNKS, layers=(1,))),
    "two windows": (WINDOW, dataclasses.replace(WINDOW, layers=(1,), window=17)),
    "full, window, chunks": (FULL, dataclasses.replace(WINDOW, layers=(1,)), dataclasses.replace(CHUNKS, layers=(2,))),
}


@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("host_slots", [0, 20], ids=["", "host"])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_front_counts_the_tokens_that_a_process_skips_for_every_kind_of_layers(
    kinds: str, host_slots: int, states: bool, holders: PageHolders
) -> None:
    groups = KINDS[kinds]
    params: dict[str, Any] = {"kv_events": KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"), "groups": groups}
    if states:
        params["states"] = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)
    made = manager_of(40 * len(groups), layers=len(groups), host_slots=host_slots, params=params)
    config: Any = SimpleNamespace(name="p", role="prefill", max_seq_len=256)
    exchange: Any = SimpleNamespace(incarnation="1", address="at p", engine_id=lambda replica: f"p/{replica}")
    holders.follow([msgspec.msgpack.decode(msgspec.msgpack.encode(_ready(config, made, exchange)), type=msg.Ready)])
    known, rng, seen = holders._followed["p"], random.Random(kinds), Counter[str]()
    prompts = [[1000 * at + one for one in range(rng.randrange(9, 66))] for at in range(12)]
    prompts += [[*prompt[: rng.randrange(1, len(prompt))], *range(7000, 7020)] for prompt in prompts]
    with closing(made):
        # a quarter of a second after the front has subscribed, everything is cleared and announced again
        worker, joined_at = worker_of(made), time.monotonic()
        until(lambda: worker._told_anew_at >= joined_at + _JOIN_S and not worker._owed, True)
        for _ in range(8):
            for _ in range(4):
                prompt = rng.choice(prompts)
                run(made, TextContext(prompt, len(prompt) + 1))
            for prompt in rng.sample(prompts, 12):
                taken_up(known, settled(made)[0])
                hashes = _hashes(prompt, None, "sha256", 4)
                counted = known.tokens_of(hashes)
                context = TextContext(prompt, len(prompt) + 1)
                with made.claim(context):
                    assert made.maybe_reserve(context)
                    assert counted == context.start_idx // 4 * 4
                first = [pages.has(hashes) for (group, _), pages in known.pages.items() if group == 0]
                seen["all"] += counted == len(hashes) * 4
                seen["past a gap"] += counted > [*np.logical_or.reduce([*first, hashes < 0]), False].index(False) * 4
    assert 2 < seen["all"] < 92, seen
    assert (seen["past a gap"] == 0) == groups[0].keeps_all, seen


def taken_up(known: _ProcessPages, last: int) -> None:
    """Waits until the front has taken up the batch with this number."""

    def arrived() -> bool:
        known.poll()
        return known._last is not None and known._last >= last

    until(arrived, True)


@pytest.mark.slow
def test_the_next_turn_at_other_processes_finds_the_answer_at_the_process_that_generated_it(
    tmp_path: Path, tiny_model: Any
) -> None:
    """The request names no source. The front knows which pages d1 has filled, and names d1 as a source."""
    # The test needs the extra 'fleet': only if a front places requests by events do all processes publish events.
    pytest.importorskip("dynamo.llm")
    served, placed = Served(tmp_path), ("--placement", "dynamo")
    try:
        served.start("front", "front", "--address-file", str(served.addresses), "--http-port", "0", *placed)
        for name in ("p1", "p2", "d1", "d2"):
            served.join("prefill" if name[0] == "p" else "decode", name, *placed)
        served.until_there(2, 2)

        def turn(prompt: list[int], prefill: str, decode: str) -> Any:
            client = served.client.with_options(base_url=f"{served.url}/processes/{decode}/v1")
            params = {"kv_transfer_params": {"prefill_process": prefill}, "return_token_ids": True, "ignore_eos": True}
            return client.completions.create(model="pagewire", prompt=prompt, max_tokens=64, extra_body=params)

        deadline = time.monotonic() + 30
        for number in itertools.count():
            first = encoded(f"{number}. " + 40 * "A conversation.")
            second = [*first, *tokens_of(turn(first, "p1", "d1")), *encoded("And then?")[1:]]
            time.sleep(0.1)  # An event takes some time to arrive.
            found = turn(second, "p2", "d2")
            if found.usage.prompt_tokens_details.cached_tokens == (len(first) + 63) // PAGE * PAGE:
                break
            assert time.monotonic() < deadline
        theirs = own_tokens(tiny_model, second, 64)  # pyright: ignore[reportPossiblyUnboundVariable]
        assert tokens_of(found)[: len(theirs)] == theirs  # pyright: ignore[reportPossiblyUnboundVariable]
        assert served.get("/fleet")["p2"]["prefixes"]["pulled"] >= 1
        served.until_nothing_is_held()
    finally:
        served.close()
