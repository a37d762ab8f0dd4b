"""An answer in service: who gave it, what shaped that team, what it has shaped. Real LanceDB, journal, weights and registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored_source import Stored
from test_from_service import ABOUT, serve, some_traces, take
from test_lineage import score_and_train

from pipelines.extensions.lineage.lineage import lineage_of_episode, lineage_of_id, lineage_of_team
from pipelines.run.run import Run
from pipelines.stages.promote import register_team
from stores.traces.served import ServedStore
from stores.types import SERVED, Purpose
from tests.train_loops.synthetic_traces import GROUP

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Team versions 1 and 2; version 2 was trained, in iteration 1, on two answers of version 1, of three that are kept."""
    run = Stored(tmp_path_factory.mktemp("lineage"), tiny_model).learner(
        "again", **{"collect.from_service": {"max_episodes": 2}}
    )
    run.open()
    models = run.parents(1)
    assert register_team(run, models, iteration=0, evaluation={}) == 1
    serve(run, some_traces(run, 3), [0.5, None, -1.0])
    _, taken = take(run)
    pinned = run.traces.pin_episodes(run_id=run.run_id, iteration=1, purpose=Purpose.TRAIN, team_key=taken[0].team_key)
    assert score_and_train(run, models, pinned) == 2
    return run


@pytest.mark.nightly
def test_an_answer_leads_to_its_team_and_to_what_has_learnt_from_it(run: Run) -> None:
    found = lineage_of_id(run, "chatcmpl-0")
    answer = found["answer"]
    assert (answer["team_version"], answer["alias"], answer["key"], answer["is_trainable"]) == (
        1,
        "champion",
        "web",
        True,
    )
    assert [(said["key"], said["score"]) for said in answer["feedback"]] == [("web", 0.5)]
    assert {agent: of["versions"] for agent, of in answer["sampled_by"].items()} == {"solver": [0], "verifier": [0]}
    assert found["shaped_by"]["team"]["version"] == 1 and found["shaped_by"]["models"][GROUP][0]["version"] == 0
    shaped = found["shaped"]
    assert (shaped["iteration"], shaped["trained"]) == (1, {GROUP: [1]})
    assert [team["version"] for team in shaped["teams"]] == [2]
    copy = lineage_of_episode(run, shaped["episode_id"])
    assert copy["episode"]["answer"] == "chatcmpl-0" and copy["trained"] == shaped["trained"]
    texts = [t.task.prompt for t in run.traces.find_traces()] + [t.answer for t in run.traces.find_traces()]
    assert not [text for text in texts if len(text) > 8 and text in str(found)], "no text of anybody"


def test_an_answer_that_nobody_learnt_from_says_so(run: Run) -> None:
    found = lineage_of_id(run, "chatcmpl-1")
    assert found["shaped"] is None and [said["score"] for said in found["answer"]["feedback"]] == [None]


def test_a_team_says_how_many_episodes_and_answers_of_callers_are_behind_it(run: Run) -> None:
    first, second = (lineage_of_team(run, *run.registry.load(run.team_name, version)) for version in (1, 2))
    assert first["episodes"] == {"scored": 0, "from_service": 0, "answers_kept": 3}
    assert second["episodes"] == {"scored": 2, "from_service": 2, "answers_kept": 0}
    assert [one["from_service"] for one in second["iterations"]] == [0, 2]


def test_of_an_answer_that_is_not_kept_the_error_says_where_its_team_stands(run: Run) -> None:
    with pytest.raises(ValueError, match=r"no episode 'chatcmpl-9'.*system_fingerprint.*`troupe lineage again@7`"):
        lineage_of_id(run, "chatcmpl-9")


def test_an_answer_of_another_runs_team_is_told(run: Run) -> None:
    (trace,) = some_traces(run, 1)
    foreign = {SERVED: {**ABOUT, "team": "other"}}
    ServedStore(run.served_uri).write_episodes([replace(trace, episode_id="ep-1-2", outcome_metadata=foreign)])
    with pytest.raises(ValueError, match="was given by team 'other', run 'again' trains 'again'"):
        lineage_of_id(run, "ep-1-2")
