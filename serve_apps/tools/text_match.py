"""text_match: a short answer, references -> exact match and F1 by words (SQuAD's normalisation, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from serve_apps.thinking import after_thinking

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Returns the text in lower case, without punctuation and articles, with single spaces."""
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
    return text.lower().translate(_PUNCTUATION)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return 0.0
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
