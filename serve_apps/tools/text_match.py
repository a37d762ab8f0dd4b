"""text_match: a short answer, references -> exact match and F1 by words (SQuAD's normalisation, arXiv 1606.05250).

Punctuation of every script and signs of units and currencies go, as SQuAD's do; a sign that makes another word or number of the
one it touches stays: C#, C++, .NET, A+, 18+, -5, .5, 1/2, <5.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from unicodedata import category

from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.plain_signs import in_plain_signs

_ARTICLES = re.compile(r"\b(an|the)\b")
_A = re.compile(r"(?<!\w[^\w\s])\ba(?=\s+[^\w\s]*(?:\d|\w[^\w\s]?\w))", re.IGNORECASE)
"""The article, which a word follows ("a U.S. state"); at the end ("Hepatitis A"), in a list ("A, B"), before another letter and as
a part of a word ("Q&A session") it is a name."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_DASH = re.compile(r"(?<=\d)\s+-\s+(?=\d)")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_STAND_INS = {"—": " ", "°": "%", "♯": "#", "≤": "<=", "≥": ">=", "≠": "!="}
_CATEGORIES = {"P": "'", "Sc": "$"}
"""What stands for a sign of Unicode's category: punctuation, or a currency."""
_NUMBER = r"[$]?\.?\d"
_KEPT = "|".join(
    [
        rf"(?<![\w)\]-])-(?={_NUMBER})",  # minus
        rf"(?<![<=-])[<>]=?(?=-?{_NUMBER})|(?<=\w)[<>]=?(?=\w)|(?<=\w\s)[<>]=?(?=\s)|!=",
        rf"(?<=\d)[{re.escape(string.punctuation)}](?=\d)",  # 7.20, 1/2, 10:30
        r"(?<![\w.)])\.(?=\w)",  # .5, .NET
        r"(?<=[A-Za-z])[+#]++(?![A-Za-z])|(?<=\d)\+(?!\w)",  # C#, C++11, 18+
        r"(?<=\b[A-Za-z])-(?![\w-])|(?<=\bAB)-(?![\w-])",  # A-
    ]
)
_PUNCTUATION = re.compile(rf"({_KEPT})|[{re.escape(string.punctuation)}]")
"""Punctuation; what is a part of a word or number is a group."""
_RELATION = re.compile(rf"([<>]=?)\s+(?=-?{_NUMBER})")


def normalize(text: str) -> str:
    """Returns the text in Unicode's form NFKC and without case, punctuation and articles, with single spaces.

    Numbers keep their sign, their decimal point and what else stands between digits, but for commas of thousands; words keep
    the signs of `C#`, `C++`, `.NET` and `A-`. The letter A is an article only before a word. (SQuAD takes "7.20" for 720,
    "C#" for C, and "Hepatitis A" for hepatitis.)
    """
    return " ".join(_ARTICLES.sub(" ", _plain(text)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the normalised answer equals any normalised reference, else 0; without a reference 0.

    Thoughts are no part of an answer.
    """
    stated = _words(after_thinking(answer))
    return float(any(stated == _words(reference) != [] for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Returns the largest harmonic mean of word precision and recall over the references; 0 without any.

    Words count as often as they occur. No answer: 0. Thoughts are no part of an answer.
    """
    stated = _words(after_thinking(answer))
    return max((_f1(stated, _words(reference)) for reference in references), default=0.0)


def _words(text: str) -> list[str]:
    """Returns the normalised words; of articles alone the last ("A." and "(A)", a choice); of punctuation alone that."""
    content = normalize(text)
    if any(character.isalnum() for character in content):
        return content.split()
    return _ARTICLES.findall(_plain(text))[-1:] or in_plain_signs(text).split()


def _plain(text: str) -> str:
    text = _NOT_ASCII.sub(_in_ascii, in_plain_signs(text))
    text = _RELATION.sub(r"\1", _SPACED_DASH.sub("-", _A.sub(" ", text)))
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return _PUNCTUATION.sub(r"\1", text).casefold()


def _in_ascii(sign: re.Match[str]) -> str:
    kind = category(sign[0])
    return _STAND_INS.get(sign[0]) or _CATEGORIES.get(kind) or _CATEGORIES.get(kind[0], sign[0])


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return 0.0
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
