"""task_fields: a row of a data set -> a task: math, question answering, or code.

The field names are those of verl's Parquet layout, Search-R1, Dr. MAS, TACO, DeepCoder and LiveCodeBench. A row with tests
is a code task: its tests go into `metadata["tests"]` in their own shape, with the function name and the checker of the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from serve_apps.boxed import last_boxed
from serve_apps.tools.code_tests import CHECKER, CHECKER_CODE, FN_NAME
from stores.types import Task

PROMPT_FIELDS = (
    "question",
    "problem",
    "query",
    "prompt",
    "extra_info.question",
    "env_kwargs.question",
    "question_content",
    "description",
)
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
TEST_FIELDS = ("tests", "test_cases", "input_output")
SPLIT_TEST_FIELDS = ("public_test_cases", "private_test_cases", "public_tests", "private_tests")
"""Fields that separate public from hidden tests; both are read, together with `TEST_FIELDS`."""
TRUTH_FIELDS = (
    "reward_model.ground_truth",
    "reward_model.answer",
    "reward_model.target",
    "reward_model",
    "answer",
    "label",
)
"""Fields that may hold tests as the ground truth."""
CASE_FIELDS = ("input", "inputs", "stdin", *TEST_FIELDS, *SPLIT_TEST_FIELDS)
"""A mapping with one of these fields holds tests."""
STARTER_FIELDS = ("starter_code", "extra_info.starter_code")
ID_FIELDS = ("task_id", "id", "unique_id", "question_id")
SOURCE_FIELDS = ("data_source", "source", "env_kwargs.data_source")

_TEST_SETTINGS = {"fn_name": FN_NAME, "checker_type": CHECKER, "checker_code": CHECKER_CODE}
_WRAPPED = re.compile(r"^### *Question:(.*?)(?=^### *Answer:|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def read_task(row: Mapping[str, Any], at: str, default_source: str) -> Task:
    """Returns the task of a row at the location `at`. Raises ValueError if it has no prompt, or neither answer nor tests."""
    prompt = next((text for f in PROMPT_FIELDS if (text := _prompt_text(_look_up(row, f)))), "")
    if not prompt:
        raise ValueError(
            f"{at}: no task prompt: looked for {', '.join(PROMPT_FIELDS)}; has {', '.join(row) or 'nothing'}"
        )
    tests = _tests(row)
    answers = () if tests is not None else next((a for f in ANSWER_FIELDS if (a := _answers(row, f))), ())
    if tests is None and not answers:
        raise ValueError(
            f"{at}: task without answer: looked for {', '.join(ANSWER_FIELDS)} (there in \\boxed{{}}), and for tests in "
            f"{', '.join((*TEST_FIELDS, *SPLIT_TEST_FIELDS, 'label'))}; has {', '.join(row)}"
        )
    source = next((str(v) for f in SOURCE_FIELDS if (v := _look_up(row, f))), default_source)
    given_id = next((str(row[f]) for f in ID_FIELDS if row.get(f) not in (None, "")), "")
    key = "\x1f".join((source, prompt, *answers))
    extra = _data(row.get("extra_info"))
    metadata = json.loads(json.dumps(extra, default=str)) if isinstance(extra, dict) else {}
    if tests is not None:
        metadata = {k: v for k, v in metadata.items() if k not in (*TEST_FIELDS, *SPLIT_TEST_FIELDS)} | {"tests": tests}
        starter = next((str(v) for f in STARTER_FIELDS if (v := _look_up(row, f))), "")
        prompt = f"{prompt}\n\nBegin with:\n{starter}" if starter else prompt
    return Task(
        task_id=given_id or sha256(key.encode()).hexdigest()[:16],
        prompt=prompt,
        answers=answers,
        source=source,
        metadata=metadata,
    )


def _tests(row: Mapping[str, Any]) -> Any:
    """Returns the tests of a row, of its `extra_info` or its ground truth, in their own shape; None if it has none."""
    tests = _raw_tests(row)
    settings = {field: value for field, names in _TEST_SETTINGS.items() if (value := _test_setting(row, names))}
    return {"tests": tests, **settings} if tests is not None and settings else tests


def _test_setting(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns the first of `names` that the row has, or its metadata, `extra_info`, label or `reward_model`."""
    parts = (row, *(_data(row.get(f)) for f in ("metadata", "extra_info", "label", "reward_model")))
    return next((p[name] for p in parts if isinstance(p, Mapping) for name in names if p.get(name)), None)


def _raw_tests(row: Mapping[str, Any]) -> Any:
    for part in (row, *(_data(row.get(f)) for f in ("extra_info", "reward_model"))):
        if not isinstance(part, Mapping):
            continue
        single = next((part[f] for f in TEST_FIELDS if part.get(f)), None)
        split = {f: part[f] for f in SPLIT_TEST_FIELDS if part.get(f)}
        if split:
            return split if single is None else {"tests": single, **split}
        if single is not None:
            return single
    truths = (_look_up(row, f) for f in TRUTH_FIELDS)
    return next((truth for truth in truths if _are_tests(_data(truth))), None)


def _are_tests(data: Any) -> bool:
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, Mapping) and any(first.get(f) is not None for f in CASE_FIELDS)


def _data(value: Any) -> Any:
    """Returns the content of a text that is JSON; else the value itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _look_up(row: Mapping[str, Any], dotted: str) -> Any:
    value: Any = row
    for part in dotted.split("."):
        value = _data(value)
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _prompt_text(value: Any) -> str:
    """Returns the text, or the last user message of a chat, without a wrapper of "### Question:" and "### Answer:"."""
    if isinstance(value, list):
        messages = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role", "user") == "user"]
        value = messages[-1] if messages else ""
    if not isinstance(value, str):
        return ""
    wrapped = _WRAPPED.search(value)
    return (wrapped[1] if wrapped else value).strip()


def _answers(row: Mapping[str, Any], field: str) -> tuple[str, ...]:
    r"""Returns the reference answers: a value or a list of them, `\boxed{}` and GSM8K's `####` unpacked."""
    value = _look_up(row, field)
    if field == "reward_model":  # the answers themselves, or an object as text, in which they were looked for before
        value = _data(value)
    values = value if isinstance(value, list) else [value]
    texts = [str(v).strip() for v in values if isinstance(v, (str, int, float))]
    answers = []
    for text in texts:
        boxed = last_boxed(text)
        if boxed is not None:
            answers.append(boxed.strip())
        elif field != "solution":
            answers.append(text.rpartition("####")[2].strip())
    return tuple(dict.fromkeys(answer for answer in answers if answer))
