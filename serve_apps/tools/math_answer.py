"""math_answer: an answer as a model wrote it, reference answers -> whether it is correct.

Numbers are compared here; everything else is judged by math-verify in a child process of its own, because a
deadline must hold in any thread and against code that no signal handler can interrupt (`9^{9^{9^9}}` is one C call).

    is_correct --- equal text, plain numbers ---------------------> verdict
         \\---- anything else --> child (math-verify, alarm, rlimit) --> verdict; killed by its alarm --> not correct

or, with `rules="strings"`, by the reference systems' own rules: numbers and spelling alone, for comparison with theirs.

Run as a script, this file is that child: one JSON request per line in, one verdict per line out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from serve_apps.authoring.boxed import last_boxed
from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.plain_signs import in_plain_signs

MAX_ANSWER_CHARS = 1000
"""The largest number of characters: a longer answer is not correct, unless it equals the reference."""
DEADLINE_S = 5
"""Seconds that math-verify may take for one pair of answers."""
_START_DEADLINE_S = 120
_MEMORY_BYTES = 4 << 30

_LATEX = str.maketrans(
    {
        **{sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℂℕℚℝℤ", "CNQRZ", strict=True)},
        **{
            sign: f"\\{command} "
            for sign, command in {
                "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "±": "pm", "∓": "mp", "≤": "le", "≥": "ge", "≠": "ne",
                "∞": "infty", "∅": "emptyset", "∪": "cup", "∩": "cap", "∈": "in",
            }.items()
        },
        "°": "^\\circ ",
    }
)  # fmt: skip
_ROOT = re.compile(r"([√∛])\s*(\d+(?:\.\d+)?|[^\W\d_])|√(?=\s*\()")
_CURRENCY = re.compile("[\u00a2-\u00a5\u20a0-\u20c0]")
_TIMES = re.compile(r"(?<=\d)\s*x\s*(?=10\^)")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\d/]|\.\d)")

_TAG = re.compile(r"<(/?)(?:FINAL_)?ANSWER>", re.IGNORECASE)
_ANNOUNCEMENT = re.compile(
    r"answer[\s*_]*(?:is\b\s*:?|:)|^[#*_ ]{0,12}(?:the )?(?:final )?answer[*_]{0,3}[ \t]{0,9}$",
    re.IGNORECASE | re.MULTILINE,
)
_EMPHASIS = re.compile(r"(?<![\w)*`\\])(\*{1,3}|`+)(?=\S)([^*`]+)(?<=\S)\1(?![\w(*`])")
_UNDERLINED = re.compile(r"(?<![^\s(])(_{1,3})(?=[^\s_{])([^_]+)(?<=\S)\1(?![\w(_{\\])")
_MARKUP_END = re.compile(r"\A[*_`]{1,3}:?(?=\s)[ \t\r\n:#]*")
"""The end of emphasis that began before an announcement: `**Answer:** 41`."""
_EXCLAIMED = re.compile(r"(?<=[*_`$)\]])!+$")
"""Exclamation marks outside of emphasis and formulas: no factorials."""
_CLOSING_PHRASE = re.compile(
    r"\b(?:if (?:you|there|anything)\b[^.!?\n\d$\\=]{0,60},? )?(?:please,? )?(?:i (?:sincerely )?hope|hope (?:it|this|that)|let me know|thank you|thanks|feel free|good luck|"
    r"(?:this|that) (?:completes|concludes)|q\.?e\.?d)\b",
    re.IGNORECASE,
)
_STATES_SOMETHING = re.compile(r"[\d$\\=]")

_PLAIN = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[+-]?\.\d+"
_NUMBER = re.compile(_PLAIN)
_POWER_OF_TEN = re.compile(rf"({_PLAIN})[eE]([+-]?\d{{1,4}})")
_PART = r"(?:\{\s*([+-]?\d+)\s*\}|(\d))"
_FRACTION = re.compile(rf"([+-]?)\s*(?:(\d+)\s*(?=\\))?(?:\\[dtc]?frac\s*{_PART}\s*{_PART}|(\d+)\s*/\s*(\d+))")
_TOKEN = r"(?:\{([^{}]*)\}|(\\[a-zA-Z]+|[^\s{}\\]))"
_SHORT_FRACTION = re.compile(rf"\\[dtc]?frac\s*{_TOKEN}\s*{_TOKEN}")
_PRINTED = re.compile(
    r"(?<![\w\\])(?:(?:np|numpy)\.)?(?:float|int)\d+\(([^()]*)\)|Decimal\('([^'()]*)'\)|Fraction\((-?\d+), (\d+)\)"
)
"""How programs print numbers of NumPy's and the standard library's types."""
_PRINTED_POWER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,2}(?!\w)")
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|[*x])\s*10\s*\^\s*(?:\{[+-]?\d+\}|[+-]?\d+)")
_UNEVALUATED = re.compile(
    r"[\w)}\]]\s*(?:\+|-|\*|/|\\times|\\cdot|\\div)\s*[\w(\\{]"  # infix
    r"|\^(?!\s*(?:\{\s*)?\\circ)|!|\\[dtc]?frac|\\(?:sqrt|log|ln|exp|sin|cos|tan|sum|prod|int|binom|lfloor|lceil)\b"
)
_EXPONENT = re.compile(r"\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)|(?<=[a-zA-Z])[23]\b")
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_SEPARATOR = re.compile(r"[,;]|\bor\b|\band\b")
_RELATIONS = ("<", ">", "!", "~", "/", "\\not")
"""These make another relation of the `=` behind them."""
_DIGITS = re.compile(r"\d[\d.,]*(?:\\(?:overline|bar|dot)\s*\{?\d+\}?)?")

_TEXT = re.compile(
    r"\\(?:text|textrm|textnormal|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|rm)\s*\{([^{}\\]*)\}"
)
_UNIT_PARTS = re.compile(r"[^\W\d_]+|\S")
_UNIT_SYMBOLS = (
    "m km cm mm μm nm in ft yd mi s ms μs ns h hr hrs min g kg mg μg lb lbs oz t l L mL ml dL kL gal N kN J kJ MJ "
    "cal kcal W kW MW kWh Wh V mV kV A mA Ω C F H T Hz kHz MHz GHz Pa kPa MPa bar atm psi mol K rad sr eV keV MeV GeV cd lm "
    "lx px dpi B kB MB GB bit bits mph kph rpm"
)
"""Units that are shorter than three letters or no word; longer words are taken for units as they are."""
_UNITS = frozenset(_UNIT_SYMBOLS.split())
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_PARTS = ["halves", "thirds", "fourths", "fifths", "sixths", "sevenths", "eighths", "ninths", "tenths"]
_FACTORS = {
    "k": Fraction(1000),
    **{name + plural: Fraction(10**power) for name, power in _POWERS_OF_TEN.items() for plural in ("", "s")},
    **{name: Fraction(12) for name in ("dozen", "dozens")},
    **{name: Fraction(1, number) for number, name in enumerate(_PARTS, 2)},
    **{f"{name}ths": Fraction(1, 10**power) for name, power in _POWERS_OF_TEN.items()},
}
"""Words after a number that make it another number."""
_AFTER = "squared cubed factorial choose to raised root modulo remainder inverse negative infinity double triple gross score half"
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth billionth"
_OPERATIONS_AFTER = frozenset(f"{_AFTER} {_ORDINALS}".split())
"""Words that make a number another one where they follow it, and not where they follow a unit ("metres squared")."""
_UNIT_WORDS = frozenset(["per", "squared", "cubed"])
"""Words that make units of several."""
_OPERATIONS = (
    "and or but not than plus minus times over mod sin cos tan cot sec csc log exp sqrt abs det gcd lcm max div"
)
_NO_UNIT = frozenset(_OPERATIONS.split())

_COMMAND = re.compile(
    r"(\\\\)(?:\s?\[[^\]\n]{0,12}\])?"  # the end of a row, with the space below it, is no spacing command
    r"|\\(?:left|right|[bB]igg?[lrm]?|quad|qquad|displaystyle|textstyle)(?![a-zA-Z])"
    r"|\\[$!,;:()\[\] ]|[$]|(?<=[\w)}\]$])~"
)
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_BEGIN = re.compile(
    r"\\begin\{((?:[pbB]?(?:small)?matrix|array|cases|aligned|align|gathered|gather)\*?)\}"
    r"(?:\s*\[[^\]]{0,12}\])?(?:(?<=array\})\s*\{[^{}]{0,99}\})?"
)
_BRACKETS = {"": ("",), "(": (")",), "[": ("]",), "{": ("}",), "\\{": ("\\}", ".", "")}
_ROW_END = re.compile(r"\\\\|\\cr(?![a-zA-Z])|\\(?:hline|midrule|toprule|bottomrule)(?![a-zA-Z])")


def extract_answer(text: str) -> str:
    r"""The answer stated last: in answer tags, in `\boxed{}`, after "answer:" or "answer is"; else all of `text`.

    Thoughts state nothing. Emphasis of Markdown and a closing phrase ("I hope it is correct.")
    are no part of an answer.
    """
    text = after_thinking(text)
    tagged = _last_tagged(text)
    if tagged is not None:
        text = tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    return _bare(_announced(text)) or _bare(text)


def is_correct(answer: str, references: Sequence[str], *, rules: Literal["verify", "strings"] = "verify") -> bool:
    """Returns whether `answer` means the same as any of `references`. Never raises on what a model wrote.

    Where the reference is a plain number only a number is right: an expression that has yet to be evaluated is not an answer.
    (math-verify alone takes `7+6*8` for 55, so that a model would learn to copy the question.) Against symbolic
    references math-verify's notion of equality holds. What it cannot judge within `DEADLINE_S` is not correct.

    With `rules="strings"`: equal numbers, fractions included, or the same spelling but for case, space and how LaTeX
    writes fractions, roots, text, degrees and large brackets (UnityMAS-O, arXiv 2605.26646).

    Raises RuntimeError only if math-verify itself cannot be started.
    """
    if rules == "strings":
        return _is_same_string(answer, references)
    return _is_correct(answer, tuple(references))


@lru_cache(maxsize=65536)
def _is_correct(answer: str, references: tuple[str, ...]) -> bool:
    stated = _clean(extract_answer(_typed(answer)))
    spellings = stated.split(", ")  # of one value: `\boxed{\frac12} or \boxed{0.5}` is right if each of them is
    return bool(stated) and any(
        _matches(stated, expected) or (len(spellings) > 1 and all(_matches(one, expected) for one in spellings))
        for expected in (_clean(extract_answer(_typed(reference))) for reference in references)
    )


def _typed(text: str) -> str:
    """Returns a text in which what is typed outside of LaTeX stands as LaTeX has it: `√2`, `1½`, `x²`, `–5`, `3 x 10⁴`.

    A currency is no part of a number.
    """
    text = _ROOT.sub(_as_root, in_plain_signs(text.translate(_LATEX)))
    text = _TIMES.sub(r"\\times ", _PI.sub(r"\\pi", _CURRENCY.sub("", text)))
    return _MIXED.sub(lambda m: f"{m[1]}\\frac{{{m[2]}}}{{{m[3]}}}" if int(m[2]) < int(m[3]) else m[0], text)


def _as_root(root: re.Match[str]) -> str:
    if not root[1]:
        return "sqrt"  # of what stands in brackets
    return f"\\sqrt{'' if root[1] == '√' else '[3]'}{{{root[2]}}}"


def _last_tagged(text: str) -> str | None:
    last, start = None, -1
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = start if start >= 0 else tag.end()
        elif start >= 0:
            last, start = text[start : tag.start()], -1
    return last


def _announced(text: str) -> str:
    """Returns what follows the last "answer is" or "answer:": the line, or the formula that begins there."""
    end = 0
    for announcement in _ANNOUNCEMENT.finditer(text.rstrip(" \t\r\n*_`")):
        end = announcement.end()
    if not end:
        return ""
    rest = text[end:].lstrip(" \t\r\n:#")
    rest = _MARKUP_END.sub("", rest)
    if not (_EMPHASIS.match(rest) or _UNDERLINED.match(rest)):
        rest = rest.lstrip(" \t\r\n:*_`#")
    line = rest.partition("\n")[0]
    is_open = line.count("$") % 2 or line.count("\\begin") > line.count("\\end")
    return rest.partition("\n\n")[0] if is_open or line.strip() in ("$$", "\\[") else line


def _bare(text: str) -> str:
    """Returns a statement without Markdown's emphasis around it or its parts, and without a closing phrase."""
    closing = _CLOSING_PHRASE.search(text)
    if closing is not None and not _STATES_SOMETHING.search(text, closing.end()):
        text = text[: closing.start()].strip() or text
    text = _EXCLAIMED.sub("", text.strip())
    text = _UNDERLINED.sub(r"\2", _EMPHASIS.sub(r"\2", text))
    bare = text.lstrip("*`#").strip()
    if bare.startswith("_"):
        bare = bare.strip("_")
    end = bare.rstrip("*`. ")
    return bare if end.endswith("^") or end == bare.rstrip(". ") else end


def _is_same_string(answer: str, references: Sequence[str]) -> bool:
    stated = _canonical(extract_answer(answer))
    number = _plain_number(stated.replace(",", ""))
    for reference in references:
        expected = _canonical(extract_answer(reference))
        if stated and stated == expected:
            return True
        if number is not None and number == _plain_number(expected.replace(",", "")):
            return True
    return False


def _canonical(text: str) -> str:
    """Returns one spelling for `\\dfrac{X}{2}` and `x/2`, `\\sqrt2` and `\\sqrt{2}`, `90^\\circ` and `90`, `\\text{
    cm}` and `cm`."""
    text = _clean(text.replace("−", "-"))
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


def _clean(text: str) -> str:
    r"""Returns an answer in one line, without dollar signs, spacing commands and the full stop at its end.

    Ends of rows (`\\`) stay. Where nothing has rows a doubled backslash before a name is a single one, escaped.
    """
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _COMMAND.sub(lambda command: command[1] or "", text).replace("{,}", ",")
    return " ".join(text.split()).removesuffix(".").strip()


def _matches(stated: str, reference: str) -> bool:
    if stated == reference:
        return True
    if len(stated) > MAX_ANSWER_CHARS or not reference:
        return False
    expected_rows, rows = _rows(reference), _rows(stated)
    if expected_rows is not None and rows is not None:
        return _are_same_rows(rows, expected_rows)
    bases = {base[1] for text in (stated, reference) if (base := _BASE.search(text))}
    if len(bases) > 1:
        return False
    expected = _plain_number(reference)
    if expected is None:
        quantity = _quantity(reference)
        expected = None if quantity.factor == 1 else _plain_number(quantity.number)
        if expected is None:
            return _mean_the_same(stated, reference)
        expected *= quantity.factor
    head, _, value = (part.strip() for part in stated.rpartition("="))
    if head.endswith(_RELATIONS) or _gives_one_name_two_values(stated):
        return False
    quantity = _quantity(value)
    if not quantity.factor:
        return False
    for text, factor in ((value, Fraction(1)), (quantity.number, quantity.factor)):
        number = _plain_number(text)
        if number is not None:
            is_division = "/" in text or "frac" in text  # which has yet to be evaluated where an integer is expected
            return number * factor == expected and not (is_division and expected.denominator == 1)
    if _UNEVALUATED.search(_SCIENTIFIC.sub("", value)):
        return False
    states_one_number = len(_DIGITS.findall(_EXPONENT.sub("", _SCIENTIFIC.sub("", value)))) == 1
    return states_one_number and _mean_the_same(value, reference)


def _gives_one_name_two_values(text: str) -> bool:
    """Returns whether a text says `x = -5 or x = 5`; `x = 10/2, x = 5` is one value."""
    values: dict[str, str] = {}
    for part in _SEPARATOR.split(text):
        name, equals, _ = part.partition("=")
        value = part.rpartition("=")[2].strip()
        if equals and not _mean_the_same(value, values.setdefault(name.strip(), value)):
            return True
    return False


def _are_words(text: str) -> bool:
    """Returns whether a text is words, or letters in an order; up to three small letters are a product of variables (`xy`)."""
    letters = text.replace(" ", "")
    return bool(_WORDS.fullmatch(text)) and (len(letters) > 3 or (len(letters) > 1 and not letters.islower()))


def _mean_the_same(stated: str, reference: str) -> bool:
    """Returns whether math-verify finds that two texts, as LaTeX, state the same value.

    Words are compared by their letters: math-verify takes them for products, in which the order does not matter.
    """
    if stated == reference:
        return True
    said, right = (_TEXT.sub(r"\1", text).strip() for text in (stated, reference))
    if _are_words(right) and _WORDS.fullmatch(said):
        return said.replace(" ", "").casefold() == right.replace(" ", "").casefold()
    return _JUDGE.verdict(_in_latex(stated), _in_latex(reference))


def _in_latex(text: str) -> str:
    r"""Returns a text without what math-verify does not read: `\frac\pi2`, and numbers as programs print them ("1.5e3, 2")."""
    text = _PRINTED.sub(lambda number: number[1] or number[2] or f"\\frac{{{number[3]}}}{{{number[4]}}}", text)
    text = _PRINTED_POWER.sub(lambda number: f"{Decimal(number[0]):f}", text)
    return _SHORT_FRACTION.sub(_braced, text)


def _braced(fraction: re.Match[str]) -> str:
    above, above_token, below, below_token = fraction.groups()
    return f"\\frac{{{above_token or above or ''}}}{{{below_token or below or ''}}}"


def _rows(text: str) -> list[list[str]] | None:
    r"""Returns the cells of a text that is one environment with rows, as it is or in brackets, after `x =` or not.

    Returns None for any other text, for a determinant (`vmatrix`), nested environments and rows of unequal length.
    """
    head, found, _ = text.partition("\\begin")
    if not found:
        return None
    text = text[len(head) :]
    _, equals, bracket = head.rpartition("=")
    bracket = bracket.strip() if equals else head.strip()
    closing = _BRACKETS.get(bracket)
    begin = _BEGIN.match(text)
    if closing is None or begin is None:
        return None
    end = f"\\end{{{begin[1]}}}"
    body, found, tail = text[begin.end() :].partition(end)
    if not found or "\\begin" in body or tail.strip() not in closing:
        return None
    lines = [line for line in _ROW_END.split(body) if line.strip()]
    rows = [[cell.strip().removesuffix(",").strip() for cell in line.split("&")] for line in lines]
    return rows if rows and len({len(row) for row in rows}) == 1 else None


def _are_same_rows(rows: list[list[str]], expected: list[list[str]]) -> bool:
    """Returns whether all cells mean the same, each judged as an answer of its own."""
    if [len(row) for row in rows] != [len(row) for row in expected]:
        return False
    cells = [pair for row, other in zip(rows, expected, strict=True) for pair in zip(row, other, strict=True)]
    return all(_matches(cell, other) for cell, other in cells)


def _plain_number(text: str) -> Fraction | None:
    """Returns the value of an integer, a decimal, a fraction of integers, a mixed number or a number as a program prints
    it; None for anything else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    printed = _PRINTED.fullmatch(text)
    if printed is not None:
        text = printed[1] or printed[2] or f"{printed[3]}/{printed[4]}"
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if power := _POWER_OF_TEN.fullmatch(text):
        return Fraction(power[1].replace(",", "")) * Fraction(10) ** int(power[2])
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, *parts = match.groups()
    numerator, denominator = (int(p) for p in parts if p is not None)
    if not denominator or (whole and not 0 < numerator < denominator):
        return None
    return (Fraction(numerator, denominator) + int(whole or 0)) * (-1 if sign == "-" else 1)


class _Quantity(NamedTuple):
    """Holds a number as it is written and what to multiply it with."""

    number: str
    factor: Fraction


def _quantity(text: str) -> _Quantity:
    r"""Returns the number in `41\text{ km/h}` and `41 km/h`, and that in `41 million people` with a million as its factor.

    Where what follows a number is no unit the number is the text itself; its factor is 0 if words there make the number
    another one in a way that is not known ("41 squared", "41 million or more"). A bare unit without an operator (`41 km`)
    stays: math-verify knows these.
    """
    numbers = [match for form in (_POWER_OF_TEN, _FRACTION, _NUMBER) if (match := form.match(text))]
    if not numbers:
        return _Quantity(text, Fraction(1))
    number = max(numbers, key=re.Match.end)
    unit = text[number.end() :].strip().replace("\\cdot", "*")
    plain = _EXPONENT.sub("", unit)
    words = _TEXT.sub(r" \1 ", plain).strip()
    is_wrapped = unit.startswith("\\") and words != plain
    parts = _UNIT_PARTS.findall(words)
    factor = Fraction(1)
    while (
        parts
        and (by := _FACTORS.get(parts[0] if len(parts[0]) == 1 else parts[0].lower()))
        and (is_wrapped or len(parts[0]) > 1)
    ):
        factor *= by
        del parts[0]
    names = [part for part in parts if part.isalpha()]
    operators = [part for part in parts if not part.isalpha()]
    is_compound = bool(operators) or not _UNIT_WORDS.isdisjoint(names) or plain != unit
    are_units = all(
        n in _UNITS or (len(n) > 2 and n.lower() not in _NO_UNIT) or (is_wrapped and n.lower() not in _NO_UNIT)
        for n in names
    ) and all(o in "/*().-'" for o in operators)
    if names and names[0].lower() in _OPERATIONS_AFTER and names[0] == parts[0]:
        return _Quantity(text, Fraction(0))
    if factor != 1:
        return _Quantity(number[0].strip(), factor if are_units else Fraction(0))
    is_word = bool(names) and all(len(n) > 2 for n in names)
    if parts and parts[0].isalpha() and are_units and (is_wrapped or is_compound or is_word):
        return _Quantity(number[0].strip(), Fraction(1))
    return _Quantity(text, Fraction(1))


class _Judge:
    """Owns the child process that runs math-verify: it is started when first needed, and replaced when it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner_pid = 0

    def verdict(self, stated: str, reference: str) -> bool:
        """Returns math-verify's verdict; False where the child died of its deadline, or twice of anything else."""
        with self._lock:
            for _ in range(2):
                child = self._alive()
                assert child.stdin is not None and child.stdout is not None, "the child has pipes"
                try:
                    child.stdin.write(json.dumps([stated, reference]) + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
                except BrokenPipeError:
                    line = ""
                if line:
                    return line.strip() == "1"
                self._child = None
                if child.wait() == -signal.SIGALRM:
                    return False
            return False

    def _alive(self) -> subprocess.Popen[str]:
        """Returns the running child; a fork of this process starts its own."""
        if self._child is not None and self._owner_pid == os.getpid() and self._child.poll() is None:
            return self._child
        child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent; the child ends when its stdin does
        )
        assert child.stdout is not None, "the child has pipes"
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError(
                f"math-verify does not start (exit code {child.wait()}): try `{sys.executable} -c 'import math_verify'`"
            )
        self._child, self._owner_pid = child, os.getpid()
        return child


_JUDGE = _Judge()


def _serve() -> None:
    """Runs as the child: writes verdicts until stdin ends.

    The alarm keeps its default action, so that the kernel enforces it.
    """
    import resource

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_START_DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not a reply

    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify import verify
    from math_verify.parser import parse_latex_cached

    spelling = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )

    def parsed(text: str) -> Any:
        """Returns the meaning of all of a text, or its spelling. `math_verify.parse` would go on with a part of it."""
        latex = normalize_latex(text, spelling)
        try:
            return parse_latex_cached(latex)
        except Exception:  # noqa: BLE001 - latex2sympy2 raises plain `Exception` for a syntax error: this is no formula
            return latex

    print("ready", file=replies, flush=True)
    signal.alarm(0)
    for line in sys.stdin:
        signal.alarm(DEADLINE_S)
        stated, reference = json.loads(line)
        is_equal = verify(parsed(reference), parsed(stated), timeout_seconds=0)
        signal.alarm(0)
        print("1" if is_equal else "0", file=replies, flush=True)


if __name__ == "__main__":
    _serve()
