"""proving: targets -> a proof from each replica, by its versions and its probe logprobs, or a SyncError."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_apps.policy.app_list import deployed_apps, num_replicas
from serve_apps.policy.proof import FLOAT32, Limits, Proof, SyncError, SyncTimeoutError, Verdict, judge, telling
from serve_apps.policy.replicas import REPLICA_TIMEOUT_S, Broadcast
from stores.journal.waiting import waiting
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Names the version that an app should serve a model group with; an app of adapters has a target for each group."""

    app: str
    model: ModelVersionRef
    before: ModelVersionRef | None = None
    """The version that it must be told apart from; None: none is known."""
    limits: Limits = FLOAT32
    """What the proof allows."""


def prove_apps(
    targets: Sequence[Target],
    weights: WeightStore,
    *,
    started: float | None = None,
    timeout_s: float = REPLICA_TIMEOUT_S,
) -> list[Proof]:
    """Asks every replica of every app for the versions it serves and their logprobs on the targets' probe sequences.

    All model groups of an app are asked in one call, which the engine computes as one batch.
    Args: timeout_s: how long replicas may be missing, as one is that Serve replaces.

    Raises SyncError, naming replica, model group, version and numbers, if a replica is not proven or does not answer;
    changes nothing.
    """
    since = time.monotonic() if started is None else started
    probes = {target: _probes(target, weights) for target in targets}
    pending = []
    for app in dict.fromkeys(target.app for target in targets):
        asked = [target for target in targets if target.app == app]
        sequences = {target.model.model_group: _probe_sequences(*probes[target]) for target in asked}
        pending.append((app, asked, Broadcast(app, "probe", sequences)))
    apps = deployed_apps()
    proofs = []
    for app, asked, broadcast in pending:
        with waiting(f"replicas of {app} to prove {versions_of(asked)}"):
            try:
                answers = broadcast.answers(num_replicas(apps[app]), timeout_s=timeout_s)
            except TimeoutError as error:
                raise SyncTimeoutError(str(error)) from None
        for statuses, logprobs in answers:
            for target in asked:
                (status,) = (s for s in statuses if s["model_group"] == target.model.model_group)
                judged = _judged(logprobs[target.model.model_group], *probes[target], target.limits)
                proofs.append(_proof(target, status, judged, seconds=time.monotonic() - since))
    _raise_for_failures(proofs, targets)
    return proofs


def _judged(
    logprobs: list[list[float]], new: Probe, old: Probe | None, limits: Limits
) -> tuple[Verdict, float, float | None]:
    # The old version's sequences were asked behind the new one's, and left out where they are the same.
    on_old = logprobs[len(new.sequences) :] or logprobs if old else None
    return judge(
        logprobs[: len(new.sequences)],
        new.logprobs,
        on_old,
        old.logprobs if old else None,
        tolerance=limits.tolerance,
        noise=limits.noise,
    )


def _proof(
    target: Target, status: Mapping[str, Any], judged: tuple[Verdict, float, float | None], *, seconds: float
) -> Proof:
    verdict, to_new, to_old = judged
    return Proof(
        app=target.app,
        model_group=target.model.model_group,
        replica_id=status["replica_id"],
        pid=status["pid"],
        version=status["version"],
        max_difference_new=to_new,
        max_difference_old=to_old,
        noise=target.limits.noise,
        verdict=verdict if serves(status, target.model) else "failed",
        seconds=seconds,
    )


def serves(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    """Returns whether a replica reports that it serves exactly this version."""
    return (status["version"], status["manifest_sha256"]) == (ref.version, ref.manifest_sha256)


def versions_of(targets: Iterable[Target]) -> str:
    """Returns the versions of targets for a message: `solver@3, verifier@3`."""
    return ", ".join(f"{target.model.model_group}@{target.model.version}" for target in targets)


def _probes(target: Target, weights: WeightStore) -> tuple[Probe, Probe | None]:
    """Returns the probe that the target is recognised by, and the probe of the version that it is told apart from.

    For an adapter both are the beginning of one sequence, which is chosen to tell the versions apart: all adapters of an
    app are proven in one call, and the whole probes would prove no more.
    """
    manifest = weights.manifest(target.model)
    new, old = manifest.probe, weights.manifest(target.before).probe if target.before else None
    if manifest.base is None or (old is not None and old.sequences != new.sequences):
        return new, old
    base = weights.manifest(manifest.base).probe
    others = [other.logprobs for other in (old, base) if other is not None and other.sequences == new.sequences]
    index, length = telling(new.logprobs, others)
    return _only(new, index, length), None if old is None else _only(old, index, length)


def _only(probe: Probe, index: int, length: int) -> Probe:
    """Returns the beginning of one sequence: as many tokens as have `length` logprobs (the first token has none)."""
    return Probe(sequences=(probe.sequences[index][: length + 1],), logprobs=(probe.logprobs[index][:length],))


def _probe_sequences(new: Probe, old: Probe | None) -> list[list[int]]:
    """Returns the new version's probe sequences, then the old one's if they differ."""
    more = () if old is None or old.sequences == new.sequences else old.sequences
    return [list(sequence) for sequence in (*new.sequences, *more)]


def _raise_for_failures(proofs: Sequence[Proof], targets: Sequence[Target]) -> None:
    failed = [p for p in proofs if p.verdict == "failed"]
    if not failed:
        return
    target_of = {(target.app, target.model.model_group): target for target in targets}
    lines = []
    for p in failed:
        target = target_of[p.app, p.model_group]
        limits = target.limits
        line = (
            f"app {p.app!r}, replica {p.replica_id} (pid {p.pid}), model group {p.model_group!r} should serve version "
            f"{target.model.version}, says {p.version}; max |logprob difference| to it {p.max_difference_new:.4g} "
        )
        if p.max_difference_old is None:
            line += f"(without another version to tell it apart from, sync.proof_noise = {limits.noise:g} is allowed"
        else:
            line += f"(tolerance {limits.tolerance:g}), to the version before {p.max_difference_old:.3g} (noise {limits.noise:g}"
        lines.append(f"{line}; {limits.pair})")
    raise SyncError("\n".join(lines), proofs)
