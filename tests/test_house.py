"""What must not grow again: who imports vLLM, modules with one caller, config fields that nobody uses, long functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "infra"))

from house import House, Module, config_fields, fields_without_use, read_house  # noqa: E402

pytestmark = pytest.mark.fast

ROLES = ("pipelines.examples.", "pipelines.extensions.", "serve_apps.extensions.", "train_loops.extensions.")
"""Folders whose files are named by their role, whoever imports them."""
ONE_CALLER = {
    "a process of its own": (
        "pipelines.episodes.operators",
        "serve_apps.chat.template_process",
        "serve_apps.tools.math_judge",
        "train_loops.worker.trainer_supervisor",
    ),
    "a formula or a model": ("pipelines.evaluation.betting",),
    "a protocol or a format": ("stores.journal.schema",),
    "the commands or routes of one subject": (
        "pipelines.cli.main",
        "pipelines.cli.new_team",
        "pipelines.cli.service",
        "pipelines.cli.tools",
    ),
    "imported by dotted path as well": (
        "serve_apps.gateway.app",
        "serve_apps.policy.policy_app",
    ),
    "private attributes of a library": ("serve_apps.engines.vllm.inside",),
    "one concept of more than a hundred lines": (
        "pipelines.config.rules",
        "pipelines.config.training_rules",
        "pipelines.report.result",
        "pipelines.tasks.choices",
        "serve_apps.chat.control_tokens",
        "serve_apps.engines.vllm.settings",
        "serve_apps.episode.tool_recorder",
        "serve_apps.gateway.http.request_limits",
        "serve_apps.gateway.traffic.capture",
        "serve_apps.gateway.traffic.metrics",
        "serve_apps.gateway.traffic.redaction",
        "serve_apps.policy.generation",
        "train_loops.worker.learner",
        "train_loops.worker.update",
    ),
    "which processes are gone, for leases": ("stores.journal.process",),
}
MAX_LONG_FUNCTIONS = 5
MAX_CONFIG_FIELDS = 360
MAX_INNER_IMPORTS = 369


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def test_vllm_is_imported_in_one_folder(house: House) -> None:
    assert house.vllm_folders == {"serve_apps.engines.vllm"}


def test_a_module_with_one_caller_in_its_folder_has_a_reason(house: House) -> None:
    reasoned = {name for names in ONE_CALLER.values() for name in names}
    single = {name for name in house.single_caller_modules if not name.startswith(ROLES)}
    assert single - reasoned == set(), "fold them into their callers, or give a reason"
    assert reasoned - single == set(), "they have other callers now, or are gone: take them off the list"


def test_every_config_field_stands_in_a_yaml_file_a_page_or_a_test() -> None:
    assert fields_without_use() == []


def test_what_was_made_less_does_not_grow_again(house: House) -> None:
    assert len(house.long_functions) <= MAX_LONG_FUNCTIONS, house.long_functions
    assert sum(map(len, config_fields().values())) <= MAX_CONFIG_FIELDS
    assert house.inner_imports <= MAX_INNER_IMPORTS


def test_the_measure_sees_what_it_counts() -> None:
    texts = {
        "stores.a": "from stores.b import thing\n\n\ndef run():\n    import vllm\n    return thing, vllm  # why\n",
        "stores.b": "thing = 1\n",
    }
    house = House(ROOT, {name: Module(name, ROOT, text) for name, text in texts.items()})
    assert house.single_caller_modules == {"stores.b": "stores.a"}
    assert house.vllm_folders == {"stores"}
    assert (house.inner_imports, house.long_functions) == (1, {})
    assert house.comments_per_100_lines == pytest.approx(100 / 7)
    assert house.files_with("thing") == ["stores.a", "stores.b"]
