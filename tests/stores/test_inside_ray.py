"""What Troupe uses of Ray beyond its documentation is in one file, and is there in the Ray that is installed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
INSIDE = re.compile(
    r"ray\._private|ray\.serve\._private|ray\.core\.generated|ray\.dashboard|_internal_kv|_to_object_ref_gen"
)
ATTRIBUTES = {
    "ray._private.ray_constants": ("DASHBOARD_ADDRESS", "KV_NAMESPACE_DASHBOARD"),
    "ray.experimental.internal_kv": ("_internal_kv_get", "_internal_kv_exists"),
    "ray.dashboard.modules.serve.sdk": ("ServeSubmissionClient.deploy_applications",),
    "ray.serve.handle": ("DeploymentResponseGenerator._to_object_ref_gen",),
    "ray.serve.context": ("_set_global_client",),
    "ray._private.worker": ("global_worker",),
    "ray._private.authentication.authentication_token_setup": ("Config.initialize",),
    "ray._private.state": ("state._connect_and_get_accessor", "state.actor_table"),
    "ray.core.generated.gcs_pb2": ("PlacementGroupTableData.REMOVED", "PlacementGroupTableData.FromString"),
}


def test_only_one_file_looks_inside_ray() -> None:
    folders = ("stores", "serve_apps", "train_loops", "pipelines", "dags")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    inside = [str(file.relative_to(ROOT)) for file in sources if INSIDE.search(file.read_text())]
    assert inside == ["stores/inside_ray.py"]


@pytest.mark.test
@pytest.mark.parametrize("module", ATTRIBUTES)
def test_what_is_used_of_ray_is_there(module: str) -> None:
    for path in ATTRIBUTES[module]:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
