"""The corpus: what is found, in which order, and what is refused when it is built."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lancedb.table import LanceTable

from stores.traces import corpus as corpus_module
from stores.traces.corpus import BATCH_ROWS, Corpus, build_corpus

pytestmark = pytest.mark.test

DOCUMENTS = [
    {"id": "1", "contents": '"Mira Holt"\nMira Holt was born in Tarn and paints bridges.'},
    {"_id": "2", "title": "Tarn", "text": "Tarn is a town in the north of Velland."},
    {"document": "Velland has the currency dorin."},
]


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    assert build_corpus(str(folder / "index"), written(folder / "documents.jsonl", [*DOCUMENTS, ""])) == 3
    return Corpus(str(folder / "index"))


def test_each_query_has_its_row_and_a_blank_one_an_empty_row(corpus: Corpus) -> None:
    rows = corpus.search(["currency of Velland", "", "Where was Mira Holt born?", "  ", "zzz"], top_k=1)
    assert [[d.document_id for d in row] for row in rows] == [["3"], [], ["1"], [], []]
    assert rows[0][0].score > 0
    assert corpus.search(["Tarn"], top_k=5)[0][0].contents.startswith('"Tarn"\n')
    assert pickle.loads(pickle.dumps(corpus)).search(["dorin"], top_k=1)[0][0].document_id == "3"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("首都", {"zh", "ja"}),
        ("北京", {"zh"}),
        ("中国最大的城市是哪个", {"zh2"}),
        ("東京の人口", {"ja"}),
        ("สถานที่ เมืองหลวง", {"th"}),
        ("running", {"en"}),
        ("cafe", {"en"}),
        ("foo bar", {"en"}),
        ("광주는", {"ko"}),
    ],
)
def test_languages_without_spaces_are_searched_by_words(query: str, found: set[str], many_languages: Corpus) -> None:
    (row,) = many_languages.search([query], top_k=5)
    assert {document.document_id for document in row[: len(found)]} == found, "the best ones"


@pytest.fixture(scope="module")
def many_languages(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    texts = {
        "zh": "北京是中华人民共和国的首都。",
        "zh2": "上海位于长江口，是中国最大的城市。",
        "ja": "東京は日本の首都であり、世界最大の都市圏です。",
        "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
        "ko": "광주는 한국의 도시이다",
        "en": "The café runs by foo_bar.",
        "tr": "İstanbul bir şehirdir.",
    }
    folder = tmp_path_factory.mktemp("languages")
    rows = [{"id": name, "title": name.upper(), "text": text} for name, text in texts.items()]
    build_corpus(str(folder / "index"), written(folder / "documents.jsonl", rows))
    return Corpus(str(folder / "index"))


def test_a_dotted_capital_i_is_found_as_it_is_written(many_languages: Corpus) -> None:
    """What the guide says of it (guides/tools.md); letters with other marks are found without them."""
    found = many_languages.search(["istanbul", "ISTANBUL", "İstanbul", "sehirdir"], top_k=5)
    assert [[document.document_id for document in row] for row in found] == [[], [], ["tr"], ["tr"]]


def test_a_name_that_is_a_common_word_of_some_language_is_found(tmp_path: Path) -> None:
    names = ["Ben Los", "Ben Sus", "Der Vor", "Per Dar", "The Who", "Nur Hin"]
    path = tmp_path / "names.jsonl"
    path.write_text("".join(json.dumps({"id": name, "contents": f"{name} lives in Rome."}) + "\n" for name in names))
    build_corpus(str(tmp_path / "index"), path)
    found = Corpus(str(tmp_path / "index")).search(names, 1)
    assert [[document.document_id for document in row] for row in found] == [[name] for name in names]


def test_a_title_is_searched_and_shown_once(tmp_path: Path) -> None:
    rows = [{"title": "Mira Holt", "text": "She paints."}, {"title": "Tarn", "contents": '"Tarn"\nA town.'}]
    build_corpus(str(tmp_path / "index"), written(tmp_path / "documents.jsonl", rows))
    found = Corpus(str(tmp_path / "index")).search(["holt", "tarn"], top_k=3)
    assert [[d.contents for d in row] for row in found] == [['"Mira Holt"\nShe paints.'], ['"Tarn"\nA town.']]


def test_words_of_a_query_language_are_words(corpus: Corpus) -> None:
    (row,) = corpus.search(["AND OR ("], top_k=3)
    assert [document.document_id for document in row] == ["1"], "the only document with `and`"


@pytest.mark.parametrize("query", ['"unclosed', "title:x^2", "*", "\\", "a" * 10_000, "☃ \x00", "\ud83d"])
def test_no_query_is_anything_but_words(corpus: Corpus, query: str) -> None:
    (row,) = corpus.search([query], top_k=3)
    assert row == []


def letters(texts: Sequence[str]) -> list[list[float]]:
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


def test_with_vectors_both_rankings_count(tmp_path: Path) -> None:
    path = written(tmp_path / "documents.jsonl", DOCUMENTS)
    build_corpus(str(tmp_path / "index"), path, embed=letters)
    hybrid = Corpus(str(tmp_path / "index"), embed=letters)
    ((best, *others),) = hybrid.search(["Velland has the currency dorin."], top_k=3)
    assert best.document_id == "3"
    assert len(others) == 2, "vectors find what shares no word"
    assert best.score == pytest.approx(2 / 61)
    assert hybrid.search([""], top_k=3) == [[]]
    assert [d.document_id for d in hybrid.search(["dorin \ud83d"], top_k=1)[0]] == ["3"]


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_document_is_found_where_none_is_asked_for(top_k: int, corpus: Corpus) -> None:
    assert corpus.search(["Tarn", ""], top_k) == [[], []]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "holds no document"),
        (["", "  "], "holds no document"),
        ([DOCUMENTS[0], "{not json"], r"documents\.jsonl:2: not JSON"),
        ([DOCUMENTS[0], "[" * 100_000], r"documents\.jsonl:2: not JSON \(maximum recursion"),
        ([DOCUMENTS[0], '{"text": "a", "n": ' + "1" * 5000 + "}"], r"documents\.jsonl:2: not JSON \(Exceeds the limit"),
        (['{"text": "\\ud800"}'], r"documents\.jsonl:1: no text: .*surrogates"),
        (["[1, 2]"], ":1: a document is a JSON object, this is list"),
        ([{"id": "1", "title": "x"}], ":1: no text: one of contents, text"),
        ([{"id": "1", "text": "a"}, {"id": 1, "text": "b"}], ":2: id '1' was used before"),
    ],
)
def test_what_is_no_corpus_is_refused_with_its_line(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_corpus(str(tmp_path / "index"), written(tmp_path / "documents.jsonl", rows))


def test_a_bad_line_far_down_is_named_and_the_old_index_stays(tmp_path: Path) -> None:
    uri = str(tmp_path / "index")
    build_corpus(uri, written(tmp_path / "old.jsonl", DOCUMENTS))
    rows: list[Any] = [{"text": f"word{i}"} for i in range(BATCH_ROWS + 5)]
    with pytest.raises(ValueError, match=rf"^corpus: .*new\.jsonl:{len(rows) + 1}: not JSON") as refused:
        build_corpus(uri, written(tmp_path / "new.jsonl", [*rows, "{not json"]))
    assert "Traceback" not in str(refused.value)
    assert Corpus(uri).search(["dorin"], top_k=1)[0][0].document_id == "3"


def test_a_corpus_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        build_corpus(str(tmp_path / "index"), tmp_path / "documents.jsonl")
    with pytest.raises(ValueError, match=r"holds no table 'documents': build it with `troupe corpus`"):
        Corpus(str(tmp_path / "index")).search(["a"], top_k=1)


def test_a_corpus_without_its_index_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    uri = str(tmp_path / "index")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LanceTable, "create_index", killed)
        build_corpus(uri, written(tmp_path / "documents.jsonl", DOCUMENTS))
    with pytest.raises(ValueError, match=r"has no index: .* build it again with `troupe corpus`"):
        Corpus(uri).search(["dorin"], top_k=1)


@pytest.mark.parametrize("form", ["~/an index", "file://{home}/an%20index"])
def test_a_corpus_is_read_where_it_was_built(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    uri = form.format(home=tmp_path)
    build_corpus(uri, written(tmp_path / "documents.jsonl", DOCUMENTS))
    assert len(Corpus(uri)) == len(Corpus(str(tmp_path / "an index"))) == 3
    with pytest.raises(ValueError, match="file://runs names the machine 'runs': write a path"):
        build_corpus("file://runs", tmp_path / "documents.jsonl")


@pytest.mark.nightly
def test_a_corpus_on_object_storage_over_plain_http(tmp_path: Path, s3_uri: str) -> None:
    build_corpus(s3_uri, written(tmp_path / "documents.jsonl", DOCUMENTS))
    assert Corpus(s3_uri).search(["dorin"], top_k=1)[0][0].document_id == "3"


def test_a_corpus_that_is_built_again_is_followed_once_it_has_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, new = str(tmp_path / "index"), written(tmp_path / "new.jsonl", [{"id": "new", "text": "a new town"}])
    build_corpus(uri, written(tmp_path / "old.jsonl", [{"id": "old", "text": "an old town"}]))
    opened = Corpus(uri)
    seen = {opened.version: opened.search(["town"], 1)[0][0].document_id}
    monkeypatch.setattr(corpus_module, "LOOK_S", -1)
    index = LanceTable.create_index

    def searched_before(table: LanceTable, *arguments: Any, **settings: Any) -> None:
        seen[opened.version] = opened.search(["town"], 1)[0][0].document_id
        index(table, *arguments, **settings)

    monkeypatch.setattr(LanceTable, "create_index", searched_before)
    build_corpus(uri, new)
    assert list(seen.values()) == ["old"] and opened.version not in seen
    assert opened.search(["town"], 1)[0][0].document_id == "new" and len(opened) == 1


@pytest.mark.parametrize(("built_with", "width"), [(None, 0), (lambda texts: [[1.0, 0.0] for _ in texts], 2)])
def test_another_embedding_than_that_of_the_build_is_named(tmp_path: Path, built_with: Any, width: int) -> None:
    uri = str(tmp_path / "index")
    build_corpus(uri, written(tmp_path / "documents.jsonl", DOCUMENTS), embed=built_with)
    other = Corpus(uri, embed=lambda texts: [[1.0, 0.0, 0.0] for _ in texts])
    with pytest.raises(
        ValueError, match=rf"was built with vectors of {width} numbers .*, and embed gives 3: search with"
    ):
        other.search(["Tarn"], top_k=1)
