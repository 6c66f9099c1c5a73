"""What is told of a worker that died of GPU memory, beside its exception. Torch-free.

What filled the memory another program says (``stages.explain_memory``), so that training depends on
no code that plans it. What that program cannot say is left out: a run ends in its own error only.
"""

import re
import subprocess
import sys
from collections.abc import Sequence

# torch's allocator, the driver, NCCL, and cuBLAS: the last two ask the driver themselves.
SIGNS = (
    r"OutOfMemoryError|CUDA (error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY|"
    r"Cuda failure \d+ 'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
)
_SECONDS = 60.0


def memory_error(report: str) -> str | None:
    """The line of a traceback by which GPU memory was out, the last if there are several."""
    # A line of source is indented: one that handles such an error is none.
    lines = [line for line in report.splitlines() if line[:1].strip() and re.search(SIGNS, line)]
    return lines[-1] if lines else None


def explain_memory_error(
    explainer: Sequence[str], rank: int, processes: int, report: str
) -> list[str]:
    """Runs the program that explains; gives its lines, none if it fails.

    Args:
        explainer: its module and arguments; empty: there is none.
        rank: of the worker that died.
        processes: of all nodes together.
        report: its traceback.
    """
    if not explainer or memory_error(report) is None:
        return []
    command = [sys.executable, "-m", *explainer, f"--processes={processes}", f"--rank={rank}"]
    try:
        done = subprocess.run(
            command, input=report, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
