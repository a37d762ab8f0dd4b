"""corpus: keeps documents that agents search in a LanceDB table with a full-text index, and vectors if a model is given.

build_corpus(uri, "wiki.jsonl")  ──> documents(id, contents[, vector])
Corpus(uri).search(["who ...", ""], top_k=3) ──> [[Document, ...], []]      one row per query, in order
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.files import connect_lancedb, is_uri, local_path

if TYPE_CHECKING:
    import pyarrow as pa
    from lancedb.table import Table

TABLE = "documents"
BATCH_ROWS = 10_000
TEXT_FIELDS = ("contents", "text", "content", "document", "passage")
TITLE_FIELDS = ("title", "wikipedia_title")
ID_FIELDS = ("id", "_id", "docid", "doc_id")
TOKENIZER = "icu/split"
"""Splits at spaces and punctuation, and Chinese, Japanese, Thai and the like, which have no spaces, by ICU's dictionaries. They
are part of LanceDB; its `simple` takes a whole sentence of these languages for one word, its other ones need files."""
INDEX: Mapping[str, Any] = {"with_position": False, "base_tokenizer": TOKENIZER, "remove_stop_words": False}
"""The settings of the index. LanceDB's stop words are those of many languages together: `Los`, `Der`, `Ben` and `Sus` would not be found."""
RANK_OFFSET = 60
"""Of reciprocal rank fusion: score = sum of 1 / (60 + rank) (Cormack, Clarke, Buettcher 2009)."""

LOOK_S = 5.0
"""Seconds between two looks whether the corpus was built again."""

Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]
"""Texts -> one vector each, all of one length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document that a search returns."""

    document_id: str
    contents: str
    """The title in quotation marks as the first line, then the text (the form of Search-R1, arXiv 2503.09516)."""
    score: float = 0.0
    """Larger is better; comparable within one query only."""


def build_corpus(uri: str, path: str | Path, *, embed: Embed | None = None) -> int:
    """Replaces the table below `uri` by the documents of a JSONL file; returns how many these are.

    A row is `{"id", "contents"}` (Search-R1), or uses another common name of these fields; a title becomes the first line.
    The file is read in parts: it may be larger than memory.

    Raises ValueError, naming the line, where a row is not JSON, has no text, or repeats an id; and for a file without any
    document. The old table stays then.
    """
    from lancedb.index import FTS

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"corpus: {path} does not exist (seen from {Path.cwd()})")
    rows = _rows(path)
    first = list(islice(rows, BATCH_ROWS))
    if not first:
        raise ValueError(f"corpus: {path} holds no document")
    head = _batch(first, embed)

    faults: list[Exception] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from head.to_batches()
            while part := list(islice(rows, BATCH_ROWS)):
                yield from _batch(part, embed).to_batches()
        except Exception as error:
            faults.append(error)
            raise

    try:
        table = connect_lancedb(uri).create_table(TABLE, batches(), schema=head.schema, mode="overwrite")
    except Exception:
        if faults:  # LanceDB wraps an error of its input into one of its own
            raise faults[0] from None
        raise
    table.create_index("contents", config=FTS(**INDEX))
    return table.count_rows()


class Corpus:
    """The documents below one LanceDB URI, of its newest build. It is cheap to create and to pickle, and safe to use from several threads."""

    _opened: tuple[float, Table] | None = None
    """When the table was looked for, and the table."""

    def __init__(self, uri: str, *, embed: Embed | None = None) -> None:
        """Opens nothing yet.

        Args:
            uri: LanceDB URI, a folder or object storage.
            embed: makes the search hybrid: full text and vectors, fused by their ranks. It must be the one with which the
                corpus was built.
        """
        self.uri, self._embed = uri, embed

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "_embed": self._embed}

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Returns a list for each query, in their order: the best documents, best first.

        It is empty for a blank query, and where `top_k` is below 1.
        """
        if top_k < 1:  # which LanceDB takes for 10
            return [[] for _ in queries]
        queries = [q.encode(errors="replace").decode() for q in queries]  # LanceDB refuses half a surrogate pair
        if self._embed is None:
            return [self._by_text(query, top_k) if query.strip() else [] for query in queries]
        texts = [query for query in queries if query.strip()]
        vectors = dict(zip(texts, self._embed(texts), strict=True)) if texts else {}
        return [
            _fused([self._by_text(q, 4 * top_k), self._by_vector(vectors[q], 4 * top_k)], top_k) if q.strip() else []
            for q in queries
        ]

    def __len__(self) -> int:
        return self._table.count_rows()

    @property
    def version(self) -> int:
        """Returns the version of the table that is searched: each build makes another."""
        return int(self._table.version)

    @property
    def _table(self) -> Table:
        opened, now = self._opened, time.monotonic()
        if opened is None or now - opened[0] > LOOK_S:
            newest = self._newest()
            if newest.list_indices():
                opened = (now, newest)
            elif opened is None:
                raise ValueError(
                    f"corpus: {self.uri} has no index: its build is going on or was ended; wait, or build it again with `troupe corpus`"
                )
            else:  # one that is being built has no index yet: the one before it is searched on
                opened = (now, opened[1])
            self._opened = opened
        return opened[1]

    def _newest(self) -> Table:
        missing = f"corpus: {self.uri} holds no table {TABLE!r}: build it with `troupe corpus`"
        if not is_uri(self.uri) and not local_path(self.uri).is_dir():  # to connect would make the folder
            raise ValueError(missing)
        try:
            return connect_lancedb(self.uri).open_table(TABLE)
        except (ValueError, FileNotFoundError):
            raise ValueError(missing) from None

    def _by_text(self, query: str, limit: int) -> list[Document]:
        from lancedb.query import MatchQuery

        search = self._table.search(MatchQuery(query, "contents"), query_type="fts").limit(limit)  # type: ignore[call-arg]
        rows = search.select(["id", "contents", "_score"]).to_list()
        return [Document(document_id=r["id"], contents=r["contents"], score=r["_score"]) for r in rows]

    def _by_vector(self, vector: Sequence[float], limit: int) -> list[Document]:
        table = self._table
        columns = {field.name: field.type for field in table.schema}
        width = columns["vector"].list_size if "vector" in columns else 0
        if len(vector) != width:
            raise ValueError(
                f"corpus: {self.uri} was built with vectors of {width} numbers (0: without any), and embed gives {len(vector)}: search with "
                "the function that it was built with, or build it again with `troupe corpus --embed`"
            )
        rows = table.search(list(vector)).limit(limit).select(["id", "contents", "_distance"]).to_list()
        return [Document(document_id=r["id"], contents=r["contents"], score=-r["_distance"]) for r in rows]


def with_title(text: str, row: Mapping[str, Any]) -> str:
    """Returns a text with the title of its row in quotation marks as the first line, unless it begins with that already."""
    title = next((str(row[f]) for f in TITLE_FIELDS if row.get(f)), "")
    first_line = f'"{title}"\n'
    return text if not title or text.startswith(first_line) else f"{first_line}{text}"


def _fused(rankings: Sequence[Sequence[Document]], top_k: int) -> list[Document]:
    """Joins rankings by reciprocal rank fusion (see `RANK_OFFSET`)."""
    scores: dict[str, float] = {}
    document_of = {document.document_id: document for ranking in rankings for document in ranking}
    for ranking in rankings:
        for rank, document in enumerate(ranking, 1):
            scores[document.document_id] = scores.get(document.document_id, 0.0) + 1 / (RANK_OFFSET + rank)
    best = sorted(scores, key=lambda name: (-scores[name], name))[:top_k]
    return [Document(document_id=n, contents=document_of[n].contents, score=scores[n]) for n in best]


def _batch(rows: Sequence[tuple[str, str]], embed: Embed | None) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {"id": [name for name, _ in rows], "contents": [text for _, text in rows]}
    if embed is not None:
        vectors = [list(map(float, vector)) for vector in embed(columns["contents"])]
        columns["vector"] = pa.array(vectors, pa.list_(pa.float32(), len(vectors[0])))
    return pa.table(columns)


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (id, contents) of every line."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            at = f"corpus: {path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{at}: not UTF-8: {error}") from None
            except (ValueError, RecursionError) as error:  # too many digits, too many brackets
                raise ValueError(f"{at}: not JSON ({error}): {line[:60].decode(errors='replace')!r}") from None
            name, contents = _document(row, at, str(number))
            if name in seen:
                raise ValueError(f"{at}: id {name!r} was used before: give each document its own")
            seen.add(name)
            yield name, contents


def _document(row: Any, at: str, default_id: str) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{at}: a document is a JSON object, this is {type(row).__name__}")
    text = next((row[f] for f in TEXT_FIELDS if row.get(f)), "")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{at}: no text: one of {', '.join(TEXT_FIELDS)} must hold some; it has {sorted(row)}")
    name = next((str(row[f]) for f in ID_FIELDS if row.get(f) not in (None, "")), default_id)
    contents = with_title(text, row)
    try:
        f"{name}{contents}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{at}: no text: {error}") from None
    return name, contents
