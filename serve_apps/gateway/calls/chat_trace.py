"""chat_trace: a chat that was answered -> a trace of it, token-exact, with a turn per choice."""

from __future__ import annotations

import time

from serve_apps.gateway.calls.chat import Chat
from serve_apps.gateway.calls.workflow_runs import SERVICE_RUN
from stores.types import EpisodeStatus, FinishReason, Purpose, Task, Trace, Turn


def trace_of(chat: Chat, *, task_id: str, seconds: float) -> Trace:
    """Returns the chat as an episode of run `service`; its id is that of the reply."""
    acting = chat.team.acting
    turns = _turns_of(chat, seconds)
    is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in turns)
    versions = {turn.policy_version for turn in turns}
    return Trace(
        episode_id=chat.id,
        run_id=SERVICE_RUN,
        iteration=0,
        purpose=Purpose.AD_HOC,
        team_key=acting.team_key,
        workflow=acting.workflow_path,
        task=Task(task_id=task_id, prompt=chat.request.last_user_text, answers=(), source=SERVICE_RUN),
        group_id=task_id,
        episode_index=0,
        variant="",
        seed=chat.seeds[0],
        status=EpisodeStatus.TRUNCATED if is_cut else EpisodeStatus.OK,
        stop_reason="length" if is_cut else "",
        error="",
        answer=turns[0].completion_text,
        outcome_metadata={"model": chat.request.model},
        policy_versions={chat.model_group: max(versions)},
        is_version_mixed=len(versions) > 1,
        turns=turns,
        tool_calls=(),
        started_at=time.time() - seconds,
        duration_s=seconds,
    )


def is_trainable(chat: Chat) -> bool:
    """Whether the trace of a chat can be trained on.

    It can if one choice was sampled, by an agent, from the policy's own distribution: no filter or penalty changed it.
    A constraint is part of the turn: the trainer applies it, too.
    """
    return chat.agent is not None and chat.request.n == 1 and chat.sampling.is_unfiltered and not chat.settings


def _turns_of(chat: Chat, seconds: float) -> tuple[Turn, ...]:
    prompt = chat.tokenizer.decode(chat.prompt_token_ids)
    return tuple(
        Turn(
            turn_index=index,
            agent=chat.agent or "",
            model_group=chat.model_group,
            policy_version=choice.policy_version,
            round_index=0,
            parents=(),
            prompt_text=prompt,
            completion_text=choice.text,
            prompt_token_ids=tuple(chat.prompt_token_ids),
            completion_token_ids=tuple(choice.token_ids),
            rollout_logprobs=tuple(choice.logprobs),
            sampling=chat.sampling,
            seed=chat.seeds[index],
            finish_reason=FinishReason(choice.finish_reason),
            is_format_ok=True,
            format_fault="",
            fields={},
            start_s=0.0,
            duration_s=seconds,
        )
        for index, choice in sorted(chat.choices.items())
    )
