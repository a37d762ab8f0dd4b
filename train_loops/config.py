"""Settings of `train` and of the warm start: pydantic models, nothing heavy imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from stores.settings import IDENTITY_IF_CHANGED, NOT_IDENTITY, Settings
from train_loops.estimators import ESTIMATORS, PAPERS, WHOLE_TEAM, Estimator, estimator_of

WeightRange = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]]
"""A range of importance weights, around the 1 of logprobs that agree."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """This section sets AdamW and its learning rate schedule."""

    lr: float = Field(1e-6, gt=0)
    """The learning rate after the warm-up. Tiny models need about 1e-3, models of billions of parameters 1e-6."""
    weight_decay: float = Field(0.0, ge=0)
    """The decoupled weight decay of AdamW, as a factor of the learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """The decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """The term that AdamW adds to the denominator for numerical stability."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: it stays constant, or it falls to `min_lr_share` of `lr` at `decay_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """The number of optimizer steps over which the learning rate rises linearly from 0 to `lr`."""
    decay_steps: int = Field(0, ge=0)
    """The number of optimizer steps, warm-up included, after which the learning rate stays at its minimum. Schedules
    linear and cosine need it."""
    min_lr_share: float = Field(0.0, ge=0, le=1)
    """The learning rate at the end of the schedule, as a share of `lr`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The norm to which gradients are clipped. Lower it when the gradient norm jumps."""

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
    """This section adapts the coefficient of the KL in the reward to a target (Ziegler 2019, arXiv 1909.08593, as in
    verl 0.8)."""

    target: float = Field(0.1, gt=0)
    """The KL to the reference that the coefficient is adapted to, in nats per token."""
    horizon: int = Field(10_000, ge=1)
    """The number of episodes over which the coefficient may double or halve several times. Larger is slower. In one
    iteration the coefficient keeps at least a tenth of itself."""


class LossConfig(Settings):
    """This section sets the policy loss. The defaults are those of verl 0.8, see infra/docs/design/formulas.md."""

    policy: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """The policy loss: PPO's clipped ratio per token, GSPO's per sequence (arXiv 2507.18071), CISPO's clipped weight
    (arXiv 2506.13585), or REINFORCE without a ratio."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """How far below 1 the ratio of new to old probability is clipped."""
    clip_high: float = Field(0.2, gt=0)
    """How far above 1 the ratio of new to old probability is clipped. Raise it (0.28 in DAPO, arXiv 2503.14476) when the
    entropy falls too fast."""
    dual_clip: float | None = Field(3.0, gt=1)
    """The bound c of dual-clip PPO (arXiv 1912.09729) on the loss where the advantage is negative; null: no bound."""
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How the losses of tokens become one number. `token_mean`: the mean over all tokens, in which long completions weigh
    more. `seq_mean_token_sum` and `seq_mean_token_mean`: the mean over rows of their sums or means.
    `seq_mean_token_sum_norm`: the mean over rows of their sums, divided by the constant `norm_tokens` (Dr. GRPO)."""
    norm_tokens: int | None = Field(None, ge=1)
    """The divisor of `seq_mean_token_sum_norm`, in tokens; null: the largest `max_tokens` of the model group's agents."""
    entropy_coef: float = 0.0
    """The weight of the entropy bonus in the loss. Raise it above 0 when the entropy collapses."""
    kl_in_loss_coef: float = Field(0.0, ge=0)
    """The weight of the KL to the reference in the loss; 0: no KL, and no reference model is loaded for it."""
    kl_in_reward_coef: float = Field(0.0, ge=0)
    """The weight of the KL to the reference that is subtracted from the rewards of tokens; 0: none is. Its estimator is k1
    (Schulman 2020, "Approximating KL divergence"), which alone has the gradient of the KL there."""
    reference_every: int = Field(0, ge=0)
    """The number of versions after which the newest version becomes the reference; 0: version 0 stays the reference."""
    kl_in_loss_estimator: Literal["abs", "k2", "k3"] = "k3"
    """The estimator of the KL in the loss. On policy k2 has the gradient of KL(policy || reference) and k3, which is never
    negative, that of KL(reference || policy). k1 has a gradient of mean zero there."""
    adaptive_kl: AdaptiveKLConfig | None = None
    """How `kl_in_reward_coef` is adapted to a target, beginning at its value; null: it stays constant."""

    @property
    def has_kl(self) -> bool:
        """Whether the policy is compared with a reference."""
        return self.kl_in_loss_coef > 0 or self.kl_in_reward_coef > 0

    @field_validator("kl_in_loss_estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError(
                "k1 in the loss has a gradient of mean zero: take k3 or k2 (k1 is that of kl_in_reward_coef)"
            )
        return value

    @model_validator(mode="after")
    def _has_a_kl(self) -> Self:
        if self.reference_every and not self.has_kl:
            raise ValueError("loss.reference_every needs a KL: give loss.kl_in_loss_coef or loss.kl_in_reward_coef")
        if self.adaptive_kl is not None and self.kl_in_reward_coef == 0:
            raise ValueError("loss.adaptive_kl needs loss.kl_in_reward_coef above 0: the coefficient it starts from")
        return self


class CriticConfig(Settings):
    """This section sets the value model of PPO."""

    kind: Literal["own", "shared", "frozen"] = "own"
    """Where the values come from. `own`: a model with weights of its own, started from the policy's trunk. `shared`: a value
    head on the policy's trunk, trained with it in one backward pass. `frozen`: a small head on features of the frozen
    warm-start trunk."""
    hidden_size: int = Field(0, ge=0)
    """The width of the value head's hidden layer; 0: the head is linear."""
    value_coef: float = Field(0.1, gt=0)
    """The weight of the value loss beside the policy loss; it counts for `shared` only."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """The optimizer of the critic's weights; one that is `shared` has the policy's. Its learning rate is usually higher than the
    policy's."""
    value_clip: float = Field(0.5, gt=0)
    """How far a value may move from its old value in one iteration before the value loss is clipped."""
    warmup_iterations: int = Field(0, ge=0)
    """The number of first iterations in which only the critic learns. Raise it when the critic explains nothing yet."""

    @model_validator(mode="after")
    def _optimizer_is_read(self) -> Self:
        if self.kind == "shared" and self.optimizer != CriticConfig.model_fields["optimizer"].default:
            raise ValueError(
                "critic.optimizer is set, which critic.kind: shared does not read: its head learns in the policy's steps, by "
                "train.optimizer: drop it, or take kind: own"
            )
        return self


class AdvantageConfig(Settings):
    """This section sets how advantages are computed from the rewards of turns."""

    gamma: float = Field(1.0, gt=0, le=1)
    """The discount per token of GAE and of the returns of REINFORCE++."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """The lambda of GAE (arXiv 1506.02438): 1 has no bias from the critic, lower values have less variance."""
    whiten: Literal["all", "agent", "none"] | None = None
    """The rows over which advantages of GAE and REINFORCE++ are whitened; null: `agent` for ippo, mappo and happo, else
    `all`."""
    group_by: Literal["task", "task_agent", "task_agent_round", "task_round", "batch_agent"] | None = None
    """The rows that are compared with one another; null: the algorithm's own choice. `task` compares episodes in grpo, rloo
    and gigpo, turns in dr_mas, at_grpo, opo, gpg and reinforce_pp_baseline; the others compare turns. pass_at_k always
    compares episodes. `batch_agent` is for agents with one sample per task."""
    normalize_std: bool = True
    """Whether group estimators divide by the group's standard deviation. False gives Dr. GRPO (arXiv 2503.20783)."""
    ddof: Literal[0, 1] = 1
    """The delta degrees of freedom of the group's standard deviation: it divides by n - ddof."""
    eps: float = Field(1e-6, gt=0)
    """The term that is added to the group's standard deviation before dividing by it."""
    singleton: Literal["zero", "raw", "batch"] = "zero"
    """The advantage of a group of one, which nothing can be compared with: zero, its raw reward (as in the reference
    implementations), or its comparison with all turns of its agent in the iteration (where episodes are compared: with all
    episodes)."""
    step_gamma: float = Field(0.95, gt=0, le=1)
    """The discount per turn of an episode in the step advantage of GiGPO (arXiv 2505.10978)."""
    step_weight: float = Field(1.0, ge=0)
    """The weight of GiGPO's step advantage beside the episode's."""
    anchor: Literal["state", "prompt"] = "state"
    """What GiGPO compares turns by: the state of the world that they acted in (the prompt where there is no world), or the prompt."""
    similarity: float = Field(1.0, gt=0, le=1)
    """The similarity from which GiGPO treats two prompts as the same anchor; 1: only equal prompts."""
    nll_gain: float = Field(0.0, ge=0)
    """The alpha of UMAD (arXiv 2603.01221): advantages are multiplied by exp(-alpha * normalised mean negative
    log-likelihood of the completion in its group); 0: off."""


class OverlongConfig(Settings):
    """This section sets DAPO's soft penalty for completions near their limit (arXiv 2503.14476). Choices have none: each is
    one token."""

    buffer_tokens: int = Field(ge=1)
    """The number of last tokens below the completion's limit over which the penalty grows from 0 to `penalty`. The limit is
    the agent's max_tokens, or what its context had room for. A larger buffer than the limit covers the whole completion."""
    penalty: float = Field(1.0, gt=0)
    """The penalty in units of reward at the limit."""


class AgentTrainConfig(Settings):
    """This section sets the learning signal of one agent."""

    weight: float = Field(1.0, ge=0)
    """The factor of the agent's advantages. 0: its turns have no gradient, entropy and KL included."""
    overlong: OverlongConfig | None = None
    """The penalty for long completions of this agent; null: that of `train.overlong`."""
    entropy_coef: float | None = None
    """The weight of the entropy bonus for this agent; null: that of `train.loss.entropy_coef`."""


class RowsConfig(Settings):
    """This section sets how turns become rows. None of these settings changes the gradient."""

    merge: bool = True
    """Whether turns that extend each other exactly (prompt = earlier prompt + completion) are computed as one row."""
    pack: bool | Literal["auto"] = "auto"
    """Whether rows are laid end to end without padding, each attending to itself only. `auto`: where the model can; one with
    layers that look back a window only (`sliding_attention`: Gemma 2 and 3, Mistral 7B 0.1) cannot, and is trained on
    padded rows."""
    share: bool = True
    """Whether the common beginning of packed rows (the prompts of a task's episodes) is computed once."""


class TeamConfig(Settings):
    """This section sets what learns from the whole team before the model groups do: a central critic, or a mixer of per-agent
    Q values."""

    mixer: Literal["none", "vdn", "qmix"] = "none"
    """The mixer whose credit (VDN, arXiv 1706.05296, or QMIX, arXiv 1803.11485, per turn) replaces the rewards of turns,
    for any group estimator."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-4, max_grad_norm=10.0)
    """The optimizer of the central critic or of the mixer and its Q functions."""
    num_epochs: int = Field(4, ge=1)
    """The number of passes over the episodes in each iteration."""
    num_minibatches: int = Field(4, ge=1)
    """The number of optimizer steps per pass of the central critic, at most one per turn. A mixer does not read it: it makes one
    step per 64 episodes that it learns from, and at least one per pass."""
    gamma: float = Field(0.99, gt=0, le=1)
    """The discount per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """The lambda of GAE (arXiv 1506.02438) with the central critic's values."""
    value_clip: float = Field(0.2, gt=0)
    """How far a value of the central critic may move from its old value in one iteration before the loss is clipped."""
    huber_delta: float = Field(10.0, gt=0)
    """The error of a value from which the Huber loss is linear instead of quadratic."""
    value_norm: bool = True
    """Whether values are learned normalised by a running mean and standard deviation (MAPPO, arXiv 2103.01955)."""
    embedding_size: int = Field(64, ge=1)
    """The width of the embedding of texts from which critic and mixer read a state."""
    mixer_size: int = Field(32, ge=1)
    """The width of the mixing layer of QMIX."""
    hidden_size: int = Field(64, ge=1)
    """The width of the hidden layers of critic, Q functions and hypernetworks."""
    target_tau: float = Field(0.005, gt=0, le=1)
    """The rate at which the target Q functions and the target mixer follow after every step. The default is for thousands of steps.
    Where an iteration has few, take 0.1: a reward at an episode's end then reaches its first turns sooner."""
    replay_episodes: int = Field(5000, ge=1)
    """The number of newest episodes that the mixer learns from."""
    warmup_iterations: int = Field(0, ge=0)
    """The number of first iterations in which the mixer learns and the turns keep their own rewards."""
    order: Literal["random", "fixed"] = "random"
    """The order in which HAPPO updates model groups. `random` is drawn from the run's seed and kept in the journal."""


class MismatchConfig(Settings):
    """This section sets how the trainer's logprobs are compared with the engine's on the same tokens: absolute
    differences in nats."""

    correction: Literal["none", "token", "sequence"] = "token"
    """The truncated importance weights that are applied beyond tolerance: one per token, one per turn (the product over its
    tokens), or none."""
    always: bool = False
    """Whether weights are applied within tolerance, too: decoupled PPO (Hilton et al. 2021, arXiv 2110.00641), whose ratio is to
    the recomputed old logprobs and whose weights are exp(old - rollout). It suits episodes of other versions."""
    reject_token: WeightRange | None = None
    """The range of the weight exp(old - rollout) outside of which a token is masked: it has no gradient, entropy and KL
    included; null: no token is masked."""
    reject_sequence: WeightRange | None = None
    """The range of the geometric mean weight outside of which a turn is masked whole; null: no turn is masked."""
    old_logprobs: Literal["recompute", "rollout_if_close"] = "recompute"
    """Where the old logprobs come from. `rollout_if_close` takes the engine's, which saves a forward pass, while the
    difference, measured on a part of the rows, is within tolerance and no row is from service."""
    tolerance_mean: float = Field(1e-3, gt=0)
    """The mean difference in nats beyond which (or beyond `tolerance_max`) importance weights are applied."""
    tolerance_max: float = Field(0.05, gt=0)
    """The largest difference in nats of one token beyond which importance weights are applied."""
    limit_mean: float = Field(0.1, gt=0)
    """The mean difference in nats beyond which the stage fails, because the engine served other weights. It does not apply to
    turns that another version sampled."""
    truncation: float = Field(2.0, gt=1)
    """The upper bound of the importance weight exp(old - rollout)."""
    min_ess: float = Field(0.0, ge=0, le=1, json_schema_extra=NOT_IDENTITY)
    """The effective sample size below which the stage fails, as a share of an agent's tokens, or of its turns with
    `correction: sequence`; 0: never, and 0.5 for turns that another version sampled."""


class DeepSpeedConfig(Settings):
    """This section holds the settings of DeepSpeed that a run config may change."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """The stage of ZeRO: workers partition nothing (0), optimizer state (1), gradients (2) or parameters (3), too. Raise it
    when the memory of one worker is too small."""
    bf16: bool = False
    """Whether the trainer computes in bfloat16, with float32 weights and sums of gradients beside. Set it for models of real size
    on GPUs. Stages below 2 are then stage 2."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass, which saves memory and costs time."""
    offload_optimizer: bool = False
    """Whether the optimizer state is kept in CPU memory; it needs zero_stage >= 1."""
    offload_parameters: bool = False
    """Whether parameters are kept in CPU memory; it needs zero_stage 3."""
    sequence_parallel: int = Field(1, ge=1)
    """The number of workers that compute the same rows together, each a part of the tokens (Ulysses, arXiv 2309.14509), so that
    a row may be that many times as long. It divides the workers, and the heads of the model."""

    @model_validator(mode="after")
    def _offload_needs_partitions(self) -> Self:
        if self.offload_optimizer and self.zero_stage < 1:
            raise ValueError("deepspeed.offload_optimizer needs deepspeed.zero_stage of at least 1")
        if self.offload_parameters and self.zero_stage < 3:
            raise ValueError("deepspeed.offload_parameters needs deepspeed.zero_stage: 3")
        return self


class LoraConfig(Settings):
    """This section trains a LoRA adapter (arXiv 2106.09685, by peft) per model group, over a base that several groups
    share."""

    rank: int = Field(8, ge=1, le=512)
    """The rank of the adapter: at most the smaller dimension of every layer that it changes, and the 512 that vLLM
    serves."""
    alpha: float = Field(16.0, gt=0)
    """The scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """The names of the linear layers that the adapter changes."""


TEAM = "team"
"""The name of the whole-team learner beside those of the model groups, for its task, its versions and its jobs."""
MIXERS = ("vdn", "qmix")
TEAM_CRITICS = tuple(name for name, estimator in ESTIMATORS.items() if estimator.critic == "team")
TEAM_SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("optimizer", "num_epochs", "gamma", "embedding_size", "hidden_size"), TEAM_CRITICS + MIXERS),
    **dict.fromkeys(("num_minibatches", "gae_lambda", "value_clip", "huber_delta", "value_norm"), TEAM_CRITICS),
    "order": tuple(name for name in TEAM_CRITICS if ESTIMATORS[name].updates_in_turn),
    **dict.fromkeys(("target_tau", "replay_episodes", "warmup_iterations"), MIXERS),
    "mixer_size": ("qmix",),
}
"""The algorithms and mixers that read a setting of `train.team`."""


class TrainConfig(Settings):
    """This section sets how the model groups learn; `model_groups.<name>.train` changes it for one of them."""

    algorithm: str = Field("dr_mas", examples=list(ESTIMATORS))
    """The estimator of advantages: a name of train_loops/estimators.py, or the dotted path `module:name` of your own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer of the policy's weights."""
    loss: LossConfig = LossConfig()
    """The policy loss with its entropy and KL terms."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How advantages are computed from rewards."""
    critic: CriticConfig = CriticConfig()
    """The value model of ppo and ippo. Other algorithms refuse it."""
    mismatch: MismatchConfig = MismatchConfig()
    """What happens when the trainer's logprobs differ from the engine's."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """How DeepSpeed partitions and stores the training state."""
    lora: LoraConfig | None = None
    """The adapter that is trained instead of all weights, see `model_groups.<name>.base`; null: all weights are trained."""
    rows: RowsConfig = RowsConfig()
    """How turns are laid out as training rows. It changes the speed, not the gradient."""
    team: TeamConfig = TeamConfig()
    """The learner of the whole team. It must be the same for all model groups."""
    overlong: OverlongConfig | None = None
    """The penalty for completions near their limit; null: none. mappo, happo, remax, counterfactual and leave_one_out refuse it."""
    agents: dict[str, AgentTrainConfig] = Field(default_factory=dict)
    """The learning signal of single agents, by their names."""
    num_epochs: int = Field(1, ge=1)
    """The number of passes over the rows of an iteration."""
    num_minibatches: int = Field(1, ge=1)
    """The number of optimizer steps per pass. It is fixed, whatever the number of rows."""
    microbatch_tokens: int = Field(16384, ge=1)
    """The number of tokens per forward and backward pass, padding included. Lower it when memory runs out."""
    train_mixed_versions: bool = False
    """Whether episodes are trained on in which more than one version of a model group had turns."""
    num_workers: int = Field(1, ge=1)
    """The number of training workers per model group; they are data-parallel, but for `deepspeed.sequence_parallel`."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", json_schema_extra=NOT_IDENTITY)
    """The number of torch threads per worker. `auto`: the cores that the process which starts the trainers may use
    (affinity, cgroup, OMP_NUM_THREADS), divided by the number of workers of all model groups; a small model gets fewer."""
    cpus_per_worker: float = Field(0.1, ge=0, json_schema_extra=NOT_IDENTITY)
    """The number of CPUs that Ray reserves per worker, also while a warm worker waits."""
    gpus_per_worker: float = Field(0.0, ge=0, json_schema_extra=NOT_IDENTITY)
    """The number of GPUs that Ray reserves per worker; 0: training on the CPU."""
    keep_warm: bool = Field(True, json_schema_extra=NOT_IDENTITY)
    """Whether workers stay alive between iterations. Set false when memory is short; each iteration then loads the
    state."""
    job_timeout_s: float = Field(1800, gt=0, json_schema_extra=NOT_IDENTITY)
    """The time in seconds within which the training job of one model group must end."""
    start_timeout_s: float = Field(300, gt=0, json_schema_extra=NOT_IDENTITY)
    """The time in seconds within which the training workers must have started."""
    stage_timeout_s: float = Field(3600, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of stage train, start of the workers included."""

    @property
    def estimator(self) -> Estimator:
        """Returns the estimator, with what it needs of a run."""
        return estimator_of(self.algorithm)

    @property
    def has_critic(self) -> bool:
        """Returns whether the model group trains a critic of its own."""
        return self.estimator.critic == "model_group"

    @property
    def has_team_critic(self) -> bool:
        """Returns whether values come from the team's central critic."""
        return self.estimator.critic == "team"

    @property
    def is_whole_team(self) -> bool:
        """Returns whether a learner of the whole team runs before the model groups."""
        return self.has_team_critic or self.team.mixer != "none"

    @property
    def extensions(self) -> set[str]:
        """Returns the packages of Troupe's extensions that training needs."""
        others = {WHOLE_TEAM: self.is_whole_team, PAPERS: self.advantage.nll_gain > 0}
        return {self.estimator.extension, *(package for package, is_used in others.items() if is_used)} - {""}

    def entropy_coef(self, agent: str) -> float:
        """Returns the weight of the entropy bonus for an agent."""
        own = self.agents.get(agent, AgentTrainConfig()).entropy_coef
        return self.loss.entropy_coef if own is None else own

    @field_validator("algorithm")
    @classmethod
    def _is_an_estimator(cls, value: str) -> str:
        estimator_of(value)
        return value

    @model_validator(mode="after")
    def _workers_are_groups(self) -> Self:
        if self.num_workers % self.deepspeed.sequence_parallel:
            raise ValueError(
                f"train.num_workers = {self.num_workers}: these are no groups of deepspeed.sequence_parallel = "
                f"{self.deepspeed.sequence_parallel} workers: give a multiple"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.team.mixer != "none" and self.estimator.critic:
            raise ValueError(
                f"train.team.mixer: {self.team.mixer} gives turns their credit, which algorithm {self.algorithm!r} takes "
                "from a critic: take a group estimator, e.g. algorithm: dr_mas with advantage.normalize_std: false"
            )
        if self.team.mixer != "none" and self.estimator.variants:
            raise ValueError(
                f"train.team.mixer: {self.team.mixer} gives turns their credit, and algorithm {self.algorithm!r} would hold it "
                "against what a variant of the episode was paid, which is in another unit: take algorithm: dr_mas, or drop the mixer"
            )
        if self.has_team_critic and self.loss.kl_in_reward_coef:
            raise ValueError(
                f"train.loss.kl_in_reward_coef: algorithm {self.algorithm!r} has advantages of the team's critic, which "
                "knows no KL: use loss.kl_in_loss_coef"
            )
        if self.estimator.divides and self.advantage.normalize_std and self.loss.kl_in_reward_coef:
            raise ValueError(
                f"train.loss.kl_in_reward_coef = {self.loss.kl_in_reward_coef:g}: algorithm {self.algorithm!r} divides by the deviation of a "
                "group, and where all of it earned the same, that is the deviation of its KL: the smallest coefficient has the effect of a "
                "large one: use loss.kl_in_loss_coef, or set advantage.normalize_std: false"
            )
        if self.advantage.group_by is not None and not self.estimator.compares:
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

    @model_validator(mode="after")
    def _team_settings_are_used(self) -> Self:
        learner = self.algorithm if self.has_team_critic else self.team.mixer
        usual = TeamConfig()
        for name, learners in TEAM_SETTINGS.items():
            if learner not in learners and getattr(self.team, name) != getattr(usual, name):
                raise ValueError(
                    f"train.team.{name} is set, which only {', '.join(learners)} read{'s' * (len(learners) == 1)}: algorithm is "
                    f"{self.algorithm!r} and train.team.mixer {self.team.mixer!r}: take one of those, or drop the setting"
                )
        return self


class TinyModelConfig(Settings):
    """This section sets the shape of a model that is built from nothing, with a tokenizer of its own."""

    architecture: Literal["qwen3", "llama"] = Field("qwen3", json_schema_extra=IDENTITY_IF_CHANGED)
    """The model family, as transformers and vLLM know it."""
    hidden_size: int = Field(128, ge=1)
    """The width of the residual stream."""
    intermediate_size: int = Field(384, ge=1)
    """The width of the hidden layer of each feed-forward block."""
    num_layers: int = Field(3, ge=1)
    """The number of transformer layers."""
    num_heads: int = Field(4, ge=1)
    """The number of attention heads for queries."""
    num_kv_heads: int = Field(2, ge=1)
    """The number of attention heads for keys and values; it divides `num_heads`."""
    head_dim: int = Field(32, ge=2, multiple_of=2)
    """The width of one attention head: an even number, since positions turn pairs of its numbers."""
    max_position: int = Field(512, ge=1)
    """The longest context in tokens. `serve.max_model_len` is at most this."""
    vocab_size: int = Field(512, ge=300)
    """The upper bound of the vocabulary of the tokenizer that is trained on the demonstrations. 300 tokens are for bytes and the
    shortest pieces of words; XML-like tags of the demonstrations that have no room beside them come on top."""

    @model_validator(mode="after")
    def _heads_share_keys(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}: lower it"
            )
        return self


class ChosenTracesConfig(Settings):
    """This section names stored episodes that serve as demonstrations: what went well in the training of another run.

    Episodes of tasks that this run holds out are left out, and those of another tokenizer are refused.
    """

    uri: str
    """The LanceDB URI of the other run's trace store."""
    weights: str = Field("", json_schema_extra=NOT_IDENTITY)
    """The folder or URI of the other run's model versions, whose tokenizer is compared; empty: `weights` beside the
    traces."""
    run: str
    """The name of the run whose episodes are read."""
    iteration: int | None = None
    """The iteration whose episodes are read; null: all iterations."""
    min_outcome: float = 1.0
    """The lowest outcome, under any stored credit version, with which an episode is chosen."""
    other_choices: float = Field(0.1, ge=0, lt=1, json_schema_extra=IDENTITY_IF_CHANGED)
    """Where this run has an orchestrator and the episodes have none, it learns the order in which their agents acted. This share of its choices is
    another option instead, so that it tries those, too."""


class WarmstartConfig(Settings):
    """This section sets the supervised training on demonstrations or chosen episodes, before any reinforcement learning."""

    tiny_model: TinyModelConfig | None = None
    """The shape of a model to build from nothing for every model group, none of which has a `model` then; null: training
    starts from `model` of each model group."""
    demonstrator: str = ""
    """The dotted path `module:function` of a function that plays every agent, see serve_apps/episode/demonstrate.py. Give either
    this or `traces`."""
    traces: ChosenTracesConfig | None = None
    """The stored episodes that are used instead of a demonstrator; null: the demonstrator plays."""
    num_demonstrations: int = Field(2048, ge=1)
    """The number of episodes that the demonstrator plays, or that are chosen at most."""
    tokenizer_demonstrations: int | None = Field(None, ge=1, json_schema_extra=IDENTITY_IF_CHANGED)
    """The number of demonstrations whose texts the tokenizer of a tiny model is made of; they are played once more for that.
    null: all of them. A few hundred hold every word, and those of programs and worlds take long to play."""
    num_epochs: int = Field(4, ge=1)
    """The number of passes over the demonstrations."""
    batch_turns: int = Field(64, ge=1)
    """The number of turns per optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3, warmup_steps=20)
    """The optimizer of the supervised training. Its rate falls to a tenth along a cosine until the last step: it takes no `schedule`."""
    threads: int = Field(2, ge=1)
    """The number of torch threads of the process that trains."""
    stage_timeout_s: float = Field(3600, gt=0, json_schema_extra=NOT_IDENTITY)
    """The deadline in seconds of the warm start, demonstrations included."""

    @model_validator(mode="after")
    def _has_one_schedule(self) -> Self:
        if self.optimizer.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule: {self.optimizer.schedule} is not read here: after warmup_steps the rate of a warm start falls to "
                "a tenth along a cosine, until the last step: drop schedule, decay_steps and min_lr_share"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.demonstrator) == (self.traces is not None):
            raise ValueError("give exactly one of `demonstrator` and `traces`")
        if self.tiny_model is not None and self.traces is not None:
            raise ValueError("a tiny model is made from a demonstrator: traces hold the token ids of another tokenizer")
        if self.tokenizer_demonstrations is not None and self.tiny_model is None:
            raise ValueError("tokenizer_demonstrations: only a `tiny_model` has a tokenizer made for it: leave it out")
        return self
