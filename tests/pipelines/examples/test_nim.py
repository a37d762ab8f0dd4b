"""Nim: its rules, its best moves, and games of two agents that a credit rule pays by the winner."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from one_group import team_in_one_group

from pipelines.credit.rule import score_trace
from pipelines.examples.nim.tasks import SHARES, demonstrate, generate
from pipelines.examples.nim.workflow import CHALLENGER, RIVAL, Duel
from pipelines.examples.nim.world import Nim, best_move
from pipelines.extensions.paper_credit.game_scores import GameScores
from pipelines.tasks.splits import settings_of
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import EpisodeSpec
from stores.types import Completion, FinishReason, Purpose, Task, Trace

pytestmark = pytest.mark.test


def game(task: Task, best: str, dice: random.Random) -> str:
    """The winner where the player `best` makes the best moves and the other one any."""
    nim = Nim(**settings_of(task))
    seen = nim.reset()
    while not seen["is_done"]:
        mover = seen["info"]["player"]
        reply = demonstrate(mover, task, {"see": seen["text"]}, dice)[6:-7]
        seen = nim.step(best_move(nim.heaps) if mover == best else reply)
    return max(seen["info"]["scores"], key=seen["info"]["scores"].get)


def test_the_challenger_can_win_every_task_and_the_rival_can_be_beaten_by_chance() -> None:
    tasks = generate(seed=0, split="train", count=200)
    assert all(game(task, CHALLENGER, random.Random(n)) == CHALLENGER for n, task in enumerate(tasks))
    against = [game(task, RIVAL, random.Random(n)) for n, task in enumerate(tasks)]
    assert 0.02 < against.count(CHALLENGER) / len(tasks) < 0.5
    assert {task.source for task in tasks} == {"begins", "second"}


def test_a_move_that_the_rules_do_not_have_loses() -> None:
    for move in ("", "take 4 from b", "take 0 from a", "take 1 from d", "take -1 from a", "take 999999 from a"):
        seen = Nim([1, 2, 3], ["x", "y"]).step(move)
        assert seen["is_done"] and seen["info"]["scores"] == {"x": 0.0, "y": 1.0} and seen["reward"] == 0.0, move
    won = Nim([0, 0, 3], ["x", "y"]).step("take 3 from c")
    assert won["reward"] == 1.0 and won["info"]["scores"] == {"x": 1.0, "y": 0.0}
    with pytest.raises(ValueError, match="three heaps, not all empty, and two names"):
        Nim([0, 0, 0], ["x", "y"])


@pytest.fixture(scope="module")
def played(tiny_model: Path) -> Trace:
    tokenizer, workflow = ChatTokenizer(tiny_model), Duel()

    async def complete(call: AgentCall) -> Completion:
        heaps = [int(word) for word in call.inputs["see"].replace(",", "").split() if word.isdigit()]
        text = f"<MOVE>{best_move(heaps)}</MOVE>" if call.agent == CHALLENGER else "nothing in form"
        ids = tokenizer.encode_completion(text)
        return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=FinishReason.STOP, policy_version=0)

    beginning = {"heaps": [1, 2, 2], "players": [CHALLENGER, RIVAL]}
    task = Task(task_id="t", prompt="Win", answers=(CHALLENGER,), metadata=beginning)
    spec = EpisodeSpec(
        run_id="r", iteration=1, purpose=Purpose.TRAIN, team_key="team", task=task, episode_index=0, run_seed=0
    )
    team = team_in_one_group(workflow, tokenizer, max_model_len=256, max_tokens=32)
    return asyncio.run(run_episode(spec, team=team, complete=complete, limits=EpisodeConfig()))


def test_players_are_asked_in_turn_and_the_winner_is_paid(played: Trace) -> None:
    assert (played.answer, played.error) == (CHALLENGER, "")
    assert [turn.agent for turn in played.turns] == [CHALLENGER, RIVAL]
    assert played.tool_calls[1].parents == (played.turns[0].turn_index,)
    frozen = score_trace(GameScores("game", CHALLENGER), played, version="v")
    assert [(reward.agent, reward.reward) for reward in frozen.rewards] == [(CHALLENGER, 1.0)]
    both = score_trace(GameScores("game", RIVAL, trained=[CHALLENGER, RIVAL]), played, version="v")
    assert [reward.reward for reward in both.rewards] == pytest.approx([1.0, -0.1]) and both.outcome == 0.0
    with pytest.raises(ValueError, match=r"opened no world 'home'; its tools and environments: game"):
        GameScores("home", CHALLENGER).assign_credit(played)


def test_splits_share_no_heaps_in_any_order_and_what_does_not_exist_is_named() -> None:
    heaps = {
        split: {tuple(sorted(t.metadata["heaps"])) for t in generate(seed=1, split=split, count=30)} for split in SHARES
    }
    for split, own in heaps.items():
        assert all(own.isdisjoint(heaps[other]) for other in heaps if other != split)
    with pytest.raises(ValueError, match=r"nim: split 'gate' has \d+ tasks of heaps up to 3, not 50: raise `most`"):
        generate(seed=0, split="gate", count=50, most=3)
