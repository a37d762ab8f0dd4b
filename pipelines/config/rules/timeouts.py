"""timeouts: every wait inside a stage ends before the stage's deadline, and that before the deadline of its job."""

from __future__ import annotations

from itertools import pairwise

from pipelines.config.run_sections import RunSections


def timeouts_nest(config: RunSections) -> None:
    """Each timeout is below the one that encloses it."""
    call, episode = config.collect.call, config.collect.episode
    chain = [
        ("collect.call.call_timeout_s", call.call_timeout_s),
        ("collect.episode.turn_timeout_s", episode.turn_timeout_s),
        ("collect.episode.episode_timeout_s", episode.episode_timeout_s),
        ("collect.stage_timeout_s", config.collect.stage_timeout_s),
    ]
    evaluate = ("evaluate.stage_timeout_s", config.evaluate.stage_timeout_s)
    sync = ("sync.stage_timeout_s", config.sync.stage_timeout_s)
    pairs = [*pairwise(chain), (chain[2], evaluate)]
    if config.collect.budget.seconds is not None:
        pairs.append((("collect.budget.seconds", config.collect.budget.seconds), chain[3]))
    for stage in (chain[3], sync, evaluate):
        pairs.append((("sync.timeout_s", config.sync.timeout_s), stage))
        starts = {config.serve_config(group).start_timeout_s for group in config.model_groups}
        pairs += [(("serve.start_timeout_s", start), stage) for start in starts]
    if config.promote.deploy != "never":
        promote = ("promote.stage_timeout_s", config.promote.stage_timeout_s)
        pairs += [(("serve.start_timeout_s", start), promote) for start in starts]
    trains = [config.train_config(group) for group in config.model_groups]
    for train in trains:
        stage = ("train.stage_timeout_s", train.stage_timeout_s)
        pairs.append((("train.job_timeout_s", train.job_timeout_s), stage))
    if config.schedule is not None:
        stages = [chain[3], sync, evaluate, *(("train.stage_timeout_s", t.stage_timeout_s) for t in trains)]
        stages += [(f"{name}.stage_timeout_s", getattr(config, name).stage_timeout_s) for name in ("score", "promote")]
        if config.warmstart is not None:
            stages.append(("warmstart.stage_timeout_s", config.warmstart.stage_timeout_s))
        pairs += [(stage, ("schedule.stage_timeout_s", config.schedule.stage_timeout_s)) for stage in stages]
    for (inner, a), (outer, b) in pairs:
        if a >= b:
            raise ValueError(f"deadlines must nest: {inner} = {a:g} s is not below {outer} = {b:g} s")
