"""judge: a served model reads task and answer -> a score in [0, 1]; each prompt is asked once, and its score kept.

    prompts ──those not in the cache──> POST <url>/chat/completions, at most `at_once` at a time ──> <score>7</score> ──> 0.7

Scores are kept by content: judge, version, prompt. So what a killed stage had asked is not asked again, and an answer that a team gives twice
is paid twice the same.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from serve_apps.authoring.contracts import Tags
from serve_apps.http.peer import AsyncPeer, PeerError, pause_s

MAX_ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
MAX_TOKENS = 1024
_SCORE = Tags("score")


class JudgeFault(OSError):
    """Raised where the judge gives no answer, or another one than the judge that was asked for answers: no doing of the team."""


class Judge:
    """A model behind an API of chat completions."""

    def __init__(
        self, url: str, model: str, *, version: str, api_key_env: str, highest: float, at_once: int, timeout_s: float
    ) -> None:
        """Asks nobody yet. Args: see `JudgedOutcome`."""
        self.url, self.model, self.version, self.highest = url.rstrip("/"), model, version, highest
        self._api_key_env, self._at_once, self._timeout_s = api_key_env, at_once, timeout_s

    async def scores_of(self, prompts: Sequence[str]) -> list[float]:
        """Returns a score in [0, 1] per prompt: 0 where the judge gives none that can be read. Raises JudgeFault."""
        key_of = {prompt: self._key(prompt) for prompt in prompts}
        with _cache() as cache:
            known = {key: score for key in key_of.values() if (score := _stored(cache, key)) is not None}
            missing = {key: prompt for prompt, key in key_of.items() if key not in known}
            if missing:
                peer, room = self._peer(), asyncio.Semaphore(self._at_once)

                async def ask(key: str, prompt: str) -> None:
                    async with room:
                        known[key] = await self._asked(peer, prompt)
                    with cache:  # at once: who is killed has paid for what was asked
                        cache.execute("INSERT OR IGNORE INTO scores VALUES (?, ?)", (key, known[key]))

                try:
                    async with asyncio.TaskGroup() as group:
                        for key, prompt in missing.items():
                            group.create_task(ask(key, prompt))
                except BaseExceptionGroup as faults:
                    raise faults.exceptions[0] from None
                finally:
                    await peer.close()
        return [known[key_of[prompt]] for prompt in prompts]

    def _key(self, prompt: str) -> str:
        return sha256("\x1f".join((self.model, self.version, f"{self.highest:g}", prompt)).encode()).hexdigest()

    def _peer(self) -> AsyncPeer:
        try:
            return AsyncPeer([self.url], timeout_s=self._timeout_s)
        except PeerError as error:
            raise JudgeFault(f"the judge at {self.url} cannot be asked: {error}") from None

    async def _asked(self, peer: AsyncPeer, prompt: str) -> float:
        key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(MAX_ATTEMPTS):
            try:
                answer = await peer.ask("POST", f"{self.url}/chat/completions", json=body, headers=headers)
                return self._read(answer.json())
            except PeerError as error:
                if error.fault == "request":  # too long for it, perhaps: that is the text of the team
                    return 0.0
                if error.fault != "peer" or attempt == MAX_ATTEMPTS - 1:
                    raise JudgeFault(f"the judge at {self.url}: {error} {error.text[:200]}".rstrip()) from None
                pause = pause_s(attempt, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                await asyncio.sleep(max(pause, error.retry_after_s))
            except ValueError as error:
                raise JudgeFault(
                    f"the judge at {self.url}: {error}; is it the address of an API, /v1 included?"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: Any) -> float:
        try:
            text, version = answer["choices"][0]["message"]["content"] or "", answer.get("system_fingerprint") or ""
        except (TypeError, LookupError, AttributeError):
            raise ValueError(f"an answer that is no chat completion: {str(answer)[:200]}") from None
        if self.version and version != self.version:
            raise JudgeFault(
                f"the judge at {self.url} is version {version!r}, credit.settings.version asks for {self.version!r}: its scores would be others"
            )
        parsed = _SCORE.parse(text)
        try:
            score = float(parsed.fields["score"])
        except ValueError:
            return 0.0
        return min(max(score / self.highest, 0.0), 1.0) if isfinite(score) else 0.0


@contextmanager
def _cache() -> Iterator[sqlite3.Connection]:
    folder = Path(os.environ.get("TROUPE_CACHE") or Path(tempfile.gettempdir()) / f"troupe-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    cache = sqlite3.connect(folder / "judged.sqlite", timeout=60)
    try:
        with cache:
            cache.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID")
        yield cache
    finally:
        cache.close()


def _stored(cache: sqlite3.Connection, key: str) -> float | None:
    row = cache.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
    return None if row is None else float(row[0])
