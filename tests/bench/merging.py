"""merging: training tokens per second of merged, packed and shared rows, beside the same turns unmerged and padded.

Tokens are those of the unmerged rows in both cases: the same turns are learned, by forward and backward passes whose
losses and gradients are compared. Rows are shaped like multi-round workflows, several episodes per task:

    conversation  one agent, every prompt is the whole conversation before it
    debate        three debaters in turn over one transcript, every prompt is the transcript before it
    search        M-ASK: planner, searcher, summariser and updater write prompts of their own (instructions, question,
                  growing state): no turn extends another, but episodes of a task begin alike
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.bench.figures import Figure, ratio
from tests.train_loops.chained_samples import sample
from train_loops.config import RowsConfig, TinyModelConfig
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs
from train_loops.engine.tiny_model import build_model, build_tokenizer
from train_loops.rows.batching import collate, lay, plan
from train_loops.rows.samples import Sample
from train_loops.rows.sharing import chains_of, neighbours, unique_shares

LEAST = 1.5
SHAPE = TinyModelConfig(max_position=2048)
"""The demo's, with room for a conversation."""
NUM_TASKS, EPISODES_PER_TASK, NUM_REPEATS = 2, 4, 3
WAYS = {
    "merged, packed and shared": RowsConfig(),
    "merged and packed": RowsConfig(share=False),
    "unmerged and padded": RowsConfig(merge=False, pack=False),
}
OURS, PLAIN = "merged, packed and shared", "unmerged and padded"
MICROBATCH_TOKENS = 4096
THREADS = 1
NUM_WORDS = 250
Turns = list[tuple[str, list[int], int]]
"""Agent, prompt with completion, and number of completion tokens."""
Episode = Callable[[np.random.Generator, np.random.Generator], Turns]
"""What the task decides and what is sampled are drawn from a generator each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward pass over all turns."""

    seconds: float
    loss: float
    gradient: torch.Tensor
    num_computed: int
    """Tokens, padding included."""


def measure(_: Path) -> list[Figure]:
    """Every shape, all ways in turn."""
    torch.set_num_threads(THREADS)
    tokenizer = build_tokenizer(["Solve the problem. Compute 12 + 3 * 45 - 6 / 7 = 890"], vocab_size=SHAPE.vocab_size)
    scorer = PolicyScorer(build_model(SHAPE, tokenizer, seed=0)).train()
    shapes: dict[str, Episode] = {
        "conversation": partial(
            _conversation, agents=("assistant",), num_turns=10, completion=(20, 60), reply=(10, 50)
        ),
        "debate": partial(
            _conversation, agents=("pro", "con", "judge"), num_turns=6, completion=(40, 120), reply=(4, 12)
        ),
        "search": _search,
    }
    return [figure for name, episode in shapes.items() for figure in _measure(name, _samples(episode), scorer)]


def _measure(name: str, samples: list[Sample], scorer: PolicyScorer) -> list[Figure]:
    passes: dict[str, list[Pass]] = {way: [] for way in WAYS}
    for _ in range(1 + NUM_REPEATS):
        for way, rows in WAYS.items():
            passes[way].append(_run(samples, scorer, rows))
    # The first pass of each warms up; of the others the fastest was disturbed least.
    num_tokens = sum(len(s.token_ids) for s in samples)
    rate = {way: num_tokens / min(p.seconds for p in found[1:]) for way, found in passes.items()}
    ours, plain = passes[OURS][0], passes[PLAIN][0]
    share, _ = unique_shares(samples, chains_of(samples))
    gap = float((ours.gradient - plain.gradient).abs().max() / plain.gradient.abs().max())
    others = ", ".join(f"{way} {rate[way] / rate[PLAIN]:.2f}x" for way in WAYS if way not in (OURS, PLAIN))
    computed = f"{ours.num_computed:,} tokens computed instead of {plain.num_computed:,}"
    return [
        Figure(
            f"{OURS}, {name}",
            rate[OURS],
            "tok/s",
            note=f"{len(samples)} turns of {num_tokens:,} tokens, {share:.0%} left by merging; {computed}",
        ),
        Figure(f"{PLAIN}, {name}", rate[PLAIN], "tok/s"),
        ratio(f"{OURS} / {PLAIN}, {name}", rate[OURS], rate[PLAIN], least=LEAST, note=others),
        Figure(
            f"difference of the losses, {name}",
            abs(ours.loss - plain.loss),
            most=1e-5,
            note=f"losses {ours.loss:.6f} and {plain.loss:.6f}; largest difference of a gradient {gap:.1e} of the largest",
        ),
    ]


def _run(samples: list[Sample], scorer: PolicyScorer, rows: RowsConfig) -> Pass:
    """One minibatch, planning and laying out included."""
    began = time.perf_counter()
    [cuts] = plan(
        chains_of(samples),
        [len(s.token_ids) for s in samples],
        num_minibatches=1,
        microbatch_tokens=MICROBATCH_TOKENS,
        merge=rows.merge,
        pack=rows.pack,
        order=neighbours([s.token_ids for s in samples]) if rows.pack and rows.share else None,
        seed=0,
    )
    scorer.zero_grad()
    total, num_computed = 0.0, 0
    num_targets = sum(s.completion_length for s in samples)
    for chains in cuts:
        batch = collate(samples, chains, pack=rows.pack, share=rows.share)
        ratios = (completion_logprobs(scorer, batch) - lay([s.rollout_logprobs for s in samples], batch)).exp()
        loss = -(ratios * lay([s.reward for s in samples], batch)).sum() / num_targets
        loss.backward()
        total += loss.item()
        num_computed += batch.token_ids.numel()
    seconds = time.perf_counter() - began
    gradient = torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])
    return Pass(seconds=seconds, loss=total, gradient=gradient, num_computed=num_computed)


def _samples(episode: Episode) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        sample(
            f"t{task}-{number}",
            index,
            tokens[:-length],
            tokens[-length:],
            agent=agent,
            group_id=f"t{task}",
            rollout_logprobs=[-5.5] * length,
            reward=float(random.normal()),
            temperature=1.0,
        )
        for task in range(NUM_TASKS)
        for number in range(EPISODES_PER_TASK)
        for index, (agent, tokens, length) in enumerate(episode(np.random.default_rng(task), random))
    ]


def _words(random: np.random.Generator, num: int) -> list[int]:
    return random.integers(3, NUM_WORDS, num).tolist()


def _conversation(
    task: np.random.Generator,
    random: np.random.Generator,
    *,
    agents: tuple[str, ...],
    num_turns: int,
    completion: tuple[int, int],
    reply: tuple[int, int],
) -> Turns:
    """Prompt, completion, reply, completion, reply: every turn's prompt is all that was said."""
    said = _words(task, 80)
    turns = []
    for index in range(int(random.integers(num_turns // 2, num_turns + 1))):
        length = int(random.integers(*completion))
        said = said + _words(random, length)
        turns.append((agents[index % len(agents)], said, length))
        said = said + _words(random, int(random.integers(*reply)))
    return turns


def _search(task: np.random.Generator, random: np.random.Generator) -> Turns:
    """Four rounds of four agents; the state, which is the same at first, is the episode's own from the second one on."""
    lengths = {"planner": (40, 60), "searcher": (60, 16), "summariser": (100, 90), "updater": (120, 50)}
    instructions = {agent: _words(np.random.default_rng(num), num) for agent, (num, _) in lengths.items()}
    state, turns = _words(task, 60), []
    for _ in range(4):
        for agent, (_, completion) in lengths.items():
            documents = _words(random, 300) if agent == "summariser" else []
            length = int(random.integers(completion // 2, completion + 1))
            said = _words(random, length)
            turns.append((agent, [*instructions[agent], *state, *documents, *said], length))
        state = state + _words(random, 60)
    return turns
