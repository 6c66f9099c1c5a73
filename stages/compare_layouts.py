"""Command: trains the same steps on several layouts and compares the results, number by number.

Layouts are run on this machine's CPU (gloo) or GPUs (NCCL), each beside one process that trains
the same batches; the exit status says whether all agree.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from lib.cli import stage_command
from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.params_file import read_params
from lib.config.rules import broken_rules
from lib.config.run_config import Params, resolve
from lib.config.schema import ParallelConfig, PrecisionConfig
from lib.console import say, table
from lib.errors import InvalidParams, UserError
from lib.train.comparison_cases import (
    layouts_up_to,
    small_version,
)

VOCABULARY = 500

Precision = Literal["fp64", "fp32", "bf16", "fp16"]

# Largest relative differences from one process: of loss and gradient norm over the steps, and of
# each gradient and weight. In float64 only the order of sums is left. In lower precisions AdamW
# turns rounding noise of tiny gradients into whole steps, so tensors are shown and not judged.
TOLERANCES: dict[Precision, tuple[float, float]] = {
    "fp64": (1e-9, 1e-9),
    "fp32": (1e-5, float("inf")),
    "bf16": (2e-2, float("inf")),
    "fp16": (2e-2, float("inf")),
}


@stage_command
@click.option("--up-to", type=click.IntRange(2), help="All layouts over up to so many processes.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True)
@click.option("--precision", type=click.Choice(list(TOLERANCES)), default="fp64", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--full-size", is_flag=True, help="The model as it is, not a small one of its kind.")
def main(
    params: Path,
    up_to: int | None,
    steps: int,
    precision: Precision,
    device: Literal["cpu", "cuda"],
    full_size: bool,  # click passes options by name
) -> None:
    """Compares the layout of params.yaml with one process on random tokens.

    With --up-to N all layouts over up to N processes are compared that the model admits. The
    model is a small one of the same kind, unless --full-size is given; dropout is off.
    """
    sections = Params.from_file(read_params(params)).without_dropout()
    runtime = read_params(params).section("runtime", RuntimeConfig)
    layouts = layouts_up_to(sections, up_to) if up_to else [_own_layout(sections)]
    if not layouts:
        raise UserError(f"--up-to {up_to}: the model admits no layout but one process")
    run = sections if full_size else small_version(sections, layouts, steps)
    # A dynamic scale would skip all of these few steps while it finds its size.
    numbers = PrecisionConfig(compute=precision, loss_scale=1024.0 if precision == "fp16" else None)
    run = replace(run, precision=numbers, parallel=ParallelConfig())
    if not full_size:
        model = run.model
        say(
            f"a small model of the same kind: {model.num_layers} layers of {model.hidden_size}, "
            f"{model.num_attention_heads} heads (--full-size takes the whole one)"
        )
    _require_that_it_fits(run, layouts)
    differing = _compare(run, layouts, runtime, (steps, precision, device))
    if differing:
        raise UserError(f"differs from one process: {', '.join(differing)}")


def _own_layout(params: Params) -> ParallelConfig:
    """The layout of params.yaml, if it is one of several processes and breaks no rule."""
    layout = params.parallel
    sections = {"model": params.model, "parallel": layout, "training": params.training}
    if problems := broken_rules(sections):
        raise InvalidParams(problems)
    if layout.processes == 1:
        raise UserError(
            "parallel: one process, with which there is nothing to compare; set tensor, pipeline "
            "or data above 1, or give --up-to 4 to try all layouts of up to 4 processes"
        )
    return layout


def _require_that_it_fits(run: Params, layouts: list[ParallelConfig]) -> None:
    """Refuses a model or a batch that one of the layouts cannot divide, before ranks start."""
    for layout in layouts:
        sections = {"model": run.model, "parallel": layout, "training": run.training}
        sections |= {"data": run.data, "corpora": run.corpora, "vocab_size": VOCABULARY}
        if problems := broken_rules(sections):
            raise InvalidParams(problems)
        layout_for(replace(run, parallel=layout), layout.processes)


def _compare(
    run: Params,
    layouts: list[ParallelConfig],
    runtime: RuntimeConfig,
    options: tuple[int, Precision, Literal["cpu", "cuda"]],
) -> list[str]:
    """Runs all layouts and shows the table; gives the names of those that differ."""
    from lib.train.comparison import compare, run_layout, with_layout
    from lib.train.random_tokens import random_tokens

    steps, precision, device = options
    numbers, tensors = TOLERANCES[precision]
    rows: list[tuple[str, ...]] = []
    differing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="compare-layouts-") as folder:
        tokens = 4 * steps * run.training.global_batch_size * (run.longest_seq_length + 1)
        facts = random_tokens(Path(folder), run, VOCABULARY, tokens // 60 + 100)
        config = resolve(run, facts)
        reference = run_layout(config, RuntimeConfig(), 1, steps, device)
        for layout in layouts:
            laid_out, name = with_layout(config, layout), layout.name
            outcome = run_layout(laid_out, runtime, layout.processes, steps, device)
            found = compare(outcome, reference)
            agrees = max(found.loss, found.norm) <= numbers
            agrees = agrees and max(found.gradient[0], found.weight[0]) <= tensors
            differing += [] if agrees else [name]
            figures = (found.loss, found.norm, found.gradient[0], found.weight[0])
            verdict = "equal" if agrees else f"DIFFERS (most in {found.weight[1]})"
            rows.append((name, *(f"{figure:.1e}" for figure in figures), verdict))
            say(f"{name}: {verdict}")
    table(
        f"largest relative difference from one process, {steps} steps in {precision}",
        rows,
        headers=("layout", "loss", "norm", "gradient", "weight", ""),
    )
    return differing


if __name__ == "__main__":
    main()
