"""Each rule on the layout: what it accepts, what it refuses, and which legal values it names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import layout_rules as rules
from tests.config.sections import launch, model, only, parallel, training


@pytest.mark.parametrize(
    ("keys", "tensor", "start", "remedy"),
    [
        ({"num_attention_heads": 3}, 2, "num_attention_heads = 3", "nearest: 2 or 4"),
        ({"ffn_hidden_size": 63}, 2, "ffn_hidden_size = 63", "nearest: 62 or 64"),
        (
            {"num_attention_heads": 6, "hidden_size": 30, "activation": "swiglu"},
            3,
            "ffn_hidden_size = null (128, from hidden_size)",
            "nearest: 126 or 129; or parallel.tensor: 2 or 4",
        ),
    ],
)
def test_layers_divide_by_tensor(
    keys: dict[str, Any], tensor: int, start: str, remedy: str
) -> None:
    found = only(rules.layers_divide_by_tensor(model(**keys), parallel(tensor=tensor)))
    assert found.startswith(f"model.{start}: must be divisible by parallel.tensor = {tensor}")
    assert remedy in found
    assert not list(rules.layers_divide_by_tensor(model(**keys), parallel(tensor=1)))


def test_vocabulary_divides_by_tensor() -> None:
    rule = rules.vocabulary_divides_by_tensor
    shape = model(vocab_size_multiple=64)
    assert not list(rule(shape, parallel(tensor=3), 150))  # 192 rows
    assert only(rule(shape, parallel(tensor=3), 200)) == (
        "model.vocab_size_multiple = 64: pads the vocabulary of 200 tokens to 256 rows, which "
        "must be divisible by parallel.tensor = 3; nearest: 63 or 66; or parallel.tensor: 2 or 4"
    )
    for remedy in (63, 66):
        assert not list(rule(model(vocab_size_multiple=remedy), parallel(tensor=3), 200))


@pytest.mark.parametrize(
    ("groups", "tensor", "is_sound"),
    [(1, 2, True), (2, 4, True), (4, 2, True), (3, 2, False), (2, 3, False), (6, 4, False)],
)
def test_query_groups_divide_by_tensor(groups: int, tensor: int, is_sound: bool) -> None:
    shape = model(num_query_groups=groups, num_attention_heads=12)
    found = list(rules.query_groups_divide_by_tensor(shape, parallel(tensor=tensor)))
    assert (not found) == is_sound


def test_query_groups_that_are_named_are_legal() -> None:
    shape = model(num_query_groups=6, num_attention_heads=12)
    found = only(rules.query_groups_divide_by_tensor(shape, parallel(tensor=4)))
    assert found.endswith("divisor of parallel.tensor = 4; nearest: 4 or 12")


def test_sequence_parallelism_needs_tensor() -> None:
    rule = rules.sequence_parallelism_needs_tensor
    assert not list(rule(parallel()))
    assert not list(rule(parallel(sequence=True, tensor=2)))
    found = only(rule(parallel(sequence=True)))
    assert found.startswith("parallel.sequence = true: needs parallel.tensor above 1")
    assert "write false" in found


def test_sequence_divides_by_tensor() -> None:
    """B22: refused with the numbers, and only where the sequence is cut."""
    rule = rules.sequence_divides_by_tensor
    odd = training(seq_length=15)
    assert not list(rule(odd, parallel(tensor=2)))
    assert not list(rule(training(), parallel(tensor=2, sequence=True)))
    assert only(rule(odd, parallel(tensor=2, sequence=True))) == (
        "training.seq_length = 15: must be divisible by parallel.tensor = 2 with "
        "parallel.sequence: true; nearest: 14 or 16; or parallel.sequence: false"
    )


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "start", "remedy"),
    [
        (2, 3, 1, "parallel.pipeline = 3", "write 2 or less, or num_layers: 3 or more"),
        (7, 4, 2, "parallel.virtual_stages = 2", "write 1 or less, or num_layers: 8 or more"),
        (9, 2, 5, "parallel.virtual_stages = 5", "write 4 or less, or num_layers: 10 or more"),
    ],
)
def test_every_chunk_has_a_layer(
    layers: int, stages: int, chunks: int, start: str, remedy: str
) -> None:
    rule = rules.every_chunk_has_a_layer
    layout = parallel(pipeline=stages, virtual_stages=chunks)
    found = only(rule(model(num_layers=layers), layout))
    assert found.startswith(f"{start}: parallel.pipeline x virtual_stages = {stages} x {chunks}")
    assert found.endswith(remedy)
    assert not list(rule(model(num_layers=stages * chunks), layout))


def test_virtual_stages_need_a_pipeline() -> None:
    rule = rules.virtual_stages_need_a_pipeline
    assert not list(rule(parallel()))
    assert not list(rule(parallel(virtual_stages=2, pipeline=2)))
    found = only(rule(parallel(virtual_stages=2)))
    assert found.startswith("parallel.virtual_stages = 2: needs parallel.pipeline above 1")


def test_layers_per_chunk_make_the_model() -> None:
    rule = rules.layers_per_chunk_make_the_model
    layout = {"pipeline": 2, "virtual_stages": 2}
    shape = model(num_layers=8)
    assert not list(rule(shape, parallel(**layout)))
    assert not list(rule(shape, parallel(**layout, layers_per_chunk=(1, 3, 3, 1))))
    assert only(rule(shape, parallel(**layout, layers_per_chunk=(4, 4)))) == (
        "parallel.layers_per_chunk = [4, 4]: has 2 numbers, but parallel.pipeline x "
        "virtual_stages = 2 x 2 makes 4 chunks; write 4 numbers, or null"
    )
    assert only(rule(shape, parallel(**layout, layers_per_chunk=(1, 2, 3, 1)))) == (
        "parallel.layers_per_chunk = [1, 2, 3, 1]: adds up to 7, but model.num_layers = 8; "
        "write numbers that add up to 8, or null"
    )
    assert len(list(rule(shape, parallel(**layout, layers_per_chunk=(7,))))) == 2


def test_data_shard_divides_data() -> None:
    rule = rules.data_shard_divides_data
    for keys in ({}, {"data_shard": 3}, {"data": 4}, {"data": 6, "data_shard": 3}):
        assert not list(rule(parallel(**keys)))
    assert only(rule(parallel(data=6, data_shard=4))) == (
        "parallel.data_shard = 4: must divide parallel.data = 6; nearest: 3 or 6; or null for all"
    )


def test_node_rank_is_one_of_the_nodes() -> None:
    rule = rules.node_rank_is_one_of_the_nodes
    for keys in ({}, {"node_rank": 3}, {"nodes": 2}, {"nodes": 2, "node_rank": 1}):
        assert not list(rule(launch(**keys)))
    assert only(rule(launch(nodes=2, node_rank=2))).endswith(
        "node_rank = 2: must be below launch.nodes = 2; write 0 to 1"
    )
    assert only(rule(launch(nodes=1, node_rank=1))).endswith("; write 0 or null")


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_named_query_groups_obey_all_their_rules(groups: int, times: int, tensor: int) -> None:
    heads = groups * times * tensor
    shape = model(num_query_groups=groups, num_attention_heads=heads, head_dim=2)
    for problem in rules.query_groups_divide_by_tensor(shape, parallel(tensor=tensor)):
        for named in problem.remedy.removeprefix("nearest: ").split(" or "):
            assert heads % int(named) == 0
            legal = model(num_query_groups=int(named), num_attention_heads=heads, head_dim=2)
            assert not list(rules.query_groups_divide_by_tensor(legal, parallel(tensor=tensor)))
