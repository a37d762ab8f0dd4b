"""mismatch: agreement per agent, the three decisions, the corrections on literal numbers, and what the mean weight tells."""

import numpy as np
import pytest
from pydantic import ValidationError

from train_loops.config import MismatchConfig
from train_loops.signal.mismatch import (
    MismatchError,
    check_masks,
    check_mean_weight,
    correct,
    correct_served,
    decide,
    effective_sample_size,
    is_close,
    measure,
    off_policy,
)

pytestmark = pytest.mark.fast

CONFIG = MismatchConfig(tolerance_mean=0.01, tolerance_max=0.05, limit_mean=0.1, truncation=2.0)


def agreements(*differences: float, agent: str = "solver"):
    rollout = np.full(len(differences), -1.0)
    return measure([rollout + differences], [rollout], [agent], config=CONFIG)


def test_equal_logprobs_agree_fully() -> None:
    a = agreements(0.0, 0.0, 0.0)["solver"]
    assert (a.num_tokens, a.mean_abs, a.max_abs, a.kl_k3) == (3, 0, 0, 0)
    assert a.ess == 1
    assert decide(agreements(0.0), config=CONFIG) == "none"


def test_the_figures_of_two_tokens_are_their_literal_values() -> None:
    a = agreements(np.log(2), -np.log(2))["solver"]  # weights 2 and 1/2
    assert a.mean_abs == pytest.approx(np.log(2))
    assert a.kl_k3 == pytest.approx(0.25)
    assert a.ess == pytest.approx(2.5**2 / (2 * 4.25))
    assert (a.weight_mean, a.weight_sd) == (pytest.approx(1.25), pytest.approx(0.75))


def test_agents_are_measured_apart_and_rows_of_one_agent_together() -> None:
    got = measure([[-1.0], [-1.0, -1.0], [-3.0]], [[-1.0], [-1.0, -1.2], [-3.0]], ["a", "b", "a"], config=CONFIG)
    assert (got["a"].num_tokens, got["b"].num_tokens) == (2, 2)
    assert got["a"].max_abs == 0
    assert (got["b"].mean_abs, got["b"].max_abs) == (pytest.approx(0.1), pytest.approx(0.2))


def test_one_far_token_or_many_near_ones_call_for_a_correction() -> None:
    assert decide(agreements(*[0.0] * 99, 0.06), config=CONFIG) == "correct"
    assert decide(agreements(*[0.02] * 5), config=CONFIG) == "correct"
    assert decide(agreements(*[0.005] * 5), config=CONFIG) == "none"


@pytest.mark.parametrize("difference", [0.2, -0.2, float("nan")])
def test_beyond_the_limit_the_error_names_agent_number_and_limit(difference: float) -> None:
    measured = {**agreements(0.0, agent="fine"), **agreements(difference, agent="verifier")}
    with pytest.raises(MismatchError, match=r"'verifier'.* (0\.2|nan) nats.*limit_mean=0\.1"):
        decide(measured, config=CONFIG)


def test_a_correction_may_be_wanted_always() -> None:
    assert decide(agreements(0.0), config=CONFIG.model_copy(update={"always": True})) == "correct"


def test_too_small_an_effective_sample_size_fails_and_says_what_to_do() -> None:
    config = MismatchConfig(limit_mean=10.0, min_ess=0.9)
    with pytest.raises(MismatchError, match=r"'solver'.*below train\.mismatch\.min_ess=0\.9.*sample again"):
        decide(agreements(np.log(2), -np.log(2)), config=config)


def test_the_effective_sample_size_of_whole_turns_is_that_of_their_products() -> None:
    old = [[np.log(2), np.log(2)], [np.log(2), -np.log(2)]]  # products 4 and 1
    rollout = [[0.0, 0.0], [0.0, 0.0]]
    sequence = CONFIG.model_copy(update={"correction": "sequence"})
    of_turns = measure(old, rollout, ["a", "a"], config=sequence)["a"]
    of_tokens = measure(old, rollout, ["a", "a"], config=CONFIG)["a"]
    assert of_turns.ess == pytest.approx(5.0**2 / (2 * 17.0))
    assert of_tokens.ess == pytest.approx(6.5**2 / (4 * 12.25))


def test_the_effective_sample_size_is_one_where_all_weights_are_equal() -> None:
    assert effective_sample_size(np.array([0.3, 0.3, 0.3])) == pytest.approx(1.0)
    assert effective_sample_size(np.array([0.0, np.log(3.0)])) == pytest.approx(16 / 20)


@pytest.mark.parametrize("bounds", [(2.0, 0.5), (-1.0, 2.0), (0.0, 0.0), (0.5, float("nan")), (1.5, 2.0)])
def test_a_range_of_weights_that_no_agreement_lies_in_is_refused(bounds: tuple[float, float]) -> None:
    for key in ("reject_token", "reject_sequence"):
        with pytest.raises(ValidationError, match=key):
            MismatchConfig.model_validate({key: bounds})


def test_a_factor_common_to_all_weights_costs_no_samples() -> None:
    assert agreements(-400.0, -400.0)["solver"].ess == 1


@pytest.mark.parametrize(
    ("differences", "close"),
    [([0.005, -0.005], True), ([0.02, 0.02], False), ([0.0] * 99 + [0.06], False), ([float("nan")], False)],
)
def test_close_is_within_both_tolerances(differences: list[float], close: bool) -> None:
    measured = {**agreements(0.0, agent="fine"), **agreements(*differences)}
    assert is_close(measured, config=CONFIG) is close


def test_decoupled_weights_times_the_ratio_are_the_ratio_to_what_sampled() -> None:
    old, rollout, new = [[-1.0, -2.0]], [[-1.2, -1.9]], np.array([-0.8, -2.1])
    config = MismatchConfig(always=True, truncation=10.0, limit_mean=1.0)
    assert decide(measure(old, rollout, ["a"], config=config), config=config) == "correct"
    weights, _ = correct(old, rollout, config=config)
    assert weights is not None
    np.testing.assert_allclose(weights[0] * np.exp(new - np.array(old[0])), np.exp(new - np.array(rollout[0])))


ROLLOUT, OLD = [[-3.0, -1.0, -1.5]], [[0.0, -5.0, -1.0]]
"""Log weights 3, -4 and 0.5: their sum is -0.5."""


def test_token_weights_are_capped_above_only() -> None:
    weights, kept = correct(OLD, ROLLOUT, config=CONFIG)
    assert weights is not None and kept is None
    np.testing.assert_allclose(weights[0], [2.0, np.exp(-4), np.exp(0.5)])


def test_a_sequence_weight_is_the_product_over_the_turn_and_the_same_on_all_its_tokens() -> None:
    config = CONFIG.model_copy(update={"correction": "sequence"})
    weights, _ = correct([*OLD, [0.0]], [*ROLLOUT, [-1.0]], config=config)
    assert weights is not None
    np.testing.assert_allclose(weights[0], [np.exp(-0.5)] * 3)
    np.testing.assert_allclose(weights[1], [2.0])


def test_tokens_and_turns_out_of_range_are_rejected() -> None:
    config = CONFIG.model_copy(update={"correction": "none", "reject_token": (0.1, 10.0)})
    assert correct(OLD, ROLLOUT, config=config)[0] is None
    (kept,) = correct(OLD, ROLLOUT, config=config)[1]
    assert kept.tolist() == [0, 0, 1]
    config = CONFIG.model_copy(update={"reject_sequence": (0.5, 1.1)})
    _, turns = correct([*OLD, [0.0]], [*ROLLOUT, [-1.0]], config=config)  # geometric means exp(-1/6) and e
    assert [k.tolist() for k in turns] == [[1, 1, 1], [0]]


def test_the_error_names_the_least_sample_size_that_would_accept_every_agent() -> None:
    config = MismatchConfig(limit_mean=10.0, min_ess=0.95)
    far, near = agreements(np.log(4), -np.log(4), agent="far"), agreements(np.log(2), -np.log(2), agent="a_near")
    for measured in ({**near, **far}, {**far, **near}):
        with pytest.raises(MismatchError, match=r"'far'.*accept it with train\.mismatch\.min_ess=0\.5"):
            decide(measured, config=config)
    accepted = config.model_copy(update={"min_ess": 0.561, "tolerance_max": 10.0, "tolerance_mean": 10.0})
    assert decide({**near, **far}, config=accepted) == "none"


def test_on_the_limit_is_within_it() -> None:
    config = CONFIG.model_copy(update={"tolerance_mean": 0.0, "tolerance_max": 0.0})
    assert is_close(agreements(0.0), config=config)


def test_rows_that_do_not_fit_together_are_refused() -> None:
    for old, rollout, agents in (([[0.0]], [[0.0], [0.0]], ["a"]), ([[0.0], [0.0]], [[0.0]], ["a", "a"])):
        with pytest.raises(ValueError, match="zip"):
            correct(old, rollout, config=CONFIG)
        with pytest.raises(ValueError, match="zip"):
            measure(old, rollout, agents, config=CONFIG)


@pytest.mark.parametrize(("given", "correction"), [("none", "token"), ("token", "token"), ("sequence", "sequence")])
def test_what_other_versions_sampled_is_always_weighted_and_has_a_floor(given: str, correction: str) -> None:
    config = MismatchConfig(correction=given, limit_mean=0.1, old_logprobs="rollout_if_close")
    settings = off_policy(config)
    assert (settings.always, settings.old_logprobs, settings.correction) == (True, "recompute", correction)
    assert settings.limit_mean >= 100 and settings.min_ess == 0.5
    assert settings == MismatchConfig.model_validate(settings.model_dump()), "no setting is of another name"
    assert off_policy(config.model_copy(update={"min_ess": 0.2})).min_ess == 0.2


def test_rows_from_service_are_weighted_and_the_others_stay_as_they_are() -> None:
    old, rollout = [[-1.0, -1.0], [-1.0, -1.5], [-2.0]], [[-9.0, -9.0], [-1.2, -1.4], [-2.0]]
    agents, is_served = ["a", "a", "b"], [False, True, True]
    weights, mask, near = correct_served(old, rollout, agents, is_served, weights=None, keep_mask=None, config=CONFIG)
    assert [w.tolist() for w in weights] == [[1, 1], pytest.approx([np.exp(0.2), np.exp(-0.1)]), [1]]
    assert [m.tolist() for m in mask] == [[1, 1], [1, 1], [1]] and set(near) == {"a", "b"}
    given = [np.array([3.0, 4.0]), np.array([5.0, 6.0]), np.array([7.0])]
    kept = [np.array([0.0, 1.0]), np.array([0.0, 0.0]), np.array([0.0])]
    weights, mask, _ = correct_served(
        old, rollout, agents, is_served, weights=list(given), keep_mask=list(kept), config=CONFIG
    )
    assert weights[0].tolist() == [3, 4] and mask[0].tolist() == [0, 1]
    assert weights[1].tolist() == pytest.approx([np.exp(0.2), np.exp(-0.1)]) and mask[1].tolist() == [1, 1]
    rejecting = CONFIG.model_copy(update={"reject_token": (1.0, 2.0)})
    _, mask, _ = correct_served(old, rollout, agents, is_served, weights=None, keep_mask=None, config=rejecting)
    assert [m.tolist() for m in mask] == [[1, 1], [1, 0], [1]]


def test_an_agent_whose_rows_from_service_say_too_little_trains_on_none_of_them() -> None:
    old, rollout = [[5.0, -5.0], [-2.0], [-1.0]], [[0.0, 0.0], [-2.0], [-1.0]]
    _, mask, near = correct_served(
        old, rollout, ["a", "b", "a"], [True, True, False], weights=None, keep_mask=None, config=CONFIG
    )
    assert near["a"].ess == pytest.approx(0.5, abs=1e-3) and near["a"].ess < 0.50005
    config = CONFIG.model_copy(update={"min_ess": 0.6})
    _, mask, _ = correct_served(
        old, rollout, ["a", "b", "a"], [True, True, False], weights=None, keep_mask=None, config=config
    )
    assert [m.tolist() for m in mask] == [[0, 0], [1], [1]]


def test_a_far_version_fails_with_both_settings_that_help() -> None:
    config = off_policy(CONFIG)
    far = agreements(*[3.0] * 5, *[-3.0] * 95)
    message = (
        r"'solver': the version that sampled and the parent differ.*0\.5.*loop\.max_lag.*train\.mismatch\.min_ess=0\.05"
    )
    with pytest.raises(MismatchError, match=message):
        decide(far, config=config, is_off_policy=True)
    assert decide(far, config=config.model_copy(update={"min_ess": 0.05}), is_off_policy=True) == "correct"


@pytest.mark.parametrize(
    ("num_tokens", "weight", "is_wrong"),
    [
        (4000, 1.06, True),
        (4000, 0.94, True),
        (4000, 1.04, False),
        (100, 1.9, False),
        (400, 1.3, True),
        (400, 0.8, False),
    ],
)
def test_a_mean_weight_is_wrong_beyond_a_twentieth_and_beyond_what_few_tokens_can_say(
    num_tokens: int, weight: float, is_wrong: bool
) -> None:
    measured = {**agreements(0.0, agent="fine"), **agreements(*[np.log(weight)] * num_tokens)}
    assert complains(measured) == is_wrong


def masks_fit(gaps: np.ndarray, *, constrained: np.ndarray | None = None) -> bool:
    rollout = np.full(len(gaps), -1.0)
    allowed = np.ones(len(gaps), dtype=bool) if constrained is None else constrained
    try:
        check_masks([rollout + gaps], [rollout], ["solver"], [allowed], config=MismatchConfig())
    except MismatchError as error:
        assert "agent 'solver': of " in str(error) and "tokens under a constraint" in str(error)
        return False
    return True


def test_a_mask_that_allows_too_much_or_too_little_is_refused_on_policy_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    assert not masks_fit(np.full(100, -0.07)), "one label too many: within limit_mean"
    assert not masks_fit(np.full(100, 0.07))
    rare = np.where(rng.random(4000) < 0.04, -rng.uniform(0.1, 4.9, 4000), 0.0)
    assert not masks_fit(rare), "a schema without its maximum: a mean of 0.1 nats over some tokens"
    other = np.concatenate([rare, np.zeros(40_000)])
    assert not masks_fit(other, constrained=np.arange(len(other)) < 4000), "hidden among free tokens"
    assert masks_fit(other, constrained=np.arange(len(other)) >= 4000)
    for spread in (0.01, 0.1, 0.5):
        assert all(masks_fit(rng.normal(-(spread**2) / 2, spread, 200)) for _ in range(500)), "rounding"
    assert masks_fit(np.full(20, -0.07)), "too few to say"
    assert masks_fit(np.full(1000, -0.002)), "too small to matter"
    assert check_masks([[-1.0]], [[-9.0]], ["solver"], [None], config=MismatchConfig()) is None


def test_a_mean_far_below_1_over_many_tokens_is_judged_however_uneven_the_weights() -> None:
    wrong = agreements(*[np.log(0.001)] * 4000, *[0.0] * 2700)
    assert wrong["solver"].ess < 0.5 and wrong["solver"].weight_mean < 0.42
    assert complains(wrong)


def test_uneven_weights_have_a_mean_below_1_but_not_above() -> None:
    uneven = agreements(*[np.log(0.2)] * 3800, *[np.log(10.0)] * 100, *[np.log(0.1)] * 100)
    assert uneven["solver"].ess < 0.5 and uneven["solver"].weight_mean < 0.5
    assert not complains(uneven)
    assert complains(agreements(*[np.log(0.2)] * 2000, *[np.log(10.0)] * 2000))


@pytest.mark.parametrize("shift", [0.5, *(pytest.param(x, marks=pytest.mark.nightly) for x in (0.1, 1.0, 2.0))])
def test_honest_choices_between_two_options_are_called_wrong_once_in_ten_thousand_iterations_at_most(
    shift: float,
) -> None:
    """Exact: the binomial probabilities of all counts that fail. The parent is `shift` logits away, on the same choice."""
    for num_choices in (4, 20, 100, 192, 400, 1000, 4000):
        counts = np.arange(num_choices + 1)
        for p in (0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999):
            for log_odds in (np.log(p / (1 - p)) + shift, np.log(p / (1 - p)) - shift):
                q = 1 / (1 + np.exp(-log_odds))
                drawn = binomial(num_choices, p)
                likely = counts[drawn > 1e-9]
                failed = [k for k in likely if complains(of_choices(k, num_choices - k, p, q))]
                assert drawn[failed].sum() < 1e-4, (num_choices, p, q)


@pytest.mark.parametrize("vocabulary", [2, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_honest_tokens_of_another_version_are_not_called_wrong(vocabulary: int, shift: float) -> None:
    tokens = Tokens(vocabulary, shift=shift, num=40_000)
    gaps = tokens.logprobs_of(tokens.parent, tokens.drawn) - tokens.logprobs_of(tokens.sampler, tokens.drawn)
    draws = np.random.default_rng(1)
    for num_tokens in (20, 200, 1000, 4000):
        for _ in range(100):
            picked = gaps[draws.integers(0, len(gaps), num_tokens)]
            assert not complains(measure([picked], [np.zeros(num_tokens)], ["a"], config=CONFIG))


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.3])
def test_logprobs_of_another_distribution_are_found(shift: float) -> None:
    tokens = Tokens(300, shift=shift, num=5000)
    old, rollout = tokens.parent, tokens.sampler
    allowed = np.random.default_rng(2).random(rollout.shape) < 0.5
    allowed[:, :2] = True
    masked, old_masked = np.where(allowed, rollout, -1e30), np.where(allowed, old, -1e30)
    cooler, in_mask = tokens.draw(rollout / 0.7), tokens.draw(masked)
    wrong = {
        "stored at 1, sampled at 0.7": (old / 0.7, rollout, cooler),
        "stored without the mask": (old_masked, rollout, in_mask),
        "trained without the mask": (old, masked, in_mask),
    }
    for what, (parent, stored, drawn) in wrong.items():
        gaps = tokens.logprobs_of(parent, drawn) - tokens.logprobs_of(stored, drawn)
        assert complains(measure([gaps], [np.zeros(5000)], ["a"], config=CONFIG)), what
    rightly = tokens.logprobs_of(old_masked, in_mask) - tokens.logprobs_of(masked, in_mask)
    assert not complains(measure([rightly], [np.zeros(5000)], ["a"], config=CONFIG))
    shifted_ids = tokens.logprobs_of(old, (tokens.drawn + 1) % 300) - tokens.logprobs_of(rollout, tokens.drawn)
    shifted_places = tokens.logprobs_of(old, tokens.drawn) - np.roll(tokens.logprobs_of(rollout, tokens.drawn), 1)
    for gaps in (shifted_ids, shifted_places):
        measured = measure([gaps], [np.zeros(5000)], ["a"], config=CONFIG)
        assert complains(measured) or measured["a"].ess < 0.5


class Tokens:
    """Contexts with the logits of two versions, and a token drawn in each of them."""

    def __init__(self, vocabulary: int, *, shift: float, num: int) -> None:
        self.random = np.random.default_rng(0)
        slope = self.random.uniform(0.8, 4, (num, 1))  # Zipf's law, and contexts that are surer than it
        ranks = np.log(np.arange(1, vocabulary + 1))
        self.sampler = self.random.normal(0, 0.5, (num, vocabulary)) - slope * ranks
        self.parent = self.sampler + shift * self.random.normal(0, 1, (num, vocabulary))
        self.drawn = self.draw(self.sampler)

    def draw(self, logits: np.ndarray) -> np.ndarray:
        cumulative = softmax(logits).cumsum(1)
        return (cumulative < self.random.random((len(logits), 1)) * cumulative[:, -1:]).sum(1)

    @staticmethod
    def logprobs_of(logits: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(softmax(logits)[np.arange(len(logits)), drawn], 1e-300))


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def binomial(num: int, p: float) -> np.ndarray:
    """The probabilities of 0 to `num` successes."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num + 1)))])
    k = np.arange(num + 1)
    return np.exp(logs[num] - logs[k] - logs[num - k] + k * np.log(p) + (num - k) * np.log(1 - p))


def of_choices(num_first: int, num_second: int, p: float, q: float):
    """The agreement of an agent that chose so often, with probabilities p of the first option when sampled, q under the parent."""
    gaps = np.repeat([np.log(q / p), np.log((1 - q) / (1 - p))], [num_first, num_second])
    return measure([gaps], [np.zeros(len(gaps))], ["a"], config=CONFIG)


def complains(measured) -> bool:
    try:
        check_mean_weight(measured)
    except MismatchError:
        return True
    return False
