"""vocabulary: traces and model versions -> whether the traces' token ids mean the same to another model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stores.types import ModelVersionRef, Trace
from stores.weights.manifest import whole_model
from stores.weights.store import WeightStore
from stores.weights.weight_cache import fetch

NO_IDS = ("truncation", "padding", "version")
"""Entries of a tokenizer.json that change no token id."""


def version_that_acted(weights: WeightStore, group: str, traces: Iterable[Trace]) -> ModelVersionRef | None:
    """A version whose tokenizer made the traces' token ids of a model group; None where none is left.

    Every version of a model group has the tokenizer of version 0, so that any version will do.
    """
    acted = {trace.policy_versions[group] for trace in traces if group in trace.policy_versions}
    return next((ref for version in sorted({0, *acted}) if (ref := weights.ref(group, version))), None)


def vocabulary_of(ref: ModelVersionRef) -> dict[str, Any]:
    """`vocabulary` of a model version; an adapter has that of its base."""
    return vocabulary(fetch(whole_model(ref), with_tensors=False))


def vocabulary(folder: Path) -> dict[str, Any]:
    """The entries of a model folder's tokenizer.json that decide which text has which token ids."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, by which the tokenizers of stored traces are compared")
    return {name: entry for name, entry in json.loads(file.read_text()).items() if name not in NO_IDS}
