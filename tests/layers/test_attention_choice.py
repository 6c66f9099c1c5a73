"""Choosing attention by its speed, with clocks that are told what to show."""

from dataclasses import replace

import pytest
import torch

from lib.layers import attention_choice
from lib.layers.attention import BACKENDS, Backend
from lib.layers.attention_choice import check, kept_bytes, measure, obstacle
from lib.layers.attention_limits import serves_all
from tests.layers.test_attention_limits import CASE, H100

LONG = replace(CASE, seq_length=8192, micro_batch_size=2)


def clock(times):
    """A timer that shows ``times[name][sequence length]``, or raises what stands there."""

    def time(name, case):
        shown = times[name][case.seq_length]
        if isinstance(shown, Exception):
            raise shown
        return shown

    return time


def test_the_phases_count_by_their_weight():
    """Fast at one length, slow at the other: the run's mixture decides."""
    time = clock({"flash": {2048: 2.0, 8192: 6.0}, "cudnn": {2048: 1.0, 8192: 9.0}})
    short = measure(["flash", "cudnn"], {CASE: 9.0, LONG: 1.0}, time)
    assert short.milliseconds == {"cudnn": 1.8, "flash": 2.4}
    assert list(short.milliseconds) == ["cudnn", "flash"]
    long = measure(["flash", "cudnn"], {CASE: 1.0, LONG: 3.0}, time)
    assert list(long.milliseconds) == ["flash", "cudnn"]


def test_of_two_that_are_equally_fast_the_first_is_taken():
    time = clock({"sdpa": {2048: 2.0}, "cudnn": {2048: 2.0}})
    for names in (["sdpa", "cudnn"], ["cudnn", "sdpa"]):
        assert list(measure(names, {CASE: 1.0}, time).milliseconds) == names


def test_what_fails_is_left_out_with_its_reason():
    time = clock(
        {
            "cudnn": {2048: 1.0, 8192: RuntimeError("No available kernel.\nAborting")},
            "flash": {2048: 2.0, 8192: 2.0},
            "efficient": {2048: torch.OutOfMemoryError("CUDA out of memory. Tried to"), 8192: 1.0},
            "sdpa": {2048: AssertionError(), 8192: 1.0},
        }
    )
    found = measure(["cudnn", "flash", "efficient", "sdpa"], {CASE: 1.0, LONG: 1.0}, time)
    assert found.milliseconds == {"flash": 2.0}
    assert found.failed == {
        "cudnn": "fails (No available kernel.)",
        "efficient": "does not fit into the GPU's memory",
        "sdpa": "fails (AssertionError)",
    }


def test_a_person_who_stops_the_run_is_no_reason():
    def interrupted(_name, _case):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(["sdpa"], {CASE: 1.0}, interrupted)


def test_an_obstacle_to_one_case_is_one_to_all():
    assert obstacle("cudnn", [CASE, LONG], H100) is None
    assert obstacle("cudnn", [CASE, replace(LONG, documents=True)], H100) is not None
    assert obstacle("sdpa", [CASE], None) is None
    assert obstacle("of_tomorrow", [CASE], H100) == "is no backend of this version"


def test_what_is_kept_grows_with_the_square():
    assert kept_bytes("flash", LONG) == 0
    assert kept_bytes("fused_softmax", CASE) == 8 * 16 * 2048**2 * 2
    assert kept_bytes("fused_softmax", replace(CASE, dropout=0.5)) == 8 * 16 * 2048**2 * 5


@pytest.mark.parametrize("documents", [False, True])
def test_the_inputs_that_are_timed_are_those_of_the_model(documents):
    """Views of one tensor; their gradients are wanted."""
    small = replace(
        CASE, seq_length=10, micro_batch_size=3, heads=4, kv_heads=2, documents=documents
    )
    cpu = torch.device("cpu")
    (q, k, v), upstream = attention_choice._random_inputs(small, cpu)
    assert (q.shape, k.shape, v.shape) == ((10, 3, 4, 128), (10, 3, 2, 128), (10, 3, 2, 128))
    for x in (q, k, v):
        assert x.requires_grad
        assert x.is_leaf
        assert x.stride() == (3 * 8 * 128, 8 * 128, 128, 1)
        assert x.dtype == torch.bfloat16
    assert k.data_ptr() - q.data_ptr() == 4 * 128 * 2
    assert upstream.shape == (10, 3, 4 * 128)
    found = attention_choice._some_documents(small, cpu)
    if documents:
        assert found.offsets.diff().tolist() == [2, 3, 2, 3] * 3
    else:
        assert found is None


CPU = torch.device("cpu")
FEW_HEADS = replace(CASE, heads=2, kv_heads=1, head_dim=8)


@pytest.mark.parametrize("name", ["fused_softmax", "reference", "sdpa"])
@pytest.mark.parametrize("dtype", list(attention_choice._TOLERANCES))
@pytest.mark.parametrize("documents", [False, True])
def test_backends_that_are_right_pass_the_check(name, dtype, documents):
    case = replace(FEW_HEADS, seq_length=130, dtype=dtype, documents=documents)
    check(name, case, CPU)


@pytest.mark.parametrize(
    ("length", "checked"), [(1, 1), (640, 640), (641, 513), (2048, 512), (8192 + 64, 576)]
)
def test_the_part_that_is_checked_ends_where_the_whole_does(length, checked, monkeypatch):
    shapes = []

    def noting(q, k, v, dropout, documents):
        shapes.append(q.shape)
        return BACKENDS["sdpa"].attend(q, k, v, dropout, documents)

    monkeypatch.setitem(BACKENDS, "noting", Backend(noting, serves_all))
    check("noting", replace(FEW_HEADS, seq_length=length, dropout=0.5), CPU)
    assert shapes == [(checked, 2, 2, 8)]


def spoiled(what):
    """Torch's attention, with its output or one of its gradients spoilt."""

    def attend(q, k, v, dropout, documents):
        right = BACKENDS["sdpa"].attend(q, k, v, dropout, documents)
        if what == "output":
            return right * 1.2
        spoilt = {"queries": q, "keys": k, "values": v}[what]
        spoilt.register_hook(lambda grad: torch.where(grad == grad.max(), torch.nan, grad))
        return right

    return Backend(attend, serves_all)


@pytest.mark.parametrize("what", ["output", "queries", "keys", "values"])
def test_a_backend_that_is_wrong_is_found(what, monkeypatch):
    monkeypatch.setitem(BACKENDS, "spoiled", spoiled(what))
    told = "output, off by 0.2" if what == "output" else f"gradient of the {what}, off by nan"
    with pytest.raises(ArithmeticError, match=f"wrong {told} of its size"):
        check("spoiled", replace(FEW_HEADS, seq_length=64), CPU)
