"""Prometheus text. What clients saw is counted here; the rest is read from the cluster's status."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from snowskin.measure.histogram import LATENCY_EDGES_S
from snowskin.measure.records import RequestRecord, Slo, is_effective
from snowskin.terms.serving import ClusterStatus, NodeState, NodeStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ApiMetrics:
    """Counters and histograms of one API. Each has its own registry, so many may live at once."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._registry = CollectorRegistry()
        self._ttft = self._histogram("ttft_seconds", "Arrival to the first token.")
        self._tbt = self._histogram(
            "tbt_seconds", "Per request: mean of the longest 10 % of the intervals between tokens."
        )
        self._interval = self._histogram("token_interval_seconds", "Between tokens, each.")
        self._duration = self._histogram("request_seconds", "Arrival to the end, if it completed.")
        self._prompt = self._counter("prompt_tokens", "Of requests that had a first token.")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens that were reused.")
        self._hits = self._counter("prefix_hits", "Requests that reused at least one token.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._effective = self._counter("effective_requests", "Completed and within both SLOs.")
        self._requests = Counter(
            "snowskin_requests",
            "Generations by how they ended; invalid: refused before they were one.",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in ("completed", "rejected", "failed", "cancelled", "invalid"):
            self._requests.labels(outcome)

    def token_interval(self, interval_s: float) -> None:
        """Count the time between two tokens of one generation."""
        self._interval.observe(interval_s)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error before it became a generation."""
        outcome = "rejected" if status == 429 else "failed" if status >= 500 else "invalid"
        self._requests.labels(outcome).inc()

    def finished(self, record: RequestRecord) -> None:
        """Count one generation that ended."""
        self._requests.labels(record.ending.value).inc()
        self._generated.inc(record.output_tokens)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
            self._prompt.inc(record.prompt_tokens)
            self._cached.inc(record.cached_tokens)
            self._hits.inc(record.cached_tokens > 0)
        if record.tbt_s is not None:
            self._tbt.observe(record.tbt_s)
        if record.ending == "completed":
            self._duration.observe(record.finished_s - record.arrived_s)
        self._effective.inc(is_effective(record, self._slo))

    def render(self, status: ClusterStatus) -> bytes:
        """All as Prometheus text. May run in any thread."""
        snapshot = CollectorRegistry()
        snapshot.register(_StatusCollector(status))
        return generate_latest(self._registry) + generate_latest(snapshot)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"snowskin_{name}", text, buckets=LATENCY_EDGES_S, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"snowskin_{name}", text, registry=self._registry)


class _StatusCollector(Collector):
    """One status as metrics."""

    def __init__(self, status: ClusterStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The families, in a fixed order."""
        yield from self._cluster()
        yield from self._nodes()
        yield from self._transfers()

    def _cluster(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("ready", "1 when requests are served.", int(status.ready))
        yield _gauge("uptime_seconds", "Since the cluster started.", status.uptime_s)
        yield _gauge("requests_in_flight", "Admitted and not ended.", status.requests_in_flight)
        yield _gauge("directory_blocks", "Distinct blocks known.", status.directory_blocks)
        yield _gauge(
            "hot_block_replicas", "Beyond the first of each block.", status.hot_block_replicas
        )
        rejections = CounterMetricFamily(
            "snowskin_rejections", "Requests turned away, by the reason.", labels=["reason"]
        )
        for reason, count in sorted(status.rejections.items()):
            rejections.add_metric([reason], count)
        yield rejections

    def _nodes(self) -> Iterator[Metric]:
        yield self._per_node("node_ready", "1 when the node takes work.", _is_ready)
        yield self._per_node(
            "node_running_sequences", "In the running batch.", lambda node: node.running_sequences
        )
        yield self._per_node(
            "node_queue_sequences", "Waiting in the queue.", lambda node: node.waiting_sequences
        )
        yield self._per_node(
            "node_context_tokens", "KV of the running batch.", lambda node: node.context_tokens
        )
        yield self._per_node("node_blocks", "Of the segment.", lambda node: node.block_count)
        yield self._per_node(
            "node_used_blocks", "Reserved or committed.", lambda node: node.used_blocks
        )
        totals: tuple[tuple[str, str, Callable[[NodeStatus], int]], ...] = (
            ("node_restarts", "Times the node was started anew.", lambda node: node.restarts),
            ("node_committed_blocks", "Blocks committed.", lambda node: node.committed_blocks),
            ("node_evicted_blocks", "Blocks evicted.", lambda node: node.evicted_blocks),
        )
        for name, text, value in totals:
            family = CounterMetricFamily(f"snowskin_{name}", text, labels=["node", "role"])
            for node in self._status.nodes:
                family.add_metric([node.node, node.role.value], value(node))
            yield family

    def _per_node(self, name: str, text: str, value: Callable[[NodeStatus], int]) -> Metric:
        family = GaugeMetricFamily(f"snowskin_{name}", text, labels=["node", "role"])
        for node in self._status.nodes:
            family.add_metric([node.node, node.role.value], value(node))
        return family

    def _transfers(self) -> Iterator[Metric]:
        families = [
            CounterMetricFamily(f"snowskin_{name}", text, labels=["kind"])
            for name, text in (
                ("transfers", "Transfers of KV between nodes."),
                ("transfer_bytes", "KV bytes that went between nodes."),
                ("transfer_seconds", "Time of the transfers, summed."),
                ("transfer_failures", "Transfers that brought less than asked."),
            )
        ]
        for each in self._status.transfers:
            values = (each.transfers, each.transfer_bytes, each.transfer_s, each.failures)
            for family, value in zip(families, values, strict=True):
                family.add_metric([each.kind.value], value)
        yield from families


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"snowskin_{name}", text, value=value)


def _is_ready(node: NodeStatus) -> int:
    return int(node.state is NodeState.READY)
