"""The decision about an iteration, without engines: looks, cross-play, guards, and what is promoted. Stores are real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace
from stage_records import call, finish
from tiers import each_push

from pipelines.config.run_config import load_config
from pipelines.episodes.sampling import Pass, Sampled
from pipelines.evaluation import played as played_module
from pipelines.run.run import Run, plain
from pipelines.runners.schedule import champion_accuracy
from pipelines.stages import evaluate
from pipelines.stages.promote import promote
from serve_apps.episode_spec import EpisodeSpec
from stores.journal.stage_results import Decided, Evaluated
from stores.types import Cause, EpisodeStatus, ModelVersionRef, Task, Trace

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}

FAILED = {"status": EpisodeStatus.AGENT_ERROR, "stop_reason": "workflow_raised"}

Solves = Callable[[int, dict[str, int]], bool]
"""Whether a team of these versions solves the task of this number."""


class Scene:
    """A run whose champion is version 1 of both groups and whose iteration 1 trained version 2 of both."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, make_trace: MakeTrace, solves: Solves, **changes: Any
    ) -> None:
        config: dict[str, Any] = {
            "storage.root": str(folder),
            "model_groups": GROUPS,
            "tasks.gate.count": 240,
            "evaluate.every": 1,
        }
        # a+1*1 is a problem of its own; a+b*c and a+c*b would be one family.
        config["tasks.gate.generator.settings"] = {"max_a": 2500, "max_factor": 1}
        self.run = Run(load_config(SMALL, {**config, "evaluate.bootstrap_samples": 500, **changes}))
        self.run.open()
        self.made, self.solves = make_trace, solves
        self.number = {task.task_id: i for i, task in enumerate(self.run.tasks("gate"))}
        self.played: dict[tuple[int, ...], int] = {}
        """Episodes per team that really were played."""
        self.longer: dict[int, int] = {}
        """Times the tokens of a turn, by version of group a."""
        self.escapes: dict[int, Cause] = {}
        """How every other lost episode ends instead, by version of group a."""
        refs = {g: {v: self.ref(g, v) for v in (1, 2)} for g in GROUPS}
        self.set_champion(5, 1)
        monkeypatch.setattr(self.run, "trained", lambda iteration: {g: refs[g][2] for g in GROUPS}, raising=False)
        monkeypatch.setattr(evaluate, "serve", lambda run, models: None)
        monkeypatch.setattr(played_module, "serve", lambda run, models: None)
        monkeypatch.setattr(played_module, "sample_episodes", self.sample)
        self.registered: list[dict[str, int]] = []
        self.evaluations: list[Any] = []
        self.run.__dict__["registry"] = SimpleNamespace(
            register=self.register, set_alias=lambda *_: None, remove_alias=lambda *_: None
        )

    def set_champion(self, team_version: int, version: int) -> None:
        """Makes a version of both groups the champion."""
        champion = {"team_version": team_version, "models": {g: plain(self.ref(g, version)) for g in GROUPS}}
        self.run.journal.put_value(self.run.run_id, "champion", champion)

    def ref(self, group: str, version: int) -> ModelVersionRef:
        return ModelVersionRef(
            model_group=group, version=version, uri=f"{group}/{version}", manifest_sha256=f"{version}"
        )

    def register(self, name: str, team: Any, *, code: Path) -> int:
        self.registered.append({group: ref.version for group, ref in team.models.items()})
        self.evaluations.append(team.evaluation)
        return 6

    def sample(self, tasks: Sequence[Task], of: Pass, **more: Any) -> Sampled:
        where, team_spec, store, seed = of.where, of.team_spec, of.store, of.seed
        traces: list[Trace] = []
        for task in tasks:
            spec = EpisodeSpec(**where, task=task, episode_index=0, run_seed=seed)
            is_solved = self.solves(self.number[task.task_id], team_spec.policy_versions)
            answer = task.answers[0] if is_solved else "no idea"
            version = team_spec.policy_versions["a"]
            ends = {} if is_solved or version not in self.escapes or self.number[task.task_id] % 2 else FAILED
            made = self.made(**where, **ends, cause=self.escapes[version]) if ends else self.made(**where)
            made = replace(made, episode_id=spec.episode_id, task=task, answer=answer)
            times = self.longer.get(version, 1)
            turns = tuple(replace(t, completion_token_ids=[7] * 10 * times, rollout_logprobs=[-1.0] * 10 * times)
                          for t in made.turns)  # fmt: skip
            traces.append(replace(made, turns=turns))
        key = tuple(version for _, version in sorted(team_spec.policy_versions.items()))
        self.played[key] = self.played.get(key, 0) + store.write_episodes(traces)
        ids = {trace.episode_id for trace in traces}
        counts = dict.fromkeys(("num_new", "num_kept", "num_tokens"), 0)
        pinned = store.pin_episodes(**where)
        assert pinned.num_episodes == len(ids)
        return Sampled(traces=pinned, groups=(), statuses={}, sampling_seconds=0.0, seconds=0.0, stopped_by=None,
                       tasks_left=(), **counts)  # fmt: skip

    def decide(self, between: Callable[[], None] = lambda: None) -> tuple[Evaluated, Decided]:
        """The report and what promote made of it. Args: between: what happens between the two stages."""
        report = evaluate.evaluate(call(self.run, "evaluate", 1, models=self.run.trained(1)))
        finish(self.run, 1, report)
        between()
        return report, promote(call(self.run, "promote", 1, models=self.run.trained(1)))

    def champion(self) -> dict[str, int]:
        return {group: ref.version for group, ref in self.run.champion().items()}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trace: MakeTrace) -> Callable[..., Scene]:
    return lambda solves, **changes: Scene(tmp_path, monkeypatch, make_trace, solves, **changes)


def a_helps_b_hurts(number: int, versions: dict[str, int]) -> bool:
    chance = 5 + 3 * (versions["a"] - 1) - 4 * (versions["b"] - 1)
    return number * 7 % 10 < chance


def test_a_group_that_hurts_holds_the_other_back_without_cross_play_and_not_with_it(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    together = scene(a_helps_b_hurts)
    report, decision = together.decide()
    assert (report.verdict, decision.verdict, report.promotes) == ("reject", "reject", ())
    assert together.champion() == {"a": 1, "b": 1} and together.registered == [{"a": 2, "b": 2}]


@pytest.mark.nightly
def test_with_cross_play_only_the_group_that_helps_is_promoted(scene: Callable[..., Scene]) -> None:
    apart = scene(a_helps_b_hurts, **{"promote.cross_play": True})
    del apart.run.__dict__["registry"]  # the real one: MLflow takes the report, too
    report, decision = apart.decide()
    assert report.promotes == ("a",) and report.condition.startswith("new a: gain +0.3")
    assert [("".join(contender["groups"]), contender["verdict"]) for contender in report.contenders or ()] == [
        ("ab", "reject"),
        ("a", "promote"),
        ("b", "reject"),
    ]
    assert decision.verdict == "promote" and apart.champion() == {"a": 2, "b": 1}
    (registered,) = apart.run.registry.versions(apart.run.team_name)
    assert registered.policy_versions == {"a": 2, "b": 1} and registered.aliases == ("candidate", "champion")
    assert apart.played == {(1, 1): 240, (2, 2): 240, (2, 1): 240, (1, 2): 240}


def test_a_mix_is_of_the_champion_that_was_played_though_another_one_is_champion_by_now(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = scene(a_helps_b_hurts, **{"promote.cross_play": True})
    monkeypatch.setattr(apart.run.weights, "ref", apart.ref)
    report, decision = apart.decide(between=lambda: apart.set_champion(9, 3))
    assert (report.verdict, decision.verdict) == ("promote", "inconclusive")
    assert apart.registered == [{"a": 2, "b": 1}] and apart.champion() == {"a": 3, "b": 3}
    assert decision.condition.endswith(
        "the champion is no longer the one that it was compared with: {'a': 1, 'b': 1} then, {'a': 3, 'b': 3} now"
    )


def test_a_mixed_team_is_registered_with_its_own_score_which_the_schedule_sees(scene: Callable[..., Scene]) -> None:
    apart = scene(a_helps_b_hurts, **{"promote.cross_play": True})
    report, decision = apart.decide()
    finish(apart.run, 1, decision)
    assert report.candidate is not None and report.candidate.accuracy == pytest.approx(0.4, abs=0.03)
    (kept,) = apart.evaluations
    assert kept["accuracy"] == pytest.approx(0.8, abs=0.03) == champion_accuracy(apart.run)
    assert kept["policy_versions"] == apart.registered[0] == {"a": 2, "b": 1} and "promoted" not in kept


def test_the_evaluation_grows_until_the_gate_is_sure_and_no_further(scene: Callable[..., Scene]) -> None:
    better = scene(
        lambda number, versions: number % 10 < 3 + 5 * (versions["a"] - 1), **{"evaluate.tasks_per_look": 40}
    )
    report, _ = better.decide()
    assert report.verdict == "promote" and report.num_looks is not None and report.num_looks < 6
    assert better.played == dict.fromkeys([(1, 1), (2, 2)], 40 * report.num_looks)
    assert report.candidate is not None and report.candidate.num_tasks == 40 * report.num_looks
    assert report.num_unpaired == 0


def test_a_floor_that_the_first_tasks_miss_by_chance_does_not_end_the_looks(scene: Callable[..., Scene]) -> None:
    failing: set[int] = set()
    unlucky = scene(
        lambda number, versions: number not in failing if versions["a"] == 2 else number % 10 < 5,
        **{"evaluate.tasks_per_look": 40},
    )
    first = [unlucky.number[task.task_id] for task in evaluate.decision_tasks(unlucky.run, 1)[:40]]
    failing.update([number for number in first if number % 2 == 0][:6])
    unlucky.escapes = {2: Cause.POLICY}
    report, _ = unlucky.decide()
    assert report.num_looks is not None and report.num_looks > 1, report.condition
    assert report.verdict == "promote", report.condition


def test_what_stays_open_when_all_tasks_are_played_is_inconclusive(scene: Callable[..., Scene]) -> None:
    alike = scene(lambda number, versions: (number + versions["a"]) % 2 == 0, **{"evaluate.tasks_per_look": 100})
    report, decision = alike.decide()
    assert (report.verdict, report.num_looks) == ("inconclusive", 3), "looks after 100, 200 and 240 tasks"
    assert decision.verdict == "inconclusive" and alike.champion() == {"a": 1, "b": 1}


def test_a_candidate_that_doubles_its_length_is_rejected_whatever_it_gains(scene: Callable[..., Scene]) -> None:
    hacker = scene(lambda number, versions: number % 10 < 3 + 5 * (versions["a"] - 1))
    hacker.longer = {2: 2}
    report, _ = hacker.decide()
    assert report.verdict == "reject"
    assert report.condition == "guard completion_tokens x2.00 [2.00, 2.00], at most x1.50"
    assert report.guards is not None
    assert report.guards["completion_tokens"]["state"] == "broken" and report.guards["turns"]["state"] == "holds"


@pytest.mark.parametrize("cause", each_push([cause for cause in Cause if cause], [Cause.INFRASTRUCTURE]))
@pytest.mark.parametrize("changes", [{}, {"evaluate.tasks_per_look": 80}])
def test_an_equal_candidate_that_fails_instead_of_losing_is_not_promoted_and_both_figures_are_kept(
    scene: Callable[..., Scene], cause: Cause, changes: dict[str, Any]
) -> None:
    alone = {"promote.min_ok_share": 0.0, "promote.guards": {"refusal_share": None}}
    fleeing = scene(lambda number, versions: number % 10 < 5, **alone, **changes)
    fleeing.escapes = {2: cause}
    report, decision = fleeing.decide()
    assert report.verdict != "promote" and decision.verdict != "promote" and fleeing.champion() == {"a": 1, "b": 1}
    assert report.candidate is not None and report.candidate.causes is not None and report.gain is not None
    num_escaped = report.candidate.causes[cause.value]
    assert num_escaped > 0 and report.candidate.causes[
        "sound"
    ] == report.candidate.num_tasks + report.candidate.num_failed - (num_escaped)
    if cause is Cause.POLICY:
        assert (
            report.bound is None and report.gain.mean == 0.0 and report.num_missing == {"candidate": 0, "champion": 0}
        )
    else:
        assert report.bound is not None and report.bound.mean == 0.0
        assert report.num_missing == {"candidate": num_escaped, "champion": 0} and report.num_unpaired == num_escaped


def test_the_exact_test_decides_where_it_is_asked_for(scene: Callable[..., Scene]) -> None:
    from scipy.stats import binomtest

    exact = scene(lambda number, versions: number % 10 < 3 + 2 * (versions["a"] - 1), **{"evaluate.test": "mcnemar"})
    report, _ = exact.decide()
    assert report.verdict == "promote" and report.gain is not None and report.gain.mean == pytest.approx(0.2)
    won = 48  # of 48 tasks that differ: the lower bound of the share won is (1/40)^(1/48)
    differ = binomtest(won, 240).proportion_ci(confidence_level=0.95, method="exact").low
    assert report.gain.low == pytest.approx(differ * (2 * 0.025 ** (1 / won) - 1), abs=1e-6)


OWN_TEST = """
import numpy as np

from pipelines.evaluation.statistics import Interval, paired_differences


def hoeffding(candidate, champion, how):
    gains = paired_differences(candidate, champion)
    mean, half = float(gains.mean()), float(np.sqrt(2 * np.log(2 / (1 - how.confidence)) / len(gains)))
    return Interval(mean=mean, low=mean - half, high=mean + half, num_tasks=len(gains))


def upside_down(candidate, champion, how):
    return Interval(mean=0.0, low=1.0, high=-1.0, num_tasks=len(candidate))


number = 3
"""


@pytest.fixture
def own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_gate_test.py").write_text(OWN_TEST)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(("gained", "verdict"), [(2, "promote"), (1, "inconclusive")])
def test_a_test_of_the_users_own_folder_decides(
    scene: Callable[..., Scene], own_test: None, gained: int, verdict: str
) -> None:
    half = math.sqrt(2 * math.log(40) / 240)  # of 240 differences in [-1, 1], at 95%
    own = scene(
        lambda number, versions: number % 10 < 3 + gained * (versions["a"] - 1),
        **{"evaluate.test": "own_gate_test:hoeffding"},
    )
    report, _ = own.decide()
    assert report.verdict == verdict and report.gain is not None
    assert (report.gain.low, report.gain.high) == pytest.approx((gained / 10 - half, gained / 10 + half))


def test_what_is_no_test_of_the_gate_is_named(scene: Callable[..., Scene], own_test: None) -> None:
    for changes, fault in (
        ({"evaluate.test": "own_gate_test:number"}, r"is .*int.*must be a function \(candidate, champion, how\)"),
        ({"evaluate.test": "own_gate_test:hofding"}, "has no 'hofding'"),
        ({"evaluate.test": "macnemar"}, "no test of this name: there are auto, mcnemar"),
        (
            {"evaluate.test": "own_gate_test:hoeffding", "evaluate.tasks_per_look": 20},
            "own_gate_test:hoeffding is for a fixed number of tasks",
        ),
    ):
        with pytest.raises(ValueError, match=fault):
            load_config(SMALL, changes)
    with pytest.raises(ValueError, match=r"evaluate\.test: own_gate_test:upside_down returned .*low <= mean <= high"):
        scene(lambda number, versions: number % 2 == 0, **{"evaluate.test": "own_gate_test:upside_down"}).decide()


def test_what_promotions_may_have_lost_is_taken_off_the_margin_of_the_next_one(scene: Callable[..., Scene]) -> None:
    alike = scene(lambda number, versions: number % 10 < 5, **{"promote.non_inferiority": 0.03})
    champion: dict[str, float | None] = {"margin_spent": None}
    alike.run.registry.load = lambda name, alias: (5, SimpleNamespace(evaluation=champion))

    def evaluated() -> Evaluated:
        return evaluate.evaluate(call(alike.run, "evaluate", 1, models=alike.run.trained(1)))

    first = evaluated()
    assert first.verdict == "promote" and first.gain is not None
    assert first.margin_spent == pytest.approx(-first.gain.low) == pytest.approx(1 - 0.025 ** (1 / 240))
    champion["margin_spent"] = first.margin_spent
    second = evaluated()
    assert (second.verdict, second.margin_spent) == ("inconclusive", None)
    assert "-non_inferiority -0.015 lies inside the interval" in second.condition


def test_a_source_with_too_few_tasks_is_said_to_have_too_few(scene: Callable[..., Scene], tmp_path: Path) -> None:
    better = scene(
        lambda number, versions: number % 10 < 3 + 5 * (versions["a"] - 1), **{"promote.max_source_loss": 0.1}
    )
    gate = better.run.tasks("gate")
    # The two teams are equal on these 8: neither solves them.
    few = [replace(task, source="few") if i < 40 and i % 10 > 7 else task for i, task in enumerate(gate)]
    better.run.tasks = lambda section: few if section == "gate" else gate  # type: ignore[method-assign]
    report = evaluate.evaluate(call(better.run, "evaluate", 1, models=better.run.trained(1)))
    assert report.verdict == "inconclusive"
    assert "but not sure of source 'few'" in report.condition and "so few tasks cannot show less" in report.condition


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("evaluate.tasks_per_look", ("reject", "source 'rare' loses")),
        ("evaluate.tasks_per_decision", ("inconclusive", "not sure of source 'rare': +0.000 [-inf, +inf] on 0 tasks")),
    ],
)
def test_a_source_of_which_no_task_was_played_yet_holds_a_promotion_back(
    scene: Callable[..., Scene], key: str, expected: tuple[str, str]
) -> None:
    """The first 80 tasks had none of it, and a team that loses all of it was promoted."""
    rare: set[int] = set()

    def solves(number: int, versions: dict[str, int]) -> bool:
        return versions["a"] == 1 if number in rare else number % 10 < 3 + 5 * (versions["a"] - 1)

    better = scene(solves, **{"promote.max_source_loss": 0.1, key: 80})
    played = {task.task_id for task in evaluate.decision_tasks(better.run, 1)[:80]}
    gate = [task if task.task_id in played else replace(task, source="rare") for task in better.run.tasks("gate")]
    rare |= {number for number, task in enumerate(gate) if task.source == "rare"}
    better.run.tasks = lambda section: gate  # type: ignore[method-assign]
    report = evaluate.evaluate(call(better.run, "evaluate", 1, models=better.run.trained(1)))
    assert report.verdict == expected[0] and expected[1] in report.condition
