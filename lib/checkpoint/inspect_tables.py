"""What is told of states and checkpoints, as rows of tables: text for a person."""

import math
from collections.abc import Mapping, Sequence

from lib.checkpoint.compare import TensorDifference
from lib.checkpoint.inspect import CheckpointFacts, StateFacts, TensorFacts

NOT_RECORDED = "not recorded"
# Of the many packages that are recorded, those that decide what a step computes.
_VERSIONS = ("python", "torch", "triton", "numpy")
_SECTIONS = ("model", "precision", "parallel", "optimizer", "schedule", "training", "checkpoint")
_DEGREES = ("tensor", "pipeline", "virtual_stages", "data")

Rows = list[tuple[str, ...]]


def state_rows(states: Sequence[StateFacts]) -> Rows:
    """Of each state: name, iterations, finished, layout, size."""
    return [
        (
            state.path.name,
            ", ".join(map(str, state.iterations)) or "none",
            _finished(state),
            layout_text(state.record.layout) if state.record else NOT_RECORDED,
            size_text(state.bytes),
        )
        for state in states
    ]


def record_rows(state: StateFacts) -> Rows:
    """Names and values of one state's record."""
    record = state.record
    return [
        ("finished", _finished(state)),
        ("resumes from", value_text(state.pointer)),
        ("trained last under", layout_text(record.layout) if record else NOT_RECORDED),
        ("code", record.code_hash if record else NOT_RECORDED),
        ("changed code adopted", f"{len(record.adopted)} times" if record else NOT_RECORDED),
        ("size", size_text(state.bytes)),
    ]


def checkpoint_rows(checkpoints: Sequence[CheckpointFacts]) -> Rows:
    """Of each checkpoint of a state: iteration, size, layout, whether it is whole."""
    return [
        (
            f"{facts.iteration:,}",
            size_text(sum(facts.files.values())),
            layout_text(facts.scalar("arithmetic", "parallel")),
            verdict_text(facts),
        )
        for facts in checkpoints
    ]


def scalar_rows(facts: CheckpointFacts) -> Rows:
    """Names and values of what was saved beside the tensors."""
    consumed = facts.scalar("data", "consumed_samples")
    if consumed is None:
        consumed = facts.scalar("progress", "consumed_samples")
    versions = facts.scalar("versions")
    named = versions if isinstance(versions, Mapping) else {}
    told = [f"{name} {named[name]}" for name in _VERSIONS if name in named]
    values = {
        "consumed samples": consumed,
        "tokens seen": facts.scalar("tokens_seen"),
        "skipped steps": facts.scalar("progress", "skipped"),
        "optimizer step": facts.scalar("optimizer_step"),
        "loss scale": facts.scalar("loss_scale"),
        "rows of history": facts.scalar("metrics", "rows"),
        "device": facts.scalar("arithmetic", "device"),
        "attention": facts.scalar("arithmetic", "runtime.attention"),
        "deterministic": facts.scalar("arithmetic", "runtime.deterministic"),
        "git commit": facts.scalar("git_commit"),
    }
    return [
        ("iteration", f"{facts.iteration:,}"),
        ("saved under", layout_text(facts.scalar("arithmetic", "parallel"))),
        *((name, value_text(value)) for name, value in values.items()),
        ("versions", ", ".join(told) or NOT_RECORDED),
    ]


def config_rows(facts: CheckpointFacts) -> Rows:
    """The sections of the run configuration, each in one row; none where it is not recorded."""
    config = facts.scalar("run_config")
    if not isinstance(config, Mapping):
        return []
    return [(name, value_text(config[name])) for name in _SECTIONS if name in config]


def kind_rows(tensors: Sequence[TensorFacts]) -> Rows:
    """Of each kind of tensor: how many, number types, entries, size."""
    rows: Rows = []
    for kind in dict.fromkeys(tensor.kind for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.kind == kind]
        types = ", ".join(dict.fromkeys(tensor.dtype for tensor in group))
        entries = sum(math.prod(tensor.shape) for tensor in group)
        size = size_text(sum(tensor.bytes for tensor in group))
        rows.append((kind, str(len(group)), types, f"{entries:,}", size))
    return rows


def tensor_rows(tensors: Sequence[TensorFacts]) -> Rows:
    """Of each tensor: name, number type, shape, size."""
    return [(t.name, t.dtype, str(list(t.shape)), size_text(t.bytes)) for t in tensors]


def difference_rows(differences: Sequence[TensorDifference]) -> Rows:
    """Of each tensor that differs: name, in what, largest difference, the same relatively."""
    return [
        (
            tensor.name,
            f"{tensor.verdict} {tensor.detail}".strip(),
            *("" if each is None else f"{each:.3g}" for each in (tensor.absolute, tensor.relative)),
        )
        for tensor in differences
    ]


def change_rows(lines: Sequence[str]) -> Rows:
    """Lines of ``lib.checkpoint.fingerprint.difference`` as names and changes."""
    parts = [line.partition(": ") for line in lines]
    return [(name, change) for name, _, change in parts]


def verdict_text(facts: CheckpointFacts) -> str:
    """Whether a checkpoint is whole, and how sure that is."""
    if facts.damage:
        return f"DAMAGED: {'; '.join(facts.damage)}"
    if facts.is_hashed:
        return "verified, every sha256 is right"
    return "all there in their sizes, not hashed"


def layout_text(layout: object) -> str:
    """What is above 1 in a layout: ``tensor 2, data 2``."""
    if not isinstance(layout, Mapping) or not layout:
        return NOT_RECORDED
    above = [f"{name} {layout[name]}" for name in _DEGREES if layout.get(name, 1) != 1]
    return ", ".join(above) or "one process"


def value_text(value: object) -> str:
    """A value in one line, spelled as in params.yaml."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spelled(item)}" for name, item in value.items()) or "none"
    return NOT_RECORDED if value is None else _spelled(value)


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def size_text(count: int) -> str:
    """Bytes in the largest unit (of 1000) that leaves a whole digit."""
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:,.1f} {unit}"


def _finished(state: StateFacts) -> str:
    if state.record is None:
        return NOT_RECORDED
    return "yes" if state.record.finished else "no"
