"""task_fields: a row of a data set -> a task: math, question answering, code, or a repository to repair.

The field names are those of verl's Parquet layout, Search-R1, Dr. MAS, TACO, DeepCoder and LiveCodeBench; those of answers and
tests are in `serve_apps/tools/reference_fields.py`. A row with tests is a code task: its tests go into `metadata["tests"]` in their
own shape, with the function name and the checker of the row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from itertools import chain
from typing import Any

from pipelines.tasks.cells import data_of, is_finite, look_up, written
from pipelines.tasks.choices import LIST_FIELDS, choice_columns, find_choices
from pipelines.tasks.repository_rows import REPOSITORY_FIELDS, is_repository, repository_task
from pipelines.tasks.splits import BOOKKEEPING, settings_of
from serve_apps.authoring.boxed import last_boxed
from serve_apps.chat import long_json
from serve_apps.tools.reference_fields import (
    ANSWER_FIELDS,
    CHECKER,
    CHECKER_CODE,
    FN_NAME,
    KEY_FIELDS,
    SPLIT_TEST_FIELDS,
    TEST_FIELDS,
    TRUTH_FIELDS,
)
from stores.types import FAMILY, Task

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
CASE_FIELDS = ("input", "inputs", "stdin", *TEST_FIELDS, *SPLIT_TEST_FIELDS)
"""A mapping with one of these fields holds tests."""
STARTER_FIELDS = ("starter_code", "extra_info.starter_code")
ID_FIELDS = ("task_id", "id", "unique_id", "question_id", "problem_id", "query_id", "uid", "extra_info.index")
"""What names a row within its source: where the row names that, too, both make up the task's id."""
SOURCE_FIELDS = ("data_source", "source", "env_kwargs.data_source")
INNER_ANSWER_FIELDS = ("target", "ground_truth", "golden_answers", "answer")
"""Fields of an object that stands where an answer is looked for: they hold the answers."""
PUZZLE = "numbers"
"""Where an object has it beside the target, as in Countdown, the target is what an answer must come to, and no answer."""
METADATA = "metadata"
"""The field whose entries become the task's metadata; they win over those of verl's `extra_info`."""
PASSAGE_FIELDS = ("passage", "context", "article", "story", "paragraph", "body", "table")
"""Texts that a question is about; they come before it in the prompt. What is no text, such as documents to be found, does not."""
MEDIA_FIELDS = ("image", "images", "audio", "video", "videos")
QUESTION_ROLES = ("system", "developer", "user")
"""Roles of the messages that make up a task's prompt."""
MAX_BARE_SOLUTION = 100
"""Characters of a `solution` without a box that is the answer itself: one line, no derivation."""

_TEST_SETTINGS = {"fn_name": FN_NAME, "checker_type": CHECKER, "checker_code": CHECKER_CODE}
KNOWN_FIELDS = tuple(
    dict.fromkeys(
        name.partition(".")[0]
        for name in chain(
            *(PROMPT_FIELDS, PASSAGE_FIELDS, ANSWER_FIELDS, TEST_FIELDS, SPLIT_TEST_FIELDS, TRUTH_FIELDS),
            *(LIST_FIELDS, KEY_FIELDS, STARTER_FIELDS, *_TEST_SETTINGS.values(), ID_FIELDS, SOURCE_FIELDS),
            (METADATA, "extra_info", FAMILY),
        )
    )
)
"""Names of columns that a task may be made of."""

_WRAPPED = re.compile(r"^### *Question:(.*?)(?=^### *Answer:|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def read_task(row: Mapping[str, Any], at: str, default_source: str, *, is_one_of_several: bool = False) -> Task:
    """Returns the task of a row at the location `at`; null and NaN are missing values.

    Args: is_one_of_several: whether other sources are read with this one, so that an id is one within its source.

    Raises ValueError if it has no prompt or one that is no question, neither answer nor tests, an answer that is no number, or
    half of a surrogate pair, which no model reads.
    """
    try:
        task = _task(_without_nan(row), at, default_source, default_source if is_one_of_several else "")
        "\n".join((task.task_id, task.prompt, task.source, *task.answers)).encode()
        return task
    except UnicodeEncodeError as error:
        text = error.object[max(error.start - 20, 0) : error.end]
        raise ValueError(f"{at}: half of a surrogate pair ends {text!r}: write the whole character") from None
    except RecursionError:
        raise ValueError(f"{at}: objects or lists within one another, too deep to be read") from None


def _task(row: Mapping[str, Any], at: str, default_source: str, source_of_ids: str) -> Task:
    if is_repository(row):
        task = repository_task(row, at)
        return replace(task, metadata={**task.metadata, **_family(row, {}, at)})
    prompt = _prompt(row, at)
    if not prompt:
        raise ValueError(
            f"{at}: no task prompt: looked for {', '.join(PROMPT_FIELDS)}; has {', '.join(_shown(row)) or 'nothing'}"
        )
    tests, own = _tests(row), _object(row, METADATA)
    settings = _told_apart_by(own)
    answers: tuple[str, ...] = ()
    if tests is None:
        prompt, answers = _whole_question(row, prompt, at)
    if tests is None and not answers and not settings:
        raise ValueError(
            f"{at}: task without answer: looked for {', '.join(ANSWER_FIELDS)} (there in \\boxed{{}}), and for tests in "
            f"{', '.join((*TEST_FIELDS, *SPLIT_TEST_FIELDS, 'label'))}; has {', '.join(_shown(row))}; a task of a world needs none where "
            f"its settings stand in `{METADATA}`"
        )
    own_source = next((str(v) for f in SOURCE_FIELDS if (v := look_up(row, f))), "")
    source = own_source or default_source
    own_id = next((written(v) for f in ID_FIELDS if (v := look_up(row, f)) not in (None, "")), "")
    source_of_ids = own_source or source_of_ids
    own_id = f"{source_of_ids}/{own_id}" if source_of_ids and own_id else own_id
    key = "\x1f".join((source, prompt, *answers, *([json.dumps(settings, sort_keys=True)] if settings else [])))
    metadata = _object(row, "extra_info") | {name: value for name, value in own.items() if value is not None}
    if tests is not None:
        metadata = {k: v for k, v in metadata.items() if k not in (*TEST_FIELDS, *SPLIT_TEST_FIELDS)} | {"tests": tests}
        starter = next((str(v) for f in STARTER_FIELDS if (v := look_up(row, f))), "")
        prompt = f"{prompt}\n\nBegin with:\n{starter}" if starter else prompt
    return Task(
        task_id=own_id or sha256(key.encode()).hexdigest()[:16],
        prompt=prompt,
        answers=answers,
        source=source,
        metadata=metadata | _family(row, metadata, at),
    )


def unread_fields(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of a row's values that no task is made of, but for those that only say where the row was found."""
    known = {*KNOWN_FIELDS, *BOOKKEEPING, *choice_columns(row), *(REPOSITORY_FIELDS if is_repository(row) else ())}
    has_choices = choice_columns(row) or any(row.get(field) for field in LIST_FIELDS)
    if not (has_choices or _are_tests(data_of(row.get("label")))):
        known.discard("label")
    if not isinstance(data_of(row.get(METADATA)), Mapping):
        known.discard(METADATA)
    return [name for name, value in row.items() if name not in known and value not in (None, "") and not _is_nan(value)]


def _whole_question(row: Mapping[str, Any], question: str, at: str) -> tuple[str, tuple[str, ...]]:
    """Returns the question with all that the row says it is about, and the answers; ValueError where that is no text."""
    for field in MEDIA_FIELDS:
        if row.get(field):
            raise ValueError(
                f"{at}: {field}: a prompt is text only; leave this row out, or the column where it says nothing"
            )
    field, answers = next(((f, a) for f in ANSWER_FIELDS if (a := _answers(row, f, at))), ("", ()))
    choices = find_choices(row, at)
    if choices is not None:
        value = look_up(row, field) if field else None
        stated: dict[str, Any] = {f: row[f] for f in KEY_FIELDS if row.get(f) not in (None, "")}
        # What a table holds as a number counts the choices; an answer in words names one.
        stated |= {field: value if isinstance(value, int | float | Decimal) else answers} if field else {}
        stated = stated or {name: value for name, value in row.items() if name == "label"}
        answers = choices.references(choices.right_one(stated, at))
        question = choices.below(question)
    elif field and row.get("label") in (0, "0"):
        raise ValueError(
            f"{at}: label = {row['label']!r} beside {field} = {str(answers[0])[:60]!r} says that this is no right answer, as in WikiQA and "
            "MultiRC: leave this row out, or give a `label` that means something else another name"
        )
    passages = (data_of(row.get(field)) for field in PASSAGE_FIELDS)
    about = [text.strip() for text in passages if isinstance(text, str) and text.strip() not in question]
    return "\n\n".join([*about, question]), answers


def _object(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Returns the object of a field as JSON values; empty where it is none."""
    value = data_of(row.get(field))
    return json.loads(json.dumps(_finite(value), default=str)) if isinstance(value, Mapping) else {}


def _told_apart_by(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a row's metadata makes another task of the same question."""
    of_tests = {name for names in _TEST_SETTINGS.values() for name in names}
    settings = settings_of(Task(task_id="", prompt="", answers=(), metadata=metadata))
    return {k: v for k, v in settings.items() if v is not None and k not in {*of_tests, FAMILY}}


def _family(row: Mapping[str, Any], metadata: Mapping[str, Any], at: str) -> dict[str, str]:
    """Returns the family that a row names, as an entry of its metadata; empty where it names none."""
    family = next((v for v in (metadata.get(FAMILY), row.get(FAMILY)) if v not in (None, "")), None)
    if family is None:
        return {}
    if not isinstance(family, str | int | float | Decimal):
        raise ValueError(
            f"{at}: {FAMILY} = {family!r:.80} is no name: write a text or a number there, or rename the column"
        )
    return {FAMILY: written(family)}


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with null for NaN, also in objects within it: tables write both for a missing value."""
    return {
        name: _without_nan(value) if isinstance(value, Mapping) else None if _is_nan(value) else value
        for name, value in row.items()
    }


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, Decimal)) and math.isnan(value)


def _shown(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} (missing)" if value is None else name for name, value in row.items()]


def _finite(value: Any) -> Any:
    """Returns a value with null for each number that JSON does not have: NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tests(row: Mapping[str, Any]) -> Any:
    """Returns the tests of a row, of its `extra_info` or its ground truth, in their own shape; None if it has none.

    Tests with integers of more than `MAX_INT_DIGITS` are JSON text, because a task is written by Python's own JSON.
    """
    tests = _raw_tests(row)
    if _has_long_integers(tests):
        tests = long_json.dumps(tests)
    settings = {field: value for field, names in _TEST_SETTINGS.items() if (value := _test_setting(row, names))}
    return {"tests": tests, **settings} if tests is not None and settings else tests


def _has_long_integers(value: Any) -> bool:
    if isinstance(value, (Mapping, list)):
        return any(map(_has_long_integers, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Decimal)


def _test_setting(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns the first of `names` that the row has, or its metadata, `extra_info`, label or `reward_model`."""
    parts = (row, *(data_of(row.get(f)) for f in ("metadata", "extra_info", "label", "reward_model")))
    return next((p[name] for p in parts if isinstance(p, Mapping) for name in names if p.get(name)), None)


def _raw_tests(row: Mapping[str, Any]) -> Any:
    for owner in (row, *(data_of(row.get(f)) for f in ("extra_info", "reward_model"))):
        if not isinstance(owner, Mapping):
            continue
        single = next((owner[f] for f in TEST_FIELDS if owner.get(f)), None)
        split = {f: owner[f] for f in SPLIT_TEST_FIELDS if owner.get(f)}
        if split:
            return split if single is None else {"tests": single, **split}
        if single is not None:
            return single
    truths = (look_up(row, f) for f in TRUTH_FIELDS)
    return next((truth for truth in truths if _are_tests(data_of(truth))), None)


def _are_tests(data: Any) -> bool:
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, Mapping) and any(first.get(f) is not None for f in CASE_FIELDS)


def _prompt(row: Mapping[str, Any], at: str) -> str:
    """Returns the text of the first field that holds a prompt; empty where none does.

    Where a later field has the same question behind a system message, that conversation is the prompt: a task may stand in its
    system message alone. ValueError where it asks for something else. A row of Dr. MAS has its question by itself, and before it a
    system message that is the same in all rows.
    """
    if bare := _prompt_text(look_up(row, "env_kwargs.question"), f"{at}: env_kwargs.question"):
        return bare
    for number, field in enumerate(PROMPT_FIELDS):
        text = _prompt_text(look_up(row, field), f"{at}: {field}")
        if not text:
            continue
        for later in PROMPT_FIELDS[number + 1 :]:
            value = look_up(row, later)
            if not _has_instructions(value):
                continue
            conversation = _prompt_text(value, f"{at}: {later}")
            if text not in conversation:
                raise ValueError(
                    f"{at}: two prompts: {field} is {text[:60]!r}, and {later} has a system message and another question: keep the one "
                    "that is meant"
                )
            text = conversation
        return text
    return ""


def _has_instructions(value: Any) -> bool:
    """Whether a value is a conversation with a system message that is not empty."""
    data = data_of(value)
    return isinstance(data, list) and any(
        isinstance(message, Mapping) and message.get("role") in ("system", "developer") and message.get("content")
        for message in data
    )


def _prompt_text(value: Any, at: str) -> str:
    """Returns a text, or the texts of a conversation's messages in their order; empty for anything else.

    A wrapper of "### Question:" and "### Answer:" is taken off what the user says. Raises ValueError for a conversation that
    is more than a question, or not of text.
    """
    data = data_of(value)
    if isinstance(data, Mapping) and "role" in data:
        data = [data]
    if not (isinstance(data, list) and any(isinstance(m, Mapping) and "content" in m for m in data)):
        return _unwrapped(value) if isinstance(value, str) else ""
    return "\n\n".join(text for number, message in enumerate(data, 1) if (text := _message(message, f"{at}[{number}]")))


def _message(message: Any, at: str) -> str:
    """Returns the text of one message of a prompt."""
    role = message.get("role") or "user" if isinstance(message, Mapping) else type(message).__name__
    if role not in QUESTION_ROLES:
        raise ValueError(
            f"{at}: a message of role {role!r}: a task's prompt is made of messages of {', '.join(QUESTION_ROLES)}; write the "
            "conversation so far as one text into `question`, or leave this row out"
        )
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_part_text(part) for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type") or sorted(part) if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{at}: content of kind {kind!r}: a prompt is text only; leave this row out")
    text = "".join(texts)
    return _unwrapped(text) if role == "user" else text.strip()


def _part_text(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return part.get("text") if part.get("type", "text") in ("text", "input_text") else None


def _unwrapped(text: str) -> str:
    wrapped = _WRAPPED.search(text)
    return (wrapped[1] if wrapped else text).strip()


def _answers(row: Mapping[str, Any], field: str, at: str) -> tuple[str, ...]:
    r"""Returns the reference answers: a value or a list of them, `\boxed{}` and GSM8K's `####` unpacked."""
    value = look_up(row, field)
    if field == "reward_model":  # the answers themselves, or an object as text, in which they were looked for before
        value = data_of(value)
        value = None if isinstance(value, Mapping) else value
    answers = []
    for text in _answer_texts(value, f"{at}: {field}"):
        boxed = last_boxed(text)
        if boxed is not None:
            answers.append(boxed.strip())
        elif field != "solution" or (len(text) <= MAX_BARE_SOLUTION and "\n" not in text):
            answers.append(text.rpartition("####")[2].strip())
    return tuple(dict.fromkeys(answer for answer in answers if answer))


def _answer_texts(value: Any, at: str) -> list[str]:
    """Returns the texts of an answer, of a list of them, or of an object that holds them; each may be JSON text.

    A list of finite numbers as text stays a text: it is an answer of mathematics, an interval for example.
    """
    data = data_of(value)
    if isinstance(data, Mapping) and (inner_answers := [data[f] for f in INNER_ANSWER_FIELDS if f in data]):
        if PUZZLE in data:
            raise ValueError(
                f"{at} has {PUZZLE!r} beside its target: any expression of these numbers that gives it is right, and the target alone is not; "
                "write rows without an answer, with both in `metadata`, and check them by a credit rule of your own"
            )
        inner = next((item for item in inner_answers if item is not None), None)
        return [] if inner is None else _answer_texts(inner, at)
    if isinstance(data, list) and (value is data or any(map(_is_answer, data))):
        return [text for number, item in enumerate(data, 1) for text in _answer_texts(item, f"{at}[{number}]")]
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, (float, Decimal)) and not is_finite(value):
        raise ValueError(f"{at} is {value}, which is no answer: write the answer there, or leave this row out")
    return [written(value)] if isinstance(value, (int, float, Decimal)) else []


def _is_answer(item: Any) -> bool:
    """Whether an item shows that a list in JSON text is a list of answers, missing ones among them, and no mathematics."""
    if isinstance(item, list):
        return any(map(_is_answer, item))
    if isinstance(item, Mapping):
        return any(field in item for field in INNER_ANSWER_FIELDS)
    return item is None or isinstance(item, str) or (isinstance(item, float) and not math.isfinite(item))
