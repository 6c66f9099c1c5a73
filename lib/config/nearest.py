"""Nearest legal values, for the remedy of a broken rule."""

import math
from collections.abc import Sequence


def multiples_near(value: int, step: int) -> str:
    """The multiples of ``step`` on both sides of ``value``, as ``"6 or 12"``."""
    below = value // step * step
    return str(step) if below == 0 else f"{below} or {below + step}"


def divisors_near(value: int, whole: int) -> str:
    """The divisors of ``whole`` on both sides of ``value``, as ``"4 or 8"``."""
    return nearest_of(value, divisors(whole))


def divisors(whole: int) -> list[int]:
    """All divisors of a positive number, in order."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    large = [whole // n for n in reversed(small) if n * n != whole]
    return small + large


def nearest_of(value: int, legal: Sequence[int]) -> str:
    """The legal values, sorted, on both sides of ``value``, as ``"4 or 8"``."""
    below = [n for n in legal if n <= value][-1:]
    above = [n for n in legal if n > value][:1]
    return " or ".join(map(str, below + above))
