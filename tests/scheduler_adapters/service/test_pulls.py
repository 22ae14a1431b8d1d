"""Events of a pull are news to the attempt that it is of, and to no other."""

from typing import Any

import pytest

from scheduler_adapters.loop import Request
from scheduler_adapters.service.pulls import Pulls
from scheduler_adapters.service.requests import DecodeRoom
from transfer.pull.pull_state import PullEvent


@pytest.mark.parametrize("error", ["", "its source was lost"])
def test_an_earlier_attempt_s_end_is_no_news_to_a_later_one(error: str) -> None:
    nobody: Any = None  # neither the manager nor the transfer is asked
    pulls = Pulls(nobody, nobody)
    room = DecodeRoom("r", 1, "pulling", 5.0, request=Request("r", [1], 1))
    pulls._open["r#1"] = pulls._open["r#2"] = room
    room.attempt = 2
    assert pulls.on_event(PullEvent("r#1", error, safe=True), None) is None
    assert pulls.on_event(PullEvent("r#2", "lost, too", safe=True), None) is room
