"""Every run config of infra/workflows could start as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.runners.validate import check
from serve_apps.authoring.workflow import load_workflow

pytestmark = pytest.mark.fast

CONFIGS = sorted((Path(__file__).parents[3] / "infra" / "workflows").glob("*.yaml"))
MAPPINGS = {"reflective_code": {1, 2, 3}, "iterative_search": {1, 4, 5}, "debate": {1, 2}}
"""Numbers of model groups that the variants of these have: shared, partial, separate."""
IN_THE_SANDBOX = ("reflective_code", "repair")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            c, id=c.stem, marks=pytest.mark.needs_program("bwrap") if c.stem.startswith(IN_THE_SANDBOX) else ()
        )
        for c in CONFIGS
    ],
)
def test_it_could_start(config: Path) -> None:
    loaded = load_config(config)
    assert loaded.run == config.stem
    lines = check(loaded)
    lines_of = {
        "tasks.gate": "routed_math",  # a tenth of its small sums have the same numbers as one that is trained on
        "tasks.test": "routed_math",
        "sandbox": "code",
        "program": "program",
        "environment home": "household",
        "environment game": "nim",
        "environment repo": "repair",
    }
    expected = [what for what, part in lines_of.items() if part in config.stem]
    assert [line.split(":")[0] for line in lines] == expected


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_prompt_names_each_word_that_its_contract_holds_the_agent_to(config: Path) -> None:
    workflow = load_config(config).workflow
    for name, agent in load_workflow(workflow.path, workflow.settings).agents.items():
        for words in getattr(agent.contract, "choices", {}).values():
            assert [word for word in words if word not in agent.prompt.lower()] == [], name


@pytest.mark.parametrize("workflow", MAPPINGS)
def test_sharing_in_full_in_part_and_not_at_all_are_one_workflow(workflow: str) -> None:
    loaded = [load_config(config) for config in CONFIGS if config.stem.startswith(workflow)]
    assert len({config.workflow.path for config in loaded}) == 1
    assert {len(config.model_groups) for config in loaded} == MAPPINGS[workflow]


def test_one_debate_is_between_two_families() -> None:
    config = load_config(next(c for c in CONFIGS if c.stem == "debate_families"))
    shapes = [config.tiny_model(group) for group in config.model_groups]
    assert {s.architecture for s in shapes if s} == {"qwen3", "llama"}
    assert len({s.vocab_size for s in shapes if s}) == 2
