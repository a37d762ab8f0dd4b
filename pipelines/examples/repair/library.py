"""library: short functions by module, with arguments to try them with; a repository is made of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a repository."""

    name: str
    parameters: str
    body: tuple[str, ...]
    """Its lines, without indentation."""
    calls: tuple[tuple[Any, ...], ...]
    """Arguments to try it with."""

    @property
    def source(self) -> str:
        """The whole definition, as it stands in a file."""
        return "\n".join([f"def {self.name}({self.parameters}):", *(f"    {line}" for line in self.body)])


_PAIRS = ((7, 2), (3, 9), (4, 4), (12, 5), (0, 6), (1, 8))
_NUMBERS = ((3,), (10,), (0,), (7,), (25,), (1,))
_WORDS = (("rain",), ("Storm",), ("a cloud",), ("sun",), ("Wind",), ("ice",))
_ROWS = (([4, 1, 9],), ([7, 7, 2, 5],), ([0, 3],), ([8, 6, 1],), ([2, 5, 3, 11],), ([1, 10, 4],))


def _of(parameters: str, calls: tuple[tuple[Any, ...], ...], **bodies: str) -> tuple[Function, ...]:
    return tuple(Function(name, parameters, tuple(body.split("\n")), calls) for name, body in bodies.items())


LIBRARY: dict[str, tuple[Function, ...]] = {
    "calc.py": _of(
        "a, b",
        _PAIRS,
        add="return a + b",
        gap="c = a - b\nreturn abs(c)",
        area="return a * b",
        border="c = a + b\nreturn c * 2",
        larger="return max(a, b)",
    ),
    "money.py": _of(
        "n",
        _NUMBERS,
        tax="return n * 3",
        with_fee="return n + 5",
        refund="m = n - 2\nreturn max(m, 0)",
        tip="m = n // 4\nreturn m + 1",
        capped="return min(n, 9)",
    ),
    "words.py": _of(
        "w",
        _WORDS,
        shout="w = w.upper()\nreturn w + '!'",
        first="return w[0]",
        twice="return w * 2",
        ending="return w[1:]",
        size="return len(w) + 1",
    ),
    "rows.py": _of(
        "r",
        _ROWS,
        top="return max(r)",
        low="return min(r)",
        spread="m = max(r)\nreturn m - min(r)",
        total="return sum(r) + 5",
        second="r = sorted(r)\nreturn r[1]",
    ),
    "clock.py": _of(
        "h, m",
        _PAIRS,
        minutes="return h * 60 + m",
        later="h = h + 1\nreturn h * 60 + m",
        is_early="return h < 6",
        is_half="return m == 30 or h > 9",
        wait="return h * 60 - m",
    ),
    "shapes.py": _of(
        "s",
        _NUMBERS,
        square="return s * s",
        cube="t = s * s\nreturn t * s",
        ring="return s * 4 - 4",
        half="return s // 2",
        is_big="return s > 8",
    ),
}
