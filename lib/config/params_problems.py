"""What is wrong with a parameter file, in words: pydantic's errors, unknown keys, remedies.

Knows neither files nor lines: a ``Finding`` is a place, a rule and a remedy, to which
``lib.config.params_file`` adds the line and what the file says there.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, get_args

from pydantic import BaseModel, RootModel
from pydantic_core import ErrorDetails
from ruamel.yaml.scalarint import ScalarInt

from lib.errors import InvalidParams

# A path into the file: keys and list positions.
Location = tuple[str | int, ...]
# The keys of each section, for telling where a misplaced key belongs.
KnownKeys = Mapping[str, tuple[str, ...]]

# What other programs (transformers, nanoGPT, Megatron, PyTorch) call keys of ours.
_ELSEWHERE = {
    "batch_size_per_gpu": "micro_batch_size",
    "betas": "beta1",
    "block_size": "seq_length",
    "context_length": "seq_length",
    "d_ff": "ffn_hidden_size",
    "d_model": "hidden_size",
    "dim": "hidden_size",
    "dp": "data",
    "dropout": "hidden_dropout",
    "dtype": "compute",
    "epochs": "train_iters",
    "eps": "epsilon",
    "flash_attention": "attention",
    "gpus": "processes",
    "grad_clip": "clip_grad",
    "gradient_accumulation_steps": "global_batch_size",
    "gradient_checkpointing": "recompute",
    "intermediate_size": "ffn_hidden_size",
    "kv_heads": "num_query_groups",
    "lr_scheduler": "decay",
    "max_grad_norm": "clip_grad",
    "max_iters": "train_iters",
    "max_steps": "train_iters",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "n_positions": "max_position_embeddings",
    "num_epochs": "train_iters",
    "num_gpus": "processes",
    "num_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "pipeline_model_parallel_size": "pipeline",
    "pp": "pipeline",
    "tensor_model_parallel_size": "tensor",
    "tie_word_embeddings": "tie_embeddings",
    "tp": "tensor",
    "zero_stage": "sharding",
}
_LONGEST_LIST = 60
_KEY_AND_VALUE = re.compile(r"(\w+) = .*?: ")


class Finding(NamedTuple):
    """A broken rule and where in the file it is broken."""

    at: Location
    rule: str
    remedy: str


def dotted(location: Iterable[str | int]) -> str:
    """A path as people write it: ``corpora.web.urls[0].sha256``."""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def location_of(field: str) -> Location:
    """The path that ``dotted`` wrote."""
    steps = re.findall(r"\[(\d+)\]|([^.\[]+)", field)
    return tuple(int(position) if position else key for position, key in steps)


def show(value: object) -> str:
    """A value as a message shows it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, value)) + "}"
    if isinstance(value, list):
        text = json.dumps(value, default=str)
        return text if len(text) <= _LONGEST_LIST else f"[{len(value)} entries]"
    if width := width_with_zeros(value):
        return str(value).zfill(width)
    return json.dumps(value) if isinstance(value, str) else str(value)


def width_with_zeros(number: object) -> int:
    """How many characters a number like 010 has in the file; 0 for all others."""
    if type(number) is not ScalarInt:  # 0x10 and 0o10 are subclasses, and clear
        return 0
    width: int = getattr(number, "_width", None) or 0
    return width if len(str(abs(number))) < width else 0


def describe_error(
    error: ErrorDetails, name: str, model: type[BaseModel], known: KnownKeys
) -> list[Finding]:
    """One of pydantic's errors in section ``name``, in our words."""
    at: Location = (name, *error["loc"])
    entry = entry_model(model)
    depth = 2 if entry is model else 3
    if error["type"] == "extra_forbidden":
        if len(at) == depth:
            return [unknown_key(at, known)]
        return [Finding(at, "no such key here", "remove it")]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParams):
        return [
            Finding((*at, *problem.field.split(".")), problem.rule, problem.remedy)
            for problem in cause.problems
        ]
    if cause is not None:
        keys = known[name] if len(at) == 1 else ()
        return [_from_text(part, at, keys) for part in str(cause).split("; and ")]
    if error["type"] == "model_type" and entry is not model and at[-1] in entry.model_fields:
        remedy = f"write a name of your choice, such as mine, and {at[-1]} below it, indented"
        return [Finding(at, "stands where the name of a corpus must be", remedy)]
    default: object = None
    if len(at) == depth and isinstance(at[-1], str) and at[-1] in entry.model_fields:
        field = entry.model_fields[at[-1]]
        default = None if field.is_required() else field.get_default()
    rule, remedy = _rule_and_remedy(error, default)
    if error["type"] == "literal_error" and _may_be_null(at, entry, depth):
        remedy = f"{remedy.rstrip('?')}, or write null"
    return [Finding(at, rule, remedy)]


def _may_be_null(at: Location, entry: type[BaseModel], depth: int) -> bool:
    field = entry.model_fields.get(str(at[-1])) if len(at) == depth else None
    return field is not None and type(None) in get_args(field.annotation)


def entry_model(model: type[BaseModel]) -> type[BaseModel]:
    """The model of the keys of a section: its own, or that of each entry of a mapping of entries.

    Such a mapping is ``RootModel[dict[str, ENTRY]]``: names are the user's, keys stand below them.
    """
    if not issubclass(model, RootModel):
        return model
    entry = get_args(model.model_fields["root"].annotation)[1]
    assert isinstance(entry, type)
    assert issubclass(entry, BaseModel)
    return entry


def _from_text(text: str, at: Location, keys: tuple[str, ...]) -> Finding:
    """A validator's "rule; remedy", "key = value: rule; remedy" or "key is ...; remedy"."""
    rule, _, remedy = text.partition("; ")
    if named := _KEY_AND_VALUE.match(rule):
        at, rule = (*at, named[1]), rule[named.end() :]
    elif rule.split(" ")[0] in keys:
        at = (*at, rule.split(" ")[0])
    return Finding(at, rule, remedy or "see the key's comment")


def _rule_and_remedy(error: ErrorDetails, default: object) -> tuple[str, str]:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    example = f"such as {show(default)}" if default not in (None, "") else "there"
    if kind.startswith("int_"):
        is_fraction = isinstance(value, float) and math.isfinite(value)
        near = f"nearest: {math.floor(value)} or {math.ceil(value)}" if is_fraction else ""
        return "must be a whole number", near or f"write a whole number {example}"
    if kind == "literal_error":
        return _choice(str(context["expected"]), value)
    if kind == "bool_type":
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}
        return "must be true or false", f"write {word.get(str(value).lower(), 'true or false')}"
    if kind == "string_type" and value is not None:
        return "must be text", f'put it in quotes: "{value}"'
    for prefix, (rule, remedy) in _SIMPLE_RULES.items():
        if kind.startswith(prefix):
            return rule.format(**context), remedy.format(**context, example=example)
    return error["msg"], "see the key's comment"


_SIMPLE_RULES: Mapping[str, tuple[str, str]] = {
    "missing": ("the key is required", "add it"),
    "float_": ("must be a number", "write a number {example}"),
    "string_type": ("must be text", "write text {example}"),
    "greater_than_equal": ("must be at least {ge}", "write {ge} or more"),
    "greater_than": ("must be greater than {gt}", "write a number above {gt}"),
    "less_than_equal": ("must be at most {le}", "write {le} or less"),
    "less_than": ("must be less than {lt}", "write a number below {lt}"),
    "list_": ("must be a list", "write [first, second] or one '- entry' a line"),
    "tuple_": ("must be a list", "write [first, second] or one '- entry' a line"),
    "too_short": ("must have at least {min_length} entries", "add some"),
    "string_too_short": ("must not be empty", "write text {example}"),
    "model_type": ("must be a mapping of keys", "write {{key: value, ...}}"),
    "dict_type": ("must be a mapping of keys", "write {{key: value, ...}}"),
}


def _choice(expected: str, value: object) -> tuple[str, str]:
    choices = [part.strip("' ") for part in expected.replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"choose one, such as {choices[0]}"
    return f"must be one of {', '.join(choices)}", remedy


def unknown_key(at: Location, known: KnownKeys) -> Finding:
    """A key, or a section, that there is not: where it belongs or which one was meant."""
    key = str(at[-1])
    is_section = len(at) == 1
    siblings = tuple(known) if is_section else known[str(at[0])]
    owners = [section for section, keys in known.items() if key in keys]
    elsewhere = {f"{section}.{k}": k for section, keys in known.items() for k in keys}
    meant = _ELSEWHERE.get(key.lower())
    if owners:
        remedy = f"it belongs to section {' or '.join(owners)}"
    elif found := [name for name, k in elsewhere.items() if k == meant]:
        remedy = f"nearest: {meant if meant in siblings else ' or '.join(found)}"
    elif near := nearest_keys(key, siblings):
        remedy = f"nearest: {' or '.join(near)}"
    elif near := nearest_keys(key, elsewhere.values()):
        found = [name for name, k in elsewhere.items() if k in near]
        remedy = f"nearest: {' or '.join(found[:3])}"
    else:
        remedy = f"remove it; known are {', '.join(siblings)}"
    rule = "no such section" if is_section else "no such key in this section"
    return Finding(at, rule, remedy)


def nearest_keys(key: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that someone who wrote ``key`` most likely meant, best first, at most 3.

    Initials ("learning_rate" for lr), keys that contain the word ("heads"), and close spellings.
    """
    words = key.lower().replace("-", "_").replace(" ", "_")
    names = list(dict.fromkeys(candidates))
    initials = "".join(word[0] for word in words.split("_") if word)
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == words,
        lambda name: len(name) > 1 and name == initials,
        lambda name: f"_{words}_" in f"_{name}_",
        lambda name: name in difflib.get_close_matches(words, names, n=1, cutoff=0.75),
        lambda name: name in difflib.get_close_matches(words, names, n=1, cutoff=0.6),
    )
    for test in tests:
        if found := list(filter(test, names)):
            return found[:3]
    return []
