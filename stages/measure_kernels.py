"""Command: times the fused kernels on a GPU beside what torch, torch.compile and Liger do.

Figures of shared or throttled machines drift from minute to minute; the ratios, taken in one run,
are what to compare.
"""

from pathlib import Path

import click

from lib.cli import plain_command
from lib.console import say
from lib.errors import UserError
from lib.output_file import OutputFile
from lib.train.hardware import cuda_device_names
from lib.workflow.kernel_report import Conditions, tell
from lib.workflow.shapes import REFERENCES, Shape


@plain_command
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=click.Choice(list(REFERENCES)),
    default=("1.4b", "125m"),
    show_default=True,
    help="A model at whose sizes to measure; may be given several times.",
)
@click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    help="Append a line of JSON per kernel and pass to this file.",
)
def main(shapes: tuple[str, ...], json_file: Path | None) -> None:
    """Times every fused kernel: forward, and forward with backward, in bf16.

    Beside it the torch operations that it stands for, the same compiled, and the kernel of the
    package liger-kernel where that is installed and has one. "Of copy" is the time that a plain
    copy of the bytes that must move would take on this GPU, measured in the same run, over the
    kernel's; the last column is the least time of another way over the kernel's. Reads no file. A
    kernel that fails is told of at its place and at the end, with exit status 1.
    """
    if not cuda_device_names():
        say("kernels are measured on a GPU only, and this machine shows none")
        return
    failures = [
        f"{name}: {failure}"
        for name in dict.fromkeys(shapes)
        for failure in _measure(REFERENCES[name], json_file)
    ]
    if failures:
        raise UserError(f"failed: {'; '.join(failures)}. The lines above say why")


def _measure(shape: Shape, json_file: Path | None) -> list[str]:
    """Times all kernels at one model's sizes; gives what failed."""
    import torch

    from lib.layers.fused import runs_kernels
    from lib.workflow.kernel_cases import CASES, Setting
    from lib.workflow.kernel_timing import Clock, time_kernel

    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if not runs_kernels(torch.empty(1, dtype=dtype, device=device)):
        raise UserError("Triton, which the kernels are written in, cannot compile for this GPU")
    clock = Clock(device)
    tokens = (shape.micro_batch_size, shape.seq_length)
    name = torch.cuda.get_device_name(device)
    conditions = Conditions(shape.name, tokens, "bf16", name, clock.copy_rate())
    found = []
    for kernel in CASES:
        say(f"timing {kernel} at the sizes of {shape.name}")
        found.append(time_kernel(kernel, Setting(shape, dtype, device), clock.milliseconds))
    tell(found, conditions, json_file)
    return [failure for each in found for failure in each.failures()]


if __name__ == "__main__":
    main()
