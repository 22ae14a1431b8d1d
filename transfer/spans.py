"""An OpenTelemetry span for each hand-over, which shows where the time goes until a request has its pages.

A hand-over has six consecutive parts. The span has an attribute with the duration of each part, which can be searched
and summed, and an event at the start of each part. A separate child span for each part would take seven times the
storage. The durations of the parts add up to the duration of the span.

Import this module only if hand-overs are traced, because it needs `opentelemetry-api` (the extra `observe`). The
process's own tracer provider decides where the spans go. If the process has no tracer provider, the spans are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PARTS = {
    "queue": "the request waits for a prefill process",
    "lease": "a prefill process computes the prompt, until the lease is granted",
    "room": "the request waits for free pages here; its lease is renewed",
    "read": "READs of the pages computed so far are under way",
    "fence": "all data has arrived, and the lease words are being read",
    "commit": "the fence has passed, and the loop has yet to publish the pages",
}
"""The parts of a hand-over, in order.

A part that the hand-over did not reach takes 0 s. A hand-over ends before the last part if it fails, and it skips parts
if no page has to be read.
"""

NAME = "kv_handover"
"""The name of every span."""


class HandoverSpan:
    """Records when each part of a hand-over began, and emits a span at its end. Can be reused for the next hand-over.

    Args:
        carrier: headers of the request. If a `traceparent` is among them, the span joins that trace.
        attributes: attributes of every span.
        clock: a monotonic clock, in seconds. The times passed to `begin` must come from the same clock.
    """

    def __init__(
        self,
        carrier: Mapping[str, str],
        attributes: Mapping[str, str | int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._carrier = dict(carrier)
        self._attributes = dict(attributes)
        self._clock = clock
        self._begun: list[tuple[str, float]] = []

    def begin(self, part: str, at: float | None = None) -> None:
        """Begins a part, now or at time `at`, and ends the part before it.

        `at` may come from another thread or host. It is therefore limited to the range from the start of the previous
        part to the current time.
        """
        now = self._clock()
        at = now if at is None else min(at, now)
        self._begun.append((part, max(at, self._begun[-1][1]) if self._begun else at))

    def end(self, error: str = "", **attributes: str | int) -> None:
        """Ends the hand-over and emits its span, as an error if `error` is set.

        A no-op if no part has begun since the last end.
        """
        begun, self._begun = self._begun, []
        if not begun:
            return
        now, wall_ns = self._clock(), time.time_ns()

        def wall(at: float) -> int:
            return wall_ns - round((now - at) * 1e9)

        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, since), (_, until) in pairwise([*begun, ("", now)]):
            seconds[part] += until - since
        span = trace.get_tracer("pagewire").start_span(
            NAME,
            context=TraceContextTextMapPropagator().extract(self._carrier),
            attributes={
                **self._attributes,
                **{f"pagewire.{name}": value for name, value in attributes.items()},
                **{f"pagewire.{part}_seconds": duration for part, duration in seconds.items()},
            },
            start_time=wall(begun[0][1]),
        )
        for part, since in begun:
            span.add_event(part, timestamp=wall(since))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(wall_ns)
