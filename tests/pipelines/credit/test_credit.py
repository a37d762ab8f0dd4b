"""Credit rules: golden numbers, and what score_trace refuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from by_hand import chain, paid, refuse_unknown_agent, trace

from pipelines.config.sections import DottedConfig
from pipelines.credit.math_final_answer import MathFinalAnswer
from pipelines.credit.math_progress import MathProgress
from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.posted_score import PostedScore
from pipelines.credit.rule import (
    Credit,
    CreditRule,
    caller_credit,
    credit_version,
    load_credit,
    score_trace,
    score_traces,
    turn_reward,
)
from stores.settings import NotNegative
from stores.types import SERVED, Cause, EpisodeStatus, Trace

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
FINAL = DottedConfig(path="pipelines.credit.math_final_answer:MathFinalAnswer")


def test_final_answer_pays_every_turn_the_accuracy_plus_its_own_format() -> None:
    """UnityMAS-O's math allocator: R = acc + 1.0 * (0 | -1) for each of the four agents."""
    right = MathFinalAnswer().assign_credit(trace(chain("104", "55", "55", bad_format=["verifier"]), answer="55"))
    assert right.outcome == 1.0
    assert [r.reward for r in right.rewards] == [1.0, 0.0, 1.0, 1.0]
    wrong = MathFinalAnswer(format_weight=0.5).assign_credit(
        trace(chain("55", "55", "54", bad_format=["solver"]), answer="54")
    )
    assert wrong.outcome == 0.0
    assert [r.reward for r in wrong.rewards] == [-0.5, 0.0, 0.0, 0.0]
    assert wrong.rewards[0].breakdown == {"accuracy": 0.0, "format": -0.5}


@pytest.mark.parametrize(
    ("answers", "progress"),
    [
        (("55", "55", "55"), [1, 0, 0, 0]),
        (("104", "55", "55"), [0, 0, 1, 0]),
        (("55", "104", "55"), [1, 0, -1, 1]),
        (("55", "55", ""), [1, 0, 0, -1]),
        (("", "55", "104"), [0, 0, 1, -1]),
        (("104", "", "104"), [0, 0, 0, 0]),
    ],
)
def test_progress_pays_the_change_of_correctness_and_adds_up_to_the_accuracy(
    answers: tuple[str, str, str], progress: list[float]
) -> None:
    episode = trace(chain(*answers, bad_format=["refiner"]), answer=answers[-1])
    credit = MathProgress(format_weight=0.25).assign_credit(episode)
    assert [r.breakdown["progress"] for r in credit.rewards] == progress
    assert sum(r.breakdown["progress"] for r in credit.rewards) == credit.outcome
    assert [r.reward - p for r, p in zip(credit.rewards, progress, strict=True)] == [0, 0, -0.25, 0]


@pytest.mark.parametrize("rule", [MathFinalAnswer(), MathProgress()])
def test_a_truncated_episode_pays_only_the_turns_that_happened(rule: MathFinalAnswer | MathProgress) -> None:
    cut = trace(chain("55", "55", "55")[:2], status=EpisodeStatus.TRUNCATED)
    scored = score_trace(rule, cut, version="v")
    assert [r.agent for r in scored.rewards] == ["solver", "verifier"]
    assert scored.outcome == 0.0
    assert score_trace(rule, replace(cut, turns=()), version="v").rewards == ()


@pytest.mark.parametrize("status", ["timeout", "agent_error", "tool_error", "infra_error"])
def test_an_episode_that_is_neither_ok_nor_truncated_is_refused_not_paid_zero(status: str) -> None:
    with pytest.raises(
        ValueError, match=f"is {status}, caused by .*: it is no outcome of the policy and is not scored"
    ):
        score_trace(MathFinalAnswer(), trace([], status=EpisodeStatus(status)), version="v")


@pytest.mark.parametrize(
    ("rule", "rewards"),
    [(MathFinalAnswer(format_weight=0.25), [0, 0, -0.25, 0]), (MathProgress(format_weight=0.25), [1, 0, -0.25, -1])],
)
def test_an_episode_that_the_policy_caused_to_fail_gets_the_worst_outcome_and_its_turns_their_format(
    rule: MathFinalAnswer | MathProgress, rewards: list[float]
) -> None:
    turns = chain("55", "55", "55", bad_format=["refiner"])
    failed = trace(turns, answer="55", status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    scored = score_trace(rule, failed, version="v")
    assert (scored.outcome, [r.reward for r in scored.rewards]) == (0.0, rewards), "never better than to be wrong"


class _AboveTheMean:
    kind = "returns"

    def assign_credit(self, episode: Trace) -> Credit:
        raise AssertionError("it compares episodes")

    def assign_all(self, episodes: Sequence[Trace]) -> list[Credit]:
        mean = sum(len(episode.answer) for episode in episodes) / len(episodes)
        return [Credit(outcome=len(episode.answer) - mean, rewards=()) for episode in episodes]


def test_a_rule_that_compares_episodes_is_not_asked_about_none() -> None:
    failed = trace(chain("55", "55", "55"), answer="", status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    assert score_trace(_AboveTheMean(), failed, version="v").outcome == 0.0
    assert score_traces(_AboveTheMean(), [], version="v") == []


class _Pays:
    kind = "returns"

    def __init__(self, positions: Sequence[int], value: float = 1.0) -> None:
        self.positions, self.value = positions, value

    def assign_credit(self, episode: Trace) -> Credit:
        other = trace(chain("1", "1", "1"))
        return Credit(outcome=1.0, rewards=tuple(turn_reward(other, i, {"x": self.value}) for i in self.positions))


QA = [("decomposer", {}), ("answerer", {"_bad": "x"})]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({}, [1.0, 0.0]),
        ({"share": "split"}, [0.5, -0.5]),
        ({"format_weight": 0.1}, [1.0, 0.9]),
        ({"sharing": ["answerer"]}, [0.0, 0.0]),
        ({"share": "split", "sharing": ["answerer"], "format_weight": 0}, [0.0, 1.0]),
    ],
)
def test_outcome_is_shared_in_full_or_split(settings: dict[str, Any], rewards: list[float]) -> None:
    rule = OutcomeShare(metric="em", **settings)
    assert list(paid(rule, trace(QA, answers=("The Red Town!",), answer="red town")).values()) == rewards


def test_progress_follows_time_and_not_the_order_in_which_turns_are_stored() -> None:
    episode = trace([("solver", {"answer": "55"}), ("refiner", {"answer": "1"})], answer="1")
    stored = replace(episode, turns=tuple(reversed(episode.turns)))
    assert paid(MathProgress(), stored) == paid(MathProgress(), episode) == {"solver_0": 1.0, "refiner_0": -1.0}


def test_rules_that_pay_what_cannot_be_are_caught() -> None:
    cut = trace(chain("55", "55", "55")[:2], answer="55")
    with pytest.raises(ValueError, match="pays turn 3 of finalizer"):
        score_trace(_Pays([3]), cut, version="v")
    with pytest.raises(ValueError, match=r"pays turn 1 .* twice"):
        score_trace(_Pays([1, 1]), cut, version="v")
    with pytest.raises(ValueError, match="not a finite number"):
        score_trace(_Pays([0], float("nan")), cut, version="v")


class Slips:
    """Looks for a second turn, whatever the model wrote."""

    kind = "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        return Credit(outcome=float(len(trace.turns[99].completion_text)), rewards=())


class Forgets(Slips):
    """Returns nothing."""

    def assign_credit(self, trace: Trace) -> Credit:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            Slips(),
            r"rule Slips fails on episode .* \(IndexError: tuple index out of range, test_credit\.py line \d+\): it must",
        ),
        (Forgets(), r"rule Forgets gives episode .* None: return a Credit"),
    ],
)
def test_a_bug_of_a_rule_is_named_with_rule_episode_and_line(rule: CreditRule, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        score_trace(rule, trace(chain("55", "55", "55"), answer="55"), version="v")


@pytest.mark.parametrize(
    ("reference", "is_read"),
    [
        ("The result is 14.", False),
        ("14", True),
        ("14 apples", True),
        (r"x \text{ is greater than all of } 5", True),
        ("north of Rome", True),
    ],
)
def test_a_sentence_around_a_number_is_a_reference_that_mathematics_cannot_read(reference: str, is_read: bool) -> None:
    assert (OutcomeShare(metric="math").reads(reference), MathFinalAnswer().reads(reference)) == (is_read, is_read)
    assert OutcomeShare(metric="f1").reads(reference)


def test_a_rule_is_loaded_by_path_and_settings() -> None:
    rule = load_credit(FINAL.model_copy(update={"settings": {"format_weight": 0.2}}))
    assert isinstance(rule, MathFinalAnswer)
    assert rule.format_weight == 0.2


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("no.such.module:Rule", {}, r"credit\.path: cannot import 'no\.such\.module'"),
        ("pipelines.credit.math_final_answer:MathFinalAnser", {}, r"credit\.path: .*has no 'MathFinalAnser'"),
        ("pipelines.tasks.sources:load_tasks", {}, r"credit\.path: .*must be a credit rule"),
        ("pipelines.credit.math_final_answer:MathFinalAnswer", {"weight": 1}, r"credit\.settings: .*'weight'"),
        (
            "pipelines.credit.math_final_answer:MathFinalAnswer",
            {"format_weight": -1},
            r"settings\.format_weight: .*or equal to 0",
        ),
        (
            "pipelines.credit.math_final_answer:MathFinalAnswer",
            {"format_weight": "0.1"},
            r"settings\.format_weight: .*number",
        ),
        (
            "pipelines.credit.math_final_answer:MathFinalAnswer",
            {"format_weight": None},
            r"settings\.format_weight: .*number",
        ),
        (
            "pipelines.credit.step_rewards:StepRewards",
            {"environment": "home", "planner_share": 1.5},
            r"settings\.planner_share: .*or equal to 1",
        ),
    ],
)
def test_a_rule_that_cannot_be_loaded_is_one_clear_message(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_credit(DottedConfig(path=path, settings=settings))


def test_settings_that_name_an_agent_which_the_run_has_not_are_refused() -> None:
    refuse_unknown_agent("pipelines.credit.outcome:OutcomeShare", {"sharing": ["nobody"]}, "sharing.0")


@pytest.mark.parametrize("file", sorted(ROOT.glob("pipelines/**/*credit/*.py")), ids=lambda file: file.stem)
def test_no_rule_pays_for_a_format_that_is_wrong(file: Path) -> None:
    module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    rules = [rule for rule in vars(module).values() if isinstance(rule, type) and rule.__module__ == module.__name__]
    for rule in rules:
        hints = get_type_hints(rule.__init__, include_extras=True)  # type: ignore[misc]
        assert hints.get("format_weight", NotNegative) == NotNegative, rule


def test_the_credit_version_changes_with_settings_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert credit_version(FINAL) == credit_version(FINAL)
    assert credit_version(FINAL) != credit_version(FINAL.model_copy(update={"settings": {"format_weight": 0.2}}))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "my_rule.py"
    module.write_text("class Rule:\n    kind = 'returns'\n    def assign_credit(self, trace): ...\n")
    mine = DottedConfig(path="my_rule:Rule")
    before = credit_version(mine)
    module.write_text(module.read_text() + "    # another reward\n")
    assert credit_version(mine) != before


@pytest.mark.parametrize(
    ("used", "call"),
    [
        ("from judges.judge import judge", "judge()"),
        ("from judges import judge", "judge.judge()"),
        ("import judges.judge", "judges.judge.judge()"),
        ("import judges.judge as j", "j.judge()"),
        ("from judges.judge import cached", "cached()"),
        ("from judges.judge import Judge", "Judge().judge()"),
        ("from judges.judge import THE_JUDGE", "THE_JUDGE.judge()"),
    ],
)
def test_the_credit_version_changes_with_a_judge_however_it_is_used(
    used: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "__init__.py").write_text("")
    rule = f"{used}\nclass Rule:\n    kind = 'returns'\n    def assign_credit(self, trace):\n        return {call}\n"
    (tmp_path / "judges" / "rule.py").write_text(rule)
    judge = tmp_path / "judges" / "judge.py"
    judge.write_text(
        "from functools import lru_cache\ndef judge(): return 0\n@lru_cache\ndef cached(): return 0\n"
        "class Judge:\n    def judge(self): return 0\nTHE_JUDGE = Judge()\n"
    )
    (tmp_path / "judges" / "flow.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = DottedConfig(path="judges.rule:Rule")
    for name in ("judges", "judges.rule", "judges.judge", "judges.flow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = credit_version(mine)
    import_module("judges.flow")
    assert credit_version(mine) == before, "another process may have loaded more of the package"
    judge.write_text(judge.read_text().replace("0", "1"))
    assert credit_version(mine) != before


def test_a_posted_score_is_paid_to_every_turn_with_its_format() -> None:
    episode = replace(trace(chain("1", "1", "1", bad_format=["verifier"])[:2]), outcome_metadata={"score": 0.75})
    credit = PostedScore(format_weight=0.25).assign_credit(episode)
    assert credit.outcome == 0.75
    assert [r.breakdown for r in credit.rewards] == [{"score": 0.75, "format": 0}, {"score": 0.75, "format": -0.25}]
    assert [(r.turn_index, r.reward) for r in credit.rewards] == [(0, 0.75), (1, 0.5)]
    assert [r.reward for r in PostedScore().assign_credit(episode).rewards] == [0.75, 0.75], "formats cost nothing"
    cut = replace(episode, outcome_metadata={}, status=EpisodeStatus.TRUNCATED)
    assert [r.reward for r in PostedScore().assign_credit(cut).rewards] == [0, 0]
    unscored = replace(cut, outcome_metadata={"score": None})
    assert PostedScore().assign_credit(unscored).outcome == 0, "a program that posts null has posted no score"
    with pytest.raises(ValueError, match=r"ended without a score: have the program post it"):
        PostedScore().assign_credit(replace(cut, status=EpisodeStatus.OK))


@pytest.mark.parametrize(("rule", "rewards"), [(MathFinalAnswer(), [0.75, 0.75, 0.75]), (MathProgress(), [0, 0, 0.75])])
def test_a_callers_judgement_is_paid_once_however_it_is_counted(rule: CreditRule, rewards: list[float]) -> None:
    episode = trace(chain("1", "1", "1")[:3])
    credit = caller_credit(rule, episode, 0.5)
    assert (credit.outcome, [r.reward for r in credit.rewards]) == (0.75, rewards)
    assert [r.breakdown for r in credit.rewards] == [{"caller": reward} for reward in rewards]
    assert caller_credit(rule, episode, -1.0).outcome == 0


def test_of_increments_the_last_turn_that_is_paid_gets_the_outcome() -> None:
    rule = MathProgress()
    rule.pays = lambda agent: agent != "finalizer"  # type: ignore[attr-defined]
    served = replace(trace(chain("1", "1", "1")), outcome_metadata={SERVED: {"score": 0.5}})
    assert [r.reward for r in score_trace(rule, served, version="v").rewards] == [0, 0, 0.75]
