"""text_match: a short answer, references -> exact match and F1 by words (SQuAD's normalisation, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from serve_apps.thinking import after_thinking

_ARTICLES = re.compile(r"\b(an|the)\b")
_A = re.compile(r"\ba(?=\s+[^\w\s]*(?:\d|\w\w))", re.IGNORECASE)
"""The article, which a word follows; at the end ("Hepatitis A"), in a list ("A, B") and before another letter it is a name."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SIGN = r"(?<![\w)\]-])-(?=[$£€]?\.?\d)"
_PUNCTUATION = re.compile(
    rf"({_SIGN}|(?<=\d)[{re.escape(string.punctuation)}](?=\d)|(?<![\w.)])\.(?=\d))|[{re.escape(string.punctuation)}]"
)
"""Punctuation; what is a part of a number, a sign, a decimal point or what stands between its digits, is a group."""


def normalize(text: str) -> str:
    """Returns the text in lower case, without punctuation and articles, with single spaces.

    Numbers keep their sign, their decimal point and what else stands between digits, but for commas of thousands. The
    letter A is an article only before a word (SQuAD takes "7.20" for 720, and "Hepatitis A" for hepatitis).
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
    return _ARTICLES.findall(_plain(text))[-1:] or text.split()


def _plain(text: str) -> str:
    text = _A.sub(" ", text.replace("\N{MINUS SIGN}", "-"))
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return _PUNCTUATION.sub(r"\1", text).lower()


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return 0.0
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
