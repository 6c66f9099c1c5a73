"""Megatron-LM's flags of batches, lengths and the learning rate's course.

Megatron counts a whole run either in iterations or in samples. A length in tokens, as
Megatron-DeepSpeed has, is one in samples of ``seq-length`` tokens.
"""

from dataclasses import dataclass

from lib.config.batch_schedule import BatchSchedule
from lib.plan.megatron_flags import Importing

_DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "wsd"}
# Megatron warmed up for this share of the decay, unless told, while it had --batch-size.
_OLD_WARMUP = 0.01
_MICRO_BATCHES = ("num-microbatches", "num-microbatches-in-minibatch", "gas")
_WSD_STYLES = {
    "exponential": "exponential",
    "linear": "linear",
    "cosine": "cosine",
    "minus_sqrt": "minus_sqrt",
    "1-sqrt": "minus_sqrt",
}


@dataclass(frozen=True)
class _Length:
    """A length of the run: a number, its unit, and the flags that it comes from."""

    number: int
    unit: str
    flags: tuple[str, ...]


def import_lengths(importing: Importing, copies: int | None) -> None:
    """Puts batches, lengths and the course of the learning rate.

    Args:
        importing: with the model and the micro batch put already.
        copies: copies of the model, None where the script does not tell.
    """
    arguments = importing.arguments
    _sequence(importing)
    batches = _batches(importing, copies)
    _units_agree(importing)
    train = _train(importing, batches)
    decay = _length(importing, "lr-decay")
    _put(importing, "schedule.decay", decay)
    _put(importing, "schedule.warmup", _warmup(importing, decay or train, batches))
    kind = (arguments.text("lr-decay-style") or "linear").lower()
    if kind in _DECAYS:
        why = "" if arguments.has("lr-decay-style") else "Megatron's default of --lr-decay-style"
        importing.put("schedule.decay", _DECAYS[kind], "lr-decay-style", why=why)
    else:
        importing.leave("lr-decay-style", "cosine, linear, constant and wsd are here")
        importing.put_default("schedule.decay", "linear", "lr-decay-style")
    _wsd(importing, is_wsd=kind == "wsd")
    if arguments.number("lr-warmup-init"):
        importing.leave("lr-warmup-init", "the warm-up begins at 0 here")
    importing.agree("lr-warmup-init", "the warm-up begins at 0")


def _sequence(importing: Importing) -> None:
    arguments = importing.arguments
    flag = "seq-length" if arguments.has("seq-length") else "encoder-seq-length"
    if not arguments.has(flag):
        importing.refuse("seq-length", "the run needs it", "add --seq-length VALUE")
    elif (length := _count(importing, flag)) is not None:
        importing.put("training.seq_length", length, flag)


def _count(importing: Importing, flag: str, least: int = 1) -> int | None:
    """A flag's whole number; None where it is not given or too small."""
    number = importing.arguments.whole(flag) if importing.arguments.has(flag) else None
    if number is not None and number < least:
        importing.refuse(flag, f"must be {least} or more", "write another number")
        return None
    return number


def _batches(importing: Importing, copies: int | None) -> BatchSchedule | None:
    """Puts the batch and its ramp-up; None where they are not known."""
    batch = _global_batch(importing, copies)
    values = importing.arguments.wholes("rampup-batch-size")
    names = ("start_batch_size", "increment", "samples")
    if values and len(values) != len(names):
        importing.refuse("rampup-batch-size", "takes 3 numbers", "write START INCREMENT SAMPLES")
        values = values[:0]
    if values and (values[1] <= 0 or values[2] <= 0):
        values = values[:0]  # Megatron takes such as: no ramp-up
    if values and importing.arguments.has("train-iters"):
        importing.refuse(
            "rampup-batch-size",
            "--train-iters counts the run in iterations, and Megatron refuses a ramp-up then",
            "give all lengths in samples, or no ramp-up",
        )
    for number, name in enumerate(names):
        flags = ("rampup-batch-size",)
        importing.put(f"training.rampup_{name}", values[number] if values else None, *flags)
    if batch is None or batch < 1:
        return None
    if values and 0 < values[0] < batch and (batch - values[0]) % values[1] == 0:
        return BatchSchedule(batch, *values)
    return None if values else BatchSchedule.constant(batch)


def _global_batch(importing: Importing, copies: int | None) -> int | None:
    arguments, name = importing.arguments, "training.global_batch_size"
    if arguments.has("global-batch-size"):
        batch = _count(importing, "global-batch-size")
        if batch is not None:
            importing.put(name, batch, "global-batch-size")
        return batch
    micro = importing.value("training.micro_batch_size")
    if not isinstance(micro, int) or micro < 1:
        return None
    flag = next((each for each in _MICRO_BATCHES if arguments.has(each)), _MICRO_BATCHES[0])
    steps = _count(importing, flag) or 1
    why = f"micro-batch-size {micro} x {copies or 1} copies of the model"
    why += f" x {steps} micro batches" * (steps > 1)
    if copies is None:
        why += " (the script does not say how many: look at it)"
    batch = micro * (copies or 1) * steps
    importing.put(name, batch, flag, why=why)
    return batch


# ---- lengths


def _units_agree(importing: Importing) -> None:
    """A run in iterations has no lengths in samples, and the other way round."""
    arguments = importing.arguments
    in_samples = arguments.has("train-samples")
    if arguments.has("train-iters") == in_samples:
        if in_samples:
            importing.refuse("train-samples", "--train-iters is given as well", "keep one of them")
        return
    main = "train-samples" if in_samples else "train-iters"
    wrong = "iters" if in_samples else "samples"
    for flag in (f"lr-decay-{wrong}", f"lr-warmup-{wrong}"):
        given = arguments.given.get(flag)
        if given is not None and given.values[:1] != ("0",):
            importing.refuse(
                flag,
                f"--{main} counts the run in {'samples' if in_samples else 'iterations'}, and "
                "Megatron refuses the other unit",
                f"give all lengths in {'samples' if in_samples else 'iterations'}",
            )


def _train(importing: Importing, batches: BatchSchedule | None) -> _Length | None:
    """Puts the length of the run; None where no flag says it, or none that can be read."""
    arguments = importing.arguments
    known = len(arguments.problems) + len(importing.problems)
    train = _length(importing, "train")
    if train is not None:
        train = _sooner(importing, train, batches)
        _put_train(importing, train, batches)
    elif known == len(arguments.problems) + len(importing.problems):
        importing.refuse("train-iters", "the run needs a length", "add --train-iters N")
    return train


def _length(importing: Importing, stem: str) -> _Length | None:
    """A length: one in tokens counts before one in samples or iterations."""
    samples = _count(importing, f"{stem}-samples", least=0)
    iterations = _count(importing, f"{stem}-iters", least=0)
    tokens, length = _count(importing, f"{stem}-tokens"), importing.value("training.seq_length")
    if tokens is not None and isinstance(length, int):
        return _Length(-(-tokens // length), "samples", (f"{stem}-tokens",))
    if iterations:
        return _Length(iterations, "iters", (f"{stem}-iters",))
    return _Length(samples, "samples", (f"{stem}-samples",)) if samples else None


def _sooner(importing: Importing, train: _Length, batches: BatchSchedule | None) -> _Length:
    """A run with a length in tokens and another one ends with whichever comes first."""
    if train.flags != ("train-tokens",):
        return train
    read = importing.arguments.whole
    batch = batches.global_batch_size if batches else 0
    ends = {
        "train-tokens": train.number,
        "train-samples": read("train-samples") or 0,
        "train-iters": (read("train-iters") or 0) * batch,
    }
    first = min((flag for flag in ends if ends[flag] > 0), key=lambda flag: ends[flag])
    return _Length(ends[first], "samples", (first, *(flag for flag in ends if flag != first)))


def _put_train(importing: Importing, train: _Length, batches: BatchSchedule | None) -> None:
    """A run in samples ends with its last whole step, one in tokens with the step that fills it."""
    number, why = train.number, ""
    if train.flags[0] == "train-tokens":
        why = "tokens / seq-length"
    if train.unit == "samples" and batches is not None:
        ends = batches.ends_near(number)
        number = ends[-1] if why else min(ends[0], number)
        if number == 0:
            importing.refuse(train.flags[0], "must be one step at least", "train longer")
        if number != train.number:
            side = "first whole step after" if why else "last whole step before"
            why = f"the {side} {train.number} samples, where Megatron ends too"
    _put(importing, "training.train", _Length(number, train.unit, train.flags), why)


def _warmup(
    importing: Importing, decay: _Length | None, batches: BatchSchedule | None
) -> _Length | None:
    arguments = importing.arguments
    given = _length(importing, "lr-warmup")
    share = arguments.number("lr-warmup-fraction")
    is_old = any(flag.name == "batch-size" for flag in importing.launch.flags)
    if share is None and given is None and is_old:
        share = _OLD_WARMUP
    if share is None or decay is None:
        return given
    if given is not None:
        importing.refuse("lr-warmup-fraction", f"--{given.flags[0]} is given as well", "keep one")
    flags = ("lr-warmup-fraction",)
    exact = share * decay.number
    if decay.unit == "samples" or abs(exact - round(exact)) < 1e-6 * max(1.0, exact):
        return _Length(round(exact), decay.unit, flags)
    batch = batches.global_batch_size if batches else 1
    return _Length(round(exact * batch), "samples", flags)


def _put(importing: Importing, name: str, length: _Length | None, why: str = "") -> None:
    """Puts a length in its unit, and null in the other."""
    if length is not None and not why and "lr-warmup-fraction" in length.flags:
        why = "share of the decay, which is the training's length where no other is given"
        if not importing.arguments.has("lr-warmup-fraction"):
            why = "1 % of the decay: Megatron's default while it had --batch-size"
    for unit in ("iters", "samples"):
        if length is not None and length.unit == unit:
            importing.put(f"{name}_{unit}", length.number, *length.flags, why=why)
        else:
            importing.put(
                f"{name}_{unit}", None, why="the length is given in the other unit, or none"
            )


def _wsd(importing: Importing, *, is_wsd: bool) -> None:
    arguments = importing.arguments
    flags = ("lr-wsd-decay-iters", "lr-wsd-decay-samples", "lr-wsd-decay-style")
    if not is_wsd:
        for flag in flags:
            importing.leave(flag, "only --lr-decay-style WSD reads it", changes_result=False)
        _put(importing, "schedule.wsd_decay", None)
        return
    length = _length(importing, "lr-wsd-decay")
    if length is None:
        importing.refuse(flags[0], "--lr-decay-style WSD needs it", f"add --{flags[0]} N")
    _put(importing, "schedule.wsd_decay", length)
    style = arguments.text("lr-wsd-decay-style")
    if style is None:
        importing.put_default("schedule.wsd_style", "exponential", "lr-wsd-decay-style")
    elif style in _WSD_STYLES:
        importing.put("schedule.wsd_style", _WSD_STYLES[style], "lr-wsd-decay-style")
    else:
        importing.leave("lr-wsd-decay-style", f"{', '.join(_WSD_STYLES)} are here")
