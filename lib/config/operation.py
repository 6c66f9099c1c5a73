"""Typed sections of params.yaml that decide how a run is carried out and judged.

Nothing here changes the weights of a step (``attention``, ``kernels`` and ``deterministic``
aside, in the last digits): when to save, what to evaluate, on which processes to run.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from lib.config.data_section import DataSection
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    Section,
    TrainingSection,
)

_LARGEST_PORT = 65535


def host_and_port(text: str) -> tuple[str, int] | None:
    """What ``launch.rendezvous`` says, without the brackets of an IPv6 address; None if nothing."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):([0-9]{1,5})", text, re.ASCII)
    if found is None or not 0 < int(found[3]) <= _LARGEST_PORT:
        return None
    return found[1] or found[2], int(found[3])


class CheckpointConfig(Section):
    """The section ``checkpoint``."""

    save_interval: int = Field(default=0, ge=0)
    """Iterations between two checkpoints; 0 saves at the end only. What a crash can cost. Ctrl-C
    and SIGTERM save in any case."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep. Two, so that one is left if the disk spoils the other."""

    keep_every: int | None = Field(default=None, ge=1)
    """Keep for good each checkpoint whose iteration is a multiple of this; null keeps none."""


class EvaluateConfig(Section):
    """The section ``evaluate``: the finished model's loss and texts."""

    split: Literal["test", "valid"] = "test"
    """Documents to measure the loss on. ``test`` were never looked at while training."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Stop after so many tokens of each corpus; null measures the whole split."""

    num_samples: int = Field(default=20, ge=0)
    """Texts to generate, prompts in turn; 0 generates none."""

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Beginnings that the model continues; without any, texts begin as documents do."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Tokens to generate per text; a text may end earlier by itself."""

    temperature: float = Field(default=0.8, ge=0)
    """Divides the logits before sampling: below 1 is more certain, 0 takes the likeliest token."""

    top_k: int | None = Field(default=50, ge=1)
    """Sample among the so many likeliest tokens only; null among all."""

    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Of the sampling: the same model and seed give the same texts."""

    syntax: Literal["python"] | None = None
    """Report the share of generated texts that parse as this language; null reports none."""


class ExportConfig(Section):
    """The section ``export``: the finished model for programs other than this one."""

    format: Literal["huggingface", "none"] = "huggingface"
    """``huggingface`` writes what transformers loads, and refuses before training a model that
    it has no class for; ``none`` writes a note."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number type of the weights. fp32 is exact; the others halve the files and round."""

    max_shard_gigabytes: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Largest file of weights, in GB (10^9 bytes); larger models are split. 5 as usual there."""


class LaunchConfig(Section):
    """The section ``launch``: the processes of a training run. No stage reruns when it changes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the GPUs if there are any."""

    processes: int | None = Field(default=None, ge=1)
    """Training processes, one per GPU. Null: from the hardware and the layout."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads per process. Null: the cores divided by the processes."""

    on_code_change: Literal["refuse", "adopt", "fresh"] = "refuse"
    """When training code changed since an unfinished state was written: ``refuse`` and ask;
    ``adopt`` it, continue and record that; ``fresh`` starts again and keeps the old state
    aside."""

    fresh: bool = False
    """Train again from the start even if there is a state to continue from."""

    stop_timeout_s: int = Field(default=600, ge=1)
    """Seconds that a run gets to save its state when it is told to stop. Large models need
    minutes."""

    nodes: int | None = Field(default=None, ge=1)
    """Machines that train together, each started by its own command. Null: one, or as many as
    Slurm says. ``processes`` is of one of them."""

    node_rank: int | None = Field(default=None, ge=0)
    """Number of this machine among them, from 0. Null: the environment's DRYDOCK_NODE_RANK, or
    what Slurm says."""

    rendezvous: str | None = None
    """``host:port`` where the machines meet: a name of machine 0 that all can reach, and any free
    port of it. Null: this machine, or what Slurm says."""

    debug: Literal["collectives"] | None = None
    """``collectives`` compares each message between processes on all of them and names the
    process and call that is late or differs; slow. Null: off."""

    @field_validator("rendezvous")
    @classmethod
    def _rendezvous_has_host_and_port(cls, text: str | None) -> str | None:
        if text is None:
            return None
        if host_and_port(text) is None:
            raise ValueError(
                "must be host:port, the host a name or an address (IPv6 in brackets), the port 1 "
                f'to {_LARGEST_PORT}; write something like "gpu001:29500"'
            )
        return text


class RuntimeConfig(Section):
    """The section ``runtime``: speed and output. No stage reruns when it changes."""

    log_interval: int = Field(default=10, ge=1)
    """Iterations between two log lines. results/train.csv has each iteration in any case."""

    deterministic: bool = False
    """Use deterministic kernels only: the same machine gives the same bits, more slowly."""

    prefetch: int = Field(default=2, ge=0)
    """Batches read ahead while the model computes; 0 reads when needed."""

    num_workers: int = Field(default=1, ge=1)
    """Threads per process that read ahead. One is enough for local disks; slow network storage
    may want more. What is read does not depend on it."""

    background_save: bool = True
    """Write checkpoints while training goes on. Takes host memory for a copy of the state (12
    bytes a parameter); where there is less, training waits for each save."""

    attention: Literal[
        "auto",
        "cudnn",
        "flash",
        "efficient",
        "flash_attn",
        "flash_attn_4",
        "sdpa",
        "fused_softmax",
        "reference",
    ] = "auto"
    """Attention code. ``auto`` times all that can serve on the GPU, takes the fastest, and again
    the same at a resume; ``sdpa`` leaves the choice to torch, as ``auto`` does on a CPU. ``cudnn``,
    ``flash`` and ``efficient`` are torch's kernels by name, ``flash_attn`` and ``flash_attn_4``
    packages to be installed, ``fused_softmax`` two products and one kernel for any GPU,
    ``reference`` the plain formula (slow, for comparison)."""

    kernels: Literal["fused", "torch"] = "fused"
    """Code of norms, activations, rotary positions and the loss: ``fused`` is one Triton kernel
    each on a GPU (a CPU has none), ``torch`` torch's own operations (slower, for comparison)."""

    cuda_graphs: Literal["auto", "off"] = "auto"
    """Launch the kernels of a micro batch all at once: ``auto`` tries it in the first steps on GPUs
    and keeps it where it is faster, ``off`` never does. The result does not change."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: ``selective`` the attention's
    core, which is cheap to compute and large to keep; ``full`` whole layers, about a third more
    time. The result does not change."""

    recompute_method: Literal["uniform", "block"] = "uniform"
    """For full: ``uniform`` keeps only the input of each group of recompute_layers layers;
    ``block`` recomputes the first recompute_layers layers of each chunk and keeps the rest."""

    recompute_layers: int = Field(default=1, ge=1)
    """For full: layers, as the method says."""

    gradient_statistics: int = Field(default=0, ge=0)
    """Iterations between two records of each parameter's gradient; 0 records none."""


# Every section of params.yaml but the data stages' own (corpora, tokenizer, tokens), which
# ``lib.data.options`` types: a stage that wants the whole file joins the two.
CONFIG_SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection,
    "precision": PrecisionConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleSection,
    "training": TrainingSection,
    "data": DataSection,
    "checkpoint": CheckpointConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "launch": LaunchConfig,
    "runtime": RuntimeConfig,
}
