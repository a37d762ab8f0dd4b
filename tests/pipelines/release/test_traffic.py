"""Decisions on live figures: how often a sound team is sent back, how soon a bad one is, and what each look says."""

from __future__ import annotations

from contextlib import nullcontext
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.config.sections import TrafficConfig, TrafficGuardsConfig
from pipelines.release import traffic
from pipelines.release.traffic import Watch
from serve_apps.gateway.traffic.figures import Since, Sums, Tally, added, difference, total

pytestmark = pytest.mark.fast

CONFIG = TrafficConfig()


def answers(
    rng: np.random.Generator, num: int, *, tokens: float = 40.0, empty: float = 0.02, failing: float = 0.0
) -> list[dict[str, float]]:
    found = []
    for _ in range(num):
        if rng.random() < failing:
            found.append({"failure_share": 1.0})
            continue
        length = float(rng.gamma(4, tokens / 4))
        found.append(
            {"completion_tokens": length, "latency_s": length / 100, "cut_share": float(rng.random() < 0.03),
             "empty_share": float(rng.random() < empty), "failure_share": 0.0}
        )  # fmt: skip
    return found


def tally(figures: list[dict[str, float]]) -> Sums:
    whole = Tally()
    for one in figures:
        whole.add(one)
    return whole.sums


def states(watch: Watch, new: Sums, old: Sums) -> dict[str, str]:
    seen = watch.check(new, old)
    assert seen is not None
    return {s.name: s.state for s in seen}


def test_too_few_answers_are_no_look_and_a_look_needs_more_than_the_last() -> None:
    rng, watch = np.random.default_rng(0), Watch(CONFIG)
    some, enough = tally(answers(rng, 19)), tally(answers(rng, 100))
    assert watch.check(some, enough) is None and watch.check(enough, some) is None
    assert watch.check(enough, enough) is not None
    assert watch.check(enough, enough) is None, "the same answers again are no news"
    assert watch.check(tally(answers(rng, 131)), tally(answers(rng, 131))) is not None


@pytest.mark.parametrize(
    ("worse", "figure"),
    [({"tokens": 80.0}, "completion_tokens"), ({"empty": 0.4}, "empty_share"), ({"failing": 0.3}, "failure_share")],
)
def test_a_team_that_is_clearly_worse_is_found_within_a_hundred_answers(worse: dict[str, float], figure: str) -> None:
    rng = np.random.default_rng(1)
    seen = Watch(CONFIG).check(tally(answers(rng, 100, **worse)), tally(answers(rng, 100)))
    assert seen is not None
    (one,) = (s for s in seen if s.name == figure)
    assert one.state == "broken" and one.low > one.limit
    assert figure in str(one) and "at most" in str(one)


def test_twice_next_to_nothing_is_no_change_and_much_after_nothing_is_one() -> None:
    def sums(tokens: float, seconds: float) -> Sums:
        values = {"failure_share": 0.0, "completion_tokens": tokens, "latency_s": seconds}
        return tally([values] * 200)

    found = states(Watch(CONFIG), sums(0.3, 0.03), sums(0.1, 0.01))
    assert (found["completion_tokens"], found["latency_s"]) == ("holds", "holds")
    found = states(Watch(CONFIG), sums(500, 0.4), sums(0, 0.01))
    assert (found["completion_tokens"], found["latency_s"]) == ("broken", "broken")
    assert states(Watch(CONFIG), sums(80, 1.0), sums(40, 1.0))["completion_tokens"] == "broken", "as ever"


def test_equal_teams_hold_once_there_are_enough_answers() -> None:
    rng = np.random.default_rng(2)
    found = states(Watch(CONFIG), tally(answers(rng, 3000)), tally(answers(rng, 3000)))
    assert found == dict.fromkeys(
        ("completion_tokens", "latency_s", "cut_share", "empty_share", "failure_share"), "holds"
    ), "no format: no workflow ran"


def test_a_guard_that_is_off_or_has_no_figure_is_not_looked_at() -> None:
    rng = np.random.default_rng(3)
    config = TrafficConfig(guards=TrafficGuardsConfig(latency_s=None, completion_tokens=None))
    found = states(Watch(config), tally(answers(rng, 50)), tally(answers(rng, 50)))
    assert set(found) == {"cut_share", "empty_share", "failure_share"}


def test_a_sound_team_at_the_very_limit_is_rarely_sent_back_however_often_it_is_looked_at() -> None:
    """Twice as many empty answers are allowed as 5 points more; the canary has exactly these: the worst sound case."""
    rng, sent_back, num = np.random.default_rng(4), 0, 400
    config = TrafficConfig(guards=TrafficGuardsConfig(**dict.fromkeys(
        ("completion_tokens", "latency_s", "cut_share", "format_share", "failure_share"))))  # fmt: skip
    for _ in range(num):
        watch = Watch(config)
        new = {"failure_share": [0, 0.0, 0.0], "empty_share": [0, 0.0, 0.0]}
        old = {"failure_share": [0, 0.0, 0.0], "empty_share": [0, 0.0, 0.0]}
        for _ in range(100):
            for sums, share in ((new, 0.10), (old, 0.05)):
                many = float(rng.binomial(20, share))
                sums["empty_share"] = [sums["empty_share"][0] + 20, sums["empty_share"][1] + many, 0.0]
                sums["failure_share"] = [sums["failure_share"][0] + 20, 0.0, 0.0]
            unseen = {name: [0, 0.0, 0.0] for name in Tally().sums}
            seen = watch.check({**unseen, **new}, {**unseen, **old})
            if seen and any(s.state == "broken" for s in seen):
                sent_back += 1
                break
    assert sent_back / num <= 0.05


@pytest.mark.parametrize("per_new", [1, 19])
@pytest.mark.parametrize(("short", "long", "share"), [(1.0, 1000.0, 0.02), (4.0, 400.0, 0.03)])
def test_equal_teams_that_are_rarely_long_are_rarely_sent_back(
    short: float, long: float, share: float, per_new: int
) -> None:
    """By each side's own variance 37% and 10% were, where one side of twenty answers had none that was long."""
    rng, sent_back, num = np.random.default_rng(5), 0, 200
    names = ("latency_s", "cut_share", "empty_share", "format_share", "failure_share")
    config = TrafficConfig(guards=TrafficGuardsConfig(**dict.fromkeys(names)))

    def sums(values: np.ndarray) -> Sums:
        said = [len(values), float(values.sum()), float((values**2).sum())]
        return Tally().sums | {"failure_share": [len(values), 0.0, 0.0], "completion_tokens": said}

    for _ in range(num):
        watch = Watch(config, parts=3)
        new, old = (np.where(rng.random(200 * times) < share, long, short) for times in (1, per_new))
        seen = [watch.check(sums(new[:k]), sums(old[: k * per_new])) for k in range(20, 201)]
        sent_back += any(one.state == "broken" for compared in seen for one in compared or ())
    assert sent_back / num <= 0.05


def test_checks_go_on_when_the_old_team_answers_no_more() -> None:
    rng = np.random.default_rng(9)
    watch, old, new = Watch(CONFIG, is_old_over=True), tally(answers(rng, 30)), answers(rng, 80)
    assert Watch(CONFIG, is_old_over=True).check(tally(new), tally(answers(rng, 19))) is None, "too few of before"
    assert "broken" not in states(watch, tally(new), old).values()
    assert watch.check(tally(new), old) is None, "the same answers again are no news"
    found = states(watch, tally(new + answers(rng, 200, failing=0.9)), old)
    assert found["failure_share"] == "broken"


def test_all_looks_at_all_guards_of_all_steps_together_spend_what_confidence_leaves() -> None:
    """What each look spends is read from its interval; a third guard or step, or a look that spends more, would go beyond."""
    parts, num_guards = 3, 2
    off = dict.fromkeys(("completion_tokens", "latency_s", "cut_share", "format_share"))
    watch = Watch(TrafficConfig(guards=TrafficGuardsConfig(**off)), parts=parts)
    spent = []
    for look in range(60):
        num = 20 * 2**look
        sums = Tally().sums | {name: [num, num / 2, num / 2] for name in ("failure_share", "empty_share")}
        seen = watch.check(sums, sums)
        assert seen is not None and len(seen) == num_guards
        spread = (2 * 0.25 / (num + 2)) ** 0.5
        spent += [1 - NormalDist().cdf(one.high / spread) for one in seen]
    assert spent[0] == pytest.approx(0.05 / 2 / num_guards / parts)
    assert 0.98 * 0.05 < parts * sum(spent) < 0.05


def test_figures_add_up_over_replicas_and_subtract_over_time() -> None:
    rng = np.random.default_rng(5)
    first, second = answers(rng, 30), answers(rng, 50)
    whole = tally(first + second)
    parts = total([tally(first), tally(second)])
    assert all(parts[name] == pytest.approx(whole[name]) for name in whole)
    later = difference(whole, tally(first))
    assert all(later[name] == pytest.approx(tally(second)[name]) for name in whole)


def status(replica: str, figures: list[dict[str, float]]) -> dict[str, Any]:
    return {"replica": replica, "figures": [{"team": "demo", "team_version": 4, "sums": tally(figures)}]}


def test_a_replica_that_ends_takes_its_figures_along_and_nothing_of_the_others() -> None:
    rng = np.random.default_rng(6)
    failing, sound, later, young = (
        answers(rng, 100, failing=0.2),
        answers(rng, 100),
        answers(rng, 150),
        answers(rng, 20),
    )
    before = [status("a", sound), status("b", failing)]
    found = added("demo", [status("a", sound + later), status("c", young)], before)[4]
    expected = tally(later + young)
    assert all(found[name] == pytest.approx(expected[name]) for name in expected)
    assert Watch(CONFIG).check(found, expected) is not None, "its shares are between 0 and 1"


def test_a_replica_that_is_missing_at_the_first_look_brings_nothing_of_before_along() -> None:
    rng = np.random.default_rng(7)
    earlier, later = answers(rng, 300), answers(rng, 5)
    since = Since("demo", [status("a", earlier)])
    assert since.added([]) == {4: total([])}
    assert since.added([status("a", earlier + later), status("b", earlier)])[4]["failure_share"][0] == len(later)
    assert since.added([status("b", earlier + later)])[4]["failure_share"][0] == 2 * len(later), "a has ended"
    both = [status(replica, earlier + later) for replica in ("a", "b")]
    assert since.added(both)[4]["failure_share"][0] == 2 * len(later)


def test_a_step_decides_nothing_by_what_was_answered_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is on nobody's list when the step begins, as a change of the route has it."""
    both = [{"team": "demo", "team_version": v, "sums": tally(answers(np.random.default_rng(v), 300))} for v in (1, 2)]
    looks = iter([[]])
    monkeypatch.setattr(
        traffic.production, "gateway_answers", lambda _: next(looks, [{"replica": "a", "figures": both}])
    )
    in_place = SimpleNamespace(candidate=SimpleNamespace(team_version=2))
    monkeypatch.setattr(traffic.production, "deployed_route", lambda _: in_place)
    config = CONFIG.model_copy(update={"step_timeout_s": 0.3, "poll_s": 0.02})
    run: Any = SimpleNamespace(team_name="demo", config=SimpleNamespace(traffic=config))
    found = traffic._step(run, 2, 1, Watch(config), is_last=False)
    assert found == {"state": "undecided", "reason": "after 0.3 s: 0 answers", "num_answers": 0}


def restarted(
    monkeypatch: pytest.MonkeyPatch, *, first: dict[int, Any], before: dict[int, Any], after: dict[int, Any]
) -> Any:
    """A gateway of one replica that is another one from the third look on; what each version has answered by then."""

    def look(replica: str, answered: dict[int, Any]) -> list[dict[str, Any]]:
        rows = [{"team": "demo", "team_version": v, "sums": tally(found)} for v, found in answered.items()]
        return [{"replica": replica, "figures": rows}]

    looks = iter([look("a", first), look("a", before), look("b", {})])
    monkeypatch.setattr(traffic.production, "gateway_answers", lambda _: next(looks, look("b", after)))
    config = CONFIG.model_copy(update={"step_timeout_s": 0.5, "poll_s": 0.02})
    return SimpleNamespace(team_name="demo", config=SimpleNamespace(traffic=config))


def test_a_team_that_fails_after_the_gateway_was_restarted_does_not_advance_by_what_it_answered_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(10)
    sound = answers(rng, 190)
    after = {1: answers(rng, 210), 2: answers(rng, 210, failing=0.5)}
    run = restarted(monkeypatch, first={}, before={1: sound, 2: sound}, after=after)
    in_place = SimpleNamespace(candidate=SimpleNamespace(team_version=2))
    monkeypatch.setattr(traffic.production, "deployed_route", lambda _: in_place)
    found = traffic._step(run, 2, 1, Watch(run.config.traffic), is_last=False)
    assert found["state"] == "broken" and found["reason"].startswith("failure_share")


def test_the_answers_of_the_team_before_outlive_a_restart_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    sound = answers(rng, 100)
    after = {2: answers(rng, 400, failing=0.9)}
    run = restarted(monkeypatch, first={1: sound}, before={1: sound, 2: sound}, after=after)
    teams = {"champion": SimpleNamespace(team_version=2), "previous": SimpleNamespace(team_version=1)}
    monkeypatch.setattr(traffic.production, "deployed_route", lambda _: SimpleNamespace(**teams))
    monkeypatch.setattr(traffic.production, "go_back", lambda run, version: {"ended": version, "team_version": 1})
    monkeypatch.setattr(traffic, "hold_promotion", lambda run: nullcontext())
    monkeypatch.setattr(traffic, "_return_to_champion", lambda *_, **__: None)
    monkeypatch.setattr(traffic, "_note", lambda *_: None)
    assert traffic.guard_deployed(run, seconds=1.0)["verdict"] == "sent_back"


def test_a_canary_that_somebody_has_ended_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promotion by hand holds the lock for minutes: the last step may have ended just before it."""
    moved: list[int] = []
    by_hand = SimpleNamespace(champion=SimpleNamespace(team_version=7), candidate=None)
    advanced = {"state": "advance", "reason": "all hold", "num_answers": 200.0}
    monkeypatch.setattr(traffic.production, "canary", lambda *_, **__: {"beside": 1})
    monkeypatch.setattr(traffic, "_step", lambda *_, **__: advanced)
    monkeypatch.setattr(traffic, "hold_promotion", lambda run: nullcontext())
    monkeypatch.setattr(traffic.production, "deployed_route", lambda _: by_hand)
    for name in ("move_champion", "move_champion_alone"):
        monkeypatch.setattr(traffic.production, name, lambda run, version, team, reason: moved.append(version))
    monkeypatch.setattr(traffic, "_note", lambda *_: None)
    run: Any = SimpleNamespace(team_name="demo", config=SimpleNamespace(traffic=CONFIG))
    team: Any = None
    found = traffic.roll_out(run, 2, team)
    assert (found["verdict"], found["reason"]) == ("undecided", "somebody else has ended this canary") and not moved
    by_hand.candidate = SimpleNamespace(team_version=2)
    assert traffic.roll_out(run, 2, team)["verdict"] == "promoted" and moved == [2]


def test_a_step_without_guards_advances_when_there_are_enough_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"team": "demo", "team_version": v, "sums": tally(answers(np.random.default_rng(v), 300))} for v in (1, 2)]
    looks = iter([[{"replica": "a", "figures": []}]])
    monkeypatch.setattr(
        traffic.production, "gateway_answers", lambda _: next(looks, [{"replica": "a", "figures": rows}])
    )
    in_place = SimpleNamespace(candidate=SimpleNamespace(team_version=2))
    monkeypatch.setattr(traffic.production, "deployed_route", lambda _: in_place)
    guards = TrafficGuardsConfig(**dict.fromkeys(TrafficGuardsConfig.DEFAULTS))
    config = CONFIG.model_copy(update={"step_timeout_s": 0.3, "poll_s": 0.02, "guards": guards})
    run: Any = SimpleNamespace(team_name="demo", config=SimpleNamespace(traffic=config))
    found = traffic._step(run, 2, 1, Watch(config), is_last=True)
    assert (found["state"], found["reason"]) == ("advance", "no figure of traffic.guards has a limit")


def test_a_step_of_copies_compares_with_the_same_requests_and_one_of_a_hanging_team_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(8)
    long, short = answers(rng, 300, tokens=200), answers(rng, 300, tokens=40)
    hanging = [{"latency_s": 30.0}] * 40
    nothing = Tally().sums

    def step(candidate: list[dict[str, float]], champion: list[dict[str, float]], *, is_shadow: bool) -> dict[str, Any]:
        own = (
            {"sums": nothing, "copies": tally(candidate)}
            if is_shadow
            else {"sums": tally(candidate), "copies": tally(long)}
        )
        rows = [
            {"team": "demo", "team_version": 1, "sums": tally(champion), "copies": nothing, "shadowed": nothing},
            {"team": "demo", "team_version": 2, **own, "shadowed": tally(long)},
        ]
        looks = iter([[{"replica": "a", "figures": []}]])
        monkeypatch.setattr(
            traffic.production, "gateway_answers", lambda _: next(looks, [{"replica": "a", "figures": rows}])
        )
        in_place = SimpleNamespace(candidate=SimpleNamespace(team_version=2))
        monkeypatch.setattr(traffic.production, "deployed_route", lambda _: in_place)
        config = CONFIG.model_copy(update={"step_timeout_s": 0.3, "poll_s": 0.02})
        run: Any = SimpleNamespace(team_name="demo", config=SimpleNamespace(traffic=config))
        return traffic._step(run, 2, 1, Watch(config), is_shadow=is_shadow, is_last=False)

    assert step(long, short, is_shadow=True)["state"] == "advance", "the copies were of the champion's long answers"
    assert step(long, short, is_shadow=False)["state"] == "broken", "canary's own users: all of the champion's answers"
    found = step(hanging, short, is_shadow=False)
    assert found["state"] == "broken" and found["reason"].startswith("latency_s"), "no caller waited for an answer"
    failing = [answers(np.random.default_rng(seed), 400, tokens=200, failing=0.1) for seed in (1, 2)]
    found = step(failing[0], failing[1], is_shadow=True)
    assert found["state"] == "advance", "only what the champion had answered was copied: it fails as often"
    found = step([], short, is_shadow=False)
    assert found["state"] == "undecided" and found["num_answers"] == 0, "late copies are no answers of the next step"


@pytest.mark.parametrize("shares", [(), (0.5, 0.1), (0.0, 0.5), (0.5, 1.5), (0.5, 1.0)])
def test_shares_that_do_not_grow_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match=r"traffic\.shares must be between 0 and 1 and grow"):
        TrafficConfig(shares=shares)
