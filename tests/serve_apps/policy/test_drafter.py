"""What a drafter guesses on a runner that is moved by hand: which requests get drafts, how many, and what is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serve_apps.policy.draft_costs import StepCosts
from serve_apps.policy.drafter import DRAFTS, Drafter, is_plain
from serve_apps.policy.wire import WireCompletion

pytestmark = pytest.mark.fast

FORM = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
LONGEST = 256
STOP = 399


def params(agent: str = "solver", task: str = "t", max_tokens: int = 64, **changes: Any) -> SimpleNamespace:
    plain = {
        "structured_outputs": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "logit_bias": None,
        "min_p": 0.0,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "prompt_logprobs": None,
        "thinking_token_budget": None,
        "logprob_token_ids": None,
        "all_stop_token_ids": {STOP},
        "max_tokens": max_tokens,
        "extra_args": {DRAFTS: [agent, task]} if agent else None,
    }
    return SimpleNamespace(**plain | changes)


class HandRunner:
    """Has the part of vLLM's model runner that a drafter reads, and samples given completions.

    A step takes `fixed_s`, `row_s` for each row, and `draft_s` where there are drafts, by the drafter's clock.
    """

    def __init__(
        self,
        *,
        num_tokens: int = 6,
        longest: int = LONGEST,
        fixed_s: float = 2e-3,
        row_s: float = 1e-5,
        draft_s: float = 0.0,
    ) -> None:
        self._fixed_s, self._row_s, self._draft_s = fixed_s, row_s, draft_s
        self.seconds = 0.0
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
            model_config=SimpleNamespace(max_model_len=longest),
        )
        self.drafter = Drafter(config, clock=lambda: self.seconds)
        self.drafter.attach(self)
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}
        self._num = 0

    def sample(self, completions: Sequence[Sequence[int]], **request: Any) -> tuple[int, list[list[list[int]]]]:
        """Samples completions side by side; returns the number of steps, and by step the drafts of each."""
        ids = [f"{self._num + n}" for n in range(len(completions))]
        self._num += len(ids)
        self.input_batch.req_ids = ids
        for request_id in ids:
            self.requests[request_id] = SimpleNamespace(sampling_params=params(**request), output_token_ids=[])
        tokens = np.zeros((len(ids), 2 * LONGEST), np.int32)
        tokens[:, :3] = 5
        counts = np.full(len(ids), 3, np.int32)
        drafts: list[list[int]] = [[] for _ in ids]
        all_drafts = []
        while any(len(self.requests[i].output_token_ids) < len(c) for i, c in zip(ids, completions, strict=True)):
            sampled = []
            for row, (request_id, completion) in enumerate(zip(ids, completions, strict=True)):
                output = self.requests[request_id].output_token_ids
                new: list[int] = []
                for draft in [*drafts[row], None]:
                    if len(output) + len(new) == len(completion):
                        break
                    new.append(completion[len(output) + len(new)])
                    if new[-1] != draft:
                        break
                tokens[row, counts[row] : counts[row] + len(new)] = new
                counts[row] += len(new)
                output += new
                sampled.append(new)
            num_drafted = sum(map(len, drafts))
            self.seconds += (
                self._fixed_s + self._row_s * (len(ids) + num_drafted) + (self._draft_s if num_drafted else 0.0)
            )
            drafts = self.drafter.propose(sampled, counts, tokens)
            all_drafts.append(drafts)
        return len(all_drafts), all_drafts


def forms(seed: int, num: int = 8) -> list[list[int]]:
    """Completions in a set form with one word that varies."""
    draw = random.Random(seed)
    return [[token for _ in range(4) for token in (*FORM, draw.randrange(100, 130))] for _ in range(num)]


def test_what_an_agent_says_again_comes_in_fewer_steps_and_all_of_it_is_counted() -> None:
    runner = HandRunner()
    steps = [runner.sample(forms(seed))[0] for seed in range(8)]
    assert steps[0] > 15 and steps[-1] <= 12, steps
    counts = runner.drafter.counts()["solver"]
    assert counts["sampled"] == 8 * 8 * 44 == counts["steps"] + counts["kept"]
    assert 0.6 * counts["drafted"] < counts["kept"] <= counts["drafted"]


def test_what_cannot_be_foreseen_is_soon_not_guessed_any_more() -> None:
    runner = HandRunner()
    draw = random.Random(0)
    for _ in range(12):
        runner.sample([[draw.randrange(400) for _ in range(40)] for _ in range(8)])
    _, drafts = runner.sample([[draw.randrange(400) for _ in range(40)] for _ in range(8)])
    assert sum(len(one) for step in drafts for one in step) < 0.05 * 8 * 40


def test_completions_of_an_earlier_engine_are_drafted_from_at_once() -> None:
    runner = HandRunner()
    told = [WireCompletion("solver", f"t{n}", [5, 5, 5, *tokens], 3) for n, tokens in enumerate(forms(0, num=16))]
    runner.drafter.learn(told)
    assert runner.drafter.num_positions == 16 * 44
    steps, _ = runner.sample(forms(99))
    assert steps <= 14


@pytest.mark.parametrize(
    "request_of",
    [
        {"agent": ""},
        {"agent": "somebody else"},
        {"min_p": 0.1},
        {"structured_outputs": object()},
        {"allowed_token_ids": [1, 2]},
        {"repetition_penalty": 1.2},
        {"min_tokens": 3},
    ],
)
def test_a_request_of_nobody_known_or_with_rules_of_its_own_gets_no_draft(request_of: dict[str, Any]) -> None:
    runner = HandRunner()
    runner.drafter.learn([WireCompletion("solver", "t", [5, 5, 5, *tokens], 3) for tokens in forms(0, num=16)])
    _, drafts = runner.sample(forms(1, num=1), **request_of)
    assert not any(one for step in drafts for one in step)
    assert is_plain(params(**request_of)) == (request_of.keys() == {"agent"})


def test_a_draft_ends_where_the_answer_or_the_context_must_end() -> None:
    runner = HandRunner(longest=3 + 44)
    runner.drafter.learn([WireCompletion("solver", "t", [5, 5, 5, *tokens], 3) for tokens in forms(0, num=16)])
    for max_tokens, longest in ((20, 20), (64, 44)):
        _, drafts = runner.sample([tokens[:longest] for tokens in forms(1, num=2)], max_tokens=max_tokens)
        assert not any(drafts[-1])
    runner = HandRunner(num_tokens=2)
    runner.drafter.learn([WireCompletion("solver", "t", [5, 5, 5, *tokens], 3) for tokens in forms(0, num=16)])
    _, drafts = runner.sample(forms(1, num=2))
    assert max(len(one) for step in drafts for one in step) == 2


def test_nothing_is_guessed_from_where_the_answer_ends() -> None:
    runner = HandRunner()
    answer = [1, 2, 3, 4, STOP]
    runner.drafter.learn([WireCompletion("solver", "t", [5, 5, 5, *answer, 7, 8], 3)] * 20)
    _, drafts = runner.sample([answer])
    assert any(one for step in drafts for one in step)
    assert not any(token in (STOP, 7, 8) for step in drafts for one in step for token in one)


def test_a_sequence_that_sits_a_step_out_keeps_what_was_guessed_for_it() -> None:
    runner = HandRunner()
    runner.drafter.learn([WireCompletion("solver", "t", [5, 5, 5, *tokens], 3) for tokens in forms(0, num=16)])
    for request_id in ("one", "two"):
        runner.requests[request_id] = SimpleNamespace(sampling_params=params(), output_token_ids=[FORM[0]])
    tokens = np.zeros((2, 64), np.int32)
    tokens[:, :4] = [5, 5, 5, FORM[0]]
    runner.input_batch.req_ids = ["one", "two"]
    drafts = runner.drafter.propose([[FORM[0]], [FORM[0]]], np.array([4, 4], np.int32), tokens)
    assert drafts[0] == FORM[1:7]
    runner.input_batch.req_ids = ["two"]
    runner.drafter.propose([[FORM[1]]], np.array([5], np.int32), tokens[1:])
    runner.input_batch.req_ids = ["one"]
    kept = FORM[1:8]
    tokens[0, 4 : 4 + len(kept)] = kept
    runner.requests["one"].output_token_ids += kept
    before = runner.drafter.counts()["solver"]["kept"]
    runner.drafter.propose([kept], np.array([4 + len(kept)], np.int32), tokens[:1])
    assert runner.drafter.counts()["solver"]["kept"] == before + 6


def test_an_engine_that_knows_enough_is_taught_nothing() -> None:
    runner = HandRunner()
    runner.drafter.learn([WireCompletion("solver", "t", [5, *FORM], 1)] * 60)
    num = runner.drafter.num_positions
    runner.drafter.learn([WireCompletion("solver", "t", [5, *FORM], 1)] * 60)
    assert runner.drafter.num_positions == num == 600


def test_drafts_that_cost_more_than_they_gain_are_made_only_now_and_then() -> None:
    steps = {}
    for draft_s in (0.0, 1e-2):
        runner = HandRunner(draft_s=draft_s)
        draw = random.Random(0)
        # Some completions end early, so that batches have different sizes.
        sizes = [[tokens[: draw.randrange(20, 44)] for tokens in forms(seed)] for seed in range(60)]
        drafted = [any(map(len, step)) for some in sizes for step in runner.sample(some)[1]]
        steps[draft_s] = sum(drafted[-400:]) / len(drafted[-400:])
    assert steps[0.0] > 0.7
    assert steps[1e-2] < 0.25


def test_a_row_is_worth_what_it_costs_against_a_token() -> None:
    draw = random.Random(0)
    costs = StepCosts()
    assert costs.threshold(8) == pytest.approx(0.4)
    for _ in range(200):
        rows = draw.randrange(8, 40)
        tried = draw.random() < 0.5
        costs.add(rows, 2e-3 + 1e-4 * rows + 1e-3 * tried + draw.gauss(0, 1e-5), tried=tried)
    costs.add(8, 5.0, tried=False)  # it waited for requests
    assert costs.threshold(8) == pytest.approx(8e-4 / 28e-4, rel=0.1)
    assert costs.threshold(80) > 2 * costs.threshold(8)
