"""The messages of a decode process about an attempt may arrive in any order on the process's own connection."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.prefill import PrefillScheduler, _DecodeConnection
from scheduler_adapters.service.requests import PrefillRequest, PrefillTimes


class Rig:
    """A scheduler without a loop. It is draining, so each new attempt fails at once. The failure is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, int]] = []
        self.prefill = prefill = object.__new__(PrefillScheduler)
        prefill.name, prefill.counts, prefill.draining = "p", Counter(), True
        prefill._serial, prefill._clock, prefill._times = itertools.count(), lambda: 0.0, PrefillTimes()
        monkeypatch.setattr(PrefillScheduler, "_fail", self._note)

    def _note(self, request: PrefillRequest, reason: str, *, elsewhere: bool) -> None:
        assert elsewhere
        assert reason == "prefill process 'p' is draining"
        self.begun.append((request.request_id, request.attempt))

    def ask(self, reader: _DecodeConnection, attempt: int, request_id: str = "r") -> None:
        message = msg.Prefill(request_id=request_id, attempt=attempt, prompt=(1, 2), within_s=9.0)
        self.prefill._start(b"sender", reader, message)

    def cancel(self, reader: _DecodeConnection, attempt: int, request_id: str = "r") -> None:
        self.prefill._on_cancel(reader, msg.Cancel(request_id=request_id, attempt=attempt, reason="gone"))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_cancel_that_overtakes_its_prompt_drops_only_that_prompt(rig: Rig) -> None:
    reader, other = _DecodeConnection("d", "1"), _DecodeConnection("e", "1")
    rig.cancel(reader, 1)
    rig.ask(reader, 1)
    assert rig.begun == []
    assert rig.prefill.counts["late"] == 2
    rig.ask(reader, 2)
    rig.ask(reader, 1, "s")
    rig.ask(other, 1)
    assert rig.begun == [("r", 2), ("s", 1), ("r", 1)]
    assert rig.prefill.counts["late"] == 2


def test_an_attempt_begins_once_however_often_it_is_asked_for(rig: Rig) -> None:
    reader = _DecodeConnection("d", "1")
    for _ in range(3):
        rig.ask(reader, 1)
    assert rig.begun == [("r", 1)]
    assert rig.prefill.counts["late"] == 2
