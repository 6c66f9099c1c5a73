"""What a GPU reaches at most, as data: the rates that ``lib.plan.time`` counts with.

Those of the H200 were measured (docs/performance.md). For other GPUs the datasheet's peaks are
taken times the share of them that the H200 reaches, and ``measured`` says so. A file of rates:

    {"device": "NVIDIA H200",
     "memory_gib": 139.8,
     "product_tflops": 740.0,
     "copy_gb_per_s": 4100.0,
     "attention_tflops": {"64": {"2048": 290.0}, "128": {"2048": 363.0, "8192": 545.0}},
     "link_gb_per_s": {"collective": {"16": 132.0, "512": 298.0}, "p2p": {"32": 150.0},
                       "nodes": {"64": 45.0}},
     "latency_us": {"kernel": 65.0, "collective": 100.0}}

product_tflops:    bf16 (fp16) products of large matrices.
copy_gb_per_s:     bytes read and written by a copy on the device.
attention_tflops:  forward and backward, causal half counted, by head dimension and sequence length.
link_gb_per_s:     bus rate by the megabytes of a message: all-gathers and reduce-scatters of the
                   GPUs of a node, transfers between two, and collectives between nodes.
latency_us:        of the host: from one launch of a kernel to the next as training launches them
                   (Python and autograd included), and the same of a collective.
"""

import bisect
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib.errors import UserError
from lib.model.flops import dense_peak_tflops

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rates = Annotated[dict[Annotated[int, Field(gt=0)], _Positive], Field(min_length=1)]


class Links(BaseModel):
    """GB/s by the megabytes of a message."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: _Rates
    p2p: _Rates
    nodes: _Rates


class Latency(BaseModel):
    """Microseconds of the host for each launch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: float = Field(ge=0, allow_inf_nan=False)
    collective: float = Field(ge=0, allow_inf_nan=False)


class Ceilings(BaseModel):
    """See the text of the module."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    memory_gib: _Positive
    product_tflops: _Positive
    copy_gb_per_s: _Positive
    attention_tflops: dict[Annotated[int, Field(gt=0)], _Rates] = Field(min_length=1)
    link_gb_per_s: Links
    latency_us: Latency
    measured: bool = True

    def attention(self, head_dim: int, seq_length: int) -> float:
        """TFLOP/s of attention, by the nearest head dimension."""
        nearest = min(self.attention_tflops, key=lambda size: abs(math.log(size / head_dim)))
        return interpolated(self.attention_tflops[nearest], seq_length)


def interpolated(rates: Mapping[int, float], at: float) -> float:
    """A rate between those measured, in a straight line over the logarithm; the ends beyond."""
    places = sorted(rates)
    above = bisect.bisect_left(places, at)
    if above == 0:
        return rates[places[0]]
    if above == len(places):
        return rates[places[-1]]
    low, high = places[above - 1], places[above]
    share = math.log(at / low) / math.log(high / low)
    return rates[low] + share * (rates[high] - rates[low])


H200 = Ceilings(
    device="NVIDIA H200",
    memory_gib=139.8,
    product_tflops=740.0,
    copy_gb_per_s=4100.0,
    # At 1024: what the 125M model's step leaves for it.
    attention_tflops={
        64: {1024: 200.0, 2048: 290.0, 8192: 430.0},
        128: {1024: 260.0, 2048: 363.0, 8192: 545.0},
    },
    link_gb_per_s=Links(
        collective={1: 20.0, 16: 132.0, 64: 239.0, 512: 298.0},
        p2p={1: 20.0, 16: 132.0, 64: 239.0},
        nodes={1: 5.0, 16: 25.0, 64: 45.0},  # a network card of 400 Gb/s for each GPU
    ),
    latency_us=Latency(kernel=65.0, collective=100.0),
)

# What ``stages.check_hardware`` measures of two H200: products, copies, attention of two samples of
# 2048 tokens with head dimension 128, all-reduce of 256 MiB, and of one number.
_CHECKED_H200 = {
    "product_tflops": 792.0,
    "copy_gb_per_s": 4200.0,
    "attention_tflops": 277.0,
    "link_gb_per_s": 296.0,
    "latency_us": 39.0,
}

# By the makers' datasheets: memory GB/s, GiB that a program sees, link of a GPU to others of its
# node in both directions, GB/s. Products are in ``lib.model.flops``.
_DATASHEET: dict[str, tuple[float, float, float]] = {
    "NVIDIA H200": (4800, 139.8, 900),
    "NVIDIA H100": (3350, 79.1, 900),
    "NVIDIA H100 PCIe": (2000, 79.1, 128),
    "NVIDIA B200": (8000, 178.0, 1800),
    "NVIDIA A100-SXM4-80GB": (2039, 79.2, 600),
    "NVIDIA A100-SXM4-40GB": (1555, 39.4, 600),
    "NVIDIA A100 80GB PCIe": (1935, 79.2, 64),
    "NVIDIA L40S": (864, 44.4, 64),
    "NVIDIA L4": (300, 22.2, 64),
    "NVIDIA GeForce RTX 4090": (1008, 23.5, 64),
    "NVIDIA GeForce RTX 3090": (936, 23.6, 64),
    "Tesla V100-SXM2-32GB": (900, 31.7, 300),
    "Tesla V100-SXM2-16GB": (900, 15.8, 300),
    "Tesla T4": (320, 14.6, 32),
}
# Dense fp16 TFLOP/s of those that have no bf16.
_FP16_TFLOPS = {"Tesla V100-SXM2-32GB": 125, "Tesla V100-SXM2-16GB": 125, "Tesla T4": 65}

# What may follow in a reported name and says nothing of the chip.
_FORM = re.compile(r"( (sxm\d*|pcie|\d+gb|hbm\w*))*")


def known_ceilings(name: str) -> Ceilings:
    """The rates of a GPU by its name or a part of it, such as ``H200`` or ``A100-SXM4-80GB``.

    Raises:
        UserError: no such GPU is known.
    """
    wanted = _plain(name)
    names = {_plain(known): known for known in _DATASHEET}
    ending = [known for text, known in names.items() if f" {text}".endswith(f" {wanted}")]
    within = [known for text, known in names.items() if f" {wanted} " in f" {text} "]
    # A driver says more than the name: "NVIDIA H100 80GB HBM3".
    longer = [
        names[text]
        for text in sorted(names, key=len, reverse=True)
        if wanted.startswith(text) and _FORM.fullmatch(wanted[len(text) :])
    ]
    found = [*ending, *within, *longer]
    if not found:
        raise UserError(
            f"{name}: the rates of this GPU are not known; there are {', '.join(_DATASHEET)}; "
            "name one by --gpu, or give rates by --ceilings FILE"
        )
    return H200 if found[0] == H200.device else _estimated(found[0])


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).lower().strip()


def _estimated(name: str) -> Ceilings:
    copy, memory, link = _DATASHEET[name]
    top_copy, _, top_link = _DATASHEET[H200.device]
    flops = _peak(name) / _peak(H200.device)
    links = H200.link_gb_per_s
    return Ceilings(
        device=name,
        memory_gib=memory,
        product_tflops=H200.product_tflops * flops,
        copy_gb_per_s=H200.copy_gb_per_s * copy / top_copy,
        attention_tflops={
            size: _times(rates, flops) for size, rates in H200.attention_tflops.items()
        },
        link_gb_per_s=Links(
            collective=_times(links.collective, link / top_link),
            p2p=_times(links.p2p, link / top_link),
            nodes=links.nodes,
        ),
        latency_us=H200.latency_us,
        measured=False,
    )


def _peak(name: str) -> float:
    return dense_peak_tflops(name) or _FP16_TFLOPS[name]


def _times(rates: Mapping[int, float], factor: float) -> dict[int, float]:
    return {at: rate * factor for at, rate in rates.items()}


class _Checked(BaseModel):
    """The ceilings of a record; None: not measured."""

    product_tflops: _Positive | None = None
    copy_gb_per_s: _Positive | None = None
    attention_tflops: _Positive | None = None
    link_gb_per_s: _Positive | None = None
    latency_us: _Positive | None = None


class _Machine(BaseModel):
    gpus: list[str] = Field(min_length=1)


class HardwareRecord(BaseModel):
    """What is read of the record of ``stages.check_hardware`` (docs/hardware.md)."""

    device: Literal["cuda"]
    machine: _Machine
    ceilings: _Checked

    def rates(self) -> Ceilings:
        """The rates of the H200, times how this machine does beside one in the same check.

        The check is short: it sees other rates than training does, yet the same of each GPU. What
        it does not measure is as of the known GPU of this name.

        Raises:
            UserError: no such GPU is known.
        """
        name, found = self.machine.gpus[0], self.ceilings.model_dump()
        shares = {key: found[key] / rate for key, rate in _CHECKED_H200.items() if found[key]}
        known = known_ceilings(name)
        rates: dict[str, object] = {
            "device": name,
            "measured": known.measured or len(shares) == len(_CHECKED_H200),
        }
        for key in ("product_tflops", "copy_gb_per_s"):
            if key in shares:
                rates[key] = getattr(H200, key) * shares[key]
        if share := shares.get("attention_tflops"):
            table = H200.attention_tflops.items()
            rates["attention_tflops"] = {size: _times(each, share) for size, each in table}
        if share := shares.get("link_gb_per_s"):
            links = H200.link_gb_per_s
            rates["link_gb_per_s"] = Links(
                collective=_times(links.collective, share),
                p2p=_times(links.p2p, share),
                nodes=known.link_gb_per_s.nodes,
            )
        if share := shares.get("latency_us"):
            collective = H200.latency_us.collective * share
            rates["latency_us"] = Latency(kernel=known.latency_us.kernel, collective=collective)
        return known.model_copy(update=rates)


def read_ceilings(path: Path) -> Ceilings:
    """Reads a file of rates, or the record that ``stages.check_hardware --json`` writes.

    Raises:
        UserError: it cannot be read, or is neither; or a record is of a GPU whose other rates are
            not known.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(read, dict) and "ceilings" in read:
            if read.get("device") == "cpu":
                raise UserError("is of a CPU; run stages.check_hardware on GPUs, or take --gpu")
            return HardwareRecord.model_validate(read).rates()
        return Ceilings.model_validate(read)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the text"
            raise UserError(f"{path}: {place}: {first['msg']}; see docs/planning.md") from None
        raise UserError(f"{path}: cannot be read as a file of rates ({error})") from None
