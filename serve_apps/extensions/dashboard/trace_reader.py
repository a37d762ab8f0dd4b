"""trace_reader: a team's stored episodes -> JSON for the dashboard.

    event loop ──> a few threads of its own ──> LanceDB of the run | of served episodes ──> rows, a whole trace, one task's teams

Reads are bounded in rows, in tokens, in time and in number, so that readers do not slow down callers. Numbers that JSON does not
have become null.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from typing import Any, Literal

from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.gateway.traffic.teams import Production
from serve_apps.openai_api.protocol import ApiError
from stores.store_faults import UnreadableStore
from stores.traces.explanations import find_explanation
from stores.traces.served import ServedStore
from stores.traces.shown_advantages import read_advantages
from stores.traces.store import TraceStore
from stores.types import EpisodeRewards, EpisodeStatus, Purpose, Trace, Turn

logger = logging.getLogger(__name__)

StoreName = Literal["run", "served"]

MAX_ROWS = 200
MAX_TOKENS = 20_000
"""Tokens of one trace that are listed one by one."""
MAX_TEXT = 200_000
"""Characters of a text."""
PROMPT_IN_LIST = 200
"""Characters of a task's prompt, or of an answer, in a list."""
READ_TIMEOUT_S = 30.0
NUM_THREADS = 2
MAX_READS = 16


class TraceReader:
    """Reads stores in a few threads, for one gateway replica."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="trace-reader")
        self._num_reads = 0

    async def read(self, work: Callable[[], Mapping[str, Any]]) -> bytes:
        """Runs `work` in a thread and returns its result as JSON.

        ApiError 429 where too many reads wait, 504 where it takes too long, 503 where the store cannot be read.
        """
        if self._num_reads >= MAX_READS:
            raise ApiError(429, "too many traces are being read: try again later", code="overloaded", retry_after_s=1)
        self._num_reads += 1
        reading = asyncio.get_running_loop().run_in_executor(self._threads, lambda: as_json(work()))
        # A read that has timed out goes on in its thread and counts until it ends, so that threads cannot pile up.
        reading.add_done_callback(self._read_ended)
        done, _ = await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
        if not done:
            raise ApiError(504, f"the trace store did not answer within {READ_TIMEOUT_S:g} s", code="timeout")
        try:
            return reading.result()
        except (UnreadableStore, OSError) as error:
            logger.warning("a store cannot be read: %s", error)
            raise ApiError(503, f"the store cannot be read: {error}", code="store_unreadable") from error

    def _read_ended(self, _: asyncio.Future[bytes]) -> None:
        self._num_reads -= 1


def list_traces(
    production: Production,
    *,
    store: StoreName,
    limit: int,
    before: str = "",
    purpose: Purpose | None = None,
    iteration: int | None = None,
    status: EpisodeStatus | None = None,
    task_id: str | None = None,
) -> dict[str, Any]:
    """Returns {"data": rows, newest first, "next": `before` for the next page, or null}."""
    trace_store, run_id = _open_store(production, store)
    try:
        rows = trace_store.newest_episodes(
            limit=limit + 1,  # one more than is shown tells whether there is a next page
            before=before,
            run_id=run_id,
            purpose=purpose,
            iteration=iteration,
            status=status,
            task_id=task_id,
        )
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="before") from None
    shown = rows[:limit]
    outcomes = trace_store.outcomes_of(shown)
    data = [_list_row(row, outcomes.get(row["episode_id"], {}), production) for row in shown]
    return {"data": data, "next": shown[-1]["episode_id"] if len(rows) > limit else None}


def read_trace(production: Production, trace_id: str, *, store: StoreName) -> dict[str, Any]:
    """Returns one trace with its turns, tool calls, tokens, rewards and what `troupe why` found; ApiError 404."""
    trace_store, run_id = _open_store(production, store)
    try:
        trace = trace_store.get_trace(trace_id, run_id=run_id)
    except ValueError as error:
        raise ApiError(404, f"no such trace: {error}", code="trace_not_found", param="trace_id") from None
    advantages = _advantages(production, trace) if store == "run" else {}
    num_tokens_left = MAX_TOKENS
    turns = []
    for turn in trace.turns:
        row = _turn_row(turn, _tokenizer(production, turn.model_group), max_tokens=num_tokens_left)
        turns.append(row | {"advantages": advantages.get(turn.turn_index)})
        num_tokens_left = max(0, num_tokens_left - len(turn.completion_token_ids))
    return {
        **_episode_row(trace),
        "alias": _alias_of(production, trace.team_key),
        "turns": turns,
        "tool_calls": [asdict(call) for call in trace.tool_calls],
        "rewards": [_rewards_row(rewards) for rewards in _rewards_of(trace_store, trace)],
        "feedback": _feedback_rows(trace_store, trace) if store == "served" else [],
        "explanation": find_explanation(trace_store.uri, trace.run_id, trace.episode_id),
    }


def compare_task(production: Production, task_id: str, *, store: StoreName, purpose: Purpose | None) -> dict[str, Any]:
    """Returns the newest episodes of one task, grouped by team, the team of the newest first; ApiError 404."""
    rows = list_traces(production, store=store, limit=MAX_ROWS, purpose=purpose, task_id=task_id)["data"]
    if not rows:
        with_purpose = f" for {purpose.value}" if purpose else ""
        raise ApiError(
            404, f"no stored episode of task {task_id!r}{with_purpose}", code="task_not_found", param="task_id"
        )
    teams: dict[str, dict[str, Any]] = {}
    for row in rows:
        team = {name: row[name] for name in ("team_key", "policy_versions", "alias", "workflow")}
        teams.setdefault(row["team_key"], {**team, "episodes": []})["episodes"].append(row)
    return {"task_id": task_id, "purpose": purpose, "teams": list(teams.values())}


def as_json(value: Any) -> bytes:
    """Returns the value as JSON in ASCII, which can also hold a lone surrogate of a stored text."""
    return json.dumps(_finite(value), allow_nan=False, default=str).encode()


def decoded(tokenizer: ChatTokenizer | None, turn: Turn, *, max_tokens: int) -> list[tuple[str, float]]:
    """Returns text and logprob of each of the first tokens; a character of several tokens belongs to the last of them."""
    ids, logprobs = turn.completion_token_ids[:max_tokens], turn.rollout_logprobs[:max_tokens]
    if tokenizer is None:
        return [(f"⟨{i}⟩", logprob) for i, logprob in zip(ids, logprobs, strict=False)]
    stream, texts = tokenizer.decode_stream(), []
    for token in ids:  # a decode stream has no text for special tokens: those are named
        text = stream.push([token])
        is_special = not text and not tokenizer.decode([token])
        texts.append(tokenizer.token_text(token) if is_special else text)
    if texts:
        texts[-1] += stream.end()
    return list(zip(texts, logprobs, strict=False))


def _open_store(production: Production, store: StoreName) -> tuple[TraceStore, str | None]:
    stores = production.config.stores
    if stores is None:
        raise ApiError(
            404,
            f"team {production.name!r} was deployed without its stores: run `troupe serve` again",
            code="no_store",
            param="team",
        )
    return (TraceStore(stores.traces), stores.run_id) if store == "run" else (ServedStore(stores.served), None)


def _rewards_of(trace_store: TraceStore, trace: Trace) -> list[EpisodeRewards]:
    return trace_store.rewards_of(trace.episode_id, run_id=trace.run_id, iteration=trace.iteration)


def _feedback_rows(trace_store: TraceStore, trace: Trace) -> list[dict[str, Any]]:
    """Callers' feedback on a trace, oldest first."""
    return [asdict(feedback) for feedback in ServedStore(trace_store.uri).feedback_on([trace.episode_id])]


def _tokenizer(production: Production, model_group: str) -> ChatTokenizer | None:
    teams = [team for team in (production.champion, production.candidate) if team is not None]
    return next((t.acting.tokenizers[model_group] for t in teams if model_group in t.acting.tokenizers), None)


def _advantages(production: Production, trace: Trace) -> dict[int, float | list[float]]:
    """Advantages by turn, as far as they are stored beside the versions that were trained on the trace."""
    stores, advantages = production.config.stores, dict[int, float | list[float]]()
    if stores is not None and stores.weights and trace.purpose is Purpose.TRAIN:
        for group in {turn.model_group for turn in trace.turns}:
            advantages |= read_advantages(
                stores.weights, model_group=group, version=trace.iteration, episode_id=trace.episode_id
            )
    return advantages


def _alias_of(production: Production, team_key: str) -> str | None:
    """`champion`, `candidate` or `previous`; None where this team is not deployed now."""
    config = production.config
    deployed = {"champion": config.champion, "candidate": config.candidate, "previous": config.previous}
    aliases = (a for a, team in deployed.items() if team is not None and team.team_spec["team_key"] == team_key)
    return next(aliases, None)


def _list_row(row: Mapping[str, Any], outcomes: Mapping[str, float], production: Production) -> dict[str, Any]:
    return {
        **{name: value for name, value in row.items() if name not in ("agents", "model_groups")},
        "agents": row["agents"].strip("|").split("|"),
        "task_prompt": row["task_prompt"][:PROMPT_IN_LIST],
        "answer": row["answer"][:PROMPT_IN_LIST],
        "policy_versions": json.loads(row["policy_versions"]),
        "outcome_metadata": json.loads(row["outcome_metadata"]),
        "outcomes": dict(outcomes),
        "alias": _alias_of(production, row["team_key"]),
    }


def _episode_row(trace: Trace) -> dict[str, Any]:
    return {**_plain(trace, but_not=("turns", "tool_calls", "task")), "task": asdict(trace.task)}


def _turn_row(turn: Turn, tokenizer: ChatTokenizer | None, *, max_tokens: int) -> dict[str, Any]:
    return {
        **_plain(turn, but_not=("prompt_token_ids", "completion_token_ids", "rollout_logprobs", "sampling")),
        "sampling": asdict(turn.sampling),
        "prompt_text": turn.prompt_text[:MAX_TEXT],
        "completion_text": turn.completion_text[:MAX_TEXT],
        "num_prompt_tokens": len(turn.prompt_token_ids),
        "num_completion_tokens": len(turn.completion_token_ids),
        "tokens": decoded(tokenizer, turn, max_tokens=max_tokens),
    }


def _plain(record: Trace | Turn, *, but_not: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a record by name, but for some: those that are long."""
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in but_not}


def _rewards_row(rewards: EpisodeRewards) -> dict[str, Any]:
    turns = [asdict(reward) for reward in rewards.rewards]
    return {"credit_version": rewards.credit_version, "outcome": rewards.outcome, "turns": turns}


def _finite(value: Any) -> Any:
    """The value with null for the numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
