"""Typed options of the data stages: the sections corpora, tokenizer and tokens of params.yaml.

They live here, not in ``lib.config``, so that a new training parameter never touches the data
stages and so never tokenises a corpus again. A docstring under each field says what it means, in
which unit, and why the default is what it is.
"""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator, model_validator

from lib.errors import InvalidParams, Problem, UserError

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Names of folders and of DVC's stages. Not digits alone: YAML would read a number.
_CORPUS_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _missing(field: str, reader: str, remedy: str) -> Problem:
    return Problem(field, "(missing)", f"{reader} needs it", remedy)


def _unused(field: str, value: object, chosen: str, remedy: str) -> Problem:
    """Most likely a wrong choice of source or kind, so it must not be passed over in silence."""
    return Problem(field, str(value), f"{chosen} does not read it", f"{remedy} or remove {field}")


def _raise_all(problems: list[Problem]) -> None:
    if problems:
        raise InvalidParams(problems)


class UrlOptions(BaseModel):
    """One file to download, and the checksum that proves that it arrived whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Where the file is: http:// or https://. Its ending says what it is, as for ``paths``."""

    sha256: str
    """The sha256 of the file, 64 hexadecimal digits (``sha256sum FILE`` prints it). Without it a
    file that was cut short or changed on the server would pass for the corpus."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                "must begin with http:// or https://; "
                "for a file on this machine use source: files and paths"
            )
        return url

    @field_validator("sha256")
    @classmethod
    def _check_sha256(cls, sha256: str) -> str:
        if not _SHA256.fullmatch(sha256):
            raise ValueError(
                "must be 64 hexadecimal digits; write what sha256sum prints for the file"
            )
        return sha256.lower()


class CorpusOptions(BaseModel):
    """Where the documents of a corpus come from, and how they are stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["python_stdlib", "files", "url", "huggingface"] = "python_stdlib"
    """Where the text comes from. ``python_stdlib``: the source of the Python standard library on
    this machine, real text that needs no network, hence the default. ``files``: files on this
    machine (``paths``). ``url``: files to download (``urls``). ``huggingface``: a data set of the
    Hugging Face hub (``dataset``, ``revision``)."""

    paths: tuple[str, ...] = ()
    """For ``files``: globs such as ``texts/**/*.jsonl.zst``. Endings: .jsonl and .txt, either also
    with .gz or .zst, and .parquet. A glob that matches nothing is an error."""

    urls: tuple[UrlOptions, ...] = ()
    """For ``url``: the files, each with ``url`` and ``sha256``."""

    dataset: str | None = None
    """For ``huggingface``: the name of the data set, such as ``owner/name``."""

    dataset_config: str | None = None
    """For ``huggingface``: the configuration (subset) of the data set, where it has several."""

    dataset_split: str = Field(default="train", min_length=1)
    """For ``huggingface``: the split to read."""

    revision: str | None = None
    """For ``huggingface``: the commit of the data set, 40 hexadecimal digits. A branch may move,
    and the same parameters would then give another corpus."""

    text_key: str = Field(default="text", min_length=1)
    """The key (of a JSON line) or column (of a table) that holds the text."""

    txt_documents: Literal["file", "line"] = "file"
    """What is one document in a .txt file: the whole ``file``, or each ``line``."""

    max_documents: int | None = Field(default=None, ge=1)
    """Stop reading after so many documents; null reads all. They are the first ones of the source,
    in its own order, duplicates included."""

    deduplicate: bool = False
    """Whether a text that occurs several times is kept once: of equal texts the first of the source
    stays, the others are left out and counted. Equal means to the last byte (by a 128-bit hash).
    This costs no memory, since documents are sorted by that hash anyway. Off by default, since
    how often a text occurs may be meant."""

    seed: int = Field(default=1234, ge=0)
    """Key of the hash by which documents are ordered. The order is that of a shuffle, so that any
    range of documents (a shard, a split) is like any other."""

    shard_megabytes: int = Field(default=64, ge=1)
    """Text per shard of data/raw, in millions of bytes before compression. Small enough to be
    handled by one worker, large enough that shards are few."""

    on_bad_record: Literal["skip", "stop"] = "skip"
    """What to do with a record that cannot be used (a malformed line, no text key, a text that is
    no string or is not UTF-8): ``stop`` names file and line and ends, ``skip`` leaves it out and
    counts it, up to ``max_bad_records``. Empty documents are no bad records: they are always left
    out and counted."""

    max_bad_records: int = Field(default=100, ge=0)
    """For ``skip``: more bad records than this end the stage, for then something is wrong with the
    corpus as a whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _raise_all(self._missing_fields() + self._unused_fields())
        return self

    def _missing_fields(self) -> list[Problem]:
        """What the chosen source needs and does not have."""
        reader = f"source = {self.source}"
        problems = []
        if self.source == "files" and not self.paths:
            problems.append(_missing("paths", reader, "list at least one glob"))
        if self.source == "url" and not self.urls:
            problems.append(_missing("urls", reader, "list at least one {url: ..., sha256: ...}"))
        if self.source == "huggingface" and not self.dataset:
            problems.append(_missing("dataset", reader, "write the data set's name, owner/name"))
        if self.source == "huggingface" and not _COMMIT.fullmatch(self.revision or ""):
            problems.append(
                Problem(
                    "revision",
                    self.revision or "(missing)",
                    f"{reader} needs a pinned revision, since a branch may move",
                    "write a commit of the data set, 40 hexadecimal digits, from its history "
                    "under 'Files and versions'",
                )
            )
        return problems

    def _unused_fields(self) -> list[Problem]:
        """What is set although the chosen source never reads it."""
        readers = {
            "paths": ("files", list(self.paths)),
            "urls": ("url", [url.url for url in self.urls]),
            "dataset": ("huggingface", self.dataset),
            "dataset_config": ("huggingface", self.dataset_config),
            "revision": ("huggingface", self.revision),
        }
        return [
            _unused(field, value, f"source = {self.source}", f"set source: {reader}")
            for field, (reader, value) in readers.items()
            if value and self.source != reader
        ]


class Corpora(RootModel[dict[str, CorpusOptions]]):
    """All corpora, by the names that the user gives them."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.root:
            raise ValueError("names no corpus; write a name and below it the keys of a corpus")
        wrong = [name for name in self.root if not _CORPUS_NAME.fullmatch(name)]
        _raise_all(
            [
                Problem(
                    name,
                    "(this name)",
                    "a corpus's name has small letters, digits and underscores, a letter first",
                    "rename it, such as web_2024",
                )
                for name in wrong
            ]
        )
        return self

    def choose(self, name: str | None) -> str:
        """The corpus that a stage's option --corpus means; with one corpus it may be left out.

        Raises:
            UserError: it is missing, or there is no such corpus.
        """
        names = ", ".join(self.root)
        if name is None:
            if len(self.root) == 1:
                return next(iter(self.root))
            raise UserError(f"--corpus is missing: there are several; name one of {names}")
        if name not in self.root:
            raise UserError(
                f"--corpus {name}: no such corpus in the section corpora; it has {names}"
            )
        return name


class TokenizerOptions(BaseModel):
    """How text becomes token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["train_bpe", "tokenizer_json", "gpt2", "sentencepiece"] = "train_bpe"
    """``train_bpe``: train a byte-level BPE on the corpora, the default: it needs nothing else.
    ``tokenizer_json``: take a tokenizer.json (``path``). ``gpt2``: take a vocab.json and a
    merges.txt (``vocab_file``, ``merges_file``). ``sentencepiece``: take a .model (``path``)."""

    vocab_size: int = Field(default=4096, ge=257)
    """For ``train_bpe``: entries of the vocabulary, the 256 bytes and the end of document
    included. Small models want small ones: the embedding has vocab_size x hidden_size weights."""

    path: str | None = None
    """For ``tokenizer_json`` and ``sentencepiece``: the file."""

    vocab_file: str | None = None
    """For ``gpt2``: the vocabulary, vocab.json or encoder.json."""

    merges_file: str | None = None
    """For ``gpt2``: the merges, merges.txt or vocab.bpe."""

    end_of_document: str = Field(default="<|endoftext|>", min_length=1)
    """The special token that ends a document. A given tokenizer must have it."""

    train_megabytes: int = Field(default=100, ge=1)
    """For ``train_bpe``: text to train on, in millions of bytes, from the start of each corpus
    (which is in random order) by its share of all text. More hardly changes the merges, and takes
    memory and time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        readers = {
            "path": ("tokenizer_json", "sentencepiece"),
            "vocab_file": ("gpt2",),
            "merges_file": ("gpt2",),
        }
        values = {"path": self.path, "vocab_file": self.vocab_file, "merges_file": self.merges_file}
        chosen = f"tokenizer.kind = {self.kind}"
        problems = []
        for field, kinds in readers.items():
            value = values[field]
            if self.kind in kinds and not value:
                problems.append(_missing(field, chosen, f"name the file in {field}"))
            if self.kind not in kinds and value:
                remedy = f"set tokenizer.kind: {' or '.join(kinds)},"
                problems.append(_unused(field, value, chosen, remedy))
        _raise_all(problems)
        return self


class TokensOptions(BaseModel):
    """How the tokenised corpus is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    append_eod: bool = True
    """Whether the end-of-document token follows each document, so that the model learns where
    texts end and samples can cross from one to the next."""

    min_document_tokens: int | None = Field(default=None, ge=1)
    """Shortest document, in tokens before the end-of-document token: shorter ones are left out and
    counted. null leaves out the empty ones alone."""

    max_document_tokens: int | None = Field(default=None, ge=1)
    """Longest document, in tokens before the end-of-document token; null sets no limit."""

    long_documents: Literal["cut", "drop"] = "cut"
    """What happens to a document over ``max_document_tokens``: it is ``cut`` to that many tokens,
    or it is ``drop``ped. Either is counted in the manifest."""

    workers: int | None = Field(default=None, ge=1)
    """Processes that tokenise; null takes all cores. The output does not depend on it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.min_document_tokens, self.max_document_tokens
        if low and high and low > high:
            _raise_all(
                [
                    Problem(
                        "min_document_tokens",
                        str(low),
                        f"is above max_document_tokens = {high}, so that no document would fit",
                        "lower it, or raise max_document_tokens",
                    )
                ]
            )
        return self


DATA_SECTIONS: dict[str, type[BaseModel]] = {
    "corpora": Corpora,
    "tokenizer": TokenizerOptions,
    "tokens": TokensOptions,
}
"""The sections of the parameter file that the data stages read."""
