"""run: a run config -> the run as its stages see it: stores, workflow, credit rule, versions in force."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import CreditRule, credit_version, load_credit
from pipelines.figures.registry import Figures, with_own
from pipelines.run.iteration import Iteration
from pipelines.tasks.sources import load_tasks
from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Workflow, load_carried, load_workflow
from serve_apps.episode.team import TeamSpec
from stores.files import is_uri, local_path
from stores.journal.journal import DONE, HOLD_WAIT_S, Journal, Lease, StageKey
from stores.journal.run_values import RunValue
from stores.journal.sqlite import sqlite_url
from stores.journal.stage_results import Collected, TracesSource
from stores.registry.registry import TeamRegistry
from stores.registry.tracking import RunTracker
from stores.team_code import collect_code
from stores.types import ModelVersionRef, Sampling, Task, team_key
from stores.weights.manifest import REMOVED
from stores.weights.store import WeightStore

if TYPE_CHECKING:
    from stores.registry.team import Team
    from stores.traces.store import TraceStore

logger = logging.getLogger(__name__)


class Run:
    """An opened run. Everything is made when first asked for, so that a stage imports only what it uses."""

    def __init__(self, config: RunConfig, *, is_read_only: bool = False) -> None:
        """Args: is_read_only: journal and registry are only read, and nothing is made: their disk may be read-only or full."""
        self.config = config
        self.run_id = config.run
        self.is_read_only = is_read_only

    @property
    def folder(self) -> str:
        """Where the run keeps what is not given a URI of its own."""
        return _join(absolute(self.config.storage.root), self.run_id)

    @cached_property
    def journal(self) -> Journal:
        """Which stages are done."""
        url = self.config.storage.journal or sqlite_url(_join(self.folder, "journal.db"))
        return Journal(url, is_read_only=self.is_read_only)

    @contextmanager
    def hold_engines(self, *, wait_s: float = 0.0) -> Iterator[Lease]:
        """Keeps others from changing what the engines serve; waits while somebody else does something with them.

        With `loop.max_lag` the engines are free for milliseconds only, so that whoever waits has the next turn.

        Args: wait_s: how long it waits at most, but never less than `engines_wait_s`. Raises TimeoutError after that.
        """
        hold = partial(self.journal.hold, self.run_id, owner=stage_owner(), wait_s=max(wait_s, self.engines_wait_s))
        with ExitStack() as engines:
            with hold("engines-turn") if self.config.loop.max_lag else nullcontext():
                lease = engines.enter_context(hold("engines"))
            yield lease

    @property
    def engines_wait_s(self) -> float:
        """Returns how long somebody else may have the engines, in seconds: an hour, and with `loop.max_lag` as long as the stages may take."""
        stages = (self.config.collect, self.config.sync, self.config.evaluate)
        return max(HOLD_WAIT_S, sum(stage.stage_timeout_s for stage in stages) if self.config.loop.max_lag else 0.0)

    @cached_property
    def traces(self) -> TraceStore:
        """Opens the store of episodes and rewards."""
        from stores.traces.store import TraceStore

        return TraceStore(self.traces_uri)

    @property
    def traces_uri(self) -> str:
        """Names the LanceDB folder of the trace store, as a path or URI."""
        return absolute(self.config.storage.traces) or _join(self.folder, "traces")

    @property
    def served_uri(self) -> str:
        """LanceDB URI of the answers to people that may be kept."""
        return absolute(self.config.storage.served) or _join(self.folder, "served")

    @cached_property
    def weights(self) -> WeightStore:
        """Opens the store of model versions."""
        return WeightStore(self.weights_uri)

    @property
    def weights_uri(self) -> str:
        """Folder or URI of the model versions."""
        return absolute(self.config.storage.weights) or _join(self.folder, "weights")

    @property
    def _mlflow(self) -> tuple[str, str]:
        root = absolute(self.config.storage.root)
        tracking = self.config.storage.mlflow or sqlite_url(_join(root, "mlflow.db"))
        return tracking, absolute(self.config.storage.artifacts) or _join(root, "mlflow-artifacts")

    @cached_property
    def registry(self) -> TeamRegistry:
        """Team versions and their aliases."""
        return TeamRegistry(*self._mlflow, is_read_only=self.is_read_only)

    @cached_property
    def tracker(self) -> RunTracker:
        """Metrics, artifacts and sampled traces in MLflow."""
        return RunTracker(*self._mlflow, self.run_id)

    @cached_property
    def code(self) -> dict[str, str]:
        """The user's own modules that a team needs to act and its config to be read, path -> text; empty where they cannot travel."""
        try:
            return collect_code(self.config.names_of_code)
        except ValueError as error:
            logger.warning("the team can be trained, but a gateway must find its modules by itself: %s", error)
            return {}

    @cached_property
    def figures(self) -> Figures:
        """Troupe's figures and those of `evaluate.figures`."""
        return with_own(self.config.evaluate.figures)

    @cached_property
    def workflow(self) -> Workflow:
        """Loads the workflow that the config names, with its settings."""
        _ = self.code  # as it is now that it is imported: a file may be edited while the run goes on
        return load_workflow(self.config.workflow.path, self.config.workflow.settings)

    @cached_property
    def credit(self) -> CreditRule:
        """The user's credit rule."""
        return load_credit(self.config.credit, agents=self.config.group_of)

    @cached_property
    def credit_version(self) -> str:
        """Identity of rule, settings and code."""
        return credit_version(self.config.credit)

    def scored_version(self, iteration: int) -> str:
        """Returns the credit version under which stage score stores rewards.

        It names run and iteration, because rewards depend on more than the episode: on `cost`, on earlier iterations, on what is
        scored together. Another run that trains on the same episodes, in a shared store, must not find its rewards there.
        """
        return f"{self.credit_version}-{sha256(f'{self.run_id}@{iteration}'.encode()).hexdigest()[:16]}"

    @property
    def team_name(self) -> str:
        """Name of the registered team: one per workflow and run name."""
        return self.run_id

    def load_team(self, alias: str) -> tuple[int, Team]:
        """A registered team by its alias or version number: its version and its manifest."""
        return self.registry.load(self.team_name, int(alias) if alias.isdigit() else alias)

    def tasks(self, section: str) -> list[Task]:
        """Tasks of `train`, `gate` or `test`; ValueError where the section is missing."""
        source = getattr(self.config.tasks, section)
        if source is None:
            raise ValueError(f"tasks.{section} is missing: this needs a set of tasks of its own")
        return list(load_tasks(source, section=section, seed=self.config.seed))

    def team_spec(
        self,
        models: Mapping[str, ModelVersionRef],
        *,
        iteration: int = 0,
        temperature: float | None = None,
        occasion: str = "",
        code: Mapping[str, str] | None = None,
    ) -> TeamSpec:
        """What acts in episodes when these versions are served.

        Args:
            iteration: the one that trains on the episodes: `swap` may have agents change model groups; 0: none does.
            occasion: that of ad hoc episodes.
            code: that of a registered team, which acts by it; None: by the modules that are found where it acts.
        """
        workflow = self.workflow_of(code) if code else self.workflow
        versions = {group: ref.version for group, ref in sorted(models.items())}
        key = team_key(
            workflow=self.config.workflow.path,
            policy_versions=versions,
            prompts_sha256=workflow.prompts_sha256,
            occasion=occasion,
        )
        group_of = self.config.groups_at(iteration)
        return TeamSpec(
            workflow=self.config.workflow.path,
            settings=dict(self.config.workflow.settings),
            group_of=group_of,
            tokenizers=dict(models),
            max_model_len={group: self.config.serve_config(group).max_model_len for group in models},
            sampling={name: self.sampling(name, agent, temperature) for name, agent in workflow.agents.items()},
            policy_versions=versions,
            team_key=key,
            limits=self.config.collect.episode,
            parsers={group: self.config.serve_config(group).parsers for group in models},
            code=dict(code or {}),
            chat_template_kwargs=self.config.template_kwargs(group_of),
        )

    def workflow_of(self, code: Mapping[str, str]) -> Workflow:
        """Loads the workflow from the code of a registered team. This proves, too, that the code is complete."""
        return load_carried(code, self.config.workflow.path, self.config.workflow.settings)

    def sampling(self, name: str, agent: Agent, temperature: float | None = None) -> Sampling:
        """The agent's sampling with the run config's changes."""
        sampling = agent.with_sampling(agent.sampling, **self.config.agent_changes(name))
        return agent.with_sampling(sampling, temperature=temperature)

    def iteration(self, number: int, *, needed_by: str = "") -> Iteration:
        """What the stages of an iteration have left by now; `needed_by` names the stage that reads it, for messages."""
        rows = self.journal.stages(self.run_id, number)
        return Iteration(
            run_id=self.run_id,
            number=number,
            results={(row.stage, row.model_group): row.ref or {} for row in rows if row.status == DONE},
            journal=self.journal.shown_url,
            model_groups=tuple(self.config.model_groups),
            is_team_trained=self.config.team_config is not None,
            needed_by=needed_by,
        )

    def source(self, iteration: int) -> TracesSource | None:
        """Where an iteration has its traces from; None if it samples them itself."""
        value = self.journal.value(self.run_id, RunValue.SOURCE.of(iteration))
        return None if value is None else TracesSource(**value)

    def samplers(self, iteration: int) -> dict[str, ModelVersionRef]:
        """The versions that sample `iteration`, by model group: its parents, or with `loop.max_lag` those of an earlier one.

        Once collect is done they are what it recorded, whoever is champion by now. Raises NotDone like `parents`.
        """
        return self._sampled(iteration) or self.parents(self.config.loop.sampler_of(iteration))

    def parents(self, iteration: int) -> dict[str, ModelVersionRef]:
        """The versions that `iteration` trains from, by model group.

        They are what the iteration before trained; after a rejection with `on_reject: champion`, the champion. Whoever asks first keeps
        them, whoever is champion by now: without overlap this is collect, which they sample.
        Raises NotDone if that iteration has not finished training, or where the gate's decision matters and is to come.
        """
        is_overlapping = self.config.loop.max_lag > 0
        if not is_overlapping and (sampled := self._sampled(iteration)):
            return sampled
        if iteration == 1 or self.config.promote.on_reject == "continue":
            return self.trained(iteration - 1)
        if not is_overlapping:
            return self._after_gate(iteration)
        name = RunValue.PARENTS.of(iteration)
        pinned = self.journal.value(self.run_id, name)
        if pinned is None:
            versions = {group: ref.version for group, ref in self._after_gate(iteration).items()}
            pinned = self.journal.pin_value(self.run_id, name, versions)
        return self._refs(pinned)

    def _sampled(self, iteration: int) -> dict[str, ModelVersionRef]:
        """What collect recorded as its policy versions; empty before it is done."""
        collected = self.iteration(iteration).find(Collected)
        return {} if collected is None else self._refs(collected.policy_versions)

    def _refs(self, versions: Mapping[str, int]) -> dict[str, ModelVersionRef]:
        return {group: self.model_ref(group, version) for group, version in versions.items()}

    def _after_gate(self, iteration: int) -> dict[str, ModelVersionRef]:
        decided = self.iteration(iteration - 1, needed_by="the choice of parents").decided
        return self.champion() if decided.verdict == "reject" else self.trained(iteration - 1)

    def trained(self, iteration: int) -> dict[str, ModelVersionRef]:
        """The versions after training in `iteration`; a model group without a trainable row keeps its parent."""
        if iteration == 0:
            return self._refs(dict.fromkeys(self.config.model_groups, 0))
        return {group: trained.model for group, trained in self.iteration(iteration).trained.items()}

    def champion(self) -> dict[str, ModelVersionRef]:
        """The model versions of the champion, by model group; ValueError before there is one."""
        value = self.journal.value(self.run_id, RunValue.CHAMPION)
        if value is None:
            raise ValueError(f"run {self.run_id!r} has no champion yet: its iteration 0 is not done")
        return {group: ModelVersionRef(**ref) for group, ref in value["models"].items()}

    def key(self, iteration: int, stage: str, model_group: str = "") -> StageKey:
        """The journal's key of a stage."""
        return StageKey(self.run_id, iteration, stage, model_group)

    def begin(self, *, is_continued: bool = True) -> None:
        """Begins or continues the run; ValueError if its name is taken by another config, it was moved, or nothing can be stored."""
        own, config_json = self.config.storage.journal, self.config.model_dump_json()
        with _naming("storage.journal" if own else "storage.root", own or self.folder):
            self.journal.begin_run(self.run_id, self.config.sha256, config_json)
        self.journal.pin_value(self.run_id, RunValue.FOLDER, {"folder": self.folder})
        self.check_folder(is_continued=is_continued)
        self.journal.keep_config(self.run_id, config_json)  # only now: whoever reads the run finds its folder by it

    def check_folder(self, *, is_continued: bool = True) -> None:
        """ValueError where the run's folder was moved since it was begun: results, manifests and MLflow name files of the old one.

        A copy may be served as long as these are there; to go on with it would write to both.
        """
        begun = self.journal.value(self.run_id, RunValue.FOLDER)
        if begun is None or (there := absolute(begun["folder"])) == absolute(self.folder):
            return
        where = f"run {self.run_id!r} was begun in {there}, which its results name, and is now in {self.folder}"
        if is_uri(there) or not local_path(there).exists():
            raise ValueError(
                f"{where}: here it can be looked at. To go on with it, or to serve it, put it back, or link it: "
                f"ln -s {self.folder} {there}"
            )
        if is_continued:
            raise ValueError(f"{where}: this copy can be looked at and served. Go on with the one that is there")

    def open(self) -> None:
        """`begin`, and the tables of the trace store."""
        self.begin()
        with _naming("storage.traces" if self.config.storage.traces else "storage.root", self.traces_uri):
            self.traces.create()

    def model_ref(self, group: str, version: int) -> ModelVersionRef:
        """Returns the version of a model group; ValueError where there is none, or its weights were removed."""
        ref = self.weights.ref(group, version)
        if ref is None and self.weights.removed(group, version) is not None:
            raise ValueError(f"version {version} of model group {group!r} {REMOVED}")
        if ref is None:
            raise ValueError(
                f"model group {group!r} has no version {version} in {self.weights_uri}: run `troupe warmstart`"
            )
        return ref


def plain(ref: Any) -> dict[str, Any]:
    """A ref as JSON data, the form in which it is kept and passed on."""
    return asdict(ref)


def absolute(uri: str) -> str:
    """URIs and empty strings as they are, paths made absolute and without links: Ray workers run in other folders, and folders move."""
    return uri if not uri or is_uri(uri) else str(local_path(uri).resolve())


def _join(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}"


@contextmanager
def _naming(key: str, uri: str) -> Iterator[None]:
    """Has errors of a store that is opened name its config key and its URI: a wrong address is the usual reason."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ValueError(
            f"{key}: nothing can be stored at {uri}: {error.strerror or error}. Give a place that this user may write; what only "
            "reads a run (runs, show, lineage, export, report --out) needs none"
        ) from None
    except RuntimeError as error:
        if not str(error).startswith("lance error"):
            raise
        reason = str(error).partition(", /")[0].removeprefix("lance error: ")
        raise RuntimeError(f"{key}: {uri} cannot be opened ({reason}): check address, credentials, endpoint") from error
