"""tasks: a task source of the run config -> tasks, from JSON, JSONL, Parquet or a generator.

Field names are those of the data sets in the field (seed-systems 1.1.7, verl's Parquet layout included).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.sections import TaskSourceConfig
from serve_apps.tools.math_answer import last_boxed
from serve_apps.workflow import load_object
from stores.types import Task

PROMPT_FIELDS = ("question", "problem", "query", "prompt")
ANSWER_FIELDS = (
    "reward_model.ground_truth",
    "reward_model.answer",
    "reward_model.target",
    "answer",
    "ground_truth",
    "target",
    "solution",
)
ID_FIELDS = ("task_id", "id", "unique_id")
SOURCE_FIELDS = ("data_source", "source")


def load_tasks(source: TaskSourceConfig, *, section: str, seed: int) -> list[Task]:
    """The tasks of one source, in file order or as the generator gives them; ids are unique.

    `section` ("train", "gate", "test") names the source in messages and is a generator's default split. Raises
    ValueError with place and fix for a file that is missing, empty or not what its suffix says, for a row without
    prompt or answer, and for an id that comes twice.
    """
    place = f"tasks.{section}"
    if source.generator is not None:
        assert source.count is not None, "the config demands a count with a generator"
        generate = load_object(source.generator.path, place=f"{place}.generator.path")
        settings = {"seed": seed, "split": source.split or section, "count": source.count, **source.generator.settings}
        try:
            inspect.signature(generate).bind(**settings)
        except TypeError as error:
            raise ValueError(f"{place}.generator.settings: {error} of {source.generator.path}") from None
        tasks = generate(**settings)
        located = [(f"{place}: task {number}", task) for number, task in enumerate(tasks, 1)]
    else:
        located = [
            (at, _task(row, at, Path(source.path).stem))
            for at, row in islice(_rows(Path(source.path), place), source.count)
        ]
    if not located:
        raise ValueError(f"{place}: {source.path or source.generator} holds no task")
    _check_unique(located)
    return [task for _, task in located]


def check_disjoint(sections: Mapping[str, Sequence[Task]]) -> None:
    """Raises ValueError if two sections share a prompt: what trains must not be measured on. Ids may repeat."""
    owner: dict[str, str] = {}
    for section, tasks in sections.items():
        for task in tasks:
            other = owner.setdefault(task.prompt, section)
            if other != section:
                raise ValueError(
                    f"tasks.{section} and tasks.{other} share the task {task.prompt[:80]!r} "
                    f"(id {task.task_id!r} in {section}): remove it from one of the two"
                )


def digest(tasks: Sequence[Task]) -> str:
    """Identity of a set of tasks: all that a workflow or a credit rule reads of them, not their ids alone."""
    text = json.dumps([asdict(task) for task in tasks], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _check_unique(located: Sequence[tuple[str, Task]]) -> None:
    first: dict[str, str] = {}
    for at, task in located:
        if task.task_id in first:
            raise ValueError(
                f"{at}: task id {task.task_id!r} was used before, at {first[task.task_id]}: "
                f"drop one of the two, or give each row its own `id`"
            )
        first[task.task_id] = at


def _rows(path: Path, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row of a file."""
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"{place}: {path} is of no known kind: use one of {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"{place}: task file {path} does not exist (seen from {Path.cwd()})")
    for at, row in readers[path.suffix](path):
        if not isinstance(row, dict):
            raise ValueError(f"{at}: a task is a JSON object, this is {type(row).__name__}: {str(row)[:60]!r}")
        yield at, row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                at = f"{path}:{number}"
                try:
                    yield at, json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{at}: not UTF-8: {error}") from None
                except json.JSONDecodeError as error:
                    raise ValueError(f"{at}: not JSON ({error}): {line[:60].decode(errors='replace')!r}") from None


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = json.loads(path.read_bytes().decode("utf-8-sig") or "[]")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        hint = "; one object per line is called .jsonl" if error.msg == "Extra data" else ""
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error}){hint}") from None
    if not isinstance(data, list):
        raise ValueError(f"{path}: holds {type(data).__name__}, a task file holds a list of objects")
    yield from ((f"{path}: item {number}", row) for number, row in enumerate(data, 1))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not Parquet: {error}") from None
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", row


def _task(row: Mapping[str, Any], at: str, default_source: str) -> Task:
    prompt = next((text for f in PROMPT_FIELDS if (text := _prompt_text(_look_up(row, f)))), "")
    if not prompt:
        raise ValueError(
            f"{at}: no task prompt: looked for {', '.join(PROMPT_FIELDS)}; has {', '.join(row) or 'nothing'}"
        )
    answers = next((a for f in ANSWER_FIELDS if (a := _answers(_look_up(row, f), is_solution=f == "solution"))), ())
    if not answers:
        raise ValueError(
            f"{at}: task without answer: looked for {', '.join(ANSWER_FIELDS)} (there in \\boxed{{}}); "
            f"has {', '.join(row)}"
        )
    source = next((str(row[f]) for f in SOURCE_FIELDS if row.get(f)), default_source)
    given_id = next((str(row[f]) for f in ID_FIELDS if row.get(f) not in (None, "")), "")
    key = "\x1f".join((source, prompt, *answers))
    extra = row.get("extra_info")
    return Task(
        task_id=given_id or sha256(key.encode()).hexdigest()[:16],
        prompt=prompt,
        answers=answers,
        source=source,
        metadata=json.loads(json.dumps(extra, default=str)) if isinstance(extra, dict) else {},
    )


def _look_up(row: Mapping[str, Any], dotted: str) -> Any:
    value: Any = row
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _prompt_text(value: Any) -> str:
    """The text itself, or what the user says last in a list of chat messages."""
    if isinstance(value, list):
        said = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role", "user") == "user"]
        value = said[-1] if said else ""
    return value.strip() if isinstance(value, str) else ""


def _answers(value: Any, *, is_solution: bool) -> tuple[str, ...]:
    r"""Reference answers: a value or a list of them, `\boxed{}` and GSM8K's `####` unpacked."""
    values = value if isinstance(value, list) else [value]
    texts = [str(v).strip() for v in values if isinstance(v, (str, int, float))]
    found = []
    for text in texts:
        boxed = last_boxed(text)
        if boxed is not None:
            found.append(boxed.strip())
        elif not is_solution:
            found.append(text.rpartition("####")[2].strip())
    return tuple(dict.fromkeys(answer for answer in found if answer))
