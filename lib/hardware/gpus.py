"""GPUs one by one, and copies from each to each, seen through torch."""

from collections.abc import Iterable
from itertools import permutations

import torch

from lib.hardware.facts import Facts
from lib.hardware.findings import Finding, failed_by, fine, not_applicable
from lib.hardware.nvml import Nvml
from lib.hardware.speed import (
    Rates,
    judge_rates,
    judge_state,
    measure_rates,
    seconds_of,
)

_TAKEN_SHARE = 0.05  # of a GPU's memory; this program's own context takes less
_CONTEXT_BYTES = 1.5e9
_COPIED_BYTES = 2**26
_PRIME = 251  # the pattern that is copied does not repeat with any power of two


def check_devices(facts: Facts) -> Iterable[Finding]:
    """Driver and CUDA, then name, memory and compute capability of each GPU."""
    if not facts.gpus:
        yield not_applicable("GPUs", "none: training runs on the CPU")
        return
    yield _cuda()
    for index, kind in enumerate(facts.gpus):
        name = f"cuda:{index}"
        try:
            yield _device(name, kind, index)
        except Exception as error:
            yield failed_by(name, error, "cuda")


def _cuda() -> Finding:
    nvml = Nvml()
    served, built = nvml.driver_cuda(), torch.version.cuda or "none"
    driver = nvml.driver_version() or "unknown"
    newest = "unknown" if served is None else f"{served[0]}.{served[1]}"
    seen = f"driver {driver} for CUDA {newest}, torch {torch.__version__} with CUDA {built}"
    # Within a major version older drivers serve newer releases.
    if served is not None and torch.version.cuda and served[0] < int(built.split(".")[0]):
        return Finding(
            name="driver",
            status="failed",
            seen=seen,
            meaning="the driver is older than the CUDA that torch was built for",
            remedy="update the NVIDIA driver, or install a torch build for its CUDA",
            device="cuda",
        )
    return fine("driver", seen, "cuda")


def _device(name: str, kind: str, index: int) -> Finding:
    torch.zeros(1, device=f"cuda:{index}")  # what is broken shows here
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    seen = f"{kind}, {total / 2**30:.0f} GiB, compute capability {major}.{minor}"
    temperature = Nvml().state(index).temperature
    seen += f", {temperature} C" if temperature is not None else ""
    taken = total - free
    if taken <= max(_TAKEN_SHARE * total, _CONTEXT_BYTES):
        return fine(name, seen, "cuda", memory_gib=total / 2**30)
    return Finding(
        name=name,
        status="warning",
        seen=f"{seen}; {taken / 2**30:.1f} GiB are taken",
        meaning="other programs hold memory of this GPU, and slow it down",
        remedy="end what `nvidia-smi` lists, or leave this GPU out with CUDA_VISIBLE_DEVICES",
        device="cuda",
        figures={"memory_gib": total / 2**30},
    )


def check_speed(facts: Facts) -> Iterable[Finding]:
    """Product and copy of each GPU against its peers; of the CPU without one."""
    if not facts.gpus:
        yield from judge_rates([measure_rates(torch.device("cpu"), facts.cpu)])
        return
    measured: list[Rates] = []
    for index, kind in enumerate(facts.gpus):
        try:
            measured.append(measure_rates(torch.device("cuda", index), kind))
        except Exception as error:
            yield failed_by(f"speed of cuda:{index}", error, "cuda")
        if complaint := judge_state(f"cuda:{index}", Nvml().state(index)):
            yield complaint
        torch.cuda.empty_cache()  # ranks want it later
    yield from judge_rates(measured)


def check_peers(facts: Facts) -> Iterable[Finding]:
    """Copies from each GPU to each other one, whether direct or through the host."""
    gpus = [torch.device("cuda", index) for index in range(len(facts.gpus))]
    if len(gpus) < 2:
        yield not_applicable("copies between GPUs", "there are no two GPUs")
        return
    nvml = Nvml()
    indirect: list[str] = []
    for source, target in permutations(gpus, 2):
        direct = torch.cuda.can_device_access_peer(source.index, target.index)
        indirect += [] if direct else [f"{source.index} to {target.index}"]
        way = "direct" if direct else "through the host"
        if nvml.are_linked(source.index, target.index):
            way = "NVLink"
        yield try_copy(source, target, way)
    if indirect:
        yield Finding(
            name="peer access",
            status="warning",
            seen=f"none from GPU {', '.join(indirect[:8])}",
            meaning="these GPUs send through host memory, several times slower",
            remedy="see `nvidia-smi topo -p2p r`; put GPUs under one PCIe switch, switch off ACS "
            "and the IOMMU; consumer GPUs have none",
            device="cuda",
        )
    else:
        yield fine("peer access", "each GPU reaches each other one", "cuda")


def try_copy(source: torch.device, target: torch.device, way: str) -> Finding:
    """Whether what is copied between two devices arrives unchanged, and how fast."""
    name = f"copy {source} to {target}"
    try:
        pattern = torch.arange(_COPIED_BYTES, dtype=torch.int32, device=source) % _PRIME
        leaving = pattern.to(torch.uint8)
        arriving = torch.zeros_like(leaving, device=target)
        seconds = seconds_of(lambda: arriving.copy_(leaving), source)
        right = torch.equal(arriving.cpu(), leaving.cpu())
    except Exception as error:
        return failed_by(name, error, source.type)
    if right:
        rate = _COPIED_BYTES / seconds / 1e9
        return fine(name, f"{rate:,.3g} GB/s, {way}", source.type, peer_gb_per_s=rate)
    return Finding(
        name=name,
        status="failed",
        seen=f"other bytes arrive than were sent, {way}",
        meaning="direct copies between these GPUs are spoilt, which happens where an IOMMU or ACS "
        "redirects them; every training over both would be wrong",
        remedy="switch off the IOMMU and ACS (BIOS, kernel option iommu=off); until then "
        "NCCL_P2P_DISABLE=1",
        device=source.type,
    )
