"""check-code: a program and its tests -> the verdict and each case as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError

from pipelines.cli.options import TOOLS, reports_errors
from serve_apps.extensions.sandbox.config import SandboxConfig
from stores.settings import Settings


class Submission(Settings):
    """The JSON that `check-code` reads."""

    code: str
    tests: Any
    fn_name: str = ""
    checker: str = ""
    checker_code: str = ""
    limits: SandboxConfig = Field(default_factory=SandboxConfig)


def add_to(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("check-code", rich_help_panel=TOOLS)(check_code)


@reports_errors
def check_code(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON with code, tests and optionally fn_name, checker, checker_code, limits; - reads standard input.",
        ),
    ],
) -> None:
    """Run a program against its tests in the sandbox. Prints the verdict and each case as JSON, and which isolation is active."""
    from pipelines.extensions.code_tasks.code_tests import read_tests
    from pipelines.extensions.code_tasks.code_verifier import NOT_JUDGED, CodeVerifier
    from serve_apps.extensions.sandbox import Sandbox

    submission = _read(file)
    tests: Any = submission.tests
    if submission.checker or submission.checker_code:
        tests = {"tests": tests, "checker_type": submission.checker, "checker_code": submission.checker_code}
    cases = read_tests(tests, place=f"{file}: tests", fn_name=submission.fn_name)
    sandbox = Sandbox(submission.limits)
    print(sandbox.describe(), file=sys.stderr)
    judged = CodeVerifier(sandbox=sandbox, max_cases=len(cases.cases)).judge(submission.code, cases)
    print(json.dumps(judged.to_dict(), indent=2))
    if judged.verdict in NOT_JUDGED:
        raise SystemExit(1)


def _read(file: str) -> Submission:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return Submission.model_validate_json(text)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist (seen from {Path.cwd()})") from None
    except ValidationError as error:
        from pipelines.config.messages import explain

        raise ValueError(explain(error, Submission, file)) from None
