"""spending: episodes -> what they cost and in how many rounds, by how hard their tasks are; as tables and a picture.

A round is a turn of an agent that is not the orchestrator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend that needs no display is chosen

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.gate import Evidence, Verdict, decide_promotion
from pipelines.evaluation.statistics import Interval
from serve_apps.extensions.orchestration.steps import ORCHESTRATOR
from stores.types import Task, Trace
from tests.algorithms.table import Results

ALL = "all"


def spending(
    traces: Sequence[Trace], outcomes: Mapping[str, Sequence[float]], difficulty: Callable[[Task], str]
) -> dict[str, Any]:
    """Returns, by class of tasks and for all of them, {"episodes", "accuracy", "tokens", "rounds", "calls"}: completion tokens and rounds of
    an episode on average, and the share of the rounds that each agent has.

    Args:
        traces: one or more episodes of each task.
        outcomes: by task id, those of its episodes.
    """
    classes: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        classes[ALL].append(trace)
        classes[difficulty(trace.task)].append(trace)
    return {name: _spending(classes[name], outcomes) for name in sorted(classes)}


def _spending(traces: Sequence[Trace], outcomes: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    calls = Counter(turn.agent for trace in traces for turn in trace.turns if turn.agent != ORCHESTRATOR)
    earned = [x for task in {trace.task.task_id for trace in traces} for x in outcomes[task]]
    return {
        "episodes": len(traces),
        "accuracy": sum(earned) / len(earned),
        "tokens": sum(len(turn.completion_token_ids) for trace in traces for turn in trace.turns) / len(traces),
        "rounds": calls.total() / len(traces),
        "calls": {agent: number / calls.total() for agent, number in sorted(calls.items())},
    }


def spending_table(results: Results, gains: Mapping[str, Interval], promote: PromoteConfig, reference: str) -> str:
    """The tables for a page: what each row spends and what the gate would say of it against `reference`, and rounds by class of tasks."""
    means = {row: _mean_spending(done) for row, done in results.items() if done}
    base = means[reference][ALL]["tokens"]
    lines = [
        "| row | seeds | accuracy | completion tokens | fewer | rounds | the gate, against the reference | multiplier, last three |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, classes in means.items():
        whole = classes[ALL]
        verdict = _verdict(gains[row], promote) if row in gains else None
        lines.append(
            f"| `{row}` | {len(results[row])} | {whole['accuracy']:.3f} | {whole['tokens']:.1f} | {1 - whole['tokens'] / base:.0%} "
            f"| {whole['rounds']:.2f} | {f'{verdict.verdict}: {verdict.condition}' if verdict else ''} | {_last_multipliers(results[row])} |"
        )
    names = sorted({name for classes in means.values() for name in classes} - {ALL})
    lines += ["", "| row | " + " | ".join(f"{name}: rounds, accuracy, calls" for name in names) + " |"]
    lines += [f"|---|{'---|' * len(names)}"]
    for row, classes in means.items():
        cells = [
            f"{classes[n]['rounds']:.2f}, {classes[n]['accuracy']:.3f}, {_in_words(classes[n]['calls'])}" for n in names
        ]
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_costs(results: Results, *, limit: float, title: str, out: Path) -> None:
    """Writes a PNG of the mean cost of an episode and of the multiplier, by iteration, a line per seed of each row that has a limit."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), dpi=120, sharex=True)
    rows = [row for row, done in results.items() if any(one["costs"] for one in done)]
    for number, row in enumerate(rows):
        for one in results[row]:
            label = row if one is results[row][0] else None
            x = range(1, len(one["costs"]) + 1)
            upper.plot(x, [cost["mean"] for cost in one["costs"]], color=f"C{number}", label=label, linewidth=1.4)
            lower.plot(x, [cost["multiplier"] for cost in one["costs"]], color=f"C{number}", linewidth=1.4)
    upper.axhline(limit, color="#111827", linestyle="--", linewidth=1, label="limit")
    upper.set(ylabel="cost of an episode", title=title)
    lower.set(ylabel="multiplier", xlabel="iteration")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False, fontsize=9)
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def _verdict(gain: Interval, promote: PromoteConfig) -> Verdict:
    return decide_promotion(promote, Evidence(gain=gain, ok_share=1.0, format_shares={}))


def _mean_spending(done: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean over seeds of each figure."""
    found = {}
    for name in done[0]["spending"]:
        seeds = [one["spending"][name] for one in done if name in one["spending"]]
        agents = sorted({agent for seed in seeds for agent in seed["calls"]})
        found[name] = {key: sum(seed[key] for seed in seeds) / len(seeds) for key in ("accuracy", "tokens", "rounds")}
        found[name]["calls"] = {a: sum(seed["calls"].get(a, 0.0) for seed in seeds) / len(seeds) for a in agents}
    return found


def _last_multipliers(done: Sequence[Mapping[str, Any]]) -> str:
    ends = [", ".join(f"{cost['multiplier']:.2f}" for cost in one["costs"][-3:]) for one in done if one["costs"]]
    return "; ".join(ends)


def _in_words(calls: Mapping[str, float]) -> str:
    return " ".join(f"{agent} {share:.0%}" for agent, share in calls.items())
