"""scraper: a small Prometheus: what the nodes of a Ray cluster show on their metrics endpoints while it lives."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import urllib.request
from pathlib import Path

EVERY_S = 1.0


class Scraper:
    """Scrapes, from a thread, the cluster that is started with `environment`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="troupe-", dir="/tmp"))  # short: sockets lie below it
        self.environment = {"RAY_TMPDIR": str(self.folder), "RAY_metrics_report_interval_ms": "1000"}
        self.values: dict[str, float] = {}
        """Last value by series, e.g. `ray_troupe_iteration{...,run="small"}`."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def names(self) -> set[str]:
        """Metrics seen at least once."""
        return {series.partition("{")[0] for series in self.values}

    def of(self, name: str, **tags: str) -> list[float]:
        """Last values of the series of a metric that have these tags."""
        wanted = [f'{tag}="{value}"' for tag, value in tags.items()]
        return [v for s, v in self.values.items() if s.partition("{")[0] == name and all(w in s for w in wanted)]

    def close(self) -> None:
        """Stops scraping and removes Ray's files."""
        self._stopped.set()
        self._thread.join(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            for target in self._targets():
                try:
                    text = urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read().decode()
                except OSError:  # not up yet, or gone
                    continue
                for line in text.splitlines():
                    series, _, value = line.rpartition(" ")
                    if series and not line.startswith("#"):
                        self.values[series] = float(value)

    def _targets(self) -> list[str]:
        """As Prometheus finds them: in the file that Ray writes for its service discovery."""
        for path in self.folder.glob("ray/session_latest/prom_metrics_service_discovery.json"):
            try:
                return [target for entry in json.loads(path.read_text()) for target in entry["targets"]]
            except (OSError, json.JSONDecodeError):  # being written
                return []
        return []
