"""Looks and their history: kept, repeated, accepted, shown; what a champion answered; what holds a schedule."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import MakeTrace
from stage_records import collected, finish
from typer.testing import CliRunner

from pipelines.cli.main import app
from pipelines.cluster import connect
from pipelines.config.run_config import load_config
from pipelines.episodes.sampling import Pass
from pipelines.evaluation import played as played_module
from pipelines.extensions.watch import champion as watch_champion
from pipelines.extensions.watch import command as watch_command
from pipelines.extensions.watch import served_windows
from pipelines.extensions.watch.config import watch_config
from pipelines.extensions.watch.episode_metrics import Estimate, Window
from pipelines.extensions.watch.served_windows import estimates_of_sums
from pipelines.extensions.watch.shown import TEMPLATE, found
from pipelines.extensions.watch.watching import (
    CHAMPION,
    ITERATION,
    accept,
    check_iteration,
    check_metrics,
    check_tags,
    check_windows,
    kept_windows,
)
from pipelines.report.page import section
from pipelines.run.run import Run
from pipelines.runners.schedule import reason_to_skip
from pipelines.stages.steps import run_stage
from serve_apps.gateway.traffic.figures import NAMES, Tally
from stores.journal.stage_results import TracesSource
from stores.registry.registry import TeamRegistry
from stores.registry.team import Team
from stores.registry.tracking import RunTracker
from stores.traces.served import Feedback, ServedStore
from stores.types import SERVED, Purpose, Task
from tests.pipelines.report.test_record import play
from tests.pipelines.runners import answers_five
from tests.pipelines.runners.answers_five import SMALL, Played, Sampled, write_tasks

pytestmark = pytest.mark.test

by_hand = answers_five.by_hand


@pytest.fixture
def run(tmp_path: Path) -> Run:
    changes = {"storage.root": str(tmp_path), "watch.on_alarm": "fail", "schedule": {"cron": "@daily"}}
    run = Run(load_config(SMALL, changes))
    run.journal.put_value("small", "champion", {"team_version": 1, "models": {}})
    return run


def taken(run: Run, number: int, success: float) -> dict[str, Any]:
    """A look at an iteration."""
    figures = {"outcome": Estimate(num=50, mean=success, error=0.02), "turns": Estimate(num=50, mean=3.0, error=0.1)}
    key = f"iteration/{number}"
    return check_windows(run, {ITERATION: Window(key=key, at=float(number), figures=figures)}, kind=ITERATION, key=key)


def test_a_look_learns_then_judges_and_an_alarm_is_an_event_that_lasts(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    states = [taken(run, k, 0.7 + 0.01 * (k % 2))["state"] for k in range(1, 7)]
    assert states == ["learning"] * 5 + ["sound"]
    told = taken(run, 7, 0.2)
    assert (told["state"], told["judged"], told["learning"]) == ("alarm", ["iteration/outcome", "iteration/turns"], [])
    (alarm,) = told["alarms"]
    assert alarm["what"].startswith("fewer tasks are solved: 0.2, 0.705 is usual (at least") and alarm["try"]
    assert taken(run, 7, 0.2) == told, "the same look again is the same"
    assert [m for m in caplog.messages if m.startswith("alarm: iteration, outcome: fewer tasks")]
    events = run.journal.value("small", "watch/events")
    assert events and [(e["figure"], e["team_version"]) for e in events["events"]] == [("outcome", 1)]
    assert taken(run, 8, 0.2)["state"] == "alarm", "what alarmed is not usual"
    assert len(kept_windows(run, ITERATION)) == 8


def test_an_earlier_look_repeated_is_judged_by_what_was_before_it_and_is_not_the_latest(run: Run) -> None:
    told = [taken(run, k, 0.7 + 0.01 * (k % 2)) for k in range(1, 9)]
    assert taken(run, 7, 0.71) == told[6] and told[6]["sources"]["iteration"]["outcome"]["num_windows"] == 6
    assert [w.at for w in kept_windows(run, ITERATION)] == [float(k) for k in range(1, 9)]
    assert run.journal.value("small", "watch/latest/iteration") == told[7]


def test_an_alarm_holds_the_schedule_until_it_is_accepted_or_a_team_is_promoted(run: Run) -> None:
    for k in range(1, 7):
        taken(run, k, 0.7)
    assert reason_to_skip(run) == ""
    taken(run, 7, 0.2)
    assert "raised an alarm (watch.on_alarm: fail): iteration: fewer tasks are solved" in reason_to_skip(run)
    assert accept(run, "harder tasks")["reason"] == "harder tasks"
    assert reason_to_skip(run) == "" and kept_windows(run, ITERATION)[-1].alarms == ()
    run.journal.put_value("small", "watch/accepted", {"accepted_at": 0.0})
    assert reason_to_skip(run)
    run.journal.put_value("small", "champions", {"history": [{"team_version": 2, "at": 8.0}]})
    assert reason_to_skip(run) == ""


def test_a_rollback_accepts_no_alarm(run: Run) -> None:
    for k in range(1, 7):
        taken(run, k, 0.7)
    taken(run, 7, 0.2)
    back = {"team_version": 1, "at": 8.0, "reason": "sent back: outcome", "is_rollback": True}
    run.journal.put_value("small", "champions", {"history": [back]})
    assert reason_to_skip(run) and kept_windows(run, ITERATION)[-1].alarms == ("outcome",)
    promoted = back | {"team_version": 2, "at": 9.0, "is_rollback": False}
    run.journal.put_value("small", "champions", {"history": [back, promoted]})
    assert reason_to_skip(run) == ""


def test_an_alarm_that_lasts_does_not_become_the_norm(run: Run) -> None:
    for k in range(1, 11):
        taken(run, k, 0.7 + 0.01 * (k % 2))
    states = {taken(run, k, 0.2)["state"] for k in range(11, 51)}
    assert states == {"alarm"} and reason_to_skip(run), "watch.history is 20"
    accept(run, "harder tasks")
    assert reason_to_skip(run) == ""


def test_only_the_latest_windows_are_kept(run: Run) -> None:
    for k in range(1, 25):
        taken(run, k, 0.7)
    assert [w.at for w in kept_windows(run, ITERATION)] == [float(k) for k in range(5, 25)]


def test_the_first_windows_of_a_champion_are_kept_until_they_are_accepted_anew(run: Run) -> None:
    def keep(number: int, version: int) -> None:
        figures = {"outcome": Estimate(num=50, mean=0.7, error=0.02)}
        window = Window(key=str(number), at=float(number), figures=figures, team_version=version)
        check_windows(run, {"service": window}, kind=CHAMPION, key=window.key)

    for number in range(1, 6):
        keep(number, 1)
    for number in range(6, 61):
        keep(number, 2)
    kept = [*range(6, 26), *range(41, 61)]
    assert [w.at for w in kept_windows(run, "service")] == kept, "watch.history is 20"
    run.journal.put_value("small", "watch/accepted", {"accepted_at": 50.0})
    keep(61, 2)
    assert [w.at for w in kept_windows(run, "service")] == [float(k) for k in range(42, 62)]


def test_alarms_are_shown_on_the_version_in_mlflow_until_they_are_over(
    run: Run, mlflow_sqlite: tuple[str, str]
) -> None:
    for k in range(1, 7):
        taken(run, k, 0.7)
    told = taken(run, 7, 0.2)
    registry, tracker = TeamRegistry(*mlflow_sqlite), RunTracker(*mlflow_sqlite, "watched")
    team = Team(
        workflow="a:B", prompts={}, credit={}, models={}, git_commit="", run_id="watched", iteration=0, evaluation={}
    )
    version = registry.register("watched", team)
    registry.show_watch("watched", version, check_tags(told))
    tags = registry._client.get_model_version("watched", str(version)).tags
    assert tags["troupe.alarm.iteration.outcome"].startswith("fewer tasks are solved: 0.2")
    assert tags["troupe.watch"].startswith("alarm: iteration: fewer")
    registry.show_watch("watched", version, check_tags({**told, "alarms": [], "state": "sound", "reason": "fine"}))
    tags = registry._client.get_model_version("watched", str(version)).tags
    assert "troupe.alarm.iteration.outcome" not in tags and tags["troupe.watch"] == "sound: fine"
    tracker.log_metrics(check_metrics(told), 7)
    tracker.log_dict("watch.json", told)
    shown = tracker._client.get_run(tracker.mlflow_run_id).data.metrics
    assert (shown["alarm/outcome"], shown["alarm/turns"], shown["episode_metrics/outcome"], shown["alarm/count"]) == (
        1,
        0,
        0.2,
        1,
    )


def test_points_for_prometheus_have_their_tags_and_a_table_its_alarms_first(run: Run) -> None:
    for k in range(1, 7):
        taken(run, k, 0.7)
    told = taken(run, 7, 0.2)
    prometheus = pytest.importorskip("pipelines.extensions.prometheus.points")
    points = prometheus.check_points("small", told)
    metrics = pytest.importorskip("pipelines.extensions.prometheus.meter").METRICS
    assert all(tuple(tags) == metrics[name].tags for name, _, tags in points)
    assert {(n, t["figure"]): v for n, v, t in points}["troupe_alarm", "outcome"] == 1
    page = section(TEMPLATE, checks={ITERATION: told})
    table = page[page.index("Usual range") :]
    assert table.index(">alarm<") < table.index(">normal<") and "at least" in table
    assert "The champion&#39;s latest window" not in page


def test_the_gateways_sums_are_estimates() -> None:
    tally = Tally()
    for tokens, is_ok in ((10.0, 1.0), (20.0, 0.0), (30.0, 1.0)):
        tally.add({"completion_tokens": tokens, "format_share": is_ok, "failure_share": 0.0})
    found = estimates_of_sums(tally.sums)
    assert set(found) == {"completion_tokens", "format_share", "failure_share"}
    assert (found["completion_tokens"].num, found["completion_tokens"].mean) == (3, 20.0)
    assert found["completion_tokens"].error == pytest.approx((100 / 3) ** 0.5)
    assert found["format_share"].mean == pytest.approx(2 / 3)
    assert found["format_share"].error == pytest.approx((0.3 / 5) ** 0.5), "of 1 0 1, and a 0 and a 1 in addition"


@pytest.fixture
def watched(by_hand: tuple[Run, Any]) -> Run:
    """The run whose team answers 5 to everything."""
    run, _ = by_hand
    run.journal.put_value("small", "champion", {"team_version": 7, "models": {}})
    return run


def answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = played_module.sample_episodes

    def wrong(tasks: list[Task], of: Pass, **more: Any) -> Any:
        return sampled([replace(task, answers=("6",)) for task in tasks], of, **more)

    monkeypatch.setattr(played_module, "sample_episodes", wrong)


def many_tasks(run: Run) -> None:
    for name in ("test", "sentinel"):
        write_tasks(Path(run.folder).parent / f"{name}.jsonl", *["5"] * 24)


@pytest.mark.nightly
def test_a_degraded_champion_alarms_in_watch_and_its_exit_code_says_so(
    watched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_tasks(watched)
    monkeypatch.setattr(watch_command, "scheduled_run", lambda config, root: watched)
    command = ["watch", "--run", "small", "--exit-code"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 13, first.output
    assert '"state": "learning"' in first.output and '"test/outcome"' in first.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and '"state": "sound"' in again.output
    answer_wrong(monkeypatch)
    assert CliRunner().invoke(app, ["watch", "--run", "small", "--team", "7"]).exit_code == 0, "not the champion's look"
    bad = CliRunner().invoke(app, command)
    assert bad.exit_code == 12, bad.output
    said = json.loads(bad.output[bad.output.index("{") :].splitlines()[0])
    assert {(a["source"], a["figure"]) for a in said["alarms"]} >= {("test", "outcome"), ("sentinel", "outcome")}
    assert "fewer tasks are solved: 0, 1 is usual" in said["reason"] and "2 + 3" not in bad.output
    assert CliRunner().invoke(app, [*command[:3], "--accept", "the tasks were wrong"]).exit_code == 0
    assert kept_windows(watched, "test")[-1].alarms == ()


def serve_answers(run: Run, make_trace: MakeTrace, num: int, *, text: str, version: int = 7, begun: float) -> None:
    store = ServedStore(run.served_uri)
    store.create()
    about = {"team": "small", "team_version": version, "alias": "champion", "key": "web", "is_trainable": True}
    traces = [
        replace(
            make_trace(i),
            episode_id=f"e{begun}-{version}-{i}",
            purpose=Purpose.AD_HOC,
            task=Task(task_id=f"request-{begun}-{i}", prompt=f"{text} {i}", answers=()),
            outcome_metadata={SERVED: about},
            started_at=begun,
        )
        for i in range(num)
    ]
    store.write_episodes(traces)
    for trace in traces[:10]:
        store.write_feedback(Feedback(trace_id=trace.episode_id, key="web", at=begun, score=1.0))


def test_what_was_served_since_the_last_watching_is_a_window_of_the_champions(
    watched: Run, make_trace: MakeTrace, make_rewards: Callable[..., Any]
) -> None:
    now = time.time()
    serve_answers(watched, make_trace, 20, text="how many", begun=now - 9)
    serve_answers(watched, make_trace, 40, text="how many", version=3, begun=now - 8)
    first = watch_champion.watch(watched, CHAMPION, ["test"])
    assert first["waiting"] == {"service": "20 of watch.min_episodes = 30 answers"}
    serve_answers(watched, make_trace, 15, text="how much", begun=now - 7)
    second = watch_champion.watch(watched, CHAMPION, ["test"])
    assert second["waiting"] == {} and "service/input_drift" in second["learning"]
    (window,) = kept_windows(watched, "service")
    assert (window.figures["turns"].num, window.figures["feedback_score"].mean) == (35, 1.0)
    assert watch_champion.watch(watched, CHAMPION, ["test"])["waiting"] == {}, "nothing new, nothing waits"
    assert len(kept_windows(watched, "service")) == 1


def test_answers_of_other_teams_in_the_same_store_hide_none(watched: Run, make_trace: MakeTrace) -> None:
    watch = watch_config(watched.config).model_copy(update={"max_episodes": 50})
    watched = Run(watched.config.model_copy(update={"watch": watch}))
    now = time.time()
    serve_answers(watched, make_trace, 40, text="how many", begun=now - 9)
    serve_answers(watched, make_trace, 60, text="how much", version=3, begun=now - 8)
    served = served_windows.served_windows(watched, 7, key="k", at=now)
    assert served.windows["service"].figures["turns"].num == 40
    serve_answers(watched, make_trace, 60, text="how many", begun=now - 7)
    served_windows.mark_checked(watched, served)
    served = served_windows.served_windows(watched, 7, key="l", at=now)
    assert served.windows["service"].figures["turns"].num == 50, "the newest"


def of_two_tasks(make_trace: MakeTrace) -> MakeTrace:
    """The first two episodes are of two tasks, without which there is no figure."""
    return lambda index=0, **changes: make_trace(2 * index, **changes)


def test_an_iteration_on_the_traces_of_another_run_is_no_window_of_this_team(run: Run, make_trace: MakeTrace) -> None:
    run.begin()
    play(run, 1, of_two_tasks(make_trace))
    source = TracesSource(run="other", iteration=4, store="runs")
    own = run.iteration(1).collected
    finish(run, 3, replace(own, source=source))
    finish(run, 3, run.iteration(1).scored)
    checks = [check_iteration(run, k, at=float(k)) for k in (1, 3)]
    assert [bool(check["sources"][ITERATION]) for check in checks] == [True, False]
    assert [(check["state"], check["alarms"]) for check in checks] == [("learning", [])] * 2


def show_answers(monkeypatch: pytest.MonkeyPatch, run: Run, shown: Mapping[str, Tally]) -> None:
    """The gateway's replicas, by name, as they are when somebody looks."""

    def answers(_: Run) -> list[dict[str, Any]]:
        about = {"team": run.team_name, "team_version": 7}
        return [{"replica": name, "figures": [about | {"sums": tally.sums}]} for name, tally in shown.items()]

    monkeypatch.setattr(served_windows, "gateway_answers", answers)


def answer(tallies: Mapping[str, Tally], tokens: float) -> None:
    """Thirty answers of each."""
    for tally in tallies.values():
        for _ in range(30):
            tally.add(dict.fromkeys(NAMES, 0.0) | {"completion_tokens": tokens})


def test_the_gateways_answers_are_those_since_the_last_window(watched: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tallies = {"a": Tally(), "b": Tally()}
    show_answers(monkeypatch, watched, tallies)
    for tokens in (10.0, 20.0):
        answer(tallies, tokens)
        watch_champion.watch(watched, CHAMPION, ["test"])
        tallies.pop("a", None)  # a replica that ends takes only its own figures along
    means = [w.figures["completion_tokens"].mean for w in kept_windows(watched, "gateway")]
    assert means == [10.0, 20.0]


def test_after_a_rollback_only_new_answers_of_the_earlier_champion_count(
    watched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallies = {7: Tally(), 8: Tally()}

    def answers(run: Run) -> list[dict[str, Any]]:
        figures = [{"team": "small", "team_version": v, "sums": tally.sums} for v, tally in tallies.items()]
        return [{"replica": "a", "figures": figures}]

    monkeypatch.setattr(served_windows, "gateway_answers", answers)
    means = []
    for version, tokens in ((7, 10.0), (8, 20.0), (7, 30.0)):
        answer({"": tallies[version]}, tokens)
        served = served_windows.served_windows(watched, version, key=f"{tokens}", at=time.time())
        served_windows.mark_checked(watched, served)
        means.append(served.windows["gateway"].figures["completion_tokens"].mean)
    assert means == [10.0, 20.0, 30.0]


def test_an_episode_that_ends_after_one_that_began_later_is_counted_and_none_twice(
    watched: Run, make_trace: MakeTrace
) -> None:
    begun, counted = time.time() - 7200, []
    for late, early in ((0, 0), (60, -600), (120, 0)):
        serve_answers(watched, make_trace, 40, text="how many", begun=begun + late)
        if early:
            serve_answers(watched, make_trace, 40, text="how long", begun=begun + early)
        served = served_windows.served_windows(watched, 7, key=f"{late}", at=time.time())
        served_windows.mark_checked(watched, served)
        counted.append(served.windows["service"].figures["turns"].num)
    assert counted == [40, 80, 40]


def test_a_replica_that_one_look_missed_is_not_counted_from_its_start(
    watched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallies = {"a": Tally(), "b": Tally()}
    for tokens, shown in ((10.0, ("a", "b")), (20.0, ("a",)), (30.0, ("a", "b"))):
        answer(tallies, tokens)
        show_answers(monkeypatch, watched, {name: tallies[name] for name in shown})
        watch_champion.watch(watched, CHAMPION, ["test"])
    means = [w.figures["completion_tokens"].mean for w in kept_windows(watched, "gateway")]
    assert means == [10.0, 20.0, pytest.approx((2 * 30.0 + 20.0) / 3)], "b's 20s were not counted before"


@pytest.fixture(autouse=True)
def _nothing_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "connect", lambda address: None)
    monkeypatch.setattr(served_windows, "gateway_answers", lambda run: [])


def test_a_set_of_tasks_that_the_run_does_not_have_is_not_skipped(by_hand: tuple[Run, Played]) -> None:
    run, played = by_hand
    with pytest.raises(ValueError, match=r"has no tasks\.sentinal; there are tasks\.train, .*tasks\.sentinel"):
        watch_champion.watch(run, "champion", ["test", "sentinal"])
    tasks = run.config.tasks.model_copy(update={"sentinel": None})
    without = Run(run.config.model_copy(update={"tasks": tasks}))
    with pytest.raises(ValueError, match=r"has no tasks\.sentinel"):
        watch_champion.watch(without, "champion", ["test", "sentinel"])
    assert played == {}
    assert watch_champion._sets_to_play(without, ()) == ["test"], "of the default ones, those that there are"


def test_each_watching_plays_every_section_and_a_repeated_one_keeps_its_episodes(
    by_hand: tuple[Run, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, played = by_hand
    found = watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert {name: section["accuracy"] for name, section in found["sections"].items()} == {"test": 1.0, "sentinel": 0.5}
    assert played == {"t0": 2, "t1": 2}

    def killed(tasks: Sequence[Task], *by: Any, **more: Any) -> Sampled:
        if tasks[1].answers == ("6",):
            raise KeyboardInterrupt
        return sampled(tasks, *by, **more)

    sampled = played_module.sample_episodes
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(played_module, "sample_episodes", killed)
        watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert played == {"t0": 3, "t1": 3}
    again = watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert again["sections"] == found["sections"] and (found["state"], again["state"]) == ("learning", "sound")
    assert played == {"t0": 4, "t1": 4}, "the test tasks were kept, the sentinel ones played anew"


def test_a_check_that_was_recorded_without_a_cluster_is_sent_at_the_end_of_the_next_stage(
    run: Run, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = pytest.importorskip("pipelines.extensions.prometheus.points")
    run.begin()
    play(run, 1, of_two_tasks(make_trace))
    kept = run.journal.once(run.key(1, "record"), lambda lease: {"watch": dict(found(run, 1, at=time.time()).result)})
    monkeypatch.setattr(points, "_sent", set())  # as in another process, as each stage of a DAG run is
    sent: list[Any] = []
    monkeypatch.setattr(points, "send", lambda points, key="": sent.extend(points))
    finish(run, 2, collected())
    run_stage(run, "collect", 2)
    figures = set(kept["watch"]["sources"][ITERATION])
    assert figures and {tags["figure"] for name, _, tags in sent if name == "troupe_alarm"} == figures
