"""Gateway replicas that are too busy to say their status: the way back is routed, and an idle set is one of which all have said so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.release import production
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute
from serve_apps.policy import replicas

pytestmark = pytest.mark.fast

RUN: Any = SimpleNamespace(
    team_name="demo",
    traces_uri="",
    served_uri="",
    weights_uri="",
    run_id="r",
    folder="/run",
    config=SimpleNamespace(gateway=None),
)


def busy(*_: Any, **__: Any) -> Any:
    raise TimeoutError("1 of 2 replicas did not answer")


def test_one_busy_replica_is_no_partial_answer_but_for_those_who_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"replica": "a"}, TimeoutError("Timed out"), RuntimeError("is being replaced")]
    asked = SimpleNamespace(results=lambda timeout_s, return_exceptions: answers)
    monkeypatch.setattr(replicas, "handle_of", lambda app: SimpleNamespace(broadcast=lambda method: asked))
    with pytest.raises(TimeoutError, match=r"1 of 3 replicas of app 'gateway' did not answer 'status' in 2 s"):
        replicas.statuses_of("gateway", timeout_s=2)
    assert replicas.statuses_of("gateway", timeout_s=2, without_late=True) == [{"replica": "a"}]
    answers.pop(1)
    assert replicas.statuses_of("gateway", timeout_s=2) == [{"replica": "a"}]


def test_a_route_is_set_though_a_replica_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    routed: list[float] = []
    monkeypatch.setattr(production, "gateway_statuses", busy)
    monkeypatch.setattr(production, "route", lambda *_, timeout_s, **__: routed.append(timeout_s))
    champion = DeployedTeam(team_version=5, set_name="green", apps={}, team_spec={})
    production.switch(RUN, TeamRoute(champion=champion))
    assert routed == [production.SWITCH_S], "a gateway that is busy is up"
    assert production.gateway_answers(RUN) == [], "one check is missed"


def test_a_set_is_idle_when_a_busy_replica_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(num: int) -> dict[str, Any]:
        return {"in_flight": [{"team": "demo", "set_name": "blue", "num": num}], "port": {"num_replicas": 2}}

    looks = iter([busy, lambda: [status(0), status(3)], busy, lambda: [status(0), status(0)]])
    monkeypatch.setattr(production, "gateway_teams", lambda gateway: {"demo": 1})
    monkeypatch.setattr(production, "gateway_statuses", lambda gateway: next(looks)())
    monkeypatch.setattr(production, "ANSWER_S", 0.0)
    monkeypatch.setattr(production, "POLL_S", 0.001)
    production._wait_until_idle(RUN, "blue")
    assert next(looks, None) is None
    monkeypatch.setattr(production, "gateway_statuses", busy)
    monkeypatch.setattr(production, "DRAIN_S", 0.01)
    with pytest.raises(TimeoutError, match=r"an unknown number of requests of team 'demo' are still on set blue"):
        production._wait_until_idle(RUN, "blue")
