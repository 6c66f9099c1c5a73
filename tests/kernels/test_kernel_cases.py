"""What `make bench` times: every kernel, by ways that do the same, and the bytes that must move.

Nothing is timed here. Ways of liger-kernel are tested where it is installed, on a GPU: some of its
kernels are nothing for the interpreter.
"""

import ast
from pathlib import Path

import pytest
import torch

import kernels
from lib.config.schema import ModelSection
from lib.workflow import kernel_timing
from lib.workflow.kernel_cases import (
    BACKWARD,
    BOTH,
    CASES,
    FORWARD,
    LIGER,
    OURS,
    TORCH,
    Fresh,
    KernelCase,
    Setting,
    Way,
    results,
)
from lib.workflow.kernel_report import FAILED, NO_MEMORY, NOT_INSTALLED
from lib.workflow.kernel_timing import time_kernel
from lib.workflow.shapes import Shape
from lib.workflow.trace_parts import part_of
from tests.kernels.conftest import HAS_GPU

S, B, H, N, G, D, F, V = 5, 2, 24, 3, 1, 8, 20, 256
MODEL = ModelSection(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=N,
    num_query_groups=G,
    head_dim=D,
    ffn_hidden_size=F,
    position_embedding="rope",
)
TINY = Shape("tiny", MODEL, vocab_size=V - 6, seq_length=S, micro_batch_size=B)
FILES = sorted(Path(kernels.__path__[0]).glob("*.py"))


def launched(path):
    """Names of the kernels that a file launches: those that it indexes with a grid."""
    tree = ast.parse(path.read_text())
    compiled = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)
    }
    indexed = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }
    return compiled & indexed


KERNELS = {path.stem: launched(path) for path in FILES if launched(path)}


@pytest.fixture
def setting(dtype, device):
    return Setting(TINY, dtype, device)


# ---- which kernels there are


def test_every_kernel_is_timed():
    assert set(CASES) == set(KERNELS)


def test_a_kernel_is_named_after_its_operation():
    """Traces show nothing else of it."""
    for operation, names in KERNELS.items():
        for name in names:
            assert operation in name


def test_traces_put_kernels_where_they_belong():
    for operation, names in KERNELS.items():
        expected = "attention" if operation == "softmax" else "pointwise"
        assert {part_of(name) for name in names} == {expected}


# ---- what the ways do


def assert_same(found, truth, dtype):
    for one, expected in zip(found, truth, strict=True):
        assert one.shape == expected.shape
        difference = (one.double() - expected.double()).norm()
        assert difference <= 8 * torch.finfo(dtype).eps * expected.double().norm()


@pytest.mark.parametrize("name", CASES)
def test_all_ways_do_the_same(name, setting):
    """The one to be compiled, before it is; outputs and gradients, which none leaves at zero."""
    case = CASES[name](setting)
    truth = results(case.ways[TORCH]())
    assert all(one.any() for one in truth)
    for way_name, make in case.ways.items():
        if way_name != LIGER:
            assert_same(results(make()), truth, setting.dtype)


@pytest.mark.skipif(not HAS_GPU, reason="Liger's kernels need a GPU")
@pytest.mark.parametrize("name", CASES)
def test_liger_does_the_same(name, setting):
    pytest.importorskip("liger_kernel")
    case = CASES[name](setting)
    if LIGER in case.ways:
        truth = results(case.ways[TORCH]())
        assert_same(results(case.ways[LIGER]()), truth, setting.dtype)


@pytest.mark.parametrize("name", [name for name in CASES if name != "embedding_gradient"])
def test_every_run_has_fresh_inputs(name, setting):
    way = CASES[name](setting).ways[OURS]()
    before = [x.clone() for x in (*way.inputs, *way.upstreams)]
    first = results(way)
    assert same_bits((*way.inputs, *way.upstreams), before)
    assert same_bits(results(way), first)


def same_bits(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_kernels_run_in_our_way_only(setting, monkeypatch):
    calls = []
    import kernels.swiglu as module

    monkeypatch.setattr(module, "swiglu", lambda x: calls.append(x) or x[..., :F].clone())
    ways = CASES["swiglu"](setting).ways
    for name in ways.keys() - {LIGER}:
        Fresh(ways[name]()).forward()
    assert len(calls) == 1


# ---- bytes that must move


def tensors_bytes(*tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "swiglu"])
def test_forward_reads_inputs_and_writes_outputs(name, setting):
    case = CASES[name](setting)
    way = case.ways[TORCH]()
    outputs = Fresh(way).forward()
    assert case.bytes_of(FORWARD) == tensors_bytes(*way.inputs, *outputs)


def test_bytes_by_hand(setting):
    e = setting.dtype.itemsize
    found = {name: case(setting) for name, case in CASES.items()}
    rows = S * B
    # Upstream of both outputs and the stream in, one gradient for both inputs out; weights.
    assert found["rms_norm"].bytes_of(BACKWARD) == (3 + 1) * rows * H * e + 2 * H * e
    assert found["layer_norm"].bytes_of(BACKWARD) == (3 + 1) * rows * H * e + 3 * H * e
    # Gate, up and upstream in, both gradients out.
    assert found["swiglu"].bytes_of(BACKWARD) == (3 + 2) * rows * F * e
    table = 2 * S * (D // 2) * 4
    assert found["rotary"].bytes_of(FORWARD) == 2 * rows * (N + G) * D * e + table
    assert found["rotary"].bytes_of(BACKWARD) == 2 * rows * (N + 2 * G) * D * e + table
    labels = 8 * rows
    assert found["cross_entropy"].bytes_of(FORWARD) == rows * V * e + labels
    assert found["cross_entropy"].bytes_of(BACKWARD) == 2 * rows * V * e + labels
    pairs = sum(key <= query for query in range(S) for key in range(S)) * B * N
    assert found["softmax"].bytes_of(FORWARD) == (pairs + S * S * B * N) * e
    assert found["softmax"].bytes_of(BACKWARD) == 3 * pairs * e
    for case in found.values():
        assert case.bytes_of(BOTH) == case.bytes_of(FORWARD) + case.bytes_of(BACKWARD)


def test_bytes_of_rows_that_occur(setting):
    tokens = Setting(TINY, setting.dtype, setting.device)
    tokens.drawn(V, H)  # the table comes first
    different = len(set(tokens.tokens().flatten().tolist()))
    moved = S * B * (H * setting.dtype.itemsize + 8) + 2 * different * H * 4
    assert CASES["embedding_gradient"](setting).bytes_of(BACKWARD) == moved


# ---- how they are timed


@pytest.fixture
def timed(monkeypatch, device):
    """Times a case whose ways are given, by a clock that runs everything once."""
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: forward)

    def run(ways, passes=(FORWARD, BOTH)):
        monkeypatch.setitem(CASES, "made up", lambda _: KernelCase(ways, 8, 16, passes))
        return time_kernel("made up", Setting(TINY, torch.float32, device), milliseconds)

    def milliseconds(prepare):
        prepare()()
        return 1.5

    return run


def doubling(factor=2.0):
    return lambda: Way(lambda x: (x * factor,), (torch.ones(3),), (torch.ones(3),))


def failing(error):
    def make():
        raise error

    return make


def test_all_ways_and_passes(timed):
    found = timed({OURS: doubling(), TORCH: doubling()})
    assert found.milliseconds == {p: {OURS: 1.5, TORCH: 1.5} for p in (FORWARD, BOTH)}
    assert found.moved == {FORWARD: 8, BOTH: 24}
    assert found.without == {}
    backward = timed({OURS: doubling(), TORCH: doubling()}, passes=(BACKWARD,))
    assert backward.milliseconds == {BACKWARD: {OURS: 1.5, TORCH: 1.5}}


def test_one_that_fails_is_told_and_the_others_are_timed(timed, capsys):
    found = timed({OURS: failing(RuntimeError("no such\nluck")), TORCH: doubling()})
    assert found.milliseconds[FORWARD] == {TORCH: 1.5}
    assert found.without == {OURS: FAILED}
    assert "made up, drydock: fails (no such)" in capsys.readouterr().err


def test_wrong_results_are_a_failure(timed, capsys):
    found = timed({OURS: doubling(2.01), TORCH: doubling()})
    assert found.without == {OURS: FAILED}
    assert "wrong result 0" in capsys.readouterr().err
    assert timed({OURS: doubling(float("nan")), TORCH: doubling()}).without == {OURS: FAILED}


def test_what_is_not_there_is_no_failure(timed):
    found = timed(
        {
            OURS: failing(torch.OutOfMemoryError("2 GiB")),
            TORCH: doubling(),
            LIGER: failing(ImportError("liger_kernel")),
        }
    )
    assert found.without == {OURS: NO_MEMORY, LIGER: NOT_INSTALLED}
    assert found.failures() == []


def test_inputs_that_do_not_fit(monkeypatch, device):
    monkeypatch.setitem(CASES, "made up", failing_case)
    found = time_kernel("made up", Setting(TINY, torch.float32, device), lambda _: 1.0)
    assert found.without == {OURS: NO_MEMORY}
    assert found.milliseconds == {}


def failing_case(_):
    raise torch.OutOfMemoryError("9 GiB")


def test_real_cases_pass_the_check(setting):
    """The embedding's gradient too, whose sums begin at zero in every way."""
    for name in ("swiglu", "embedding_gradient"):
        case = CASES[name](setting)
        kernel_timing._compare(case.ways[OURS](), case.ways[TORCH](), 0.01)
