"""What `troupe validate` says of code tasks that no program could solve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.extensions.code_tasks.reflective_code import ReflectiveCode
from pipelines.runners.validate import check_tasks

pytestmark = pytest.mark.fast

SHIPPED = Path(__file__).parents[4] / "infra" / "workflows" / "reflective_code.yaml"
CASES = [{"input": "1 2", "output": "3"}]


def checked(tmp_path: Path, section: str, row: dict[str, Any]) -> None:
    rows = [{"problem": f"sound {n}", "tests": CASES} for n in range(40)]
    for name, last in (("train", {}), ("gate", {}), (section, {"problem": "p", **row})):
        of_section = [{**r, "problem": f"{name} {r['problem']}"} for r in rows] + ([last] if last else [])
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in of_section))
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "gate")}
    config = load_config(SHIPPED, {"tasks": {**sources, "test": None}})
    check_tasks(config, check=ReflectiveCode().check_task)


@pytest.mark.parametrize("section", ["train", "gate"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tests": "{}"}, "case 1 has no input"),
        ({"tests": CASES, "problem": "Add.\nInput\n1 2\nOutput\n3\n"}, "or stands in the statement"),
        ({"tests": CASES, "problem": "Begin with:\nimport numpy as np\n"}, "the statement imports numpy"),
        ({"tests": CASES, "starter_code": "from numpy import *\n"}, "the statement imports numpy"),
        (
            {"tests": CASES, "checker_code": "import numpy\ndef check(given, expected, actual): return True"},
            "the checker imports numpy",
        ),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_with_file_and_row(
    tmp_path: Path, section: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        checked(tmp_path, section, row)
    assert str(refused.value).startswith(f"{tmp_path / section}.jsonl:41: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "row",
    [
        {
            "public_tests": CASES,
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["4"], "output": ["5"]},
        },
        {"tests": [{"input": {"nums": [1]}, "output": 3}], "fn_name": "f"},
    ],
)
def test_a_task_that_can_be_judged_is_accepted(tmp_path: Path, row: dict[str, Any]) -> None:
    checked(tmp_path, "gate", row)
