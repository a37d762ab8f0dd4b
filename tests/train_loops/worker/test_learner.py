"""The learner: rows of a job raise what was rewarded, are checked against the engine that sampled them, and counted."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_traces import GROUP, WANTED, make_turns_of, rewards_for, sample_traces

from stores.traces.conventions import constraint_of
from stores.traces.store import TraceStore
from stores.types import EpisodeRewards, Purpose, RewardsRef, Trace, TracesRef
from train_loops.config import (
    AdaptiveKLConfig,
    AdvantageConfig,
    AgentTrainConfig,
    CriticConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    OverlongConfig,
    TrainConfig,
)
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, load_critic, load_policy, load_reference
from train_loops.engine.models import Models
from train_loops.rows.masks import with_masks
from train_loops.rows.samples import Funnel, Sample, samples_of
from train_loops.signal.figures import credit_correlation, explained_variance
from train_loops.signal.learning_signal import learning_signal
from train_loops.signal.mismatch import MismatchError
from train_loops.signal.team_signal import TeamSignal
from train_loops.worker.learner import Learned, learn, read_rows
from train_loops.worker.scoring import probe_rows
from train_loops.worker.update import TrainingDivergedError

pytestmark = [pytest.mark.test, pytest.mark.usefixtures("one_worker")]

LR = OptimizerConfig(lr=3e-3)


@pytest.fixture(scope="module")
def sampled(tiny_model: Path):
    return sample_traces(tiny_model)


def rows(sampled) -> list[Sample]:
    return [s for t, r in zip(*sampled, strict=True) for s in samples_of(t, r, model_group=GROUP)]


def models(folder: Path, config: TrainConfig) -> Models:
    policy = Engine(load_policy(folder, config.deepspeed), optimizer=config.optimizer, config=config.deepspeed)
    reference = load_reference(folder, config.deepspeed) if config.loss.has_kl else None
    if not config.has_critic:
        return Models(policy=policy, reference=reference)
    critic = Engine(load_critic(folder, config.deepspeed), optimizer=config.critic.optimizer, config=config.deepspeed)
    return Models(policy=policy, critic=critic, reference=reference)


def run(samples: list[Sample], engines: Models, config: TrainConfig, **kwargs) -> Learned:
    funnel = Funnel(model_group=GROUP)
    return learn(samples, engines, config=config, credit_kind="returns", seed=0, funnel=funnel, **kwargs)


def wanted_probability(engine: Engine, samples: list[Sample]) -> float:
    ids = torch.tensor([list(s.token_ids) for s in samples])
    with torch.no_grad():
        probabilities = engine.module.model(input_ids=ids, use_cache=False).logits[:, 4:-1].softmax(-1)
    return float(probabilities[..., :WANTED].sum(-1).mean())


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr_mas"])
def test_a_job_raises_the_probability_of_what_was_rewarded(tiny_model: Path, sampled, algorithm: str) -> None:
    config = TrainConfig(algorithm=algorithm, optimizer=LR, num_epochs=2, num_minibatches=2, microbatch_tokens=256)
    engines, samples = models(tiny_model, config), rows(sampled)
    before = wanted_probability(engines.policy, samples)
    learned = run(samples, engines, config)
    assert wanted_probability(engines.policy, samples) > before + 0.01
    metrics = learned.metrics
    assert metrics["train/steps"] == 4 and metrics["train/skipped_steps"] == 0
    assert metrics["train/logprob_gap_max"] < 1e-5 and metrics["train/is_corrected"] == 0
    assert metrics["train/rows"] == 128 and metrics["train/completion_tokens"] == 768
    assert metrics["train/kl_k3"] > 0 and metrics["train/grad_norm"] > 0
    assert set(learned.agents) == {"solver", "verifier"}
    assert learned.agents["solver"]["logprob_gap_max"] < 1e-5
    assert ("train/explained_variance" in metrics) == (algorithm == "ppo")
    assert all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize(
    "loss",
    [LossConfig(), LossConfig(aggregation="seq_mean_token_sum_norm", norm_tokens=6)],
    ids=lambda x: x.aggregation,
)
def test_one_big_step_equals_any_cut_into_microbatches(tiny_model: Path, sampled, loss: LossConfig) -> None:
    samples, metrics = rows(sampled), []
    for microbatch_tokens in (64, 100_000):
        config = TrainConfig(optimizer=LR, microbatch_tokens=microbatch_tokens, loss=loss)
        engines = models(tiny_model, config)
        metrics.append(run(samples, engines, config).metrics)
    assert metrics[0]["train/grad_norm"] == pytest.approx(metrics[1]["train/grad_norm"], rel=1e-4)
    assert metrics[0]["train/kl_k3"] == pytest.approx(metrics[1]["train/kl_k3"], rel=1e-3)


def test_twice_the_rows_have_the_gradient_of_dr_grpo_of_the_rows_once(tiny_model: Path, sampled) -> None:
    loss = LossConfig(aggregation="seq_mean_token_sum_norm", norm_tokens=6)
    config = TrainConfig(optimizer=LR, loss=loss, advantage=AdvantageConfig(normalize_std=False))
    samples = rows(sampled)
    again = [replace(s, episode_id=f"{s.episode_id}/2", group_id=f"{s.group_id}/2") for s in samples]
    norms = [run(x, models(tiny_model, config), config).metrics["train/grad_norm"] for x in (samples, samples + again)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_one_shifted_token_id_is_seen_and_many_fail_the_job(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR)
    samples = rows(sampled)

    def shifted(s: Sample) -> Sample:
        return replace(s, token_ids=[*s.token_ids[:-1], (s.token_ids[-1] + 1) % 300])

    one = run([shifted(samples[0]), *samples[1:]], models(tiny_model, config), config)
    assert one.agents[samples[0].agent]["logprob_gap_max"] > config.mismatch.tolerance_max
    assert one.metrics["train/is_corrected"] == 1
    with pytest.raises(MismatchError, match="trainer and engine differ"):
        run([shifted(s) for s in samples], models(tiny_model, config), config)


def test_the_engines_logprobs_stand_for_the_old_ones_while_they_are_close(tiny_model: Path, sampled) -> None:
    mismatch = MismatchConfig(old_logprobs="rollout_if_close")
    config, samples = TrainConfig(optimizer=LR, mismatch=mismatch), rows(sampled)
    spared = run(samples, models(tiny_model, config), config)
    scored = run(samples, models(tiny_model, config), TrainConfig(optimizer=LR))
    assert "train/entropy" not in spared.metrics and "train/entropy" in scored.metrics, "no pass was made for it"
    assert 0 < spared.metrics["train/logprob_gap_max"] < 1e-5, "measured on a part of the rows"
    assert spared.metrics["train/grad_norm"] == pytest.approx(scored.metrics["train/grad_norm"], rel=1e-4)
    far = [replace(s, rollout_logprobs=[x - 0.06 for x in s.rollout_logprobs]) for s in samples]
    assert "train/entropy" in run(far, models(tiny_model, config), config).metrics


@pytest.fixture(scope="module")
def sampled_before(tiny_model: Path) -> list[Sample]:
    """Rows of another iteration, drawn from the version that `moved` starts from."""
    return rows(sample_traces(tiny_model, iteration=2, num_tasks=32))


def moved(folder: Path, sampled, config: TrainConfig, *, lr: float = 3e-3) -> Models:
    """Engines one job away from the weights in `folder`."""
    engines = models(folder, config.model_copy(update={"optimizer": OptimizerConfig(lr=lr, max_grad_norm=1e9)}))
    run(rows(sampled), engines, TrainConfig())
    return engines


def logprobs_of(model: torch.nn.Module, s: Sample) -> torch.Tensor:
    """[completion tokens], at temperature 1."""
    logits = model(input_ids=torch.tensor([list(s.token_ids)]), use_cache=False).logits[0, s.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(s.token_ids[s.prompt_length :])[:, None]).squeeze(1)


def test_rows_of_an_earlier_version_are_weighted_and_their_figures_named_for_it(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config = TrainConfig(optimizer=LR, mismatch=MismatchConfig(correction="none", old_logprobs="rollout_if_close"))
    learned = run(sampled_before, moved(tiny_model, sampled, config), config, is_off_policy=True)
    assert learned.metrics["train/is_corrected"] == 1 and learned.metrics["train/importance_weight"] < 1.01
    assert "train/entropy" in learned.metrics, "all rows are scored"
    figures = [learned.agents["solver"], learned.agents["verifier"]]
    figures.append({name.removeprefix("train/"): value for name, value in learned.metrics.items()})
    for about in figures:
        assert 0.05 < about["policy_gap_mean"] < about["policy_gap_max"] and 0 < about["policy_kl_k3"] < 0.1
        assert 0.8 < about["ess"] < 1 and about["policy_weight_mean"] == pytest.approx(1, abs=0.05)
        assert not [name for name in about if "logprob_gap" in name or name == "mismatch_kl_k3"]
    for name, join in (("ess", min), ("policy_gap_max", max)):
        assert figures[2][name] == join(about[name] for about in figures[:2])
    assert learned.metrics["train/trained_rows"] == learned.metrics["train/non_zero_advantage_rows"] > 400


def test_on_policy_no_figure_is_named_for_another_policy(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR)
    learned = run(rows(sampled), models(tiny_model, config), config)
    for about in (learned.metrics, *learned.agents.values()):
        assert not [name for name in about if "policy_" in name]
        assert {"logprob_gap_mean", "logprob_gap_max", "ess"} <= {name.removeprefix("train/") for name in about}


def test_a_step_off_policy_has_the_gradient_that_weights_by_hand_give(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config = TrainConfig(optimizer=LR)
    engines = moved(tiny_model, sampled, config)
    scorer = engines.policy.module
    by_hand = copy.deepcopy(scorer.model)
    found: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    for name, parameter in scorer.model.named_parameters():
        parameter.register_hook(lambda grad, name=name: found.update({name: found[name] + grad}))
    learned = run(sampled_before, engines, config, is_off_policy=True)

    num_tokens = sum(s.completion_length for s in sampled_before)
    loss, num_truncated = torch.zeros(()), 0
    for s in sampled_before:
        logprobs = logprobs_of(by_hand, s)
        weights = (logprobs.detach() - torch.tensor(s.rollout_logprobs)).exp()
        num_truncated += int((weights > 2).sum())
        advantages = torch.tensor(learned.advantages[s.episode_id, s.turn_index].tolist())
        # One step: the ratio to the old logprobs is 1, and its gradient that of the logprob.
        loss = loss - (weights.clamp(max=2) * advantages * logprobs).sum() / num_tokens
    loss.backward()
    assert 0 < num_truncated < num_tokens / 20, "truncation is part of what is compared"
    norm = torch.cat([p.grad.flatten() for p in by_hand.parameters()]).norm()
    assert learned.metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in by_hand.named_parameters():
        assert (found[name] - parameter.grad).abs().max() < 1e-4 * norm, name


def test_logprobs_of_another_temperature_than_the_tokens_fail_by_the_mean_weight(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR)
    for logprobs_of in (None, 1.0):
        samples = rows(sample_traces(tiny_model, iteration=2, num_tasks=32, temperature=0.7, logprobs_of=logprobs_of))
        engines = moved(tiny_model, sampled, config)
        num_steps = engines.policy.num_steps
        if logprobs_of is None:
            assert run(samples, engines, config, is_off_policy=True).metrics["train/ess"] > 0.5
            continue
        with pytest.raises(MismatchError, match=r"mean of exp\(old - rollout\) is 1\.\d+ over 1536 tokens"):
            run(samples, engines, config, is_off_policy=True)
        assert engines.policy.num_steps == num_steps


def test_choices_without_their_masks_fail_by_the_mean_weight(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config, labels, random = TrainConfig(optimizer=LR), [5, 70, 300], torch.Generator().manual_seed(0)
    sampler = models(tiny_model, config).policy.module.model
    prompts = torch.tensor([list(s.token_ids[: s.prompt_length]) for s in sampled_before])
    with torch.no_grad():
        of_labels = sampler(input_ids=prompts, use_cache=False).logits[:, -1, labels].log_softmax(-1)
    picked = torch.multinomial(of_labels.exp(), 1, generator=random)
    choices = [
        replace(
            s,
            token_ids=[*s.token_ids[: s.prompt_length], labels[i]],
            rollout_logprobs=[logprobs[i].item()],
            constraint=constraint_of(labels),
        )
        for s, i, logprobs in zip(sampled_before, picked.flatten().tolist(), of_labels, strict=True)
    ]
    engines = moved(tiny_model, sampled, config)
    with pytest.raises(MismatchError, match=r"mean of exp\(old - rollout\) is 0\.0\d+ over 256 tokens"):
        run(choices, engines, config, is_off_policy=True)
    learned = run(with_masks(choices, tiny_model), engines, config, is_off_policy=True)
    assert learned.metrics["train/policy_weight_mean"] == pytest.approx(1, abs=0.1)


def test_a_far_version_fails_by_the_effective_sample_size_and_the_error_says_what_to_set(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config = TrainConfig(optimizer=LR)
    message = r"effective sample size 0\.[0-4]\d*,.*loop\.max_lag.*train\.mismatch\.min_ess=0\.[0-4]"
    with pytest.raises(MismatchError, match=message):
        run(sampled_before, moved(tiny_model, sampled, config, lr=3e-2), config, is_off_policy=True)
    accepted = TrainConfig(optimizer=LR, mismatch=MismatchConfig(min_ess=0.01))
    engines = moved(tiny_model, sampled, accepted, lr=3e-2)
    assert run(sampled_before, engines, accepted, is_off_policy=True).metrics["train/ess"] < 0.5


def test_rows_that_were_chosen_after_they_were_drawn_have_no_mean_weight_to_check(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config = TrainConfig(optimizer=LR)
    engines = moved(tiny_model, sampled, config, lr=6e-3)
    with torch.no_grad():
        gains = [
            float(logprobs_of(engines.policy.module.model, s).sum()) - sum(s.rollout_logprobs) for s in sampled_before
        ]
    chosen = [replace(s, agent="solver") for s, gain in zip(sampled_before, gains, strict=True) if gain > 0.2]
    with pytest.raises(MismatchError, match=r"mean of exp\(old - rollout\) is 1\."):
        run(chosen, engines, config, is_off_policy=True)
    learned = run(chosen, engines, config, is_off_policy=True, has_all_groups=False)
    assert learned.metrics["train/policy_weight_mean"] > 1.05 and learned.metrics["train/is_corrected"] == 1


def served_from(samples: list[Sample], served: Collection[str], by: float) -> list[Sample]:
    """These episodes as if another version had sampled them: two tokens of three `by` nats more likely then."""

    def other(s: Sample) -> Sample:
        logprobs = [x + by * (i % 3 > 0) for i, x in enumerate(s.rollout_logprobs)]
        return replace(s, is_served=True, rollout_logprobs=logprobs)

    return [other(s) if s.episode_id in served else s for s in samples]


def test_rows_from_service_among_those_of_an_earlier_version_keep_their_own_rule(
    tiny_model: Path, sampled, sampled_before: list[Sample]
) -> None:
    config = TrainConfig(algorithm="grpo", optimizer=LR)
    served = {s.episode_id for s in sampled_before[:32]}

    own = [s for s in sampled_before if s.episode_id not in served]
    alone = run(own, moved(tiny_model, sampled, config), config, is_off_policy=True)
    near = run(served_from(sampled_before, served, 0.3), moved(tiny_model, sampled, config), config, is_off_policy=True)
    far = run(served_from(sampled_before, served, 6.0), moved(tiny_model, sampled, config), config, is_off_policy=True)
    for learned in (near, far):
        for agent, about in alone.agents.items():
            for name in ("policy_gap_mean", "policy_weight_mean", "ess"):
                assert learned.agents[agent][name] == pytest.approx(about[name], rel=1e-4), "of the run's own rows"
    num_served = sum(s.episode_id in served for s in sampled_before)
    assert near.metrics["train/served_rows_kept"] == num_served and far.metrics["train/served_rows_kept"] == 0
    assert 0.8 < near.metrics["train/served_ess"] < 1 and far.metrics["train/served_ess"] < 0.6
    nothing_else = [s for s in served_from(sampled_before, served, 6.0) if s.is_served]
    engines = moved(tiny_model, sampled, config)
    reason = run(nothing_else, engines, config, is_off_policy=True).reason
    assert "is masked: rows from service whose effective sample size" in reason and "reject" not in reason


def test_rows_from_service_are_weighed_apart_and_too_far_ones_train_nothing(tiny_model: Path, sampled) -> None:
    config = TrainConfig(algorithm="grpo", optimizer=LR)
    samples = rows(sampled)
    served = {s.episode_id for s in samples[:8]}

    near = run(served_from(samples, served, 0.3), models(tiny_model, config), config).metrics
    assert near["train/served_rows"] == near["train/served_rows_kept"] == sum(s.episode_id in served for s in samples)
    assert near["train/logprob_gap_max"] < 1e-3  # of the rows that the run sampled
    assert 0.9 < near["train/served_ess"] < 1
    assert near["train/importance_weight"] < 1
    far = run(served_from(samples, served, 6.0), models(tiny_model, config), config).metrics
    assert far["train/served_rows_kept"] == 0
    assert far["train/served_ess"] < 0.6
    assert far["train/trained_rows"] == sum(s.episode_id not in served for s in samples)


def test_rows_from_service_are_weighed_by_logprobs_of_the_trainer_also_where_the_engines_are_close(
    tiny_model: Path, sampled
) -> None:
    config = TrainConfig(optimizer=LR, mismatch=MismatchConfig(old_logprobs="rollout_if_close"))
    samples = rows(sampled)
    probed = probe_rows([len(s.token_ids) for s in samples])
    served = {s.episode_id for s in samples} - {samples[i].episode_id for i in probed}
    assert served, "the probe takes a part of the episodes only"
    learned = run(served_from(samples, served, 6.0), models(tiny_model, config), config)
    assert learned.metrics["train/served_rows_kept"] == 0 and learned.metrics["train/served_ess"] < 0.6


def test_rows_from_service_alone_do_not_speak_for_the_engine(tiny_model: Path, sampled) -> None:
    config = TrainConfig(algorithm="grpo", optimizer=LR)
    samples = rows(sampled)
    served = {s.episode_id for s in samples}

    assert config.mismatch.limit_mean < 0.2, "the mean difference"
    near = run(served_from(samples, served, 0.3), models(tiny_model, config), config).metrics
    assert near["train/served_rows_kept"] == near["train/rows"] and near["train/trained_rows"] > 0
    assert near["train/importance_weight"] < 1 and "train/logprob_gap_mean" not in near
    assert (
        "is masked: rows from service"
        in run(served_from(samples, served, 6.0), models(tiny_model, config), config).reason
    )


def test_an_agents_weight_scales_its_gradient_and_nobody_elses(tiny_model: Path, sampled) -> None:
    samples, norms = rows(sampled), {}
    for weights in ((1, 1), (1, 0), (0, 1), (2, 0)):
        agents = {a: AgentTrainConfig(weight=w) for a, w in zip(("solver", "verifier"), weights, strict=True)}
        config = TrainConfig(optimizer=LR, agents=agents)
        learned = run(samples, models(tiny_model, config), config)
        norms[weights] = learned.metrics["train/grad_norm"]
        trained = {agent: learned.agents[agent].get("funnel/trained", 0) for agent in agents}
        assert [trained[a] > 0 for a in agents] == [w > 0 for w in weights]
    assert norms[2, 0] == pytest.approx(2 * norms[1, 0], rel=1e-4)
    assert norms[1, 1] < norms[1, 0] + norms[0, 1]


def test_an_agent_of_weight_0_has_no_entropy_bonus_either(tiny_model: Path, sampled) -> None:
    samples = [replace(s, reward=0.0) for s in rows(sampled)]
    of_verifier = TrainConfig(optimizer=LR, agents={"verifier": AgentTrainConfig(entropy_coef=0.5)})
    agents = {"solver": AgentTrainConfig(weight=0)}
    of_all = TrainConfig(optimizer=LR, agents=agents, loss=LossConfig(entropy_coef=0.5))
    results = [run(samples, models(tiny_model, config), config) for config in (of_verifier, of_all)]
    assert results[1].metrics["train/grad_norm"] == pytest.approx(results[0].metrics["train/grad_norm"], rel=1e-4)
    for learned in results:
        assert [learned.agents[a].get("funnel/trained", 0) for a in ("solver", "verifier")] == [0, 64]
    alone = run([s for s in samples if s.agent == "solver"], models(tiny_model, of_all), of_all)
    assert "the only rows are of solver, whose train.agents.<name>.weight is 0" in alone.reason


def test_rejected_tokens_have_no_gradient_of_entropy_and_no_figures(tiny_model: Path, sampled) -> None:
    samples = rows(sampled)
    far = [
        replace(s, rollout_logprobs=[x - 0.06 for x in s.rollout_logprobs]) if s.agent == "solver" else s
        for s in samples
    ]
    loss = LossConfig(entropy_coef=0.5)
    weightless = TrainConfig(optimizer=LR, loss=loss, agents={"solver": AgentTrainConfig(weight=0)})
    wanted = run(samples, models(tiny_model, weightless), weightless)
    rejecting = MismatchConfig(correction="none", reject_sequence=(0.95, 1.05))
    config = TrainConfig(optimizer=LR, loss=loss, mismatch=rejecting)
    learned = run(far, models(tiny_model, config), config)
    assert learned.metrics["train/grad_norm"] == pytest.approx(wanted.metrics["train/grad_norm"], rel=1e-4)
    assert learned.metrics["train/is_corrected"] == 1 and learned.metrics["train/rejected_share"] == 0.5
    assert [learned.agents[a].get("funnel/trained", 0) for a in ("solver", "verifier")] == [0, 64]
    assert "ratio" not in learned.agents["solver"] and learned.agents["verifier"]["ratio"] == pytest.approx(1)
    engines = models(tiny_model, config)
    nothing = run([s for s in far if s.agent == "solver"], engines, config)
    assert "is masked: train.mismatch.reject_token" in nothing.reason and engines.policy.num_steps == 0


def test_the_entropy_bonus_of_a_row_is_that_of_its_tokens_that_are_kept(tiny_model: Path, sampled) -> None:
    samples = [replace(s, reward=0.0) for s in rows(sampled)]

    def loss_where(is_far: Callable[[int], bool]) -> float:
        """The loss of the first step where these tokens of each row are rejected."""
        moved = [
            replace(s, rollout_logprobs=[x - 0.06 * is_far(t) for t, x in enumerate(s.rollout_logprobs)])
            for s in samples
        ]
        rejecting = MismatchConfig(correction="none", reject_token=(0.95, 1.05))
        loss = LossConfig(entropy_coef=0.5)
        config = TrainConfig(optimizer=LR, loss=loss, mismatch=rejecting, num_epochs=1, num_minibatches=1)
        metrics = run(moved, models(tiny_model, config), config).metrics
        assert metrics["train/ratio"] == pytest.approx(1, abs=1e-3), "a mean over the tokens that are kept"
        return metrics["train/loss"]

    early, late, every = (loss_where(is_far) for is_far in (lambda t: t > 1, lambda t: t <= 1, lambda t: False))
    assert early + late == pytest.approx(every, rel=1e-4) and min(abs(early), abs(late)) > 0.01


def test_without_a_correction_nothing_is_called_corrected(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR, mismatch=MismatchConfig(correction="none", always=True))
    assert run(rows(sampled), models(tiny_model, config), config).metrics["train/is_corrected"] == 0


def test_an_entropy_bonus_of_one_agent_raises_its_entropy(tiny_model: Path, sampled) -> None:
    samples = [replace(s, reward=0.0) for s in rows(sampled)]
    agents = {"solver": AgentTrainConfig(entropy_coef=0.5)}
    mismatch = MismatchConfig(limit_mean=9.0)  # the second job looks at the weights that the first one made
    config = TrainConfig(optimizer=LR, num_epochs=3, agents=agents, mismatch=mismatch)
    engines = models(tiny_model, config)
    before, after = (run(samples, engines, config) for _ in range(2))
    assert after.agents["solver"]["entropy"] > before.agents["solver"]["entropy"]


def test_happo_tells_the_next_group_how_likely_each_episode_became(tiny_model: Path, sampled) -> None:
    samples = rows(sampled)
    advantages = {(s.episode_id, s.turn_index): s.reward - 0.4 for s in samples}
    config = TrainConfig(algorithm="happo", optimizer=LR, num_epochs=2)
    engines = models(tiny_model, config)
    learned = run(samples, engines, config, team=TeamSignal(advantages=advantages))
    after = run(samples, engines, TrainConfig(optimizer=LR, mismatch=MismatchConfig(limit_mean=9.0)))
    gap = sum(a["mismatch_kl_k3"] for a in after.agents.values())
    assert set(learned.log_ratios) == {s.episode_id for s in samples} and gap > 0
    assert {turn: set(values.tolist()) for turn, values in learned.advantages.items()} == {
        turn: {value} for turn, value in advantages.items()
    }, "what is shown to people is what was trained on"
    earned: dict[str, float] = {}
    for s in samples:
        earned[s.episode_id] = earned.get(s.episode_id, 0.0) + s.reward
    best, worst = (sorted(earned, key=earned.__getitem__)[part] for part in (slice(-16, None), slice(16)))
    assert sum(learned.log_ratios[e] for e in best) > sum(learned.log_ratios[e] for e in worst)
    with pytest.raises(ValueError, match="needs the advantages of the team's central critic"):
        run(samples, models(tiny_model, config), config)
    with pytest.raises(ValueError, match="no advantage for turn"):
        run(samples, models(tiny_model, config), config, team=TeamSignal(advantages={}))


def test_log_m_multiplies_the_advantages_of_its_episodes(tiny_model: Path, sampled) -> None:
    samples = rows(sampled)
    advantages = {(s.episode_id, s.turn_index): s.reward - 0.4 for s in samples}
    config, metrics = TrainConfig(algorithm="happo", optimizer=LR), []
    for factor in (0.0, math.log(2)):
        signal = TeamSignal(advantages=advantages, log_factor={s.episode_id: factor for s in samples})
        metrics.append(run(samples, models(tiny_model, config), config, team=signal).metrics)
    assert metrics[1]["train/grad_norm"] == pytest.approx(2 * metrics[0]["train/grad_norm"], rel=1e-4)
    assert metrics[1]["train/factor_ess"] == pytest.approx(1.0)
    one = TeamSignal(advantages=advantages, log_factor={samples[0].episode_id: math.log(2)})
    ess = run(samples, models(tiny_model, config), config, team=one).metrics["train/factor_ess"]
    assert ess == pytest.approx(65**2 / (64 * 67)), "one M of 2 among 64"


def test_the_mixers_credit_takes_the_place_of_rewards(tiny_model: Path, sampled) -> None:
    samples = [replace(s, reward=0.0) for s in rows(sampled)]
    config = TrainConfig(optimizer=LR)
    assert "all advantages" in run(samples, models(tiny_model, config), config).reason
    credit = {(s.episode_id, s.turn_index): float(i % 3) for i, s in enumerate(samples)}
    learned = run(samples, models(tiny_model, config), config, team=TeamSignal(credit=credit))
    assert learned.metrics["train/non_zero_advantage_rows"] > 0
    assert learned.metrics["train/credit_mean"] == pytest.approx(sum(credit.values()) / len(credit))
    assert learned.metrics["train/reward_mean"] == 0.0


def test_completions_near_their_limit_are_paid_less(tiny_model: Path, sampled) -> None:
    samples, overlong = rows(sampled), OverlongConfig(buffer_tokens=2, penalty=0.5)
    config = TrainConfig(optimizer=LR, agents={"solver": AgentTrainConfig(overlong=overlong)})
    plain = run(samples, models(tiny_model, config), TrainConfig(optimizer=LR))
    less = run(samples, models(tiny_model, config), config)
    change = {a: less.agents[a]["credit_mean"] - plain.agents[a]["credit_mean"] for a in ("solver", "verifier")}
    assert change == pytest.approx({"solver": -0.5, "verifier": 0.0})


def test_a_choice_is_not_punished_for_its_one_token() -> None:
    trace = make_turns_of("e", index=0)
    choice, text = samples_of(trace, rewards_for(trace, [1.0, 1.0], outcome=1.0), model_group=GROUP)
    choice = replace(choice, constraint=constraint_of([8, 9]), max_tokens=1)
    text = replace(text, max_tokens=1)
    config = TrainConfig(overlong=OverlongConfig(buffer_tokens=64))
    scores = {"old": [np.array([-1.0])] * 2}
    signal = learning_signal([choice, text], scores, config=config, credit_kind="returns", beta=0.0, team=None)
    assert signal.credit.tolist() == [1.0, 0.0]


def test_the_coefficient_of_the_kl_follows_its_target(tiny_model: Path, sampled) -> None:
    loss = LossConfig(kl_in_reward_coef=0.5, adaptive_kl=AdaptiveKLConfig(target=0.1, horizon=640))
    config = TrainConfig(optimizer=LR, loss=loss, advantage=AdvantageConfig(normalize_std=False))
    learned = run(rows(sampled), models(tiny_model, config), config)
    assert learned.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 64 / 640)), "the reference is the policy: no KL yet"
    again = run(rows(sampled), models(tiny_model, config), config, kl_coef=learned.kl_coef)
    assert again.kl_coef < learned.kl_coef
    equal = [replace(s, reward=0.5) for s in rows(sampled)]
    still = run(equal, models(tiny_model, config), config)
    assert still.reason and still.kl_coef == still.metrics["train/kl_coef"] == 0.5, "nothing was trained"
    config = config.model_copy(update={"algorithm": "ppo"})
    warm_up = run(rows(sampled), models(tiny_model, config), config, trains_policy=False)
    assert not warm_up.reason and warm_up.kl_coef == 0.5, "the critic alone was trained"


def test_equal_rewards_train_nothing_and_say_so(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR)
    engines = models(tiny_model, config)
    samples = [replace(s, reward=0.5) for s in rows(sampled)]
    learned = run(samples, engines, config)
    assert "all advantages" in learned.reason and engines.policy.num_steps == 0
    assert "no trainable rows" in run([], engines, config).reason


def test_a_kl_coefficient_holds_the_policy_near_the_reference(tiny_model: Path, sampled) -> None:
    samples, kls = rows(sampled), []
    for beta in (0.0, 20.0):
        loss = LossConfig(kl_in_loss_coef=beta, clip_high=5.0)
        config = TrainConfig(optimizer=OptimizerConfig(lr=3e-4), num_epochs=10, loss=loss)
        kls.append(run(samples, models(tiny_model, config), config).metrics["train/kl_k3"])
    assert kls[1] < kls[0] / 2
    config = TrainConfig(algorithm="rloo", optimizer=LR, loss=LossConfig(kl_in_reward_coef=0.1))
    assert run(samples, models(tiny_model, config), config).metrics["train/kl_ref_k3"] == pytest.approx(0, abs=1e-6)


def test_while_only_the_critic_learns_the_policy_stays(tiny_model: Path, sampled) -> None:
    config = TrainConfig(algorithm="ppo", optimizer=LR, advantage=AdvantageConfig(whiten="agent"))
    engines, samples = models(tiny_model, config), rows(sampled)
    alone = run(samples, engines, config, trains_policy=False)
    assert engines.policy.num_steps == 0 and engines.critic.num_steps == 1
    assert alone.metrics["train/trained_rows"] == 0
    both = run(samples, engines, config)
    assert engines.policy.num_steps == 1 and engines.critic.num_steps == 2
    assert both.metrics["train/trained_rows"] == both.metrics["train/non_zero_advantage_rows"] > 0


def test_a_head_on_the_policys_trunk_learns_in_its_warm_up_and_never_moves_the_policy_without_a_gradient(
    tiny_model: Path, sampled
) -> None:
    config = TrainConfig(algorithm="ppo", optimizer=LR, critic=CriticConfig(kind="shared"))
    scorer = load_policy(tiny_model, config.deepspeed)
    width = scorer.model.config.get_text_config().hidden_size
    scorer.value_head = value_head(width, hidden_size=0, dtype=torch.float32)
    policy = Engine(scorer, optimizer=LR, config=config.deepspeed)
    engines, samples = Models(policy=policy, shares_trunk=True), rows(sampled)

    def weights() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in scorer.model.parameters()])

    before = weights()
    assert not run(samples, engines, config, trains_policy=False).reason
    assert policy.num_steps == 1 and torch.equal(weights(), before)
    run(samples, engines, config)
    trained = weights()
    assert not torch.equal(trained, before)
    far = [replace(s, rollout_logprobs=[x + 60 for x in s.rollout_logprobs]) for s in samples]
    rejecting = config.model_copy(update={"mismatch": MismatchConfig(limit_mean=1000, reject_token=(0.5, 2.0))})
    reason = run(far, engines, rejecting).reason
    assert "is masked: train.mismatch.reject_token" in reason and "service" not in reason
    assert policy.num_steps == 2 and torch.equal(weights(), trained)


@pytest.mark.parametrize(
    ("num_epochs", "message"),
    [(3, "3 steps in a row of the policy"), (1, r"every step of the policy in this job \(1\)")],
)
def test_a_job_whose_steps_are_not_finite_ends(tiny_model: Path, sampled, num_epochs: int, message: str) -> None:
    config = TrainConfig(algorithm="ppo", optimizer=LR, num_epochs=num_epochs)
    engines = models(tiny_model, config)
    with torch.no_grad():
        engines.critic.module.head.bias.fill_(math.nan)
    with pytest.raises(TrainingDivergedError, match=f"{message} had a loss or gradient that is not finite"):
        run(rows(sampled), engines, config)


def test_rows_of_a_skipped_step_do_not_count_as_trained(tiny_model: Path, sampled) -> None:
    advantage = AdvantageConfig(normalize_std=False, singleton="raw")
    config = TrainConfig(optimizer=LR, num_minibatches=2, advantage=advantage)
    samples = rows(sampled)
    samples[0] = replace(samples[0], group_id="alone", reward=1e38)  # the norm of its gradient overflows
    learned = run(samples, models(tiny_model, config), config)
    assert learned.metrics["train/skipped_steps"] == 1
    assert abs(learned.metrics["train/loss"]) < 1, "of the step that was made"
    assert learned.metrics["train/trained_rows"] < learned.metrics["train/non_zero_advantage_rows"]


def test_a_gradient_that_overflows_in_a_job_of_one_step_names_its_turns(tiny_model: Path, sampled) -> None:
    config = TrainConfig(optimizer=LR, advantage=AdvantageConfig(normalize_std=False, singleton="raw"))
    samples = rows(sampled)
    samples[0] = replace(samples[0], group_id="alone", reward=1e38)
    message = (
        r"this job \(1\).*the losses of its rows are finite, their gradient is not; they are turn \d of .* and 123 more"
    )
    with pytest.raises(TrainingDivergedError, match=message):
        run(samples, models(tiny_model, config), config)


def test_figures_of_what_does_not_vary_are_left_out() -> None:
    varying, constant = [0.0, 1.0, 0.5], [0.1, 0.1, 0.1 + 1e-16]
    assert credit_correlation(varying, varying) == pytest.approx(1)
    assert credit_correlation(varying, constant) is None and credit_correlation(constant, varying) is None
    assert explained_variance(np.array(varying), np.array(varying)) == {"train/explained_variance": 1}
    assert explained_variance(np.array(constant), np.array(varying)) == {}


def stored(
    folder: Path, traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]
) -> tuple[TraceStore, TracesRef, RewardsRef]:
    """A store that has these, and their pins."""
    store = TraceStore(str(folder / "traces"))
    store.create()
    store.write_episodes(traces)
    store.write_rewards(rewards)
    key = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN}
    pinned = store.pin_episodes(**key, team_key="v0")
    return store, pinned, store.pin_rewards(**key, credit_version="c1", traces=pinned)


def test_rows_come_from_the_pinned_store_in_a_fixed_order(tmp_path: Path, sampled) -> None:
    pinned = stored(tmp_path, *sampled)
    samples, funnel = read_rows(*pinned, model_group=GROUP, config=TrainConfig(), credit_kind="returns")
    assert sorted(samples, key=lambda s: (s.episode_id, s.turn_index)) == samples
    by_id = {(s.episode_id, s.turn_index): s for s in rows(sampled)}
    assert all(list(s.token_ids) == list(by_id[s.episode_id, s.turn_index].token_ids) for s in samples)
    assert len(samples) == len(by_id) == 128
    assert funnel.counts["solver"]["scored"] == 64


@pytest.mark.parametrize(("num_rows", "wanted"), [(1, 1), (8, 8), (100, 10), (400, 25), (4000, 41)])
def test_the_kl_probe_takes_a_sixteenth_of_the_tokens_from_all_over_the_job(num_rows: int, wanted: int) -> None:
    rows = probe_rows([100] * num_rows)
    assert len(rows) == len(set(rows)) == wanted
    assert rows == probe_rows([100] * num_rows)
    assert max(rows) >= num_rows // 2, "not only the first agents"


def test_siblings_of_a_turn_are_rows_of_the_algorithm_that_compares_them(tmp_path: Path, sampled) -> None:
    base, paid = sampled[0][0], sampled[1][0]
    at = base.turns[-1]
    siblings = [
        replace(base, episode_id=f"sibling{i}", group_id="variants", variant=f"counterfactual-{at.turn_index}#{i}")
        for i in (1, 2)
    ]

    def earns(episode: str, reward: float) -> EpisodeRewards:
        turns = tuple(replace(r, reward=reward) for r in paid.rewards)
        return replace(paid, episode_id=episode, rewards=turns)

    paid_rewards = [earns(base.episode_id, 1.0), earns("sibling1", 0.5), earns("sibling2", 0.25)]
    pinned = stored(tmp_path, [base, *siblings], paid_rewards)
    about = {"model_group": GROUP, "credit_kind": "returns"}
    config = TrainConfig(algorithm="counterfactual")
    samples, funnel = read_rows(*pinned, config=config, **about)
    baseline = {s.episode_id: s.baseline for s in samples if s.turn_index == at.turn_index}
    assert baseline == pytest.approx({base.episode_id: 0.375, "sibling1": 0.625, "sibling2": 0.75})
    assert [s.episode_id for s in samples if s.is_sibling] == ["sibling1", "sibling2"]
    assert len(samples) == len(base.turns) + 2
    num_calls = {agent: counts["calls"] for agent, counts in funnel.counts.items()}
    assert num_calls == {t.agent: 1 + 2 * (t.agent == at.agent) for t in base.turns}
    plain, funnel = read_rows(*pinned, config=TrainConfig(), **about)
    assert len(plain) == sum(counts["scored"] for counts in funnel.counts.values()) == len(base.turns)


def test_variants_without_a_turn_of_the_model_group_are_compared_with(tmp_path: Path) -> None:
    """Of group `helper` is the second turn; the greedy episode and one replay ended before it."""
    first = make_turns_of("e", index=0)
    helper = replace(first.turns[1], agent="helper", model_group="helper")
    base = replace(first, turns=(first.turns[0], helper), policy_versions={GROUP: 0, "helper": 0})
    called = replace(base, episode_id="called", variant="without-solver")
    ended = [
        replace(base, episode_id=name, variant=name, turns=base.turns[:1]) for name in ("greedy", "without-solver#1")
    ]
    outcomes = {"e": 1.0, "called": 0.75, "greedy": 0.5, "without-solver#1": 0.25}
    traces = [base, called, *ended]
    rewards = [rewards_for(t, [outcomes[t.episode_id]] * len(t.turns), outcomes[t.episode_id]) for t in traces]
    pinned = stored(tmp_path, traces, rewards)
    config = TrainConfig(algorithm="leave_one_out")
    samples, funnel = read_rows(*pinned, model_group="helper", config=config, credit_kind="returns")
    assert {s.episode_id: s.baseline for s in samples} == {"e": 0.5, "called": 0.25}
    assert funnel.counts.keys() == {"helper"} and funnel.counts["helper"]["scored"] == len(samples)
