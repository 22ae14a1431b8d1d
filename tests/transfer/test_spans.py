"""The durations of a hand-over's parts add up to the duration of its span.

The span belongs to the trace of its request.
"""

from __future__ import annotations

import pytest
from opentelemetry.trace import StatusCode

from tests.spans import exported, parts_of
from tests.transfer.clock import Clock
from transfer.spans import PARTS, HandoverSpan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


def handed_over(begun: list[tuple[str, float]], until: float, carrier: dict[str, str], error: str = "") -> None:
    clock = Clock()
    span = HandoverSpan(carrier, {"gen_ai.request.id": "r"}, clock)
    for part, at in begun:
        clock.now = at
        span.begin(part)
    clock.now = until
    span.end(error, attempt=2)
    span.end("and nothing follows")


WHOLE = [(part, 100.0 + 0.25 * number) for number, part in enumerate(PARTS)]


def test_parts_are_attributes_and_events_and_sum_to_the_whole() -> None:
    with exported() as spans:
        handed_over(WHOLE, 103.0, {"traceparent": PARENT})
    (span,) = spans()
    assert parts_of(span) == {**dict.fromkeys(PARTS, 0.25), "commit": 1.75}
    assert span.end_time - span.start_time == 3_000_000_000
    assert [(event.name, (event.timestamp - span.start_time) / 1e9) for event in span.events] == [
        (part, at - 100.0) for part, at in WHOLE
    ]
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.id"] == "r"
    assert span.attributes["pagewire.attempt"] == 2
    assert span.status.status_code is StatusCode.UNSET


def test_a_failed_pull_says_why_and_has_no_parts_that_it_did_not_reach() -> None:
    with exported() as spans:
        handed_over(WHOLE[:3], 101.0, {}, "the source is gone")
    (span,) = spans()
    assert parts_of(span) == {**dict.fromkeys(PARTS, 0.0), "queue": 0.25, "lease": 0.25, "room": 0.5}
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the source is gone")
    assert span.parent is None


@pytest.mark.parametrize("carrier", [{"traceparent": "nonsense"}, {"traceparent": ""}, {"other": PARENT}])
def test_headers_that_name_no_trace_begin_one(carrier: dict[str, str]) -> None:
    with exported() as spans:
        handed_over(WHOLE, 103.0, carrier)
    assert spans()[0].parent is None


def test_unsampled_traces_are_not_exported() -> None:
    with exported() as spans:
        handed_over(WHOLE, 103.0, {"traceparent": UNSAMPLED})
    assert spans() == []


def test_parts_of_a_span_begin_in_order_and_not_in_the_future() -> None:
    """The parts of a span begin in order, although their times come from several threads, and from hosts with other
    clocks.
    """
    clock = Clock()
    span = HandoverSpan({}, {}, clock)
    span.begin("read")
    span.begin("fence", 99.0)
    clock.now = 101.0
    span.begin("commit", 107.0)
    clock.now = 103.0
    with exported() as spans:
        span.end()
    (found,) = spans()
    assert parts_of(found) == {**dict.fromkeys(PARTS, 0.0), "fence": 1.0, "commit": 2.0}
    assert found.end_time - found.start_time == 3_000_000_000
