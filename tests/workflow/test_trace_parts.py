"""Where the time of a step goes: on events that are made up, so that every figure is known."""

import gzip
import json
import random

import pytest

from lib.workflow.trace_parts import (
    COMMUNICATION,
    PARTS,
    Event,
    kernels_by_time,
    own_time,
    part_of,
    read_trace,
    step_parts,
)

PRODUCT = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>(Flash_fwd_params)"
NORM = "_rms_norm_forward"
ADAM = "void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoH (Device -> Pinned)"


def ms(name, start, duration, stream="7"):
    return Event(name, 1e3 * start, 1e3 * duration, stream)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("products", PRODUCT),
        ("products", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128>"),
        ("products", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
        ("products", "void cublasLt::splitKreduce_kernel<32, 16, int, float>"),
        ("products", "aten::addmm"),
        ("products", "aten::addmm_"),
        ("attention", FLASH),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128"),
        ("attention", "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>"),
        ("attention", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)"),
        ("attention", "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackward"),
        ("attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("pointwise", NORM),
        ("pointwise", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3"),
        ("pointwise", "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"),
        ("pointwise", "aten::native_layer_norm"),
        ("pointwise", "aten::log_softmax"),
        ("optimizer", ADAM),
        ("optimizer", "void multi_tensor_apply_kernel<LpNormFunctor<float, NormType::L2>>"),
        ("optimizer", "aten::_fused_adamw_"),
        ("collectives", REDUCE),
        ("collectives", "gloo:all_reduce"),
        ("transfers", SEND),
        ("transfers", "c10d::recv_"),
        ("copies", COPY),
        ("copies", "Memset (Device)"),
    ],
)
def test_a_kernel_belongs_to_its_part(part, name):
    assert part_of(name) == part


def test_one_stream_adds_up():
    events = [ms(PRODUCT, 0, 5), ms(FLASH, 5, 2), ms(NORM, 8, 1), ms(ADAM, 9, 3), ms(COPY, 13, 1)]
    found = step_parts(events, 20.0)
    assert found.step == 20.0
    assert found.parts == pytest.approx(
        {
            "products": 5,
            "attention": 2,
            "pointwise": 1,
            "optimizer": 3,
            "collectives": 0,
            "transfers": 0,
            "copies": 1,
            "idle": 8,
        }
    )
    assert found.hidden == {"collectives": 0, "transfers": 0}


def test_a_collective_is_hidden_beside_work_and_exposed_elsewhere():
    events = [
        ms(PRODUCT, 0, 4),
        ms(NORM, 6, 1),
        ms(REDUCE, 2, 8, "20"),  # beside the product 2, beside the norm 1, alone 5
        ms(COPY, 9, 3, "30"),  # beside the collective 1, which a copy does not hide
    ]
    found = step_parts(events, 12.0)
    assert found.hidden == pytest.approx({"collectives": 3, "transfers": 0})
    assert found.parts["collectives"] == pytest.approx(5)
    assert found.parts["products"] == pytest.approx(4)
    assert found.parts["copies"] == pytest.approx(2)
    assert found.parts["idle"] == pytest.approx(0)
    assert found.rows()["collectives, exposed"] == found.parts["collectives"]
    assert found.rows()["collectives, hidden"] == found.hidden["collectives"]


def test_work_on_several_streams_counts_once():
    events = [
        ms(NORM, 0, 10, "1"),
        ms(PRODUCT, 2, 3, "2"),
        ms(PRODUCT, 4, 3, "3"),  # two products at once are one instant of products
        ms(SEND, 8, 4, "4"),
        ms(REDUCE, 8, 4, "5"),
    ]
    found = step_parts(events, 15.0)
    assert found.parts["products"] == pytest.approx(5)
    assert found.parts["pointwise"] == pytest.approx(5)
    assert found.hidden == pytest.approx({"collectives": 2, "transfers": 2})
    assert found.parts["collectives"] == pytest.approx(2)
    assert found.parts["transfers"] == 0  # shown under the first that runs
    assert found.parts["idle"] == pytest.approx(3)


def test_any_events_add_up_to_the_step():
    """Against counting instants one by one."""
    draw = random.Random(4)
    names = [PRODUCT, FLASH, NORM, ADAM, REDUCE, SEND, COPY]
    events = [
        ms(draw.choice(names), draw.randrange(180), draw.randrange(1, 20), str(n % 5))
        for n in range(60)
    ]
    found = step_parts(events, 220.0)
    parts, hidden = dict.fromkeys([*PARTS, "idle"], 0), dict.fromkeys(COMMUNICATION, 0)
    for instant in range(220):
        running = {
            part_of(event.name)
            for event in events
            if event.start <= 1e3 * instant < event.start + event.duration
        }
        shown = next((part for part in PARTS if part in running), "idle")
        parts[shown] += 1
        if shown in PARTS[:4]:
            for each in running & set(COMMUNICATION):
                hidden[each] += 1
    assert found.parts == pytest.approx(parts)
    assert found.hidden == pytest.approx(hidden)
    assert sum(found.parts.values()) == pytest.approx(220)


def test_a_step_without_events_is_idle():
    assert step_parts([], 3.0).parts["idle"] == 3.0


def test_events_of_one_name_are_one_kernel():
    events = [ms(NORM, 0, 1), ms(PRODUCT, 1, 5), ms(NORM, 6, 2, "8")]
    first, second = kernels_by_time(events)
    assert (first.name, first.part, first.calls, first.ms) == (PRODUCT, "products", 1, 5.0)
    assert (second.name, second.calls, second.ms) == (NORM, 2, 3.0)


def test_operators_are_cut_to_their_own_time():
    calls = [
        Event("outer", 0, 10, "a"),
        Event("first", 1, 3, "a"),
        Event("inner", 2, 1, "a"),
        Event("second", 4, 2, "a"),
        Event("apart", 12, 1, "a"),
        Event("other thread", 0, 13, "b"),
    ]
    pieces = sorted((e.name, e.start, e.start + e.duration, e.stream) for e in own_time(calls))
    assert pieces == [
        ("apart", 12, 13, "a"),
        ("first", 1, 2, "a"),
        ("first", 3, 4, "a"),
        ("inner", 2, 3, "a"),
        ("other thread", 0, 13, "b"),
        ("outer", 0, 1, "a"),
        ("outer", 6, 10, "a"),
        ("second", 4, 6, "a"),
    ]
    assert {kernel.name: kernel.calls for kernel in kernels_by_time(own_time(calls))} == {
        event.name: 1 for event in calls
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_for_one_kind_of_device(tmp_path, name):
    def event(cat, name, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": 5, "dur": 2, "tid": 3, "args": args}

    events = [
        event("kernel", PRODUCT, stream=7),
        event("gpu_memcpy", COPY, stream=8),
        event("cpu_op", "aten::mm"),
        event("cuda_runtime", "cudaLaunchKernel"),
        {"ph": "M", "name": "process_name"},
    ]
    text = json.dumps({"traceEvents": events}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_trace(tmp_path / name, "cuda", pipeline=False) == [
        Event(PRODUCT, 5, 2, "7"),
        Event(COPY, 5, 2, "8"),
    ]
    assert read_trace(tmp_path / name, "cpu", pipeline=False) == [Event("aten::mm", 5, 2, "3")]


# ---- NCCL's kernel that serves transfers and exchanges


def exchanges(folder, *kernels, pipeline):
    """Parts of the SendRecv kernels among (name, stream, name of the collective or None)."""
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": 1,
            "tid": 0,
            "args": {"stream": stream} | ({"Collective name": known} if known else {}),
        }
        for start, (name, stream, known) in enumerate(kernels)
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path, "cuda", pipeline=pipeline)
    assert [event.name for event in found] == [name for name, _, _ in kernels]
    return [event.part for event in found if event.name == SEND]


def test_without_a_pipeline_all_are_exchanges(tmp_path):
    kernels = [(SEND, 20, None), (PRODUCT, 7, None), (SEND, 24, None)]
    assert exchanges(tmp_path, *kernels, pipeline=False) == ["collectives", "collectives"]


def test_with_a_pipeline_the_stream_tells(tmp_path):
    kernels = [
        (SEND, 20, None),
        (REDUCE, 20, None),  # of the same process group
        (SEND, 24, None),
        (PRODUCT, 7, None),
        (REDUCE, 7, None),  # one that the host waits for runs on the stream of the work
    ]
    assert exchanges(tmp_path, *kernels, pipeline=True) == ["collectives", "transfers"]


@pytest.mark.parametrize("pipeline", [False, True])
def test_the_name_of_the_collective_decides(tmp_path, pipeline):
    kernels = [
        (REDUCE, 20, "reduce_scatter"),
        (SEND, 20, "send"),
        (SEND, 20, "recv"),
        (SEND, 24, "all_to_all"),
        (SEND, 24, "all_to_allv"),
    ]
    found = exchanges(tmp_path, *kernels, pipeline=pipeline)
    assert found == ["transfers", "transfers", "collectives", "collectives"]


def test_one_kernel_of_two_parts_is_told_as_two():
    exchange = Event(SEND, 0, 4e3, "20", known_part="collectives")
    transfer = Event(SEND, 4e3, 2e3, "24")
    found = kernels_by_time([exchange, transfer])
    assert [(each.part, each.ms) for each in found] == [("collectives", 4.0), ("transfers", 2.0)]
    parts = step_parts([exchange, transfer], 6.0).parts
    assert (parts["collectives"], parts["transfers"]) == (4.0, 2.0)
