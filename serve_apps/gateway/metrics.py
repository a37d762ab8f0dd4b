"""metrics: what Prometheus shows of a gateway replica."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_apps.gateway.admission import Admission

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """Counters of one replica; no prompt, no answer and no user among the labels."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "troupe_gateway_requests", "Requests by route and status", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "troupe_gateway_seconds",
            "Until the answer, or the first byte of a stream",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._answers = Counter(
            "troupe_gateway_answers",
            "Answers by team version and key",
            ["team", "version", "key"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "troupe_gateway_completion_tokens",
            "Sampled tokens of answers",
            ["team", "version"],
            registry=self._registry,
        )
        self._shadows = Counter(
            "troupe_gateway_shadows",
            "Requests that a candidate got too: answered, failed, late (its engines stand back), or dropped for want of room",
            ["team", "version", "outcome"],
            registry=self._registry,
        )
        self._captured = Counter(
            "troupe_gateway_captured",
            "Episodes that may be kept, by what became of them: kept, redacted, dropped, failed; and feedback",
            ["outcome"],
            registry=self._registry,
        )
        self._episodes = Counter(
            "troupe_gateway_episodes",
            "Episodes that callers' programs played, by how they ended",
            ["team", "version", "status"],
            registry=self._registry,
        )
        in_flight = Gauge("troupe_gateway_in_flight", "Requests being answered", registry=self._registry)
        in_flight.set_function(lambda: admission.num_in_flight)
        waiting = Gauge("troupe_gateway_waiting", "Requests in the queue", registry=self._registry)
        waiting.set_function(lambda: admission.num_waiting)

    def request(self, route: str, status: int, seconds: float) -> None:
        """One request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answer(self, team: str, version: int, key: str, completion_tokens: int) -> None:
        """One answer of a team."""
        self._answers.labels(team, str(version), key).inc()
        self._tokens.labels(team, str(version)).inc(completion_tokens)

    def shadow(self, team: str, version: int, outcome: str) -> None:
        """One request that a candidate got, or should have got, too."""
        self._shadows.labels(team, str(version), outcome).inc()

    def episode(self, team: str, version: int, status: str) -> None:
        """One episode of a caller's program has ended."""
        self._episodes.labels(team, str(version), status).inc()

    def captured(self, outcome: str, num: int) -> None:
        """Episodes that may be kept, or feedback on one."""
        self._captured.labels(outcome).inc(num)

    def text(self) -> str:
        """In Prometheus' format."""
        return generate_latest(self._registry).decode()
