"""An estimator of a user's own: opened by its path, checked where the config is parsed, and trained with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chained_samples import sample
from pydantic import ValidationError

from stores.by_name import check_extension
from train_loops.config import TrainConfig
from train_loops.signal.figures import row_figures
from train_loops.signal.learning_signal import learning_signal

pytestmark = pytest.mark.fast

OWN = """
import numpy as np
from train_loops.estimators import Estimator

def halved(rows, settings):
    return rows.scores / 2

def per_token(rows, settings):
    return [np.arange(length) for length in rows.lengths]

def short(rows, settings):
    return rows.scores[:-1]

def square(rows, settings):
    return np.zeros((len(rows.scores), 7, 2))

def infinite(rows, settings):
    return np.full(len(rows.scores), np.inf)

def nothing(rows, settings):
    pass

def lazy(rows, settings):
    return (score for score in rows.scores)

def ragged(rows, settings):
    return [[1.0, [2.0, 3.0]] for _ in rows.scores]

def words(rows, settings):
    return ["high" for _ in rows.scores]

def wrong(rows, settings):
    return {}["x"]

grouped = Estimator(function=halved, compares="turns", figures=lambda rows, settings: {"train/seen": len(rows.scores)})
numpys = Estimator(function=halved, figures=lambda rows, settings: {"train/seen": np.float32(len(rows.scores))})
worded = Estimator(function=halved, figures=lambda rows, settings: {"train/seen": "two"})
unnamed = Estimator(function=halved, figures=lambda rows, settings: [1.0])
unmeasured = Estimator(function=halved, figures=lambda rows, settings: None)
failing = Estimator(function=halved, figures=wrong)
taken = Estimator(function=halved, figures=lambda rows, settings: {"train/rows": 7})
elsewhere = Estimator(function="own_estimators:nosuch")
figureless = Estimator(function=halved, figures="own_estimators:nosuch")
numbered = Estimator(function=3)
without = Estimator(compares="turns")
uncalled = Estimator(function=halved, critic="model_group")
gredy = Estimator(function=halved, variants="gredy")
episode = Estimator(function=halved, compares="episode")
Halved = Estimator
number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_estimators.py").write_text(OWN)
    (tmp_path / "heavy_estimators.py").write_text("import torch\ndef mine(rows, settings): ...")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_estimators", None)


def signal(algorithm: str, rewards: tuple[float, ...] = (1.0, 0.5)) -> tuple[list[list[float]], dict[str, float]]:
    samples = [replace(sample(f"e{i}", 0, [1, 2], [3, 4, 5]), reward=reward) for i, reward in enumerate(rewards)]
    old = [np.zeros(s.completion_length) for s in samples]
    config = TrainConfig(algorithm=algorithm)
    made = learning_signal(samples, {"old": old}, config=config, credit_kind="returns", beta=0.0, team=None)
    return [list(map(float, row)) for row in made.advantages], dict(made.metrics)


def test_a_function_in_a_users_folder_is_trained_with() -> None:
    assert signal("own_estimators:halved")[0] == [[0.5] * 3, [0.25] * 3]
    assert signal("own_estimators:per_token")[0] == [[0.0, 1.0, 2.0]] * 2


def test_an_estimator_that_declares_what_it_needs_has_it_checked() -> None:
    config = TrainConfig.model_validate({"algorithm": "own_estimators:grouped", "advantage": {"group_by": "task"}})
    assert config.estimator.compares == "turns"
    assert signal("own_estimators:grouped")[1] == {"train/seen": 2}
    assert type(signal("own_estimators:numpys")[1]["train/seen"]) is float, "as JSON has it"
    with pytest.raises(ValueError, match=r"train\.algorithm: figures of the estimator are .*'two'"):
        signal("own_estimators:worded")
    with pytest.raises(ValidationError, match="algorithm 'own_estimators:halved' compares no groups"):
        TrainConfig.model_validate({"algorithm": "own_estimators:halved", "advantage": {"group_by": "task"}})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("dr_mass", r"no estimator of this name: did you mean 'dr_mas'\?"),
        ("no_such:mine", "cannot import 'no_such'"),
        (
            "own_estimators:other",
            r"'own_estimators' \(.*own_estimators\.py\) has no 'other'; it has np, Estimator, halved",
        ),
        ("own_estimators:number", r"is of type int, and must be a function of \(rows, settings\)"),
        ("own_estimators:Halved", r"is the class Estimator, and must be a function of \(rows, settings\)"),
        ("own_estimators:without", r"is of type Estimator, and must be .*an Estimator with one"),
        (
            "own_estimators:uncalled",
            "critic='model_group': .*the function of your own would not be called: drop `critic`",
        ),
        ("own_estimators:elsewhere", r"function: 'own_estimators' .* has no 'nosuch'"),
        ("own_estimators:figureless", r"figures: 'own_estimators' .* has no 'nosuch'"),
        ("own_estimators:numbered", r"function=3: give a function of \(rows, settings\)"),
        ("own_estimators:gredy", "variants='gredy': allowed are '', 'greedy', 'counterfactual', 'leave_one_out'"),
        ("own_estimators:episode", "compares='episode': allowed are '', 'turns', 'episodes'"),
    ],
)
def test_what_is_no_estimator_is_refused_where_the_config_is_parsed(algorithm: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(algorithm=algorithm)


def test_what_an_extension_holds_is_named_and_missed_where_it_is_not_installed() -> None:
    assert TrainConfig(algorithm="opo").extensions == {"train_loops.extensions.paper_estimators"}
    mixed = TrainConfig.model_validate({"algorithm": "dr_mas", "team": {"mixer": "vdn"}})
    assert mixed.extensions == TrainConfig(algorithm="mappo").extensions == {"train_loops.extensions.whole_team"}
    assert not TrainConfig(algorithm="grpo").extensions
    with pytest.raises(
        ValueError, match=r"here: the extension 'absent' is not installed.*put train_loops/extensions/absent/ back"
    ):
        check_extension("train_loops.extensions.absent", place="here")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "own_estimators:short gives 1 advantages for 2 rows"),
        ("square", r"gives row 0 advantages of shape \(7, 2\): it has 3 completion tokens"),
        ("infinite", "own_estimators:infinite gives row 0 an advantage that is not finite"),
        ("nothing", "own_estimators:nothing gives None: give a list of 2 advantages"),
        ("lazy", "own_estimators:lazy gives <generator .*: give a list of 2 advantages"),
        ("ragged", r"own_estimators:ragged gives row 0 \[1\.0, \[2\.0, 3\.0\]\]: give one number"),
        ("words", "own_estimators:words gives row 0 'high': give one number"),
        ("wrong", r"train\.algorithm: wrong fails \(KeyError: 'x', own_estimators\.py line \d+\)"),
        ("failing", r"train\.algorithm: wrong fails \(KeyError: 'x', own_estimators\.py line \d+\)"),
        ("unnamed", r"figures of the estimator are \[1\.0\], and must be a dict of numbers by their names"),
        ("unmeasured", "figures of the estimator are None, and must be a dict of numbers"),
    ],
)
def test_what_an_estimator_gives_is_checked(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        signal(f"own_estimators:{name}")


def test_an_estimator_that_loads_torch_is_refused_where_configs_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="cannot import 'heavy_estimators'"):
        TrainConfig(algorithm="heavy_estimators:mine")


def test_a_figure_of_ones_own_does_not_replace_another_one() -> None:
    samples = [sample("e", 0, [1, 2], [3, 4, 5])]
    scores, config = {"old": [np.zeros(3)]}, TrainConfig(algorithm="own_estimators:taken")
    made = learning_signal(samples, scores, config=config, credit_kind="returns", beta=0.0, team=None)
    with pytest.raises(ValueError, match="a figure of the estimator has the name of another one, train/rows"):
        row_figures(samples, scores, made, np.array([True]))
