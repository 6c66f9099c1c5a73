"""Torture: a training that is hit again and again must end as the one that was left alone.

One scratch project is prepared. A copy of it trains undisturbed: that is the truth. In further
copies, one round each, the same training is started, hit, and started again until it finishes;
then its results are compared with the truth bit for bit. Rounds follow until all blows are dealt.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from lib.console import say
from lib.errors import UserError
from lib.workflow.torture_evidence import (
    Evidence,
    collect,
    differences,
    forgotten_files,
    leftovers,
)
from lib.workflow.torture_plan import Blow, Moment
from lib.workflow.torture_processes import PATIENCE_S, Scene, Start, aim, strike
from lib.workflow.torture_scenes import (
    KEEP_LAST,
    keep_for_inspection,
    new_scene,
    pipeline_goes_on,
    remove_scene,
    unlock_if_spoilt,
)

_LONGEST_DELAY_S: dict[Moment, float] = {"step": 0.05, "save": 0.05, "publish": 1.0}


@dataclass(frozen=True)
class Hit:
    """A blow that was dealt.

    Attributes:
        blow: as it was dealt.
        while_saving: a checkpoint was half written just then, or half removed.
        status: exit status of the outermost process; None: it was not to end.
        reached: the last step in the history when all had ended.
        lost: steps of these that the next start did again; None: nothing to tell.
    """

    blow: Blow
    while_saving: bool
    status: int | None
    reached: int
    lost: int | None = None


@dataclass
class Account:
    """What happened in all.

    Attributes:
        hits: blows that were dealt, in order.
        starts: times that the training was started under torture.
        resumes: of these, those that went on from a checkpoint.
        rounds: trainings that were brought to their end and compared.
        spoilt_locks: times that DVC's lock file had to be removed (``make unlock``).
        forgotten: files that killed processes left in their temporary folder, and their bytes.
        faults: what went wrong; empty: nothing was lost.
        kept: where the scene of a fault is kept.
    """

    hits: list[Hit] = field(default_factory=list)
    starts: int = 0
    resumes: int = 0
    rounds: int = 0
    spoilt_locks: int = 0
    forgotten: tuple[int, int] = (0, 0)
    faults: list[str] = field(default_factory=list)
    kept: Path | None = None


@dataclass(frozen=True)
class Truth:
    """The training that was left alone.

    Attributes:
        evidence: its results.
        seconds_to_begin: from its start to its first step.
    """

    evidence: Evidence
    seconds_to_begin: float


def leave_alone(prepared: Path) -> Truth:
    """Trains undisturbed in a copy of the prepared project.

    Raises:
        UserError: it failed.
    """
    scene = new_scene(prepared, "left_alone")
    start = Start(scene, "pretrain")
    try:
        start.wait(lambda: scene.reached() > 0, PATIENCE_S)
        seconds = time.monotonic() - start.begun
        start.process.wait()
    finally:
        start.end()
    if start.process.returncode != 0:
        raise UserError(f"the training that was left alone failed: {start.last_words()}")
    truth = Truth(collect(scene.project), seconds)
    if faults := leftovers(scene, KEEP_LAST):
        raise UserError(f"the training that was left alone: {'; '.join(faults)}")
    remove_scene(scene)
    return truth


def torture(
    prepared: Path,
    blows: Iterable[Blow],
    truth: Truth,
    in_the_end: Callable[[Scene], list[str]] = pipeline_goes_on,
) -> Account:
    """Deals all blows, in as many rounds as that takes, and compares each round with the truth.

    Ends early at the first fault, whose scene is kept.

    Args:
        prepared: from `lib.workflow.torture_scenes.prepared_project`.
        blows: what to do, in order.
        truth: from `leave_alone`.
        in_the_end: a last check of the last scene; gives what is wrong.
    """
    account, waiting = Account(), deque(blows)
    total = len(waiting)
    while (waiting or account.rounds == 0) and not account.faults:
        scene = new_scene(prepared, f"round_{account.rounds + 1}")
        one = _Round(scene, waiting, truth, account)
        try:
            one.run()
        except (TimeoutError, UserError) as error:
            account.faults.append(str(error))
        finally:
            one.end()
        account.rounds += 1
        count, size = forgotten_files(scene)
        account.forgotten = (account.forgotten[0] + count, account.forgotten[1] + size)
        if not account.faults:
            account.faults += differences(truth.evidence, collect(scene.project))
            account.faults += leftovers(scene, KEEP_LAST)
        if not account.faults and not waiting:
            account.faults += in_the_end(scene)
        verdict = "; ".join(account.faults) or "the same bits as when left alone"
        say(f"round {account.rounds}, {len(account.hits)} of {total} blows so far: {verdict}")
        if account.faults:
            account.kept = keep_for_inspection(scene)
        else:
            remove_scene(scene)
    return account


class _Round:
    """One training that is hit until it finishes, or until no blow is left."""

    def __init__(self, scene: Scene, waiting: deque[Blow], truth: Truth, account: Account) -> None:
        self._scene, self._waiting = scene, waiting
        self._truth, self._account = truth, account
        self._start: Start | None = None
        self._roles: dict[str, list[psutil.Process]] = {}
        self._unsettled: list[int] = []  # hits whose loss the next resume tells

    def run(self) -> None:
        """Returns when the training has finished.

        Raises:
            UserError: it failed by itself, or did not end when it had to.
            TimeoutError: something that was waited for did not happen.
        """
        while True:
            start = self._running()
            blow = self._waiting[0] if self._waiting else None
            if blow is None or not self._await(start, blow):
                if self._finished(start, was_hit=start.stumbled):
                    return
                continue
            self._waiting.popleft()
            if self._deal(start, blow):
                return

    def end(self) -> None:
        """Leaves no process behind, whatever happened."""
        if self._start is not None:
            self._start.end()

    def _running(self) -> Start:
        if self._start is None:
            self._account.spoilt_locks += unlock_if_spoilt(self._scene)
            through = self._waiting[0].through if self._waiting else "dvc"
            self._start = Start(self._scene, through)
            self._account.starts += 1
        return self._start

    def _await(self, start: Start, blow: Blow) -> bool:
        """Waits for a blow's moment; False if the run ended before it came."""
        self._roles = {}
        if blow.moment == "start" and start.resumed_at() is None:
            until = start.begun + blow.fraction * self._seconds_to_begin(start)
            return start.wait(lambda: time.monotonic() >= until, PATIENCE_S)
        if not start.wait(lambda: start.resumed_at() is not None, PATIENCE_S):
            return False
        self._roles = start.roles()  # now: to look takes longer than some moments last
        if not start.wait(self._moment(start, blow), PATIENCE_S):
            return False
        until = time.monotonic() + blow.fraction * _LONGEST_DELAY_S.get(blow.moment, 0.0)
        return start.wait(lambda: time.monotonic() >= until, PATIENCE_S)

    def _seconds_to_begin(self, start: Start) -> float:
        """How long it takes to the first step; DVC comes before."""
        return self._truth.seconds_to_begin * (1.5 if start.through == "dvc" else 1.0)

    def _moment(self, start: Start, blow: Blow) -> Callable[[], bool]:
        """The condition that makes a blow's moment."""
        scene = self._scene
        if blow.moment == "publish":
            return scene.half_published
        if blow.moment == "save":
            seen: set[str] = set()

            def saving() -> bool:
                now = scene.half_saved()
                seen.update(now)
                return bool(now) and len(seen) >= blow.count

            return saving
        begun = scene.reached() if start.began() else start.resumed_at() or 0
        return lambda: start.began() and scene.reached() >= begun + blow.count

    def _deal(self, start: Start, blow: Blow) -> bool:
        """Strikes, and waits for the end where there must be one; True: the run had finished."""
        roles = self._roles or start.roles()
        saving = bool(self._scene.half_saved())
        blow = aim(start, blow, roles)
        strike(start, blow, roles)
        if not blow.ends_the_run:
            start.stumbled |= blow.signal != "STOP+CONT"
            self._account.hits.append(Hit(blow, saving, None, self._scene.reached()))
            return False
        left = start.wait_for_end(PATIENCE_S)
        if left:
            raise UserError(f"{blow.label()}: still there: {'; '.join(left)}")
        status = start.process.returncode
        self._account.hits.append(Hit(blow, saving, status, self._scene.reached()))
        finished = self._finished(start, was_hit=True)
        self._unsettled.append(len(self._account.hits) - 1)
        return finished

    def _finished(self, start: Start, *, was_hit: bool) -> bool:
        """Closes the book on a start that has ended; whether it ended well."""
        self._start = None
        if left := start.wait_for_end(PATIENCE_S):
            start.end()
            raise UserError(f"ended, but still there: {'; '.join(left)}")
        resumed = start.resumed_at()
        if resumed is not None:
            self._account.resumes += resumed > 0
            # Hits after the first struck starts that had done no step yet.
            for number in self._unsettled:
                hit = self._account.hits[number]
                lost = max(0, hit.reached - resumed) if number == self._unsettled[0] else 0
                self._account.hits[number] = replace(hit, lost=lost)
                if hit.blow.asks and lost:
                    raise UserError(f"{hit.blow.label()}: {lost} steps were done again, not saved")
            self._unsettled.clear()
        status = start.process.returncode
        if status != 0 and not was_hit:
            raise UserError(
                f"a start that nobody hit ended with status {status}: {start.last_words()}"
            )
        return status == 0
