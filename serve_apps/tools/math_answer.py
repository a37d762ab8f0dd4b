"""math_answer: an answer as a model wrote it, reference answers -> whether it is correct.

    extract_answer -> in LaTeX --- equal text, plain numbers ---> verdict
                                \\--- anything else ------------> math_judge (math-verify in a child process)

`rules="strings"` compares numbers and spelling alone, as the reference systems do: see `math_strings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from serve_apps.authoring.boxed import last_boxed
from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.math_judge import MathJudge
from serve_apps.tools.plain_signs import in_plain_signs

MAX_ANSWER_CHARS = 1000
"""The largest number of characters: a longer answer is not correct, unless it equals the reference."""

_TAG = re.compile(r"<(/?)(?:FINAL_)?ANSWER>", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<![\w)*`\\])(\*{1,3}|`+)(?=\S)([^*`]+)(?<=\S)\1!*(?![\w(*`])")
_UNDERLINED = re.compile(r"(?<![^\s(])(_{1,3})(?=[^\s_{])([^_]+)(?<=\S)\1!*(?![\w(_{\\])")
_ANNOUNCEMENT = re.compile(
    r"answer\s*(?:is\b\s*:?|:)|^[# ]{0,12}(?:the )?(?:final )?answer[ \t]{0,9}$|^####(?=[ \t]*[^\s#]{0,40}\d[^\s#]{0,40}[ \t]*$)",
    re.I | re.M,
)
"""The last one is GSM8K's, for which prompts of its data sets ask: a line of `#### ` and one number."""
_CLOSING_PHRASE = re.compile(
    r"\b(?:if (?:you|there|anything)\b[^.!?\n\d$\\=]{0,60},? )?(?:please,? )?(?:i (?:sincerely )?hope|hope (?:it|this|that)|let me know|thank you|thanks|feel free|good luck|"
    r"(?:this|that) (?:completes|concludes)|q\.?e\.?d)\b",
    re.IGNORECASE,
)
_STATES_SOMETHING = re.compile(r"[\d$\\=]")
_EXCLAIMED = re.compile(r"(?:(?<=\$)|(?<=\\\)))!+\Z")
"""Exclamation marks behind a formula: no factorials."""

_SIGNS = "×times ·cdot ⋅cdot ÷div ±pm ∓mp ≤le ≥ge ≠ne ∞infty ∅emptyset ∪cup ∩cap ∈in"
_LATEX = str.maketrans(
    {entry[0]: f"\\{entry[1:]} " for entry in _SIGNS.split()}
    | {sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℂℕℚℝℤ", "CNQRZ", strict=True)}
    | {"°": "^\\circ "}
)
_ROOT = re.compile(r"([√∛])\s*(\d+(?:\.\d+)?|[^\W\d_])")
_DEGREE = re.compile(r"(?:\^\s?\{\s?\\degree\s?\}|\^?\s?\\degree(?![a-zA-Z]))")
_CURRENCY = re.compile("[\u00a2-\u00a5\u20a0-\u20c0]")
_TIMES = re.compile(r"(?<=\d)\s*x\s*(?=10\^)")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\d/]|\.\d)")
_COMMAND = re.compile(
    r"(\\\\)(?:\s?\[[^\]\n]{0,12}\])?"  # the end of a row, with the space below it, is no spacing command
    r"|\\(?:left|right|[bB]igg?[lrm]?|quad|qquad|displaystyle|textstyle)(?![a-zA-Z])"
    r"|\\[$!,;:()\[\] ]|[$]|(?<=[\w)}\]$])~"
)
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_EQUATIONS = re.compile(
    r"(?:\\begin\{(cases)\}|\\\{\s*\\begin\{(array)\}\s*\{[lcr|]{1,9}\})((?:(?!\\begin|&).)*?)\\end\{(?:\1|\2)\}\.?"
)
_ROW_END = re.compile(r"\\\\")
_OTHER_MATRIX = re.compile(r"\{(?:B|small)matrix\}")
_TOKEN = r"(?:\{([^{}]*)\}|(\\[a-zA-Z]+|[^\s{}\\]))"
_SHORT_FRACTION = re.compile(rf"\\[dtc]?frac\s*{_TOKEN}\s*{_TOKEN}")
_PRINTED = re.compile(
    r"(?<![\w\\])(?:(?:np|numpy)\.)?(?:float|int)\d+\(([^()]*)\)|Decimal\('([^'()]*)'\)|Fraction\((-?\d+), (\d+)\)"
)
"""How programs print numbers of NumPy's and the standard library's types."""
_PRINTED_POWER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,2}(?!\w)")

_NUMBER = re.compile(r"(?:[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[+-]?\.\d+)(?:[eE][+-]?\d{1,4})?")
_PART = r"(?:\{\s*([+-]?\d+)\s*\}|(\d))"
_FRACTION = re.compile(rf"([+-]?)\s*(?:(\d+)\s*(?=\\))?(?:\\[dtc]?frac\s*{_PART}\s*{_PART}|(\d+)\s*/\s*(\d+))")
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|[*x])\s*10\s*\^\s*(?:\{[+-]?\d+\}|[+-]?\d+)")
_UNEVALUATED = re.compile(
    r"[\w)}\]]\s*(?:\+|-|\*|/|\\times|\\cdot|\\div)\s*[\w(\\{]"  # infix
    r"|\^(?!\s*(?:\{\s*)?\\circ)|!|\\[dtc]?frac|\\(?:sqrt|log|ln|exp|sin|cos|tan|sum|prod|int|binom|lfloor|lceil)\b"
)
_DIGITS = re.compile(r"\d[\d.,]*(?:\\(?:overline|bar|dot)\s*\{?\d+\}?)?")
_EXPONENT = re.compile(r"\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)|(?<=[a-zA-Z])[23]\b")
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_HALF_DAY = re.compile(r"(?<![a-z])([ap])\.?\s?m\b", re.IGNORECASE)
"""math-verify takes them for units, which it leaves out."""
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_PROSE_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_SEPARATOR = re.compile(r"[,;]|\bor\b|\band\b")
_RELATIONS = ("<", ">", "!", "~", "/", "\\not")
"""These make another relation of the `=` behind them."""

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
_FACTORS = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
"""Words after a number that multiply it."""
_OPERATIONS = (
    "and or but not than plus minus times over mod sin cos tan cot sec csc log exp sqrt abs det gcd lcm max div"
)
_OPERATIONS_AFTER = (
    "squared cubed factorial choose to raised root modulo remainder inverse negative infinity double triple gross score half "
    "halves third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth billionth"
)
"""Words that make a number another one where they follow it, and not where they follow a unit ("metres squared")."""

_UNITS, _NO_UNITS, _AFTER = (frozenset(words.split()) for words in (_UNIT_SYMBOLS, _OPERATIONS, _OPERATIONS_AFTER))

_JUDGE = MathJudge()


def extract_answer(text: str) -> str:
    r"""The answer stated last: in answer tags, in `\boxed{}`, after "answer:" or "answer is"; else all of `text`.

    Thoughts state nothing. Emphasis of Markdown and a closing phrase ("I hope it is correct.")
    are no part of an answer.
    """
    text = after_thinking(text)
    tagged = _last_tagged(text)
    text = text if tagged is None else tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    text = _UNDERLINED.sub(r"\2", _EMPHASIS.sub(r"\2", text))
    return _bare(_announced(text)) or _bare(text)


def is_prose(reference: str) -> bool:
    """Returns whether a reference is a sentence around a number ("The result is 14."), which only the same sentence matches."""
    text = one_line(extract_answer(_typed(reference)))
    words = _PROSE_WORD.findall(_TEXT.sub("", text))
    return len(words) > 2 and bool(_DIGITS.search(text)) and _value(text) is None


def is_correct(answer: str, references: Sequence[str]) -> bool:
    """Returns whether `answer` means the same as any of `references`. Never raises on what a model wrote.

    Where the reference is a plain number only a number is right: an expression that has yet to be evaluated is not an answer.
    (math-verify alone takes `7+6*8` for 55, so that a model would learn to copy the question.) Against symbolic
    references math-verify's notion of equality holds, by which 3.141593 is pi: it compares six decimal places. What it cannot judge
    within its deadline is not correct.

    Raises RuntimeError only if math-verify itself cannot be started.
    """
    return _is_correct(answer, tuple(references))


@lru_cache(maxsize=65536)
def _is_correct(answer: str, references: tuple[str, ...]) -> bool:
    stated = one_line(extract_answer(_typed(answer)))
    spellings = stated.split(", ")  # of one value: `\boxed{\frac12} or \boxed{0.5}` is right if each of them is
    return bool(stated) and any(
        _matches(stated, expected) or (len(spellings) > 1 and all(_matches(one, expected) for one in spellings))
        for expected in (one_line(extract_answer(_typed(reference))) for reference in references)
    )


def _typed(text: str) -> str:
    """Returns a text in which what is typed outside of LaTeX stands as LaTeX has it: `√2`, `1½`, `x²`, `–5`, `3 x 10⁴`.

    A currency is no part of a number.
    """
    text = _DEGREE.sub(r"^\\circ ", in_plain_signs(text.translate(_LATEX)))
    text = _ROOT.sub(lambda root: f"\\sqrt{'[3]' if root[1] == '∛' else ''}{{{root[2]}}}", text).replace("√", "sqrt")
    text = _TIMES.sub(r"\\times ", _PI.sub(r"\\pi", _CURRENCY.sub("", text)))
    return _MIXED.sub(lambda m: f"{m[1]}\\frac{{{m[2]}}}{{{m[3]}}}" if int(m[2]) < int(m[3]) else m[0], text)


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
    end = max((announcement.end() for announcement in _ANNOUNCEMENT.finditer(text.rstrip())), default=len(text))
    rest = text[end:].lstrip(" \t\r\n:*_`#")
    line = rest.partition("\n")[0]
    is_open = line.count("$") % 2 or line.count("\\begin") > line.count("\\end")
    return rest.partition("\n\n")[0] if is_open or line.strip() in ("$$", "\\[") else line


def _bare(text: str) -> str:
    """Returns a statement without a closing phrase, marks of emphasis or a heading around it, and the full stop at its
    end."""
    closing = _CLOSING_PHRASE.search(text)
    if closing is not None and not _STATES_SOMETHING.search(text, closing.end()):
        text = text[: closing.start()].strip() or text
    text = _EXCLAIMED.sub("", text.strip()).lstrip("*`# ").rstrip(". ")
    end = text.rstrip("*`. ")
    return text if end.endswith("^") else end


def one_line(text: str) -> str:
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
    if any(
        len({found[1].lower() for text in (stated, reference) if (found := sign.search(text))}) > 1
        for sign in (_BASE, _HALF_DAY)
    ):
        return False
    expected = _value(reference)
    if expected is None:
        return _mean_the_same(stated, reference)
    head, _, value = (part.strip() for part in stated.rpartition("="))
    if head.endswith(_RELATIONS) or _gives_one_name_two_values(stated):
        return False
    number, factor = _quantity(value)
    if (plain := plain_number(number)) is not None:
        is_division = "/" in number or "frac" in number  # which has yet to be evaluated where an integer is expected
        return plain * factor == expected and not (is_division and expected.denominator == 1)
    rest = _SCIENTIFIC.sub("", value)
    states_one_number = not _UNEVALUATED.search(rest) and len(_DIGITS.findall(_EXPONENT.sub("", rest))) == 1
    return bool(factor) and states_one_number and _mean_the_same(value, reference)


def _value(reference: str) -> Fraction | None:
    """Returns the number that a reference is, alone or before a word that multiplies it; None for any other."""
    number, factor = _quantity(reference)
    plain = plain_number(reference if factor == 1 else number)
    return None if plain is None else plain * factor


def _gives_one_name_two_values(text: str) -> bool:
    """Returns whether a text says `x = -5 or x = 5`; `x = 10/2, x = 5` is one value."""
    values: dict[str, str] = {}
    for part in _SEPARATOR.split(text):
        name, equals, _ = part.partition("=")
        value = part.rpartition("=")[2].strip()
        if equals and not _mean_the_same(value, values.setdefault(name.strip(), value)):
            return True
    return False


def _mean_the_same(stated: str, reference: str) -> bool:
    """Returns whether math-verify finds that two texts, as LaTeX, state the same value.

    Words are compared by their letters, but for up to three small ones: math-verify takes them for products of variables, in
    which the order does not matter.
    """
    if stated == reference:
        return True
    said, right = (_TEXT.sub(r"\1", text).strip() for text in (stated, reference))
    if said == right:
        return True
    letters = right.replace(" ", "")
    are_words = len(letters) > 3 or (len(letters) > 1 and not letters.islower())
    if are_words and _WORDS.fullmatch(right) and _WORDS.fullmatch(said):
        return said.replace(" ", "").casefold() == letters.casefold()
    return _JUDGE.is_same(_in_latex(stated), _in_latex(reference))


def _in_latex(text: str) -> str:
    r"""Returns a text without what math-verify does not read: `\frac\pi2`, `1.5e3, 2`, equations one under the other."""
    text = _PRINTED.sub(lambda number: number[1] or number[2] or f"\\frac{{{number[3]}}}{{{number[4]}}}", text)
    text = _PRINTED_POWER.sub(lambda number: f"{Decimal(number[0]):f}", text)
    text = _EQUATIONS.sub(
        lambda equations: _ROW_END.sub(", ", equations[3].strip()), _OTHER_MATRIX.sub("{pmatrix}", text)
    ).replace("{Bmatrix}", "{pmatrix}")
    return _SHORT_FRACTION.sub(lambda f: f"\\frac{{{f[2] or f[1] or ''}}}{{{f[4] or f[3] or ''}}}", text)


def plain_number(text: str) -> Fraction | None:
    """Returns the value of an integer, a decimal, a fraction of integers, a mixed number or a number as a program prints
    it; None for anything else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    printed = _PRINTED.fullmatch(text)
    if printed is not None:
        text = printed[1] or printed[2] or f"{printed[3]}/{printed[4]}"
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, integer, *parts = match.groups()
    numerator, denominator = (int(p) for p in parts if p is not None)
    if not denominator or (integer and not 0 < numerator < denominator):
        return None
    return (Fraction(numerator, denominator) + int(integer or 0)) * (-1 if sign == "-" else 1)


def _quantity(text: str) -> tuple[str, Fraction]:
    r"""Returns the number in `41\text{ km/h}` and `41 km/h`, and what multiplies it: a million in `41 million people`.

    Where what follows a number is no unit the number is the text itself; the factor is 0 if words there make the number
    another one ("41 squared", "41 million or more"). A bare symbol (`41 km`) stays: math-verify knows these.
    """
    numbers = [match for form in (_FRACTION, _NUMBER) if (match := form.match(text))]
    if not numbers:
        return text, Fraction(1)
    number = max(numbers, key=re.Match.end)
    tail = text[number.end() :].strip().replace("\\cdot", "*")
    plain = _EXPONENT.sub("", tail)
    words = _TEXT.sub(r" \1 ", plain).strip()
    is_text = tail.startswith("\\") and words != plain
    parts, factor = _UNIT_PARTS.findall(words), 1
    while parts and (by := _FACTORS.get(parts[0].lower().removesuffix("s"))):
        factor *= by
        del parts[0]
    are_units = all(
        part in "/*().'-" if not part.isalpha() else part in _UNITS or is_text or len(part) > 2 for part in parts
    )
    lower = [part.lower() for part in parts]
    if lower and (lower[0].removesuffix("s") in _AFTER or (are_units and not _NO_UNITS.isdisjoint(lower))):
        return text, Fraction(0)
    if factor != 1:
        return number[0].strip(), Fraction(factor if are_units else 0)
    is_bare_symbol = not is_text and len(parts) == 1 and len(parts[0]) < 3 and plain == tail
    if parts and parts[0].isalpha() and are_units and not is_bare_symbol:
        return number[0].strip(), Fraction(1)
    return text, Fraction(1)
