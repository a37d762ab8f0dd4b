"""`evaluate.temperature: 0` is greedy from the run config to the engine's request; training is sampled as before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.runners.validate import check
from serve_apps.episode.team import TeamSpec
from serve_apps.policy.generation import Generation
from serve_apps.policy.wire import WireRequest, wire_request

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def greedy_run() -> Run:
    return Run(load_config(SMALL, {"evaluate.temperature": 0}))


def requests(spec: TeamSpec) -> list[WireRequest]:
    crossed = TeamSpec.from_dict(spec.to_dict())
    return [wire_request(0, [1, 2], s, model_group="g", seed=3) for s in crossed.sampling.values()]


def test_every_agent_is_greedy_in_evaluations_and_none_in_training() -> None:
    run = greedy_run()
    check(run.config)
    assert {r.temperature for r in requests(run.team_spec({}, temperature=run.config.evaluate.temperature))} == {0.0}
    assert {r.temperature for r in requests(run.team_spec({}))} == {1.0}


@pytest.mark.parametrize("temperature", [-0.1, "cold"])
def test_other_temperatures_are_refused(temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate\.temperature"):
        load_config(SMALL, {"evaluate.temperature": temperature})


@pytest.mark.test
def test_the_engine_takes_the_request_as_greedy() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingType

    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    routes: Any = SimpleNamespace(states={})
    generation = Generation(engine, routes, stop_token_ids=[0])
    for request in requests(greedy_run().team_spec({}, temperature=0.0)):
        params = generation._params(request, kind=RequestOutputKind.FINAL_ONLY)
        assert (params.temperature, params.sampling_type) == (0.0, SamplingType.GREEDY)
