"""Megatron-LM's flags of the data and the tokenizer."""

import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from lib.plan.megatron_flags import Importing, is_unknown

_SPLIT = "969,30,1"
_ENDINGS = re.compile(r"(_(text|content))?_(document|sentence)$")
_SENTENCEPIECE = {"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"}
_HUGGING_FACE = {
    "HFTokenizer",
    "HuggingFaceTokenizer",
    "Llama3Tokenizer",
    "PretrainedFromHF",
    "TokenizerFromFile",
    "TokenizerFromFileWithFIM",
}
_PATHS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")


def import_data(importing: Importing, taken: Collection[str]) -> None:
    """Puts which tokens are read and how they were made.

    Args:
        importing: where to.
        taken: names that no pair of files may get: those of the section corpora.
    """
    _tokenizer(importing)
    names: dict[str, str] = {}
    blends = {flag: _blend(importing, flag, names, taken) for flag in _PATHS}
    if importing.arguments.has("data-path") and any(blends[flag] for flag in _PATHS[1:]):
        importing.refuse("data-path", "other --*-data-path are given as well", "keep one kind")
    train = blends["data-path"] or blends["train-data-path"]
    if not train:
        importing.notes.append(
            "no --data-path: data.imported, data.blend and data.validation stay as they are"
        )
        _split(importing, importing.arguments.values("split"))
        return
    importing.put("data.imported", names, *_PATHS)
    importing.put("data.blend", train, "data-path", "train-data-path")
    valid = blends["valid-data-path"]
    importing.put("data.validation", list(valid) if valid else None, "valid-data-path")
    importing.leave(
        "test-data-path",
        "imported, but no test is run on it: name it in data.validation to measure it",
        changes_result=False,
    )
    _split(importing, ("100,0,0",) if blends["train-data-path"] else None)
    for name, prefix in names.items():
        importing.notes.append(
            f"then: python -m stages.describe_tokens {prefix} --tokenizer data/tokenizer (data."
            f"imported.{name})"
        )


def _split(importing: Importing, values: Sequence[str] | None) -> None:
    """The shares of documents; each file is whole where train and valid have files of their own."""
    arguments = importing.arguments
    given = "".join(arguments.values("split"))
    if values == ("100,0,0",):
        importing.put("training.split", values[0], why="each file is for one purpose alone")
    elif given:
        importing.put("training.split", given, "split")
    else:
        importing.put_default("training.split", _SPLIT, "split")
    shares = str(importing.value("training.split")).split(",")
    if len(shares) < 3 or not shares[2].strip("0. "):
        why = "the split leaves no documents for the test"
        importing.put("evaluate.split", "valid", why=why)


def _blend(
    importing: Importing, flag: str, names: dict[str, str], taken: Collection[str]
) -> dict[str, float]:
    """Weights by name of what a --*-data-path lists; adds the names' prefixes to ``names``."""
    values = list(importing.arguments.values(flag))
    if not values:
        return {}
    pairs = _pairs(values)
    if pairs is None:
        pairs = [(1.0, prefix) for prefix in values]
        if len(pairs) > 1:
            importing.notes.append(
                f"--{flag} has no weights, where Megatron takes each by its number of tokens: "
                "each has weight 1 in data.blend now; write those numbers there"
            )
    blend: dict[str, float] = {}
    for weight, prefix in pairs:
        if is_unknown(prefix):
            importing.arguments.unknown_values.append(f"--{flag} {prefix}")
        known = [name for name, path in names.items() if path == prefix]
        name = known[0] if known else _name(prefix, {*names, *taken})
        names[name] = prefix
        blend[name] = blend.get(name, 0.0) + weight
    return blend


def _pairs(values: list[str]) -> list[tuple[float, str]] | None:
    """Weights and prefixes in turn; None where they are prefixes alone."""
    if len(values) % 2:
        return None
    try:
        return [(float(values[at]), values[at + 1]) for at in range(0, len(values), 2)]
    except ValueError:
        return None


def _name(prefix: str, taken: Collection[str]) -> str:
    """A name for a pair of files: what its path ends with, in the letters that names have."""
    stem = _ENDINGS.sub("", PurePosixPath(prefix).name.lower())
    name = re.sub(r"[^a-z0-9]+", "_", stem).strip("_") or "tokens"
    name = name if name[0].isalpha() else f"tokens_{name}"
    number, base = 2, name
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


# ---- the tokenizer


def _tokenizer(importing: Importing) -> None:
    arguments = importing.arguments
    kind = arguments.text("tokenizer-type")
    files = arguments.has("vocab-file") and arguments.has("merge-file")
    if kind == "GPT2BPETokenizer" or (kind is None and files):
        _put_tokenizer(importing, "gpt2", ("tokenizer-type", "vocab-file", "merge-file"))
        importing.put("tokenizer.vocab_file", arguments.text("vocab-file"), "vocab-file")
        importing.put("tokenizer.merges_file", arguments.text("merge-file"), "merge-file")
        importing.put("tokenizer.end_of_document", "<|endoftext|>", why="GPT-2's")
        for flag in ("vocab-file", "merge-file"):
            if not arguments.has(flag):
                importing.refuse(flag, "the tokenizer needs it", f"add --{flag} FILE")
    elif kind in _SENTENCEPIECE:
        flag = "tokenizer-model" if arguments.has("tokenizer-model") else "vocab-file"
        _put_tokenizer(importing, "sentencepiece", ("tokenizer-type",))
        importing.put("tokenizer.path", arguments.text(flag), flag)
        importing.put("tokenizer.end_of_document", "</s>", why="Llama's: look into the model")
        _needs_file(importing, flag)
    elif kind in _HUGGING_FACE:
        flag = "tokenizer-model" if arguments.has("tokenizer-model") else "vocab-file"
        path = arguments.text(flag)
        if path is not None and not path.endswith(".json"):
            path = f"{path.rstrip('/')}/tokenizer.json"
        _put_tokenizer(importing, "tokenizer_json", ("tokenizer-type",))
        importing.put("tokenizer.path", path, flag, why="a folder's tokenizer.json")
        _needs_file(importing, flag)
        importing.notes.append(
            "tokenizer.path must be a file on this machine, and tokenizer.end_of_document its "
            "token: Megatron asks the Hugging Face hub for both"
        )
    else:
        importing.leave("tokenizer-type", "gpt2, sentencepiece and tokenizer.json are here")
        for flag in ("tokenizer-model", "vocab-file", "merge-file"):
            importing.leave(flag, "the section tokenizer stays as it is")


def _put_tokenizer(importing: Importing, kind: str, flags: tuple[str, ...]) -> None:
    importing.put("tokenizer.kind", kind, *flags)
    for name in ("path", "vocab_file", "merges_file"):
        importing.put(f"tokenizer.{name}", None)


def _needs_file(importing: Importing, flag: str) -> None:
    if not importing.arguments.has(flag):
        importing.refuse("tokenizer-model", "the tokenizer needs it", "add --tokenizer-model FILE")
