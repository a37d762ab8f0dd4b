"""yaml_text: YAML text -> plain data, as in YAML 1.2 and JSON: 1e-3 is a number, 2026-02-28 and `no` are texts, and not as in YAML 1.1.

What YAML would read in silence as something else is refused: the same key twice, and 1:30 as 90.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""What YAML 1.1 reads in base 8 or 60, and YAML 1.2 and people do not."""


WITH_EXPONENT = re.compile(r"\A[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")
"""Numbers that YAML 1.1 takes for texts unless they have a point and a sign: 1e-3, 1.5e3."""


TRUTH = re.compile(r"\A(?:true|True|TRUE|false|False|FALSE)\Z")
"""The truth values of YAML 1.2."""


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


# A date in settings would be an object where a config is read from a file, and a text where it came with a job, as JSON. A list of answers
# [yes, no] would be one of truth values.
_OTHERS = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in _OTHERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", TRUTH, list("tTfF"))  # type: ignore[no-untyped-call]
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", WITH_EXPONENT, list("-+.0123456789"))  # type: ignore[no-untyped-call]
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist, by its tag
        raise ValueError(f"{place} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{place}: lists or mappings within one another, too deep to be read") from None
