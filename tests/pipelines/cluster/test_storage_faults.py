"""pipelines.cluster.faults on what LanceDB and pyarrow really raise about object storage."""

from __future__ import annotations

import pytest
from servers import S3, free_port

from pipelines.cluster.faults import FaultKind, diagnose
from stores.traces.store import TraceStore

pytestmark = pytest.mark.test


def fault_of(uri: str) -> tuple[FaultKind, str]:
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        TraceStore(uri).create()
    fault = diagnose(caught.value)
    return fault.kind, fault.message


@pytest.mark.nightly
def test_storage_that_does_not_answer_is_lost_not_bad_input(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    kind, message = fault_of("s3://elsewhere/traces")
    assert kind is FaultKind.LOST
    assert "does not answer (Connect): repeat" in message and "127.0.0.1" in message


def test_a_bucket_that_does_not_exist_is_bad_input(s3_server: S3) -> None:
    kind, message = fault_of("s3://absent/traces")
    assert kind is FaultKind.BAD_INPUT
    assert "refused (NoSuchBucket): see that the bucket" in message


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", FaultKind.BAD_INPUT),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect", FaultKind.LOST),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.", FaultKind.LOST),
        ("Status { status: 503, body: Some('<Error><Code>SlowDown</Code></Error>') }", FaultKind.LOST),
        ("AWS Error NO_SUCH_KEY during GetObject operation", FaultKind.FAILED),
    ],
)
def test_what_storage_says_decides(said: str, kind: FaultKind) -> None:
    assert diagnose(OSError(said)).kind is kind
