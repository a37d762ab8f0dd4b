"""of_training: what the stages `train` and `sync` measure of a model group or agent in each iteration."""

from __future__ import annotations

from pipelines.figures.checks import (
    Check,
    jump_above,
    missing_anchors,
    missing_signal,
    opposed_credit,
    useless_critic,
)
from pipelines.figures.figure import Figure

INDISTINGUISHABLE = "is_indistinguishable"
TRAINING_FIGURES = (
    Figure(
        name=INDISTINGUISHABLE,
        meaning="whether the logprobs of a new version lie within the engine's rounding of its parent's",
        worse="higher",
        changed="new versions cannot be told apart from their parents",
        try_="a higher optimizer.lr: steps are below what bfloat16 stores; or serve.dtype float32 with deepspeed.bf16 false",
    ),
    Figure(
        name="groups_without_signal",
        meaning="share of groups (GRPO sense) whose episodes all earned the same",
        worse="higher",
        changed="most groups have no signal",
        try_="easier or harder tasks, more collect.episodes_per_task, collect.dynamic_sampling, a credit rule per turn",
        check=Check(kind="collapse", seen=missing_signal),
    ),
    Figure(
        name="anchor_share",
        meaning="share of turns that have the prompt of another turn of their task (gigpo)",
        worse="lower",
        changed="few turns share their prompt with another",
        try_="a lower advantage.similarity (0.9), more collect.episodes_per_task, algorithm dr_mas",
        check=Check(kind="collapse", seen=missing_anchors),
    ),
    Figure(
        name="credit_correlation",
        meaning="correlation of an agent's credit with the outcome",
        worse="lower",
        changed="its credit goes against the outcome",
        try_="a credit rule that pays what helps the team, a smaller weight of its other parts (format ...)",
        check=Check(kind="hacking", seen=opposed_credit),
    ),
    Figure(
        name="explained_variance",
        meaning="share of the variance of returns that the critic explains",
        worse="lower",
        changed="the critic explains less than nothing",
        try_="critic.warmup_iterations, another critic.optimizer.lr, an algorithm without a critic",
        check=Check(kind="divergence", seen=useless_critic),
    ),
    Figure(
        name="kl_k3",
        meaning="KL of an update to the parent version in nats per token, estimator k3",
        worse="higher",
        changed="the update moved the policy far from its parent (KL)",
        try_="lower optimizer.lr, or add loss.kl_in_loss_coef",
        compared_by="ratio",
        check=Check(kind="divergence", seen=jump_above(0.05)),
    ),
    Figure(
        name="kl_ref_k3",
        meaning="KL to the reference in nats per token, estimator k3",
        worse="higher",
        changed="the policy left its reference (KL)",
        try_="raise loss.kl_in_loss_coef or loss.kl_in_reward_coef",
        compared_by="ratio",
        check=Check(kind="divergence", seen=jump_above(0.5)),
    ),
    Figure(
        name="grad_norm",
        meaning="norm of the gradient before clipping",
        worse="higher",
        changed="the gradient's norm jumped",
        try_="lower optimizer.max_grad_norm or optimizer.lr",
        compared_by="ratio",
        check=Check(kind="divergence", seen=jump_above(2.0)),
    ),
    Figure(
        name="clip_share",
        meaning="share of tokens whose ratio is clipped",
        worse="higher",
        changed="far more tokens than before were clipped",
        try_="lower optimizer.lr, num_epochs or num_minibatches",
        compared_by="ratio",
        check=Check(kind="divergence", seen=jump_above(0.2)),
    ),
)
