"""Rules across fields and sections of params.yaml: one rule, one function.

Rules on the layout, on batches, on blends, on the tokens and on the export have files of their own
beside this one. A rule takes the sections that it compares, by name: ``model``, ``training``, ...,
``corpora`` (the names in that section), and of what was read ``tokens_facts``, ``origins``,
``tokenizer_facts`` and ``vocab_size``. It yields what is
wrong, with the nearest legal values. ``broken_rules`` runs them all, so that a person sees every
problem at once; a rule is left out where a section that it needs is broken in itself or not there
yet.

Nothing is ever rounded to fit: a batch that does not divide is refused, not shrunk.
"""

from collections.abc import Iterator, Mapping

from lib.config.batch_rules import BATCH_RULES
from lib.config.blend_rules import BLEND_RULES
from lib.config.data_rules import DATA_RULES
from lib.config.data_section import DataSection
from lib.config.export_rules import EXPORT_RULES
from lib.config.initial_rules import INITIAL_RULES
from lib.config.layout_rules import LAYOUT_RULES
from lib.config.nearest import divisors_near, multiples_near
from lib.config.operation import EvaluateConfig
from lib.config.rule import Rule, problems_of
from lib.config.run_config import in_samples, longest_seq_length
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.errors import Problem


def broken_rules(sections: Mapping[str, object]) -> list[Problem]:
    """What all rules that can be run on these sections find."""
    return problems_of(ALL_RULES, sections)


# ---- the model


def hidden_size_divides_into_heads(model: ModelSection) -> Iterator[Problem]:
    """Without head_dim, each head gets hidden_size / num_attention_heads."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.head_dim is None and hidden % heads:
        yield Problem(
            "model.hidden_size",
            str(hidden),
            f"must be divisible by model.num_attention_heads = {heads}, as head_dim is null",
            f"nearest hidden_size: {multiples_near(hidden, heads)}; nearest num_attention_heads: "
            f"{divisors_near(heads, hidden)}; or give head_dim",
        )


def heads_divide_into_query_groups(model: ModelSection) -> Iterator[Problem]:
    """Each group of query heads shares one key and value head."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups is not None and heads % groups:
        yield Problem(
            "model.num_query_groups",
            str(groups),
            f"must divide model.num_attention_heads = {heads}",
            f"nearest: {divisors_near(groups, heads)}",
        )


def rope_needs_even_head_dim(model: ModelSection) -> Iterator[Problem]:
    """Rotary positions turn pairs of entries."""
    if model.position_embedding != "rope":
        return
    size = model.head_dim or model.hidden_size // model.num_attention_heads
    divides = model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0
    if divides and size % 2:
        yield Problem(
            "model.head_dim",
            str(size) if model.head_dim else f"{size} (hidden_size / num_attention_heads)",
            "must be even for position_embedding: rope",
            f"nearest: {multiples_near(size, 2)}; or position_embedding: learned",
        )


def positions_cover_the_sequence(
    model: ModelSection, training: TrainingSection, data: DataSection
) -> Iterator[Problem]:
    """A learned position has a row of its own, so there must be one for each token."""
    rows, longest = model.max_position_embeddings, longest_seq_length(training, data)
    if model.position_embedding == "learned" and rows is not None and rows < longest:
        yield Problem(
            "model.max_position_embeddings",
            str(rows),
            f"must be at least the longest seq_length = {longest} for learned positions",
            f"write {longest} or more, null, or a seq_length of at most {rows}",
        )


# ---- number types


def loss_scale_is_for_fp16(precision: PrecisionConfig) -> Iterator[Problem]:
    """Only fp16 loses small gradients."""
    if precision.loss_scale is not None and precision.compute != "fp16":
        yield Problem(
            "precision.loss_scale",
            f"{precision.loss_scale:g}",
            f"precision.compute: {precision.compute} does not read it",
            "write null, or compute: fp16",
        )


def loss_scale_begins_above_its_floor(precision: PrecisionConfig) -> Iterator[Problem]:
    """The scale falls from its first value, never below the least one."""
    first, least = precision.initial_loss_scale, precision.min_loss_scale
    if first < least:
        yield Problem(
            "precision.initial_loss_scale",
            f"{first:g}",
            f"must be at least precision.min_loss_scale = {least:g}",
            f"write {least:g} or more, or min_loss_scale: {first:g} or less",
        )


# ---- lengths


def lengths_are_given_once(
    training: TrainingSection, schedule: ScheduleSection
) -> Iterator[Problem]:
    """A length is in iterations or in samples, never in both."""
    lengths = (
        ("training.train", training.train_iters, training.train_samples),
        ("schedule.warmup", schedule.warmup_iters, schedule.warmup_samples),
        ("schedule.decay", schedule.decay_iters, schedule.decay_samples),
        ("schedule.wsd_decay", schedule.wsd_decay_iters, schedule.wsd_decay_samples),
    )
    for name, iterations, samples in lengths:
        if iterations is not None and samples is not None:
            yield Problem(
                f"{name}_samples",
                str(samples),
                f"{name}_iters = {iterations} is given as well",
                "set one of the two to null",
            )
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            "training.train_iters",
            "null",
            "the length of training must be given",
            "give training.train_iters or training.train_samples",
        )


def warmup_ends_before_the_decay_and_the_training(
    schedule: ScheduleSection, training: TrainingSection
) -> Iterator[Problem]:
    """The peak must be reached, and what follows must have a length."""
    batch = training.global_batch_size
    warmup = in_samples(schedule.warmup_iters, schedule.warmup_samples, batch)
    train = in_samples(training.train_iters, training.train_samples, batch)
    decay = in_samples(schedule.decay_iters, schedule.decay_samples, batch)
    if not warmup:
        return
    unit, one = ("iters", batch) if schedule.warmup_iters is not None else ("samples", 1)
    ends = [(_given("training.train", training.train_iters), "the length of training", train)]
    if decay is not None and schedule.decay != "constant":
        ends.append((_given("schedule.decay", schedule.decay_iters), "the end of the decay", decay))
    ends = [end for end in ends if end[2] is not None and warmup >= end[2]]
    if ends:
        limit = min(length for _, _, length in ends if length is not None)
        what = " and ".join(f"{text} ({given}, {length} samples)" for given, text, length in ends)
        yield Problem(
            f"schedule.warmup_{unit}",
            str(warmup // one),
            f"warm-up ({warmup} samples) must be shorter than {what}",
            f"write {max(0, -(-limit // one) - 1)} or less, or make the other longer",
        )


def _given(name: str, iterations: int | None) -> str:
    """The key of a length that is given."""
    return f"{name}_samples" if iterations is None else f"{name}_iters = {iterations}"


def wsd_decay_is_given_for_wsd_only(schedule: ScheduleSection) -> Iterator[Problem]:
    """Only wsd has a last part of its own, and it needs one."""
    lengths = {"iters": schedule.wsd_decay_iters, "samples": schedule.wsd_decay_samples}
    given = {unit: length for unit, length in lengths.items() if length is not None}
    if schedule.decay == "wsd" and not given:
        yield Problem(
            "schedule.wsd_decay_iters",
            "null",
            "schedule.decay: wsd needs the length of its last part",
            "write it in iterations, usually 10 to 20 % of decay_iters",
        )
    if schedule.decay != "wsd":
        for unit, length in given.items():
            yield Problem(
                f"schedule.wsd_decay_{unit}",
                str(length),
                f"schedule.decay: {schedule.decay} does not read it",
                "write null, or decay: wsd",
            )


def wsd_decay_fits_after_the_warmup(
    schedule: ScheduleSection, training: TrainingSection
) -> Iterator[Problem]:
    """The last part of wsd ends with the decay and begins after the warm-up."""
    batch = training.global_batch_size
    last = in_samples(schedule.wsd_decay_iters, schedule.wsd_decay_samples, batch)
    decay = in_samples(schedule.decay_iters, schedule.decay_samples, batch)
    if decay is None:
        decay = in_samples(training.train_iters, training.train_samples, batch)
    if schedule.decay != "wsd" or last is None or decay is None:
        return
    warmup = in_samples(schedule.warmup_iters, schedule.warmup_samples, batch) or 0
    unit, one = ("iters", batch) if schedule.wsd_decay_iters is not None else ("samples", 1)
    if warmup < decay < warmup + last:
        yield Problem(
            f"schedule.wsd_decay_{unit}",
            str(last // one),
            f"warm-up ({warmup} samples) and last part ({last}) must fit in the decay ({decay})",
            f"write {(decay - warmup) // one} or less, or make the decay longer",
        )


def min_lr_is_at_most_lr(
    schedule: ScheduleSection, optimizer: OptimizerConfig
) -> Iterator[Problem]:
    """The rate decays, it does not rise."""
    if schedule.min_lr > optimizer.lr:
        yield Problem(
            "schedule.min_lr",
            str(schedule.min_lr),
            f"must be at most optimizer.lr = {optimizer.lr}",
            f"write {optimizer.lr} or less; a tenth of it, {optimizer.lr / 10:g}, is usual",
        )


# ---- evaluation


def evaluation_takes_batches(training: TrainingSection) -> Iterator[Problem]:
    """A measurement of nothing has no mean."""
    if training.eval_interval > 0 and training.eval_iters == 0:
        yield Problem(
            "training.eval_iters",
            "0",
            f"must be at least 1 while training.eval_interval = {training.eval_interval}",
            "write 1 or more, or eval_interval: 0 to measure nothing",
        )


def top_k_is_at_most_the_vocabulary(evaluate: EvaluateConfig, vocab_size: int) -> Iterator[Problem]:
    """There are no more tokens to choose among than the vocabulary has."""
    if evaluate.top_k is not None and evaluate.top_k > vocab_size:
        yield Problem(
            "evaluate.top_k",
            str(evaluate.top_k),
            f"must be at most the vocabulary, {vocab_size} tokens",
            f"write {vocab_size} or less, or null for all tokens",
        )


ALL_RULES: tuple[Rule, ...] = (
    hidden_size_divides_into_heads,
    heads_divide_into_query_groups,
    rope_needs_even_head_dim,
    positions_cover_the_sequence,
    loss_scale_is_for_fp16,
    loss_scale_begins_above_its_floor,
    lengths_are_given_once,
    warmup_ends_before_the_decay_and_the_training,
    wsd_decay_is_given_for_wsd_only,
    wsd_decay_fits_after_the_warmup,
    min_lr_is_at_most_lr,
    evaluation_takes_batches,
    top_k_is_at_most_the_vocabulary,
    *LAYOUT_RULES,
    *BATCH_RULES,
    *BLEND_RULES,
    *DATA_RULES,
    *EXPORT_RULES,
    *INITIAL_RULES,
)
