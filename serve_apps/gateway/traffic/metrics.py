"""metrics: the Prometheus metrics of a gateway replica."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from serve_apps.gateway.traffic.admission import Admission

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """The metrics of one replica. No prompt, no answer and no user is among the labels."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "troupe_gateway_requests", "Requests by route and status", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "troupe_gateway_seconds",
            "Seconds until the reply, or the first byte of a stream",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._answers = Counter(
            "troupe_gateway_answers",
            "Complete answers by team version and key",
            ["team", "version", "key"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "troupe_gateway_completion_tokens",
            "Sampled tokens of the answers",
            ["team", "version"],
            registry=self._registry,
        )
        self._shadows = Counter(
            "troupe_gateway_shadows",
            "Shadow requests by outcome: answered, failed, late (its engines run at low priority), or dropped (no free place)",
            ["team", "version", "outcome"],
            registry=self._registry,
        )
        self._captured = Counter(
            "troupe_gateway_captured",
            "Episodes that callers allow to be stored, by outcome: kept, redacted, dropped, failed; and feedback",
            ["outcome"],
            registry=self._registry,
        )
        self._episodes = Counter(
            "troupe_gateway_episodes",
            "Episodes that callers' programs played, by status",
            ["team", "version", "status"],
            registry=self._registry,
        )
        in_flight = Gauge("troupe_gateway_in_flight", "Requests being answered", registry=self._registry)
        in_flight.set_function(lambda: admission.num_in_flight)
        waiting = Gauge("troupe_gateway_waiting", "Requests in the queue", registry=self._registry)
        waiting.set_function(lambda: admission.num_waiting)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Counts one HTTP request with its latency."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_answer(self, team: str, version: int, key: str, completion_tokens: int, *, is_complete: bool) -> None:
        """Counts one answer of a team and its sampled tokens; of one that was cut short only these."""
        self._answers.labels(team, str(version), key).inc(int(is_complete))
        self._tokens.labels(team, str(version)).inc(completion_tokens)

    def count_shadow(self, team: str, version: int, outcome: str) -> None:
        """Counts one shadow request by its outcome."""
        self._shadows.labels(team, str(version), outcome).inc()

    def count_episode(self, team: str, version: int, status: str) -> None:
        """Counts one episode of a caller's program that has ended."""
        self._episodes.labels(team, str(version), status).inc()

    def count_captured(self, outcome: str, num: int) -> None:
        """Counts episodes that callers allow to be stored, or feedback on them."""
        self._captured.labels(outcome).inc(num)

    def text(self, teams: Collection[str]) -> str:
        """Returns the metrics of these teams, and those of all requests together, in Prometheus' text format."""
        return generate_latest(_Visible(self._registry, teams)).decode()


class _Visible(CollectorRegistry):
    """A registry without what is said of other teams."""

    def __init__(self, registry: CollectorRegistry, teams: Collection[str]) -> None:
        super().__init__()
        self._all, self._teams = registry, teams

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, with the samples of these teams."""
        for metric in self._all.collect():
            metric.samples = [s for s in metric.samples if s.labels.get("team", "") in ("", *self._teams)]
            yield metric
