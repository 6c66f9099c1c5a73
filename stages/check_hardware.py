"""Command: tries what this machine can do, and says of every failure what it means."""

import dataclasses
import json
import time
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.cli import plain_command
from lib.console import say, table
from lib.errors import UserError
from lib.hardware.facts import Facts, read_facts
from lib.hardware.findings import Finding, as_record, failed_by, run_checks
from lib.hardware.machine import MACHINE_CHECKS
from lib.output_file import OutputFile


@plain_command
@click.option("--gpus", type=click.IntRange(0), help="Fail unless there are so many GPUs.")
@click.option(
    "--json",
    "record",
    type=OutputFile(),
    help="Write findings and ceilings to a file.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1.0),
    default=60.0,
    show_default=True,
    help="Seconds after which ranks that hang are ended.",
)
def main(gpus: int | None, record: Path | None, time_limit: float) -> None:
    """Tries what this machine can do: sizes, versions, GPUs, kernels, attention, links.

    Reads no parameters and needs no DVC; writes nothing but the file of --json. On a CPU it takes
    less than a minute, on 8 GPUs less than three. Exit status 1 if anything failed; what is only
    slow, or odd, is told. docs/hardware.md explains each line.
    """
    begin = time.monotonic()
    facts = dataclasses.replace(read_facts(Path.cwd(), gpus), time_limit_s=time_limit)
    findings = [*run_checks(MACHINE_CHECKS, facts), *_by_torch(facts)]
    _show(findings, time.monotonic() - begin)
    if record is not None:
        text = json.dumps(as_record(findings, facts), indent=2)
        write_text_atomically(record, f"{text}\n")
        say(f"written to {record}")
    failed = [finding.name for finding in findings if finding.status == "failed"]
    if failed:
        raise UserError(f"{len(failed)} failed: {', '.join(failed)}")


def _by_torch(facts: Facts) -> list[Finding]:
    """The checks that need torch, or why it cannot be imported."""
    try:
        from lib.hardware.torch_checks import TORCH_CHECKS
    except (ImportError, OSError) as error:  # a library that it wants is missing
        return [failed_by("torch", error)]
    return run_checks(TORCH_CHECKS, facts)


def _show(findings: list[Finding], seconds: float) -> None:
    rows = [(finding.name, finding.status, finding.seen) for finding in findings]
    table(f"this machine, {seconds:.0f} s", rows, headers=("what", "", "seen"))
    for finding in findings:
        if finding.meaning:
            say(f"{finding.status}: {finding.advice()}")


if __name__ == "__main__":
    main()
