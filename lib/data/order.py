"""The order in which samples are read, by arithmetic: no index files, no state but one integer.

Positions 0, 1, 2, ... are the samples of a run in the order of their use, whatever the layout.
Position p is sample ``permutation_e(p mod W)`` of epoch ``e = p div W``, W being the number of
samples of the split. The permutation is a keyed Feistel network over the smallest domain 2^(2b)
that holds W, with cycle walking: an image outside [0, W) is permuted again until it falls inside,
which keeps the map a bijection of [0, W). The domain is less than 4 W, so that takes less than 4
rounds on average. (Black and Rogaway, Ciphers with arbitrary finite domains.)

Memory and start-up cost do not depend on W, and a longer run keeps the order of what it has read.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _round_keys(seed: int, epoch: int, purpose: str) -> list[np.uint64]:
    text = f"sample order/{purpose}/{seed}/{epoch}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return [np.uint64(key) for key in np.frombuffer(digest, dtype="<u8")]


def _mix(half: np.ndarray, key: np.uint64) -> np.ndarray:
    """Scrambles 64-bit words (the finisher of the splitmix64 generator)."""
    x = half + key
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def permute(numbers: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """Maps each of ``numbers`` (uint64, below ``size``) to its image under the permutation."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    image = numbers.astype(np.uint64)
    walking = np.ones(image.shape, dtype=bool)
    while walking.any():
        x = image[walking]
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        image[walking] = (left << shift) | right
        walking = image >= np.uint64(size)
    return image


@dataclass(frozen=True)
class SampleOrder:
    """The order of one split's samples.

    Attributes:
        num_samples: W, samples in the split; positive.
        seed: ``training.seed``.
        purpose: ``train`` or ``valid``; different purposes have unrelated orders.
    """

    num_samples: int
    seed: int
    purpose: str = "train"

    def samples_at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers, int64, of global positions (int64, not negative, any shape)."""
        flat = positions.reshape(-1).astype(np.int64)
        samples = np.empty_like(flat)
        epochs = flat // self.num_samples
        with np.errstate(over="ignore"):  # 64-bit multiplication is meant to wrap
            for epoch in np.unique(epochs):
                here = epochs == epoch
                keys = _round_keys(self.seed, int(epoch), self.purpose)
                samples[here] = permute(flat[here] % self.num_samples, self.num_samples, keys)
        return samples.reshape(positions.shape)


def step_positions(
    consumed_samples: int, *, micro_batches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """Global positions that one data-parallel rank reads in one step.

    Micro batch m of all ranks together covers consecutive positions; rank d takes the d-th slice
    of them. Any layout reads the same set in the same step.

    Returns:
        int64 [micro_batches, micro_batch_size].
    """
    start = consumed_samples + dp_rank * micro_batch_size
    first = start + np.arange(micro_batches, dtype=np.int64) * (micro_batch_size * dp_size)
    return first[:, None] + np.arange(micro_batch_size, dtype=np.int64)[None, :]
