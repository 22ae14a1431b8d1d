"""Pages by content: the pages that a replica leases to a reader, and the pages that it loads from lower tiers for the
reader.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import BlockTableMismatchError, InterruptedCallError, InvalidRequestError, LayerGroup, TextContext
from kvcache.tiers import file_tier, host_tier
from kvcache.tiers.page_files import SystemIO
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.served import SIZE, Served

PROMPT = range(33)  # eight full pages of 4 tokens, and one more token
PAGES = 8


@pytest.fixture
def served(tmp_path: Path) -> Iterable[Callable[..., Served]]:
    made: list[Served] = []

    def make(pages: int = 16, host_slots: int = 80, *, files: bool = False, io: Any = None, **options: Any) -> Served:
        folder = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3, "file_tier_key": "model"}
        given = {**options.pop("params", {}), **({**folder, "file_tier_io": io} if files else {})}
        made.append(Served(pages, host_slots, params=given, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()


def evicted(it: Served, prompt: Iterable[int] = PROMPT) -> None:
    """Serves the prompt, and then other prompts that evict all of its pages."""
    it.serve(prompt)
    it.fill(16)
    it.fill(16)
    assert cached(it) == 0


def cached(it: Served) -> int:
    return it.manager.contents.cached(0, wanted(it)) // SIZE


def wanted(it: Served, first: int = 0, prompt: Iterable[int] = PROMPT) -> Any:
    return it.manager.contents.digests(TextContext([*prompt], 256, "theirs"), first)


def brought(it: Served, most: int = 100, first: int = 0) -> int:
    """Asks again and again until no page is being loaded any more. Returns the number of leased pages, and the number
    of questions.
    """
    asked, deadline = 0, time.monotonic() + 10
    while it.manager.contents.bring("theirs", 0, wanted(it, first), most):
        it.manager.check()
        asked += 1
        assert time.monotonic() < deadline
    found = it.manager.contents.lease("theirs", 0, wanted(it, first), most)
    if found is None:
        return 0
    it.manager.check()
    it.manager.end_lease(found[0])
    pages = len(found[1].groups[0])
    assert (found[1].first_page, found[1].num_tokens) == (first, (first + pages) * SIZE)
    return pages


@pytest.mark.parametrize(
    ("length", "first", "pages"), [(32, 0, 7), (33, 0, 8), (33, 3, 5), (33, 20, 0), (4, 0, 0), (5, 0, 1)]
)
def test_digests_leave_out_a_page_that_only_the_last_token_completes(length: int, first: int, pages: int) -> None:
    context = TextContext(range(length), 256)
    contents = manager_of(page_size=SIZE).contents
    found = contents.digests(context, first)
    assert (len(found.digests), found.first_page) == (32 * pages, first)
    assert contents.cached(0, found) == 0
    assert manager_of(page_size=SIZE, caching=False).contents.digests(context, first).digests == b""
    groups = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)
    found = manager_of(page_size=SIZE, layers=2, params={"groups": groups}).contents.digests(context, first)
    assert (len(found.digests), found.first_page) == ((length - 1) // SIZE * 32, 0)


def test_an_object_that_is_no_context_has_no_digests() -> None:
    with pytest.raises(InvalidRequestError, match="digests"):
        manager_of().contents.digests(object())  # type: ignore[arg-type]


def test_pages_that_only_the_host_has_are_loaded_with_the_right_content(served: Any) -> None:
    it = served()
    evicted(it)
    assert brought(it) == PAGES
    assert it.manager.metrics.h2d_blocks_copied == PAGES
    assert it.manager.num_held_blocks == 0
    assert it.serve(PROMPT) == PAGES * SIZE
    assert it.kv.compared == PAGES * SIZE
    assert it.manager.metrics.h2d_blocks_copied == PAGES  # from the device


def test_pages_in_files_are_loaded_after_a_restart(served: Any) -> None:
    it = served(files=True)
    it.serve(PROMPT)
    it.manager.close()
    again = served(files=True)
    assert brought(again) == PAGES
    assert again.manager.metrics.file_blocks_read == PAGES
    assert again.serve(PROMPT) == PAGES * SIZE
    assert again.kv.compared == PAGES * SIZE


def test_pages_that_have_just_arrived_in_the_host_are_loaded_by_the_next_call(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = served(files=True)
    it.serve(PROMPT)
    it.manager.close()
    again = served(files=True)
    files = again.tiers.files
    brings = files.brings

    def a_moment_later(*where: Any) -> bool:
        files._reader.jobs[-1].wait()
        return brings(*where)

    monkeypatch.setattr(files, "brings", a_moment_later)
    assert again.manager.contents.bring("theirs", 0, wanted(again), 100)
    assert brought(again) == PAGES


def test_a_run_begins_at_a_later_page_and_follows_what_the_device_has(served: Any) -> None:
    it = served()
    evicted(it)
    assert brought(it, first=3) == PAGES - 3
    assert it.manager.metrics.h2d_blocks_copied == PAGES - 3
    assert brought(it) == PAGES  # This call loads the three pages before the cached pages.
    assert it.manager.metrics.h2d_blocks_copied <= PAGES + PAGES - 3


def test_no_more_pages_are_loaded_than_may_be_lent(served: Any) -> None:
    it = served()
    evicted(it)
    assert brought(it, 0) == 0
    assert brought(it, -2) == 0
    assert brought(it, 5) == 5
    assert it.manager.metrics.h2d_blocks_copied == 5


def test_half_of_the_free_pages_stay_free_for_the_manager_s_own_requests(served: Any) -> None:
    it = served()
    evicted(it)
    busy = it.claim(range(500, 500 + 6 * SIZE - 1))
    assert it.manager.maybe_reserve(busy)
    assert it.manager.num_free_blocks == 10
    assert brought(it) == 5
    assert it.manager.num_free_blocks == 10
    it.manager.release(busy.request_id)
    assert brought(it) == PAGES


@pytest.mark.parametrize("have", [0, 3])
@pytest.mark.parametrize("busy", [0, 1, 5, 6, 9, 10, 13])
def test_a_call_loads_as_many_pages_as_the_manager_s_own_requests_leave(
    served: Any, monkeypatch: pytest.MonkeyPatch, busy: int, have: int
) -> None:
    for most, at_once in itertools.product((0, 3, 8), (2, 100)):
        it = served()
        evicted(it)
        assert brought(it, have) == have
        (tier,) = it.tiers.replicas
        monkeypatch.setattr(tier, "brought_at_once", at_once)
        if busy:
            assert it.manager.maybe_reserve(it.claim(range(500, 500 + busy * SIZE - 1)))
        free, copied = it.manager.num_free_blocks, it.manager.metrics.h2d_blocks_copied
        assert free == 16 - busy
        most_here = max(0, min(most, PAGES))
        here = min(have, most_here)
        expected = max(0, min(most_here - here, free // 2 - here, at_once))
        assert it.manager.contents.bring("theirs", 0, wanted(it), most) is (expected > 0)
        it.manager.check()
        assert it.manager.metrics.h2d_blocks_copied - copied == expected
        assert it.manager.num_free_blocks == free
        assert cached(it) == have + (expected if most > have else 0)


def test_each_page_that_is_loaded_belongs_to_its_table(served: Any) -> None:
    windows = LayerGroup("full", (0,)), LayerGroup("window", (1,), 8), LayerGroup("window", (2,), 100)
    it = served(40, 300, layers=3, params={"groups": windows})
    it.serve(PROMPT)
    for _ in range(3):
        it.fill(12)
    assert cached(it) == 0
    for _ in as_long_as(lambda: it.manager.contents.bring("theirs", 0, wanted(it), 100)):
        it.manager.check()
    lease, table = it.manager.contents.lease("theirs", 0, wanted(it), 100)
    index = it.manager._replicas.each[0].pool.index
    assert [len(pages) for pages in table.groups] == [PAGES, PAGES, 2]
    assert [set(index.tables[list(pages)].tolist()) for pages in table.groups] == [{0}, {1}, {2}]
    it.manager.end_lease(lease)
    assert it.serve(PROMPT) == PAGES * SIZE
    it.manager.check()


def test_an_interrupted_load_ends_before_the_next_one(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served()
    evicted(it)
    (tier,) = it.tiers.replicas

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tier, "bring", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.manager.contents.bring("theirs", 0, wanted(it), 100)
    with pytest.raises(InterruptedCallError, match=r"contents\.bring"):
        it.manager.contents.bring("theirs", 0, wanted(it), 100)
    it.manager.recover()
    it.manager.check()
    assert it.manager.num_held_blocks == 0
    assert brought(it) == PAGES


def test_a_load_does_not_wait_for_files(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served(files=True)
    it.serve(PROMPT)
    it.manager.close()
    monkeypatch.setattr(file_tier, "_LONGEST_WAIT_S", 3600.0)
    may = threading.Event()

    class SlowReads(SystemIO):
        def read(self, *given: Any) -> None:
            may.wait(10)
            super().read(*given)

    again = served(files=True, io=lambda memory: SlowReads())
    assert again.manager.contents.bring("theirs", 0, wanted(again), 100)
    assert again.manager.metrics.file_blocks_read == 0
    may.set()
    assert brought(again) == PAGES


def test_loading_pages_does_not_evict_the_earlier_pages_of_the_prompt(served: Any) -> None:
    it = served()
    evicted(it)
    assert brought(it, 4) == 4
    it.fill(12)  # The first pages of the prompt are the oldest idle pages.
    assert cached(it) == 4
    assert brought(it) == PAGES


def test_few_pages_are_loaded_at_a_time(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_BROUGHT_BYTES", 3 * 2 * SIZE * 2 * 8)  # three pages
    it = served()
    evicted(it)
    rounds = as_long_as(lambda: it.manager.contents.bring("theirs", 0, wanted(it), 100))
    assert [it.manager.metrics.h2d_blocks_copied for _ in rounds] == [3, 6, 8]
    assert brought(it) == PAGES


class Copy:
    begun = True

    def __init__(self) -> None:
        self.is_over = False

    def begin(self) -> None: ...

    def over(self) -> bool:
        return self.is_over

    def order(self) -> None:
        pass

    def wait(self) -> None:
        self.is_over = True


def copied_beside_us(it: Any, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Makes copies to the device begin at once and end only when the test says so, as copies of a GPU do."""
    (tier,) = it.tiers.replicas
    copy, load = Copy(), tier._mover.load

    def beside_us(slots: Any, pages: Any) -> Copy:
        load(slots, pages).begin()
        return copy

    monkeypatch.setattr(tier._mover, "load", beside_us)
    return copy


def test_pages_that_are_on_their_way_are_found_by_nobody(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served()
    evicted(it)
    copy = copied_beside_us(it, monkeypatch)
    contents = it.manager.contents
    assert contents.bring("theirs", 0, wanted(it), 100)
    assert contents.bring("theirs", 0, wanted(it), 100)
    it.manager.check()
    assert it.manager.metrics.h2d_blocks_copied == 0
    assert contents.lease("theirs", 0, wanted(it), 100) is None
    assert it.manager.num_free_blocks == 16 - PAGES
    copy.is_over = True
    assert not contents.bring("theirs", 0, wanted(it), 100)
    assert it.manager.metrics.h2d_blocks_copied == PAGES  # Each page was copied once.
    assert cached(it) == PAGES
    assert it.manager.num_free_blocks == 16


@pytest.mark.parametrize("asked", ["admission", "maybe_reserve"])
def test_a_loop_without_steps_notices_the_end_of_copies_for_no_request(
    served: Any, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """No step runs, so no step can notice the end of the copies. If waiting calls did not notice it either, the pages
    would stay held forever.
    """
    it = served()
    evicted(it)
    copy = copied_beside_us(it, monkeypatch)
    assert it.manager.contents.bring("theirs", 0, wanted(it), 100)
    all_pages = TextContext([*range(5000, 5000 + 16 * SIZE - 1)], 16 * SIZE)
    it.manager.external_claim(all_pages.request_id)
    assert not it.manager.admission(all_pages).fits
    assert not it.manager.maybe_reserve(all_pages)
    copy.is_over = True
    if asked == "admission":
        assert it.manager.admission(all_pages).fits
    assert it.manager.maybe_reserve(all_pages)
    it.manager.release(all_pages.request_id)
    it.manager.check()


def test_a_reset_forgets_pages_that_are_being_loaded(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served()
    evicted(it)
    copied_beside_us(it, monkeypatch)
    assert it.manager.contents.bring("theirs", 0, wanted(it), 100)
    it.manager.reset_prefix_cache()
    it.manager.check()
    assert cached(it) == 0
    assert not it.manager.contents.bring("theirs", 0, wanted(it), 100)
    assert it.manager.num_free_blocks == 16


def test_a_page_that_a_request_computes_while_it_is_loaded_is_published_once(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = served(24)
    it.serve(PROMPT)
    it.fill(24)
    it.fill(24)
    copy = copied_beside_us(it, monkeypatch)
    assert it.manager.contents.bring("theirs", 0, wanted(it), 100)
    assert it.serve(PROMPT) == PAGES * SIZE  # The request also finds the pages that the call has loaded from the host.
    copy.is_over = True
    assert not it.manager.contents.bring("theirs", 0, wanted(it), 100)
    it.manager.check()
    assert cached(it) == PAGES
    assert it.serve(PROMPT) == PAGES * SIZE


def test_without_lower_tiers_no_page_is_loaded_and_another_page_size_is_refused(served: Any) -> None:
    it = served(host_slots=0)
    it.serve(PROMPT)
    contents = it.manager.contents
    assert not contents.bring("theirs", 0, wanted(it), 100)
    with pytest.raises(BlockTableMismatchError, match="request 'theirs': asks for .*256 bytes of digests"):
        contents.bring("theirs", 0, wanted(it)._replace(page_size=8), 100)


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_leave_the_books_right(served: Any, seed: int) -> None:
    it, random = served(12, 60), np.random.default_rng(seed)
    prompts = [[number, *range(random.integers(8, 40))] for number in range(6)]
    leases = list[Any]()
    for _ in range(150):
        prompt, move = prompts[random.integers(6)], random.integers(4)
        digests = it.manager.contents.digests(TextContext([*prompt], 256), int(random.integers(3)))
        if move == 0 and it.manager.num_free_blocks >= 11:
            it.serve(prompt)
        elif move == 1 and digests.digests:
            it.manager.contents.bring("theirs", 0, digests, int(random.integers(12)))
        elif move == 2 and digests.digests:
            found = it.manager.contents.lease("theirs", 0, digests, int(random.integers(12)))
            leases += [] if found is None else [found[0]]
        elif leases:
            it.manager.end_lease(leases.pop(random.integers(len(leases))))
        it.manager.check()
    assert it.manager.metrics.h2d_blocks_copied
    for lease in leases:
        it.manager.end_lease(lease)
    assert it.manager.num_held_blocks == 0
