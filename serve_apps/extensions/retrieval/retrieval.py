"""retrieval: settings -> the tool through which a workflow searches.

    {"corpus": "runs/corpus"}                          an index in this process
    {"documents": "package.module:function", ...}      the same, built from what the function yields, once per machine;
                                                       further keys are its arguments
    {"urls": ["http://host:8000/retrieve"], ...}       servers of Search-R1's contract; further keys as HttpRetriever has

The trace holds the error of a retriever that fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from serve_apps.authoring.agent import Tool
from serve_apps.extensions.retrieval.retriever import EmbeddedRetriever, HttpRetriever, Retriever, as_information
from stores.by_name import check_settings, open_by_name
from stores.files import cache_folder
from stores.traces.corpus import INDEX, Corpus, build_corpus

MAX_DOCUMENT_CHARS = 2000


def retriever_tool(settings: Mapping[str, Any], *, top_k: int, fail_open: bool = True, timeout_s: float = 60.0) -> Tool:
    """Returns a tool `retrieve(queries)` that returns the documents of all queries as text.

    With `fail_open` the agents go on without documents where the retriever fails; the trace holds the error. Raises
    ValueError for settings that name no retriever, or an unknown one.
    """
    retriever = open_retriever(settings)

    async def retrieve(queries: str | Sequence[str]) -> str:
        asked = [queries] if isinstance(queries, str) else [str(query) for query in queries]
        rows = await retriever.search(asked, top_k)
        documents = {document.contents[:MAX_DOCUMENT_CHARS]: document for row in rows for document in row}
        return as_information(list(documents.values()))

    return Tool(retrieve, timeout_s=timeout_s, fail_open=fail_open, fallback=as_information([]))


def declared_tool(name: str, settings: Mapping[str, Any]) -> Tool:
    """Returns the tool of an entry of a declared workflow: `{retriever: {...}, top_k: 5}`; TypeError for other keys."""
    if unknown := sorted(settings.keys() - {"retriever", "top_k"}):
        raise TypeError(f"unknown {', '.join(unknown)}")
    return retriever_tool(settings["retriever"], top_k=int(settings.get("top_k", 5)), fail_open=False)


def open_retriever(settings: Mapping[str, Any]) -> Retriever:
    """Opens the retriever that settings name."""
    options = dict(settings)
    if options.keys() == {"corpus"}:
        return EmbeddedRetriever(Corpus(str(options["corpus"])))
    if "documents" in options and not options.keys() & {"corpus", "urls"}:
        path = str(options.pop("documents"))
        return EmbeddedRetriever(Corpus(_built(path, options)))
    if "urls" in options and not options.keys() & {"corpus", "documents"}:
        check_settings(HttpRetriever, options, place="workflow.settings.retriever")
        return HttpRetriever(**options)
    raise ValueError(
        f"workflow.settings.retriever: give `corpus` alone, `documents` or `urls`, got {sorted(options) or 'nothing'}"
    )


def _built(path: str, settings: Mapping[str, Any]) -> str:
    """Returns the corpus of a function's documents in this machine's cache; the first process that needs it builds it."""
    documents = open_by_name(path, place="workflow.settings.retriever.documents")
    check_settings(documents, settings, place="workflow.settings.retriever")
    corpora = cache_folder() / "corpora"
    corpora.mkdir(parents=True, exist_ok=True)
    made_of = sha256(json.dumps(dict(INDEX), sort_keys=True).encode())
    with tempfile.TemporaryDirectory(dir=corpora, prefix=".build-") as scratch:
        lines = Path(scratch) / "documents.jsonl"
        with lines.open("w", encoding="utf-8") as file:
            for document in documents(**settings):
                line = json.dumps(document) + "\n"
                made_of.update(line.encode())
                file.write(line)
        folder = corpora / made_of.hexdigest()[:16]
        if not folder.is_dir():
            build_corpus(str(Path(scratch) / "index"), lines)
            with suppress(OSError):  # another process was first: its corpus is the same
                (Path(scratch) / "index").rename(folder)
    return str(folder)
