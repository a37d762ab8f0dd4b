"""Agent frameworks, unchanged and by their documented defaults, against a gateway with a real engine: a case per cell of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from servers import free_port

from pipelines.release.production import deploy_team
from pipelines.run.run import Run
from pipelines.run.serving import app_names
from pipelines.runners.begin import plain_config, untrained_team
from serve_apps.gateway.routes import gateway_apps
from tests.clients.known_model import CONTEXT, write_model
from tests.clients.table import CELLS, ENVIRONMENT_OF
from tests.serve_apps.deployed_apps import remove_apps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "clients"


@pytest.fixture(scope="module")
def gateway(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a gateway that serves the known model."""
    folder = write_model(tmp_path_factory.mktemp("clients") / "known")
    changes = {"serve.max_model_len": CONTEXT, "serve.kv_cache_gib": 0.5, "gateway.port": free_port()}
    run = Run(plain_config(folder, root=str(folder.parent / "runs"), changes=changes))
    version, team = untrained_team(run, folder=folder)
    yield deploy_team(run, version, team)["url"]
    remove_apps([*app_names(run, "blue").values(), *gateway_apps(run.config.gateway)])


@cache
def why_missing(environment: str) -> str:
    """Makes an environment; returns why that cannot be done here, empty where it is there."""
    if environment == "node" and not (shutil.which("node") and shutil.which("npm")):
        return "node and npm are not installed"
    made = subprocess.run([HERE / "make.sh", environment], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    if made.returncode == 0:
        return ""
    return (
        f"tests/clients/make.sh {environment} failed; it needs a package registry that answers: {made.stderr[-2000:]}"
    )


@cache
def output(framework: str, url: str) -> subprocess.CompletedProcess[str]:
    """Plays all cells of a framework."""
    folder = CACHE / ENVIRONMENT_OF[framework]
    program = ["node", folder / "play.mjs"] if folder.name == "node" else [folder / "bin" / "python", HERE / "play.py"]
    package = framework.removeprefix("node:")
    return subprocess.run([*program, url, "known/model", package], capture_output=True, text=True, timeout=600)


def faults(framework: str, url: str) -> dict[str, str]:
    """The fault of each cell that was played. Where the environment is missing the case is skipped, but fails in CI."""
    if missing := why_missing(ENVIRONMENT_OF[framework]):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    done = output(framework, url)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"framework"')]
    return {line["cell"]: line["fault"] for line in lines}


@pytest.mark.parametrize(("framework", "cell"), [(name, cell) for name, cells in CELLS.items() for cell in cells])
def test_a_framework_gets_what_it_asks_for(framework: str, cell: str, gateway: str) -> None:
    assert faults(framework, gateway)[cell] == ""


@pytest.mark.parametrize("framework", CELLS)
def test_the_table_has_every_cell_that_is_played(framework: str, gateway: str) -> None:
    assert tuple(faults(framework, gateway)) == CELLS[framework]
