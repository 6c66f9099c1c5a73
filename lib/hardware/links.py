"""Ranks on this machine, on its CPU by gloo and on its GPUs by NCCL, judged against their links."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lib.hardware.facts import Facts
from lib.hardware.findings import Finding, failed_by, fine, not_applicable
from lib.hardware.nvml import Nvml
from lib.hardware.traffic import Traffic, measure_traffic
from lib.train.local_ranks import run_on_ranks

_MIB = 2**20
_SIZES = {"cpu": (_MIB, 8 * _MIB), "cuda": (64 * _MIB, 256 * _MIB)}
_REPEATS = {"cpu": 5, "cuda": 10}
_MOST_GLOO_RANKS = 4
# Share of a link's own rate that the largest tensors should reach: NCCL on NVLink gets 0.7 and
# more; PCIe also carries what the host does, and two GPUs may share a way to it.
_FLOORS = {"NVLink": 0.4, "PCIe": 0.25}
_MOST_LATENCY_US = 200.0  # of a small all-reduce over GPUs; on one machine 15 to 50
_SLOW = (
    "a layout that sends much (tensor parallelism, parameters sharded) will wait for it",
    "see `nvidia-smi topo -m` and `nvidia-smi nvlink -s` for a link that is down, unset "
    "NCCL_P2P_DISABLE, switch off ACS and the IOMMU, give a virtual machine's GPUs their topology; "
    "NCCL_DEBUG=INFO tells the transport",
)
_WRONG = (
    "numbers arrive changed: every training over these ranks would be wrong",
    "NCCL_P2P_DISABLE=1: if that helps, direct copies between GPUs are spoilt (switch off ACS and "
    "the IOMMU); update driver and NCCL",
)


@dataclass(frozen=True)
class Link:
    """What joins the GPUs.

    Attributes:
        kind: ``NVLink``, ``PCIe``, or ``loopback`` of the CPU.
        gb_per_s: what the slowest of them should carry in one direction; None: not told.
    """

    kind: Literal["NVLink", "PCIe", "loopback"]
    gb_per_s: float | None = None

    def floor(self) -> float:
        """GB/s below which the link is slow."""
        return _FLOORS.get(self.kind, 0.0) * (self.gb_per_s or 0.0)

    def text(self) -> str:
        """The link in words."""
        rate = f" of {self.gb_per_s:,.0f} GB/s each way" if self.gb_per_s else ""
        return f"{self.kind}{rate}"


def find_link(gpus: int, nvml: Nvml) -> Link:
    """The slowest link between any two GPUs; PCIe where nothing tells of NVLink."""
    pairs = [(one, other) for one in range(gpus) for other in range(one + 1, gpus)]
    linked = all(nvml.are_linked(*pair) for pair in pairs)
    states = [nvml.state(index) for index in range(gpus)]
    if linked and all(state.links for state in states):
        rates = [state.peer_gb_per_s() or 0.0 for state in states]
        return Link("NVLink", min(rates) or None)
    slots = [state.pcie_gb_per_s for state in states if state.pcie_gb_per_s is not None]
    return Link("PCIe", min(slots, default=None))


def check_gloo(facts: Facts) -> Iterable[Finding]:
    """Ranks on the CPU: what every run uses for its checkpoints, and a CPU run for all."""
    ranks = max(2, min(_MOST_GLOO_RANKS, facts.cores))
    return _check_ranks("gloo", ranks, "cpu", Link("loopback"), facts)


def check_nccl(facts: Facts) -> Iterable[Finding]:
    """A rank on each GPU."""
    gpus = len(facts.gpus)
    if gpus == 0:
        return [not_applicable("NCCL", "no GPU")]
    link = find_link(gpus, Nvml()) if gpus > 1 else Link("PCIe")
    return _check_ranks("NCCL", gpus, "cuda", link, facts)


def _check_ranks(
    name: str, ranks: int, device: Literal["cpu", "cuda"], link: Link, facts: Facts
) -> Iterable[Finding]:
    title = f"{name}, {ranks} ranks" if ranks > 1 else f"{name}, 1 rank"
    try:
        traffic, *_ = run_on_ranks(
            ranks,
            measure_traffic,
            device,
            _SIZES[device],
            _REPEATS[device],
            timeout=facts.time_limit_s,
            device=device,
        )
    except AssertionError as error:
        return [failed_by(title, error, device)]
    return judge_traffic(title, traffic, link, device)


def judge_traffic(title: str, traffic: Traffic, link: Link, device: str) -> Iterable[Finding]:
    """Findings on rightness, latency, each collective and each pair."""
    if traffic.wrong:
        yield Finding(
            name=title,
            status="failed",
            seen=f"{traffic.library}: wrong {', '.join(traffic.wrong[:4])}",
            meaning=_WRONG[0],
            remedy=_WRONG[1],
            device=device,
        )
    elif traffic.ranks == 1:
        yield fine(title, f"{traffic.library} starts", device)
    else:
        calls = "all-reduce, all-gather, reduce-scatter and exchanges are right"
        yield fine(title, f"{traffic.library} over {link.text()}: {calls}", device)
    if traffic.ranks == 1:
        return
    yield _latency(f"{title}: latency", traffic, device)
    largest = max(size for _, size in traffic.bus_gb_per_s)
    for (call, size), rate in traffic.bus_gb_per_s.items():
        name = f"{title}: {call}, {size // _MIB} MiB"
        figures = {"link_gb_per_s": rate} if (call, size) == ("all-reduce", largest) else {}
        judged = size == largest  # smaller ones do not fill a link
        yield _rate(name, rate, link if judged else Link(link.kind), device, figures)
    for (one, other), rate in traffic.pairs_gb_per_s.items():
        name = f"{title}: ranks {one} and {other}, {largest // _MIB} MiB"
        yield _rate(name, rate, link, device, {"pair_gb_per_s": rate})


def _latency(name: str, traffic: Traffic, device: str) -> Finding:
    seen = f"{traffic.latency_us:,.0f} us for an all-reduce of one number"
    figures = {"latency_us": traffic.latency_us}
    if device == "cpu" or traffic.latency_us <= _MOST_LATENCY_US:
        return fine(name, seen, device, **figures)
    return Finding(
        name=name,
        status="slow",
        seen=f"{seen}; {_MOST_LATENCY_US:g} is much",
        meaning="steps of a small model will wait for messages",
        remedy="end other programs on these cores, unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, "
        "see that no GPU's clocks are held low",
        device=device,
        figures=figures,
    )


def _rate(name: str, rate: float, link: Link, device: str, figures: dict[str, float]) -> Finding:
    seen, floor = f"{rate:,.3g} GB/s", link.floor()
    if rate >= floor:
        of = f" of {link.gb_per_s:,.0f}" if link.gb_per_s else ""
        return fine(name, f"{seen}{of}", device, **figures)
    return Finding(
        name=name,
        status="slow",
        seen=f"{seen}; {link.text()} should give {floor:,.3g} at least",
        meaning=_SLOW[0],
        remedy=_SLOW[1],
        device=device,
        figures=figures,
    )
