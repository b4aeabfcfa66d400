"""Metrics of one process in a registry of its own: nothing is registered at import, nothing is global."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "deepserve_"
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Makes metrics and renders them. Names get the prefix `deepserve_`; units end names (`_seconds`, `_bytes`)."""

    def __init__(self, service: str) -> None:
        self._registry = CollectorRegistry(target_info={"service": service})
        ProcessCollector(registry=self._registry)
        peak = "Most memory that the process ever held."
        self.watch("peak_resident_memory_bytes", peak, None, lambda: {"": float(peak_resident_bytes())})

    def counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, says, labels, registry=self._registry)

    def gauge(self, name: str, says: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, says, labels, registry=self._registry)

    def histogram(
        self, name: str, says: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S
    ) -> Histogram:
        return Histogram(_PREFIX + name, says, labels, registry=self._registry, buckets=buckets)

    def watch(self, name: str, says: str, label: str | None, read: Callable[[], Mapping[str, float]]) -> None:
        """A gauge whose values are read when somebody asks: one for each value of `label`, or one alone under ""."""
        self._registry.register(_Watched(GaugeMetricFamily, _PREFIX + name, says, label, read))

    def watch_counts(self, name: str, says: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """As `watch`, for counts that never fall."""
        self._registry.register(_Watched(CounterMetricFamily, _PREFIX + name, says, label, read))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _Watched(Collector):
    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        says: str,
        label: str | None,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._family = family
        self._name = name
        self._says = says
        self._labels = [] if label is None else [label]
        self._read = read

    def collect(self) -> Iterable[Metric]:
        metric = self._family(self._name, self._says, labels=self._labels)
        for value, number in self._read().items():
            metric.add_metric([value] if self._labels else [], number)
        yield metric


def peak_resident_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
