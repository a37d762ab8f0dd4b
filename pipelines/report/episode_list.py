"""episode_list: a run and what is asked for -> its stored episodes, the newest first, as rows and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from shlex import quote
from typing import Any, Unpack

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from pipelines.config.messages import near
from pipelines.report.foreign_text import ForeignText
from pipelines.run.run import Run
from pipelines.run.scoring import of_latest_version
from stores.traces.lookup import Asked
from stores.traces.served import ServedStore
from stores.traces.store import TraceStore

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
