"""What a GPU must be for number types and kernels, by its compute capability; without torch.

Asked before a process is started, where torch, which takes seconds to import, is not there yet.
"""

# Of a GPU: major and minor number. None is a CPU.
Capability = tuple[int, int] | None

OLDEST_FOR_BF16 = (8, 0)  # A100: V100 and T4 have no bf16 products in hardware
OLDEST_FOR_TRITON = (7, 0)  # V100: the first that Triton compiles for


def written(capability: tuple[int, int]) -> str:
    """A compute capability as people write it: ``8.0``."""
    return f"{capability[0]}.{capability[1]}"
