"""extensions: what Troupe can do beside its core -> the commands, config sections and routes that are there.

    LAYER/extensions/NAME/, of pipelines, serve_apps, train_loops    Troupe's own: a folder may be left out, and the core goes on
    an entry point of the group `troupe.extensions`                  of a package that is installed beside Troupe

A credit rule, a workflow, a world or an estimator is named by its dotted path, and needs no more than its folder. What adds to the command line, to run
configs or to the gateway says so in `extension.py` of its folder, or in what the entry point names: `EXTENSION = Extension(...)`. The core
imports none of them by name (an import contract), and runs its tests without the folders.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stores.by_name import open_by_name

logger = logging.getLogger(__name__)

GROUP = "troupe.extensions"
HOMES = ("pipelines.extensions", "serve_apps.extensions", "train_loops.extensions")
SECTIONS: Mapping[str, str] = {"compare": "pipelines.extensions.compare", "watch": "pipelines.extensions.watch"}
"""The sections of run configs that Troupe's own extensions add, with their packages: for whoever names one that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What an extension adds. Paths are `package.module:Name`, which is imported only when it is needed."""

    name: str
    sections: Mapping[str, str] = field(default_factory=dict)
    """Section of the run config -> a subclass of `stores.settings.Settings`. It is null where a config has none, and no part of what
    identifies a run."""
    commands: str = ""
    """`add_to(app: typer.Typer) -> None`, which adds commands to `troupe`. Errors of a command are reported as those of the core's."""
    notes: str = ""
    """`notes(config: RunConfig) -> list[str]`, what `troupe validate` says beside its own, of a run config that it has found valid."""
    worlds: str = ""
    """A module in which worlds live: `session_of(environment)`, see `serve_apps.worlds.world`, and `await reach(environment)`, which raises
    ToolFault where a server takes no connection. The first extension that names one counts."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Key in an entry of a declared workflow's `tools` -> `make(name, settings) -> Tool`, which raises TypeError for other settings."""
    observer: str = ""
    """A subclass of `pipelines.cluster.observe.Observer`, which is made once in a process: it is told what happens in runs."""
    begins: str = ""
    """`lines(run: Run) -> list[str]`, what is said once version 0 of a run is there, before its iterations; ValueError ends it."""
    stacks: str = ""
    """`add(path: Path) -> None`, which adds what the processes of a stage that hangs are doing to a file with the stacks of this one."""
    routes: str = ""
    """`add_to(api: FastAPI, service: Service) -> AsyncContextManager | None`, which adds routes to a gateway, before it serves; what it
    returns is entered when the gateway starts, and left when it ends."""
    episode_routes: str = ""
    """`add_to(routes: APIRouter, episodes: Episodes) -> None`, which adds routes to the episodes that programs play."""
    spans: str = ""
    """A subclass of `serve_apps.spans.Spans`, made from a `TelemetryConfig` and `service`: what exports the spans of a process. The
    first extension that has one counts."""
    records: str = ""
    """`found(run: Run, iteration: int, *, at: float) -> pipelines.report.parts.Found` of an iteration when it is recorded."""
    episodes: str = ""
    """`show(tracker: RunTracker, mlflow_run: str, episodes)`, which shows some episodes of an iteration, each with its rewards or None,
    beside the figures of the iteration's MLflow run. It may be called again with the same ones."""
    reports: str = ""
    """`part(run: Run, last: int) -> pipelines.report.parts.Part | None` of a report, as far as iteration `last`."""
    shows: str = ""
    """`shown(run: Run, trace: Trace) -> rich.console.RenderableType | None`, which `troupe show` shows below an episode."""
    holds: str = ""
    """`reasons(run: Run) -> list[str]` why the schedule must begin no further iteration; none where it may."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Returns the extensions that are there, Troupe's own first, by name.

    A package whose extension does not load, is no `Extension`, or has a section that another one has, is left out.

    Raises:
        ValueError: one of Troupe's own does not load.
    """
    found = [_opened(f"{home}.{name}.extension:EXTENSION") for home in HOMES for name in _folders(home)]
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        with left_out_if_broken(f"package {point.dist.name if point.dist else point.module}"):
            extension = _opened(point.value)
            for other in found:
                for section in other.sections.keys() & extension.sections.keys():
                    raise ValueError(
                        f"extensions {other.name!r} and {extension.name!r} both have the config section {section!r}: uninstall one"
                    )
            found.append(extension)
    return tuple(found)


def hooks(kind: str) -> dict[str, Any]:
    """Returns by extension what `Extension` names under `kind`, for example `reports`, of those that name something there."""
    named = {extension.name: getattr(extension, kind) for extension in extensions()}
    return {name: open_by_name(path, place=f"extension {name}, {kind}") for name, path in named.items() if path}


def ask(hook: str, *given: Any) -> list[str]:
    """Returns the lines that the extensions with a hook have to say, one extension after another. Args: hook: a field of `Extension`."""
    return [line for say in hooks(hook).values() for line in say(*given) or ()]


def section_models(core: Collection[str] = ()) -> dict[str, Any]:
    """Returns the settings class of every config section that an extension adds; one that does not load is left out.

    So is one with the name of a section in `core`, which it would replace.
    """
    models: dict[str, Any] = {}
    for extension in extensions():
        for section, path in extension.sections.items():
            place = f"extension {extension.name}, section {section}"
            with left_out_if_broken(place):
                if section in core:
                    raise ValueError(f"Troupe has a config section {section!r} itself: rename this one")
                models[section] = open_by_name(path, place=place, is_parsing=True)
    return models


@contextmanager
def left_out_if_broken(what: str) -> Iterator[None]:
    """Logs one line about what another package does not do, so that whoever does not use it can go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever their code raises
        logger.error("%s is left out: %s", what, " ".join(str(error).split()) or type(error).__name__)


def _folders(home: str) -> list[str]:
    spec = find_spec(home)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return sorted(file.parent.name for place in places for file in Path(place).glob("*/extension.py"))


def _opened(path: str) -> Extension:
    return open_by_name(
        path,
        place=f"extension {path}",
        wanted="a stores.extensions.Extension",
        fits=lambda found: isinstance(found, Extension),
        is_parsing=True,
    )
