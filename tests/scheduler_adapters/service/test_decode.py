"""Events of a pull are news to the attempt that it is of, and to no other."""

from typing import Any

import pytest

from scheduler_adapters.loop import Request
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.requests import DecodeRequest
from transfer.pull.exchange import ExchangeEvent
from transfer.pull.pull_state import PullEvent


@pytest.mark.parametrize("error", ["", "its source was lost"])
def test_an_earlier_attempt_s_end_is_no_news_to_a_later_one(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = DecodeRequest("r#0", 2, "pulling", 5.0, spec=Request("r#0", [1], 1))
    news: list[tuple[Any, ...]] = []
    monkeypatch.setattr(DecodeScheduler, "_fail", lambda _, *of: news.append(of))
    monkeypatch.setattr(DecodeScheduler, "_join", lambda _, *of: news.append(of))
    decode = object.__new__(DecodeScheduler)  # neither the manager nor the transfer is asked
    decode._requests = {"r#0": request}
    for key in ("r#0#1", "r#0", "nobody#2"):
        decode._on_event(ExchangeEvent(0, PullEvent(key, error, safe=True)))
    assert news == []
    decode._on_event(ExchangeEvent(0, PullEvent("r#0#2", "lost, too", safe=True)))
    assert news == [(request, "lost, too")]
