"""Requests that the OpenAPI document allows, and others: none causes a server error."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from tests.serve_apps.gateway.hostile_gateway import scripted_scene

pytestmark = pytest.mark.nightly


def test_no_request_causes_a_server_error(tiny_model: Path) -> None:
    """Operation by operation: schemathesis' own pytest plugin does not know this pytest."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", scripted_scene(tiny_model, capture={"flush_s": 0.01}).api)
    seen: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE, *[GenerationMode.NEGATIVE] * (operation.method == "post")]
        for mode in modes:  # there is nothing to do wrong in a request without a body or a parameter
            num = 20 if "{episode_id}" in operation.label else 80  # the bodies of those are tried elsewhere
            statuses = ask_all(operation.as_strategy(generation_mode=mode), num)
            seen[operation.label] = seen.get(operation.label, Counter()) + statuses
    chat = seen["POST /v1/chat/completions"]
    assert chat[400] + chat[404] > 100 and chat[400], f"many kinds of requests were refused: {seen}"
    assert set(seen) >= {"GET /v1/models", "POST /v1/workflows/{team}/runs", "POST /v1/episodes", "GET /metrics"}
    assert "POST /v1/episodes/{episode_id}/agents/{agent}/chat/completions" in seen
    assert set(seen) >= {"POST /v1/responses", "POST /v1/completions", "POST /tokenize", "POST /detokenize"}


def ask_all(cases: SearchStrategy[Case], num: int) -> Counter[int]:
    """Statuses of many requests; schemathesis raises where one is a server error."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=cases)
    def ask(case: Case) -> None:
        statuses[case.call_and_validate(checks=[not_a_server_error]).status_code] += 1

    ask()
    return statuses
