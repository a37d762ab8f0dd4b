"""Passwords in URLs are never shown, wherever in a URL they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from stores.url_secrets import without_secrets

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[2] / "infra/runs/demo.yaml"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql+psycopg://troupe:s3cret@host/troupe", "postgresql+psycopg://troupe:...@host/troupe"),
        (
            "postgresql://troupe@host/d?password=s3cret&sslmode=require",
            "postgresql://troupe@host/d?password=...&sslmode=require",
        ),
        ("s3://key:s3cret/x@bucket", "s3://key:s3cret/x@bucket"),
        ("s3://key:s3cret@bucket/a", "s3://key:...@bucket/a"),
        ("https://h/a?X-Amz-Security-Token=s3cret", "https://h/a?X-Amz-Security-Token=..."),
        ("mongodb://u:p@s3cret@host/d", "mongodb://u:...@host/d"),
        ("redis://:s3cret@host", "redis://:...@host"),
        ("two http://a:s3cret@b and http://c:s3cret@d", "two http://a:...@b and http://c:...@d"),
        ("sqlite:///a/b.db", "sqlite:///a/b.db"),
        ("http://127.0.0.1:5000/a?token_count=3", "http://127.0.0.1:5000/a?token_count=3"),
        ("mail a:b@c", "mail a:b@c"),
    ],
)
def test_a_password_is_replaced_and_nothing_else(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("storage.journal", "postgresql+psycopg://troupe:s3cret@host/troupe"),
        ("storage.journal", "postgresql+psycopg://troupe@host/troupe?password=s3cret"),
        ("storage.mlflow", "http://me:s3cret@mlflow:5000"),
        ("model_groups.solver_verifier.model", "s3://key:s3cret@bucket/model"),
        ("workflow.settings", {"environment": {"DATABASE_URL": "postgresql://a:s3cret@h/d"}}),
        ("cluster.address", "http://me:s3cret@head:8265"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_run_config_with_a_password_is_refused_and_does_not_show_it(key: str, value: object) -> None:
    with pytest.raises(ValueError, match="holds a password, and a run config is stored and shown") as refused:
        load_config(DEMO, {key: value})
    assert "s3cret" not in str(refused.value) and key.split(".")[0] in str(refused.value)
