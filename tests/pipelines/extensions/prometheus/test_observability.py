"""What the dashboard draws is what the code exports, and the reverse; the other files of infra/observability parse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pipelines.extensions.prometheus.meter import METRICS

pytestmark = pytest.mark.fast

FOLDER = Path(__file__).parents[4] / "infra" / "observability"
DASHBOARD = FOLDER / "dashboards" / "troupe.json"
HISTOGRAM = ("_bucket", "_sum", "_count")


def drawn() -> set[str]:
    """Metric names in the expressions of the dashboard's panels and variables."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    return {name for expression in asked for name in re.findall(r"\bray_\w+", expression)}


def exported() -> set[str]:
    """Names under which Prometheus has Troupe's metrics."""
    return {f"{m.exported}_bucket" if m.kind == "histogram" else m.exported for m in METRICS.values()}


def test_the_dashboard_draws_exactly_the_metrics_that_troupe_exports() -> None:
    ours = {name for name in drawn() if name.startswith("ray_troupe_")}
    assert (sorted(ours - exported()), sorted(exported() - ours)) == ([], []), "(not exported, not drawn)"


def test_panels_ask_for_tags_that_their_metric_has() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    by_name = {name: METRICS[name] for name in METRICS}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for name in re.findall(r"\bray_(troupe_\w+?)(?:_total|_bucket)?\{", target["expr"]):
                tags = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert tags <= set(by_name[name].tags), (panel["title"], tags)


def test_prometheus_and_grafana_files_are_whole() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == ["/tmp/ray/session_latest/prom_metrics_service_discovery.json"]
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "datasource" in panel]
    assert {panel["datasource"]["uid"] for panel in panels} == uids
    assert yaml.safe_load((FOLDER / "provisioning/dashboards/troupe.yaml").read_text())["providers"]
    assert len({panel["id"] for panel in panels}) == len(panels)
