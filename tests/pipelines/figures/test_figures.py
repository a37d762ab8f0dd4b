"""One figure is one object: every section of the config, the gateway and the checks read it, and a user's own opens by its path."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from records import MakeTrace

from pipelines.config.run_config import RunConfig, load_config
from pipelines.config.sections import GuardsConfig, TrafficGuardsConfig
from pipelines.evaluation.guards import check_guards
from pipelines.figures.figure import Figure
from pipelines.figures.registry import FIGURES, figure_of, figures_of, with_own
from pipelines.stages.score import _own_figures
from serve_apps.gateway.traffic.figures import NAMES
from stores.types import EpisodeRewards, Trace

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "names",
    [GuardsConfig.DEFAULTS, TrafficGuardsConfig.DEFAULTS, NAMES],
    ids=["promote.guards", "traffic.guards", "gateway"],
)
def test_every_figure_that_is_compared_is_in_the_table(names: list[str]) -> None:
    assert set(names) <= FIGURES.keys()


def test_a_guard_that_can_be_set_can_be_measured() -> None:
    assert all(FIGURES[name].of_episode is not None for name in GuardsConfig.DEFAULTS)
    assert set(NAMES) == TrafficGuardsConfig.DEFAULTS.keys()


def test_the_sections_have_the_defaults_of_the_figures() -> None:
    assert GuardsConfig().model_dump() == {
        "format_share": 0.05, "refusal_share": 0.05, "completion_tokens": 0.5, "turns": 0.5, "tool_calls": 0.5,
        "world_steps": None, "latency_s": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        GuardsConfig(turns=-1)


def test_shares_are_compared_by_difference_and_a_figure_of_an_agent_is_that_of_the_team() -> None:
    shares = {name: figure.compared_by for name, figure in FIGURES.items() if name.endswith("_share")}
    del shares["clip_share"]  # a jump to a multiple is what counts
    assert len(shares) > 5 and set(shares.values()) == {"difference"}
    assert figure_of("entropy/solver") is FIGURES["entropy"]
    with pytest.raises(KeyError):
        figure_of("cheer")


def test_a_change_is_judged_by_its_whole_interval() -> None:
    tokens, format_share = FIGURES["completion_tokens"], FIGURES["format_share"]
    assert (tokens.limit(0.5), format_share.limit(0.05)) == (1.5, -0.05)
    assert [tokens.state(low, high, 1.5) for low, high in ((1, 1.5), (1, 1.6), (1.6, 2))] == [
        "holds",
        "unclear",
        "broken",
    ]
    assert [format_share.state(low, high, -0.05) for low, high in ((0, 1), (-0.1, 0), (-1, -0.1))] == [
        "holds", "unclear", "broken",
    ]  # fmt: skip
    assert tokens.words(1.984, 1.911, 2.052, 1.5) == "completion_tokens x1.98 [1.91, 2.05], at most x1.50"
    assert format_share.words(0.1, -0.1, 0.3, -0.05) == "format_share +0.100 [-0.100, +0.300], at least -0.050"


def test_an_amount_that_must_not_fall_may_fall_by_the_margin(make_trace: MakeTrace) -> None:
    words = Figure(
        name="words",
        meaning="",
        worse="lower",
        changed="",
        compared_by="ratio",
        guard=0.2,
        of_episode=lambda trace: float(len(trace.answer.split())),
    )
    old, new = ([make_trace(i, answer="word " * num * (2 + i % 3)) for i in range(80)] for num in (10, 9))
    off = GuardsConfig(**dict.fromkeys(GuardsConfig.DEFAULTS))

    def state(new: list[Trace], old: list[Trace]) -> str:
        (found,) = check_guards(new, old, config=off, figures={"words": words})
        assert found.limit == 0.8
        return found.state

    assert (state(old, old), state(new, old), state(old, new)) == ("holds", "holds", "holds")
    halved = [replace(trace, answer="word " * (len(trace.answer.split()) // 2)) for trace in old]
    assert state(halved, old) == "broken"


OWN = """
from pipelines.figures.figure import Figure

politeness = Figure(
    name="politeness",
    meaning="share of answers that say please",
    worse="lower",
    changed="fewer answers say please",
    of_episode=lambda trace: float("please" in trace.answer),
    floor=0.1,
)
paid = Figure(name="payment", meaning="", worse="lower", changed="")
payment = paid
empty = Figure(name="empty", meaning="", worse="lower", changed="")
rich = Figure(name="rich", meaning="", worse="lower", changed="", of_rewards=lambda rewards: rewards.outcome, guard=0.1)
richer = Figure(name="richer", meaning="", worse="lower", changed="", of_rewards=lambda rewards: rewards.outcome)
endless = Figure(name="endless", meaning="", worse="higher", changed="", compared_by="ratio", of_episode=lambda trace: 0.0)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `polite` of a user's own."""
    file = tmp_path / "polite.py"
    file.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "polite", raising=False)
    return file


DEMO = Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml"


def config(**keys: Any) -> RunConfig:
    return load_config(DEMO, keys)


def test_a_figure_of_ones_own_is_a_guard(own: Path, make_trace: MakeTrace) -> None:
    parsed = config(**{"evaluate.figures": ["polite:politeness"], "promote.guards": {"politeness": 0.1}})
    old, new = ([make_trace(i, answer=said) for i in range(40)] for said in ("42, please", "42"))
    figures = with_own(parsed.evaluate.figures)
    broken = check_guards(new, old, config=parsed.promote.guards, figures=figures)
    assert [(g.figure.name, g.state) for g in broken if g.state != "holds"] == [("politeness", "broken")]
    assert str(broken[-1]).startswith("politeness -1.000 [")


def test_a_limit_of_ones_own_figure_identifies_a_run() -> None:
    named = {"evaluate.figures": ["polite:politeness"]}
    one, two = (config(**named, **{"promote.guards": {"politeness": margin}}).sha256 for margin in (0.1, 0.2))
    assert len({one, two, config().sha256}) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"promote.guards": {"politeness": 0.1}},
            r"unknown key 'promote\.guards\.politeness'; there are .*evaluate\.figures",
        ),
        ({"promote.guards": {"turn": 0.1}}, r"unknown key 'promote\.guards\.turn': did you mean 'turns'\?"),
        (
            {"traffic.guards": {"cut_shares": 0.1}},
            r"unknown key 'traffic\.guards\.cut_shares': did you mean 'cut_share'\?",
        ),
        ({"evaluate.figures": ["polite.politeness"]}, r"evaluate\.figures\.0: 'polite\.politeness' is not of the form"),
        ({"evaluate.figures": ["polite:turns"]}, r"evaluate\.figures\.0: there is a figure or metric 'turns' already"),
        ({"evaluate.figures": ["polite:reward"]}, r"there is a figure or metric 'reward' already: rename yours"),
    ],
)
def test_what_is_no_figure_is_refused_where_the_config_is_read(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**keys)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("impolite:politeness", r"evaluate\.figures\.0: cannot import 'impolite'"),
        ("polite:rudeness", r"evaluate\.figures\.0: .*polite\.py.* has no 'rudeness'"),
        ("polite:number", r"evaluate\.figures\.0: 'polite:number' is .*Figure"),
        ("polite:payment", None),
        ("polite:paid", r"'polite:paid' has the name 'payment'"),
        ("polite:empty", r"'polite:empty' has no value of an episode"),
        ("polite:endless", r"evaluate\.figures\.0: 'polite:endless' is compared by its ratio and has no `least`"),
    ],
)
def test_a_path_that_leads_to_no_figure_is_refused_with_the_fix(own: Path, path: str, message: str | None) -> None:
    with pytest.raises(ValueError, match=message or r"has no value of an episode"):
        with_own([path])


def test_a_ratio_of_rewards_has_a_least_value_and_none_below_zero(
    own: Path, make_trace: MakeTrace, make_rewards: Callable[..., EpisodeRewards]
) -> None:
    figure = 'Figure(name="{0}", meaning="m", worse="lower", changed="c", compared_by="ratio"{1}, of_rewards=lambda r: r.outcome)'
    own.write_text(f"{OWN}\nbare = {figure.format('bare', '')}\nearned = {figure.format('earned', ', least=0.1')}\n")
    with pytest.raises(ValueError, match=r"'polite:bare' is compared by its ratio and has no `least`"):
        with_own(["polite:bare"])
    trace, figures = make_trace(), with_own(["polite:earned"])
    assert figures_of(trace, make_rewards(trace, outcome=0.0), figures=figures)["earned"] == 0.0
    with pytest.raises(ValueError, match=r'figure earned of an episode is -0\.3, .* compared_by="difference"'):
        figures_of(trace, make_rewards(trace, outcome=-0.3), figures=figures)


def test_a_guard_needs_a_value_of_the_episode(own: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'polite:rich' cannot be a guard, because .*no rewards: give it `of_episode`"
    ):
        with_own(["polite:rich"])
    assert "richer" in with_own(["polite:richer"])
    with pytest.raises(ValueError, match=r"'polite:richer' cannot be a guard, .*drop .*promote\.guards\.richer"):
        with_own(["polite:richer"], guards={"richer": 0.1})


@pytest.mark.parametrize("name", ["copy", "json", "schema", "of"])
def test_a_figure_may_be_called_as_a_method_of_the_section(name: str) -> None:
    assert GuardsConfig().of(name, 0.3) == 0.3
    assert GuardsConfig.model_validate({name: 0.1}).of(name) == 0.1


def test_a_module_that_loads_a_heavy_library_is_refused_with_its_file(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own.parent / "torch.py").write_text("")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    own.write_text(f"import torch\n{OWN}")
    with pytest.raises(ValueError, match=r"polite\.py\) loads torch"):
        with_own(["polite:politeness"])
    sys.modules.pop("torch", None)  # what other tests import is the library


def test_a_value_that_is_missing_is_no_number(make_trace: MakeTrace) -> None:
    """NaN says that an episode has no value: it counts in no mean."""
    trace = make_trace()
    assert "world_steps" not in figures_of(trace)
    assert FIGURES["world_steps"].of_episode(trace) == 0, "who does not act takes no steps"  # type: ignore[misc]
    ended = replace(trace, turns=(), tool_calls=())
    assert math.isnan(FIGURES["format_share"].of_episode(ended))  # type: ignore[misc]
    assert FIGURES["completion_tokens"].of_episode(ended) == 0, "it counts in the guard as it did"  # type: ignore[misc]
    assert "completion_tokens" not in figures_of(ended) and figures_of(ended)["turns"] == 0


def test_a_value_that_is_no_number_is_refused_by_the_name_of_its_figure(make_trace: MakeTrace) -> None:
    numpys = Figure(name="numpys", meaning="", worse="lower", changed="", of_episode=lambda trace: np.float32(0.5))
    assert type(figures_of(make_trace(0), figures={"numpys": numpys})["numpys"]) is float
    nothing: Any = Figure(name="nothing", meaning="", worse="lower", changed="", of_episode=lambda trace: None)
    with pytest.raises(
        ValueError, match=r"figure nothing of an episode is no number: .*; return nan where there is none"
    ):
        figures_of(make_trace(0), figures={"nothing": nothing})
    off = GuardsConfig(**dict.fromkeys(GuardsConfig.DEFAULTS), nothing=0.1)
    with pytest.raises(ValueError, match=r"figure nothing of an episode is no number"):
        check_guards([make_trace(0)], [make_trace(0)], config=off, figures={"nothing": nothing})


def test_the_means_of_ones_own_figures_are_part_of_the_scored_iteration(own: Path, make_trace: MakeTrace) -> None:
    run: Any = SimpleNamespace(figures=with_own(["polite:politeness"]))
    traces = [make_trace(i, answer="please" if i else "") for i in range(4)]
    assert _own_figures(run, traces, []) == {"politeness": 0.75}
    run.figures = FIGURES
    assert _own_figures(run, traces, []) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_a_figure_that_is_infinite_is_named(make_trace: MakeTrace, value: float) -> None:
    endless = Figure(name="endless", meaning="", worse="higher", changed="", guard=1.0, of_episode=lambda trace: value)
    traces = [make_trace(i) for i in range(20)]
    wanted = f"figure endless of an episode is {value}: return a finite number, or nan where there is none"
    with pytest.raises(ValueError, match=wanted):
        check_guards(traces, traces, config=GuardsConfig(), figures={"endless": endless})
    with pytest.raises(ValueError, match=wanted):
        figures_of(traces[0], figures={"endless": endless})
