"""records: small complete records, and an MLflow for the session. Fixtures of the folders that import them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from stores.types import (
    EpisodeRewards,
    EpisodeStatus,
    FinishReason,
    Purpose,
    Sampling,
    Task,
    ToolCall,
    Trace,
    Turn,
    TurnReward,
    episode_id,
)

if TYPE_CHECKING:
    from tests import servers

MakeTrace = Callable[..., Trace]


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """`make_trace(index, **changes)`, see `build_trace`."""
    return build_trace


def build_trace(index: int = 0, **changes: Any) -> Trace:
    """An episode of two agents of two model groups and one tool call."""
    key = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team"}
    key |= {name: changes.pop(name) for name in list(changes) if name in key}
    name = episode_id(**key, task_id=f"t{index // 2}", episode_index=index % 2)
    trace = Trace(
        **key,
        episode_id=name,
        workflow="package.module:Flow",
        task=Task(
            task_id=f"t{index // 2}",
            prompt="2 + 3 = ?",
            answers=("5", "five"),
            source="sums",
            metadata={"level": 2, "tags": ["a"], "nested": {"x": None}},
        ),
        group_id=f"g{index // 2}",
        episode_index=index % 2,
        variant="",
        seed=2**31 - 1,
        status=EpisodeStatus.OK,
        stop_reason="answered",
        error="",
        answer="5",
        outcome_metadata={"votes": {"5": 2}},
        policy_versions={"small": 4, "large": 2},
        is_version_mixed=False,
        turns=(build_turn(0, "solver", "small", seed=index), build_turn(2, "verifier", "large", seed=index)),
        tool_calls=(
            ToolCall(
                call_index=1,
                tool="search",
                caller="solver",
                parents=(0,),
                request={"query": "it's 2 + 3", "top": 3},
                response=[{"text": "five"}],
                error="",
                start_s=0.15,
                duration_s=0.05,
            ),
        ),
        started_at=1_700_000_000.125,
        duration_s=1.5,
    )
    return replace(trace, **changes)


@pytest.fixture(scope="session")
def make_rewards() -> Callable[..., EpisodeRewards]:
    """`make_rewards(trace, credit_version=..., outcome=...)`, see `build_rewards`."""
    return build_rewards


def build_rewards(trace: Trace, *, credit_version: str = "c1", outcome: float = 1.0) -> EpisodeRewards:
    """The outcome to every turn, less a tenth for its format."""
    return EpisodeRewards(
        episode_id=trace.episode_id,
        run_id=trace.run_id,
        iteration=trace.iteration,
        purpose=trace.purpose,
        credit_version=credit_version,
        outcome=outcome,
        rewards=tuple(
            TurnReward(
                turn_index=t.turn_index,
                agent=t.agent,
                model_group=t.model_group,
                reward=outcome - 0.1,
                breakdown={"correct": outcome, "format": -0.1},
            )
            for t in trace.turns
        ),
    )


def build_turn(turn_index: int, agent: str, model_group: str, *, seed: int = 0, **changes: Any) -> Turn:
    """A turn with as many tokens as `seed` says."""
    import numpy as np

    generator = np.random.default_rng(seed * 100 + turn_index)
    length = int(generator.integers(1, 9))
    turn = Turn(
        turn_index=turn_index,
        agent=agent,
        model_group=model_group,
        policy_version=4,
        round_index=0,
        parents=() if turn_index == 0 else (0, 1),
        prompt_text="2 + 3 = ?\n",
        completion_text="<answer>5</answer> ✓",
        prompt_token_ids=tuple(generator.integers(0, 2**31 - 1, length + 3).tolist()),
        completion_token_ids=tuple(generator.integers(0, 50_000, length).tolist()),
        rollout_logprobs=tuple((-generator.exponential(size=length)).astype(np.float32).tolist()),
        sampling=Sampling(max_tokens=32, temperature=0.7, top_p=0.9 if turn_index else 1.0),
        seed=seed,
        finish_reason=FinishReason.STOP,
        is_format_ok=True,
        format_fault="",
        fields={"answer": "5", "choice": "go"},
        start_s=0.1 * turn_index,
        duration_s=0.123456789,
        num_cached_tokens=None if turn_index else 3,
        option_logprobs={"go": -0.25, "stop": -1.5} if turn_index else {},
    )
    return replace(turn, **changes)


@pytest.fixture(scope="session")
def mlflow_sqlite(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Tracking URI and artifact root of one MLflow for the session: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    return f"sqlite:///{folder}/not/there/yet/mlflow.db", str(folder / "artifacts")


@pytest.fixture(scope="session")
def mlflow_postgres(postgres_server: servers.Postgres, s3_server: servers.S3) -> tuple[str, str]:
    """The same on PostgreSQL and S3."""
    return postgres_server.create(f"mlflow_{uuid4().hex[:8]}"), f"{s3_server.uri}/mlflow"


@pytest.fixture(
    scope="session",
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.needs_program("psql"), pytest.mark.nightly])],
)
def mlflow_place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each of the two."""
    return request.getfixturevalue(f"mlflow_{request.param}")
