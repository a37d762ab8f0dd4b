"""Games of TextArena, in an environment of their own, played through a worker. Needs a package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.workers import WorldWorkers
from tests.venvs import make_venv

pytestmark = [pytest.mark.nightly, pytest.mark.anyio]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_venv("textarena", tmp_path_factory.mktemp("textarena"))


async def test_a_game_is_played_to_its_end_and_the_same_seed_gives_the_same_game(python: str) -> None:
    kind = Environment("tests.worlds.textarena.world:Arena", python=python, paths=(str(ROOT),))
    workers = WorldWorkers(kind)
    try:
        games = [await _played(workers, seed) for seed in (0, 4, 4)]
    finally:
        workers.end()
    assert games[1] == games[2] != games[0]
    assert all(sorted(game[-1]["info"]["scores"]) == ["one", "other"] for game in games)
    assert {score for game in games for score in game[-1]["info"]["scores"].values()} == {0.0, 1.0}


async def _played(workers: WorldWorkers, seed: int) -> list[dict[str, object]]:
    """What a game of Kuhn poker showed in which both players always check or call."""
    async with workers.session() as world:
        seen = [await world.reset({"game": "KuhnPoker-v0", "seed": seed, "players": ["one", "other"]})]
        while not seen[-1].get("is_done"):
            possible = seen[-1]["text"].rpartition("available actions")[2]
            seen.append(await world.step("[check]" if "'[check]'" in possible else "[call]"))
            assert len(seen) < 40
    return seen
