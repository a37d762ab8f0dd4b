"""The report: self-contained, escaped, complete; and the table for the terminal."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from pipelines.report.charts import (
    choices,
    learning,
    other_metrics,
    overhead_share,
    parts_of_rewards,
    training,
    training_of_agents,
)
from pipelines.report.page import ReportData, render
from pipelines.report.progress import iteration_table
from pipelines.report.record import iteration_metrics
from pipelines.report.summary import repeated_calls
from pipelines.report.training_warnings import latest_warnings

pytestmark = pytest.mark.fast

GROUP_OF = {
    "solver": "solver_verifier",
    "verifier": "solver_verifier",
    "refiner": "refiner_finalizer",
    "finalizer": "refiner_finalizer",
}
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


def iteration_row(k: int, *, of: int = 12) -> dict[str, Any]:
    """Made-up numbers of a run that learns."""
    rng = random.Random(k)
    progress = 1 - math.exp(-3 * k / of)
    calls = 512
    return {
        "iteration": k,
        "metrics": {"reward": 0.3 + 0.55 * progress, "tokens_per_s": 9000 + rng.uniform(-400, 400), "kl_to_start": 0.1},
        "agents": {
            agent: {
                "reward": -0.1 + 0.1 * i + 0.8 * progress + rng.uniform(-0.03, 0.03),
                "format": min(1.0, 0.82 + 0.03 * i + 0.15 * progress),
            }
            for i, agent in enumerate(GROUP_OF)
        },
        "groups": {
            group: {
                "train/kl_k3": 0.002 + rng.uniform(0, 0.004),
                "train/approx_kl": rng.uniform(0, 0.001),
                "train/entropy": 0.9 - 0.5 * progress + 0.1 * i,
                "train/logprob_gap_mean": 2e-6 + rng.uniform(0, 1e-6),
                "train/logprob_gap_max": 4e-5,
                "train/grad_norm": 0.8 + rng.uniform(0, 0.6),
                "train/clip_share": rng.uniform(0, 0.1),
                "train/value_loss": float("nan"),
            }
            for i, group in enumerate(("solver_verifier", "refiner_finalizer"))
        },
        "funnel": {
            agent: {
                "attempts": calls + 8 * i,
                "calls": calls,
                "with_ids": calls,
                "episodes_ok": 506,
                "scored": 506,
                "non_zero_advantage": int(506 * (0.9 - 0.4 * progress) - 20 * i),
                "trained": int(506 * (0.9 - 0.4 * progress) - 20 * i),
            }
            for i, agent in enumerate(GROUP_OF)
        },
        "seconds": {
            "collect": 11 + rng.uniform(0, 1),
            "score": 0.3,
            "train": 14 + rng.uniform(0, 2),
            "sync": 0.6,
            **({"evaluate": 9.0, "promote": 0.4} if k % 3 == 0 else {}),
            "total": 29.5 if k % 3 else 38.5,
        },
        "evaluation": evaluation(k, progress) if k % 3 == 0 else None,
    }


def evaluation(k: int, progress: float) -> dict[str, Any]:
    mean = 0.35 + 0.5 * progress
    interval = {"mean": mean, "low": mean - 0.055, "high": mean + 0.05}
    gain = {"mean": 0.12 - 0.01 * k, "low": 0.07 - 0.01 * k, "high": 0.17 - 0.01 * k}
    return {
        "candidate": interval,
        "champion": {n: v - gain["mean"] for n, v in interval.items()} if k > 3 else None,
        "gain": gain if k > 3 else None,
        "bound": {"mean": -0.0421, "low": -0.09, "high": 0.01} if k == 9 else None,
        "causes": {"candidate": {"sound": 250, "infrastructure": 6}, "champion": {}} if k == 9 else {},
        "num_tasks": 256,
        "verdict": "promote" if k < 9 else "inconclusive" if k < 12 else "reject",
        "condition": f"gain {gain['mean']:+.3f} on 256 tasks: lower bound above min_gain +0.000",
    }


def sample_report(num_iterations: int = 12) -> ReportData:
    headline = {
        "before": {"accuracy": 0.371, "ci95": [0.312, 0.430], "num_tasks": 256},
        "after": {"accuracy": 0.863, "ci95": [0.820, 0.902], "num_tasks": 256},
        "delta": 0.492,
        "delta_ci95": [0.426, 0.559],
    }
    return ReportData(
        run_id="demo",
        headline=headline,
        iterations=[iteration_row(k) for k in range(1, num_iterations + 1)],
        notes=["The models are tiny and were warm-started on demonstrations of mixed quality."],
        facts={"workflow": "serve_apps.workflows.math_chain:MathChain", "seed": 0, "evil <b>": EVIL},
    )


class _Reader(HTMLParser):
    """Collects what a browser would load, run and show."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[dict[str, Any]] = []
        self.text = ""
        self._script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("type") or "code") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def handle_data(self, data: str) -> None:
        if self._script == "application/json":
            self.figures.append(json.loads(data))
        elif not self._script:
            self.text += data


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    return reader


def test_the_report_loads_nothing_and_runs_only_its_own_scripts() -> None:
    page = read(render(sample_report()))
    assert not [
        tag for tag, attrs in page.tags if tag in ("img", "link", "iframe") or "src" in attrs or "href" in attrs
    ]
    assert sum(tag == "script" and "type" not in attrs for tag, attrs in page.tags) == 2, "Plotly and the page's own"


def test_names_and_prompts_are_escaped_wherever_they_stand() -> None:
    data = sample_report()
    row = iteration_row(1)
    row["agents"][EVIL] = row["agents"]["solver"]
    row["funnel"][EVIL] = row["funnel"]["solver"]
    html = render(replace(data, run_id=EVIL, iterations=[row], notes=[EVIL]))
    assert "<script>alert" not in html and "<img" not in html
    assert read(html).text.count(EVIL) > 4, "what was written is shown as it was written"


def test_the_report_shows_every_part() -> None:
    page = read(render(sample_report()))
    for part in ("37.1", "86.3", "+49.2", "inconclusive", "refiner_finalizer"):
        assert part in page.text or part in json.dumps(page.figures), part
    lines = {trace["name"] for figure in page.figures for trace in figure["data"]}
    assert lines >= {"solver", "finalizer", "solver_verifier", "candidate", "champion", "collect", "between stages"}


def test_the_worst_case_stands_beside_the_gain_and_failed_episodes_are_counted_by_cause() -> None:
    rows = [iteration_row(k) for k in range(1, 13)]
    rows[3] |= {"causes": {"sound": 500, "policy": 11, "infrastructure": 1}}
    page = render(replace(sample_report(), iterations=rows))
    assert "-0.042" in page and "Worst case" in page and "Failed episodes" in page
    assert "gate, candidate" in page and "gate, champion" not in page, "there is nothing to show of it"
    assert "failed: 1 by infrastructure, 11 by policy" in terminal(rows[3])
    assert "Failed episodes" not in render(replace(sample_report(), iterations=[iteration_row(1)]))


def test_the_terminal_says_how_much_of_the_prompts_was_cached_where_it_is_known() -> None:
    row = iteration_row(3)
    assert "prefix cache" not in terminal(row)
    row["agents"]["solver"]["cached_prompt_share"] = 0.69
    assert "prompt tokens from the prefix cache: solver 69%" in terminal(row)


def terminal(row: dict[str, Any], *, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(iteration_table(row))
    return console.export_text()


def test_repeated_calls_are_shown_in_training_and_at_the_gate_with_the_key_to_raise() -> None:
    agents = {"solver": {"calls": 400.0, "attempts": 412.0}, "verifier": {"calls": 9.0, "attempts": 9.0}}
    assert repeated_calls(agents) == {"solver": 12} and repeated_calls({"solver": {"calls": 3.0}}) == {}
    row = iteration_row(1) | {"repeated": {"training": {"solver": 12}, "gate, candidate": {"verifier": 3}}}
    said = "repeated calls: 12 of solver (training), 3 of verifier (gate, candidate): a replica failed"
    page = read(render(replace(sample_report(), iterations=[row, iteration_row(2)])))
    assert f"Iteration 1, {said}" in page.text and "Iteration 2, repeated" not in page.text
    shown = terminal(row, width=300)
    assert said in shown and "collect.call.call_timeout_s" in shown


def test_missing_parts_and_numbers_are_left_out_never_drawn_as_zero() -> None:
    row = iteration_row(1)
    row["agents"]["solver"]["reward"] = float("nan")
    bare = {"iteration": 2, "metrics": {}, "agents": {}, "groups": {}, "funnel": {}, "seconds": {}, "evaluation": None}
    page = read(render(replace(sample_report(), headline={}, iterations=[row, bare])))
    reward = {line["name"]: line["y"] for line in page.figures[0]["data"]}
    assert "solver" not in reward
    assert reward["verifier"][1] is None
    assert read(render(ReportData(run_id="empty", headline={}, iterations=[]))).figures == []


def test_the_kl_of_the_update_is_what_was_measured_after_it() -> None:
    rows = [{"iteration": 1, "groups": {"g": {"train/approx_kl": 0.5, "train/kl_k3": 0.25}}}]
    figure = next(f for f in training(rows) if f.title == "KL of the update")
    assert figure.data[0]["y"] == [0.25]
    assert [f.title for f in other_metrics(rows)] == ["approx_kl"]


def test_the_overhead_is_what_neither_samples_nor_trains() -> None:
    seconds = {"collect": 10.0, "score": 1.0, "train": 5.0, "evaluate": 2.0, "total": 20.0}
    assert overhead_share({"iteration": 1, "seconds": seconds}) == 1 - 17 / 20
    assert overhead_share({"iteration": 1}) is None


def test_the_terminal_table_fits_in_100_columns_and_names_everything() -> None:
    text = terminal(iteration_row(6))
    assert max(len(line) for line in text.splitlines()) <= 100
    for part in ("finalizer", "refiner_finalizer", "tokens/s", "entropy", "logprob gap", "(max 4e-05)", "collect 11"):
        assert part in text, part
    assert len(text.splitlines()) <= 13


def collapsing_rows() -> list[dict[str, Any]]:
    """Eight iterations in which the solver's credit goes against the outcome."""
    return [
        {
            "iteration": k,
            "metrics": {"outcome": 0.4, "reward": 0.4},
            "agents": {"solver": {"credit_correlation": -0.5, "ratio": 1.0, "rows": 8.0}},
            "groups": {},
        }
        for k in range(1, 9)
    ]


def test_a_warning_is_in_the_page_and_in_the_terminal_with_what_to_try() -> None:
    rows = collapsing_rows()
    page = read(render(ReportData(run_id="r", headline={}, iterations=rows, warnings=latest_warnings(rows))))
    for part in ("hacking", "agent solver", "correlation -0.50", "a credit rule that pays what helps the team"):
        assert part in page.text, part
    assert "! hacking, agent solver, iteration 8" in terminal(rows[-1] | {"warnings": latest_warnings(rows)})


def test_a_run_that_learns_has_no_warnings() -> None:
    page = read(render(sample_report()))
    assert "All metrics are in their usual range." in page.text


def test_training_metrics_of_agents_have_charts_of_their_own_and_are_drawn_once() -> None:
    rows = collapsing_rows()
    titles = ["Ratio to the old policy (mean)", "Correlation of credit with outcome"]
    assert [f.title for f in training_of_agents(rows)] == titles
    assert [f.title for f in other_metrics(rows)] == ["rows, per agent", "outcome", "reward"]


def test_what_an_agent_chooses_has_charts_with_a_line_per_option_and_a_line_in_the_terminal() -> None:
    rows = [
        {
            "iteration": k,
            "agents": {
                "router": {"chosen/ask": 0.25, "chosen/stop": 0.75, "probability/ask": 0.5},
                "solver": {"rows": 2.0},
            },
        }
        for k in (1, 2)
    ]
    shown = choices(rows)
    assert [chart.title for chart in shown] == [
        "router: share of its choices",
        "router: mean probability where offered",
    ]
    assert [(line["name"], line["y"]) for line in shown[0].data] == [("ask", [0.25, 0.25]), ("stop", [0.75, 0.75])]
    assert [line["name"] for line in shown[1].data] == ["ask"]
    assert [chart.title for chart in other_metrics(rows)] == ["rows, per agent"]
    page = read(render(ReportData(run_id="r", headline={}, iterations=rows)))
    assert "Choices" in page.text and "router: share of its choices" in page.text
    assert "router chooses: stop 75%, ask 25%" in terminal(rows[0])


def test_a_value_between_two_gaps_has_a_marker_in_a_long_run_too() -> None:
    rows = [
        {"iteration": k, "metrics": {"stop/passed": 1.0, **({"stop/error": 0.1} if k in (1, 30) else {})}}
        for k in range(1, 100)
    ]
    (chart,) = learning(rows)
    assert {line["name"]: line["mode"] for line in chart.data} == {"passed": "lines", "error": "lines+markers"}


def test_parts_of_rewards_and_reasons_to_stop_have_a_chart_with_a_line_each() -> None:
    rows = [
        {
            "iteration": k,
            "agents": {"solver": {"reward": 0.6, "part/correct": 0.5, "part/format": 0.1, "tool/search": 1.5}},
            "metrics": {"stop/passed": 0.75, "stop/last_round": 0.25, "solved": 0.75},
        }
        for k in (1, 2)
    ]
    parts, tools = parts_of_rewards(rows)
    assert (tools.title, tools.data[0]["name"]) == ("solver: calls of tools per episode", "search")
    assert parts.title == "solver: parts of its reward"
    assert [(line["name"], line["y"]) for line in parts.data] == [("correct", [0.5, 0.5]), ("format", [0.1, 0.1])]
    ends = learning(rows)[-1]
    assert [(line["name"], line["y"]) for line in ends.data] == [("passed", [0.75, 0.75]), ("last_round", [0.25, 0.25])]
    assert learning([{**row, "metrics": {"stop/finished": 1.0}} for row in rows])[-1].title == "Reward"
    assert [chart.title for chart in other_metrics(rows)] == ["solved"]
    page = read(render(ReportData(run_id="r", headline={}, iterations=rows)))
    assert "Parts of rewards" in page.text and "Why episodes end" in page.text


def test_mlflow_gets_every_metric_by_group_and_agent_and_every_warning() -> None:
    summary = {
        "metrics": {"outcome": 0.5},
        "seconds": {"train": 2.0},
        "versions": {"g": 8},
        "groups": {"g": {"train/kl_k3": 0.1}},
        "trained_agents": {"g": {"solver": {"clip_share": 0.2}}},
        "agents": {"solver": {"reward": 0.3}},
        "warnings": latest_warnings(collapsing_rows()),
        "evaluation": None,
    }
    assert iteration_metrics(summary) == {
        "outcome": 0.5,
        "seconds/train": 2.0,
        "policy_version/g": 8.0,
        "train/g/kl_k3": 0.1,
        "train/g/solver/clip_share": 0.2,
        "agent/solver/reward": 0.3,
        "warnings/count": 1.0,
        "warnings/hacking/agent/solver/credit_correlation": 1.0,
    }


def test_an_agent_has_one_colour_also_where_another_has_no_figure() -> None:
    figures = {"solver": {"reward": 0.5}, "reviewer": {"reward": 0.2, "kl_k3": 0.1}}
    rows = [{"iteration": k, "agents": figures} for k in (1, 2)]
    lines = [line for chart in (*learning(rows), *training_of_agents(rows)) for line in chart.data]
    colours = {(line["name"], line["line"]["color"]) for line in lines}
    assert len(lines) == 3 and len(colours) == 2
