"""Typed sections of params.yaml that decide what is trained: model to training.

``*Section`` is a section as written, where null means "derive it"; ``*Config`` is the same with
every null resolved, as ``outputs/run_config.json`` holds it. Sections without nulls need one class
only. Rules across fields are in ``lib.config.rules``; here each field is checked by itself.
"""

import math
import re
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_LARGEST_SEED = 2**63
_LEAST_FP32, _LARGEST_FP32 = 1e-37, 1e38  # a little within its range
_PINNED = re.compile(r".+@[0-9a-f]{12,64}")


class Section(BaseModel):
    """A section of params.yaml: frozen, and no key beyond those named."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelShape(Section):
    """What a model section says in full, whether nulls are resolved or not."""

    num_layers: int = Field(ge=1)
    """Transformer layers. Depth; time and memory grow in proportion."""

    hidden_size: int = Field(ge=1)
    """Width: entries of the vector that stands for one token. Cost grows with its square."""

    num_attention_heads: int = Field(ge=1)
    """Attention heads per layer. Must divide hidden_size unless head_dim is given."""

    position_embedding: Literal["learned", "rope"] = "learned"
    """How positions enter: ``learned`` adds a trained vector per position (GPT-2, the default as
    the simplest), ``rope`` turns queries and keys by an angle that grows with position (Llama)."""

    rope_theta: float = Field(default=10000.0, ge=1)
    """For rope: base of the angles' wavelengths, no unit. 10000 suits contexts to about 4096
    tokens; longer ones use more (Llama 3: 500000). Learned positions ignore it."""

    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """``layernorm`` centres and scales and has a bias (GPT-2); ``rmsnorm`` only scales (Llama)."""

    norm_epsilon: float = Field(default=1e-5, ge=_LEAST_FP32)
    """Added to the variance before the root is taken. 1e-5 is GPT-2's and Llama's value."""

    activation: Literal["gelu", "swiglu"] = "gelu"
    """Of the MLP: ``gelu`` (GPT-2, tanh form), or ``swiglu`` with a gate matrix more (Llama)."""

    bias: bool = True
    """Whether linear layers have biases: true as GPT-2, false as Llama."""

    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm per head (Qwen3). Steadies large models; off as in
    GPT-2 and Llama."""

    tie_embeddings: bool = True
    """Whether the output layer uses the embedding's weights. Saves vocabulary x hidden_size
    weights, which matters in small models; large ones untie (Llama)."""

    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of attention weights dropped in training, 0 to below 1. 0, as for any run that sees
    its data about once."""

    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of each block's output dropped in training, 0 to below 1. 0 for the same reason."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; output projections get this / sqrt(2 layers).
    0.02 as GPT-2 and Megatron."""

    vocab_size_multiple: int = Field(default=128, ge=1)
    """The embedding's rows are padded to a multiple of this, for fast matrix products. The rows
    are masked, so the loss does not depend on it."""


class ModelSection(ModelShape):
    """The section ``model`` as written."""

    num_query_groups: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by heads / groups query heads (grouped-query attention).
    Null: as many as heads, which is ordinary attention. Must divide num_attention_heads."""

    head_dim: int | None = Field(default=None, ge=1)
    """Size of one head. Null: hidden_size / num_attention_heads."""

    ffn_hidden_size: int | None = Field(default=None, ge=1)
    """Width of the MLP. Null: 4 hidden_size for gelu; for swiglu, whose third matrix costs as much
    as each other, 8/3 hidden_size rounded up to a multiple of 64."""

    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Longest sequence the model is made for, in tokens. Null: the longest seq_length of the
    training. With learned positions it must be at least that."""

    qkv_bias: bool | None = None
    """Biases of the query, key and value layers alone (Qwen2: true with bias false). Null: as
    bias."""


class ModelConfig(ModelShape):
    """The section ``model`` with every null resolved; what ``lib.model`` builds."""

    num_query_groups: int
    """Key and value heads."""

    head_dim: int
    """Size of one head."""

    ffn_hidden_size: int
    """Width of the MLP."""

    max_position_embeddings: int
    """Longest sequence in tokens; rows of the position embedding where positions are learned."""

    qkv_bias: bool
    """Whether the query, key and value layers have biases."""


class PrecisionConfig(Section):
    """The section ``precision``."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Number type of matrix products and activations. bf16 is fast on GPUs; on CPUs often slower,
    hence fp32. fp16 is for GPUs without bf16: its gradients need the loss scale below. Master
    weights, gradient sums and moments are fp32, except for fp64, where all is fp64: slow, to
    compare two layouts exactly."""

    loss_scale: float | None = Field(default=None, gt=0, le=_LARGEST_FP32)
    """For fp16: what the loss is multiplied by, so that small gradients are not rounded to 0; a
    number stays fixed. Null: found and kept up by itself, with the four keys below."""

    initial_loss_scale: float = Field(default=2.0**32, gt=0, le=_LARGEST_FP32)
    """For fp16 and loss_scale null: the first scale. Too large a one costs a skipped step per
    halving, too small a one accuracy, hence Megatron's 2^32."""

    min_loss_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """For fp16 and loss_scale null: the scale never falls below; a run that overflows even here
    stops. 1 as Megatron."""

    loss_scale_window: int = Field(default=1000, ge=1)
    """For fp16 and loss_scale null: the scale doubles after so many steps in a row without an
    overflow. 1000 as Megatron."""

    loss_scale_hysteresis: int = Field(default=2, ge=1)
    """For fp16 and loss_scale null: overflows before the scale halves. Counted anew only when the
    scale doubles. 2 as Megatron, so that one odd batch changes nothing."""


class ParallelConfig(Section):
    """The section ``parallel``: how the model is laid over processes."""

    tensor: int = Field(default=1, ge=1)
    """Processes that share each layer, which talk in each one: best on one machine. Must divide
    heads, the MLP's width and the padded vocabulary."""

    pipeline: int = Field(default=1, ge=1)
    """Groups of layers on processes of their own; they wait for each other when a step begins
    and ends, so that many micro batches per step are wanted."""

    data: int | None = Field(default=None, ge=1)
    """Copies of the model, each with its part of the global batch. Null: as many as the processes
    of the launch allow, so that one file runs on any machine with the same result."""

    sequence: bool = False
    """Sequence parallelism: the processes of ``tensor`` share norms and dropout as well, each for
    its part of the sequence. Saves activation memory at the same traffic. Needs tensor above 1,
    which must divide training.seq_length."""

    virtual_stages: int = Field(default=1, ge=1)
    """Chunks of layers per process of the pipeline. More of them wait less (1 / virtual_stages of
    the time) and send more often. 1 is the plain schedule."""

    layers_per_chunk: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Layers of each chunk in order of depth: pipeline x virtual_stages numbers. Null: split such
    that the slowest chunk, with embedding and head counted, is as fast as can be."""

    sharding: Literal["optimizer", "gradients", "parameters"] = "optimizer"
    """What the copies of the model split among them instead of each holding all: the optimizer's
    state; also gradients, summed after each micro batch; also parameters, gathered for each use.
    Each saves more memory than the one before and sends more."""

    data_shard: int | None = Field(default=None, ge=1)
    """Copies over which is split what ``sharding`` says; every other so many hold the same. Null:
    all of them. The GPUs of one node keep the traffic of several nodes low. Must divide data."""

    @property
    def processes(self) -> int:
        """Processes in all; ``data: null`` counts as one copy."""
        return self.tensor * self.pipeline * (self.data or 1)

    @property
    def name(self) -> str:
        """The layout in a few words, such as ``tp2+sp pp2x2 dp4/2 gradients``."""
        sequence = "+sp" if self.sequence else ""
        chunks = f"x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        shard = f"/{self.data_shard}" if self.data_shard else ""
        name = f"tp{self.tensor}{sequence} pp{self.pipeline}{chunks} dp{self.data or 1}{shard}"
        return name if self.sharding == "optimizer" else f"{name} {self.sharding}"


class OptimizerConfig(Section):
    """The section ``optimizer``: AdamW with a clipped gradient."""

    lr: float = Field(gt=0)
    """Peak learning rate, reached when warm-up ends. No default: it depends on the model's size
    (small models 1e-3 and more, billions of weights 3e-4 and less)."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients per step, 0 to below 1."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients, 0 to below 1. 0.95 as in GPT-3 and Llama; it
    follows changes in the gradient's size sooner than the textbook's 0.999."""

    epsilon: float = Field(default=1e-8, ge=_LEAST_FP32)
    """Added to the root of the squared gradients' mean, which is 0 where a weight never had a
    gradient. Smaller than 1e-37 it would be 0 in fp32, and the step 0 / 0."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices (never of norms or biases) per step, times the learning rate. 0 is off."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; a larger one is scaled down to it. 0 is off."""


class ScheduleShape(Section):
    """What a schedule section says in full, whether lengths are resolved or not."""

    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate after warm-up. ``wsd`` (warm-up, stable, decay) holds the peak
    and falls at the end only, so that the stable part can be made longer later."""

    min_lr: float = Field(default=0.0, ge=0)
    """Where the decay ends and stays. A tenth of lr is usual; constant ignores it."""

    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """For wsd: the course of its last part."""


class ScheduleSection(ScheduleShape):
    """The section ``schedule`` as written: each length in iterations or in samples, not both."""

    warmup_iters: int | None = Field(default=None, ge=0)
    """Iterations from 0 to the peak, in a straight line. Null in both spellings: no warm-up."""

    warmup_samples: int | None = Field(default=None, ge=0)
    """The same in samples, for a length that does not depend on the batch size."""

    decay_iters: int | None = Field(default=None, ge=1)
    """The iteration at which the rate reaches min_lr, warm-up included. Null in both spellings:
    the length of training. Write it out to be able to train longer later: the course of the
    rate is then the same, and the run continues."""

    decay_samples: int | None = Field(default=None, ge=1)
    """The same in samples."""

    wsd_decay_iters: int | None = Field(default=None, ge=1)
    """For wsd: iterations of its last part, which ends at decay_iters."""

    wsd_decay_samples: int | None = Field(default=None, ge=1)
    """The same in samples."""


class ScheduleConfig(ScheduleShape):
    """The section ``schedule`` with all lengths in samples."""

    warmup_samples: int
    """Samples from 0 to the peak; 0 is no warm-up."""

    decay_samples: int
    """The sample at which the rate reaches min_lr, warm-up included."""

    wsd_decay_samples: int
    """Samples of the last part of wsd; 0 for all other kinds."""


class TrainingShape(Section):
    """What a training section says in full, whether its length is resolved or not."""

    seed: int = Field(default=1234, ge=0, lt=_LARGEST_SEED)
    """Decides initial weights, order of the data and dropout. Two runs that differ in nothing
    else show how much of a result is chance."""

    seq_length: int = Field(ge=1)
    """Tokens per sample, until a phase of section data says otherwise; the loss is measured in
    samples of this length throughout. Attention's cost grows with its square."""

    micro_batch_size: int = Field(ge=1)
    """Samples that one process computes at once. Only speed and memory depend on it."""

    global_batch_size: int = Field(ge=1)
    """Samples per optimizer step, over all processes and micro batches. Part of the result."""

    rampup_start_batch_size: int | None = Field(default=None, ge=1)
    """Samples of the first step, where the batch is to grow to global_batch_size: small batches
    learn more from each sample early on. Null, as its two companions: no ramp-up."""

    rampup_increment: int | None = Field(default=None, ge=1)
    """Samples by which the batch grows each time."""

    rampup_samples: int | None = Field(default=None, ge=1)
    """Samples over which the batch grows, in equal parts for all its sizes below
    global_batch_size. All lengths of the run must then be in samples."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target given evenly to all tokens of the vocabulary, as torch defines it; 0 to
    below 1. 0, as for any usual pretraining."""

    z_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of log(sum of exp of the logits)^2 in the loss, which keeps logits from drifting
    (PaLM: 1e-4). 0 is off."""

    split: str = "90,5,5"
    """Shares of documents for training, validation and test, "90,5,5" or "969,30,1"; they need
    not add up to 100. Each split is a contiguous range of documents."""

    eval_interval: int = Field(default=0, ge=0)
    """Iterations between two measurements of the validation loss; 0 is never."""

    eval_iters: int = Field(default=10, ge=0)
    """Global batches per measurement. Each measurement takes the same ones."""

    @field_validator("split")
    @classmethod
    def _split_has_weights(cls, text: str) -> str:
        weights: list[float] = []
        with suppress(ValueError):
            weights = [float(part) for part in text.split(",")]
        is_sound = all(0 <= weight < math.inf for weight in weights)
        if not 1 <= len(weights) <= 3 or not is_sound or weights[0] == 0:
            raise ValueError(
                "must be the shares of training, validation and test, the first above 0; "
                'write something like "90,5,5"'
            )
        return text


class TrainingSection(TrainingShape):
    """The section ``training`` as written: its length in iterations or in samples, not both."""

    train_iters: int | None = Field(default=None, ge=1)
    """Optimizer steps. A run that is finished continues when this grows."""

    train_samples: int | None = Field(default=None, ge=1)
    """The same in samples; the end of a step: without a ramp-up a multiple of
    global_batch_size."""

    initial_weights: str | None = None
    """Weights to start from: a folder of ``stages.import_model`` and the first digits of their
    sha256, ``initial@0123456789abcdef``; the digits, so that other weights in that folder are
    another run. Null draws them at random. A run that has a checkpoint goes on from that."""

    new_parts: Literal["refuse", "initialize"] = "refuse"
    """Where the model is larger than the weights it starts from (more layers, more learned
    positions, other tokens): ``refuse`` and say what would be new, or draw it at random."""

    @field_validator("initial_weights")
    @classmethod
    def _initial_weights_are_pinned(cls, text: str | None) -> str | None:
        if text is not None and not _PINNED.fullmatch(text):
            raise ValueError(
                "must be FOLDER@SHA256, a weights folder and 12 or more digits of the checksum of "
                "its weights; write what python -m stages.import_model prints"
            )
        return text


class TrainingConfig(TrainingShape):
    """The section ``training`` with its length in both units."""

    train_iters: int
    """Optimizer steps."""

    train_samples: int
    """Samples of all steps: train_iters x global_batch_size, less with a ramp-up."""
