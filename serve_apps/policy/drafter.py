"""drafter: what an engine has sampled -> the next tokens of its sequences, as far as it pays to guess them.

    each step   tokens that were sampled ──> positions of their agent and task, and: was the guess of the step before right?
                last tokens of each sequence ──> DraftTables ──> token, its bin ──> probability, as counted in that bin
                one more token, while the probability that all so far are right is above what a row costs against a token
    now and then    did drafts gain more than they took, with so many sequences? If not, none are made for some time

vLLM calls `propose` after each step (`speculative_config.method: custom_class`). Guesses may depend on anything: the tokens that are
sampled do not depend on them (see coupled_sampler.py). No import of vLLM or torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_apps.policy.draft_costs import StepCosts, Trials
from serve_apps.policy.draft_tables import NO_TOKEN, NUM_BINS, WINDOW, DraftTables, Positions, bin_share, source_id
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
MOST_STOPS = 16
"""A request with more tokens that end its answer gets no drafts."""
COUNTS = ("steps", "sampled", "drafted", "kept")

Ints = NDArray[np.integer[Any]]


class _Agents:
    """How often guesses for each agent were right, by bin, and what became of its drafts."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._hits = np.empty((0, NUM_BINS))
        self._tries = np.empty((0, NUM_BINS))
        self.counts = np.empty((0, len(COUNTS)), np.int64)
        """By agent and COUNTS."""

    def number(self, name: str) -> int:
        """Returns the row of an agent, a new one for one that is new."""
        if name not in self.names:
            self.names[name] = len(self.names)
            self._hits = np.vstack([self._hits, bin_share() * PRIOR_TRIES])
            self._tries = np.vstack([self._tries, np.full(NUM_BINS, PRIOR_TRIES)])
            self.counts = np.vstack([self.counts, np.zeros(len(COUNTS), np.int64)])
        return self.names[name]

    def count(self, agents: Ints, **numbers: Ints) -> None:
        """Adds numbers, by their name in COUNTS, each with a value for each of `agents`."""
        for name, values in numbers.items():
            np.add.at(self.counts[:, COUNTS.index(name)], agents, values)

    def check(self, agents: Ints, bins: Ints, is_right: NDArray[np.bool_]) -> None:
        """Takes guesses that were checked."""
        np.add.at(self._tries, (agents, bins), 1)
        np.add.at(self._hits, (agents, bins), is_right)

    def forget(self) -> None:
        """Halves what was checked often."""
        often = self._tries > FORGET_ABOVE
        self._hits[often] /= 2
        self._tries[often] /= 2

    def probability(self, agents: Ints, bins: Ints) -> NDArray[np.float64]:
        """Returns how often guesses of a bin were right for an agent."""
        return self._hits[agents, bins] / self._tries[agents, bins]


class _Sequences:
    """The requests under way that drafts are made for: a row each in a table, used again after its end."""

    def __init__(self, most: int) -> None:
        self._rows: dict[str, int | None] = {}
        self._free: list[int] = []
        self.table = np.zeros(
            0,
            [
                ("agent", np.int64),  # row in `_Agents`
                ("agent_id", np.uint64),
                ("task_id", np.uint64),
                ("end", np.int64),  # the number of tokens, with the prompt, at which the request must end
                ("stops", np.int64, (MOST_STOPS,)),  # tokens that end the answer, NO_TOKEN behind them
                ("guesses", np.int64, (most,)),  # the next tokens, as guessed in the last step, NO_TOKEN behind them
                ("bins", np.int64, (most,)),
                ("num_drafted", np.int64),  # how many of the guesses were given to the engine
            ],
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def drop_all_but(self, under_way: Mapping[str, Any]) -> None:
        """Forgets requests that have ended."""
        ended = [request_id for request_id in self._rows if request_id not in under_way]
        rows = [self._rows.pop(request_id) for request_id in ended]
        self._free += [row for row in rows if row is not None]

    def leave_out(self, request_id: str) -> None:
        """Notes a request that gets no drafts."""
        self._rows[request_id] = None

    def add(self, request_id: str, *, agent: int, names: tuple[str, str], end: int, stops: Sequence[int]) -> None:
        """Takes a request. Args: names: of its agent and task."""
        if not self._free:
            more = np.zeros(len(self.table) + 8, self.table.dtype)
            self._free = list(range(len(self.table), len(self.table) + len(more)))
            self.table = np.concatenate([self.table, more])
        row = self._rows[request_id] = self._free.pop()
        entry = self.table[row]
        entry["agent"], entry["agent_id"], entry["task_id"] = agent, source_id(names[0]), source_id(*names)
        entry["end"] = end
        entry["stops"], entry["guesses"], entry["num_drafted"] = NO_TOKEN, NO_TOKEN, 0
        entry["stops"][: len(stops)] = stops

    def rows(self, ids: Sequence[str]) -> list[int | None]:
        """Returns the row of each request, None for one that gets no drafts."""
        return [self._rows[request_id] for request_id in ids]


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step sampled, of the N sequences that drafts are made for."""

    places: Ints
    """[N]: in the batch."""
    rows: Ints
    """[N]: in `_Sequences`."""
    lengths: Ints
    """[N]: tokens of each sequence, with what was sampled."""
    counts: Ints
    """[N]: how many tokens were sampled."""
    token_ids: NDArray[np.int32]
    """[batch, longest]: all tokens."""

    def sampled(self, most: int) -> Ints:
        """Returns the tokens that were sampled, [N, most], NO_TOKEN behind them."""
        at = (self.lengths - self.counts)[:, None] + np.arange(most)
        is_new = at < self.lengths[:, None]
        return np.where(is_new, self.token_ids[self.places[:, None], np.where(is_new, at, 0)], NO_TOKEN).astype(
            np.int64
        )

    def windows(self) -> NDArray[np.int32]:
        """Returns the last WINDOW tokens of each sequence, [N, WINDOW]."""
        return _windows(self.token_ids, self.places, self.lengths)


class Drafter:
    """Guesses tokens for one engine."""

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: vllm_config: the engine's; vLLM makes the drafter. clock: seconds."""
        self._clock = clock
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._runner: Any = None
        self._agents = _Agents()
        self._sequences = _Sequences(self._most)
        self._history = Positions.none()
        self._new: list[Positions] = []
        self._num_new = 0
        self._tables: DraftTables | None = None
        self._costs = StepCosts()
        self._trials = Trials()
        self._ended_at = clock()
        """When the last step ended."""
        self._num_sequences = 0
        """Of the last step; 0 before the first."""
        self._tried = False
        """Whether drafts were looked for after the last step."""
        self._had_sampled: set[str] = set()
        """The requests that the last step sampled a token for."""

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
        """Positions that guesses are made from; 0 until the first tables."""
        return len(self._history)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns by agent since the start {steps, sampled, drafted, kept}, in tokens and in steps of single sequences."""
        numbers = self._agents.counts.tolist()
        return {name: dict(zip(COUNTS, numbers[row], strict=True)) for name, row in self._agents.names.items()}

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
        self._measure(ids, sampled_token_ids)
        new = [place for place, request_id in enumerate(ids) if request_id not in self._sequences]
        if new:
            # One that sits a step out, for want of room, keeps what was guessed for it.
            self._sequences.drop_all_but(self._runner.requests)
            for place in new:
                self._add(ids[place], int(num_tokens_no_spec[place]))
        taken = [
            (place, row)
            for place, row in enumerate(self._sequences.rows(ids))
            if row is not None and sampled_token_ids[place]
        ]
        self._num_sequences = len(ids)
        self._tried = bool(taken) and self._tables is not None and self._trials.is_on(len(ids))
        if not taken:
            return [[] for _ in ids]
        places, rows = np.array(taken).T
        counts = np.array([len(sampled_token_ids[place]) for place in places.tolist()])
        step = _Step(places, rows, num_tokens_no_spec[places].astype(np.int64), counts, token_ids_cpu)
        self._check(step)
        self._learn(step)
        return self._guess(step, len(ids))

    def _add(self, request_id: str, num_tokens: int) -> None:
        """Takes a new request, with `num_tokens` until now."""
        state = self._runner.requests[request_id]
        params = state.sampling_params
        names = (params.extra_args or {}).get(DRAFTS) if params is not None else None
        if not names or not is_plain(params) or len(params.all_stop_token_ids) > MOST_STOPS:
            self._sequences.leave_out(request_id)
            return
        name, task_id = names
        self._sequences.add(
            request_id,
            agent=self._agents.number(name),
            names=(name, task_id),
            end=min(num_tokens - len(state.output_token_ids) + params.max_tokens, self._max_model_len),
            stops=sorted(params.all_stop_token_ids),
        )

    def _measure(self, ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Takes what the step took: for rows only where it computed no prompt, so that all had sampled in the step before, too."""
        began, self._ended_at = self._ended_at, self._clock()
        seconds = self._ended_at - began
        if self._num_sequences:
            self._trials.add(self._num_sequences, sum(map(len, sampled)), seconds, tried=self._tried)
        if self._had_sampled.issuperset(ids):
            rows = [row for row in self._sequences.rows(ids) if row is not None]
            num_drafted = int(self._sequences.table["num_drafted"][rows].sum())
            self._costs.add(len(ids) + num_drafted, seconds, tried=self._tried)
        self._had_sampled = {request_id for request_id, tokens in zip(ids, sampled, strict=True) if tokens}

    def _check(self, step: _Step) -> None:
        """Compares the guesses of the step before with what was sampled."""
        most, entries = self._most, self._sequences.table[step.rows]
        agents, guesses, bins = entries["agent"], entries["guesses"], entries["bins"]
        is_right = guesses == step.sampled(most)
        so_far = np.logical_and.accumulate(is_right, axis=1)
        # A guess is checked where all before it were right and something was sampled.
        checked = np.concatenate([np.ones((len(so_far), 1), bool), so_far[:, :-1]], axis=1)
        checked &= (guesses != NO_TOKEN) & (np.arange(most) < step.counts[:, None])
        self._agents.check(np.repeat(agents, checked.sum(axis=1)), bins[checked], is_right[checked])
        kept = np.minimum(entries["num_drafted"], step.counts - 1)
        self._agents.count(agents, steps=np.ones_like(agents), sampled=step.counts, kept=kept)

    def _learn(self, step: _Step) -> None:
        """Remembers what was sampled."""
        places, rows = np.repeat(step.places, step.counts), np.repeat(step.rows, step.counts)
        back = np.concatenate([np.arange(count, 0, -1) for count in step.counts.tolist()])
        at = np.repeat(step.lengths, step.counts) - back
        self._remember(
            Positions(
                _windows(step.token_ids, places, at),
                self._sequences.table["agent_id"][rows],
                self._sequences.table["task_id"][rows],
                step.token_ids[places, at].astype(np.int32),
            )
        )
        if self._num_new >= max(FIRST_BUILD, len(self._history) // 2):
            self._build()
            self._agents.forget()

    def _remember(self, positions: Positions) -> None:
        self._new.append(positions)
        self._num_new += len(positions)

    def _build(self) -> None:
        if self._new:
            self._history = Positions.joined([self._history, *self._new], newest=HISTORY_TOKENS)
            self._new, self._num_new = [], 0
            self._tables = DraftTables(self._history)

    def _guess(self, step: _Step, num_sequences: int) -> list[list[int]]:
        """Returns the drafts of the batch; a sequence's first guess is kept also where it is not worth a row, to be checked."""
        table, rows = self._sequences.table, step.rows
        table["guesses"][rows], table["num_drafted"][rows] = NO_TOKEN, 0
        drafts: list[list[int]] = [[] for _ in range(num_sequences)]
        if self._tables is None or not self._tried:
            return drafts
        entries, windows = table[rows], step.windows()
        agents, stops = entries["agent"], entries["stops"]
        # The token after the last draft must fit, too.
        room = np.where((windows[:, -1:] == stops).any(axis=1), 0, entries["end"] - step.lengths - 1)
        threshold = self._costs.threshold(num_sequences)
        likely, alive = np.ones(len(rows)), np.flatnonzero(room > 0)
        for column in range(self._most):
            if not len(alive):
                break
            tokens, bins = self._tables.look_up(windows[alive], entries["agent_id"][alive], entries["task_id"][alive])
            likely[alive] *= self._agents.probability(agents[alive], bins) * (bins != NO_TOKEN)
            is_worth_it = (likely[alive] >= threshold) & (column < room[alive])
            is_worth_it &= (tokens[:, None] != stops[alive]).all(axis=1)
            is_kept = is_worth_it if column else bins != NO_TOKEN
            table["guesses"][rows[alive[is_kept]], column] = tokens[is_kept]
            table["bins"][rows[alive[is_kept]], column] = bins[is_kept]
            alive, tokens = alive[is_worth_it], tokens[is_worth_it]
            table["num_drafted"][rows[alive]] += 1
            windows[alive] = np.concatenate([windows[alive, 1:], tokens[:, None]], axis=1)
        num_drafted = table["num_drafted"][rows]
        self._agents.count(agents, drafted=num_drafted)
        guesses = table["guesses"][rows].tolist()
        for place, guess, num in zip(step.places.tolist(), guesses, num_drafted.tolist(), strict=True):
            drafts[place] = guess[:num]
        return drafts


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


def _windows(token_ids: NDArray[np.int32], places: Ints, ends: Ints) -> NDArray[np.int32]:
    """Returns the WINDOW tokens before each end, [N, WINDOW]; NO_TOKEN before the beginning of a sequence."""
    at = ends[:, None] + np.arange(-WINDOW, 0)
    windows = token_ids[places[:, None], np.maximum(at, 0)]
    return np.where(at >= 0, windows, NO_TOKEN).astype(np.int32)
