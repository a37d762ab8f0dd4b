"""swebench_grader: outcomes as `swebench` sees them. It runs in the environment of tests/clients/locks/swebench.txt.

Standard input: a JSON list of {"log", "FAIL_TO_PASS", "PASS_TO_PASS"}; standard output: a list of [status, share, share].
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from swebench.harness.grading import (
    compute_fail_to_pass,
    compute_pass_to_pass,
    get_eval_tests_report,
    get_logs_eval,
    get_resolution_status,
)
from swebench.types import TestSpec


def graded(case: dict[str, object], folder: Path) -> list[object]:
    """Returns the status and the two shares of one log."""
    names = {name: case[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    spec = TestSpec("x", image="", eval_script_list=[], repo="x", version="1", log_parser="parse_log_pytest", **names)
    log = folder / "log"
    log.write_text(case["log"])
    outcomes, _ = get_logs_eval(spec, str(log))
    report = get_eval_tests_report(outcomes, names)
    return [get_resolution_status(report), compute_fail_to_pass(report), compute_pass_to_pass(report)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps([graded(case, Path(temporary)) for case in json.load(sys.stdin)]))
