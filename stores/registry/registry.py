"""registry: keeps team versions in MLflow, and the aliases by which they are promoted and rolled back.

A team version is a version of one registered model: a logged model with `team.json` (weights by URI and sha256, never
copied), params, metrics and tags. Promotion and rollback move the aliases `champion` and `previous`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stores.files import read_file
from stores.journal.sqlite import sqlite_file
from stores.registry.experiment import absolute, connect, mlflow_names, numbers, open_experiment, open_run
from stores.registry.team import IDENTITY_TAG, KEY_TAG, Team, TeamVersion, about_name, about_version, tags_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE = "candidate"
CHAMPION = "champion"
PREVIOUS = "previous"
"""The champion before the present one, to which `troupe rollback` goes back."""

TEAM_FILE = "team.json"
PAGE = 100
"""Teams of one request to MLflow, whose own default it is."""
ALARM_TAG = "troupe.alarm."
"""Prefix of the tags that show the alarms of a version."""
NAME_TAG = "troupe.team"
"""Keeps the team's name at its logged model, whose own name has not all of its characters."""
MODEL_TAG = "troupe.model_id"
"""Keeps the id of a version's logged model, because the SQL store of MLflow 3.17 forgets it."""


class TeamRegistry:
    """The teams in one MLflow store or server. It is cheap to create and to pickle."""

    def __init__(self, tracking_uri: str, artifact_root: str, *, is_read_only: bool = False) -> None:
        """Args:
        tracking_uri: `sqlite:///PATH` or a server.
        artifact_root: folder or URI.
        is_read_only: nothing is made: a file that is not there is a store without teams.
        """
        self.tracking_uri, self.artifact_root = absolute(tracking_uri), absolute(artifact_root)
        self.is_read_only = is_read_only

    def register(self, name: str, team: Team, *, code: Path | None = None) -> int:
        """Registers the team under this name and returns its version; a team that is registered already keeps its version.

        Args: code: a file that MLflow runs to load the team as a pyfunc model ("models from code").
        """
        self._make_name(name)
        # Found by what it is: a stage that died after registering may run again, from another commit or with another `iterations`.
        same = self._client.search_model_versions(
            f"name = {_quote(name)} and tags.`{IDENTITY_TAG}` = '{team.identity}'"
        )
        entry = min(same, key=lambda v: int(v.version)) if same else self._create_version(name, team, code=code)
        version = int(entry.version)
        if not entry.description:  # the last write
            link = json.dumps([{"name": name, "version": version}])
            self._client.set_logged_model_tags(entry.tags[MODEL_TAG], {"mlflow.modelVersions": link})
            self._client.update_model_version(name, entry.version, description=about_version(name, version, team))
        return version

    def load(self, name: str, version: int | str) -> tuple[int, Team]:
        """Returns version and team of a version or alias.

        ValueError lists the existing ones if there is none such, and refuses a team.json that was changed: the import paths in it
        run where it is loaded.
        """
        number = self.alias(name, version) if isinstance(version, str) else version
        entry = self._versions(name).get(number) if number is not None else None
        if entry is None:
            raise ValueError(f"no team {name!r} {version!r} in {self.tracking_uri}: {self._existing(name)}")
        file = f"{entry.source}/{TEAM_FILE}"
        try:
            team, registered = Team.from_text(self._read(file)), entry.tags.get(KEY_TAG)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is damaged, it is no JSON ({error}): put a copy of it back") from None
        if team.sha256 != registered:
            raise ValueError(
                f"{file} was changed after team {name!r} {entry.version} was registered: its hash is {team.sha256}, the "
                f"registry has {registered}; put the file back, or roll back to another version"
            )
        return int(entry.version), team

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Moves an alias; ValueError if there is no such version."""
        if version not in self._versions(name):
            raise ValueError(f"no team {name!r} {version} in {self.tracking_uri}: {self._existing(name)}")
        self._client.set_registered_model_alias(name, alias, str(version))

    def remove_alias(self, name: str, alias: str) -> None:
        """Removes an alias, if there is one of this name."""
        if self.alias(name, alias) is not None:
            self._client.delete_registered_model_alias(name, alias)

    def show_watch(self, name: str, version: int, tags: Mapping[str, str]) -> None:
        """Sets the tags of the last check of a version, and removes alarms of earlier checks that are over."""
        old = self._client.get_model_version(name, str(version)).tags
        for tag in old:
            if tag.startswith(ALARM_TAG) and tag not in tags:
                self._client.delete_model_version_tag(name, str(version), tag)
        for tag, text in tags.items():
            self._client.set_model_version_tag(name, str(version), tag, text)

    def alias(self, name: str, alias: str) -> int | None:
        """Returns the version that an alias names; None if there is no such alias."""
        return self._aliases(name).get(alias)

    def versions(self, name: str) -> list[TeamVersion]:
        """Returns every version of a team, ascending; empty if there is none."""
        aliases = self._aliases(name)
        return [
            TeamVersion(
                version=number,
                aliases=tuple(sorted(a for a, v in aliases.items() if v == number)),
                run_id=entry.tags["troupe.run_id"],
                iteration=int(entry.tags["troupe.iteration"]),
                policy_versions=json.loads(entry.tags["troupe.policy_versions"]),
                evaluation=json.loads(entry.tags["troupe.evaluation"]),
                created_at=entry.creation_timestamp / 1000,
            )
            for number, entry in self._versions(name).items()
            if KEY_TAG in entry.tags  # not one that somebody registered in MLflow by hand
        ]

    def names(self) -> list[str]:
        """Returns every team that has a version or had one, sorted."""
        if self._is_missing:
            return []
        names: list[str] = []
        token = None
        while True:
            page = self._client.search_registered_models(max_results=PAGE, page_token=token)
            names += [model.name for model in page]
            token = page.token
            if not token:
                return sorted(names)

    @property
    def _client(self) -> MlflowClient:
        return connect(self.tracking_uri, is_read_only=self.is_read_only)

    @property
    def _is_missing(self) -> bool:
        """True where this store is only read, and its file is not there."""
        file = sqlite_file(self.tracking_uri)
        return self.is_read_only and file is not None and not file.is_file()

    def _read(self, uri: str) -> str:
        """Reads a small artifact. Files that need no server are read directly: MLflow would show a progress bar."""
        if uri.startswith(("file://", "s3://", "gs://", "abfss://")):
            data = read_file(uri)
            if data is None:
                raise ValueError(f"{uri} is gone, though {self.tracking_uri} names it: register the team again")
            return data.decode()
        from mlflow.artifacts import download_artifacts

        with tempfile.TemporaryDirectory() as scratch:
            return Path(download_artifacts(uri, dst_path=scratch, tracking_uri=self.tracking_uri)).read_text()

    def _create_version(self, name: str, team: Team, *, code: Path | None) -> ModelVersion:
        experiment = open_experiment(self._client, self.artifact_root)
        mlflow_run = open_run(self._client, experiment, team.run_id)
        model = self._log_model(name, team, experiment, mlflow_run, code=code)
        return self._client.create_model_version(
            name,
            source=model.artifact_location,
            run_id=mlflow_run,
            model_id=model.model_id,
            tags={**tags_of(team), MODEL_TAG: model.model_id},
        )

    def _log_model(self, name: str, team: Team, experiment: str, mlflow_run: str, *, code: Path | None) -> LoggedModel:
        """Logs a model that holds the manifest and, with `code`, can be loaded; goes on with one that was not finished."""
        from mlflow.entities import LoggedModelStatus

        tags = {KEY_TAG: team.sha256, NAME_TAG: name}
        of_team = " and ".join(f"tags.`{tag}` = {_quote(value)}" for tag, value in tags.items())
        begun = self._client.search_logged_models([experiment], filter_string=of_team)
        if begun and begun[0].status is LoggedModelStatus.READY:  # ready with its metrics
            return begun[0]
        params = {"workflow": team.workflow, "credit": str(team.credit.get("path", "")), "git_commit": team.git_commit}
        params |= {f"model.{group}": f"v{ref.version} {ref.uri}" for group, ref in team.models.items()}
        model = (
            begun[0]
            if begun
            else self._client.create_logged_model(
                experiment,
                name=_model_name(name, team),
                source_run_id=mlflow_run,
                params=params,
                tags=tags,
                model_type="team",
            )
        )
        with tempfile.TemporaryDirectory() as folder:
            model_folder = Path(folder) / "model"
            if code is not None:
                _save_pyfunc(model_folder, team, code)
            model_folder.mkdir(exist_ok=True)
            (model_folder / TEAM_FILE).write_text(team.to_text())
            self._client.log_model_artifacts(model.model_id, str(model_folder))
        if not model.metrics:
            self._log_metrics(team, mlflow_run, model.model_id)
        return self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def _log_metrics(self, team: Team, mlflow_run: str, model_id: str) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(path, value, now_ms, team.iteration, model_id=model_id, run_id=mlflow_run)
            for path, value in mlflow_names(numbers(team.evaluation, "team")).items()
        ]
        if metrics:
            self._client.log_batch(mlflow_run, metrics=metrics[:1000])

    def _make_name(self, name: str) -> None:
        """Creates the registered model, unless it exists: another process may create it at the same time."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name, description=about_name(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _versions(self, name: str) -> dict[int, ModelVersion]:
        if self._is_missing:
            return {}
        entries = self._client.search_model_versions(f"name = {_quote(name)}", max_results=10_000)
        return {int(v.version): v for v in sorted(entries, key=lambda v: int(v.version))}

    def _aliases(self, name: str) -> dict[str, int]:
        """Reads aliases from the registered model: a version that a search returns does not know its aliases."""
        from mlflow.exceptions import MlflowException

        if self._is_missing:
            return {}
        try:
            model = self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}
        return {alias: int(version) for alias, version in model.aliases.items()}

    def _existing(self, name: str) -> str:
        """Lists the teams, or the versions and aliases of this team, for an error message."""
        versions = list(self._versions(name))
        if not versions and name not in (names := self.names()):
            return f"teams are {', '.join(map(repr, names)) or 'none yet'}"
        aliases = ", ".join(f"{a} = {v}" for a, v in sorted(self._aliases(name).items()))
        return f"versions are {', '.join(map(str, versions)) or 'none yet'}; aliases are {aliases or 'none'}"


def _save_pyfunc(folder: Path, team: Team, code: Path) -> None:
    """Writes the files that `mlflow.pyfunc.load_model` needs beside the manifest: prompts in, answers out."""
    import mlflow.pyfunc
    from mlflow.models.signature import ModelSignature
    from mlflow.types import ColSpec, Schema

    text, number = "string", "long"
    signature = ModelSignature(
        inputs=Schema([ColSpec(text, "prompt"), ColSpec(number, "seed", required=False)]),
        outputs=Schema(
            [
                ColSpec(text, "answer"),
                ColSpec(text, "status"),
                ColSpec(number, "num_turns"),
                ColSpec(text, "team_version"),
            ]
        ),
    )
    manifest = folder.parent / TEAM_FILE
    manifest.write_text(team.to_text())
    logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)  # warns where there is no pip, as under uv
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that type hints give no signature: there is one already
        mlflow.pyfunc.save_model(
            folder,
            python_model=str(code),
            artifacts={"team": str(manifest)},
            signature=signature,
            input_example={"prompt": ["Compute 2+3*4"], "seed": [0]},
            pip_requirements=["troupe-rl"],  # otherwise MLflow would load the model to find out
            metadata={"troupe.run_id": team.run_id, "troupe.iteration": team.iteration},
        )


def _model_name(name: str, team: Team) -> str:
    """Returns a name without the characters that MLflow refuses in names of logged models."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in f"{name}-{team.run_id}-{team.iteration}")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
