"""Faults of disk and files: full, read-only, cut short, a bit flipped.

A training is stopped on its way. In copies of it one thing each is spoilt, and the same command
run again. Either the run goes on by itself, after a warning that names the fault, or it refuses
with one line, and goes on once the cause is mended. The end must be that of the run left alone.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib.checkpoint.directory import POINTER, iteration_path, iterations
from lib.checkpoint.history import HISTORY
from lib.checkpoint.resume import RECORD
from lib.console import say
from lib.errors import UserError
from lib.workflow import torture_disks as disks
from lib.workflow.torture import Truth
from lib.workflow.torture_evidence import collect, differences, leftovers
from lib.workflow.torture_plan import Blow
from lib.workflow.torture_processes import PATIENCE_S, Scene, Start, strike
from lib.workflow.torture_scenes import KEEP_LAST, copy_scene, new_scene, remove_scene

_REMAINING_STEPS = 40


@dataclass(frozen=True)
class Fault:
    """One thing that is spoilt.

    Attributes:
        name: what, for people.
        how: by which means.
        says: pattern of what the run must say.
        spoil: does it; gives the wrapper to run the command in, if it needs one.
        mend: undoes it; the run must refuse until then, with exit status 1. None: it must go on
            and finish by itself.
    """

    name: str
    how: str
    says: str
    spoil: Callable[[Scene], tuple[str, ...]]
    mend: Callable[[Scene], None] | None = None


@dataclass(frozen=True)
class FaultReport:
    """What became of one fault: ``fault`` says what was lost, and is empty if nothing was."""

    name: str
    how: str
    fault: str


def try_faults(prepared: Path, truth: Truth) -> list[FaultReport]:
    """Spoils one thing after another; one report each."""
    half = _stopped_on_its_way(prepared, int(truth.evidence.rows[-1]["step"]))
    reports = []
    for number, fault in enumerate([*file_faults(half), *disk_faults(half)]):
        scene = copy_scene(half, f"fault_{number}")
        lost = "; ".join(_try(scene, fault, truth))
        reports.append(FaultReport(fault.name, fault.how, lost))
        say(f"{fault.name} ({fault.how}): {lost or 'nothing lost'}")
        remove_scene(scene)
    reports += [FaultReport(name, why, "") for name, why in not_tried()]
    remove_scene(half)
    return reports


def _stopped_on_its_way(prepared: Path, steps: int) -> Scene:
    """A training that was asked to stop some steps before its end."""
    scene = new_scene(prepared, "half")
    start = Start(scene, "pretrain")
    try:
        start.wait(lambda: scene.reached() >= steps - _REMAINING_STEPS, PATIENCE_S)
        strike(start, Blow(target="launcher", signal="TERM"), start.roles())
        start.wait_for_end(PATIENCE_S)
    finally:
        start.end()
    if len(iterations(scene.state)) < KEEP_LAST:
        raise UserError(f"the training could not be stopped on its way: {start.last_words()}")
    return scene


def _try(scene: Scene, fault: Fault, truth: Truth) -> list[str]:
    """Runs a spoilt scene to its end; what is not as it should be."""
    earlier = digests(scene.state)
    wrapper = fault.spoil(scene)
    start = _run(scene, wrapper)
    said, status = start.said(), start.process.returncode
    wanted = 0 if fault.mend is None else 1
    found = []
    if status != wanted:
        found.append(f"status {status} instead of {wanted}: {start.last_words()}")
    if not re.search(fault.says, said):
        found.append(f"it does not say {fault.says!r}: {start.last_words()}")
    if "Traceback" in said:
        found.append(f"a traceback: {start.last_words()}")
    if found or fault.mend is None:
        return found or _compared(scene, truth)
    fault.mend(scene)
    # A checkpoint may be gone because newer ones took its place, but none may have changed.
    now = digests(scene.state)
    changed = [name for name in earlier if name in now and earlier[name] != now[name]]
    if changed or not now:
        return [f"a failed save touched earlier checkpoints: {', '.join(changed) or 'all gone'}"]
    again = _run(scene, ())
    if again.process.returncode != 0:
        return [f"mended, it does not go on: {again.last_words()}"]
    if not again.resumed_at():
        return ["mended, it began at iteration 0"]
    return _compared(scene, truth)


def _run(scene: Scene, wrapper: tuple[str, ...]) -> Start:
    start = Start(scene, "pretrain", wrapper)
    try:
        start.wait_for_end(PATIENCE_S)
    finally:
        start.end()
    return start


def _compared(scene: Scene, truth: Truth) -> list[str]:
    try:
        return differences(truth.evidence, collect(scene.project)) + leftovers(scene, KEEP_LAST)
    except UserError as error:
        return [str(error)]


def digests(state: Path) -> dict[str, str]:
    """A digest of each checkpoint in a state: its files' names and bytes."""
    found = {}
    for iteration in iterations(state):
        folder, digest = iteration_path(state, iteration), hashlib.sha256()
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        found[folder.name] = digest.hexdigest()
    return found


def file_faults(half: Scene) -> Iterator[Fault]:
    """Every file of the newest checkpoint cut and flipped; then what lies beside checkpoints."""
    newest = iteration_path(half.state, iterations(half.state)[-1])
    says = rf"{newest.name} is damaged and is not used: "
    for path in sorted(newest.iterdir()):
        inside = Path(newest.name) / path.name
        for name, change in (("cut short", cut), ("a bit flipped", flip)):
            # A manifest that still is one has a wrong sum of another file, which is then named.
            named = says if path.name == "manifest.json" else says + re.escape(path.name)
            yield Fault(path.name, name, named, partial(_change, inside, change))
    pointer = rf"{POINTER} (is missing|says|names)"
    yield Fault(POINTER, "empty", pointer, partial(_change, Path(POINTER), _emptied))
    yield Fault(POINTER, "a bit flipped", pointer, partial(_change, Path(POINTER), flip))
    half_line = partial(_change, Path(HISTORY), lambda data: data + b'{"kind": "tr')
    yield Fault(HISTORY, "half a line at its end", "continuing from iteration", half_line)
    original = (half.state / RECORD).read_bytes()

    def restore(scene: Scene) -> None:
        (scene.state / RECORD).write_bytes(original)

    record = partial(_change, Path(RECORD), cut)
    yield Fault(f"{RECORD} of the state", "cut short", f"{RECORD} cannot be read", record, restore)


def _change(inside: Path, change: Callable[[bytes], bytes], scene: Scene) -> tuple[str, ...]:
    path = scene.state / inside
    path.write_bytes(change(path.read_bytes()))
    return ()


def cut(data: bytes) -> bytes:
    """The first half."""
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    """The same with one bit changed, in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _emptied(_data: bytes) -> bytes:
    return b""


def disk_faults(half: Scene) -> Iterator[Fault]:
    """A disk without room, before and while training, and a folder that cannot be written."""
    newest = iteration_path(half.state, iterations(half.state)[-1])
    one = disks.size_of(newest)
    shards = [path.stat().st_size for path in newest.glob("*.distcp")]
    limit = disks.small_files(min(shards) // 2)
    says = "could not be saved: "
    yield Fault("a write fails", "RLIMIT_FSIZE", says, lambda _scene: limit, _nothing)
    within = disks.namespace()
    if within is not None:
        full = r"No space left on device|bytes needed"
        for name, step in (
            ("disk full at the start", 0),
            ("disk full on the way", half.reached() + 3),
        ):
            spoil = partial(disks.small_disk, within=within, free=3 * one, fills_at=step)
            how = "tmpfs in a mount namespace"
            yield Fault(name, how, full, spoil, disks.take_over)
        how = "read-only bind mount"
        for name, folder in (("read-only state", ""), ("read-only folder of states", "..")):
            spoil = partial(_read_only, within=within, folder=folder)
            yield Fault(name, how, "Read-only file system", spoil, _nothing)
    elif disks.modes_bind():
        says = "Permission denied"
        yield Fault("read-only state", "file modes", says, _closed, _opened)


def not_tried() -> list[tuple[str, str]]:
    """What this machine does not let one try, and why."""
    if disks.namespace() is not None:
        return []
    missing = [("disk full", "not tried: no mount namespaces here; RLIMIT_FSIZE stands in")]
    if not disks.modes_bind():
        missing.append(("read-only state", "not tried: no mounts here, and modes do not bind root"))
    return missing


def _read_only(scene: Scene, within: tuple[str, ...], folder: str) -> tuple[str, ...]:
    return disks.read_only((scene.state / folder).resolve(), within)


def _nothing(_scene: Scene) -> None:
    """What ended with its wrapper is mended by then."""


def _closed(scene: Scene) -> tuple[str, ...]:
    scene.state.chmod(0o555)
    return ()


def _opened(scene: Scene) -> None:
    scene.state.chmod(0o755)
