"""The check of the plan: its cases can run and fit, and are put beside what ranks took."""

import json
import weakref

import pytest
import torch
from click.testing import CliRunner

from lib.config.operation import RuntimeConfig
from lib.model.initialization import initial_parts
from lib.parallel.groups import Group
from lib.parallel.storage import Cut
from lib.plan.ceilings import H200
from lib.plan.memory import GIB, USABLE
from lib.plan.search import Machines
from lib.train.measuring import repeated_parts
from lib.workflow.plan_cases import HEADERS, Checked, RankUse, usual_cases
from stages import measure_plan
from stages.measure_plan import _as_before, _config, _together, measure_cases_on_rank
from tests.distributed import run_on_ranks
from tests.model.models import GPT2, VOCAB_SIZE

RUNTIME = RuntimeConfig()


def use(allocated=None, reserved=None, attention="cudnn"):
    return RankUse(attention, 1.0, allocated, reserved)


def test_the_usual_cases_are_many_and_fit_an_h200():
    machines = Machines(2, 2, H200.memory_gib * GIB, H200)
    one, two = usual_cases(RUNTIME, 1), usual_cases(RUNTIME, 2)
    assert len(one) >= 12
    assert {case.ranks for case in one} == {1}
    assert {case.ranks for case in two} == {1, 2}
    assert {case.shape.name for case in one} == {"125m", "1.4b", "7b"}
    for case in two:
        planned = Checked.of(case, [use()], H200)
        assert planned.planned_bytes <= machines.usable == USABLE * H200.memory_gib * GIB
    seconds = sum(6 * (Checked.of(case, [use()], H200).time.seconds) for case in one)
    assert seconds < 60


def test_cases_of_one_rank_go_together():
    groups = _together(usual_cases(RUNTIME, 2))
    assert [len(group) for group in groups[:2]] == [len(usual_cases(RUNTIME, 1)), 1]


def test_errors_are_plan_over_measurement():
    (case, *_) = usual_cases(RUNTIME, 1)
    planned = Checked.of(case, [use()], H200)
    size = planned.planned_bytes
    checked = Checked.of(case, [use(size // 2, size), use(size * 4 // 5, size)], H200)
    row = dict(zip(HEADERS[:-1], checked.row()[:-1], strict=True))
    assert row["error"] == "+25.0%"
    assert row["GiB"] == f"{size * 4 / 5 / GIB:.2f}"
    assert checked.row()[-1] == f"{planned.time.seconds - 1:+.1%}"
    assert json.loads(json.dumps(checked.mapping()))["allocated"] == [size // 2, size * 4 // 5]


def test_a_line_says_the_figures_of_the_row():
    (case, *_) = usual_cases(RUNTIME, 1)
    size = Checked.of(case, [use()], H200).planned_bytes
    checked = Checked.of(case, [use(size, size)], H200)
    row = checked.row()
    assert checked.line() == (
        f"125m tp1 pp1 dp1, 4 of 16, recompute none: plan {row[4]} GiB, {row[5]} GiB (+0.0%), "
        f"plan {row[8]} ms, 1,000.0 ms ({row[10]})"
    )
    assert Checked.of(case, [use()], None).line().endswith("recompute none: 1,000.0 ms")


def test_what_was_measured_stays_when_the_next_group_ends_it(tmp_path, monkeypatch):
    """One rank says its lines itself; the file is written after its group."""
    file = tmp_path / "plan.json"
    measure = measure_plan._measure

    def killed_in_the_second(cases, *rest):
        if cases[0].ranks > 1:
            raise KeyboardInterrupt
        return measure(cases, *rest)

    monkeypatch.setattr(measure_plan, "_measure", killed_in_the_second)
    monkeypatch.setattr(measure_plan, "cuda_device_names", tuple)
    (tmp_path / "params.yaml").write_text("launch: {}\nruntime: {}\n")
    done = CliRunner().invoke(
        measure_plan.main, [f"--params={tmp_path / 'params.yaml'}", f"--json={file}"]
    )
    assert done.exit_code != 0
    assert len(json.loads(file.read_text())) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory\nmore"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate\nmore"),
    ],
)
def test_lines_come_case_by_case(tmp_path, capsys, monkeypatch, error):
    """On the only rank, also where a run has no memory; nothing is left of that one."""
    cases = [case for case in usual_cases(RUNTIME, 0) if case.ranks == 1]
    outcomes = [error, use()]

    left = []

    def measured(*_run):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            module = torch.nn.Module()
            object.__setattr__(module, "itself", module)
            left.append(weakref.ref(module))
            raise type(outcome)(str(outcome))
        assert left[0]() is None
        told = capsys.readouterr().err
        assert str(error).splitlines()[0] in " ".join(told.split())
        return outcome

    monkeypatch.setattr(measure_plan, "_measure_run", measured)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    runs = [(case, _config(case, tmp_path)) for case in cases]
    assert measure_cases_on_rank(runs, "cpu", torch.get_num_threads(), None) == [None, use()]
    told = capsys.readouterr()
    assert told.out == "tiny tp1 pp1 dp1, 1 of 1, recompute full: 1,000.0 ms\n"


def test_the_attention_of_a_model_is_tried_once():
    first, second, *_ = usual_cases(RUNTIME, 1)
    checked = [Checked.of(first, [use(attention="flash")], H200)]
    assert _as_before(second, checked).runtime.attention == "flash"
    assert _as_before(second, []).runtime.attention == "auto"


def test_ranks_take_the_steps_of_several_runs(tmp_path):
    cases = [case for case in usual_cases(RUNTIME, 0) if case.ranks == 1]
    runs = [(case, _config(case, tmp_path)) for case in cases]
    (found,) = run_on_ranks(1, measure_cases_on_rank, runs, "cpu", 1, None, timeout=120.0)
    assert [each.attention for each in found] == ["sdpa", "sdpa"]
    for case, each in zip(cases, found, strict=True):
        row = Checked.of(case, [each], None).row()
        assert row[4:9] == ("", "", "", "", "")
        assert float(row[9]) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_repeated_values_look_like_drawn_ones(rank):
    group = Group(rank, 2)
    cuts = {
        "layers.0.mlp.linear_fc1.up.weight": Cut((1200, 1000), 0, group),
        "layers.0.mlp.linear_fc1.up.bias": Cut((1200,), 0, group),
    }
    drawn = dict(initial_parts(cuts, GPT2, vocab_size=VOCAB_SIZE, seed=1))
    repeated = dict(repeated_parts(cuts, GPT2, vocab_size=VOCAB_SIZE, seed=1))
    for name, value in repeated.items():
        assert value.shape == (drawn[name].shape if value.ndim > 1 else cuts[name].held_shape)
        assert value.std().item() == pytest.approx(drawn[name].std().item(), rel=0.02)
    assert torch.equal(repeated["layers.0.mlp.linear_fc1.up.bias"], torch.zeros(600))
