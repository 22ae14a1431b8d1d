"""What does `pagewire top` cost the loop that it watches, that loop's process, and itself?

A loop decodes all of its requests, and replaces one of them by a new prompt in every 16th step. All other pages of its
pool are idle. The loop runs in turns of some seconds, of three kinds. In the first kind nothing watches. In the second
kind a `pagewire top` watches another process of the same size. In the third kind that program watches the loop, with
two snapshots a second. The second kind is needed because two cores of one chip affect each other. The loop has one
core. The watching threads and the program share the other. `model_ms` is the time that each step waits for its model.
With 0 the loop does nothing but watched work, so each share is an upper bound. `us_mean` and `us_max` are the mean and
the longest step of a row, without the model. `cost` is what watching adds to the loop's time including the model,
compared with the second kind of turn. `look_ms` is the processor time of a snapshot in the watched process.
`thread_cpu` and `watcher_cpu` are shares of a core.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from benchmarks.frame import Row, now, options, pin, report, settle
from benchmarks.pools import Prompts, age, claimed, expect, manager_of, reserve
from kvcache import PagedKVCacheManager, TextContext
from kvcache.endpoints import watch as endpoint
from kvcache.endpoints.follower import Followed, WatchClient
from kvcache.endpoints.watch import ManagerWatch
from pagewire.top.app import TopApp
from pagewire.top.sources import LiveSource

PAGE, PROMPT, LONGEST = 16, 512, 32_768
UPDATES = 2.0
TURNED_OVER = 16
FORGET_S = 3.0
MODELS_MS = (0.0, 10.0)
SIDES = ("nobody looks", "somebody looks at another process", "two looks a second")


def view(address: str, seconds: float) -> None:
    """Runs the watcher: draws for `seconds`, and then reports its processor seconds and the number of its updates."""
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
    """Decodes the requests of a manager step by step, and replaces one of them now and then."""

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
        """Runs a decode step, or a step with a prompt."""
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

    def turn(self, seconds: float, model_s: float) -> list[float]:
        """Runs for `seconds`. Returns the microseconds of each step without the model."""
        times, end = list[float](), time.monotonic() + seconds
        while time.monotonic() < end:
            begin = now()
            self.step()
            times.append((now() - begin) / 1e3)
            if model_s:
                time.sleep(model_s)
        return times


def grown(pages: int, batch: int) -> tuple[PagedKVCacheManager, Prompts]:
    """A manager whose pages are all in use or idle."""
    manager, prompts = manager_of(pages, page_size=PAGE, rows=batch, max_seq_len=LONGEST), Prompts()
    age(manager, prompts)
    return manager, prompts


def be_looked_at(pages: int, batch: int) -> None:
    """Runs an idle process of this size, which exits when its standard input is closed."""
    manager, prompts = grown(pages, batch)
    kept = Loop(manager, prompts, batch)
    with closing(ManagerWatch(kept.manager)) as watch:
        print(watch.address, flush=True)
        sys.stdin.read()


@contextmanager
def beside(pages: int, batch: int, cores: set[int]) -> Generator[str]:
    """Starts a process that runs `be_looked_at`. Yields its address."""
    with subprocess.Popen(  # noqa: S603  (our own)
        [sys.executable, "-m", "benchmarks.watch", "--be-looked-at", str(pages), str(batch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509
    ) as process:
        if process.stdout is None:
            raise RuntimeError("no output")
        yield process.stdout.readline().strip()
        process.communicate("")


def looks(watch: ManagerWatch, count: int) -> tuple[float, int, int]:
    """Returns the milliseconds of processor time of a snapshot, and the bytes of the first and of a later snapshot."""
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
    """The rows for one size."""
    other = sorted(os.sched_getaffinity(1))  # the cores of init, which are all cores
    away = set(other) - os.sched_getaffinity(0) or set(other)
    manager, prompts = grown(pages, batch)
    loop = Loop(manager, prompts, batch)
    endpoint._FORGET_S = FORGET_S  # noqa: SLF001 - else a turn that is unwatched waits for ten seconds
    rows = list[Row]()
    with closing(ManagerWatch(manager)) as watch, beside(pages, batch, away) as still:
        os.sched_setaffinity(watch._thread.native_id or 0, away)  # noqa: SLF001 - as above
        settle()
        loop.turn(1.0, 0.0)
        for model_ms in MODELS_MS:
            found = _turns(loop, (still, watch.address), away, turns, seconds, model_ms / 1e3)
            rows += _rows({"pages": pages, "batch": batch, "model_ms": model_ms}, *found)
        look_ms, first, later = looks(watch, 5)
        rows[-1].update(look_ms=round(look_ms, 2), thread_cpu=round(look_ms * UPDATES / 1e3, 4))
        rows[-1].update(bytes_first=first, bytes_later=later)
    expect(manager.metrics.evictions > 0, "pages are evicted all the while")
    return rows


def _turns(
    loop: Loop, addresses: Sequence[str], away: set[int], turns: int, seconds: float, model_s: float
) -> tuple[list[list[float]], list[tuple[float, float]]]:
    """The times of each kind of turn (unwatched, beside the program, watched), and the program's share of a core."""
    times: list[list[float]] = [[], [], []]
    cpu = list[tuple[float, float]]()
    for _ in range(turns):
        times[0] += loop.turn(seconds, model_s)
        for at, address in enumerate(addresses, 1):
            more, took = _watched(loop, address, away, seconds, model_s)
            times[at] += more
            cpu.append(took)
            # if no snapshot is requested for this long, the data kept for snapshots are dropped
            time.sleep(FORGET_S + 1)
    return times, cpu[1::2]


def _rows(shape: Row, times: Sequence[Sequence[float]], cpu: Sequence[tuple[float, float]]) -> list[Row]:
    rows: list[Row] = [{**shape, "loop": name, **_of(some)} for name, some in zip(SIDES, times, strict=True)]
    without, seen = (statistics.mean(some) / 1e3 + shape["model_ms"] for some in times[1:])
    rows[-1].update(
        cost=round(seen / without - 1, 4),
        watcher_cpu=round(statistics.median(share for share, _ in cpu), 4),
        updates_a_second=round(statistics.median(rate for _, rate in cpu), 2),
    )
    return rows


def _watched(
    loop: Loop, address: str, away: set[int], seconds: float, model_s: float
) -> tuple[list[float], tuple[float, float]]:
    """Runs a turn of the loop while a second process, the watching program, shows the manager at `address`.

    Returns the microseconds of each step of the loop. Also returns two figures of the watching program: the share of a
    core that it used, and how often per second it redrew its display.
    """
    program = subprocess.Popen(  # noqa: S603  (our own)
        [sys.executable, "-m", "benchmarks.watch", "--view", address, str(seconds + 2)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, away),  # noqa: PLW1509
    )
    if program.stdout is None or program.stdout.readline() != "ready\n":
        raise RuntimeError("the watcher did not start")
    loop.turn(1.0, model_s)  # the watcher's first snapshot falls into this turn, which is not measured
    times = loop.turn(seconds, model_s)
    used, updates = program.stdout.readline().split()
    program.communicate()
    return times, (float(used) / (seconds + 2), int(updates) / (seconds + 2))


def _of(times: Sequence[float]) -> Row:
    return {
        "us_median": round(statistics.median(times), 2),
        "us_mean": round(statistics.mean(times), 2),
        "us_p99": round(float(np.percentile(times, 99)), 2),
        "us_max": round(max(times), 2),
        "n": len(times),
    }


def main() -> None:
    """Runs the benchmark and reports its rows."""
    if "--view" in sys.argv:
        view(sys.argv[-2], float(sys.argv[-1]))
        return
    if "--be-looked-at" in sys.argv:
        be_looked_at(int(sys.argv[-2]), int(sys.argv[-1]))
        return
    chosen = options(__doc__)
    pin()
    small, large = (100_000, 64, 3, 4.0), (4_000_000, 1024, 3, 8.0)
    sizes = [small] if chosen.quick else [small, large]
    rows = [row for size in sizes for row in measure(*size)]
    report("watch", rows, chosen, "columns us_*: median, mean, 99th percentile and maximum of the n steps of a row")


if __name__ == "__main__":
    main()
