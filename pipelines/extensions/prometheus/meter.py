"""meter: keeps the figures that Prometheus shows of a run in an actor that outlives stages.

    stage, collector ──points──> Meter (detached actor, one per cluster) ──> metrics endpoint of its Ray node ──> Prometheus

A stage that is a job lives for seconds, and a counter that dies with its process is lost between two scrapes: therefore one
actor owns all counters. Points are sent without waiting, a batch of episodes at a time, and a lost one changes no result.
In Prometheus each name has Ray's prefix `ray_`, counters also the suffix `_total`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stores.journal.stage_results import Collected, Evaluated, Measured
from stores.resources import ON_HEAD

NAMESPACE = "troupe"
ACTOR_NAME = "meter"
MAX_KEYS = 10_000
REFRESH_S = 1.0

Point = tuple[str, float | Sequence[float], Mapping[str, str]]
"""A metric's name, its value (of a histogram several values), and tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: counters are added to, gauges are set, and histograms observe values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    tags: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    ends_with: tuple[str, ...] = ()
    """The stages that a gauge describes while they run: it is set to 0 when one of the run ends, whose process may have died."""

    @property
    def exported(self) -> str:
        """Returns its name in Prometheus."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, help: str, tags: str) -> Metric:
    return Metric(name=name, kind="counter", help=help, tags=tuple(tags.split()))


def _gauge(name: str, help: str, tags: str, *, ends_with: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, kind="gauge", help=help, tags=tuple(tags.split()), ends_with=ends_with)


def _histogram(name: str, help: str, tags: str, *, bounds: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind="histogram", help=help, tags=tuple(tags.split()), bounds=bounds)


METRICS = {
    metric.name: metric
    for metric in (
        _counter("troupe_stages", "Stages that ended, by outcome (done, failed).", "run stage model_group outcome"),
        _gauge("troupe_stage_seconds", "Seconds of the last attempt of a stage.", "run stage model_group"),
        _gauge("troupe_iteration", "Latest iteration with an ended stage.", "run"),
        _counter("troupe_episodes", "Episodes stored, by how they ended.", "run purpose status"),
        _gauge(
            "troupe_episodes_in_flight",
            "Episodes that a collector runs at once.",
            "run collector",
            ends_with=(Collected.STAGE, Evaluated.STAGE, Measured.STAGE),
        ),
        _counter(
            "troupe_tokens", "Tokens of stored episodes, of prompts and of completions.", "run purpose model_group kind"
        ),
        _histogram(
            "troupe_turn_seconds",
            "Seconds of a model call as the workflow sees it, waiting included.",
            "run purpose model_group",
            bounds=(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0),
        ),
        _counter("troupe_trained_rows", "Rows trained on.", "run model_group"),
        _gauge(
            "troupe_logprob_gap_mean",
            "Mean |difference| between the trainer's and the engine's logprobs of the last trained rows, nats.",
            "run model_group",
        ),
        _gauge("troupe_logprob_gap_max", "Largest |difference| of the same.", "run model_group"),
        _gauge("troupe_sync_seconds", "Seconds of the last sync, proof included.", "run"),
        _gauge(
            "troupe_policy_version",
            "Version of a model group: last trained, last proven to be served.",
            "run model_group of",
        ),
        _gauge("troupe_accuracy", "Accuracy on the gate's tasks at the last evaluation.", "run team"),
        _gauge(
            "troupe_episode_metrics",
            "Figures that tell whether a team degrades, by what they are of (iteration, test, sentinel, service, gateway).",
            "run source figure",
        ),
        _gauge(
            "troupe_alarm", "1 where a figure has left the range that is usual for the champion.", "run source figure"
        ),
        _gauge("troupe_champion_version", "Team version of the champion.", "run"),
    )
}


class Meter:
    """The actor. A point with an unknown name comes from newer code than the actor's, and is dropped."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._metrics: dict[str, Any] = {}
        for metric in METRICS.values():
            if metric.kind == "histogram":
                recorder: Any = metrics.Histogram(metric.name, metric.help, list(metric.bounds), metric.tags)
            else:
                kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
                recorder = kind(metric.name, metric.help, metric.tags)
            self._metrics[metric.name] = recorder
        self._seen: dict[str, None] = {}
        self._gauges: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        threading.Thread(target=self._refresh, daemon=True).start()

    def observe(self, points: Sequence[Point], key: str = "") -> None:
        """Records points; those of a `key` that was seen before are dropped."""
        if key:
            if key in self._seen:
                return
            self._seen[key] = None
            if len(self._seen) > MAX_KEYS:
                self._seen.pop(next(iter(self._seen)))
        for name, value, tags in points:
            if name in METRICS:
                self._take(METRICS[name], value, dict(tags))

    def _take(self, metric: Metric, value: Any, tags: dict[str, str]) -> None:
        if metric.kind == "gauge":
            self._set(metric.name, frozenset(tags.items()), value)
        elif metric.kind == "histogram":
            for observation in value:
                self._metrics[metric.name].observe(observation, tags)
        elif value:
            self._metrics[metric.name].inc(value, tags)
        if metric.name == "troupe_stages":
            for name, gauge_tags in list(self._gauges):
                if tags["stage"] in METRICS[name].ends_with and ("run", tags["run"]) in gauge_tags:
                    self._set(name, gauge_tags, 0.0)

    def _set(self, name: str, tags: frozenset[tuple[str, str]], value: float) -> None:
        self._gauges[name, tags] = value
        self._metrics[name].set(value, dict(tags))

    def _refresh(self) -> None:
        """Sets all gauges again and again: Ray drops a gauge that is not set between two of its reports (10 s)."""
        while True:
            time.sleep(REFRESH_S)
            for (name, tags), value in list(self._gauges.items()):
                self._metrics[name].set(value, dict(tags))


_meters: dict[str, Any] = {}
"""Handles of the actor by cluster."""


def send(points: Sequence[Point], key: str = "") -> bool:
    """Sends points to the cluster's Meter, which is started if there is none, and does not wait.

    Points are dropped, and False is returned, where this process is not connected to Ray: nobody scrapes it.

    Args:
        key: names an event that may be reported twice, and is counted once.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    cluster = ray.get_runtime_context().gcs_address
    if cluster not in _meters:
        options: dict[str, Any] = {"name": ACTOR_NAME, "namespace": NAMESPACE, "get_if_exists": True}
        options |= {"lifetime": "detached", "max_restarts": -1, "num_cpus": 0, "resources": ON_HEAD}
        _meters[cluster] = ray.remote(Meter).options(**options).remote()
    _meters[cluster].observe.remote(list(points), key)
    return True
