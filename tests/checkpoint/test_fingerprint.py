"""Each field of a run configuration makes another run or does not, as docs/checkpoints.md says.

The table there is written by hand; here every field is changed alone, to another legal value that
is made from its type, so that a new field is tried as soon as it exists, or fails for want of a
row in the table.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from lib.checkpoint.fingerprint import (
    NOT_TRAJECTORY,
    TRAJECTORY,
    code_hash,
    difference,
    fingerprint,
    fingerprint_parts,
    general_name,
    is_trajectory,
    leaves,
)
from lib.checkpoint.resume import RECORD, ResumePolicy, open_state
from lib.config.run_config import RunConfig
from lib.data.order import SampleOrder
from lib.errors import UserError
from lib.optim.lr_schedule import LearningRate
from tests.checkpoint.examples import run_config, two_phases

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
_ROW = re.compile(r"^\| `([a-z0-9_.*]+)` \| (another run|continues) \|", re.MULTILINE)
# A run that reads every field: wsd and a moving loss scale, started from given weights, two corpora
# in two phases.
BASE = two_phases(
    schedule__decay="wsd",
    schedule__wsd_decay_samples=32,
    precision__compute="fp16",
    initial={"folder": "initial", "sha256": "ab" * 32, "new_parts": ["layers.1"]},
)
_NEAR = {
    NoneType: lambda _value: (None,),
    bool: lambda value: (not value,),
    int: lambda value: ((value or 0) + 1, (value or 0) - 1),
    float: lambda value: ((value or 1.0) / 2, 0.5),
    str: lambda value: (f"{value or ''}x", "80,10,10"),
}


def values(config: RunConfig) -> dict[str, object]:
    return dict(leaves(config.model_dump(mode="json")))


# One field of each kind: of the last corpus, and of the second phase.
FIELDS = {general_name(name): name for name in values(BASE)}


def documented() -> list[tuple[str, str]]:
    return _ROW.findall(DOCUMENT.read_text())


def documented_kind(name: str) -> str:
    """What the table says of a field; a row may stand for all fields below a name."""
    general = f"{general_name(name)}."
    kinds = [kind for row, kind in documented() if general.startswith(f"{row}.")]
    assert len(kinds) == 1, f"{name} must be in one row of {DOCUMENT.name}, it is in {len(kinds)}"
    return kinds[0]


def annotation_of(name: str) -> object:
    kind: object = RunConfig
    for part in name.split("."):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[part].annotation
        else:
            kind = get_args(kind)[0 if get_origin(kind) is tuple else 1]
    return kind


def candidates(kind: object, value: object) -> Iterator[object]:
    """Values of a type near a given one; some may break a rule of their field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for option in arguments:
            yield from candidates(option, value)
    elif origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from candidates(arguments[0], value)
    elif origin is tuple:
        old = list(value or [])
        for new in candidates(arguments[0], old[0] if old else None):
            yield [new, *old[1:]]
    elif kind in _NEAR:
        yield from _NEAR[kind](value)


def varied(name: str) -> RunConfig:
    """The base with another value of one field."""
    before = values(BASE)
    for value in candidates(annotation_of(name), before[name]):
        tree = BASE.model_dump(mode="json")
        below = tree
        for part in name.split(".")[:-1]:
            below = below[int(part) if isinstance(below, list) else part]
        below[name.rpartition(".")[2]] = value
        try:
            config = RunConfig.model_validate(tree)
        except ValidationError:
            continue
        if values(config)[name] != before[name]:
            return config
    pytest.fail(f"no other value of {name} could be made: extend candidates() by its type")


def fields_of(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_the_documented_table_is_that_of_the_code():
    names = values(BASE)
    for name in names:
        assert is_trajectory(name) == (documented_kind(name) == "another run"), name
    for row, _ in documented():
        assert any(f"{name}.".startswith(f"{row}.") for name in FIELDS), f"there is no {row}"


@pytest.mark.parametrize("name", FIELDS.values())
def test_a_field_makes_another_run_or_continues(tmp_path, name):
    after = varied(name)
    assert fields_of(difference(BASE.model_dump(mode="json"), after.model_dump(mode="json"))) == [
        name
    ]
    first = open_state(tmp_path, BASE, "code", ResumePolicy())
    first.mark_training({})
    (first.path / "iter_0000100").mkdir()
    second = open_state(tmp_path, after, "code", ResumePolicy())
    if documented_kind(name) == "continues":
        assert fingerprint(after) == fingerprint(BASE)
        assert (second.outcome, second.path) == ("continued", first.path)
        assert (second.path / "iter_0000100").is_dir()
        return
    assert second.outcome == "new"
    assert [path.name for path in second.path.iterdir()] == [RECORD]
    shutil.copy(second.path / RECORD, first.path / RECORD)
    with pytest.raises(UserError, match="another configuration") as refusal:
        open_state(tmp_path, BASE, "code", ResumePolicy())
    for line in difference(fingerprint_parts(after), fingerprint_parts(BASE)):
        assert line in str(refusal.value)
    assert name in fields_of(difference(fingerprint_parts(BASE), fingerprint_parts(after)))
    assert (first.path / "iter_0000100").is_dir()


def test_the_lists_name_nothing_that_does_not_exist():
    for entry in TRAJECTORY | NOT_TRAJECTORY:
        assert any(f"{name}.".startswith(f"{entry}.") for name in FIELDS), entry


def test_an_unlisted_field_is_an_error():
    with pytest.raises(AssertionError, match=r"training\.new"):
        is_trajectory("training.new")


def test_random_weights_leave_no_trace_in_the_fingerprint():
    assert "initial" not in fingerprint_parts(run_config())


def read_first(config: RunConfig, count: int = 300) -> list[tuple[str, int]]:
    """The corpus and the sample of each of the first positions."""
    order = SampleOrder.of_phases(config.data.phases, config.training.seed)
    found = order.samples_at(np.arange(count))
    return [(order.names[c], k) for c, k in zip(*map(np.ndarray.tolist, found), strict=True)]


def test_a_corpus_that_is_not_drawn_from_changes_nothing():
    plain, beside = run_config(), two_phases().model_dump(mode="json")["data"]
    measured = run_config(data__corpora=beside["corpora"], data__validation=["web"])
    weightless = beside["phases"][0]
    weightless["weights"] = {"web": 0.0, "stdlib": 3.0}
    for config in (
        measured,
        run_config(data__corpora=beside["corpora"], data__phases=[weightless]),
    ):
        assert fingerprint(config) == fingerprint(plain)
        assert read_first(config) == read_first(plain)


def test_the_run_before_a_phase_is_the_run_that_never_had_it():
    later = two_phases(data__phases__0__weights={"stdlib": 168.0, "web": 0.0})
    before = later.before_phase(1)
    assert fingerprint(before) == fingerprint(run_config()) != fingerprint(later)
    assert read_first(before) == read_first(run_config()) != read_first(later)
    assert read_first(before, 40) == read_first(later, 40)
    assert (before.longest_seq_length, later.longest_seq_length) == (16, 32)


def test_only_learned_positions_have_a_length_that_counts():
    lengths = [
        [
            fingerprint(
                run_config(model__position_embedding=kind, model__max_position_embeddings=n)
            )
            for n in (16, 32)
        ]
        for kind in ("learned", "rope")
    ]
    assert [first == second for first, second in lengths] == [False, True]


@pytest.mark.parametrize(
    ("decay", "field", "value", "counts"),
    [
        ("constant", "decay_samples", 160, False),
        ("constant", "min_lr", 0.0, False),
        ("constant", "warmup_samples", 4, True),
        ("linear", "decay_samples", 160, True),
        ("linear", "wsd_decay_samples", 16, False),
        ("wsd", "wsd_decay_samples", 16, True),
        ("wsd", "wsd_style", "cosine", True),
        ("wsd", "decay_samples", 160, True),
    ],
)
def test_schedule_fields_count_where_the_learning_rate_reads_them(decay, field, value, counts):
    base = {"schedule__decay": decay, "schedule__wsd_decay_samples": 32}
    before, after = run_config(**base), run_config(**{**base, f"schedule__{field}": value})
    assert (fingerprint(before) != fingerprint(after)) == counts
    curves = [
        [LearningRate(max_lr=1e-3, **config.schedule.model_dump()).at(n, 4) for n in range(200)]
        for config in (before, after)
    ]
    assert (curves[0] != curves[1]) == counts


LOSS_SCALE_FIELDS = {
    "loss_scale": 1024.0,
    "initial_loss_scale": 1024.0,
    "min_loss_scale": 2.0,
    "loss_scale_window": 100,
    "loss_scale_hysteresis": 1,
}


@pytest.mark.parametrize(
    ("compute", "scale", "reads"),
    [
        ("fp32", None, set()),
        ("bf16", None, set()),
        ("fp64", None, set()),
        ("fp16", 512.0, {"loss_scale"}),
        ("fp16", None, set(LOSS_SCALE_FIELDS)),
    ],
)
def test_loss_scale_fields_count_where_the_number_type_reads_them(compute, scale, reads):
    base = {"precision__compute": compute, "precision__loss_scale": scale}
    before = fingerprint(run_config(**base))
    for field, value in LOSS_SCALE_FIELDS.items():
        after = fingerprint(run_config(**{**base, f"precision__{field}": value}))
        assert (after != before) == (field in reads), field


def test_it_is_the_same_in_another_process():
    program = (
        "from tests.checkpoint.examples import run_config\n"
        "from lib.checkpoint.fingerprint import fingerprint\n"
        "import sys\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.write(fingerprint(run_config()))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == fingerprint(run_config())
    assert len(output) == 16


def test_difference_names_absent_fields():
    assert difference({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}}) == [
        "a: 1 -> '(absent)'",
        "b.c: 2 -> 3",
        "b.d: '(absent)' -> 4",
    ]


def tree(root: Path) -> list[Path]:
    """A small project; gives its code's paths relative to it."""
    (root / "train" / "inner").mkdir(parents=True)
    (root / "train" / "loop.py").write_text("a = 1\n")
    (root / "train" / "inner" / "x.py").write_text("")
    (root / "pretrain.py").write_text("b = 2\n")
    return [Path("train"), Path("pretrain.py")]


def test_code_hash_sees_contents_and_names_only(tmp_path, monkeypatch):
    paths = tree(tmp_path / "one")
    tree(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    elsewhere = code_hash(paths)
    monkeypatch.chdir(tmp_path / "one")
    before = code_hash(paths)
    assert before == elsewhere
    assert before == code_hash(paths[::-1])
    assert before == code_hash([*paths, Path("train/loop.py")]), "a file named twice counts once"

    Path("train/__pycache__").mkdir()
    Path("train/__pycache__/loop.cpython-311.pyc").write_bytes(b"\0")
    Path("train/notes.txt").write_text("x")
    assert code_hash(paths) == before

    Path("train/loop.py").write_text("a = 2\n")
    assert code_hash(paths) != before
    Path("train/loop.py").write_text("a = 1\n")
    assert code_hash(paths) == before
    Path("train/loop.py").rename("train/pool.py")
    assert code_hash(paths) != before


def test_code_hash_cannot_be_fooled_by_moving_bytes_between_files(tmp_path, monkeypatch):
    hashes = []
    for name, parts in (("one", ("ab", "c")), ("two", ("a", "bc"))):
        (tmp_path / name / "lib").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        for file, text in zip("xy", parts, strict=True):
            Path(f"lib/{file}.py").write_text(text)
        hashes.append(code_hash([Path("lib")]))
    assert hashes[0] != hashes[1]
