"""Credit rules: the outcome of an episode -> a reward per turn, recomputable over stored traces."""

from pipelines.credit.rule import Credit, CreditKind, CreditRule, format_penalty, turn_reward

__all__ = ["Credit", "CreditKind", "CreditRule", "format_penalty", "turn_reward"]
