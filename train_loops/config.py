"""Settings of `train` and of the warm start: pydantic models, nothing heavy imported."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(Settings):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class LossConfig(Settings):
    """PPO clip loss. Defaults are those of verl 0.8 (seed-systems 2.1)."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """c of dual clip; null switches it off."""
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    entropy_coef: float = 0.0
    kl_in_loss_coef: float = Field(0.0, ge=0)
    kl_in_reward_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"


class CriticConfig(Settings):
    """The value model of PPO: own weights, started from the policy's trunk."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    value_clip: float = Field(0.5, gt=0)
    warmup_iterations: int = Field(0, ge=0)
    """Iterations in which only the critic learns."""


class AdvantageConfig(Settings):
    """How advantages are made of turn rewards."""

    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    whiten: Literal["all", "agent", "none"] = "all"
    """PPO only: over which rows GAE advantages are whitened."""
    normalize_std: bool = True
    """GRPO family: divide by the group's standard deviation (False: Dr.GRPO)."""
    ddof: Literal[0, 1] = 1
    eps: float = Field(1e-6, gt=0)
    singleton: Literal["zero", "raw"] = "zero"
    """A group of one carries no comparison: zero (honest) or the raw reward (what the references do)."""


class MismatchConfig(Settings):
    """Trainer against engine on the same tokens (design rule 4), absolute logprob difference in nats."""

    tolerance_mean: float = Field(1e-3, gt=0)
    """Beyond it (or `tolerance_max`) truncated importance weights are applied."""
    tolerance_max: float = Field(0.05, gt=0)
    limit_mean: float = Field(0.1, gt=0)
    """Beyond it the stage fails."""
    truncation: float = Field(2.0, gt=1)
    """Cap of the importance weight exp(old - rollout)."""


class DeepSpeedConfig(Settings):
    """What of DeepSpeed a user sets."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    bf16: bool = False
    gradient_checkpointing: bool = False


class TrainConfig(Settings):
    """How one model group learns."""

    algorithm: Literal["ppo", "grpo", "dr_mas"] = "dr_mas"
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    mismatch: MismatchConfig = MismatchConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    num_epochs: int = Field(1, ge=1)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch: fixed, whatever the number of rows."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward and backward pass."""
    train_statuses: tuple[Literal["ok", "truncated", "agent_error", "tool_error", "timeout"], ...] = ("ok", "truncated")
    """Episodes that are trained on; the credit rule pays those that are added, with the answer they ended with, if any."""
    train_mixed_versions: bool = False
    num_workers: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    """torch threads per worker."""
    cpus_per_worker: float = Field(0.1, ge=0)
    """What Ray reserves while the warm worker waits."""
    gpus_per_worker: float = Field(0.0, ge=0)
    keep_warm: bool = True
    order_timeout_s: float = Field(1800, gt=0)
    start_timeout_s: float = Field(300, gt=0)
    stage_timeout_s: float = Field(3600, gt=0)

    @model_validator(mode="after")
    def _ppo_only_settings(self) -> Self:
        if self.algorithm != "ppo" and self.critic != CriticConfig():
            raise ValueError(f"train.critic is set but algorithm {self.algorithm!r} has no critic: use ppo or drop it")
        return self


class TinyModelConfig(Settings):
    """A model built from nothing, with its own tokenizer."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position: int = 512
    vocab_size: int = 512
    """Upper bound of the tokenizer trained on the demonstrations."""
    tie_embeddings: bool = True


class ChosenTracesConfig(Settings):
    """Stored traces that serve as demonstrations: what went well in another run's training.

    Traces of tasks that this run holds out are left out, another tokenizer is refused.
    """

    uri: str
    """LanceDB URI of the trace store."""
    weights: str = ""
    """Folder or URI of that run's model versions, whose tokenizer is compared; empty: `weights` beside the traces."""
    run: str
    iteration: int | None = None
    """null: all iterations."""
    min_outcome: float = 1.0
    """Lowest outcome, under any stored credit version, at which a trace is chosen."""


class WarmstartConfig(Settings):
    """Supervised training on demonstrations or chosen traces, before any reinforcement learning."""

    tiny_model: TinyModelConfig | None = None
    """Build a model from nothing; null: start from `model` of each model group."""
    demonstrator: str = ""
    """Dotted path `module:function` that plays every agent, see serve_apps/demonstrate.py."""
    traces: ChosenTracesConfig | None = None
    """Stored traces instead of a demonstrator."""
    num_demonstrations: int = Field(2048, ge=1)
    num_epochs: int = Field(4, ge=1)
    batch_turns: int = Field(64, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3, warmup_steps=20)
    threads: int = Field(2, ge=1)
    stage_timeout_s: float = Field(3600, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.demonstrator) == (self.traces is not None):
            raise ValueError("give exactly one of `demonstrator` and `traces`")
        if self.tiny_model is not None and self.traces is not None:
            raise ValueError("a tiny model is made from a demonstrator: traces hold the token ids of another tokenizer")
        return self
