"""The command: figures, the file, what it takes from the parameters, and clear refusals."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lib.errors import UserError
from stages.draw_schedule import Shape, chosen_shape, figures, simulated

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def params(tmp_path):
    def write(batch=32, **parallel):
        path = tmp_path / "params.yaml"
        lines = "".join(f"  {name}: {value}\n" for name, value in parallel.items())
        training = f"  seq_length: 64\n  micro_batch_size: 2\n  global_batch_size: {batch}\n"
        path.write_text(f"parallel:\n{lines}training:\n{training}  train_iters: 1\n")
        return path

    return write


def draw(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "stages.draw_schedule", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_picture_of_a_parameter_file(params, tmp_path):
    params(pipeline=2, virtual_stages=2, data=4)
    done = draw(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 0 F0.0-F1.0-F0.1-F1.1-F2.0-" in done.stdout
    for figure in (
        "micro batches: 4",
        "11.1%",
        "20.0%",
        "27 forwards",
        "5, 3 (micro batches x 1/2",
    ):
        assert figure in done.stdout
    root = ElementTree.parse(tmp_path / "outputs" / "schedule.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 2 * 2 * 2 * 4
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["schedule.svg"]


def test_options_need_no_parameter_file(tmp_path):
    options = ["--stages", "3", "--chunks", "1", "--micro-batches", "2", "--out", "a/b.svg"]
    done = draw(tmp_path, *options, "--backward-cost", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 2 ......F0-B0=F1-B1=......" in done.stdout
    assert (tmp_path / "a" / "b.svg").is_file()


def test_a_mistake_is_one_line_and_writes_nothing(tmp_path):
    done = draw(tmp_path, "--stages", "0")
    assert done.returncode == 1
    assert done.stderr == "error: --stages = 0: must be 1 or more; write 1, for example\n"
    assert list(tmp_path.iterdir()) == []


def test_options_come_before_the_parameters(params):
    path = params(pipeline=2, virtual_stages=3)
    assert chosen_shape(path, None, None, None) == Shape(2, 3, 16)
    assert chosen_shape(path, 4, None, None) == Shape(4, 3, 16)
    assert chosen_shape(path, None, 1, 5) == Shape(2, 1, 5)


def test_a_batch_that_does_not_divide_is_refused(params):
    path = params(batch=30, data=4)
    with pytest.raises(UserError, match=r"global_batch_size = 30: .* 2 x 4; give --micro-batches"):
        chosen_shape(path, None, None, None)
    assert chosen_shape(path, None, None, 7) == Shape(1, 1, 7)


@pytest.mark.parametrize("option", ["stages", "chunks", "micro_batches"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused(tmp_path, option, value):
    given = {"stages": 1, "chunks": 1, "micro_batches": 1, option: value}
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} = {value}: must be 1"):
        chosen_shape(tmp_path / "none", **given)


@pytest.mark.parametrize("cost", [0.0, -1.0, float("nan"), float("inf"), 11.0])
def test_costs_out_of_range_are_refused(cost):
    with pytest.raises(UserError, match=r"--backward-cost = .*must be 0.1 to 10"):
        simulated(Shape(1, 1, 1), cost)


def test_too_much_to_draw_is_refused():
    with pytest.raises(UserError, match="100,000 actions are too many"):
        simulated(Shape(5, 2, 5000), 2.0)


def test_figures_of_a_single_stage():
    shape = Shape(1, 1, 3)
    rows = dict(figures(shape, simulated(shape, 2.0)))
    assert rows["bubble (idle share of the step)"] == rows["by the formula"] == "0.0%"
    assert rows["activations kept at most, by stage"] == "1 (micro batches)"
