"""Drafts around a collect, on replicas that answer by hand: who is taught, what is counted, and that nothing here ends a stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import collected

from pipelines.episodes import drafts
from pipelines.episodes.drafts import Drafts
from serve_apps.policy.wire import WireCompletion

pytestmark = pytest.mark.fast

APPS = {"a": "app-a", "b": "app-b"}


class Replicas:
    """Stands in for `Broadcast` over all apps: app -> replica -> its answer."""

    def __init__(self) -> None:
        self.of_app: dict[str, dict[str, dict[str, Any]]] = {}
        self.taught: dict[str, list[WireCompletion]] = {}
        self.is_down = False

    def __call__(self, app: str, method: str, *arguments: Any) -> SimpleNamespace:
        def answers(num_replicas: int) -> list[Any]:
            assert num_replicas == 2
            if self.is_down:
                raise TimeoutError(f"replicas of {app} do not answer")
            if method == "learn_drafts":
                self.taught[app] = arguments[0]
                return [None, None]
            return [{"replica_id": name, **answer} for name, answer in self.of_app[app].items()]

        return SimpleNamespace(answers=answers)


def counts(steps: int, kept: int) -> dict[str, dict[str, int]]:
    return {"solver": {"steps": steps, "sampled": steps + kept, "drafted": 2 * kept, "kept": kept}}


def turn(group: str, agent: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        model_group=group, agent=agent, prompt_token_ids=list(range(20)), completion_token_ids=tokens
    )


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    made = Replicas()
    monkeypatch.setattr(drafts, "Broadcast", made)
    monkeypatch.setattr(drafts, "app_names", lambda run: APPS)
    return made


def run_with(*groups: str) -> Any:
    trace = SimpleNamespace(
        task=SimpleNamespace(task_id="t1"), turns=[turn("a", "solver", [7, 8]), turn("b", "other", [9])]
    )
    return SimpleNamespace(
        config=SimpleNamespace(
            model_groups=dict.fromkeys(APPS),
            serve_config=lambda group: SimpleNamespace(
                speculation=object() if group in groups else None, num_replicas=2
            ),
        ),
        iteration=lambda number: SimpleNamespace(find=lambda kind: collected() if number == 1 else None),
        traces=SimpleNamespace(read_traces=lambda ref: [trace]),
    )


def test_without_speculation_nobody_is_asked(replicas: Replicas) -> None:
    replicas.is_down = True
    assert Drafts(run_with(), 2).gained() is None


def test_an_app_with_a_new_replica_is_taught_the_completions_of_its_groups(replicas: Replicas) -> None:
    known, new = {"num_positions": 900, "agents": counts(10, 5)}, {"num_positions": 0, "agents": {}}
    replicas.of_app = {"app-a": {"r1": known, "r2": new}, "app-b": {"r3": known, "r4": known}}
    Drafts(run_with("a", "b"), 2)
    assert replicas.taught == {"app-a": [WireCompletion("solver", "t1", [*range(12, 20), 7, 8], 8)]}


def test_the_first_iteration_teaches_nothing(replicas: Replicas) -> None:
    replicas.of_app = {"app-a": {name: {"num_positions": 0, "agents": {}} for name in ("r1", "r2")}}
    Drafts(run_with("a"), 1)
    assert replicas.taught == {}


def test_counts_are_those_of_this_pass_and_a_replica_that_started_meanwhile_counts_from_its_start(
    replicas: Replicas,
) -> None:
    replicas.of_app = {
        "app-a": {
            "r1": {"num_positions": 9, "agents": counts(100, 40)},
            "r2": {"num_positions": 9, "agents": counts(80, 30)},
        }
    }
    passed = Drafts(run_with("a"), 3)
    replicas.of_app["app-a"] = {
        "r1": {"num_positions": 9, "agents": counts(150, 60)},
        "r9": {"num_positions": 9, "agents": counts(7, 3)},
    }
    assert passed.gained() == counts(57, 23)


def test_replicas_that_do_not_answer_end_no_stage(replicas: Replicas, caplog: pytest.LogCaptureFixture) -> None:
    replicas.is_down = True
    assert Drafts(run_with("a"), 2).gained() is None
    assert "do not answer" in caplog.text


def test_without_counts_from_before_nothing_is_said_of_a_pass(replicas: Replicas) -> None:
    replicas.is_down = True
    passed = Drafts(run_with("a"), 2)
    replicas.is_down = False
    replicas.of_app = {"app-a": {"r1": {"num_positions": 9, "agents": counts(150, 60)}}}
    assert passed.gained() is None
