"""reference_fields: the names of answers and tests in data sets, and a task without them, as a program is shown it.

`pipelines/tasks/task_fields.py` reads a row by these names; `public_task` leaves them out. A name is added here once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve_apps.chat import long_json
from stores.types import FAMILY, Task

ANSWER_FIELDS = (
    "reward_model.ground_truth",
    "reward_model.answer",
    "reward_model.target",
    "answer",
    "ground_truth",
    "target",
    "solution",
    "golden_answers",
    "reward_model.ground_truth.target",
    "env_kwargs.ground_truth",
    "extra_info.answer",
    "reward_model",
)
KEY_FIELDS = ("answerKey", "answer_key", "answer_idx", "answer_index", "correct_option", "correct", "cop")
"""Fields of rows of multiple choice that hold the label or the number of the right one, and never its text."""
TEST_FIELDS = ("tests", "test_cases", "input_output")
PUBLIC_TESTS = ("public_tests", "public_test_cases")
PRIVATE_TESTS = ("private_tests", "private_test_cases", "generated_tests", "generated_test_cases")
SPLIT_TEST_FIELDS = (*PUBLIC_TESTS, *PRIVATE_TESTS)
"""Fields that separate public from hidden tests; both are read, together with `TEST_FIELDS`."""
OUTPUT, OUTPUTS = ("output", "stdout", "expected"), ("outputs", "output", "stdout")
"""Fields of what a right program writes: in a single test, and in a column of them."""
FN_NAME = ("fn_name", "function_name", "func_name")
CHECKER = ("checker_type", "special_judge")
CHECKER_CODE = ("checker_code", "checker")
TRUTH_FIELDS = (
    "reward_model.ground_truth",
    "reward_model.answer",
    "reward_model.target",
    "reward_model",
    "answer",
    "label",
)
"""Fields that may hold tests as the ground truth."""
MAX_DEPTH = 100
"""Levels of a task's metadata that a program is shown, JSON text within it included."""

_CONTAINERS = ("extra_info", "env_kwargs")
"""Parts of a dotted name above which and beside which other things stand, too."""
_WORDS = re.compile(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*")


def _words(name: str) -> tuple[str, ...]:
    """Returns the words of a name in lower case and without the s of a plural: `groundTruths` -> ground, truth."""
    return tuple(word.lower().removesuffix("s") for word in _WORDS.findall(name))


_REFERENCES = {
    _words(part)
    for field in (
        *ANSWER_FIELDS,
        *KEY_FIELDS,
        *TEST_FIELDS,
        *SPLIT_TEST_FIELDS,
        *TRUTH_FIELDS,
        *OUTPUT,
        *OUTPUTS,
        *CHECKER_CODE,
    )
    for part in field.split(".")
    if part not in _CONTAINERS
}


def is_reference(name: str) -> bool:
    """Whether a field of this name holds an answer or tests: `answer`, `final_answer`, `groundTruth`, not `answer_type`."""
    words = _words(name)
    return any(words[start:] in _REFERENCES for start in range(len(words)))


def public_task(task: Task) -> dict[str, Any]:
    """Returns what a program may know of a task: its id, prompt, source, and its metadata without answers, tests and family.

    They are left out under every name for which `is_reference` holds, at any depth, also within JSON text.
    """
    metadata = _public({key: value for key, value in task.metadata.items() if key != FAMILY}, depth=0)
    return {"task_id": task.task_id, "prompt": task.prompt, "source": task.source, "metadata": metadata}


def _public(value: Any, *, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {k: _public(v, depth=depth + 1) for k, v in value.items() if not is_reference(str(k))}
    if isinstance(value, (list, tuple)):
        return [_public(item, depth=depth + 1) for item in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return _public_text(value, depth=depth)
    return value


def _public_text(text: str, *, depth: int) -> str | None:
    """Returns JSON text without references, other text as it is."""
    try:
        data = long_json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        return None
    shown = _public(data, depth=depth)
    return text if shown == data else long_json.dumps(shown)
