"""`evaluate.temperature: 0` is greedy from the run config to the engine's request; training is sampled as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.runners.validate import check
from serve_apps.episode.team import TeamSpec
from stores.types import GenerateRequest

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def greedy_run() -> Run:
    return Run(load_config(SMALL, {"evaluate.temperature": 0}))


def requests(spec: TeamSpec) -> list[GenerateRequest]:
    crossed = TeamSpec.from_dict(spec.to_dict())
    return [
        GenerateRequest(request_id="r", model_group="g", prompt_token_ids=[1, 2], sampling=s, seed=3)
        for s in crossed.sampling.values()
    ]


def test_every_agent_is_greedy_in_evaluations_and_none_in_training() -> None:
    run = greedy_run()
    check(run.config)
    assert {
        r.sampling.temperature for r in requests(run.team_spec({}, temperature=run.config.evaluate.temperature))
    } == {0.0}
    assert {r.sampling.temperature for r in requests(run.team_spec({}))} == {1.0}


@pytest.mark.parametrize("temperature", [-0.1, "cold"])
def test_other_temperatures_are_refused(temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate\.temperature"):
        load_config(SMALL, {"evaluate.temperature": temperature})


@pytest.mark.test
def test_the_engine_takes_the_request_as_greedy() -> None:
    from vllm.sampling_params import SamplingType

    from serve_apps.engines.vllm.engine import sampling_params

    for request in requests(greedy_run().team_spec({}, temperature=0.0)):
        params = sampling_params(request, [0])
        assert (params.temperature, params.sampling_type) == (0.0, SamplingType.GREEDY)
