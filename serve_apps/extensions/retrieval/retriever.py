"""retriever: queries -> documents, from an index in this process or from servers of Search-R1's contract (arXiv 2503.09516).

    await retriever.search(["who ...", "", "when ..."], top_k=3) ──> [[Document, ...], [], [Document, ...]]

Whatever a server answers, rows and queries stay aligned, or the call fails with the reason: a row of another query could
earn a reward by accident.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from serve_apps.authoring.agent import ToolError, ToolFault, count_attempt, note_version
from stores.settings import Count, NotNegative
from stores.traces.corpus import Corpus, Document, with_title

if TYPE_CHECKING:
    from serve_apps.http.peer import AsyncPeer, PeerError

Request = Literal["queries", "query", "questions"]
"""The form of a request: Search-R1's batch, Dr. MAS' single query, UnityMAS-O's pool."""
PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Between two attempts, at first and at most."""


class Retriever(Protocol):
    """Finds documents for queries."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Returns one row per query, in order, an empty one for a blank query.

        Raises ToolFault where every attempt failed, and ToolError where the servers refuse the queries.
        """
        ...


@dataclass(frozen=True)
class EmbeddedRetriever:
    """Searches an index in this process."""

    corpus: Corpus

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Searches the corpus in a thread, so that the event loop goes on; the record of the call says which version answered."""
        rows = await asyncio.to_thread(self.corpus.search, queries, top_k)
        note_version(f"version {self.corpus.version} of {self.corpus.uri}")
        return rows


@dataclass
class _Endpoint:
    """Holds one server and its recent faults."""

    url: str
    num_faults: int = 0
    closed_until: float = 0.0
    version: Any = None
    """What the server said last of its documents, as `troupe retriever` does."""


@dataclass
class HttpRetriever:
    """Searches by POST to servers that are asked in turn.

    A server that failed `max_faults` times in a row is left alone for `rest_s`, unless there is no other. One that
    refuses a request (HTTP 404, say) is not asked the same again, the others are.
    """

    urls: Sequence[str]
    """Whole addresses, for example http://host:8000/retrieve."""
    request: Request = "queries"
    timeout_s: NotNegative = 5.0
    """Seconds for one attempt, from the connection to the answer's last byte."""
    deadline_s: NotNegative = 30.0
    """Seconds for all attempts and pauses together."""
    max_attempts: Count = 5
    """The largest number of attempts, without those that were refused."""
    max_in_flight: Count = 64
    cache_size: int = 10_000
    """The number of queries whose documents are remembered; 0: none."""
    max_faults: Count = 3
    rest_s: NotNegative = 10.0
    _endpoints: list[_Endpoint] = field(init=False, repr=False)
    _cache: OrderedDict[tuple[str, int], list[Document]] = field(init=False, repr=False, default_factory=OrderedDict)
    _peer: AsyncPeer | None = field(init=False, repr=False, default=None)
    _room: asyncio.Semaphore | None = field(init=False, repr=False, default=None)
    _next: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        bad = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if bad or not self.urls:
            raise ValueError(f"retriever: {bad or 'no address'}: give whole addresses, e.g. http://host:8000/retrieve")
        self._endpoints = [_Endpoint(url) for url in dict.fromkeys(self.urls)]

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Searches each distinct query once, from the cache where it was asked before."""
        asked = list(dict.fromkeys(query for query in queries if query.strip()))
        row_of = {query: self._cache[query, top_k] for query in asked if (query, top_k) in self._cache}
        for query in row_of:
            self._cache.move_to_end((query, top_k))
        missing = [query for query in asked if query not in row_of]
        if missing:
            batches = [missing] if self.request != "query" else [[query] for query in missing]
            parts = await asyncio.gather(*(self._ask(batch, top_k) for batch in batches))
            rows = dict(zip(missing, [row for part in parts for row in part], strict=True))
            self._cache.update(((query, top_k), row) for query, row in rows.items())
            row_of |= rows
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)
        return [row_of[query] if query.strip() else [] for query in queries]

    async def close(self) -> None:
        """Closes the connections to the search servers."""
        if self._peer is not None:
            await self._peer.close()
            self._peer = None

    async def _ask(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        from serve_apps.http.peer import AsyncPeer, PeerError, pause_s

        if self._peer is None or self._room is None:
            try:
                self._peer = AsyncPeer(self.urls, timeout_s=self.timeout_s)
            except PeerError as error:
                raise ToolFault(f"{', '.join(self.urls)} cannot be asked: {error}") from None
            self._room = asyncio.Semaphore(self.max_in_flight)  # of the event loop that the connections are of
        body, fault, num_faults = self._payload(queries, top_k), "no attempt was made", 0
        refusals: dict[str, PeerError] = {}
        try:
            async with asyncio.timeout(self.deadline_s) as limit, self._room:
                while num_faults < self.max_attempts and len(refusals) < len(self._endpoints):
                    endpoint, asked_s = self._choose(refusals), 0.0
                    count_attempt()
                    try:
                        answer = (await self._peer.ask("POST", endpoint.url, json=body)).json()
                        rows = read_rows(answer, len(queries))
                        endpoint.num_faults = 0
                        self._note_version(endpoint, answer)
                        return rows
                    except (PeerError, ValueError) as error:
                        self._blame(endpoint)
                        if isinstance(error, PeerError):
                            if error.fault != "peer":
                                refusals[endpoint.url] = error
                                continue
                            asked_s = error.retry_after_s if len(self._endpoints) == 1 else 0.0
                        fault = f"{endpoint.url}: {error}"
                    pause = pause_s(num_faults, first_s=PAUSE_S, longest_s=MAX_PAUSE_S)
                    left_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                    await asyncio.sleep(asked_s if pause < asked_s < left_s else pause)
                    num_faults += 1
        except TimeoutError:
            raise ToolFault(f"no documents within {self.deadline_s:g} s; last {fault}") from None
        if num_faults < self.max_attempts:
            said = "; ".join(f"{url} {refusal}" for url, refusal in refusals.items())
            if all(refusal.fault == "request" for refusal in refusals.values()):
                raise ToolError(f"{said}; the queries are not what it takes")
            raise ToolFault(f"{said}; is it the address of the retriever, path included?")
        raise ToolFault(f"no documents after {self.max_attempts} attempts; last {fault}")

    def _note_version(self, endpoint: _Endpoint, answer: Any) -> None:
        version = answer.get("version") if isinstance(answer, Mapping) else None
        if version is None:
            return
        note_version(f"version {version} of {endpoint.url}")
        if endpoint.version not in (None, version):  # what is remembered is of other documents
            self._cache.clear()
        endpoint.version = version

    def _payload(self, queries: Sequence[str], top_k: int) -> dict[str, Any]:
        if self.request == "questions":
            return {"questions": list(queries), "N": top_k}
        settings: dict[str, Any] = {"topk": top_k, "return_scores": True}
        return (
            {"queries": list(queries), **settings} if self.request == "queries" else {"query": queries[0], **settings}
        )

    def _choose(self, refusals: Collection[str]) -> _Endpoint:
        """Returns the next server that did not refuse and is not paused.

        Where all are paused it returns the one whose pause ends first.
        """
        now = time.monotonic()
        self._next += 1
        turn = [self._endpoints[(self._next + i) % len(self._endpoints)] for i in range(len(self._endpoints))]
        turn = [endpoint for endpoint in turn if endpoint.url not in refusals]
        return next((e for e in turn if e.closed_until <= now), min(turn, key=lambda e: e.closed_until))

    def _blame(self, endpoint: _Endpoint) -> None:
        endpoint.num_faults += 1
        if endpoint.num_faults >= self.max_faults:
            endpoint.closed_until = time.monotonic() + self.rest_s


def read_rows(answer: Any, num_queries: int) -> list[list[Document]]:
    """Reads the documents in an answer of any of the three forms, one row per query.

    Raises ValueError where the shape is not known, or rows and queries do not match: no answer is better than
    another query's.
    """
    if isinstance(answer, Mapping):
        answer = next((answer[name] for name in ("result", "results", "top_k_docs") if name in answer), answer)
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise ValueError(f"an answer of another shape: {str(answer)[:200]}")
    rows = [row["top_k_docs"] if isinstance(row, Mapping) and "top_k_docs" in row else row for row in answer]
    if num_queries == 1 and (not rows or not all(isinstance(row, list) for row in rows)):
        rows = [rows]  # a single query's documents, without the row around them
    if len(rows) != num_queries or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{len(rows)} rows for {num_queries} queries: {str(answer)[:200]}")
    return [[_document(item) for item in row] for row in rows]


def as_information(documents: Sequence[Document]) -> str:
    """Returns documents as Search-R1 shows them to a model, within <information> tags."""
    lines = []
    for number, document in enumerate(documents, 1):
        title, newline, text = document.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n" if newline else f"Doc {number}: {title}\n")
    return f"<information>{''.join(lines).rstrip()}</information>"


def _document(item: Any) -> Document:
    score, inner = 0.0, item
    if isinstance(item, Mapping):
        try:
            score = float(item.get("score") or 0.0)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"a score that is no number: {str(item)[:200]}") from None
        inner = item.get("document", item)
    if isinstance(inner, Mapping):
        text = next(
            (inner[f] for f in ("contents", "text", "content", "document") if isinstance(inner.get(f), str)), None
        )
        if text is None:
            raise ValueError(f"a document without text: {str(item)[:200]}")
        return Document(document_id=str(inner.get("id", "")), contents=with_title(text, inner), score=score)
    if isinstance(inner, str):
        return Document(document_id="", contents=inner, score=score)
    raise ValueError(f"a document of another shape: {str(item)[:200]}")
