"""shown: the sampled episodes of a run -> the section `Episodes` of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.extensions.samples.samples import samples
from pipelines.report.inspect import show_command
from pipelines.report.page import section
from pipelines.report.parts import Part
from pipelines.run.run import Run
from pipelines.run.scoring import rewards_for
from stores.types import EpisodeRewards, Trace, Turn, TurnReward

TEMPLATE = Path(__file__).with_name("samples.html.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEpisode:
    """An episode to show: its trace and, if it was scored, its rewards."""

    trace: Trace
    rewards: EpisodeRewards | None = None
    command: str = ""
    """Shows the whole episode in a terminal."""

    def reward_of(self, turn: Turn) -> TurnReward | None:
        """The reward of one of its turns; None where it has none."""
        rewards = self.rewards.rewards if self.rewards else ()
        return next((reward for reward in rewards if reward.turn_index == turn.turn_index), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One task, as two teams solved it."""

    title: str
    """Why it is shown."""
    episodes: Mapping[str, ExampleEpisode]
    """By what each team is called."""


def part(run: Run, last: int) -> Part:
    """Returns the episodes to look at; no section where no two teams have played the same tasks yet."""

    def shown(episode_id: str) -> ExampleEpisode:
        trace = run.traces.get_trace(episode_id, run_id=run.run_id)
        return ExampleEpisode(trace=trace, rewards=rewards_for(run, trace), command=show_command(run, episode_id))

    chosen = samples(run, last=last)
    examples = [
        Example(title=one.title, episodes={name: shown(episode) for name, episode in one.episodes.items()})
        for one in chosen
    ]
    return Part(html=episodes_section(examples), values={"samples": [asdict(sample) for sample in chosen]})


def episodes_section(examples: Sequence[Example]) -> str:
    """Returns the section of these examples; empty without any."""
    return section(TEMPLATE, examples=examples) if examples else ""
