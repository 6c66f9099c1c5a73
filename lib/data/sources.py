"""The sources of a corpus, each an iterator of documents: the one place that knows them all."""

import itertools
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.data.documents import RawDocument
from lib.data.fetch import fetch, file_name_of
from lib.data.options import CorpusOptions
from lib.data.rejections import (
    BAD_ENCODING,
    EMPTY,
    MISSING_KEY,
    Rejections,
    WrongRecord,
    checked_text,
)
from lib.data.source_files import check_suffix, decode_text_file, find_files, read_file
from lib.errors import UserError

# Tests of the library are data and noise more than prose and code; the other folders hold other
# people's packages or compiled copies.
_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and what documents and errors call it (its path or its URL)."""

    path: Path
    label: str


def locate_files(
    section: str, options: CorpusOptions, download_dir: Path, advance: Callable[[int], None]
) -> list[SourceFile]:
    """The files of the sources ``files`` and ``url``, downloaded where they must be.

    Args:
        section: the corpus in the parameter file, for messages: ``corpora.NAME``.
        options: the keys of that section.
        download_dir: where downloads are kept.
        advance: called with every number of bytes downloaded.

    Returns:
        The files in the order in which they are read; none for the other sources.
    """
    if options.source == "url":
        for file in options.urls:
            check_suffix(file_name_of(file.url))
        return [
            SourceFile(fetch(file, download_dir, section, advance), file.url)
            for file in options.urls
        ]
    if options.source == "files":
        paths = find_files(options.paths, f"{section}.paths")
        return [SourceFile(path, _label_of(path)) for path in paths]
    return []


def _label_of(path: Path) -> str:
    """The path relative to the working folder where it lies in it: the same on any machine."""
    absolute = path.absolute()
    here = Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else path).as_posix()


def read_documents(
    options: CorpusOptions, files: list[SourceFile], rejections: Rejections
) -> Iterator[RawDocument]:
    """The corpus as its source orders it, without empty documents, up to ``max_documents``.

    Args:
        options: the section of the corpus.
        files: what ``locate_files`` gave.
        rejections: takes what is kept out.
    """
    if options.source == "python_stdlib":
        documents = read_stdlib(Path(sysconfig.get_path("stdlib")), rejections)
    elif options.source == "huggingface":
        documents = read_huggingface(options, rejections)
    else:
        documents = itertools.chain.from_iterable(
            read_file(file.path, file.label, options, rejections) for file in files
        )
    return itertools.islice(_without_empty(documents, rejections), options.max_documents)


def _without_empty(
    documents: Iterator[RawDocument], rejections: Rejections
) -> Iterator[RawDocument]:
    for document in documents:
        if not document.text or document.text.isspace():
            rejections.count(EMPTY)
        else:
            yield document


def read_stdlib(folder: Path, rejections: Rejections) -> Iterator[RawDocument]:
    """The modules of the Python standard library, one document each, sorted by name.

    Files that are no UTF-8 are left out and counted: nobody can be asked to mend them.

    Args:
        folder: where the standard library lies.
        rejections: takes the files that do not decode.

    Raises:
        UserError: if the folder holds no module, as where Python was installed compiled only.
    """
    modules = [
        path
        for path in folder.rglob("*.py")
        if not _STDLIB_SKIPPED.intersection(path.relative_to(folder).parts)
        # Build settings of this one installation, with its paths.
        and not path.name.startswith("_sysconfigdata")
    ]
    if not modules:
        raise UserError(
            f"{rejections.section}.source = python_stdlib: no module's source lies in {folder}; "
            "use a Python that has it, or another source"
        )
    for path in sorted(modules):
        name = path.relative_to(folder).as_posix()
        try:
            yield RawDocument(decode_text_file(path.read_bytes()), name, None)
        except UnicodeDecodeError as error:
            rejections.leave_out(BAD_ENCODING, name, f"no valid UTF-8 ({error.reason})")


def read_huggingface(options: CorpusOptions, rejections: Rejections) -> Iterator[RawDocument]:
    """The rows of a data set of the Hugging Face hub, streamed.

    Raises:
        UserError: if the data set cannot be reached or read, or none of its rows has text.
    """
    name, key = options.dataset or "", options.text_key
    row_number, with_key, columns = 0, False, ""
    for row_number, row in enumerate(_huggingface_rows(name, options, rejections.section), 1):
        with_key = with_key or key in row
        columns = columns or ", ".join(row)
        try:
            text = _text_of_row(row, key)
        except WrongRecord as wrong:
            rejections.reject(wrong.kind, f"{name}:{row_number}", wrong.detail)
            continue
        yield RawDocument(text, f"{name}@{options.revision}", row_number)
    if row_number and not with_key:
        raise UserError(
            f"{name}: none of its {row_number:,} rows has the column {key!r} "
            f"({rejections.section}.text_key); its columns are: {columns}; correct that key"
        )


def _text_of_row(row: Mapping[str, object], key: str) -> str:
    if key not in row:
        columns = ", ".join(row)
        raise WrongRecord(MISSING_KEY, f"no column {key!r}; its columns are: {columns}")
    return checked_text(row[key], key)


def _huggingface_rows(
    name: str, options: CorpusOptions, section: str
) -> Iterator[Mapping[str, object]]:
    # Imported here: only this source needs it, and it takes seconds.
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{section}.source = huggingface needs the package datasets ({error}); "
            "install it, or use another source"
        ) from error
    # The hub, its client and the file formats raise errors of many unrelated classes, and this is
    # the boundary to all of them. What the caller does with a row is outside of it.
    try:
        rows = iter(
            datasets.load_dataset(
                name,
                name=options.dataset_config,
                split=options.dataset_split,
                revision=options.revision,
                streaming=True,
            )
        )
    except Exception as error:
        raise _unreachable(options, section, error) from error
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _unreachable(options, section, error) from error
        yield row


def _unreachable(options: CorpusOptions, section: str, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return UserError(
        f"the data set {options.dataset} (split {options.dataset_split}, revision "
        f"{options.revision}) cannot be read: {reason}; check the network and the names, or use "
        f"{section}.source files"
    )
