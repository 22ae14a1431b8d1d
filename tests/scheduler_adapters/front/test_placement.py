"""The choice of a prompt's prefill process. Dynamo's selection core follows the events of two real managers."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.params import KVEvents
from scheduler_adapters.front.placement import InTurns, Selected
from scheduler_adapters.service import messages as msg

PAGE = 16
PROMPTS = {name: [number, *range(200)] for number, name in enumerate(("p1", "p2"))}


def make_manager() -> PagedKVCacheManager:
    events = KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    params = KVCacheParams(torch.float32, 2, 8, enable_prefix_caching=True, page_size=PAGE, kv_events=events)
    return PagedKVCacheManager(params, 4, 512, 1, ["cpu"], available_cache_memory=1 << 20)


@pytest.fixture
def managers() -> Iterator[dict[str, PagedKVCacheManager]]:
    made = {name: make_manager() for name in PROMPTS}
    yield made
    for manager in made.values():
        manager.close()


def ready(name: str, manager: PagedKVCacheManager, incarnation: str = "1") -> msg.Ready:
    events, replay = manager.kv_event_endpoints[0]
    assert replay
    return msg.Ready(name=name, incarnation=incarnation, page_size=PAGE, kv_events=events, kv_replay=replay)


def compute(manager: PagedKVCacheManager, prompt: list[int]) -> None:
    context = TextContext(prompt, len(prompt) + 1)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])


async def check_placed_soon(placement: Selected, prompt: list[int], wanted: str) -> None:
    """Waits until the events have arrived and the placement chooses `wanted`. Dynamo chooses at random between equal
    processes. Twelve right choices in a row cannot be an accident.
    """
    row, number = 0, 0
    async with asyncio.timeout(20):
        while row < 12:
            number += 1
            chosen = await placement.place(f"{wanted}{number}", prompt, list(PROMPTS))
            await placement.over(f"{wanted}{number}")
            row = row + 1 if chosen == wanted else 0
            await asyncio.sleep(0.01)


def test_prompts_go_where_they_are_cached_while_that_process_is_there(
    managers: dict[str, PagedKVCacheManager],
) -> None:
    async def run() -> None:
        placement = Selected()
        assert await placement.place("early", PROMPTS["p1"], ["p1"]) == "", "nobody is known"
        members = [ready(name, manager) for name, manager in managers.items()]
        await placement.follow(members)
        for name, prompt in PROMPTS.items():
            compute(managers[name], prompt)
        for name, prompt in PROMPTS.items():
            await check_placed_soon(placement, [*prompt, 7], name)
            for number in range(5):
                assert await placement.place(f"{name}.{number}", [*prompt, number], ["p1", "p2"]) == name
                await placement.prefilled(f"{name}.{number}")
                await placement.over(f"{name}.{number}")
                await placement.over(f"{name}.{number}")
        assert await placement.place("other", [*PROMPTS["p1"], 9], ["p2"]) == "p2", "p1 accepts no prompts now"
        await placement.over("other")
        await placement.follow(members[1:])
        assert await placement.place("gone", [*PROMPTS["p1"], 9], ["p1", "p2"]) == "p2"
        await placement.over("gone")
        await placement.follow([ready("p1", managers["p1"], "2"), members[1]])
        # A placement that subscribes late still learns the pages of the process.
        await check_placed_soon(placement, [*PROMPTS["p1"], 9], "p1")

    asyncio.run(run())


def test_a_process_that_goes_takes_its_reservations_with_it_and_costs_no_request(
    managers: dict[str, PagedKVCacheManager],
) -> None:
    async def run() -> None:
        placement = Selected()
        members = [ready(name, manager) for name, manager in managers.items()]
        await placement.follow(members)
        assert await placement.place("stays", PROMPTS["p2"], ["p2"]) == "p2"
        assert await placement.place("goes", PROMPTS["p1"], ["p1"]) == "p1"
        number, _ = placement._workers["p1"]
        await placement._service.delete_worker(number)  # `follow` makes this call when a process has ended.
        assert await placement.place("late", PROMPTS["p1"], ["p1"]) == "", "decode chooses"
        assert await placement.place("late", PROMPTS["p2"], ["p2"]) == "p2", (
            "a prompt that was refused may be placed again"
        )
        for request_id in ("goes", "late", "stays"):
            await placement.prefilled(request_id)
            await placement.over(request_id)
            await placement.over(request_id)
        assert placement._reserved == set()
        assert await placement.place("goes", PROMPTS["p1"], ["p2"]) == "p2", "its name may be used again"
        assert await placement.place("goes", PROMPTS["p1"], ["p2"]) == "", (
            "a name must not be used twice at the same time"
        )
        await placement.over("goes")  # The reservation is freed although the name was used twice.
        assert await placement.place("goes", PROMPTS["p1"], ["p2"]) == "p2"

    asyncio.run(run())


def test_a_restarted_process_is_followed_at_its_new_endpoints(managers: dict[str, PagedKVCacheManager]) -> None:
    """The front has not noticed the end of the first process. The new process has the same name and other endpoints."""

    async def run() -> None:
        placement, prompt = Selected(), [*PROMPTS["p1"], 9]
        with closing(make_manager()) as before:
            compute(managers["p2"], prompt[:100])
            compute(managers["p1"], prompt)
            await placement.follow([ready("p1", before, "1"), ready("p2", managers["p2"])])
            # p2 has half of the pages of this prompt, and p1 has none.
            await check_placed_soon(placement, prompt, "p2")
            await placement.follow([ready(name, manager, "2") for name, manager in managers.items()])
            await check_placed_soon(placement, prompt, "p1")
            assert {name: known.incarnation for name, (_, known) in placement._workers.items()} == {
                "p1": "2",
                "p2": "2",
            }
            assert len({number for number, _ in placement._workers.values()}) == 2

    asyncio.run(run())


def test_the_load_is_the_sum_of_the_reservations(managers: dict[str, PagedKVCacheManager]) -> None:
    async def run() -> None:
        placement = Selected()
        await placement.follow([ready(name, manager) for name, manager in managers.items()])
        new = [[1000 * number, *range(160)] for number in range(8)]
        chosen = [await placement.place(str(number), prompt, list(PROMPTS)) for number, prompt in enumerate(new)]
        assert chosen.count("p1") == chosen.count("p2") == 4

    asyncio.run(run())


def test_the_round_robin_placement_gives_each_process_its_share() -> None:
    async def run() -> list[str]:
        placement = InTurns()
        assert await placement.place("r", [1], []) == ""
        return [await placement.place("r", [1], ["b", "a"]) for _ in range(4)]

    assert sorted(asyncio.run(run())) == ["a", "a", "b", "b"]
