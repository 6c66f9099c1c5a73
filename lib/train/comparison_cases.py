"""What ``stages.compare_layouts`` runs: a small model of the same kind, and layouts that it admits.

What decides whether a layout is right stays as in params.yaml: heads and key/value heads, norms,
activation, biases, tied embeddings, positions, an explicit split of the layers, the rules of the
samples. Sizes that only cost time (head dimension, width, depth, sequence, batch) shrink to what a
CPU runs in seconds. The data are a blend of two small corpora; if the run has later phases, its
last step has samples twice as long.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from lib.config.data_section import DataSection, PhaseSection
from lib.config.launch_plan import layout_for
from lib.config.rules import broken_rules
from lib.config.run_config import Params
from lib.config.schema import ParallelConfig, ScheduleSection, TrainingSection
from lib.errors import UserError

_HEAD_DIM = 8
_SHORTEST = 16
_BLEND = {"one": 2.0, "two": 1.0}


def small_version(params: Params, layouts: Sequence[ParallelConfig], steps: int) -> Params:
    """A run of ``steps`` steps over a model of the same kind that all ``layouts`` can hold."""
    model, tensors = params.model, math.lcm(*(layout.tensor for layout in layouts))
    hidden = _HEAD_DIM * model.num_attention_heads
    depth = max(layout.pipeline * layout.virtual_stages for layout in layouts) + 1
    has_split = any(layout.layers_per_chunk is not None for layout in layouts)
    multiple = model.vocab_size_multiple
    small = model.model_copy(
        update={
            "num_layers": model.num_layers if has_split else min(model.num_layers, depth),
            "hidden_size": hidden,
            "head_dim": _HEAD_DIM,
            "ffn_hidden_size": 2 * hidden * tensors,
            "max_position_embeddings": None,
            "vocab_size_multiple": multiple if multiple % tensors == 0 else tensors,
        }
    )
    rounds = 2 * max(layout.pipeline for layout in layouts)
    training = TrainingSection(
        seed=params.training.seed,
        seq_length=-(-_SHORTEST // tensors) * tensors,
        micro_batch_size=1,
        global_batch_size=rounds * math.lcm(*(layout.data or 1 for layout in layouts)),
        train_iters=steps,
        label_smoothing=params.training.label_smoothing,
        z_loss=params.training.z_loss,
    )
    return replace(
        params,
        model=small,
        training=training,
        schedule=ScheduleSection(decay="constant"),
        data=_small_data(params.data, training, steps),
        corpora=tuple(_BLEND),
    )


def _small_data(data: DataSection, training: TrainingSection, steps: int) -> DataSection:
    phases: tuple[PhaseSection, ...] = ()
    if data.phases and steps > 1:
        last = (steps - 1) * training.global_batch_size
        phases = (PhaseSection(from_samples=last, seq_length=2 * training.seq_length),)
    return data.model_copy(
        update={"blend": _BLEND, "validation": None, "imported": {}, "phases": phases}
    )


def layouts_up_to(params: Params, processes: int) -> list[ParallelConfig]:
    """All layouts over up to so many processes that break no rule, one process left out."""
    found = []
    degrees = range(1, processes + 1)
    for tensor, pipeline, data in product(degrees, degrees, degrees):
        if not 1 < tensor * pipeline * data <= processes:
            continue
        for sequence, chunks in product((False, True), (1, 2)):
            layout = params.parallel.model_copy(
                update={
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "data": data,
                    "sequence": sequence,
                    "virtual_stages": chunks,
                    "layers_per_chunk": None,
                    "data_shard": None,
                }
            )
            if is_admitted(params, layout):
                found.append(layout)
    return found


def is_admitted(params: Params, layout: ParallelConfig) -> bool:
    """Whether a small version of the run may be laid out so."""
    small = replace(small_version(params, [layout], 1), parallel=layout)
    sections = {"model": small.model, "parallel": layout, "training": small.training}
    if broken_rules(sections) or layout.pipeline * layout.virtual_stages > params.model.num_layers:
        return False
    try:
        layout_for(small, layout.processes)
    except UserError:
        return False
    return True
