"""The reference models have the sizes that figures are given for, and layouts that fit."""

from dataclasses import replace

import pytest

from lib.checkpoint.shapes import parameter_shapes
from lib.config.schema import ParallelConfig
from lib.errors import InvalidParams, UserError
from lib.workflow.shapes import REFERENCES, fitted, measured_run, usual_layouts

H200 = 150_000_000_000
ONE = ParallelConfig(data=1)


def llama_size(layers, hidden, wide, vocab):
    """Four attention matrices, three of the MLP, two norms a layer; a norm, two tables."""
    return layers * (4 * hidden**2 + 3 * hidden * wide + 2 * hidden) + hidden + 2 * vocab * hidden


@pytest.mark.parametrize(
    ("name", "expected", "billions"),
    [
        ("125m", 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768, 0.12),
        ("1.4b", llama_size(24, 2048, 5504, 50304), 1.42),
        ("7b", llama_size(32, 4096, 11008, 50304), 6.89),
    ],
)
def test_sizes(name, expected, billions):
    shape = REFERENCES[name]
    assert shape.num_parameters() == expected
    assert round(expected / 1e9, 2) == billions
    shapes = parameter_shapes(shape.resolved(), shape.vocab_size).values()
    assert sum(rows * (columns or [1])[0] for rows, *columns in shapes) == expected
    assert shape.resolved().head_dim == (64 if name == "125m" else 128)


def test_micro_batches_shrink_until_they_fit():
    seven, two = REFERENCES["7b"], ParallelConfig(data=2)
    assert fitted(seven, two, H200).micro_batch_size == 2
    assert fitted(seven, ONE, H200).micro_batch_size == 1
    assert fitted(seven, ONE, 80_000_000_000) is None


def test_usual_layouts():
    assert [
        (s.micro_batch_size, x.data) for s, x in usual_layouts(REFERENCES["1.4b"], 1, H200)
    ] == [(8, 1)]
    found = [x for _, x in usual_layouts(REFERENCES["1.4b"], 4, H200)]
    assert found == [ONE, ParallelConfig(data=4)]
    # Four of 40 GB hold no copies of this model; what is left are layers cut over all four.
    found = [x for _, x in usual_layouts(REFERENCES["7b"], 4, 40_000_000_000)]
    assert found == [ParallelConfig(tensor=4, sequence=True, data=1)]
    assert usual_layouts(REFERENCES["7b"], 1, 16_000_000_000) == []


def test_a_measured_run_keeps_the_micro_batches_of_each_copy():
    run = measured_run(REFERENCES["1.4b"], ParallelConfig(tensor=2, data=3), "bf16")
    assert run.training.global_batch_size == 3 * 4 * 8
    assert run.precision.compute == "bf16"
    assert run.schedule.decay == "constant"


def test_a_layout_that_cannot_divide_the_model_is_refused():
    with pytest.raises(InvalidParams, match="num_attention_heads"):
        measured_run(REFERENCES["125m"], ParallelConfig(tensor=5, data=1), "fp32")
    with pytest.raises(UserError, match="virtual_stages"):
        measured_run(
            replace(REFERENCES["125m"], micro_batches=3),
            ParallelConfig(virtual_stages=2, data=1),
            "fp32",
        )
