"""Keyed permutations.

``permute`` gives any images under a permutation of [0, W) by arithmetic: nothing is built or
stored. It is a Feistel network over the smallest domain 2^(2b) that holds W, with cycle
walking: an image outside [0, W) is permuted again until it falls inside, which keeps the map a
bijection of [0, W). The domain is less than 4 W, so that takes less than 4 rounds on average.
(Black and Rogaway, Ciphers with arbitrary finite domains.)
"""

import hashlib

import numpy as np

_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_DOMAINS = np.uint64(4) ** np.arange(1, 32, dtype=np.uint64)


def round_keys(text: str) -> np.ndarray:
    """The keys of the permutation that ``text`` names, uint64 [rounds]."""
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(numbers: np.ndarray, sizes: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Maps each number to its image under the permutation of its keys.

    Args:
        numbers: integers [N], each below its size.
        sizes: W of each number, [N], or one for all; 1 to 2^62.
        keys: from ``round_keys``: uint64 [rounds, N], or [rounds, 1] for all numbers alike.

    Returns:
        int64 [N].
    """
    limits = np.broadcast_to(np.asarray(sizes).astype(np.uint64), numbers.shape)
    half_bits = (np.searchsorted(_DOMAINS, limits) + 1).astype(np.uint64)
    keys = np.broadcast_to(keys, (_ROUNDS, len(numbers)))
    image = _network(numbers.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(image >= limits)
    while len(outside):
        image[outside] = _network(image[outside], half_bits[outside], keys[:, outside])
        outside = outside[image[outside] >= limits[outside]]
    return image.astype(np.int64)


def shuffle(size: int, keys: np.ndarray) -> np.ndarray:
    """A whole permutation of [0, size), int64 [size]: faster than ``permute`` where all is wanted.

    Sorts scrambled numbers, of which no two are equal.
    """
    first, second = keys[:2]
    return np.argsort(_mix(_mix(np.arange(size, dtype=np.uint64), first), second))


def _network(x: np.ndarray, half_bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = x >> half_bits, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << half_bits) | right


def _mix(half: np.ndarray, key: np.ndarray | np.uint64) -> np.ndarray:
    """Scrambles 64-bit words (the finisher of the splitmix64 generator)."""
    x = half + key
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
