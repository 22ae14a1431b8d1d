"""What do KV events cost the serving loop, and can a subscriber delay it?

`prefills` times reserve, fetch and step for a prompt in a pool that must evict all of its pages. `decodes` lets each
running request fill a page in such a pool: it times the step that reserves the page, and the one that publishes it. One
run has managers with and without events, several of each, in random order. `us_page_*` is this thread's processor time.
`wall_cost` also includes the work of the publisher, which shares the core in this benchmark.

`loop` times a decode step. Steps follow each other at once, or with a pause as long as a small model runs. There is no
subscriber, or one that reads everything, is slower than the loop, reads nothing, dies half way, or asks for replays as
fast as it can. The loop has a core for itself. The publisher's thread and the subscriber share another one. `missed`
counts the batches that a subscriber did not get because its queue was full. `mib_grown` is the growth of the process in
the second half of the last round, when all event queues are full.
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

from benchmarks.decode_step import bound
from benchmarks.frame import Row, options, pin, report, settle
from benchmarks.pools import Prompts, age, expect, manager_of, reserve, running
from kvcache import KVEvents

ANY = "tcp://127.0.0.1:0"
PAGE = 16
SIDES = 3
"""How many managers with events take part, and as many without.

One of each is not enough, because the addresses of a manager's arrays affect its times more than events do.
"""
KEPT = 50
"""In `loop`: how many batches may wait for a subscriber, and how many are kept for replays."""
PAUSES_MS = (0.0, 1.0)
SUBSCRIBERS = ("off", "none", "reading", "slow", "stopped", "dead", "flooding")
_START_S = 120.0
_STATISTICS = (
    "us_page_*_min and *_median: of n calls by page stored; cost_*: what events add to the minimum and to the median; "
    "us_median, us_p999 and us_max: median, 999th of 1,000 parts and maximum of the n steps of a row"
)


class Prefills:
    """Runs prompts of `pages` pages, one after another, and releases each."""

    def __init__(self, pages: int, told: KVEvents | None) -> None:
        self.pages = pages
        self.manager = manager_of(max(512, 4 * pages), page_size=PAGE, kv_events=told)
        self.prompts = Prompts()
        age(self.manager, self.prompts)

    def store(self) -> tuple[int, int]:
        """Returns the processor time and wall time of one prompt, in ns."""
        context = self.prompts.claimed(self.manager, self.pages * PAGE)

        def run() -> None:
            reserve(self.manager, context)
            self.manager.fetch([context])
            context.update(1)
            self.manager.step([context])

        spent = timed(run)
        self.manager.release(context.request_id)
        return spent


class Decodes:
    """Running requests that fill a page in the same step.

    Times the step in which the requests take a page, and the step that publishes it.
    """

    def __init__(self, requests: int, told: KVEvents | None) -> None:
        self.pages = requests
        self.manager = manager_of(requests * 400, page_size=PAGE, rows=max(requests, 32), kv_events=told)
        self.prompts = Prompts()
        age(self.manager, self.prompts)
        self.begin()

    def begin(self) -> None:
        """New requests."""
        self.contexts = running(self.manager, self.prompts, [PAGE - 1] * self.pages)
        self.step = bound(self.manager, self.contexts)

    def store(self) -> tuple[int, int]:
        """Returns the processor time and wall time of the two steps, in ns."""
        if len(self.contexts[0].tokens) > 300 * PAGE:
            for context in self.contexts:
                self.manager.release(context.request_id)
            self.begin()
        published = timed(self.step)
        reserved = timed(self.step)
        for _ in range(PAGE - 2):
            self.step()
        return published[0] + reserved[0], published[1] + reserved[1]


def timed(call: Callable[[], object]) -> tuple[int, int]:
    """Returns this thread's processor time and the wall time of a call, in ns."""
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    call()
    return time.thread_time_ns() - own, time.perf_counter_ns() - wall


def stores(kind: type[Prefills | Decodes], pages: int, repeats: int) -> Row:
    """One row: the times of managers without events and with events, in random order."""
    made = [(on, kind(pages, KVEvents(ANY, ANY) if on else None)) for _ in range(SIDES) for on in (False, True)]
    for _, each in made * 3:
        each.store()
    settle()
    order = random.Random(0)  # noqa: S311 - nobody guesses it
    spent: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for _ in range(repeats):
        order.shuffle(made)
        for on, each in made:
            spent[on].append(each.store())
    for _, each in made:
        each.manager.close()
    off, on = (np.array(spent[which]) / 1e3 / pages for which in (False, True))
    least = [float(side[:, 0].min()) for side in (off, on)]
    middle, wall = ([float(np.median(side[:, which])) for side in (off, on)] for which in (0, 1))
    return {
        "case": kind.__name__.lower(),
        "pages": pages,
        "us_page_off_min": round(least[0], 3),
        "us_page_on_min": round(least[1], 3),
        "us_page_off_median": round(middle[0], 3),
        "us_page_on_median": round(middle[1], 3),
        "cost_min": round(least[1] - least[0], 3),
        "cost_median": round(middle[1] - middle[0], 3),
        "wall_cost_median": round(wall[1] - wall[0], 3),
        "n": len(on),
    }


def subscriber(kind: str, endpoints: tuple[str, str], ready: Event, over: Event, missed: Synchronized[int]) -> None:
    """Runs a subscriber of this kind until the loop is over."""
    context = zmq.Context()
    # a context's linger applies to all of its sockets, so that closing does not wait for messages to a dead peer
    context.linger = 0
    sub = context.socket(zmq.SUB)
    # such a subscriber's queues are as short as possible, so that messages queue at the publisher
    if kind in ("slow", "stopped"):
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
    """Asks for replays as fast as possible, and reads none."""
    dealers = [context.socket(zmq.DEALER) for _ in range(8)]
    for dealer in dealers:
        dealer.connect(endpoint)
    while not over.is_set():
        for dealer in dealers:
            if dealer.poll(0, zmq.POLLOUT):
                dealer.send_multipart([b"", bytes(8)])
    for dealer in dealers:
        dealer.close()


def loop(kind: str, requests: int, pause_ms: float, steps: int) -> tuple[list[float], int | None, float]:
    """Runs a decode loop.

    Returns the times of its steps in µs, the missed batches, and the growth of the process in MiB.
    """
    processes = multiprocessing.get_context("spawn")
    ready, over, missed = processes.Event(), processes.Event(), processes.Value("q", 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # the threads and processes that are started next get this core
    told = None if kind == "off" else KVEvents(ANY, ANY, hwm=KEPT, buffer_steps=KEPT)
    manager = manager_of(requests * 400, page_size=PAGE, rows=requests, kv_events=told)
    contexts = running(manager, Prompts(), [PAGE] * requests)
    step = bound(manager, contexts)
    process = None
    if kind not in SUBSCRIBERS[:2]:
        given = (kind, manager.kv_event_endpoints[0], ready, over, missed)
        process = processes.Process(target=subscriber, args=given, daemon=True)
        process.start()
        expect(ready.wait(_START_S), f"the subscriber that is {kind} gets a message")
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
        if pause_ms:
            time.sleep(pause_ms / 1e3)
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
    """The resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def loops(requests: int, steps: int, rounds: int) -> list[Row]:
    """Returns a row for each subscriber and each pause.

    The steps of a row come from several alternating rounds, so that machine noise affects all rows.
    """
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
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    rounds, steps, repeats = (1, 1600, 60) if chosen.quick else (3, 3200, 600)
    rows = loops(64, steps, rounds)
    pin()
    rows += [stores(Prefills, pages, repeats * (4 if pages < 100 else 1)) for pages in (1, 16, 128, 1024)]
    rows += [stores(Decodes, requests, repeats) for requests in (1, 16, 64, 256)]
    report("events", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
