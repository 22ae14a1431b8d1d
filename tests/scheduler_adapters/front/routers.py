"""What real routers and our front count of a prompt that a server has cached: the table in `docs/guides/routers.md`.

`python -m tests.scheduler_adapters.front.routers` measures it, and writes `routers.json` beside this file. Then
`python -m tests.generated_tables` writes the table.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from kvcache import KVEvents, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.params import KVEventsReader, StateShape
from scheduler_adapters.front.holders import PageHolders, _hashes
from scheduler_adapters.service import messages as msg
from tests.kvcache.build import manager_of
from tests.kvcache.events.mirror import settled
from tests.kvcache.events.routed import ROUTER, Router, Server

MEASURED = Path(__file__).with_suffix(".json")
ANY, PAGE, PROMPTS = "tcp://127.0.0.1:0", 4, 8
PROMPT = [*range(33)]  # 8 pages, and the token that is always computed
QUIET_S = 8.0  # how long a router that has not counted all pages may still learn them
_VERSIONS = itertools.count()
_SHAPE = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)


class Case(NamedTuple):
    """A model, the names of the cached prompt and of the question, and what runs between the two.

    `kinds` are the kinds of its layers, with the length of windows and chunks. `fillers` is the number of other prompts
    that run before the question. `switches` is 1 if the weights change before the question, and 2 if those of the
    prompt come back then.
    """

    kinds: tuple[tuple[Any, int], ...] = (("full", 0),)
    states: bool = False
    salt: str | None = None
    adapter: str | None = None
    named: bool = True  # whether the question names the salt or the adapter
    pages: int = 80
    host_slots: int = 0
    fillers: int = 0
    switches: int = 0
    latents: bool = False
    files: bool = False
    is_lost: bool = False  # whether the server must compute the prompt again after the fillers and switches


CASES = {
    "full attention": Case(),
    "latents (MLA)": Case(latents=True),
    "windows": Case((("window", 64),)),
    "windows that have freed their first pages": Case((("window", 6),), pages=20, fillers=2),
    "chunks": Case((("chunked", 64),)),
    "full attention and windows": Case((("full", 0), ("window", 64))),
    "the same, the window's last pages evicted": Case((("full", 0), ("window", 6)), pages=24, fillers=1, is_lost=True),
    "full attention and chunks": Case((("full", 0), ("chunked", 64))),
    "full attention and recurrent states": Case(states=True),
    "full attention, a salt": Case(salt="a"),
    "the same, asked without the salt": Case(salt="a", named=False),
    "full attention, an adapter": Case(adapter="ann"),
    "the same, asked without the adapter": Case(adapter="ann", named=False),
    "full attention, evicted": Case(pages=20, fillers=3, is_lost=True),
    "full attention, evicted to the host": Case(pages=20, host_slots=64, fillers=3),
    "full attention, evicted to files": Case(pages=20, host_slots=20, fillers=7, files=True),
    "full attention, other weights since": Case(switches=1, is_lost=True),
    "full attention, other weights and back": Case(switches=2),
    "latents (MLA), evicted to the host": Case(pages=20, host_slots=64, fillers=3, latents=True),
}


def manager_for(case: Case, reader: KVEventsReader, folder: Path) -> PagedKVCacheManager:
    """Returns a manager of the case's model, which publishes events for this reader. `folder` is for its files."""
    groups = tuple(LayerGroup(kind, (at,), size) for at, (kind, size) in enumerate(case.kinds))
    params: dict[str, Any] = {"kv_events": KVEvents(ANY, ANY, reader=reader), "groups": groups}
    params |= ({"states": _SHAPE} if case.states else {}) | ({"is_mla": True} if case.latents else {})
    params |= {"file_tier_dir": str(folder), "file_tier_key": "m", "file_tier_max_gb": 1} if case.files else {}
    return manager_of(case.pages, layers=len(groups), checks=False, host_slots=case.host_slots, params=params)


@contextmanager
def folder_of(case: Case) -> Generator[Path]:
    """Yields a folder for a manager's files, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="files" if case.files else "none") as folder:
        yield Path(folder)


def context_of(prompt: Sequence[int], case: Case, *, named: bool = True) -> TextContext:
    """Returns a context of the prompt, with the case's salt and adapter if `named`."""
    keys = ((0, case.adapter.encode()),) if case.adapter and named else ()
    return TextContext(prompt, len(prompt) + 1, cache_salt=case.salt if named else None, extra_keys=keys)


def run(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Runs a prompt in chunks of two pages, and of fewer where its recurrent state is kept."""
    length = context.current_length
    with manager.claim(context):
        while context.start_idx < length:
            context.set_token_indices(active_idx=min(context.start_idx + 2 * PAGE, context.end_idx))
            assert manager.maybe_reserve(context)
            manager.fetch([context])
            for states in manager.states:
                states.advance(states.pages_at([context.request_id], [context.start_idx]), [context.active_idx])
            context.update(1)
            manager.step([context])


def fill(manager: PagedKVCacheManager, case: Case, prompt: Sequence[int] = PROMPT) -> None:
    """Runs the prompt and the fillers, and waits until their events are sent."""
    run(manager, context_of(prompt, case))
    if case.files:
        manager.flush_tiers()  # pages that come faster than the disk takes them are dropped
    for number in range(case.fillers):
        begin = 1_000_000 * (number + 1) + prompt[0]  # other fillers for each prompt: known ones would evict nothing
        run(manager, context_of(range(begin, begin + 33), case))
    settled(manager)
    before = manager.weights
    for number in range(case.switches):
        manager.set_weights(before if number else next(_VERSIONS))
        settled(manager)


def skipped(manager: PagedKVCacheManager, case: Case) -> int:
    """Returns the number of the prompt's blocks that the server skips. A slow disk is asked again."""
    deadline, found = time.monotonic() + (QUIET_S if case.files else 0.0), 0
    while found < len(PROMPT) // PAGE:
        context = context_of(PROMPT, case, named=case.named)
        with manager.claim(context):
            assert manager.maybe_reserve(context)
            found = context.start_idx // PAGE
        if time.monotonic() >= deadline:
            break
    return found


async def by_dynamo(case: Case, reader: KVEventsReader) -> int:
    """Returns the number of blocks that Dynamo's service counts, in any medium."""
    from dynamo.llm import SelectionService

    with folder_of(case) as folder, closing(manager_for(case, reader, folder)) as manager:
        service, (events, replay) = SelectionService(indexer_threads=1), manager.kv_event_endpoints[0]
        told = {"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": PAGE}
        await service.upsert_worker({**told, "kv_events_endpoint": events, "replay_endpoint": replay})
        await asyncio.to_thread(fill, manager, case)
        question: dict[str, Any] = {"model_name": "m", "token_ids": PROMPT}
        if case.named:
            question |= {"cache_salt": case.salt, "lora_name": case.adapter}
        deadline = time.monotonic() + QUIET_S
        found = 0
        while time.monotonic() < deadline:
            answer = await service.overlap_scores(question)
            media = ("device_blocks", "host_pinned_blocks", "disk_blocks")
            found = max((each[medium] for each in answer["workers"] for medium in media), default=0)
            await asyncio.sleep(0.2)
        return found


def by_our_front(manager: PagedKVCacheManager, case: Case) -> int:
    """Returns the number of blocks that the front of `pagewire serve` counts."""
    context: zmq.Context[Any] = zmq.Context()
    holders = PageHolders(context)
    member = msg.Ready(
        name="p",
        page_size=PAGE,
        kv_events=manager.kv_event_endpoints[0][0],
        pulse="at p",
        engines=("p/0",),
        layer_groups=tuple(table.group for table in manager.layer_tables.tables),
        has_states=case.states,
    )
    deadline = time.monotonic() + QUIET_S
    hashes = _hashes(PROMPT, case.salt if case.named else None, "sha256", PAGE)
    try:
        while time.monotonic() < deadline:
            holders.follow([member])
            time.sleep(0.1)
        return holders._followed["p"].tokens_of(hashes) // PAGE
    finally:
        holders.close()
        context.destroy(linger=0)


def by_vllms_router(case: Case, folder: Path) -> bool:
    """Returns whether vLLM's router sends each of 8 prompts to the one of two servers that has it.

    The questions name no salt and no adapter. If the case has fillers, each prompt is asked for after the fillers have
    evicted it: at the server that has it in another medium, or, if it is lost, at the other server, which then has it
    alone.
    """
    with ExitStack() as made:
        managers = [made.enter_context(closing(manager_for(case, "vllm", folder / f"w{at}"))) for at in range(2)]
        servers = [made.enter_context(closing(Server(f"w{number}"))) for number in range(2)]
        streams = [manager.kv_event_endpoints[0] for manager in managers]
        told = {server.url: stream for server, stream in zip(servers, streams, strict=True)}
        router = made.enter_context(closing(Router(told, folder / "log")))
        router.begin()
        prompts = [[*range(5000 + 100 * at, 5000 + 100 * at + 33)] for at in range(PROMPTS)]
        if case.fillers or case.switches:
            return all(is_found(router, managers, case, at, prompt) for at, prompt in enumerate(prompts))
        for at, prompt in enumerate(prompts):
            run(managers[at % 2], context_of(prompt, case))
        for manager in managers:
            settled(manager)
        # by chance, one of 16 million routers would be right three times
        return until_sent(router, prompts, ["w0", "w1"] * (PROMPTS // 2), times=3)


def is_found(router: Router, managers: Sequence[PagedKVCacheManager], case: Case, at: int, prompt: list[int]) -> bool:
    """Returns whether the router sends a prompt to the server that has it after fillers have run."""
    fill(managers[at % 2], case, prompt)
    right = at % 2
    if case.is_lost:
        right = 1 - right
        run(managers[right], context_of(prompt, case))
        settled(managers[right])
    return until_sent(router, [prompt], [f"w{right}"], times=6)


def until_sent(router: Router, prompts: Sequence[list[int]], servers: Sequence[str], times: int) -> bool:
    """Returns whether the router sends the prompts to these servers, once it has had time, `times` times in a row."""
    deadline, right = time.monotonic() + QUIET_S, 0
    while right < times and time.monotonic() < deadline:
        right = right + 1 if [router.ask(one) for one in prompts] == servers else 0
        time.sleep(0.0 if right else 0.2)
    return right == times


async def counts(case: Case) -> dict[str, int | None]:
    """Returns what the server skips, and what Dynamo and the front count."""
    for_vllm, for_dynamo = await asyncio.gather(by_dynamo(case, "vllm"), by_dynamo(case, "dynamo"))
    with folder_of(case) as folder, closing(manager_for(case, "vllm", folder)) as manager:
        await asyncio.to_thread(fill, manager, case)
        front = None if case.adapter else await asyncio.to_thread(by_our_front, manager, case)
        return {"server": skipped(manager, case), "vllm": for_vllm, "dynamo": for_dynamo, "front": front}


def sent(name: str) -> bool | None:
    """Returns the finding of `by_vllms_router`, or None for a case that it does not pose."""
    if (CASES[name].salt or CASES[name].adapter) and CASES[name].named:
        return None
    with tempfile.TemporaryDirectory() as folder:
        return by_vllms_router(CASES[name], Path(folder))


def table() -> str:
    """Returns the table in Markdown, from the measured counts."""
    head = ("what is cached, of 8 blocks", "server skips", "Dynamo 1.6.1", 'Dynamo, `reader="dynamo"`')
    rows = ["| " + " | ".join((*head, "front of `pagewire serve`", "vLLM's router 0.1.17")) + " |", "|---" * 6 + "|"]
    words = {None: "", True: "follows", False: "ignores"}
    for name, found in json.loads(MEASURED.read_text()).items():
        cells = ["" if (one := found[key]) is None else str(one) for key in ("server", "vllm", "dynamo", "front")]
        rows.append("| " + " | ".join([name, *cells, words[found["router"]]]) + " |")
    return "\n".join(rows)


async def all_counts() -> dict[str, dict[str, int | None]]:
    """Returns the counts of all cases, which are measured at the same time."""
    return dict(zip(CASES, await asyncio.gather(*map(counts, CASES.values())), strict=True))


def main() -> None:
    """Measures everything, and writes `routers.json`."""
    assert ROUTER is not None
    found = {name: {**one, "router": sent(name)} for name, one in asyncio.run(all_counts()).items()}
    MEASURED.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
