"""Tasks in every shape of the field's data sets, each in every kind of file, however large the file is."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.sources import load_tasks

pytestmark = pytest.mark.fast

IO = [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}]


def packed(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def row(shape: str, i: int, pad: int = 0) -> dict[str, Any]:
    """A row as the data set has it, by us."""
    text = f"Add the two numbers, number {i}." + (f"\n{i} and so on" * (pad // 12))[:pad]
    return {
        "math": {"problem": text, "answer": str(i)},
        "gsm8k": {"question": text, "answer": f"so\n#### {i}"},
        "verl": {
            "data_source": "math",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        },
        "nq": {"id": f"train_{i}", "question": text, "golden_answers": [f"a{i}", "b"], "data_source": "nq"},
        "search_r1": {
            "question": text,
            "prompt": [{"role": "user", "content": f"Answer the question. {text}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [f"a{i}"]}},
            "data_source": "nq",
        },
        "hotpotqa": {"_id": str(i), "question": text, "answer": f"a{i}", "context": {"title": ["Title"], "sentences": [["sentence"]]}},
        "drmas": {"env_kwargs": {"question": text, "ground_truth": [f"a{i}"], "data_source": "hotpotqa"}},
        "taco": {
            "question": text,
            "input_output": json.dumps({"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]}),
            "starter_code": "",
        },
        "deepcoder": {"problem": text, "tests": json.dumps(IO), "starter_code": "def f(a, b):"},
        "lcb": {
            "question_content": text,
            "question_id": f"abc_{i}",
            "public_test_cases": json.dumps([{"input": "7 8", "output": "15", "testtype": "stdin"}]),
            "private_test_cases": packed(IO),
            "metadata": "{}",
            "starter_code": "",
        },
        "codecontests": {
            "description": text,
            "public_tests": {"input": ["7 8"], "output": ["15"]},
            "private_tests": {"input": ["1 2", "4 5"], "output": ["3", "9"]},
        },
        "prime": {
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": json.dumps({"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]})},
            "extra_info": {"index": i},
        },
        "unitymas": {"prompt": text, "extra_info": {"public_test_cases": [{"input": "7 8", "output": "15"}], "private_test_cases": IO}},
    }[shape]  # fmt: skip


CODE = ("taco", "deepcoder", "lcb", "codecontests", "prime", "unitymas")
SHAPES = ("math", "gsm8k", "verl", "nq", "search_r1", "hotpotqa", "drmas", *CODE)


def write(path: Path, shape: str, count: int, pad: int = 0) -> Path:
    rows: Iterator[dict[str, Any]] = (row(shape, i, pad) for i in range(count))
    if path.suffix == ".parquet":
        schema = pyarrow.Table.from_pylist([row(shape, 0)]).schema
        with pyarrow.parquet.ParquetWriter(path, schema, write_batch_size=8) as writer:  # rows between ends of pages
            while part := list(islice(rows, 256)):
                writer.write_table(pyarrow.Table.from_pylist(part, schema=writer.schema))
    else:
        with path.open("w") as file:
            file.write("[" if path.suffix == ".json" else "")
            for i, one in enumerate(rows):
                separator = "," if path.suffix == ".json" and i else ""
                file.write(f"{separator}{json.dumps(one)}\n")
            file.write("]" if path.suffix == ".json" else "")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_its_tasks(shape: str, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"tasks{suffix}", shape, 3)
    tasks = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert [t.prompt.partition("\n")[0] for t in tasks] == [f"Add the two numbers, number {i}." for i in range(3)]
    if shape in CODE:
        assert tasks[0].metadata["tests"]
        assert tasks[0].answers == ()
        assert ("Begin with:\ndef f(a, b):" in tasks[0].prompt) == (shape == "deepcoder")
    else:
        assert tasks[2].answers[0] in ("2", "a2")


def test_several_files_make_a_set_in_which_each_is_a_source(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("nq", "hotpotqa")}
    for name, file in files.items():
        rows = [{"id": f"train_{i}", "question": f"{name} {i}?", "golden_answers": [f"a{i}"]} for i in range(3)]
        file.write_text("\n".join(map(json.dumps, rows)))
    source = TaskSourceConfig(path=tuple(map(str, files.values())), count=5)
    tasks = load_tasks(source, section="train", seed=0)
    assert [(task.source, task.prompt) for task in tasks] == [
        *(("nq", f"nq {i}?") for i in range(3)),
        *(("hotpotqa", f"hotpotqa {i}?") for i in range(2)),
    ]
    files["hotpotqa"].unlink()
    with pytest.raises(ValueError, match=r"hotpotqa\.jsonl does not exist"):
        load_tasks(source, section="train", seed=0)


def test_files_of_one_name_are_told_apart_by_their_folders_and_one_named_twice_is_read_once(tmp_path: Path) -> None:
    files = []
    for name in ("gsm8k", "math"):
        files.append(tmp_path / name / "train.jsonl")
        files[-1].parent.mkdir()
        files[-1].write_text(json.dumps({"id": 0, "question": f"{name}?", "answer": "1"}))
    tasks = load_tasks(TaskSourceConfig(path=tuple(map(str, files))), section="train", seed=0)
    assert [task.source for task in tasks] == ["gsm8k/train", "math/train"]
    assert len({task.task_id for task in tasks}) == 2
    twice = load_tasks(TaskSourceConfig(path=(str(files[0]), str(files[0]))), section="train", seed=0)
    assert [(task.task_id, task.source) for task in twice] == [("0", "train")]


READER = """
import sys
from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.sources import iter_tasks

for line in sys.stdin:
    source = TaskSourceConfig(path=line.strip())
    print(sum(1 for _ in iter_tasks(source, section="train", seed=0)), flush=True)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_mib(folder: Path, suffix: str, shapes: Sequence[str], count: int, pad: int) -> float:
    """Most resident memory, Arrow's included, of a process that streams `count` tasks of each shape, file after file."""
    child = subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert child.stdin is not None and child.stdout is not None
    for shape in shapes:
        path = write(folder / f"{shape}-{count}{suffix}", shape, count, pad)
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == count
        path.unlink()
    rest, _ = child.communicate(timeout=60)
    return int(rest) / 1024


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_ten_thousand_tasks_of_each_shape_stream_in_flat_memory(suffix: str, tmp_path: Path) -> None:
    """What reading holds beyond the ids does not grow with the file: 9,000 more rows of 3 kB would be 26 MiB."""
    few, many = [peak_mib(tmp_path, suffix, SHAPES, count, pad=3000) for count in (1_000, 10_000)]
    print(f"{few:.0f} -> {many:.0f} MiB")
    assert many < few + 14, f"{few} -> {many} MiB"


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_of_half_a_megabyte_are_not_held_together(suffix: str, tmp_path: Path) -> None:
    few, many = [peak_mib(tmp_path, suffix, ["math"], count, pad=1 << 19) for count in (64, 256)]
    print(f"{few:.0f} -> {many:.0f} MiB")
    assert many < few + 72, f"{few} -> {many} MiB"


def test_one_file_gives_all_sets_and_a_task_stays_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", "math", 400)

    def part(section: str, count: int | None = None) -> list[str]:
        shares = {"train": 0.5, "gate": 0.25, "test": 0.2}
        source = TaskSourceConfig(path=str(path), shares=shares, count=count)
        return [t.task_id for t in load_tasks(source, section=section, seed=0)]

    before = {section: part(section) for section in ("train", "gate", "test")}
    assert len({*before["train"], *before["gate"], *before["test"]}) == sum(map(len, before.values())) < 400
    assert 150 < len(before["train"]) < 250
    write(path, "math", 800)
    assert all({*before[section]} <= {*part(section)} for section in before)
    assert part("test", count=5) == part("test")[:5]
    with pytest.raises(ValueError, match="holds no task in its part 'sentinel'"):
        part("sentinel")


@pytest.mark.parametrize("shares", [{"train": 0.9, "test": 0.2}, {"train": -0.1}])
def test_shares_are_parts_of_one(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="`shares` are parts of 1"):
        TaskSourceConfig(path="x", shares=shares)


def test_a_split_of_a_file_is_one_of_its_parts() -> None:
    with pytest.raises(ValueError, match="split = 'gate': a file has no parts without `shares`"):
        TaskSourceConfig(path="x", split="gate")
    shares = {"train": 0.8, "gate": 0.2}
    with pytest.raises(ValueError, match="split = 'test' is none of the parts in `shares`: train, gate"):
        TaskSourceConfig(path="x", split="test", shares=shares)
    assert TaskSourceConfig(path="x", split="gate", shares=shares).split == "gate"
