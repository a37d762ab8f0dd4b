"""team: the record of a registered team (workflow, prompts, credit rule, one model version per model group), and what MLflow shows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from stores.codec import Record
from stores.registry.experiment import numbers
from stores.types import ModelVersionRef

KEY_TAG = "troupe.team_sha256"
IDENTITY_TAG = "troupe.identity"
MAX_DESCRIPTION_LENGTH = 5000
"""MLflow accepts so many characters on any of its databases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team(Record):
    """Everything that is evaluated, promoted, served and rolled back as one."""

    workflow: str
    """The workflow's dotted path."""
    prompts: Mapping[str, str]
    """The system prompts by agent."""
    credit: Mapping[str, Any]
    """`path`, `settings` and `version` of the credit rule."""
    models: Mapping[str, ModelVersionRef]
    """The model versions by model group."""
    git_commit: str
    run_id: str
    iteration: int
    evaluation: Mapping[str, Any]
    """Summary of the evaluation that the gate decided on; JSON values."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run config: agents, sampling, model groups, serving: all that is needed to run the team elsewhere. No secrets."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The user's own modules, path -> text: workflow, credit rule and what they import. What is installed is no part of it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The data it was trained on, who made it, commits: see `pipelines/stages/promote.py`; JSON values."""

    @property
    def sha256(self) -> str:
        """Identifies the team by what acts: it does not depend on evaluations, nor on how the team came to be."""
        data = {name: value for name, value in asdict(self).items() if name not in ("evaluation", "provenance")}
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> str:
        """Identifies the team by what was trained and evaluated, whatever of config, code and commit may change between two attempts."""
        names = ("workflow", "prompts", "credit", "models", "run_id", "iteration")
        data = {name: value for name, value in asdict(self).items() if name in names}
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def prompts_sha256(self) -> str:
        """Identifies the prompts, like `Workflow.prompts_sha256`."""
        return sha256(json.dumps(dict(self.prompts), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamVersion:
    """One line of a list of team versions."""

    version: int
    aliases: tuple[str, ...]
    run_id: str
    iteration: int
    policy_versions: Mapping[str, int]
    evaluation: Mapping[str, float]
    """The numbers of the evaluation summary, by their path in it."""
    created_at: float
    """Unix seconds."""


def tags_of(team: Team) -> dict[str, str]:
    """Returns the tags of a team version; `TeamRegistry.versions` reads some of them back."""
    evaluation = numbers(team.evaluation)
    tags = {
        KEY_TAG: team.sha256,
        IDENTITY_TAG: team.identity,
        "troupe.run_id": team.run_id,
        "troupe.iteration": str(team.iteration),
        "troupe.git_commit": team.git_commit,
        "troupe.prompts_sha256": team.prompts_sha256,
        "troupe.policy_versions": json.dumps({group: ref.version for group, ref in team.models.items()}),
        "troupe.evaluation": json.dumps(dict(list(evaluation.items())[:100])),
    }
    tags["troupe.verdict"] = str(team.evaluation.get("verdict") or "")
    tags["troupe.dag_run"] = str(team.provenance.get("links", {}).get("dag_run", ""))
    return {name: text for name, text in tags.items() if text}


def about_name(name: str) -> str:
    """Returns the text above the list of a team's versions, in Markdown."""
    return f"""A team of agents, trained by Troupe: workflow, prompts, credit rule and one model version per model group, promoted as one.

`champion` is the best team so far, `previous` the champion that it followed, `candidate` the latest one.

```
troupe serve {name}@champion
troupe lineage {name}@champion
```

```python
mlflow.set_tracking_uri(...)  # this server or store
mlflow.pyfunc.load_model("models:/{name}@champion").predict(pd.DataFrame({{"prompt": ["..."]}}))
```
"""


def about_version(name: str, version: int, team: Team) -> str:
    """Returns the text on the page of a team version, in Markdown; lists of versions show its first words unformatted."""
    rows = [
        f"| {group} | v{ref.version} | `{ref.manifest_sha256[:12]}` | {_data(team, group)} | `{ref.uri}` |"
        for group, ref in sorted(team.models.items())
    ]
    made_by = team.provenance.get("made_by", "")
    facts = {
        "Verdict": _verdict(team.evaluation),
        "Accuracy": _accuracy(team.evaluation),
        "Workflow": f"`{team.workflow}`, prompts `{team.prompts_sha256[:12]}`",
        "Credit": f"`{team.credit.get('path', '')}`, version `{str(team.credit.get('version', ''))[:12]}`",
        "Own modules": ", ".join(f"`{path}`" for path in sorted(team.code)),
        "Made by": f"`{made_by}`" if made_by else "",
        "Commits": _commits(team),
        "Links": ", ".join(f"{name}: {link}" for name, link in team.provenance.get("links", {}).items()),
    }
    lines = [
        f"{_in_short(team.evaluation)}: run {team.run_id}, iteration {team.iteration}",
        "",
        *(f"- **{key}**: {value}" for key, value in facts.items() if value),
        "",
        "| model group | version | manifest | trained on | weights |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Everything behind it: `troupe lineage {name}@{version}`; the manifest is the artifact `team.json`.",
    ]
    return "\n".join(lines)[:MAX_DESCRIPTION_LENGTH]


def _in_short(evaluation: Mapping[str, Any]) -> str:
    """Returns verdict and accuracy, e.g. `promote 0.750`."""
    accuracy = f" {evaluation['accuracy']:.3f}" if "accuracy" in evaluation else ""
    return f"{evaluation.get('verdict', 'first team')}{accuracy}"


def _verdict(evaluation: Mapping[str, Any]) -> str:
    if not evaluation:
        return "the first team: nothing to compare it with"
    return f"{evaluation.get('verdict', '')}: {evaluation.get('condition', '')}"


def _accuracy(evaluation: Mapping[str, Any]) -> str:
    if "accuracy" not in evaluation:
        return ""
    champion = evaluation.get("champion")
    beside = f"; the champion then {champion['accuracy']:.3f}" if champion else ""
    return f"{evaluation['accuracy']:.3f} on {evaluation.get('num_tasks', 0)} tasks of the gate{beside}"


def _commits(team: Team) -> str:
    commits = {"Troupe": team.git_commit, "workflow": team.provenance.get("workflow_commit", "")}
    return ", ".join(f"{code} `{commit}`" for code, commit in commits.items() if commit)


def _data(team: Team, group: str) -> str:
    """Describes training data, e.g. `412 episodes of iteration 3 (traces@57, rewards@31)`."""
    data = team.provenance.get("data", {}).get(group)
    if data is None:
        return ""
    traces, rewards = data["traces"], data["rewards"]
    pinned = f"traces@{traces['version']}, rewards@{rewards['version']}"
    return f"{traces['num_episodes']} episodes of iteration {data['iteration']} ({pinned})"
