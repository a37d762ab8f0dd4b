"""yaml_text: YAML text -> plain data. The same key twice in one mapping is refused, where YAML would take the last in silence."""

from __future__ import annotations

from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"


class _UniqueKeys(yaml.SafeLoader):
    """Compares the keys of each mapping as they are written: what `<<` merges into one may be repeated there."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = key.value if key.tag == MERGE else self.construct_object(key)  # type: ignore[no-untyped-call]
            line = key.start_mark.line + 1
            if name in lines:
                raise _Twice(f"{key.value!r} stands twice in the same mapping, in lines {lines[name]} and {line}", line)
            lines[name] = line
        return node


class _Twice(ValueError):
    """Raised for a key that stands twice, with the line of the second."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str, place: str) -> Any:
    """Returns the data in a YAML text. Raises ValueError, with `place` and lines, where it is none or a key stands twice."""
    try:
        return yaml.load(text, _UniqueKeys)
    except _Twice as error:
        raise ValueError(f"{place}:{error.line}: {error}: keep one of them") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(f"{place} is not YAML: {error}") from None
