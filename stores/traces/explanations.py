"""explanations: what `troupe why` found about episodes, kept beside them for whoever looks at them.

why ── keep ──> <traces>/why/<run>/<episode id>.json ── find, newest ──> `troupe show`, report, dashboard
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from stores.files import list_files, read_file, write_file

logger = logging.getLogger(__name__)

FOLDER = "why"
Explanation = Mapping[str, Any]
"""What `pipelines.extensions.why.why.explain` returns."""


def keep_explanation(traces_uri: str, run_id: str, explanation: Explanation) -> None:
    """Keeps what was found about an episode, in the place of what was found before."""
    data = json.dumps(explanation, indent=2).encode()
    write_file(f"{_folder(traces_uri, run_id)}/{explanation['episode_id']}.json", data)


def find_explanation(traces_uri: str, run_id: str, episode_id: str) -> Explanation | None:
    """Returns what was found about an episode, by its whole id; None where nobody asked, or the file is damaged."""
    place = f"{_folder(traces_uri, run_id)}/{episode_id}.json"
    data = read_file(place)
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        logger.warning("%s is damaged (%s): ask `troupe why` again", place, error)
        return None


def newest_explanations(traces_uri: str, run_id: str, *, limit: int) -> list[Explanation]:
    """Returns what was found last about episodes of a run, the newest first."""
    files = sorted(list_files(_folder(traces_uri, run_id)), key=lambda file: file.changed_at, reverse=True)[:limit]
    found = (find_explanation(traces_uri, run_id, file.name.removesuffix(".json")) for file in files)
    return [explanation for explanation in found if explanation is not None]


def _folder(traces_uri: str, run_id: str) -> str:
    return f"{traces_uri}/{FOLDER}/{run_id}"
