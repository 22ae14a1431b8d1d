"""A span of OpenTelemetry for each hand-over: where the time goes until a request has its pages.

One span, and no children: a hand-over has six parts that follow one another, so each is an attribute, which can be
searched for and summed up, and an event that shows where it begins; as spans they would be seven times the volume. The
parts sum to the whole. Imported only where hand-overs are traced: it needs `opentelemetry-api` (the extra `observe`).
Spans go where the process's own tracer provider sends them, and nowhere where it has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PARTS = {
    "queue": "it waits until somebody is there to compute its prompt",
    "lease": "its prompt is computed elsewhere, until a lease stands",
    "room": "it waits for pages here, while the lease is renewed",
    "read": "READs are on their way, of what is computed by now",
    "fence": "all data is here, and the lease words are read",
    "commit": "it passed; until the loop has taken the pages up",
}
"""The parts of a hand-over, in order. A part that was not reached (a failure, or no page to read) counts as 0 s."""

NAME = "kv_handover"
"""The name of the spans."""


class HandoverSpan:
    """When each part of a hand-over began, on a monotonic clock; a span once it has ended. Good for several, in turn.

    Args:
        carrier: the headers that the request came with; `traceparent` among them joins the span to its trace.
        attributes: of every span.
        clock: seconds, of the same clock as the times that `begin` is told.
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
        """A part begins, now or `at` a time; the one before it is over.

        A time that another thread or host has read is held between the beginning of the part before and now.
        """
        now = self._clock()
        at = now if at is None else min(at, now)
        self._begun.append((part, max(at, self._begun[-1][1]) if self._begun else at))

    def end(self, error: str = "", **attributes: str | int) -> None:
        """End the hand-over, which is over or has failed. A no-op if none has begun since the last end."""
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
