"""shown_advantages: per-token advantages of a few episodes of each order, beside the weights that they trained.

    trainer ── write_advantages ──> <version>/advantages.json ── read_advantages ──> dashboard

For people to look at: nothing is trained on them, and they go when the version goes. Which episodes is decided by their ids
alone, which are hashes, so that all model groups of an iteration keep the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from stores.weight_cache import fetch
from stores.weights import WeightStore

ADVANTAGES_FILE = "advantages.json"
"""By episode and turn: one number where all tokens have the same, else one per token."""
NUM_SHOWN = 32
"""Episodes per order."""
DIGITS = 5


def write_advantages(folder: Path, advantages: Mapping[tuple[str, int], Iterable[float]]) -> None:
    """Writes those of the first `NUM_SHOWN` episodes. Args: advantages: by episode id and turn index, per token."""
    shown: dict[str, dict[int, float | list[float]]] = {}
    for (episode, turn), values in sorted(advantages.items()):
        if episode in shown or len(shown) < NUM_SHOWN:
            rounded = [float(f"{value:.{DIGITS}g}") for value in values]
            shown.setdefault(episode, {})[turn] = rounded[0] if len(set(rounded)) == 1 else rounded
    (folder / ADVANTAGES_FILE).write_text(json.dumps(shown))


def read_advantages(
    weights_uri: str, *, model_group: str, version: int, episode_id: str
) -> dict[int, float | list[float]]:
    """By turn index; empty where the version is gone, was made otherwise, or did not keep this episode's."""
    ref = WeightStore(weights_uri).ref(model_group, version)
    path = None if ref is None else fetch(ref, with_tensors=False) / ADVANTAGES_FILE
    if path is None or not path.is_file():
        return {}
    of_episode = json.loads(path.read_text()).get(episode_id, {})
    return {int(turn): values for turn, values in of_episode.items()}
