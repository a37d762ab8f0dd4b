"""team_page: a team version -> what MLflow's pages say of it: tags to search by, a description to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stores.experiment import numbers

if TYPE_CHECKING:
    from stores.team import Team

KEY_TAG = "troupe.team_sha256"
MAX_DESCRIPTION_LENGTH = 5000
"""What MLflow takes at most, on any of its databases."""


def tags_of(team: Team) -> dict[str, str]:
    """Tags of a team version; `TeamRegistry.versions` reads some of them back."""
    evaluation = numbers(team.evaluation)
    found = {
        KEY_TAG: team.sha256,
        "troupe.run_id": team.run_id,
        "troupe.iteration": str(team.iteration),
        "troupe.git_commit": team.git_commit,
        "troupe.prompts_sha256": team.prompts_sha256,
        "troupe.policy_versions": json.dumps({group: ref.version for group, ref in team.models.items()}),
        "troupe.evaluation": json.dumps(dict(list(evaluation.items())[:100])),
    }
    found["troupe.verdict"] = str(team.evaluation.get("verdict") or "")
    found["troupe.dag_run"] = str(team.origin.get("links", {}).get("dag_run", ""))
    return {name: text for name, text in found.items() if text}


def about_name(name: str) -> str:
    """What stands above the list of a team's versions; Markdown."""
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
    """What stands on the page of a team version; Markdown. A list of versions shows the first words of it, as they are."""
    rows = [
        f"| {group} | v{ref.version} | `{ref.manifest_sha256[:12]}` | {_data(team, group)} | `{ref.uri}` |"
        for group, ref in sorted(team.models.items())
    ]
    made_by = team.origin.get("made_by", "")
    facts = {
        "Verdict": _verdict(team.evaluation),
        "Accuracy": _accuracy(team.evaluation),
        "Workflow": f"`{team.workflow}`, prompts `{team.prompts_sha256[:12]}`",
        "Credit": f"`{team.credit.get('path', '')}`, version `{str(team.credit.get('version', ''))[:12]}`",
        "Made by": f"`{made_by}`" if made_by else "",
        "Commits": _commits(team),
        "Links": ", ".join(f"{name}: {link}" for name, link in team.origin.get("links", {}).items()),
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
    """`promote 0.750`."""
    return f"{evaluation['verdict']} {evaluation.get('accuracy', 0.0):.3f}" if "verdict" in evaluation else "first team"


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
    found = {"Troupe": team.git_commit, "workflow": team.origin.get("workflow_commit", "")}
    return ", ".join(f"{of} `{commit}`" for of, commit in found.items() if commit)


def _data(team: Team, group: str) -> str:
    """`412 episodes of iteration 3 (traces@57, rewards@31)`."""
    data = team.origin.get("data", {}).get(group)
    if data is None:
        return ""
    traces, rewards = data["traces"], data["rewards"]
    pinned = f"traces@{traces['version']}, rewards@{rewards['version']}"
    return f"{traces['num_episodes']} episodes of iteration {data['iteration']} ({pinned})"
