"""What a measurement of speed is of: models and layouts, from a command line and a machine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

from lib.config.params_file import ParamsFile
from lib.config.run_config import Params
from lib.config.schema import ParallelConfig
from lib.console import say
from lib.errors import UserError
from lib.plan.vocabulary import vocabulary_of
from lib.workflow.shapes import REFERENCES, Compute, Shape, measured_run, usual_layouts

OF_THE_FILE = "params"

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Machine:
    """Where things are measured.

    Attributes:
        device: what computes.
        gpus: of the machine; 0 to compute on the CPU.
        memory: of the smallest GPU, in bytes.
    """

    device: Device
    gpus: int = 0
    memory: int = 0


class Options(TypedDict):
    """The command line, as click passes it."""

    shape: tuple[str, ...]
    tensor: int | None
    pipeline: int | None
    data: int | None
    sequence: bool
    sharding: str | None
    virtual_stages: int | None
    micro_batch: int | None
    micro_batches: int | None
    recompute: str | None
    steps: int
    no_baseline: bool
    profile: Path | None
    json_file: Path | None


@dataclass(frozen=True)
class Work:
    """One model on one layout.

    Attributes:
        shape: the model and its batches.
        layout: ``data`` is a number.
        compute: number type.
    """

    shape: Shape
    layout: ParallelConfig
    compute: Compute


def works_of(file: ParamsFile, options: Options, machine: Machine) -> list[Work]:
    """The models and layouts that the command line, the file and the machine come to.

    Raises:
        UserError: a layout that needs more GPUs than there are, or that cannot divide a model.
    """
    chosen = options["shape"] or (tuple(REFERENCES) if machine.device == "cuda" else (OF_THE_FILE,))
    found = [
        work
        for name in dict.fromkeys(chosen)
        for work in _works_of_shape(file, name, options, machine)
    ]
    for work in found:  # all that cannot be is refused before the first is measured
        measured_run(work.shape, work.layout, work.compute)
    return found


def _works_of_shape(file: ParamsFile, name: str, options: Options, machine: Machine) -> list[Work]:
    shape, layout, compute = _named(file, name, machine.device)
    shape, layout = _with_batches(shape, options), _with_options(layout, options)
    names = ("tensor", "pipeline", "data", "sequence", "virtual_stages")
    if machine.device == "cpu" or name == OF_THE_FILE or any(options[each] for each in names):
        return [Work(shape, _on_all_gpus(layout, machine), compute)]
    found: list[Work] = []
    for smaller, usual in usual_layouts(shape, machine.gpus, machine.memory):
        kept = shape if options["micro_batch"] else smaller
        found.append(Work(kept, usual.model_copy(update={"sharding": layout.sharding}), compute))
    if not found:
        say(f"{name}: needs more memory than these GPUs have; left out")
    return found


def _named(file: ParamsFile, name: str, device: Device) -> tuple[Shape, ParallelConfig, Compute]:
    """A reference, or the model of the file without dropout, which no baseline has."""
    if name != OF_THE_FILE:
        return REFERENCES[name], ParallelConfig(), "bf16" if device == "cuda" else "fp32"
    sections = Params.from_file(file).without_dropout()
    training = sections.training
    shape = Shape(
        name,
        sections.model,
        vocabulary_of(file),
        training.seq_length,
        training.micro_batch_size,
        max(1, training.global_batch_size // training.micro_batch_size),
    )
    return shape, sections.parallel, sections.precision.compute


def _with_batches(shape: Shape, options: Options) -> Shape:
    return replace(
        shape,
        micro_batch_size=options["micro_batch"] or shape.micro_batch_size,
        micro_batches=options["micro_batches"] or shape.micro_batches,
    )


def _with_options(layout: ParallelConfig, options: Options) -> ParallelConfig:
    given = {
        "tensor": options["tensor"],
        "pipeline": options["pipeline"],
        "data": options["data"],
        "sequence": options["sequence"] or None,
        "sharding": options["sharding"],
        "virtual_stages": options["virtual_stages"],
    }
    kept = {name: value for name, value in given.items() if value is not None}
    return layout.model_copy(update=kept)


def _on_all_gpus(layout: ParallelConfig, machine: Machine) -> ParallelConfig:
    """The layout with its number of copies: those that are asked for, else what the GPUs allow."""
    unit = layout.tensor * layout.pipeline
    copies = layout.data or max(1, machine.gpus // unit)
    if machine.device == "cuda" and unit * copies > machine.gpus:
        raise UserError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {copies} needs "
            f"{unit * copies} GPUs, one per process, but this machine shows {machine.gpus}"
        )
    return layout.model_copy(update={"data": copies})
