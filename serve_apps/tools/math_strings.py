r"""math_strings: an answer, references -> whether numbers or spelling are the same (UnityMAS-O, arXiv 2605.26646).

The rules of the reference systems, for comparison with theirs: equal numbers, fractions included, or the same spelling but
for case, space and how LaTeX writes fractions, roots, text, degrees and large brackets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_apps.tools.math_answer import MAX_ANSWER_CHARS, extract_answer, one_line, plain_number


def is_same_string(answer: str, references: Sequence[str]) -> bool:
    """Returns whether `answer` is one of `references` by numbers and spelling alone. Never raises on what a model wrote."""
    stated = _canonical(extract_answer(answer))
    number = plain_number(stated.replace(",", ""))
    for expected in (_canonical(extract_answer(reference)) for reference in references):
        if stated and stated == expected:
            return True
        if number is not None and number == plain_number(expected.replace(",", "")):
            return True
    return False


def _canonical(text: str) -> str:
    r"""Returns one spelling for `\dfrac{X}{2}` and `x/2`, `\sqrt2` and `\sqrt{2}`, `90^\circ` and `90`, `\text{cm}` and
    `cm`."""
    text = one_line(text.replace("−", "-"))
    if len(text) > MAX_ANSWER_CHARS:
        return text
    text = re.sub(r"\^(?:\{\\circ\}|\\circ)|\^?\\degree|°", "", re.sub(r"\s", "", text))
    text = re.sub(r"\\[dtc]?frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    before = ""
    while text != before:  # from the innermost braces outwards
        before = text
        text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", lambda f: f"{_bracketed(f[1])}/{_bracketed(f[2])}", text)
    return text.casefold()


def _bracketed(part: str) -> str:
    return part if re.fullmatch(r"-?[\w.]+", part) else f"({part})"
