"""Rules within the data sections: each names field, rule and remedy."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from lib.config.params_file import read_params, unknown_keys
from lib.data.options import (
    DATA_SECTIONS,
    Corpora,
    CorpusOptions,
    TokenizerOptions,
    TokensOptions,
    UrlOptions,
)
from lib.errors import InvalidParams, UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA256 = "ab" * 32


def problems_of(tmp_path: Path, section: str, text: str) -> list[str]:
    path = tmp_path / "params.yaml"
    path.write_text(f"{section}: {text}\n")
    with pytest.raises(InvalidParams) as caught:
        read_params(path).section(section, DATA_SECTIONS[section])
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("{source: files}", "paths", "list at least one glob"),
        ("{source: url}", "urls", "sha256"),
        (f"{{source: huggingface, revision: {COMMIT}}}", "dataset", "owner/name"),
        ("{source: huggingface, dataset: a/b}", "revision", "40 hexadecimal"),
        ("{source: huggingface, dataset: a/b, revision: main}", "revision", "40 hexadecimal"),
        ("{paths: [a.txt]}", "paths", "set source: files or remove"),
        (f"{{revision: {COMMIT}}}", "revision", "huggingface or remove"),
        ("{source: url, urls: [{url: 'http://h/a.txt'}]}", "urls[0].sha256", "add it"),
        ("{source: url, urls: [{url: 'http://h/a', sha256: a}]}", "urls[0].sha256", "sha256sum"),
        (
            f"{{source: url, urls: [{{url: /a.txt, sha256: {SHA256}}}]}}",
            "urls[0].url",
            "source: files",
        ),
        ("{max_documents: 0}", "max_documents", "1"),
        ("{deduplicate: yes}", "deduplicate", "write true"),
        ("{seed: -1}", "seed", "0"),
        ("{seed: 010}", "seed", "leading zero"),
        ("{source: hugging_face}", "source", "huggingface"),
        ("{sources: files}", "sources", "nearest: source"),
    ],
)
def test_broken_rule_of_a_corpus_names_corpus_and_key(
    tmp_path: Path, text: str, key: str, remedy: str
) -> None:
    (problem,) = problems_of(tmp_path, "corpora", f"{{good: {{}}, web: {text}}}")
    assert f": corpora.web.{key} = " in problem
    assert remedy in problem


@pytest.mark.parametrize(
    ("section", "text", "field", "remedy"),
    [
        ("corpora", "{}", "corpora", "write a name"),
        ("corpora", "{web: files}", "corpora.web", "must be a mapping of keys"),
        ("corpora", "{source: files}", "corpora.source", "write a name of your choice"),
        ("corpora", "{Web: {}}", "corpora.Web", "small letters"),
        ("corpora", "{2024: {}}", "corpora.2024", "a letter first"),
        ("corpora", "{'a;b': {}}", "corpora.a;b", "rename it"),
        ("tokenizer", "{kind: sentencepiece}", "tokenizer.path", "name the file"),
        ("tokenizer", "{path: a.json}", "tokenizer.path", "tokenizer_json or sentencepiece"),
        ("tokenizer", "{vocab_size: 256}", "tokenizer.vocab_size", "257"),
        ("tokens", "{workers: 0}", "tokens.workers", "1"),
        ("tokens", "{long_documents: split}", "tokens.long_documents", "cut"),
    ],
)
def test_broken_rule_names_field_and_remedy(
    tmp_path: Path, section: str, text: str, field: str, remedy: str
) -> None:
    (problem,) = problems_of(tmp_path, section, text)
    assert f"{field} = " in problem
    assert remedy in problem


def test_all_broken_rules_at_once(tmp_path: Path) -> None:
    text = "{a: {source: huggingface, paths: [a.txt]}, b: {seed: x}}"
    fields = {
        problem.split(" = ")[0].split(": ")[1] for problem in problems_of(tmp_path, "corpora", text)
    }
    assert fields == {
        "corpora.a.dataset",
        "corpora.a.revision",
        "corpora.a.paths",
        "corpora.b.seed",
    }
    assert len(problems_of(tmp_path, "tokenizer", "{kind: gpt2, path: x}")) == 3


def test_unknown_keys_of_each_corpus_are_found(tmp_path: Path) -> None:
    path = tmp_path / "preset.yaml"
    path.write_text("corpora:\n  a: {seed: 1}\n  '*': {max_docs: 3}\n  b: 5\n")
    problems = unknown_keys(read_params(path), DATA_SECTIONS)
    assert [(problem.where, problem.field) for problem in problems] == [
        (f"{path}:3", "corpora.*.max_docs"),
        (f"{path}:4", "corpora.b"),
    ]
    assert problems[0].remedy == "nearest: max_documents"


def test_the_option_corpus_may_be_left_out_where_there_is_one() -> None:
    one, two = (
        Corpora({"a": CorpusOptions()}),
        Corpora({"a": CorpusOptions(), "b": CorpusOptions()}),
    )
    assert (one.choose(None), one.choose("a"), two.choose("b")) == ("a", "a", "b")
    with pytest.raises(UserError, match=r"--corpus is missing: .* a, b"):
        two.choose(None)
    with pytest.raises(UserError, match=r"--corpus c: no such corpus .* a, b"):
        two.choose("c")


@pytest.mark.parametrize(
    "options",
    [
        CorpusOptions(),
        CorpusOptions(source="files", paths=("a/*.txt",)),
        CorpusOptions(
            source="url", urls=(UrlOptions(url="https://h/a.txt", sha256=SHA256.upper()),)
        ),
        CorpusOptions(source="huggingface", dataset="a/b", revision=COMMIT, max_documents=5),
        TokenizerOptions(kind="gpt2", vocab_file="v", merges_file="m"),
        TokensOptions(),
    ],
)
def test_good_options_survive_their_own_json(options: BaseModel) -> None:
    assert type(options).model_validate(options.model_dump(mode="json")) == options
    with pytest.raises(ValidationError):
        setattr(options, next(iter(type(options).model_fields)), "frozen")


@pytest.mark.parametrize("model", [CorpusOptions, TokenizerOptions, TokensOptions, UrlOptions])
def test_every_field_is_documented(model: type[BaseModel]):
    """A string follows each annotated field in the class's body."""
    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    documented = {
        field.target.id
        for field, following in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert documented == set(model.model_fields)
