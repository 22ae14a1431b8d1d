"""Reads a scrape of collectors, and checks its names against the conventions of Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# `promtool check metrics` rejects these: units that are not base units, abbreviated units, and names of metric types.
_UNITS = (
    "nanoseconds|microseconds|milliseconds|minutes|hours|days|weeks|kilobytes|megabytes|gigabytes|kibibytes|"
    "bits|percent|percents|pct|ms|us|ns|kb|mb|gb|kib|mib|gib|s|sec|secs|b|min|h"
)
_TYPES = "counter|gauge|histogram|summary"
_ENDINGS = ("_count", "_sum", "_bucket")


def text_of(*collectors: Any) -> str:
    """Returns the text of a scrape, from a registry with these collectors."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def parsed(text: str) -> Scrape:
    """Returns the samples of a scrape, by name and labels. Each sample must occur only once."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def scraped(*collectors: Any) -> Scrape:
    """Makes a scrape now and returns it as `parsed` does."""
    return parsed(text_of(*collectors))


def value(found: Scrape, name: str, **labels: object) -> float:
    """Returns the sum of all samples with this name and these labels."""
    wanted = {(label, str(of)) for label, of in labels.items()}
    matching = [figure for (of, has), figure in found.items() if of == name and wanted <= set(has)]
    assert matching, f"no {name} with {labels}"
    return sum(matching)


def faults(text: str) -> Iterator[str]:
    """Returns the violations of Prometheus's conventions in a scrape."""
    for family in text_string_to_metric_families(text):
        name = family.name
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
            yield f"{name}: lower case, digits and single underscores only"
        if found := re.search(rf"_({_UNITS}|{_TYPES})(_|$)", name):
            yield f"{name}: {found[1]} is no base unit, or the word for a type"
        if name.endswith(("_total", *_ENDINGS)):  # the parser removes a counter's `_total`
            yield f"{name}: the ending is for another type"
        if not re.fullmatch(r"[A-Z].*\.", family.documentation):
            yield f"{name}: its help is no sentence: {family.documentation!r}"
        for sample in family.samples:
            yield from _faults_of(family.type, sample)


def _faults_of(kind: str, sample: Any) -> Iterator[str]:
    if kind == "counter" and not sample.name.endswith("_total"):
        yield f"{sample.name}: a counter ends in _total"
    if "_ratio" in sample.name and not 0 <= sample.value <= 1:
        yield f"{sample.name}: a share of {sample.value}"
    if sample.value < 0 or math.isnan(sample.value):
        yield f"{sample.name}: {sample.value}"
    for label in sample.labels:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label) or (label == "le" and not sample.name.endswith("_bucket")):
            yield f"{sample.name}: label {label!r}"
