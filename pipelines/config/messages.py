"""messages: faults of a run config -> lines that name the place, the key, the value and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from stores.by_name import how_to_get
from stores.extensions import SECTIONS
from stores.urls import without_secrets

GONE = {
    "collect.write_batch": "128 episodes are stored at once",
    "serve.drain_timeout_s": "a replica that stops has 30 s for its requests",
    "cluster.num_cpus": "write cluster.resources: {CPU: 1}",
    "cluster.num_gpus": "write cluster.resources: {GPU: 1}",
    "cluster.memory_gib": "write cluster.resources: {memory: 1073741824}, in bytes",
    "train.loss.kl_in_reward_estimator": "it is k1, which alone has the gradient of the KL there",
}
"""Keys that were settings once -> what holds in their place."""


def near(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message: the name of `known` that was probably meant, or all there are."""
    names = sorted(known)
    nearest = get_close_matches(name, names, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else f"; there are {', '.join(names)}"


def explain(error: ValidationError, model: type[BaseModel], place: str) -> str:
    """Returns one line per fault: place, key, what is wrong and, for an unknown key, the nearest known one."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            of_extension = SECTIONS.get(key)
            meant = near(str(fault["loc"][-1]), _keys_at(model, fault["loc"][:-1]))
            lines.append(f"{place}: unknown key {key!r}{': ' + how_to_get(of_extension) if of_extension else meant}")
        elif fault["type"] == "missing":
            lines.append(f"{place}: {key!r} is missing")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            is_value = key and not isinstance(fault["input"], (dict, list))
            got = f" (got {without_secrets(repr(fault['input']))})" if is_value else ""
            lines.append(f"{place}: {key + ': ' if key else ''}{message}{got}")
    return "\n".join(lines)


def _keys_at(model: Any, location: tuple[Any, ...]) -> list[str]:
    """Returns the keys that are known at `location` below `model`."""
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = model.model_fields[part].annotation
        elif get_args(model):
            model = get_args(model)[-1]
        candidates = [m for m in (model, *get_args(model)) if isinstance(m, type) and issubclass(m, BaseModel)]
        model = candidates[-1] if candidates else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
