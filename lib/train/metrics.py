"""What a run reports: Megatron's log line, a row a step in CSV, and live figures in JSON.

The history in the state directory is the record; ``results/`` is written from it, so a resumed
run shows every step once although DVC deletes the results before each run.
"""

import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.atomic import write_text_atomically

TRAIN_COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "consumed_samples",
    "consumed_tokens",
    "global_batch_size",
    "loss_scale",
    "skipped",
    "nan",
    "step_ms",
    "data_wait_ms",
    "tokens_per_second",
    "samples_per_second",
    "tflops_per_gpu",
    "mfu",
)
GRADIENT_COLUMNS = ("step", "name", "norm", "max_abs", "mean", "zeros", "not_finite")
VALIDATION_COLUMNS = ("step", "loss", "perplexity", "samples", "tokens")


@dataclass(frozen=True)
class StepRow:
    """Everything reported about one optimizer step; the columns of ``results/train.csv``.

    Losses in nats per token, times in milliseconds; ``mfu`` is a fraction, or None for a device
    whose peak is unknown. ``skipped`` and ``nan`` are 1 for such a step, else 0.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    loss_scale: float
    skipped: int
    nan: int
    step_ms: float
    data_wait_ms: float
    tokens_per_second: float
    samples_per_second: float
    tflops_per_gpu: float
    mfu: float | None

    def as_row(self) -> dict[str, object]:
        """The row as it stands in the history."""
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """Rates of one step; ``mfu`` is a fraction, or None for a device whose peak is unknown."""

    tokens_per_second: float
    samples_per_second: float
    tflops_per_gpu: float
    mfu: float | None


@dataclass(frozen=True)
class Throughput:
    """Turns a step's time into rates.

    Attributes:
        tokens_per_sample: the sequence length, which may be another in a later phase of a run.
        flops_per_token: model FLOPs, see ``lib.model.flops``.
        processes: devices that share the work.
        peak_tflops: dense peak of one device, or None where unknown.
    """

    tokens_per_sample: int
    flops_per_token: float
    processes: int
    peak_tflops: float | None

    def of(self, seconds: float, samples: int) -> "Rates":
        """Rates of one step that took ``seconds``, over ``samples`` of all ranks together."""
        tokens = samples * self.tokens_per_sample
        tflops = tokens * self.flops_per_token / seconds / 1e12 / self.processes
        return Rates(
            tokens_per_second=tokens / seconds,
            samples_per_second=samples / seconds,
            tflops_per_gpu=tflops,
            mfu=None if self.peak_tflops is None else tflops / self.peak_tflops,
        )


def log_line(rows: list[StepRow], train_iters: int) -> str:
    """The line for the steps since the last one: means over them, counters of the last.

    Fields, spelling and order are Megatron's, since people search logs for them; tokens/s,
    samples/s, MFU and the share of the time that was spent waiting for data follow. As there, the
    loss is left out where its mean is not a number.
    """
    last = rows[-1]
    count = len(rows)
    all_ms = sum(row.step_ms for row in rows)
    loss = sum(row.loss for row in rows) / count

    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [
        f" [{stamp}] iteration {last.step:8d}/{train_iters:8d}",
        f" consumed samples: {last.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {all_ms / count:.1f}",
        f" throughput per GPU (TFLOP/s/GPU): {_over_time(rows, 'tflops_per_gpu'):.1f}",
        f" learning rate: {last.learning_rate:.6E}",
        f" global batch size: {last.global_batch_size:5d}",
    ]
    if loss >= 0:
        parts.append(f" lm loss: {loss:.6E}")
    mfu = "n/a" if last.mfu is None else f"{_over_time(rows, 'mfu'):.1%}"
    parts += [
        f" loss scale: {last.loss_scale:.1f}",
        f" grad norm: {last.grad_norm:.3f}",
        f" number of skipped iterations: {sum(row.skipped for row in rows):3d}",
        f" number of nan iterations: {sum(row.nan for row in rows):3d}",
        f" tokens/s: {_over_time(rows, 'tokens_per_second'):.0f}",
        f" samples/s: {_over_time(rows, 'samples_per_second'):.2f}",
        f" MFU: {mfu}",
        f" data wait: {sum(row.data_wait_ms for row in rows) / all_ms:.1%}",
    ]
    return " |".join(parts) + " |"


def _over_time(rows: Sequence[StepRow], rate: str) -> float:
    """What all steps did over their whole time; the mean of the rates would be higher."""
    done = sum((getattr(row, rate) or 0.0) * row.step_ms for row in rows)
    return done / sum(row.step_ms for row in rows)


def validation_lines(step: int, loss: float, sets: Mapping[str, float]) -> str:
    """Megatron's validation line between dashed rules, and one for each of several sets.

    Args:
        step: after which it was measured.
        loss: over all sets together, nats per token.
        sets: the loss on each; empty where there is only one.
    """
    lines = [
        f" validation loss at iteration {step}{name} | lm loss value: {value:.6E} "
        f"| lm loss PPL: {perplexity(value):.6E} | "
        for name, value in {
            "": loss,
            **{f" on {name}": each for name, each in sets.items()},
        }.items()
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join((rule, *lines, rule))


def perplexity(loss: float) -> float:
    """exp(loss), with Megatron's cap of exp(20)."""
    return math.exp(min(20.0, loss))


def loss_column(name: str) -> str:
    """The column of ``validation.csv`` with the loss on one of several validation sets."""
    return f"loss/{name}"


def _csv_text(columns: tuple[str, ...], rows: list[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


class ResultFiles:
    """``train.csv``, ``validation.csv`` and the live ``train.json`` of a run.

    Args:
        folder: ``results/``.
        train_rows: rows of the history so far, oldest first.
        validation_rows: likewise.
        gradient_rows: one for each step whose gradients were described.
        validation_sets: names of the sets that have a loss of their own in ``validation.csv``;
            none where there is only one.
    """

    def __init__(
        self,
        folder: Path,
        train_rows: list[dict[str, object]],
        validation_rows: list[dict[str, object]],
        gradient_rows: list[dict[str, object]],
        validation_sets: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._train = folder / "train.csv"
        self._validation = folder / "validation.csv"
        self._losses = ("loss", *map(loss_column, validation_sets))
        self._validation_columns = (*VALIDATION_COLUMNS, *self._losses[1:])
        for path, columns, rows in (
            (self._train, TRAIN_COLUMNS, train_rows),
            (self._validation, self._validation_columns, validation_rows),
        ):
            write_text_atomically(path, ",".join(columns) + "\n" + _csv_text(columns, rows))
        self._gradients = folder / "gradient_statistics.csv"
        self._gradients.unlink(missing_ok=True)
        for row in gradient_rows:
            parameters = row["parameters"]
            assert isinstance(parameters, list)
            self.add_gradients(parameters)
        self._last_validation = validation_rows[-1] if validation_rows else None

    def add_step(self, row: dict[str, object]) -> None:
        """Appends a step's row."""
        with self._train.open("a") as file:
            file.write(_csv_text(TRAIN_COLUMNS, [row]))

    def add_validation(self, row: dict[str, object]) -> None:
        """Appends a validation's row."""
        self._last_validation = row
        with self._validation.open("a") as file:
            file.write(_csv_text(self._validation_columns, [row]))

    def add_gradients(self, rows: list[dict[str, object]]) -> None:
        """Appends the statistics of one step's gradients; the first make the file."""
        is_new = not self._gradients.exists()
        with self._gradients.open("a") as file:
            file.write(",".join(GRADIENT_COLUMNS) + "\n" if is_new else "")
            file.write(_csv_text(GRADIENT_COLUMNS, rows))

    def write_live(self, row: dict[str, object], train_iters: int) -> None:
        """Replaces ``train.json`` by the figures of the latest step."""
        keep = ("step", "loss", "learning_rate", "grad_norm", "consumed_tokens")
        live: dict[str, object] = {"train_iters": train_iters}
        live |= {name: row[name] for name in keep}
        live |= {name: row[name] for name in ("tokens_per_second", "mfu")}
        if self._last_validation is not None:
            losses = {name: self._last_validation.get(name) for name in self._losses}
            live |= {f"validation_{name}": loss for name, loss in losses.items()}
            live["validation_step"] = self._last_validation["step"]
        for name, value in live.items():
            if isinstance(value, float) and not math.isfinite(value):
                live[name] = None  # JSON has no NaN
        text = json.dumps(live, indent=2) + "\n"
        write_text_atomically(self.folder / "train.json", text)
