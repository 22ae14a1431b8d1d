"""What does `pagewire top` cost: the loop that is watched, the process around it, and the watcher?

A loop that does nothing but decode steps for all of its requests, and takes a new prompt in place of an old one in
every 16th step, over a pool whose other pages are idle: the model takes no time, so every share is an upper bound. It
runs in turns, some seconds each: unwatched, watched by the drawn program at two looks a second, unwatched, and so on.
The loop has one core, the thread that looks and the watcher have the other.

`us_mean` is of all steps of the turns of a row, `us_max` the longest one; `cost` the mean against that of the unwatched
turns. `look_ms` is the processor time of a look in the watched process; `thread_cpu`, `watcher_cpu`: shares of a core.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.frame import Row, now, options, pin, report, settle
from benchmarks.pools import Prompts, age, claimed, expect, manager_of, reserve
from kvcache import PagedKVCacheManager, TextContext
from kvcache.watch import endpoint
from kvcache.watch.endpoint import ManagerWatch
from kvcache.watch.follower import Followed, WatchClient
from scheduler_adapters.top.app import TopApp
from scheduler_adapters.top.sources import LiveSource

PAGE, PROMPT, LONGEST = 16, 512, 32_768
UPDATES = 2.0
TURNED_OVER = 16
FORGET_S = 3.0


def view(address: str, seconds: float) -> None:
    """The watcher: draws for so many seconds, then says what it took, in processor seconds and updates."""
    source = LiveSource([address], UPDATES)
    app = TopApp(source)

    async def stop(_: object) -> None:
        while not app.updates:  # noqa: ASYNC110 - Textual has no event for it
            await asyncio.sleep(0.1)
        started, first = time.process_time(), app.updates
        print("ready", flush=True)
        await asyncio.sleep(seconds)
        print(time.process_time() - started, app.updates - first, flush=True)
        app.exit()

    app.run(headless=True, size=(160, 50), auto_pilot=stop)


class Loop:
    """The requests of a manager, decoded step by step, one of them replaced now and then."""

    def __init__(self, manager: PagedKVCacheManager, prompts: Prompts, batch: int) -> None:
        self.manager, self._prompts = manager, prompts
        self._contexts = [self._new() for _ in range(batch)]
        self._batch, self._tokens = manager.batch(self._contexts), np.ones(batch, np.int32)
        self._steps = 0

    def _new(self) -> TextContext:
        context = claimed(self.manager, self._prompts.tokens(PROMPT))
        reserve(self.manager, context)
        self.manager.fetch([context])
        context.update(1)
        self.manager.step([context])
        return context

    def step(self) -> None:
        """A decode step, or one with a prompt."""
        self._steps += 1
        if self._steps % TURNED_OVER == 0:
            at = self._steps // TURNED_OVER % len(self._contexts)
            self.manager.release(self._contexts[at].request_id)
            self._contexts[at] = self._new()
            self._batch = self.manager.batch(self._contexts)
        self.manager.reserve_batch(self._batch)
        self.manager.fetch(self._batch)
        self._batch.update(self._tokens)
        self.manager.step(self._batch)

    def turn(self, seconds: float) -> list[float]:
        """Microseconds of each step for so long."""
        times, end = list[float](), time.monotonic() + seconds
        while time.monotonic() < end:
            begin = now()
            self.step()
            times.append((now() - begin) / 1e3)
        return times


def looks(watch: ManagerWatch, count: int) -> tuple[float, int, int]:
    """Milliseconds of processor time of a look, and the bytes of a first one and of a later one."""
    client, followed = WatchClient(watch.address), Followed()
    costs, sizes = list[float](), list[int]()
    for _ in range(count):
        client.ask(followed.ask)
        frames = client.answer(60.0)
        expect(frames is not None, "a look is answered")
        costs.append(followed.apply(frames or []).cost_s * 1e3)
        sizes.append(sum(map(len, frames or [])))
        time.sleep(1 / UPDATES)
    client.close()
    return statistics.median(costs), sizes[0], sizes[-1]


def measure(pages: int, batch: int, turns: int, seconds: float) -> list[Row]:
    """The rows of one size."""
    manager, prompts = manager_of(pages, page_size=PAGE, rows=batch, max_seq_len=LONGEST), Prompts()
    age(manager, prompts)
    loop = Loop(manager, prompts, batch)
    with_watch: list[list[float]] = []
    without: list[list[float]] = []
    cpu: list[tuple[float, float]] = []
    endpoint._FORGET_S = FORGET_S  # noqa: SLF001 - else a turn that is unwatched waits for ten seconds
    watch = ManagerWatch(manager)
    other = sorted(os.sched_getaffinity(1))  # of init: all there are
    away = set(other) - os.sched_getaffinity(0) or set(other)
    os.sched_setaffinity(watch._thread.native_id or 0, away)  # noqa: SLF001 - as above
    settle()
    loop.turn(1.0)
    for _ in range(turns):
        without.append(loop.turn(seconds))
        cpu.append(_watched(loop, watch, away, seconds, with_watch))
        time.sleep(FORGET_S + 1)  # nobody looks any more: what was kept for looks is forgotten
    plain = [time for times in without for time in times]
    seen = [time for times in with_watch for time in times]
    look_ms, first, later = looks(watch, 5)
    watch.close()
    expect(manager.metrics.evictions > 0, "pages are evicted all the while")
    shape = {"pages": pages, "batch": batch}
    return [
        {**shape, "loop": "nobody looks", **_of(plain), "cost": 0.0},
        {
            **shape,
            "loop": "two looks a second",
            **_of(seen),
            "cost": round(statistics.mean(seen) / statistics.mean(plain) - 1, 4),
            "look_ms": round(look_ms, 2),
            "thread_cpu": round(look_ms * UPDATES / 1e3, 4),
            "watcher_cpu": round(statistics.median(share for share, _ in cpu), 4),
            "updates_a_second": round(statistics.median(rate for _, rate in cpu), 2),
            "bytes_first": first,
            "bytes_later": later,
        },
    ]


def _watched(
    loop: Loop, watch: ManagerWatch, away: set[int], seconds: float, found: list[list[float]]
) -> tuple[float, float]:
    """A turn while the drawn program looks: its share of a core, and its updates a second."""
    command = [sys.executable, "-m", "benchmarks.watch", "--view", watch.address, str(seconds + 2)]
    program = subprocess.Popen(  # noqa: S603  (our own)
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, away),  # noqa: PLW1509
    )
    if program.stdout is None or program.stdout.readline() != "ready\n":
        raise RuntimeError("the watcher did not start")
    loop.turn(1.0)  # its first look is over
    found.append(loop.turn(seconds))
    used, updates = program.stdout.readline().split()
    program.communicate()
    return float(used) / (seconds + 2), int(updates) / (seconds + 2)


def _of(times: Sequence[float]) -> Row:
    return {
        "us_median": round(statistics.median(times), 2),
        "us_mean": round(statistics.mean(times), 2),
        "us_p99": round(float(np.percentile(times, 99)), 2),
        "us_max": round(max(times), 2),
        "n": len(times),
    }


def main() -> None:
    """Measure and report."""
    if "--view" in sys.argv:
        view(sys.argv[-2], float(sys.argv[-1]))
        return
    chosen = options(__doc__)
    pin()
    small, large = (100_000, 64, 3, 4.0), (4_000_000, 1024, 3, 8.0)
    sizes = [small] if chosen.quick else [small, large]
    rows = [row for size in sizes for row in measure(*size)]
    report("watch", rows, chosen, "columns us_*: median, mean, 99th percentile and maximum of the n steps of a row")


if __name__ == "__main__":
    main()
