"""Command: hits a training at random, again and again, and sees that nothing is lost."""

import dataclasses
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import click

from lib.cli import plain_command
from lib.console import say, table
from lib.errors import UserError
from lib.workflow.torture import Account, leave_alone, torture
from lib.workflow.torture_faults import FaultReport, try_faults
from lib.workflow.torture_plan import MOMENTS, SIGNALS, Blow, crossed, draw_blows
from lib.workflow.torture_scenes import Length, prepared_project


@plain_command
@click.option("--kills", default=100, show_default=True, help="Blows to deal; 0 is none.")
@click.option("--seed", default=1, show_default=True, help="Draws the blows.")
@click.option("--processes", default=2, show_default=True, help="Ranks of the training.")
@click.option("--steps", default=240, show_default=True, help="Steps of the training.")
@click.option("--faults", is_flag=True, help="Then spoil disk and files, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the account as JSON.")
def main(kills: int, seed: int, processes: int, steps: int, faults: bool, as_json: bool) -> None:
    """Hits a tiny training at random instants and compares its end with that left alone.

    Random processes of it (a rank, the launcher, torchrun, dvc, the group, everyone) are killed,
    stopped, or asked to end, while they start, train, save or publish. After each blow the same
    command runs again, until it finishes. Rows of train.csv, the samples read and the published
    weights must then be the same bits as those of the run that was left alone.

    All in scratch copies of the project, on the CPU. Takes about 15 seconds a blow on 2 cores.
    Exit status 1 when anything was lost; the scratch copy of that is kept.
    """
    # With --json standard output is for the account alone.
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        account, reports = work(
            draw_blows(seed, kills), Length(steps, processes=processes), faults=faults
        )
    if as_json:
        say(json.dumps(_as_json(account, reports), indent=2))
    else:
        show(account, reports)
    lost = account.faults + [report.fault for report in reports if report.fault]
    if lost:
        where = f" (kept in {account.kept}, seed {seed})" if account.kept else ""
        raise UserError(f"something was lost: {'; '.join(lost)}{where}")


def work(blows: list[Blow], length: Length, *, faults: bool) -> tuple[Account, list[FaultReport]]:
    """Deals the blows, then tries the faults of disk and files, in scratch copies."""
    with prepared_project(Path.cwd(), length) as prepared:
        say("training once, left alone")
        truth = leave_alone(prepared)
        account = torture(prepared, blows, truth) if blows else Account()
        reports = try_faults(prepared, truth) if faults and not account.faults else []
    return account, reports


def show(account: Account, reports: list[FaultReport]) -> None:
    """Prints the tables of what was done, and what became of it."""
    hits = account.hits
    if hits:
        signals = [(hit.blow.target, hit.blow.signal) for hit in hits]
        table("blows", crossed(signals, SIGNALS), ("who", *SIGNALS, "all"))
        moments = [(hit.blow.target, hit.blow.moment) for hit in hits]
        table("moments", crossed(moments, MOMENTS), ("who", *MOMENTS, "all"))
        table("account", summary(account))
    if reports:
        rows = [(report.name, report.how, report.fault or "nothing") for report in reports]
        table("faults of disk and files", rows, ("fault", "how", "lost"))


def summary(account: Account) -> list[tuple[str, str]]:
    """The account in figures, the verdict last."""
    asked = [hit.lost for hit in account.hits if hit.blow.asks and hit.lost is not None]
    killed = [hit.lost for hit in account.hits if not hit.blow.asks and hit.lost is not None]
    files, size = account.forgotten
    return [
        ("blows", str(len(account.hits))),
        ("of these while a checkpoint was half written", str(_saving(account))),
        ("starts", str(account.starts)),
        ("resumes from a checkpoint", str(account.resumes)),
        ("trainings brought to their end", str(account.rounds)),
        ("steps done again after a kill, at most", str(max(killed, default=0))),
        ("steps done again after a signal that asks, at most", str(max(asked, default=0))),
        ("DVC locks that had to be removed (make unlock)", str(account.spoilt_locks)),
        ("temporary files left by killed processes", f"{files}, {size:,} bytes"),
        ("lost", "; ".join(account.faults) or "nothing"),
    ]


def _saving(account: Account) -> int:
    return sum(hit.while_saving for hit in account.hits)


def _as_json(account: Account, reports: list[FaultReport]) -> dict[str, object]:
    return {
        **dataclasses.asdict(account),
        "kept": str(account.kept) if account.kept else None,
        "disk_and_files": [dataclasses.asdict(report) for report in reports],
    }


if __name__ == "__main__":
    main()
