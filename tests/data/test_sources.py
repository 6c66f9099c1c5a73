"""Sources: known faults B01 (empty documents), B04 (BOM, CRLF), B06 (bad records), and globs."""

import ast
import codecs
import gzip
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.documents import RawDocument
from lib.data.options import CorpusOptions
from lib.data.rejections import Rejections
from lib.data.sources import SourceFile, locate_files, read_documents, read_stdlib
from lib.errors import UserError

SECTION = "corpora.web"
BAD_LINES = (
    '{"text":"a"}',
    '{"text":"b"',
    '{"txt":"c"}',
    '{"text":null}',
    '{"text":5}',
    "[1]",
    '{"text":"d"}',
)


def read(*paths: Path, **settings: object) -> tuple[list[RawDocument], Rejections]:
    fixed = {"source": "files", "paths": [str(path) for path in paths]}
    options = CorpusOptions.model_validate(fixed | settings)
    rejections = Rejections(SECTION, options)
    files = locate_files(SECTION, options, Path("unused"), lambda _count: None)
    return list(read_documents(options, files, rejections)), rejections


def texts(*paths: Path, **settings: object) -> list[str]:
    return [document.text for document in read(*paths, **settings)[0]]


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text":""}\n{"text":"a b"}\n{"text":" "}\n{"text":""}\n')
    documents, rejections = read(path, on_bad_record="stop")
    assert [(document.text, document.line) for document in documents] == [("a b", 2)]
    assert rejections.counts == {"empty": 3}


FORMS: dict[str, Callable[[str], bytes]] = {
    "lf": lambda text: text.encode(),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "bom": lambda text: codecs.BOM_UTF8 + text.encode(),
    "bom and crlf": lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    "no final newline": lambda text: text.removesuffix("\n").encode(),
}
INNER = ("first", "\ufeffa mark within", "nul \x00, \u2028 and \x85 end no line \U0001f600")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_form_of_the_file_does_not_change_its_documents(
    tmp_path: Path, kind: str, form: str, suffix: str
) -> None:
    lines = [json.dumps({"text": t}, ensure_ascii=False) if kind == "jsonl" else t for t in INNER]
    data = FORMS[form]("".join(f"{line}\n" for line in lines))
    if suffix:
        data = gzip.compress(data) if suffix == ".gz" else zstandard.compress(data)
    path = write(tmp_path / f"a.{kind}{suffix}", data)
    documents, rejections = read(path, txt_documents="line", on_bad_record="stop")
    assert [(d.text, d.line) for d in documents] == list(zip(INNER, (1, 2, 3), strict=True))
    assert not rejections.counts


@pytest.mark.parametrize("form", ["lf", "crlf", "bom", "bom and crlf"])
def test_text_file_as_one_document(tmp_path: Path, form: str) -> None:
    text = "one\n\n\ufefftwo\n"
    path = write(tmp_path / "a.txt", FORMS[form](text))
    documents, _ = read(path)
    assert [(d.text, d.line) for d in documents] == [(text, None)]


def test_mark_is_stripped_once_and_in_each_file(tmp_path: Path) -> None:
    mark = codecs.BOM_UTF8
    first = write(tmp_path / "a.txt", mark + mark + b"x")
    second = write(tmp_path / "b.txt", mark + b"y")
    assert texts(first, second) == ["\ufeffx", "y"]


def test_crlf_inside_a_json_text_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\r\\nb\\u0000"}\r\n')
    assert texts(path) == ["a\r\nb\x00"]


def test_blank_lines_count_as_lines_not_as_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\n{"text":"a"}\n  \n{"text":"b"\n')
    with pytest.raises(UserError, match=r"a\.jsonl:4: no valid JSON"):
        read(path, on_bad_record="stop")


def test_bad_records_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n".join(BAD_LINES))
    documents, rejections = read(path)
    assert [(d.text, d.line) for d in documents] == [("a", 1), ("d", 7)]
    assert rejections.counts == {
        "malformed_json": 1,
        "missing_key": 1,
        "not_text": 2,
        "not_an_object": 1,
    }
    assert [example.split(": ")[0] for example in rejections.examples] == [
        f"{path}:{line}" for line in (2, 3, 4, 5, 6)
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (BAD_LINES[1].encode(), "no valid JSON"),
        (BAD_LINES[2].encode(), "no key 'text'; its keys are: 'txt'"),
        (BAD_LINES[3].encode(), "null, not a string"),
        (BAD_LINES[4].encode(), "int, not a string"),
        (BAD_LINES[5].encode(), "list, not a JSON object"),
        (b'{"text": "\xff"}', "byte 0xff at offset 10"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b"\xff\xfe{\x00", "no valid UTF-8"),
    ],
)
def test_stop_names_file_and_line(tmp_path: Path, bad: bytes, reason: str) -> None:
    good = b'{"text": "good"}\n'
    path = write(tmp_path / "a.jsonl", good + bad + b"\n" + good)
    with pytest.raises(UserError) as caught:
        read(path, on_bad_record="stop")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)
    assert "corpora.web.on_bad_record" in str(caught.value)
    assert texts(path) == ["good", "good"]


@pytest.mark.parametrize("documents", ["file", "line"])
def test_text_that_is_no_utf8_names_its_line(tmp_path: Path, documents: str) -> None:
    path = write(tmp_path / "a.txt", b"good\nbad \xe4\n")
    write(tmp_path / "b.txt", b"fine")
    with pytest.raises(UserError, match=r"a\.txt:2: no valid UTF-8"):
        read(path, on_bad_record="stop", txt_documents=documents)
    _, rejections = read(tmp_path / "*.txt", txt_documents=documents)
    assert rejections.counts == {"bad_encoding": 1}


@pytest.mark.parametrize(("limit", "fails"), [(4, True), (5, False)])
def test_limit_of_bad_records(tmp_path: Path, limit: int, fails: bool) -> None:
    path = write(tmp_path / "a.jsonl", "\n".join(BAD_LINES))
    if not fails:
        assert len(texts(path, max_bad_records=limit)) == 2
        return
    with pytest.raises(UserError, match=r"more than 4 bad records.*a\.jsonl:2: no valid JSON"):
        read(path, max_bad_records=limit)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_file_without_the_key_is_an_error_even_beside_a_good_one(tmp_path: Path, kind: str) -> None:
    good = write(tmp_path / "a.jsonl", '{"content": "x"}\n')
    assert texts(good, text_key="content") == ["x"]
    path = tmp_path / f"b.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"body": ["y"], "id": [1]}), path)
    else:
        write(path, '{"body": "y", "id": 1}\n{"body": "z"}\n')
    with pytest.raises(
        UserError, match=r"b\.\w+: .*content.*corpora\.web\.text_key.*body.*id.*correct"
    ):
        read(tmp_path / "*", text_key="content")


@pytest.mark.parametrize("value", ["null", '"\\ud800"'])
def test_file_of_unusable_values_has_the_key(tmp_path: Path, value: str) -> None:
    write(tmp_path / "a.jsonl", f'{{"text": {value}}}\n')
    write(tmp_path / "b.jsonl", '{"text": "b"}\n')
    assert texts(tmp_path / "*.jsonl") == ["b"]


def test_glob_that_matches_nothing_is_an_error_although_another_matches(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"^corpora\.web\.paths: .*\*\.jsonl matches no file"):
        read(tmp_path / "a.txt", tmp_path / "*.jsonl")


def test_a_folder_is_told_how_to_name_its_files(tmp_path: Path) -> None:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    write(tmp_path / "texts" / "deep" / "a.txt", "x")
    with pytest.raises(UserError, match=r"it is a folder: write .*/texts/\*\*/\*\.txt,") as told:
        read(tmp_path / "texts")
    pattern = str(told.value).partition("write ")[2].partition(",")[0]
    assert texts(Path(pattern)) == ["x"]


def test_unknown_ending_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x")
    with pytest.raises(UserError, match=r"a\.csv: unknown kind.*\.jsonl\.zst.*\.parquet"):
        read(tmp_path / "*")


def test_files_are_read_once_in_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    documents, _ = read(Path("deep/*"), Path("**/*.txt"), Path("a.txt"))
    assert [document.source for document in documents] == ["a.txt", "b.txt", "deep/c.txt"]
    documents, _ = read(tmp_path / "*.txt")  # an absolute glob names files as a relative one does
    assert [document.source for document in documents] == ["a.txt", "b.txt"]


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows: list[str | None] = [f"row {number}" for number in range(500)]
    rows[10] = rows[20] = None
    rows[30] = " "
    table = pyarrow.table({"text": rows, "other": list(range(500))})
    pyarrow.parquet.write_table(table, path, row_group_size=64)
    documents, rejections = read(path)
    kept = [(text, line) for line, text in enumerate(rows, 1) if text and text.strip()]
    assert [(d.text, d.line) for d in documents] == kept
    assert rejections.counts == {"not_text": 2, "empty": 1}
    with pytest.raises(UserError, match=r"a\.parquet:11: the value of 'text' is null"):
        read(path, on_bad_record="stop")


def test_parquet_with_bad_bytes_and_cut_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"good", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    documents, rejections = read(path)
    assert [document.text for document in documents] == ["good"]
    assert rejections.counts == {"bad_encoding": 1}
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a\.parquet: no readable Parquet file"):
        read(path)


def test_max_documents_counts_what_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text":""}\n{"text":"a"}\nbroken\n{"text":"b"}\nbroken\n')
    documents, rejections = read(path, max_documents=2)
    assert [document.text for document in documents] == ["a", "b"]
    assert rejections.counts == {"empty": 1, "malformed_json": 1}


@settings(deadline=None)  # it writes files
@given(st.lists(st.text(min_size=1).filter(lambda text: not text.isspace()), max_size=8))
def test_any_text_passes_through_json_lines(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str]
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in contents))
    options = CorpusOptions(on_bad_record="stop", source="files", paths=("unused",))
    documents = read_documents(options, [SourceFile(path, "label")], Rejections(SECTION, options))
    assert list(documents) == [
        RawDocument(text, "label", line) for line, text in enumerate(contents, 1)
    ]


def test_stdlib_is_real_python_without_its_tests() -> None:
    rejections = Rejections(SECTION, CorpusOptions())
    folder = Path(sysconfig.get_path("stdlib"))
    documents = {document.source: document for document in read_stdlib(folder, rejections)}
    assert len(documents) > 500
    assert list(documents) == sorted(documents, key=Path)
    assert documents["argparse.py"].text == (folder / "argparse.py").read_text("utf-8")
    assert not [name for name in documents if {"test", "tests"} & set(Path(name).parts)]
    ast.parse(documents["asyncio/base_events.py"].text)


def test_stdlib_files_that_do_not_decode_are_counted_whatever_the_policy(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "x = 1\r\n")
    write(tmp_path / "latin.py", b"# \xe4\n")
    for skipped in ("test", "site-packages", "__pycache__", "idlelib/idle_test"):
        (tmp_path / skipped).mkdir(parents=True)
        write(tmp_path / skipped / "b.py", "y = 2\n")
    rejections = Rejections(SECTION, CorpusOptions(on_bad_record="stop"))
    assert list(read_stdlib(tmp_path, rejections)) == [RawDocument("x = 1\n", "a.py", None)]
    assert rejections.counts == {"bad_encoding": 1}


def test_stdlib_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"corpora\.web\.source = .*no module's source"):
        list(read_stdlib(tmp_path, Rejections(SECTION, CorpusOptions())))
