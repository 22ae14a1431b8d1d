"""Prometheus metrics: families, each with the function that reads its values, and the collector for scrapes.

Imported only if metrics are wanted, because this module needs `prometheus_client` (the extra `observe`).
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Histogram = tuple[Sequence[float], Sequence[int], float]
"""The data of a histogram.

It has the upper bounds of the buckets, the number of values in each bucket, and the sum of all values. The last bucket
is for values above all bounds.
"""
Sample = tuple[Sequence[object], float | Histogram]
"""One measurement: the values of the family's own labels, and the measured value."""

_CLASSES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_log = logging.getLogger("pagewire")


class Family(NamedTuple):
    """A metric family.

    Attributes:
        name: the name in a scrape. Counters end in `_total`, units are seconds and bytes, shares are 0 to 1.
        kind: the Prometheus type.
        text: the help text, a sentence.
        labels: the names of the family's own labels.
        read: returns the family's samples, given the observed object. The scraping thread calls it while another thread
            counts. So the function must only read, and must first copy in one step anything that may change
            (`list(d.values())`).
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    read: Callable[[Any], Iterable[Sample]]


class FamilyCollector(Collector):
    """Reads metric families at each scrape.

    Register it with a `CollectorRegistry`, which accepts one collector of a class.

    Scraping costs the loop nothing: a scrape reads existing counters in its own thread. Each figure by itself is
    correct, but two figures of one scrape may belong to different steps, because the loop continues meanwhile. A family
    that cannot be read is left out of the scrape, logged the first time, and counted. The collector never raises.

    Attributes:
        families: the families to read, and one more, which counts the families that could not be read.
    """

    def __init__(
        self, room: str, look: Callable[[], Any], families: Sequence[Family], labels: Mapping[str, object]
    ) -> None:
        self._look = look  # called once per scrape; the families read its result
        self._labels, self._values = tuple(labels), tuple(map(str, labels.values()))
        self._unread: dict[str, int] = {}
        errors = f"pagewire_{room}_unread_families_total"
        text = "Families that a scrape could not read, and left out; the log says why."
        self.families = (*families, Family(errors, "counter", text, (), self._count_unread))

    def _count_unread(self, _: object) -> list[Sample]:
        return [((), sum(self._unread.values()))]

    def describe(self) -> Iterator[Any]:
        """Returns the families without samples. A registry uses them to find duplicate names."""
        return map(self._empty, self.families)

    def collect(self) -> Iterator[Any]:
        """Returns the families with their current samples."""
        look = functools.cache(self._look)
        for family in self.families:
            metric = self._empty(family)
            try:
                for values, figure in family.read(look()):
                    parts = _cumulative(figure) if isinstance(figure, tuple) else (figure,)
                    metric.add_metric([*self._values, *map(str, values)], *parts)
            except Exception:  # noqa: BLE001  (an unreadable family must not cost the host its other metrics)
                if family.name not in self._unread:
                    _log.exception("metric %s cannot be read", family.name)
                self._unread[family.name] = self._unread.get(family.name, 0) + 1
            else:
                yield metric

    def _empty(self, family: Family) -> Any:
        return _CLASSES[family.kind](family.name, family.text, labels=(*self._labels, *family.labels))


def _cumulative(figure: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Convert a histogram to Prometheus's form: for each bound and for infinity, the number of values up to it."""
    bounds, counts, total = figure
    return list(zip([*map(repr, map(float, bounds)), "+Inf"], accumulate(counts), strict=True)), total
