"""What do waiting requests cost: a step, adding or aborting a request, and a poll of transfers?

64 requests decode and hold every row of the cache, so no waiting request is admitted. There is no model, so a step is
the time of the loop and the manager. `add` and `abort` are the times to add and to abort one more request at the end of
the queue. The polls are those of the transfer thread, in two cases: pulls whose pages are still being computed, and
pulls whose source does not answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pools import Prompts, expect, manager_of
from benchmarks.pulls.engines import Spec, make
from kvcache import RaggedKVCacheInputs
from kvcache.replica.context import Context
from scheduler_adapters.loop import Request, ServingLoop
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.source import Source
from transfer.wire.handshake import HandshakeServer

RUNNING, PROMPT, PAGE = 64, 256, 16
WAITING = (0, 1, 100, 1000, 10_000)
_NOBODY = "tcp://127.0.0.1:9"


class _NoModel:
    """A model that returns token 1 for every request."""

    eos_token_ids: frozenset[int] = frozenset()

    def run(self, batch: Sequence[Context], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:  # noqa: ARG002 - no model
        """Returns one token for each request."""
        return [1] * len(batch)


def measure(waiting: int, repeats: int) -> list[Row]:
    """The rows for one length of the queue."""
    steps = 4 * repeats + 64
    pages = RUNNING * -(-(PROMPT + steps) // PAGE) * 2
    manager, prompts, names = manager_of(pages, page_size=PAGE, rows=RUNNING), Prompts(), itertools.count()
    loop = ServingLoop(manager, _NoModel(), token_budget=RUNNING * PROMPT)

    def request() -> Request:
        return Request(f"r{next(names)}", prompts.tokens(PROMPT).tolist(), steps)

    for _ in range(RUNNING + waiting):
        loop.add(request())
    loop.step()
    expect((loop.num_running, loop.num_waiting) == (RUNNING, waiting), "the rest waits")
    rows = [("step", samples(repeats, lambda: None, lambda _: loop.step()))]
    rows.append(("add", samples(repeats, request, loop.add)))
    last = [f"r{number}" for number in range(RUNNING + waiting, next(names))]
    rows.append(("abort", samples(repeats, last.pop, loop.abort)))
    expect((loop.num_running, loop.num_waiting) == (RUNNING, waiting), "nothing has ended")
    return [{"running": RUNNING, "waiting": waiting, "call": call, **summary(times)} for call, times in rows]


def measure_polls(waiting: int, repeats: int) -> list[Row]:
    """The rows for `waiting` open pulls, none of which makes progress."""
    rows: list[Row] = []
    source = make(Spec(name="source", layers=1, pages=8))
    with HandshakeServer([source.card]) as server:
        for call, address in (("poll, pages to come", server.endpoint), ("poll, silent source", _NOBODY)):
            replica = make(Spec(name="reader", layers=1, pages=8)).replica
            lease = LeaseRef(new_lease_id(), 0, 600.0)
            for number in range(waiting):
                replica.pull(f"r{number}", Source(address, "source", lease), 600.0)
            while replica.poll() and address != _NOBODY:
                source.replica.poll()
            times = samples(repeats, lambda: None, lambda _, replica=replica: replica.poll())
            expect(replica.num_pulls == (waiting, 0), "no pull has ended")
            rows.append({"running": 0, "waiting": waiting, "call": call, **summary(times)})
            # the source must poll in order to learn of each pull
            for number in range(waiting if address != _NOBODY else 0):
                replica.cancel(f"r{number}", "measured")
                source.replica.poll()
            replica.close()
    source.replica.close()
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    repeats = 50 if chosen.quick else 300
    rows = [row for waiting in WAITING for row in measure(waiting, repeats)]
    report("waiting", rows + [row for waiting in WAITING for row in measure_polls(waiting, 50)], chosen)


if __name__ == "__main__":
    main()
