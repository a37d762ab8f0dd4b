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
from pipelines.runners.untrained import plain_config, untrained_team
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
def environment(name: str) -> Path:
    """Returns the folder of an environment; skips the case where it cannot be made, which in CI is a failure."""
    give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    if name == "node" and shutil.which("npm") is None:
        give_up("node and npm are not installed: make system")
    made = subprocess.run([HERE / "make.sh", name], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    if made.returncode:
        give_up(f"tests/clients/make.sh {name} failed; it needs a package registry that answers: {made.stderr[-2000:]}")
    return CACHE / name


@cache
def played(framework: str, url: str) -> dict[str, str]:
    """Plays all cells of a framework; returns their faults."""
    folder = environment(ENVIRONMENT_OF[framework])
    program = ["node", folder / "play.mjs"] if folder.name == "node" else [folder / "bin" / "python", HERE / "play.py"]
    package = framework.removeprefix("node:")
    done = subprocess.run([*program, url, "known/model", package], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"framework"')]
    return {line["cell"]: line["fault"] for line in lines}


@pytest.mark.parametrize(("framework", "cell"), [(name, cell) for name, cells in CELLS.items() for cell in cells])
def test_a_framework_gets_what_it_asks_for(framework: str, cell: str, gateway: str) -> None:
    assert played(framework, gateway)[cell] == ""


@pytest.mark.parametrize("framework", CELLS)
def test_the_table_has_every_cell_that_is_played(framework: str, gateway: str) -> None:
    assert tuple(played(framework, gateway)) == CELLS[framework]
