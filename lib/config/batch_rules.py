"""Rules on batch sizes and their ramp-up; see ``lib.config.rules``.

Where ``parallel.data`` is null the number of copies is known at launch only, and
``lib.config.launch_plan`` checks it; here what no number of copies could make good is refused.
"""

from collections.abc import Iterator

from lib.config.batch_schedule import BatchSchedule
from lib.config.nearest import divisors_near, multiples_near
from lib.config.schema import ParallelConfig, ScheduleSection, TrainingSection
from lib.errors import Problem

_RAMPUP_KEYS = ("rampup_start_batch_size", "rampup_increment", "rampup_samples")


def fewest_copies(parallel: ParallelConfig) -> int:
    """Copies of the model that there are in any case."""
    return parallel.data or parallel.data_shard or 1


def has_sound_rampup(training: TrainingSection) -> bool:
    """Whether there is a ramp-up that ends at the full batch."""
    start, growth = training.rampup_start_batch_size, training.rampup_increment
    if start is None or growth is None or training.rampup_samples is None:
        return False
    missing = training.global_batch_size - start
    return missing > 0 and missing % growth == 0


def global_batch_divides(training: TrainingSection, parallel: ParallelConfig) -> Iterator[Problem]:
    """A step is a whole number of micro batches on every copy of the model."""
    batch, micro, copies = (
        training.global_batch_size,
        training.micro_batch_size,
        fewest_copies(parallel),
    )
    unit = micro * copies
    if batch % unit == 0:
        return
    remedy = f"nearest global_batch_size: {multiples_near(batch, unit)}"
    if batch % copies == 0:
        remedy += f"; nearest micro_batch_size: {divisors_near(micro, batch // copies)}"
    yield Problem(
        "training.global_batch_size",
        str(batch),
        f"must be divisible by {_unit(training, parallel)}",
        remedy,
    )


def _unit(training: TrainingSection, parallel: ParallelConfig) -> str:
    """The samples that all copies compute at once, as a product."""
    factors = f"training.micro_batch_size = {training.micro_batch_size}"
    copies = fewest_copies(parallel)
    if copies > 1:
        name = "data_shard" if parallel.data is None else "data"
        factors += f" x parallel.{name} = {copies}"
    return factors


def train_samples_are_whole_steps(training: TrainingSection) -> Iterator[Problem]:
    """Training ends after a whole step."""
    samples, batch = training.train_samples, training.global_batch_size
    if samples is None or training.rampup_samples is not None:
        return
    if samples % batch:
        yield Problem(
            "training.train_samples",
            str(samples),
            f"must be divisible by training.global_batch_size = {batch}",
            f"nearest: {multiples_near(samples, batch)}",
        )


def train_samples_are_whole_steps_of_the_rampup(training: TrainingSection) -> Iterator[Problem]:
    """As above, where steps are of several sizes."""
    samples = training.train_samples
    if samples is None or not has_sound_rampup(training):
        return
    ends = BatchSchedule.of(training).ends_near(samples)
    if samples not in ends:
        yield Problem(
            "training.train_samples",
            str(samples),
            "must be where a step ends, with the ramp-up's smaller batches counted",
            f"nearest: {' or '.join(map(str, ends))}",
        )


def rampup_is_given_whole(training: TrainingSection) -> Iterator[Problem]:
    """A ramp-up is a start, a growth and a length."""
    values = {name: getattr(training, name) for name in _RAMPUP_KEYS}
    given = [f"training.{name} = {value}" for name, value in values.items() if value is not None]
    for name, value in values.items():
        if given and value is None:
            yield Problem(
                f"training.{name}",
                "null",
                f"must be given, as {' and '.join(given)} is",
                "write a number, or null for all three rampup_* keys",
            )


def rampup_starts_below_the_full_batch(training: TrainingSection) -> Iterator[Problem]:
    """The batch grows."""
    start, batch = training.rampup_start_batch_size, training.global_batch_size
    if start is not None and start >= batch:
        remedy = "null for all three rampup_* keys"
        yield Problem(
            "training.rampup_start_batch_size",
            str(start),
            f"must be below training.global_batch_size = {batch}",
            f"write {batch - 1} or less, or {remedy}" if batch > 1 else f"write {remedy}",
        )


def rampup_ends_at_the_full_batch(training: TrainingSection) -> Iterator[Problem]:
    """The batch grows by equal parts."""
    start, growth = training.rampup_start_batch_size, training.rampup_increment
    if start is None or growth is None:
        return
    missing = training.global_batch_size - start
    if missing > 0 and missing % growth:
        yield Problem(
            "training.rampup_increment",
            str(growth),
            f"must divide training.global_batch_size - rampup_start_batch_size = {missing}",
            f"nearest: {divisors_near(growth, missing)}",
        )


def rampup_batches_divide(training: TrainingSection, parallel: ParallelConfig) -> Iterator[Problem]:
    """Every batch of the ramp-up is a whole number of micro batches on every copy."""
    unit = training.micro_batch_size * fewest_copies(parallel)
    for name in ("rampup_start_batch_size", "rampup_increment"):
        value: int | None = getattr(training, name)
        if value is not None and value % unit:
            yield Problem(
                f"training.{name}",
                str(value),
                f"must be divisible by {_unit(training, parallel)}",
                f"nearest: {multiples_near(value, unit)}",
            )


def rampup_wants_lengths_in_samples(
    training: TrainingSection, schedule: ScheduleSection
) -> Iterator[Problem]:
    """An iteration is not one number of samples while the batch grows."""
    if training.rampup_samples is None:
        return
    lengths = {
        "training.train": training.train_iters,
        "schedule.warmup": schedule.warmup_iters,
        "schedule.decay": schedule.decay_iters,
        "schedule.wsd_decay": schedule.wsd_decay_iters,
    }
    for name, value in lengths.items():
        if value is not None:
            yield Problem(
                f"{name}_iters",
                str(value),
                f"must be null while training.rampup_samples = {training.rampup_samples}: "
                "steps differ in size",
                f"give {name}_samples instead",
            )


BATCH_RULES = (
    global_batch_divides,
    train_samples_are_whole_steps,
    train_samples_are_whole_steps_of_the_rampup,
    rampup_is_given_whole,
    rampup_starts_below_the_full_batch,
    rampup_ends_at_the_full_batch,
    rampup_batches_divide,
    rampup_wants_lengths_in_samples,
)
