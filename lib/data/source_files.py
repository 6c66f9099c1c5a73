"""Documents from files: JSON lines, text and Parquet, the first two also compressed.

Everything is streamed: a file is never held whole, except a .txt file that is one document. A byte
order mark at a file's start is dropped, lines may end in CR LF, and line numbers are those that an
editor shows.
"""

import codecs
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lib.data.compressed import lines_of, read_pieces
from lib.data.documents import RawDocument
from lib.data.options import CorpusOptions
from lib.data.rejections import (
    BAD_ENCODING,
    BAD_UNICODE,
    MALFORMED,
    MISSING_KEY,
    NOT_AN_OBJECT,
    NOT_TEXT,
    Rejections,
    WrongRecord,
    checked_text,
)
from lib.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_TXT = (".txt", ".txt.gz", ".txt.zst")
_PARQUET = (".parquet",)
_SUFFIXES = _JSONL + _TXT + _PARQUET
# Rows decoded at a time: few, since each may be a whole book.
_PARQUET_ROWS = 64


def find_files(paths: tuple[str, ...], field: str) -> list[Path]:
    """All files that the globs match, each once, sorted by name.

    Args:
        paths: the globs.
        field: where the parameter file has them, for messages.

    Raises:
        UserError: if a glob matches no file, or a file's ending is unknown.
    """
    found: set[Path] = set()
    for pattern in paths:
        expanded = str(Path(pattern).expanduser())
        matches = [Path(name) for name in glob.iglob(expanded, recursive=True)]  # noqa: PTH207
        files = [path for path in matches if path.is_file()]
        if not files:
            raise UserError(
                f"{field}: {pattern} matches no file (looked from {Path.cwd()}); "
                + _other_glob(pattern, Path(expanded))
            )
        found.update(files)
    for path in sorted(found):
        check_suffix(str(path))
    return sorted(found)


def _other_glob(pattern: str, path: Path) -> str:
    if path.is_dir():
        return f"it is a folder: write {pattern.rstrip('/')}/**/*.txt, or another ending"
    return "correct the glob, or remove it"


def check_suffix(name: str) -> None:
    """Refuses a file name whose ending says nothing about how to read it."""
    if not name.endswith(_SUFFIXES):
        raise UserError(
            f"{name}: unknown kind of file; its name must end in one of {', '.join(_SUFFIXES)}"
        )


def read_file(
    path: Path, label: str, options: CorpusOptions, rejections: Rejections
) -> Iterator[RawDocument]:
    """The documents of one file, in its order; empty ones included.

    Args:
        path: the file; its ending says how to read it.
        label: what documents and errors call it: the path or the URL that it came from.
        options: the section of the corpus.
        rejections: takes the records that cannot be used.

    Raises:
        UserError: if the file is damaged, or none of its records has the text key.
    """
    if path.name.endswith(_PARQUET):
        return _read_parquet(path, label, options, rejections)
    if path.name.endswith(_JSONL):
        return _read_jsonl(path, label, options, rejections)
    if options.txt_documents == "line":
        return _read_txt_lines(path, label, rejections)
    return _read_txt_file(path, label, rejections)


def _numbered_lines(path: Path, label: str) -> Iterator[tuple[int, bytes]]:
    """Physical lines with their numbers, from 1; without the byte order mark and line ends."""
    for number, line in enumerate(lines_of(read_pieces(path, label)), 1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        yield number, content.removesuffix(b"\r")


def _read_jsonl(
    path: Path, label: str, options: CorpusOptions, rejections: Rejections
) -> Iterator[RawDocument]:
    records = with_key = 0
    first_wrong = ""
    for number, line in _numbered_lines(path, label):
        if not line.strip():
            continue
        records += 1
        try:
            text = _text_of_json(line, options.text_key)
        except WrongRecord as wrong:
            with_key += wrong.kind in (NOT_TEXT, BAD_UNICODE)
            first_wrong = first_wrong or f"line {number}: {wrong.detail}"
            rejections.reject(wrong.kind, f"{label}:{number}", wrong.detail)
            continue
        with_key += 1
        yield RawDocument(text, label, number)
    if records and not with_key:
        raise UserError(
            f"{label}: none of its {records:,} records has the key {options.text_key!r} "
            f"({rejections.section}.text_key); {first_wrong}; correct that key, or the file"
        )


def _text_of_json(line: bytes, text_key: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise WrongRecord(BAD_ENCODING, _describe(error)) from None
    except (ValueError, RecursionError) as error:
        raise WrongRecord(MALFORMED, f"no valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise WrongRecord(NOT_AN_OBJECT, f"a {type(record).__name__}, not a JSON object")
    if text_key not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8])
        raise WrongRecord(MISSING_KEY, f"no key {text_key!r}; its keys are: {keys or 'none'}")
    return checked_text(record[text_key], text_key)


def _describe(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"no valid UTF-8 (byte 0x{byte:02x} at offset {error.start}); convert it to UTF-8"


def _read_txt_lines(path: Path, label: str, rejections: Rejections) -> Iterator[RawDocument]:
    for number, line in _numbered_lines(path, label):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            rejections.reject(BAD_ENCODING, f"{label}:{number}", _describe(error))
            continue
        yield RawDocument(text, label, number)


def _read_txt_file(path: Path, label: str, rejections: Rejections) -> Iterator[RawDocument]:
    data = b"".join(read_pieces(path, label))
    try:
        text = decode_text_file(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        rejections.reject(BAD_ENCODING, f"{label}:{line}", _describe(error))
        return
    yield RawDocument(text, label, None)


def decode_text_file(data: bytes) -> str:
    """A text file's contents: no byte order mark, lines ended by line feeds alone."""
    return data.removeprefix(codecs.BOM_UTF8).decode().replace("\r\n", "\n")


def _read_parquet(
    path: Path, label: str, options: CorpusOptions, rejections: Rejections
) -> Iterator[RawDocument]:
    # Imported here: it takes a quarter of a second, and the other kinds of file do not need it.
    import pyarrow
    import pyarrow.parquet

    key = options.text_key
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            columns = table.schema_arrow.names
            if key not in columns:
                raise UserError(
                    f"{label}: has no column {key!r} ({rejections.section}.text_key); its "
                    f"columns are: {', '.join(columns)}; correct that key"
                )
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[key]):
                for scalar in batch.column(0):
                    row += 1
                    try:
                        text = _text_of_scalar(scalar, key)
                    except WrongRecord as wrong:
                        rejections.reject(wrong.kind, f"{label}:{row}", wrong.detail)
                        continue
                    yield RawDocument(text, label, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{label}: no readable Parquet file, perhaps cut short ({error}); "
            "fetch or copy it again"
        ) from error


def _text_of_scalar(scalar: "pyarrow.Scalar[pyarrow.DataType]", key: str) -> str:
    try:
        return checked_text(scalar.as_py(), key)
    except UnicodeDecodeError as error:
        raise WrongRecord(BAD_ENCODING, _describe(error)) from None
