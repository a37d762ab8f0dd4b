"""yaml_text: YAML text -> plain data. What YAML would read in silence as something else is refused: the same key twice, and 1:30 as 90."""

from __future__ import annotations

import re
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""What YAML 1.1 reads in base 8 or 60, and YAML 1.2 and people do not."""


class _Loader(yaml.SafeLoader):
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
                lines_of_both = f"lines {lines[name]} and {line}"
                raise _Refused(
                    f"{key.value!r} stands twice in the same mapping, in {lines_of_both}: keep one of them", line
                )
            lines[name] = line
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_int = node.tag == "tag:yaml.org,2002:int"
        value: int | float = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)  # type: ignore[no-untyped-call]
        if OTHER_BASE.fullmatch(node.value):
            raise _Refused(
                f"YAML reads {node.value} as {value}: write that number, or '{node.value}' with quotes for the text",
                node.start_mark.line + 1,
            )
        return value


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


class _Refused(ValueError):
    """Raised for what is not what it looks like, with its line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str, place: str) -> Any:
    """Returns the data in a YAML text.

    Raises ValueError, with `place` and lines, where it is none, a key stands twice or a number is written in base 8 or 60.
    """
    try:
        return yaml.load(text, _Loader)
    except _Refused as error:
        raise ValueError(f"{place}:{error.line}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(f"{place} is not YAML: {error}") from None
