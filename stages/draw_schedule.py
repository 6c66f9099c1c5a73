"""Command: draws the pipeline schedule of params.yaml, or of another layout, and its idle time.

Nothing runs: the plans that pretraining would execute are simulated, with equal slabs of layers
and free transfers.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.params_file import ParamsFile, read_params
from lib.config.schema import ParallelConfig, TrainingSection
from lib.console import say, table
from lib.errors import UserError
from lib.output_file import OutputFile
from lib.pipeline.drawing import as_svg, as_text
from lib.pipeline.schedule import training_plan
from lib.pipeline.simulate import Costs, Timeline, bubble_formula, simulate

_MOST_ACTIONS = 20_000  # of all stages; nobody reads a picture of more


@dataclass(frozen=True)
class Shape:
    """What a schedule depends on."""

    stages: int
    chunks: int
    micro_batches: int

    def __str__(self) -> str:
        """The shape in words."""
        name = "1F1B" if self.chunks == 1 else f"interleaved, {self.chunks} chunks per stage"
        return f"{name}, stages: {self.stages}, micro batches: {self.micro_batches}"


@stage_command
@click.option("--stages", type=int, help="Pipeline stages; default: parallel.pipeline.")
@click.option("--chunks", type=int, help="Chunks per stage; default: parallel.virtual_stages.")
@click.option("--micro-batches", type=int, help="Per step; default: from the batch sizes.")
@click.option(
    "--backward-cost", default=2.0, show_default=True, help="Time of a backward, in forwards."
)
@click.option(
    "--out",
    type=OutputFile(),
    default=Path("outputs/schedule.svg"),
    show_default=True,
    help="The picture to write.",
)
def main(
    params: Path,
    stages: int | None,
    chunks: int | None,
    micro_batches: int | None,
    backward_cost: float,
    out: Path,
) -> None:
    """Draws what each pipeline stage does in a training step.

    F3.1 is the forward of micro batch 3 through chunk 1 of the stage, B3.1 its backward; dots are
    idle time. Layouts that are not in the parameter file are drawn with the options.
    """
    shape = chosen_shape(params, stages, chunks, micro_batches)
    timeline = simulated(shape, backward_cost)
    say(as_text(timeline, shutil.get_terminal_size((100, 24)).columns))
    say("")
    table(str(shape), figures(shape, timeline))
    write_text_atomically(out, as_svg(timeline, f"{shape}, bubble {timeline.bubble_share:.1%}"))
    say(f"wrote {out}")


def chosen_shape(
    params: Path, stages: int | None, chunks: int | None, micro_batches: int | None
) -> Shape:
    """The shape of the options; the parameter file is read only for those that are not given.

    Raises:
        UserError: an option is below 1, or the file does not say what is missing.
    """
    given = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches}
    for name, value in given.items():
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} = {value}: must be 1 or more; write 1, for example")
    if stages is not None and chunks is not None and micro_batches is not None:
        return Shape(stages, chunks, micro_batches)
    file = read_params(params)
    parallel = file.section("parallel", ParallelConfig)
    return Shape(
        stages or parallel.pipeline,
        chunks or parallel.virtual_stages,
        micro_batches or _micro_batches(file, parallel.data or 1),
    )


def _micro_batches(file: ParamsFile, data: int) -> int:
    """Micro batches per step of one copy of the model (of one copy in all where data is null)."""
    training = file.section("training", TrainingSection)
    batch, micro = training.global_batch_size, training.micro_batch_size
    if batch % (micro * data):
        raise UserError(
            f"training.global_batch_size = {batch}: is not divisible by training.micro_batch_size "
            f"x parallel.data = {micro} x {data}; give --micro-batches"
        )
    return batch // (micro * data)


def simulated(shape: Shape, backward_cost: float) -> Timeline:
    """A step of the shape. One time unit is the forward of a micro batch through a chunk.

    Raises:
        UserError: the cost is no positive number, or there is too much to draw.
    """
    if not 0.1 <= backward_cost <= 10:
        raise UserError(
            f"--backward-cost = {backward_cost:g}: must be 0.1 to 10 forwards; 2 is usual"
        )
    actions = 2 * shape.stages * shape.chunks * shape.micro_batches
    if actions > _MOST_ACTIONS:
        raise UserError(
            f"{shape}: {actions:,} actions are too many to draw (at most {_MOST_ACTIONS:,}); "
            "give a smaller --micro-batches: the schedule repeats"
        )
    plans = [
        training_plan(stage, shape.stages, shape.chunks, shape.micro_batches)
        for stage in range(shape.stages)
    ]
    return simulate(plans, Costs.uniform(shape.stages * shape.chunks, backward=backward_cost))


def figures(shape: Shape, timeline: Timeline) -> list[tuple[str, str]]:
    """Names and values of what the picture shows."""
    formula = bubble_formula(shape.stages, shape.chunks, shape.micro_batches)
    peaks = ", ".join(map(str, timeline.peak_activations))
    unit = "micro batches" if shape.chunks == 1 else f"micro batches x 1/{shape.chunks} stage"
    rows = [
        ("bubble (idle share of the step)", f"{timeline.bubble_share:.1%}"),
        ("by the formula", f"{formula:.1%}"),
        ("length of the step", f"{timeline.makespan:g} forwards of a chunk"),
        ("activations kept at most, by stage", f"{peaks} ({unit})"),
    ]
    if shape.chunks > 1:
        plain = bubble_formula(shape.stages, 1, shape.micro_batches)
        rows.insert(2, ("with 1 chunk per stage", f"{plain:.1%}"))
    return rows


if __name__ == "__main__":
    main()
