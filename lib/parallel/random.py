"""Random streams: one seed and a name give a generator, on every rank the same.

Dropout draws from two streams. Activations that every tensor-parallel rank holds whole need the
same mask on all of them: they use torch's default generator, seeded alike. Activations that are
cut over the ranks (attention heads; everything between layers under sequence parallelism) need
another mask on each: they use a ``RandomStream`` seeded by the rank. (Megatron's scheme.)
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on ``seed`` and all ``names``, and on nothing else."""
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def named_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator seeded by ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def _default_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_default_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class RandomStream:
    """A stream beside the default one, swapped in where it is wanted.

    Swapped, since neither ``dropout`` nor fused attention takes a generator.

    Args:
        seed: of the stream.
        device: whose default generator gives way to it.

    Attributes:
        device: as given.
        state: of the stream, uint8; to be saved and set with a checkpoint. Drawing replaces it
            and never changes it in place.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Generator[None]:
        """Inside, random numbers come from this stream; the default one stands still."""
        outside = _default_state(self.device)
        _set_default_state(self.state, self.device)
        try:
            yield
        finally:
            self.state = _default_state(self.device)
            _set_default_state(outside, self.device)

    @contextmanager
    def replayed(self, state: Tensor) -> Generator[None]:
        """Inside, the stream runs from an earlier ``state``; afterwards it goes on where it was.

        For a forward pass that is computed again: its masks must be those of the first time.
        """
        ahead, self.state = self.state, state
        try:
            yield
        finally:
            self.state = ahead


def seed_default_stream(seed: int, *, dp_rank: int, pp_rank: int) -> None:
    """Seeds the default generators, alike on the ranks of one tensor-parallel group.

    Data-parallel ranks see other samples and pipeline stages hold other layers: they draw other
    masks.
    """
    torch.manual_seed(derive_seed(seed, "dropout", dp_rank, pp_rank))


def shard_stream(
    seed: int, device: torch.device, *, dp_rank: int, pp_rank: int, tp_rank: int
) -> RandomStream:
    """The stream of one tensor-parallel rank."""
    return RandomStream(derive_seed(seed, "shard dropout", dp_rank, pp_rank, tp_rank), device)
