"""inside_ray: what Troupe uses of Ray beyond what Ray documents, all in one place for whoever updates it.

`tests/stores/test_inside_ray.py` names every attribute. Ray is imported where it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

AUTHENTICATION_LOGGER = "ray._private.authentication"


def dashboard_address() -> str:
    """Returns host and port of the dashboard of the cluster that this process is connected to; empty if it has none."""
    from ray._private import ray_constants
    from ray.experimental.internal_kv import _internal_kv_get

    key, namespace = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    address = _internal_kv_get(key, namespace=namespace)
    return address.decode() if address else ""


def has_package(name: str) -> bool:
    """Whether the cluster keeps a package that was uploaded by the job API under this name."""
    from ray.experimental.internal_kv import _internal_kv_exists

    return bool(_internal_kv_exists(f"gcs://{name}".encode()))


def deploy_applications(url: str, applications: Iterable[Mapping[str, Any]]) -> None:
    """Makes these the applications of Serve. Raises RuntimeError with its message where it refuses."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    config = {"proxy_location": "Disabled", "applications": list(applications)}
    ServeSubmissionClient(url).deploy_applications(config)


async def taken(stream: Any) -> None:
    """Returns once a replica has taken the call of this stream of Serve, or raises what Serve raises."""
    await stream._to_object_ref_gen()


def forget_serve_client() -> None:
    """Has Serve look for its controller again. It keeps its client as long as Ray's job id is the same."""
    if context := sys.modules.get("ray.serve.context"):
        context._set_global_client(None)


def session_name() -> str:
    """Returns the name of the Ray session that this process is connected to; empty if none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    from ray._private.worker import global_worker

    return str(global_worker.node.session_name) if global_worker.node is not None else ""


def use_token() -> None:
    """Makes this process send Ray's token, unless RAY_AUTH_MODE says otherwise."""
    from ray._private.authentication.authentication_token_setup import Config

    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray read its settings as it was imported; it does this itself for a head of its own


def free_reservations_of_the_dead() -> None:
    """Removes placement groups of Ray Train controllers that are dead: nobody can use them again.

    Ray Train removes them itself, but only once all workers of a group are up. It keeps those of a controller that was
    killed earlier as long as the driver lives, and the next start would wait for CPUs that no process uses. Only Ray's own
    tables say who made a group.
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # made at run time
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for row in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(row)
        if not group.creator_actor_dead or group.state == PlacementGroupTableData.REMOVED:
            continue
        creator = state.actor_table(group.creator_actor_id.hex())
        if creator.get("ActorClassName") == "TrainController":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
