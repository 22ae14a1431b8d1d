"""The work of a file tier's two threads: what begins it, what its results change, and what ends it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import KVCacheMetrics
from kvcache.tiers import file_tier as module
from kvcache.tiers.file_tier import NO_ENTRY, FileTier
from kvcache.tiers.page_files import SystemIO
from kvcache.tiers.page_folder import Scan
from tests.kvcache.tiers.test_file_tier import (
    PROMPT,
    Make,
    SlowReads,
    damage,
    down,
    files_of,
    page_files,
    served,
    slow,
    written,
)

LONGEST_WAIT_S = module._LONGEST_WAIT_S  # The fixture sets a longer one.
__all__ = ["served"]  # the fixture
EVERY = np.ones((1, 4), np.bool_)  # a mask of the prompt's pages


def read(files: FileTier) -> None:
    """Waits until the thread has read, without a call of the tier that takes up the result."""
    SlowReads.may.set()
    for job in files._reader.jobs:
        job.wait()


@pytest.mark.parametrize("asked", ["has_of", "brings"])
def test_each_question_notices_a_read_that_has_ended(served: Make, tmp_path: Path, asked: str) -> None:
    again = slow(served)
    files, digests = files_of(again), again.digests(PROMPT)[None]
    (path,) = page_files(tmp_path)
    damage(files, path, "noise", np.random.default_rng(0))
    files.fetch(digests, EVERY, wait=False, gain=4)
    assert files.has_of(digests, EVERY, perhaps=False).all()
    assert files.brings(digests, EVERY)
    read(files)
    if asked == "has_of":
        assert not files.has_of(digests, EVERY, perhaps=False).any()
    else:
        assert not files.brings(digests, EVERY)
    assert not files._reader.jobs
    assert again.manager.metrics.file_blocks_refused == 4


def test_a_run_of_which_only_some_pages_are_being_read_is_worth_waiting_for(served: Make) -> None:
    again = slow(served)
    files, digests = files_of(again), again.digests(PROMPT)[None]
    first = np.array([[True, True, False, False]])
    files.fetch(digests, first, wait=False, gain=2)
    assert files.brings(digests, EVERY)
    assert not files.brings(digests, EVERY & ~first)
    SlowReads.may.set()


def test_a_page_that_is_being_read_is_not_read_twice(served: Make) -> None:
    again = slow(served)
    files, digests = files_of(again), again.digests(PROMPT)[None]
    for _ in range(2):
        files.fetch(digests, EVERY, wait=False, gain=4)
        assert [len(job.slots) for job in files._reader.jobs] == [4]
    read(files)
    files.tick()
    files.fetch(digests, EVERY, wait=False, gain=4)
    assert not files._reader.jobs, "the host has the pages"
    assert again.manager.metrics.file_blocks_read == 4


def test_a_file_that_is_read_counts_as_used_though_no_request_has_used_its_pages(served: Make, tmp_path: Path) -> None:
    it = served()
    for first in (1, 2, 3):
        it.serve([first, *PROMPT])
        down(it)
        for path in page_files(tmp_path):  # two files that are written within one tick of the clock have no order
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
    it.manager.close()
    again = served()
    files, digests = files_of(again), again.digests([1, *PROMPT])[None]
    before = list(files._index._files)
    files.fetch(digests, EVERY, wait=True, gain=4)
    assert list(files._index._files) == [*before[1:], before[0]]


def test_a_read_touches_no_file_behind_a_link(served: Make, tmp_path: Path) -> None:
    written(served)
    again, (path,) = served(), page_files(tmp_path)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    os.utime(elsewhere, (1000, 1000))
    assert again.serve(PROMPT) == 0
    assert elsewhere.stat().st_mtime == 1000


@pytest.mark.parametrize("seed", range(5))
def test_pages_leave_the_queue_in_the_order_of_their_offers(served: Make, seed: int) -> None:
    files, random = files_of(served()), np.random.default_rng(seed)
    offers = [np.full((count, 4), at, np.uint64) for at, count in enumerate(random.integers(1, 5, 6).tolist())]
    pages = np.concatenate(offers)[:, 0].tolist()
    for count in (*range(len(pages) + 1), 1):
        files._queue.clear()
        files._queue.extend((float(at), offer) for at, offer in enumerate(offers))
        files._unqueue(count)
        left = [(when, page) for when, offer in files._queue for page in offer[:, 0].tolist()]
        assert left == [(float(page), page) for page in pages[count:]]
        assert all(len(offer) for _, offer in files._queue)
    files._queue.clear()


def test_after_a_failed_write_the_pages_that_still_wait_are_not_written_either(served: Make) -> None:
    tried = list[int]()

    class Full(SystemIO):
        def write(self, *_: Any) -> None:
            tried.append(1)
            raise OSError(28, "No space left on device")

    it = served(8, 8, io=lambda memory: Full())
    assert files_of(it).pages_a_file == 2
    it.serve(PROMPT)
    down(it)
    assert len(tried) == 1, "the prompt has pages for two files"
    assert not files_of(it)._queue


def test_a_queue_that_is_not_full_waits_for_a_second(served: Make) -> None:
    it = served(16, 40)
    files, now = files_of(it), 100.0
    files._clock = lambda: now
    it.serve(PROMPT)
    it.tiers.store_all()
    for passed, writes in ((0.0, False), (1.0, False), (1.0 + 1e-9, True)):
        now = 100.0 + passed
        files.tick()
        assert bool(files._writer.jobs) == writes


@pytest.mark.parametrize(("offered", "writes"), [(3, False), (4, True)])
def test_a_queue_for_a_whole_file_is_written_at_once(served: Make, offered: int, writes: bool) -> None:
    it = served(8, 16)
    files = files_of(it)
    assert files.pages_a_file == 4
    files._clock = lambda: 100.0
    it.serve(PROMPT)
    it.tiers.store_all()
    files._queue.clear()
    files.offer(it.digests(PROMPT)[:offered])
    files.tick()
    assert bool(files._writer.jobs) == writes


def test_the_folder_is_scanned_every_five_seconds_and_after_a_recovery(served: Make) -> None:
    it = served()
    now, files = 100.0, files_of(it)
    files._clock = lambda: now
    files._scanned = now
    it.serve(PROMPT)
    down(it)
    pages = it.digests(PROMPT)

    def scanned() -> bool:
        files.tick()
        begun = bool(files._writer.jobs)
        files.flush()
        return begun

    for passed, scans in ((5.0, False), (0.1, True), (4.9, False), (0.2, True)):
        now += passed
        assert scanned() == scans
    files.stop()
    files.restart()
    assert not files._index.names
    assert (files.index.find(pages) == NO_ENTRY).all()
    now += 0.1
    assert scanned()
    assert (files.index.find(pages) != NO_ENTRY).all()
    now += 4.9
    assert not scanned()


def test_a_scan_changes_nothing_in_known_files_and_finds_none_that_is_too_large(served: Make) -> None:
    it = served(8, 40, gb=4000 / 2**30)
    it.serve(PROMPT)
    down(it)
    files, pages = files_of(it), it.digests(PROMPT)
    ((name, file),) = files._index._files.items()
    files._index.drop(files._index.find(pages)[1:2])
    names = files._layout.names(pages, np.zeros(len(pages), np.intp))
    others = names.copy()
    others[:, 0] += 1
    generation = files.generation
    files._take_up_scan(Scan([(name, file.size, names), ("f" * 32 + ".pages", 4001, others)], []))
    assert files._index.names == {name}
    assert (files._index.find(pages) == NO_ENTRY).tolist() == [False, True, False, False]
    assert files.generation == generation
    files._take_up_scan(Scan([("f" * 32 + ".pages", 4000, others)], []))
    assert files._index.names == {"f" * 32 + ".pages"}
    files._index.clear()


def test_a_reset_removes_the_folder_with_the_old_files(served: Make) -> None:
    it = served()
    it.serve(PROMPT)
    down(it)
    old = files_of(it)._folder.path
    assert page_files(old)
    it.serve([7, *PROMPT])
    it.tiers.store_all()
    files_of(it).reset()
    files_of(it).stop()
    assert not old.exists()
    assert it.manager.metrics.file_blocks_written == 4, "the pages that still waited were not written first"
    assert not files_of(it)._index.names


class SlowWrites(SystemIO):
    """A writer of files whose writes wait until the test lets them run."""

    may = threading.Event()

    def write(self, *given: Any) -> None:
        self.may.wait(50)
        super().write(*given)


def test_pages_that_are_being_written_are_not_written_again(served: Make, tmp_path: Path) -> None:
    SlowWrites.may.clear()
    it = served(io=lambda memory: SlowWrites())
    now, files = 100.0, files_of(it)
    files._clock = lambda: now
    it.serve(PROMPT)
    it.tiers.store_all()
    for _ in range(3):
        now += 2.0
        files.tick()
        assert len(files._writer.jobs) == 1
        files.used(it.digests(PROMPT))  # No file has the pages yet, so they are queued again.
    SlowWrites.may.set()
    files.flush()
    assert it.manager.metrics.file_blocks_written == 4
    assert len(page_files(tmp_path)) == 1


def test_a_close_waits_for_both_threads(served: Make, tmp_path: Path) -> None:
    SlowWrites.may.clear()
    before = set(threading.enumerate())
    it = served(io=lambda memory: SlowWrites())
    files = files_of(it)
    it.serve(PROMPT)
    it.tiers.store_all()
    files._begin_write()
    threads = set(threading.enumerate()) - before
    assert len(threads) >= 1
    later = threading.Timer(0.05, SlowWrites.may.set)
    later.start()
    files.close()
    files.close()
    assert not any(thread.is_alive() for thread in threads)
    assert len(page_files(tmp_path)) == 1
    later.join()


def test_a_wait_for_reads_is_short_and_a_reservation_without_it_does_not_wait(
    served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LONGEST_WAIT_S <= 0.1
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 3600.0)
    again = slow(served)
    files, digests = files_of(again), again.digests(PROMPT)[None]
    files.fetch(digests, EVERY, wait=False, gain=4)
    (job,) = files._reader.jobs
    assert not job.work.done()
    later = threading.Timer(0.05, SlowReads.may.set)
    later.start()
    files.fetch(digests, EVERY, wait=True, gain=4)
    assert not files._reader.jobs, "a call that waits also takes up what has been read"
    assert again.manager.metrics.file_blocks_read == 4
    later.join()


@pytest.mark.parametrize("noun", ["blocks", "states"])
def test_every_count_of_a_tier_is_a_metric(served: Make, noun: str) -> None:
    counts = files_of(served()).counts(noun)
    assert counts.keys() <= {*KVCacheMetrics.__struct_fields__}
    assert {f"file_{noun}_written", f"file_{noun}_read", f"file_{noun}_refused", "files_refused"} <= counts.keys()
    assert (f"file_{noun}_corrupted" in counts) == (noun == "blocks")
