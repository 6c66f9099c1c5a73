"""Each field of a run configuration either changes the fingerprint or provably does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from lib.checkpoint.fingerprint import (
    NOT_TRAJECTORY,
    TRAJECTORY,
    code_hash,
    difference,
    fingerprint,
    fingerprint_parts,
    is_trajectory,
    leaves,
)
from lib.optim.lr_schedule import LearningRate
from tests.checkpoint.examples import run_config

# Written out by hand, apart from the lists in lib: what changes the weights, and what must not.
CHANGES = {
    "model.num_layers": 3,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.num_query_groups": 2,
    "model.head_dim": 4,
    "model.ffn_hidden_size": 16,
    "model.max_position_embeddings": 32,
    "model.position_embedding": "rope",
    "model.rope_theta": 500000.0,
    "model.normalization": "rmsnorm",
    "model.norm_epsilon": 1e-6,
    "model.activation": "swiglu",
    "model.bias": False,
    "model.qkv_bias": False,
    "model.qk_norm": True,
    "model.tie_embeddings": False,
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "model.init_std": 0.01,
    "model.vocab_size_multiple": 64,
    "precision.compute": "bf16",
    "optimizer.lr": 2e-3,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.5,
    "schedule.decay": "linear",
    "schedule.min_lr": 0.0,
    "schedule.warmup_samples": 4,
    "schedule.decay_samples": 160,
    "training.seed": 2,
    "training.seq_length": 8,
    "training.global_batch_size": 8,
    "training.rampup_start_batch_size": 2,
    "training.rampup_increment": 2,
    "training.rampup_samples": 8,
    "training.label_smoothing": 0.1,
    "training.z_loss": 1e-4,
    "training.split": "80,10,10",
    "data.tokens_sha256": "ef" * 32,
    "data.tokenizer_fingerprint": "ef" * 32,
    "data.vocab_size": 20,
    "data.eod_id": 1,
    "data.dtype": "int32",
    "data.documents": 31,
    "data.tokens": 3001,
    "data.splits.train.documents": [0, 26],
    "data.splits.train.tokens": 2701,
    "data.splits.train.samples": 167,
    "data.splits.valid.documents": [26, 28],
    "data.splits.valid.tokens": 151,
    "data.splits.valid.samples": 8,
    "data.splits.test.documents": [27, 30],
    "data.splits.test.tokens": 151,
    "data.splits.test.samples": 8,
}
KEEPS = {
    "parallel.tensor": 2,
    "parallel.pipeline": 2,
    "parallel.data": 2,
    "parallel.sequence": True,
    "parallel.virtual_stages": 2,
    "parallel.layers_per_chunk": [1, 1],
    "parallel.sharding": "parameters",
    "parallel.data_shard": 2,
    "training.micro_batch_size": 4,
    "training.eval_interval": 5,
    "training.eval_iters": 3,
    "training.train_iters": 40,
    "training.train_samples": 160,
    "checkpoint.save_interval": 7,
    "checkpoint.keep_last": 3,
    "checkpoint.keep_every": 10,
    "data.prefix": "elsewhere/corpus",
    "derived.padded_vocab_size": 256,
    "derived.num_parameters": 2000,
    "derived.tokens_per_step": 128,
    "derived.train_tokens": 2560,
    "derived.epochs": 1.5,
    # Not read by a cosine schedule; tested below with the one that reads them.
    "schedule.wsd_style": "cosine",
    "schedule.wsd_decay_samples": 8,
    # Not read by fp32; tested below with fp16, which reads them.
    "precision.loss_scale": 1024.0,
    "precision.initial_loss_scale": 1024.0,
    "precision.min_loss_scale": 2.0,
    "precision.loss_scale_window": 100,
    "precision.loss_scale_hysteresis": 1,
}


def varied(name, value):
    return run_config(**{name.replace(".", "__"): value})


def test_every_field_is_in_exactly_one_table():
    names = {name for name, _ in leaves(run_config().model_dump(mode="json"))}
    assert names == CHANGES.keys() | KEEPS.keys()
    assert not CHANGES.keys() & KEEPS.keys()
    for name in names:
        is_trajectory(name)  # raises for a field in neither list or in both


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_of_the_trajectory_changes_the_fingerprint(name):
    before, after = run_config(), varied(name, CHANGES[name])
    assert fingerprint(before) != fingerprint(after)
    lines = difference(fingerprint_parts(before), fingerprint_parts(after))
    assert [line.split(":")[0] for line in lines] == [name]


@pytest.mark.parametrize("name", KEEPS)
def test_other_fields_do_not(name):
    before, after = run_config(), varied(name, KEEPS[name])
    assert before != after
    assert fingerprint(before) == fingerprint(after)
    assert difference(fingerprint_parts(before), fingerprint_parts(after)) == []


def test_the_lists_name_nothing_that_does_not_exist():
    names = {name for name, _ in leaves(run_config().model_dump(mode="json"))}
    for entry in TRAJECTORY | NOT_TRAJECTORY:
        assert any(f"{name}.".startswith(f"{entry}.") for name in names), entry


def test_an_unlisted_field_is_an_error():
    with pytest.raises(AssertionError, match=r"training\.new"):
        is_trajectory("training.new")


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


@pytest.mark.parametrize(
    ("compute", "scale", "reads"),
    [
        ("fp32", None, set()),
        ("bf16", None, set()),
        ("fp64", None, set()),
        ("fp16", 512.0, {"loss_scale"}),
        (
            "fp16",
            None,
            {
                "loss_scale",
                "initial_loss_scale",
                "min_loss_scale",
                "loss_scale_window",
                "loss_scale_hysteresis",
            },
        ),
    ],
)
def test_loss_scale_fields_count_where_the_number_type_reads_them(compute, scale, reads):
    base = {"precision__compute": compute, "precision__loss_scale": scale}
    before = fingerprint(run_config(**base))
    for name in KEEPS:
        section, _, field = name.partition(".")
        if section == "precision":
            after = fingerprint(run_config(**{**base, f"precision__{field}": KEEPS[name]}))
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
