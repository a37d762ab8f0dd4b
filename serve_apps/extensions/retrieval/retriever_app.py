"""retriever_app: a corpus -> an HTTP API of Search-R1's contract (arXiv 2503.09516), which the clients of three systems use.

POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}  ──> {"result": [[{"document", "score"}, ...]], "version": 3}
POST /retrieve  {"query": "..."}  or  {"questions": [...], "N": 3}        Dr. MAS', UnityMAS-O's form
GET  /health
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stores.traces.corpus import Corpus, Document


class Search(BaseModel):
    """Is the body of a search; exactly one of the three names for the queries is set."""

    model_config = ConfigDict(extra="ignore")

    queries: list[str] | None = None
    query: str | None = None
    questions: list[str] | None = None
    topk: int | None = Field(None, ge=1, le=1000)
    n: int | None = Field(None, alias="N", ge=1, le=1000)
    return_scores: bool = False

    @model_validator(mode="after")
    def _asks_once(self) -> Search:
        if sum(x is not None for x in (self.queries, self.query, self.questions)) != 1:
            raise ValueError("give exactly one of `queries`, `query` and `questions`")
        return self


def build_retriever(corpus: Corpus, *, top_k: int = 3) -> FastAPI:
    """Returns the application. Args: top_k: the number of documents where a request names none."""
    app = FastAPI(title="Troupe retriever")

    @app.post("/retrieve")
    async def retrieve(search: Search) -> dict[str, Any] | list[dict[str, Any]]:
        asked = search.queries if search.queries is not None else search.questions
        limit = search.topk or search.n or top_k
        rows = await asyncio.to_thread(corpus.search, asked if asked is not None else [search.query or ""], limit)
        if search.questions is not None:
            return [{"top_k_docs": [document.contents for document in row]} for row in rows]
        found = [[_shown(document, search.return_scores) for document in row] for row in rows]
        return {"result": found, "version": corpus.version}

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"documents": await asyncio.to_thread(len, corpus)}

    return app


def _shown(document: Document, with_score: bool) -> dict[str, Any]:
    shown = {"id": document.document_id, "contents": document.contents}
    return {"document": shown, "score": document.score} if with_score else shown
