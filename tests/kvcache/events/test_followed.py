"""Routers of other projects follow the event streams of pagewire."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import KVEvents, LayerGroup, TextContext
from kvcache.events.wire import hashes_of
from kvcache.replica.hashing import PrefixHasher
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.events import followed as program
from tests.kvcache.events.followed import Followed, follow
from tests.kvcache.events.mirror import Mirror
from tests.kvcache.events.test_grouped_events import longest

pytest.importorskip("dynamo.llm")


def test_dynamos_selection_service_knows_what_two_managers_hold() -> None:
    followed = asyncio.run(follow(2, 200, rounds=3, seed=1, requests=60))
    assert followed.differences == []
    assert followed.seen["compared"] >= 200
    assert followed.seen["pages"] > 200


GROUPS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6), LayerGroup("chunked", (2,), 8)


def test_dynamo_knows_only_the_first_group_and_promises_more_than_windows_keep() -> None:
    options = {"kv_events": KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"), "groups": GROUPS}
    made = manager_of(90, layers=3, params=options)
    chooser, seen = random.Random(1), Counter[str]()
    prompts = [[100 * at + one for one in range(chooser.randrange(9, 40))] for at in range(30)]

    async def compared() -> None:
        from dynamo.llm import SelectionService

        service, (events, replay) = SelectionService(indexer_threads=1), made.kv_event_endpoints[0]
        told = {"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4}
        await service.upsert_worker({**told, "kv_events_endpoint": events, "replay_endpoint": replay})
        for _ in range(8):
            for _ in range(12):
                await asyncio.to_thread(run_once, made, chooser.choice(prompts))
            await asyncio.to_thread(mirror.settle, made, 0)
            for tokens in prompts:
                digests = PrefixHasher("sha256", 4, None, ()).digests(np.array(tokens, np.int32), 0, len(tokens) // 4)
                there = [one in mirror.there.get("GPU", {}) for one in hashes_of(digests).tolist()]
                want = [*there, False].index(False)
                deadline = time.monotonic() + program.PATIENCE_S
                have = -1
                while have != want and time.monotonic() < deadline:
                    answer = await service.overlap_scores({"model_name": "m", "token_ids": tokens})
                    have = sum(each["device_blocks"] for each in answer["workers"])
                assert have == want
                seen["compared"] += 1
                seen["over"] += have > longest(made._replicas.each[0], digests)[0]

    with closing(made), Mirror(made.kv_event_endpoints[0]) as mirror:
        asyncio.run(compared())
        assert mirror.groups[1].spec == ("chunked_local_attention", None)
    assert seen["compared"] == 240
    assert seen["over"] > 0


async def counted(service: Any, tokens: list[int], salt: str | None, want: int) -> int:
    """Returns how many blocks the service counts, as soon as it counts `want` blocks, or else after some seconds."""
    deadline, found = time.monotonic() + program.PATIENCE_S, -1
    while found != want and time.monotonic() < deadline:
        answer = await service.overlap_scores({"model_name": "m", "token_ids": tokens, "cache_salt": salt})
        found = sum(each["device_blocks"] for each in answer["workers"])
    return found


async def following(endpoints: tuple[str, str | None]) -> Any:
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    told = {"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4}
    await service.upsert_worker({**told, "kv_events_endpoint": endpoints[0], "replay_endpoint": endpoints[1]})
    return service


def test_dynamo_counts_each_tenants_blocks_from_the_stream_that_is_written_for_it() -> None:
    """Two salts, one prompt: when the first tenant's pages are evicted, the second tenant's are still counted."""
    events = KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", reader="dynamo")
    made, prompt = manager_of(14, params={"kv_events": events}), [*range(29)]

    async def compared() -> None:
        service = await following(made.kv_event_endpoints[0])
        run_once(made, prompt[:17], cache_salt="a")
        for salt, want in (("a", 4), (None, 0), ("b", 0)):
            assert await counted(service, prompt, salt, want) == want
        run_once(made, prompt, cache_salt="b")  # 7 pages, and 4 of "a"
        assert await counted(service, prompt, "b", 7) == 7
        run_once(made, [*range(100, 125)])  # evicts the pages of "a"
        there = made.admission(TextContext(prompt, 64, cache_salt="b")).cached_pages
        gone = made.admission(TextContext(prompt, 64, cache_salt="a")).cached_pages
        assert gone < 4 < there
        assert await counted(service, prompt, "b", there) == there
        assert await counted(service, prompt, "a", gone) == gone

    with closing(made):
        asyncio.run(compared())


@pytest.mark.parametrize("kind", ["window", "chunked"])
def test_dynamo_follows_a_model_without_full_attention(kind: Any) -> None:
    events = KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", reader="dynamo")
    made = manager_of(40, params={"kv_events": events, "groups": (LayerGroup(kind, (0,), 64),)})

    async def compared() -> None:
        service = await following(made.kv_event_endpoints[0])
        run_once(made, [*range(33)])
        assert await counted(service, [*range(33)], None, 8) == 8

    with closing(made):
        asyncio.run(compared())


class Stuck:
    """A service that never answers, or that always answers that no page is cached."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    async def upsert_worker(self, _: dict[str, Any]) -> None:
        await self.overlap_scores(_)

    async def overlap_scores(self, _: dict[str, Any]) -> dict[str, Any]:
        if not self._answers:
            await asyncio.Event().wait()
        nothing = dict.fromkeys(("device_blocks", "host_pinned_blocks", "disk_blocks"), 0)
        return {"workers": [{"worker_id": 1, **nothing}]}


@pytest.mark.parametrize("answers", [False, True], ids=["no answer", "nothing followed"])
def test_a_service_that_is_stuck_is_named_and_ends_the_run(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ANSWER_S", 0.05)
    monkeypatch.setattr(program, "PATIENCE_S", 1.0)
    made = Followed(1, 0, tmp_path)
    try:
        made.services = [Stuck(answers)]
        made.work(20)
        if answers:
            asyncio.run(asyncio.wait_for(made.compare(60), 30.0))
            assert {one.partition(":")[0] for one in made.differences} == {"service 0, manager 1"}
        else:
            with pytest.raises(TimeoutError, match=r"service 0: overlaps of \d+ tokens: no answer"):
                asyncio.run(asyncio.wait_for(made.compare(60), 30.0))
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.parametrize("managers", [2, 8])
def test_dynamos_selection_service_agrees_10_000_times(managers: int) -> None:
    followed = asyncio.run(follow(managers, 10_000, rounds=20, seed=0))
    assert followed.differences == []
    assert followed.seen["compared"] >= 10_000
    assert min(followed.seen[what] for what in ("evictions", "restarts", "resets", "lost")) > 0
