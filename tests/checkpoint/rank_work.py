"""What the ranks of the distributed tests do; here so that other tests can use the model."""

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from lib.checkpoint import loading, saving, state
from lib.checkpoint.background import Saver
from lib.checkpoint.metadata import read_metadata
from lib.checkpoint.retention import Retention
from lib.errors import UserError
from tests.checkpoint.saved import load_latest, save_tensors
from tests.train.tiny_run import build_tiny, tiny_config, write_tokens

CREATE_STREAM = "torch.distributed.checkpoint.filesystem.FileSystem.create_stream"


class Model(nn.Module):
    """Odd sizes, so that shards are uneven; its gradients come from random inputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def build(seed, *, sharded, fused=True, device="cpu", shape=None):
    """A model and its optimizer; sharded over all ranks, or copies and shards as ``shape`` says."""
    torch.manual_seed(seed)
    model = Model().to(device)
    if sharded:
        shape = shape or (dist.get_world_size(),)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
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
    return save_tensors(directory, iteration, tensors, scalars, keep_last)


def resume(directory, model, optimizer):
    tensors = state.training_tensors(model.named_parameters(), optimizer)
    found = load_latest(directory, tensors)
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
    saver = Saver(directory, Retention(1), background=True)
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
            saver.start(3, tensors | streams, scalars)
        else:
            saver.finish()
            tensors = state.training_tensors(model.named_parameters(), optimizer)
            found = load_latest(directory, tensors | streams)
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
    save_tensors(directory / "random", 1, saved, {}, 1)
    drawn = torch.randn(4)
    torch.manual_seed(5)
    streams = {
        name: torch.zeros_like(each)
        for name, each in state.random_streams(rank, torch.device("cpu")).items()
    }
    load_latest(directory / "random", streams)
    assert all(torch.equal(saved[name], streams[name]) for name in saved)
    state.restore_random_streams(streams, rank, torch.device("cpu"))
    assert torch.equal(torch.randn(4), drawn)
    return drawn


def both_stages():
    """What a pipeline of two stages holds, a tensor each."""
    return {"model.0.weight": torch.arange(15.0).view(5, 3), "model.1.weight": torch.ones(4, 3)}


def needed_for_both_stages():
    return saving.bytes_needed(both_stages())


def stages(directory):
    """Each rank holds one of two tensors; then nobody wants the second one."""
    own = list(both_stages().items())[dist.get_rank()]
    tensors = dict([own])
    save_tensors(directory / "stages", 1, tensors, {}, 1)
    blank = {name: torch.zeros_like(each) for name, each in tensors.items()}
    load_latest(directory / "stages", blank)
    found = loading.find_latest(directory / "stages")
    wanted = {name: each for name, each in blank.items() if "0" in name}
    return {
        "needed": saving.bytes_needed(tensors),
        "loaded": [(blank[name], each) for name, each in tensors.items()],
        "refused": complaint(loading.load_tensors, found, wanted),
    }


def load_both_stages(directory):
    blank = {name: torch.zeros_like(each) for name, each in both_stages().items()}
    load_latest(directory / "stages", blank)
    return blank


def faults(directory):
    """Whatever goes wrong on one rank ends in the same outcome on all, and none hangs."""
    state_directory = directory / "faults"
    tensors = {"plain": torch.arange(6.0)}
    for iteration in (1, 2):
        save_tensors(state_directory, iteration, tensors, {"n": iteration}, 5)
    dist.barrier()
    if dist.get_rank() == 0:
        (state_directory / "iter_0000002" / "__0_0.distcp").write_bytes(b"spoilt")
    dist.barrier()
    fallback = load_latest(state_directory, tensors).iteration
    with unable_on_rank_one("lib.checkpoint.ranks.sha256_of", errno.EIO):
        unreadable = complaint(load_latest, state_directory, tensors)
    mine = {f"random.rank_{dist.get_rank():05d}.cpu": torch.zeros(4)}
    with unable_on_rank_one(CREATE_STREAM, errno.ENOSPC):
        full = complaint(save_tensors, state_directory, 3, tensors | mine, {}, 5)
    dist.barrier()
    left = sorted(path.name for path in state_directory.iterdir())
    ill = {"plain": torch.zeros(6 + dist.get_rank())}
    return fallback, unreadable, full, left, complaint(load_latest, state_directory, ill)


@contextlib.contextmanager
def unable_on_rank_one(name, number):
    """On rank 1 alone, calls of ``name`` fail with an OSError of that number."""

    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    with mock.patch(name, fail) if dist.get_rank() == 1 else contextlib.nullcontext():
        yield


def complaint(function, *arguments):
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return "no complaint"


def background(directory):
    """Trains on while a save is held back; loads it; then rank 1 cannot write."""
    result = {}
    for kind, shape in (("sharded", (2,)), ("replicated", (2, 1))):
        model, optimizer = build(0, sharded=True, shape=shape)
        saver = Saver(directory / kind, Retention(1), background=True)
        losses = [step(model, optimizer, number) for number in range(3)]
        tensors = state.training_tensors(model.named_parameters(), optimizer)
        result[kind, "at save"] = whole(tensors)
        opened = threading.Event()
        with mock.patch("lib.checkpoint.background.write_checkpoint", after(opened)):
            saver.start(3, tensors, state.optimizer_scalars(optimizer))
            losses += [step(model, optimizer, number) for number in range(3, 6)]
            opened.set()
            saver.finish()
        blank, blank_optimizer = build(99, sharded=True, shape=shape)
        resume(directory / kind, blank, blank_optimizer)
        loaded = state.training_tensors(blank.named_parameters(), blank_optimizer)
        result[kind, "loaded"] = whole(loaded)
    alone, alone_optimizer = build(0, sharded=True, shape=shape)
    result["losses"] = losses
    result["losses_alone"] = [step(alone, alone_optimizer, number) for number in range(6)]
    with unable_on_rank_one(CREATE_STREAM, errno.ENOSPC):
        saver.start(6, tensors, {})
        saver.wait()
    result["failed"] = saver.failed
    result["complaint"] = complaint(saver.finish)
    result["left"] = sorted(path.name for path in (directory / "replicated").iterdir())
    return result


def after(opened):
    """Writing a checkpoint, as soon as the gate is open."""

    def write(*arguments):
        assert opened.wait(60)
        return saving.write_checkpoint(*arguments)

    return write


SHARING = {
    "optimizer": {},
    "gradients": {"parallel__sharding": "gradients"},
    "parameters": {"parallel__sharding": "parameters"},
    "replicated": {"parallel__data_shard": 1},
}


def bytes_of_two_copies(directory):
    """Bytes in the files, bytes of the tensors, pieces and names, for each way to share a state."""
    corpus = [write_tokens(directory)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(corpus)
    found = {}
    for name, changes in SHARING.items():
        config = tiny_config(corpus[0], model__hidden_size=64, **changes)
        parts = build_tiny(config.to_json())
        tensors = state.training_tensors(parts.model.own_parameters().items(), parts.optimizer)
        parts.close()
        folder = save_tensors(directory / name, 1, tensors, {}, 1)
        written = sum(path.stat().st_size for path in Path(folder).glob("*.distcp"))
        payload = sum(each.numel() * each.element_size() for each in tensors.values())
        entries = read_metadata(folder).state_dict_metadata
        pieces = sum(len(entry.chunks) for entry in entries.values())
        found[name] = (written, payload, pieces, len(tensors))
    return found


def die_while_saving(directory):
    """Rank 1 is killed by the kernel in the middle of a save; rank 0 must not wait for it."""
    tensors = {f"random.rank_{dist.get_rank():05d}.cpu": torch.zeros(4)}
    saver = Saver(directory, Retention(1), background=True)
    saver.start(1, tensors, {})
    saver.finish()
    dist.barrier()
    if dist.get_rank() == 1:
        mock.patch(CREATE_STREAM, die).start()
    saver.start(2, tensors, {})
    saver.wait()
    assert saver.failed
    saver.finish()


def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)
