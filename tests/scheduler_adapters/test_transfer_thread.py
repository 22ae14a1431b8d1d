import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from scheduler_adapters.errors import WorkerError
from scheduler_adapters.transfer_thread import Ended, Posted, TransferThread
from transfer.engine import KVTransferEngine

PAGES, ELEMENTS = 33, 4096


class End:
    """One side: an engine over a tensor of its own, and its thread."""

    def __init__(self, name: str) -> None:
        self.tensor = torch.zeros(PAGES, ELEMENTS)
        self.thread = TransferThread(KVTransferEngine(name, [[self.tensor]], total_num_pages=PAGES))
        self.metadata = self.thread.call(lambda engine: engine.metadata)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    source, reader = End("source"), End("reader")
    source.thread.call(lambda engine: engine.connect(reader.metadata))
    reader.thread.call(lambda engine: engine.connect(source.metadata))
    yield source, reader
    source.thread.close()
    reader.thread.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited 10 s for {what}"
        time.sleep(1e-3)


def test_a_pull_moves_the_bytes_and_both_sides_hear_of_its_end(ends: tuple[End, End]) -> None:
    source, reader = ends
    source.tensor.uniform_()
    pages = ([5, 2, 30], [1, 9, 4])
    reader.thread.pull("r", source.metadata, pages, (0, 0))
    wait_for(lambda: len(reader.thread.events) == 2, "the pull")
    posted, ended = reader.thread.events
    assert isinstance(posted, Posted)
    assert ended == Ended("r", "")
    assert torch.equal(reader.tensor[pages[1]], source.tensor[pages[0]])
    assert reader.tensor.count_nonzero() <= 3 * ELEMENTS
    source.thread.watch("r", posted.transfer)
    wait_for(lambda: source.thread.events, "the notification")
    assert list(source.thread.events) == [Ended("r", "")]
    assert reader.thread.pull_seconds > 0
    assert source.thread.pull_seconds == 0


def test_a_source_that_computes_still_serves_the_first_pull(ends: tuple[End, End]) -> None:
    source, reader = ends
    reader.thread.pull("r", source.metadata, ([1], [1]), (0, 0))
    deadline = time.monotonic() + 10
    big = torch.ones(300, 300)
    while len(reader.thread.events) < 2:  # this thread, which would be the serving loop's, never calls the engine
        big @ big
        assert time.monotonic() < deadline
    assert reader.thread.events[1] == Ended("r", "")


def test_a_pull_that_cannot_start_ends_with_the_reason(ends: tuple[End, End]) -> None:
    source, reader = ends
    reader.thread.pull("r", source.metadata, ([PAGES], [1]), (0, 0))
    wait_for(lambda: reader.thread.events, "the refusal")
    (ended,) = reader.thread.events
    assert isinstance(ended, Ended)
    assert str(PAGES) in ended.error
    reader.thread.pull("again", source.metadata, ([1], [1]), (0, 0))
    wait_for(lambda: len(reader.thread.events) == 3, "the next pull")
    assert reader.thread.events[-1] == Ended("again", "")


def test_unwatch_forgets_a_pull_that_came_to_nothing(ends: tuple[End, End]) -> None:
    source, reader = ends
    reader.thread.pull("r", source.metadata, ([1], [1]), (0, 0))
    wait_for(lambda: len(reader.thread.events) == 2, "the pull")
    posted = reader.thread.events[0]
    assert isinstance(posted, Posted)
    never = msgspec.structs.replace(posted.transfer, transfer_name="f" * 32)
    for request_id, transfer in (("r", never), ("stays", never), ("other", posted.transfer)):
        source.thread.watch(request_id, transfer)
    source.thread.unwatch("r")
    wait_for(lambda: source.thread.events, "the notification")
    assert [event.request_id for event in source.thread.events] == ["other"]
    assert source.thread.call(lambda _: [job.request_id for job in source.thread._jobs]) == ["stays"]


def test_call_gives_back_results_and_errors(ends: tuple[End, End]) -> None:
    source, _ = ends
    assert source.thread.call(lambda engine: engine.name) == "source"
    with pytest.raises(ZeroDivisionError):
        source.thread.call(lambda _engine: 1 // 0)
    source.thread.raise_failure()


def test_a_dead_thread_is_told_to_the_loop() -> None:
    end = End("alone")
    end.thread.call(lambda engine: engine.cleanup())  # somebody breaks the rule that the thread owns the engine
    wait_for(lambda: end.thread._failure is not None, "the failure")
    with pytest.raises(WorkerError, match="transfer thread died"):
        end.thread.raise_failure()
    end.thread.close()
    end.thread.close()
