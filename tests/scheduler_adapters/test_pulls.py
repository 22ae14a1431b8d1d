"""Events of a pull are news to the attempt that it is of, and to no other."""

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_adapters.loop import Request
from scheduler_adapters.pulls import Pulls, _Pull
from scheduler_adapters.rooms import DecodeRoom
from transfer.pull_state import PullEvent


@pytest.mark.parametrize("error", ["", "its source was lost"])
def test_an_earlier_attempt_s_end_is_no_news_to_a_later_one(error: str) -> None:
    nobody: Any = None  # neither the manager nor the transfer is asked
    pulls = Pulls(nobody, nobody)
    room = DecodeRoom("r", 1, "pulling", 5.0, request=Request("r", [1], 1))
    pulls._open["r#1"] = pulls._open["r#2"] = _Pull(room, 0)
    room.attempt = 2
    assert pulls.on_event(PullEvent("r#1", error, safe=True)) is None
    assert pulls.on_event(PullEvent("r#2", "lost, too", safe=True)) is room


def test_pages_of_an_attempt_that_is_over_stay_with_the_transfer_to_its_end() -> None:
    done: list[str] = []
    manager: Any = SimpleNamespace(release=lambda _: done.append("row"), cancel_import=lambda _: done.append("pages"))
    nobody, pending = None, SimpleNamespace(dst_pages=[3])
    pulls = Pulls(manager, nobody)  # type: ignore[arg-type]
    room = DecodeRoom("r", 1, "pulling", 5.0, request=Request("r", [1], 1), pending=pending)  # type: ignore[arg-type]
    pulls._open["r#1"] = _Pull(room, 0, pending)  # type: ignore[arg-type]
    pulls.release(room)
    assert done == ["row"]  # a READ may still write to the pages
    room.attempt = 2
    assert pulls.on_event(PullEvent("r#1", "", safe=True)) is None  # it has ended well, and nobody waits for it
    assert done == ["row", "pages"]
