"""Parts are divided into transfers. A pull of many parts carries out all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.replica.block_table import PageCopy
from tests.transfer.replicas import Engine
from transfer.errors import AgentError
from transfer.nixl.agent import BACKGROUND_RUNS, is_over
from transfer.plan.runs import LONGEST_RUN, Runs
from transfer.pull.parts import BACKGROUND_BYTES, FOREGROUND_BYTES, Part, longest_run
from transfer.pull.pull_state import PullEvent

KIB, MIB = 1 << 10, 1 << 20


def part_of(runs: int, length: int) -> Part:
    rows = np.full((runs, 3), length, np.uint64)
    return Part(0, rows, rows, runs * length)


def cut(part: Part, *, background: bool) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    while part.posted < len(part.local):
        last, behind = part.next_transfer(background=background)
        found.append((last - part.posted, behind))
        part.posted = last
    return found


@pytest.mark.parametrize(("runs", "length"), [(1, 512 * MIB), (127, 32 * KIB), (127, 64), (64, 64 * KIB)])
def test_a_small_part_is_one_transfer(runs: int, length: int) -> None:
    assert cut(part_of(runs, length), background=True) == [(runs, False)]


@pytest.mark.parametrize(("runs", "length"), [(2048, 64 * KIB), (300, MIB), (100_000, 256), (200, 64), (70, 4 * MIB)])
def test_the_posting_thread_copies_few_runs_and_few_bytes_at_a_time(runs: int, length: int) -> None:
    for background in (False, True):
        found = cut(part_of(runs, length), background=background)
        assert sum(count for count, _ in found) == runs
        for count, behind in found:
            if behind:
                assert background
                assert count >= BACKGROUND_RUNS
                assert count * length <= BACKGROUND_BYTES
            else:
                assert count < BACKGROUND_RUNS
                assert count == 1 or count * length <= FOREGROUND_BYTES


def test_half_of_the_remaining_runs_go_to_the_background_thread_while_that_pays() -> None:
    assert cut(part_of(2048, 64 * KIB), background=True)[:3] == [(1024, True), (512, True), (256, True)]
    assert not any(behind for _, behind in cut(part_of(2 * BACKGROUND_RUNS - 1, 64 * KIB), background=True))
    assert not any(behind for _, behind in cut(part_of(1000, 4 * MIB), background=True))


def test_each_transfer_takes_as_much_as_it_may_from_where_the_last_one_ended() -> None:
    assert cut(part_of(300, MIB), background=False) == [(16, False)] * 18 + [(12, False)]
    assert cut(part_of(1000, MIB), background=True)[:3] == [(128, True)] * 3
    assert cut(part_of(300, 64), background=False) == [(BACKGROUND_RUNS - 1, False)] * (
        300 // (BACKGROUND_RUNS - 1)
    ) + [(300 % (BACKGROUND_RUNS - 1), False)]


def test_a_part_has_arrived_when_all_of_its_transfers_were_posted_and_have_ended() -> None:
    part = part_of(4, 64)
    assert not part.is_here
    part.posted, part.in_flight = 4, 1
    assert not part.is_here
    part.in_flight = 0
    assert part.is_here
    part.posted = 3
    assert not part.is_here


class Handles:
    """An agent whose transfers have ended, are open, or have failed. It counts released handles."""

    def __init__(self, state: bool | AgentError, *, release: AgentError | None = None) -> None:
        self.state, self.fails, self.released = state, release, list[int]()

    def done(self, handle: int) -> bool:  # noqa: ARG002
        if isinstance(self.state, AgentError):
            raise self.state
        return self.state

    def release(self, handle: int) -> None:
        self.released.append(handle)
        if self.fails:
            raise self.fails


@pytest.mark.parametrize("fails", [None, AgentError("no such handle")])
def test_the_handle_of_a_transfer_is_released_once_however_the_transfer_ends(fails: AgentError | None) -> None:
    error = AgentError("it broke")
    moves, ended, broken = (Handles(state, release=fails) for state in (False, True, error))
    assert is_over(moves, 1) == (False, None)  # type: ignore[arg-type]
    assert is_over(ended, 2) == (True, None)  # type: ignore[arg-type]
    assert is_over(broken, 3) == (True, error)  # type: ignore[arg-type]
    assert (moves.released, ended.released, broken.released) == ([], [2], [3])


@pytest.mark.parametrize("num_bytes", [4 * KIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 512 * MIB])
def test_a_large_part_of_few_runs_is_cut_into_enough_for_two_threads(num_bytes: int) -> None:
    longest = longest_run(num_bytes)
    assert 128 * KIB <= longest <= LONGEST_RUN
    behind = [background for _, background in cut(part_of(-(-num_bytes // longest), longest), background=True)]
    assert any(behind) == (num_bytes >= 32 * MIB)


def test_long_runs_are_cut_and_nothing_else_changes() -> None:
    runs = Runs(np.array([0, 1000, 5000]), np.array([9000, 20000, 100]), np.array([100, 250, 200]))
    assert runs.shortened(250) is runs
    short = runs.shortened(100)
    assert short.length.tolist() == [100, 100, 100, 50, 100, 100]
    assert short.local.tolist() == [0, 1000, 1100, 1200, 5000, 5100]
    assert short.remote.tolist() == [9000, 20000, 20100, 20200, 100, 200]


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    p, d = Engine("p", seed=1, pages=2048), Engine("d", seed=2, pages=2048)
    yield p, d
    for engine in (d, p):
        engine.replica.close()
        if engine.server is not None:
            engine.server.close()


def test_a_pull_of_many_runs_progresses_in_both_threads_and_between_polls(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    pages = np.arange(0, 2048, 2)
    d.replica.pull("r", p.source(p.offer()), 20.0)
    d.replica.add_pages("r", [PageCopy(pages, pages[::-1], (0, 1024 * 16))], last=True)
    while not d.pulls:
        p.poll()
        d.poll()
    assert d.pulls == [PullEvent("r", "", safe=True)]
    reads = [runs for runs, note in d.hindrances[0].reads if not note]
    assert sum(reads) == 1024
    assert max(reads) == 512
    assert len(reads) >= 4
    assert (d.pools[0][pages] == p.pools[0][pages[::-1]]).all()


def test_a_pull_that_fails_between_its_transfers_posts_no_more_of_them(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    pages = np.arange(0, 2048, 2)
    d.hindrances[0].refuse = {2}
    d.replica.pull("r", p.source(p.offer()), 20.0)
    d.replica.add_pages("r", [PageCopy(pages, pages, (0, 1024 * 16))], last=True)
    while not d.pulls or not d.pulls[-1].safe:
        p.poll()
        d.poll()
    assert "refused by the test" in d.pulls[-1].error
    assert len(d.hindrances[0].reads) == 3
    assert not d.replica.ranks[0].puller.is_reading
