"""inspect: what is stored -> views for people: runs, lists of episodes, episodes, differences, explanations; exported weights.

What models, programs and errors say is shown as `ForeignText`, which obeys neither a terminal's markup nor its control characters.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Unpack

from rich.box import SIMPLE
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelines.config.messages import near
from pipelines.run.run import Run
from pipelines.run.scoring import of_latest_version, rewards_for
from serve_apps.workflows.alone import PATH as ALONE
from stores.extensions import hooks
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Decided
from stores.store_faults import UnreadableStore
from stores.traces.lookup import Asked
from stores.traces.served import ServedStore
from stores.traces.store import TraceStore
from stores.types import EpisodeRewards, Purpose, Trace, Turn
from stores.weights.manifest import REMOVED

if TYPE_CHECKING:
    from stores.journal.journal import Journal

CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Control characters (Unicode's category Cc) but tab and line feed: ESC begins the sequences by which a terminal is told what to do."""


class ForeignText(Text):
    """Text as it is, also where it has `[...]`; control characters are replaced."""

    def __init__(self, text: str = "", *args: Any, **kwargs: Any) -> None:
        """Takes what `Text` takes, and replaces control characters in it."""
        super().__init__(text.translate(CONTROL), *args, **kwargs)

    def append(self, text: Any, style: Any = None) -> Text:
        """Appends as `Text` does, without control characters; `Text.assemble` comes here, too."""
        return super().append(text.translate(CONTROL) if isinstance(text, str) else text, style)


ID_DIGITS = 12
"""Digits of an episode's id that tell it from all others of a run."""
MAX_TEXT = 40
"""Characters of a task's prompt, or of an answer, in the table."""


def store_of(run: Run, *, is_served: bool) -> TraceStore:
    """Returns the store of the run's own episodes, or of those that callers of its team were given."""
    return ServedStore(run.served_uri) if is_served else run.traces


COLUMNS = {
    "episode": None,
    "it.": None,
    "purpose": None,
    "outcome": None,
    "status": None,
    "answer": 8,
    "task": 16,
    "asked": 5,
}
"""Headings, and to how many characters a narrow terminal may cut what stands below them."""


def show_command(run: Run, episode_id: str = "") -> str:
    """Returns the command that shows an episode, or without an id lists them."""
    words = ["troupe show", episode_id[:ID_DIGITS], f"--run {run.run_id}", root_option(run)]
    return " ".join(filter(None, words))


def root_option(run: Run) -> str:
    """Returns the option by which a command finds the run; empty where it is in the default folder."""
    root = run.config.storage.root
    return "" if root == "runs" else f"--root {quote(root)}"


def list_episodes(run: Run, *, limit: int, is_served: bool = False, **asked: Unpack[Asked]) -> dict[str, Any]:
    """Returns {"episodes": at most `limit` rows without turns, the newest first, "num_left_out"}.

    `outcome` of a row is None where the episode was not credited. Raises ValueError for an agent that the run does not have, and
    for bounds of outcomes between which there is no number.
    """
    bounds = [bound for bound in asked.get("outcomes") or () if bound is not None]
    if not all(map(math.isfinite, bounds)) or bounds != sorted(bounds):
        raise ValueError(
            f"outcomes between {' and '.join(map(str, bounds))}: name finite numbers, --min-outcome the lower one"
        )
    agent = asked.get("agent")
    if agent is not None and agent not in run.config.group_of:
        raise ValueError(f"--agent {agent!r} is no agent of run {run.run_id!r}{near(agent, run.config.group_of)}")
    store = store_of(run, is_served=is_served)
    if not is_served:
        asked["run_id"] = run.run_id
    rows = store.newest_episodes(limit=limit, **asked)
    outcomes = store.outcomes_of(rows)
    credited = {episode: of_latest_version(run, by_version) for episode, by_version in outcomes.items()}
    return {
        "episodes": [_row(row) | {"outcome": credited.get(row["episode_id"])} for row in rows],
        "num_left_out": store.count_episodes(**asked) - len(rows),
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "episode_id",
        "iteration",
        "purpose",
        "task_id",
        "task_prompt",
        "task_answers",
        "answer",
        "status",
        "stop_reason",
    )
    more = ("cause", "error", "variant", "num_turns", "started_at", "duration_s")
    return {
        **{name: row.get(name) for name in (*names, *more)},
        "agents": row["agents"].strip("|").split("|") if row["agents"] else [],
        "policy_versions": json.loads(row["policy_versions"]),
    }


def list_view(listed: Mapping[str, Any]) -> RenderableType:
    """Shows a list of episodes."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name, width in COLUMNS.items():
        table.add_column(name, no_wrap=width is None, min_width=width)
    for row in listed["episodes"]:
        outcome = "–" if row["outcome"] is None else f"{row['outcome']:g}"
        purpose = f"{row['purpose']}, {row['variant']}" if row["variant"] else row["purpose"]
        cells = [row["episode_id"][:ID_DIGITS], str(row["iteration"]), purpose, outcome, row["status"]]
        texts = [*cells, _short(row["answer"]), row["task_id"], _short(row["task_prompt"])]
        table.add_row(*(ForeignText(text, no_wrap=True, overflow="ellipsis") for text in texts))
    left_out = listed["num_left_out"]
    if not listed["episodes"]:
        return ForeignText("no stored episode is like this")
    return (
        Group(table, ForeignText(f"{left_out} older ones are left out: raise --limit, or ask for fewer"))
        if left_out
        else table
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


NUM_NEWEST = 200
"""Episodes of a task whose versions are named where none was played by those that were asked for."""
VERSIONS_BY_PURPOSE = (Purpose.TEST, Purpose.GATE, Purpose.TRAIN)


def runs_table(journals: Sequence[Journal]) -> tuple[Table, list[str]]:
    """One row per run: finished iterations, running or failed stage, champion; and what is wrong with unreadable journals."""
    table = Table("run", "iterations done", "last stage", "status", "error", "champion")
    faults: list[str] = []
    for journal in journals:
        try:
            rows = [_run_row(journal, row.run_id) for row in journal.runs()]
        except (UnreadableStore, OSError) as error:
            faults.append(str(error))
            continue
        for row in rows:
            table.add_row(*map(ForeignText, row))
    return table, faults


def _run_row(journal: Journal, run_id: str) -> list[str]:
    done = len(journal.finished(run_id, Decided.STAGE, after=0))
    last = journal.latest(run_id)
    champion = journal.value(run_id, RunValue.CHAMPION)
    return [
        run_id,
        str(done),
        str(last.key) if last else "",
        last.status if last else "",
        (last.error or "")[:60] if last else "",
        f"team {champion['team_version']}" if champion else "",
    ]


def episode_view(run: Run, episode_id: str, *, is_served: bool = False) -> RenderableType:
    """Shows every turn of an episode with its credit; a served one has none."""
    if is_served:
        return _episode(store_of(run, is_served=True).get_trace(episode_id), None)
    trace = run.traces.get_trace(episode_id, run_id=run.run_id)
    more = (shown(run, trace) for shown in hooks("shows").values())
    return Group(_episode(trace, rewards_for(run, trace)), *(part for part in more if part is not None))


def diff_view(run: Run, task_id: str, first: int, second: int) -> RenderableType:
    """Shows the same task, played after two iterations, side by side; ValueError where one was never played."""
    return Columns([_played(run, task_id, iteration) for iteration in (first, second)], equal=True, expand=True)


def _played(run: Run, task_id: str, iteration: int) -> RenderableType:
    versions = {group: ref.version for group, ref in run.trained(iteration).items()}
    for purpose in VERSIONS_BY_PURPOSE:
        traces = run.traces.find_traces(
            run_id=run.run_id, purpose=purpose, task_id=task_id, variant="", policy_versions=versions
        )
        for trace in traces:
            if dict(trace.policy_versions) == versions and trace.workflow != ALONE:  # the control is another team
                return episode_view(run, trace.episode_id)
    newest = run.traces.newest_episodes(run_id=run.run_id, task_id=task_id, limit=NUM_NEWEST)
    played = sorted({str(json.loads(row["policy_versions"])) for row in newest})
    raise ValueError(
        f"task {task_id!r} was not played by versions {versions} (after iteration {iteration}); "
        f"versions that played it: {'; '.join(played) or 'none'}"
        f"{', among others' if len(newest) == NUM_NEWEST else ''}"
    )


def _episode(trace: Trace, credit: EpisodeRewards | None) -> RenderableType:
    paid = {reward.turn_index: reward for reward in credit.rewards} if credit else {}
    head = ForeignText.assemble(
        (f"{trace.episode_id}\n", "dim"),
        (f"{trace.task.prompt}", "bold"),
        f"  expected {' or '.join(trace.task.answers) or 'no answer in words'}, answered {trace.answer or 'nothing'}",
        f"\n{trace.purpose} of iteration {trace.iteration}, {trace.status} ({trace.stop_reason}"
        f"{f', caused by {trace.cause}' if trace.cause else ''}), "
        f"versions {dict(trace.policy_versions)}, {trace.duration_s:.2f} s",
        f", outcome {credit.outcome:g}" if credit else "",
        f"\n{trace.error}" if trace.error else "",
    )
    panels: list[RenderableType] = [head]
    for turn in trace.turns:
        reward = paid.get(turn.turn_index)
        parts = ", ".join(f"{name} {value:+g}" for name, value in reward.breakdown.items()) if reward else ""
        title = f"{turn.turn_index} {turn.agent} v{turn.policy_version}"
        verdict = "format ok" if turn.is_format_ok else f"format: {turn.format_fault}"
        earned = f"reward {reward.reward:+.3f} ({parts})" if reward else "no reward"
        body = ForeignText.assemble(
            (turn.prompt_text, "dim"), "\n", (turn.completion_text, "bold"), _options(turn), f"\n{verdict}, {earned}"
        )
        panels.append(Panel(body, title=ForeignText(title), title_align="left"))
    for call in trace.tool_calls:
        panels.append(
            Panel(
                ForeignText(f"{call.request} -> {call.error or call.response}"),
                title=ForeignText(f"{call.call_index} {call.tool}"),
            )
        )
    return Group(*panels)


def _options(turn: Turn) -> str:
    """Describes the options of a choice, the most likely first; empty for other turns."""
    by_probability = sorted(turn.option_logprobs.items(), key=lambda option: -option[1])
    shown = ", ".join(f"{name} {math.exp(logprob):.1%}" for name, logprob in by_probability)
    return f"\nchose {turn.fields['choice'] or 'nothing'} of: {shown}" if shown else ""


def export_version(run: Run, model_group: str, version: int, out: Path, *, is_merged: bool = False) -> Path:
    """Copies a model version after checking its hashes; ValueError where it, or room for it, is missing.

    An adapter is copied as it is, or `is_merged` with its base into one model.
    """
    ref = run.weights.ref(model_group, version)
    if ref is None:
        if run.weights.removed(model_group, version) is not None:
            raise ValueError(
                f"version {version} of model group {model_group!r} {REMOVED}; there are {run.weights.versions(model_group)}"
            )
        known = {group: run.weights.versions(group) for group in run.config.model_groups}
        raise ValueError(f"no version {version} of model group {model_group!r}; there are {known}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is no empty folder: give a new one")
    run.weights.verify(ref)
    base = run.weights.manifest(ref).base
    if is_merged:
        if base is None:
            raise ValueError(f"version {version} of {model_group!r} is a whole model, no adapter: drop --merged")
        from train_loops.engine.adapters import merge_adapter

        run.weights.verify(base)
        return merge_adapter(run.weights.fetch(base), run.weights.fetch(ref), out)
    shutil.copytree(run.weights.fetch(ref), out, dirs_exist_ok=True)
    return out


def serve_config(run: Run, alias: str) -> dict[str, Any]:
    """A Serve config (`serve deploy`, RayService) of the policy apps of a registered team (alias or version number)."""
    from pipelines.run.serving import app_names, app_specs
    from serve_apps.policy.deployment import app_entry

    _, team = run.load_team(alias)
    specs = app_specs(run, team.models, app_names(run, "production"))
    return {"proxy_location": "EveryNode", "applications": [app_entry(spec) for spec in specs]}
