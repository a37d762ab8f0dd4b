"""shown_advantages: keeps the advantages per token of a few episodes of each job, beside the weights that they trained.

    trainer ── write_advantages ──> <version>/advantages.json ── read_advantages ──> dashboard

They are for people to look at: nothing is trained on them, and they are removed with the version. Episodes are chosen by
their ids alone, which are hashes, so that all model groups of an iteration keep the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from stores.weights.store import WeightStore
from stores.weights.weight_cache import fetch

ADVANTAGES_FILE = "advantages.json"
"""Holds by episode and turn one number where all tokens have the same advantage, else one per token."""
NUM_SHOWN = 32
"""Episodes per job."""
DIGITS = 5
"""Significant digits of a number: more make the file larger, and nobody reads them."""


def write_advantages(folder: Path, advantages: Mapping[tuple[str, int], Iterable[float]]) -> None:
    """Writes the advantages of the first `NUM_SHOWN` episodes. Args: advantages: per token, by episode id and turn index."""
    shown: dict[str, dict[int, float | list[float]]] = {}
    for (episode, turn), values in sorted(advantages.items()):
        if episode in shown or len(shown) < NUM_SHOWN:
            rounded = [float(f"{value:.{DIGITS}g}") for value in values]
            shown.setdefault(episode, {})[turn] = rounded[0] if len(set(rounded)) == 1 else rounded
    (folder / ADVANTAGES_FILE).write_text(json.dumps(shown))


def read_advantages(
    weights_uri: str, *, model_group: str, version: int, episode_id: str
) -> dict[int, float | list[float]]:
    """Returns advantages by turn index; empty where the version is gone, is no trainer's, or has none of this episode."""
    ref = WeightStore(weights_uri).ref(model_group, version)
    path = None if ref is None else fetch(ref, with_tensors=False) / ADVANTAGES_FILE
    if path is None or not path.is_file():
        return {}
    of_episode = json.loads(path.read_text()).get(episode_id, {})
    return {int(turn): values for turn, values in of_episode.items()}
