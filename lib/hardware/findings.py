"""What a check found, and how checks are run: each is data, and none ends the others.

A check is a function of the machine that gives findings. One that raises gives a failed finding,
whose text says what the exception means (``lib.hardware.causes``).
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from lib.console import fail, say
from lib.hardware.causes import explain
from lib.hardware.facts import Facts

# ``slow`` and ``warning`` let a training run; ``failed`` would not, or not rightly.
Status = Literal["ok", "slow", "warning", "failed", "not applicable"]

# What a check may take beside its ranks: Triton compiles its kernels for a minute on a slow disk.
_SPARE_S = 120.0

# What a planner needs, and how the figures of several devices or rounds become one: the slowest
# device sets the pace of all.
CEILINGS: dict[str, Callable[[Iterable[float]], float]] = {
    "product_tflops": min,
    "copy_gb_per_s": min,
    "attention_tflops": max,
    "link_gb_per_s": max,
    "latency_us": min,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table.

    Attributes:
        name: what was looked at.
        status: the verdict.
        seen: what was seen, in a few words.
        meaning: what it means; empty if all is well.
        remedy: what to try; empty if all is well.
        device: ``cpu`` or ``cuda``, what the figures are of.
        figures: measured numbers; the unit is the end of each name.
    """

    name: str
    status: Status
    seen: str
    meaning: str = ""
    remedy: str = ""
    device: str = "cpu"
    figures: dict[str, float] = field(default_factory=dict)

    def advice(self) -> str:
        """The finding as a paragraph."""
        meaning = self.meaning[0].upper() + self.meaning[1:]
        return f"{self.name}: {self.seen}. {meaning}. Try: {self.remedy}."


@dataclass(frozen=True)
class Check:
    """A check as data.

    Attributes:
        name: of the check.
        run: looks at the machine.
    """

    name: str
    run: Callable[[Facts], Iterable[Finding]]


def fine(name: str, seen: str, device: str = "cpu", **figures: float) -> Finding:
    """All is well."""
    return Finding(name=name, status="ok", seen=seen, device=device, figures=figures)


def not_applicable(name: str, why: str) -> Finding:
    """There was nothing to look at."""
    return Finding(name=name, status="not applicable", seen=why)


def failed_by(name: str, error: BaseException, device: str = "cpu") -> Finding:
    """What an exception says."""
    cause = explain(error)
    return Finding(
        name=name,
        status="failed",
        seen=cause.seen,
        meaning=cause.meaning,
        remedy=cause.remedy,
        device=device,
    )


def run_checks(checks: Sequence[Check], facts: Facts) -> list[Finding]:
    """Runs the checks in their order, telling which one is at work."""
    findings: list[Finding] = []
    for check in checks:
        say(f"checking {check.name}")
        try:
            with _time_limit(check.name, facts.time_limit_s + _SPARE_S):
                findings += check.run(facts)
        except Exception as error:
            findings.append(failed_by(check.name, error))
    return findings


@contextmanager
def _time_limit(name: str, seconds: float) -> Iterator[None]:
    """Ends this program if a check hangs, not in ranks but in the driver: nothing else can."""
    timer = threading.Timer(seconds, _give_up, (name, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(name: str, seconds: float) -> None:
    fail(
        f"{name}: did not finish within {seconds:g} s. The driver, or a GPU, does not answer. Try: "
        "look for Xid messages in `dmesg`, see whether `nvidia-smi` answers, reset the GPU or "
        "restart the machine; CUDA_VISIBLE_DEVICES leaves a GPU out."
    )
    os._exit(1)


def ceilings(findings: Iterable[Finding], device: str) -> dict[str, float | None]:
    """What the machine reaches at best, for planning; None for what could not be measured.

    Args:
        findings: of all checks.
        device: ``cuda`` takes the figures of GPUs, ``cpu`` those of the CPU.

    Returns:
        product_tflops, copy_gb_per_s: of the slowest device. attention_tflops: of the fastest
        backend. link_gb_per_s: bus bandwidth of an all-reduce over all ranks. latency_us: of a
        small one.
    """
    own = [finding.figures for finding in findings if finding.device == device]
    values = {name: [figures[name] for figures in own if name in figures] for name in CEILINGS}
    return {name: pick(values[name]) if values[name] else None for name, pick in CEILINGS.items()}


def as_record(findings: Sequence[Finding], facts: Facts) -> dict[str, object]:
    """Everything as plain data, for ``--json``."""
    device = "cuda" if facts.gpus else "cpu"
    machine = dataclasses.asdict(facts)
    del machine["environment"]  # may hold secrets
    return {
        "version": 1,
        "device": device,
        "machine": machine,
        "ceilings": ceilings(findings, device),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
