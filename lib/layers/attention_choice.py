"""Which attention backend is the fastest for a run's shapes on this device, by trying them.

Their order differs by GPU, head dimension and length, so nothing but a measurement tells it: on an
H200 cuDNN takes 0.58 of the time of flash attention at 2048 tokens of 16 heads of 128, and at 8192
flash-attn-4 is ahead of both.

The fastest of those that are right, that is: kernels of some releases gave wrong gradients for some
lengths or numbers of heads, so each is compared with the formula before it is timed.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lib.layers.attention import BACKENDS
from lib.layers.attention_limits import AttentionCase
from lib.layers.documents import Documents, find_documents
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.layers.gpu_limits import Capability

# Milliseconds of a backend, by name, for a case; raises whatever the backend raises, and if it is
# wrong.
Timer = Callable[[str, AttentionCase], float]

_WARM_UPS, _SAMPLES = 3, 5
_RUNS = 4  # of a sample, one after another: training, too, keeps the device's queue filled
_DOCUMENTS = 4  # of each sequence that is timed
_LONGEST_REASON = 160

# What is compared: two sequences, since the formula forms S x S numbers a part of each, which ends
# at the same place of a kernel's block as the whole.
_CHECKED_LENGTH, _BLOCK, _CHECKED_ROWS = 512, 128, 2
# Norm of the difference over the norm: ten times what rounding does. Products of fp32 may be TF32.
_RESULTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
_TOLERANCES = {
    "bf16": 2.0**-4,
    "fp16": 2.0**-7,
    "fp32": 2.0**-7,
    "fp64": 2.0**-40,
}


@dataclass(frozen=True)
class Measured:
    """What came of trying.

    Attributes:
        milliseconds: of each backend that ran, fastest first.
        failed: why the others did not, by name.
    """

    milliseconds: dict[str, float]
    failed: dict[str, str]


def obstacle(name: str, cases: Iterable[AttentionCase], capability: Capability) -> str | None:
    """Why a backend cannot serve all cases on such a device, as far as that is known beforehand."""
    if name not in BACKENDS:
        return "is no backend of this version"
    reasons = (BACKENDS[name].why_not(case, capability) for case in cases)
    return next((reason for reason in reasons if reason is not None), None)


def measure(names: Iterable[str], cases: Mapping[AttentionCase, float], time: Timer) -> Measured:
    """Times backends; one that raises, for want of memory say, is left out with its reason.

    Args:
        names: of the backends.
        cases: how much of the run each case is, in any unit: the times are weighted means.
        time: of one backend and case.
    """
    milliseconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            taken = sum(weight * time(name, case) for case, weight in cases.items())
        except Exception as error:
            failed[name] = reason_of(error)
        else:
            milliseconds[name] = taken / sum(cases.values())
    return Measured(dict(sorted(milliseconds.items(), key=lambda item: item[1])), failed)


def reason_of(error: Exception) -> str:
    """What an exception says of the backend that raised it, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit into the GPU's memory"
    lines = str(error).splitlines() or [type(error).__name__]
    return f"fails ({lines[0][:_LONGEST_REASON]})"


def kept_bytes(name: str, case: AttentionCase) -> int:
    """What a layer keeps of the S x S weights for backward; 0 where they are never formed."""
    if not BACKENDS[name].keeps_weights:
        return 0
    entries = case.micro_batch_size * case.heads * case.seq_length**2
    # With dropout also which were dropped, a byte each, and what is left of them.
    size = COMPUTE_DTYPES[case.dtype].itemsize
    return entries * (2 * size + 1 if case.dropout else size)


def check(name: str, case: AttentionCase, device: torch.device) -> None:
    """Compares output and gradients of a backend, without dropout, with the formula in float64.

    Raises:
        ArithmeticError: they are wrong.
    """
    length = case.seq_length
    if length > _CHECKED_LENGTH + _BLOCK:
        length = _CHECKED_LENGTH + length % _BLOCK
    rows = min(case.micro_batch_size, _CHECKED_ROWS)
    part = replace(case, seq_length=length, micro_batch_size=rows)
    inputs, upstream = _random_inputs(part, device)
    documents = _some_documents(part, device)
    found = _results(name, inputs, upstream, documents)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = _results("reference", exact, upstream.double(), documents)
    for what, one, expected in zip(_RESULTS, found, truth, strict=True):
        # Gradients are zero where a token sees none but itself.
        size = max(float(expected.norm()), 0.01 * expected.numel() ** 0.5)
        error = float((one.double() - expected).norm()) / size
        if not error <= _TOLERANCES[case.dtype]:  # not a number is wrong too
            raise ArithmeticError(f"wrong {what}, off by {error:.2g} of its size")


def _results(
    name: str, inputs: list[Tensor], upstream: Tensor, documents: Documents | None
) -> list[Tensor]:
    q, k, v = inputs
    output = BACKENDS[name].attend(q, k, v, 0.0, documents)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def time_on_gpu(name: str, case: AttentionCase, device: torch.device) -> float:
    """Milliseconds of one forward and backward on random inputs, the median of several.

    The inputs are views of one fused tensor, as in the model. Documents are four of one length a
    sequence. The random streams are left as they were.

    Raises:
        ArithmeticError: its results are wrong.
    """
    torch.cuda.empty_cache()  # of what another backend left
    check(name, case, device)
    attend = BACKENDS[name].attend
    inputs, upstream = _random_inputs(case, device)
    q, k, v = inputs
    documents = _some_documents(case, device)

    def run() -> None:
        output = attend(q, k, v, case.dropout, documents)
        torch.autograd.grad(output, inputs, upstream)

    with torch.random.fork_rng(devices=[device]):
        for _ in range(_WARM_UPS):
            run()
        return statistics.median(_milliseconds(run) for _ in range(_SAMPLES))


def _milliseconds(run: Callable[[], None]) -> float:
    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(_RUNS):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / _RUNS


def _random_inputs(case: AttentionCase, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(1)
    heads, kv_heads, size = case.heads, case.kv_heads, case.head_dim
    shape, dtype = (case.seq_length, case.micro_batch_size), COMPUTE_DTYPES[case.dtype]

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*shape, *sizes, generator=generator, dtype=dtype, device=device)

    fused = drawn(heads + 2 * kv_heads, size)
    parts = fused.split([heads, kv_heads, kv_heads], dim=2)
    return [part.detach().requires_grad_() for part in parts], drawn(heads * size)


def _some_documents(case: AttentionCase, device: torch.device) -> Documents | None:
    if not case.documents:
        return None
    starts = np.arange(1, _DOCUMENTS) * case.seq_length // _DOCUMENTS
    return find_documents([starts] * case.micro_batch_size, case.seq_length).to(device)
