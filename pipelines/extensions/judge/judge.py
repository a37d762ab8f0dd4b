"""judge: a served model reads task and answer -> a score in [0, 1]; each prompt is asked once, and its score kept.

    prompts ──those not in the cache──> POST <url>/chat/completions, at most `at_once` at a time ──> <score>7</score> ──> 0.7

Scores are kept by content: judge, version, prompt. So what a killed stage had asked is not asked again, and an answer that a team gives twice
is paid twice the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from math import isfinite, nan
from typing import Any

from serve_apps.authoring.contracts import Tags
from serve_apps.http.peer import AsyncPeer, PeerError, pause_s
from stores.files import cache_folder
from stores.urls import without_secrets

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
_SCORE = Tags("score")


class JudgeFault(OSError):
    """Raised where the judge gives no answer, or another one than the judge that was asked for answers: no doing of the team."""


class _Refused(JudgeFault):
    """Raised where the judge does not take a prompt."""


class Judge:
    """A model behind an API of chat completions."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        version: str,
        api_key_env: str,
        highest: float,
        at_once: int,
        timeout_s: float,
        max_tokens: int,
    ) -> None:
        """Asks nobody yet. Args: see `JudgedOutcome`."""
        self.url, self.model, self.version, self.highest = url.rstrip("/"), model, version, highest
        self._api_key_env, self._at_once, self._timeout_s, self._max_tokens = (
            api_key_env,
            at_once,
            timeout_s,
            max_tokens,
        )
        self.shown = without_secrets(self.url)

    async def scores_of(self, prompts: Sequence[str], *, may_refuse: bool = True) -> list[float]:
        """Returns a score in [0, 1] per prompt: 0 where the judge gives none that can be read. Raises JudgeFault.

        Args: may_refuse: whether a prompt that is refused, as one that is too long, has the score 0, too; else it is a JudgeFault.
        """
        key_of = {prompt: self._key(prompt) for prompt in prompts}
        with _cache() as cache:
            known = {key: score for key in key_of.values() if (score := _stored(cache, key)) is not None}
            missing = {key: prompt for prompt, key in key_of.items() if key not in known}
            if missing:
                peer, room = self._peer(), asyncio.Semaphore(self._at_once)

                async def ask(key: str, prompt: str) -> None:
                    async with room:
                        try:
                            known[key] = await self._asked(peer, prompt)
                        except _Refused as error:
                            if not may_refuse:
                                raise
                            known[key] = 0.0  # not kept: the judge may take it another time
                            logger.warning("%s: its score is 0", error)
                            return
                    with cache:  # at once: who is killed has paid for what was asked
                        cache.execute("INSERT OR IGNORE INTO scores VALUES (?, ?)", (key, known[key]))

                try:
                    async with asyncio.TaskGroup() as group:
                        for key, prompt in missing.items():
                            group.create_task(ask(key, prompt))
                except ExceptionGroup as faults:
                    raise faults.exceptions[0] from None
                finally:
                    await peer.close()
        return [known[key_of[prompt]] for prompt in prompts]

    def _key(self, prompt: str) -> str:
        parts = (self.model, self.version, f"{self.highest:g}", str(self._max_tokens), prompt)
        return sha256("\x1f".join(parts).encode()).hexdigest()

    def _peer(self) -> AsyncPeer:
        try:
            return AsyncPeer([self.url], timeout_s=self._timeout_s)
        except PeerError as error:
            raise JudgeFault(f"the judge at {self.shown} cannot be asked: {error}") from None

    async def _asked(self, peer: AsyncPeer, prompt: str) -> float:
        key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(MAX_ATTEMPTS):
            try:
                answer = await peer.ask("POST", f"{self.url}/chat/completions", json=body, headers=headers)
                return self._read(answer.json())
            except PeerError as error:
                if error.fault != "peer" or attempt == MAX_ATTEMPTS - 1:
                    # Too long for it, perhaps: that is the text of the team.
                    fault = _Refused if error.fault == "request" else JudgeFault
                    raise fault(f"the judge at {self.shown}: {error}") from None
                pause = pause_s(attempt, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                await asyncio.sleep(max(pause, error.retry_after_s))
            except ValueError as error:
                raise JudgeFault(
                    f"the judge at {self.shown}: {error}; is it the address of an API, /v1 included?"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: Any) -> float:
        try:
            text, version = answer["choices"][0]["message"]["content"] or "", answer.get("system_fingerprint") or ""
        except (TypeError, LookupError, AttributeError):
            raise ValueError(f"an answer that is no chat completion: {str(answer)[:200]}") from None
        if self.version and version != self.version:
            raise JudgeFault(
                f"the judge at {self.shown} is version {version!r}, credit.settings.version asks for {self.version!r}: its scores would be others"
            )
        try:
            score = float(_SCORE.parse(text).fields["score"])
        except ValueError:
            score = nan
        if not isfinite(score):
            logger.warning("the judge at %s gives no score that can be read: ...%r; it is 0", self.shown, text[-80:])
            return 0.0
        return min(max(score / self.highest, 0.0), 1.0)


@contextmanager
def _cache() -> Iterator[sqlite3.Connection]:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "judged.sqlite"
    try:
        with closing(sqlite3.connect(file, timeout=60)) as cache:
            with cache:
                cache.execute(
                    "CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID"
                )
            yield cache
    except sqlite3.Error as error:
        raise JudgeFault(f"{file}, where the judge's scores are kept: {error}") from None


def _stored(cache: sqlite3.Connection, key: str) -> float | None:
    row = cache.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
    return None if row is None else float(row[0])
