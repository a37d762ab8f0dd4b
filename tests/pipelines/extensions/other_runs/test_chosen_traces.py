"""A warm start on another run's traces: which are taken, which are left out, which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import MakeTrace

from pipelines.config.run_config import RunConfig, load_config
from pipelines.extensions.other_runs.chosen_traces import choose_traces, under_orchestrator
from pipelines.run.run import Run
from pipelines.stages.warmstart import _team, warmstart
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.episode.scripted import play_saying
from serve_apps.workflows.math_chain import MathChain
from stores.traces.store import TraceStore
from stores.types import FAMILY, EpisodeRewards, Purpose, Task, Trace
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"


class Other:
    """A run whose traces are chosen, and its model versions beside them."""

    def __init__(self, folder: Path, model: Path, make_trace: MakeTrace, make_rewards: Callable[..., Any]) -> None:
        self.uri, self.make_trace, self.make_rewards = str(folder / "traces"), make_trace, make_rewards
        self.store = TraceStore(self.uri)
        self.store.create()
        self.commit(model, "team")

    def commit(self, model: Path, group: str) -> None:
        """Stores version 0 of a model group."""
        WeightStore(str(Path(self.uri).with_name("weights"))).commit(
            model,
            model_group=group,
            version=0,
            parent=None,
            run_id="other",
            iteration=0,
            probe=Probe(sequences=(), logprobs=()),
        )

    def play(
        self,
        prompt: str,
        outcome: float,
        *,
        purpose: Purpose = Purpose.TRAIN,
        family: str | None = None,
        verifier: str = "team",
    ) -> Trace:
        """Stores an episode of two turns that was paid `outcome`; `verifier` is the model group of that agent."""
        trace: Trace = self.make_trace(run_id="other", purpose=purpose)
        ids = {"prompt_token_ids": (5, 6, 7), "completion_token_ids": (8, 2), "rollout_logprobs": (-0.5, -0.5)}
        trace = replace(
            trace,
            episode_id=f"{len(prompt)}{prompt}{purpose}",
            task=Task(task_id="t", prompt=prompt, answers=("5",), metadata={FAMILY: family}),
            policy_versions={"team": 0, verifier: 0},
            turns=tuple(
                replace(turn, model_group=verifier if turn.agent == "verifier" else "team", **ids)
                for turn in trace.turns
            ),
        )
        rewards: EpisodeRewards = self.make_rewards(trace, outcome=outcome)
        self.store.write_episodes([trace])
        self.store.write_rewards([rewards])
        return trace


@pytest.fixture
def other(tmp_path: Path, tiny_model: Path, make_trace: MakeTrace, make_rewards: Callable[..., Any]) -> Other:
    return Other(tmp_path / "other", tiny_model, make_trace, make_rewards)


def learner(other: Other, folder: Path, model: Path, *, count: int = 4, **choice: Any) -> Run:
    """A run that starts from `model` and the other run's traces; it holds out the tasks "held out" and "reported", each of a family."""
    for section, prompt in {"gate": "held out", "test": "reported"}.items():
        row = {"question": prompt, "answer": "5", FAMILY: f"family of {prompt}"}
        (folder / f"{section}.jsonl").write_text(json.dumps(row))
    warm = {"traces": {"uri": other.uri, "run": "other", **choice}, "num_demonstrations": count, "num_epochs": 1}
    changes = {
        "storage.root": str(folder),
        "warmstart": warm,
        "model_groups.team.model": str(model),
        "tasks.gate": {"path": str(folder / "gate.jsonl")},
        "tasks.test": {"path": str(folder / "test.jsonl")},
    }
    return Run(load_config(SMALL, changes))


def chosen(run: Run) -> set[str]:
    settings = run.config.warmstart
    assert settings is not None and settings.traces is not None
    folders = {group: Path(g.model) for group, g in run.config.model_groups.items()}
    traces = choose_traces(run, settings.traces, count=settings.num_demonstrations, folders=folders)
    return {trace.task.prompt for trace in traces}


def test_training_episodes_that_went_well_are_taken_however_many_others_there_are(
    other: Other, tiny_model: Path, tmp_path: Path
) -> None:
    for number in range(6):
        other.play(f"bad {number}", 0.0)
    for purpose in (Purpose.GATE, Purpose.TEST, Purpose.AD_HOC):
        other.play(f"played as {purpose}", 1.0, purpose=purpose)
    for prompt in ("held out", "reported", "good", "good, too"):
        other.play(prompt, 1.0)
    assert chosen(learner(other, tmp_path, tiny_model)) == {"good", "good, too"}
    assert len(chosen(learner(other, tmp_path, tiny_model, count=1))) == 1


def test_where_only_held_out_tasks_went_well_there_is_nothing_to_start_from(
    other: Other, tiny_model: Path, tmp_path: Path
) -> None:
    other.play("held out", 1.0)
    with pytest.raises(ValueError, match=r"no training episode of run 'other' .* \(1 are left out, .*tasks\.gate"):
        chosen(learner(other, tmp_path, tiny_model))


def test_a_variant_of_a_held_out_task_is_held_out(other: Other, tiny_model: Path, tmp_path: Path) -> None:
    other.play("held out, in other words", 1.0, family="family of held out")
    other.play("another problem", 1.0, family="family of others")
    assert chosen(learner(other, tmp_path, tiny_model)) == {"another problem"}


def test_token_ids_of_another_or_an_unknown_tokenizer_are_refused(
    other: Other, tiny_model: Path, tmp_path: Path
) -> None:
    other.play("good", 1.0)
    mine = shutil.copytree(tiny_model, tmp_path / "mine")
    tokenizer = json.loads((mine / "tokenizer.json").read_text())
    (mine / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": None}))
    assert chosen(learner(other, tmp_path, mine)) == {"good"}, "written otherwise, the same ids"
    tokenizer["added_tokens"][-1]["content"] = "<other>"
    (mine / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError, match=r"ids of the tokenizer in .*/v0, model group 'team' starts from .*another one"
    ):
        chosen(learner(other, tmp_path, mine))
    with pytest.raises(ValueError, match=r"elsewhere holds none .*: set warmstart\.traces\.weights"):
        chosen(learner(other, tmp_path, tiny_model, weights=str(tmp_path / "elsewhere")))


def test_a_warm_start_learns_the_chosen_traces(other: Other, tiny_model: Path, tmp_path: Path) -> None:
    other.play("good", 1.0)
    run = learner(other, tmp_path, tiny_model)
    metrics = warmstart(run).metrics
    assert metrics["team/warmstart/completion_tokens"] == 2 * 2
    assert run.weights.manifest(run.trained(0)["team"]).note == "warm start"


def test_turns_of_an_agent_that_another_group_plays_here_are_refused(
    other: Other, tiny_model: Path, tmp_path: Path
) -> None:
    trace = other.play("good", 1.0, verifier="checkers")
    assert [turn.agent for turn in trace.turns] == ["solver", "verifier"]
    data = learner(other, tmp_path, tiny_model).config.model_dump(mode="json", exclude_unset=True)
    of = data["model_groups"]["team"] | {
        "agents": [a for a in data["model_groups"]["team"]["agents"] if a != "verifier"]
    }

    def begun(team: list[str], checkers: list[str]) -> Run:
        groups = {name: of | {"agents": agents} for name, agents in (("team", team), ("checkers", checkers))}
        return Run(RunConfig.model_validate(data | {"model_groups": groups}))

    left = [agent for agent in of["agents"] if agent != "solver"]
    other.commit(tiny_model, "checkers")
    run = begun(["verifier", *left], ["solver"])
    with pytest.raises(
        ValueError, match=r"agent 'solver' belongs to model group 'team' in run 'other' and to 'checkers' here"
    ):
        warmstart(run)
    metrics = warmstart(begun(["solver", *left], ["verifier"])).metrics
    assert metrics["checkers/warmstart/completion_tokens"] == 2


TEAM = {
    "path": "serve_apps.extensions.orchestration.orchestrated:Orchestrated",
    "settings": {
        "team": {"path": "serve_apps.workflows.math_chain:MathChain"},
        "steps": {"solve": {"agent": "solver"}, "check": {"agent": "verifier", "needs": ["answer"]}},
    },
}
SAYS = {
    "solver": "<SOLUTION>2+3=5</SOLUTION><ANSWER>5</ANSWER>",
    "verifier": "<STATUS>correct</STATUS><ERROR_TYPE>none</ERROR_TYPE><FEEDBACK>keep it</FEEDBACK>",
    "refiner": "<REFINED_SOLUTION>2+3=5</REFINED_SOLUTION><ANSWER>5</ANSWER>",
    "finalizer": "<FINAL_SOLUTION>2+3=5</FINAL_SOLUTION><FINAL_ANSWER>5</FINAL_ANSWER>",
}


def store_math_chain(other: Other, model: Path, *, count: int) -> None:
    """Stores episodes of the math chain that went well, in the tokens of `model`."""
    tokenizer = ChatTokenizer(model)
    for number in range(count):
        task = Task(task_id=f"t{number}", prompt=f"{number}+{number}*1", answers=("5",))
        played = play_saying(MathChain(), task, lambda call: SAYS[call.agent], tokenizer=tokenizer)
        assert played.answer == "5", played.error
        turns = tuple(replace(turn, model_group="team") for turn in played.turns)
        trace = replace(played, run_id="other", policy_versions={"team": 0}, turns=turns)
        other.store.write_episodes([trace])
        other.store.write_rewards([other.make_rewards(trace, outcome=1.0)])


def orchestrated(other: Other, folder: Path, model: Path, groups: dict[str, list[str]], **choice: Any) -> Run:
    run = learner(other, folder, model, count=8, **choice)
    steps: dict[str, Any] = json.loads(json.dumps(TEAM))
    data = run.config.model_dump(mode="json", exclude_unset=True)
    data |= {"workflow": steps, "agents": {}}
    data["credit"] = {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "math"}}
    data["model_groups"] = {group: {"model": str(model), "agents": agents} for group, agents in groups.items()}
    return Run(RunConfig.model_validate(data))


def test_an_orchestrator_learns_the_order_in_which_the_agents_of_another_run_acted(
    other: Other, tiny_model: Path, tmp_path: Path
) -> None:
    store_math_chain(other, tiny_model, count=3)
    groups = {"router": ["orchestrator"], "team": ["solver", "verifier"]}
    run = orchestrated(other, tmp_path, tiny_model, groups, other_choices=0.0)
    assert warmstart(run).metrics["router/warmstart/completion_tokens"] == 3 * 2, (
        "check, stop; the first step is the only one"
    )


def test_a_share_of_what_an_orchestrator_learns_is_another_option(
    other: Other, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_math_chain(other, tiny_model, count=3)
    bad = other.play("without calls", 1.0)
    run = orchestrated(other, tmp_path, tiny_model, {"team": ["orchestrator", "solver", "verifier"]})
    settings = run.config.warmstart
    assert settings is not None and settings.traces is not None
    team, traces = _team(run, {"team": tiny_model}, None), list(other.store.find_traces(run_id="other"))

    def learned(share: float, among: list[Trace]) -> list[tuple[str, tuple[int, ...]]]:
        choice = settings.traces.model_copy(update={"other_choices": share})  # type: ignore[union-attr]
        played = under_orchestrator(among, team, choice, run_id="new", seed=3)
        return [(turn.agent, tuple(turn.completion_token_ids)) for trace in played for turn in trace.turns]

    exact, mixed = learned(0.0, traces), learned(0.5, traces)
    assert (
        "1 of 4 episodes cannot be played by the orchestrator's steps" in caplog.text and bad.episode_id in caplog.text
    )
    differing = [agent for (agent, ids), (_, other_ids) in zip(exact, mixed, strict=True) if ids != other_ids]
    assert 0 < len(differing) < 6 and set(differing) == {"orchestrator"}
    assert mixed == learned(0.5, traces)
    with pytest.raises(
        ValueError, match=r"can make none of the 1 chosen episodes of run 'other'; .*change workflow\.settings\.steps"
    ):
        learned(0.0, [trace for trace in traces if trace.episode_id == bad.episode_id])
