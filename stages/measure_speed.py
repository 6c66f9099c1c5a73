"""Command: measures this machine's speed at training, beside what one could do plainly.

Figures of shared or throttled machines drift from minute to minute; the ratios, taken turn by
turn in one process, are what to compare.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click

from lib.cli import stage_command
from lib.config.params_file import read_params
from lib.config.run_config import Params, resolve_model
from lib.console import table
from lib.train.hardware import cpu_name

VOCABULARY = 4096


@stage_command
@click.option("--rounds", default=5, show_default=True, help="Measurements of each kind.")
def main(params: Path, rounds: int) -> None:
    """Measures training with the parameters of params.yaml, beside a plain torch loop.

    Both train the same model on random tokens.
    """
    sections = Params.from_file(read_params(params))
    table("training", measure_training(sections, rounds))


def medians(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each job, the jobs taking turns after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure_training(sections: Params, rounds: int) -> list[tuple[str, str]]:
    """One optimizer step of the model in params.yaml: the real parts and a plain loop."""
    from lib.workflow.speed import OneRank, compared_steps

    training = sections.training
    model = resolve_model(sections.model, training.seq_length)
    with OneRank() as device:
        ours, plain = compared_steps(
            model,
            compute=sections.precision.compute,
            vocab_size=VOCABULARY,
            shape=(training.seq_length, training.micro_batch_size),
            micro_batches=training.global_batch_size // training.micro_batch_size,
            device=device,
        )
        took = medians({"ours": ours, "plain": plain}, rounds)
    tokens = training.global_batch_size * training.seq_length
    return [
        ("device", cpu_name() if device.type == "cpu" else str(device)),
        ("one step", f"{tokens:,} random tokens, {sections.precision.compute}"),
        ("Drydock", f"{tokens / took['ours']:,.0f} tokens/s"),
        ("plain torch loop", f"{tokens / took['plain']:,.0f} tokens/s"),
        ("ratio", f"{took['plain'] / took['ours']:.3f}"),
    ]


if __name__ == "__main__":
    main()
