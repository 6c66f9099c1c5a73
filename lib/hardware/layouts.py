"""A few steps on parallel layouts of every kind that this machine admits, against one process."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lib.config.operation import RuntimeConfig
from lib.config.run_config import Params, resolve
from lib.config.schema import ParallelConfig, PrecisionConfig
from lib.train.comparison import Difference, compare, run_layout, run_layouts, with_layout
from lib.train.comparison_cases import (
    is_admitted,
    small_version,
)
from lib.train.random_tokens import random_tokens

STEPS = 10
# In float64 only the order of sums is left; seen: below 1e-13.
TOLERANCE = 1e-9
_VOCABULARY = 500
_LAYERS = 4  # for two pipeline stages of two chunks each
_PATIENCE_S = 300.0

# Each way to divide alone, then together; the most telling ones, as all would take minutes.
_LAYOUTS: tuple[dict[str, int | bool | str], ...] = (
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"data": 2},
    {"data": 2, "sharding": "parameters"},
    {"tensor": 2, "sequence": True, "pipeline": 2},
    {"tensor": 2, "data": 2},
    {"pipeline": 2, "virtual_stages": 2, "data": 2},
    {"tensor": 2, "sequence": True, "pipeline": 2, "data": 2},
)


def layouts_of(params: Params, processes: int) -> list[ParallelConfig]:
    """The layouts to try over up to so many processes, those of few processes first."""
    layouts = [ParallelConfig.model_validate(degrees) for degrees in _LAYOUTS]
    fitting = [layout for layout in layouts if layout.processes <= processes]
    return [layout for layout in fitting if is_admitted(params, layout)]


def compare_layouts(
    params: Params, processes: int, device: Literal["cpu", "cuda"]
) -> Iterator[tuple[str, Difference]]:
    """Trains a small model on each layout; gives its name and how far it is from one process.

    Args:
        params: whose model is made small.
        processes: of the largest layout.
        device: ``cuda``: one GPU a process.

    Raises:
        AssertionError: a rank failed or hung; the text has its traceback.
    """
    whole = params.without_dropout()
    whole = replace(whole, model=whole.model.model_copy(update={"num_layers": _LAYERS}))
    layouts = layouts_of(whole, processes)
    run = replace(
        small_version(whole, layouts, STEPS),
        precision=PrecisionConfig(compute="fp64"),
        parallel=ParallelConfig(),
    )
    with tempfile.TemporaryDirectory(prefix="drydock-layouts-") as folder:
        tokens = 4 * STEPS * run.training.global_batch_size * (run.longest_seq_length + 1)
        config = resolve(run, random_tokens(Path(folder), run, _VOCABULARY, tokens // 60 + 100))
        reference = run_layout(config, RuntimeConfig(), 1, STEPS, device, _PATIENCE_S)
        for size in sorted({layout.processes for layout in layouts}):
            batch = [layout for layout in layouts if layout.processes == size]
            configs = [with_layout(config, layout) for layout in batch]
            outcomes = run_layouts(configs, RuntimeConfig(), size, STEPS, device, _PATIENCE_S)
            for layout, outcome in zip(batch, outcomes, strict=True):
                yield layout.name, compare(outcome, reference)


def differing(found: Sequence[tuple[str, Difference]]) -> list[str]:
    """Names of the layouts that are not equal to one process."""
    return [name for name, difference in found if not difference.worst() <= TOLERANCE]
