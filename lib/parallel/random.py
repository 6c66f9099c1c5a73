"""Random streams: one seed and a name give a generator, on every rank the same."""

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on ``seed`` and all ``names``, and on nothing else."""
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def named_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator seeded by ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def seed_streams(seed: int, dp_rank: int) -> None:
    """Seeds the default generators (dropout draws from them).

    Data-parallel ranks see other samples and so draw other masks.
    """
    torch.manual_seed(derive_seed(seed, "dropout", dp_rank))
