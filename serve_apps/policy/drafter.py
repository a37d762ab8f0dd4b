"""drafter: what an engine has sampled -> the next tokens of its sequences, as far as it pays to guess them.

    each step   tokens that were sampled ──> positions of their agent and task, and: was the guess of the step before right?
                last tokens of each sequence ──> DraftTables ──> token, its bin ──> probability, as counted in that bin
                one more token, while the probability that all so far are right is above what a row costs against a token

vLLM calls `propose` after each step (`speculative_config.method: custom_class`). Guesses may depend on anything: the tokens that are
sampled do not depend on them (see coupled_sampler.py). No import of vLLM or torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_apps.policy.draft_tables import NUM_BINS, WINDOW, DraftTables, Positions, bin_share, source_id
from serve_apps.policy.wire import WireCompletion

DRAFTS = "drafts"
"""Where `SamplingParams.extra_args` have the agent and the task, [agent, task_id], of a request that drafts may be made for."""
HISTORY_TOKENS = 65_536
"""Positions, the newest ones, that guesses are made from."""
FIRST_BUILD = 512
"""Positions from which on the tables are made; afterwards they are made again with each half more."""
PRIOR_TRIES = 4.0
"""How many tries the share of a bin counts for while few of its guesses were checked."""
FORGET_ABOVE = 4096.0
"""Checks of an agent's bin from which on older ones count half, since policies change."""
DEFAULT_THRESHOLD = 0.4
"""Until the costs of a step are known."""
NUM_STEPS = 256


@dataclass
class _Agent:
    """How often guesses for an agent were right, by bin."""

    name: str
    hits: NDArray[np.float64] = field(default_factory=lambda: bin_share() * PRIOR_TRIES)
    tries: NDArray[np.float64] = field(default_factory=lambda: np.full(NUM_BINS, PRIOR_TRIES))
    num_steps: int = 0
    num_drafted: int = 0
    num_kept: int = 0
    num_sampled: int = 0

    def check(self, bin_: int, is_right: bool) -> None:
        if self.tries[bin_] > FORGET_ABOVE:
            self.hits[bin_] /= 2
            self.tries[bin_] /= 2
        self.tries[bin_] += 1
        self.hits[bin_] += is_right


@dataclass(slots=True)
class _Request:
    """A request that is under way."""

    agent: _Agent
    agent_id: int
    task_id: int
    stops: frozenset[int]
    """Tokens that end the answer: nothing is guessed from them on."""
    guesses: list[int] = field(default_factory=list)
    """The next tokens, as guessed in the last step; of those only `num_drafted` were given to the engine."""
    bins: list[int] = field(default_factory=list)
    num_drafted: int = 0


class StepCosts:
    """Seconds of an engine's steps -> the probability from which on a token is worth its row.

    A step of R rows is taken to last F + b R. One more row is worth while it is kept with a probability above
    b B / (F + b B), the cost of a row over that of a token without drafts, with B sequences.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._num_new = 0
        self._fit: tuple[float, float] | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Takes what a step of so many rows lasted."""
        self._steps.append((rows, seconds))
        self._num_new += 1
        if self._num_new >= NUM_STEPS // 8 and len(self._steps) >= NUM_STEPS // 4:
            self._num_new = 0
            self._fit = self._fitted()

    def threshold(self, num_sequences: int) -> float:
        """Returns the least probability of a draft that pays."""
        if self._fit is None:
            return DEFAULT_THRESHOLD
        fixed_s, row_s = self._fit
        return float(np.clip(row_s * num_sequences / max(fixed_s + row_s * num_sequences, 1e-12), 0.05, 0.95))

    def _fitted(self) -> tuple[float, float] | None:
        """Returns F and b in seconds; None where the steps were all alike. Steps that waited for requests are left out."""
        rows, seconds = np.array(self._steps).T
        usual = seconds < 5 * np.median(seconds)
        rows, seconds = rows[usual], seconds[usual]
        if rows.std() < 1.0:
            return self._fit
        row_s = max(0.0, float(np.cov(rows, seconds)[0, 1] / rows.var(ddof=1)))
        return max(0.0, float(seconds.mean() - row_s * rows.mean())), row_s


class Drafter:
    """Guesses tokens for one engine."""

    def __init__(self, vllm_config: Any) -> None:
        """Args: vllm_config: the engine's; vLLM makes the drafter."""
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._runner: Any = None
        self._agents: dict[str, _Agent] = {}
        self._requests: dict[str, _Request | None] = {}
        self._history = Positions.none()
        self._new: list[Positions] = []
        self._num_new = 0
        self._tables: DraftTables | None = None
        self._costs = StepCosts()
        self._ended_at = time.perf_counter()
        """When the last step ended."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks for it; there is no model."""

    def attach(self, runner: Any) -> None:
        """Args: runner: the engine's model runner, which knows the requests."""
        self._runner = runner

    def learn(self, completions: Iterable[WireCompletion]) -> None:
        """Takes completions of an earlier engine, the oldest first; one that has sampled enough itself needs none."""
        if self._tables is None:
            for one in completions:
                self._remember(Positions.of(one.agent, one.task_id, one.token_ids, one.num_prompt))
            self._build()

    @property
    def num_positions(self) -> int:
        """Positions that guesses are made from; 0 until there are enough."""
        return len(self._history)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns by agent since the start {steps, sampled, drafted, kept}, in tokens and in steps of single sequences."""
        return {
            agent.name: {
                "steps": agent.num_steps,
                "sampled": agent.num_sampled,
                "drafted": agent.num_drafted,
                "kept": agent.num_kept,
            }
            for agent in self._agents.values()
        }

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns the drafts of each sequence of the batch.

        Args:
            sampled_token_ids: what the step sampled, by sequence; empty for one whose prompt is not through.
            num_tokens_no_spec: tokens of each sequence, those included.
            token_ids_cpu: [sequences, longest], its tokens.
            slot_mappings: not used.
        """
        assert self._runner is not None, "attach comes before the first request"
        ids = self._runner.input_batch.req_ids[: len(sampled_token_ids)]
        self._measure(ids)
        # One that sits a step out, for want of room, keeps what was guessed for it.
        under_way = {i: request for i, request in self._requests.items() if i in self._runner.requests}
        self._requests = under_way | {i: self._request(i) for i in ids if i not in under_way}
        rows: list[int] = []
        for row, (request_id, sampled) in enumerate(zip(ids, sampled_token_ids, strict=True)):
            request = self._requests[request_id]
            if request is None or not sampled:
                continue
            _check(request, sampled)
            rows.append(row)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if rows:
            self._learn_rows(rows, ids, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            self._guess(rows, ids, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, drafts)
        return drafts

    def _measure(self, ids: Sequence[str]) -> None:
        """Adds what the step took, unless it computed the prompt of a sequence that is new."""
        began, self._ended_at = self._ended_at, time.perf_counter()
        if all(request_id in self._requests for request_id in ids):
            known = [self._requests[request_id] for request_id in ids]
            rows = len(ids) + sum(request.num_drafted for request in known if request is not None)
            self._costs.add(rows, self._ended_at - began)

    def _request(self, request_id: str) -> _Request | None:
        """Returns what is known of a request that is new; None for one that gets no drafts."""
        params = self._runner.requests[request_id].sampling_params
        names = (params.extra_args or {}).get(DRAFTS) if params is not None else None
        if not names or not is_plain(params):
            return None
        name, task_id = names
        if name not in self._agents:
            self._agents[name] = _Agent(name)
        stops = frozenset(params.all_stop_token_ids)
        return _Request(self._agents[name], source_id(name), source_id(name, task_id), stops)

    def _learn_rows(
        self,
        rows: Sequence[int],
        ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> None:
        """Remembers what was sampled in this step."""
        counts = np.array([len(sampled[row]) for row in rows])
        row_of = np.repeat(rows, counts)
        back = np.concatenate([np.arange(count, 0, -1) for count in counts])
        ends = num_tokens[row_of] - back  # the place of each sampled token
        requests = [self._requests[ids[row]] for row in rows]
        agents = np.repeat(np.array([r.agent_id for r in requests if r], np.uint64), counts)
        tasks = np.repeat(np.array([r.task_id for r in requests if r], np.uint64), counts)
        self._remember(
            Positions(_windows(token_ids, row_of, ends), agents, tasks, token_ids[row_of, ends].astype(np.int32))
        )
        if self._num_new >= max(FIRST_BUILD, len(self._history) // 2):
            self._build()

    def _remember(self, positions: Positions) -> None:
        self._new.append(positions)
        self._num_new += len(positions)

    def _build(self) -> None:
        if self._new:
            self._history = Positions.joined([self._history, *self._new], newest=HISTORY_TOKENS)
            self._new, self._num_new = [], 0
            self._tables = DraftTables(self._history)

    def _guess(
        self,
        rows: Sequence[int],
        ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        drafts: list[list[int]],
    ) -> None:
        """Fills in `drafts`; the first guess of each sequence is kept also where it is not worth a row, to be checked."""
        for row in rows:
            request = self._requests[ids[row]]
            assert request is not None
            request.guesses, request.bins, request.num_drafted = [], [], 0
            request.agent.num_steps += 1
        if self._tables is None:
            return
        requests = [self._requests[ids[row]] for row in rows]
        agents = np.array([r.agent_id for r in requests if r], np.uint64)
        tasks = np.array([r.task_id for r in requests if r], np.uint64)
        row_of = np.array(rows)
        windows = _windows(token_ids, row_of, num_tokens[row_of])
        room = np.array([self._room(ids[row], int(num_tokens[row]), sampled[row][-1]) for row in rows])
        threshold = self._costs.threshold(len(ids))
        likely, alive = np.ones(len(rows)), np.flatnonzero(room > 0)
        for number in range(self._most):
            if not len(alive):
                break
            tokens, bins = self._tables.look_up(windows[alive], agents[alive], tasks[alive])
            alive, tokens, bins = alive[bins >= 0], tokens[bins >= 0], bins[bins >= 0]
            goes_on = np.zeros(len(alive), bool)
            for place, (of, token, bin_) in enumerate(zip(alive.tolist(), tokens.tolist(), bins.tolist(), strict=True)):
                request = requests[of]
                assert request is not None
                likely[of] *= request.agent.hits[bin_] / request.agent.tries[bin_]
                goes_on[place] = likely[of] >= threshold and number < room[of] and token not in request.stops
                if goes_on[place] or not number:
                    request.guesses.append(token)
                    request.bins.append(bin_)
                if goes_on[place]:
                    drafts[rows[of]].append(token)
                    request.num_drafted += 1
                    request.agent.num_drafted += 1
            alive, tokens = alive[goes_on], tokens[goes_on]
            windows[alive] = np.concatenate([windows[alive, 1:], tokens[:, None]], axis=1)

    def _room(self, request_id: str, num_tokens: int, last: int) -> int:
        """Returns how many drafts a sequence may have: the token after the last of them must fit, too. None after its end."""
        state, request = self._runner.requests[request_id], self._requests[request_id]
        if request is None or last in request.stops:
            return 0
        left = state.sampling_params.max_tokens - len(state.output_token_ids)
        return min(self._most, left - 1, self._max_model_len - num_tokens - 1)


def is_plain(params: Any) -> bool:
    """Whether a token's distribution follows from its logits, temperature, top-p and top-k alone, in each place of the answer."""
    return (
        params.structured_outputs is None
        and not params.allowed_token_ids
        and not params.bad_words
        and not params.logit_bias
        and not params.min_p
        and not params.min_tokens
        and not params.presence_penalty
        and not params.frequency_penalty
        and params.repetition_penalty == 1.0
        and params.prompt_logprobs is None
        and params.thinking_token_budget is None
        and params.logprob_token_ids is None
    )


def _check(request: _Request, sampled: Sequence[int]) -> None:
    """Compares the guesses of the step before with what was sampled."""
    agent = request.agent
    agent.num_sampled += len(sampled)
    agent.num_kept += min(request.num_drafted, len(sampled) - 1)
    for guess, bin_, token in zip(request.guesses, request.bins, sampled, strict=False):
        agent.check(bin_, guess == token)
        if guess != token:
            return


def _windows(token_ids: NDArray[np.int32], rows: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.int32]:
    """Returns the WINDOW tokens before each place, [N, WINDOW]; -1 before the beginning of a sequence."""
    places = ends[:, None] + np.arange(-WINDOW, 0)
    windows = token_ids[rows[:, None], np.maximum(places, 0)]
    return np.where(places >= 0, windows, -1).astype(np.int32)
