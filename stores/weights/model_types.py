"""model_types: the types of models that the installed transformers can build, read from its source without importing it."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from stores.syntax_trees import parse_python

MAPPING = "CONFIG_MAPPING_NAMES"


def is_known_type(model_type: str) -> bool | None:
    """Returns whether transformers has a `model_type`; None where it is not installed, or does not list them as expected."""
    words = _words()
    return model_type in words if words else None


@cache
def _words() -> frozenset[str]:
    """Returns every text in the modules that list the types; empty where there are none.

    Among them are names of classes, too: no type that transformers has is missing, which is what counts.
    """
    spec = find_spec("transformers")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [
        Path(folder) / "models" / "auto" / name
        for folder in folders
        for name in ("auto_mappings.py", "configuration_auto.py")
    ]
    sources = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    if not any(MAPPING in source for source in sources):
        return frozenset()
    nodes = (node for source in sources for node in ast.walk(parse_python(source)))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
