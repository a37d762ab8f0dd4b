"""trace_filters: properties of episodes and rewards -> the SQL conditions that LanceDB takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stores.types import COUNTED, SOUND, Cause, EpisodeStatus, RewardsRef, TracesRef

if TYPE_CHECKING:
    from lancedb.table import Table


def equals(**values: str | int | None) -> str:
    """Returns SQL for the conjunction of the values that are not None, given by column; empty if all are None."""
    return " AND ".join(f"{name} = {literal(value)}" for name, value in values.items() if value is not None)


def pinned_by(ref: TracesRef | RewardsRef) -> str:
    """Returns SQL for the rows that a ref pins."""
    key: dict[str, Any] = {"run_id": ref.run_id, "iteration": ref.iteration, "purpose": ref.purpose}
    if isinstance(ref, RewardsRef):
        return equals(**key, credit_version=ref.credit_version)
    return equals(**key, team_key=ref.team_key) + without_groups(ref.excluded_groups)


def without_groups(groups: Sequence[str]) -> str:
    """Returns SQL, to be appended to a condition, for the episodes of other groups than these."""
    return f" AND group_id NOT IN ({quoted(groups)})" if groups else ""


def with_status(statuses: Sequence[EpisodeStatus] | None) -> str:
    """Returns SQL, to be appended to a condition, for the episodes with one of these statuses; None: all."""
    if statuses is None:
        return ""
    return f" AND status IN ({quoted(statuses)})" if statuses else " AND false"


def with_cause(causes: Sequence[Cause] | None, table: Table) -> str:
    """Returns SQL, to be appended to a condition, for the episodes of `table` with one of these causes; None: all.

    A table of an earlier version knows statuses only.
    """
    if causes is None:
        return ""
    if "cause" not in table.schema.names:
        assert tuple(causes) == COUNTED, "the only causes that statuses tell"
        return with_status(SOUND)
    return f" AND cause IN ({quoted(causes)})" if causes else " AND false"


def played_by(policy_versions: Mapping[str, int]) -> list[str]:
    """Returns an SQL condition per model group: the column is a JSON object, in whose order the groups stand as written."""
    entries = [f"{json.dumps(group, ensure_ascii=False)}: {version}" for group, version in policy_versions.items()]
    return [
        f"(contains(policy_versions, {literal(f'{entry},')}) OR contains(policy_versions, {literal(entry + '}')}))"
        for entry in entries
    ]


def literal(value: str | int) -> str:
    """Returns a value as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def quoted(values: Sequence[str]) -> str:
    """Returns values as SQL literals, separated by commas."""
    return ", ".join(literal(value) for value in values)
