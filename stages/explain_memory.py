"""Command: why a training run died of memory, and what would help.

A program of its own: training depends on no code of the plan, so a better plan trains nothing anew.
"""

import sys
from pathlib import Path

import click

from lib.cli import stage_command
from lib.config.operation import RuntimeConfig
from lib.config.params_file import read_params
from lib.config.run_config import RunConfig
from lib.console import say
from lib.errors import UserError
from lib.plan.out_of_memory import explain
from lib.plan.work import works_of
from lib.train.memory_crash import memory_error


@stage_command
@click.option(
    "--processes", type=click.IntRange(1), required=True, help="Ranks of the run, of all nodes."
)
@click.option("--rank", type=click.IntRange(0), default=0, help="The one that died.")
@click.option(
    "--run-config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("outputs/run_config.json"),
    show_default=True,
)
def main(params: Path, processes: int, rank: int, run_config: Path) -> None:
    """Reads torch's message from standard input and says what filled the memory.

    The kind that fills it by plan, other processes on the GPU, and what each remedy would save:
    micro batch, recomputation, sequence, sharding, sequence, tensor and pipeline parallelism,
    settings of the allocator.
    """
    if rank >= processes:
        raise UserError(f"--rank {rank}: must be below --processes {processes}")
    runtime = read_params(params).section("runtime", RuntimeConfig)
    config = RunConfig.load(run_config)
    works = works_of(config, runtime, config.data.vocab_size, processes)
    # Stages are the slowest axis of the grid of ranks.
    stage = rank * works[0].parallel.pipeline // processes
    message = sys.stdin.read()
    if memory_error(message) is None:
        raise UserError("standard input: says nothing of memory that ran out; give torch's message")
    for line in explain(works, stage, message):
        say(line)


if __name__ == "__main__":
    main()
