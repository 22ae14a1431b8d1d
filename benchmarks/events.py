"""What do KV events cost the caller, and does a subscriber ever hold it up?

`prefills`: reserving, fetching and stepping a prompt of so many pages, in a pool that evicts as many for it. `decodes`:
a page of each of so many running requests, in such a pool: the step that reserves it, and the one that publishes it.
With and without events in one run, on the same managers: where a manager's arrays lie changes a time more than events
do, so each is compared with itself, by turns, and writes nothing down in half of them. `us_page_*` is this thread's
processor time. Each store is followed by the next at once, so that the publisher's thread needs the interpreter while
this one does, or by a pause as long as a small model, in which it has that for itself. This one has a core of its own.

`loop` is a decode step of so many requests, back to back or with a pause as long as a small model, while nobody listens
to the events, or somebody does: who reads all, who is slower than the loop, who reads nothing, who dies half way, and
who asks for replays as fast as it can. The loop has a core for itself; the publisher's thread and the subscriber share
another one. `missed` are the batches that a subscriber did not get: its queue was full. `mib_grown` is what the process
grew by in the second half of the last round, when all queues of the events are as long as they may be.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.decode_step import bound
from benchmarks.frame import Row, options, pin, report, settle
from benchmarks.pools import Prompts, age, manager_of, reserve, running
from kvcache import KVEvents, PagedKVCacheManager

ANY = "tcp://127.0.0.1:0"
PAGE = 16
MANAGERS = 3
TURN, SETTLING = 32, 8
"""Stores of a manager with events, then as many without; in the first ones the thread has what the last turn left."""
KEPT = 50
"""Batches that wait for a subscriber, and that are kept for replays, in `loop`."""
PAUSES_MS = (0.0, 1.0)
SUBSCRIBERS = ("off", "none", "reading", "slow", "stopped", "dead", "flooding")
Spent = NDArray[np.float64]
"""Of each store of a turn the processor time and the wall time of a page, in µs."""
_STATISTICS = (
    "us_page_*_min and *_median: of n calls by page stored; cost_min: what events add to the minimum, "
    "cost_median and wall_cost_median: the median of what they add to the median of a turn; "
    "us_median, us_p999 and us_max: median, 999th of 1,000 parts and maximum of the n steps of a row"
)


class Switch:
    """Whether a manager that has events writes them down. Where it does not, it runs what one without events runs."""

    def __init__(self, manager: PagedKVCacheManager) -> None:
        self._all = manager._replicas  # noqa: SLF001 - a manager has no such switch
        self._log = self._all._log  # noqa: SLF001 - as above
        self._append = self._all.each[0].pool.index.log

    def turn(self, *, on: bool) -> None:
        """From now on it writes them down, or not."""
        self._all._log = self._all.each[0].log = self._log if on else None  # noqa: SLF001 - as above
        self._all.each[0].pool.index.log = self._append if on else None


class Prefills:
    """Prompts of `pages` pages, one after another, each released."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.manager = manager_of(max(512, 4 * pages), page_size=PAGE, kv_events=KVEvents(ANY, ANY))
        self.prompts = Prompts()
        age(self.manager, self.prompts)

    def store(self, pause_ms: float) -> tuple[int, int]:
        """Processor time and wall time of one prompt, in ns."""
        context = self.prompts.claimed(self.manager, self.pages * PAGE)

        def run() -> None:
            reserve(self.manager, context)
            self.manager.fetch([context])
            context.update(1)
            self.manager.step([context])

        spent = timed(run)
        self.manager.release(context.request_id)
        wait(pause_ms)
        return spent


class Decodes:
    """Running requests that fill a page all at once, every `PAGE` steps: those where they take one and publish it."""

    def __init__(self, requests: int) -> None:
        self.pages = requests
        events = KVEvents(ANY, ANY)
        self.manager = manager_of(requests * 400, page_size=PAGE, rows=max(requests, 32), kv_events=events)
        self.prompts = Prompts()
        age(self.manager, self.prompts)
        self.begin()

    def begin(self) -> None:
        """New requests."""
        self.contexts = running(self.manager, self.prompts, [PAGE - 1] * self.pages)
        self.step = bound(self.manager, self.contexts)

    def store(self, pause_ms: float) -> tuple[int, int]:
        """Processor time and wall time of the two steps, in ns."""
        if len(self.contexts[0].tokens) > 300 * PAGE:
            for context in self.contexts:
                self.manager.release(context.request_id)
            self.begin()
        published = timed(self.step)
        wait(pause_ms)
        reserved = timed(self.step)
        for _ in range(PAGE - 2):
            self.step()
        return published[0] + reserved[0], published[1] + reserved[1]


def wait(pause_ms: float) -> None:
    """As for a model, which leaves the interpreter to others."""
    if pause_ms:
        time.sleep(pause_ms / 1e3)


def timed(call: Callable[[], object]) -> tuple[int, int]:
    """Processor time of this thread and wall time of a call, in ns."""
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    call()
    return time.thread_time_ns() - own, time.perf_counter_ns() - wall


def stores(kind: type[Prefills | Decodes], pages: int, repeats: int, pause_ms: float) -> Row:
    """One row: pairs of turns, one with events and one without, of one manager after the other."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # for the threads that are started now
    made = [kind(pages) for _ in range(MANAGERS)]
    os.sched_setaffinity(0, cores[-1:])
    switches = [Switch(each.manager) for each in made]
    for each in made * 3:
        each.store(0.0)
    settle()
    order = random.Random(0)  # noqa: S311 - nobody guesses it
    spent: dict[bool, list[Spent]] = {False: [], True: []}
    for pair in range(max(1, repeats // TURN) * MANAGERS):
        at = pair % MANAGERS
        for on in order.sample((False, True), 2):
            switches[at].turn(on=on)
            times = [made[at].store(pause_ms) for _ in range(TURN)][SETTLING:]
            spent[on].append(np.array(times) / 1e3 / pages)
    for each in made:
        each.manager.close()
    os.sched_setaffinity(0, cores)
    off, on = (np.array(spent[which]) for which in (False, True))
    least = [float(side[..., 0].min()) for side in (off, on)]
    middle = [float(np.median(side[..., 0])) for side in (off, on)]
    # Of pairs, as what else the machine does changes a time more than events do, and is the same in both turns.
    own, wall = np.median(np.median(on, axis=1) - np.median(off, axis=1), axis=0)
    return {
        "case": kind.__name__.lower(),
        "pages": pages,
        "pause_ms": pause_ms,
        "us_page_off_min": round(least[0], 3),
        "us_page_on_min": round(least[1], 3),
        "us_page_off_median": round(middle[0], 3),
        "us_page_on_median": round(middle[1], 3),
        "cost_min": round(least[1] - least[0], 3),
        "cost_median": round(float(own), 3),
        "wall_cost_median": round(float(wall), 3),
        "n": on[..., 0].size,
    }


def subscriber(kind: str, endpoints: tuple[str, str], ready: Event, over: Event, missed: Synchronized[int]) -> None:
    """A subscriber of the kind, until the loop is over."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    if kind in ("slow", "stopped"):  # as little as possible waits on this side
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.setsockopt(zmq.RCVBUF, 1 << 12)
    sub.connect(endpoints[0])
    sub.subscribe(b"")
    expected = int.from_bytes(sub.recv_multipart()[1], "big") + 1
    ready.set()
    if kind == "flooding":
        flood(context, endpoints[1], over)
    elif kind == "stopped":
        over.wait()
    while sub.poll(500) or not over.is_set():
        over.wait(0.1 if kind == "slow" else 0)
        if sub.poll(0):
            number = int.from_bytes(sub.recv_multipart()[1], "big")
            missed.value += number - expected
            expected = number + 1


def flood(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, over: Event) -> None:
    """Ask for replays as fast as possible, and read none."""
    dealers = [context.socket(zmq.DEALER) for _ in range(8)]
    for dealer in dealers:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
    while not over.is_set():
        for dealer in dealers:
            if dealer.poll(0, zmq.POLLOUT):
                dealer.send_multipart([b"", bytes(8)])
    for dealer in dealers:
        dealer.close()


def loop(kind: str, requests: int, pause_ms: float, steps: int) -> tuple[list[float], int | None, float]:
    """Times of the steps of a decode loop in µs, what the subscriber missed, and what the process grew by in MiB."""
    processes = multiprocessing.get_context("spawn")
    ready, over, missed = processes.Event(), processes.Event(), processes.Value("q", 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # for what is started now
    told = None if kind == "off" else KVEvents(ANY, ANY, hwm=KEPT, buffer_steps=KEPT)
    manager = manager_of(requests * 400, page_size=PAGE, rows=requests, kv_events=told)
    contexts = running(manager, Prompts(), [PAGE] * requests)
    step = bound(manager, contexts)
    process = None
    if kind not in SUBSCRIBERS[:2]:
        given = (kind, manager.kv_event_endpoints[0], ready, over, missed)
        process = processes.Process(target=subscriber, args=given, daemon=True)
        process.start()
        ready.wait()
    os.sched_setaffinity(0, cores[-1:])
    settle()
    times: list[float] = []
    before = 0.0
    for number in range(steps):
        if number == steps // 2:
            before = resident()
            if process is not None and kind == "dead":
                process.kill()
        started = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - started) / 1e3)
        wait(pause_ms)
    grown = resident() - before
    over.set()
    if process is not None:
        process.join()
    os.sched_setaffinity(0, cores)
    manager.close()
    del manager, contexts, step
    gc.unfreeze()
    gc.collect()
    return times, missed.value if kind in ("reading", "slow", "stopped") else None, grown


def resident() -> float:
    """MiB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def loops(requests: int, steps: int, rounds: int) -> list[Row]:
    """A row for each subscriber and pause, of steps of several rounds, so that all meet the same machine."""
    cases = [(kind, pause) for pause in PAUSES_MS for kind in SUBSCRIBERS]
    times: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    rest: dict[tuple[str, float], tuple[int | None, float]] = {}
    for _ in range(rounds):
        for case in cases:
            some, *others = loop(case[0], requests, case[1], steps)
            times[case] += some
            rest[case] = others[0], others[1]
    return [
        {
            "case": "loop",
            "subscriber": kind,
            "requests": requests,
            "pause_ms": pause,
            "us_median": round(statistics.median(times[kind, pause]), 1),
            "us_p999": round(float(np.percentile(times[kind, pause], 99.9)), 1),
            "us_max": round(max(times[kind, pause]), 1),
            "missed": rest[kind, pause][0],
            "mib_grown": round(rest[kind, pause][1], 1),
            "n": len(times[kind, pause]),
        }
        for kind, pause in cases
    ]


def main() -> None:
    """Run and report."""
    chosen = options(__doc__)
    rounds, steps, repeats = (1, 1600, 60) if chosen.quick else (3, 3200, 600)
    rows = loops(64, steps, rounds)
    more = {1: 4, 16: 2}
    for pause in PAUSES_MS:
        rows += [stores(Prefills, pages, repeats * more.get(pages, 1), pause) for pages in (1, 16, 128, 1024)]
        rows += [stores(Decodes, requests, repeats * more.get(requests, 1), pause) for requests in (1, 16, 64, 256)]
    pin()
    report("events", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
