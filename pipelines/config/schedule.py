"""schedule: settings of a run that something else drives: when it runs, what makes it skip, where its jobs are sent.

Pydantic only, and croniter where Airflow is, which parses run configs with it.
"""

from __future__ import annotations

from datetime import date
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from stores.settings import Settings

PRESETS = ("@once", "@continuous", "@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly")


class ScheduleConfig(Settings):
    """This section sets when the next iteration runs. A run config with this section becomes the DAG
    `train_team__<run>`."""

    cron: str = ""
    """The five fields of a cron expression (`0 2 * * *`) or a preset (`@daily`); empty: only by hand or `on_assets`."""
    start: date | None = None
    """The date before which no iteration is scheduled; of the times since a date that is over the latest is made up for. null: from when Airflow
    sees the run, without those before."""
    timezone: str = "UTC"
    """The time zone in which `cron` and `start` are read, e.g. Europe/Berlin."""
    on_assets: tuple[str, ...] = ()
    """The URIs of Airflow assets: an update of all of them triggers an iteration. With `cron`, either does."""
    on_new_tasks: bool = False
    """Whether to train only where the file of train tasks has changed since the last scheduled iteration (or
    `min_fresh_traces` holds)."""
    min_fresh_traces: int | None = Field(None, ge=1)
    """The number of new episodes from other runs in the trace store from which on an iteration trains (or `on_new_tasks`
    holds); null: not checked."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """The champion's accuracy on held-out tasks from which on iterations are skipped; null: never."""
    max_rejections: int = Field(2, ge=1)
    """The number of candidates rejected in a row after which iterations are skipped."""
    retries: int = Field(2, ge=0)
    """The number of times that a failed stage is repeated where the reason may pass. Bad input and out of memory are never
    repeated."""
    retry_delay_s: float = Field(30, ge=0)
    """The time in seconds before a failed stage is repeated."""
    stage_timeout_s: float = Field(7200, gt=0)
    """The deadline in seconds of the Ray job of one stage, from its submission to its end, including the wait for the
    engines; with `loop.max_lag` that and as much for each iteration before it."""
    jobs: Literal["iteration", "stage"] = "iteration"
    """What has a Ray job of its own. `iteration`: one job stays warm and does a stage when its task asks for it; where it has ended, the
    stage has a job of its own. `stage`: each task has a job, which costs some seconds each, and processes share nothing."""
    engine_pool: str = ""
    """The Airflow pool in which `collect`, `sync` and `evaluate` take a slot. It must exist and count deferred tasks (`airflow
    pools set NAME 2 "" --include-deferred`), or they are never started or never limited; empty: Airflow's default pool."""
    trainer_pool: str = ""
    """The Airflow pool in which `train` takes a slot, like `engine_pool`."""
    evaluate: str = ""
    """The cron expression or preset of `evaluate_team__<run>`, which plays the champion on the test and sentinel tasks;
    empty: only by hand."""
    maintain: str = "@weekly"
    """The cron expression or preset of `maintain_stores__<run>`; empty: only by hand."""

    @field_validator("cron", "evaluate", "maintain")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        if value and value not in PRESETS:
            check_cron(value)
        return value

    @model_validator(mode="after")
    def _presets_stand_alone(self) -> Self:
        if self.cron.startswith("@") and self.on_assets:
            raise ValueError(f"cron {self.cron!r} cannot be joined with on_assets: write it as five fields")
        return self

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):  # of a folder of zones, as Europe
            raise ValueError(f"{value!r} is not a time zone: give a name like UTC or Europe/Berlin") from None
        return value

    @field_validator("on_assets")
    @classmethod
    def _are_uris(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if "://" not in value:
                raise ValueError(f"{value!r} is not a URI: an asset is named like troupe://team/nightly")
        return values


class ClusterConfig(Settings):
    """This section names the Ray cluster that stages are sent to as jobs (`troupe submit`, Airflow)."""

    address: str = ""
    """The address of Ray's job API, http(s)://HOST:8265, which is the port of the dashboard. Empty:
    RAY_API_SERVER_ADDRESS, else this machine."""
    folder: str = ""
    """The folder on the cluster in which jobs start, so that relative paths mean the same; empty: the current one."""
    working_dir: str = ""
    """The folder that is uploaded with every job instead, for a cluster that does not share this file system."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """The runtime environment that Ray gives each job: `pip`, `env_vars`, `image_uri` ..."""
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """The Ray resources that a job's own process reserves, beside the actors that it starts: `CPU`, `GPU`, `memory` in bytes, and
    custom ones, by which Ray places it."""

    @field_validator("address")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return check_address(value) if value else value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.folder and self.working_dir:
            raise ValueError(
                "give `folder` (the cluster sees it) or `working_dir` (uploaded), not both: a job starts in one folder"
            )
        if "working_dir" in self.runtime_env:
            raise ValueError("runtime_env.working_dir: set cluster.working_dir instead")
        return self


def check_address(address: str) -> str:
    """Returns an address of Ray's job API without a slash at its end; ValueError for any other kind, with the right one."""
    scheme, _, rest = address.partition("://")
    host = (rest or scheme).split("/")[0].rsplit(":", 1)[0] or "HOST"
    if scheme in ("http", "https") and rest:
        return address.rstrip("/")
    kind = {"ray": "a Ray client address"}.get(scheme, "an address of the cluster itself" if not rest else "no address")
    raise ValueError(f"{address!r} is {kind}: jobs go to the dashboard, e.g. http://{host}:8265")


def check_cron(text: str) -> None:
    """Raises ValueError for what is no time of cron, or a day that no month has.

    croniter comes with Airflow, which is all that reads it; where it is not installed only the number of fields is looked at.
    """
    presets = ", ".join(PRESETS)
    if len(text.split()) != 5:
        raise ValueError(
            f"{text!r} has {len(text.split())} fields, cron has 5 (minute hour day month weekday), or: {presets}"
        )
    if drawn := next(
        (field for field in text.split() if field[0] in "rR"), None
    ):  # croniter would draw another one at each reading
        raise ValueError(
            f"{text!r} has the random field {drawn!r}: give a time, so that each reader of the DAG has the same"
        )
    if find_spec("croniter") is None:
        return
    from croniter import CroniterBadDateError, CroniterError, croniter

    try:
        croniter(text).get_next()
    except CroniterBadDateError:
        raise ValueError(f"{text!r} never fires: no month that it names has such a day") from None
    except CroniterError as error:
        raise ValueError(
            f"{text!r} is no time of cron ({error}): minute (0 to 59), hour (0 to 23), day (1 to 31), month (1 to 12), weekday (0 to 7), "
            "each of them *, numbers, ranges a-b or steps */n"
        ) from None
