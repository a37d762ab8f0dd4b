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

    def sample(
        self, completions: Sequence[Sequence[int]], *, at_once: int | None = None, **request: Any
    ) -> tuple[int, list[list[list[int]]]]:
        """Samples completions, `at_once` or all side by side; one that is through makes room for the next.

        Returns the number of steps, and by step the drafts of each.
        """
        waiting = [(f"{self._num + n}", completion) for n, completion in enumerate(completions)]
        self._num += len(waiting)
        size = at_once or len(waiting)
        tokens = np.zeros((size, 2 * LONGEST), np.int32)
        counts = np.zeros(size, np.int32)
        batch: list[tuple[str, Sequence[int]] | None] = [None] * size
        drafts: dict[str, list[int]] = {}
        all_drafts = []
        while waiting or any(batch):
            for row, one in enumerate(batch):
                if one is None and waiting:
                    request_id, _ = batch[row] = waiting.pop(0)
                    self.requests[request_id] = SimpleNamespace(sampling_params=params(**request), output_token_ids=[])
                    tokens[row, :3], counts[row] = 5, 3
            rows = [row for row, one in enumerate(batch) if one is not None]
            under_way = [one for one in batch if one is not None]
            sampled = [
                self._step(request_id, completion, drafts.get(request_id, [])) for request_id, completion in under_way
            ]
            for row, new in zip(rows, sampled, strict=True):
                tokens[row, counts[row] : counts[row] + len(new)] = new
                counts[row] += len(new)
            num_drafted = sum(map(len, drafts.values()))
            self.seconds += self._fixed_s + self._row_s * (len(rows) + num_drafted) + self._draft_s * bool(num_drafted)
            self.input_batch.req_ids = [request_id for request_id, _ in under_way]
            proposed = self.drafter.propose(sampled, counts[rows], tokens[rows])
            drafts = dict(zip(self.input_batch.req_ids, proposed, strict=True))
            all_drafts.append(proposed)
            for row, (request_id, completion) in zip(rows, under_way, strict=True):
                if len(self.requests[request_id].output_token_ids) == len(completion):
                    del self.requests[request_id], drafts[request_id]
                    batch[row] = None
        return len(all_drafts), all_drafts

    def _step(self, request_id: str, completion: Sequence[int], draft: Sequence[int]) -> list[int]:
        """The next tokens of a completion: one more than its draft has right."""
        output = self.requests[request_id].output_token_ids
        new: list[int] = []
        for guess in [*draft, None]:
            if len(output) + len(new) == len(completion):
                break
            new.append(completion[len(output) + len(new)])
            if new[-1] != guess:
                break
        output += new
        return new


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


def share_with_drafts(runner: HandRunner, completions: Sequence[Sequence[int]], at_once: int) -> float:
    """The share of the last 400 steps that have drafts."""
    _, drafts = runner.sample(completions, at_once=at_once)
    return sum(any(map(len, step)) for step in drafts[-400:]) / 400


@pytest.mark.parametrize("at_once", [1, 8])
def test_drafts_that_cost_more_than_they_gain_are_made_only_now_and_then(at_once: int) -> None:
    """Also where a new sequence comes in nearly every step."""
    draw = random.Random(0)
    completions = [t[: draw.randrange(20, 44)] for seed in range(14 * at_once) for t in forms(seed)]
    assert share_with_drafts(HandRunner(), completions, at_once) > 0.7
    assert share_with_drafts(HandRunner(draft_s=1e-2), completions, at_once) < 0.25


def test_drafts_that_seemed_to_pay_beside_a_slow_start_are_given_up() -> None:
    class SlowStart(HandRunner):
        def _step(self, request_id: str, completion: Sequence[int], draft: Sequence[int]) -> list[int]:
            self.seconds += 2e-3 if self.seconds < 1.0 else 0.0
            return super()._step(request_id, completion, draft)

    draw = random.Random(0)
    completions = [[draw.choice([*FORM, draw.randrange(100, 130)]) for _ in range(40)] for _ in range(500)]
    assert share_with_drafts(SlowStart(draft_s=3e-3), completions, 8) < 0.25


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
