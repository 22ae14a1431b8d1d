"""Work that waits for batches of SGLang's loop."""

from scheduler_adapters.sglang.delayed import DelayedWork
from transfer.connector.metadata import ConnectorMetadata

NOTHING = ConnectorMetadata()


def work(name: str) -> ConnectorMetadata:
    return ConnectorMetadata(reqs_computed=[name])


def test_work_begins_at_once_or_one_turn_later() -> None:
    delayed = DelayedWork()
    assert delayed.turn(work("at once"), 0) == [work("at once")]
    assert delayed.turn(work("later"), 1) == []
    assert delayed.turn(NOTHING, 1) == [work("later")]
    assert delayed.turn(NOTHING, 0) == []


def test_no_work_begins_before_work_that_was_planned_earlier() -> None:
    delayed = DelayedWork()
    assert delayed.turn(work("lease"), 2) == []
    assert delayed.turn(work("its end"), 0) == []
    assert delayed.turn(NOTHING, 0) == [work("lease"), work("its end")]
