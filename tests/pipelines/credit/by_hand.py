"""by_hand: episodes written as (agent, fields), and what a credit rule pays their turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipelines.config.sections import DottedConfig
from pipelines.credit.rule import CreditRule, load_credit, score_trace
from stores.types import Task, Trace
from tests.records import build_trace

Event = tuple[str, dict[str, Any]]
"""(agent, fields) with `_bad` for a broken format, or ("verify", response)."""


def trace(events: Sequence[Event], *, answers: Sequence[str] = ("55",), answer: str = "", **changes: Any) -> Trace:
    """An episode of these turns and of calls of the tool `verify`, in this order, by one model group."""
    base, turns, calls, rounds = build_trace(), [], [], dict[str, int]()
    for index, (name, given) in enumerate(events):
        if name == "verify":
            error = given.get("error", "")
            said = {"request": {}, "response": None if error else given, "error": error}
            calls.append(replace(base.tool_calls[0], call_index=index, tool=name, parents=(), **said))
            continue
        rounds[name] = rounds.get(name, -1) + 1
        fault = given.get("_bad", "")
        turns.append(
            replace(
                base.turns[0],
                turn_index=index,
                agent=name,
                model_group="all",
                round_index=rounds[name],
                is_format_ok=not fault,
                format_fault=fault,
                fields={k: v for k, v in given.items() if k != "_bad"},
            )
        )
    task = Task(task_id="t", prompt="q", answers=tuple(answers))
    changes = {"task": task, "answer": answer, "outcome_metadata": {}, "policy_versions": {"all": 0}} | changes
    return replace(base, turns=tuple(turns), tool_calls=tuple(calls), **changes)


def chain(solver: str, refiner: str, finalizer: str, *, bad_format: Sequence[str] = ()) -> list[Event]:
    """Four agents of which three say an answer."""
    said = {
        "solver": {"answer": solver},
        "verifier": {"status": "correct"},
        "refiner": {"answer": refiner},
        "finalizer": {"final_answer": finalizer},
    }
    return [(agent, fields | ({"_bad": "x"} if agent in bad_format else {})) for agent, fields in said.items()]


def paid(rule: CreditRule, played: Trace) -> dict[str, float]:
    """Reward by `agent_round`."""
    rounds = {t.turn_index: f"{t.agent}_{t.round_index}" for t in played.turns}
    return {rounds[r.turn_index]: r.reward for r in score_trace(rule, played, version="v").rewards}


def refuse_unknown_agent(path: str, settings: dict[str, Any], place: str) -> None:
    """Asserts that a rule takes `nobody` for no agent: otherwise everybody is paid another rule than the one written.

    Where nobody knows the agents, any name passes.
    """
    config = DottedConfig(path=path, settings=settings)
    said = f"credit.settings.{place}: 'nobody' is no agent of this run, which has solver, critic (got 'nobody')"
    with pytest.raises(ValueError, match=re.escape(said)):
        load_credit(config, agents=("solver", "critic"))
    for agents in ((), ("solver", "nobody")):
        assert load_credit(config, agents=agents).kind == load_credit(config).kind
