"""Tests the jobs that a lower tier gives to its threads. The tier takes results in order. The slots of a job become
free whatever the result is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcache.pool.pages_below import Slots
from kvcache.tiers.host_tier import HostTier, Job, LowerTier, TierThread
from tests.kvcache.tiers.test_host_tier_lower import OBJECT, UNKNOWN, Tier, mask, names


class Failing(Tier):
    """A tier that records the errors after which a real tier would pause."""

    def _fail(self, error: OSError) -> None:
        self.noted.append(("failed", str(error)))


class Thread(TierThread):
    """A substitute for the threads of a tier. The test decides when each job runs, and in which order."""

    def __init__(self) -> None:
        super().__init__("test")
        self.begun: list[Callable[[], Any]] = []

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        self.begun.append(partial(call, *given))
        return Future()


class Begun:
    """A read or a write that was begun. The test runs it later."""

    def __init__(self, job: Job, work: Callable[[], Any]) -> None:
        self.job, self._work = job, work

    def run(self) -> None:
        try:
            self.job.work.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - as a thread does
            self.job.work.set_exception(error)


class Work:
    """A tier over a host tier with five slots. Its jobs end when the test says so."""

    def __init__(self) -> None:
        self.host = HostTier([8, 4], 5, 2, pinned=False)
        self.tier = Failing(self.host, [])
        self.threads = self.tier._reader, self.tier._writer
        self.tier._reader, self.tier._writer = Thread(), Thread()

    def begin(
        self,
        name: str,
        slots: int = 1,
        *,
        writes: bool = False,
        raises: Exception | None = None,
        take_raises: Exception | None = None,
    ) -> Begun:
        """Begins a read or a write that holds `slots` slots. Running it may raise `raises`, and taking its result may
        raise `take_raises`.
        """

        def work() -> str:
            if raises is not None:
                raise raises
            return name

        def take(found: str) -> None:
            self.tier.noted.append(("took", found))
            if take_raises is not None:
                raise take_raises

        thread: Any = self.tier._writer if writes else self.tier._reader
        self.tier._begin_job(thread, work, take, self.host.pool.allocate(slots))
        return Begun(thread.jobs[-1], thread.begun[-1])

    def take_up(self) -> None:
        self.tier._take_up(self.tier._reader, self.tier._writer)

    @property
    def free(self) -> int:
        return self.host.pool.free_count


def test_a_new_tier_has_zero_counts_and_asks_nothing() -> None:
    tier = Work().tier
    assert (tier.written, tier.read, tier.refusals.total(), tier.held_slots) == (0, 0, 0, [])
    assert LowerTier.asks is False
    assert LowerTier.ask(tier, names(OBJECT, UNKNOWN), mask()) is False


def test_results_are_taken_in_the_order_in_which_the_work_began() -> None:
    work = Work()
    first, second, write = work.begin("first"), work.begin("second", 2), work.begin("write", writes=True)
    assert [slots.tolist() for slots in work.tier.held_slots] == [[1], [2, 3], [4]]
    second.run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([], 1)
    write.run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([("took", "write")], 2)
    first.run()
    work.take_up()
    assert work.tier.noted[1:] == [("took", "first"), ("took", "second")]
    assert (work.free, work.tier.held_slots) == (5, [])


def test_work_without_slots_frees_none() -> None:
    work = Work()
    work.begin("looks up", 0).run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([("took", "looks up")], 5)


def test_an_error_of_the_system_pauses_the_tier_and_frees_the_slots() -> None:
    work = Work()
    work.begin("reads", 2, raises=OSError("no device")).run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([("failed", "no device")], 5)


def test_cancelled_work_is_skipped() -> None:
    work = Work()
    assert work.begin("cancelled").job.work.cancel()
    work.begin("next").run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([("took", "next")], 5)


@pytest.mark.parametrize("error", [None, OSError("no device"), ValueError("of a thread")])
def test_a_dropped_result_is_not_taken_and_its_slots_are_free(error: Exception | None) -> None:
    work = Work()
    begun = work.begin("reads", 2, raises=error)
    begun.job.dropped = True
    begun.run()
    work.take_up()
    assert (work.tier.noted, work.free) == ([], 5)


def test_waiting_for_work_ends_after_the_time_given() -> None:
    work = Work()
    begun = work.begin("reads")
    begun.job.wait(0.001)
    assert not begun.job.work.done()
    begun.run()
    begun.job.wait()
    assert begun.job.work.done()


@pytest.mark.parametrize("taking", [True, False])
def test_other_errors_of_work_reach_the_caller_and_its_slots_are_free(taking: bool) -> None:
    """An `OSError` in a thread's job pauses the tier. Any other error is raised to the caller. An `OSError` while the
    result is taken is raised to the caller, too.
    """
    work = Work()
    if taking:
        work.begin("raises", 2, take_raises=OSError("of a signal handler")).run()
    else:
        work.begin("raises", 2, raises=ValueError("of a thread")).run()
    work.begin("next").run()
    with pytest.raises(OSError if taking else ValueError, match="of a"):
        work.take_up()
    assert work.free == 4
    work.take_up()
    assert work.tier.noted[-1] == ("took", "next")
    assert work.free == 5


def test_after_an_interrupt_work_is_forgotten_and_stopping_needs_no_thread() -> None:
    work = Work()
    work.begin("read")
    work.begin("write", writes=True)
    for thread, ours in zip(work.threads, (work.tier._reader, work.tier._writer), strict=True):
        thread.jobs.extend(ours.jobs)
    work.tier._reader, work.tier._writer = work.threads
    ran: list[int] = []
    work.tier._reader.submit(ran.append, 1)
    work.tier.stop()
    assert ran == [1]
    work.tier.restart()
    assert work.tier.held_slots == []
    for thread in work.threads:
        thread.shutdown()
    work.tier.stop()


def test_a_slot_has_one_part_in_the_memory_of_each_shard() -> None:
    host = Work().host
    slots: Slots = np.array([2, 5], np.int32)
    for slot, (first, second) in zip((2, 5), host.parts(slots), strict=True):
        assert (len(first), len(second)) == (8, 4)
        first[:], second[:] = slot, slot + 10
    first, second = (np.asarray(memory)[:, -1] for memory in host.memory)
    assert [*map(int, first)] == [0, 0, 2, 0, 0, 5]
    assert [*map(int, second)] == [0, 0, 12, 0, 0, 15]


def test_a_thread_of_a_tier_runs_its_jobs_one_after_the_other() -> None:
    may_end = threading.Event()
    with TierThread("test") as thread:
        first = thread.submit(may_end.wait, 50)
        second = thread.submit(first.done)
        wait([second], 0.1)
        may_end.set()
        assert second.result()
