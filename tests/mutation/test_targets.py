"""The targets of mutation testing name modules and tests that are there."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.mutation.__main__ import PACKAGES, ROOT, _module_of, _row, _settings
from tests.mutation.targets import TARGETS, Target

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_modules_and_tests_of_a_target_are_there(target: Target) -> None:
    for pattern in target.sources:
        assert list(ROOT.glob(pattern)), pattern
        assert pattern.startswith(PACKAGES)
    for test in target.tests:
        assert (ROOT / test).exists(), test


def test_mutmut_reads_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "setup.cfg"
    path.write_text(_settings(TARGETS[0], ["train_loops/signal/losses.py", "train_loops/signal/kl.py"]))
    parser = ConfigParser()
    parser.read(path)
    assert parser.get("mutmut", "process_isolation") == "forkserver"
    assert parser.get("mutmut", "only_mutate").split() == ["train_loops/signal/losses.py", "train_loops/signal/kl.py"]
    assert parser.get("mutmut", "do_not_mutate_patterns").count("\n") == 5


def test_a_row_counts_what_was_noticed_of_what_was_tried() -> None:
    from collections import Counter

    counts = Counter({"killed": 7, "timeout": 1, "survived": 1, "no tests": 1, "not checked": 5, "skipped": 3})
    assert _row("m", counts) == "| `m` | 10 | 8 | 1 | 1 | 5 | 80.0% |"
    assert _module_of("stores.journal.journal.xǁJournalǁ_take__mutmut_3") == "stores.journal.journal"
    assert _module_of("train_loops.signal.losses.x_gspo__mutmut_12") == "train_loops.signal.losses"
