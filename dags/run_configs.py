"""run_configs: the environment -> the run configs that Airflow sees, the valid ones and what is wrong with the others.

TROUPE_RUN_CONFIGS   files and globs, separated by `:`; default infra/runs/*.yaml of this checkout
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow.sdk import Asset

from pipelines.config.run_config import RunConfig, load_config
from pipelines.config.schedule import ScheduleConfig

CHECKOUT = Path(__file__).resolve().parents[1]
VARIABLE = "TROUPE_RUN_CONFIGS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """A run config with a `schedule` section."""

    path: str
    config: RunConfig
    folder: str
    """Where its jobs start on the cluster; empty where the config uploads a working directory."""

    @property
    def settings(self) -> ScheduleConfig:
        """Returns the `schedule` section of the run's config."""
        assert self.config.schedule is not None, "find_runs gives scheduled runs only"
        return self.config.schedule

    @property
    def json(self) -> str:
        """The run config by value."""
        return self.config.model_dump_json()


def find_runs() -> tuple[list[ScheduledRun], list[str]]:
    """The runs to be made into DAGs, and one message per config that cannot be: file, key and fix."""
    runs: dict[str, ScheduledRun] = {}
    paths, errors = _paths()
    for path in paths:
        try:
            config = load_config(path)
            if config.schedule is None:
                continue
            _check_assets(config.schedule.on_assets, path)
            if config.run in runs:
                raise ValueError(f"{path}: run {config.run!r} is that of {runs[config.run].path}, too: rename one")
            runs[config.run] = ScheduledRun(path=path, config=config, folder=_folder(config, path))
        except ValueError as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{path}: cannot be read ({error.strerror}): check who may read it, as the user of Airflow")
    return list(runs.values()), errors


def _paths() -> tuple[list[str], list[str]]:
    """Files in order, one that is named without a wildcard whether it exists or not; a message per pattern without any."""
    default = str(CHECKOUT / "infra" / "runs" / "*.yaml")
    paths: list[str] = []
    errors: list[str] = []
    for pattern in filter(None, os.environ.get(VARIABLE, default).split(os.pathsep)):
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not matches and VARIABLE in os.environ:
            errors.append(f"{VARIABLE}: no file is called {pattern!r}: check the path, as the user of Airflow")
        paths += [path for path in matches if path not in paths]
    return paths, errors


def _check_assets(uris: Sequence[str], path: str) -> None:
    """ValueError for an asset that Airflow refuses: met while a DAG is built, it would hide all DAGs of the file."""
    for uri in uris:
        try:
            Asset(uri=uri)
        except ValueError as error:
            raise ValueError(
                f"{path}: schedule.on_assets: {uri!r}: {error}; name it like troupe://team/nightly"
            ) from None


def _folder(config: RunConfig, path: str) -> str:
    if config.cluster.working_dir or config.cluster.folder:
        return config.cluster.folder
    if (CHECKOUT / "pyproject.toml").is_file():
        return str(CHECKOUT)
    raise ValueError(
        f"{path}: cluster.folder is missing: Troupe is installed here without its checkout, so say in which folder of "
        "the cluster its jobs start, or give cluster.working_dir"
    )
