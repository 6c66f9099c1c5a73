"""The tensors of a run: names, sharing of memory, exact resume with AdamW."""

import pytest
import torch
from torch.optim import AdamW

from lib.checkpoint import state
from lib.parallel.random import shard_stream
from tests.checkpoint.rank_work import build, checkpoint, resume, step


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def fused(request):
    return request.param


def test_names_and_shared_memory(fused):
    model, optimizer = build(0, sharded=False, fused=fused)
    tensors = state.training_tensors(model.named_parameters(), optimizer)
    names = ["first.weight", "first.bias", "second.weight"]
    assert set(tensors) == {
        f"{kind}.{name}"
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for name in names
    }
    tensors["model.first.weight"].fill_(3.0)
    assert model.first.weight.eq(3.0).all()
    tensors["optimizer.exp_avg.second.weight"].fill_(2.0)
    assert optimizer.state[model.second.weight]["exp_avg"].eq(2.0).all()


def test_created_state_is_what_a_first_step_starts_from(fused):
    """A step after creation equals a step without it, bit for bit, and nothing else changes."""
    models = []
    for create in (False, True):
        model, optimizer = build(0, sharded=False, fused=fused)
        if create:
            before = [p.clone() for p in model.parameters()]
            state.training_tensors(model.named_parameters(), optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert state.optimizer_scalars(optimizer) == {"optimizer_step": 0}
        losses = [step(model, optimizer, number) for number in range(3)]
        models.append((model, optimizer, losses))
    (one, one_optimizer, one_losses), (two, two_optimizer, two_losses) = models
    assert one_losses == two_losses
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in one_optimizer.state[a].items():
            assert torch.equal(value, two_optimizer.state[b][key])
            assert value.dtype == two_optimizer.state[b][key].dtype
            assert value.device == two_optimizer.state[b][key].device


def test_resume_is_bit_for_bit(tmp_path, fused):
    model, optimizer = build(0, sharded=False, fused=fused)
    for number in range(3):
        step(model, optimizer, number)
    checkpoint(tmp_path, 3, model, optimizer)
    expected = [step(model, optimizer, number) for number in range(3, 8)]

    other, other_optimizer = build(1, sharded=False, fused=fused)
    assert resume(tmp_path, other, other_optimizer) == 3
    assert state.optimizer_scalars(other_optimizer) == {"optimizer_step": 3}
    assert [step(other, other_optimizer, number) for number in range(3, 8)] == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resume_without_the_step_count_would_be_noticed(tmp_path):
    """The bias corrections depend on the step: the test above can tell a wrong one."""
    model, optimizer = build(0, sharded=False)
    for number in range(3):
        step(model, optimizer, number)
    state.restore(optimizer, {"optimizer_step": 0})
    other, other_optimizer = build(0, sharded=False)
    for number in range(3):
        step(other, other_optimizer, number)
    losses = [
        [step(*pair, n) for n in (3, 4)] for pair in ((model, optimizer), (other, other_optimizer))
    ]
    assert losses[0] != losses[1]


def test_an_optimizer_of_another_model_is_noticed():
    model, _ = build(0, sharded=False)
    _, optimizer = build(0, sharded=False)
    with pytest.raises(AssertionError, match="another model"):
        state.training_tensors(model.named_parameters(), optimizer)


def test_parameter_groups_are_all_covered():
    model, _ = build(0, sharded=False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    assert len(state.training_tensors(model.named_parameters(), optimizer)) == 9


def test_random_streams_are_named_for_their_rank():
    torch.manual_seed(3)
    streams = state.random_streams(12, torch.device("cpu"))
    assert "random.rank_00012.cpu" in streams
    drawn = torch.randn(5)
    state.restore_random_streams(streams, 12, torch.device("cpu"))
    assert torch.equal(torch.randn(5), drawn)
    with pytest.raises(KeyError):
        state.restore_random_streams(streams, 11, torch.device("cpu"))


def test_the_stream_of_a_tensor_parallel_shard_is_one_more():
    cpu = torch.device("cpu")
    stream = shard_stream(3, cpu, dp_rank=0, pp_rank=0, tp_rank=1)
    torch.manual_seed(3)
    streams = {name: value.clone() for name, value in state.random_streams(2, cpu, stream).items()}
    assert set(streams) == {"random.rank_00002.cpu", "random.rank_00002.shard"}
    drawn = torch.randn(5), drawn_from(stream)
    state.restore_random_streams(streams, 2, cpu, stream)
    again = drawn_from(stream)  # the order of the two does not matter
    assert torch.equal(again, drawn[1])
    assert torch.equal(torch.randn(5), drawn[0])
    assert not torch.equal(again, drawn[0])
    with pytest.raises(KeyError):
        state.restore_random_streams(state.random_streams(2, cpu), 2, cpu, stream)


def test_a_loaded_stream_draws_without_changing_what_was_loaded():
    cpu = torch.device("cpu")
    stream = shard_stream(3, cpu, dp_rank=0, pp_rank=0, tp_rank=1)
    streams = state.random_streams(0, cpu, stream)
    before = streams["random.rank_00000.shard"].clone()
    state.restore_random_streams(streams, 0, cpu, stream)
    drawn_from(stream)
    assert torch.equal(streams["random.rank_00000.shard"], before)
    assert not torch.equal(stream.state, before)


def drawn_from(stream):
    with stream.active():
        return torch.randn(5)


def test_copies_of_another_stages_parameters_can_be_left_out():
    model, optimizer = build(0, sharded=False)
    own = {name: value for name, value in model.named_parameters() if name != "second.weight"}
    tensors = state.training_tensors(own.items(), optimizer)
    assert len(tensors) == 3 * len(own)
    assert not any("second" in name for name in tensors)
    assert optimizer.state[model.second.weight]["exp_avg"].eq(0).all()  # it steps all the same
