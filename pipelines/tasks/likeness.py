"""likeness: tasks to train on and tasks that measure -> those of the second that a team has practised in another form.

Equal prompts in two sections are refused where tasks are loaded (`sources`). What is left are the same words in another order (`7 * 8` and
`8 * 7`), another spelling, and one task with a few other words. A task counts as practised where a training task has

    the same references, by the normal form of `text_match`, and tests, no setting that differs, and
    at least `LIKE` of both tasks' words in common: sum of log((N + 1) / n_w) over the words of both, divided by that over the words of either
    (weighted Jaccard index), with n_w of the N tasks holding the word w

Words that many tasks hold, as a template's, so weigh next to nothing. Words are runs of letters and digits, and signs but for punctuation.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum, log

from pipelines.tasks.splits import HELD_OUT, have_same_settings
from serve_apps.tools.plain_signs import in_plain_signs
from serve_apps.tools.reference_fields import public_task
from serve_apps.tools.text_match import normalize
from stores.types import FAMILY, Task

LIKE = 0.8
TOLD = 0.03
"""The share of a section up to which nothing is said: remembering so few gains less than a gate of some hundred tasks tells apart."""
_WORD = re.compile(r"\w+|[^\w\s.,;:!?'\"()]")
_OPERATORS = str.maketrans("×·÷", "**/")

_Judged = tuple[frozenset[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Practised:
    """A held-out task, and the training task that it is like."""

    task: Task
    like: Task
    likeness: float
    """`LIKE` to 1."""


def practised(train: Sequence[Task], held_out: Sequence[Task]) -> list[Practised]:
    """Returns the held-out tasks that are like a training task that is judged alike, each with the one that it is most like.

    Two tasks that are alike share a word of any that make up more than 1 - `LIKE` of one's weight, so that only tasks with one of a task's
    rarest words are compared with it.
    """
    words = [_words(task) for task in (*train, *held_out)]
    held = Counter(chain.from_iterable(words))
    weight = {word: log((len(words) + 1) / number) for word, number in held.items()}
    having: dict[tuple[_Judged, str], list[int]] = defaultdict(list)
    for k, task in enumerate(train):
        judged = _judged_by(task)
        for word in words[k]:
            having[judged, word].append(k)
    alike = []
    for task, own in zip(held_out, words[len(train) :], strict=True):
        judged, total = _judged_by(task), fsum(weight[word] for word in own)
        others: set[int] = set()
        seen = 0.0
        for word in sorted(own, key=held.__getitem__):
            if seen > (1 - LIKE) * total:
                break
            others.update(having.get((judged, word), ()))
            seen += weight[word]
        best, like = LIKE, None
        for k in sorted(others):
            both, either = (fsum(weight[word] for word in some) for some in (own & words[k], own | words[k]))
            if both >= best * either and have_same_settings(task, train[k]) and (like is None or both > best * either):
                best, like = both / either, train[k]
        if like is not None:
            alike.append(Practised(task=task, like=like, likeness=best))
    return alike


def practised_notes(sections: Mapping[str, Sequence[Task]]) -> list[str]:
    """Returns a line per held-out section with such tasks: how many they are, and one of them with what it is like."""
    notes = []
    for section in HELD_OUT:
        tasks = sections.get(section, ())
        alike = practised(sections["train"], tasks) if tasks else []
        if len(alike) > TOLD * len(tasks):
            most = max(alike, key=lambda one: one.likeness)
            notes.append(
                f"tasks.{section}: {len(alike)} of {len(tasks)} tasks are like one of tasks.train and are judged alike, for example "
                f"{most.task.prompt!r:.100} and {most.like.prompt!r:.100}: a team that remembers solves them; give both one `family`, or drop one"
            )
    return notes


def _words(task: Task) -> set[str]:
    """Returns the words and signs of the prompt; one that stands there twice counts as two."""
    words = Counter(_WORD.findall(in_plain_signs(task.prompt).translate(_OPERATORS).casefold()))
    return {f"{word}/{k}" for word, number in words.items() for k in range(number)}


def _judged_by(task: Task) -> _Judged:
    """Returns what an answer is compared with: references, tests, and whatever else of a task no agent sees."""
    seen = public_task(task)["metadata"]
    hidden = {name: value for name, value in task.metadata.items() if name not in seen and name != FAMILY}
    return frozenset(map(normalize, task.answers)), json.dumps(hidden, sort_keys=True, default=str)
