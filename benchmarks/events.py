"""What do KV events cost the caller, and does a subscriber ever hold it up?

`prefills`: reserving, fetching and stepping a prompt of so many pages, in a pool that evicts as many for it. `decodes`:
a step in which each of so many requests fills a page. With and without events in one run, in turn, so that both meet
the same machine; the time is this thread's processor time, and beside it wall time, in which the publisher's thread
takes its turns.

`loop` is a decode step of 64 requests, reserved, fetched and stepped, while nobody listens, or somebody does who
reads all, is stopped (connected, reads nothing), or asks for replays as fast as it can: the longest step says whether
the loop ever waits.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event

import numpy as np
import zmq

from benchmarks.frame import Row, options, pin, report, settle
from benchmarks.pools import Prompts, claimed, manager_of, reserve
from kvcache import KVEvents, PagedKVCacheManager, TextContext

ANY = "tcp://127.0.0.1:0"
PAGE = 16
_STATISTICS = (
    "us_page_*: medians over n calls, of this thread's processor time and of wall time, by page stored; cost_us_page: "
    "what events add (off and on in turn); us_*: median, 99th of 100 parts and maximum of the n steps of a row"
)
READERS = ("none", "reading", "stopped", "flooding")


def events() -> KVEvents:
    """On free ports of this host."""
    return KVEvents(ANY, ANY)


class Prefills:
    """Prompts of `pages` pages, one after another, each released."""

    def __init__(self, pages: int, told: KVEvents | None) -> None:
        self.pages = pages
        self.manager = manager_of(max(512, 4 * pages), page_size=PAGE, kv_events=told)
        self.prompts = Prompts()

    def store(self) -> tuple[int, int]:
        """Processor time and wall time of one prompt, in ns."""
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
    """Running requests that fill a page all at once, every `PAGE` steps: the step that publishes is timed."""

    def __init__(self, requests: int, told: KVEvents | None) -> None:
        self.pages = requests
        self.manager, self.contexts = running(requests, told)
        self.batch, self.tokens = self.manager.batch(self.contexts), np.ones(requests, np.int32)

    def store(self) -> tuple[int, int]:
        """Processor time and wall time of one step, in ns."""
        while True:
            self.manager.reserve_batch(self.batch)
            self.manager.fetch(self.batch)
            self.batch.update(self.tokens)
            spent = timed(lambda: self.manager.step(self.batch))
            if int(self.batch.starts[0]) % PAGE == 0:
                return spent


def running(requests: int, told: KVEvents | None) -> tuple[PagedKVCacheManager, list[TextContext]]:
    """Requests whose prompts are computed, and room for what they generate."""
    manager = manager_of(requests * 400, page_size=PAGE, rows=requests, kv_events=told)
    prompts = Prompts()
    contexts = [claimed(manager, prompts.tokens(PAGE)) for _ in range(requests)]
    for context in contexts:
        reserve(manager, context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    return manager, contexts


def timed(call: Callable[[], object]) -> tuple[int, int]:
    """Processor time of this thread and wall time of a call, in ns."""
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    call()
    return time.thread_time_ns() - own, time.perf_counter_ns() - wall


def stores(kind: type[Prefills | Decodes], pages: int, repeats: int) -> Row:
    """One row: off and on in turn."""
    both = [kind(pages, None), kind(pages, events())]
    for each in both * 3:
        each.store()
    settle()
    spent = np.array([[each.store() for each in both] for _ in range(repeats)]) / 1e3 / pages
    own, wall = np.median(spent[:, :, 0], axis=0), np.median(spent[:, :, 1], axis=0)
    for each in both:
        each.manager.close()
    return {
        "case": kind.__name__.lower(),
        "pages": pages,
        "us_page_off": round(float(own[0]), 3),
        "us_page_on": round(float(own[1]), 3),
        "cost_us_page": round(float(np.median(spent[:, 1, 0] - spent[:, 0, 0])), 3),
        "wall_cost_us_page": round(float(wall[1] - wall[0]), 3),
        "n": repeats,
    }


def subscriber(kind: str, endpoints: tuple[str, str], ready: Event) -> None:
    """A subscriber of the kind, until it is killed."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, 10 if kind == "stopped" else 1000)
    sub.connect(endpoints[0])
    sub.subscribe(b"")
    sub.recv_multipart()
    dealers = [context.socket(zmq.DEALER) for _ in range(8 if kind == "flooding" else 0)]
    for dealer in dealers:
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.connect(endpoints[1])
    ready.set()
    while True:
        if kind == "reading":
            sub.recv_multipart()
        elif kind == "stopped":
            time.sleep(1)
        for dealer in dealers:
            dealer.send_multipart([b"", bytes(8)])


def loop(kind: str, requests: int, steps: int) -> Row:
    """One row: steps of a decode loop under such a subscriber; `off`: without events."""
    manager, contexts = running(requests, None if kind == "off" else events())
    batch, tokens = manager.batch(contexts), np.ones(requests, np.int32)
    processes = multiprocessing.get_context("spawn")
    process = None
    if kind in READERS[1:]:
        ready = processes.Event()
        endpoint, replay = manager.kv_event_endpoints[0]
        process = processes.Process(target=subscriber, args=(kind, (endpoint, replay or ""), ready), daemon=True)
        process.start()
        ready.wait()
    settle()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter_ns()
        manager.reserve_batch(batch)
        manager.fetch(batch)
        batch.update(tokens)
        manager.step(batch)
        times.append((time.perf_counter_ns() - started) / 1e3)
        time.sleep(0.001)  # the model runs
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if process is not None:
        process.kill()
        process.join()
    manager.close()
    return {"subscriber": kind, "requests": requests, **spread(times), "mib_grown": grown, "n": steps}


def spread(times: Sequence[float]) -> Row:
    """Median, 99th of 100 parts and maximum."""
    return {
        "us_median": round(statistics.median(times), 1),
        "us_p99": round(float(np.percentile(times, 99)), 1),
        "us_max": round(max(times), 1),
    }


def main() -> None:
    """Run and report."""
    chosen = options(__doc__)
    pin()
    repeats, steps = (100, 2000) if chosen.quick else (300, 6000)
    rows = [stores(Prefills, pages, repeats) for pages in (1, 16, 128, 1024)]
    rows += [stores(Decodes, requests, repeats) for requests in (1, 16, 64, 256)]
    rows += [loop(kind, 64, steps) for kind in ("off", *READERS)]
    report("events", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
