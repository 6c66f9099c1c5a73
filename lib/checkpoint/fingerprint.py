"""The fingerprint: a hash of everything that defines a training trajectory, and of nothing else.

Two runs with one fingerprint go through the same weights, so one may continue from the other's
checkpoints; runs with different fingerprints never see each other's state. How far a run goes
(``training.train_iters``), how often and at what it looks (``eval_interval``, ``data.validation``),
how it is spread over devices (``parallel``, ``micro_batch_size``) and what its code is are not part
of it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lib.config.data_facts import DataFacts
from lib.config.run_config import RunConfig

# Every field of RunConfig is in exactly one of the two sets; a name stands for all below it.
# A field in neither is an error, so that a new one is never left out by oversight. ``*`` is the
# name of a corpus or the number of a phase.
TRAJECTORY = frozenset(
    {
        "model",
        "precision",
        "optimizer",
        "schedule",
        "training.seed",
        "training.seq_length",
        "training.global_batch_size",
        "training.rampup_start_batch_size",
        "training.rampup_increment",
        "training.rampup_samples",
        "training.label_smoothing",
        "training.z_loss",
        "training.split",
        "data.tokenizer_fingerprint",
        "data.vocab_size",
        "data.eod_id",
        "data.corpora.*.tokens_sha256",
        "data.corpora.*.dtype",
        "data.corpora.*.documents",
        "data.corpora.*.tokens",
        "data.corpora.*.splits.train",
        "data.phases.*.from_samples",
        "data.phases.*.seq_length",
        "data.phases.*.weights",
        "data.phases.*.samples",
        "data.eod_in_loss",
        "data.positions",
        "data.attention",
        "initial.sha256",
        "initial.new_parts",
    }
)
NOT_TRAJECTORY = frozenset(
    {
        "parallel",
        "checkpoint",
        "training.micro_batch_size",
        "training.train_iters",
        "training.train_samples",
        "training.eval_interval",
        "training.eval_iters",
        "data.corpora.*.manifest",
        "data.corpora.*.splits.valid",
        "data.corpora.*.splits.test",
        "data.phases.*.micro_batch_size",
        "data.validation",
        "derived",
        "initial.folder",
    }
)
# Fields that a decay form or a number type does not read: were they kept, a constant rate could
# not be continued past its first length.
_UNREAD_OF_SCHEDULE = {
    "cosine": {"wsd_decay_samples", "wsd_style"},
    "linear": {"wsd_decay_samples", "wsd_style"},
    "constant": {"wsd_decay_samples", "wsd_style", "decay_samples", "min_lr"},
    "wsd": set(),
}
_OF_DYNAMIC_LOSS_SCALE = {
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "loss_scale_hysteresis",
}
_CORPUS_OR_PHASE = re.compile(r"^data\.(corpora|phases)\.[^.]+")


def fingerprint(run_config: RunConfig) -> str:
    """16 hexadecimal digits that name the trajectory."""
    text = json.dumps(fingerprint_parts(run_config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint_parts(run_config: RunConfig) -> dict[str, object]:
    """The fields that define the trajectory, nested as in the run configuration."""
    parts: dict[str, object] = {}
    unread = _unread(run_config)
    for name, value in leaves(run_config.model_dump(mode="json")):
        if is_trajectory(name) and name not in unread:
            _set(parts, name, value)
    return parts


def _unread(run_config: RunConfig) -> set[str]:
    """Dotted names of the fields that this run does not read."""
    of_schedule = _UNREAD_OF_SCHEDULE[run_config.schedule.decay]
    of_precision: set[str] = set()
    if run_config.precision.compute != "fp16":
        of_precision = _OF_DYNAMIC_LOSS_SCALE | {"loss_scale"}
    elif run_config.precision.loss_scale is not None:
        of_precision = _OF_DYNAMIC_LOSS_SCALE
    # A run from random weights is the run that it was before there were others.
    of_initial = {name for name, value in run_config.initial.model_dump().items() if not value}
    # Only learned positions have a table of that length; others may be made longer on the way.
    of_model = {"max_position_embeddings"} if run_config.model.position_embedding == "rope" else ()
    return (
        {f"schedule.{name}" for name in of_schedule}
        | {f"precision.{name}" for name in of_precision}
        | {f"initial.{name}" for name in of_initial}
        | {f"model.{name}" for name in of_model}
        | set(_unread_of_data(run_config.data))
    )


def _unread_of_data(data: DataFacts) -> Iterator[str]:
    """Dotted names of what belongs to corpora that are not drawn from.

    So a corpus that is measured only, or that a later phase brings, changes nothing of the phases
    before it; and neither does the weight of a corpus that is alone.
    """
    drawn: set[str] = set()
    for number, phase in enumerate(data.phases):
        here = {name for name, weight in phase.weights.items() if weight > 0}
        drawn |= here
        for name in phase.weights:
            if name not in here or len(here) == 1:
                yield f"data.phases.{number}.weights.{name}"
            if name not in here:
                yield f"data.phases.{number}.samples.{name}"
    for name in data.corpora.keys() - drawn:
        for leaf, _ in leaves(data.corpora[name].model_dump(mode="json")):
            yield f"data.corpora.{name}.{leaf}"


def is_trajectory(name: str) -> bool:
    """Whether a field (dotted name) belongs to the fingerprint."""
    general = general_name(name)
    prefixes = {general[:end] for end, letter in enumerate(f"{general}.") if letter == "."}
    inside, outside = bool(prefixes & TRAJECTORY), bool(prefixes & NOT_TRAJECTORY)
    assert inside != outside, f"{name} must be in one of the lists of lib/checkpoint/fingerprint.py"
    return inside


def general_name(name: str) -> str:
    """A field's dotted name with ``*`` for the name of a corpus or the number of a phase."""
    return _CORPUS_OR_PHASE.sub(r"data.\1.*", name)


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted names and the values of a nested mapping.

    Lists are values, but one of mappings is a mapping of its positions.
    """
    for key, found in tree.items():
        value = found
        if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
            value = {str(number): each for number, each in enumerate(found)}
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def difference(parts_a: Mapping[str, object], parts_b: Mapping[str, object]) -> list[str]:
    """What differs between two fingerprints' parts, a line for each field: ``name: a -> b``."""
    a, b = dict(leaves(parts_a)), dict(leaves(parts_b))
    missing = "(absent)"
    return [
        f"{name}: {a.get(name, missing)!r} -> {b.get(name, missing)!r}"
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or a[name] != b[name]
    ]


def code_hash(paths: Sequence[Path]) -> str:
    """A hash over Python files, given one by one or as folders, relative to the project.

    It depends on the files' names as given and on their bytes: not on where the project lies, on
    the order of ``paths``, on times, or on compiled files.
    """
    files: set[Path] = set()
    for path in paths:
        files.update([path] if path.is_file() else path.rglob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(files):
        data = path.read_bytes()
        digest.update(f"{path.as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def _set(tree: dict[str, object], name: str, value: object) -> None:
    """Sets a dotted name in a nested dict, making the levels above it."""
    *levels, leaf = name.split(".")
    for level in levels:
        below = tree.setdefault(level, {})
        assert isinstance(below, dict)
        tree = below
    tree[leaf] = value
