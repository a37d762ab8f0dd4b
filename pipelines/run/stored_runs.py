"""stored_runs: a folder of runs, or a journal's URL -> the runs that are kept there, opened from the configs they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config.run_config import parse_config
from pipelines.run.run import Run

if TYPE_CHECKING:
    from stores.journal import Journal


def journals(root: str) -> list[Journal]:
    """The journals of the runs in a folder, or the one at a URL."""
    from stores.journal import Journal
    from stores.sqlite_urls import sqlite_url

    if "://" in root:
        return [Journal(root)]
    return [Journal(sqlite_url(path.resolve())) for path in sorted(Path(root).glob("*/journal.db"))]


def stored_run(name: str, root: str) -> Run:
    """The run of this name, with the config that its journal keeps; ValueError, naming those there are, without one."""
    rows = {row.run_id: (journal, row) for journal in journals(root) for row in journal.runs()}
    if name not in rows:
        raise ValueError(
            f"no run {name!r} below {root}; there are: {', '.join(sorted(rows)) or 'none'} (or give its RUN.yaml)"
        )
    journal, row = rows[name]
    data: dict[str, Any] = json.loads(row.config_json)
    if "://" not in root:
        data["storage"]["root"] = root  # folders move
    return Run(parse_config(data, f"the config of run {name!r} in {journal.shown_url}"))
