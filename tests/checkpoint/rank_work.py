"""What the ranks of the distributed tests do; here so that other tests can use the model."""

import errno
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from lib.checkpoint import state, storage
from lib.errors import UserError


class Model(nn.Module):
    """Odd sizes, so that shards are uneven; its gradients come from random inputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def build(seed, *, sharded, fused=True, device="cpu"):
    torch.manual_seed(seed)
    model = Model().to(device)
    if sharded:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    return model, optimizer


def step(model, optimizer, number):
    """One step on inputs that depend on its number alone."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 5, generator=generator).to(next(model.parameters()).device)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(tensors):
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in tensors.items()
    }


def checkpoint(directory, iteration, model, optimizer, keep_last=2):
    tensors = state.training_tensors(model.named_parameters(), optimizer)
    scalars = {"iteration": iteration} | state.optimizer_scalars(optimizer)
    return storage.save(directory, iteration, tensors, scalars, keep_last)


def resume(directory, model, optimizer):
    tensors = state.training_tensors(model.named_parameters(), optimizer)
    found = storage.load_latest(directory, tensors)
    state.restore(optimizer, found.scalars)
    return found.iteration


def train_and_save(directory):
    """Trains 3 steps, saves, trains 2 more: losses, and the final tensors whole."""
    model, optimizer = build(0, sharded=True)
    losses = [step(model, optimizer, number) for number in range(3)]
    checkpoint(directory / "state", 3, model, optimizer)
    losses += [step(model, optimizer, number) for number in range(3, 5)]
    return losses, whole(state.training_tensors(model.named_parameters(), optimizer))


def resume_and_train(directory):
    """Resumes from what other ranks, perhaps another number of them, have saved."""
    model, optimizer = build(99, sharded=True)
    assert resume(directory / "state", model, optimizer) == 3
    losses = [step(model, optimizer, number) for number in range(3, 5)]
    return losses, whole(state.training_tensors(model.named_parameters(), optimizer))


def resume_on_gpu(directory):
    """Saves, goes on, and resumes into another model on the same GPU: both must do the same."""
    losses, draws = [], []
    for seed in (0, 99):
        model, optimizer = build(seed, sharded=True, device="cuda")
        streams = state.random_streams(0, torch.device("cuda"))
        if seed == 0:
            for number in range(3):
                step(model, optimizer, number)
            torch.randn(3, device="cuda")
            streams = state.random_streams(0, torch.device("cuda"))
            tensors = state.training_tensors(model.named_parameters(), optimizer)
            scalars = state.optimizer_scalars(optimizer)
            storage.save(directory, 3, tensors | streams, scalars, 1)
        else:
            tensors = state.training_tensors(model.named_parameters(), optimizer)
            found = storage.load_latest(directory, tensors | streams)
            state.restore(optimizer, found.scalars)
            state.restore_random_streams(streams, 0, torch.device("cuda"))
        losses.append([step(model, optimizer, number) for number in range(3, 6)])
        draws.append((torch.randn(4, device="cuda").tolist(), torch.randn(4).tolist()))
    return losses, draws


def random_streams(directory):
    """Each rank's generator comes back as its own; draws after the save are repeated."""
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    torch.randn(10 + rank)
    saved = state.random_streams(rank, torch.device("cpu"))
    storage.save(directory / "random", 1, saved, {}, 1)
    drawn = torch.randn(4)
    torch.manual_seed(5)
    streams = {
        name: torch.zeros_like(each)
        for name, each in state.random_streams(rank, torch.device("cpu")).items()
    }
    storage.load_latest(directory / "random", streams)
    assert all(torch.equal(saved[name], streams[name]) for name in saved)
    state.restore_random_streams(streams, rank, torch.device("cpu"))
    assert torch.equal(torch.randn(4), drawn)
    return drawn


def both_stages():
    """What a pipeline of two stages holds, a tensor each."""
    return {"model.0.weight": torch.arange(15.0).view(5, 3), "model.1.weight": torch.ones(4, 3)}


def needed_for_both_stages():
    return storage.bytes_needed(both_stages())


def stages(directory):
    """Each rank holds one of two tensors; then nobody wants the second one."""
    own = list(both_stages().items())[dist.get_rank()]
    tensors = dict([own])
    storage.save(directory / "stages", 1, tensors, {}, 1)
    blank = {name: torch.zeros_like(each) for name, each in tensors.items()}
    storage.load_latest(directory / "stages", blank)
    found = storage.find_latest(directory / "stages")
    wanted = {name: each for name, each in blank.items() if "0" in name}
    return {
        "needed": storage.bytes_needed(tensors),
        "loaded": [(blank[name], each) for name, each in tensors.items()],
        "refused": complaint(storage.load_tensors, found, wanted),
    }


def load_both_stages(directory):
    blank = {name: torch.zeros_like(each) for name, each in both_stages().items()}
    storage.load_latest(directory / "stages", blank)
    return blank


def faults(directory):
    """Whatever goes wrong on one rank ends in the same outcome on all, and none hangs."""
    state_directory = directory / "faults"
    tensors = {"plain": torch.arange(6.0)}
    for iteration in (1, 2):
        storage.save(state_directory, iteration, tensors, {"n": iteration}, 5)
    dist.barrier()
    if dist.get_rank() == 0:
        (state_directory / "iter_0000002" / "__0_0.distcp").write_bytes(b"spoilt")
    dist.barrier()
    fallback = storage.load_latest(state_directory, tensors).iteration
    unreadable = with_rank_one_unable(
        "lib.checkpoint.ranks.sha256_of", errno.EIO, storage.load_latest, state_directory, tensors
    )
    mine = {f"random.rank_{dist.get_rank():05d}.cpu": torch.zeros(4)}
    full = with_rank_one_unable(
        "torch.distributed.checkpoint.filesystem.FileSystem.create_stream",
        errno.ENOSPC,
        storage.save,
        *(state_directory, 3, tensors | mine, {}, 5),
    )
    dist.barrier()
    left = sorted(path.name for path in state_directory.iterdir())
    ill = {"plain": torch.zeros(6 + dist.get_rank())}
    return fallback, unreadable, full, left, complaint(storage.load_latest, state_directory, ill)


def with_rank_one_unable(name, number, function, *arguments):
    """What a call says when on rank 1 alone a step of it fails with an OSError."""

    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    if dist.get_rank() != 1:
        return complaint(function, *arguments)
    with mock.patch(name, fail):
        return complaint(function, *arguments)


def complaint(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return "no complaint"
