"""why: a stored episode -> the turn that decided its outcome, from replays on engines that serve the versions which played it.

    episode ── replays from each turn ──> decisive_turn ──> stores.traces.explanations

Replays are stored as ad hoc episodes: the same question again plays only what is missing, or failed outside of the team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipelines.credit.rule import caller_score, worst_outcome
from pipelines.episodes.sampling import Pass, Progress, play_specs
from pipelines.evaluation.teams import Models
from pipelines.extensions.why.decisive_turn import find_decisive_turn
from pipelines.extensions.why.lost_tasks import LostTasks, lost_episodes
from pipelines.run.run import Run
from pipelines.run.scoring import assign_credit
from pipelines.run.serving import serve
from pipelines.runners.by_request import on_engines
from serve_apps.episode_spec import EpisodeSpec, Script
from stores.traces.explanations import Explanation, keep_explanation
from stores.types import Purpose, Trace


def explain_episode(run: Run, episode_id: str, *, budget: int, address: str = "") -> Explanation:
    """Finds the turn that decided an episode by playing it again at most `budget` times."""
    return on_engines(run, lambda: explain(run, episode_id, budget=budget), name="why", address=address)


def explain_lost_tasks(run: Run, iteration: int, *, tasks: int, budget: int, address: str = "") -> LostTasks:
    """Explains the candidate's episodes of the `tasks` that it lost most at the gate, with `budget` replays each."""
    lost = lost_episodes(run, iteration)
    report = LostTasks(iteration=iteration, num_lost=len(lost), explanations=[], faults=[])

    def explain_each() -> None:
        for episode in lost[:tasks]:
            try:
                report.explanations.append(explain(run, episode, budget=budget))
            except ValueError as fault:  # one that cannot be replayed leaves the others alone
                report.faults.append(str(fault))

    if lost:
        on_engines(run, explain_each, name="why", address=address, iteration=iteration, times=len(lost[:tasks]))
    return report


def explain(run: Run, episode_id: str, *, budget: int, progress: Progress | None = None) -> Explanation:
    """Finds the turn that cost an episode most, and keeps what was found; the caller holds the engines.

    Returns the fields of `DecisiveTurn`, and `episode_id`, `task_id`, `outcome`, `agent`, `completion`, `alternative`; each of `values`
    with its `agent`. Costs and values are in the outcome's unit.

    Args:
        episode_id: or a unique beginning of it.
        budget: replays in all.

    Raises ValueError for an episode that is no outcome of the policy, is a replay itself or of the service, or whose model versions are gone.
    """
    trace = run.traces.get_trace(episode_id, run_id=run.run_id)
    _check(run, trace)
    models = _models_of(run, trace)
    serve(run, models)
    replays = _Replays(run, trace, models, progress)
    agent_of = {turn.turn_index: turn.agent for turn in trace.turns}
    decisive = find_decisive_turn(list(agent_of), replays.scaled(replays.outcome), replays, budget=budget)
    alternative = None
    if decisive.best is not None:
        alternative = _alternative(replays.played[decisive.best], decisive.turn_index, replays.outcomes[decisive.best])
    turn = next(turn for turn in trace.turns if turn.turn_index == decisive.turn_index)
    explanation = {
        **asdict(decisive),
        "before": replays.unscaled(decisive.before),
        "after": replays.unscaled(decisive.after),
        "cost": decisive.cost * replays.span,
        "ci95": [edge * replays.span for edge in decisive.ci95],
        "is_certain": decisive.is_certain,
        "values": [
            {
                "turn_index": value.turn_index,
                "agent": agent_of[value.turn_index],
                "before": None if value.before is None else replays.unscaled(value.before),
                "num_replays": value.num_replays,
            }
            for value in decisive.values
        ],
        "episode_id": trace.episode_id,
        "task_id": trace.task.task_id,
        "outcome": replays.outcome,
        "agent": turn.agent,
        "completion": turn.completion_text,
        "alternative": alternative,
    }
    del explanation["best"]
    keep_explanation(run.traces_uri, run.run_id, explanation)
    return explanation


def _check(run: Run, trace: Trace) -> None:
    """Raises ValueError for an episode that cannot be explained."""
    if trace.run_id != run.run_id:
        raise ValueError(f"episode {trace.episode_id} is of run {trace.run_id!r}: name it by --run")
    if trace.workflow != run.config.workflow.path:
        raise ValueError(
            f"episode {trace.episode_id} was played by {trace.workflow}, and the run's team is {run.config.workflow.path}"
        )
    if not trace.turns:
        raise ValueError(
            f"episode {trace.episode_id} has no turn that could have decided it: {trace.error[:200] or trace.stop_reason}"
        )
    if not trace.is_outcome:
        raise ValueError(
            f"episode {trace.episode_id}: {trace.cause} caused its failure, and no turn of the team: {trace.error[:200]}"
        )
    if trace.variant:
        raise ValueError(
            f"episode {trace.episode_id} is a replay ({trace.variant}) itself: name the episode that it replays"
        )
    if caller_score(trace) is not None:
        raise ValueError(
            f"episode {trace.episode_id} is of the service: its caller scored it, and nobody can score its replays alike"
        )
    if trace.is_version_mixed:
        raise ValueError(
            f"episode {trace.episode_id}: weights changed while it was played, so that nothing can play it again"
        )


def _alternative(trace: Trace, turn_index: int, outcome: float) -> dict[str, Any]:
    turn = next(turn for turn in trace.turns if turn.turn_index == turn_index)
    return {"episode_id": trace.episode_id, "completion": turn.completion_text, "outcome": outcome}


def _models_of(run: Run, trace: Trace) -> Models:
    models = {}
    for group, version in trace.policy_versions.items():
        ref = run.weights.ref(group, version)
        if ref is None:
            raise ValueError(
                f"episode {trace.episode_id} was played by version {version} of model group {group!r}, which is not stored any more: "
                f"there are {run.weights.versions(group)}"
            )
        models[group] = ref
    return models


class _Replays:
    """Plays an episode again on engines, and scores what comes out by the run's credit rule."""

    def __init__(self, run: Run, trace: Trace, models: Models, progress: Progress | None) -> None:
        self._run, self._trace, self._progress = run, trace, progress
        # A round is a few episodes: what failed outside of the team is left out, and the turn's values say how many are left.
        config = run.config.collect.model_copy(update={"max_failed_share": 1.0})
        # Only what is trained on is played with swapped agents.
        iteration = trace.iteration if trace.purpose is Purpose.TRAIN else 0
        team = run.team_spec(models, iteration=iteration, occasion=f"why/{trace.episode_id}")
        self._pass = Pass.of(run, team, iteration=0, purpose=Purpose.AD_HOC, config=config)
        (reward,) = assign_credit(run, [trace])
        self.outcome = reward.outcome
        self._worst = min(0.0, worst_outcome(run.credit))
        self.span = 1.0 - self._worst
        """How far the best outcome is from the worst one."""
        self.played: dict[tuple[int, int], Trace] = {}
        self.outcomes: dict[tuple[int, int], float] = {}

    def scaled(self, outcome: float) -> float:
        """Returns an outcome on the scale of 0 to 1."""
        return min(1.0, max(0.0, (outcome - self._worst) / self.span))

    def unscaled(self, value: float) -> float:
        """Is the inverse of `scaled`."""
        return value * self.span + self._worst

    def __call__(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Plays what is not stored yet, or failed outside of the team when it was asked before; see `decisive_turn.Replays`."""
        agents = {turn.turn_index: turn.agent for turn in self._trace.turns}
        specs = {
            (index, number): EpisodeSpec(
                **self._pass.where,
                task=self._trace.task,
                episode_index=self._trace.episode_index,
                run_seed=self._run.config.seed,
                script=Script(
                    kind="counterfactual", agent=agents[index], base=self._trace, changed_at=index, sibling=number
                ),
            )
            for index, number in wanted
        }
        sampled = play_specs(list(specs.values()), self._pass, repeats_failed=True, progress=self._progress)
        by_id = {t.episode_id: t for t in self._run.traces.read_traces(sampled.traces)}
        done = {key: by_id[spec.episode_id] for key, spec in specs.items() if spec.episode_id in by_id}
        done = {key: trace for key, trace in done.items() if trace.is_outcome and not trace.is_version_mixed}
        rewards = assign_credit(self._run, list(done.values()))
        self.played |= done
        self.outcomes |= {key: reward.outcome for key, reward in zip(done, rewards, strict=True)}
        return {key: self.scaled(self.outcomes[key]) for key in done}
