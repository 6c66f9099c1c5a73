"""The published model: whole or absent, plain to read, and consistent with its configuration."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from lib.checkpoint.published import publish_model, read_model
from lib.checkpoint.shapes import parameter_shapes
from lib.config.run_config import count_parameters
from lib.errors import UserError
from tests.checkpoint.examples import run_config


def weights(config):
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(config.model, config.data.vocab_size)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def surroundings(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "tokenizer" / "tokenizer_info.json").write_text('{"format": 1}')
    (tmp_path / "train.log").write_text("line\n")
    return tmp_path


def publish(root, config=None, tensors=None):
    config = config or run_config()
    publish_model(
        root / "model",
        weights(config) if tensors is None else tensors,
        config,
        root / "tokenizer",
        {"command": ["python"], "versions": {"torch": torch.__version__}},
        root / "train.log",
    )


def test_round_trip(surroundings):
    config = run_config()
    publish(surroundings, config)
    model = surroundings / "model"
    assert {path.name for path in model.iterdir()} == {
        "model.safetensors",
        "run_config.json",
        "tokenizer.json",
        "tokenizer_info.json",
        "run_record.json",
        "train.log",
    }
    read_config, tensors = read_model(model)
    assert read_config == config
    assert tensors.keys() == weights(config).keys()
    assert all(torch.equal(tensors[name], each) for name, each in weights(config).items())
    assert json.loads((model / "run_record.json").read_text())["command"] == ["python"]
    assert (model / "train.log").read_text() == "line\n"
    with safe_open(model / "model.safetensors", "pt") as file:
        assert file.get_tensor("embedding.word_embeddings.weight").shape == (19, 8)


def test_the_same_model_has_the_same_bytes(surroundings):
    contents = []
    for _ in range(2):
        publish(surroundings)
        contents.append((surroundings / "model" / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_a_failure_leaves_the_old_model(surroundings):
    publish(surroundings)
    before = {p.name: p.read_bytes() for p in (surroundings / "model").iterdir()}
    (surroundings / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="could not be written"):
        publish(surroundings)
    assert {p.name: p.read_bytes() for p in (surroundings / "model").iterdir()} == before
    assert not (surroundings / "model.partial").exists()


def test_padding_rows_or_other_types_are_never_published(surroundings):
    for name, tensor in (
        ("embedding.word_embeddings.weight", torch.zeros(128, 8)),
        ("final_layernorm.weight", torch.zeros(8, dtype=torch.bfloat16)),
    ):
        with pytest.raises(AssertionError):
            publish(surroundings, tensors=weights(run_config()) | {name: tensor})
    assert not (surroundings / "model").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"extra": torch.zeros(2)}, "extra is unknown"),
        ({"final_layernorm.bias": None}, "final_layernorm.bias is missing"),
        ({"final_layernorm.bias": torch.zeros(9)}, r"has shape \(9,\) instead of \(8,\)"),
        ({"final_layernorm.bias": torch.zeros(8).half()}, "float16 instead of"),
        ({"embedding.word_embeddings.weight": torch.zeros(128, 8)}, r"\(128, 8\) instead of"),
    ],
)
def test_weights_that_do_not_fit_are_named_in_one_error(surroundings, change, complaint):
    publish(surroundings)
    tensors = weights(run_config()) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, surroundings / "model" / "model.safetensors")
    with pytest.raises(UserError, match=complaint):
        read_model(surroundings / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "run_config.json"])
def test_missing_and_damaged_files(surroundings, name):
    publish(surroundings)
    path = surroundings / "model" / name
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=name):
        read_model(surroundings / "model")
    path.unlink()
    with pytest.raises(UserError, match="holds no finished model"):
        read_model(surroundings / "model")


@given(
    position=st.sampled_from(["learned", "rope"]),
    normalization=st.sampled_from(["layernorm", "rmsnorm"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    flags=st.tuples(*[st.booleans()] * 4),
    groups=st.sampled_from([1, 2, 4]),
)
def test_shapes_add_up_to_the_number_of_parameters(
    position, normalization, activation, flags, groups
):
    """Two independent counts: from the list of shapes, and by the formula of lib.config."""
    config = run_config(
        model__position_embedding=position,
        model__normalization=normalization,
        model__activation=activation,
        model__bias=flags[0],
        model__qkv_bias=flags[1],
        model__qk_norm=flags[2],
        model__tie_embeddings=flags[3],
        model__num_query_groups=groups,
        model__head_dim=6,
    )
    shapes = parameter_shapes(config.model, 19)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert total == count_parameters(config.model, 19)
