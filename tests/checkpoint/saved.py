"""Small checkpoints whose contents follow from their iteration, saved and checked."""

import torch

from lib.atomic import sha256_of
from lib.checkpoint.loading import find_latest, load_tensors
from lib.checkpoint.retention import Retention
from lib.checkpoint.saving import Snapshot, write_checkpoint


def example(seed):
    torch.manual_seed(seed)
    return {
        "model.weight": torch.randn(17, 5),
        "model.scalar": torch.randn(()),
        "optimizer.exp_avg.weight": torch.randn(17, 5),
        "half": torch.randn(3, 4).bfloat16(),
        "count": torch.tensor([2**62 + seed]),
        "empty": torch.zeros(0, 3),
        "random.rank_00000.cpu": torch.get_rng_state(),
    }


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in example(0).items()}


def save_tensors(directory, iteration, tensors, scalars, keep_last, keep_every=None):
    """What a saver does for one checkpoint, in the foreground."""
    folder = write_checkpoint(directory, Snapshot(iteration, tensors, scalars))
    Retention(keep_last, keep_every).apply(directory, iteration)
    return folder


def save(directory, *iterations, keep_last=9, keep_every=None):
    for iteration in iterations:
        save_tensors(
            directory, iteration, example(iteration), {"n": iteration}, keep_last, keep_every
        )


def assert_is(tensors, iteration):
    for name, tensor in example(iteration).items():
        assert torch.equal(tensor, tensors[name]), name


def load_latest(directory, tensors, max_iteration=None):
    """What a resume does, for tensors that are always the same."""
    found = find_latest(directory, max_iteration)
    if found is not None:
        load_tensors(found, tensors)
    return found


def load(directory, max_iteration=None):
    tensors = blank()
    found = load_latest(directory, tensors, max_iteration)
    if found is None:
        return None
    assert found.scalars == {"n": found.iteration}
    assert found.path == directory / f"iter_{found.iteration:07d}"
    assert_is(tensors, found.iteration)
    return found.iteration


def snapshot(directory):
    return {path: sha256_of(path) for path in directory.rglob("*") if path.is_file()}
