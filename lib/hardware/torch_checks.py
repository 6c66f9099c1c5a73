"""The checks that need torch, in the order of the table."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch

from lib.hardware.attention import check_attention
from lib.hardware.facts import Facts
from lib.hardware.findings import Check, Finding
from lib.hardware.fused_ops import check_kernels
from lib.hardware.gpus import check_devices, check_peers, check_speed
from lib.hardware.links import check_gloo, check_nccl


def _places(facts: Facts) -> list[tuple[torch.device, str]]:
    """The first GPU of each name, as code is the same on the others; else the CPU."""
    if not facts.gpus:
        return [(torch.device("cpu"), "")]
    kinds = dict.fromkeys(facts.gpus)
    named = len(kinds) > 1
    return [(torch.device("cuda", facts.gpus.index(kind)), kind if named else "") for kind in kinds]


def _check_kernels(facts: Facts) -> Iterable[Finding]:
    return _at_each_place(facts, lambda device, kind: check_kernels(device, kind=kind))


def _check_attention(facts: Facts) -> Iterable[Finding]:
    return _at_each_place(facts, check_attention)


def _at_each_place(
    facts: Facts, check: Callable[[torch.device, str], Iterable[Finding]]
) -> list[Finding]:
    """A check's findings, with each GPU the current one: Triton and events work on that."""
    findings: list[Finding] = []
    for device, kind in _places(facts):
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            findings += check(device, kind)
    return findings


TORCH_CHECKS = (
    Check("GPUs", check_devices),
    Check("speed", check_speed),
    Check("kernels", _check_kernels),
    Check("attention", _check_attention),
    Check("copies between GPUs", check_peers),
    Check("gloo", check_gloo),
    Check("NCCL", check_nccl),
)
