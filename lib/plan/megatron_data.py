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
        _measuring(importing)
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
    _measuring(importing)
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


def _measuring(importing: Importing) -> None:
    """Where Megatron measures no loss while it trains, none is measured here."""
    name, interval = "training.eval_iters", "training.eval_interval"
    iterations = importing.value(name)
    if isinstance(iterations, int) and iterations < 1:
        importing.put(name, 0, "eval-iters", why="Megatron measures nothing with fewer than 1")
        importing.put(interval, 0, "eval-interval", "eval-iters", why="as --eval-iters wants it")
    shares = [share.strip(" 0.") for share in str(importing.value("training.split")).split(",")]
    if any(shares[1:]) or importing.value("data.validation"):
        return
    flag = "split" if importing.arguments.has("split") else "valid-data-path"
    importing.refuse(
        flag,
        "no documents are left to measure the loss on, as stages.evaluate does at the end",
        "give --valid-data-path, or a split such as 99,1,0",
    )


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
    files = all(flag in arguments.given for flag in ("vocab-file", "merge-file"))
    used: tuple[str, ...] = ()
    why, matters = "--tokenizer-type asks for other files", False
    if kind == "GPT2BPETokenizer" or (kind is None and files):
        used = _gpt2(importing)
    elif kind in _SENTENCEPIECE:
        used = _one_file(importing, "sentencepiece")
        importing.put("tokenizer.end_of_document", "</s>", why="Llama's: look into the model")
    elif kind in _HUGGING_FACE:
        used = _one_file(importing, "tokenizer_json")
        importing.notes.append(
            "tokenizer.path must be a file on this machine, and tokenizer.end_of_document its "
            "token: Megatron asks the Hugging Face hub for both"
        )
    else:
        importing.leave("tokenizer-type", "gpt2, sentencepiece and tokenizer.json are here")
        why, matters = "the section tokenizer stays as it is", True
    for flag in ("tokenizer-model", "vocab-file", "merge-file"):
        if flag not in used:
            importing.leave(flag, why, changes_result=matters)


def _gpt2(importing: Importing) -> tuple[str, ...]:
    """Puts the tokenizer of two files; gives the flags that name them."""
    arguments, flags = importing.arguments, ("vocab-file", "merge-file")
    paths = {flag: arguments.text(flag) for flag in flags}
    missing = [flag for flag in flags if not arguments.has(flag)]
    for flag in missing:
        importing.refuse(flag, "--tokenizer-type GPT2BPETokenizer needs it", f"add --{flag} FILE")
    if not missing:
        _put_tokenizer(importing, "gpt2", ("tokenizer-type", *flags))
        importing.put("tokenizer.vocab_file", paths["vocab-file"], "vocab-file")
        importing.put("tokenizer.merges_file", paths["merge-file"], "merge-file")
        importing.put("tokenizer.end_of_document", "<|endoftext|>", why="GPT-2's")
    return flags


def _one_file(importing: Importing, kind: str) -> tuple[str, ...]:
    """Puts a tokenizer of one file; gives the flag that names it."""
    arguments = importing.arguments
    flag = "vocab-file" if "tokenizer-model" not in arguments.given else "tokenizer-model"
    path, why = arguments.text(flag), ""
    if not arguments.has(flag):
        name = arguments.text("tokenizer-type")
        importing.refuse(
            "tokenizer-model", f"--tokenizer-type {name} needs it", "add --tokenizer-model FILE"
        )
        return ()
    if kind == "tokenizer_json" and path is not None and not path.endswith(".json"):
        path, why = f"{path.rstrip('/')}/tokenizer.json", "a folder's tokenizer.json"
    _put_tokenizer(importing, kind, ("tokenizer-type",))
    importing.put("tokenizer.path", path, flag, why=why)
    return (flag,)


def _put_tokenizer(importing: Importing, kind: str, flags: tuple[str, ...]) -> None:
    importing.put("tokenizer.kind", kind, *flags)
    for name in ("path", "vocab_file", "merges_file"):
        importing.put(f"tokenizer.{name}", None)
