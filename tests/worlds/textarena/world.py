"""world: a game of TextArena -> a world in its turn order; `info` says whose turn it is, and at the end what each player has earned.

    Environment("tests.worlds.textarena.world:Arena", python=".venvs/textarena/bin/python", paths=(".",))

It runs in a virtual environment of its own (`requirements.txt`), and knows nothing of Troupe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Arena:
    """A game of named players. Its observations begin with the rules, and hold what the player to move has seen so far."""

    def __init__(self, game: str, seed: int, players: Sequence[str], max_characters: int = 4000) -> None:
        """Args:
        game: id of TextArena, `KuhnPoker-v0` for example.
        players: their names, in the order of the game's seats.
        max_characters: of an observation its beginning and its end are shown, so many in all.
        """
        self.game, self.seed, self.players, self.max_characters = game, seed, list(players), max_characters
        self.env: Any = None
        self.scores: dict[str, float] = {}

    def reset(self) -> dict[str, Any]:
        """Begins the game, and returns what its first player sees."""
        import textarena

        self.env = textarena.make(self.game)
        self.env.reset(num_players=len(self.players), seed=self.seed)
        return self._shown(0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Makes the move of the player whose turn it is. The reward is that player's, 0 to 1, once the game is over."""
        mover = self._turn()[0]
        is_done, _ = self.env.step(action)
        if is_done:
            rewards, _ = self.env.close()
            seats = dict(rewards or {})  # TextArena pays -1 to 1
            self.scores = {name: (1 + seats.get(seat, -1)) / 2 for seat, name in enumerate(self.players)}
        return self._shown(self.scores.get(mover, 0.0))

    def _turn(self) -> tuple[str, str]:
        """The player to move, and what that player sees."""
        seat, text = self.env.get_observation()
        return self.players[seat], str(text)

    def _shown(self, reward: float) -> dict[str, Any]:
        if self.scores:
            return {"text": "The game is over.", "reward": reward, "is_done": True, "info": {"scores": self.scores}}
        player, text = self._turn()
        half = self.max_characters // 2
        if len(text) > self.max_characters:
            text = f"{text[:half]}\n...\n{text[-half:]}"
        return {"text": text, "reward": reward, "info": {"player": player, "scores": {}}}
