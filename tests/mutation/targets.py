"""targets: which modules are mutated, and the tests that ought to notice."""

from __future__ import annotations

from dataclasses import dataclass

SLOW_OF_JOURNAL = "not race and not killed and not stopped_beating and not heartbeats and not holder and not passes_on"
"""Tests that start processes, or wait for a lease to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Some modules and their own tests."""

    name: str
    sources: tuple[str, ...]
    """Paths of modules, or patterns of them."""
    tests: tuple[str, ...]
    tier: str = "fast"
    chosen: str = ""
    """The tests that are played, as `pytest -k` has it; empty: all of the tier."""


TARGETS = (
    Target(
        name="losses",
        sources=("train_loops/signal/losses.py", "train_loops/signal/kl.py"),
        tests=("tests/train_loops/signal/test_losses.py", "tests/train_loops/test_loss_cuts.py"),
    ),
    Target(
        name="advantages",
        sources=("train_loops/advantages/*.py", "train_loops/extensions/paper_estimators/*.py"),
        tests=(
            "tests/train_loops/test_advantages.py",
            "tests/train_loops/extensions/paper_estimators",
            "tests/train_loops/test_gae.py",
        ),
    ),
    Target(
        name="rows",
        sources=("train_loops/rows/samples.py", "train_loops/signal/baselines.py"),
        tests=("tests/train_loops/rows/test_rows.py", "tests/train_loops/signal/test_baselines.py"),
    ),
    Target(
        name="mismatch",
        sources=("train_loops/signal/mismatch.py",),
        tests=("tests/train_loops/signal/test_mismatch.py",),
    ),
    Target(
        name="batching",
        sources=("train_loops/rows/batching.py",),
        tests=("tests/train_loops/rows/test_batching.py", "tests/train_loops/rows/test_merging.py"),
    ),
    Target(
        name="evaluation",
        sources=("pipelines/evaluation/*.py",),
        tests=("tests/pipelines/evaluation",),
    ),
    Target(name="credit", sources=("pipelines/credit/*.py",), tests=("tests/pipelines/credit",)),
    Target(
        name="journal",
        sources=("stores/journal/journal.py",),
        tests=("tests/stores/journal/test_journal.py",),
        tier="test",
        chosen=SLOW_OF_JOURNAL,
    ),
    Target(
        name="traces",
        sources=("stores/traces/store.py", "stores/traces/[lrtu]*.py"),
        tests=(
            "tests/stores/traces/test_traces.py",
            "tests/stores/traces/test_tables.py",
            "tests/stores/traces/test_upkeep.py",
            "tests/stores/test_damaged_tables.py",
        ),
        tier="test",
        chosen="not processes and not mount and not full_disk",
    ),
)
