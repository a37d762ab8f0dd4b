"""renamed: old names of config keys, their values and dotted paths -> what they are called now, or what does their work.

An old name is refused with the new one. A rename adds a line here and one to CHANGELOG.md.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED_KEYS: Mapping[str, str] = {
    "collect.tail": "collect.incomplete_groups",
    "maintain.readers_s": "maintain.reader_grace_s",
    "promote.into_service": "promote.deploy",
    "traffic.guards.seconds": "traffic.guards.latency_s",
    "traffic.shadow": "traffic.shadow_share",
    "train.order_timeout_s": "train.job_timeout_s",
    "watch.floors.cut_turns": "watch.floors.cut_share",
    "watch.floors.failures": "watch.floors.failure_share",
    "watch.floors.feedback": "watch.floors.feedback_score",
    "watch.floors.format_faults": "watch.floors.format_share",
    "watch.floors.refusals": "watch.floors.refusal_share",
    "watch.floors.repeats": "watch.floors.repeat_share",
    "watch.floors.reward_over_success": "watch.floors.reward_over_outcome",
    "watch.floors.seconds": "watch.floors.latency_s",
    "watch.floors.success": "watch.floors.outcome",
    "watchdog.every_s": "watchdog.log_interval_s",
}
"""Old key -> new key, both from the root of a run config. The section stays the same."""

SPLIT_KEYS: Mapping[str, tuple[str, ...]] = {
    "train.loss.kl_estimator": ("train.loss.kl_in_reward_estimator", "train.loss.kl_in_loss_estimator"),
}
"""Old key -> the keys that took its place, in the same section."""

REMOVED_KEYS: Mapping[str, str] = {
    "train.train_statuses": (
        "drop it: who caused a failure decides; an episode whose failure the policy caused is trained on with the credit "
        "rule's worst outcome, other failures are not"
    ),
}
"""Key that is no more -> what to do."""

RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "collect.incomplete_groups": {"cut": "drop"},
    "evaluate.test": {"bootstrap": "auto"},
    "promote.on_failed_group": {"hold": "fail", "rest": "keep_parent"},
    "watch.on_alarm": {"tell": "warn", "hold": "fail"},
}
"""Key -> old value -> new value."""

MOVED_MODULES: Mapping[str, str] = {
    "pipelines.arithmetic": "pipelines.examples.arithmetic.tasks",
    "pipelines.arithmetic_demonstrator": "pipelines.examples.arithmetic.demonstrator",
    "pipelines.calculator_demonstrator": "pipelines.examples.calculator.demonstrator",
    "pipelines.counting_house": "pipelines.examples.counting_house.tasks",
    "pipelines.counting_house_credit": "pipelines.examples.counting_house.credit",
    "pipelines.counting_house_demonstrator": "pipelines.examples.counting_house.demonstrator",
    "pipelines.made_up_facts": "pipelines.examples.made_up_facts.tasks",
    "pipelines.made_up_facts_demonstrator": "pipelines.examples.made_up_facts.demonstrator",
    "pipelines.small_functions": "pipelines.examples.small_functions.tasks",
    "pipelines.small_functions_demonstrator": "pipelines.examples.small_functions.demonstrator",
    "serve_apps.programs.calculator": "pipelines.examples.calculator.program",
    "serve_apps.workflows.counting_house": "pipelines.examples.counting_house.workflow",
}
"""Old module -> new module, of those that a run config names by dotted path. The names inside are the same."""
