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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to `min_lr_share` of `lr` at `decay_steps`."""
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps, warm-up included, after which the rate stays at its least; needed by linear and cosine."""
    min_lr_share: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if self.schedule == "constant" and (self.decay_steps or self.min_lr_share):
            raise ValueError("decay_steps and min_lr_share need schedule: linear or cosine")
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule: {self.schedule} needs decay_steps above warmup_steps = {self.warmup_steps}, "
                f"got {self.decay_steps}"
            )
        return self


class AdaptiveKLConfig(Settings):
    """Coefficient of the KL in the reward, steered to a target (Ziegler 2019, as in verl 0.8; seed-systems 2.1)."""

    target: float = Field(0.1, gt=0)
    """Wanted KL to the reference, nats per token."""
    horizon: int = Field(10_000, ge=1)
    """Episodes over which the coefficient may double or halve several times: larger is slower."""


class LossConfig(Settings):
    """The policy loss. Defaults are those of verl 0.8 (seed-systems 2.1)."""

    policy: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """c of dual clip; null switches it off."""
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    norm_tokens: int | None = Field(None, ge=1)
    """Divisor of `seq_mean_token_sum_norm`; null: the longest completion of the minibatch."""
    entropy_coef: float = 0.0
    kl_in_loss_coef: float = Field(0.0, ge=0)
    kl_in_reward_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    adaptive_kl: AdaptiveKLConfig | None = None
    """Adapts `kl_in_reward_coef`, which is where it starts."""

    @model_validator(mode="after")
    def _adapted_kl_is_there(self) -> Self:
        if self.adaptive_kl is not None and self.kl_in_reward_coef == 0:
            raise ValueError("loss.adaptive_kl needs loss.kl_in_reward_coef above 0: the coefficient it starts from")
        return self


class CriticConfig(Settings):
    """The value model of PPO."""

    kind: Literal["own", "shared", "frozen"] = "own"
    """`own`: weights of its own, started from the policy's trunk. `shared`: a value head on the policy's trunk, trained
    with it in one backward pass. `frozen`: a small head on features of the frozen warm-start trunk."""
    hidden_size: int = Field(0, ge=0)
    """Width of the head's hidden layer; 0: the head is linear."""
    value_coef: float = Field(0.1, gt=0)
    """Weight of the value loss beside the policy loss; `shared` only."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    value_clip: float = Field(0.5, gt=0)
    warmup_iterations: int = Field(0, ge=0)
    """Iterations in which only the critic learns."""


class AdvantageConfig(Settings):
    """How advantages are made of turn rewards."""

    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    whiten: Literal["all", "agent", "none"] | None = None
    """Over which rows GAE and REINFORCE++ advantages are whitened; null: `agent` for ippo, mappo and happo, else `all`."""
    group_by: Literal["task", "task_agent", "task_agent_round", "task_round", "batch_agent"] | None = None
    """Which rows are compared with one another; null: the algorithm's own. `task` compares episodes in grpo, rloo and
    gigpo, turns in dr_mas, at_grpo, opo, gpg and reinforce_pp_baseline; the others compare turns. pass_at_k always
    compares episodes. `batch_agent` is for agents with one sample per task."""
    normalize_std: bool = True
    """Group estimators: divide by the group's standard deviation (False: Dr. GRPO)."""
    ddof: Literal[0, 1] = 1
    eps: float = Field(1e-6, gt=0)
    singleton: Literal["zero", "raw", "batch"] = "zero"
    """A group of one carries no comparison: zero (honest), the raw reward (what the references do), or compared with all
    turns of its agent in the iteration."""
    step_gamma: float = Field(0.95, gt=0, le=1)
    """GiGPO: discount per turn of an episode."""
    step_weight: float = Field(1.0, ge=0)
    """GiGPO: weight of the step advantage beside the episode's."""
    similarity: float = Field(1.0, gt=0, le=1)
    """GiGPO: prompts at least so alike are one anchor; 1: equal prompts only."""
    nll_gain: float = Field(0.0, ge=0)
    """UMAD's alpha: advantages times exp(-alpha * normalised mean NLL of the completion in its group); 0: off."""


class OverlongConfig(Settings):
    """DAPO's soft penalty for completions near their limit (seed-systems 2.2)."""

    buffer_tokens: int = Field(ge=1)
    """The last tokens below the completion's limit, over which the penalty grows from 0 to `penalty`. The limit is the
    agent's max_tokens, or less where its context had no room for as many; at most all of its tokens are such."""
    penalty: float = Field(1.0, gt=0)


class AgentTrainConfig(Settings):
    """The learning signal of one agent."""

    weight: float = Field(1.0, ge=0)
    """Its advantages are multiplied by it; 0: its turns have no gradient, entropy and KL included."""
    overlong: OverlongConfig | None = None
    """Instead of `train.overlong`."""
    entropy_coef: float | None = None
    """Instead of `train.loss.entropy_coef`."""


class RowsConfig(Settings):
    """How turns become rows. None of it changes the gradient."""

    merge: bool = True
    """Turns that extend each other exactly (prompt = earlier prompt + completion) are computed as one row."""
    pack: bool = True
    """Rows lie end to end without padding, each attending to itself only."""
    share: bool = True
    """Packed rows that begin alike (the prompts of a task's episodes) are computed once up to where they part."""


class TeamConfig(Settings):
    """What learns from the whole team before the model groups do: a central critic, or a mixer of per-agent Qs."""

    mixer: Literal["none", "vdn", "qmix"] = "none"
    """Q-credit (VDN, QMIX at turn level) takes the place of the turns' rewards, for any group estimator."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-4, max_grad_norm=10.0)
    num_epochs: int = Field(4, ge=1)
    num_minibatches: int = Field(4, ge=1)
    gamma: float = Field(0.99, gt=0, le=1)
    """Per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    value_clip: float = Field(0.2, gt=0)
    huber_delta: float = Field(10.0, gt=0)
    value_norm: bool = True
    """Values are learned normalised by a running mean and standard deviation (MAPPO)."""
    embedding_size: int = Field(64, ge=1)
    mixer_size: int = Field(32, ge=1)
    hidden_size: int = Field(64, ge=1)
    target_tau: float = Field(0.005, gt=0, le=1)
    """Soft update of the target critics and the target mixer, after every step. The default is for thousands of steps: where
    an iteration has few, a reward at an episode's end reaches its first turns sooner with 0.1."""
    replay_episodes: int = Field(5000, ge=1)
    warmup_iterations: int = Field(0, ge=0)
    """Iterations in which the mixer learns and the turns keep their own rewards."""
    max_log_factor: float = Field(0.6931471805599453, gt=0)
    """HAPPO: log M is clipped to +- this (log 2)."""
    order: Literal["random", "fixed"] = "random"
    """HAPPO: in which order groups are updated; random is seeded and kept in the journal."""


class MismatchConfig(Settings):
    """Trainer against engine on the same tokens (design rule 4), absolute logprob difference in nats."""

    correction: Literal["none", "token", "sequence"] = "token"
    """Truncated importance weights beyond tolerance: per token, or one per turn (the product over its tokens)."""
    always: bool = False
    """Correct within tolerance too: decoupled PPO (Hilton 2022), whose ratio is to the recomputed old logprobs and whose
    weights are exp(old - rollout); for traces of other versions."""
    reject_token: tuple[float, float] | None = None
    """Tokens whose weight exp(old - rollout) lies outside are masked: no gradient, entropy and KL included."""
    reject_sequence: tuple[float, float] | None = None
    """Turns whose geometric mean weight lies outside are masked whole."""
    old_logprobs: Literal["recompute", "rollout_if_close"] = "recompute"
    """`rollout_if_close`: the engine's logprobs stand for the old ones, and their forward pass is spared, while the gap,
    measured on a part of the rows, stays within tolerance."""

    tolerance_mean: float = Field(1e-3, gt=0)
    """Beyond it (or `tolerance_max`) truncated importance weights are applied."""
    tolerance_max: float = Field(0.05, gt=0)
    limit_mean: float = Field(0.1, gt=0)
    """Beyond it the stage fails."""
    truncation: float = Field(2.0, gt=1)
    """Cap of the importance weight exp(old - rollout)."""
    min_ess: float = Field(0.0, ge=0, le=1)
    """An effective sample size (share of an agent's tokens, or of its turns with `correction: sequence`) below it fails
    the stage; 0: never."""


class DeepSpeedConfig(Settings):
    """What of DeepSpeed a user sets."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    bf16: bool = False
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    """Optimizer state in CPU memory; needs zero_stage >= 1."""
    offload_parameters: bool = False
    """Parameters in CPU memory; needs zero_stage 3."""

    @model_validator(mode="after")
    def _offload_needs_partitions(self) -> Self:
        if self.offload_optimizer and self.zero_stage < 1:
            raise ValueError("deepspeed.offload_optimizer needs deepspeed.zero_stage of at least 1")
        if self.offload_parameters and self.zero_stage < 3:
            raise ValueError("deepspeed.offload_parameters needs deepspeed.zero_stage: 3")
        return self


class LoraConfig(Settings):
    """An adapter (peft) per model group over a base that several groups share."""

    rank: int = Field(8, ge=1, le=512)
    """At most the smaller dimension of every layer it is put on, and the 512 that vLLM serves."""
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


Algorithm = Literal[
    "ppo",
    "ippo",
    "mappo",
    "happo",
    "grpo",
    "dr_mas",
    "at_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "gpg",
    "pass_at_k",
    "gigpo",
    "counterfactual",
    "leave_one_out",
]
"""Advantage estimators: each is the file of its name in train_loops/advantages/ (ppo, ippo, mappo and happo: gae)."""
GAE_ALGORITHMS = ("ppo", "ippo", "mappo", "happo")
GROUP_ALGORITHMS = ("grpo", "dr_mas", "at_grpo", "rloo", "opo", "gpg", "pass_at_k", "gigpo", "reinforce_pp_baseline")
"""They compare episodes of a task."""
BASELINE_ALGORITHMS = {"remax": "greedy", "counterfactual": "counterfactual", "leave_one_out": "leave_one_out"}
"""Which kind of variants (`collect.variants`) each of them needs."""
TEAM = "team"
"""Name of the whole-team learner beside the model groups': of its task, its versions and its orders."""
TEAM_CRITIC_ALGORITHMS = ("mappo", "happo")
"""Their values come from the team's central critic, not from one of the model group's."""


class TrainConfig(Settings):
    """How one model group learns."""

    algorithm: Algorithm = "dr_mas"
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    mismatch: MismatchConfig = MismatchConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights; see `model_groups.<name>.base`."""
    rows: RowsConfig = RowsConfig()
    team: TeamConfig = TeamConfig()
    """Must be the same for all model groups."""
    overlong: OverlongConfig | None = None
    agents: dict[str, AgentTrainConfig] = Field(default_factory=dict)
    """Learning signal per agent."""
    num_epochs: int = Field(1, ge=1)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch: fixed, whatever the number of rows."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens per forward and backward pass, padding included."""
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
    job_timeout_s: float = Field(1800, gt=0)
    start_timeout_s: float = Field(300, gt=0)
    stage_timeout_s: float = Field(3600, gt=0)

    @property
    def has_critic(self) -> bool:
        """Whether the model group trains a critic of its own."""
        return self.algorithm in GAE_ALGORITHMS and self.algorithm not in TEAM_CRITIC_ALGORITHMS

    @property
    def is_whole_team(self) -> bool:
        """Whether a learner of the whole team runs before the model groups."""
        return self.algorithm in TEAM_CRITIC_ALGORITHMS or self.team.mixer != "none"

    def entropy_coef(self, agent: str) -> float:
        """What the entropy of an agent's tokens counts."""
        own = self.agents.get(agent, AgentTrainConfig()).entropy_coef
        return self.loss.entropy_coef if own is None else own

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.team.mixer != "none" and self.algorithm in GAE_ALGORITHMS:
            raise ValueError(
                f"train.team.mixer: {self.team.mixer} gives turns their credit, which algorithm {self.algorithm!r} takes "
                "from a critic: take a group estimator, e.g. algorithm: dr_mas with advantage.normalize_std: false"
            )
        if self.team.mixer != "none" and self.algorithm in BASELINE_ALGORITHMS:
            raise ValueError(
                f"train.team.mixer: {self.team.mixer} gives turns their credit, and algorithm {self.algorithm!r} would hold it "
                "against what a variant of the episode was paid, which is in another unit: take algorithm: dr_mas, or drop the mixer"
            )
        if self.algorithm in TEAM_CRITIC_ALGORITHMS and self.loss.kl_in_reward_coef:
            raise ValueError(
                f"train.loss.kl_in_reward_coef: algorithm {self.algorithm!r} has advantages of the team's critic, which "
                "knows no KL: use loss.kl_in_loss_coef"
            )
        if self.advantage.group_by is not None and self.algorithm not in GROUP_ALGORITHMS:
            raise ValueError(
                f"train.advantage.group_by = {self.advantage.group_by}: algorithm {self.algorithm!r} compares no groups: "
                "drop it, or take one that does, e.g. dr_mas"
            )
        return self

    @model_validator(mode="after")
    def _critic_is_used(self) -> Self:
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f"train.critic is set but algorithm {self.algorithm!r} has no critic of its own: use ppo or ippo, "
                "or drop it (mappo and happo: the central critic's settings are train.team)"
            )
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
