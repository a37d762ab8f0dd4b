"""A gateway for the dashboard: two versions of a team, and made-up episodes of both in a real store, one with hostile text."""

from __future__ import annotations

import math
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from gateway_scene import Scene, deployed_team
from records import build_trace

from serve_apps.chat.tokenizer import ChatTokenizer, load_tokenizer
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute, TeamStores
from stores.traces.shown_advantages import write_advantages
from stores.traces.store import TraceStore
from stores.types import (
    EpisodeRewards,
    EpisodeStatus,
    FinishReason,
    Purpose,
    Task,
    Trace,
    TurnReward,
    episode_id,
)
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

GROUP_OF = {"solver": "worker", "refiner": "worker", "verifier": "judge", "finalizer": "judge"}
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
REPLIES = {
    "solver": "<SOLUTION>6*8=48;7+48=55</SOLUTION><ANSWER>55</ANSWER>",
    "verifier": "<STATUS>correct</STATUS> the product comes before the sum",
    "refiner": "<ANSWER>55</ANSWER>",
    "finalizer": "<ANSWER>55</ANSWER>",
}


def two_group_team(model: Path, version: int, set_name: str, policy_versions: dict[str, int]) -> DeployedTeam:
    deployed = deployed_team(model, version, set_name)
    groups = {"worker": "demo-worker", "judge": "demo-judge"}
    changes: dict[str, Any] = {
        "group_of": GROUP_OF,
        "tokenizers": dict.fromkeys(groups, str(model)),
        "max_model_len": dict.fromkeys(groups, 256),
        "policy_versions": policy_versions,
    }
    return deployed.model_copy(update={"apps": groups, "team_spec": deployed.team_spec | changes})


def team_route(model: Path, folder: Path) -> TeamRoute:
    """Champion 3; candidate 4 with a quarter of the requests and copies of half of the others; previous version 2."""
    return TeamRoute(
        champion=two_group_team(model, 3, "blue", {"worker": 7, "judge": 5}),
        candidate=two_group_team(model, 4, "green", {"worker": 9, "judge": 5}),
        previous=two_group_team(model, 2, "blue", {"worker": 6, "judge": 5}),
        share=0.25,
        shadow=0.5,
        stores=TeamStores(
            run_id="math",
            traces=str(folder / "traces"),
            served=str(folder / "served"),
            weights=str(folder / "weights"),
        ),
    )


def make_episode(tokenizer: ChatTokenizer, index: int, *, team: int, purpose: Purpose, **changes: Any) -> Trace:
    """Makes an episode of four agents and a tool; its numbers are drawn by index and team."""
    rng = random.Random(f"{index}/{team}/{purpose}")
    task = Task(task_id=f"sum-{index // 2}", prompt=f"Compute 7 + 6 * {8 + index // 2}", answers=("55",), source="sums")
    versions = {"worker": {3: 7, 4: 9}[team], "judge": 5}
    key: dict[str, Any] = {"run_id": "math", "iteration": 6, "purpose": purpose, "team_key": f"key{team}"}
    whole = build_trace(index, **key, outcome_metadata={})
    turns, began = [], 0.0
    for position, (agent, text) in enumerate(REPLIES.items()):
        place = position + (position > 0)  # the tool's call is event 1
        text = changes.get("texts", {}).get(agent, text)
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        took = 0.05 + len(ids) * rng.uniform(0.008, 0.014)
        is_ok = rng.random() > 0.2
        turns.append(
            replace(
                whole.turns[0],
                turn_index=place,
                agent=agent,
                model_group=GROUP_OF[agent],
                policy_version=versions[GROUP_OF[agent]],
                parents=() if not position else (place - 2, 1) if agent == "verifier" else (place - 1,),
                prompt_text=f"Problem: {task.prompt}\nReply in the form that you were given.",
                completion_text=text,
                prompt_token_ids=tuple(tokenizer.encode(task.prompt)),
                completion_token_ids=tuple(ids),
                rollout_logprobs=tuple(-(rng.random() ** 6) * 6 for _ in ids),
                finish_reason=FinishReason.STOP if is_ok else FinishReason.LENGTH,
                is_format_ok=is_ok,
                format_fault="" if is_ok else "no <ANSWER>",
                fields={"answer": "55" if is_ok else ""},
                start_s=began,
                duration_s=took,
                num_cached_tokens=None,
                option_logprobs={"pass": math.log(0.75), HOSTILE: math.log(0.25)} if agent == "verifier" else {},
            )
        )
        began += took + (0.01 if position else 0.14)
    call = replace(
        whole.tool_calls[0],
        tool="calculator",
        request={"expression": "7 + 6 * 8"},
        response={"value": 55, "note": HOSTILE},
        start_s=turns[0].duration_s + 0.01,
        duration_s=0.12,
    )
    return replace(
        whole,
        episode_id=episode_id(**key, task_id=task.task_id, episode_index=index % 2),
        workflow="serve_apps.workflows.math_chain:MathChain",
        task=task,
        group_id=f"group-{index // 2}",
        status=changes.get("status", EpisodeStatus.OK),
        answer=changes.get("answer", "55" if rng.random() < {3: 0.5, 4: 0.8}[team] else "49"),
        policy_versions=versions,
        turns=tuple(turns),
        tool_calls=(call,),
        started_at=1_790_000_000 + 60.0 * index + team,
        duration_s=began,
    )


def reward_of(trace: Trace) -> EpisodeRewards:
    outcome = float(trace.answer == "55")
    parts = [{"correct": outcome * 0.5, "format": 0.1 if t.is_format_ok else -0.2} for t in trace.turns]
    return EpisodeRewards(
        episode_id=trace.episode_id,
        run_id=trace.run_id,
        iteration=trace.iteration,
        purpose=trace.purpose,
        credit_version="outcome-1",
        outcome=outcome,
        rewards=tuple(
            TurnReward(
                turn_index=t.turn_index, agent=t.agent, model_group=t.model_group, reward=sum(p.values()), breakdown=p
            )
            for t, p in zip(trace.turns, parts, strict=True)
        ),
    )


def fill(folder: Path, model: Path) -> list[Trace]:
    """Fills a store with gate episodes of both teams and training episodes of one; the first returned has hostile text."""
    tokenizer = load_tokenizer(str(model))
    hostile = make_episode(
        tokenizer, 40, team=3, purpose=Purpose.TRAIN, texts={"solver": f"It is 55 {HOSTILE}"}, answer=HOSTILE
    )
    traces = [hostile]
    traces += [make_episode(tokenizer, i, team=t, purpose=Purpose.GATE) for i in range(8) for t in (3, 4)]
    traces += [
        make_episode(tokenizer, i, team=3, purpose=Purpose.TRAIN, status=EpisodeStatus.TRUNCATED) for i in range(6)
    ]
    store = TraceStore(str(folder / "traces"))
    store.create()
    store.write_episodes(traces)
    store.write_rewards([reward_of(trace) for trace in traces])
    keep_advantages(folder, model, hostile)
    return traces


def keep_advantages(folder: Path, model: Path, trace: Trace) -> None:
    """Commits the version that was trained on a trace, with an advantage per token of its first turn."""
    source = shutil.copytree(model, folder / "trained")
    first, third = trace.turns[0], trace.turns[2]
    per_token = [math.sin(i / 9) for i in range(len(first.completion_token_ids))]
    same = [0.25] * len(third.completion_token_ids)
    write_advantages(
        source, {(trace.episode_id, first.turn_index): per_token, (trace.episode_id, third.turn_index): same}
    )
    probe = Probe(sequences=((1, 2),), logprobs=((-1.0,),))
    WeightStore(str(folder / "weights")).commit(
        source, model_group="worker", version=6, parent=5, run_id="math", iteration=6, probe=probe
    )


@contextmanager
def over_http(scene: Scene, port: int) -> Iterator[str]:
    """Serves the scene's API on a port of this machine."""
    server = uvicorn.Server(uvicorn.Config(scene.api, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
