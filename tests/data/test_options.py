"""Rules within the data sections: each names field, rule and remedy."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from lib.config.params_file import read_params
from lib.data.options import CorpusOptions, TokenizerOptions, TokensOptions, UrlOptions
from lib.errors import InvalidParams

MODELS = {"corpus": CorpusOptions, "tokenizer": TokenizerOptions, "tokens": TokensOptions}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA256 = "ab" * 32


def problems_of(tmp_path: Path, section: str, text: str) -> list[str]:
    path = tmp_path / "params.yaml"
    path.write_text(f"{section}: {text}\n")
    with pytest.raises(InvalidParams) as caught:
        read_params(path).section(section, MODELS[section])
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("section", "text", "field", "remedy"),
    [
        ("corpus", "{source: files}", "corpus.paths", "list at least one glob"),
        ("corpus", "{source: url}", "corpus.urls", "sha256"),
        ("corpus", f"{{source: huggingface, revision: {COMMIT}}}", "corpus.dataset", "owner/name"),
        ("corpus", "{source: huggingface, dataset: a/b}", "corpus.revision", "40 hexadecimal"),
        (
            "corpus",
            "{source: huggingface, dataset: a/b, revision: main}",
            "corpus.revision",
            "40 hexadecimal",
        ),
        ("corpus", "{paths: [a.txt]}", "corpus.paths", "set corpus.source: files or remove"),
        ("corpus", f"{{revision: {COMMIT}}}", "corpus.revision", "huggingface or remove"),
        ("corpus", "{source: url, urls: [{url: 'http://h/a.txt'}]}", "sha256", "sha256"),
        (
            "corpus",
            "{source: url, urls: [{url: 'http://h/a.txt', sha256: abc}]}",
            "corpus.urls[0].sha256",
            "sha256sum",
        ),
        (
            "corpus",
            f"{{source: url, urls: [{{url: /a.txt, sha256: {SHA256}}}]}}",
            "corpus.urls[0].url",
            "source: files",
        ),
        ("corpus", "{max_documents: 0}", "corpus.max_documents", "1"),
        ("corpus", "{seed: -1}", "corpus.seed", "0"),
        ("corpus", "{source: hugging_face}", "corpus.source", "huggingface"),
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
    assert field in problem
    assert remedy in problem


def test_all_broken_rules_at_once(tmp_path: Path) -> None:
    text = "{source: huggingface, paths: [a.txt]}"
    fields = {
        problem.split(" = ")[0].split(": ")[1] for problem in problems_of(tmp_path, "corpus", text)
    }
    assert fields == {"corpus.dataset", "corpus.revision", "corpus.paths"}
    assert len(problems_of(tmp_path, "tokenizer", "{kind: gpt2, path: x}")) == 3


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


@pytest.mark.parametrize("model", [*MODELS.values(), UrlOptions])
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
