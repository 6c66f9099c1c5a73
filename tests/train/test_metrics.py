"""What a run reports: Megatron's log line, CSV, live figures, rates by hand."""

import csv
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from lib.optim.gradient_statistics import gradient_statistics
from lib.parallel.groups import ParallelGroups
from lib.train.metrics import (
    GRADIENT_COLUMNS,
    TRAIN_COLUMNS,
    VALIDATION_COLUMNS,
    ResultFiles,
    StepRow,
    Throughput,
    log_line,
    validation_lines,
)

# Megatron's fields, spelling and order (its training_log), then ours.
LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(?P<iteration>\d+)/ *(?P<iters>\d+) \|"
    r" consumed samples: +(?P<samples>\d+) \|"
    r" elapsed time per iteration \(ms\): (?P<ms>\d+\.\d) \|"
    r" throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>\d+\.\d) \|"
    r" learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \|"
    r" global batch size: +(?P<batch>\d+) \|"
    r"( lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \|)?"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r" grad norm: (?P<norm>\d+\.\d{3}) \|"
    r" number of skipped iterations: +(?P<skipped>\d+) \|"
    r" number of nan iterations: +(?P<nan>\d+) \|"
    r" tokens/s: (?P<tokens_s>\d+) \|"
    r" samples/s: (?P<samples_s>\d+\.\d\d) \|"
    r" MFU: (?P<mfu>n/a|\d+\.\d%) \|"
    r" data wait: (?P<wait>\d+\.\d%) \|$"
)


def row(step=3, **changes):
    values = {
        "step": step,
        "loss": 2.5,
        "learning_rate": 3e-4,
        "grad_norm": 1.23456,
        "consumed_samples": 96,
        "consumed_tokens": 96 * 128,
        "global_batch_size": 32,
        "loss_scale": 1.0,
        "skipped": 0,
        "nan": 0,
        "step_ms": 200.0,
        "data_wait_ms": 1.0,
        "tokens_per_second": 32 * 128 / 0.2,
        "samples_per_second": 32 / 0.2,
        "tflops_per_gpu": 12.34,
        "mfu": 0.25,
    }
    return StepRow(**values | changes)


def test_the_whole_line():
    line = log_line([row()], 100)
    assert re.sub(r"\[.*?\]", "[time]", line) == (
        " [time] iteration        3/     100 | consumed samples:           96 |"
        " elapsed time per iteration (ms): 200.0 | throughput per GPU (TFLOP/s/GPU): 12.3 |"
        " learning rate: 3.000000E-04 | global batch size:    32 | lm loss: 2.500000E+00 |"
        " loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | tokens/s: 20480 | samples/s: 160.00 | MFU: 25.0% |"
        " data wait: 0.5% |"
    )
    assert LINE.match(line)


def test_means_of_loss_and_times_and_the_last_of_the_rest():
    rows = [
        row(1, loss=4.0, step_ms=100.0, tokens_per_second=40960.0, samples_per_second=320.0,
            tflops_per_gpu=30.0, mfu=0.6, learning_rate=1e-4, grad_norm=9.0, data_wait_ms=7.0),
        row(2, loss=3.0, step_ms=300.0, tokens_per_second=4096 / 0.3,
            samples_per_second=32 / 0.3, tflops_per_gpu=10.0, mfu=0.2, skipped=1, nan=1,
            consumed_samples=64, grad_norm=2.0),
    ]  # fmt: skip
    match = LINE.match(log_line(rows, 12_345_678))
    assert match
    assert (match["iteration"], match["iters"], match["samples"]) == ("2", "12345678", "64")
    assert (match["ms"], match["loss"], match["lr"]) == ("200.0", "3.500000E+00", "3.000000E-04")
    assert match["norm"] == "2.000"
    # Work over the time of both steps, 0.4 s: 2 x 4096 tokens, 2 x 3 TFLOP a device. (The mean of
    # the two rates would be 20 TFLOP/s.)
    assert (match["tflops"], match["mfu"]) == ("15.0", "30.0%")
    assert (match["tokens_s"], match["samples_s"]) == ("20480", "160.00")
    assert match["wait"] == "2.0%"  # 7 ms and 1 ms of 400 ms
    assert (match["skipped"], match["nan"]) == ("1", "1")


def test_steps_of_unlike_sizes_count_with_what_they_did():
    """A ramp-up, or a later phase with longer samples: 1000 tokens in 0.1 s, 6000 in 0.3 s."""
    rows = [
        row(1, step_ms=100.0, tokens_per_second=1000 / 0.1, samples_per_second=10 / 0.1),
        row(2, step_ms=300.0, tokens_per_second=6000 / 0.3, samples_per_second=20 / 0.3),
    ]
    match = LINE.match(log_line(rows, 100))
    assert match
    assert (match["tokens_s"], match["samples_s"]) == ("17500", "75.00")


@pytest.mark.parametrize("losses", [[math.nan], [2.0, math.nan], [-1.0]])
def test_a_loss_that_is_no_number_is_left_out(losses):
    match = LINE.match(log_line([row(loss=loss) for loss in losses], 100))
    assert match
    assert match["loss"] is None


def test_an_unknown_device_has_no_mfu():
    match = LINE.match(log_line([row(mfu=None)], 100))
    assert match
    assert match["mfu"] == "n/a"


def test_validation_lines():
    rule, line, again = validation_lines(30, 2.0, {}).split("\n")
    assert line == (
        " validation loss at iteration 30 | lm loss value: 2.000000E+00 "
        "| lm loss PPL: 7.389056E+00 | "
    )
    assert rule == again == "-" * len(line)
    lines = validation_lines(30, 2.0, {"web": 1.5, "code": 3.0}).split("\n")
    assert lines[1] == line
    assert lines[2:4] == [
        " validation loss at iteration 30 on web | lm loss value: 1.500000E+00 "
        "| lm loss PPL: 4.481689E+00 | ",
        " validation loss at iteration 30 on code | lm loss value: 3.000000E+00 "
        "| lm loss PPL: 2.008554E+01 | ",
    ]
    assert lines[0] == lines[4] == "-" * len(lines[3])


def test_rates_by_hand():
    """32 samples, 4096 tokens of 6 GFLOP, in 0.5 s on 4 devices: 12.288 TFLOP/s each, of 100."""
    throughput = Throughput(
        tokens_per_sample=128,
        flops_per_token=6e9,
        processes=4,
        peak_tflops=100.0,
    )
    rates = throughput.of(0.5, 32)
    assert rates.tokens_per_second == pytest.approx(8192.0)
    assert rates.samples_per_second == pytest.approx(64.0)
    assert rates.tflops_per_gpu == pytest.approx(12.288)
    assert rates.mfu == pytest.approx(0.12288)
    assert replace(throughput, peak_tflops=None).of(0.5, 32).mfu is None


def test_rows_have_the_columns_of_the_table():
    assert tuple(row().as_row()) == TRAIN_COLUMNS


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_files_show_history_and_new_rows_alike(tmp_path):
    history = [row(1, loss=0.1 + 0.2).as_row(), row(2, mfu=None).as_row()]
    files = ResultFiles(tmp_path, history, [], [])
    files.add_step(row(3, loss=math.nan, learning_rate=1e-300).as_row())
    files.add_validation({"step": 3, "loss": 2.0, "perplexity": 7.4, "samples": 8, "tokens": 80})
    table = read(tmp_path / "train.csv")
    assert (tmp_path / "train.csv").read_text().splitlines()[0] == ",".join(TRAIN_COLUMNS)
    assert [line["step"] for line in table] == ["1", "2", "3"]
    assert float(table[0]["loss"]) == 0.1 + 0.2  # nothing is rounded
    assert table[1]["mfu"] == ""
    assert math.isnan(float(table[2]["loss"]))
    assert float(table[2]["learning_rate"]) == 1e-300
    validation = read(tmp_path / "validation.csv")
    assert tuple(validation[0]) == VALIDATION_COLUMNS
    assert validation == [
        {"step": "3", "loss": "2.0", "perplexity": "7.4", "samples": "8", "tokens": "80"}
    ]


def test_a_restart_writes_the_history_once(tmp_path):
    rows = [row(step).as_row() for step in (1, 2, 3)]
    first = ResultFiles(tmp_path, [], [], [])
    for one in rows:
        first.add_step(one)
    before = (tmp_path / "train.csv").read_text()
    again = ResultFiles(tmp_path, rows[:2], [], [])  # step 3 was not saved: it is done again
    again.add_step(rows[2])
    assert (tmp_path / "train.csv").read_text() == before


def test_files_without_rows_have_a_heading(tmp_path):
    ResultFiles(tmp_path, [], [], [])
    assert (tmp_path / "train.csv").read_text() == ",".join(TRAIN_COLUMNS) + "\n"
    assert (tmp_path / "validation.csv").read_text() == ",".join(VALIDATION_COLUMNS) + "\n"


def test_several_validation_sets_have_a_column_each(tmp_path):
    """Also where rows of the history were measured on other sets."""
    old = {"step": 1, "loss": 3.0, "perplexity": 20.0, "samples": 8, "tokens": 80, "loss/gone": 1}
    files = ResultFiles(tmp_path, [], [old], [], ("web", "code"))
    files.add_validation(old | {"step": 2, "loss/web": 2.0, "loss/code": 4.0})
    (first, second) = read(tmp_path / "validation.csv")
    assert tuple(first) == (*VALIDATION_COLUMNS, "loss/web", "loss/code")
    assert (first["loss/web"], first["loss/code"]) == ("", "")
    assert (second["loss"], second["loss/web"], second["loss/code"]) == ("3.0", "2.0", "4.0")
    files.write_live(row(2).as_row(), 100)
    live = json.loads((tmp_path / "train.json").read_text())
    assert (live["validation_loss"], live["validation_loss/web"]) == (3.0, 2.0)


def gradients_of(step):
    """Rows as ``gradient_statistics`` gives them, which so decides the columns."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([0.0, -3.0, 4.0, float("inf")]) * step
    found = gradient_statistics({"weight": parameter, "bias": parameter}, ParallelGroups())
    return [{"step": step, **line} for line in found]


def test_gradient_statistics_are_a_line_a_parameter(tmp_path):
    assert tuple(gradients_of(1)[0]) == GRADIENT_COLUMNS
    files = ResultFiles(tmp_path, [], [], [])
    assert not (tmp_path / "gradient_statistics.csv").exists()
    files.add_gradients(gradients_of(1))
    files.add_gradients(gradients_of(2))
    text = (tmp_path / "gradient_statistics.csv").read_text()
    assert text.splitlines()[0] == ",".join(GRADIENT_COLUMNS)
    assert text.splitlines()[1:] == [
        # norm and largest of 3 and 4, their mean over three finite elements
        f"{step},{name},{5.0 * step},{4.0 * step},{step / 3},0.25,1"
        for step in (1, 2)
        for name in ("bias", "weight")
    ]
    history = [{"kind": "gradients", "iteration": s, "parameters": gradients_of(s)} for s in (1, 2)]
    ResultFiles(tmp_path, [], [], history)
    assert (tmp_path / "gradient_statistics.csv").read_text() == text
    ResultFiles(tmp_path, [], [], [])
    assert not (tmp_path / "gradient_statistics.csv").exists()


def test_live_figures(tmp_path):
    files = ResultFiles(tmp_path, [], [], [])
    files.write_live(row(4).as_row(), 100)
    live = json.loads((tmp_path / "train.json").read_text())
    assert (live["step"], live["loss"], live["train_iters"]) == (4, 2.5, 100)
    assert "validation_loss" not in live
    files.add_validation({"step": 4, "loss": 2.25, "perplexity": 9.5, "samples": 8, "tokens": 80})
    files.write_live(row(5, mfu=None).as_row(), 100)
    live = json.loads((tmp_path / "train.json").read_text())
    assert (live["step"], live["validation_loss"], live["validation_step"]) == (5, 2.25, 4)
    assert live["mfu"] is None


def test_live_figures_of_a_resumed_run_know_the_last_validation(tmp_path):
    validations = [{"step": s, "loss": s / 10, "perplexity": 1.0} for s in (10, 20)]
    files = ResultFiles(tmp_path, [], validations, [])
    files.write_live(row(21).as_row(), 100)
    live = json.loads((tmp_path / "train.json").read_text())
    assert (live["validation_loss"], live["validation_step"]) == (2.0, 20)


def test_live_figures_are_json_whatever_the_loss(tmp_path):
    files = ResultFiles(tmp_path, [], [], [])
    files.write_live(row(4, loss=math.nan, grad_norm=math.inf).as_row(), 100)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    live = json.loads((tmp_path / "train.json").read_text(), parse_constant=refuse)
    assert live["step"] == 4
