"""played: a team and tasks -> evaluation episodes with their scores, on the engines that serve the team."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pipelines.config.sections import EvaluateConfig
from pipelines.episodes.sampling import Pass, Progress, Sampled, sample_episodes
from pipelines.evaluation.statistics import Interval, Resampling, mean_interval, pass_at_k
from pipelines.evaluation.teams import Models
from pipelines.run.run import Run
from pipelines.run.scoring import assign_credit, counts_by_cause, per_agent
from pipelines.run.serving import serve
from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from stores.journal.stage_results import TeamScore
from stores.types import EpisodeStatus, FinishReason, Purpose, Task, Trace, families

CURES: Mapping[EpisodeStatus, str] = {
    EpisodeStatus.TIMEOUT: "raise collect.episode.episode_timeout_s or turn_timeout_s",
    EpisodeStatus.INFRA_ERROR: "an engine, a node or the network failed, see the log",
    EpisodeStatus.TOOL_ERROR: "a tool failed, see `troupe show`",
    EpisodeStatus.AGENT_ERROR: "the workflow raised an error, see `troupe show`",
}
"""What to do about episodes of a status; `truncated` has several reasons."""

UNKNOWN = Interval(mean=0.0, low=0.0, high=1.0, num_tasks=0)
"""The accuracy of a team all of whose episodes are missing: the floors reject it."""


class Played:
    """Evaluation episodes of one team and their rewards.

    What the policy caused to fail is an outcome. Missing is what infrastructure or author caused to fail, and that in which
    another version had a part.
    """

    def __init__(self, run: Run, sampled: Sampled, models: Models, *, episodes_per_task: int | None = None) -> None:
        """Args: episodes_per_task: the first so many of each task count, where an earlier request may have stored more; None: all."""
        self.sampled, self.models = sampled, models
        self._episodes_per_task = episodes_per_task
        stored = run.traces.read_traces(sampled.traces)
        traces = [t for t in stored if episodes_per_task is None or t.episode_index < episodes_per_task]
        self.traces = [t for t in traces if t.is_outcome and not t.is_version_mixed]
        self.failed = [t for t in traces if not t.is_outcome or t.is_version_mixed]
        """The missing ones."""
        self.num_failed = len(self.failed)
        self.causes = counts_by_cause(traces)
        self.families = families(t.task for t in traces)
        self.rewards = assign_credit(run, self.traces)
        self._all = traces
        self.ok_share = sum(t.status is EpisodeStatus.OK for t in traces) / max(1, len(traces))
        self.outcomes: dict[str, list[float]] = {}
        """By task id, the outcome of each episode that counts."""
        for trace, credit in zip(self.traces, self.rewards, strict=True):
            self.outcomes.setdefault(trace.task.task_id, []).append(credit.outcome)

    @property
    def acted(self) -> list[Trace]:
        """Returns the episodes whose conduct guards compare: what a missing one did before it failed counts, too."""
        return [*self.traces, *(t for t in self.failed if t.turns and not t.is_version_mixed)]

    def not_ok(self, run: Run) -> str:
        """How the episodes ended that are not ok, and what would change that, in words."""
        limits = {name: run.sampling(name, agent).max_tokens for name, agent in run.workflow.agents.items()}
        return endings_in_words(self._all, limits)

    def score(self, run: Run) -> TeamScore:
        """Accuracy with its interval, pass@k, figures per agent and accuracy per data set."""
        k = self._episodes_per_task or run.config.evaluate.episodes_per_task
        accuracy = self.interval(run, self.outcomes) if self.outcomes else UNKNOWN
        return TeamScore(
            policy_versions=versions_of(self.models),
            accuracy=accuracy.mean,
            ci95=(accuracy.low, accuracy.high),
            num_tasks=len(self.outcomes),
            num_failed=self.num_failed,
            k=k,
            solved=pass_at_k(self.outcomes, 1) if self.outcomes else None,
            pass_at_k=pass_at_k(self.outcomes, k) if not self.num_failed else None,
            ok_share=self.ok_share,
            agents=per_agent(self.traces, self.rewards),
            sources={source: self.interval(run, outcomes).mean for source, outcomes in self.by_source().items()},
            traces=self.sampled.traces,
            causes=self.causes,
        )

    def by_source(self) -> dict[str, dict[str, list[float]]]:
        """`outcomes` by data set."""
        source_of = {trace.task.task_id: trace.task.source for trace in self.traces}
        found: dict[str, dict[str, list[float]]] = {source: {} for source in sorted(set(source_of.values()))}
        for task_id, outcomes in self.outcomes.items():
            found[source_of[task_id]][task_id] = outcomes
        return found

    def interval(self, run: Run, outcomes: Mapping[str, list[float]]) -> Interval:
        """Their accuracy with its 95% interval."""
        return mean_interval(outcomes, Resampling.of(run.config, self.families))


def play_team(
    run: Run,
    models: Models,
    tasks: list[Task],
    *,
    iteration: int,
    purpose: Purpose,
    occasion: str = "",
    settings: EvaluateConfig | None = None,
    progress: Progress | None = None,
) -> Played:
    """Serves `models` and has them play `tasks`; the rewards are written beside those of training.

    What is stored of the same versions, iteration, purpose and occasion is not played again. Args: settings: how many episodes of each
    task, at which temperature; None: the run's section `evaluate`.
    """
    assert bool(occasion) == (purpose is Purpose.AD_HOC), f"{purpose} episodes on the occasion {occasion!r}"
    serve(run, models)
    settings = settings or run.config.evaluate
    team_spec = run.team_spec(models, temperature=settings.temperature, occasion=occasion)
    by = Pass.of(run, team_spec, iteration=iteration, purpose=purpose)
    sampled = sample_episodes(tasks, by, episodes_per_task=settings.episodes_per_task, progress=progress)
    played = Played(run, sampled, models, episodes_per_task=settings.episodes_per_task)
    run.traces.write_rewards(played.rewards)
    return played


def versions_of(models: Models) -> dict[str, int]:
    """By model group, the number of its version."""
    return {group: ref.version for group, ref in sorted(models.items())}


def endings_in_words(traces: Iterable[Trace], max_tokens: Mapping[str, int]) -> str:
    """Describes how the episodes ended that are not ok, the most frequent status first; empty where all are ok.

    Args: max_tokens: the limit of every agent, `agents.<agent>.max_tokens` or its default.
    """
    traces = list(traces)
    counts = Counter(trace.status for trace in traces if trace.status is not EpisodeStatus.OK)
    parts = []
    for status, count in counts.most_common():
        of_status = [trace for trace in traces if trace.status is status]
        fix = _cut(of_status, max_tokens) if status is EpisodeStatus.TRUNCATED else CURES[status]
        parts.append(f"{count} of {len(traces)} are {status} ({fix})")
    return "; ".join(parts)


def _cut(traces: Iterable[Trace], max_tokens: Mapping[str, int]) -> str:
    """Describes what cut episodes short, the most frequent reason first."""
    reasons: Counter[str] = Counter()
    for trace in traces:
        cut = {turn.agent: turn for turn in trace.turns if turn.finish_reason is FinishReason.LENGTH}
        for agent, turn in cut.items():
            limit = turn.sampling.max_tokens
            if limit < max_tokens.get(agent, 0):
                reasons[f"{agent} had room for fewer tokens than its max_tokens: raise serve.max_model_len"] += 1
            else:
                reasons[f"{agent} ran into its max_tokens = {limit}: raise agents.{agent}.max_tokens"] += 1
        if trace.stop_reason == CONTEXT_EXHAUSTED:
            reasons["a prompt left no room in the context: raise serve.max_model_len"] += 1
        elif not cut:
            reasons["the workflow ended them as truncated"] += 1
    return ", ".join(f"in {number} {reason}" for reason, number in reasons.most_common())
