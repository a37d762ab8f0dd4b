"""Trains every algorithm on the same tasks, with the same seeds and budget of episodes, and compares what they learned.

    python -m tests.algorithms                               all comparisons
    python -m tests.algorithms --comparison credit --rows dr_mas broadcast_grpo --seeds 0
    python -m tests.algorithms --show                        the tables of what is done

Writes runs/algorithms/<comparison>/{table.md, report.json, plot.png}, for choices spending.md and costs.png, too. Engines and trainers stay up from row to row, the
warm start of a seed is shared, rows that are done are kept: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from pipelines.report.progress import Screen
from pipelines.stages.promote import git_commit
from tests.algorithms.plot import draw
from tests.algorithms.rows import COMPARISONS, ROOT, SEEDS, Comparison
from tests.algorithms.spending import draw_costs, spending_table
from tests.algorithms.table import against, figures, markdown, rich_table
from tests.algorithms.training import read_result, train_row

RUNS = ROOT / "runs" / "algorithms"
TITLES = {
    "family": "Math chain, one budget of episodes",
    "credit": "Counting house: who earned it?",
    "anchors": "Household: what is a turn compared with?",
    "choices_math": "Math chain: an orchestrator under a limit on tokens",
    "choices_search": "Search: an orchestrator under a limit on tokens",
    "papers_math": "Math chain: whom an agent is compared with, and which agents share weights",
    "papers_code": "Code: whom an agent is compared with, which agents share weights, how many rounds",
    "papers_search": "M-ASK: whom an agent is compared with, which agents share weights, how many rounds",
    "papers_verifier": "Solver and verifier: an answer alone, or checked once or twice",
    "overlap": "The demo: what does an iteration learn that was sampled one version earlier?",
}


def main() -> int:
    """Trains what is missing; the number of rows that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--comparison", choices=sorted(COMPARISONS), nargs="+", default=list(COMPARISONS))
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--show", action="store_true", help="train nothing")
    args = parser.parse_args()
    known = sorted({row for name in args.comparison for row in COMPARISONS[name].rows})
    if unknown := sorted(set(args.rows) - set(known)):
        parser.error(f"--rows {unknown[0]}: no such row in {', '.join(args.comparison)}; there are {', '.join(known)}")
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    failed: list[str] = []
    for name in args.comparison:
        comparison = COMPARISONS[name]
        rows = [row for row in comparison.rows if not args.rows or row in args.rows]
        if not args.show:
            failed += _train(comparison, rows, args.seeds, console)
        _report(comparison, args.seeds, console)
    if failed:
        print("failed:\n" + "\n".join(failed), file=sys.stderr)
    return len(failed)


def _train(comparison: Comparison, rows: Sequence[str], seeds: Sequence[int], console: Console) -> list[str]:
    """Seed by seed, so that a comparison that is stopped early has all rows of its first seeds."""
    from pipelines.cluster.connect import connect

    root = RUNS / comparison.name
    todo = [(row, seed) for seed in seeds for row in rows if read_result(comparison, row, seed, root=root) is None]
    if not todo:
        return []
    if comparison.is_of_one_model and len(todo) > 1:
        # Rows have other model groups, whose engines and trainers would stay beside those of the next row: each has a process of its own.
        command = [sys.executable, "-m", "tests.algorithms", "--comparison", comparison.name]
        each = [(f"{row}, seed {seed}", [*command, "--rows", row, "--seeds", str(seed)]) for row, seed in todo]
        return [f"{comparison.name}/{about}" for about, one in each if subprocess.run(one, check=False).returncode]
    connect("")
    screen = Screen(console)
    failed = []
    for number, (row, seed) in enumerate(todo, 1):
        console.rule(f"{comparison.name}: {row}, seed {seed} ({number} of {len(todo)})")
        began = time.monotonic()
        try:
            result = train_row(comparison, row, seed, root=root, screen=screen)
        except (ValueError, RuntimeError, TimeoutError) as error:  # one row that cannot train leaves the others alone
            failed.append(f"{comparison.name}/{row}, seed {seed}: {type(error).__name__}: {error}")
            console.print(failed[-1], markup=False)
            continue
        passed = time.monotonic() - began
        console.print(f"{row}, seed {seed}: {result['before']:.3f} -> {result['after']:.3f} in {passed:.0f} s")
    return failed


def _report(comparison: Comparison, seeds: Sequence[int], console: Console) -> None:
    root = RUNS / comparison.name
    results = {
        row: [one for seed in seeds if (one := read_result(comparison, row, seed, root=root)) is not None]
        for row in comparison.rows
    }
    found = figures(results)
    if not found:
        return
    gains = against(results, comparison.highlight)
    report = {
        "comparison": comparison.name,
        "seeds": list(seeds),
        "rows": found,
        f"over_{comparison.highlight}": {row: [gain.mean, *gain.ci95] for row, gain in gains.items()},
        "num_improved": sum(about["is_improved"] for about in found.values()),
        "commit": git_commit(),
        "cores": os.cpu_count(),
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "report.json").write_text(json.dumps(report, indent=2))
    (root / "table.md").write_text(markdown(found, gains, comparison.highlight))
    draw(found, reference=comparison.highlight, title=TITLES[comparison.name], out=root / "plot.png")
    console.print(rich_table(found, gains, comparison.highlight))
    if comparison.difficulty and comparison.highlight in found:
        config = comparison.row_config("", seed=seeds[0], root=root)
        table = spending_table(results, gains, config.promote, comparison.highlight)
        (root / "spending.md").write_text(table)
        console.print(table, markup=False, soft_wrap=True)
        if config.cost is not None:
            draw_costs(results, limit=config.cost.at_most, title=TITLES[comparison.name], out=root / "costs.png")
    console.print(f"{report['num_improved']} of {len(found)} improve with the interval away from 0; {root}/report.json")


if __name__ == "__main__":
    sys.exit(main())
