"""choices: a row of multiple choice -> its choices by letter, and the one that is right.

    {"question": ..., "choices": ["Rome", "Paris"], "answer": 1}                                     MMLU
    {"question": ..., "options": {"A": "Rome", "B": "Paris"}, "answer": "Paris", "answer_idx": "B"}    MedQA
    {"question": ..., "choices": {"text": ["Rome", "Paris"], "label": ["1", "2"]}, "answerKey": "2"}   ARC
    {"question": ..., "opa": "Rome", "opb": "Paris", "cop": 1}                                        MedMCQA
    {"question": ..., "A": "Rome", "B": "Paris", "answer": "B"}                                       C-Eval

A number counts from 0, as in all of these, unless the labels are numbers. What can be read in two ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

from pipelines.tasks.cells import data_of, written
from serve_apps.tools.reference_fields import KEY_FIELDS
from serve_apps.tools.text_match import normalize

LIST_FIELDS = ("choices", "options", "answer_choices", "answer_options", "endings")
COLUMN_PREFIXES = ("", "op", "option_", "choice_")
"""What stands before the letter in the names of columns that hold one choice each."""
LABEL_FIELDS, TEXT_FIELDS = ("label", "key"), ("text", "value")

BEHIND_LETTER = (". ", ") ", ": ", ".", ")", ":", " ")
"""What stands between the letter and the text of a choice that a question has already."""

_LETTERED = re.compile(r"\(?([A-Za-z])[).:]\s*(?=\S)")
_NUMBERED = re.compile(r"(?:choice|option|opt|ending)_?\d", re.IGNORECASE)
_AROUND_LABEL = "()[].: "


class Choices(NamedTuple):
    """The choices of a row."""

    texts: dict[str, str]
    """By letter."""
    labels: Sequence[str]
    """What the row calls them, in the same order."""
    are_numbers: bool = False
    """Whether the row has numbers in place of texts, so that a number may be a choice as well as count them."""

    def below(self, question: str) -> str:
        """Returns the question with the choices below it, a line each, unless it has them already."""
        forms = [[f"{letter}{sign}{text}" for sign in BEHIND_LETTER] for letter, text in self.texts.items()]
        is_there = all(any(form in question for form in of_choice) for of_choice in forms)
        return question if is_there else "\n".join([question, *map(self._line, self.texts)])

    def references(self, letter: str) -> tuple[str, ...]:
        """Returns what counts as an answer: the letter, its line, and the text where no other choice is written like it."""
        text = self.texts[letter]
        others = [*self.texts, *(other for name, other in self.texts.items() if name != letter)]
        is_unlike = normalize(text) not in map(normalize, others)
        return (letter, self._line(letter), text) if is_unlike else (letter, self._line(letter))

    def right_one(self, stated: Mapping[str, Any], at: str) -> str:
        """Returns the letter of the right choice.

        Args: stated: what the row says of it, by field. Raises ValueError where that names none, or may mean several.
        """
        keys = {field: self._of_key(value) for field, value in stated.items() if field in KEY_FIELDS}
        answers = {field: self._of_answer(value) for field, value in stated.items() if field not in KEY_FIELDS}
        # Beside a key, an answer that is none of the choices explains the right one.
        meant = keys | {field: letters for field, letters in answers.items() if letters or not keys}
        common = set.intersection(*meant.values()) if meant else set()
        if len(common) == 1:
            return common.pop()
        shown = ", ".join(f"{field} = {stated[field]!r:.80}" for field in meant) or f"none of {', '.join(KEY_FIELDS)}"
        several = " or ".join(sorted(set().union(*meant.values())))
        raise ValueError(
            f"{at}: {shown} {f'may mean {several}' if several else 'names no choice'} of "
            f"{' '.join(map(self._line, self.texts)):.200} (numbers count from 0): write the letter of the right one into `answer`, "
            "without another key, or leave this row out"
        )

    def _line(self, letter: str) -> str:
        return f"{letter}. {self.texts[letter]}"

    def _of_key(self, value: Any) -> set[str]:
        """Returns the letters that a label or a number means."""
        text = written(value).strip(_AROUND_LABEL).casefold()
        named = {letter for letter, label in zip(self.texts, self.labels, strict=True) if label.casefold() == text}
        return named or {letter for number, letter in enumerate(self.texts) if str(number) == text}

    def _of_answer(self, value: Any) -> set[str]:
        """Returns the letters that an answer may mean, which is a label, a number or the text of a choice."""
        if isinstance(value, list | tuple):
            return {letter for item in value for letter in self._of_answer(item)}
        text = written(value).strip()
        lettered = _LETTERED.match(text)
        same = {letter for letter, choice in self.texts.items() if choice == text}
        if lettered and self.texts.get(letter := lettered[1].upper()) == text[lettered.end() :]:
            same.add(letter)
        return self._of_key(value) | (same if isinstance(value, str) or self.are_numbers else set())


def find_choices(row: Mapping[str, Any], at: str) -> Choices | None:
    """Returns the choices of a row; None where it has none. Raises ValueError for what may be choices and cannot be read."""
    for field in LIST_FIELDS:
        if value := data_of(row.get(field)):
            return _choices(value, f"{at}: {field} = {value!r:.80}")
    numbered = [name for name, value in row.items() if _NUMBERED.fullmatch(name) and value not in (None, "")]
    if len(numbered) > 1:
        raise ValueError(
            f"{at}: {', '.join(numbered)}: data sets count such columns from 0 or from 1: write them as one list into `choices`, and the letter "
            "of the right one into `answer`"
        )
    columns = choice_columns(row)
    return _choices({name[-1]: row[name] for name in columns}, f"{at}: {', '.join(columns)}") if columns else None


def choice_columns(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns that hold one choice each; empty where there are fewer than two."""
    for prefix in COLUMN_PREFIXES:
        for letters in (ascii_uppercase, ascii_lowercase if prefix else ""):
            names = [prefix + letter for letter in letters if row.get(prefix + letter) not in (None, "")]
            if names[:2] == [prefix + letter for letter in letters[:2]] != []:
                return names
    return []


def _choices(value: Any, place: str) -> Choices:
    """Returns the choices that a list, or an object of labels and texts, holds."""
    labelled = _labelled(value)
    labels, texts = [label for label, _ in labelled], [written(text).strip() for _, text in labelled]
    is_read = all(isinstance(text, str | int | float | Decimal) for _, text in labelled) and all(texts)
    if not is_read or not 2 <= len(set(labels)) == len(labels) <= len(ascii_uppercase):
        raise ValueError(
            f"{place} is no list of choices that can be read: write a list of 2 to {len(ascii_uppercase)} texts, or an object of letters "
            "and texts, and give a column that holds something else another name"
        )
    are_letters = all(len(label) == 1 and label in ascii_uppercase for label in map(str.upper, labels))
    letters = [label.upper() for label in labels] if are_letters else list(ascii_uppercase[: len(labels)])
    return Choices(
        dict(zip(letters, texts, strict=True)), labels, not any(isinstance(text, str) for _, text in labelled)
    )


def _labelled(value: Any) -> list[tuple[str, Any]]:
    """Returns labels and texts; empty for a value that is neither a list nor an object of them."""
    if isinstance(value, Mapping):
        label, text = (next((f for f in fields if f in value), "") for fields in (LABEL_FIELDS, TEXT_FIELDS))
        if label and text:
            lists = [data_of(value[field]) for field in (label, text)]
            same = all(isinstance(one, list) for one in lists) and len(lists[0]) == len(lists[1])
            return list(zip(map(written, lists[0]), lists[1], strict=True)) if same else []
        return [(name.strip(_AROUND_LABEL), text) for name, text in value.items() if text is not None]
    if not isinstance(value, list):
        return []
    if all(isinstance(item, Mapping) for item in value):
        return [pair for item in value for pair in _labelled({name: [part] for name, part in item.items()})]
    return (
        list(zip(ascii_uppercase, _without_letters(value), strict=False)) if len(value) <= len(ascii_uppercase) else []
    )


def _without_letters(texts: list[Any]) -> list[Any]:
    """Returns texts without the letters that they begin with, where each has its own: "A) 21", "B) 22"."""
    begins = [_LETTERED.match(text.strip()) if isinstance(text, str) else None for text in texts]
    if any(begin is None or begin[1].upper() != letter for begin, letter in zip(begins, ascii_uppercase, strict=False)):
        return texts
    return [text.strip()[begin.end() :] for text, begin in zip(texts, begins, strict=True) if begin]
