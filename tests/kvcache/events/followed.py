"""Dynamo's `SelectionService` follows real managers. Every overlap that it reports is compared with their indexes.

`python -m tests.kvcache.events.followed [--managers 8] [--overlaps 10000] [--seed 0]`

Requests share prefixes and evict each other's pages, in the pool, the host tier and the file tier. Managers die and
restart on their addresses, messages are lost, and services join late. When nothing happens any more, three counts must
be right for each prompt: how many of its first pages are on the device, how many after these are in host memory, and
how many after both are in files.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvcache import InvalidParamsError, KVEvents, PagedKVCacheManager, TextContext
from kvcache.replica.hashing import PrefixHasher
from tests.kvcache.build import manager_of
from tests.kvcache.events.mirror import settled, worker_of

PAGE, PAGES, SLOTS = 4, 48, 40
PATIENCE_S = 20.0
ANSWER_S = 60.0  # The time in seconds that a service may take to answer one question.


class LossyWay:
    """Forwards a stream to its subscribers, and drops some of its messages."""

    def __init__(self, seed: int) -> None:
        self._context = zmq.Context()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._sub.subscribe(b"")
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.rate = 0.0  # The fraction of messages that are dropped.
        self.lost = 0
        self._random = random.Random(seed)
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, address: str) -> None:
        self._sub.connect(address)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            if self._sub.poll(50):
                frames = self._sub.recv_multipart()
                if self._random.random() < self.rate:
                    self.lost += 1
                else:
                    self._pub.send_multipart(frames)
        self._sub.close(0)
        self._pub.close(0)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._context.term()


class Worker:
    """Starts, uses, kills and restarts a manager on the same addresses."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self._folder = folder
        self.way = LossyWay(number)
        self.manager = self._made("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.way.start(self.manager.kv_event_endpoints[0][0])

    def _made(self, endpoint: str, replay: str | None) -> PagedKVCacheManager:
        files = {"file_tier_dir": str(self._folder / str(self.number)), "file_tier_key": "m", "file_tier_max_gb": 4e-5}
        events = KVEvents(endpoint, replay, buffer_steps=20)
        return manager_of(
            PAGES, page_size=PAGE, rows=4, checks=False, host_slots=SLOTS, params={"kv_events": events, **files}
        )

    def run(self, tokens: list[int]) -> None:
        context = TextContext(tokens, 256)
        with self.manager.claim(context, 0):
            if self.manager.maybe_reserve(context):
                self.manager.fetch([context])
                context.update(1)
                self.manager.step([context])

    def restart(self) -> None:
        """Restarts the manager as if it had been killed: subscribers do not learn that its pages are gone."""
        (endpoint, replay), worker = self.manager.kv_event_endpoints[0], worker_of(self.manager)
        for stream in worker.streams:
            stream.send = lambda _: None
        self.manager.close()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.manager = self._made(endpoint, replay)
            except InvalidParamsError:  # The sockets of the earlier manager are still being closed.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def overlap(self, tokens: list[int]) -> tuple[int, int, int]:
        """Returns three counts of the prompt's first pages: pages on the device, pages on the device or the host, and
        pages on the device, the host or in files. A page in a file counts only if this process has seen its tokens
        since its start, because a file has only digests.
        """
        count = len(tokens) // PAGE
        digests = PrefixHasher("sha256", PAGE, None, ()).digests(np.array(tokens, np.int32), 0, count)
        tiers, book = self.manager._replicas.tiers, worker_of(self.manager)._book
        assert tiers is not None
        assert tiers.files is not None
        found = [len(self.manager._replicas.each[0].pool.index.match(digests))]
        for index in (tiers.host.pool.index, tiers.files.index):
            rest = digests[found[-1] :]
            pages = len(index.match(rest)) if len(rest) else 0
            ids = book._index.find(rest[:pages, -1:].byteswap())
            unknown = np.flatnonzero(~book._described[ids])
            found.append(found[-1] + (int(unknown[0]) if unknown.size else pages))
        return found[0], found[1], found[2]

    def close(self) -> None:
        self.manager.close()
        self.way.close()


async def answered(asking: Awaitable[Any], what: str) -> Any:
    """Returns the result of a call. If the call takes too long, raises a `TimeoutError` that names the call."""
    try:
        return await asyncio.wait_for(asking, ANSWER_S)
    except TimeoutError:
        raise TimeoutError(f"{what}: no answer for {ANSWER_S:.0f} s") from None


class Followed:
    """Several managers, and the services that follow them."""

    def __init__(self, managers: int, seed: int, folder: Path, make: Callable[[int, Path], Worker] = Worker) -> None:
        self.random = random.Random(seed)
        self.rates = (0.0, 0.05, 0.5)
        self.workers = [make(number, folder) for number in range(1, managers + 1)]
        self.services: list[Any] = []
        self.prompts: list[list[int]] = [[]]
        self.seen: Counter[str] = Counter()
        self.differences: list[str] = []

    async def join(self) -> None:
        """Starts one more service."""
        from dynamo.llm import SelectionService

        service = SelectionService(indexer_threads=1)
        for worker in self.workers:
            told = {
                "worker_id": worker.number,
                "model_name": "m",
                "endpoint": f"http://127.0.0.1:{worker.number}",
                "block_size": PAGE,
                "kv_events_endpoint": worker.way.address,
                "replay_endpoint": worker.manager.kv_event_endpoints[0][1],
            }
            joining = f"service {len(self.services)}: following manager {worker.number}"
            await answered(service.upsert_worker(told), joining)
        self.services.append(service)

    def prompt(self) -> list[int]:
        """Returns a new prompt, or a prompt that begins with the first pages of an earlier prompt and then differs."""
        start = self.random.choice(self.prompts)
        kept = start[: self.random.randint(0, len(start))]
        length = min(150, len(kept) + self.random.randint(5, 50))
        made = kept + [self.random.randint(1, 9999) for _ in range(length - len(kept))]
        self.prompts = [*self.prompts[-60:], made]
        return made

    def work(self, requests: int) -> None:
        for _ in range(requests):
            worker = self.random.choice(self.workers)
            worker.run(self.prompt() if self.random.random() < 0.7 else self.random.choice(self.prompts[1:] or [[1]]))
            if self.random.random() < 0.05:
                worker.manager.flush_tiers()
            if self.random.random() < 0.004:
                worker.manager.reset_prefix_cache()
                self.seen["resets"] += 1

    async def round(self, requests: int, compared: int) -> None:
        """Runs requests with losses and a restart, waits until the streams are quiet, and compares."""
        for worker in self.workers:
            worker.way.rate = self.random.choice(self.rates)
        await asyncio.to_thread(self.work, requests)
        if self.random.random() < 0.5:
            await asyncio.to_thread(self.random.choice(self.workers).restart)
            self.seen["restarts"] += 1
            await asyncio.to_thread(self.work, requests // 4)
        for worker in self.workers:
            worker.way.rate = 0.0
            await asyncio.to_thread(settled, worker.manager)
        await self.compare(compared)

    async def compare(self, count: int) -> None:
        """Compares `count` overlaps of each service with each manager. If an overlap differs, the service gets some
        time to learn the right overlap. All overlaps of a round share this time, because a service that no longer
        follows a manager would otherwise delay every overlap.
        """
        deadline = time.monotonic() + PATIENCE_S
        for tokens in self.random.choices(self.prompts[1:], k=-(-count // len(self.workers))):
            want = {worker.number: worker.overlap(tokens) for worker in self.workers}
            self.seen["pages"] += sum(found[2] for found in want.values())
            for at, service in enumerate(self.services):
                have = await self.asked(service, tokens)
                while have != want and time.monotonic() < deadline:
                    await asyncio.sleep(0.05)
                    have = await self.asked(service, tokens)
                self.seen["compared"] += len(want)
                self.differences += [
                    f"service {at}, manager {number}: {have.get(number)} told, {there} there"
                    for number, there in want.items()
                    if have.get(number) != there
                ]

    async def asked(self, service: Any, tokens: list[int]) -> dict[int, tuple[int, int, int]]:
        asking = service.overlap_scores({"model_name": "m", "token_ids": tokens})
        told = await answered(asking, f"service {self.services.index(service)}: overlaps of {len(tokens)} tokens")
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        return {each["worker_id"]: tuple(each[name] for name in names) for each in told["workers"]}  # type: ignore[misc]

    def close(self) -> None:
        for worker in self.workers:
            self.seen["lost"] += worker.way.lost
            self.seen["evictions"] += worker.manager.metrics.evictions
            worker.close()


async def follow(managers: int, overlaps: int, rounds: int, seed: int, requests: int = 120) -> Followed:
    """Runs the rounds. One service exists from the beginning, and a second service joins after half of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        followed = Followed(managers, seed, Path(folder))
        try:
            await followed.join()
            for number in range(rounds):
                if number == rounds // 2:
                    await followed.join()
                each = -(-(overlaps - followed.seen["compared"]) // (rounds - number)) // len(followed.services)
                await followed.round(requests, each)
        finally:
            followed.close()
    return followed


def main() -> None:
    """Runs the comparison, and prints what was compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--managers", type=int, default=8)
    parser.add_argument("--overlaps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    followed = asyncio.run(follow(chosen.managers, chosen.overlaps, chosen.rounds, chosen.seed))
    print(f"{chosen.managers} managers: {dict(followed.seen)}, {len(followed.differences)} differ")  # noqa: T201 - a script
    for difference in followed.differences[:10]:
        print(difference)  # noqa: T201 - as above
    raise SystemExit(bool(followed.differences))


if __name__ == "__main__":
    main()
