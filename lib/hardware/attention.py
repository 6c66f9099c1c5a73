"""Each attention backend against the formula, and how fast it is on this device.

FLOPs as of MFU (``lib.model.flops``): forward and backward count three times the forward, and the
causal half of the S x S weights once: 6 S per token and element of the queries.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lib.hardware.findings import Finding, fine, not_applicable
from lib.hardware.speed import seconds_of
from lib.layers.attention import BACKENDS
from lib.layers.attention_choice import Timer, check, measure, obstacle, time_on_gpu
from lib.layers.attention_limits import AttentionCase
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.layers.gpu_limits import OLDEST_FOR_BF16, Capability

_GPU_CASE = AttentionCase(
    seq_length=2048,
    micro_batch_size=2,  # small enough for the formula's S x S weights on a GPU of 8 GB
    heads=16,
    kv_heads=16,
    head_dim=128,
    dtype="bf16",
    dropout=0.0,
    documents=False,
    deterministic=False,
)
_CPU_CASE = replace(
    _GPU_CASE,
    seq_length=256,
    micro_batch_size=1,
    heads=4,
    kv_heads=4,
    head_dim=32,
    dtype="fp32",
)
# Those that a run falls back on when all others fail.
_LAST_RESORTS = ("sdpa", "reference")


def check_attention(device: torch.device, kind: str = "") -> Iterable[Finding]:
    """A finding for each backend.

    Args:
        device: to run on.
        kind: name of the GPU, told in the findings.
    """
    on_gpu = device.type == "cuda"
    case, capability = _CPU_CASE, None
    if on_gpu:
        capability = torch.cuda.get_device_capability(device)
        case = replace(_GPU_CASE, dtype="bf16" if capability >= OLDEST_FOR_BF16 else "fp16")

    def timer(name: str, case: AttentionCase) -> float:
        # Query heads that share keys and values go other ways through some kernels.
        check(name, replace(case, kv_heads=case.heads // 4), device)
        return time_on_gpu(name, case, device) if on_gpu else _time_on_cpu(name, case, device)

    place = f" on {kind}" if kind else ""
    return judge_backends(case, capability, timer, place)


def judge_backends(
    case: AttentionCase, capability: Capability, timer: Timer, place: str
) -> Iterable[Finding]:
    """What trying each backend says of it."""
    device = "cpu" if capability is None else "cuda"
    for backend in BACKENDS:
        name = f"attention: {backend}{place}"
        reason = obstacle(backend, [case], capability)
        if reason is not None:
            yield not_applicable(name, reason)
            continue
        found = measure([backend], {case: 1.0}, timer)
        if backend in found.milliseconds:
            yield _timed(name, case, found.milliseconds[backend], device)
            continue
        is_last = backend in _LAST_RESORTS
        yield Finding(
            name=name,
            status="failed" if is_last else "warning",
            seen=found.failed[backend],
            meaning="attention does not work here, whatever runtime.attention says"
            if is_last
            else "runtime.attention: auto passes it over; naming it would end or spoil a run",
            remedy="leave runtime.attention at auto; install the torch of requirements.lock, built "
            "for this driver",
            device=device,
        )


def _timed(name: str, case: AttentionCase, milliseconds: float, device: str) -> Finding:
    tokens = case.seq_length * case.micro_batch_size
    tflops = 6 * case.seq_length * case.heads * case.head_dim * tokens / milliseconds / 1e9
    seen = f"right; {milliseconds:.3g} ms, {tflops:,.3g} TFLOP/s"
    return fine(name, seen, device, attention_tflops=tflops)


def _time_on_cpu(name: str, case: AttentionCase, device: torch.device) -> float:
    """Milliseconds of a forward and a backward pass."""
    shape = (case.seq_length, case.micro_batch_size, case.heads, case.head_dim)
    dtype = COMPUTE_DTYPES[case.dtype]
    inputs = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, dtype=dtype, device=device).flatten(2)
    q, k, v = inputs

    def run() -> None:
        output = BACKENDS[name].attend(q, k, v, 0.0, None)
        torch.autograd.grad(output, inputs, upstream)

    return 1e3 * seconds_of(run, device)
