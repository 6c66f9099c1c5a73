"""Rules on blends, validation sets and phases that need no data; see ``lib.config.rules``.

``corpora`` are the names of the section ``corpora``.
"""

from collections.abc import Iterator, Sequence

from lib.config.batch_rules import fewest_copies, has_sound_rampup
from lib.config.batch_schedule import BatchSchedule
from lib.config.data_section import (
    DataSection,
    blended_names,
    planned_phases,
    validation_names,
)
from lib.config.nearest import divisors_near, multiples_near
from lib.config.params_problems import nearest_keys
from lib.config.run_config import in_samples
from lib.config.schema import ParallelConfig, TrainingSection
from lib.errors import Problem

# ---- names


def imported_names_are_their_own(data: DataSection, corpora: Sequence[str]) -> Iterator[Problem]:
    """A name is one corpus."""
    for name, prefix in data.imported.items():
        if name in corpora:
            yield Problem(
                f"data.imported.{name}",
                prefix,
                "the section corpora has this name as well",
                "give it another name",
            )


def names_are_known(data: DataSection, corpora: Sequence[str]) -> Iterator[Problem]:
    """A name means a corpus of the section ``corpora`` or an imported pair."""
    lists = {"data.blend": data.blend or {}, "data.validation": data.validation or ()}
    lists |= {
        f"data.phases[{number}].blend": phase.blend or {}
        for number, phase in enumerate(data.phases)
    }
    known = (*corpora, *data.imported)
    for field, names in lists.items():
        for name in dict.fromkeys(names):
            if name in known:
                continue
            near = nearest_keys(name, known)
            remedy = f"did you mean {near[0]}? " if near else ""
            yield Problem(
                field,
                name,
                "is no name of corpora or data.imported",
                f"{remedy}there are {', '.join(known)}",
            )


def imported_tokens_are_read(
    data: DataSection, training: TrainingSection, corpora: Sequence[str]
) -> Iterator[Problem]:
    """Tokens that nothing reads were forgotten somewhere else."""
    blended = blended_names(planned_phases(training, data), corpora)
    read = {*blended, *validation_names(data, blended)}
    for name, prefix in data.imported.items():
        if name not in read:
            yield Problem(
                f"data.imported.{name}",
                prefix,
                "nothing reads it",
                "name it in data.blend (null takes only the section corpora) or in "
                "data.validation, or remove it",
            )


def validation_names_differ(data: DataSection) -> Iterator[Problem]:
    """A loss is measured once, and of something."""
    names = data.validation
    if names is None or (names and len(set(names)) == len(names)):
        return
    yield Problem(
        "data.validation",
        f"[{', '.join(names)}]",
        "must name at least one corpus, and each once",
        "write null for those of the blend; training.eval_interval: 0 measures nothing",
    )


# ---- weights and phases


def blends_have_a_positive_weight(data: DataSection) -> Iterator[Problem]:
    """Something has to be read."""
    blends = {"data.blend": data.blend}
    blends |= {
        f"data.phases[{number}].blend": each.blend for number, each in enumerate(data.phases)
    }
    for field, blend in blends.items():
        if blend is not None and not any(weight > 0 for weight in blend.values()):
            yield Problem(
                field,
                "{" + ", ".join(f"{name}: {weight:g}" for name, weight in blend.items()) + "}",
                "must have a weight above 0",
                "write {NAME: 1}, or null",
            )


def phases_begin_in_order(data: DataSection) -> Iterator[Problem]:
    """Each part begins after the one before it."""
    for number, (before, phase) in enumerate(zip(data.phases, data.phases[1:], strict=False), 1):
        if phase.from_samples <= before.from_samples:
            yield Problem(
                f"data.phases[{number}].from_samples",
                str(phase.from_samples),
                f"must be greater than that of the phase before it, {before.from_samples}",
                "write the phases in order, or one with both changes",
            )


def phases_begin_inside_the_training(
    data: DataSection, training: TrainingSection
) -> Iterator[Problem]:
    """A part after the end would never be."""
    end = in_samples(training.train_iters, training.train_samples, training.global_batch_size)
    for number, phase in enumerate(data.phases):
        if end is not None and phase.from_samples >= end:
            yield Problem(
                f"data.phases[{number}].from_samples",
                str(phase.from_samples),
                f"must be below the length of training, {end} samples",
                "begin it earlier, or train longer",
            )


def phases_begin_with_a_step(data: DataSection, training: TrainingSection) -> Iterator[Problem]:
    """All samples of a step are of one length and one blend."""
    if training.rampup_samples is not None and not has_sound_rampup(training):
        return
    schedule = BatchSchedule.of(training)
    for number, phase in enumerate(data.phases):
        ends = schedule.ends_near(phase.from_samples)
        if phase.from_samples not in ends:
            yield Problem(
                f"data.phases[{number}].from_samples",
                str(phase.from_samples),
                "must be where a step begins (training.global_batch_size = "
                f"{training.global_batch_size})",
                f"nearest: {' or '.join(map(str, ends))}",
            )


def phase_batches_divide(
    data: DataSection, training: TrainingSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """A step of each phase is a whole number of micro batches on every copy of the model."""
    copies = fewest_copies(parallel)
    for number, phase in enumerate(data.phases):
        micro = phase.micro_batch_size
        if micro is None:
            continue
        sizes = {"global_batch_size": training.global_batch_size}
        if phase.from_samples < (training.rampup_samples or 0):
            start, growth = training.rampup_start_batch_size, training.rampup_increment
            sizes |= {"rampup_start_batch_size": start or 0, "rampup_increment": growth or 0}
        for name, size in sizes.items():
            if size % (micro * copies):
                near = divisors_near(micro, size // copies) if size % copies == 0 else ""
                yield Problem(
                    f"data.phases[{number}].micro_batch_size",
                    str(micro),
                    f"times {copies} copies of the model must divide training.{name} = {size}",
                    f"nearest: {near}" if near else "change parallel.data or the batch",
                )


def phase_sequences_divide_by_tensor(
    data: DataSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Sequence parallelism cuts the sequences of each phase into equal parts."""
    for number, phase in enumerate(data.phases):
        length, tensor = phase.seq_length, parallel.tensor
        if parallel.sequence and length is not None and length % tensor:
            yield Problem(
                f"data.phases[{number}].seq_length",
                str(length),
                f"must be divisible by parallel.tensor = {tensor} with parallel.sequence: true",
                f"nearest: {multiples_near(length, tensor)}; or parallel.sequence: false",
            )


BLEND_RULES = (
    imported_names_are_their_own,
    names_are_known,
    imported_tokens_are_read,
    validation_names_differ,
    blends_have_a_positive_weight,
    phases_begin_in_order,
    phases_begin_inside_the_training,
    phases_begin_with_a_step,
    phase_batches_divide,
    phase_sequences_divide_by_tensor,
)
