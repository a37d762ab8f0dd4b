"""cost: what episodes cost on average, held below a limit by a multiplier that is learned with the team.

    reward of a turn - multiplier * (what the episode costs from this turn on) / limit
    multiplier <- max(0, multiplier + rate * (mean cost / limit - 1))                     after each iteration

This is the Lagrangian of "earn as much as possible at a mean cost of at most `limit`", with one step on the multiplier per iteration
(reward constrained policy optimization, Tessler et al., arXiv 1805.11074). Above the limit cost weighs more with each iteration, below
it less, down to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipelines.config.sections import CostConfig
from pipelines.credit.rule import Credit, capped
from stores.types import Cause, EpisodeRewards, Trace, TurnReward

PART = "cost"
"""The name of the cost in the breakdown of a reward."""
Costs = Mapping[int, float]
"""By index of the turn, what it costs: itself, and the tool calls after it up to the next turn."""
Prices = Mapping[int, float]
"""By index of the turn, what a token, a call or a second of it costs."""


def turn_costs(trace: Trace, config: CostConfig) -> Costs:
    """Returns what each turn of an episode costs in `config.figure`, tokens, calls and seconds of each model group at its price."""
    prices = {turn.turn_index: config.prices.get(turn.model_group, 1.0) for turn in trace.turns}
    return _FIGURES[config.figure](trace, prices)


def charge(
    rewards: Sequence[EpisodeRewards],
    traces: Sequence[Trace],
    config: CostConfig,
    *,
    multiplier: float,
    mean: float,
    caps_failed: bool = True,
) -> list[EpisodeRewards]:
    """Returns the rewards, which are returns, less what the episode costs from their turn on; outcomes stay as they are.

    An episode that the policy caused to fail pays `mean` at least: it ended before it could cost anything. With `caps_failed` its turns
    also earn at most what others earn least after they have paid: failing must not pay more than being wrong, see `rule.capped`.

    Args:
        traces: the episodes of `rewards`, in any order.
        mean: the `mean_cost` of the iteration, or the limit where there is none.
    """
    trace_of = {trace.episode_id: trace for trace in traces}
    charged = []
    for episode in rewards:
        trace = trace_of[episode.episode_id]
        costs = turn_costs(trace, config)
        least = mean if trace.cause is Cause.POLICY else 0.0
        ahead = {index: max(least, sum(c for i, c in costs.items() if i >= index)) for index in costs}
        price = multiplier / config.at_most
        parts = tuple(_charged(reward, price * ahead[reward.turn_index]) for reward in episode.rewards)
        charged.append(replace(episode, rewards=parts))
    return _capped(charged, trace_of) if caps_failed else charged


def _capped(charged: Sequence[EpisodeRewards], trace_of: Mapping[str, Trace]) -> list[EpisodeRewards]:
    credits = {e.episode_id: (trace_of[e.episode_id], Credit(outcome=e.outcome, rewards=e.rewards)) for e in charged}
    failed = {name: credit for name, credit in credits.items() if credit[0].cause is Cause.POLICY}
    judged = [credit for name, credit in credits.items() if name not in failed]
    paid = dict(zip(failed, capped(list(failed.values()), judged, kind="returns"), strict=True))
    return [replace(e, rewards=paid[e.episode_id].rewards) if e.episode_id in paid else e for e in charged]


def mean_cost(traces: Sequence[Trace], config: CostConfig) -> float | None:
    """Returns what an episode costs on average, without those that the policy caused to fail; None where there are no others."""
    totals = [sum(turn_costs(trace, config).values()) for trace in traces if trace.cause is not Cause.POLICY]
    return sum(totals) / len(totals) if totals else None


def next_multiplier(multiplier: float, cost: float, config: CostConfig) -> float:
    """Returns the multiplier of the next iteration after one whose episodes cost so much on average."""
    return max(0.0, multiplier + config.rate * (cost / config.at_most - 1))


def _charged(reward: TurnReward, price: float) -> TurnReward:
    return replace(reward, reward=reward.reward - price, breakdown={**reward.breakdown, PART: -price})


@dataclass(frozen=True, slots=True)
class _Event:
    """A turn or a tool call: when it was made, and the turn that it is counted with."""

    turn: int
    start: float
    end: float
    weight: float


def _completion_tokens(trace: Trace, prices: Prices) -> Costs:
    return {turn.turn_index: len(turn.completion_token_ids) * prices[turn.turn_index] for turn in trace.turns}


def _calls(trace: Trace, prices: Prices) -> Costs:
    counts = dict(prices)
    for owner in _owners(trace).values():
        counts[owner] += 1
    return counts


def _critical_path_tokens(trace: Trace, prices: Prices) -> Costs:
    tokens = _completion_tokens(trace, prices)
    events = [_Event(t.turn_index, t.start_s, t.start_s + t.duration_s, tokens[t.turn_index]) for t in trace.turns]
    return _on_heaviest_path(trace, events)


def _seconds(trace: Trace, prices: Prices) -> Costs:
    owners = _owners(trace)
    events = [
        _Event(t.turn_index, t.start_s, t.start_s + t.duration_s, t.duration_s * prices[t.turn_index])
        for t in trace.turns
    ]
    events += [
        _Event(owners[c.call_index], c.start_s, c.start_s + c.duration_s, c.duration_s)
        for c in trace.tool_calls
        if c.call_index in owners
    ]
    return _on_heaviest_path(trace, events)


def _owners(trace: Trace) -> dict[int, int]:
    """Returns the turn before each tool call; calls before all turns belong to none, because no policy decided on them."""
    turns = sorted(turn.turn_index for turn in trace.turns)
    owners = {}
    for call in trace.tool_calls:
        place = bisect_right(turns, call.call_index)
        if place:
            owners[call.call_index] = turns[place - 1]
    return owners


def _on_heaviest_path(trace: Trace, events: Sequence[_Event]) -> Costs:
    """Returns the weights of the events on the heaviest path, each at its turn; 0 for the turns beside it.

    Of two events one follows the other where it began after the other had ended: those that ran side by side count once, with the
    heavier of them. This is weighted interval scheduling, in n log n.
    """
    ordered = sorted(events, key=lambda event: event.end)
    ends = [event.end for event in ordered]
    best: list[tuple[float, int]] = [(0.0, -1)]
    """Of the first n events, the weight of the heaviest path, and the last event on it."""
    before = [bisect_right(ends, event.start, hi=i) for i, event in enumerate(ordered)]
    for i, event in enumerate(ordered):
        best.append(max(best[i], (best[before[i]][0] + event.weight, i)))
    costs = dict.fromkeys((turn.turn_index for turn in trace.turns), 0.0)
    n = len(ordered)
    while n and best[n][1] >= 0:
        last = best[n][1]
        costs[ordered[last].turn] += ordered[last].weight
        n = before[last]
    return costs


_FIGURES: Mapping[str, Callable[[Trace, Prices], Costs]] = {
    "completion_tokens": _completion_tokens,
    "calls": _calls,
    "critical_path_tokens": _critical_path_tokens,
    "seconds": _seconds,
}
