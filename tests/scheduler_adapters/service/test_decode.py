"""The events of a pull reach only the attempt that has started the pull."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvcache import BlockTable
from scheduler_adapters.loop import Request
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.requests import DecodeRequest, Recent
from transfer.pull.exchange import ExchangeEvent
from transfer.pull.lease import LeaseRef
from transfer.pull.pull_state import PullEvent
from transfer.pull.source import Source


@pytest.mark.parametrize("error", ["", "its source was lost"])
def test_the_end_of_an_earlier_attempt_does_not_affect_a_later_one(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = DecodeRequest("r#0", 2, "pulling", 5.0, spec=Request("r#0", [1], 1))
    news: list[tuple[Any, ...]] = []
    monkeypatch.setattr(DecodeScheduler, "_fail", lambda _, *of: news.append(of))
    monkeypatch.setattr(DecodeScheduler, "_join", lambda _, *of: news.append(of))
    decode = object.__new__(DecodeScheduler)  # The calls of this test use neither the manager nor the transfer.
    decode._requests = {"r#0": request}
    for key in ("r#0#1", "r#0", "nobody#2"):
        decode._on_event(ExchangeEvent(0, PullEvent(key, error, safe=True)))
    assert news == []
    decode._on_event(ExchangeEvent(0, PullEvent("r#0#2", "lost, too", safe=True)))
    assert news == [(request, "lost, too")]


class Asked:
    """A connection to a prefill process that records which requests are cancelled."""

    name = "p1"

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, int, str]] = []

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        self.cancelled.append((request_id, attempt, reason))


OFFER = msg.PagesOffer(
    request_id="r#0",
    attempt=2,
    source=Source("tcp://127.0.0.1:9", "p1/0", LeaseRef(5, 0, 9.0), "i"),
    table=BlockTable("r#0", 0, 4, 4, ((1,),), ("kv",), "f", "sha256", bytes(32)),
    prompt_digest=b"d" * 32,
)


@pytest.mark.parametrize("phase", ["asked", "decoding"])
@pytest.mark.parametrize(
    ("attempt", "mine", "known"), [(1, True, True), (2, False, True), (2, True, False), (2, True, True)]
)
def test_an_unwanted_offer_is_cancelled_at_its_source(
    phase: str, attempt: int, mine: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are: an offer of an earlier attempt, an offer of a process that was not asked, an offer for an unknown
    request, and an offer for a request that is already decoding.
    """
    prefill, other = Asked(), Asked()
    request = DecodeRequest("r#0", 2, phase, 5.0, spec=Request("r#0", [1], 1), prefill=prefill if mine else other)  # type: ignore[arg-type]
    decode = object.__new__(DecodeScheduler)
    decode._requests = {"r#0": request} if known else {}
    decode.counts = Counter()
    taken: list[msg.PagesOffer] = []
    monkeypatch.setattr(DecodeScheduler, "_on_offer", lambda _, __, offer: taken.append(offer))
    monkeypatch.setattr(DecodeRequest, "foreign", lambda *_: "")
    late = (attempt, mine, known, phase) != (2, True, True, "asked")
    decode._on_message(prefill, msgspec.structs.replace(OFFER, attempt=attempt))  # type: ignore[arg-type]
    assert prefill.cancelled == ([("r#0", attempt, "too late")] if late else [])
    assert len(taken) == (not late)
    assert decode.counts["late"] == late
    if late:
        decode._on_message(prefill, msg.Failed(request_id="r#0", attempt=attempt, reason="no"))  # type: ignore[arg-type]
        assert decode.counts["late"] == 2
        assert len(prefill.cancelled) == 1, "nothing is leased, so there is nothing to cancel"
    assert other.cancelled == []


@pytest.mark.parametrize(("serial", "ends"), [(0, True), (7, True), (3, False)])
def test_an_abort_of_one_submission_ends_no_other_of_the_same_name(
    serial: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = DecodeRequest("r#0", 2, "asked", 5.0, spec=Request("r#0", [1], 1), serial=7)
    decode = object.__new__(DecodeScheduler)
    decode._requests, decode._submitted = {"r#0": request}, Recent()
    for known in (3, 7):  # Serial 3 belongs to an earlier request, which has ended.
        decode._submitted.add(known)
    ended: list[tuple[Any, ...]] = []
    monkeypatch.setattr(DecodeScheduler, "_give_up", lambda *_, **__: None)
    monkeypatch.setattr(DecodeScheduler, "_finish", lambda _, *of: ended.append(of))
    decode.abort("r#0", serial)
    assert ended == ([(request, "cancelled")] if ends else [])


def test_offers_wait_behind_requests_that_were_preempted() -> None:
    """Preempted requests come first, because they have had pages before."""
    request = DecodeRequest("r#0", 2, "asked", 5.0, spec=Request("r#0", [1], 1))
    decode, loop = object.__new__(DecodeScheduler), SimpleNamespace(num_waiting=1)
    decode._loop = loop  # type: ignore[assignment]
    decode._arrived = [deque([(request, 1)])]  # This offer belongs to an attempt that has ended.
    decode._admit()
    assert len(decode._arrived[0]) == 1, "the offer must not be looked at"
    loop.num_waiting = 0
    decode._admit()
    assert not decode._arrived[0]
