"""Collects the spans that OpenTelemetry's own SDK exports, in this process and in other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from transfer.spans import PARTS

_memory = InMemorySpanExporter()


@contextmanager
def exported() -> Iterator[Callable[[], Sequence[Any]]]:
    """Collects the spans exported in a `with` block by the provider of this process, which can be set only once."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_memory))
        trace.set_tracer_provider(provider)
    _memory.clear()
    yield lambda: list(_memory.get_finished_spans())


def parts_of(span: ReadableSpan) -> dict[str, float]:
    """Returns the seconds that each part of a hand-over took."""
    assert span.attributes is not None
    return {part: span.attributes[f"pagewire.{part}_seconds"] for part in PARTS}  # type: ignore[misc]


def main() -> int:
    """Runs a process of the service that writes its spans to a file, one line of JSON each: `python -m tests.spans
    FILE`.
    """
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    from scheduler_adapters.service import program

    with Path(sys.argv[1]).open("a", buffering=1) as file:
        provider = TracerProvider()
        export = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(export))
        trace.set_tracer_provider(provider)
        return program.main()


if __name__ == "__main__":
    sys.exit(main())
