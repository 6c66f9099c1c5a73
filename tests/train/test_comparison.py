"""The comparison of layouts finds what is wrong, and finds nothing where nothing is."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lib.config.data_section import DataSection, PhaseSection
from lib.config.operation import RuntimeConfig
from lib.config.params_file import read_params
from lib.config.rules import broken_rules
from lib.config.run_config import Params
from lib.config.schema import ParallelConfig
from lib.train import comparison
from lib.train.comparison import KEY_BIAS, Outcome, compare, run_layout, with_layout
from lib.train.comparison_cases import (
    is_admitted,
    layouts_up_to,
    small_version,
)
from stages import compare_layouts
from tests.train.tiny_run import tiny_config, write_tokens

ROOT = Path(__file__).resolve().parents[2]
_KEY = f"layers.0.self_attention.{KEY_BIAS}"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


# ---- the differences of two outcomes


def outcome(**changes):
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(4, 5, generator=generator, dtype=torch.float64)
        for name in ("embedding", "layers.0.weight", _KEY)
    }
    gradients = {name: value / 3 for name, value in tensors.items()}
    return Outcome(**{
        "losses": [3.0, 2.0], "norms": [1.0, 0.5], "gradients": gradients, "weights": tensors
    } | changes)  # fmt: skip


def changed(tensors, name, factor=1.0, entry=None):
    value = tensors[name] * factor
    if entry is not None:
        value[1, 2] = entry
    return tensors | {name: value}


def test_equal_outcomes_do_not_differ():
    assert compare(outcome(), outcome()).worst() == 0.0


@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_a_spoiled_tensor_is_found_and_named(kind):
    spoiled = changed(getattr(outcome(), kind), "layers.0.weight", 1 + 1e-6)
    found = compare(outcome(**{kind: spoiled}), outcome())
    size, name = {"gradients": found.gradient, "weights": found.weight}[kind]
    assert name == "layers.0.weight"
    assert size == pytest.approx(1e-6, rel=1e-6)
    assert found.worst() == size
    assert (found.loss, found.norm) == (0.0, 0.0)


def test_a_single_spoiled_entry_is_found():
    reference = outcome()
    spoiled = changed(reference.gradients, "embedding", entry=0.0)
    expected = (
        reference.gradients["embedding"][1, 2].abs() / reference.gradients["embedding"].norm()
    )
    assert compare(outcome(gradients=spoiled), reference).gradient == (
        pytest.approx(expected.item()),
        "embedding",
    )


@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_a_missing_and_an_odd_tensor_are_infinitely_far(kind):
    tensors = getattr(outcome(), kind)
    without = {name: value for name, value in tensors.items() if name != "embedding"}
    more = tensors | {"extra": torch.ones(1)}
    for other, name in ((without, "embedding"), (more, "extra")):
        found = compare(outcome(**{kind: other}), outcome())
        assert getattr(found, kind.removesuffix("s")) == (math.inf, name)
        assert found.worst() == math.inf


@pytest.mark.parametrize("kind", ["gradients", "weights"])
@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_a_tensor_that_is_not_finite_is_infinitely_far(kind, entry):
    reference = outcome()
    for name in ("embedding", "layers.0.weight"):
        spoiled = changed(getattr(reference, kind), name, entry=entry)
        found = compare(outcome(**{kind: spoiled}), reference)
        assert getattr(found, kind.removesuffix("s")) == (math.inf, name)


@pytest.mark.parametrize("kind", ["losses", "norms"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(kind, place, value):
    numbers = list(getattr(outcome(), kind))
    numbers[place] = value
    for one, other in (
        (outcome(**{kind: numbers}), outcome()),
        (outcome(), outcome(**{kind: numbers})),
        (outcome(**{kind: numbers}), outcome(**{kind: numbers})),
    ):
        assert compare(one, other).worst() == math.inf


def test_a_loss_and_a_norm_are_compared_relatively_over_all_steps():
    found = compare(outcome(losses=[3.0, 2.2], norms=[0.75, 0.5]), outcome())
    assert (found.loss, found.norm) == (pytest.approx(0.1), pytest.approx(0.25))


def test_key_biases_are_left_out_but_must_be_there():
    reference = outcome()
    for kind in ("gradients", "weights"):
        tensors = getattr(reference, kind)
        noisy = changed(tensors, _KEY, 100.0)
        assert compare(outcome(**{kind: noisy}), reference).worst() == 0.0
        without = {name: value for name, value in tensors.items() if name != _KEY}
        assert compare(outcome(**{kind: without}), reference).worst() == math.inf


# ---- runs on ranks


def test_two_copies_train_as_one(manifest):
    config = tiny_config(manifest, precision__compute="fp64")
    alone = run_layout(config, RuntimeConfig(), 1, 3)
    laid_out = with_layout(config, ParallelConfig(data=2, sharding="parameters"))
    found = compare(run_layout(laid_out, RuntimeConfig(), 2, 3), alone)
    assert found.worst() < 1e-9
    assert len(alone.losses) == len(alone.norms) == 3
    assert set(alone.gradients) == set(alone.weights)


def test_another_run_is_another_outcome(manifest):
    """What the test above calls equal could also be a comparison of nothing."""
    config = tiny_config(manifest, precision__compute="fp64")
    alone = run_layout(config, RuntimeConfig(), 1, 2)
    for change in ({"training__seed": 5}, {"optimizer__weight_decay": 0.3}):
        other = tiny_config(manifest, precision__compute="fp64", **change)
        found = compare(run_layout(other, RuntimeConfig(), 1, 2), alone)
        assert found.weight[0] > 1e-6
    assert found.gradient[0] == 0.0  # decay is no part of the first gradient


# ---- cases


@pytest.fixture
def params():
    return Params.from_file(read_params(ROOT / "params.yaml")).without_dropout()


MODELS = {
    "as it is": {},
    "grouped": {"num_attention_heads": 8, "num_query_groups": 2, "hidden_size": 64},
    "odd": {"num_attention_heads": 3, "num_layers": 5, "vocab_size_multiple": 3},
    "shallow": {"num_attention_heads": 4, "num_layers": 2},
}


def admitted_by_hand(model):
    """Layouts of 2 to 4 processes, from what each kind of parallelism needs."""
    groups = model.num_query_groups or model.num_attention_heads
    found = set()
    for tensor in range(1, 5):
        heads_fit = model.num_attention_heads % tensor == 0
        heads_fit = heads_fit and (groups % tensor == 0 or tensor % groups == 0)
        for pipeline in range(1, 5):
            for data in range(1, 5):
                if not heads_fit or not 2 <= tensor * pipeline * data <= 4:
                    continue
                for chunks in (1, 2) if pipeline > 1 else (1,):
                    if pipeline * chunks <= model.num_layers:
                        found.add((tensor, pipeline, data, False, chunks))
                        if tensor > 1:
                            found.add((tensor, pipeline, data, True, chunks))
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_layouts_that_the_model_admits_and_no_other(params, name):
    model = params.model.model_copy(update=MODELS[name])
    layouts = layouts_up_to(replace(params, model=model), 4)
    found = [(x.tensor, x.pipeline, x.data, x.sequence, x.virtual_stages) for x in layouts]
    assert len(found) == len(set(found))
    assert set(found) == admitted_by_hand(model)
    assert len({layout.name for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_small_model_admits_all_the_layouts_at_once(params, name):
    changed_params = replace(params, model=params.model.model_copy(update=MODELS[name]))
    layouts = layouts_up_to(changed_params, 4)
    small = small_version(changed_params, layouts, steps=3)
    for layout in layouts:
        sections = {"model": small.model, "parallel": layout, "training": small.training}
        assert broken_rules(sections) == []
        assert is_admitted(small, layout)
    assert small.training.train_iters == 3
    assert (small.model.hidden_size, small.model.head_dim) == (
        8 * small.model.num_attention_heads,
        8,
    )
    same = "num_attention_heads num_query_groups normalization activation tie_embeddings"
    for field in [*same.split(), "position_embedding", "bias", "qk_norm"]:
        assert getattr(small.model, field) == getattr(changed_params.model, field)


def test_the_small_run_keeps_the_rules_of_the_samples_and_a_later_length(params):
    changes = ({"micro_batch_size": 1}, {"seq_length": 512})
    phases = tuple(PhaseSection(from_samples=160 * n, **c) for n, c in enumerate(changes, 1))
    rules = {"eod_in_loss": False, "positions": "document", "attention": "document"}
    data = DataSection(blend={"gone": 1}, validation=("gone",), phases=phases, **rules)
    layout = ParallelConfig(tensor=2, sequence=True, data=2)
    small = small_version(replace(params, data=data), [layout], steps=3)
    assert {name: getattr(small.data, name) for name in rules} == rules
    sections = {"model": small.model, "parallel": layout, "training": small.training}
    assert broken_rules(sections | {"data": small.data, "corpora": small.corpora}) == []
    (later,) = small.data.phases
    assert later.from_samples == 2 * small.training.global_batch_size
    assert later.seq_length == small.longest_seq_length == 2 * small.training.seq_length
    assert not small_version(params, [layout], steps=3).data.phases


def test_an_explicit_split_of_the_layers_stays(params):
    split = (1, 1, 1, params.model.num_layers - 3)
    layout = ParallelConfig(pipeline=2, virtual_stages=2, layers_per_chunk=split)
    small = small_version(params, [layout], steps=1)
    assert small.model.num_layers == params.model.num_layers
    assert is_admitted(params, layout)
    assert not is_admitted(params, layout.model_copy(update={"layers_per_chunk": (1, 1, 1, 9)}))


def test_processes_and_names():
    layout = ParallelConfig(
        tensor=2, pipeline=2, virtual_stages=2, data=4, sequence=True, sharding="gradients"
    )
    assert layout.processes == 16
    assert layout.name == "tp2+sp pp2x2 dp4 gradients"
    assert layout.model_copy(update={"data_shard": 2}).name == "tp2+sp pp2x2 dp4/2 gradients"
    assert ParallelConfig(tensor=2).processes == 2
    assert ParallelConfig(tensor=2).name == "tp2 pp1 dp1"


# ---- the command


def write_params(folder, **keys):
    text = (ROOT / "params.yaml").read_text()
    for key, value in keys.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {key}:")]
        text = text.replace(line, f"  {key}: {value}")
    (folder / "params.yaml").write_text(text)


def run_command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "stages.compare_layouts", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize("precision", ["fp64", pytest.param("fp16", marks=pytest.mark.layouts)])
def test_the_command_compares_the_layout_of_the_file(tmp_path, precision):
    phases = "[{from_samples: 160, seq_length: 256}]"
    apart = {"eod_in_loss": "false", "positions": "document", "phases": phases}
    documents = apart if precision == "fp64" else {}
    write_params(tmp_path, tensor=2, sequence="true", attention_dropout=0.1, **documents)
    done = run_command(tmp_path, "--steps", "2", "--precision", precision)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp2+sp pp1 dp1: equal" in done.stdout
    assert f"largest relative difference from one process, 2 steps in {precision}" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]


def test_the_command_needs_something_to_compare(tmp_path):
    write_params(tmp_path)
    done = run_command(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: parallel: one process")
    write_params(tmp_path, tensor=4)
    done = run_command(tmp_path)
    assert done.returncode == 1
    assert "model.num_attention_heads" in done.stderr


def test_at_full_size_a_layout_that_does_not_fit_is_refused_before_ranks_start(tmp_path):
    write_params(tmp_path)  # 16 samples in micro batches of 8: no step for three copies
    done = run_command(tmp_path, "--full-size", "--up-to", "3")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "training.global_batch_size = 16: must be divisible by" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The command's exit status and output where training itself is played by a function."""
    write_params(tmp_path, data=2)
    monkeypatch.chdir(tmp_path)

    def run(play, *arguments):
        monkeypatch.setattr(comparison, "run_layout", play)
        return CliRunner().invoke(compare_layouts.main, list(arguments))

    return run


def playing(**differences):
    """A run_layout of which several processes give another outcome than one."""
    return lambda _config, _runtime, processes, _steps, _device: outcome(
        **(differences if processes > 1 else {})
    )


WRONG = {
    "loss": {"losses": [3.0, 2.0 * (1 + 3e-9)]},
    "norm": {"norms": [1.0, 0.5 * (1 + 3e-9)]},
    "no loss": {"losses": [3.0, math.nan]},
    "no norm": {"norms": [1.0, math.nan]},
    "gradient": {"gradients": changed(outcome().gradients, "embedding", 1 + 3e-9)},
    "weight": {"weights": changed(outcome().weights, "embedding", 1 + 3e-9)},
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_layout_that_differs_ends_in_status_one(verdict, name):
    done = verdict(playing(**WRONG[name]))
    assert done.exit_code == 1
    assert "tp1 pp1 dp2: DIFFERS" in done.output
    assert "differs from one process: tp1 pp1 dp2" in done.output


def test_rounding_is_no_difference(verdict):
    done = verdict(playing(losses=[3.0, 2.0 * (1 + 3e-10)]))
    assert (done.exit_code, "tp1 pp1 dp2: equal" in done.output) == (0, True), done.output


def test_in_fp32_tensors_are_shown_and_not_judged(verdict):
    tensors = changed(outcome().weights, "embedding", 1.5)
    done = verdict(playing(weights=tensors), "--precision", "fp32")
    assert done.exit_code == 0
    assert "5.0e-01" in done.output
    assert verdict(playing(losses=[3.1, 2.0]), "--precision", "fp32").exit_code == 1
