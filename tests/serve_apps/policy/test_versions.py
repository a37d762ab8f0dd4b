"""Which versions are live after a change of them, on an engine that only notes what it is told to load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_apps.engines.port import AdapterRoom
from serve_apps.policy import versions as versions_module
from serve_apps.policy.versions import Versions
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast


def ref(group: str, version: int) -> ModelVersionRef:
    return ModelVersionRef(model_group=group, version=version, uri="u", manifest_sha256=f"{group}{version}")


WANTED = {"a": ref("a", 1), "b": ref("b", 1)}


def taken(
    monkeypatch: pytest.MonkeyPatch, *, of_check: Mapping[str, Exception], of_load: Mapping[str, Exception]
) -> tuple[list[str], dict[str, tuple[Any, str]]]:
    """What was done in turn, and live version and error of each group. Args: by group, the errors of its check and its load."""
    done: list[str] = []

    def verified(ref: ModelVersionRef) -> Path:
        done.append(f"check {ref.model_group}")
        if error := of_check.get(ref.model_group):
            raise error
        return Path()

    class NotingEngine:
        async def load(self, ref: ModelVersionRef, folder: Path) -> None:
            done.append(f"load {ref.model_group}")
            if error := of_load.get(ref.model_group):
                raise error

    monkeypatch.setattr(versions_module, "_verified_folder", verified)
    room = AdapterRoom(model_groups=tuple(WANTED), max_rank=1, target_modules=())
    versions = Versions(NotingEngine(), ref("base", 0), room)  # type: ignore[arg-type]
    asyncio.run(versions.take(WANTED))
    return done, {group: (state.live and state.live.version, state.error) for group, state in versions.states.items()}


def test_adapters_go_live_together_once_all_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    done, live = taken(monkeypatch, of_check={}, of_load={})
    assert done == ["check a", "check b", "load a", "load b"]
    assert live == {"a": (1, ""), "b": (1, "")}


def test_a_version_that_cannot_be_fetched_or_does_not_fit_is_kept_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, live = taken(monkeypatch, of_check={"a": TimeoutError()}, of_load={})
    assert live == {"a": (None, "TimeoutError"), "b": (1, "")}
    _, live = taken(monkeypatch, of_check={}, of_load={"a": ValueError("too large")})
    assert live == {"a": (None, "too large"), "b": (1, "")}


@pytest.mark.parametrize("error", [TimeoutError, ConnectionError, RuntimeError])
def test_an_engine_that_breaks_as_it_loads_is_not_kept(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    with pytest.raises(error):
        taken(monkeypatch, of_check={}, of_load={"b": error()})
