"""corpus, retriever: documents -> an index, and a server of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stores.by_name import open_by_name

Embed = Annotated[
    str,
    typer.Option(
        help="package.module:function from texts to vectors: also searches by vectors. Default: full text only."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    for command in (corpus, retriever):
        app.command(rich_help_panel="Tools")(command)


def corpus(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DOCUMENTS.jsonl", help="A file with one document per line: id, contents (or title, text)."
        ),
    ],
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="The folder or LanceDB URI of the index.")],
    embed: Embed = "",
) -> None:
    """Build the index that agents search. An index that is there is replaced."""
    from stores.traces.corpus import build_corpus

    print(f"{build_corpus(uri, source, embed=_embedding(embed))} documents in {uri}")


def retriever(
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus made by `troupe corpus`.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    top_k: Annotated[
        int, typer.Option("--top-k", min=1, help="How many documents a request gets that asks for no number.")
    ] = 3,
    embed: Embed = "",
) -> None:
    """Serve a corpus with the API of Search-R1's retrieval server: POST /retrieve."""
    import uvicorn

    from serve_apps.extensions.retrieval.retriever_app import build_retriever
    from serve_apps.http.http_connection import HttpConnection
    from stores.traces.corpus import Corpus

    documents = Corpus(uri, embed=_embedding(embed))
    print(f"{len(documents)} documents at http://{host}:{port}/retrieve")
    api = build_retriever(documents, top_k=top_k)
    uvicorn.run(api, host=host, port=port, http=HttpConnection, ws="none", log_level="warning")


def _embedding(path: str) -> Any:
    return open_by_name(path, place="--embed") if path else None
