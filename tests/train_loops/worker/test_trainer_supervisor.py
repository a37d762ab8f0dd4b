"""The supervisor of a trainer, without Ray: who is given which job."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from train_loops.train_job import TrainJob
from train_loops.worker.trainer_supervisor import TrainerSupervisor

pytestmark = pytest.mark.fast

JOB = cast(TrainJob, object())


class WithoutWorkers(TrainerSupervisor):
    """One whose starts are named by the test."""

    def _run_for_ever(self) -> None:
        pass

    def start(self, epoch: str) -> None:
        self._epoch = epoch


def test_a_worker_that_waited_while_the_next_start_began_is_given_no_job() -> None:
    async def play() -> Any:
        supervisor = WithoutWorkers("trainer", {"train": {"num_workers": 1}})
        supervisor.start("first")
        waits = asyncio.create_task(supervisor.next_job("first", "", 60))
        await asyncio.sleep(0)
        supervisor.start("second")
        await supervisor.submit("attempt", JOB)
        with pytest.raises(RuntimeError, match="a worker of an earlier start"):
            await waits
        return await supervisor.next_job("second", "", 60)

    assert asyncio.run(play()) == ("attempt", JOB)
