"""What is legal but most likely unwise: one piece of advice, one function, in the form of a rule.

As in ``lib.config.rules``, a function takes the sections that it compares, by name, and yields what
it found: field, value, why, and what to do. Nothing is refused for it. Each docstring says the
threshold and where it comes from; docs/validation.md lists them. Only parameters that break no
rule are looked at.

Beside the sections there are ``vocab_size``, ``bubble_formula`` (that of ``lib.pipeline``, which
may not read configuration, as this may not import it) and ``run_config``, where it was resolved.
"""

from collections.abc import Callable, Iterator
from itertools import count

from lib.config.batch_rules import fewest_copies
from lib.config.nearest import multiples_near
from lib.config.operation import CheckpointConfig, EvaluateConfig
from lib.config.run_config import (
    RunConfig,
    count_parameters,
    in_samples,
    padded_size,
    resolve_model,
    resolve_training,
)
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.errors import Problem

LARGEST_BUBBLE = 0.2
LARGEST_VOCABULARY_SHARE = 0.5
LARGEST_WARMUP_SHARE = 0.5
LARGEST_MISMATCH = 1.25
LARGEST_LR = 1e-2
MOST_EPOCHS = 4.0
MOST_UNSAVED_STEPS = 1000
SIZE_MULTIPLE = 64

# ---- speed


def pipeline_waits_little(
    parallel: ParallelConfig,
    training: TrainingSection,
    bubble_formula: Callable[[int, int, int], float],
) -> Iterator[Problem]:
    """The idle share of a step should be 20 % or less.

    By the closed formula of docs/pipeline.md, for the fewest copies of the model that there can
    be: with more, each has fewer micro batches and waits longer. 20 % is what 4 micro batches per
    stage cost; Narayanan et al. 2021 (Efficient Large-Scale Language Model Training), section
    2.2, ask for many more of them than stages.
    """
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    micro_batches = training.global_batch_size // (
        training.micro_batch_size * fewest_copies(parallel)
    )
    share = bubble_formula(stages, chunks, micro_batches)
    if share > LARGEST_BUBBLE:
        enough = next(m for m in count(1) if bubble_formula(stages, chunks, m) <= LARGEST_BUBBLE)
        least = "" if parallel.data else "at least "
        yield Problem(
            "parallel.pipeline",
            str(stages),
            f"its stages wait {least}{share:.0%} of each step, which has {micro_batches} micro "
            "batches for each copy of the model",
            f"{enough} or more keep it to {LARGEST_BUBBLE:.0%}: a larger training."
            "global_batch_size or smaller micro_batch_size; or more parallel.virtual_stages, or "
            "fewer stages",
        )


def sizes_suit_the_gpu(
    model: ModelSection, precision: PrecisionConfig, vocab_size: int
) -> Iterator[Problem]:
    """Sizes of products should be multiples of 64 in bf16 and fp16.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, table of the requirements of
    Tensor Cores: on A100, products are most efficient where sizes are multiples of 128 bytes, 64
    numbers of 2 bytes.
    """
    if precision.compute not in ("bf16", "fp16"):
        return
    sizes = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size}
    for name, size in sizes.items():
        if size is not None and size % SIZE_MULTIPLE:
            yield Problem(
                f"model.{name}",
                str(size),
                f"is no multiple of {SIZE_MULTIPLE}, so that products of matrices are slower than "
                "they need be on GPUs",
                f"nearest: {multiples_near(size, SIZE_MULTIPLE)}",
            )
    rows = padded_size(vocab_size, model.vocab_size_multiple)
    if rows % SIZE_MULTIPLE:
        yield Problem(
            "model.vocab_size_multiple",
            str(model.vocab_size_multiple),
            f"pads the vocabulary to {rows} rows, no multiple of {SIZE_MULTIPLE}, so that the "
            "output layer is slower than it need be on GPUs",
            f"nearest: {multiples_near(model.vocab_size_multiple, SIZE_MULTIPLE)}",
        )


# ---- learning


def learning_rate_is_usual(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """AdamW diverges, or learns nothing, with rates that suit other optimizers.

    Source: Brown et al. 2020 (GPT-3), table 2.1: 6e-4 for 125M weights, less for more; Biderman et
    al. 2023 (Pythia): 1e-3 for 70M. Ten times that is the threshold.
    """
    if optimizer.lr > LARGEST_LR:
        yield Problem(
            "optimizer.lr",
            f"{optimizer.lr:g}",
            "is more than ten times what AdamW bears in language models",
            "try 1e-3 for millions of weights, 3e-4 for billions",
        )


def warmup_is_a_small_part(
    schedule: ScheduleSection, training: TrainingSection
) -> Iterator[Problem]:
    """Warm-up should end in the first half of the training.

    Usual are 0.1 to 10 %: GPT-3 (Brown et al. 2020) took 375M of 300B tokens, Pythia 1 %.
    """
    batch = training.global_batch_size
    warmup = in_samples(schedule.warmup_iters, schedule.warmup_samples, batch) or 0
    share = warmup / resolve_training(training).train_samples
    if share > LARGEST_WARMUP_SHARE:
        unit = "samples" if schedule.warmup_iters is None else "iters"
        yield Problem(
            f"schedule.warmup_{unit}",
            str(
                schedule.warmup_samples if schedule.warmup_iters is None else schedule.warmup_iters
            ),
            f"is {share:.0%} of the training, so that the peak is held for little of it",
            "1 % of a long run and 10 % of a short one are usual",
        )


def decay_ends_with_the_training(
    schedule: ScheduleSection, training: TrainingSection
) -> Iterator[Problem]:
    """The decay should end when the training does, give or take a quarter.

    Source: Hoffmann et al. 2022 (Chinchilla), appendix B: a decay that is planned for over 25 %
    more steps than are trained ends in a clearly worse loss. The other way around, a fifth of the
    steps or more are trained at the least rate.
    """
    batch, train = training.global_batch_size, resolve_training(training).train_samples
    decay = in_samples(schedule.decay_iters, schedule.decay_samples, batch)
    if decay is None or schedule.decay == "constant":
        return
    unit, one = ("samples", 1) if schedule.decay_iters is None else ("iters", batch)
    field, value = f"schedule.decay_{unit}", str(decay // one)
    remedy = f"write the length of the training, {train // one}, or null"
    if decay > LARGEST_MISMATCH * train:
        rule = f"training ends at {train / decay:.0%} of the decay, with a rate that is still high"
        yield Problem(field, value, rule, remedy)
    if train > LARGEST_MISMATCH * decay:
        rule = (
            f"the decay ends at {decay / train:.0%} of the training; the rest has the rate "
            f"schedule.min_lr = {schedule.min_lr:g}"
        )
        yield Problem(field, value, rule, remedy)


def gradients_are_clipped(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """One bad batch can undo a run whose gradients are not clipped.

    Source: GPT-3 (Brown et al. 2020, appendix B) and Llama (Touvron et al. 2023) clip at 1.
    """
    if optimizer.clip_grad == 0:
        yield Problem(
            "optimizer.clip_grad",
            "0",
            "gradients are not clipped, so that one bad batch can spoil the run",
            "write 1.0, the usual norm",
        )


def loss_scale_is_found_by_itself(precision: PrecisionConfig) -> Iterator[Problem]:
    """What gradients need changes during a run, so a fixed scale fits a part of it only.

    Source: Micikevicius et al. 2018 (Mixed Precision Training), section 3.2.
    """
    if precision.compute == "fp16" and precision.loss_scale is not None:
        yield Problem(
            "precision.loss_scale",
            f"{precision.loss_scale:g}",
            "is fixed: where it is too large steps are skipped, where it is too small gradients "
            "are rounded to 0",
            "write null, which finds it and keeps it up",
        )


def vocabulary_does_not_dominate(
    model: ModelSection, training: TrainingSection, vocab_size: int
) -> Iterator[Problem]:
    """Embedding and head should have half of the weights at most.

    They know tokens, layers what follows from them. GPT-2's smallest has 31 % there. Half is this
    project's choice.
    """
    shape = resolve_model(model, training.seq_length)
    table = vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    share = table / count_parameters(shape, vocab_size)
    if share > LARGEST_VOCABULARY_SHARE:
        tied = "" if shape.tie_embeddings else ", or model.tie_embeddings: true"
        yield Problem(
            "tokenizer.vocab_size",
            str(vocab_size),
            f"embedding and output layer have {share:.0%} of the weights, and layers the rest",
            f"take a smaller vocabulary or a larger model{tied}",
        )


def data_are_not_repeated_often(run_config: RunConfig) -> Iterator[Problem]:
    """Data that are read more than 4 times teach less and less.

    Source: Muennighoff et al. 2023 (Scaling Data-Constrained Language Models): up to 4 epochs are
    nearly as good as new data, later ones are worth less and less.
    """
    passes = run_config.data.passes(run_config.training.train_samples)
    often = {name: epochs for name, epochs in passes.items() if epochs > MOST_EPOCHS}
    for name, epochs in often.items():
        yield Problem(
            "data.blend",
            name,
            f"its training documents are read {epochs:.1f} times; after 4 times they teach less "
            "and less",
            "take more text, give it a smaller weight, or train for fewer steps",
        )


# ---- what is kept and seen


def training_is_saved(checkpoint: CheckpointConfig, training: TrainingSection) -> Iterator[Problem]:
    """A crash should not cost more than 1,000 steps; the number is this project's choice."""
    steps, interval = resolve_training(training).train_iters, checkpoint.save_interval
    unsaved = min(interval, steps) or steps
    if unsaved > MOST_UNSAVED_STEPS:
        yield Problem(
            "checkpoint.save_interval",
            str(interval),
            f"a crash can cost {unsaved:,} steps (a stop by Ctrl-C or SIGTERM saves)",
            f"write {MOST_UNSAVED_STEPS} or less",
        )


def validation_is_measured_on_the_way(training: TrainingSection) -> Iterator[Problem]:
    """An interval beyond the end measures once, after the last step."""
    steps, interval = resolve_training(training).train_iters, training.eval_interval
    if interval > steps:
        yield Problem(
            "training.eval_interval",
            str(interval),
            f"is longer than the training ({steps:,} steps), so that the validation loss is "
            "measured once, at the end",
            f"write a part of it, such as {max(1, steps // 10)}",
        )


def prompts_end_without_a_space(evaluate: EvaluateConfig) -> Iterator[Problem]:
    """Byte-level tokenizers put a space and the word behind it into one token.

    Source: GPT-2's tokenizer, whose pattern takes a space together with the letters behind it.
    """
    for number, prompt in enumerate(evaluate.prompts):
        if evaluate.num_samples > 0 and prompt.strip() and prompt.endswith(" "):
            yield Problem(
                f"evaluate.prompts[{number}]",
                f'"{prompt}"',
                "ends with a space, which the model has seen at the beginning of words only",
                f'write "{prompt.rstrip()}"',
            )


ADVICE = (
    pipeline_waits_little,
    sizes_suit_the_gpu,
    learning_rate_is_usual,
    warmup_is_a_small_part,
    decay_ends_with_the_training,
    gradients_are_clipped,
    loss_scale_is_found_by_itself,
    vocabulary_does_not_dominate,
    data_are_not_repeated_often,
    training_is_saved,
    validation_is_measured_on_the_way,
    prompts_end_without_a_space,
)
