"""`make bench` measures real steps, says what they are, and refuses what cannot be. No timings."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lib.config.operation import RuntimeConfig
from lib.config.params_file import read_params
from lib.config.run_config import resolve
from lib.config.schema import ModelSection, ParallelConfig
from lib.errors import UserError
from lib.train.graphs import SETTLED_AFTER
from lib.train.random_tokens import random_tokens
from lib.workflow.measured_works import Machine, works_of
from lib.workflow.shapes import Shape, documents_for, measured_run
from lib.workflow.speed_report import Subject, figure_rows, parts_table, summaries, tell
from lib.workflow.step_figures import RankFigures, StepTimes, TimingPlan
from lib.workflow.trace_parts import read_trace
from stages import measure_speed
from stages.measure_speed import HUGGING_FACE, OURS, measure_on_rank
from tests.distributed import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(
    "tiny",
    ModelSection(num_layers=2, hidden_size=32, num_attention_heads=4),
    vocab_size=300,
    seq_length=16,
    micro_batch_size=2,
    micro_batches=2,
)
WARMUP, STEPS = 1, 2
NO_OPTIONS = {
    "shape": (),
    "tensor": None,
    "pipeline": None,
    "data": None,
    "sequence": False,
    "sharding": None,
    "virtual_stages": None,
    "micro_batch": None,
    "micro_batches": None,
    "recompute": None,
    "steps": STEPS,
    "no_baseline": False,
    "profile": None,
    "json_file": None,
}


def measured(folder, layout, *, beside, micro_batches=2):
    """Figures of all ranks that took the tiny model's steps on the CPU."""
    shape = replace(TINY, micro_batches=micro_batches)
    run = measured_run(shape, layout, "fp32")
    documents = documents_for(shape, 10, layout.data)
    config = resolve(run, random_tokens(folder / "tokens", run, shape.vocab_size, documents))
    profile = folder / "profile"
    profile.mkdir()
    plan = TimingPlan(WARMUP, STEPS, folder, profile, "tiny")
    texts = (config.to_json(), RuntimeConfig().model_dump_json())
    arguments = (*texts, "cpu", 1, plan, beside)
    return run_on_ranks(layout.processes, measure_on_rank, *arguments, timeout=240.0)


def subject(layout="tp1 pp1 dp1", processes=1, **changes):
    return Subject(
        **{
            "shape": "tiny",
            "parameters": 1000,
            "device": "cpu",
            "layout": layout,
            "pipeline": 1,
            "processes": processes,
            "micro_batch_size": 2,
            "micro_batches": 2,
            "tokens_per_step": 64 * processes,
            "compute": "fp32",
            "recompute": "none",
            "flops_per_token": 1e9,
            "peak_tflops": None,
        }
        | changes
    )


# ---- the real steps


def test_one_rank_beside_the_hugging_face_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    (rank,) = measured(tmp_path, ParallelConfig(data=1), beside=True)
    assert set(rank.ways) == {OURS, HUGGING_FACE}
    ours, theirs = rank.ways[OURS], rank.ways[HUGGING_FACE]
    # The same batches with the same weights, so the same losses, step after step.
    assert len(ours.losses) == WARMUP + STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.losses[0] == pytest.approx(math.log(300), rel=0.02)
    assert len(ours.seconds) == len(theirs.seconds) == STEPS
    assert ours.peak_bytes is None  # two ways share a process
    found = summaries(subject(), [rank], tmp_path / "profile")
    for way, each in zip((OURS, HUGGING_FACE), found, strict=True):
        assert each.way == way
        (parts,) = each.parts
        assert parts.parts["products"] > 0
        assert parts.parts["optimizer"] > 0
        assert sum(parts.parts.values()) == pytest.approx(parts.step)
        trace = tmp_path / "profile" / f"tiny-{way}-rank0.json.gz"
        assert {event.name for event in read_trace(trace, "cpu", pipeline=False)} >= {
            "aten::_fused_adamw_"
        }
        kernels = (tmp_path / "profile" / f"tiny-tp1-pp1-dp1-{way}-kernels.csv").read_text()
        assert kernels.startswith("part,calls,ms,name\n")
        assert '"aten::_fused_adamw_"' in kernels
    tell(found, tmp_path / "figures.jsonl")
    shown = capsys.readouterr().out
    assert "what takes longest on the first rank" in shown
    assert "products" in shown
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == [OURS, HUGGING_FACE]
    assert lines[0]["tokens_per_second"] == pytest.approx(64e3 / lines[0]["step_ms"])
    assert lines[0]["losses"] == ours.losses


def test_two_ranks_take_the_same_steps_as_one(tmp_path):
    """Two copies with two micro batches each read what one reads as four."""
    folders = [tmp_path / name for name in ("one", "two")]
    (alone,) = measured(folders[0], ParallelConfig(data=1), beside=False, micro_batches=4)
    both = measured(folders[1], ParallelConfig(data=2), beside=False)
    assert len(both) == 2
    for rank, figures in enumerate(both):
        times = figures.ways[OURS]
        assert times.losses == pytest.approx(alone.ways[OURS].losses, rel=1e-5)
        assert times.peak_bytes > 0
        assert times.trace == folders[1] / "profile" / f"tiny-{OURS}-rank{rank}.json.gz"
    (found,) = summaries(subject("tp1 pp1 dp2", 2), both, None)
    assert len(found.parts) == len(found.peak_bytes) == 2
    assert all(sum(e.parts.values()) == pytest.approx(e.step) for e in found.parts)


# ---- what is told


def rank_of(seconds, way=OURS, peak=2**30):
    return RankFigures("device", "sdpa", 0.5, {way: StepTimes([5.0, 4.0], seconds, peak)})


def test_a_step_takes_as_long_as_its_slowest_rank():
    ranks = [rank_of([1.0, 2.0, 9.0]), rank_of([1.5, 1.0, 1.0], peak=2**31)]
    (found,) = summaries(subject(processes=2, peak_tflops=0.5), ranks, None)
    assert found.step_ms == pytest.approx(2000)
    assert found.step_ms_range == pytest.approx((1500, 9000))
    assert found.tokens_per_second == pytest.approx(128 / 2)
    assert found.tflops_per_gpu == pytest.approx(64 * 1e9 / 1e12 / 2)
    assert found.mfu == pytest.approx(found.tflops_per_gpu / 0.5)
    assert found.peak_bytes == [2**30, 2**31]


def test_the_ratio_is_of_rates_per_device():
    (ours,) = summaries(subject("tp1 pp1 dp2", 2), [rank_of([1.0]), rank_of([1.0])], None)
    (plain,) = summaries(subject(), [rank_of([1.25], "plain-torch")], None)
    (other,) = summaries(subject(micro_batch_size=1), [rank_of([1.0])], None)
    rows = figure_rows([ours, plain, other])
    assert [row[-1] for row in rows] == ["1.250", "", ""]
    assert [row[4] for row in rows] == ["128", "51", "64"]
    assert rows[0][7] == "1.0"


def test_parts_of_both_ways_stand_side_by_side(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 2000, "tid": 1}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event]}))
    found = []
    for way, ms in ((OURS, 4.0), ("plain-torch", 8.0)):
        times = StepTimes([1.0], [1.0], None, trace, ms)
        found += summaries(subject(), [RankFigures("device", "", 0.0, {way: times})], None)
    headers, rows = parts_table(*found)
    assert headers == ("ms", OURS, "plain-torch")
    cells = {name: [cell.split() for cell in cells] for name, *cells in rows}
    assert cells["products"] == [["2.0", "50.0%"], ["2.0", "25.0%"]]
    assert cells["idle"] == [["2.0", "50.0%"], ["6.0", "75.0%"]]
    assert "attention" not in cells


def test_names_of_files_have_no_folders_in_them():
    assert subject("tp1 pp1 dp4/2").name == "tiny-tp1-pp1-dp4-2"


# ---- what is measured


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without a tokenizer
    return read_params(ROOT / "params.yaml")


def works(file, machine, **options):
    found = works_of(file, NO_OPTIONS | options, machine)
    return [(work.shape.name, work.shape.micro_batch_size, work.layout) for work in found]


def test_a_cpu_takes_the_model_of_the_file(file):
    assert works(file, Machine("cpu")) == [("params", 8, ParallelConfig(data=1))]
    (work,) = works_of(file, NO_OPTIONS, Machine("cpu"))
    assert work.compute == "fp32"
    assert (work.shape.vocab_size, work.shape.micro_batches) == (4096, 2)
    found = works(file, Machine("cpu"), shape=("125m",), data=2, micro_batch=1)
    assert found == [("125m", 1, ParallelConfig(data=2))]


def test_the_vocabulary_is_that_of_the_tokenizer(file, tmp_path):
    text = file.path.read_text().replace("  kind: train_bpe", "  kind: sentencepiece")
    text = text.replace("  path: null", "  path: my.model")
    (tmp_path / "params.yaml").write_text(text)
    file = read_params(tmp_path / "params.yaml")
    with pytest.raises(UserError, match=r"tokenizer\.kind = sentencepiece"):
        works_of(file, NO_OPTIONS, Machine("cpu"))
    info = {"fingerprint": "f", "vocab_size": 50257, "end_of_document": {"id": 0}}
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)
    (tmp_path / "data" / "tokenizer" / "tokenizer_info.json").write_text(json.dumps(info))
    (work,) = works_of(file, NO_OPTIONS, Machine("cpu"))
    assert work.shape.vocab_size == 50257


def test_gpus_take_what_fits_them(file):
    one, two = ParallelConfig(data=1), ParallelConfig(data=2)
    found = works(file, Machine("cuda", 2, 150_000_000_000))
    names = [(name, layout) for name, _, layout in found]
    assert names == [(name, each) for name in ("125m", "1.4b", "7b") for each in (one, two)]
    small = works(file, Machine("cuda", 1, 16_000_000_000))
    assert [(name, layout) for name, _, layout in small] == [("125m", one)]
    asked = {"tensor": 2, "sequence": True, "shape": ("1.4b",), "micro_batch": 4}
    layout = ParallelConfig(tensor=2, sequence=True, data=2)
    assert works(file, Machine("cuda", 4, 1), **asked) == [("1.4b", 4, layout)]


def test_more_gpus_than_there_are_is_refused(file):
    machine = Machine("cuda", 2, 150_000_000_000)
    with pytest.raises(UserError, match=r"pipeline 4 x data 1 needs 4 GPUs, .* machine shows 2"):
        works(file, machine, shape=("1.4b",), pipeline=4)
    with pytest.raises(UserError, match=r"data 3 needs 3 GPUs"):
        works(file, machine, shape=("1.4b",), data=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor", "5"), "model.num_attention_heads"),
        (("--virtual-stages", "2"), "parallel.virtual_stages"),
        (("--shape", "13b"), "Invalid value for '--shape'"),
    ],
)
def test_the_command_refuses_before_it_measures(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "stages.measure_speed", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "measuring" not in done.stdout


def test_steps_are_timed_once_a_run_has_settled_on_graphs():
    assert measure_speed._WARMUP >= SETTLED_AFTER
