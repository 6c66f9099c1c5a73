"""Exports of models from several layouts: the same bytes as from none, padding rows cut."""

import pytest

from lib.checkpoint.shapes import parameter_shapes
from lib.data.tokenizer import save_tokenizer
from lib.errors import UserError
from lib.model.initialization import initial_value
from tests.checkpoint.examples import run_config
from tests.checkpoint.export_models import (
    FINGERPRINT,
    configuration,
    contents,
    export,
    publish,
    save_initial,
)
from tests.data.tiny_tokenizer import train
from tests.distributed import run_on_ranks

# 301 ids in 384 rows: both tensor ranks hold rows that the vocabulary has not.
LAYOUTS = {"tensor": (2, 1), "pipeline": (1, 2)}
UNTIED = {"tie_embeddings": False, "num_query_groups": 2, "position_embedding": "rope"}
UNTIED |= {"normalization": "rmsnorm", "activation": "swiglu", "bias": False, "qkv_bias": True}


def with_layout(config, layout):
    degrees = dict(zip(("tensor", "pipeline"), layout, strict=True))
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=degrees)})


def test_every_layout_gives_the_same_files(tmp_path):
    """Checkpoints of tensor and of pipeline ranks, and the published model, by one export."""
    tokenizer = train(vocab_size=301)
    save_tokenizer(tmp_path / "tokenizer", tokenizer)
    shape = run_config().model
    models = {"tied": shape, "untied": shape.model_copy(update=UNTIED)}
    configs = {name: configuration(model, tokenizer) for name, model in models.items()}
    states = {
        (name, layout): tmp_path / name / layout / FINGERPRINT
        for name in models
        for layout in LAYOUTS
    }
    jobs = [
        (with_layout(configs[name], LAYOUTS[layout]).model_dump_json(), state)
        for (name, layout), state in states.items()
    ]
    run_on_ranks(2, save_initial, jobs)
    for name, config in configs.items():
        tensors = {
            key: initial_value(key, shape, config.model, vocab_size=301, seed=1)
            for key, shape in parameter_shapes(config.model, 301).items()
        }
        model = publish(tmp_path / name, config, tensors, tokenizer)
        export(model, tmp_path / name / "expected")
        expected = contents(tmp_path / name / "expected")
        assert b'"vocab_size": 301' in expected["config.json"]
        for layout in LAYOUTS:
            checkpoint = states[name, layout] / "iter_0000001"
            output = tmp_path / name / f"from_{layout}"
            export(checkpoint, output, tokenizer=tmp_path / "tokenizer")
            assert contents(output) == expected, layout

    damaged = checkpoint / "state.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"c0ffee", b"coffee"))
    with pytest.raises(UserError, match=r"is damaged: state\.json has another sha256"):
        export(checkpoint, output, tokenizer=tmp_path / "tokenizer")
    assert contents(output) == expected, "a failure leaves the old export"
