"""How fast each device multiplies and copies, against its peers and its maker's figure.

A GPU that is slower than others of its name (heat, a power limit, a spoilt memory) sets the pace
of all: every step waits for it.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lib.hardware.findings import Finding, fine
from lib.hardware.nvml import GpuState
from lib.layers.gpu_limits import OLDEST_FOR_BF16
from lib.model.flops import dense_peak_tflops

_WARM_UPS, _SAMPLES, _RUNS = 2, 5, 3
_AGAINST_BEST = 0.9  # of the best GPU of the same name
_AGAINST_PEAK = 0.55  # of the datasheet; an H200 reaches 0.7 to 0.8
_SIZE = {"cuda": 8192, "cpu": 1024}
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}


@dataclass(frozen=True)
class Rates:
    """What a device reached.

    Attributes:
        title: of the device, such as ``cuda:0``.
        kind: its name by the maker.
        product_tflops: of a bf16 product of square matrices (fp16 before compute capability 8.0,
            fp32 on a CPU).
        copy_gb_per_s: of a copy within its memory, bytes read and written.
    """

    title: str
    kind: str
    product_tflops: float
    copy_gb_per_s: float


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run: the median of several samples after some that warm up."""
    for _ in range(_WARM_UPS):
        run()
    samples: list[float] = []
    for _ in range(_SAMPLES):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(_RUNS):
            run()
        synchronize(device)
        samples.append((time.perf_counter() - begin) / _RUNS)
    return statistics.median(samples)


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_rates(device: torch.device, kind: str) -> Rates:
    """Times a product and a copy on a device."""
    size, dtype = _SIZE[device.type], torch.float32
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= OLDEST_FOR_BF16
        dtype = torch.bfloat16 if has_bf16 else torch.float16
    x = torch.randn(size, size, dtype=dtype, device=device)
    y = torch.randn(size, size, dtype=dtype, device=device)
    product = torch.empty_like(x)
    seconds = seconds_of(lambda: torch.mm(x, y, out=product), device)
    tflops = 2 * size**3 / seconds / 1e12
    count = _COPIED_BYTES[device.type]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    title = str(device) if device.type == "cuda" else "CPU"
    return Rates(title, kind, tflops, 2 * count / seconds / 1e9)


def judge_rates(rates: Sequence[Rates]) -> Iterable[Finding]:
    """A finding for each device: slow against the best of its kind, or against its maker's word."""
    for one in rates:
        kin = [other for other in rates if other.kind == one.kind]
        name = f"speed of {one.title}"
        seen = f"product {one.product_tflops:,.3g} TFLOP/s, copy {one.copy_gb_per_s:,.3g} GB/s"
        behind = _behind_its_kin(one, kin) or _behind_its_peak(one)
        device = "cpu" if one.title == "CPU" else "cuda"
        figures = {
            "product_tflops": one.product_tflops,
            "copy_gb_per_s": one.copy_gb_per_s,
        }
        if not behind:
            yield fine(name, seen, device, **figures)
            continue
        yield Finding(
            name=name,
            status="slow",
            seen=f"{seen}: {behind}",
            meaning="every step waits for the slowest GPU",
            remedy="see `nvidia-smi -q -d PERFORMANCE,POWER,CLOCK` for heat, a power limit or "
            "locked clocks, and `nvidia-smi` for other programs on it; leave it out with "
            "CUDA_VISIBLE_DEVICES",
            device=device,
            figures=figures,
        )


def _behind_its_kin(one: Rates, kin: Sequence[Rates]) -> str:
    for what, own, best in (
        ("product", one.product_tflops, max(other.product_tflops for other in kin)),
        ("copy", one.copy_gb_per_s, max(other.copy_gb_per_s for other in kin)),
    ):
        if own < _AGAINST_BEST * best:
            return f"the {what} at {own / best:.0%} of the best {one.kind} here"
    return ""


def _behind_its_peak(one: Rates) -> str:
    peak = dense_peak_tflops(one.kind)
    if peak is None or one.product_tflops >= _AGAINST_PEAK * peak:
        return ""
    return f"the product at {one.product_tflops / peak:.0%} of the {peak:g} of its datasheet"


def judge_state(title: str, state: GpuState) -> Finding | None:
    """What the driver complains of just after the measurement; None if of nothing."""
    complaints = [*state.throttled]
    if state.ecc_errors:
        complaints.append(f"{state.ecc_errors} uncorrected memory errors")
    if not complaints:
        return None
    return Finding(
        name=f"state of {title}",
        status="warning" if state.ecc_errors else "slow",
        seen=", ".join(complaints),
        meaning="its memory loses bits" if state.ecc_errors else "it runs below its clocks",
        remedy="reset it (`nvidia-smi --gpu-reset`), and exchange it if errors come back"
        if state.ecc_errors
        else "see to cooling and power (`nvidia-smi -q -d TEMPERATURE,POWER`)",
        device="cuda",
    )
