"""world: a number -> the repository of that number, as a world."""

from __future__ import annotations

from pipelines.examples.repair.tasks import make_repository
from serve_apps.extensions.repository.repository import Repository


class Repair(Repository):
    """A small repository with one fault. Its tests have one run of at most ten seconds."""

    def __init__(self, seed: int) -> None:
        made = make_repository(seed)
        super().__init__(
            files=made.files,
            tests=made.hidden,
            FAIL_TO_PASS=made.fail_to_pass,
            PASS_TO_PASS=made.pass_to_pass,
            time_s=10.0,
        )
