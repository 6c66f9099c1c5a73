"""What a run may differ in from the weights that it starts from, and what it must name as new."""

import hashlib
import json
from pathlib import Path

import pytest

from lib.checkpoint.fingerprint import fingerprint
from lib.config.initial_weights import FileFacts, WeightsRecord, first_new_row
from lib.config.params_file import read_params
from lib.config.run_config import resolve_model
from lib.config.schema import ModelSection
from lib.errors import InvalidParams, UserError
from stages.validate_config import check_schema, summarise, validate
from tests.config.project_folder import ROOT, change, write_data

WORDS = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
OUTPUT = "output_layer.weight"
TOKENS = 4096


def write_tokenizer(path, count, shift=0):
    vocab = {f"t{number + shift}": number for number in range(count)}
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


def write_weights(folder, *, fingerprint="ff", vocab_size=TOKENS, tokens=None, **model):
    """A weights folder without real weights: its record is what counts here."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    if tokens is not None:
        write_tokenizer(folder / "tokenizer.json", tokens)
    section = read_params(Path("params.yaml")).section("model", ModelSection)
    record = WeightsRecord(
        model=resolve_model(section, 256).model_copy(update=model),
        vocab_size=vocab_size,
        tokenizer_fingerprint=fingerprint,
        source="a test",
        files={
            file.name: FileFacts(
                bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest()
            )
            for file in folder.iterdir()
            if file.name != "weights.json"
        },
    )
    (folder / "weights.json").write_text(record.model_dump_json())


PIN = hashlib.sha256(b"weights").hexdigest()[:16]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Parameters that start from ``initial``, data, and a tokenizer of 4096 tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text())
    write_data(tmp_path)
    write_tokenizer(Path("data/tokenizer/tokenizer.json"), TOKENS)
    change(tmp_path, "  initial_weights: null ", f"  initial_weights: initial@{PIN} ")
    change(tmp_path, "  format: huggingface ", "  format: none ")
    return tmp_path


def complaints():
    with pytest.raises(InvalidParams) as caught:
        validate(read_params(Path("params.yaml")))
    for problem in caught.value.problems:
        assert problem.where.startswith("params.yaml:")
        assert "\n" not in str(problem)
    return {problem.field: str(problem) for problem in caught.value.problems}


def initialize(project):
    change(project, "  new_parts: refuse ", "  new_parts: initialize ")
    return validate(read_params(Path("params.yaml")))


def test_the_same_model_needs_nothing_new(project, capsys):
    """Dropout, init_std and padding are the run's own."""
    write_weights(
        Path("initial"), hidden_dropout=0.1, attention_dropout=0.2, init_std=0.1, rope_theta=5.0,
        vocab_size_multiple=1,
    )  # fmt: skip
    config = validate(read_params(Path("params.yaml")))
    assert config.initial.folder == "initial"
    assert config.initial.sha256.startswith(PIN)
    assert config.initial.new_parts == ()
    summarise(config)
    assert "initial; new and random: nothing" in " ".join(capsys.readouterr().out.split())
    random = config.model_copy(update={"initial": type(config.initial)()})
    moved = config.initial.model_copy(update={"folder": "elsewhere"})
    assert fingerprint(config) != fingerprint(random)
    assert fingerprint(config) == fingerprint(config.model_copy(update={"initial": moved}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 96),
        ("num_attention_heads", 3),
        ("num_query_groups", 2),
        ("head_dim", 16),
        ("ffn_hidden_size", 100),
        ("position_embedding", "rope"),
        ("normalization", "rmsnorm"),
        ("norm_epsilon", 1e-6),
        ("activation", "swiglu"),
        ("bias", False),
        ("qkv_bias", False),
        ("qk_norm", True),
        ("tie_embeddings", False),
        ("num_layers", 6),
        ("max_position_embeddings", 512),
    ],
)
def test_another_kind_of_model_is_refused_by_its_field(project, field, value):
    """Also fewer layers and fewer positions: nothing that is given is thrown away."""
    write_weights(Path("initial"), **{field: value})
    found = complaints()
    change(project, "  new_parts: refuse ", "  new_parts: initialize ")
    assert complaints() == found
    assert list(found) == [f"model.{field}"]
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    assert f"the weights in initial have {shown}" in found[f"model.{field}"]
    assert f"write {shown}" in found[f"model.{field}"]


def test_rope_has_a_base_and_no_table_of_positions(project):
    change(project, "position_embedding: learned ", "position_embedding: rope ")
    write_weights(Path("initial"), max_position_embeddings=32)
    assert validate(read_params(Path("params.yaml"))).initial.new_parts == ()
    write_weights(Path("initial"), rope_theta=5e5)
    assert list(complaints()) == ["model.rope_theta"]


def test_a_larger_model_is_refused_or_its_new_parts_are_named(project):
    write_weights(Path("initial"), num_layers=2, max_position_embeddings=128)
    found = complaints()
    assert list(found) == ["model.num_layers", "model.max_position_embeddings"]
    assert "so layers.2, layers.3 would be new and random" in found["model.num_layers"]
    assert f"{POSITIONS}[128:256] would be new" in found["model.max_position_embeddings"]
    assert "write 2, or training.new_parts: initialize" in found["model.num_layers"]
    parts = initialize(project).initial.new_parts
    assert parts == ("layers.2", "layers.3", f"{POSITIONS}[128:256]")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ({}, TOKENS),
        ({"fingerprint": "ff", "vocab_size": 4000}, 4000),
        ({"fingerprint": "ee", "tokens": TOKENS}, TOKENS),
        ({"fingerprint": "ee", "tokens": 4000, "vocab_size": 4000}, 4000),
        ({"fingerprint": "ee", "tokens": 4000, "vocab_size": 4050}, 0),
        ({"fingerprint": "ee", "tokens": 5000, "vocab_size": 5000}, 0),
        ({"fingerprint": "ee"}, 0),
        ({"fingerprint": None}, TOKENS),
        ({"fingerprint": None, "vocab_size": 4000}, 0),
    ],
)
def test_rows_stay_where_ids_mean_the_same_tokens(project, capsys, known, kept, tied):
    change(project, "tie_embeddings: true ", f"tie_embeddings: {str(tied).lower()} ")
    write_weights(Path("initial"), **known)
    unknown = known == {"fingerprint": None}
    if kept < TOKENS:
        found = complaints()
        assert list(found) == ["training.initial_weights"]
        said = f"the first {kept} are" if kept else "none are"
        assert said in found["training.initial_weights"]
        assert f"{WORDS}[{kept}:4096]" in found["training.initial_weights"]
    parts = initialize(project).initial.new_parts
    tables = (WORDS,) if tied else (WORDS, OUTPUT)
    assert parts == (() if kept == TOKENS else tuple(f"{t}[{kept}:4096]" for t in tables))
    assert ("had no tokenizer.json" in capsys.readouterr().err) == unknown


def test_another_tokenizer_of_the_same_size_is_noticed(project):
    write_tokenizer(Path("data/tokenizer/tokenizer.json"), TOKENS, shift=1)
    write_weights(Path("initial"), fingerprint="ee", tokens=TOKENS)
    assert "none are the same" in complaints()["training.initial_weights"]


def test_other_weights_than_those_named_are_refused(project):
    write_weights(Path("initial"))
    change(project, f"initial@{PIN}", f"initial@{'0' * 16}")
    found = complaints()
    assert f"write initial@{PIN} to start from these" in found["training.initial_weights"]


@pytest.mark.parametrize(
    "value", ["initial", "initial@", "initial@0123", "initial@xx3456789abcdef"]
)
def test_a_folder_without_a_checksum_is_refused(project, value):
    change(project, f"initial@{PIN}", value)
    assert "must be FOLDER@SHA256" in complaints()["training.initial_weights"]


def test_a_missing_or_damaged_folder_is_told_without_data_too(project):
    with pytest.raises(InvalidParams, match=r"initial/weights.json: no such file"):
        check_schema(read_params(Path("params.yaml")))
    for file, complaint in (
        ("model.safetensors", r"model.safetensors: no such file"),
        ("tokenizer.json", r"tokenizer.json: has another sha256"),
        ("weights.json", r"weights.json: model.num_layers"),
    ):
        write_weights(Path("initial"), tokens=TOKENS)
        path = Path("initial") / file
        data = path.read_bytes()
        path.unlink()
        if file == "tokenizer.json":
            path.write_bytes(data.replace(b"t17", b"t71"))
        if file == "weights.json":
            path.write_bytes(data.replace(b'"num_layers":4', b'"num_layers":0'))
        with pytest.raises(UserError, match=complaint):
            validate(read_params(Path("params.yaml")))
        path.write_bytes(data)


def test_a_temporary_experiment_finds_the_folder_of_the_project(project, monkeypatch):
    """DVC copies tracked files alone into the folder of an experiment."""
    write_weights(project / "initial")
    (project / "copy").mkdir()
    for name in ("params.yaml", "data"):
        (project / "copy" / name).symlink_to(project / name)
    monkeypatch.setenv("DVC_ROOT", str(project))
    monkeypatch.chdir(project / "copy")
    assert validate(read_params(Path("params.yaml"))).initial.folder == "initial"


def test_the_parts_say_of_each_parameter_what_is_new():
    parts = ["layers.1", f"{POSITIONS}[32:64]", f"{WORDS}[0:9]"]
    expected = {
        "layers.1.mlp.linear_fc2.weight": 0,
        "layers.10.mlp.linear_fc2.weight": None,
        "layers.0.mlp.linear_fc2.weight": None,
        POSITIONS: 32,
        WORDS: 0,
        OUTPUT: None,
    }
    assert {name: first_new_row(name, parts) for name in expected} == expected
