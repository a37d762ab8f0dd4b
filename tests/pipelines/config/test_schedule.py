"""The `schedule` and `cluster` sections: what is refused and with which words, and that they change no results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def load(**changes: Any) -> Any:
    return load_config(SMALL, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    "cron",
    [
        "0 2 * * *",
        "*/5 0-6,22 1 jan-mar mon",
        "@daily",
        "@continuous",
        "",
        "0 0 29 2 *",
        "0 0 31 2 mon",
        "0 0 31-1 2 *",
    ],
)
def test_cron_and_presets_are_taken(cron: str) -> None:
    assert load(schedule__cron=cron).schedule.cron == cron


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"cron": "61 * * * *"}, r"schedule.cron: '61 \* \* \* \*' is no time of cron .*: minute \(0 to 59"),
        ({"cron": "* * *"}, "has 3 fields, cron has 5"),
        ({"cron": "R(0-30) * * * *"}, r"has the random field 'R\(0-30\)'"),
        ({"cron": "@dayly"}, "has 1 fields, cron has 5.*@daily"),
        ({"evaluate": "0 25 * * *"}, r"schedule.evaluate: '0 25 \* \* \*' is no time of cron .*hour \(0 to 23"),
        ({"cron": "0 0 31 2 *"}, r"schedule.cron: '0 0 31 2 \*' never fires: no month that it names has such a day"),
        ({"maintain": "0 0 31 4-6/2,9,nov *"}, r"schedule.maintain: .* never fires"),
        ({"timezone": "Mars/Base"}, "'Mars/Base' is not a time zone"),
        ({"timezone": "Europe"}, "'Europe' is not a time zone"),
        ({"timezone": ""}, "'' is not a time zone"),
        ({"on_assets": ["nightly"]}, "'nightly' is not a URI: an asset is named like troupe://team/nightly"),
        ({"cron": "@daily", "on_assets": ["a://b"]}, "cannot be joined with on_assets: write it as five fields"),
        ({"on_new_tasks": True, "cron": "@daily"}, "schedule.on_new_tasks needs tasks.train.path"),
        ({"min_fresh_traces": 5}, "schedule.min_fresh_traces needs schedule.cron"),
        (
            {"stage_timeout_s": 60},
            r"deadlines must nest: collect.stage_timeout_s = 3600 s is not below schedule\.stage",
        ),
        ({"cronn": "@daily"}, "unknown key 'schedule.cronn': did you mean 'cron'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_fix(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(schedule=section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"address": "ray://head:10001"}, "a Ray client address: jobs go to the dashboard, e.g. http://head:8265"),
        ({"address": "10.0.0.1:6379"}, r"jobs go to the dashboard, e.g. http://10\.0\.0\.1:8265"),
        ({"working_dir": "."}, "storage.root = 'runs' is relative.*absolute path or URI"),
        ({"working_dir": ".", "folder": "/x"}, "not both: a job starts in one folder"),
        ({"runtime_env": {"working_dir": "."}}, "set cluster.working_dir instead"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_the_fix(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(cluster=section)


def test_where_and_when_a_run_runs_does_not_make_it_another_run() -> None:
    plain = load()
    moved = load(
        schedule={"cron": "@daily", "target_accuracy": 0.9},
        cluster={"address": "http://h:8265", "folder": "/x"},
        tasks__sentinel={"generator": {"path": "pipelines.examples.arithmetic.tasks:generate"}, "count": 8},
    )
    assert moved.sha256 == plain.sha256
