"""suite_program: the part of `suite` that runs inside the sandbox: files -> what pytest says of each test.

Nothing of Troupe can be imported here, and pytest only from the folder that its prelude names.
"""

from __future__ import annotations

import base64
import os
import sys
from typing import Any

import pytest

MAX_MESSAGE = 200


class Outcomes:
    """A plugin of pytest that keeps the outcome of each test: the worst of its phases."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keeps what a phase of a test says: `passed` only of a call, anything else of any phase."""
        if report.when == "call" or not report.passed:
            self._keep(report, report.outcome if report.when == "call" or report.skipped else "error")

    def pytest_collectreport(self, report: Any) -> None:
        """Keeps what cannot be collected."""
        if report.failed:
            self._keep(report, "error")

    def _keep(self, report: Any, outcome: str) -> None:
        self.of[report.nodeid] = outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        if outcome != "passed" and not report.skipped:
            text = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
            self.messages[report.nodeid] = text.removeprefix("AssertionError: ")[:MAX_MESSAGE]


def run(nonce: str, files: dict[str, Any], selected: list[str]) -> dict[str, Any]:
    """Writes the files, runs the selected tests, and returns their outcomes with the nonce."""
    root = os.path.join(os.getcwd(), "repository")
    for path, content in files.items():
        target = os.path.join(root, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else base64.b64decode(content["base64"]))
    os.chdir(root)
    sys.path.insert(0, root)
    outcomes = Outcomes()
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", root, "--tb", "short", *selected]
    code = pytest.main(arguments, plugins=[outcomes])
    return {"nonce": nonce, "code": int(code), "outcomes": outcomes.of, "messages": outcomes.messages}
