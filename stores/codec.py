"""codec: records <-> JSON values, both ways derived from the types of the fields. (Arrow columns: `stores/traces/rows.py`.)"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

FAULTS = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is an unknown key",
    "extra_forbidden": "is an unknown key",
}


class Record:
    """A frozen dataclass that is kept as JSON: `from_json(to_json())` is the record itself."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; fields that hold their default are left out."""
        return _adapter(type(self)).dump_python(self, mode="json", by_alias=True, exclude_defaults=True)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; ValueError names every key that is missing, unknown or of another type."""
        try:
            return _adapter(cls).validate_python(dict(data))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {FAULTS.get(e['type'], e['msg'])}" for e in error.errors()
            )
            raise ValueError(f"{cls.described()} cannot be read: {faults}") from None

    def to_text(self) -> str:
        """Returns the text of a file with this record; floats keep every digit."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The inverse of `to_text`; raises as `from_json`, and json.JSONDecodeError for what is no JSON."""
        return cls.from_json(json.loads(text))

    @classmethod
    def described(cls) -> str:
        """Names such a record, for messages."""
        return cls.__name__


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""What reads and writes a class; made once, which takes milliseconds."""
