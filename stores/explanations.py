"""explanations: what `troupe why` found about episodes, kept beside them for whoever looks at them.

why ── keep ──> <traces>/why/<episode id>.json ── find, newest ──> `troupe show`, report, dashboard
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stores.files import list_files, read_file, write_file

FOLDER = "why"
Explanation = Mapping[str, Any]
"""What `pipelines.evaluation.why.explain` returns."""


def keep_explanation(traces_uri: str, explanation: Explanation) -> None:
    """Keeps what was found about an episode, in the place of what was found before."""
    write_file(_place(traces_uri, explanation["episode_id"]), json.dumps(explanation, indent=2).encode())


def find_explanation(traces_uri: str, episode_id: str) -> Explanation | None:
    """Returns what was found about an episode, by its whole id; None where nobody asked."""
    data = read_file(_place(traces_uri, episode_id))
    return None if data is None else json.loads(data)


def newest_explanations(traces_uri: str, *, limit: int) -> list[Explanation]:
    """Returns what was found last, the newest first."""
    files = sorted(list_files(f"{traces_uri}/{FOLDER}"), key=lambda file: file.changed_at, reverse=True)[:limit]
    found = (find_explanation(traces_uri, file.name.removesuffix(".json")) for file in files)
    return [explanation for explanation in found if explanation is not None]


def _place(traces_uri: str, episode_id: str) -> str:
    return f"{traces_uri}/{FOLDER}/{episode_id}.json"
