"""overlap: rules about `loop.max_lag`, with which iterations are sampled while earlier ones train."""

from __future__ import annotations

from pipelines.config.run_sections import RunSections


def overlapping_stages_do_not_exclude_each_other(config: RunSections) -> None:
    """Nothing else in the config says that sampling and training take turns, or that an iteration waits for the one before."""
    max_lag = config.loop.max_lag
    if not max_lag:
        return
    place = f"loop.max_lag = {max_lag}"
    if config.pool == "shared":
        raise ValueError(
            f"{place}: with pool: shared the engines sleep while the trainers have the GPU, so that nothing can overlap: give each GPUs of "
            "their own (pool: separate), or drop loop.max_lag"
        )
    for group in config.model_groups:
        if config.train_config(group).mismatch.old_logprobs == "rollout_if_close":
            raise ValueError(
                f"{place}: model group {group!r}: train.mismatch.old_logprobs = 'rollout_if_close' takes the engine's logprobs for those of the "
                "parent, which did not sample: set recompute"
            )
    if config.promote.deploy == "canary":
        raise ValueError(
            f"{place}: promote.deploy = 'canary' holds the gate of an iteration for as long as production traffic takes, and the next "
            "evaluation with it: set direct or never"
        )
    schedule = config.schedule
    if schedule is not None and schedule.cron == "@continuous":
        raise ValueError(
            f"{place}: schedule.cron = '@continuous' allows one DAG run at a time, and overlap needs {1 + max_lag}: set '* * * * *'"
        )
