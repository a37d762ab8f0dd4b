"""Episodes sampled from a model folder by a plain forward pass: two agents of one model group, one turn each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stores.types import (
    EpisodeRewards,
    FinishReason,
    Purpose,
    Sampling,
    Task,
    Trace,
    Turn,
    TurnReward,
    episode_id,
)
from tests.records import build_trace, build_turn

GROUP = "shared"
COMPLETION = 6
WANTED = 200
"""Token ids below it are rewarded."""


def sample_traces(
    folder: Path,
    *,
    run_id: str = "run",
    iteration: int = 1,
    version: int = 0,
    num_tasks: int = 8,
    group_size: int = 8,
    temperature: float = 1.0,
    logprobs_of: float | None = None,
) -> tuple[list[Trace], list[EpisodeRewards]]:
    """Traces with exact rollout logprobs, and rewards: the share of completion tokens below `WANTED`.

    Args: logprobs_of: the temperature of the stored logprobs; None: that of the sampling, as it must be.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(iteration)
    num = num_tasks * group_size
    turns_of: list[list[Turn]] = [[] for _ in range(num)]
    for turn_index, agent in enumerate(("solver", "verifier")):
        prompts = torch.randint(0, model.config.vocab_size, (num_tasks, 5), generator=random)
        ids = prompts.repeat_interleave(group_size, 0)
        logprobs = []
        with torch.no_grad():
            for _ in range(COMPLETION):
                logits = model(input_ids=ids, use_cache=False).logits[:, -1]
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
                logprobs.append((logits / (logprobs_of or temperature)).log_softmax(-1).gather(1, token))
                ids = torch.cat([ids, token], 1)
        for i in range(num):
            drawn = torch.cat(logprobs, 1)[i].tolist()
            turns_of[i].append(
                _turn(
                    turn_index,
                    agent,
                    ids[i, :5].tolist(),
                    ids[i, 5:].tolist(),
                    drawn,
                    seed=i,
                    version=version,
                    temperature=temperature,
                )
            )
    traces = [
        _trace(turns, run_id=run_id, iteration=iteration, version=version, task=f"t{i // group_size}", index=i)
        for i, turns in enumerate(turns_of)
    ]
    return traces, [rewards_of(trace) for trace in traces]


def rewards_of(trace: Trace) -> EpisodeRewards:
    """Each turn earns the share of its tokens that are wanted."""
    earned = [sum(i < WANTED for i in turn.completion_token_ids) / COMPLETION for turn in trace.turns]
    return rewards_for(trace, earned, outcome=0.0)


def make_turns_of(episode: str, *, index: int) -> Trace:
    """An episode of task `t0` named `episode`: a solver's turn and a verifier's, one token each."""
    turns = [_turn(i, agent, [7], [8], [-1.0], seed=i) for i, agent in enumerate(("solver", "verifier"))]
    return replace(_trace(turns, run_id="run", iteration=1, version=0, task="t0", index=index), episode_id=episode)


def rewards_for(trace: Trace, rewards: Sequence[float], outcome: float, *, part: str = "") -> EpisodeRewards:
    """These rewards, turn by turn. Args: part: the one part of each breakdown; empty: they have none."""
    return EpisodeRewards(
        episode_id=trace.episode_id,
        run_id=trace.run_id,
        iteration=trace.iteration,
        purpose=trace.purpose,
        credit_version="c1",
        outcome=outcome,
        rewards=tuple(
            TurnReward(
                turn_index=t.turn_index,
                agent=t.agent,
                model_group=t.model_group,
                reward=r,
                breakdown={part: r} if part else {},
            )
            for t, r in zip(trace.turns, rewards, strict=True)
        ),
    )


def _turn(
    turn_index: int,
    agent: str,
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    *,
    seed: int,
    version: int = 0,
    temperature: float = 1.0,
) -> Turn:
    return build_turn(
        turn_index,
        agent,
        GROUP,
        seed=seed,
        policy_version=version,
        parents=(),
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        rollout_logprobs=logprobs,
        sampling=Sampling(max_tokens=COMPLETION, temperature=temperature),
        finish_reason=FinishReason.LENGTH,
    )


def _trace(turns: list[Turn], *, run_id: str, iteration: int, version: int, task: str, index: int) -> Trace:
    key = {"run_id": run_id, "iteration": iteration, "purpose": Purpose.TRAIN, "team_key": f"v{version}"}
    return build_trace(
        **key,
        episode_id=episode_id(**key, task_id=task, episode_index=index),
        task=Task(task_id=task, prompt="", answers=()),
        group_id=task,
        episode_index=index,
        seed=index,
        outcome_metadata={},
        policy_versions={GROUP: version},
        turns=tuple(turns),
        tool_calls=(),
    )
