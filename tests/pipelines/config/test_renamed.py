"""Old names of a run config are refused, and the message names what they are called now."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.config.renamed import MOVED_MODULES, RENAMED_KEYS, RENAMED_VALUES, SPLIT_KEYS
from pipelines.config.run_config import RunConfig, load_config, parse_config

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
DEMO_FILE = ROOT / "infra" / "runs" / "demo.yaml"
DEMO = yaml.safe_load(DEMO_FILE.read_text())


def changed(dotted: str, value: Any) -> dict[str, Any]:
    """The demo's config with one key set."""
    data = copy.deepcopy(DEMO)
    *parents, last = dotted.split(".")
    section = data
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    return data


def value_at(config: RunConfig, dotted: str) -> Any:
    """The value of a dotted key; AttributeError where there is none."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    value_at(load_config(DEMO_FILE), new)
    with pytest.raises(ValueError) as caught:
        parse_config(changed(old, 1), "run.yaml")
    assert str(caught.value) == f"run.yaml: unknown key '{old}': it is called '{new}' now"


@pytest.mark.parametrize(("old", "new"), SPLIT_KEYS.items())
def test_a_key_that_became_several_is_refused_with_all_of_them(old: str, new: tuple[str, ...]) -> None:
    for key in new:
        value_at(load_config(DEMO_FILE), key)
    with pytest.raises(ValueError) as caught:
        parse_config(changed(old, 1), "run.yaml")
    names = " and ".join(f"'{key}'" for key in new)
    assert str(caught.value) == f"run.yaml: unknown key '{old}': there are {names} in its place"


def test_an_old_key_in_the_overrides_of_a_model_group_is_refused_with_its_new_name() -> None:
    place = "model_groups.solver_verifier.train"
    with pytest.raises(
        ValueError, match=r"'loss\.kl_estimator': there are 'loss\.kl_in_reward_estimator' and 'loss\.kl_in"
    ):
        parse_config(changed(place, {"loss": {"kl_estimator": "k3"}}), "run.yaml")
    with pytest.raises(ValueError, match=f"{place}: unknown key 'order_timeout_s': it is called 'job_timeout_s' now"):
        parse_config(changed(place, {"order_timeout_s": 60}), "run.yaml")


@pytest.mark.parametrize(
    ("key", "old", "new"), [(key, old, new) for key, values in RENAMED_VALUES.items() for old, new in values.items()]
)
def test_an_old_value_is_refused_with_its_new_name(key: str, old: str, new: str) -> None:
    with pytest.raises(ValueError, match=f"run.yaml: {key}: '{old}' is called '{new}' now"):
        parse_config(changed(key, old), "run.yaml")
    assert value_at(parse_config(changed(key, new), "run.yaml"), key) == new


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
@pytest.mark.parametrize("key", ["workflow.path", "credit.path", "warmstart.demonstrator", "tasks.gate.generator.path"])
def test_an_old_dotted_path_is_refused_with_the_new_one(key: str, old: str, new: str) -> None:
    assert find_spec(new) is not None and not (ROOT / f"{old.replace('.', '/')}.py").exists()
    with pytest.raises(ValueError) as caught:
        parse_config(changed(key, f"{old}:Name"), "run.yaml")
    assert str(caught.value) == f"run.yaml: {key}: '{old}:Name' has moved: it is '{new}:Name' now"


def test_an_old_program_in_the_settings_of_a_workflow_is_refused_with_its_new_path() -> None:
    command = ["python", "-m", "serve_apps.programs.calculator"]
    with pytest.raises(ValueError, match=r"workflow\.settings\.command\.2: .* it is 'pipelines\.examples\.calculator"):
        parse_config(changed("workflow.settings", {"command": command}), "run.yaml")


def test_a_name_that_only_begins_like_an_old_one_is_taken() -> None:
    path = "my.pipelines.arithmetic:Name"
    assert parse_config(changed("workflow.path", path), "run.yaml").workflow.path == path
    assert parse_config(changed("workflow.path", "pipelines.arithmetic_of_mine:A"), "run.yaml").workflow.path


def test_a_value_of_another_kind_is_refused_in_one_message() -> None:
    with pytest.raises(ValueError, match=r"promote\.deploy: Input should be"):
        parse_config(changed("promote.deploy", ["canary"]), "run.yaml")
