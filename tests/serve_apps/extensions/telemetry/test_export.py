"""How spans leave a process: to a real receiver of OTLP, without ever waiting for one that is away or hangs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError
from seen_spans import collector, exported, spans_of

from serve_apps.config import CaptureConfig, GatewayConfig, TelemetryConfig
from serve_apps.extensions.telemetry.otlp import Export
from serve_apps.extensions.telemetry.spans import open_span
from serve_apps.spans import Spans, begin_spans, process_spans, use_spans

pytestmark = pytest.mark.fast


def make_spans(count: int) -> Export:
    export = process_spans()
    assert isinstance(export, Export)
    for index in range(count):
        with open_span(export.tracer, f"span {index}", {"troupe.turn_index": index}):
            pass
    return export


def test_a_collector_gets_the_spans_with_its_headers_and_the_name_of_the_service(monkeypatch: Any) -> None:
    monkeypatch.setenv("OTLP_TOKEN", "a-secret-token")
    with collector() as running:
        begin_spans(TelemetryConfig(endpoint=running.endpoint, headers={"X-Token": "OTLP_TOKEN"}), service="tests")
        make_spans(3)
        use_spans(Spans())
        assert type(process_spans()) is Spans
    assert [(span.name, span.service) for span in sorted(running.spans, key=lambda s: s.name)] == [
        (f"span {index}", "tests") for index in range(3)
    ]
    assert {headers["x-token"] for headers in running.headers} == {"a-secret-token"}
    assert "a-secret-token" not in repr(running.spans)


def test_the_variables_of_opentelemetry_are_followed(monkeypatch: Any) -> None:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-from=variable")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "our-models")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        begin_spans(TelemetryConfig(endpoint="environment", sample=0.0), service="tests")
        make_spans(1)
        use_spans(Spans())
        (span,), (headers,) = running.spans, running.headers
        assert (span.service, headers["x-from"]) == ("our-models", "variable")
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        begin_spans(TelemetryConfig(endpoint="environment"), service="tests")
        make_spans(1)
        use_spans(Spans())
        assert len(running.spans) == 1


def test_a_missing_variable_of_a_header_is_named_with_the_fix() -> None:
    config = TelemetryConfig(endpoint="http://127.0.0.1:9", headers={"authorization": "NOT_SET_ANYWHERE"})
    with pytest.raises(
        ValueError, match=r"telemetry.headers.authorization: the environment variable NOT_SET_ANYWHERE is not set"
    ):
        begin_spans(config, service="tests")
    assert type(process_spans()) is Spans


@pytest.mark.nightly
def test_a_collector_that_hangs_holds_up_nothing_and_the_memory_stays_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as running:
        running.may_answer.clear()
        begin_spans(TelemetryConfig(endpoint=running.endpoint), service="tests")
        export = make_spans(3000)
        held = export._processor._batch_processor
        assert len(held._queue) <= held._max_queue_size == 2048
        process_spans().flush()
        use_spans(Spans())
        assert not running.may_answer.is_set() and running.spans == [], "nothing was waited for"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the last spans may be lost"]


def test_a_collector_that_fails_is_told_of_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as running, caplog.at_level(logging.WARNING):
        running.status = 400
        begin_spans(TelemetryConfig(endpoint=running.endpoint), service="tests")
        for _ in range(3):
            make_spans(2)
            process_spans().flush()
        running.status = 200
        for _ in range(2):
            make_spans(1)
            process_spans().flush()
        use_spans(Spans())
    lost, again = [record.getMessage() for record in caplog.records]
    assert lost.startswith(
        f"spans are lost until {running.endpoint} takes them: Failed to export spans batch code: 400"
    )
    assert again == f"spans are sent to {running.endpoint} again, 6 or more were lost"


def test_nobody_at_the_endpoint_is_told_of_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with collector() as running:
        nobody = running.endpoint
    with caplog.at_level(logging.WARNING):
        begin_spans(TelemetryConfig(endpoint=nobody), service="tests")
        for _ in range(3):
            make_spans(10)
            process_spans().flush()
        use_spans(Spans())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"spans are lost until {nobody} takes them: Failed to export spans batch")


@pytest.mark.parametrize(("sample", "expected"), [(0.0, 0), (1.0, 5)])
def test_a_share_of_the_traces_is_recorded(sample: float, expected: int) -> None:
    with exported(sample=sample) as memory:
        make_spans(5)
        assert len(spans_of(memory)) == expected


def test_the_same_settings_go_on_with_the_same_export_and_others_begin_anew() -> None:
    with exported():
        first = process_spans()
        begin_spans(TelemetryConfig(endpoint="http://127.0.0.1:9"), service="tests")
        assert process_spans() is first
        begin_spans(TelemetryConfig(), service="tests")
        assert type(process_spans()) is Spans


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"endpoint": "collector:4318"}, "no base URL of a collector"),
        ({"endpoint": "http://user:secret@collector:4318"}, "no base URL of a collector"),
        ({"endpoint": "http://collector:4318/?token=x"}, "no base URL of a collector"),
        ({"headers": {"authorization": "Bearer abc"}}, "authorization: give the name of an environment variable"),
        ({"sample": 2}, "less than or equal to 1"),
        ({"port": 4318}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TelemetryConfig(**settings)


def test_texts_that_may_not_be_stored_are_not_sent_either() -> None:
    with pytest.raises(ValidationError, match=r"gateway.telemetry.texts would send texts to the collector"):
        GatewayConfig(telemetry=TelemetryConfig(texts=True), capture=CaptureConfig(redact={"a": "b"}))
