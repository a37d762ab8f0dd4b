"""messages: faults of a run config -> lines that name the place, the key, the value and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipelines.config.renamed import REMOVED_KEYS, RENAMED_KEYS, RENAMED_VALUES, SPLIT_KEYS
from stores.url_secrets import without_secrets


def near(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message: the name of `known` that was probably meant, or all there are."""
    names = sorted(known)
    nearest = get_close_matches(name, names, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else f"; there are {', '.join(names)}"


def explain(error: ValidationError, model: type[BaseModel], place: str, *, section: str = "") -> str:
    """Returns one line per fault: place, key, what is wrong and, for an unknown key, its new name or the nearest known one.

    Args:
        section: the section of the run config that `model` is, where it is not the whole.
    """
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        key = f"{section}.{where}" if section else where
        if fault["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key {where!r}: {_hint(key, model, fault['loc'], section)}")
        elif fault["type"] == "missing":
            lines.append(f"{place}: {where!r} is missing")
        elif fault["type"] == "literal_error" and str(fault["input"]) in (values := RENAMED_VALUES.get(key, {})):
            lines.append(f"{place}: {where}: {fault['input']!r} is called {values[str(fault['input'])]!r} now")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            got = (
                f" (got {without_secrets(repr(fault['input']))})"
                if where and not isinstance(fault["input"], (dict, list))
                else ""
            )
            lines.append(f"{place}: {where + ': ' if where else ''}{message}{got}")
    return "\n".join(lines)


def _hint(key: str, model: type[BaseModel], location: tuple[Any, ...], section: str) -> str:
    """Returns what to write instead of an unknown key."""
    if key in RENAMED_KEYS:
        return f"it is called {RENAMED_KEYS[key].removeprefix(section + '.')!r} now"
    if key in SPLIT_KEYS:
        names = " and ".join(repr(name.removeprefix(section + ".")) for name in SPLIT_KEYS[key])
        return f"there are {names} in its place"
    if key in REMOVED_KEYS:
        return REMOVED_KEYS[key]
    known = _keys_at(model, location[:-1])
    nearest = get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"


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
